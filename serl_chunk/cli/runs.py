"""`serl-chunk report` and `rollback`: the report of runs, and the way back to an earlier policy version."""

from __future__ import annotations

import argparse
from pathlib import Path

from serl_chunk.config.fields import require
from serl_chunk.logs import quiet_libraries
from serl_chunk.types import ConfigError


def report_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    p.description = "Write report.html and report.png of a run, or one page that compares several."
    p.add_argument("run", nargs="+", help="a run folder; several are compared")
    p.add_argument("--out", metavar="FILE", help="of a comparison (default: report_vs_<others>.html in the first run)")
    p.add_argument("--films", type=int, default=0, metavar="N", help="also film the newest N training episodes")


def report_command(flags: argparse.Namespace) -> int:
    """Write the page and print its path. Raises SerlChunkError."""
    if len(flags.run) > 1:
        require(not flags.films, "films", "is for the report of one run. Remove it, or give one run")
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


def rollback_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `rollback`."""
    p.description = (
        "Let a run go on from an earlier policy version, after its learner was stopped. The checkpoints after it are "
        "moved aside, all recorded episodes stay, and the next snapshots have new versions."
    )
    p.add_argument("run", metavar="RUN", help="the run folder")
    p.add_argument("--to", type=int, metavar="VERSION", help="a policy version with a checkpoint (default: list them)")


def rollback_command(flags: argparse.Namespace) -> int:
    """Roll the run back, or print the versions that it can go back to; raises as `runs.checkpoints.roll_back`."""
    quiet_libraries()
    from serl_chunk.runs.checkpoints import kept_versions, roll_back

    run, version = Path(flags.run).expanduser(), flags.to
    if version is None:
        for kept, entry in kept_versions(run).items():
            print(f"policy version {kept}: checkpoint {entry.label}")
        return 0
    print(f"{run}: {roll_back(run, version)}")
    print(
        f"Start the learner with --checkpoint_path {run}: it publishes these parameters under a new version. "
        "Restart an actor with actor.gate=canary: otherwise that version earns the robot like any other."
    )
    return 0
