"""Episodes at rest in HDF5: ALOHA's layout, and an `/rl` group with what reinforcement learning needs in addition.

One file is one episode of T steps; J joints, A actions, S state values, M_c frames of camera c:

    /observations/qpos              float32[T, J]          measured joints, in the order of the actions (*)
    /observations/images/<camera>   uint8[M_c, H, W, 3]    M_c = T unless the camera was read on some ticks only
    /action                         float32[T, A]          the command accepted for the same row's observation
    /rl/state                       float32[T, S]          only where the state is more than `qpos`
    /rl/reward, source, decision_tick, policy_version, policy_age, stamp   one value a step, see `types.STEP_COLUMNS`
    /rl/lost_ticks                  int32[T]               only where the episode has a gap
    /rl/image_index/<camera>        int32[M_c]             ticks of the frames
    /rl/decision/<name>, /rl/decision_index/<name>         [M, ...] and int32[M]: what a decision recorded
    /rl/human_dims, /rl/human_dims_index                   uint8[M, A] and int32[M]: 1 for the numbers that a human
                                                           commanded, on ticks where the policy had the others
    /rl/final_observation/state, .../images/<camera>       absent where the actor died
    root attributes                 sim, compress, color, cameras, hz; sim and hz only where they are known;
                                    state_names, action_names: of the numbers, where they came from other projects
    /rl attributes                  schema, and the fields of `types.Begin` and `types.End`

(*) the whole state for a robot whose actions are not all measured by a joint. `compress` keeps ALOHA's meaning (JPEG
rows) and is always False here: smaller files use HDF5's own lossless filter, which every reader undoes.
Plain ALOHA and ACT files have no `/rl`; `aloha` reads those.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.fields import unnamed
from serl_chunk.data.formats.aloha import IMAGES, attribute_text, cameras_in, joint_columns, open_aloha, recorded_hz
from serl_chunk.data.formats.hdf5_io import array, arrays_in, close_files, frames_of, member, names, new_hdf5, opened
from serl_chunk.data.frames import FileVersion
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.data.validate import check_episode
from serl_chunk.io import atomic_path, fsync_path, os_reason
from serl_chunk.types import (
    DECISION_PREFIX,
    HUMAN_DIMS,
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

SCHEMA = 1  # of `/rl`
_HUMAN_DIMS_INDEX = "human_dims_index"
_TEXTS = tuple(name for name in Begin._fields if name != "demonstration")  # which is of a stream, not of an episode
_OPTIONAL = ("conditions", "ticket")  # absent where they are empty


def write_episode(
    path: Path | str, episode: Episode, spec: RobotSpec | None, *, replace: bool = True, **options: Any
) -> None:
    """Write `episode` to `path` so that a crash at any moment leaves either the whole file there or none.

    `replace` False raises FileExistsError where `path` exists, even if another process created it meanwhile; `options`:
    of `write_file`. Raises DataError for an inconsistent episode, one of another robot, a full disk or no folder.
    """
    path = Path(path)
    # Not *.hdf5, so that the remains of a killed process are never taken for an episode.
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        write_file(part, episode, spec, where=str(path), **options)
        _publish(part, path, replace)
        fsync_path(path.parent)
    except FileExistsError:
        raise
    except OSError as error:
        raise DataError(
            f"{path}: cannot write the episode ({os_reason(error)}). Check the folder and its free space"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def write_file(
    part: Path,
    episode: Episode,
    spec: RobotSpec | None,
    *,
    compress: bool = False,
    sim: bool | None = None,
    hz: float | None = None,
    joints: Sequence[int] | None = None,
    where: str,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> None:
    """Write `episode` durably to the new file `part`; lazy frames (`data.frames.Frames`) are decoded one by one.

    Args:
        spec: the robot's specification; None writes the whole state as `qpos`, or its columns `joints`.
        compress: gzip the frames: lossless, a few times slower to write.
        sim: ALOHA's attribute; None is not written. ACT's loader needs it, and shifts the actions by a step for False.
        hz: steps a second, instead of the robot's; not written where neither is known.
        names: of the numbers of a state and of an action; not written where they are not known.

    Raises DataError starting with `where`, and OSError where the disk is at fault; the caller then removes `part`.
    """
    check_episode(where, episode, spec)
    if spec is not None:
        joints, hz = joint_columns(spec), spec.control_hz if hz is None else hz
    try:
        with new_hdf5(part) as (file, check_disk):
            _write(file, episode, joints, {"hz": hz, "sim": sim}, compress, check_disk)
            for key, texts in zip(("state_names", "action_names"), names or ((), ()), strict=True):
                if texts:
                    file.attrs[key] = np.array([text.encode() for text in texts])  # of fixed length, as `_fixed_text`
    except (DataError, OSError):
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # values h5py has no type for
        raise DataError(f"{where}: cannot write the episode ({error}). Check the record's values") from error


def read_episode(path: Path | str, spec: RobotSpec | None = None, **options: Any) -> Episode:
    """Read the file at `path`, of this layout, ALOHA's or ACT's, checked, frames decoded. Inverts `write_episode`.

    `options`: fields of `data.source.ReadOptions`. Raises DataError.
    """
    path = Path(path)
    try:
        return decode_images(open_episode(path, ReadOptions(spec=spec, **options)))
    except MemoryError as error:
        raise DataError(
            f"{path}: its frames do not fit into memory, or the file is damaged ({error}). Remove it or record it again"
        ) from error
    finally:
        close_files(path)  # the caller may write it next


def open_episode(path: Path, options: ReadOptions, reward: float | None = None) -> Episode:
    """Read the episode at `path`, checked, its frames still in the file; `reward` as in `aloha.open_aloha`.

    Raises DataError, also where the file records another rate than the options, and as `hdf5_io.file_faults`.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    version = FileVersion.of(path)
    with opened(path) as file:
        hz = recorded_hz(path, file)
        if hz is not None and options.hz is not None and abs(hz - options.hz) > 1e-6 * max(hz, options.hz):
            raise DataError(f"{path}: recorded at {hz:g} Hz, the other episodes at {options.hz:g}. Separate them")
        if member(path, file, "rl") is not None:
            episode = _read(path, version, file, options)
        elif member(path, file, "observations/qpos") is None or member(path, file, "action") is None:
            found = dict(arrays_in(path, file))
            reason = "no /observations/qpos and /action (ALOHA's names)"
            raise unnamed(path, reason, found, options.flag("fields"), options.spec)
        else:
            episode = open_aloha(path, version, file, options, reward)
    check_episode(str(path), episode, options.spec)
    return episode


