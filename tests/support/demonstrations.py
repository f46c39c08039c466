"""Episodes of scripted demonstrators and humans in simulated environments."""

from __future__ import annotations

from typing import Any

import numpy as np


def finish(env: Any, expert: Any, limit: int = 1000) -> int | None:
    """Act to the end of the episode; its ticks, or None without success."""
    for _ in range(limit):
        action = expert.act()
        assert env.action_space.contains(action)
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return env.tick if terminated else None
    return None


def helped(env: Any, human: Any, still: Any, ticks: int, every: int = 5) -> tuple[list[Any], bool]:
    """Run a policy that stands still and decides every so many ticks; the human's commands, whether it was solved."""
    commands, solved = [], False
    for tick in range(ticks):
        command = human.poll(tick, {}, tick % every == 0, None)
        commands.append(command)
        solved = env.step(still() if command is None else command.action)[2]
        if solved:
            break
    return commands, solved


def started(env: Any, helper: Any, seed: int) -> None:
    env.reset(seed=seed)
    helper.reset(seed)


def begin_of(commands: list[Any]) -> int | None:
    """The first tick on which the human commands."""
    return next((i for i, command in enumerate(commands) if command is not None), None)


def joints_of(env: Any) -> Any:
    """A command that leaves a fake ALOHA where it is."""
    return lambda: np.array(env.joints, np.float32)
