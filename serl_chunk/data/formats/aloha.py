"""Plain ALOHA and ACT episodes: HDF5 files without rewards, sources or colour order.

Datasets that different recorders write (T steps, M frames, J joints, A actions); all are read or named in notes:

    /observations/qpos              [T, J]                 float32, float64
    /observations/qvel, effort      [T, J]                 optional, not read: a state here is made of joints
    /observations/images/<camera>   uint8[T, H, W, 3]      raw, or uint8[T, L]: JPEG files padded with zeros
    /action                         [T, A]
    /base_action                    [T, 2]                 mobile ALOHA; read where the robot has A + 2 actions
    /compress_len                   [cameras, T]           lengths of JPEG rows; not read: the order of its cameras is
                                                           not recorded, and the zeros give the lengths too
    /image_indices                  int[M]                 the images have M rows, of these ticks
    /chunk_starts                   int[K] or bool[T]      ticks at which the acting policy computed a chunk
    root attributes                 sim, compress, hz, color, task: each may be missing
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data import validate
from serl_chunk.data.formats.hdf5_io import array, dataset_of, frames_of, in_color, member, names
from serl_chunk.data.frames import FileVersion, observation_at
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import IMAGE_PREFIX, Begin, DataError, Episode, Outcome, RobotSpec, Source, SparseRows

IMAGES = "/observations/images"
BASE_ACTIONS = 2  # forward and turning speed of mobile ALOHA's base


def joint_columns(spec: RobotSpec) -> list[int]:
    """Return the state indices of `qpos`: the joints in the order of the actions, else the whole state."""
    joints = list(spec.joint_of_action)
    return joints if joints and min(joints) >= 0 else list(range(spec.state_dim))


def attribute_text(value: Any) -> str:
    """Return an attribute's text; HDF5 returns strings of fixed length as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def recorded_hz(path: Path, file: h5py.File) -> float | None:
    """Return the steps a second that the file records, or None. Raises DataError."""
    value = file.attrs.get("hz")
    if value is None:
        return None
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf" or not np.isfinite(number) or number <= 0:
        raise DataError(f"{path}: attribute hz is {value!r}, not a rate in steps a second. Correct it or remove it")
    return float(value)


def cameras_in(path: Path, file: h5py.File, wanted: tuple[str, ...] | None) -> list[str]:
    """Return the file's cameras that are wanted, by default those `in_color`. Raises DataError where one is missing."""
    images = member(path, file, IMAGES)
    if images is not None and not isinstance(images, h5py.Group):
        raise DataError(f"{path}: {IMAGES} is no group of cameras. Record the episode again or leave it out")
    there = sorted(images or ())
    if wanted is None and images is not None:
        there = [name for name in there if in_color(member(path, images, name))]
    return validate.choose_cameras(f"{path}: {IMAGES}", there, wanted)


def open_aloha(
    path: Path, version: FileVersion, file: h5py.File, options: ReadOptions, reward: float | None = None
) -> Episode:
    """Read an episode without an `/rl` group, its frames still in the file.

    Such a file lacks the observation after its last action. Where the outcome is not known (no `reward`,
    `options.success` None) the episode is `validate.unfinished`. Where it is, the episode is `validate.finished` with
    the reward (1 for success, 0 for failure), which all steps have with `options.reward_every_step`. The source is
    POLICY where the file has chunk starts, SCRIPTED in simulation (the file's attribute `sim`), else HUMAN.
    """
    spec = options.spec
    if reward is None and options.success is not None:
        reward = float(options.success)
    qpos, action = array(path, file, "/observations/qpos"), _action(path, file, spec)
    if qpos.ndim != 2 or action.ndim != 2 or len(qpos) != len(action):
        raise DataError(f"{path}: /observations/qpos {qpos.shape} and /action {action.shape} must be [T, J] and [T, A]")
    n = len(action)
    if n == 0:
        raise DataError(f"{path}: an episode without steps. Remove the file")
    episode_id = f"{path.stem}-{validate.content_id(qpos, action)}"  # every folder has an episode_0
    source, decision_tick = _who_acted(path, file, n)
    image_ticks = np.arange(n, dtype=np.int32)
    if "image_indices" in names(file):
        image_ticks = array(path, file, "/image_indices", None)
        _check_ticks(path, "/image_indices", image_ticks, n)
        image_ticks = image_ticks.astype(np.int32)
    sparse = {}
    for camera in cameras_in(path, file, options.cameras):
        name = f"{IMAGES}/{camera}"
        images = dataset_of(path, file, name)
        if images.shape and len(images) != len(image_ticks):
            of = f"/action has {n} rows" if len(image_ticks) == n else f"/image_indices names {len(image_ticks)} ticks"
            raise DataError(f"{path}: {name} has {len(images)} frames, {of}")
        frames = frames_of(path, version, file, name, image_ticks, is_bgr(path, file, options.color))
        sparse[IMAGE_PREFIX + camera] = SparseRows(image_ticks, frames)
    state, hz = _state(path, qpos, action, spec), options.rate(recorded_hz(path, file), path)
    steps = validate.make_steps(episode_id, state, action, hz, sparse, source=source, decision_tick=decision_tick)
    begin = Begin(episode_id, task=attribute_text(file.attrs.get("task", "")) or options.task)
    if reward is None:
        if options.reward_every_step:
            raise DataError(
                f"{path}: no reward to give on every step: the file records no outcome. Set success, failure or scores"
            )
        return validate.unfinished(begin, steps)
    rewards = np.zeros(n, np.float32)
    rewards[0 if options.reward_every_step else n - 2 :] = reward  # the last one is left out
    outcome = Outcome.SUCCESS if reward >= 1 else Outcome.FAILURE if reward <= 0 else Outcome.UNKNOWN
    return validate.finished(str(path), begin, steps, observation_at(steps, n - 1), rewards, outcome)


