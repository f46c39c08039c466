"""OGBench's data sets: .npz files of `observations`, `actions` and `terminals`, and folders of such shards.

A trajectory of T steps has T + 1 rows: the last one, where `terminals` is 1, holds the state after step T - 1, and an
action without effect. It becomes T steps and a final observation.

Data sets have no rewards. With `ReadOptions.env`, OGBench labels the states that solve this task; files that were
relabelled before have `rewards` and mostly `masks`. Either way an episode ends with reward 1 at the step that reaches a
success, and the trajectory goes on as the next episode (`cut_at_successes`). Before that a step has
reward 0, or with `env_reward="dense"` 1 minus the parts of the task that are still to be done after it. Without a task
a trajectory is one episode with rewards of 0 and an unknown outcome.

Published results of Q-chunking use -1 until success and 0 from then on, which `reward.offset=-1` gives
(docs/benchmarks.md). Both are equivalent: with the discount g, a state k steps before success has the value
v = g^(k - 1) here and (g v - 1) / (1 - g) there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk import extras
from serl_chunk.data.formats.hdf5_io import ERRORS, FLOOR, MAX_RATIO, file_faults
from serl_chunk.data.source import Format, ReadOptions, sorted_files, take_fraction
from serl_chunk.data.validate import (
    Ending,
    check_columns,
    check_finite,
    check_key,
    check_pointer,
    imported_episode,
    make_steps,
)
from serl_chunk.io import plural
from serl_chunk.types import STATE, ConfigError, DataError, Episode, Outcome, Source

_DAMAGED = (*ERRORS, EOFError, zipfile.BadZipFile, zlib.error)
_EXAMPLE = "cube-single-play-singletask-task1-v0"
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def headers(path: Path) -> dict[str, _Header]:
    """Return the headers of all arrays in the file, without reading these. Raises DataError where one is unsafe."""
    out = {}
    with _errors(path), zipfile.ZipFile(path) as file:
        for member in file.infolist():
            if not member.filename.endswith(".npy"):
                continue
            name = member.filename.removesuffix(".npy")
            if member.file_size > MAX_RATIO * max(member.compress_size, FLOOR):
                raise DataError(
                    f"{path}: {name} declares {member.file_size} bytes, {member.compress_size} are stored: it was "
                    "made to fill this machine's memory. Leave the file out"
                )
            with file.open(member) as data:
                version = np.lib.format.read_magic(data)  # type: ignore[arg-type]
                if version not in _READ_HEADER:
                    raise DataError(f"{path}: {name} is in version {version[0]}.{version[1]} of numpy's format")
                shape, _, dtype = _READ_HEADER[version](data)  # type: ignore[arg-type]
                start = data.tell()
            if dtype.hasobject:
                raise DataError(f"{path}: {name} is an array of objects, a pickle that could run code: not read")
            if member.file_size != start + math.prod(shape) * dtype.itemsize:
                raise DataError(f"{path}: {name} does not have the size in its header. Download the file again")
            out[name] = _Header(shape, dtype)
    return out


def load(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read the arrays `names`, read-only; check their `headers` first. Raises DataError."""
    with _errors(path), np.load(path, allow_pickle=False) as file:
        # By its whole name: numpy prefers a member without the suffix, whose header was not checked.
        arrays: dict[str, np.ndarray] = {name: file[f"{name}.npy"] for name in names}
    for name, array in arrays.items():
        array.flags.writeable = False
        if name != "button_states":
            check_finite(path, name, array, "row", "Download the file again or leave it out")
    return arrays


def _errors(path: Path) -> contextlib.AbstractContextManager[None]:
    check_pointer(path)
    return file_faults(path, "not a whole .npz file", "Download the file again", errors=_DAMAGED)


class Segment(NamedTuple):
    """Steps `start <= t < stop` of a trajectory as an episode; `success`: its last step reached success."""

    start: int
    stop: int
    success: bool


