"""The operator's console of a process that moves a real robot: keys and view, where it is started at a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from serl_chunk.actor.operator import Operator
from serl_chunk.cli.logs import logging_to
from serl_chunk.cli.signals import before_exit
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.terminal import is_usable
from serl_chunk.robots.served_operator import ServedOperator
from serl_chunk.types import Amend


@contextlib.contextmanager
def console_of(
    config: ExperimentConfig, name: str, *, amend: Callable[[Amend], object], end: Callable[[], None]
) -> Iterator[Operator | None]:
    """Yield the operator of a robot, whose keys are read while this is open; None for a simulator or no terminal.

    Args:
        name: of this process, for the robot's server.
        amend: sends a correction of a recorded episode.
        end: ends this process (Ctrl-C).
    """
    if not config.robot.real or not is_usable(0, 1):
        yield None
        return
    with contextlib.ExitStack() as stack:
        robot = None
        if config.robot.server:
            robot = stack.enter_context(contextlib.closing(ServedOperator(config.robot, f"{name} console")))
        console = stack.enter_context(OperatorConsole())
        before_exit(console.close)
        stack.enter_context(logging_to(console.line))
        yield Operator(console, robot, amend=amend, end=end, now=time.monotonic)
