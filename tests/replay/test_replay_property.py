"""Windows never mix episodes, ticks or pixels: 10^5 windows are decoded on every path into the replay."""

import dataclasses
import threading

import numpy as np
import pytest
from coded_episodes import LIMIT, SPEC, Checker, Coded, config, feed, make, normaliser, preprocess
from coded_replay import RNG, build, coded, windows
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.gripper import SacGripperConfig
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.replay.replay import DEMO_SESSION, Replay
from serl_chunk.types import Amend, DataError, Outcome, Source

WINDOWS = 100_000
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


@pytest.mark.parametrize("capacity", [20_000, 900])
def test_concurrent_insert(capacity):
    rng = RNG(5)
    cfg = config(max_image_age=2, capacity=capacity)
    demos, episodes = demonstrations(rng, 5), online(rng, 250)
    replay = build(cfg, image_keys=BOTH)
    replay.add_demo(*(e.episode() for e in demos))
    writer = threading.Thread(target=feed, args=(replay, episodes, RNG(6)))
    checker = Checker(demos + episodes, cfg)
    writer.start()
    drawn = during = 0
    while drawn < WINDOWS or writer.is_alive():
        checker.check(replay.sample(rng, 500), writing=True)
        drawn += 500
        during += writer.is_alive()
    writer.join()
    assert during > 0
    assert replay.ready.steps == sum(e.length for e in episodes)
    assert checker.check(replay.sample(rng, BATCH)) <= checker.windows()


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
    replay = Replay(dataclasses.replace(SPEC, control_hz=hz), cfg, preprocess(cfg, BOTH))
    feed(replay, [e], RNG(0))
    batch, norm = replay.sample(RNG(0), 400), normaliser(1)
    tick = (batch.observations["state"] * norm.state_std + norm.state_mean)[:, 1].round().astype(int)
    left_out = sorted({int(t) for t, w in zip(tick, batch.bc_weight[:, 0], strict=True) if w == 0})
    assert left_out == list(range(5 - excluded, 5))


LENGTHS = [(1, 1, 5), (3, 3, 7), (6, 2, 4)]  # H, critic's, return's
every_length = pytest.mark.parametrize(("horizon", "critic", "returned"), LENGTHS)


def drawn(replay, horizon, n=3_000):
    """{(episode, tick): (steps that exist, rewards, mask, discount_n, tick of the next observation)}"""
    norm, batch = normaliser(horizon), replay.sample(RNG(0), n)
    state = batch.observations["state"] * norm.state_std + norm.state_mean
    after = batch.next_observations["state"] * norm.state_std + norm.state_mean
    np.testing.assert_array_equal(state[:, 0], after[:, 0])
    keys = [(int(e), int(t)) for e, t in state[:, :2]]
    ends = [int(t) for t in after[:, 1]]
    rows = zip(batch.valid.sum(1), batch.rewards, batch.mask, batch.discount_n, ends, strict=True)
    return {k: (int(v), r.tolist(), m, float(d), e) for k, (v, r, m, d, e) in zip(keys, rows, strict=True)}


@every_length
def test_a_data_set_that_ends_mid_episode_glues_to_nothing_and_its_successes_end_it(
    tmp_path, horizon, critic, returned
):
    """Three trajectories in OGBench's layout, the last without a terminal; the first is solved from its row 11 on."""
    lengths = [20, 12, 10]
    numbers, ticks = np.repeat(np.arange(3), lengths), np.concatenate([np.arange(n) for n in lengths])
    terminals = np.isin(np.arange(42), np.cumsum(lengths)[:2] - 1)
    done = (numbers == 0) & (ticks >= 11)
    np.savez(
        tmp_path / "play.npz", observations=np.stack([numbers, ticks, numbers + 2 * ticks], 1).astype(np.float32),
        actions=np.stack([numbers, ticks], 1).astype(np.float32), terminals=terminals,
        rewards=done - np.float32(1), masks=1.0 - done,
    )  # fmt: skip
    source = OgbenchSource(tmp_path / "play.npz", ReadOptions())
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    replay = build(cfg)
    replay.add_demo(*(source.read(key) for key in source.keys()))
    feed(replay, [coded(k, 12) for k in (10, 11)], RNG(0))
    found = drawn(replay, horizon)
    # A row of the file is a state; the action of a trajectory's last row leads nowhere that is known.
    rows = {1: 11, 2: 9, 10: 12, 11: 12}
    starts = {(k, t) for k, steps in rows.items() for t in range(steps - returned + 1)}
    assert set(found) == starts | {(0, t) for t in range(11)}  # the step from row 10 reaches the success
    for (k, t), (steps, rewards, mask, discount, end) in found.items():
        n = min(returned, 11 - t) if k == 0 else returned
        reached = k == 0 and t + returned >= 11
        assert (mask, discount, end) == (not reached, cfg.discount**n, t + n)
        assert steps == min(horizon, rows.get(k, 11) - t)
        if k < 3:
            assert rewards == [float(reached and i == n - 1) for i in range(returned)]


@every_length
def test_less_than_a_window_says_what_is_missing(horizon, critic, returned):
    replay = build(config(horizon, critic, returned, demo_fraction="uniform"))
    with pytest.raises(DataError, match=naming(returned, 0)):
        replay.sample(RNG(0), 4)
    feed(replay, [coded(k, returned - 1) for k in range(3)], RNG(0))
    with pytest.raises(DataError, match=naming(returned, 3 * (returned - 1), 3)):
        replay.sample(RNG(0), 4)
    feed(replay, [coded(9, returned)], RNG(0))
    assert set(drawn(replay, horizon, 10)) == {(9, 0)}


@pytest.mark.parametrize("windows", ["episode", "qc"])
def test_a_half_smaller_than_a_window_gives_its_share(windows):
    cfg = config(5, demo_fraction=0.5, windows=windows, terminal_windows="drop", critic_horizon=5)
    replay = build(cfg)
    replay.add_demo(coded(1, 3, demonstration=True).episode())
    feed(replay, [coded(2, 12)], RNG(0))
    assert {k for k, _ in drawn(replay, 5)} == {2}
    assert replay.empty_half == "demo"
