"""Reading the HDF5 layout that `data.hdf5` describes and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.aloha import IMAGES, array, attribute_text, choose_cameras
from serl_chunk.data.hdf5_frames import FileVersion, frames_of
from serl_chunk.data.hdf5_reading import member, names
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
    SparseRows,
    StepBlock,
)

SCHEMA = 1


def open_own(path: Path, version: FileVersion, file: h5py.File, options: ReadOptions) -> Episode:
    """The episode in `file`, unchecked, its frames still there. Raises DataError, and what h5py raises."""
    rl = file["rl"]
    there = names(rl)
    attributes = dict(rl.attrs)
    schema = _attribute(path, attributes, "schema")
    if schema != SCHEMA:
        raise DataError(f"{path}: /rl has schema {schema}, this version reads {SCHEMA}; update serl_chunk")
    begin = Begin(**{name: _text(path, attributes, name) for name in Begin._fields})
    begin = begin._replace(task=begin.task or options.task)
    state = array(path, file, "/rl/state" if "state" in there else "/observations/qpos", np.float32)
    action = array(path, file, "/action", np.float32)
    stored = {name: dtype for name, dtype in STEP_COLUMNS.items() if name != "policy_age" or name in there}
    columns = {name: array(path, file, f"/rl/{name}", dtype) for name, dtype in stored.items()}
    columns.setdefault("policy_age", np.full(len(action), -1, np.float32))  # files of version 0.1 lack it
    sparse = {}
    for camera in choose_cameras(path, file, options.cameras):
        index = array(path, file, f"/rl/image_index/{camera}", np.int32)
        frames = frames_of(path, version, file, f"{IMAGES}/{camera}", index, swap=False)
        sparse[IMAGE_PREFIX + camera] = SparseRows(index, frames)
    for name in member(path, rl, "decision") or ():
        index = array(path, file, f"/rl/decision_index/{name}", np.int32)
        sparse[DECISION_PREFIX + name] = SparseRows(index, array(path, file, f"/rl/decision/{name}"))
    reward = attributes.get("end_reward")
    end = End(
        episode_id=begin.episode_id,
        length=len(action),
        final_observation=_read_final(path, file, options.cameras),
        terminated=bool(_attribute(path, attributes, "terminated")),
        truncated=bool(_attribute(path, attributes, "truncated")),
        outcome=_outcome(path, _text(path, attributes, "outcome")),
        outcome_by=_text(path, attributes, "outcome_by"),
        reward=None if reward is None else float(reward),
    )
    return Episode(begin, StepBlock(begin.episode_id, 0, {STATE: state}, action, **columns, sparse=sparse), end)


def joints_in(file: h5py.File) -> tuple[int, ...] | None:
    """The state columns that `qpos` of a file of this layout holds; None where it is the whole state, or no part of it.

    Raises what h5py raises.
    """
    if member("", file, "/rl/state") is None:
        return None
    state, qpos = file["/rl/state"][()], file["/observations/qpos"][()]
    left = list(range(state.shape[1]))
    columns = []
    for joint in qpos.T:
        found = next((i for i in left if np.array_equal(state[:, i], joint)), None)
        if found is None:
            return None
        left.remove(found)
        columns.append(found)
    return tuple(columns)


def _read_final(path: Path, file: h5py.File, cameras: Sequence[str] | None) -> Observation | None:
    group = member(path, file, "/rl/final_observation")
    if group is None:
        return None
    final = {STATE: array(path, file, "/rl/final_observation/state", np.float32)}
    for camera in member(path, group, "images") or ():
        if cameras is None or camera in cameras:
            final[IMAGE_PREFIX + camera] = array(path, file, f"/rl/final_observation/images/{camera}")
    return final


def _attribute(path: Path, attributes: dict[str, Any], name: str) -> Any:
    if name not in attributes:
        raise DataError(f"{path}: /rl has no attribute {name!r}; the file was not written to its end, record it again")
    return attributes[name]


def _text(path: Path, attributes: dict[str, Any], name: str) -> str:
    return attribute_text(_attribute(path, attributes, name))


def _outcome(path: Path, value: str) -> Outcome:
    try:
        return Outcome(value)
    except ValueError:
        raise DataError(f"{path}: /rl outcome is {value!r}; valid: {', '.join(Outcome)}") from None
