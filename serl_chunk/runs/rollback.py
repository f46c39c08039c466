"""A run goes on from the checkpoint of an earlier policy version; nothing is deleted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from serl_chunk.io import folder_fault, plural
from serl_chunk.runs.checkpoints import CheckpointError, CheckpointStore, Entry, read_item
from serl_chunk.runs.folder import RUN_LOCK, lock_run, read_config
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.types import ConfigError

UNDONE = "checkpoints_undone"  # folder of the run that takes the checkpoints after the one that it goes back to


class RolledBack(NamedTuple):
    """What a run goes on from."""

    version: int
    step: int
    undone: int  # checkpoints that were moved

    def __str__(self) -> str:
        where = f"policy version {self.version}, checkpoint {self.step}"
        if not self.undone:
            return f"{where} is the newest one: nothing was moved"
        return f"goes on from {where}; {plural(self.undone, 'newer checkpoint')} moved to {UNDONE}"


def kept_versions(run: Path) -> dict[int, Entry]:
    """Return the policy versions of a run that have a checkpoint, ascending, each with its newest checkpoint.

    A checkpoint's version is the newest one that was published when it was written. Raises ConfigError for a folder
    that is no run's.
    """
    read_config(run)
    return {entry.version: entry for entry in CheckpointStore(run).entries() if entry.version >= 0}


def roll_back(run: Path, version: int) -> RolledBack:
    """Move the checkpoints after that of `version` aside, so that a resume goes on from that one.

    Raises, before anything is moved, ConfigError where a learner uses the run, and CheckpointError for a version
    without a checkpoint, or with a damaged one.
    """
    kept = kept_versions(run)
    try:
        with (run / RUN_LOCK).open("a") as lock:
            lock_run(run, lock)
            if version not in kept:
                raise CheckpointError(_gone(run, version, kept), parameter="to")
            target = kept[version]
            for item in ("state", "policy", "normaliser"):
                read_item(target.path, item)
            entries = CheckpointStore(run).entries()
            newer = entries[entries.index(target) + 1 :]
            for entry in reversed(newer):  # newest first: what a kill leaves is a run that goes on from between
                (run / UNDONE).mkdir(exist_ok=True)
                entry.path.rename(run / UNDONE / f"{entry.label}_{time.time_ns()}")
            result = RolledBack(version, int(target.step), len(newer))
            if newer:
                with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
                    metrics.event(f"rollback: {result}")
            return result
    except OSError as error:
        raise ConfigError(folder_fault(run, error), parameter="run") from error


def _gone(run: Path, version: int, kept: dict[int, Entry]) -> str:
    there = ", ".join(f"{v} (checkpoint {int(e.step)})" for v, e in kept.items())
    if not there:
        return f"policy version {version} of {run} is gone, as no version has a checkpoint. Start a new run"
    before = [v for v in kept if v < version]
    remedy = f"Give {before[-1] if before else min(kept)}, the nearest one" + (" before it" if before else "")
    return f"policy version {version} of {run} has no checkpoint. There are: {there}. {remedy}"
