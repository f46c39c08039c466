"""`serl-chunk data`: a command line for each thing that can be done with episodes at rest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from serl_chunk.cli.data import convert, inspect

DESCRIPTION = "Episodes at rest: into this project's formats and out of them, and what is in them."


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the command lines of both modules."""
    commands = p.add_subparsers(dest="command", required=True, metavar="convert|export|inspect|check|stats|encoder")
    convert.add_parsers(commands)
    inspect.add_parsers(commands)


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the one that was given; return its exit status."""
    return int(flags.run(flags))
