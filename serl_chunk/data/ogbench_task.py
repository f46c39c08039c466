"""What a task of OGBench says of a data set's states, asked of OGBench itself (extra `[ogbench]`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk import extras
from serl_chunk.data.relabel import Judgement, judge_states
from serl_chunk.types import ConfigError, DataError

_EXAMPLE = "cube-single-play-singletask-task1-v0"


def judge_by_task(where: str, task: str, arrays: dict[str, np.ndarray], width: int) -> Judgement:
    """What the task that OGBench calls `task` says of the state of every row.

    Args:
        where: begins the messages.
        task: a single-task name with the kind of data in it, such as cube-single-play-singletask-task1-v0.
        arrays: `qpos [N, Q]` and, where the environment has buttons, `button_states [N, B]`.
        width: of the observations in the file; another width is another one's.

    Raises:
        ConfigError: `ogbench` is not installed, or does not know the task.
        DataError: the file is of another one, or lacks what the task is judged by.
    """
    ogbench = extras.ogbench(f"{where}: --env={task}, whose rewards OGBench computes,")
    if "singletask" not in task.split("-"):
        raise ConfigError(f"--env={task}: only single-task environments have rewards, such as {_EXAMPLE}")
    try:
        env: Any = ogbench.make_env_and_datasets(task, env_only=True)
    except Exception as error:  # gymnasium's errors have no base of their own below Exception
        raise ConfigError(f"--env={task}: OGBench cannot make it ({error}); an example: {_EXAMPLE}") from error
    try:
        shape = env.observation_space.shape
        if shape != (width,):
            raise DataError(f"{where}: observations of {width} values, --env={task} has {[*shape]}: another one")
        rows: dict[str, np.ndarray] = dict(arrays)
        try:
            ogbench.relabel_utils.relabel_dataset(env.unwrapped.spec.id, env, rows)
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{where}: --env={task} cannot judge these states ({error}); it needs qpos, and button_states where "
                f"there are buttons; the file has: {', '.join(arrays) or 'neither'}"
            ) from error
    finally:
        env.close()
    return judge_states(where, rows["rewards"], rows["masks"])
