"""A LeRobot data set as episodes: ours exactly as they were, those of lerobot as far as they are recorded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data import validate
from serl_chunk.data.fields import (
    ArrayInfo,
    Fields,
    absolute,
    check_order,
    column_names,
    concatenated,
    resolve,
    table_of,
)
from serl_chunk.data.frames import FileVersion, Frames
from serl_chunk.data.labels import Label, kept, label_notes, read_labels
from serl_chunk.data.lerobot import dataset_layout as ds
from serl_chunk.data.lerobot import sidecar
from serl_chunk.data.lerobot.arrow import matrix, pa, pq, reading
from serl_chunk.data.lerobot.index import EpisodePlace, Index, check_columns, read_index
from serl_chunk.data.lerobot.stored_frames import ParquetFrames
from serl_chunk.data.lerobot.video import VideoFrames
from serl_chunk.data.source import Format, ReadOptions, take_fraction
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    Begin,
    DataError,
    Episode,
    Outcome,
    Source,
    SparseRows,
    StepBlock,
    gap_tolerance,
)

TOLERANCE_S = 1e-4  # lerobot's own


@dataclasses.dataclass
class LeRobotSource:
    """A `data.source.Source`; a key is `episode_<index>`."""

    path: Path
    options: ReadOptions
    index: Index
    fields: Fields
    cameras: dict[str, str]  # name -> feature, of those that are read
    ours: bool  # the sidecar table is there
    hz: float | None
    labels: Mapping[str, Label] = dataclasses.field(default_factory=dict)  # of its keys
    format: str = "lerobot"

    def keys(self) -> list[str]:
        keys = [f"episode_{i:06d}" for i in range(len(self.index.episodes))]
        return take_fraction(kept(keys, self.labels, self._recorded), self.options.proportion)

    def read(self, key: str) -> Episode:
        """See Source. An episode that is not ours ends as by `_ended`."""
        episode, label = self._recorded(key), self.labels.get(key)
        return episode if label is None else label.applied(f"{self.path}: {key}", episode)

    def _recorded(self, key: str) -> Episode:
        number = int(key.removeprefix("episode_"))
        where = f"{self.path}: episode {number}"
        place = self.index.episodes[number]
        if not place.file.is_file():
            raise DataError(f"{where}: no file {place.file}; the data set is not complete")
        with reading(f"{where}: {place.file} is truncated, damaged or not Parquet"):
            version = FileVersion.of(place.file)
            columns, groups = self._read_columns(where, place)
        _check_order(where, number, place, columns)
        seconds = self._seconds(where, columns, place.length)
        steps = self._steps(where, columns)
        for camera, feature in self.cameras.items():
            shape = _image_shape(where, feature, self.index.features[feature])
            frames: Frames
            if self.index.features[feature]["dtype"] == "video":
                video, start = place.videos[feature]
                if not video.is_file():
                    raise DataError(f"{where}: no video {video}. Leave it out of cameras")
                tolerance = TOLERANCE_S + float(np.spacing(np.float32(start + seconds[-1])))
                frames = VideoFrames(video, FileVersion.of(video), shape, start + seconds, tolerance, where)
            else:
                rows = np.arange(place.first, place.first + place.length)
                frames = ParquetFrames(place.file, version, feature, shape, rows, groups, where)
            steps.sparse[IMAGE_PREFIX + camera] = SparseRows(np.arange(place.length, dtype=np.int32), frames)
        task = self._task(where, columns)
        if self.ours:
            episode = sidecar.restored(where, self._sidecar(where, number), task, steps, set(self.cameras))
        else:
            # Each data set has an episode_000000.
            episode_id = f"{key}-{validate.content_id(steps.observation[STATE], steps.action)}"
            steps = dataclasses.replace(steps, episode_id=episode_id)
            reward, success = self.fields.reward, self.fields.success
            succeeded = columns[success][:, 0] if success else None
            episode = _ended(where, Begin(episode_id, task=task), steps, succeeded, bool(reward), self.options)
            check_order(where, self.fields, self.column_names(), episode, self.options.spec)
        validate.check_episode(where, episode, self.options.spec)
        return episode

    def column_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the numbers of a state and of an action."""
        arrays = _arrays(self.index)
        return column_names(self.fields.state, arrays), column_names(self.fields.action, arrays)

    def notes(self) -> list[str]:
        notes = label_notes(self.labels)
        if self.ours:
            return notes
        features = self.index.features
        if self.fields.convention != "LeRobot":
            by = f"as in {self.fields.convention}" if self.fields.convention else "by the table"
            notes.append(f"the state is {' + '.join(part.text for part in self.fields.state)}, {by}")
        if not self.fields.success and self.options.success is None:
            if self.fields.reward:
                notes.append("no column next.success: episodes that end with a reward of 1 or more count as successes")
            else:
                notes.append("no outcome is recorded: episodes are unfinished ones; success or failure sets it")
        if not any(name in features for name in (ds.INTERVENTION, ds.EXTRA + "source")):
            notes.append("the source of actions is not recorded: all steps are taken for a human's")
        notes += self._notes_on_outcomes()
        used = {*ds.READ, ds.DONE, *self.fields.names()}
        left = [n for n, f in features.items() if n not in used and f["dtype"] not in ("image", "video")]
        return notes + [f"{name} is not read" for name in sorted(left)]

    def _notes_on_outcomes(self) -> list[str]:
        """Guesses and additions of `_ended`, counted over the episodes that are read."""
        success, reward = self.fields.success, self.fields.reward
        if not success and not (reward and self.options.success):
            return []
        wanted = [name for name in (success, reward) if name]
        unknown = lacking = 0
        try:
            read = [self.index.episodes[int(key.removeprefix("episode_"))] for key in self.keys()]
            for file, places in itertools.groupby(read, lambda place: place.file):
                table = pq.read_table(str(file), columns=wanted)
                columns = {name: matrix(name, table.column(name))[:, 0] for name in wanted}
                for place in places:
                    part = {name: c[place.first : place.first + place.length] for name, c in columns.items()}
                    outcome = _outcome(part.get(success), part.get(reward), self.options)
                    unknown += outcome is Outcome.UNKNOWN
                    lacking += reward in part and _lacks_reward(outcome, part[reward])
        except (DataError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            return []  # `read` raises with the episode
        notes = []
        if unknown:
            notes.append(
                f"{unknown} episodes without a true {ds.SUCCESS}, which may be failures or not: they are unfinished "
                "ones; failure reads them as failures"
            )
        if lacking:
            notes.append(f"{lacking} successes had no reward of 1 or more: their last step has 1")
        return notes

    def _read_columns(self, where: str, place: EpisodePlace) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The columns that are used, [T, D] each, and the first row of each of the file's row groups."""
        with pq.ParquetFile(str(place.file)) as file:
            check_columns(place.file, file.schema_arrow, self.index.features)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            if self.index.version == ds.V21 and starts[-1] != place.length:
                raise DataError(
                    f"{where}: {place.file} has {int(starts[-1])} rows, meta/episodes.jsonl has {place.length}"
                )
            wanted = dict.fromkeys((*ds.READ, *self.fields.names()))
            used = [name for name in wanted if name in file.schema_arrow.names]
            first = int(np.searchsorted(starts, place.first, side="right")) - 1
            last = int(np.searchsorted(starts, place.first + place.length, side="left"))
            table = file.read_row_groups(list(range(first, last)), columns=used)
        table = table.slice(place.first - int(starts[first]), place.length)
        return {name: self._numbers(where, place, name, table.column(name)) for name in used}, starts[:-1]

    def _numbers(self, where: str, place: EpisodePlace, name: str, column: Any) -> np.ndarray:
        """[T, D] of a column; raises DataError where it does not fit info.json."""
        if column.null_count:
            step = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise DataError(f"{where}, step {step}: {name} has no value")
        values = matrix(f"{where}: {name}, in {place.file},", column, place.first)
        shape = tuple(self.index.features[name].get("shape") or (values.shape[1],))
        if values.dtype.kind not in "biuf" or len(shape) != 1 or values.shape[1] != shape[0]:
            raise DataError(
                f"{where}: {name} holds {values.dtype}[{values.shape[1]}] a row (expected a vector of numbers of "
                f"{list(shape)}, as in meta/info.json)"
            )
        validate.check_finite(where, name, values, "step", "Leave the episode out or record it again")
        return values

    def _seconds(self, where: str, columns: dict[str, np.ndarray], n: int) -> np.ndarray:
        """float64[T], checked against the rate: both must agree, or frames of videos are others than lerobot's."""
        at = columns[ds.TIMESTAMP][:, 0].astype(np.float64) if ds.TIMESTAMP in columns else None
        hz = self.index.fps
        if at is None:
            hz = hz or self.hz
            if hz is None and any(self.index.features[name]["dtype"] == "video" for name in self.cameras.values()):
                raise DataError(
                    f"{where}: without a column {ds.TIMESTAMP} and fps in meta/info.json the frames of a video belong "
                    "to unknown steps. Set hz, or leave the videos out of cameras"
                )
            return np.arange(n) / hz if hz else np.zeros(n)
        if hz is None:
            return at
        expected = np.arange(n) / hz
        tolerance = TOLERANCE_S + np.spacing(expected.astype(np.float32))  # they are stored as float32
        if (t := validate.first_true(~(np.abs(at - expected) <= tolerance))) is not None:
            raise DataError(
                f"{where}, step {t}: timestamp is {at[t]:.6f} s (expected {expected[t]:.6f} s at {hz:g} steps a "
                f"second, within {TOLERANCE_S:g} s). Correct the timestamps, or fps in meta/info.json"
            )
        return expected

    def _steps(self, where: str, columns: dict[str, np.ndarray]) -> StepBlock:
        human = columns.get(ds.INTERVENTION)
        source = Source.HUMAN if human is None else np.where(human[:, 0] > 0, Source.HUMAN, Source.POLICY)
        extra = {name: columns[ds.EXTRA + name][:, 0] for name in ds.EXTRA_COLUMNS if ds.EXTRA + name in columns}
        given: dict[str, Any] = {"source": source, "lost_ticks": 0} | extra
        if "stamp" in extra and self.hz:
            # LeRobot has no place for gaps; they follow from the times at which the robot's ticks began.
            late = np.diff(extra["stamp"], prepend=extra["stamp"][:1] - 1 / self.hz) - 1 / self.hz
            # The tick before may have begun late itself, by less than a period: that much is not seen here.
            gap = late > gap_tolerance(1 / self.hz) - 1 / self.hz
            given["lost_ticks"] = np.where(gap, np.maximum(1, np.round(late * self.hz)), 0)
        given["reward"] = columns[self.fields.reward][:, 0] if self.fields.reward else 0
        state = concatenated(self.fields.state, columns.__getitem__)
        action = concatenated(self.fields.action, columns.__getitem__)
        action = absolute(where, self.fields, state, action, self.options.spec)
        return validate.make_steps("", state, action, self.hz, **given)

    def _task(self, where: str, columns: dict[str, np.ndarray]) -> str:
        if ds.TASK_INDEX not in columns:
            return self.options.task
        texts = []
        # An episode of ours has one text: where the steps have several (parts of a task), all of them in their order.
        for number in dict.fromkeys(map(int, columns[ds.TASK_INDEX][:, 0])):
            if not 0 <= number < len(self.index.tasks):
                raise DataError(f"{where}: task_index is {number}, there are {len(self.index.tasks)} tasks, from 0 on")
            texts.append(self.index.tasks[number])
        return "; ".join(t for t in texts if t) or self.options.task

    def _sidecar(self, where: str, number: int) -> dict[str, Any]:
        path = self.path / ds.SIDE
        with reading(f"{where}: {path} is damaged, or of other episodes", f". {sidecar.REMEDY}"):
            with pq.ParquetFile(str(path)) as file:
                group, row = divmod(number, sidecar.GROUP)
                found: dict[str, Any] = file.read_row_group(group).slice(row, 1).to_pylist()[0]
            if found[ds.EPISODE_INDEX] != number:
                raise LookupError(f"row {number} is of episode {found[ds.EPISODE_INDEX]}")
        return found


def _outcome(success: np.ndarray | None, reward: np.ndarray | None, options: ReadOptions) -> Outcome:
    """A success is a true `next.success` [T] on any row; without that column, `options.success`, or a last reward of 1
    or more. Only `options.success` False makes a failure of a column that is nowhere true.
    """
    if success is not None and (success > 0).any():
        return Outcome.SUCCESS
    if options.success is False:
        return Outcome.FAILURE
    if success is None and (options.success or (reward is not None and reward[-1] >= 1)):
        return Outcome.SUCCESS
    return Outcome.UNKNOWN


def _lacks_reward(outcome: Outcome, reward: np.ndarray) -> bool:
    return outcome is Outcome.SUCCESS and not (reward >= 1).any()


def _ended(
    where: str, begin: Begin, steps: StepBlock, success: np.ndarray | None, has_reward: bool, options: ReadOptions
) -> Episode:
    """The episode of `steps`, of T rows, with the `_outcome`, `validate.finished` where that is known.

    The last reward is the larger of the last two, and 1 where a success has no reward of 1 on any row; of data without
    rewards it is 1 for success, 0 for failure.
    """
    n = steps.n
    outcome = _outcome(success, steps.reward if has_reward else None, options)
    if outcome is Outcome.UNKNOWN:
        if options.reward_every_step and not has_reward:
            reason = "the data set records no outcome. Set success or failure"
            if success is not None:
                reason = f"{ds.SUCCESS} is nowhere true, which may be a failure or not. Set failure if it is"
            raise DataError(f"{where}: no reward to give on every step: {reason}")
        return validate.unfinished(begin, steps)
    reward = steps.reward.copy()
    end = max(n - 2, 0)  # the last row is left out
    if has_reward:
        if outcome is Outcome.FAILURE and (reward >= 1).any():
            t = int(np.argmax(reward >= 1))
            raise DataError(
                f"{where}, step {t}: a reward of {reward[t]:g} in an episode that failure makes a failure. Leave "
                "failure out, or correct the rewards"
            )
        reward[end] = max(reward[end], reward[-1])  # a success may lie before the last row
        if _lacks_reward(outcome, reward):
            reward[end] = 1.0  # else a critic would learn that success has no value
    else:
        reward[0 if options.reward_every_step else end :] = float(outcome is Outcome.SUCCESS)
    return validate.finished(where, begin, steps, steps.observation_at(n - 1), reward, outcome)


def open_lerobot(path: Path, options: ReadOptions) -> LeRobotSource:
    """See `data.source.Format`."""
    index = read_index(path)
    fields = resolve(
        path / ds.INFO, table_of(options.fields, path), _arrays(index), options.flag("fields"), options.spec
    )
    found = dict(fields.cameras or ())
    cameras = {c: found[c] for c in validate.choose_cameras(path, sorted(found), options.cameras)}
    hz = options.rate(index.fps, path / ds.INFO)
    labels = read_labels(path) if options.labels else {}
    return LeRobotSource(path, options, index, fields, cameras, (path / ds.SIDE).exists(), hz, labels)


def _arrays(index: Index) -> dict[str, ArrayInfo]:
    out: dict[str, ArrayInfo] = {}
    for name, feature in index.features.items():
        dtype, shape = str(feature["dtype"]), tuple(feature.get("shape") or (1,))
        image = dtype in ("image", "video")
        if image or dtype != "string":
            given = feature.get("names")
            given = next(iter(given.values()), None) if isinstance(given, dict) else given
            named = tuple(map(str, given)) if isinstance(given, list) and not image else ()
            size = () if shape == (1,) else shape
            out[name] = ArrayInfo(dtype, (index.episodes[0].length, *size), image, named)
    return out


def _check_order(where: str, number: int, place: EpisodePlace, columns: dict[str, np.ndarray]) -> None:
    n = place.length
    index = np.arange(place.from_index, place.from_index + n)
    wanted = {ds.EPISODE_INDEX: np.full(n, number), ds.FRAME_INDEX: np.arange(n), ds.INDEX: index}
    for name, values in wanted.items():
        if name in columns and (t := validate.first_true(columns[name][:, 0] != values)) is not None:
            raise DataError(
                f"{where}, step {t}: {name} is {columns[name][t, 0]} (expected {values[t]}), in {place.file}: its rows "
                "are out of order, or the table of episodes is of other data. Sort the rows by index"
            )


def _image_shape(where: str, name: str, feature: dict[str, Any]) -> tuple[int, int, int]:
    """[H, W, 3] from info.json, which may have the channels first."""
    shape, axes = list(feature.get("shape") or ()), feature.get("names")
    axes = axes if isinstance(axes, list) else None  # a mapping does not give their order
    if len(shape) == 3 and ((axes and str(axes[0]).startswith("channel")) or (not axes and shape[2] != 3)):
        shape = [shape[1], shape[2], shape[0]]
    if len(shape) != 3 or shape[2] != 3:
        raise DataError(
            f"{where}: {name} has the shape {feature.get('shape')} (expected [H, W, 3]). Leave it out of cameras"
        )
    return shape[0], shape[1], 3


def _matches(path: Path) -> bool:
    return (path / ds.INFO).is_file()


FORMAT = Format("lerobot", _matches, open_lerobot)
