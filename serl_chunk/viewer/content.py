"""What the page of an episode shows: its curves, segments and gaps as plain values, and its frames as image files."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.frames import Frames
from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.types import STATE, DataError, Episode, SparseRows
from serl_chunk.types import Source as Actor
from serl_chunk.viewer.catalogue import rounded

CACHE_BYTES = 64 << 20  # of image files
JPEG_QUALITY = 88
_Q = "decision/q"
_VALUES = "decision/values"  # of all candidates
_STD = "decision/q_std"  # over the heads, of the chosen chunk's


def joints_in(source: Source, s: int, a: int) -> Sequence[int] | None:
    """Return the state value that each of `a` actions commands, as far as a source knows its robot."""
    spec = getattr(source, "spec", None) or getattr(getattr(source, "options", None), "spec", None)
    joints = None
    if spec is not None and (spec.state_dim, spec.action_dim) == (s, a):
        joints = spec.joint_of_action
    if joints is None and isinstance(source, EpisodeFiles):
        joints = source.joints()
    return joints if joints is not None and len(joints) == a and max(joints, default=-1) < s else None


def value_panels(s: int, a: int, joints: Sequence[int] | None) -> list[tuple[str, int | None, int | None]]:
    """List actions over the joints they command, then the other state values: title, state value and action value.

    `joints`: the state value of each action, -1 for none; None where they are unknown.
    """
    if joints is None:
        joints = range(a) if s == a else [-1] * a
    panels: list[tuple[str, int | None, int | None]] = []
    for j, joint in enumerate(joints):
        both = f"state and action {j}" if joint == j else f"state {joint}, action {j}"
        panels.append((f"action {j}", None, j) if joint < 0 else (both, joint, j))
    return panels + [(f"state {i}", i, None) for i in range(s) if i not in joints]


def true_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, past-last) of each run of True in bool[T]."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def episode_json(episode: Episode, source: Source) -> dict[str, Any]:
    """Return what a page shows of an episode of `source`, its frames apart, as plain values."""
    begin, steps, end = episode
    state, action = steps.observation[STATE], steps.action
    reward = steps.reward.astype(np.float64)
    if end.reward is not None:
        reward[-1] = end.reward
    dimensions = state.shape[1], action.shape[1]
    panels = value_panels(*dimensions, joints_in(source, *dimensions))
    return {
        "id": begin.episode_id, "task": begin.task, "robot": begin.robot, "conditions": begin.conditions,
        "demonstration": begin.demonstration,
        "length": steps.n, "hz": source.hz or 0.0,
        "outcome": end.outcome.value, "by": end.outcome_by, "terminated": end.terminated,
        "cameras": [
            {"name": name, "ticks": rows.index.tolist(), "height": rows.values.shape[1], "width": rows.values.shape[2]}
            for name, rows in cameras_of(episode).items()
        ],
        "panels": [{"title": t, "state": i, "action": j} for t, i, j in panels],
        "state": [numbers(column) for column in state.T],
        "action": [numbers(column) for column in action.T],
        "reward": numbers(reward),
        "actors": [[a, b, actor.name.lower()] for actor in Actor for a, b in true_runs(steps.source == actor)],
        "gaps": [[int(t), int(steps.lost_ticks[t])] for t in np.flatnonzero(steps.lost_ticks)],
        "q": q_json(steps.sparse),
        "versions": [[int(a), int(steps.policy_version[a])] for a in _changes(steps.policy_version)],
        "stamps": numbers(steps.stamp - steps.stamp[0], digits=9),
    }  # fmt: skip


def numbers(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Return float[N] as plain numbers of so many significant digits, None for what JSON cannot hold."""
    if digits == 6:
        return [rounded(v) for v in np.asarray(values, np.float64).tolist()]
    return [float(f"{v:.{digits}g}") for v in np.asarray(values, np.float64).tolist()]


def q_json(sparse: dict[str, SparseRows]) -> dict[str, Any] | None:
    """Return the values of the decisions: of the chunk that was chosen, and the least and greatest candidate.

    Where it was recorded, also the deviation of the heads' values of the chosen chunk.
    """
    rows = sparse.get(_Q)
    if rows is None or not np.asarray(rows.values).size:
        return None
    q = np.asarray(rows.values, np.float64).reshape(len(rows.index), -1)
    low, high = q.min(1), q.max(1)
    others = sparse.get(_VALUES)
    if others is not None and np.array_equal(others.index, rows.index) and np.asarray(others.values).size:
        values = np.asarray(others.values, np.float64).reshape(len(rows.index), -1)
        low, high = np.minimum(low, values.min(1)), np.maximum(high, values.max(1))
    best = q.max(1)
    out = {"ticks": rows.index.tolist(), "q": numbers(best), "low": numbers(low), "high": numbers(high)}
    std = sparse.get(_STD)
    if std is not None and np.array_equal(std.index, rows.index) and np.asarray(std.values).size == len(rows.index):
        out["std"] = numbers(np.asarray(std.values).reshape(-1))
    return out


def _changes(values: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(values, prepend=values[:1] - 1))


class FrameCache:
    """Image files of frames, decoded and encoded on request; the newest `CACHE_BYTES` of them are kept. Thread-safe."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit, self._size = limit, 0
        self._files: OrderedDict[tuple[int, str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int, episode: Episode, camera: str, i: int) -> bytes:
        """Return frame `i` of a camera as a JPEG or PNG file. Raises DataError."""
        key = number, camera, i
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return self._files[key]
        rows = cameras_of(episode).get(camera)
        if rows is None or not 0 <= i < len(rows.index):
            raise DataError(f"episode {episode.begin.episode_id} has no frame {i} of camera {camera!r}")
        file = frame_file(rows, i)
        with self._lock:
            if key not in self._files:
                self._files[key] = file
                self._size += len(file)
            while self._size > self._limit and len(self._files) > 1:
                self._size -= len(self._files.popitem(last=False)[1])
        return file


def frame_file(rows: SparseRows, i: int) -> bytes:
    """Return frame `i` as the JPEG or PNG file that is stored, else as a new JPEG. Raises DataError."""
    stored = rows.values.encoded(i) if isinstance(rows.values, Frames) else None
    return to_jpeg(np.asarray(rows.values[i])) if stored is None else stored


def to_jpeg(image: np.ndarray, width: int | None = None, quality: int = JPEG_QUALITY) -> bytes:
    """Encode uint8[H, W, 3] as JPEG, at most `width` pixels wide."""
    from PIL import Image

    picture = Image.fromarray(image)
    if width is not None and picture.width > width:
        size = width, max(1, round(picture.height * width / picture.width))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()


def media_type(file: bytes) -> str:
    """Return the media type of an image file that `frame_file` returned."""
    return "image/png" if file.startswith(b"\x89PNG") else "image/jpeg"
