"""Rewards as benchmarks shift them, and how their successes become ours.

Here a step that reaches success has reward 1 and terminates, every other step has 0. Published results of Q-chunking
(and of methods it is compared with) use rewards that are -1 until success and 0 from then on. Both say the same: with
the discount g, a state k steps before success has the value v = g^(k - 1) here and (g v - 1) / (1 - g) there. The
functions named after a benchmark give the published numbers for a reward of 0 or 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from serl_chunk.types import ConfigError, DataError, Episode

RewardShift = Callable[[np.ndarray], np.ndarray]


def robomimic_reward(reward: np.ndarray) -> np.ndarray:
    """r - 1, float32: robomimic's 0 until success and 1 from it on become -1 and 0."""
    return (reward - 1).astype(np.float32)


def antmaze_reward(reward: np.ndarray) -> np.ndarray:
    """r - 1, float32: D4RL's antmaze gives 1 at the goal and 0 elsewhere."""
    return (reward - 1).astype(np.float32)


def sparse_reward(reward: np.ndarray) -> np.ndarray:
    """-1 where r != 0, else 0, float32: for OGBench's tasks of several parts, whose reward counts what is missing."""
    return -(reward != 0).astype(np.float32)


SHIFTS: dict[str, RewardShift] = {
    "robomimic": robomimic_reward,
    "antmaze": antmaze_reward,
    "sparse": sparse_reward,
}


def shifted(episode: Episode, name: str) -> Episode:
    """`episode` with the rewards of the shift `name`; terminations stay.

    Find successes first: afterwards no reward tells them. Raises ConfigError for an unknown name.
    """
    if name not in SHIFTS:
        raise ConfigError(f"there is no reward shift {name!r}; valid: {', '.join(SHIFTS)}")
    begin, steps, end = episode
    reward = SHIFTS[name](steps.reward)
    if end.reward is not None:
        end = end._replace(reward=float(SHIFTS[name](np.array([end.reward], np.float32))[0]))
    return Episode(begin, dataclasses.replace(steps, reward=reward), end)


class Stretch(NamedTuple):
    """Steps `start <= t < stop` of a trajectory as an episode, and whether its last step reached success."""

    start: int
    stop: int
    success: bool


def cut_at_successes(success: np.ndarray) -> list[Stretch]:
    """A trajectory that goes on after successes as episodes that end at them.

    `success` bool[T + 1] says it of the states; step t leads from state t to t + 1. An episode begins in a state that
    is no success and ends with the first step into one. Steps that begin in a success belong to no episode: there the
    task is over, and no action has a value.
    """
    stretches = []
    last = len(success) - 1
    start = 0
    while start < last:
        if success[start]:
            start += 1
            continue
        ahead = np.flatnonzero(success[start + 1 :])
        stop = start + 1 + int(ahead[0]) if len(ahead) else last
        stretches.append(Stretch(start, stop, bool(len(ahead))))
        start = stop
    return stretches


def state_successes(where: str, rewards: np.ndarray, masks: np.ndarray | None) -> np.ndarray:
    """Which states are successes, bool[N], by OGBench's rewards and masks of the rows [N].

    OGBench (1.2 and later) judges the state in which an action begins: its mask is 0 where that state is a success, and
    its reward is then 0 and negative elsewhere, minus the number of things still to be done. Without masks the rewards
    decide; some data sets have 0 and 1 instead. Raises DataError beginning with `where` where neither fits.
    """
    if masks is not None:
        if not np.isin(masks, (0, 1)).all():
            raise DataError(f"{where}: masks must be 0 (a success) or 1, they have {masks.min():g} to {masks.max():g}")
        return masks == 0
    if rewards.min() < 0 and rewards.max() <= 0:
        return rewards == 0
    if np.isin(rewards, (0, 1)).all() and rewards.max() == 1:
        return rewards == 1
    raise DataError(
        f"{where}: rewards from {rewards.min():g} to {rewards.max():g} do not say which states are successes: "
        "OGBench's are negative and 0 at a success, others 0 and 1 at a success. Add `masks` (0 at a success), or "
        "leave `rewards` out and name the task with --env"
    )
