"""A LeRobot data set as episodes: ours exactly as they were, those of lerobot and others as far as they say."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.formats.hdf5_frames import FileVersion
from serl_chunk.data.frames import Frames
from serl_chunk.data.lerobot import dataset_layout, sidecar
from serl_chunk.data.lerobot.arrow import pa, pq
from serl_chunk.data.lerobot.index import EpisodePlace, Index, check_columns, read_index
from serl_chunk.data.lerobot.metadata import matrix
from serl_chunk.data.lerobot.outcome import ended, lacks_reward, outcome_of
from serl_chunk.data.lerobot.stored_frames import ParquetFrames, VideoFrames
from serl_chunk.data.source import Format, ReadOptions, take_fraction
from serl_chunk.data.validate import check_episode
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    STEP_COLUMNS,
    DataError,
    Episode,
    Outcome,
    Source,
    SparseRows,
    StepBlock,
    gap_tolerance,
)

TOLERANCE_S = 1e-4  # lerobot's own
REWARDS = (dataset_layout.REWARD, "reward")
_AUTOMATIC = (
    dataset_layout.TIMESTAMP,
    dataset_layout.FRAME_INDEX,
    dataset_layout.EPISODE_INDEX,
    dataset_layout.INDEX,
    dataset_layout.TASK_INDEX,
)


@dataclasses.dataclass
class LeRobotSource:
    """See `data.source.Source`; a key is `episode_<index>`.

    Fields:
        cameras: name -> feature, of those that are read.
        ours: whether the file is there that says what LeRobot cannot.
    """

    path: Path
    options: ReadOptions
    index: Index
    cameras: dict[str, str]
    ours: bool
    hz: float | None
    format: str = "lerobot"

    def keys(self) -> list[str]:
        """See Source."""
        return take_fraction([f"episode_{i:06d}" for i in range(len(self.index.lengths))], self.options.proportion)

    def read(self, key: str) -> Episode:
        """See Source. What is not ours ends as `outcome.ended` says."""
        number = int(key.removeprefix("episode_"))
        where = f"{self.path}: episode {number}"
        place = self.index.place(number)
        if not place.file.is_file():
            raise DataError(f"{where}: there is no file {place.file}; the data set is not complete")
        try:
            version = FileVersion.of(place.file)
            columns, groups = self._read_columns(where, place)
        except DataError:
            raise
        except (OSError, ValueError, LookupError) as error:
            raise DataError(f"{where}: {place.file} is truncated, damaged or not Parquet ({error})") from error
        _check_order(where, number, place, columns)
        seconds = self._seconds(where, columns, place.length)
        steps = self._steps(columns, place.length)
        for camera, feature in self.cameras.items():
            shape = _image_shape(where, feature, self.index.features[feature])
            if self.index.features[feature]["dtype"] == "video":
                frames = _video_frames(where, place, feature, shape, seconds)
            else:
                rows = np.arange(place.first, place.first + place.length)
                frames = ParquetFrames(place.file, version, feature, shape, rows, groups, where)
            steps.sparse[IMAGE_PREFIX + camera] = SparseRows(np.arange(place.length, dtype=np.int32), frames)
        task = self._task(where, columns)
        if self.ours:
            episode = sidecar.restored(where, self._beside(where, number), task, steps, set(self.cameras))
        else:
            content = hashlib.sha256(steps.observation[STATE].tobytes() + steps.action.tobytes()).hexdigest()[:12]
            steps = dataclasses.replace(steps, episode_id=f"{key}-{content}")  # each data set has an episode_000000
            success = columns[dataset_layout.SUCCESS][:, 0] if dataset_layout.SUCCESS in columns else None
            has_reward = any(name in columns for name in REWARDS)
            episode = ended(where, task, steps, success, has_reward, self.options)
        check_episode(where, episode, self.options.spec)
        return episode

    def notes(self) -> list[str]:
        """See Source."""
        if self.ours:
            return []
        features = self.index.features
        notes = []
        if dataset_layout.SUCCESS not in features and self.options.success is None:
            if any(name in features for name in REWARDS):
                notes.append("no column next.success: episodes that end with a reward of 1 or more count as successes")
            else:
                notes.append("no outcome is recorded: episodes are unfinished ones; --success or --failure says")
        if not any(name in features for name in (dataset_layout.INTERVENTION, dataset_layout.EXTRA + "source")):
            notes.append("nothing says who acted: all steps are taken for a human's")
        notes += self._notes_on_outcomes()
        used = {
            dataset_layout.STATE,
            dataset_layout.ACTION,
            *REWARDS,
            dataset_layout.DONE,
            dataset_layout.SUCCESS,
            dataset_layout.INTERVENTION,
            *_AUTOMATIC,
        }
        used |= {dataset_layout.EXTRA + name for name in dataset_layout.EXTRA_COLUMNS}
        left = [n for n, f in features.items() if n not in used and f["dtype"] not in ("image", "video")]
        notes += [f"{name} is not read" for name in sorted(left)]
        return notes

    def _notes_on_outcomes(self) -> list[str]:
        """What `outcome.ended` guesses or adds, counted over the episodes that are read."""
        features = self.index.features
        rewards = [name for name in REWARDS if name in features][:1]
        judged = [name for name in (dataset_layout.SUCCESS,) if name in features]
        if not judged and not (rewards and self.options.success):
            return []
        unknown = lacking = 0
        file: Path | None = None
        table: Any = None
        try:
            for key in self.keys():
                place = self.index.place(int(key.removeprefix("episode_")))
                if place.file != file:
                    file, table = place.file, pq.read_table(str(place.file), columns=[*judged, *rewards])
                rows = table.slice(place.first, place.length)
                found = {name: matrix(name, rows.column(name))[:, 0] for name in (*judged, *rewards)}
                success = found[dataset_layout.SUCCESS] if judged else None
                reward = found[rewards[0]] if rewards else None
                outcome = outcome_of(success, reward, self.options)
                unknown += outcome is Outcome.UNKNOWN
                lacking += reward is not None and lacks_reward(outcome, reward)
        except (DataError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            return []  # `read` says of which episode and what is wrong
        notes = []
        if unknown:
            notes.append(
                f"{unknown} episodes without a true {dataset_layout.SUCCESS}, which may be failures or not: they are "
                "unfinished ones; --failure says that they failed"
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
            if self.index.file_of is None and starts[-1] != place.length:
                raise DataError(
                    f"{where}: {place.file} has {int(starts[-1])} rows, meta/episodes.jsonl says {place.length}"
                )
            extra = [dataset_layout.EXTRA + name for name in dataset_layout.EXTRA_COLUMNS]
            used = [
                dataset_layout.STATE,
                dataset_layout.ACTION,
                *REWARDS,
                dataset_layout.SUCCESS,
                dataset_layout.INTERVENTION,
                *extra,
                *_AUTOMATIC,
            ]
            used = [name for name in used if name in file.schema_arrow.names]
            first = int(np.searchsorted(starts, place.first, side="right")) - 1
            last = int(np.searchsorted(starts, place.first + place.length, side="left"))
            table = file.read_row_groups(list(range(first, last)), columns=used)
        table = table.slice(place.first - int(starts[first]), place.length)
        return {name: self._numbers(where, place, name, table.column(name)) for name in used}, starts[:-1]

    def _numbers(self, where: str, place: EpisodePlace, name: str, column: Any) -> np.ndarray:
        """[T, D] of a column; raises DataError where it is not what info.json says."""
        if column.null_count:
            step = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise DataError(f"{where}, step {step}: {name} has no value")
        values = matrix(f"{where}: {name}, in {place.file},", column, place.first)
        shape = tuple(self.index.features[name].get("shape") or (values.shape[1],))
        if values.dtype.kind not in "biuf" or len(shape) != 1 or values.shape[1] != shape[0]:
            raise DataError(
                f"{where}: {name} holds {values.dtype}[{values.shape[1]}] a row, a vector of numbers as long as "
                f"meta/info.json says is expected ({list(shape)})"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            step = int(np.argwhere(~np.isfinite(values))[0][0])
            raise DataError(f"{where}, step {step}: {name} is not finite; leave the episode out or record it again")
        return values

    def _seconds(self, where: str, columns: dict[str, np.ndarray], n: int) -> np.ndarray:
        """float64[T], checked against the rate: both must agree, or frames of videos are others than lerobot's."""
        at = columns[dataset_layout.TIMESTAMP][:, 0].astype(np.float64) if dataset_layout.TIMESTAMP in columns else None
        hz = self.index.fps
        if at is None:
            hz = hz or self.hz
            if hz is None and any(self.index.features[name]["dtype"] == "video" for name in self.cameras.values()):
                raise DataError(
                    f"{where}: neither a column {dataset_layout.TIMESTAMP} nor fps in meta/info.json says which frame "
                    "of a video belongs to which step; pass --hz, or leave the videos out (--cameras)"
                )
            return np.arange(n) / hz if hz else np.zeros(n)
        if hz is None:
            return at
        expected = np.arange(n) / hz
        tolerance = TOLERANCE_S + np.spacing(expected.astype(np.float32))  # they are stored as float32
        off = np.flatnonzero(~(np.abs(at - expected) <= tolerance))
        if len(off):
            t = int(off[0])
            raise DataError(
                f"{where}, step {t}: timestamp is {at[t]:.6f} s, at {hz:g} steps a second it is {expected[t]:.6f} s, "
                f"more than {TOLERANCE_S:g} s off; correct the timestamps, or fps in meta/info.json"
            )
        return expected

    def _steps(self, columns: dict[str, np.ndarray], n: int) -> StepBlock:
        """The steps without images, of an episode that has no name yet."""

        def given(name: str, otherwise: Any) -> np.ndarray:
            values = columns.get(dataset_layout.EXTRA + name)
            found = values[:, 0] if values is not None else otherwise
            return np.ascontiguousarray(np.broadcast_to(found, n).astype(STEP_COLUMNS[name]))

        reward = next((columns[name][:, 0] for name in REWARDS if name in columns), np.zeros(n))
        human = columns.get(dataset_layout.INTERVENTION)
        acted = Source.HUMAN if human is None else np.where(human[:, 0] > 0, Source.HUMAN, Source.POLICY)
        hz = self.hz
        return StepBlock(
            episode_id="",
            first_tick=0,
            observation={STATE: columns[dataset_layout.STATE].astype(np.float32)},
            action=columns[dataset_layout.ACTION].astype(np.float32),
            reward=reward.astype(np.float32),
            source=given("source", acted),
            decision_tick=given("decision_tick", -1),
            policy_version=given("policy_version", -1),
            policy_age=given("policy_age", -1),
            stamp=given("stamp", np.arange(n) / hz if hz else np.zeros(n)),
            lost_ticks=self._lost_ticks(columns.get(dataset_layout.EXTRA + "stamp"), n),
        )

    def _lost_ticks(self, stamp: np.ndarray | None, n: int) -> np.ndarray:
        """LeRobot has no place for gaps; the times float64[n, 1] at which the robot's ticks began tell of them."""
        if stamp is None or not self.hz:
            return np.zeros(n, np.int32)
        late = np.diff(stamp[:, 0], prepend=stamp[:1, 0] - 1 / self.hz) - 1 / self.hz
        # The tick before may have begun late itself, by less than a period: that much is not seen here.
        gap = late > gap_tolerance(1 / self.hz) - 1 / self.hz
        return np.where(gap, np.maximum(1, np.round(late * self.hz)), 0).astype(np.int32)

    def _task(self, where: str, columns: dict[str, np.ndarray]) -> str:
        if dataset_layout.TASK_INDEX not in columns:
            return self.options.task
        texts = []
        # An episode of ours has one text: where the steps have several (parts of a task), all of them in their order.
        for number in dict.fromkeys(map(int, columns[dataset_layout.TASK_INDEX][:, 0])):
            if not 0 <= number < len(self.index.tasks):
                raise DataError(f"{where}: task_index is {number}, there are {len(self.index.tasks)} tasks, from 0 on")
            texts.append(self.index.tasks[number])
        return "; ".join(t for t in texts if t) or self.options.task

    def _beside(self, where: str, number: int) -> dict[str, Any]:
        path = self.path / dataset_layout.SIDE
        try:
            with pq.ParquetFile(str(path)) as file:
                group, row = divmod(number, sidecar.GROUP)
                rows = file.read_row_group(group).slice(row, 1).to_pylist()
            if rows[0][dataset_layout.EPISODE_INDEX] != number:
                raise LookupError(f"row {number} is of episode {rows[0][dataset_layout.EPISODE_INDEX]}")
            missing = [name for name in sidecar.schema(staged=False).names if name not in rows[0]]
            if missing:
                raise LookupError(f"no column {missing[0]}")
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            raise DataError(
                f"{where}: {path} is damaged, or of other episodes ({error}); remove it to read what LeRobot itself "
                "records"
            ) from error
        return rows[0]


