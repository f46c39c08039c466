"""`serl-chunk experiments`: the experiments that --exp_name names."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.config.loader import known_experiments, load_experiment
from serl_chunk.config.robots import GymConfig
from serl_chunk.types import SerlChunkError

DESCRIPTION = "List the experiments: name, robot, purpose."


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add no flags: there are none."""


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print name, robot and purpose of every experiment, packaged or in ./experiments."""
    rows = [(name, *_described(name, path)) for name, path in known_experiments().items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, robot, purpose in rows:
        print(f"{name:{widths[0]}}  {robot:{widths[1]}}  {purpose}")
    return 0


def _described(name: str, path: Path) -> tuple[str, str]:
    try:
        purpose = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        robot = load_experiment(name).robot
    except (SerlChunkError, SyntaxError, OSError, UnicodeDecodeError) as error:
        return "?", f"cannot be loaded: {error}"
    return (robot.robot_name if isinstance(robot, GymConfig) else robot.kind), purpose