def cut_at_successes(success: np.ndarray, *, keep_solved: bool = False) -> list[Segment]:
    """Cut a trajectory that goes on after successes into episodes that end with the first step into one.

    Steps that begin in a success belong to no episode, since no action counts there; with `keep_solved` those that stay
    in it are episodes of one step each, and the one that leaves it is the first of what follows.
    `success`: bool[T + 1], of the states; step t leads from state t to t + 1.
    """
    last = len(success) - 1
    bounds = itertools.pairwise([0, *(np.flatnonzero(success[1:]) + 1).tolist(), last])
    spans = ((start + int(success[start] and not keep_solved), stop) for start, stop in bounds)
    return [Segment(start, stop, bool(success[stop])) for start, stop in spans if start < stop]


class SuccessMask(NamedTuple):
    """Labels of the states of N rows."""

    success: np.ndarray  # bool[N]
    missing: np.ndarray | None  # [N], parts of the task still to be done, 0 at a success alone; None: unknown


def label_states(where: str, rewards: np.ndarray, masks: np.ndarray | None) -> SuccessMask:
    """Label the states of rows [N] by OGBench's rewards and masks.

    OGBench (1.2 and later) judges the state in which an action begins: its mask is 0 where that state is a success, and
    its reward is then 0 and negative elsewhere, minus the number of parts still to be done. Without masks the rewards
    decide; some data sets have 0 and 1 instead. Raises DataError starting with `where` where neither fits.
    """
    readings = []
    if rewards.max() <= 0:
        readings.append(-rewards)
    if np.isin(rewards, (0, 1)).all():
        readings.append(1 - rewards)
    if masks is not None:
        if not np.isin(masks, (0, 1)).all():
            raise DataError(f"{where}: masks from {masks.min():g} to {masks.max():g} (expected 0, a success, or 1)")
        success = masks == 0
    elif readings and rewards.any():  # zeros alone could be either: all solved, or none
        success = readings[0] == 0
    else:
        raise DataError(
            f"{where}: rewards from {rewards.min():g} to {rewards.max():g} do not mark the successes (expected "
            "negative and 0 at a success, or 0 and 1 at a success). Add `masks` (0 at a success), or leave `rewards` "
            "out and set env to a task"
        )
    return SuccessMask(success, next((r for r in readings if np.array_equal(r == 0, success)), None))


def relabel_for_task(where: str, task: str, arrays: dict[str, np.ndarray], width: int) -> SuccessMask:
    """Label the state of every row by OGBench's single task `task`, such as cube-single-play-singletask-task1-v0.

    `arrays` are `qpos [N, Q]` and, where the environment has buttons, `button_states [N, B]`; `width` is that of the
    observations. Raises ConfigError where `ogbench` is not installed or has no such task, and DataError where the file
    is of another environment or lacks the states to judge.
    """
    ogbench = extras.ogbench(f"{where}: env={task}, whose rewards OGBench computes,")
    if "singletask" not in task.split("-"):
        raise ConfigError(
            f"only single-task environments have rewards, got {task}. Example: {_EXAMPLE}", parameter="env"
        )
    try:
        env: Any = ogbench.make_env_and_datasets(task, env_only=True)
    except Exception as error:  # gymnasium's errors have no base of their own below Exception
        raise ConfigError(f"OGBench cannot make {task} ({error}). Example: {_EXAMPLE}", parameter="env") from error
    with contextlib.closing(env):
        shape = env.observation_space.shape
        if shape != (width,):
            raise DataError(
                f"{where}: observations have {width} values, env={task} has {[*shape]}: another environment"
            )
        rows: dict[str, np.ndarray] = dict(arrays)
        try:
            ogbench.relabel_utils.relabel_dataset(env.unwrapped.spec.id, env, rows)
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{where}: env={task} cannot judge these states ({error}). It needs qpos, and button_states where "
                f"there are buttons; the file has: {', '.join(arrays) or 'neither'}"
            ) from error
    return label_states(where, rows["rewards"], rows["masks"])


# array -> dimensions, kinds of dtype
_NEEDED = {"observations": (2, "f"), "actions": (2, "f"), "terminals": (1, "biuf")}
_LABELS = {"rewards": (1, "biuf"), "masks": (1, "biuf")}
_JUDGED = {"qpos": (2, "f"), "button_states": (2, "biuf")}
_KNOWN = _NEEDED | _LABELS | _JUDGED


