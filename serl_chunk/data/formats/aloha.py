"""Plain ALOHA and ACT episodes: HDF5 files that know nothing of rewards, sources or colour order.

What different recorders leave in such a file (T steps, M frames, J joints, A actions), all of it read or named:

    /observations/qpos              [T, J]                 float32, float64
    /observations/qvel, effort      [T, J]                 optional, not read: a state here is made of joints
    /observations/images/<camera>   uint8[T, H, W, 3]      raw, or uint8[T, L]: JPEG files filled up with zeros
    /action                         [T, A]
    /base_action                    [T, 2]                 mobile ALOHA; read where the robot has A + 2 actions
    /compress_len                   [cameras, T]           lengths of JPEG rows; not read: the order of its cameras is
                                                           not recorded, and the zeros tell the lengths too
    /image_indices                  int[M]                 the images have M rows, of these ticks
    /chunk_starts                   int[K] or bool[T]      ticks at which the policy that acted was asked for a chunk
    root attributes                 sim, compress, hz, color, task: each may be missing
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.formats.hdf5_frames import FileVersion, frames_of
from serl_chunk.data.formats.hdf5_io import member, names
from serl_chunk.data.frames import observation_at
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    Begin,
    DataError,
    End,
    Episode,
    Outcome,
    RobotSpec,
    Source,
    SparseRows,
    StepBlock,
)

IMAGES = "/observations/images"
BASE_ACTIONS = 2  # forward and turning speed of mobile ALOHA's base


def joint_columns(spec: RobotSpec) -> list[int]:
    """State indices that make up `qpos`: the joints in the order of the actions, else the whole state."""
    joints = list(spec.joint_of_action)
    return joints if joints and min(joints) >= 0 else list(range(spec.state_dim))


def array(path: Path, file: h5py.File, name: str, dtype: Any = None) -> np.ndarray:
    """The whole dataset `name` (as `dtype`); raises DataError where it is missing, not numeric or not safe to read."""
    dataset = member(path, file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: no dataset {name}; this is not an episode, or it was not written to its end")
    if dataset.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} holds {dataset.dtype}, not numbers")
    values = np.asarray(dataset[()])
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused as such
        return values if dtype is None else values.astype(dtype, copy=False)


def attribute_text(value: Any) -> str:
    """An attribute's text: HDF5 gives strings of fixed length back as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def recorded_hz(path: Path, file: h5py.File) -> float | None:
    """Steps a second as the file records them, None where it does not; raises DataError."""
    value = file.attrs.get("hz")
    if value is None:
        return None
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf" or not np.isfinite(number) or number <= 0:
        raise DataError(f"{path}: attribute hz is {value!r}, not a rate in steps a second; correct it or remove it")
    return float(value)


def choose_cameras(path: Path, file: h5py.File, cameras: Sequence[str] | None) -> list[str]:
    """The file's cameras, or those of them that are wanted; a wanted one that is missing is an error."""
    images = member(path, file, IMAGES)
    if images is not None and not isinstance(images, h5py.Group):
        raise DataError(f"{path}: {IMAGES} is no group of cameras; record the episode again or leave it out")
    present = sorted(images or ())
    missing = sorted(set(cameras or ()) - set(present))
    if missing:
        raise DataError(
            f"{path}: no camera {', '.join(missing)} under {IMAGES}; it has: {', '.join(present) or 'none'}. "
            "Record with --cameras all, or give episodes that have the cameras of agent.image_keys"
        )
    return present if cameras is None else [c for c in present if c in cameras]


