"""What the page of an episode shows: its curves, segments and gaps as plain values, and its frames as image files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.frames import Frames, encode_image
from serl_chunk.data.source import Source
from serl_chunk.data.validate import cameras_of
from serl_chunk.types import STATE, Episode, SparseRows
from serl_chunk.types import Source as Actor
from serl_chunk.viewer.catalogue import rounded

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
    state, action, versions = steps.observation[STATE], steps.action, steps.policy_version
    dimensions = state.shape[1], action.shape[1]
    panels = value_panels(*dimensions, joints_in(source, *dimensions))
    return {
        "id": begin.episode_id, "task": begin.task, "conditions": begin.conditions,
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
        "reward": numbers(episode.rewards),
        "actors": [[a, b, actor.name.lower()] for actor in Actor for a, b in true_runs(steps.source == actor)],
        "gaps": [[int(t), int(steps.lost_ticks[t])] for t in np.flatnonzero(steps.lost_ticks)],
        "q": q_json(steps.sparse),
        "versions": [[int(a), int(versions[a])] for a in np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))],
    }  # fmt: skip


def numbers(values: np.ndarray) -> list[float | None]:
    """Return float[N] as plain numbers, `rounded`."""
    return [rounded(v) for v in np.asarray(values, np.float64).tolist()]


def q_json(sparse: dict[str, SparseRows]) -> dict[str, Any] | None:
    """Return the values of the decisions: of the chunk that was chosen, and the least and greatest candidate.

    Where it was recorded, also the deviation of the heads' values of the chosen chunk.
    """
    rows = sparse.get(_Q)
    if rows is None or not np.asarray(rows.values).size:
        return None
    q = np.asarray(rows.values, np.float64).reshape(len(rows.index), -1)
    low, best = q.min(1), q.max(1)
    high = best
    others = sparse.get(_VALUES)
    if others is not None and np.array_equal(others.index, rows.index) and np.asarray(others.values).size:
        values = np.asarray(others.values, np.float64).reshape(len(rows.index), -1)
        low, high = np.minimum(low, values.min(1)), np.maximum(high, values.max(1))
    out = {"ticks": rows.index.tolist(), "q": numbers(best), "low": numbers(low), "high": numbers(high)}
    std = sparse.get(_STD)
    if std is not None and np.array_equal(std.index, rows.index) and np.asarray(std.values).size == len(rows.index):
        out["std"] = numbers(np.asarray(std.values).reshape(-1))
    return out


def frame_file(rows: SparseRows, i: int) -> bytes:
    """Return frame `i` as the JPEG or PNG file that is stored, else as a new JPEG. Raises DataError."""
    stored = rows.values.encoded(i) if isinstance(rows.values, Frames) else None
    return to_jpeg(np.asarray(rows.values[i])) if stored is None else stored


def to_jpeg(image: np.ndarray, width: int | None = None, quality: int = JPEG_QUALITY) -> bytes:
    """Encode uint8[H, W, 3] as JPEG, at most `width` pixels wide."""
    if width is not None and image.shape[1] > width:
        from PIL import Image

        size = width, max(1, round(image.shape[0] * width / image.shape[1]))
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    return encode_image(image, "JPEG", quality=quality)


def media_type(file: bytes) -> str:
    """Return the media type of an image file that `frame_file` returned."""
    return "image/png" if file.startswith(b"\x89PNG") else "image/jpeg"
