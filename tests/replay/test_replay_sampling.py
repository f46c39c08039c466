"""Halves, shares and reproducibility of what is drawn; joint noise, and what a human did in part."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, Checker, Coded, config, feed, make, normaliser, preprocess
from coded_replay import RNG, build, coded, windows
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.gripper import SacGripperConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import DEMO_SESSION, BatchLoader, Replay, Request
from serl_chunk.types import Amend, ConfigError, DataError, Outcome, Source, StepBlock


@pytest.mark.parametrize("demonstration", [False, True])
def test_an_empty_half_gives_its_share_and_says_so(demonstration):
    replay = build(config(demo_fraction=0.5))
    with pytest.raises(DataError, match=naming(4, 0)):
        replay.sample(RNG(0), 8)
    assert replay.empty_half is None  # nothing was added yet
    if demonstration:
        replay.add_demo(coded(demonstration=True).episode())
    else:
        feed(replay, [coded()], RNG(0))
    assert replay.sample(RNG(0), 8).mask.shape == (8,)
    assert replay.empty_half == ("online" if demonstration else "demo")
    assert (replay.stats()["replay/demo_share"], replay.stats()["replay/empty_half"]) == (demonstration, 1)
    if demonstration:
        feed(replay, [coded(1)], RNG(0))
        assert replay.empty_half is None


def test_actions_outside_of_model_space_are_counted_where_episodes_come_in():
    replay, norm = build(config(4, 4)), normaliser(4)
    demo, online = coded(9, 12, demonstration=True), coded(1, 7)

    def outside(episode):
        """(numbers outside of [-1, 1], numbers) of every chunk of an episode's steps."""
        steps = episode.episode().steps
        chunks = [norm.encode(steps.observation["state"][t], steps.action[t : t + 4]) for t in range(steps.n)]
        return sum(int((np.abs(c) > 1).sum()) for c in chunks), sum(c.size for c in chunks)

    replay.add_demo(demo.episode())
    assert replay.outside_model_space == {"demo": outside(demo), "online": (0, 0)}
    feed(replay, [online], RNG(0))
    replay.insert("s", coded(2, 7).records(RNG(0))[0])  # of whole episodes alone
    assert replay.outside_model_space["online"] == outside(online)
    assert 0 < replay.outside_model_space["online"].outside < replay.outside_model_space["online"].numbers
    feed(replay, [dataclasses.replace(online, number=3, session="t")], RNG(0))
    assert replay.outside_model_space["online"].numbers == 2 * outside(online)[1]


def test_nothing_is_clipped_or_outside_where_model_space_has_no_bounds():
    cfg = config(4, 4)
    replay = Replay(SPEC, cfg, Preprocess(dataclasses.replace(normaliser(4), mode="openpi")), bc_on="demo")
    replay.add_demo(coded(9, 12, demonstration=True).episode())
    assert (np.abs(replay.sample(RNG(0), 100).actions) > 1).any()
    assert replay.stats()["replay/clipped_share"] == 0
    assert set(replay.outside_model_space.values()) == {(0, 0)}


@pytest.mark.parametrize(("fraction", "size", "expected"), [(0.25, 10, 3), (0.0, 64, 0), (1.0, 64, 64)])
def test_demo_fraction_is_exact_in_every_batch(fraction, size, expected):
    """A half that has no share is not missed."""
    replay = build(config(demo_fraction=fraction))
    if fraction:
        replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(3)))
    if fraction < 1:
        feed(replay, [coded(k) for k in range(30)], RNG(0))
    assert replay.empty_half is None
    batch = replay.sample(RNG(0), size, updates=5)
    number = batch.observations["state"][..., 0] * 2 + 8
    np.testing.assert_array_equal((number >= 1000).sum(1), expected)
    assert replay.stats()["replay/demo_share"] == expected / size
    assert replay.stats()["replay/empty_half"] == 0


def noisy(noise: float, horizon: int = 6):
    cfg = config(horizon, 4, demo_fraction=0.0)
    return dataclasses.replace(cfg, agent=AcfqlConfig(bc_joint_noise=noise))


