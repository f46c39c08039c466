"""Demonstrations: paths, folders, patterns and data sets of any format in, checked episodes out."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.formats import formats
from serl_chunk.data.frames import observation_at
from serl_chunk.data.source import Format, ReadOptions, Source, take_fraction
from serl_chunk.data.validate import natural_sort_key
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
    StepBlock,
)

SUCCESS_REWARD = 1.0  # a step with at least this reward is a success (docs/architecture.md, section 3)
_SAME_GREY = 6.0  # by which the mean of a block may differ between two encodings of an image, of 255
_HDF5 = "episodes"  # the format of HDF5 files that hold one episode each


class NoDemosFoundError(ConfigError):
    """A path of demonstrations leads to none."""


class Origin(NamedTuple):
    """Where a demonstration was read."""

    path: Path  # what was opened
    format: str
    key: str  # of the episode in there
    digest: str  # of its content: of the file that holds nothing else, or of its numbers


class DemoSet(NamedTuple):
    """Demonstrations as loaded: every content once, each ended at its first success, images as the source has them."""

    episodes: list[Episode]
    origins: list[Origin]  # of episodes[k]
    files: list[Path]  # files[k] holds episodes[k]
    dropped_steps: int  # steps after a first success, in all episodes
    duplicates: int  # episodes left out because another one has the same content, in another format perhaps
    digest: str  # sixteen hex digits that depend on the contents only; "" without any
    notes: tuple[str, ...] = ()  # what their sources say of them, see data.source.Source


def load_demos(
    paths: Sequence[str | Path],
    spec: RobotSpec,
    *,
    cameras: Sequence[str] | None = None,
    success: bool | None = None,
    color: str | None = None,
    options: ReadOptions | None = None,
    format: str | None = None,
    more: Sequence[Format] = (),
    progress: Callable[[int, int], None] | None = None,
) -> DemoSet:
    """Load the demonstrations that `paths` name, in their order (`episode_2` before `episode_10`).

    Args:
        paths: files, folders of `*.hdf5` (not their subfolders, unless `options.scores` names them), data sets of any
            format, or patterns of these (`~`, `*`, `?`, `**`).
        spec: the robot they must belong to.
        cameras, success, color: as in `options`, and instead of its.
        options: what the files do not say about themselves.
        format: what the paths are; None takes what they look like.
        more: formats beside those of `data.formats`; tried first.
        progress: called with (episodes done, episodes in all) after each one.

    Raises:
        NothingThere: a path is empty or matches no demonstration.
        ConfigError: a file cannot be read as what it is said to be.
        DataError: a file is damaged or of another robot; names the file and the field.
    """
    said = options or ReadOptions()
    options = dataclasses.replace(
        said,
        spec=spec,
        cameras=said.cameras if cameras is None else tuple(cameras),
        success=said.success if success is None else success,
        color=said.color if color is None else color,
        proportion=1.0,  # of all paths together
    )
    sources = [open_demos(path, options, format, more) for path in find_demos(paths, options, format, more)]
    for source in sources:
        getattr(source, "hold", lambda: None)()  # of a run that goes on: what is loaded stays whole
    wanted = [(source, key) for source in sources for key in source.keys()]
    empty = next((source for source in sources if not any(source is s for s, _ in wanted)), None)
    if empty is not None:
        raise ConfigError(f"{empty.path}: no episode that could be a demonstration ({empty.format})")
    if wanted:
        wanted = wanted[: len(take_fraction([key for _, key in wanted], said.proportion, _lengths(sources)))]
    loaded = DemoSet([], [], [], 0, 0, "", tuple(dict.fromkeys(note for source in sources for note in source.notes())))
    digests: set[str] = set()
    numbers: dict[str, list[int]] = {}  # digest of an episode's numbers -> the loaded ones that have it
    ids: set[str] = set()
    dropped = 0
    for done, (source, key) in enumerate(wanted, 1):
        file = file_of(source, key)
        digest = "" if file is None else file_digest(file)
        if file is None or digest not in digests:
            whole = source.read(key)
            _check_rate(source, spec)
            origin = Origin(source.path, source.format, key, digest or content_digest(whole))
            digest = digest or _with_images(origin.digest, whole)
            alike = numbers.setdefault(numbers_digest(whole), [])
            if digest not in digests and not any(_look_alike(loaded.episodes[k], whole) for k in alike):
                alike.append(len(loaded.episodes))
                tells = getattr(source, "rewards_tell", True)
                episode, after = end_at_first_success(whole) if tells else (whole, 0)
                if episode.begin.episode_id in ids:  # stores tell episodes apart by id alone
                    episode = _renamed(episode, f"{episode.begin.episode_id}-{digest[:12]}")
                ids.add(episode.begin.episode_id)
                dropped += after
                loaded.episodes.append(episode)
                # What its folder is worth is known to the source of all folders alone.
                alone = file is not None and key not in getattr(source, "rewards", {})
                loaded.origins.append(origin._replace(path=file, key=file.name) if file and alone else origin)
                loaded.files.append(file or source.path)
            digests.add(digest)  # a copy's too, so that the order in which they are given does not matter
        if progress is not None:
            progress(done, len(wanted))
    digest = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16] if digests else ""
    return loaded._replace(dropped_steps=dropped, duplicates=len(wanted) - len(loaded.episodes), digest=digest)


def _lengths(sources: Sequence[Source]) -> list[int] | None:
    """Steps of every episode of `sources`; None unless all tell them without reading: then episodes are counted."""
    lengths: list[int] = []
    for source in sources:
        told = getattr(source, "lengths", None)
        if told is None:
            return None
        lengths += told()
    return lengths


def _check_rate(source: Source, spec: RobotSpec) -> None:
    if source.hz is not None and abs(source.hz - spec.control_hz) > 1e-3 * spec.control_hz:
        raise DataError(
            f"{source.path}: its steps are taken {source.hz:g} times a second, robot {spec.name} takes "
            f"{spec.control_hz:g}: a chunk of it would last another time. Set the robot's rate to the data's, or leave "
            "it out"
        )


def find_demos(
    paths: Sequence[str | Path],
    options: ReadOptions | None = None,
    format: str | None = None,
    more: Sequence[Format] = (),
) -> list[Path]:
    """The files and data sets that `paths` name, as in `load_demos`; raises NothingThere where one names none."""
    if isinstance(paths, str | Path):
        paths = [paths]
    scored = options is not None and bool(options.scores)
    return [found for path in paths for found in _expand(str(path), format, more, scored)]


def open_demos(path: Path, options: ReadOptions, format: str | None, more: Sequence[Format] = ()) -> Source:
    """The source at `path`, of the format named or the one it looks like; raises ConfigError, DataError."""
    known = {f.name: f for f in more} | formats()
    if format is not None and format not in known:
        raise ConfigError(f"--demo_format={format}: no such format; valid: {', '.join(known)}")
    chosen = known[format] if format is not None else _format_of(path, more)
    if chosen is None:
        raise ConfigError(f"{path}: demonstrations of no format that is known; valid: {', '.join(known)}")
    return chosen.open(path, options)


def file_of(source: Source, key: str) -> Path | None:
    """The file that holds this episode and nothing else, None where there is none such."""
    files: dict[str, Path] = getattr(source, "files", {}) if source.format == _HDF5 else {}
    return files.get(key)


def file_digest(path: Path) -> str:
    """Of a file's bytes, 64 hex digits; raises ConfigError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the demonstration: {error}") from error


