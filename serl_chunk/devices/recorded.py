"""Interventions from a file: a human's commands, repeated on the same ticks.

The file is a NumPy `.npz` without pickles, one row per tick on which the human was in control: `episode int[N]` (0 for
the first reset) and `tick int[N]`, each pair once, `action float32[N, A]` in the robot's units, finite, and `idle
bool[N]` (in control, but not moving the robot).
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from serl_chunk.io import atomic_path, os_reason
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.types import DataError, Observation, RobotSpec

COLUMNS = ("episode", "tick", "action", "idle")
_LAYOUT = (  # column, dimensions, kinds of dtype
    ("episode", 1, "iu", "int[N]"),
    ("tick", 1, "iu", "int[N]"),
    ("idle", 1, "b", "bool[N]"),
    ("action", 2, "f", "float32[N, A]"),
)


def save_interventions(
    path: Path | str, *, episode: np.ndarray, tick: np.ndarray, action: np.ndarray, idle: np.ndarray
) -> None:
    """Write recorded interventions, columns as of the module, to `path`, replacing it; raises DataError for others."""
    given = zip(COLUMNS, map(np.asarray, (episode, tick, action, idle)), strict=True)
    columns = _checked(dict(given), str(path))
    with atomic_path(Path(path), durable=True) as part, part.open("wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]  # mypy takes them for `allow_pickle`


class ReplayedIntervention:
    """An intervention source that repeats a recording: its episode k on reset k, from 0, and then nothing more.

    Raises DataError if the file is not such a recording, or is of a robot with another number of actions.
    """

    def __init__(self, path: Path | str, spec: RobotSpec) -> None:
        columns = _load(Path(path))
        actions = columns["action"]
        if actions.shape[1] != spec.action_dim:
            raise DataError(
                f"{path} holds actions of {actions.shape[1]} dimensions, robot {spec.name!r} has {spec.action_dim}: "
                "replay a recording of this robot"
            )
        episodes, ticks, idle = (columns[name].tolist() for name in ("episode", "tick", "idle"))
        commands = map(InterventionCommand, actions, idle)
        self._commands = dict(zip(zip(episodes, ticks, strict=True), commands, strict=True))
        self._episode = -1

    def begin_at(self, episode: int) -> None:
        """Let the next reset begin recorded episode `episode`: those before were an earlier session's."""
        self._episode = episode - 1

    def reset(self, seed: int) -> None:
        self._episode += 1

    def poll(
        self, tick: int, observation: Observation, decision_tick: bool, last: np.ndarray
    ) -> InterventionCommand | None:
        command = self._commands.get((self._episode, tick))
        return None if command is None else InterventionCommand(command.action.copy(), command.idle)

    def close(self) -> None:
        """Nothing to release: the file was read at the start."""


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            # A plain .npy loads as an array, which has no columns.
            columns = {} if isinstance(archive, np.ndarray) else {c: archive[c] for c in COLUMNS if c in archive}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # Respectively: no such file, a pickle or no archive at all, empty, cut short, damaged.
        reason = os_reason(error)
        raise DataError(f"{path} cannot be read as recorded interventions (.npz without pickles): {reason}") from error
    missing = [c for c in COLUMNS if c not in columns]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}; recorded interventions have {', '.join(COLUMNS)}")
    return _checked(columns, str(path))


def _checked(columns: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return the columns in their stored types; raises DataError for wrong types, shapes, values or repeated ticks."""
    episode, tick, action, _ = (columns[c] for c in COLUMNS)
    for column, ndim, kinds, wanted in _LAYOUT:
        values = columns[column]
        if values.ndim != ndim or values.dtype.kind not in kinds:
            raise DataError(f"{name}: column {column} must be {wanted}, it is {values.dtype}{list(values.shape)}")
    lengths = {c: len(columns[c]) for c in COLUMNS}
    if len(set(lengths.values())) != 1:
        raise DataError(f"{name}: columns must have one length, they have {lengths}")
    if len(tick) and min(episode.min(), tick.min()) < 0:
        raise DataError(f"{name}: episodes and ticks count from 0, one is negative")
    if not np.isfinite(action).all():
        row = int(np.argwhere(~np.isfinite(action))[0, 0])
        raise DataError(f"{name}: row {row} holds an action that is not finite")
    if len(np.unique(np.stack([episode, tick]), axis=1).T) != len(tick):
        raise DataError(f"{name}: a tick of an episode appears twice; record one command per tick")
    types = (np.int64, np.int64, np.float32, bool)
    return {c: columns[c].astype(kind) for c, kind in zip(COLUMNS, types, strict=True)}