def test_shifts_are_those_of_moved_joints_under_the_same_targets():
    """Encoding the moved state and the unchanged targets gives the batch plus its shifts."""
    horizon, norm = 6, normaliser(6)
    replay = build(noisy(0.3, horizon))
    feed(replay, [coded(k) for k in range(10)], RNG(0))
    plain, batch = build(noisy(0.0, horizon)), replay.sample(RNG(0), 4000)
    feed(plain, [coded(k) for k in range(10)], RNG(0))
    same = plain.sample(RNG(0), 4000)
    assert (same.bc_state_shift, same.bc_action_shift) == (None, None)
    np.testing.assert_array_equal(same.actions, batch.actions)  # the windows that are drawn are the same
    assert batch.bc_state_shift.dtype == batch.bc_action_shift.dtype == np.float32
    moved = batch.bc_state_shift * norm.state_std
    np.testing.assert_array_equal(moved[:, [0, 2]], 0)  # only state[1] is a joint that an action is relative to
    reach = norm.scale[0, norm.joint == 1].max()
    assert moved[:, 1].std() == pytest.approx(0.3 * reach, rel=0.05)
    state = batch.observations["state"] * norm.state_std + norm.state_mean
    targets = norm.decode(state, batch.actions)
    np.testing.assert_allclose(
        norm.observe(state + moved), batch.observations["state"] + batch.bc_state_shift, rtol=1e-4
    )
    again = norm.encode(state + moved, targets)
    np.testing.assert_allclose(again, batch.actions + batch.bc_action_shift, rtol=1e-4, atol=1e-4)


def helped(number=0, shared=None, end="limit", **kw):
    """An episode of 12 ticks; a human acted on ticks 4 to 7, on some of them in a part of the action alone."""
    episode = coded(number, 12, end, shared={5: (1, 0), 6: (0, 1)} if shared is None else shared, **kw)
    episode.source[4:8] = Source.HUMAN
    return episode


def test_without_a_humans_part_batches_have_no_such_array():
    replay = build(config(), bc_on="interventions")
    feed(replay, [helped(0, shared={}), helped(1, shared={5: (1, 1)})], RNG(0))  # all of the action is no part
    assert replay.sample(RNG(0), 8).bc_dims is None
    feed(replay, [helped(2)], RNG(0))
    batch = replay.sample(RNG(0), 8, 3)
    assert batch.bc_dims.shape == (3, 8, 6, 2)
    assert replay._partitions.storage.human_parts.nbytes == 2 * 42_000
    assert [(f.human_ticks, f.segments) for f in replay.finished] == [(4, 1)] * 3  # a part counts as a human's tick


def test_the_published_sampler_imitates_a_humans_part_alike():
    cfg = config(3, 3, windows="qc", demo_fraction="uniform", terminal_windows="drop")
    some, everything = (build(cfg, bc_on=bc_on) for bc_on in ("interventions", "all"))
    for replay in (some, everything):
        feed(replay, [helped()], RNG(0))
    batch = some.sample(RNG(0), 500)
    tick = ((batch.observations["state"][:, 1] * 0.5 - 4)[:, None] + np.arange(3)).astype(int)
    numbers = batch.bc_weight[..., None] * batch.bc_dims
    wanted = helped().imitated("interventions", 3)
    np.testing.assert_array_equal(numbers, wanted[np.minimum(tick, 11)] * batch.valid[..., None])
    assert {tuple(n) for n in numbers.reshape(-1, 2).tolist()} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert everything.sample(RNG(0), 8).bc_dims is None


ONE = Request("critic", 1, 4)


