"""Where episodes end: every end at every offset in a window is sampled, cut and bootstrapped as it should be.

The published sampler of Q-chunking fails at these; tests/learner/test_adjacent.py has what it does.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from coded_episodes import LIMIT, Checker, config, feed, normaliser
from coded_replay import RNG, build, coded, windows
from errors import naming

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, Episode, StepBlock

LENGTHS = [
    (1, 1, 1),
    (2, 2, 2),
    (5, 5, 5),
    (7, 7, 7),
    (4, 2, 2),
    (1, 1, 5),
    (3, 3, 7),
    (6, 2, 4),
]  # H, critic's, return's
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
def test_success_at_every_offset_is_learnt_from_every_window_that_contains_it(horizon, critic, returned):
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    replay = build(cfg)
    episodes = [coded(k + 1, k + 1, "success", last_reward=2.0**14) for k in range(2 * returned + 2)]
    feed(replay, episodes, RNG(0))
    found = drawn(replay, horizon)
    assert set(found) == {(e.number, t) for e in episodes for t in range(e.length)}
    for e in episodes:
        for t in range(e.length):
            steps, rewards, mask, discount, end = found[e.number, t]
            n = min(returned, e.length - t)
            assert (steps, end) == (min(horizon, e.length - t), t + n)
            assert mask == (t + n < e.length)  # nothing is bootstrapped from beyond a success
            assert discount == cfg.discount**n
            assert (2.0**14 in rewards) == (t + returned >= e.length)
            assert rewards == [e.reward(t + i) if i < n else 0 for i in range(returned)]


@every_length
@pytest.mark.parametrize("end", ["limit", "died"])
def test_a_timeout_at_every_offset_is_bootstrapped_from_and_never_crossed(horizon, critic, returned, end):
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    replay = build(cfg)
    episodes = [coded(k + 1, k + 1, end) for k in range(2 * returned + 3)]
    feed(replay, episodes, RNG(0))
    found = drawn(replay, horizon)
    assert set(found) == {(e.number, t) for e in episodes for t in range(e.last() - returned + 1)}
    for (number, t), (steps, rewards, mask, discount, ends) in found.items():
        e = episodes[number - 1]
        assert (steps, ends) == (min(horizon, e.last() - t), t + returned)
        assert (mask, discount) == (1, cfg.discount**returned)
        assert rewards == [e.reward(t + i) for i in range(returned)]


@every_length
@pytest.mark.parametrize("length", [7, 11])
def test_the_ring_wraps_at_every_offset_in_a_window(horizon, critic, returned, length):
    capacity = LIMIT + 1 + length % 5  # no multiple of an episode's rows
    cfg = config(horizon, critic, returned, capacity=capacity, human_capacity=1, demo_fraction=0.0)
    replay = build(cfg)
    episodes = [coded(k, length, "success" if k % 2 else "limit") for k in range(3 * capacity // length)]
    checker = Checker(episodes, cfg, image_keys=())
    for e in episodes:
        begin, *_, end = e.records(RNG(0))
        replay.insert("s", begin)
        for t in range(length):  # the newest row lies at every place of the ring, amid every kind of window
            replay.insert("s", StepBlock.from_steps(e.episode_id, [e.step(t)]))
            if replay.ready.windows:
                checker.check(replay.sample(RNG(t), 32), writing=True)
        replay.insert("s", end)
    held = {key[1] for key in replay.episodes()}
    assert len(held) < len(episodes)
    kept = Checker([e for e in episodes if e.episode_id in held], cfg, image_keys=())
    assert windows(replay, kept, n=1_000) == kept.windows()


def play(folder: Path, lengths: list[int], *, closed: bool, solved: dict[int, int] | None = None) -> Path:
    """OGBench's layout: trajectory k of `lengths[k]` rows, the last one without a terminal unless `closed`.

    `solved[k]` is the row of trajectory k from which on the task is solved; the rewards go on.
    """
    n = sum(lengths)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    ticks = np.concatenate([np.arange(k) for k in lengths])
    terminals = np.isin(np.arange(n), np.cumsum(lengths) - 1)
    terminals[-1] &= closed
    arrays = {
        "observations": np.stack([numbers, ticks, numbers + 2 * ticks], 1).astype(np.float32),
        "actions": np.stack([numbers, ticks], 1).astype(np.float32),
        "terminals": terminals,
    }
    if solved is not None:
        done = np.array([t >= solved.get(k, 1_000) for k, t in zip(numbers, ticks, strict=True)])
        arrays |= {"rewards": np.where(done, 0, -1).astype(np.float32), "masks": 1.0 - done}
    np.savez(folder / "play.npz", **arrays)
    return folder / "play.npz"


@every_length
def test_a_data_set_that_ends_mid_episode_glues_to_nothing(tmp_path, horizon, critic, returned):
    source = OgbenchSource(play(tmp_path, [9, 12, 10], closed=False), ReadOptions())
    cfg = config(horizon, critic, returned, demo_fraction="uniform")
    replay = build(cfg)
    replay.add_demo(*(source.read(key) for key in source.keys()))
    online = [coded(k, 12) for k in (10, 11)]
    feed(replay, online, RNG(0))
    found = drawn(replay, horizon)
    # A row of the file is a state; the action of a trajectory's last row leads nowhere that is known.
    rows = {0: 8, 1: 11, 2: 9, 10: 12, 11: 12}
    assert set(found) == {(k, t) for k, steps in rows.items() for t in range(steps - returned + 1)}
    for (k, t), (steps, _, mask, _, end) in found.items():
        assert (steps, mask, end) == (min(horizon, rows[k] - t), 1, t + returned)


@every_length
def test_no_reward_comes_after_an_offline_success(tmp_path, horizon, critic, returned):
    source = OgbenchSource(play(tmp_path, [20, 20], closed=True, solved={0: 11}), ReadOptions())
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    replay = build(cfg)
    replay.add_demo(*(source.read(key) for key in source.keys()))
    found = drawn(replay, horizon)
    assert {t for k, t in found if k == 0} == set(range(11))  # the step from row 10 reaches the success
    for (k, t), (steps, rewards, mask, discount, _) in found.items():
        n = min(returned, 11 - t) if k == 0 else returned
        reached = k == 0 and t + returned >= 11
        assert rewards == [float(reached and i == n - 1) for i in range(returned)]
        assert (mask, discount) == (not reached, cfg.discount**n)
        assert steps == (min(horizon, 11 - t) if k == 0 else min(horizon, 19 - t))


@every_length
def test_rewards_of_any_recording_are_cut_at_its_first_success(horizon, critic, returned):
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    begin, steps, end = coded(3, 20, "success", demonstration=True).episode()
    reward = np.zeros(20, np.float32)
    reward[[8, 9, 15, 19]] = 1  # a success that lasts, and is reached again
    whole = dataclasses.replace(steps, reward=reward)
    episode, dropped = end_at_first_success(Episode(begin, whole, end._replace(reward=None)))
    assert dropped == 11
    replay = build(cfg)
    replay.add_demo(episode)
    found = drawn(replay, horizon)
    assert set(found) == {(3, t) for t in range(9)}
    for (_, t), (_, rewards, mask, _, _) in found.items():
        assert sum(rewards) == (t + returned >= 9)
        assert mask == (t + returned < 9)


@every_length
def test_less_than_a_window_says_what_is_missing(horizon, critic, returned):
    replay = build(config(horizon, critic, returned, demo_fraction="uniform"))
    with pytest.raises(DataError, match=naming(returned, 0)):
        replay.sample(RNG(0), 4)
    short = [coded(k, returned - 1) for k in range(3)] if returned > 1 else []
    feed(replay, short, RNG(0))
    if short:
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
