"""Frames and their classes, episode by episode: of data sets and runs, and of HIL-SERL's `classifier_data`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from serl_chunk.data.demos import content_digest
from serl_chunk.data.formats.hil_serl import Transitions, load_transitions
from serl_chunk.data.labels import OPERATOR
from serl_chunk.data.source import Source, sorted_files
from serl_chunk.io import atomic_write, os_faults, os_reason, plural
from serl_chunk.types import IMAGE_PREFIX, STATE, CameraSpec, ConfigError, DataError, Episode, Observation, Outcome

CLASSES = ("failure", "success")  # where no file names others
IGNORED = -1  # label of a frame that belongs to no class
LABELS = "frame_labels.json"
Condition = Callable[[Observation], bool]  # on the state
_PICKLES = {"success": 1, "failure": 0}  # part of a file's name -> class


class Labelling(NamedTuple):
    """Classes of the frames of an episode that has an outcome alone.

    The last `positives` frames of a success are of the last class, `ignored` frames before them of none, since the
    outcome may be given late; all others, and those of any other outcome, are of the first class.
    """

    positives: int = 1
    ignored: int = 5


class LabelledEpisode(NamedTuple):
    """The frames of an episode on the ticks on which all cameras have one."""

    name: str  # as shown to the user
    images: dict[str, np.ndarray]  # camera -> uint8[N, H, W, 3]
    labels: np.ndarray  # int8[N]: class, or IGNORED
    ticks: np.ndarray  # int32[N], increasing
    corrected: int = 0  # last frames that an operator's correction is about, which are drawn more often


class Labelled(NamedTuple):
    """Episodes of one or several data sets."""

    episodes: list[LabelledEpisode]
    classes: tuple[str, ...]
    notes: list[str]  # facts that the user should see

    @property
    def success_class(self) -> int:
        return len(self.classes) - 1

    def count(self, positive: bool) -> int:
        """Count the frames of success, or those of other classes."""
        labels = np.concatenate([np.empty(0), *(e.labels for e in self.episodes)])
        return int(((labels == self.success_class) == positive)[labels != IGNORED].sum())


class FrameLabels(NamedTuple):
    """A `frame_labels.json`: classes, and for some episodes ranges of ticks `start <= tick < stop` with their class."""

    classes: tuple[str, ...]
    episodes: dict[str, list[tuple[int, int, str]]]

    def of(self, key: str, ticks: np.ndarray) -> np.ndarray | None:
        """Return the classes int8[N] of an episode's `ticks`; None where it is not listed. Other ticks are IGNORED."""
        if key not in self.episodes:
            return None
        out = np.full(len(ticks), IGNORED, np.int8)
        for start, stop, name in self.episodes[key]:
            out[(ticks >= start) & (ticks < stop)] = self.classes.index(name)
        return out


def labels_file(path: Path) -> Path:
    """Return the file of the frame labels of a data set: in its folder, or next to its file."""
    return path / LABELS if path.is_dir() else path.with_name(f"{path.name}.{LABELS}")


def read_frame_labels(path: Path) -> FrameLabels | None:
    """Read the frame labels of a data set; None where it has none. Raises DataError."""
    file = labels_file(path)
    try:
        saved = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({os_reason(error)})") from error
    form = '{"classes": ["failure", "success"], "episodes": {"KEY": [[START, STOP, "success"], ...]}}'
    try:
        classes = tuple(saved["classes"])
        if len(classes) < 2 or len(set(classes)) < len(classes) or not all(type(c) is str for c in classes):
            raise ValueError(f"classes are {list(classes)}, expected two or more different names")
        episodes = {}
        for key, ranges in saved["episodes"].items():
            for start, stop, name in ranges:
                if type(start) is not int or type(stop) is not int or not 0 <= start < stop or name not in classes:
                    raise ValueError(f"episode {key}: [{start}, {stop}, {name!r}] is no range of ticks and class")
            episodes[key] = [tuple(r) for r in ranges]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: {error}. Write {form}") from error
    return FrameLabels(classes, episodes)


def write_frame_labels(path: Path, labels: FrameLabels) -> None:
    """Write the frame labels of a data set. Raises DataError."""
    file = labels_file(path)
    content = {"classes": labels.classes, "episodes": {k: labels.episodes[k] for k in sorted(labels.episodes)}}
    with os_faults(DataError, f"{file}: cannot be written", "Check the folder"):
        atomic_write(file, json.dumps(content, indent=1) + "\n", durable=True)


