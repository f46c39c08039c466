"""Episodes at rest in HDF5: ALOHA's layout, with an `/rl` group for what reinforcement learning needs beside it.

One file is one episode of T steps; J joints, A actions, S state values, M_c frames of camera c:

    /observations/qpos              float32[T, J]          measured joints, in the order of the actions (*)
    /observations/images/<camera>   uint8[M_c, H, W, 3]    M_c = T unless the camera was read on some ticks only
    /action                         float32[T, A]          the command accepted for the same row's observation
    /rl/state                       float32[T, S]          only where the state is more than `qpos`
    /rl/reward, source, decision_tick, policy_version, policy_age, stamp   one value a step, see `types.STEP_COLUMNS`
    /rl/image_index/<camera>        int32[M_c]             ticks of the frames
    /rl/decision/<name>, /rl/decision_index/<name>         [M, ...] and int32[M]: what a decision recorded
    /rl/final_observation/state, .../images/<camera>       absent where the actor died
    root attributes                 sim, compress, color, cameras, hz
    /rl attributes                  schema, and the fields of `types.Begin` and `types.End`

(*) the whole state for a robot whose actions are not all measured by a joint. `compress` keeps ALOHA's meaning (JPEG
rows) and is always False here: smaller files use HDF5's own lossless filter, which every reader undoes by itself.
Plain ALOHA and ACT files have no `/rl`; `serl_chunk.data.aloha` reads those.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.aloha import array, choose_cameras, joint_columns, read_foreign
from serl_chunk.data.checks import check_episode
from serl_chunk.types import (
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
    SparseRows,
    StepBlock,
)

SCHEMA = 1
DECISION_PREFIX = "decision/"
# Since 1.10 (2016) HDF5 checksums most of its structures, so that damage is noticed rather than believed.
_LIBVER = "v110"


def write_episode(
    path: Path | str,
    episode: Episode,
    spec: RobotSpec,
    *,
    compress: bool = False,
    sim: bool | None = None,
    replace: bool = True,
) -> None:
    """Write `episode` to `path` so that a crash at any moment leaves either the whole file there or none.

    Holds the file in memory while it writes: the episode's size once more.

    Args:
        path: the final name; its folder must exist.
        episode: a closed episode of `spec`'s robot.
        spec: the robot's specification.
        compress: gzip the frames: lossless, a few times slower to write, worth it for
            rendered frames more than for noisy ones.
        sim: ALOHA's attribute of that name; not written where it is not known. ACT's own loader demands it, and
            shifts the actions by a step where it is False.
        replace: False raises FileExistsError where `path` exists, even if another process created it meanwhile.

    Raises:
        DataError: the episode is inconsistent or not of this robot, or the file cannot be written (full disk).
    """
    path = Path(path)
    check_episode(str(path), episode, spec)
    # Not *.hdf5, so that what a killed process leaves behind is never taken for an episode.
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        # Built in memory: when a write to a full disk fails, the HDF5 library (seen with 2.0) kills the process.
        content = io.BytesIO()
        with h5py.File(content, "w", libver=(_LIBVER, _LIBVER)) as file:
            _write(file, episode, spec, compress, sim)
        with part.open("xb") as out:
            out.write(content.getbuffer())
            out.flush()
            os.fsync(out.fileno())  # before the name exists, or a power cut could leave an empty file under it
        _publish(part, path, replace)
        _sync_folder(path.parent)
    except FileExistsError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # a full disk, or values h5py has no type for
        raise DataError(
            f"{path}: cannot write the episode: {error}; check the folder, its free space and the record's values"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def read_episode(
    path: Path | str,
    spec: RobotSpec | None = None,
    *,
    cameras: Sequence[str] | None = None,
    success: bool | None = None,
    color: str | None = None,
) -> Episode:
    """The episode at `path`, checked; what `write_episode` wrote comes back exactly.

    Args:
        path: an HDF5 file in this module's layout, or a plain ALOHA or ACT file.
        spec: check the dimensions and frame sizes against this robot; None takes the file's.
        cameras: read the frames of these only; () reads none. None reads every camera in the file.
        success: the outcome of an episode whose file records none (see `data.aloha.read_foreign`).
        color: "rgb" or "bgr", the order of the channels where the file does not record it.

    Raises:
        DataError: names the file, the field, and what to do.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with h5py.File(path, "r") as file:
            if "rl" in file:
                episode = _read(path, file, cameras)
            else:
                episode = read_foreign(path, file, spec, cameras, success, color)
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError) as error:
        # h5py reports one damaged byte as any of these, depending on which structure it belongs to.
        raise DataError(
            f"{path}: the file is truncated, damaged or not HDF5 ({error}); remove it or record it again"
        ) from error
    check_episode(str(path), episode, spec)
    return episode


