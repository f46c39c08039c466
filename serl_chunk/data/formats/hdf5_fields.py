"""HDF5 whose arrays have names of their own: by a convention (`data.fields.CONVENTIONS`), or by a table of fields.

A file is one episode, or has a group for each (`demo_0`, `traj_0`, `episode_0`, at the root or in `/data`), in which
lie T actions and T or T + 1 observations: robomimic, Isaac Lab and its relatives, ManiSkill, Minari. Of robomimic:

    /data/demo_<i>/actions [T, A], rewards [T], obs/<name> [T, ...], next_obs/<name> [T, ...]
    /data: attribute env_args, JSON: env_name, env_kwargs.control_freq
    /mask/<filter key>: lists of demonstrations, not applied: all are read

A success is recorded (an attribute or array `success`), or `types.success_step`. An episode is terminated where its
last step is one; steps after a success inside it are kept, `demos.end_at_first_success` drops them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from serl_chunk.data.fields import (
    ArrayInfo,
    absolute,
    check_order,
    column_names,
    concatenated,
    resolve,
    table_of,
)
from serl_chunk.data.formats.aloha import attribute_text, is_bgr, recorded_hz
from serl_chunk.data.formats.episodes import SUFFIXES
from serl_chunk.data.formats.hdf5_io import array, arrays_in, frames_of, group_of, looks_like, member, names, opened
from serl_chunk.data.frames import FileVersion, single_frame
from serl_chunk.data.source import Format, ReadOptions, natural_sort_key, sorted_files, take_fraction
from serl_chunk.data.validate import Ending, check_key, choose_cameras, imported_episode, make_steps
from serl_chunk.io import plural
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    SUCCESS_REWARD,
    DataError,
    Episode,
    Observation,
    Outcome,
    Source,
    SparseRows,
    success_step,
)

_MINARI = "data/main_data.hdf5"  # in the folder of a data set
_TASKS = ("task", "language_instruction", "instruction")  # attributes
_TERMINATIONS = ("terminations", "terminated")
_EPISODE, _NUMBERED = re.compile(r"(demo|traj|trajectory|episode|ep)_?\d+"), re.compile(r"[A-Za-z_]*\d+")


class _Place(NamedTuple):
    """An episode's file, and its group in there ("" for the root)."""

    file: Path
    group: str


