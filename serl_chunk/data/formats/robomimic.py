"""robomimic's HDF5 data sets: one file of many demonstrations, with states and often with images.

    /data/demo_<i>/actions [T, A], rewards [T], obs/<name> [T, ...], next_obs/<name> [T, ...]
    /data: attribute env_args, JSON: env_name, env_kwargs.control_freq
    /mask/<filter key>: lists of demonstrations, not applied: all are read

The state is the concatenation of the observations of robomimic's own low-dimensional agents. A success is a step with a
reward of 1 (rewards of `dense` files reach 1 at success only). An episode is terminated where its last step is one;
steps after a success inside it are kept, `demos.end_at_first_success` drops them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from serl_chunk.data.demos import SUCCESS_REWARD
from serl_chunk.data.formats.hdf5_io import array, frames_of, group_of, looks_like, member, names, numbers, opened
from serl_chunk.data.frames import FileVersion
from serl_chunk.data.source import Format, ReadOptions, natural_sort_key, take_fraction
from serl_chunk.data.validate import Ending, check_key, choose_cameras, imported_episode, make_steps
from serl_chunk.io import plural
from serl_chunk.types import IMAGE_PREFIX, STATE, DataError, Episode, Observation, Outcome, Source, SparseRows

STATE_KEYS = (*(f"robot{i}_{part}" for i in (0, 1) for part in ("eef_pos", "eef_quat", "gripper_qpos")), "object")
"""Parts of a state, in this order; data sets of one arm have no robot1, those of images mostly no object."""
_SUFFIX = "_image"


class RobomimicSource:
    """Demonstrations in one file; see the module."""

    format = "robomimic"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self._options = path, options
        with opened(path) as file:
            demos = _demos_in(path, file)
            if not demos:
                raise DataError(f"{path}: no group data/demo_0; this is no robomimic data set, or an empty one")
            data = group_of(path, file, "data")
            self._keys = take_fraction(demos, options.proportion)
            self._task, recorded = _environment(path, data.attrs.get("env_args"))
            obs = group_of(f"{path}, {demos[0]}", group_of(path, data, demos[0]), "obs")
            self._state_keys = [k for k in STATE_KEYS if k in names(obs)]
            if not self._state_keys:
                there = ", ".join(sorted(obs)) or "nothing"
                raise DataError(f"{path}: obs has no part of a state ({', '.join(STATE_KEYS)}); it has: {there}")
            present = sorted(k.removesuffix(_SUFFIX) for k in obs if k.endswith(_SUFFIX))
            self._cameras = choose_cameras(path, present, options.cameras)
            read = {*self._state_keys, *(f"{camera}{_SUFFIX}" for camera in self._cameras)}
            self._ignored = sorted(set(obs) - read)
            masks = member(path, file, "mask")
            self._masks = sorted(masks) if isinstance(masks, h5py.Group) else []
        self.hz = options.rate(recorded, path)

    def keys(self) -> list[str]:
        return list(self._keys)

    def read(self, key: str) -> Episode:
        check_key(self._keys, key, self.path)
        where = f"{self.path}, {key}"
        version = FileVersion.of(self.path)
        with opened(self.path) as file:
            demo = group_of(where, group_of(where, file, "data"), key)
            obs = group_of(where, demo, "obs")
            action = array(where, demo, "actions", ndim=2)
            n = len(action)
            if n == 0:
                raise DataError(f"{where}: no steps. Leave it out of episodes")
            stated = demo.attrs.get("num_samples", n)
            if stated != n:
                raise DataError(f"{where}: actions have {n} rows, num_samples is {stated}; the file is incomplete")
            reward = array(where, demo, "rewards", ndim=1) if "rewards" in names(demo) else np.zeros(n, np.float32)
            if len(reward) != n:
                raise DataError(f"{where}: reward has {len(reward)} rows, /action has {n}; the file is incomplete")
            sparse, ticks = {}, np.arange(n, dtype=np.int32)
            for camera in self._cameras:
                name = f"{obs.name}/{camera}{_SUFFIX}"
                frames = frames_of(self.path, version, file, name, ticks, self._options.color == "bgr")
                sparse[IMAGE_PREFIX + camera] = SparseRows(ticks, frames)
            state = self._states(where, obs, n)
            after = final = self._final(where, demo, n)
            if final is None:
                # No target looks past a termination: for one that was not stored, the last observation stands in.
                final = {STATE: state[-1].copy(), **{k: np.asarray(v.values[n - 1]) for k, v in sparse.items()}}
            steps = make_steps("", state, action, self.hz, sparse, reward=reward, source=self._source())
            ending = self._ending(reward, after, final)
            return imported_episode(where, f"{self.path.stem}-{key}", steps, ending, self._options, self._task)

    def notes(self) -> list[str]:
        count: Counter[str] = Counter()
        with opened(self.path) as file:
            for key in self._keys:
                where = f"{self.path}, {key}"
                demo = group_of(where, group_of(self.path, file, "data"), key)
                count["unfinished"] += "next_obs" not in names(demo)
                count["missing"] += "rewards" not in names(demo)
                if "rewards" in names(demo):
                    reward = array(where, demo, "rewards", ndim=1)
                    count["after"] += bool((reward[:-1] >= SUCCESS_REWARD).any())
                    count["shaped"] += bool(((reward > 0) & (reward < SUCCESS_REWARD)).any())
        after, shaped, missing, unfinished = (
            plural(count[name], "episode") for name in ("after", "shaped", "missing", "unfinished")
        )
        actor = "policy" if self._source() is Source.POLICY else "human"
        cameras = ", ".join(c + _SUFFIX for c in self._cameras)
        shown = {
            f"the state is {' + '.join(self._state_keys)}": True,
            f"of the observations these are not read: {', '.join(self._ignored)}": self._ignored,
            f"cameras are {cameras}, in RGB as robomimic stores them": self._cameras,
            f"all demonstrations are read; the filter keys {', '.join(self._masks)} are not applied": self._masks,
            f"{after} with a success that is not in its last step: an episode that ends at its first success is "
            "shorter": count["after"],
            f"{shaped} with rewards between 0 and 1: only a reward of 1 is a success": count["shaped"],
            f"{missing} without rewards: all are 0 (success sets their outcome)": count["missing"],
            f"{unfinished} without next_obs: the observation after the last action is not stored": count["unfinished"],
            f"every action is taken for a {actor}'s (a folder named mg would hold a policy's)": True,
        }
        return [note for note, show in shown.items() if show]

    def _source(self) -> Source:
        """robomimic's folders are ph and mh for humans, mg for machine-generated."""
        return Source.POLICY if "mg" in self.path.parts else Source.HUMAN

    def _states(self, where: str, obs: h5py.Group, n: int) -> np.ndarray:
        parts = []
        for name in self._state_keys:
            values = array(f"{where}, {obs.name}", obs, name)
            if len(values) != n:
                raise DataError(f"{where}: {obs.name}/{name} has {len(values)} rows, actions {n}")
            parts.append(values.reshape(n, -1))
        return np.concatenate(parts, axis=1)

    def _final(self, where: str, demo: h5py.Group, n: int) -> Observation | None:
        if "next_obs" not in names(demo):
            return None
        after = group_of(where, demo, "next_obs")
        final = {STATE: self._states(where, after, n)[-1]}
        for camera in self._cameras:
            images = numbers(where, after, f"{camera}{_SUFFIX}", 4)
            if len(images) != n:
                raise DataError(f"{where}: {images.name} has {len(images)} rows, actions {n}")
            image = images[n - 1]
            final[IMAGE_PREFIX + camera] = image[..., ::-1].copy() if self._options.color == "bgr" else image
        return final

    def _ending(self, reward: np.ndarray, after: Observation | None, final: Observation) -> Ending:
        """`after`: the observation after the last step, where it is stored; `final`: the one a termination has."""
        if reward[-1] >= SUCCESS_REWARD:
            return Ending(final, True, Outcome.SUCCESS)
        if self._options.success is None or (reward >= SUCCESS_REWARD).any():
            return Ending(after, False, Outcome.UNKNOWN)
        if self._options.success:
            return Ending(final, True, Outcome.SUCCESS, reward=1.0)
        return Ending(final, True, Outcome.FAILURE)


def _environment(path: Path, text: Any) -> tuple[str, float | None]:
    """The environment's name and its rate in `env_args`, "" and None where it has none. Raises DataError."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: attribute env_args of /data is not JSON ({error}). Download it again") from error
    value = value if isinstance(value, dict) else {}
    arguments = value.get("env_kwargs")
    hz = arguments.get("control_freq") if isinstance(arguments, dict) else None
    if not isinstance(hz, int | float) or not hz > 0:
        return str(value.get("env_name", "")), None
    if hz > sys.float_info.max:  # JSON has integers of any length
        raise DataError(f"{path}: control_freq in env_args is no rate in steps a second. Correct it or remove it")
    return str(value.get("env_name", "")), float(hz)


def _demos_in(path: Path, file: h5py.File) -> list[str]:
    data = member(path, file, "data")
    found = data if isinstance(data, h5py.Group) else ()
    return sorted((name for name in found if name.startswith("demo")), key=natural_sort_key)


def _matches(path: Path) -> bool:
    return looks_like(path, lambda file: bool(_demos_in(path, file)))


FORMAT = Format("robomimic", _matches, RobomimicSource)
