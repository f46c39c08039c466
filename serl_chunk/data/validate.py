"""Checks of episodes at rest, and the construction of imported episodes from what their files hold."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.source import Json, ReadOptions
from serl_chunk.types import (
    DECISION_PREFIX,
    HUMAN_DIMS,
    IMAGE_PREFIX,
    STATE,
    STEP_COLUMNS,
    Begin,
    ConfigError,
    DataError,
    End,
    Episode,
    Observation,
    Outcome,
    RobotSpec,
    SparseRows,
    StepBlock,
    human_dims_fault,
)

_POINTER = b"version https://git-lfs.github.com/spec/"
_OTHER_ROBOT = "is this a demonstration of another robot?"


def check_episode(where: str, episode: Episode, spec: RobotSpec | None) -> None:
    """Raise DataError, starting with `where`, unless `episode` is whole, finite and of the robot `spec` (None: any).

    Whole: ticks from 0, columns of one length, one episode id, frames `uint8[M, H, W, 3]` at increasing ticks.
    """
    begin, steps, end = episode
    n = steps.n
    if not begin.episode_id == steps.episode_id == end.episode_id:
        ids = f"{begin.episode_id!r}, {steps.episode_id!r}, {end.episode_id!r}"
        raise DataError(f"{where}: begin, steps and end belong to different episodes ({ids})")
    if steps.first_tick != 0 or n < 1:
        raise DataError(f"{where}: {n} steps from tick {steps.first_tick} (expected 1 or more from tick 0)")
    if list(steps.observation) != [STATE]:
        raise DataError(
            f"{where}: an observation has {sorted(steps.observation)} (expected 'state' and 'images/<camera>')"
        )
    if end.length != n:
        raise DataError(f"{where}: the end has length {end.length}, /action has {n} steps")
    state = steps.observation[STATE]
    columns = {"state": (state, 2), "action": (steps.action, 2)}
    columns |= {name: (getattr(steps, name), 1) for name in STEP_COLUMNS}
    for name, (values, ndim) in columns.items():
        if values.ndim != ndim:
            raise DataError(f"{where}: {name} has the shape {values.shape} (expected {ndim} dimensions)")
        if len(values) != n:
            raise DataError(f"{where}: {name} has {len(values)} rows, /action has {n}; the file is incomplete")
        check_finite(where, name, values, "tick", "Remove the file or record it again")
    if spec is not None:
        check_width(where, spec, "actions", spec.action_dim, "/action", steps.action)
        check_width(where, spec, "state values", spec.state_dim, "the file", state)
    for key, rows in steps.sparse.items():
        _check_rows(where, key, rows, n)
        if key.startswith(IMAGE_PREFIX):
            _check_frames(where, key, rows.values, 4, spec)
    if fault := human_dims_fault(steps):
        raise DataError(f"{where}: {fault}. Remove the file or record it again")
    final = end.final_observation
    if final is None:
        return
    if STATE not in final:
        raise DataError(f"{where}: the final observation has no state; it has {sorted(final)}")
    if final[STATE].shape != state.shape[1:] or not np.isfinite(final[STATE]).all():
        shape, width = final[STATE].shape, state.shape[1]
        raise DataError(f"{where}: the final state has the shape {shape} ({width} finite values expected)")
    for key, value in final.items():
        if key.startswith(IMAGE_PREFIX):
            _check_frames(where, key, value, 3, spec)
        elif key != STATE:
            raise DataError(f"{where}: the final observation has {key!r} (expected 'state' and 'images/<camera>')")


def check_finite(where: object, name: str, values: np.ndarray, row: str, remedy: str) -> None:
    """Raise DataError with the first `row` ("tick", "row") of `values` that is not finite, and a remedy."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        at = int(np.argwhere(~np.isfinite(values))[0][0])
        raise DataError(f"{where}: {name} is not finite at {row} {at}. {remedy}")


