"""Reward shifts of the benchmarks, and episodes cut at successes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.data.relabel import (
    antmaze_reward,
    cut_at_successes,
    robomimic_reward,
    shifted,
    sparse_reward,
    state_successes,
)
from serl_chunk.types import ConfigError, DataError, Episode, RobotSpec


def test_shifts_are_the_published_ones() -> None:
    reward = np.array([0, 0, 1], np.float64)
    for shift in (robomimic_reward, antmaze_reward):
        assert shift(reward).tolist() == [-1, -1, 0]
        assert shift(reward).dtype == np.float32
    assert sparse_reward(np.array([-4, -1, 0, 0.5])).tolist() == [-1, -1, 0, -1]
    assert sparse_reward(reward).dtype == np.float32
    assert reward.tolist() == [0, 0, 1]


@given(st.integers(1, 60), st.floats(0.5, 0.999))
def test_both_conventions_order_states_alike(k: int, gamma: float) -> None:
    """The value of a state k steps before success, by our rewards and by OGBench's, as the module says."""
    ours = sum(gamma**i * r for i, r in enumerate([0] * (k - 1) + [1]))
    theirs = sum(gamma**i * -1 for i in range(k))
    assert theirs == pytest.approx((gamma * ours - 1) / (1 - gamma))


def test_an_episode_is_shifted_with_its_correction(spec: RobotSpec, make_episode: Callable[..., Episode]) -> None:
    episode: Episode = make_episode(spec, 4, success_at=(3,), reward=1.0)
    out = shifted(episode, "robomimic")
    assert np.array_equal(out.steps.reward, episode.steps.reward - 1)
    assert out.end.reward == 0
    assert out.end.truncated == episode.end.truncated
    assert shifted(episode._replace(end=episode.end._replace(reward=None)), "sparse").end.reward is None
    with pytest.raises(ConfigError, match="no reward shift 'maze'; valid: robomimic, antmaze, sparse"):
        shifted(episode, "maze")


@pytest.mark.parametrize(
    ("success", "expected"),
    [
        ("...", [(0, 2, False)]),
        ("..S", [(0, 2, True)]),
        (".S.", [(0, 1, True)]),  # the last step begins in a success
        (".SS..", [(0, 1, True), (3, 4, False)]),
        ("S..S", [(1, 3, True)]),
        (".S.S", [(0, 1, True), (2, 3, True)]),
        ("SSS", []),
        ("S.", []),
        ("S", []),
    ],
)
def test_cuts(success: str, expected: list[tuple[int, int, bool]]) -> None:
    assert cut_at_successes(np.array([c == "S" for c in success])) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_step_outside_a_success_is_in_one_episode(flags: list[bool]) -> None:
    success = np.array(flags)
    stretches = cut_at_successes(success)
    steps = [t for s in stretches for t in range(s.start, s.stop)]
    assert steps == [t for t in range(len(flags) - 1) if not flags[t]]
    for s in stretches:
        assert s.success == success[s.stop]
        assert s.success or s.stop == len(flags) - 1


def test_which_states_are_successes() -> None:
    rewards = np.array([-2.0, -1.0, 0.0])
    assert state_successes("f", rewards, np.array([1, 1, 0])).tolist() == [False, False, True]
    assert state_successes("f", np.zeros(3), np.array([1.0, 0.0, 1.0])).tolist() == [False, True, False]
    assert state_successes("f", rewards, None).tolist() == [False, False, True]
    assert state_successes("f", np.array([0, 1, 0]), None).tolist() == [False, True, False]
    for unclear in ([0, 0], [0.5, 0], [-1, 1]):
        with pytest.raises(DataError, match=r"f: rewards from .* do not say which states are successes"):
            state_successes("f", np.array(unclear, np.float32), None)
    with pytest.raises(DataError, match="masks must be 0"):
        state_successes("f", rewards, np.array([1, 2, 0]))