def _action(path: Path, file: h5py.File, spec: RobotSpec | None) -> np.ndarray:
    """The commands, with those of the mobile base behind them where the robot has them too."""
    action = array(path, file, "/action")
    wanted = spec is not None and action.ndim == 2 and spec.action_dim == action.shape[1] + BASE_ACTIONS
    if not wanted or "base_action" not in names(file):
        return action
    base = array(path, file, "/base_action")
    if base.shape != (len(action), BASE_ACTIONS):
        raise DataError(f"{path}: /base_action is {list(base.shape)}, expected [{len(action)}, {BASE_ACTIONS}]")
    return np.concatenate([action, base], axis=1)


def _who_acted(path: Path, file: h5py.File, n: int) -> tuple[Source, np.ndarray]:
    """The source of all steps and int32[T] decision ticks, those of the chunks that `chunk_starts` marks."""
    if "chunk_starts" not in names(file):
        return Source.SCRIPTED if file.attrs.get("sim", False) else Source.HUMAN, np.full(n, -1, np.int32)
    starts = array(path, file, "/chunk_starts", None)
    if not validate.are_ticks(starts, n) and starts.shape == (n,) and np.isin(starts, (0, 1)).all():
        starts = np.flatnonzero(starts)
    _check_ticks(path, "/chunk_starts", starts, n, f", or {n} flags")
    started = np.searchsorted(starts, np.arange(n), side="right")
    return Source.POLICY, np.append(-1, starts)[started].astype(np.int32)


def _check_ticks(path: Path, name: str, ticks: np.ndarray, n: int, valid: str = "") -> None:
    if not validate.are_ticks(ticks, n):
        raise DataError(
            f"{path}: {name} is {ticks.dtype}{list(ticks.shape)} {ticks.ravel()[:8].tolist()}, expected ticks that "
            f"increase within 0..{n - 1}{valid}"
        )


def _state(path: Path, qpos: np.ndarray, action: np.ndarray, spec: RobotSpec | None) -> np.ndarray:
    """`qpos` in the state's order; raises DataError where the robot's state holds more than the joints."""
    if spec is None:
        return qpos
    joints = joint_columns(spec)
    validate.check_width(path, spec, "actions", spec.action_dim, "/action", action)
    validate.check_width(path, spec, "joints", len(joints), "/observations/qpos", qpos)
    if sorted(joints) != list(range(spec.state_dim)):
        raise DataError(
            f"{path}: the state of robot {spec.name} has {spec.state_dim} values, a plain ALOHA file holds its "
            f"{len(joints)} joints only. Record demonstrations with `serl-chunk record`, or use a state of joints"
        )
    state = np.empty_like(qpos)
    state[:, joints] = qpos
    return state


def is_bgr(path: object, file: h5py.File, color: str | None) -> bool:
    """Whether the channels are stored as blue, green, red; raises DataError where this is unknown."""
    recorded = file.attrs.get("color")
    order = color if recorded is None else attribute_text(recorded)
    if order not in ("rgb", "bgr"):
        raise DataError(
            f"{path}: the order of its frames' colours is not recorded (attribute color is {order!r}). Set color to "
            "rgb or bgr, the order in which a plain viewer of the stored frames takes the channels, or set cameras to "
            "none"
        )
    return order == "bgr"
