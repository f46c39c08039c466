"""Demonstrations: paths, folders, patterns and data sets of any format in, checked episodes out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.formats import NoEpisodesError, choose, open_one
from serl_chunk.data.frames import observation_at
from serl_chunk.data.labels import FILE, Label
from serl_chunk.data.paths import find
from serl_chunk.data.source import (
    Format,
    ReadOptions,
    Source,
    take_fraction,
)
from serl_chunk.data.validate import cameras_of
from serl_chunk.io import os_faults
from serl_chunk.types import (
    IMAGE_PREFIX,
    STATE,
    STEP_COLUMNS,
    ConfigError,
    DataError,
    End,
    Episode,
    Outcome,
    RobotSpec,
    success_step,
)

_SAME_GREY = 6.0  # by which the mean of a block may differ between two encodings of an image, of 255
_LEFT_OUT = "left out: "
_HDF5 = "episodes"  # the format of HDF5 files that hold one episode each


class Origin(NamedTuple):
    """Place of a demonstration."""

    path: Path  # of its source
    format: str
    key: str  # of the episode in there
    digest: str  # of its content: of the file that holds nothing else, or of its numbers


class DemoSet(NamedTuple):
    """Loaded demonstrations: every content once, each ended at its first success, images as the source has them."""

    episodes: list[Episode]
    origins: list[Origin]  # of episodes[k]
    dropped_steps: int  # steps after a first success, in all episodes
    duplicates: int  # episodes left out because another one has the same content, in another format perhaps
    digest: str  # sixteen hex digits that depend on the contents only; "" without any
    notes: tuple[str, ...] = ()  # of their sources, see `data.source.Source.notes`


def load_demos(
    paths: Sequence[str | Path],
    spec: RobotSpec,
    *,
    cameras: Sequence[str] | None = None,
    options: ReadOptions | None = None,
    format: str | None = None,
    more: Sequence[Format] = (),
) -> DemoSet:
    """Load the demonstrations that `paths` name, in their order (`episode_2` before `episode_10`).

    Args:
        paths: as `paths.find` takes them.
        cameras: instead of those in `options`.
        format: of the paths; None takes what they look like.
        more: formats in addition to those of `data.formats`; tried first.

    Raises:
        ConfigError: a file cannot be read as `format`; NoEpisodesError: a path is empty or leads to no demonstration.
        DataError: a file is damaged (with `options.skip_bad`: all are) or of another robot.
    """
    options = options or ReadOptions()
    chosen = options.cameras if cameras is None else tuple(cameras)
    of_each = dataclasses.replace(options, spec=spec, cameras=chosen, proportion=1.0)  # options': of all together
    found = find_demos(paths, options, format, more)
    sources: list[Source] = []
    wanted: list[tuple[Source, str]] = []
    left_out: list[str] = []  # with the reason
    for path in found:
        try:
            source = open_one(path, of_each, format, more, parameter="demo_format")
            getattr(source, "hold", lambda: None)()  # of a running run: its loaded part stays unchanged
            keys = source.keys()
        except DataError as error:
            _leave_out(error, options, left_out)
            continue
        sources.append(source)
        if not keys and _labels_of(source):
            continue  # all of it is discarded
        if not keys:
            raise ConfigError(f"{source.path}: no episode that could be a demonstration ({source.format})")
        wanted += [(source, key) for key in keys]
    if sources and not wanted:
        text = f"every episode of {', '.join(map(str, found))} is discarded by {FILE}. Keep some, or give others"
        raise NoEpisodesError(text, parameter="demo_path")
    if wanted:
        each = [source.lengths() if hasattr(source, "lengths") else None for source in sources]
        # Where one must read the episodes to count their steps, episodes are counted.
        lengths = None if None in each else [n for of_source in each for n in of_source or ()]
        wanted = take_fraction(wanted, options.proportion, lengths)
    loaded = DemoSet([], [], 0, 0, "", tuple(dict.fromkeys(note for source in sources for note in source.notes())))
    digests: set[str] = set()  # copies' too, so that the order of the paths does not matter
    seen: set[tuple[str, str]] = set()  # of these, with the text
    numbers: dict[str, list[int]] = {}  # digest of an episode's numbers -> the loaded ones that have it
    ids: set[str] = set()
    labelled: set[str] = set()  # of the files' digests with their labels
    dropped, bad = 0, 0
    for source, key in wanted:
        file = file_of(source, key)
        digest = "" if file is None else file_digest(file)
        if digest in digests:
            continue
        if file is not None and (label := _labels_of(source).get(key)) is not None:
            labelled.add(f"{digest} {label.label}")
        try:
            whole = source.read(key)
            if options.skip_bad:
                for rows in cameras_of(whole).values():
                    rows.values[len(rows.index) - 1]  # a damaged file lacks its end
        except DataError as error:
            _leave_out(error, options, left_out)
            bad += 1
            continue
        check_rate(source, spec)
        origin = Origin(source.path, source.format, key, digest or content_digest(whole))
        digest = digest or _with_images(origin.digest, whole)
        alike = numbers.setdefault(numbers_digest(whole), [])
        known = (digest, whole.begin.task) in seen
        copied = None if known else next((k for k in alike if _is_copy(loaded.episodes[k], whole)), None)
        digests.add(digest)
        seen.add((digest, whole.begin.task))
        if copied is not None and not (first := loaded.episodes[copied]).begin.task:
            begin = first.begin._replace(task=whole.begin.task)  # as if the copy with a text had come first
            loaded.episodes[copied] = first._replace(begin=begin)
        if known or copied is not None:
            continue
        alike.append(len(loaded.episodes))
        episode, after = whole, 0
        if getattr(source, "rewards_mark_success", True):
            episode, after = end_at_first_success(whole)
        if episode.begin.episode_id in ids:  # stores distinguish episodes by id alone
            begin, steps, end = episode
            new = f"{begin.episode_id}-{digest[:12]}"
            steps = dataclasses.replace(steps, episode_id=new)
            episode = Episode(begin._replace(episode_id=new), steps, end._replace(episode_id=new))
        ids.add(episode.begin.episode_id)
        dropped += after
        loaded.episodes.append(episode)
        # Only the source of all folders has the reward of this one.
        alone = file is not None and key not in getattr(source, "rewards", {})
        loaded.origins.append(origin._replace(path=file, key=file.name) if file and alone else origin)
    digest = hashlib.sha256("".join(sorted(digests | labelled)).encode()).hexdigest()[:16] if digests else ""
    if left_out and not loaded.episodes:
        raise DataError(
            f"{', '.join(map(str, found))}: no demonstration is whole. {left_out[0].removeprefix(_LEFT_OUT)}"
        )
    duplicates = len(wanted) - len(loaded.episodes) - bad
    notes = (*loaded.notes, *left_out)
    return loaded._replace(dropped_steps=dropped, duplicates=duplicates, digest=digest, notes=notes)


def without_copies(source: Source, keys: Sequence[str], *, skip_bad: bool = False) -> list[str]:
    """Return the keys of every content once, as `load_demos` reads it: of copies the first with a task's text.

    Episodes that cannot be read stay with `skip_bad`, for what reads them next to name. Raises DataError.
    """
    chosen: list[str] = []
    alike: dict[str, list[int]] = {}  # digest of an episode's numbers -> its places in `chosen`
    for key in keys:
        try:
            whole = source.read(key)
        except DataError:
            if not skip_bad:
                raise
            chosen.append(key)
            continue
        same = alike.setdefault(numbers_digest(whole), [])
        for at in same:
            other = source.read(chosen[at])
            if _is_copy(other, whole):
                chosen[at] = chosen[at] if other.begin.task else key
                break
        else:
            same.append(len(chosen))
            chosen.append(key)
    return chosen


def _leave_out(error: DataError, options: ReadOptions, left_out: list[str]) -> None:
    """Note what is left out because of `error`; without `options.skip_bad` raise it."""
    if not options.skip_bad:
        raise error
    left_out.append(f"{_LEFT_OUT}{error}")


def _labels_of(source: Source) -> Mapping[str, Label]:
    return getattr(source, "labels", {})


def check_rate(source: Source, spec: RobotSpec) -> None:
    """Raise DataError where `source` was recorded at another rate than the robot's."""
    if source.hz is not None and abs(source.hz - spec.control_hz) > 1e-3 * spec.control_hz:
        raise DataError(
            f"{source.path}: recorded at {source.hz:g} steps a second, robot {spec.name} runs at {spec.control_hz:g}: "
            f"the duration of a chunk would differ. Set robot.control_hz={source.hz:g} (of a served robot: rate in its "
            "robot.toml) where the robot can run at that rate, or leave the data out"
        )