def check_pointer(path: Path) -> None:
    """Raise DataError where Git LFS left its pointer in place of the file at `path`."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise DataError(
                f"{path}: is a pointer of Git LFS, the file was not downloaded. Run git lfs pull in {path.parent}"
            )


def first_true(mask: np.ndarray) -> int | None:
    """Return the index of the first True in bool[N]; None where there is none."""
    return int(mask.argmax()) if mask.any() else None


def check_times(where: str, stamp: np.ndarray) -> None:
    """Raise DataError where the time stamps float64[T] of an episode go back."""
    if (i := first_true(np.diff(stamp) < 0)) is not None:
        raise DataError(
            f"{where}: time goes back at step {i + 1}, from {stamp[i]:.6f} s to {stamp[i + 1]:.6f} s. Correct its time "
            "stamps or leave the episode out"
        )


def check_equal_steps(where: str, stamp: np.ndarray, hz: float | None, tolerance_s: float) -> None:
    """Raise DataError where a time stamp of float64[T] is not within `tolerance_s` of its place at the rate `hz`."""
    if hz is None:
        raise ConfigError("compares time stamps with the rate, which is unknown. Pass hz", parameter="tolerance_s")
    taken, expected = stamp - stamp[0], np.arange(len(stamp)) / hz
    if (i := first_true(np.abs(taken - expected) > tolerance_s)) is not None:
        raise DataError(
            f"{where}: step {i} was taken {taken[i]:.6f} s after the first one (expected {expected[i]:.6f} s at "
            f"{hz:g} Hz). Raise tolerance_s (now {tolerance_s:g}) to take the steps for equal, correct hz, or leave "
            "the episode out"
        )


def check_width(where: object, spec: RobotSpec, what: str, expected: int, name: str, values: np.ndarray) -> None:
    """Raise DataError unless `values` [T, D], which `name` holds, has as many columns as the robot has of `what`."""
    if values.shape[1] != expected:
        raise DataError(
            f"{where}: robot {spec.name} has {expected} {what}, {name} has {values.shape[1]}; {_OTHER_ROBOT}"
        )


def _check_rows(where: str, key: str, rows: SparseRows, n: int) -> None:
    if key != HUMAN_DIMS and (not key.startswith((IMAGE_PREFIX, DECISION_PREFIX)) or key.count("/") != 1):
        raise DataError(f"{where}: unknown column {key!r}; valid: images/<camera>, decision/<name>, {HUMAN_DIMS}")
    if rows.index.ndim != 1 or len(rows.index) != len(rows.values):
        raise DataError(f"{where}: {key} has {len(rows.values)} rows, its ticks have the shape {rows.index.shape}")
    if len(rows.index) and not are_ticks(rows.index, n):
        raise DataError(f"{where}: the ticks of {key} must increase within 0..{n - 1}")


def are_ticks(values: np.ndarray, n: int) -> bool:
    """Return whether `values` are one or more ticks of an episode of `n` steps, in increasing order."""
    if values.dtype.kind not in "iu" or values.ndim != 1 or not len(values):
        return False
    return bool((np.diff(values.astype(np.int64), prepend=-1, append=n) > 0).all())


def _check_frames(where: str, key: str, frames: np.ndarray, ndim: int, spec: RobotSpec | None) -> None:
    """Frames `uint8[M, H, W, 3]` (`ndim` 4) or one frame (3), of the size the robot's camera has."""
    if frames.dtype != np.uint8 or frames.ndim != ndim or frames.shape[-1] != 3:
        raise DataError(f"{where}: {key} is {frames.dtype}{list(frames.shape)}, expected uint8[…, H, W, 3]")
    if spec is None:
        return
    name = key.removeprefix(IMAGE_PREFIX)
    known = {c.name: (c.height, c.width) for c in spec.cameras}
    if name not in known:
        raise DataError(
            f"{where}: robot {spec.name} has no camera {name!r}, it has: {', '.join(known) or 'none'}; "
            f"{_OTHER_ROBOT} Set cameras to choose which are read"
        )
    if frames.shape[-3:-1] != known[name]:
        raise DataError(
            f"{where}: camera {name!r} of robot {spec.name} has frames of {known[name][0]}x{known[name][1]} pixels "
            f"(height x width), the file's have {frames.shape[-3]}x{frames.shape[-2]}. Set the robot's image size to "
            "the file's, record again, or set cameras to choose which are read"
        )


def check_columns(where: object, shapes: Mapping[str, Sequence[int]], ndims: Mapping[str, int], by: str) -> int:
    """Check the dimensions of the arrays in `shapes`, and that each has the rows of array `by`; return that number."""
    n = shapes[by][0] if shapes[by] else 0
    for name, ndim in ndims.items():
        if name in shapes and len(shapes[name]) != ndim:
            raise DataError(f"{where}: {name} has the shape {[*shapes[name]]} (expected {ndim} dimensions)")
        if name in shapes and shapes[name][0] != n:
            raise DataError(f"{where}: {name} has {shapes[name][0]} rows, {by} {n}. Download the file again")
    return n


