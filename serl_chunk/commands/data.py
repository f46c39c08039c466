"""`serl-chunk data`: convert, export, inspect, check, statistics, weights of encoders."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from serl_chunk.types import ConfigError

Parser = Callable[..., argparse.ArgumentParser]


def run_data(arguments: Sequence[str], parser: Parser) -> int:
    """Parse what follows `serl-chunk data` and run it; returns the exit status."""
    from serl_chunk.commands import data_convert, data_encoder, data_export, data_inspect, data_stats

    p = parser(
        prog="serl-chunk data",
        description="Episodes at rest: into this project's formats and out of them, and what is in them.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="convert|export|inspect|check|stats|encoder")
    for module in (data_convert, data_export, data_inspect, data_stats, data_encoder):
        module.add_parsers(commands)
    flags = p.parse_args(list(arguments))
    run: Callable[[argparse.Namespace], int] | None = getattr(flags, "run", None)
    if run is None:
        raise ConfigError("say what to do: serl-chunk data --help")
    return run(flags)