def find_demos(
    paths: Sequence[str | Path],
    options: ReadOptions | None = None,
    format: str | None = None,
    more: Sequence[Format] = (),
) -> list[Path]:
    """Return the files and data sets that `paths` name, all of known formats. Raises ConfigError."""
    if isinstance(paths, str | Path):  # a text is a sequence of texts as well
        paths = [paths]
    scored = options is not None and bool(options.scores)
    found = [part for path in paths for part in find(path, format, more, scored=scored)]
    for path in found:
        choose(path, format, more, parameter="demo_format", fields=options.fields if options else ())
    return found


def file_of(source: Source, key: str) -> Path | None:
    """Return the file that holds only this episode, or None."""
    return getattr(source, "files", {}).get(key) if source.format == _HDF5 else None


def file_digest(path: Path) -> str:
    """Return 64 hex digits of a file's bytes. Raises ConfigError."""
    with os_faults(ConfigError, f"{path}: cannot read the demonstration"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(episode: Episode) -> str:
    """Return 64 hex digits of an episode's numbers and outcome, without its images."""
    _, steps, end = episode
    digest = hashlib.sha256(repr((end.terminated, end.truncated, end.outcome.value, end.reward)).encode())
    final = None if end.final_observation is None else end.final_observation[STATE]
    # Files have this column where it is not 0.
    names = [name for name in STEP_COLUMNS if name != "lost_ticks" or steps.lost_ticks.any()]
    columns = [steps.observation[STATE], steps.action, *(getattr(steps, name) for name in names), final]
    for column in columns:
        digest.update(b"-" if column is None else repr(column.shape).encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def numbers_digest(episode: Episode) -> str:
    """Return 64 hex digits of states, actions, rewards and outcome, which every format keeps to the bit."""
    _, steps, end = episode
    digest = hashlib.sha256(repr((end.terminated, end.outcome.value)).encode())
    for column in (steps.observation[STATE], steps.action, episode.rewards):
        digest.update(repr(column.shape).encode() + np.ascontiguousarray(column, np.float32).tobytes())
    return digest.hexdigest()


def short_digest(episode: Episode) -> bytes:
    """Return the 8 bytes that name a demonstration between a recording and a learner: of its `numbers_digest`."""
    return bytes.fromhex(numbers_digest(episode))[:8]


def _is_copy(a: Episode, b: Episode) -> bool:
    """Whether two episodes with the same numbers are one: no text makes them different tasks, and they look alike.

    JPEG and video change pixels, and hardly the means of blocks, which are compared on a few of the common ticks.
    """
    cameras, others = cameras_of(a), cameras_of(b)
    if len({a.begin.task, b.begin.task} - {""}) > 1 or set(cameras) != set(others):  # some formats have no text
        return False
    for name, rows in cameras.items():
        other = others[name]
        if rows.values.shape[1:] != other.values.shape[1:]:
            return False
        ticks, at, at_other = np.intersect1d(rows.index, other.index, return_indices=True)
        for i in sorted({0, len(ticks) // 2, len(ticks) - 1}) if len(ticks) else ():
            difference = _blocks(rows.values[int(at[i])]) - _blocks(other.values[int(at_other[i])])
            if np.abs(difference).max() > _SAME_GREY:
                return False
    return True


def _blocks(image: np.ndarray) -> np.ndarray:
    """Means of about 8 by 8 blocks of an image uint8[H, W, 3], float64."""
    edges = [np.unique(np.linspace(0, size, 9, dtype=int)[:-1]) for size in image.shape[:2]]
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), edges[0], 0), edges[1], 1)
    sizes = [np.diff([*e, size]) for e, size in zip(edges, image.shape[:2], strict=True)]
    return sums / (sizes[0][:, None, None] * sizes[1][None, :, None])


def _with_images(digest: str, episode: Episode) -> str:
    """`digest` with a few frames of each camera: the same motions in front of other cameras differ."""
    images = hashlib.sha256(digest.encode())
    for name, rows in cameras_of(episode).items():
        images.update((IMAGE_PREFIX + name).encode())
        for i in sorted({0, len(rows.index) // 2, len(rows.index) - 1}):
            images.update(np.ascontiguousarray(rows.values[i]).tobytes())
    return images.hexdigest()


def end_at_first_success(episode: Episode) -> tuple[Episode, int]:
    """Terminate `episode` at its `success_step`; also return the dropped steps.

    The observation after that step becomes the final one, with the frames that were recorded at that tick.
    """
    begin, steps, end = episode
    if (first := success_step(episode.rewards)) is None:
        return episode, 0
    dropped, by = steps.n - 1 - first, end.outcome_by if end.outcome is Outcome.SUCCESS else "reward"
    if not dropped:
        # Where the actor died right at the success, the last observation stands in for the one that was not recorded:
        # no target looks past a termination, and an unfinished episode would lose its only reward.
        final = end.final_observation or observation_at(steps, first)
        end = end._replace(final_observation=final, terminated=True, truncated=False)
        return Episode(begin, steps, end._replace(outcome=Outcome.SUCCESS, outcome_by=by)), 0
    final, kept = observation_at(steps, first + 1), steps.slice(0, first + 1)
    return Episode(begin, kept, End(end.episode_id, kept.n, final, True, False, Outcome.SUCCESS, by)), dropped