class Hdf5Fields:
    """Episodes in one file, or in the files of a folder; see the module."""

    format = "fields"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self._options = path, options
        places: dict[str, _Place] = {}
        files = _files(path)
        recorded: float | None = None
        self._task, self._masks = "", []
        for file in files:
            with opened(file) as content:
                groups = _episodes_in(file, content)
                recorded = recorded or recorded_hz(file, content)
                if "data" in groups.parent:
                    data = group_of(file, content, "data")
                    self._task, rate = _environment(file, data.attrs.get("env_args"))
                    recorded = recorded or rate
                masks = member(file, content, "mask")
                self._masks += sorted(masks) if isinstance(masks, h5py.Group) else []
            for group in groups.names:
                of_file = file.name if len(files) > 1 or not group else ""
                places["/".join(filter(None, (of_file, group.rpartition("/")[2])))] = _Place(file, group)
        if not places:
            raise DataError(f"{path}: no HDF5 file with episodes. Pass a file, or a folder of *.hdf5 files")
        self.hz = options.rate(recorded, path)
        self._arrays = self._arrays_of(next(iter(places.values())))
        table = table_of(options.fields, path)
        self.fields = resolve(path, table, self._arrays, options.flag("fields"), options.spec)
        cameras = dict(self.fields.cameras or ())  # resolved: never None
        self._cameras = {c: cameras[c] for c in choose_cameras(path, sorted(cameras), options.cameras)}
        self._places = {key: places[key] for key in take_fraction(list(places), options.proportion)}

    def keys(self) -> list[str]:
        return list(self._places)

    def column_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the numbers of a state and of an action."""
        return column_names(self.fields.state, self._arrays), column_names(self.fields.action, self._arrays)

    def read(self, key: str) -> Episode:
        check_key(self._places, key, self.path)
        place = self._places[key]
        where = f"{self.path}, {key}"
        version = FileVersion.of(place.file)
        with opened(place.file) as file:
            demo = _group(where, file, place)
            n = len(array(where, demo, self.fields.action[0].name))
            if n == 0:
                raise DataError(f"{where}: no steps. Leave it out of episodes")
            stated = demo.attrs.get("num_samples", n)
            if stated != n:
                raise DataError(f"{where}: actions have {n} rows, num_samples is {stated}; the file is incomplete")
            if not place.group:
                _check_one_episode(where, demo, n)
            action, state = (self._numbers(where, demo, of, n) for of in ("action", "state"))
            reward = self._reward(where, demo, n)
            after: Observation | None = self._after(where, demo, n)
            if len(state) > n:
                after = {STATE: state[n]}
            sparse, ticks = {}, np.arange(n, dtype=np.int32)
            for camera, name in self._cameras.items():
                swap = self._swap(where, file, name)
                rows = n + 1 if len(state) > n and len(demo[name]) == n + 1 else n
                frames = frames_of(place.file, version, demo, name, np.arange(rows), swap)
                sparse[IMAGE_PREFIX + camera] = SparseRows(ticks, frames[:n])
                if after is not None and rows > n:
                    after[IMAGE_PREFIX + camera] = single_frame(frames[n:])
                elif after is not None and self._next_name(demo, name):
                    stored = f"{demo.name}/{self._next_name(demo, name)}"
                    there = frames_of(place.file, version, file, stored, np.arange(n), swap)
                    after[IMAGE_PREFIX + camera] = single_frame(there[n - 1 :])
                elif len(state) > n:
                    after = None  # of a part of the observation no target can be computed
            final = after
            if final is None:
                # No target looks past a termination: for one that was not stored, the last observation stands in.
                final = {STATE: state[n - 1].copy(), **{k: single_frame(v.values[n - 1 :]) for k, v in sparse.items()}}
            ending = self._ending(where, demo, reward, after, final)
            said = (at.attrs.get(name) for at in (demo, demo.parent, file) for name in _TASKS)
            task = next((attribute_text(text) for text in said if text is not None), self._task)
        state = state[:n]
        action = absolute(where, self.fields, state, action, self._options.spec)
        steps = make_steps("", state, action, self.hz, sparse, reward=reward, source=self._source())
        name = f"{place.file.stem}-{place.group.rpartition('/')[2]}" if place.group else place.file.stem
        episode = imported_episode(where, name, steps, ending, self._options, task)
        check_order(where, self.fields, self.column_names(), episode, self._options.spec)
        return episode

    def notes(self) -> list[str]:
        count: Counter[str] = Counter()
        for key, demo, reward in self._rewards():
            count["unfinished"] += not self._after_stored(key, demo)
            count["missing"] += not self.fields.reward
            marked = success_step(reward) if len(reward) else None
            count["after"] += marked is not None and marked < len(reward) - 1
            count["dense"] += marked is None and bool((reward >= SUCCESS_REWARD).any())
            count["shaped"] += bool(((reward > 0) & (reward < SUCCESS_REWARD)).any())
        after, shaped, missing, unfinished, dense = (
            plural(count[name], "episode") for name in ("after", "shaped", "missing", "unfinished", "dense")
        )
        actor = self._source().name.lower()
        read = {*self.fields.names(), *self._cameras.values()}
        ignored = sorted(name for name in self._arrays if name not in read and not name.startswith("next_"))
        by = f"as in {self.fields.convention}" if self.fields.convention else "by the table"
        cameras = ", ".join(f"{camera} ({name})" for camera, name in self._cameras.items())
        shown = {
            f"the state is {' + '.join(p.text for p in self.fields.state)}, {by}; --fields names other arrays": True,
            f"of the arrays these are not read: {', '.join(ignored)}": ignored,
            f"cameras are {cameras}, in RGB unless color says otherwise": self._cameras,
            f"all demonstrations are read; the filter keys {', '.join(self._masks)} are not applied": self._masks,
            f"{after} with a success that is not in its last step: an episode that ends at its first success is "
            "shorter": count["after"],
            f"{shaped} with rewards between 0 and 1: only a reward of 1 is a success": count["shaped"],
            f"{dense} with rewards of 1 and more that mark no success": count["dense"],
            f"{missing} without rewards: all are 0 until success is recorded or set": count["missing"],
            f"{unfinished} whose observation after the last action is not stored": count["unfinished"],
            f"every action is taken for a {actor}'s, by the path (mg, human, random)": True,
            "the file records no rate: all time stamps are 0; hz sets it": self.hz is None,
        }
        return [note for note, show in shown.items() if show]

    def _arrays_of(self, place: _Place) -> dict[str, ArrayInfo]:
        with opened(place.file) as file:
            return dict(arrays_in(place.file, _group(place.file, file, place)))

    def _rewards(self) -> Iterator[tuple[str, h5py.Group, np.ndarray]]:
        """Key, group and rewards of each episode."""
        for key, place in self._places.items():
            where = f"{self.path}, {key}"
            with opened(place.file) as file:
                demo = _group(where, file, place)
                name = self.fields.reward
                yield key, demo, array(where, demo, name).reshape(-1) if name else np.zeros(0, np.float32)

    def _numbers(self, where: str, demo: h5py.Group, of: str, n: int, prefix: str = "") -> np.ndarray:
        """The columns of a state, whose rows may be one more than the `n` of the actions, or of an action."""
        parts = getattr(self.fields, of)
        read = {part.name: array(where, demo, prefix + part.name, None) for part in parts}
        if of == "action" and any(values.ndim == 1 and values.dtype.kind in "biu" for values in read.values()):
            raise DataError(
                f"{where}: {parts[0].name} are choices (a Discrete space), not vectors of numbers: not read"
            )
        lengths = {len(values) for values in read.values()}
        for name, values in read.items():
            if len(values) != n and (len(lengths) > 1 or of == "action" or len(values) != n + 1):
                raise DataError(f"{where}: {demo.name}/{prefix}{name} has {len(values)} rows, actions {n}")
        return concatenated(parts, read.__getitem__).astype(np.float32)

    def _reward(self, where: str, demo: h5py.Group, n: int) -> np.ndarray:
        name = self.fields.reward
        if not name or name not in demo:
            return np.zeros(n, np.float32)
        reward = array(where, demo, name).reshape(-1)
        if len(reward) != n:
            raise DataError(f"{where}: reward has {len(reward)} rows, actions {n}; the file is incomplete")
        return reward

    def _next_name(self, demo: h5py.Group, name: str) -> str:
        """The array of the observations after each step, "" where there is none."""
        there = f"next_{name}"
        return (
            there
            if name.startswith("obs") and name.partition("/")[0] and there.partition("/")[0] in names(demo)
            else ""
        )

    def _after_stored(self, key: str, demo: h5py.Group) -> bool:
        first = self.fields.state[0].name
        return bool(self._next_name(demo, first)) or len(demo[first]) > len(demo[self.fields.action[0].name])

    def _after(self, where: str, demo: h5py.Group, n: int) -> Observation | None:
        if not all(self._next_name(demo, part.name) for part in self.fields.state):
            return None
        return {STATE: self._numbers(where, demo, "state", n, "next_")[n - 1]}

    def _swap(self, where: str, file: h5py.File, name: str) -> bool:
        """Raw frames, and those of a convention, are RGB; other encoded ones are what their file or the caller says."""
        raw = self._arrays[name].dtype == "uint8" and len(self._arrays[name].shape) == 4
        return (
            self._options.color == "bgr" if raw or self.fields.convention else is_bgr(where, file, self._options.color)
        )

    def _source(self) -> Source:
        """robomimic's folders are ph and mh for humans, mg for machine-generated; Minari's names often tell."""
        if not self.fields.convention.startswith("Minari"):
            return Source.POLICY if "mg" in self.path.parts else Source.HUMAN
        name = "/".join(self.path.absolute().parts[-4:]).lower()
        return Source.HUMAN if "human" in name else Source.RANDOM if "random" in name else Source.POLICY

    def _recorded(self, where: str, demo: h5py.Group) -> Outcome | None:
        """What the episode records of its outcome. Steps without a success may end by failure or by time."""
        if "success" in demo.attrs:
            return Outcome.SUCCESS if np.any(demo.attrs["success"]) else Outcome.FAILURE
        name = self.fields.success
        if not name:
            return None
        return Outcome.SUCCESS if (array(where, demo, name) > 0).any() else Outcome.UNKNOWN

    def _ending(
        self, where: str, demo: h5py.Group, reward: np.ndarray, after: Observation | None, final: Observation
    ) -> Ending:
        """`after`: the observation after the last step, where it is stored; `final`: the one a termination has."""
        outcome, marked = self._recorded(where, demo), success_step(reward)
        if outcome is None and marked is not None:
            outcome = Outcome.SUCCESS if reward[-1] >= SUCCESS_REWARD else Outcome.UNKNOWN
        elif outcome is None and self._options.success:
            outcome = Outcome.SUCCESS
        elif outcome in (None, Outcome.UNKNOWN):
            outcome = Outcome.FAILURE if self._options.success is False else Outcome.UNKNOWN
        if outcome is Outcome.UNKNOWN or (marked is not None and reward[-1] < SUCCESS_REWARD):
            ended = next((demo[name][-1] for name in _TERMINATIONS if name in names(demo)), False)
            return Ending(final if ended else after, bool(ended), Outcome.UNKNOWN)
        lacks = outcome is Outcome.SUCCESS and not (reward >= SUCCESS_REWARD).any()
        return Ending(final, True, outcome, SUCCESS_REWARD if lacks else None)


class _Groups(NamedTuple):
    parent: str  # "data" or ""
    names: list[str]  # of the episodes, [""] for a file that is one


def _episodes_in(path: Path, file: h5py.File) -> _Groups:
    for parent in ("data", ""):
        within = member(path, file, parent) if parent else file
        if not isinstance(within, h5py.Group):
            continue
        found = sorted(filter(_NUMBERED.fullmatch, names(within)), key=natural_sort_key)
        whole = [f"{parent}/{name}" if parent else name for name in found]
        if found and (_EPISODE.fullmatch(found[0]) or _has_actions(path, file, whole[0])):
            return _Groups(parent, whole)
    return _Groups("", [""])


def _has_actions(path: Path, file: h5py.File, group: str) -> bool:
    """Whether a numbered group is an episode, and no camera or joint."""
    found = member(path, file, group)
    return isinstance(found, h5py.Group) and any("action" in name for name, _ in arrays_in(path, found))


def _check_one_episode(where: str, file: h5py.File, n: int) -> None:
    """Raise DataError where the arrays of a file hold several episodes, one after the other."""
    for name in (*_TERMINATIONS, "truncations", "truncated", "done", "dones", "terminals", "timeouts"):
        ended = array(where, file, name).reshape(-1) if name in names(file) else np.zeros(0)
        if len(ended) == n and ended[:-1].any():
            raise DataError(
                f"{where}: {name} is true on row {int(ended.argmax())} of {n}: its arrays hold several episodes. Write "
                "a group for each (episode_0, ...), or D4RL's names (observations, actions, rewards, terminals)"
            )


def _group(where: object, file: h5py.File, place: _Place) -> h5py.Group:
    return group_of(where, file, place.group) if place.group else file


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


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / _MINARI).is_file():
        return [path / _MINARI]
    return sorted_files(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def has_episode_groups(path: Path) -> bool:
    """Return whether `path` is a file, or a folder whose first one is, with a group for each episode."""
    files = _files(path)
    return bool(files) and looks_like(files[0], lambda file: bool(_episodes_in(files[0], file).names[0]))


FORMAT = Format("fields", has_episode_groups, Hdf5Fields)