def _write(
    file: h5py.File,
    episode: Episode,
    joints: Sequence[int] | None,
    attributes: dict[str, Any],
    compress: bool,
    check_disk: Callable[[], None],
) -> None:
    begin, steps, end = episode
    state = steps.observation[STATE]
    whole = list(range(state.shape[1]))
    joints = whole if joints is None else list(joints)
    # Groups are made by name: one that HDF5 makes on the way to a dataset keeps the time of day, and the same episode
    # would not become the same bytes.
    file.create_group("observations")["qpos"] = state[:, joints]
    file["action"] = steps.action
    rl = file.create_group("rl")
    if joints != whole:
        rl["state"] = state
    for name in STEP_COLUMNS:
        if name != "lost_ticks" or steps.lost_ticks.any():
            rl[name] = getattr(steps, name)
    cameras = []
    for key, rows in sorted(steps.sparse.items()):
        if not len(rows.index):
            continue
        if key.startswith(IMAGE_PREFIX):
            cameras.append(key.removeprefix(IMAGE_PREFIX))
            images = file["observations"].require_group("images")
            _write_frames(images, cameras[-1], rows.values, compress, check_disk)
            rl.require_group("image_index")[cameras[-1]] = rows.index
        elif key == HUMAN_DIMS:
            rl[HUMAN_DIMS], rl[_HUMAN_DIMS_INDEX] = rows.values, rows.index
        else:
            name = key.removeprefix(DECISION_PREFIX)
            rl.require_group("decision")[name] = rows.values
            rl.require_group("decision_index")[name] = rows.index
    for key, value in sorted((end.final_observation or {}).items()):
        group = rl.require_group("final_observation")
        if key.startswith(IMAGE_PREFIX):
            group = group.require_group("images")
        group[key.removeprefix(IMAGE_PREFIX)] = value
    known = {name: value for name, value in attributes.items() if value is not None}
    file.attrs.update({"compress": False, "color": "rgb"} | known)
    file.attrs.create("cameras", cameras, shape=(len(cameras),), dtype=h5py.string_dtype())
    rl.attrs["schema"] = SCHEMA
    texts = {name: getattr(begin, name) for name in _TEXTS} | {
        "outcome": end.outcome.value,
        "outcome_by": end.outcome_by,
    }
    rl.attrs.update({name: _fixed_text(text) for name, text in texts.items() if text or name not in _OPTIONAL})
    rl.attrs.update({"terminated": end.terminated, "truncated": end.truncated})
    if end.reward is not None:
        rl.attrs["end_reward"] = end.reward


def task_of(path: Path) -> str:
    """Return the text of the task of an episode's file, "" without one. Raises DataError."""
    with opened(path) as file:
        return next((attribute_text(at.attrs["task"]) for at in _with_task(file)), "")


def rename_task(path: Path, text: str) -> None:
    """Give the task of an episode's file another text; the file is replaced whole. Raises OSError."""
    with atomic_path(path.resolve(), durable=True) as part:
        shutil.copy2(path, part)
        with h5py.File(part, "r+") as file:
            for at in _with_task(file) or [file]:
                at.attrs["task"] = _fixed_text(text)