def open_lerobot(path: Path, options: ReadOptions) -> LeRobotSource:
    """See `data.source.Format`."""
    index = read_index(path)
    for name in (dataset_layout.STATE, dataset_layout.ACTION):
        if name not in index.features:
            raise DataError(f"{path / dataset_layout.INFO}: no feature {name}; it has: {', '.join(index.features)}")
    if index.fps is not None and options.hz is not None and abs(index.fps - options.hz) > 1e-6 * index.fps:
        raise DataError(
            f"{path / dataset_layout.INFO}: recorded at {index.fps:g} steps a second, not at {options.hz:g} (--hz)"
        )
    hz = index.fps or options.hz or (options.spec.control_hz if options.spec else None)
    ours = (path / dataset_layout.SIDE).exists()
    return LeRobotSource(path, options, index, _choose_cameras(path, index, options), ours, hz)


def _choose_cameras(path: Path, index: Index, options: ReadOptions) -> dict[str, str]:
    found: dict[str, str] = {}
    for feature, about in index.features.items():
        if about["dtype"] in ("image", "video"):
            camera = feature.removeprefix(dataset_layout.CAMERA).removeprefix("observation.")
            if camera in found:
                raise DataError(
                    f"{path / dataset_layout.INFO}: {feature} and {found[camera]} are both camera {camera!r}"
                )
            found[camera] = feature
    missing = sorted(set(options.cameras or ()) - set(found))
    if missing:
        raise DataError(f"{path}: no camera {', '.join(missing)}; it has: {', '.join(found) or 'none'}")
    return {c: found[c] for c in sorted(found) if options.cameras is None or c in options.cameras}


