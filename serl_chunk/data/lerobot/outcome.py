"""How episodes end that LeRobot's columns alone describe: it records no observation after the last action."""

from __future__ import annotations

import dataclasses

import numpy as np

from serl_chunk.data.lerobot import dataset_layout
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import Begin, DataError, End, Episode, Outcome, StepBlock


def outcome_of(success: np.ndarray | None, reward: np.ndarray | None, options: ReadOptions) -> Outcome:
    """A success where `next.success` [T] is true on any row; without that column, where `options.success` says so, or
    else where the reward of the last row is at least 1.

    A column that is nowhere true may be a failure, a clock that ran out or an episode without a verdict: only
    `options.success` False makes a failure of it.
    """
    if success is not None and (success > 0).any():
        return Outcome.SUCCESS
    if options.success is False:
        return Outcome.FAILURE
    if success is None and (options.success or (reward is not None and reward[-1] >= 1)):
        return Outcome.SUCCESS
    return Outcome.UNKNOWN


def lacks_reward(outcome: Outcome, reward: np.ndarray) -> bool:
    """Whether an episode with the rewards `reward` [T] is a success that none of them, not even the last, tells."""
    return outcome is Outcome.SUCCESS and not (reward >= 1).any()


def ended(
    where: str,
    task: str,
    steps: StepBlock,
    success: np.ndarray | None,
    has_reward: bool,
    options: ReadOptions,
) -> Episode:
    """The episode of `steps`, of T rows, with the outcome that `outcome_of` says.

    As with other files that drop the last observation (`data.aloha.open_foreign`): where the outcome is known, the last
    observation becomes the final one, and the last action, whose effect was not recorded, is left out. The T - 1 steps
    that remain end in a termination, with the larger of the last two rewards, and with 1 where a success has no reward
    of 1 on any of them (`lacks_reward`). Of data without rewards: 1 for success, 0 for failure.

    Episodes of unknown outcome are truncated, without a final observation, and keep all T steps. Raises DataError, also
    for a reward of 1 in an episode that `options.success` calls a failure.
    """
    n = steps.n
    begin = Begin(steps.episode_id, task=task)
    outcome = outcome_of(success, steps.reward if has_reward else None, options)
    if outcome is Outcome.UNKNOWN:
        if options.reward_every_step and not has_reward:
            said = "the data set records no outcome; pass --success or --failure"
            if success is not None:
                said = (
                    f"{dataset_layout.SUCCESS} is nowhere true, which may be a failure or not; pass --failure if it is"
                )
            raise DataError(f"{where}: no reward to give on every step: {said}")
        return Episode(begin, steps, End(steps.episode_id, n, None, False, True, Outcome.UNKNOWN))
    if n < 2:
        raise DataError(f"{where}: an episode with an outcome needs at least 2 steps, it has {n}")
    final, reward = steps.observation_at(n - 1), steps.reward.copy()
    if has_reward:
        if outcome is Outcome.FAILURE and (reward >= 1).any():
            t = int(np.argmax(reward >= 1))
            raise DataError(
                f"{where}, step {t}: a reward of {reward[t]:g} in what --failure calls a failure; leave --failure out, "
                "or correct the rewards"
            )
        reward[-2] = max(reward[-2], reward[-1])  # a success may lie before the last row
        if lacks_reward(outcome, reward):
            reward[-2] = 1.0  # else a critic would learn that success is worth nothing
    else:
        given = 1.0 if outcome is Outcome.SUCCESS else 0.0
        reward[slice(None) if options.reward_every_step else -2] = given
    steps = dataclasses.replace(steps, reward=reward).slice(0, n - 1)
    end = End(steps.episode_id, n - 1, final, True, False, outcome, outcome_by="import")
    return Episode(begin, steps, end)
