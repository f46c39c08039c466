"""Checks of episodes at rest, and the defaults that imported episodes get for what their files lack."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.source import ReadOptions
from serl_chunk.types import (
    DECISION_PREFIX,
    IMAGE_PREFIX,
    STATE,
    STEP_COLUMNS,
    Begin,
    DataError,
    End,
    Episode,
    Observation,
    Outcome,
    RobotSpec,
    Source,
    SparseRows,
    StepBlock,
)

_OTHER_ROBOT = "is this a demonstration of another robot?"


def check_episode(where: str, episode: Episode, spec: RobotSpec | None) -> None:
    """Raise DataError, beginning with `where`, unless `episode` is whole, finite and of the robot `spec`.

    Whole: ticks from 0, columns of one length, one episode id, frames `uint8[M, H, W, 3]` at increasing ticks.
    Finite: states, actions and rewards. `spec` None skips the comparison with a robot.
    """
    begin, steps, end = episode
    if not begin.episode_id == steps.episode_id == end.episode_id:
        raise DataError(
            f"{where}: begin, steps and end belong to different episodes "
            f"({begin.episode_id!r}, {steps.episode_id!r}, {end.episode_id!r})"
        )
    if steps.first_tick != 0 or steps.n < 1:
        raise DataError(
            f"{where}: an episode starts at tick 0 and has steps, this one has {steps.n} from tick {steps.first_tick}"
        )
    if list(steps.observation) != [STATE]:
        raise DataError(
            f"{where}: an observation holds 'state' and 'images/<camera>', this one {sorted(steps.observation)}"
        )
    if end.length != steps.n:
        raise DataError(f"{where}: the end says {end.length} steps, /action has {steps.n}")
    state = steps.observation[STATE]
    _check_column(where, "state", state, steps.n, 2)
    _check_column(where, "action", steps.action, steps.n, 2)
    for name in STEP_COLUMNS:
        _check_column(where, name, getattr(steps, name), steps.n, 1)
    if spec is not None:
        if steps.action.shape[1] != spec.action_dim:
            raise DataError(
                f"{where}: robot {spec.name} has {spec.action_dim} actions, /action has {steps.action.shape[1]}; "
                f"{_OTHER_ROBOT}"
            )
        if state.shape[1] != spec.state_dim:
            raise DataError(
                f"{where}: robot {spec.name} has {spec.state_dim} state values, the file has {state.shape[1]}; "
                f"{_OTHER_ROBOT}"
            )
    for key, rows in steps.sparse.items():
        _check_rows(where, key, rows, steps.n)
        if key.startswith(IMAGE_PREFIX):
            _check_frames(where, key, rows.values, 4, spec)
    if end.final_observation is not None:
        _check_final(where, episode, spec)


def _check_column(where: str, name: str, values: np.ndarray, n: int, ndim: int) -> None:
    if values.ndim != ndim:
        raise DataError(f"{where}: {name} must have {ndim} dimensions, its shape is {values.shape}")
    if len(values) != n:
        raise DataError(f"{where}: {name} has {len(values)} rows, /action has {n}; the file is incomplete")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        tick = int(np.argwhere(~np.isfinite(values))[0][0])
        raise DataError(f"{where}: {name} is not finite at tick {tick}; remove the file or record it again")


def _check_rows(where: str, key: str, rows: SparseRows, n: int) -> None:
    if not key.startswith((IMAGE_PREFIX, DECISION_PREFIX)) or key.count("/") != 1:
        raise DataError(f"{where}: unknown column {key!r}; valid: images/<camera>, decision/<name>")
    if rows.index.ndim != 1 or len(rows.index) != len(rows.values):
        raise DataError(f"{where}: {key} has {len(rows.values)} rows and ticks of shape {rows.index.shape}")
    if len(rows.index) and (rows.index[0] < 0 or rows.index[-1] >= n or (np.diff(rows.index) <= 0).any()):
        raise DataError(f"{where}: the ticks of {key} must increase within 0..{n - 1}")


def _check_frames(where: str, key: str, frames: np.ndarray, ndim: int, spec: RobotSpec | None) -> None:
    """Frames `uint8[M, H, W, 3]` (`ndim` 4) or one frame (3), of the size the robot's camera has."""
    if frames.dtype != np.uint8 or frames.ndim != ndim or frames.shape[-1] != 3:
        raise DataError(f"{where}: {key} must be uint8[…, H, W, 3], it is {frames.dtype}{list(frames.shape)}")
    if spec is None:
        return
    name = key.removeprefix(IMAGE_PREFIX)
    known = {c.name: (c.height, c.width) for c in spec.cameras}
    if name not in known:
        raise DataError(
            f"{where}: robot {spec.name} has no camera {name!r}, it has: {', '.join(known) or 'none'}; "
            f"{_OTHER_ROBOT} (cameras= chooses what is read)"
        )
    if frames.shape[-3:-1] != known[name]:
        raise DataError(
            f"{where}: camera {name!r} of robot {spec.name} has frames of {known[name][0]}x{known[name][1]} pixels "
            f"(height x width), the file's are {frames.shape[-3]}x{frames.shape[-2]}; set the robot's image size to "
            "the file's or record again (cameras= chooses what is read)"
        )


