"""How episodes end that LeRobot's columns alone describe: it records no observation after the last action."""

from __future__ import annotations

import dataclasses

import numpy as np

from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Begin, DataError, End, Episode, Outcome, StepBlock


def ended(
    where: str,
    task: str,
    steps: StepBlock,
    success: np.ndarray | None,
    has_reward: bool,
    options: ReadOptions,
) -> Episode:
    """The episode of `steps`, of T rows.

    The outcome is what `next.success` [T] says on any row; else `options.success`; else a success where the reward of
    the last row is at least 1. As with other files that drop the last observation (`data.aloha.open_foreign`): where
    the outcome is known, the last observation becomes the final one, and the last action, whose effect nobody saw, is
    left out; the T - 1 steps that remain end in a termination with the last row's reward (of data without rewards: 1
    for success, 0 for failure).

    Episodes that `next.success` calls no success are truncated instead of terminated: LeRobot's `next.done` does not
    tell a failure from a clock that ran out. Episodes of unknown outcome are truncated, without a final observation,
    and keep all T steps. Raises DataError.
    """
    n = steps.n
    begin = Begin(steps.episode_id, task=task)
    if success is not None:
        outcome = Outcome.SUCCESS if (success > 0).any() else Outcome.FAILURE
    elif options.success is not None:
        outcome = Outcome.SUCCESS if options.success else Outcome.FAILURE
    elif has_reward and steps.reward[-1] >= 1:
        outcome = Outcome.SUCCESS
    else:
        if options.reward_every_step and not has_reward:
            raise DataError(
                f"{where}: no reward to give on every step: the data set records no outcome; pass --success or "
                "--failure"
            )
        return Episode(begin, steps, End(steps.episode_id, n, None, False, True, Outcome.UNKNOWN))
    if n < 2:
        raise DataError(f"{where}: an episode with an outcome needs at least 2 steps, it has {n}")
    final, reward = steps.observation_at(n - 1), steps.reward.copy()
    if has_reward:
        reward[-2] = reward[-1]
    else:
        given = 1.0 if outcome is Outcome.SUCCESS else 0.0
        reward[slice(None) if options.reward_every_step else -2] = given
    terminated = outcome is Outcome.SUCCESS or success is None
    steps = dataclasses.replace(steps, reward=reward).slice(0, n - 1)
    end = End(steps.episode_id, n - 1, final, terminated, not terminated, outcome, outcome_by="import")
    return Episode(begin, steps, end)