@pytest.fixture
def replay():
    cfg = config()
    replay = Replay(SPEC, cfg, preprocess(cfg, ("a",)), bc_on="+successes")
    feed(replay, [make(np.random.default_rng(k), k, every_frame=True) for k in range(10)], np.random.default_rng(0))
    return replay


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_the_same_with_and_without_the_thread(replay, prefetch):
    """And no two share memory."""
    reference, arrays = np.random.default_rng(7), []
    loader = BatchLoader(replay, np.random.default_rng(7), prefetch=prefetch)
    for _ in range(5):
        batch, expected = loader.next(Request("critic", 3, 8))["critic"], replay.sample(reference, 8, 3)
        assert batch.actions.shape == (3, 8, 6, 2)
        assert batch.observations["images/a"].shape == (3, 8, 2, 4, 3)
        assert batch.delay.shape == (3, 8)
        np.testing.assert_array_equal(batch.observations["state"], expected.observations["state"])
        both = (*batch.observations.values(), *batch.next_observations.values())
        arrays.append([*both, batch.actions, batch.rewards, batch.bc_weight])
    for i, first in enumerate(arrays):
        for second in arrays[i + 1 :]:
            assert not any(np.shares_memory(a, b) for a in first for b in second)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_caller_every_time(prefetch):
    empty = Replay(SPEC, config(), preprocess(config()), bc_on="demo")
    loader = BatchLoader(empty, np.random.default_rng(0), prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(DataError, match=naming(4, 0)):
            loader.next(ONE)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_other_requests_or_another_half_drop_what_was_prepared(prefetch):
    class Drawn:
        def sample(self, rng, batch_size, updates, *, half, **shown):
            return updates, batch_size, half, shown

    loader = BatchLoader(Drawn(), np.random.default_rng(0), prefetch=prefetch)
    both = (Request("critic", 3, 4), Request("policy", 1, 8, next_observations=False, frames=True, imitated=True))
    for requests, half in [((ONE,), None), (both, None), (both, "demo"), (both, None)]:
        wanted = {r.name: (r.updates, r.size, half, dict(zip(r._fields[3:], r[3:], strict=True))) for r in requests}
        assert loader.next(*requests, half=half) == loader.next(*requests, half=half) == wanted
    loader.close()


def test_a_batch_without_next_observations_has_all_else_and_reads_no_frame_of_them(replay):
    whole = replay.sample(np.random.default_rng(3), 16, 2)
    batch = replay.sample(np.random.default_rng(3), 16, 2, next_observations=False)
    assert batch.next_observations == {}
    for name, value in batch.observations.items():
        np.testing.assert_array_equal(value, whole.observations[name])
    for name in ("actions", "rewards", "mask", "discount_n", "bc_weight"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name))


class Dear(AcfqlConfig):
    imitated_batches = True


@given(st.integers(0, 10_000), st.sampled_from(["+successes", "demo+interventions", "interventions"]))
@settings(max_examples=examples(100), deadline=None)
def test_batches_of_dear_rows_hold_every_window_of_which_something_is_imitated_and_no_other(seed, bc_on):
    rng = np.random.default_rng(seed)
    cfg = dataclasses.replace(config(4, 4, capacity=90, human_capacity=60), agent=Dear())
    replay = build(cfg, bc_on=bc_on)
    episodes = [make(np.random.default_rng(seed + k), k) for k in range(int(rng.integers(0, 12)))]
    replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(int(rng.integers(0, 3)))))
    feed(replay, episodes, rng)
    for episode in episodes[-2:]:
        outcome = Outcome.FAILURE if episode.outcome == Outcome.SUCCESS else Outcome.SUCCESS
        replay.insert(episode.session, Amend(episode.episode_id, outcome))
    held = replay._partitions
    weight, succ, live = held.storage.steps.bc_weight, held.storage.links.succ, held.storage.links.live

    def of(view):
        rows = view._members[: len(view)]
        steps = [rows]
        for _ in range(3):
            steps.append(succ[steps[-1]])
        return {
            int(row) for row, at in zip(rows, np.transpose(steps), strict=True) if (weight[at] * live[at] > 0).any()
        }

    wanted = [of(held.view_demo), of(held.view_online), of(held.view_all)]
    assert [set(view._members[: len(view)].tolist()) for view in held.imitated] == wanted
    for half in (None, *(h for h, found in (("demo", wanted[0]), ("online", wanted[1])) if found)):
        if wanted[2]:
            assert (replay.sample(rng, 32, 3, half=half, imitated=True).bc_weight.max(axis=-1) > 0).all()


@pytest.mark.parametrize("fraction", [0.5, "uniform"])
def test_a_few_corrections_have_the_share_that_they_have_among_all_windows(fraction):
    replay = build(dataclasses.replace(config(4, 4, demo_fraction=fraction), agent=Dear()), bc_on="demo+interventions")
    replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(10)))
    feed(replay, [helped(0, shared={}), *(coded(k) for k in range(1, 20))], RNG(0))

    def share(**how):
        batch = [replay.sample(RNG(k), 64, **how) for k in range(60)]
        number = np.concatenate([b.observations["state"][:, 0] * 2 + 8 for b in batch])
        return (number[np.concatenate([b.bc_weight.max(-1) for b in batch]) > 0] < 1000).mean()

    assert share(imitated=True) == pytest.approx(share(), abs=0.03)


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
    np.testing.assert_array_equal(batch.bc_weight, np.float32(0.2) * batch.valid * (number == 1)[:, None])
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


