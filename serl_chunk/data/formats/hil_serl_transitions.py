"""One file of HIL-SERL's transitions: a pickled `list[dict]` without episodes, times or a description.

Each dict holds `observations` and `next_observations` (`state` [D] or [1, D]; cameras uint8[H, W, 3] or [1, H, W, 3]),
`actions` [A], `rewards`, `dones`, mostly `masks` (0 where the state after the step is terminal), and in recorded
demonstrations `infos`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.formats.restricted_pickle import load_plain
from serl_chunk.types import STATE, DataError

_OBSERVATIONS = ("observations", "next_observations")
_REQUIRED = ("observations", "actions", "next_observations", "rewards", "dones")


class Transitions(NamedTuple):
    """N transitions of one file in columns, and the dicts they came from (their images are not copied)."""

    state: np.ndarray  # float32[N, D]
    next_state: np.ndarray  # float32[N, D]
    action: np.ndarray  # float32[N, A]
    reward: np.ndarray  # float32[N]
    done: np.ndarray  # bool[N]
    mask: np.ndarray  # float32[N]
    success: np.ndarray  # bool[N]: a reward above 0, or infos["succeed"]
    has_infos: np.ndarray  # bool[N]: infos give the source of the action
    human: np.ndarray  # bool[N]: infos have an intervene_action
    penalised: int  # transitions with a grasp_penalty, which is not read
    cameras: dict[str, tuple[int, ...]]  # name in the file -> [H, W, 3]
    ignored: tuple[str, ...]  # observations that are neither the state nor a camera
    rows: list[dict[str, Any]]

    def frames(self, camera: str, start: int, stop: int) -> np.ndarray:
        """Return the images uint8[stop - start, H, W, 3] before the steps `start..stop`, as stored."""
        shape = self.cameras[camera]
        return np.stack([row["observations"][camera].reshape(shape) for row in self.rows[start:stop]])

    def next_frame(self, camera: str, i: int) -> np.ndarray:
        """Return the image uint8[H, W, 3] after step `i`, as stored."""
        return np.array(self.rows[i]["next_observations"][camera].reshape(self.cameras[camera]))

    def digests(self) -> list[bytes]:
        """Return twenty bytes for each transition, by which it is recognised in another file."""
        rows = zip(self.state, self.action, self.next_state, strict=True)
        return [hashlib.sha1(b"".join(v.tobytes() for v in values)).digest() for values in rows]


def load_transitions(path: Path) -> Transitions:
    """Load all transitions in the file at `path`. Raises DataError with the file and the transition."""
    rows = load_plain(path)
    if type(rows) is not list or not rows:
        what = "an empty list" if type(rows) is list else f"a {type(rows).__name__}"
        raise DataError(f"{path}: holds {what}, not HIL-SERL's list of transitions. Remove it from the folder")
    for i, row in enumerate(rows):
        if type(row) is not dict:
            raise DataError(f"{path}: transition {i} is a {type(row).__name__}, not a dict; is this another pickle?")
        missing = [k for k in _REQUIRED if k not in row]
        if missing:
            keys = ", ".join(map(str, row)) or "nothing"
            raise DataError(f"{path}: transition {i} has no {' and no '.join(missing)}; it has: {keys}")
        for key in _OBSERVATIONS:
            if type(row[key]) is not dict or STATE not in row[key]:
                raise DataError(f"{path}: transition {i}: {key} must be a dict with 'state' (SERLObsWrapper makes it)")
    cameras, ignored = _cameras(path, rows)
    infos = [info if type(info := row.get("infos")) is dict else None for row in rows]
    reward, done = _scalars(path, rows, "rewards"), _scalars(path, rows, "dones") != 0
    succeeded = [
        info is not None and "succeed" in info and _number(path, i, "infos['succeed']", info["succeed"]) > 0
        for i, info in enumerate(infos)
    ]
    return Transitions(
        state=_vectors(path, [row["observations"][STATE] for row in rows], "observations['state']"),
        next_state=_vectors(path, [row["next_observations"][STATE] for row in rows], "next_observations['state']"),
        action=_vectors(path, [row["actions"] for row in rows], "actions"),
        reward=reward,
        done=done,
        mask=_scalars(path, rows, "masks") if all("masks" in row for row in rows) else 1 - done,
        success=(reward > 0) | np.array(succeeded),
        has_infos=np.array([info is not None for info in infos]),
        human=np.array([info is not None and "intervene_action" in info for info in infos]),
        penalised=sum("grasp_penalty" in row | (info or {}) for row, info in zip(rows, infos, strict=True)),
        cameras=cameras,
        ignored=ignored,
        rows=rows,
    )


def _vectors(path: Path, values: list[Any], name: str) -> np.ndarray:
    """Rows [D] or [1, D] as finite float32[N, D]."""
    out: list[np.ndarray] = []
    for i, value in enumerate(values):
        array = np.asarray(value if isinstance(value, np.ndarray) else None)
        if array.ndim == 2 and len(array) == 1:
            array = array[0]
        if array.ndim != 1 or array.dtype.kind not in "biuf" or (out and array.shape != out[0].shape):
            expected = f"[{len(out[0])}] as before" if out else "[D] or [1, D]; an observation horizon of 1 is read"
            raise DataError(f"{path}: transition {i}: {name} is {_kind(value)}, expected numbers of shape {expected}")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{path}: transition {i}: {name} is not finite. Record the episode again or leave it out")
        out.append(array)
    return np.stack(out)


def _kind(value: Any) -> str:
    return f"{value.dtype}{[*value.shape]}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _scalars(path: Path, rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([_number(path, i, name, row[name]) for i, row in enumerate(rows)], np.float32)


def _number(path: Path, i: int, name: str, value: Any) -> float:
    array = np.asarray(value if isinstance(value, bool | int | float | np.generic | np.ndarray) else None)
    if array.size != 1 or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise DataError(f"{path}: transition {i}: {name} is {_kind(value)}, expected one finite number")
    return float(array.reshape(()))


def _cameras(path: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """The cameras that every observation has, checked, and the names of the other observations."""
    first = rows[0]["observations"]
    cameras = {k: v.shape[-3:] for k, v in first.items() if k != STATE and _is_image(v)}
    unnamed = next((k for k in cameras if type(k) is not str), None)
    if unnamed is not None:
        raise DataError(f"{path}: a camera's name is {unnamed!r}, which is no text; is this another pickle?")
    ignored = tuple(str(k) for k in first if k != STATE and k not in cameras)
    for i, row in enumerate(rows):
        for key in _OBSERVATIONS:
            for camera, shape in cameras.items():
                value = row[key].get(camera)
                if not _is_image(value) or value.shape[-3:] != shape:
                    what = "missing" if value is None else _kind(value)
                    raise DataError(
                        f"{path}: transition {i}: {key}[{camera!r}] is {what}, expected uint8{[*shape]} as in the first"
                    )
    return cameras, ignored


def _is_image(value: Any) -> bool:
    """Whether `value` is one image, uint8[H, W, 3] or [1, H, W, 3]."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (3, 4):
        return False
    return value.shape[-1] == 3 and (value.ndim == 3 or len(value) == 1)