class OgbenchSource:
    """Episodes of a file or folder, by file and first row; see the module. The last file's arrays stay in memory."""

    format = "ogbench"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self._options = path, options
        self.hz = options.rate()
        self._files = shard_files(path) if path.is_dir() else [path]
        self._empty = self._open = self._solved = 0
        self._labelled: bool | None = None
        self._own: int = 0  # files whose own labels are used
        self._dense: dict[int, np.ndarray] = {}  # file -> reward of the step into each row, with dense rewards
        self._held: tuple[int, dict[str, np.ndarray]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}  # other processes read for themselves

    def keys(self) -> list[str]:
        return list(self._spans)

    def lengths(self) -> list[int]:
        return [s.stop - s.start for _, s in self._spans.values()]

    def read(self, key: str) -> Episode:
        """See Source. States and actions are read-only views of the file's arrays."""
        check_key(self._spans, key, self.path)
        file, (start, stop, success) = self._spans[key]
        arrays = self._load(file)
        reward = np.zeros(stop - start, np.float32)
        final = {STATE: np.array(arrays["observations"][stop], np.float32)}
        ending = Ending(final, False, Outcome.UNKNOWN)
        if file in self._dense:
            reward = self._dense[file][start + 1 : stop + 1].copy()
        if success or (not self._labelled and self._options.success):
            reward[-1] = 1
            ending = Ending(final, True, Outcome.SUCCESS)
        elif not self._labelled and self._options.success is False:
            ending = Ending(final, True, Outcome.FAILURE)
        state, action = (arrays[name][start:stop] for name in ("observations", "actions"))
        steps = make_steps("", state, action, self.hz, reward=reward, source=Source.SCRIPTED)
        path = self._files[file]
        where, name = f"{path}, row {start}", f"{path.stem}-{start}"
        return imported_episode(where, name, steps, ending, self._options, self._options.env)

    def notes(self) -> list[str]:
        spans = self._spans.values()
        dense = self._options.env_reward == "dense"
        reward = "1 minus the parts still to be done" if dense else "1 at a success and 0 elsewhere"
        kept = self._options.solved == "keep"
        fate = "are episodes of one step, or the first of the next one if they leave it" if kept else "are left out"
        by = "the file's own labels" if self._own else f"OGBench's task {self._options.env}"
        if self._own and self._options.env:
            by += f" (it has no qpos to judge {self._options.env} by: they must be of that task)"
        shown = {
            "every action is taken for a script's (OGBench's data was collected without humans)": True,
            f"successes by {by}: {plural(sum(s.success for _, s in spans), 'episode')} of {len(spans)} ends in one; "
            f"{plural(self._solved, 'step')} that begin in a solved state {fate}; the reward is {reward} "
            f"(OGBench's own is one less{'' if dense else ', or less,'} and one step later)": self._labelled,
            "no rewards in the data: all are 0 and no outcome is known; env names a task": not self._labelled
            and self._options.success is None,
            f"{plural(self._open, 'file')} whose last trajectory has no terminal: it ends in the last row": self._open,
            f"trajectories of one row, which hold no step, left out: {self._empty}": self._empty,
            "the files record no time: all stamps are 0; hz sets it": self.hz is None,
        }
        return [note for note, show in shown.items() if show]

    @functools.cached_property
    def _spans(self) -> dict[str, tuple[int, Segment]]:
        """File and rows of the episodes by their keys. Reads the labels in every file."""
        spans = [(i, segment) for i in range(len(self._files)) for segment in self._segments(i)]
        if not spans:
            raise DataError(f"{self.path}: no trajectory has a step")
        keys = [f"{self._files[i].stem}:{s.start}" for i, s in spans]
        keys = take_fraction(keys, self._options.proportion, [s.stop - s.start for _, s in spans])
        return dict(zip(keys, spans, strict=False))

    def _segments(self, file: int) -> list[Segment]:
        path = self._files[file]
        there = _checked_headers(path)
        # The task by which the file is judged, "" for its own labels or none.
        keeps = self._options.env_if_judged and "rewards" in there and "qpos" not in there
        env = "" if keeps else self._options.env
        labels = tuple(k for k in (_JUDGED if env else _LABELS) if k in there)
        arrays = load(path, ("terminals", *labels))
        ends = np.flatnonzero(arrays["terminals"])
        n = len(arrays["terminals"])
        if not len(ends) or ends[-1] != n - 1:
            self._open += 1
            ends = np.append(ends, n - 1)
        mask = None
        if env:
            judged = {name: arrays[name] for name in labels}
            mask = relabel_for_task(str(path), env, judged, there["observations"].shape[1])
        elif "rewards" in arrays:
            mask = label_states(str(path), arrays["rewards"], arrays.get("masks"))
        self._own += mask is not None and not env
        if self._options.env_reward == "dense":
            if mask is None or mask.missing is None:
                raise DataError(
                    f"{path}: dense rewards need the parts of a task that are still to be done, which its rewards do "
                    "not give. Set env to the task"
                )
            self._dense[file] = 1 - mask.missing.astype(np.float32)
        success = np.zeros(n, bool) if mask is None else mask.success
        out = []
        for start, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True):
            self._empty += end == start
            self._solved += int(success[start:end].sum())
            cuts = cut_at_successes(success[start : end + 1], keep_solved=self._options.solved == "keep")
            out += [Segment(start + a, start + b, reached) for a, b, reached in cuts]
        if self._labelled not in (None, mask is not None):
            raise DataError(f"{path}: some files have rewards and others have none. Set env to a task")
        self._labelled = mask is not None
        return out

    def _load(self, file: int) -> dict[str, np.ndarray]:
        if self._held is None or self._held[0] != file:
            self._held = None  # first, so that there never are two
            _checked_headers(self._files[file])
            self._held = (file, load(self._files[file], ("observations", "actions")))
        return self._held[1]


