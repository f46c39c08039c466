"""`--viewer`: the page of an actor, a recording or an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from serl_chunk.cli.console import bindings_of
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.console.feed import LiveFeed
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.served.pictures import ServedPictures
from serl_chunk.types import ConfigError, RobotSpec

if TYPE_CHECKING:
    from serl_chunk.live.server import LivePage


@contextlib.contextmanager
def page_on(viewer: str | None) -> Iterator[LivePage | None]:
    """Take the port of `--viewer`, and print the page's address; None without one.

    Raises ConfigError for an address of another machine, and a port that cannot be used.
    """
    if viewer is None:
        yield None
        return
    if not viewer.isascii() or not viewer.isdigit():
        raise ConfigError(
            f"must be a port, got {viewer!r}: the page is served to this machine alone (127.0.0.1). Give a port, and "
            "from another machine use ssh -L PORT:127.0.0.1:PORT",
            parameter="viewer",
        )
    from serl_chunk.live.server import LivePage

    with contextlib.closing(LivePage(int(viewer))) as page:
        print(f"live page: {page.url}", flush=True)
        yield page


def show_on(
    page: LivePage | None, operator: Operator | None, config: ExperimentConfig, spec: RobotSpec, name: str
) -> None:
    """Let a page, if there is one, show the episodes of an operator's robot.

    Args:
        name: of this process.
    """
    if page is None or operator is None:
        return
    operator.feed = LiveFeed()
    keys = bindings_of(config)[0]
    cameras = ServedPictures(config.robot, f"{name} page") if config.robot.server else None
    page.begin(operator, operator.feed, spec, title=f"{config.name}: {name}", keys=keys, cameras=cameras)