def content_digest(episode: Episode) -> str:
    """Of an episode's numbers and outcome, 64 hex digits; images do not count."""
    _, steps, end = episode
    digest = hashlib.sha256(repr((end.terminated, end.truncated, end.outcome.value, end.reward)).encode())
    final = None if end.final_observation is None else end.final_observation[STATE]
    # Digests of before the column are still compared: it counts where it says something.
    names = [name for name in STEP_COLUMNS if name != "lost_ticks" or steps.lost_ticks.any()]
    columns = [steps.observation[STATE], steps.action, *(getattr(steps, name) for name in names), final]
    for column in columns:
        digest.update(b"-" if column is None else repr(column.shape).encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def numbers_digest(episode: Episode) -> str:
    """Of states, actions, rewards and outcome, 64 hex digits: what every format keeps of an episode, to the bit."""
    _, steps, end = episode
    reward = steps.reward if end.reward is None else np.append(steps.reward[:-1], np.float32(end.reward))
    digest = hashlib.sha256(repr((end.terminated, end.outcome.value)).encode())
    for column in (steps.observation[STATE], steps.action, reward):
        digest.update(repr(column.shape).encode() + np.ascontiguousarray(column, np.float32).tobytes())
    return digest.hexdigest()


def _look_alike(a: Episode, b: Episode) -> bool:
    """Whether the images of two episodes with the same numbers are the same but for their encoding.

    A few of the ticks that both have are compared, in blocks: JPEG and video change pixels, and hardly their means.
    """
    cameras = [{k: v for k, v in e.steps.sparse.items() if k.startswith(IMAGE_PREFIX) and len(v.index)} for e in (a, b)]
    if set(cameras[0]) != set(cameras[1]):
        return False
    for key in cameras[0]:
        rows = [c[key] for c in cameras]
        if rows[0].values.shape[1:] != rows[1].values.shape[1:]:
            return False
        ticks, *places = np.intersect1d(rows[0].index, rows[1].index, return_indices=True)
        for i in sorted({0, len(ticks) // 2, len(ticks) - 1}) if len(ticks) else ():
            one, two = (_blocks(np.asarray(r.values[int(p[i])])) for r, p in zip(rows, places, strict=True))
            if np.abs(one - two).max() > _SAME_GREY:
                return False
    return True


def _blocks(image: np.ndarray) -> np.ndarray:
    """Means of about 8 by 8 blocks of an image uint8[H, W, 3], float64."""
    edges = [np.unique(np.linspace(0, size, 9, dtype=int)[:-1]) for size in image.shape[:2]]
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), edges[0], 0), edges[1], 1)
    sizes = [np.diff([*e, size]) for e, size in zip(edges, image.shape[:2], strict=True)]
    return sums / (sizes[0][:, None, None] * sizes[1][None, :, None])