def read_source(
    source: Source, cameras: Sequence[str], labelling: Labelling, known: set[str], condition: Condition | None = None
) -> Labelled:
    """Read the labelled episodes of a data set or run; the outcome is as corrected later.

    Args:
        source: opened for `cameras`.
        known: digests of episodes that are read already; an episode with one of these is left out, new ones are added.
        condition: of the classifier to be (`outcome.condition`): frames on which it does not hold are left out.

    Raises DataError: no episode has frames of all cameras, or the labels name an unknown episode.
    """
    labels = read_frame_labels(source.path)
    named = labels.classes if labels else CLASSES
    keys = source.keys()
    others = {key for key in labels.episodes if key not in keys} if labels else set()
    if labels is not None and (unknown := sorted(k for k in others if not (source.path / k).exists())):
        raise DataError(f"{labels_file(source.path)}: no episode {unknown[0]!r}. `serl-chunk data inspect` lists them")
    out, twice, unjudged = [], 0, 0
    lacking: dict[str, tuple[str, list[str]]] = {}  # episode -> a camera without frames, those with
    for key in keys:
        episode = source.read(key)
        digest = content_digest(episode)
        if digest in known:
            twice += 1
            continue
        known.add(digest)
        name = f"{source.path}: {key}"
        if (lacks := _lacking(episode, cameras)) is not None:
            lacking[name] = lacks
            continue
        ticks, images = _frames(episode, cameras)
        given = None if labels is None else labels.of(key, ticks)
        unjudged += given is None and episode.end.outcome is Outcome.UNKNOWN
        success = len(named) - 1 if episode.end.outcome is Outcome.SUCCESS else None
        classes = _by_outcome(success, len(ticks), labelling) if given is None else given
        # A correction of the outcome comes with one of the last reward.
        corrected = given is None and episode.end.reward is not None and episode.end.outcome_by == OPERATOR
        labelled = LabelledEpisode(name, images, classes, ticks, sum(labelling) if corrected else 0)
        out.append(labelled if condition is None else _looked_at(labelled, episode, condition))
    if lacking and not out:
        name, (camera, has) = next(iter(lacking.items()))
        raise DataError(f"{name} has no frames of camera {camera!r}; it has: {', '.join(has) or 'none'}")
    notes = [f"{source.path}: {plural(twice, 'episode')} read before, left out"] if twice else []
    if lacking:  # as those that a stop or a crash ended, of cameras that the classifier alone looked at
        names = ", ".join(sorted({camera for camera, _ in lacking.values()}))
        notes.append(f"{source.path}: {plural(len(lacking), 'episode')} without frames of {names}, left out")
    if unseen := sum(not len(e.ticks) for e in out):
        notes.append(
            f"{source.path}: {plural(unseen, 'episode')} without a frame on which the condition holds, left out"
        )
        out = [e for e in out if len(e.ticks)]
    if unjudged:
        notes.append(f"{source.path}: {plural(unjudged, 'episode')} of unknown outcome, read as failures")
    return Labelled(out, named, notes)


def _looked_at(labelled: LabelledEpisode, episode: Episode, condition: Condition) -> LabelledEpisode:
    """The frames on which the condition holds."""
    states = [*episode.steps.observation[STATE], (episode.end.final_observation or {}).get(STATE)]
    rows = np.array([bool(condition({STATE: states[tick]})) for tick in labelled.ticks], bool)
    images = {camera: frames[rows] for camera, frames in labelled.images.items()}
    return labelled._replace(images=images, labels=labelled.labels[rows], ticks=labelled.ticks[rows])


def _by_outcome(success: int | None, frames: int, labelling: Labelling) -> np.ndarray:
    """The classes of the frames of an episode that ended in class `success`, or in none."""
    out = np.zeros(frames, np.int8)
    if success is not None:
        first = max(0, frames - labelling.positives)
        out[max(0, first - labelling.ignored) : first] = IGNORED
        out[first:] = success
    return out