def _check_final(where: str, episode: Episode, spec: RobotSpec | None) -> None:
    final = episode.end.final_observation or {}
    if STATE not in final:
        raise DataError(f"{where}: the final observation has no state; it has {sorted(final)}")
    width = episode.steps.observation[STATE].shape[1]
    if final[STATE].shape != (width,) or not np.isfinite(final[STATE]).all():
        raise DataError(
            f"{where}: the final observation's state must be {width} finite values, its shape is {final[STATE].shape}"
        )
    for key, value in final.items():
        if key.startswith(IMAGE_PREFIX):
            _check_frames(where, key, value, 3, spec)
        elif key != STATE:
            raise DataError(f"{where}: the final observation holds 'state' and 'images/<camera>', not {key!r}")


class Ending(NamedTuple):
    """How an imported episode ended: fields of `types.End`."""

    final_observation: Observation | None
    terminated: bool
    outcome: Outcome
    outcome_by: str = "import"
    reward: float | None = None


def imported_episode(
    where: str,
    name: str,
    state: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    ending: Ending,
    options: ReadOptions,
    *,
    source: np.ndarray | Source,
    hz: float | None,
    task: str = "",
    sparse: dict[str, SparseRows] | None = None,
) -> Episode:
    """T steps in columns as a checked episode; `state [T, S]`, `action [T, A]`, `reward [T]` become float32.

    Its id is `name` and twelve digits that depend on states and actions: names like demo_0 occur in every data set.
    Stamps count from 0 at `hz`, and are all 0 where it is unknown. Raises DataError beginning with `where`.
    """
    n = len(action)
    state, action = np.ascontiguousarray(state, np.float32), np.ascontiguousarray(action, np.float32)
    episode_id = f"{name}-{hashlib.sha256(state.tobytes() + action.tobytes()).hexdigest()[:12]}"
    steps = StepBlock(
        episode_id=episode_id,
        first_tick=0,
        observation={STATE: state},
        action=action,
        reward=np.array(reward, np.float32),
        source=np.array(np.broadcast_to(source, n), np.uint8),
        decision_tick=np.full(n, -1, np.int32),
        policy_version=np.full(n, -1, np.int64),
        policy_age=np.full(n, -1, np.float32),
        stamp=np.arange(n, dtype=np.float64) / hz if hz else np.zeros(n),
        lost_ticks=np.zeros(n, np.int32),
        sparse=sparse or {},
    )
    final, terminated, outcome, outcome_by, end_reward = ending
    end = End(episode_id, n, final, terminated, not terminated, outcome, outcome_by, end_reward)
    episode = Episode(Begin(episode_id, task=task or options.task), steps, end)
    check_episode(where, episode, options.spec)
    return episode


def resolve_rate(options: ReadOptions, recorded: float | None = None, where: object = "") -> float | None:
    """Steps a second: what the file records, else what the caller says, else the robot's, else unknown.

    Raises DataError beginning with `where`: the file and the caller say different things.
    """
    if recorded:
        if options.hz is not None and not math.isclose(recorded, options.hz, rel_tol=1e-6):
            raise DataError(f"{where}: recorded at {recorded:g} Hz, not at {options.hz:g}; leave --hz out")
        return recorded
    return options.hz or (options.spec.control_hz if options.spec else None)


def index_of(keys: list[str], key: str, path: Path) -> int:
    """The index of `key` in `keys`; raises DataError."""
    try:
        return keys.index(key)
    except ValueError:
        raise DataError(
            f"{path}: there is no episode {key!r}; there are {len(keys)}, {keys[0]!r} to {keys[-1]!r}"
        ) from None


def natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which `demo_2` comes before `demo_10`."""
    parts = re.findall(r"\d+|\D+", text, flags=re.ASCII)
    return [(0, int(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def plural(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