def open_aloha(
    path: Path, version: FileVersion, file: h5py.File, options: ReadOptions, reward: float | None = None
) -> Episode:
    """An episode without an `/rl` group, its frames still in the file.

    Such a file drops the observation after its last action. Where the outcome is not known (no `reward`,
    `options.success` None) the episode is truncated without a final observation, like one whose actor died. Where it
    is, the last observation becomes the final one and the last action, whose effect was not recorded, is left out: the
    T - 1 steps that remain end in a termination with the reward (1 for success, 0 for failure), which all others have
    too with `options.reward_every_step`. The source is POLICY where the file has chunk starts, SCRIPTED in simulation
    (the file's attribute `sim`), else HUMAN. Stamps count from 0 at the file's rate, else the options', else the
    robot's, and are all 0 where none is known. Raises DataError.
    """
    spec = options.spec
    if reward is None and options.success is not None:
        reward = float(options.success)
    qpos, action = array(path, file, "/observations/qpos", np.float32), _action(path, file, spec)
    if qpos.ndim != 2 or action.ndim != 2 or len(qpos) != len(action):
        raise DataError(f"{path}: /observations/qpos {qpos.shape} and /action {action.shape} must be [T, J] and [T, A]")
    n = len(action)
    if n == 0:
        raise DataError(f"{path}: an episode without steps; remove the file")
    content = hashlib.sha256(qpos.tobytes() + action.tobytes()).hexdigest()[:12]
    episode_id = f"{path.stem}-{content}"  # every folder has an episode_0: the name alone would not tell them apart
    hz = recorded_hz(path, file) or options.hz or (spec.control_hz if spec else None)
    source, decision_tick = _who_acted(path, file, n)
    image_ticks = _image_ticks(path, file, n)
    sparse = {}
    for camera in choose_cameras(path, file, options.cameras):
        name = f"{IMAGES}/{camera}"
        images = member(path, file, name)
        rows = images.shape[:1] if isinstance(images, h5py.Dataset) else ()
        if rows and rows[0] != len(image_ticks):
            of = f"/action has {n} rows" if len(image_ticks) == n else f"/image_indices names {len(image_ticks)} ticks"
            raise DataError(f"{path}: {name} has {rows[0]} frames, {of}")
        frames = frames_of(path, version, file, name, image_ticks, _is_bgr(path, file, options.color))
        sparse[IMAGE_PREFIX + camera] = SparseRows(image_ticks, frames)
    steps = StepBlock(
        episode_id=episode_id,
        first_tick=0,
        observation={STATE: _state(path, qpos, action, spec)},
        action=action,
        reward=np.zeros(n, np.float32),
        source=np.full(n, source, np.uint8),
        decision_tick=decision_tick,
        policy_version=np.full(n, -1, np.int64),
        policy_age=np.full(n, -1, np.float32),
        stamp=np.arange(n, dtype=np.float64) / hz if hz else np.zeros(n),
        lost_ticks=np.zeros(n, np.int32),
        sparse=sparse,
    )
    begin = Begin(episode_id, task=attribute_text(file.attrs.get("task", "")) or options.task)
    if reward is None:
        if options.reward_every_step:
            raise DataError(
                f"{path}: no reward to give on every step: the file records no outcome; pass --success, --failure or "
                "--scores"
            )
        return Episode(begin, steps, End(episode_id, n, None, False, True, Outcome.UNKNOWN))
    if n < 2:
        raise DataError(f"{path}: a demonstration with an outcome needs at least 2 steps, it has {n}")
    final, steps = observation_at(steps, n - 1), steps.slice(0, n - 1)
    steps.reward[slice(None) if options.reward_every_step else -1] = reward
    outcome = Outcome.SUCCESS if reward >= 1 else Outcome.FAILURE if reward <= 0 else Outcome.UNKNOWN
    return Episode(begin, steps, End(episode_id, n - 1, final, True, False, outcome, outcome_by="import"))


def _action(path: Path, file: h5py.File, spec: RobotSpec | None) -> np.ndarray:
    """The commands, with those of the mobile base behind them where the robot has them too."""
    action = array(path, file, "/action", np.float32)
    if spec is None or "base_action" not in names(file) or action.ndim != 2:
        return action
    if spec.action_dim != action.shape[1] + BASE_ACTIONS:
        return action
    base = array(path, file, "/base_action", np.float32)
    if base.shape != (len(action), BASE_ACTIONS):
        raise DataError(f"{path}: /base_action must be [{len(action)}, {BASE_ACTIONS}], it is {list(base.shape)}")
    return np.concatenate([action, base], axis=1)