def choose_cameras(where: object, present: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the cameras `present`, or those of them that are `wanted`. Raises DataError for one that is missing."""
    present = list(present)
    if missing := sorted(set(wanted or ()) - set(present)):
        raise DataError(
            f"{where}: no camera {', '.join(missing)}; it has: {', '.join(present) or 'none'}. Set cameras, or "
            "agent.image_keys, to those, or record with all cameras"
        )
    return present if wanted is None else [c for c in present if c in wanted]


def cameras_of(episode: Episode) -> dict[str, SparseRows]:
    """Return the cameras that were read at all, in the order of their names."""
    found = {k.removeprefix(IMAGE_PREFIX): v for k, v in episode.steps.sparse.items() if k.startswith(IMAGE_PREFIX)}
    return {name: found[name] for name in sorted(found) if len(found[name].index)}


def shapes_of(episode: Episode) -> Json:
    """Return the dimensions that all episodes of a data set must share."""
    return {
        "state_dim": episode.steps.observation[STATE].shape[1],
        "action_dim": episode.steps.action.shape[1],
        "cameras": {name: list(rows.values.shape[1:3]) for name, rows in cameras_of(episode).items()},
    }


def check_shapes(where: str, episode: Episode, layout: Json) -> None:
    """Raise DataError where `shapes_of(episode)` differ from those in a data set's `layout`."""
    for name, value in shapes_of(episode).items():
        if value != layout[name]:
            raise DataError(
                f"{where}: {name} is {value} (expected {layout[name]}, as in the other episodes). Set cameras to "
                "choose which are read, and write episodes of two robots as two data sets"
            )


class Ending(NamedTuple):
    """End of an imported episode: fields of `types.End`."""

    final_observation: Observation | None
    terminated: bool
    outcome: Outcome
    reward: float | None = None


_DEFAULTS = {"reward": 0, "decision_tick": -1, "policy_version": -1, "policy_age": -1, "lost_ticks": 0}


def make_steps(
    episode_id: str,
    state: np.ndarray,
    action: np.ndarray,
    hz: float | None,
    sparse: dict[str, SparseRows] | None = None,
    **columns: Any,
) -> StepBlock:
    """Build the steps of an episode from `state` [T, S], `action` [T, A] and the `STEP_COLUMNS` that its file holds.

    Of the others, `_DEFAULTS` are taken; stamps count from 0 at `hz`, and are all 0 where it is unknown.
    """
    n = len(action)
    given = _DEFAULTS | {"stamp": np.arange(n) / hz if hz else 0.0} | columns
    return StepBlock(
        episode_id=episode_id,
        first_tick=0,
        observation={STATE: np.ascontiguousarray(state, np.float32)},
        action=np.ascontiguousarray(action, np.float32),
        **{k: np.ascontiguousarray(np.broadcast_to(given[k], n).astype(dtype)) for k, dtype in STEP_COLUMNS.items()},
        sparse=sparse or {},
    )


def imported_episode(
    where: str, name: str, steps: StepBlock, ending: Ending, options: ReadOptions, task: str = ""
) -> Episode:
    """Build a checked episode of `steps`. Raises DataError starting with `where`.

    Its id is `name` and twelve digits that depend on states and actions: names like demo_0 occur in every data set.
    """
    episode_id = f"{name}-{content_id(steps.observation[STATE], steps.action)}"
    final, terminated, outcome, reward = ending
    end = End(episode_id, steps.n, final, terminated, not terminated, outcome, "import", reward)
    begin = Begin(episode_id, task=task or options.task)
    episode = Episode(begin, dataclasses.replace(steps, episode_id=episode_id), end)
    check_episode(where, episode, options.spec)
    return episode


def content_id(state: np.ndarray, action: np.ndarray, digits: int = 12) -> str:
    """Return hex digits that tell episodes of one name or number apart."""
    return hashlib.sha256(state.tobytes() + action.tobytes()).hexdigest()[:digits]


def unfinished(begin: Begin, steps: StepBlock) -> Episode:
    """Build an episode of unknown outcome whose last observation was not recorded: truncated, without a final one."""
    return Episode(begin, steps, End(begin.episode_id, steps.n, None, False, True, Outcome.UNKNOWN))


def finished(
    where: str, begin: Begin, steps: StepBlock, final: Observation, reward: np.ndarray, outcome: Outcome
) -> Episode:
    """Build an episode of known outcome from T rows, the last of which lacks the observation after its action.

    The last observation becomes `final`; the last action and reward, of float32[T], are left out. Raises DataError
    where no step remains.
    """
    if steps.n < 2:
        raise DataError(f"{where}: an episode with an outcome needs at least 2 steps, it has {steps.n}")
    steps = dataclasses.replace(steps, reward=reward).slice(0, steps.n - 1)
    return Episode(begin, steps, End(begin.episode_id, steps.n, final, True, False, outcome, outcome_by="import"))


def check_key(keys: Collection[str], key: str, path: Path) -> None:
    """Raise DataError unless `key` is one of `keys`."""
    if key not in keys:
        first, *_, last = [*keys, *keys]
        raise DataError(f"{path}: no episode {key!r}; it has {len(keys)}, {first!r} to {last!r}")
