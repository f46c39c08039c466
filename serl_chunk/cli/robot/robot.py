"""`serl-chunk robot`: the command of the robot's package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `serl-chunk-robot` with all words."""
    from serl_chunk_robot.main import main

    return main(rest, program="serl-chunk robot")