def _who_acted(path: Path, file: h5py.File, n: int) -> tuple[Source, np.ndarray]:
    """The source of all steps and int32[T] decision ticks, those of the chunks that `chunk_starts` marks."""
    decision_tick = np.full(n, -1, np.int32)
    if "chunk_starts" not in names(file):
        return Source.SCRIPTED if file.attrs.get("sim", False) else Source.HUMAN, decision_tick
    starts = array(path, file, "/chunk_starts")
    if not _are_ticks(starts, n) and starts.shape == (n,) and np.isin(starts, (0, 1)).all():
        starts = np.flatnonzero(starts)
    if not _are_ticks(starts, n):
        raise DataError(
            f"{path}: /chunk_starts must be ticks that increase within 0..{n - 1}, or {n} flags; it is "
            f"{starts.dtype}{list(starts.shape)} {starts.ravel()[:8].tolist()}"
        )
    started = np.searchsorted(starts, np.arange(n), side="right") - 1
    decision_tick[started >= 0] = starts[started[started >= 0]]
    return Source.POLICY, decision_tick


def _image_ticks(path: Path, file: h5py.File, n: int) -> np.ndarray:
    """int32[M], the ticks of the images' rows."""
    if "image_indices" not in names(file):
        return np.arange(n, dtype=np.int32)
    ticks = array(path, file, "/image_indices")
    if not _are_ticks(ticks, n):
        raise DataError(
            f"{path}: /image_indices must be ticks that increase within 0..{n - 1}, it is {ticks.dtype}"
            f"{list(ticks.shape)} {ticks.ravel()[:8].tolist()}"
        )
    return ticks.astype(np.int32)


def _are_ticks(values: np.ndarray, n: int) -> bool:
    if values.dtype.kind not in "iu" or values.ndim != 1 or not len(values):
        return False
    wide = values.astype(np.int64)
    return bool(wide[0] >= 0 and wide[-1] < n and (np.diff(wide) > 0).all())


def _state(path: Path, qpos: np.ndarray, action: np.ndarray, spec: RobotSpec | None) -> np.ndarray:
    """`qpos` in the state's order; raises DataError where the robot's state holds more than the joints."""
    if spec is None:
        return qpos
    if action.shape[1] != spec.action_dim:
        raise DataError(
            f"{path}: robot {spec.name} has {spec.action_dim} actions, /action has {action.shape[1]}; "
            "is this a demonstration of another robot?"
        )
    joints = joint_columns(spec)
    if qpos.shape[1] != len(joints):
        raise DataError(
            f"{path}: robot {spec.name} has {len(joints)} joints, /observations/qpos has {qpos.shape[1]}; "
            "is this a demonstration of another robot?"
        )
    if sorted(joints) != list(range(spec.state_dim)):
        raise DataError(
            f"{path}: the state of robot {spec.name} has {spec.state_dim} values, a plain ALOHA file holds its "
            f"{len(joints)} joints only; record demonstrations with `serl-chunk record`, or use a state of joints"
        )
    state = np.empty_like(qpos)
    state[:, joints] = qpos
    return state


def _is_bgr(path: Path, file: h5py.File, color: str | None) -> bool:
    """Whether the channels are stored as blue, green, red; raises DataError where this is unknown."""
    recorded = file.attrs.get("color")
    order = color if recorded is None else attribute_text(recorded)
    if order not in ("rgb", "bgr"):
        raise DataError(
            f"{path}: the file does not record the order of its frames' colours (attribute color is {order!r}); pass "
            'color="rgb" or color="bgr" (--color), meaning what a plain viewer of the stored frames would take for '
            "red, green, blue or for blue, green, red, or cameras=() (--cameras=none) to read no frames"
        )
    return order == "bgr"