def _check_order(where: str, number: int, place: EpisodePlace, columns: dict[str, np.ndarray]) -> None:
    n = place.length
    wanted = {dataset_layout.EPISODE_INDEX: np.full(n, number), dataset_layout.FRAME_INDEX: np.arange(n)}
    if place.index is not None:
        wanted[dataset_layout.INDEX] = np.arange(place.index, place.index + n)
    for name, values in wanted.items():
        if name not in columns:
            continue
        wrong = np.flatnonzero(columns[name][:, 0] != values)
        if len(wrong):
            t = int(wrong[0])
            raise DataError(
                f"{where}, step {t}: {name} is {columns[name][t, 0]} where {values[t]} is expected, in {place.file}: "
                "its rows are out of order, or the table of episodes is of other data; sort the rows by index"
            )


def _image_shape(where: str, name: str, feature: dict[str, Any]) -> tuple[int, int, int]:
    """[H, W, 3] from info.json, which may have the channels first."""
    shape, axes = list(feature.get("shape") or ()), feature.get("names")
    axes = axes if isinstance(axes, list) else None  # a mapping says nothing of their order
    if len(shape) == 3 and ((axes and str(axes[0]).startswith("channel")) or (not axes and shape[2] != 3)):
        shape = [shape[1], shape[2], shape[0]]
    if len(shape) != 3 or shape[2] != 3:
        raise DataError(f"{where}: {name} has the shape {feature.get('shape')}, not [H, W, 3]; --cameras leaves it out")
    return shape[0], shape[1], 3


def _video_frames(
    where: str, place: EpisodePlace, feature: str, shape: tuple[int, int, int], seconds: np.ndarray
) -> Frames:
    path, start = place.videos[feature]
    if not path.is_file():
        raise DataError(f"{where}: there is no video {path}; --cameras leaves it out")
    tolerance = TOLERANCE_S + float(np.spacing(np.float32(start + seconds[-1])))
    return VideoFrames(path, FileVersion.of(path), shape, start + seconds, tolerance, where)


def _matches(path: Path) -> bool:
    try:
        return (path / "meta" / "info.json").is_file()
    except OSError:
        return False


FORMAT = Format("lerobot", "LeRobot data set, v3.0 or v2.1: images or videos", _matches, open_lerobot)