def _lacking(episode: Episode, cameras: Sequence[str]) -> tuple[str, list[str]] | None:
    """A camera that has frames neither of the steps nor, with all others, at the end, and those that have; or None."""
    final = episode.end.final_observation or {}
    lacks = next((c for c in cameras if IMAGE_PREFIX + c not in episode.steps.sparse), None)
    if lacks is None or all(IMAGE_PREFIX + c in final for c in cameras):
        return None
    names = {*episode.steps.sparse, *final}
    return lacks, sorted(name.removeprefix(IMAGE_PREFIX) for name in names if name.startswith(IMAGE_PREFIX))


def _frames(episode: Episode, cameras: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The ticks int32[N] on which all cameras have a frame, the final observation's included, and the frames.

    Cameras that the classifier alone looked at have a frame at the end.
    """
    steps, final = episode.steps, episode.end.final_observation or {}
    ticks, whole = np.arange(steps.n, dtype=np.int32), all(IMAGE_PREFIX + c in final for c in cameras)
    rows = {c: steps.sparse.get(IMAGE_PREFIX + c) for c in cameras}
    for of in rows.values():
        ticks = np.intersect1d(ticks, () if of is None else of.index)
    images = {}
    for camera, of in rows.items():
        parts = [] if of is None else [np.asarray(of.values[np.searchsorted(of.index, ticks)])]
        images[camera] = np.concatenate([*parts, *([np.asarray(final[IMAGE_PREFIX + camera])[None]] * whole)])
    return np.append(ticks, [steps.n] * whole).astype(np.int32), images


def is_classifier_data(path: Path) -> bool:
    """Return whether a path is HIL-SERL's `classifier_data`: pickles that say success or failure in their names."""
    return bool(_labelled_pickles(path))


def _labelled_pickles(path: Path) -> list[tuple[Path, int]]:
    files = sorted_files(path.glob("*.pkl")) if path.is_dir() else [path] if path.suffix == ".pkl" else []
    marked = [(file, [label for word, label in _PICKLES.items() if word in file.name.lower()]) for file in files]
    return [(file, labels[0]) for file, labels in marked if len(labels) == 1]


def read_classifier_data(path: Path, cameras: Sequence[str], *, bgr: bool = False) -> Labelled:
    """Read HIL-SERL's `*success*.pkl` and `*failure*.pkl`; nothing in them is run.

    The files hold transitions of episodes in turn, those of success in one file and the others in another. Transitions
    belong to one episode where one begins in exactly the state in which another, not its last, ended. `bgr`: the order
    of the channels, RGB otherwise. The frame of a transition is the one before its action, on which HIL-SERL trains.
    Raises DataError: a file cannot be read, or lacks a camera.
    """
    parts = [(file, label, load_transitions(file)) for file, label in _labelled_pickles(path)]
    names = {camera.replace("/", "_"): camera for camera in parts[0][2].cameras}
    for file, _, t in parts:
        if lacking := [c for c in cameras if names.get(c) not in t.cameras]:
            has = ", ".join(names) or "none"
            raise DataError(f"{file} has no frames of camera {lacking[0]!r}; it has: {has}")
    labels = np.concatenate([np.full(len(t.done), label, np.int8) for _, label, t in parts])
    frames = {c: np.concatenate([t.frames(names[c], 0, len(t.done)) for _, _, t in parts]) for c in cameras}
    episodes = []
    for number, rows in enumerate(_linked([t for _, _, t in parts])):
        images = {c: v[rows][..., ::-1] if bgr else v[rows] for c, v in frames.items()}
        ticks = np.arange(len(rows), dtype=np.int32)
        episodes.append(LabelledEpisode(f"{path}: {number}", images, labels[rows], ticks))
    return Labelled(episodes, CLASSES, [f"{path}: {plural(len(episodes), 'episode')} recovered from following states"])


def _linked(parts: Sequence[Transitions]) -> list[np.ndarray]:
    """The transitions of each episode, by their numbers in all files together, in the order of their times."""
    state, after = np.concatenate([t.state for t in parts]), np.concatenate([t.next_state for t in parts])
    done = np.concatenate([t.done for t in parts])
    begins: dict[bytes, list[int]] = {}
    for i, row in enumerate(state):
        begins.setdefault(row.tobytes(), []).append(i)
    follows = {i: [k for k in begins.get(after[i].tobytes(), ()) if k != i] for i in np.flatnonzero(~done).tolist()}
    pairs = np.array([(i, k) for i, following in follows.items() for k in following], int).reshape(-1, 2).T
    links = scipy.sparse.coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), (len(done), len(done)))
    of_row = scipy.sparse.csgraph.connected_components(links, directed=False)[1]
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(of_row.tolist()):
        groups.setdefault(group, []).append(i)
    return [np.array(_in_order(rows, follows)) for rows in groups.values()]


