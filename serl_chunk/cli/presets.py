"""`serl-chunk presets`: the algorithms that --preset names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from serl_chunk.config.presets import PRESETS

DESCRIPTION = "List the algorithms that --preset names."


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add no flags: there are none."""


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the presets, one a line."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.description}")
    return 0
