"""The published sampler: neighbouring rows whatever their episode, told apart by weights."""

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, config, feed, make, normaliser
from coded_replay import RNG, build, coded
from errors import naming

from serl_chunk.types import Amend, ConfigError, Outcome, StepBlock


def adjacent(horizon=4, critic_horizon=None, return_steps=None, **kw):
    return config(horizon, critic_horizon, return_steps, windows="qc", terminal_windows="drop", **kw)


def decode(replay, cfg, sequence, *, size=3_000):
    """Check windows against `sequence`, (episode, tick) as they neighbour each other; returns the starts seen."""
    h, r = cfg.chunk.carried, cfg.chunk.returned
    place = {(e.number, t): p for p, (e, t) in enumerate(sequence)}
    norm, batch, seen = normaliser(h), replay.sample(RNG(1), size), set()
    state = batch.observations["state"] * norm.state_std + norm.state_mean
    after = batch.next_observations["state"] * norm.state_std + norm.state_mean
    executed = batch.actions * norm.scale + norm.centre
    executed[..., 1] += state[:, None, 1]
    scale, offset, failure = cfg.reward.scale, cfg.reward.offset, cfg.reward.failure_reward
    for b in range(size):
        p = place[int(state[b, 0]), int(state[b, 1])]
        seen.add(p)
        rows = sequence[p : p + max(h, r)]
        np.testing.assert_array_equal(executed[b], [[e.number, t] for e, t in rows[:h]])
        failed = [e.outcome == Outcome.FAILURE and e.terminated and t == e.length - 1 for e, t in rows]
        paid = [failure if f else e.reward(t) * scale + offset for (e, t), f in zip(rows, failed, strict=True)]
        np.testing.assert_array_equal(batch.rewards[b], paid[:r])
        assert batch.mask[b] == (not any(e.terminated and t == e.length - 1 for e, t in rows[:r]))
        e, t = rows[0]
        same = [all(f is e and s == t + k for k, (f, s) in enumerate(rows[: i + 1])) for i in range(len(rows))]
        np.testing.assert_array_equal(batch.valid[b], same[:h])
        assert batch.weight[b] == same[r - 1]
        e, t = rows[r - 1]
        end = t + 1 if e.has_final else min(t + 1, e.length - 1)
        np.testing.assert_array_equal(after[b], [e.number, end, e.number + 2 * end])
    np.testing.assert_array_equal(batch.discount_n, cfg.discount**r)
    return seen


def in_order(episodes):
    return [(e, t) for e in episodes for t in range(e.last()) if not {t, t + 1} & e.lost.keys()]


@pytest.mark.parametrize(("horizon", "critic", "returned"), [(1, None, 5), (2, 5, 6)])
def test_neighbours_of_demonstrations_and_online_steps_as_one_buffer(horizon, critic, returned):
    cfg = adjacent(horizon, critic, returned, demo_fraction="uniform")
    replay = build(cfg)
    demos = [make(RNG(k), 100 + k, demonstration=True, gaps=True) for k in range(3)]
    episodes = [make(RNG(k), k, gaps=True) for k in range(6)]
    replay.add_demo(*(d.episode() for d in demos))
    feed(replay, episodes, RNG(0))
    sequence = in_order(demos + episodes)
    starts = len(sequence) - max(horizon, cfg.chunk.returned) + 1
    assert decode(replay, cfg, sequence) == set(range(starts))
    assert replay.ready.windows == starts


@pytest.mark.parametrize("human", [False, True])
def test_a_wrapped_store_has_no_seam_and_follows_corrections(human):
    cfg = adjacent(capacity=3 * LIMIT, demo_fraction=0.0)
    replay = build(cfg)
    episodes = [make(RNG(k), k, human=human) for k in range(30)]

    def kept():
        online = replay.episodes()[: int(replay.stats()["replay/online_episodes"])]
        return [e for e in episodes if ("s", e.episode_id) in online]

    for e in episodes:
        begin, *steps = e.records(RNG(0))
        replay.insert("s", begin)
        for record in steps:
            replay.insert("s", record)
            replay.close_session("s")  # it fell silent, and comes back
        if replay.ready.online:
            decode(replay, cfg, in_order(kept()), size=50)
    stats = replay.stats()
    assert (stats["replay/human_episodes"] > 0) == human
    assert stats["replay/evicted_episodes"] + stats["replay/kept_for_interventions"] > 20
    held = kept()
    gone, changed = held[0], held[-1]
    replay.insert("s", Amend(gone.episode_id, discard=True))
    changed.terminated, changed.outcome = True, Outcome.SUCCESS  # its last step reached the success after all
    replay.insert("s", Amend(changed.episode_id, Outcome.SUCCESS, "operator", True))
    decode(replay, cfg, in_order(held[1:]))


def test_open_episodes_of_several_robots_are_not_glued_together():
    cfg = adjacent(2, demo_fraction=0.0)
    replay = build(cfg)
    slow, fast = coded(0, 20, session="a"), coded(1, 20, session="b")
    for e in (slow, fast):
        replay.insert(e.session, e.records(RNG(0))[0])
    for t in range(10):
        for e in (slow, fast):
            replay.insert(e.session, StepBlock.from_steps(e.episode_id, [e.step(t)]))
        if t > 1:  # the newest step of each waits for what follows it
            assert decode(replay, cfg, [(e, k) for e in (slow, fast) for k in range(t)], size=100) == set(
                range(2 * t - 1)
            )


def test_without_bc_on_all_the_weights_of_imitation_are_those_of_the_steps():
    everything, some = (build(adjacent(demo_fraction="uniform"), bc_on=on) for on in ("all", "+successes"))
    for replay in (everything, some):
        feed(replay, [coded(0, end="limit"), coded(1, end="success")], RNG(0))
    batch = everything.sample(RNG(0), 200)
    np.testing.assert_array_equal(batch.bc_weight, batch.valid)
    batch = some.sample(RNG(0), 200)
    number = batch.observations["state"][:, 0] * 2 + 8
    np.testing.assert_array_equal(batch.bc_weight, batch.valid * (number == 1)[:, None])
    assert 0 < batch.bc_weight.mean() < 1


@pytest.mark.parametrize(("end", "apart", "joined"), [("success", 0, True), ("limit", 0, False), ("success", 1, False)])
def test_a_demonstration_goes_on_in_one_that_begins_in_the_state_in_which_it_succeeded(end, apart, joined):
    first, second = coded(0, 4, end, demonstration=True).episode(), coded(1, 4, demonstration=True).episode()
    second.steps.observation["state"][0] = first.end.final_observation["state"] + apart
    replay = build(adjacent(4, demo_fraction="uniform"))
    replay.add_demo(first, second)
    batch = replay.sample(RNG(0), 200)
    tick = (batch.observations["state"] * normaliser(4).state_std + normaliser(4).state_mean)[:, 1]
    across = np.isin(tick, [1, 2, 3]) & (
        batch.observations["state"][:, 0] == normaliser(4).observe(first.steps.observation["state"])[0, 0]
    )
    assert across.any()
    np.testing.assert_array_equal(batch.weight[across], float(joined))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=naming("replay.windows", "qc", "agent.image_keys", "a, b")):
        build(adjacent(), image_keys=tuple(c.name for c in SPEC.cameras))
    with pytest.raises(ConfigError, match=naming("replay.positive_fraction", 0.5, "replay.windows", "qc")):
        build(adjacent(positive_fraction=0.5))
