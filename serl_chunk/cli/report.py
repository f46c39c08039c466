"""`serl-chunk report`: the report of a run, or a page that compares several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.types import ConfigError

DESCRIPTION = "Write report.html and report.png of a run, or one page that compares several."


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.add_argument("run", nargs="+", help="a run folder; several are compared")
    p.add_argument("--out", metavar="FILE", help="of a comparison (default: report_vs_<others>.html in the first run)")
    p.add_argument("--films", type=int, default=0, metavar="N", help="also film the newest N training episodes")


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the page and print its path. Raises SerlChunkError."""
    if len(flags.run) > 1:
        if flags.films:
            raise ConfigError("is for the report of one run. Remove it, or give one run", parameter="films")
        from serl_chunk.runs.report.report import build_comparison

        print(build_comparison(flags.run, flags.out))
        return 0
    if flags.out is not None or flags.films < 0:
        raise ConfigError("--out is for a comparison of runs, and --films is 0 or more")
    if flags.films:
        from serl_chunk.runs.report.tables import film_training_episodes

        film_training_episodes(Path(flags.run[0]), flags.films)
    from serl_chunk.runs.report.report import build_report

    print(build_report(flags.run[0]))
    return 0