def _write(file: h5py.File, episode: Episode, spec: RobotSpec, compress: bool, sim: bool | None) -> None:
    begin, steps, end = episode
    state = steps.observation[STATE]
    joints = joint_columns(spec)
    file["/observations/qpos"] = state[:, joints]
    file["/action"] = steps.action
    rl = file.create_group("rl")
    if joints != list(range(spec.state_dim)):
        rl["state"] = state
    for name in STEP_COLUMNS:
        rl[name] = getattr(steps, name)
    cameras = []
    for key, rows in steps.sparse.items():
        if not len(rows.index):
            continue
        if key.startswith(IMAGE_PREFIX):
            cameras.append(key.removeprefix(IMAGE_PREFIX))
            _write_frames(file, f"/observations/{key}", rows.values, compress)
            rl[f"image_index/{cameras[-1]}"] = rows.index
        else:
            name = key.removeprefix(DECISION_PREFIX)
            rl[f"decision/{name}"], rl[f"decision_index/{name}"] = rows.values, rows.index
    for key, value in (end.final_observation or {}).items():
        rl[f"final_observation/{key}"] = value

    attributes = {"compress": False, "color": "rgb", "hz": spec.control_hz}
    attributes |= {} if sim is None else {"sim": sim}
    file.attrs.update(attributes)
    file.attrs.create("cameras", cameras, shape=(len(cameras),), dtype=h5py.string_dtype())
    rl.attrs["schema"] = SCHEMA
    texts = begin._asdict() | {"outcome": end.outcome.value, "outcome_by": end.outcome_by}
    rl.attrs.update({name: _fixed_text(text) for name, text in texts.items()})
    rl.attrs.update({"terminated": end.terminated, "truncated": end.truncated})
    if end.reward is not None:
        rl.attrs["end_reward"] = end.reward


def _fixed_text(text: str) -> np.ndarray:
    """A string of its own length: one of variable length lies in a heap that, damaged, hangs its reader for ever."""
    if "\0" in text:
        raise ValueError(f"a text with a NUL character: {text!r}")
    data = text.encode()
    return np.array(data, h5py.string_dtype(length=max(len(data), 1)))


def _write_frames(file: h5py.File, name: str, frames: np.ndarray, compress: bool) -> None:
    """One frame a chunk, as ALOHA does, so that a loader may read single ticks."""
    options = {"compression": "gzip", "compression_opts": 1} if compress else {}
    file.create_dataset(name, data=frames, chunks=(1, *frames.shape[1:]), **options)


def _read(path: Path, file: h5py.File, cameras: Sequence[str] | None) -> Episode:
    rl = file["rl"]
    attributes = dict(rl.attrs)
    schema = _attribute(path, attributes, "schema")
    if schema != SCHEMA:
        raise DataError(f"{path}: /rl has schema {schema}, this version reads {SCHEMA}; update serl_chunk")
    begin = Begin(**{name: _text(path, attributes, name) for name in Begin._fields})
    state = array(path, file, "/rl/state" if "state" in rl else "/observations/qpos", np.float32)
    action = array(path, file, "/action", np.float32)
    there = {name: dtype for name, dtype in STEP_COLUMNS.items() if name != "policy_age" or name in rl}
    columns = {name: array(path, file, f"/rl/{name}", dtype) for name, dtype in there.items()}
    columns.setdefault("policy_age", np.full(len(action), -1, np.float32))  # files of version 0.1 lack it
    sparse = {}
    for camera in choose_cameras(path, file, cameras):
        index = array(path, file, f"/rl/image_index/{camera}", np.int32)
        sparse[IMAGE_PREFIX + camera] = SparseRows(index, array(path, file, f"/observations/images/{camera}"))
    for name in rl.get("decision", ()):
        index = array(path, file, f"/rl/decision_index/{name}", np.int32)
        sparse[DECISION_PREFIX + name] = SparseRows(index, array(path, file, f"/rl/decision/{name}"))
    reward = attributes.get("end_reward")
    end = End(
        episode_id=begin.episode_id,
        length=len(action),
        final_observation=_read_final(path, file, cameras),
        terminated=bool(_attribute(path, attributes, "terminated")),
        truncated=bool(_attribute(path, attributes, "truncated")),
        outcome=_outcome(path, _text(path, attributes, "outcome")),
        outcome_by=_text(path, attributes, "outcome_by"),
        reward=None if reward is None else float(reward),
    )
    return Episode(begin, StepBlock(begin.episode_id, 0, {STATE: state}, action, **columns, sparse=sparse), end)


def _read_final(path: Path, file: h5py.File, cameras: Sequence[str] | None) -> Observation | None:
    group = file.get("/rl/final_observation")
    if group is None:
        return None
    final = {STATE: array(path, file, "/rl/final_observation/state", np.float32)}
    for camera in group.get("images", ()):
        if cameras is None or camera in cameras:
            final[IMAGE_PREFIX + camera] = array(path, file, f"/rl/final_observation/images/{camera}")
    return final


def _attribute(path: Path, attributes: dict[str, Any], name: str) -> Any:
    if name not in attributes:
        raise DataError(f"{path}: /rl has no attribute {name!r}; the file was not written to its end, record it again")
    return attributes[name]


def _text(path: Path, attributes: dict[str, Any], name: str) -> str:
    value = _attribute(path, attributes, name)
    return value.decode() if isinstance(value, bytes) else str(value)


def _outcome(path: Path, value: str) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        raise DataError(f"{path}: /rl outcome is {value!r}; valid: {', '.join(Outcome)}") from None


def _publish(part: Path, path: Path, replace: bool) -> None:
    """Give the finished file its name in one step."""
    if not replace:
        try:
            os.link(part, path)  # unlike a rename, fails where the name is taken
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links (USB sticks): check, then rename
            if path.exists():
                raise FileExistsError(f"{path} exists") from None
    os.replace(part, path)


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