def shard_files(folder: Path) -> list[Path]:
    """Return the .npz files in a folder, in their order, without validation sets (`*-val.npz`). Raises DataError."""
    files = sorted_files(p for p in folder.glob("*.npz") if p.is_file() and not p.name.endswith("-val.npz"))
    if not files:
        raise DataError(f"{folder}: no .npz file in it (*-val.npz are not read). Pass a folder of shards")
    return files


def _checked_headers(path: Path) -> dict[str, _Header]:
    """The file's arrays, if they are those of an OGBench data set of states; raises DataError before any is read."""
    there = headers(path)
    if missing := [k for k in _NEEDED if k not in there]:
        raise DataError(f"{path}: no array {' and no '.join(missing)}; it has: {', '.join(there) or 'none'}")
    for extra in ("next_observations", "valids"):
        if extra in there:
            raise DataError(
                f"{path}: it has {extra}, so its rows are not in OGBench's order. Pass the file that was downloaded or "
                "generated"
            )
    if len(there["observations"].shape) == 4:
        shape = [*there["observations"].shape]
        raise DataError(f"{path}: observations are images {shape}; visual data sets are not read")
    ndims = {name: ndim for name, (ndim, _) in _KNOWN.items()}
    n = check_columns(path, {name: header.shape for name, header in there.items()}, ndims, "terminals")
    for name, (_, kinds) in _KNOWN.items():
        if name in there and there[name].dtype.kind not in kinds:
            raise DataError(f"{path}: {name} holds {there[name].dtype}, not real numbers")
    if n < 2:
        raise DataError(f"{path}: {plural(n, 'row')}; a trajectory has two or more")
    return there


def _matches(path: Path) -> bool:
    try:
        if path.is_dir():
            first = min((p for p in path.glob("*.npz") if p.is_file()), default=None)
            return first is not None and _matches(first)
        with zipfile.ZipFile(path) as file:
            return {f"{k}.npy" for k in _NEEDED} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


FORMAT = Format("ogbench", _matches, OgbenchSource)
