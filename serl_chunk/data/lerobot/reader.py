"""A LeRobot data set as episodes: ours exactly as they were, those of lerobot as far as they are recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from serl_chunk.data.lerobot.index import EpisodePlace, Index, read_index
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
    success_step,
)

TOLERANCE_S = 1e-4  # lerobot's own: a time stamp that is as near to its place at the rate is taken to be there


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
        keys = list(self.index.episodes)
        return take_fraction(kept(keys, self.labels, self._recorded), self.options.proportion)

    def read(self, key: str) -> Episode:
        """See Source. An episode that is not ours ends as by `_ended`."""
        episode, label = self._recorded(key), self.labels.get(key)
        return episode if label is None else label.applied(f"{self.path}: {key}", episode)

    def _recorded(self, key: str) -> Episode:
        place = self.index.episodes[key]
        where = f"{self.path}: episode {place.number}"
        if not place.file.is_file():
            raise DataError(f"{where}: no file {place.file}; the data set is not complete")
        validate.check_pointer(place.file)
        with reading(f"{where}: {place.file} is truncated, damaged or not Parquet"):
            version = FileVersion.of(place.file)
            columns, groups = self._read_columns(where, place)
        self._check_order(where, place, columns)
        seconds, stamps, tolerance = self._times(where, columns, place.length)
        steps = self._steps(where, columns, stamps)
        for camera, feature in self.cameras.items():
            shape = _image_shape(where, feature, self.index.features[feature])
            frames: Frames
            if feature in self.index.videos:
                if feature not in place.videos:
                    raise DataError(
                        f"{where}: the table of episodes lacks videos/{feature}/from_timestamp, chunk_index or "
                        "file_index. Leave it out of cameras"
                    )
                video, start = place.videos[feature]
                if not video.is_file():
                    raise DataError(f"{where}: no video {video}. Leave it out of cameras")
                validate.check_pointer(video)
                slack = float(np.spacing(np.float32(start + seconds[-1])))
                frames = VideoFrames(video, FileVersion.of(video), shape, start + seconds, tolerance + slack, where)
            else:
                rows = np.arange(place.first, place.first + place.length)
                frames = ParquetFrames(place.file, version, feature, shape, rows, groups, where)
            steps.sparse[IMAGE_PREFIX + camera] = SparseRows(np.arange(place.length, dtype=np.int32), frames)
        task = self._task(where, columns)
        if self.ours:
            row = self._sidecar(where, place.number)
            episode = sidecar.restored(where, row, task, steps, set(self.cameras))
        else:
            # Each data set has an episode_000000.
            episode_id = f"{key}-{validate.content_id(steps.observation[STATE], steps.action)}"
            steps = dataclasses.replace(steps, episode_id=episode_id)
            reward, success = self.fields.reward, self.fields.success
            succeeded = columns[success][:, 0] if success in columns else None
            episode = _ended(where, Begin(episode_id, task=task), steps, succeeded, bool(reward), self.options)
            check_order(where, self.fields, self.column_names(), episode, self.options.spec)
        validate.check_episode(where, episode, self.options.spec)
        return episode

    def column_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the numbers of a state and of an action, by info.json, which may be wrong."""
        arrays = _arrays(self.index)
        return column_names(self.fields.state, arrays), column_names(self.fields.action, arrays)

    def notes(self) -> list[str]:
        notes = label_notes(self.labels) + self.index.notes + self._notes_on_rows()
        if self.ours:
            return notes
        kinds = {name: str(feature.get("dtype")) for name, feature in self.index.features.items()}
        texts = {name for name, kind in kinds.items() if "string" in kind}
        features = kinds.keys() - texts
        if self.fields.convention != "LeRobot":
            by = f"as in {self.fields.convention}" if self.fields.convention else "by the table"
            notes.append(f"the state is {' + '.join(part.text for part in self.fields.state)}, {by}")
        if not self.fields.success and self.options.success is None:
            if self.fields.reward:
                notes.append("no column next.success: episodes that end with a reward that marks one are successes")
            else:
                notes.append("no outcome is recorded: episodes are unfinished ones; success or failure sets it")
        if not any(name in features for name in (ds.INTERVENTION, ds.EXTRA + "source")):
            notes.append("the source of actions is not recorded: all steps are taken for a human's")
        images = {name for name, kind in kinds.items() if kind in ("image", "video")}
        left = texts | features - images - {*ds.READ, ds.DONE, *self.fields.names()}
        return notes + [f"{name} is not read" for name in sorted(left)]

    def departures(self) -> list[str]:
        """List where the data set departs from lerobot's conventions, and what lerobot would do. Reads all rows."""
        lengths = [place.length for place in self.index.episodes.values()]
        start = dict(zip(self.index.episodes, np.cumsum([0, *lengths]).tolist(), strict=False))
        found: dict[str, str] = {}  # by column: the first
        for place, columns in self._rows(ds.AUTOMATIC[:-1]):
            ticks = np.arange(place.length)
            expected: dict[str, np.ndarray] = {ds.EPISODE_INDEX: 0 * ticks + place.number, ds.FRAME_INDEX: ticks}
            expected[ds.INDEX] = ticks + start[f"episode_{place.number:06d}"]
            if self.index.fps:
                expected[ds.TIMESTAMP] = ticks / self.index.fps
            for name in expected.keys() & columns.keys() - found.keys():
                values = columns[name][:, 0]
                tolerance = TOLERANCE_S + np.spacing(np.float32(values[-1])) if name == ds.TIMESTAMP else 0
                if (t := validate.first_true(np.abs(values - expected[name]) > tolerance)) is not None:
                    text = f"{place.file}: episode {place.number}, step {t}: {name} is {values[t]:g}"
                    found[name] = f"{text}, lerobot expects {expected[name][t]:g}"
        return [*self.index.departures, *found.values()]

    def _rows(self, names: Sequence[str]) -> Iterator[tuple[EpisodePlace, dict[str, np.ndarray]]]:
        """Yield every episode that is read with its rows of those columns `names` that its file has, [T, D] each.

        Ends at the first that cannot be read: `read` raises with it.
        """
        with contextlib.suppress(DataError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            read = [self.index.episodes[key] for key in self.keys()]
            for file, places in itertools.groupby(read, lambda place: place.file):
                there = set(pq.read_schema(str(file)).names)
                table = pq.read_table(str(file), columns=[name for name in names if name in there])
                for place in places:
                    part = table.slice(place.first, place.length)
                    yield place, {name: matrix(name, part.column(name)) for name in part.column_names}

    def _notes_on_rows(self) -> list[str]:
        """Times off the rate, and guesses and additions of `_ended`, over the episodes that are read."""
        fps = self.index.fps
        success, reward = ("", "") if self.ours else (self.fields.success, self.fields.reward)
        counted = bool(success or (reward and self.options.success))
        unknown = lacking = untimed = 0
        farthest = 0.0, ""
        for place, columns in self._rows((ds.TIMESTAMP, ds.FRAME_INDEX, *(n for n in (success, reward) if n))):
            seconds, stamps = self._clock(columns, place.length)
            if stamps is None and ds.TIMESTAMP in columns:
                untimed += not np.allclose(columns[ds.TIMESTAMP][:, 0], seconds, rtol=1e-6, atol=1e-3)
            elif stamps is not None and fps:
                off = np.abs(stamps - seconds)
                farthest = max(farthest, (float(off.max()), f"episode {place.number}, step {int(off.argmax())}"))
            if counted:
                part = {name: columns[name][:, 0] for name in (success, reward) if name in columns}
                outcome = _outcome(part.get(success), part.get(reward), self.options)
                unknown += outcome is Outcome.UNKNOWN
                lacking += reward in part and _lacks_reward(outcome, part[reward])
        notes = []
        if untimed:
            notes.append(
                f"{untimed} episodes have time stamps that are not seconds (all equal, rounded, or of another unit): "
                "their steps are one period apart"
            )
        if farthest[0]:
            far, unit = (1e3 * farthest[0], "ms") if farthest[0] < 1 else (farthest[0], "s")
            notes.append(
                f"time stamps are up to {far:.3g} {unit} off {fps:g} steps a second ({farthest[1]}): steps keep their "
                "recorded times"
            )
        if unknown:
            notes.append(
                f"{unknown} episodes without a true {ds.SUCCESS}, which may be failures or not: they are unfinished "
                "ones; failure reads them as failures"
            )
        if lacking:
            notes.append(f"{lacking} successes had no reward of 1 or more: their last step has 1")
        return notes

    def _check_order(self, where: str, place: EpisodePlace, columns: dict[str, np.ndarray]) -> None:
        """Raise DataError where rows are of another episode than the table says, or out of order."""
        names = (ds.FRAME_INDEX,) if self.index.v2 else (ds.EPISODE_INDEX, ds.FRAME_INDEX)  # v2: by the file's name
        for name in (name for name in names if name in columns):
            values = columns[name][:, 0]
            bad = values != place.number if name == ds.EPISODE_INDEX else np.diff(values, prepend=values[0] - 1) < 1
            if (t := validate.first_true(bad)) is not None:
                expected = place.number if name == ds.EPISODE_INDEX else f"above {values[t - 1]}"
                raise DataError(
                    f"{where}, step {t}: {name} is {values[t]} (expected {expected}), in {place.file}: its rows are "
                    "out of order, or the table of episodes is of other data. Sort the rows by index"
                )

    def _read_columns(self, where: str, place: EpisodePlace) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The columns that are used, [T, D] each, and the first row of each of the file's row groups."""
        with pq.ParquetFile(str(place.file)) as file:
            needed = [
                *(part.name for part in (*self.fields.state, *self.fields.action)),
                *(n for n in self.cameras.values() if n not in self.index.videos),
            ]
            if absent := [name for name in needed if name not in file.schema_arrow.names]:
                raise DataError(f"{where}: {place.file} has no column {', '.join(absent)}. Write the data set again")
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            if self.index.v2 and starts[-1] != place.length:
                raise DataError(
                    f"{where}: {place.file} has {int(starts[-1])} rows, meta/episodes.jsonl has {place.length}"
                )
            used = [name for name in (*ds.READ, *self.fields.names()) if name in file.schema_arrow.names]
            numeric = [name for name in used if not _is_text(file.schema_arrow.field(name).type)]
            used = list(dict.fromkeys(name for name in used if name in needed or name in numeric))
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

    def _clock(self, columns: dict[str, np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Times of an episode's `n` frames in its videos, and of its steps where these are not a period apart.

        Both float64[n]. A frame's place in the video is that of its number at the rate.
        """
        frame = columns[ds.FRAME_INDEX][:, 0] if ds.FRAME_INDEX in columns else np.arange(n)
        at = columns[ds.TIMESTAMP][:, 0].astype(np.float64) if ds.TIMESTAMP in columns else None
        if at is not None and n > 1:
            # Never set, dates in a float32, or in another unit: they tell no step from the next.
            period = float(np.median(np.diff(at)))
            if (at == at[0]).all() or (self.index.fps and not 0.1 < period * self.index.fps < 10):
                at = None
        hz = self.index.fps or (self.hz if at is None else None)
        if hz is None:
            return (np.zeros(n), None) if at is None else (at, None if self.hz else at)
        places = frame / hz
        tolerance = TOLERANCE_S + np.spacing(places.astype(np.float32))  # they are stored as float32
        if at is None or (np.abs(at - places) <= tolerance).all():
            return places, None if (np.diff(frame) == 1).all() else places
        return places, at

    def _times(self, where: str, columns: dict[str, np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray | None, float]:
        """`_clock`, checked, and the seconds by which a frame may be off its place in a video."""
        seconds, stamps = self._clock(columns, n)
        if ds.TIMESTAMP in columns:
            validate.check_times(where, columns[ds.TIMESTAMP][:, 0])
        hz = self.index.fps or self.hz
        if not any(name in self.index.videos for name in self.cameras.values()):
            return seconds, stamps, 0.0
        if n > 1 and not seconds.any():
            raise DataError(
                f"{where}: without a column {ds.TIMESTAMP} and fps in meta/info.json the frames of a video belong "
                "to unknown steps. Set hz, or leave the videos out of cameras"
            )
        half = 0.5 / hz if hz else float(np.median(np.diff(seconds))) / 2 if n > 1 else TOLERANCE_S
        limit = half if self.options.tolerance_s is None else self.options.tolerance_s
        if stamps is not None and (t := validate.first_true(np.abs(stamps - seconds) > limit)) is not None:
            raise DataError(
                f"{where}, step {t}: timestamp is {stamps[t]:.6f} s, its frame of the video is at {seconds[t]:.6f} s, "
                f"more than {limit:.3g} s away. Raise tolerance_s to take the frames by their numbers, correct the "
                "timestamps or fps in meta/info.json, or leave the videos out of cameras"
            )
        return seconds, stamps, limit

    def _steps(self, where: str, columns: dict[str, np.ndarray], stamps: np.ndarray | None) -> StepBlock:
        human = columns.get(ds.INTERVENTION)
        source = Source.HUMAN if human is None else np.where(human[:, 0] > 0, Source.HUMAN, Source.POLICY)
        extra = {name: columns[ds.EXTRA + name][:, 0] for name in ds.EXTRA_COLUMNS if ds.EXTRA + name in columns}
        extra = ({} if stamps is None else {"stamp": stamps}) | extra
        given: dict[str, Any] = {"source": source, "lost_ticks": 0} | extra
        if "stamp" in extra and self.hz:
            # LeRobot has no place for gaps; they follow from the times at which the robot's ticks began.
            late = np.diff(extra["stamp"], prepend=extra["stamp"][:1] - 1 / self.hz) - 1 / self.hz
            # The tick before may have begun late itself, by less than a period: that much is not seen here.
            gap = late > gap_tolerance(1 / self.hz) - 1 / self.hz
            given["lost_ticks"] = np.where(gap, np.maximum(1, np.round(late * self.hz)), 0)
        given["reward"] = columns[self.fields.reward][:, 0] if self.fields.reward in columns else 0
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
            if self.index.tasks and number not in self.index.tasks:
                raise DataError(
                    f"{where}: task_index is {number}, the tasks are {', '.join(map(str, self.index.tasks))}"
                )
            texts.append(self.index.tasks.get(number, ""))
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
    or more that marks one. Only `options.success` False makes a failure of a column that is nowhere true.
    """
    if success is not None and (success > 0).any():
        return Outcome.SUCCESS
    if options.success is False:
        return Outcome.FAILURE
    rewarded = reward is not None and reward[-1] >= 1 and success_step(reward) is not None
    if success is None and (options.success or rewarded):
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
    index = read_index(path, skip_bad=options.skip_bad)
    fields = resolve(
        path / ds.INFO, table_of(options.fields, path), _arrays(index), options.flag("fields"), options.spec
    )
    found = dict(fields.cameras or ())
    for camera, feature in sorted(found.items()) if options.cameras is None else ():
        if not _in_color(feature, index.features[feature]):
            index.notes.append(f"{feature} is not read: {index.features[feature].get('shape')} is no image in colour")
            del found[camera]
    cameras = {c: found[c] for c in validate.choose_cameras(path, sorted(found), options.cameras)}
    hz = options.rate(index.fps, path / ds.INFO)
    labels = read_labels(path) if options.labels else {}
    return LeRobotSource(path, options, index, fields, cameras, (path / ds.SIDE).exists(), hz, labels)


def _arrays(index: Index) -> dict[str, ArrayInfo]:
    out: dict[str, ArrayInfo] = {}
    rows = next(iter(index.episodes.values())).length
    for name, feature in index.features.items():
        dtype, sizes = str(feature.get("dtype")), feature.get("shape")
        known = isinstance(sizes, list) and all(type(size) is int for size in sizes)
        shape = tuple(sizes) if known and sizes else (1,)
        image = dtype in ("image", "video")
        if image or "string" not in dtype:
            given = feature.get("names")
            given = next(iter(given.values()), None) if isinstance(given, dict) else given
            named = tuple(map(str, given)) if isinstance(given, list) and not image else ()
            size = () if shape == (1,) else shape
            out[name] = ArrayInfo(dtype, (rows, *size), image, named)
    return out


def _is_text(kind: Any) -> bool:
    """Whether a column of this type cannot hold numbers."""
    types = pa.types
    return any(of(kind) for of in (types.is_string, types.is_large_string, types.is_binary, types.is_struct))


def _in_color(name: str, feature: dict[str, Any]) -> bool:
    about = feature.get("info")
    with contextlib.suppress(DataError):
        _image_shape("", name, feature)
        return not (isinstance(about, dict) and (about.get("video.is_depth_map") or about.get("is_depth_map")))
    return False


def _image_shape(where: str, name: str, feature: dict[str, Any]) -> tuple[int, int, int]:
    """[H, W, 3] from info.json, which may have the channels first."""
    sizes, axes = feature.get("shape"), feature.get("names")
    shape = sizes if isinstance(sizes, list) and all(type(size) is int for size in sizes) else []
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
