"""Where episodes end: every end at every offset in a window is sampled, cut and bootstrapped as it should be.

The published sampler of Q-chunking fails at these; tests/learner/test_adjacent.py has what it does.
"""

import dataclasses

import numpy as np
import pytest
from coded_episodes import Checker, config, feed, normaliser
from coded_replay import RNG, build, coded, windows
from errors import naming

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats.ogbench import OgbenchSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import DataError, Episode

LENGTHS = [(1, 1, 1), (5, 5, 5), (4, 2, 2), (1, 1, 5), (3, 3, 7), (6, 2, 4)]  # H, critic's, return's
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
@pytest.mark.parametrize("end", ["success", "limit", "died"])
def test_an_end_at_every_offset_is_learnt_from_and_never_crossed(horizon, critic, returned, end):
    """A success by every window that contains it; a time-out is bootstrapped from."""
    cfg = config(horizon, critic, returned, scale=1.0, offset=0.0, demo_fraction="uniform")
    replay = build(cfg)
    big = {"last_reward": 2.0**14} if end == "success" else {}
    episodes = [coded(k + 1, k + 1, end, **big) for k in range(2 * returned + 3)]
    feed(replay, episodes, RNG(0))
    checker = Checker(episodes, cfg, image_keys=())
    found = drawn(replay, horizon)
    assert windows(replay, checker) == checker.windows() == set(found)
    for (number, t), (_, rewards, mask, _, _) in found.items():
        assert (2.0**14 in rewards) == (mask == 0) == (end == "success" and t + returned >= number)


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
