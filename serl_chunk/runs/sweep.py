"""A sweep: runs of one experiment with several seeds and settings, and the manifest in their common folder."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.config.overrides import difference
from serl_chunk.runs.folder import read_json, write_json
from serl_chunk.runs.metrics import METRICS_FILE, read_metrics
from serl_chunk.types import ConfigError

SWEEP = "sweep.json"
DIFFERENCES = 3  # of two sweeps that an error lists


class SweepRun(NamedTuple):
    """A run of a sweep. `command`: an ordinary `serl-chunk` command, which makes it or goes on with it."""

    setting: str
    seed: int
    command: str

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.command)[1:])


class Sweep(NamedTuple):
    """What a manifest has. `runs`: by the names of their folders, in the order in which they begin."""

    seeds: list[int]
    grid: dict[str, list[str]]  # field -> its values
    flags: list[str]  # of all runs
    runs: dict[str, SweepRun]

    @property
    def settings(self) -> dict[str, list[str]]:
        """The names of the runs of each setting."""
        found: dict[str, list[str]] = {}
        for name, run in self.runs.items():
            found.setdefault(run.setting, []).append(name)
        return found

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"runs": {name: run._asdict() for name, run in self.runs.items()}}

    def write(self, folder: Path) -> None:
        """Write the manifest, or check the one that is there. Raises ConfigError for another sweep's, and OSError."""
        if (folder / SWEEP).exists():
            if lines := difference(read_json(folder / SWEEP), self.to_json()):
                text = f"{folder} holds another sweep ({'; '.join(lines[:DIFFERENCES])}). Choose another folder."
                raise ConfigError(text, parameter="out")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SWEEP, self.to_json())


def combinations(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return a value of each field, in all combinations: one without any for an empty grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def read_sweep(folder: Path) -> Sweep:
    """Raises ConfigError for a folder without a manifest, or with a damaged one."""
    content = read_json(folder / SWEEP)
    try:
        runs = {name: SweepRun(**run) for name, run in content["runs"].items()}
        return Sweep(**content | {"runs": runs})
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / SWEEP} is damaged ({error!r}). Restore or remove it") from error


def has_finished(run: Path) -> bool:
    """Return whether a run came to its end and wrote its last checkpoint: an exit status does not show that."""
    from serl_chunk.runs.checkpoints import CheckpointStore  # imports JAX

    if not (run / METRICS_FILE).exists():
        return False
    ends = [row["step"] for row in read_metrics(run)["event"] if row.get("text") == "phase: done"]
    return bool(ends) and (CheckpointStore(run).newest() or 0) >= ends[-1]