def _in_order(rows: Sequence[int], follows: Mapping[int, Sequence[int]]) -> list[int]:
    """`rows` from those that follow none on, each chain in its order."""
    later = {k for i in rows for k in follows.get(i, ())}
    out: dict[int, None] = {}
    for start in [*(i for i in rows if i not in later), *rows]:
        waiting = [start]
        while waiting:
            i = waiting.pop()
            if i not in out:
                out[i] = None
                waiting += reversed(follows.get(i, ()))
    return list(out)


def joined(sets: Iterable[Labelled]) -> Labelled:
    """Join data sets. Raises DataError where their classes differ."""
    sets = list(sets)
    named = {s.classes for s in sets if s.classes != CLASSES} or {CLASSES}
    if len(named) > 1:
        shown = " and ".join(", ".join(classes) for classes in sorted(named))
        raise DataError(f"the data sets have different classes: {shown}. Use one order and one set of names in all")
    classes = named.pop()
    if len(classes) > 2 and any(s.classes != classes for s in sets):
        # In those of failure and success alone, success is the last class of all.
        last = {s.classes: np.array([*range(len(s.classes) - 1), len(classes) - 1, IGNORED], np.int8) for s in sets}
        sets = [s._replace(episodes=[e._replace(labels=last[s.classes][e.labels]) for e in s.episodes]) for s in sets]
    return Labelled([e for s in sets for e in s.episodes], classes, [note for s in sets for note in s.notes])


def camera_specs(episodes: Sequence[LabelledEpisode], cameras: Sequence[str]) -> tuple[CameraSpec, ...]:
    """Return the cameras with their sizes. Raises DataError where an episode has another size."""
    specs = []
    for camera in cameras:
        height, width = episodes[0].images[camera].shape[1:3]
        other = next((e for e in episodes if e.images[camera].shape[1:3] != (height, width)), None)
        if other is not None:
            found = "x".join(map(str, other.images[camera].shape[1:3]))
            raise DataError(
                f"{other.name}: camera {camera!r} has {found} pixels, expected {height}x{width} as in "
                f"{episodes[0].name}. Use episodes of one size"
            )
        specs.append(CameraSpec(camera, height, width))
    return tuple(specs)


def split(data: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Split whole episodes into those to train on and a `share` to validate on, with and without success alike.

    Raises ConfigError: there are fewer than two episodes with a frame of success, or none of another class is left.
    """
    rng = np.random.default_rng(seed)
    has = np.array([bool((e.labels == data.success_class).any()) for e in data.episodes])
    if has.sum() < 2:
        raise ConfigError(
            f"{plural(int(has.sum()), 'episode')} of {len(has)} with a frame of success, expected 2 or more. Record "
            "successes, or label their frames"
        )
    held = []
    for kind in (True, False):
        rows = np.flatnonzero(has == kind)
        if len(rows) > 1:
            held += rng.permutation(rows)[: min(len(rows) - 1, max(1, round(share * len(rows))))].tolist()
    parts = [
        data._replace(episodes=[e for i, e in enumerate(data.episodes) if (i in held) == validates])
        for validates in (False, True)
    ]
    if any(not part.count(positive=False) for part in parts):
        raise ConfigError("too few frames without success to train and to validate on. Record failures")
    return parts[0], parts[1]


def frames_by_class(data: Labelled) -> list[list[tuple[int, int]]]:
    """Return for each class the (episode, frame) of each of its frames; raises ConfigError for a class without any."""
    out: list[list[tuple[int, int]]] = [[] for _ in data.classes]
    for e, episode in enumerate(data.episodes):
        for i, label in enumerate(episode.labels.tolist()):
            if label != IGNORED:
                out[label].append((e, i))
    empty: list[Any] = [name for name, rows in zip(data.classes, out, strict=True) if not rows]
    if empty:
        raise ConfigError(f"no training frame of class {empty[0]!r}. Record or label some")
    return out
