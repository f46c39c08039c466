"""`serl-chunk rollback`: lets a run go on from an earlier policy version."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.logs import quiet_libraries

DESCRIPTION = (
    "Let a run go on from an earlier policy version, after its learner was stopped. The checkpoints after it are "
    "moved aside, all recorded episodes stay, and the next snapshots have new versions."
)


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.add_argument("run", metavar="RUN", help="the run folder")
    p.add_argument("--to", type=int, metavar="VERSION", help="a policy version with a checkpoint (default: list them)")


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Roll the run back, or print the versions that it can go back to; raises as `runs.rollback.roll_back`."""
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