def _with_images(digest: str, episode: Episode) -> str:
    """As `digest`, but that of the same motions before other cameras differs: a few frames of each are looked at."""
    images = hashlib.sha256(digest.encode())
    for key, rows in sorted(episode.steps.sparse.items()):
        if key.startswith(IMAGE_PREFIX) and (n := len(rows.index)):
            images.update(key.encode())
            for i in sorted({0, n // 2, n - 1}):
                images.update(np.ascontiguousarray(rows.values[i]).tobytes())
    return images.hexdigest()


class Demonstrations:
    """A source whose episodes are checked and ended at their first success, as `load_demos` does it."""

    def __init__(self, source: Source, spec: RobotSpec) -> None:
        self._source, self._spec = source, spec
        self.format, self.path, self.hz = source.format, source.path, source.hz

    def keys(self) -> list[str]:
        """See `source.Source`."""
        return self._source.keys()

    def read(self, key: str) -> Episode:
        """See `source.Source`."""
        episode = self._source.read(key)
        _check_rate(self._source, self._spec)
        return end_at_first_success(episode)[0] if getattr(self._source, "rewards_tell", True) else episode

    def notes(self) -> list[str]:
        """See `source.Source`."""
        return self._source.notes()


def end_at_first_success(episode: Episode) -> tuple[Episode, int]:
    """`episode` terminated at its first success, and the number of steps after it that were dropped.

    A success is a step whose reward (the last one's as `End.reward` corrects it) is at least `SUCCESS_REWARD`. The
    observation after that step becomes the final one, with the frames that were recorded at that tick. Episodes without
    a success come back unchanged.
    """
    begin, steps, end = episode
    reward = steps.reward if end.reward is None else np.append(steps.reward[:-1], np.float32(end.reward))
    at = np.flatnonzero(reward >= SUCCESS_REWARD)
    if not len(at):
        return episode, 0
    first, n = int(at[0]), steps.n
    said_by = end.outcome_by if end.outcome is Outcome.SUCCESS else "reward"
    if first == n - 1:
        # No target looks past a termination, so that where the actor died right at the success the last observation
        # may stand in for the one that was not recorded; as an unfinished episode it would lose its only reward.
        final = end.final_observation or observation_at(steps, n - 1)
        end = end._replace(final_observation=final, terminated=True, truncated=False)
        return Episode(begin, steps, end._replace(outcome=Outcome.SUCCESS, outcome_by=said_by)), 0
    final = observation_at(steps, first + 1)
    kept = steps.slice(0, first + 1)
    return Episode(begin, kept, End(end.episode_id, kept.n, final, True, False, Outcome.SUCCESS, said_by)), n - kept.n


def _expand(text: str, format: str | None, more: Sequence[Format], scored: bool) -> list[Path]:
    valid = "give an HDF5 file, a folder of *.hdf5 files, a data set, or a pattern such as 'demos/*.hdf5'"
    if not text.strip():
        raise NoDemosFoundError(f"a demonstration path is empty; {valid}")
    path = Path(text).expanduser()
    if not path.is_dir():
        if path.exists():
            return [path]
        matches = (Path(p) for p in glob.glob(str(path), recursive=True))
        files = sorted(
            (p for p in matches if p.is_file() or _is_data_set(p, format, more)), key=lambda p: natural_sort_key(str(p))
        )
        if not files:
            raise NoDemosFoundError(f"no demonstration matches {text!r}; {valid}")
        return files
    files = sorted((p for p in path.glob("*.hdf5") if p.is_file()), key=lambda p: natural_sort_key(str(p)))
    if files and format in (None, _HDF5) and not scored:
        return files
    if format is None and _format_of(path, more) is None:
        suffixes = Counter(p.suffix or "no suffix" for p in path.iterdir() if p.is_file())
        holds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items())) or "no file"
        raise NoDemosFoundError(f"demonstration folder {text!r} has no *.hdf5 file (it has: {holds}); {valid}")
    return [path]


def _is_data_set(folder: Path, format: str | None, more: Sequence[Format]) -> bool:
    """Whether a pattern that matches `folder` means the folder itself, and not the files below it."""
    found = _format_of(folder, more)
    return found is not None and found.name != _HDF5 and format in (None, found.name)


def _format_of(path: Path, more: Sequence[Format]) -> Format | None:
    return next((f for f in (*more, *formats().values()) if f.matches(path)), None)


def _renamed(episode: Episode, episode_id: str) -> Episode:
    begin, steps, end = episode
    columns = {name: getattr(steps, name) for name in StepBlock.__dataclass_fields__}
    return Episode(
        begin._replace(episode_id=episode_id),
        StepBlock(**(columns | {"episode_id": episode_id})),
        end._replace(episode_id=episode_id),
    )
