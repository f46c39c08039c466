"""HIL-SERL's pickled transitions: demonstrations, and the buffers an actor wrote during a run.

The files hold one flat list of transitions (`data.transitions`) and no episodes. An episode ends where `dones` says so,
and where a transition does not begin in the state in which the one before it ended (compared exactly): that one has no
recorded end. Buffers (`buffer/transitions_1000.pkl`, ...) are cut anywhere; an episode goes on in the next file.

Time limits are stored as terminal states. So an end without success may be a failure or a time-out: it is read as
truncated with an unknown outcome, or as a failure where the caller says that episodes without a success failed.

Who acted: read from `infos` where they are stored (`intervene_action`: a human; zeros: the policy). Otherwise the
transitions that also lie in the run's `demo_buffer` are human steps and the rest of `buffer` are the policy's; other
files are taken for demonstrations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.formats.hil_serl_transitions import Transitions, load_transitions
from serl_chunk.data.source import Format, ReadOptions, take_fraction
from serl_chunk.data.validate import Ending, imported_episode, index_of, natural_sort_key, plural, resolve_rate
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, DataError, Episode, Outcome, Source, SparseRows

_SUFFIXES = (".pkl", ".pickle")


class _Part(NamedTuple):
    """Transitions `start <= i < stop` of file number `file`."""

    file: int
    start: int
    stop: int


class _Span(NamedTuple):
    """Where an episode lies, and what closed it: "success", "done", "limit", "gap" or "last"."""

    parts: tuple[_Part, ...]
    closed: str


class HilSerlSource:
    """Episodes in one pickle or a folder of them; see the module.

    One file's transitions are kept in memory, those of the file that was read last. The first call reads every file
    once, to find where episodes begin.
    """

    format = "hil_serl"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        if options.success:
            raise ConfigError(
                f"{path}: HIL-SERL's transitions record their successes (reward > 0); --success would make successes "
                "of time-outs. Leave it out; --failure says that episodes without a success failed"
            )
        self.path, self._options = path, options
        self.hz = resolve_rate(options)
        self._files, self._marks = _files_of(path)
        self._spans: list[_Span] | None = None
        self._keys: list[str] = []
        self._counts: Counter[str] = Counter()
        self._cameras: dict[str, str] = {}  # name here -> name in the files
        self._ignored: tuple[str, ...] = ()
        self._interventions: set[bytes] = set()
        self._held: tuple[int, Transitions] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}  # other processes read for themselves

    def keys(self) -> list[str]:
        """See `source.Source`: file and number of the first transition."""
        self._index()
        return list(self._keys)

    def read(self, key: str) -> Episode:
        """See `source.Source`. Its images are arrays: a pickle cannot be read in parts."""
        parts, closed = self._index()[index_of(self.keys(), key, self.path)]
        columns: dict[str, list[np.ndarray]] = {}
        for file, start, stop in parts:
            t = self._load(file)
            values = {"state": t.state, "action": t.action, "reward": t.reward, "source": self._sources(file, t)}
            for name, value in values.items():
                columns.setdefault(name, []).append(value[start:stop])
            for camera, stored in self._cameras.items():
                columns.setdefault(IMAGE_PREFIX + camera, []).append(self._rgb(t.frames(stored, start, stop)))
        whole = {name: np.concatenate(pieces) for name, pieces in columns.items()}
        last = parts[-1].stop - 1
        final = {STATE: t.next_state[last]}
        for camera, stored in self._cameras.items():
            final[IMAGE_PREFIX + camera] = self._rgb(t.next_frame(stored, last))
        n = len(whole["action"])
        return imported_episode(
            f"{self._files[parts[0].file]}, transition {parts[0].start}",
            f"{self._files[parts[0].file].stem}-{parts[0].start}",
            whole["state"],
            whole["action"],
            whole["reward"],
            self._ending(closed, final, float(t.reward[last])),
            self._options,
            source=whole["source"],
            hz=self.hz,
            sparse={
                k: SparseRows(np.arange(n, dtype=np.int32), v) for k, v in whole.items() if k.startswith(IMAGE_PREFIX)
            },
        )

    def notes(self) -> list[str]:
        """See `source.Source`."""
        spans = self._index()
        closed = Counter(span.closed for span in spans)
        count = self._counts
        out = [
            f"{plural(count['transitions'], 'transition')} in {plural(len(self._files), 'file')}; episodes were "
            "recovered from `dones` and from states that follow one another"
        ]
        if closed["done"]:
            what = "truncated, outcome unknown (--failure: they failed)"
            if self._options.success is False:
                what = "failures, as you said"
            out.append(
                f"{plural(closed['done'], 'episode')} ended without success: failure and time-out are stored alike; "
                f"read as {what}"
            )
        if closed["gap"]:
            out.append(
                f"{plural(closed['gap'], 'episode')} broke off: the next transition begins in another state although "
                "nothing says that the episode ended; read as truncated"
            )
        if closed["last"]:
            out.append("the last episode has no end (the file stops in it); read as truncated")
        if count["early"]:
            out.append(f"{plural(count['early'], 'step')} with a success before the end of their episode")
        if count["raised"]:
            out.append(
                f"{plural(count['raised'], 'episode')} succeeded by infos['succeed'] alone: their last reward is 1"
            )
        told = {name: count[name] for name in ("infos", "demo_buffer", "file name") if count[name]}
        who = ", ".join(f"{name} ({plural(n, 'step')})" for name, n in told.items())
        rest = count["transitions"] - sum(told.values())
        out.append(
            (f"who acted is told by {who}" if who else "nothing tells who acted")
            + (f"; {plural(rest, 'step')} taken for a human's" if rest else "")
        )
        if count["grasp_penalty"]:
            out.append(
                f"{plural(count['grasp_penalty'], 'transition')} with a grasp_penalty: it is not part of the reward, "
                "and not read"
            )
        renamed = [f"{stored} is {name}" for name, stored in self._cameras.items() if stored != name]
        if renamed:
            out.append(f"cameras renamed: {', '.join(renamed)}")
        if self._ignored:
            out.append(f"observations that are neither the state nor an image are not read: {', '.join(self._ignored)}")
        if self._cameras and self._options.color is None:
            out.append("colours: RGB, as HIL-SERL's cameras store them; the files do not record it (--color=bgr)")
        if self.hz is None:
            out.append("the files record no time: all stamps are 0 (--hz; HIL-SERL's robots run at 10)")
        return out

    def _rgb(self, frames: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(frames[..., ::-1]) if self._options.color == "bgr" else frames

    def _ending(self, closed: str, final: dict[str, np.ndarray], reward: float) -> Ending:
        if closed == "success":
            return Ending(final, True, Outcome.SUCCESS, reward=1.0 if reward <= 0 else None)
        if closed == "done" and self._options.success is False:
            return Ending(final, True, Outcome.FAILURE)
        return Ending(final, False, Outcome.UNKNOWN)

    def _load(self, file: int) -> Transitions:
        if self._held is None or self._held[0] != file:
            self._held = None  # first, so that there never are two
            self._held = (file, load_transitions(self._files[file]))
        return self._held[1]

    def _sources(self, file: int, t: Transitions) -> np.ndarray:
        """Who acted, uint8[N]."""
        path = self._files[file]
        if self._marks and not _is_demo(path):
            human = np.array([t.digest(i) in self._interventions for i in range(len(t.done))])
        else:
            human = np.full(len(t.done), _is_demo(path) or not _is_buffer(path))
        source = np.where(human, Source.HUMAN, Source.POLICY)
        idle = (t.action == 0).all(axis=1)
        by_infos = np.where(t.human, Source.HUMAN, np.where(idle, Source.HOLD, Source.POLICY))
        return np.where(t.told, by_infos, source).astype(np.uint8)

    def _index(self) -> list[_Span]:
        """Where the episodes lie, found at the first call by reading every file."""
        if self._spans is not None:
            return self._spans
        for mark in self._marks:
            t = load_transitions(mark)
            self._interventions.update(t.digest(i) for i in range(len(t.done)))
        spans: list[_Span] = []
        parts: list[_Part] = []
        end: np.ndarray | None = None  # the state in which the open episode's last transition ended
        shapes: tuple[Any, ...] = ()
        for file, path in enumerate(self._files):
            t = self._load(file)
            shapes = self._same_shapes(path, t, shapes)
            self._count(path, t)
            start = 0
            for i in range(len(t.done)):
                if end is not None and not np.array_equal(end, t.state[i]):
                    parts += [_Part(file, start, i)] if i > start else []
                    spans.append(_Span(tuple(parts), "gap"))
                    parts, start = [], i
                end = t.next_state[i]
                self._counts["early"] += int(t.success[i] and not t.done[i])
                if t.done[i]:
                    closed = "success" if t.success[i] else "limit" if t.mask[i] else "done"
                    spans.append(_Span((*parts, _Part(file, start, i + 1)), closed))
                    self._counts["raised"] += int(closed == "success" and t.reward[i] <= 0)
                    parts, start, end = [], i + 1, None
            parts += [_Part(file, start, len(t.done))] if start < len(t.done) else []
        if parts:
            spans.append(_Span(tuple(parts), "last"))
        keys = [f"{self._files[s.parts[0].file].name}:{s.parts[0].start}" for s in spans]
        self._keys = take_fraction(keys, self._options.proportion)
        self._spans = spans[: len(self._keys)]
        return self._spans

    def _count(self, path: Path, t: Transitions) -> None:
        told, n = int(t.told.sum()), len(t.done)
        self._counts.update({"transitions": n, "grasp_penalty": t.penalised, "infos": told})
        if self._marks and not _is_demo(path):
            self._counts["demo_buffer"] += n - told
        elif _is_demo(path) or _is_buffer(path):
            self._counts["file name"] += n - told

    def _same_shapes(self, path: Path, t: Transitions, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """What all files must have in common; sets the cameras by the first. Raises DataError."""
        shapes = (t.state.shape[1], t.next_state.shape[1], t.action.shape[1], tuple(sorted(t.cameras.items())))
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: states have {shapes[0]} values, those that follow them {shapes[1]}")
        if not before:
            named = {stored.replace("/", "_"): stored for stored in t.cameras}
            chosen = self._options.cameras
            missing = sorted(set(chosen or ()) - set(named))
            if missing:
                raise DataError(f"{path}: no camera {', '.join(missing)}; it has: {', '.join(named) or 'none'}")
            self._cameras = {k: v for k, v in named.items() if chosen is None or k in chosen}
            self._ignored = t.ignored
        elif shapes != before:
            raise DataError(
                f"{path}: {shapes[0]} state values, {shapes[2]} actions and cameras {sorted(t.cameras)}; the files "
                f"before it have {before[0]}, {before[2]} and {[name for name, _ in before[3]]}. Convert them apart"
            )
        return shapes


def _pickles(folder: Path) -> list[Path]:
    found = (p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES and p.is_file())
    return sorted(found, key=lambda p: natural_sort_key(p.name))


def _files_of(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to read, and those of the interventions among them (a run's `demo_buffer`)."""
    if not path.is_dir():
        files = [path]
    else:
        files = next((f for f in map(_pickles, _folders(path)) if f), [])
        if not files:
            raise DataError(
                f"{path}: no .pkl file in it, nor in its buffer; give HIL-SERL's demo_data or a run's folder"
            )
    folder = files[0].parent
    marks = folder.parent / "demo_buffer"
    return files, _pickles(marks) if folder.name == "buffer" and marks.is_dir() else []


def _folders(path: Path) -> list[Path]:
    return [p for p in (path, path / "buffer", path / "demo_buffer") if p.is_dir()]


def _is_demo(path: Path) -> bool:
    return "demo" in path.name.lower() or "demo" in path.parent.name.lower()


def _is_buffer(path: Path) -> bool:
    return path.name.startswith("transitions_")


def _matches(path: Path) -> bool:
    try:
        if path.is_file():
            return path.suffix.lower() in _SUFFIXES
        return any(_pickles(folder) for folder in _folders(path))
    except OSError:
        return False


_open: Callable[[Path, ReadOptions], HilSerlSource] = HilSerlSource
FORMAT = Format("hil_serl", "HIL-SERL's pickled transitions: a .pkl file, a folder of them, or a run", _matches, _open)
