"""Writes to a disk that may be slow or full, while the operator of a robot is polled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from serl_chunk.actor.inference import while_polling
from serl_chunk.console.view import Obstacle
from serl_chunk.operator.operator import POLL_SECONDS, Operator
from serl_chunk.types import DataError

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # between two attempts


def nothing() -> None:
    """Do nothing before another attempt."""


def polling(work: Callable[[], None], operator: Operator | None, what: str, idle: Callable[[], None] = nothing) -> None:
    """Call `work` on a thread; the operator's keys work meanwhile. Raises what `work` raises.

    Args:
        what: is waited for, as the operator sees it.
        idle: called meanwhile where there is no operator (`RobotEnv.idle`).
    """
    while_polling(work, idle if operator is None else lambda: operator.waits(Obstacle(what, "wait: it takes a moment")))


def write_with_room(
    write: Callable[[], None], operator: Operator | None, given_up: Callable[[], bool],
    before_again: Callable[[], None] = nothing, idle: Callable[[], None] = nothing,
) -> None:  # fmt: skip
    """Call `write` until it succeeds. Where the disk is at fault the operator sees why, and all keys work meanwhile.

    Args:
        write: may be called again after it failed.
        operator: None: a failure is raised at once.
        given_up: whether to raise the failure instead of another attempt.
        before_again: called before each further attempt.
        idle: as of `polling`.

    Raises:
        DataError: of `write`.
    """
    waits = False
    while True:
        try:
            polling(write, operator, "the episode is being written", idle)
        except DataError as error:
            if operator is None or not isinstance(error.__cause__, OSError) or given_up():
                raise
            if not waits:
                logger.warning(f"{error}. It is tried again until there is room; Ctrl-C gives it up")
            waits = True
            why, ends = Obstacle(str(error), "free some space, or give it up by Ctrl-C"), time.monotonic() + AGAIN_S
            while time.monotonic() < ends and not given_up():
                operator.waits(why)
                time.sleep(POLL_SECONDS)
            before_again()
        else:
            return
