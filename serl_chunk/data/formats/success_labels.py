"""Success labels of recorded states (OGBench), and cutting of data that go on after a success.

Here a step that reaches success has reward 1 and terminates, every other step has 0. Published results of Q-chunking
use -1 until success and 0 from then on, which `reward.offset=-1` gives (docs/benchmarks.md). Both are equivalent: with
the discount g, a state k steps before success has the value v = g^(k - 1) here and (g v - 1) / (1 - g) there.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.types import ConfigError, DataError

_EXAMPLE = "cube-single-play-singletask-task1-v0"


class Segment(NamedTuple):
    """Steps `start <= t < stop` of a trajectory as an episode; `success`: its last step reached success."""

    start: int
    stop: int
    success: bool


def cut_at_successes(success: np.ndarray, *, keep_solved: bool = False) -> list[Segment]:
    """Cut a trajectory that goes on after successes into episodes that end with the first step into one.

    Steps that begin in a success belong to no episode, since no action counts there; with `keep_solved` those that stay
    in it are episodes of one step each, and the one that leaves it is the first of what follows.

    Args:
        success: bool[T + 1], of the states; step t leads from state t to t + 1.
    """
    last = len(success) - 1
    bounds = itertools.pairwise([0, *(np.flatnonzero(success[1:]) + 1).tolist(), last])
    spans = ((start + int(success[start] and not keep_solved), stop) for start, stop in bounds)
    return [Segment(start, stop, bool(success[stop])) for start, stop in spans if start < stop]


class SuccessMask(NamedTuple):
    """Labels of the states of N rows."""

    success: np.ndarray  # bool[N]
    missing: np.ndarray | None  # [N], parts of the task still to be done, 0 at a success alone; None: unknown


def label_states(where: str, rewards: np.ndarray, masks: np.ndarray | None) -> SuccessMask:
    """Label the states of rows [N] by OGBench's rewards and masks.

    OGBench (1.2 and later) judges the state in which an action begins: its mask is 0 where that state is a success, and
    its reward is then 0 and negative elsewhere, minus the number of parts still to be done. Without masks the rewards
    decide; some data sets have 0 and 1 instead. Raises DataError starting with `where` where neither fits.
    """
    readings = []
    if rewards.max() <= 0:
        readings.append(-rewards)
    if np.isin(rewards, (0, 1)).all():
        readings.append(1 - rewards)
    if masks is not None:
        if not np.isin(masks, (0, 1)).all():
            raise DataError(f"{where}: masks from {masks.min():g} to {masks.max():g} (expected 0, a success, or 1)")
        success = masks == 0
    elif readings and rewards.any():  # zeros alone could be either: all solved, or none
        success = readings[0] == 0
    else:
        raise DataError(
            f"{where}: rewards from {rewards.min():g} to {rewards.max():g} do not mark the successes (expected "
            "negative and 0 at a success, or 0 and 1 at a success). Add `masks` (0 at a success), or leave `rewards` "
            "out and set env to a task"
        )
    return SuccessMask(success, next((r for r in readings if np.array_equal(r == 0, success)), None))


def relabel_for_task(where: str, task: str, arrays: dict[str, np.ndarray], width: int) -> SuccessMask:
    """Label the state of every row by OGBench's single task `task`, such as cube-single-play-singletask-task1-v0.

    `arrays` are `qpos [N, Q]` and, where the environment has buttons, `button_states [N, B]`; `width` is that of the
    observations. Raises ConfigError where `ogbench` is not installed or has no such task, and DataError where the file
    is of another environment or lacks the states to judge.
    """
    ogbench = extras.ogbench(f"{where}: env={task}, whose rewards OGBench computes,")
    if "singletask" not in task.split("-"):
        raise ConfigError(
            f"only single-task environments have rewards, got {task}. Example: {_EXAMPLE}", parameter="env"
        )
    try:
        env: Any = ogbench.make_env_and_datasets(task, env_only=True)
    except Exception as error:  # gymnasium's errors have no base of their own below Exception
        raise ConfigError(f"OGBench cannot make {task} ({error}). Example: {_EXAMPLE}", parameter="env") from error
    with contextlib.closing(env):
        shape = env.observation_space.shape
        if shape != (width,):
            raise DataError(
                f"{where}: observations have {width} values, env={task} has {[*shape]}: another environment"
            )
        rows: dict[str, np.ndarray] = dict(arrays)
        try:
            ogbench.relabel_utils.relabel_dataset(env.unwrapped.spec.id, env, rows)
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{where}: env={task} cannot judge these states ({error}). It needs qpos, and button_states where "
                f"there are buttons; the file has: {', '.join(arrays) or 'neither'}"
            ) from error
    return label_states(where, rows["rewards"], rows["masks"])
