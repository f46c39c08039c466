"""Plain ALOHA and ACT demonstrations: HDF5 files that know nothing of rewards, sources or colour order."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

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

_IMAGES = "/observations/images"


def joint_columns(spec: RobotSpec) -> list[int]:
    """State indices that make up `qpos`: the joints in the order of the actions, else the whole state."""
    joints = list(spec.joint_of_action)
    return joints if joints and min(joints) >= 0 else list(range(spec.state_dim))


def array(path: Path, file: h5py.File, name: str, dtype: Any = None) -> np.ndarray:
    """The whole dataset `name` (as `dtype`); raises DataError where it is missing or not numeric."""
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: no dataset {name}; this is not an episode, or it was not written to its end")
    if dataset.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} holds {dataset.dtype}, not numbers")
    values = np.asarray(dataset[()])
    return values if dtype is None else values.astype(dtype, copy=False)


def choose_cameras(path: Path, file: h5py.File, cameras: Sequence[str] | None) -> list[str]:
    """The cameras to read: `cameras`, which must be in the file, or all of them; raises DataError."""
    present = sorted(file.get(_IMAGES, ()))
    missing = sorted(set(cameras or ()) - set(present))
    if missing:
        raise DataError(
            f"{path}: no camera {', '.join(missing)} under {_IMAGES}; it has: {', '.join(present) or 'none'}"
        )
    return present if cameras is None else [c for c in present if c in cameras]


def read_foreign(
    path: Path,
    file: h5py.File,
    spec: RobotSpec | None,
    cameras: Sequence[str] | None,
    success: bool | None,
    color: str | None,
) -> Episode:
    """A demonstration without an `/rl` group.

    Such a file drops the observation after its last action. Where the outcome is not known (`success` None) the
    episode is truncated without a final observation, like one whose actor died. Where it is, the last observation
    becomes the final one and the last action, whose effect nobody saw, is left out: the T - 1 steps that remain end
    in a termination with reward 1 (success) or 0 (failure). The source is SCRIPTED in simulation (the file's
    attribute `sim`), else HUMAN. Stamps count from 0 at the file's rate, else the robot's, and are all 0 where neither
    is known.
    """
    qpos, action = array(path, file, "/observations/qpos", np.float32), array(path, file, "/action", np.float32)
    if qpos.ndim != 2 or action.ndim != 2 or len(qpos) != len(action):
        raise DataError(f"{path}: /observations/qpos {qpos.shape} and /action {action.shape} must be [T, J] and [T, A]")
    n = len(action)
    content = hashlib.sha256(qpos.tobytes() + action.tobytes()).hexdigest()[:12]
    episode_id = f"{path.stem}-{content}"  # every folder has an episode_0: the name alone would not tell them apart
    hz = file.attrs.get("hz", spec.control_hz if spec else None)
    source = Source.SCRIPTED if file.attrs.get("sim", False) else Source.HUMAN
    sparse = {}
    for camera in choose_cameras(path, file, cameras):
        frames = _frames(path, file, camera, color)
        if len(frames) != n:
            raise DataError(f"{path}: {_IMAGES}/{camera} has {len(frames)} frames, /action has {n} rows")
        sparse[IMAGE_PREFIX + camera] = SparseRows(np.arange(n, dtype=np.int32), frames)
    steps = StepBlock(
        episode_id=episode_id,
        first_tick=0,
        observation={STATE: _state(path, qpos, action, spec)},
        action=action,
        reward=np.zeros(n, np.float32),
        source=np.full(n, source, np.uint8),
        decision_tick=np.full(n, -1, np.int32),
        policy_version=np.full(n, -1, np.int64),
        policy_age=np.full(n, -1, np.float32),
        stamp=np.arange(n, dtype=np.float64) / hz if hz else np.zeros(n),
        sparse=sparse,
    )
    begin = Begin(episode_id, task=_text(file.attrs.get("task", "")))
    if success is None:
        return Episode(begin, steps, End(episode_id, n, None, False, True, Outcome.UNKNOWN))
    if n < 2:
        raise DataError(f"{path}: a demonstration with an outcome needs at least 2 steps, it has {n}")
    final, steps = steps.observation_at(n - 1), steps.slice(0, n - 1)
    steps.reward[-1] = float(success)
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    return Episode(begin, steps, End(episode_id, n - 1, final, True, False, outcome, outcome_by="import"))


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


def _frames(path: Path, file: h5py.File, camera: str, color: str | None) -> np.ndarray:
    """RGB frames uint8[T, H, W, 3] of one camera, decoded where its rows are JPEG files padded with zeros."""
    name = f"{_IMAGES}/{camera}"
    recorded = file.attrs.get("color")
    order = color if recorded is None else _text(recorded)
    if order not in ("rgb", "bgr"):
        raise DataError(
            f"{path}: the file does not record the order of its frames' colours (attribute color is {order!r}); pass "
            'color="rgb" or color="bgr", meaning what a plain viewer of the stored frames would take for red, green, '
            "blue or for blue, green, red, or cameras=() to read no frames"
        )
    values = array(path, file, name)
    if values.dtype != np.uint8 or values.ndim not in (2, 4):
        raise DataError(f"{path}: {name} must be uint8[T, H, W, 3] or padded JPEG rows, it is {values.shape}")
    frames = values if values.ndim == 4 else _decode_jpeg(path, name, values)
    return frames if order == "rgb" else np.ascontiguousarray(frames[..., ::-1])


def _text(value: Any) -> str:
    """An attribute's text: HDF5 gives strings of fixed length back as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _decode_jpeg(path: Path, name: str, rows: np.ndarray) -> np.ndarray:
    from PIL import Image  # slow to import, and few files need it

    frames = []
    for tick, row in enumerate(rows):
        try:
            with Image.open(io.BytesIO(row.tobytes()), formats=("JPEG",)) as image:
                frames.append(np.asarray(image.convert("RGB")))
        except (OSError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: the frame at tick {tick} of {name} is not a whole JPEG image: {error}") from error
        if frames[-1].shape != frames[0].shape:
            raise DataError(f"{path}: the frame at tick {tick} of {name} has another size than the first")
    return np.stack(frames) if frames else np.zeros((0, 0, 0, 3), np.uint8)