def _with_task(file: h5py.File) -> list[h5py.Group]:
    """The groups with the text: of this project's files `/rl`, of ALOHA's the root."""
    return [at for at in (file.get("rl"), file) if at is not None and "task" in at.attrs]


def _fixed_text(text: str) -> np.ndarray:
    """A string of its own length: one of variable length lies in a heap that, damaged, hangs its reader forever."""
    if "\0" in text:
        raise ValueError(f"a text with a NUL character: {text!r}")
    data = text.encode()
    return np.array(data, h5py.string_dtype(length=max(len(data), 1)))


def _write_frames(images: h5py.Group, name: str, frames: Any, compress: bool, check_disk: Callable[[], None]) -> None:
    """One frame a chunk, as ALOHA does, so that a loader may read single ticks."""
    options = {"compression": "gzip", "compression_opts": 1} if compress else {}
    dataset = images.create_dataset(name, frames.shape, np.uint8, chunks=(1, *frames.shape[1:]), **options)
    for i in range(len(frames)):
        dataset[i] = frames[i]
        check_disk()


def _publish(part: Path, path: Path, replace: bool) -> None:
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


def _read(path: Path, version: FileVersion, file: h5py.File, options: ReadOptions) -> Episode:
    rl = file["rl"]
    there = names(rl)

    def attribute(name: str) -> Any:
        if name not in rl.attrs:
            raise DataError(f"{path}: /rl has no attribute {name!r}; the file is incomplete. Record it again")
        return rl.attrs[name]

    schema = attribute("schema")
    if schema != SCHEMA:
        raise DataError(f"{path}: /rl has schema {schema} (expected {SCHEMA}). Update serl_chunk")
    of_begin = (name for name in _TEXTS if name in rl.attrs or name not in _OPTIONAL)
    texts: dict[str, Any] = {name: attribute_text(attribute(name)) for name in of_begin}
    begin = Begin(**texts)
    begin = begin._replace(task=begin.task or options.task)
    state = array(path, file, "/rl/state" if "state" in there else "/observations/qpos")
    action = array(path, file, "/action")
    columns = {
        name: array(path, file, f"/rl/{name}", dtype)
        for name, dtype in STEP_COLUMNS.items()
        if name != "lost_ticks" or name in there
    }
    columns.setdefault("lost_ticks", np.zeros(len(action), STEP_COLUMNS["lost_ticks"]))
    sparse = {}
    for camera in cameras_in(path, file, options.cameras):
        index = array(path, file, f"/rl/image_index/{camera}", np.int32)
        frames = frames_of(path, version, file, f"{IMAGES}/{camera}", index, swap=False)
        sparse[IMAGE_PREFIX + camera] = SparseRows(index, frames)
    for name in member(path, rl, "decision") or ():
        index = array(path, file, f"/rl/decision_index/{name}", np.int32)
        sparse[DECISION_PREFIX + name] = SparseRows(index, array(path, file, f"/rl/decision/{name}", None))
    if HUMAN_DIMS in there or _HUMAN_DIMS_INDEX in there:
        index = array(path, file, f"/rl/{_HUMAN_DIMS_INDEX}", np.int32, ndim=1)
        sparse[HUMAN_DIMS] = SparseRows(index, array(path, file, f"/rl/{HUMAN_DIMS}", None, ndim=2))
    reward, outcome = rl.attrs.get("end_reward"), attribute_text(attribute("outcome"))
    if outcome not in list(Outcome):
        raise DataError(f"{path}: /rl outcome is {outcome!r}; valid: {', '.join(Outcome)}")
    final: Observation | None = None
    if (group := member(path, file, "/rl/final_observation")) is not None:
        final = {STATE: array(path, file, "/rl/final_observation/state")}
        for camera in member(path, group, "images") or ():
            if options.cameras is None or camera in options.cameras:
                final[IMAGE_PREFIX + camera] = array(path, file, f"/rl/final_observation/images/{camera}", None)
    end = End(
        episode_id=begin.episode_id,
        length=len(action),
        final_observation=final,
        terminated=bool(attribute("terminated")),
        truncated=bool(attribute("truncated")),
        outcome=Outcome(outcome),
        outcome_by=attribute_text(attribute("outcome_by")),
        reward=None if reward is None else float(reward),
    )
    return Episode(begin, StepBlock(begin.episode_id, 0, {STATE: state}, action, **columns, sparse=sparse), end)


def joints_in(file: h5py.File) -> tuple[int, ...] | None:
    """Return the state columns in `qpos` of a file of this layout; None for the whole state, or no part of it."""
    if member("", file, "/rl/state") is None:
        return None
    state, qpos = file["/rl/state"][()], file["/observations/qpos"][()]
    columns: list[int] = []
    for joint in qpos.T:
        found = (i for i in range(state.shape[1]) if i not in columns and np.array_equal(state[:, i], joint))
        columns.append(next(found, -1))
    return None if -1 in columns else tuple(columns)