WINDOWS = 24_000
BATCH = 4_000
BOTH = ("a", "b")
RESTRICTING = ("demo+interventions", "+successes", "interventions")  # the policy's part of an online episode is not
# Its penalty asks for the action before a window.
COUNTING = AcrlpdConfig(gripper=SacGripperConfig(choices=(-1.0, 1.0), penalty=-0.5))


def draw_all(replay, checker, rng, total=WINDOWS):
    """Check `total` windows; returns which were seen."""
    return set.union(*(checker.check(replay.sample(rng, BATCH)) for _ in range(total // BATCH)))


def online(rng, count, **kw):
    return [make(rng, i, session=f"s{i % 3}", **{"gaps": True, **kw}) for i in range(count)]


def demonstrations(rng, count, **kw):
    return [make(rng, 1000 + i, demonstration=True, session=DEMO_SESSION, gaps=True, **kw) for i in range(count)]


@pytest.mark.parametrize("agent", [None, COUNTING])
def test_wrapped_ring_keeps_the_newest_whole_episodes(agent):
    rng = RNG(1)
    cfg = config(capacity=600, image_capacity=550, demo_fraction="uniform")
    if agent is not None:
        cfg = dataclasses.replace(cfg, agent=agent, chunk=dataclasses.replace(cfg.chunk, critic_horizon=None))
    episodes = online(rng, 300, human=False)
    replay = build(cfg, image_keys=BOTH)
    feed(replay, episodes, rng)
    held = {key[1] for key in replay.episodes()}
    checker = Checker([e for e in episodes if e.episode_id in held], cfg)
    assert draw_all(replay, checker, rng) == checker.windows()
    stats = replay.stats()
    assert stats["replay/evicted_episodes"] > 200
    assert stats["replay/online_rows"] <= 600
    assert stats["replay/online_frames"] <= 2 * 550


def test_intervened_episodes_live_on_in_the_human_store():
    rng = RNG(2)
    cfg = config(capacity=400, human_capacity=500, demo_fraction="uniform", max_image_age=1)
    episodes = online(rng, 200, shared=True)
    replay = build(cfg, image_keys=BOTH)
    feed(replay, episodes, rng)
    stats = replay.stats()
    assert stats["replay/kept_for_interventions"] > 20
    assert 0 < stats["replay/human_rows"] <= 500
    keys = [key[1] for key in replay.episodes()]
    current, kept = keys[: int(stats["replay/online_episodes"])], keys[int(stats["replay/online_episodes"]) :]
    checker = Checker([e for e in episodes if e.episode_id in keys], cfg)
    retired = {e.number for e in episodes if e.episode_id in kept}
    sources = {e.number: e.source for e in episodes}
    expected = {(k, t) for k, t in checker.windows() if k not in retired or sources[k][t] == Source.HUMAN}
    assert len(current) + len(kept) == len(keys)
    assert draw_all(replay, checker, rng) == expected


def test_amended():
    rng = RNG(4)
    cfg = config(max_image_age=2, demo_fraction="uniform")
    episodes = online(rng, 80, shared=True)
    replay = build(cfg, image_keys=BOTH)
    feed(replay, episodes, rng)
    kept = []
    for i, e in enumerate(episodes):
        kind = i % 5
        if kind == 0:
            replay.insert(e.session, Amend(e.episode_id, discard=True))
            continue
        kept.append(e)
        if kind == 1:  # a late success label: terminal windows appear, policy steps are imitated
            e.terminated, e.outcome, e.last_reward = True, Outcome.SUCCESS, 16.0
            replay.insert(e.session, Amend(e.episode_id, Outcome.SUCCESS, "operator", True, 16.0))
        elif kind == 2:  # not an end after all: terminal windows go
            e.terminated, e.outcome = False, Outcome.UNKNOWN
            replay.insert(e.session, Amend(e.episode_id, Outcome.UNKNOWN, "operator", False))
        elif kind == 3:
            e.outcome = Outcome.FAILURE
            replay.insert(e.session, Amend(e.episode_id, Outcome.FAILURE, "classifier"))
    checker = Checker(kept, cfg)
    assert draw_all(replay, checker, rng) == checker.windows()
    assert replay.stats()["replay/discarded_episodes"] == 16


@pytest.mark.parametrize("bc_on", ["all", "demo", *RESTRICTING])
@pytest.mark.parametrize(("horizon", "critic"), [(5, 5), (1, 1)])
def test_each_number_is_imitated_by_who_commanded_it_and_terminal_windows_may_be_dropped(bc_on, horizon, critic):
    rng = RNG(7)
    cfg = config(horizon, critic, terminal_windows="drop", demo_fraction="uniform")
    demos, episodes = demonstrations(rng, 20, shared=True), online(rng, 40, shared=True)
    replay = build(cfg, image_keys=("b",), bc_on=bc_on)
    replay.add_demo(*(e.episode() for e in demos))
    feed(replay, episodes, rng)
    checker, seen = Checker(demos + episodes, cfg, image_keys=("b",), bc_on=bc_on), set()
    for _ in range(5):
        batch = replay.sample(rng, BATCH)
        assert batch.valid[:, :critic].all()  # drop: every window is full
        assert (batch.bc_dims is None) == (bc_on not in RESTRICTING)
        if batch.bc_dims is not None:
            assert (batch.bc_dims.dtype, batch.bc_dims.shape) == (np.float32, (BATCH, horizon, 2))
        seen |= checker.check(batch)
    assert seen == checker.windows()


P, U, H, S, R = Source.POLICY, Source.HUMAN, Source.HOLD, Source.SCRIPTED, Source.RANDOM
EVERY = [set(range(LIMIT + 1)) for _ in SPEC.cameras]


@settings(max_examples=examples(30), deadline=None)
@given(
    sources=st.lists(
        st.lists(st.sampled_from([P, P, P, U, U, H, S, R]), min_size=1, max_size=24), min_size=1, max_size=4
    ),
    ends=st.lists(st.sampled_from(["success", "failure", "limit", "died"]), min_size=4, max_size=4),
    lengths=st.sampled_from([(1, 1, 5), (4, 4, None), (6, 3, None), (2, 2, 7), (5, 2, 3), (2, 5, 6)]),
    terminal=st.sampled_from(["keep", "drop"]),
    seed=st.integers(0, 2**16),
)
def test_whoever_acted_every_window_is_sampled(sources, ends, lengths, terminal, seed):
    small = {"capacity": 200, "demo_capacity": 200, "human_capacity": 50, "image_capacity": 200}
    cfg = config(*lengths, terminal_windows=terminal, demo_fraction="uniform", **small)
    episodes = [
        Coded(i, len(s), end, np.array(s, np.uint8), EVERY, session=f"s{i % 2}")
        for i, (s, end) in enumerate(zip(sources, ends, strict=False))
    ]
    replay = build(cfg, image_keys=BOTH)
    feed(replay, episodes, RNG(seed))
    checker = Checker(episodes, cfg)
    assert replay.ready.windows == len(checker.windows())
    if replay.ready.windows:
        assert windows(replay, checker, n=400) <= checker.windows()


@pytest.mark.parametrize(("hz", "excluded"), [(50.0, 3), (5.0, 0)])
def test_what_is_not_imitated_before_an_intervention_is_a_time(hz, excluded):
    cfg = config(1, 1, demo_fraction="uniform")  # 0.06 s
    e = Coded(0, 8, "success", np.array([P, P, P, P, P, U, U, P], np.uint8), EVERY)
    replay = Replay(dataclasses.replace(SPEC, control_hz=hz), cfg, preprocess(cfg, BOTH), bc_on="+successes")
    feed(replay, [e], RNG(0))
    batch, norm = replay.sample(RNG(0), 400), normaliser(1)
    tick = (batch.observations["state"] * norm.state_std + norm.state_mean)[:, 1].round().astype(int)
    left_out = sorted({int(t) for t, w in zip(tick, batch.bc_weight[:, 0], strict=True) if w == 0})
    assert left_out == list(range(5 - excluded, 5))
