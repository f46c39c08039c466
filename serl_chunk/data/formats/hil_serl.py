"""HIL-SERL's pickled transitions: demonstrations, and the buffers an actor wrote during a run.

A file holds one pickled `list[dict]` of transitions, without episodes, times or a description. Each dict holds
`observations` and `next_observations` (`state` [D] or [1, D]; cameras uint8[H, W, 3] or [1, H, W, 3]), `actions` [A],
`rewards`, `dones`, mostly `masks` (0 where the state after the step is terminal), and in recorded demonstrations
`infos`.

An episode ends at `dones`, and before a transition that does not begin in the state in which the previous one ended
(compared exactly): then it has no recorded end. Buffers (`buffer/transitions_1000.pkl`, ...) are cut anywhere; an
episode goes on in the next file.

Time limits are stored as terminal states. An end without success may therefore be a failure or a time-out: it is read
as truncated with an unknown outcome, or as a failure with `ReadOptions.success` False.

The source of an action comes from `infos` where they are stored (`intervene_action`: a human; zeros: the policy).
Otherwise the transitions that also lie in the run's `demo_buffer` are human steps and the rest of `buffer` are the
policy's; other files are taken for demonstrations.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.data.formats.foreign import WRITE
from serl_chunk.data.formats.restricted_pickle import Unread, kind_of, load_plain
from serl_chunk.data.source import Format, ReadOptions, sorted_files, take_fraction
from serl_chunk.data.validate import Ending, check_key, choose_cameras, imported_episode, make_steps
from serl_chunk.io import plural
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, DataError, Episode, Outcome, Source, SparseRows

_SUFFIXES = (".pkl", ".pickle")
_OBSERVATIONS = ("observations", "next_observations")
_REQUIRED = ("observations", "actions", "next_observations", "rewards", "dones")


class Transitions(NamedTuple):
    """N transitions of one file in columns, and the dicts they came from (their images are not copied)."""

    state: np.ndarray  # float32[N, D]
    next_state: np.ndarray  # float32[N, D]
    action: np.ndarray  # float32[N, A]
    reward: np.ndarray  # float32[N]
    done: np.ndarray  # bool[N]
    mask: np.ndarray  # float32[N]
    success: np.ndarray  # bool[N]: a reward above 0, or infos["succeed"]
    has_infos: np.ndarray  # bool[N]: infos give the source of the action
    human: np.ndarray  # bool[N]: infos have an intervene_action
    penalised: int  # transitions with a grasp_penalty, which is not read
    cameras: dict[str, tuple[int, ...]]  # name in the file -> [H, W, 3]
    ignored: tuple[str, ...]  # observations that are neither the state nor a camera
    unread: tuple[str, ...]  # parts of infos whose objects are not read
    rows: list[dict[str, Any]]

    def frames(self, camera: str, start: int, stop: int, of: str = "observations") -> np.ndarray:
        """Return the images uint8[stop - start, H, W, 3] before the steps `start..stop`, as stored."""
        shape = self.cameras[camera]
        return np.stack([row[of][camera].reshape(shape) for row in self.rows[start:stop]])

    def digests(self) -> list[bytes]:
        """Return twenty bytes for each transition, by which it is recognised in another file."""
        rows = zip(self.state, self.action, self.next_state, strict=True)
        return [hashlib.sha1(b"".join(v.tobytes() for v in values)).digest() for values in rows]


def load_transitions(path: Path) -> Transitions:
    """Load all transitions in the file at `path`. Raises DataError with the file and the transition."""
    rows = load_plain(path)
    if other := _other_content(rows):
        raise DataError(f"{path}: holds {other}, not HIL-SERL's list of transitions. {WRITE}")
    for i, row in enumerate(rows):
        if type(row) is not dict:
            raise DataError(f"{path}: transitions[{i}] is {kind_of(row)}, not a dict; is this another pickle?")
        if missing := [k for k in _REQUIRED if k not in row]:
            keys = ", ".join(map(str, row)) or "nothing"
            raise DataError(f"{path}: transitions[{i}] has no {' and no '.join(missing)}; it has: {keys}")
        for key in _OBSERVATIONS:
            if type(row[key]) is not dict or STATE not in row[key]:
                raise DataError(
                    f"{path}: transitions[{i}].{key} is {kind_of(row[key])}, not a dict with 'state' (SERLObsWrapper "
                    "makes it)"
                )
    cameras, ignored = _cameras(path, rows)
    infos = [info if type(info := row.get("infos")) is dict else None for row in rows]
    reward, done = _scalars(path, rows, "rewards"), _scalars(path, rows, "dones") != 0
    succeeded = [
        info is not None and "succeed" in info and _number(path, i, "infos.succeed", info["succeed"]) > 0
        for i, info in enumerate(infos)
    ]
    return Transitions(
        state=_vectors(path, [row["observations"][STATE] for row in rows], "observations.state"),
        next_state=_vectors(path, [row["next_observations"][STATE] for row in rows], "next_observations.state"),
        action=_vectors(path, [row["actions"] for row in rows], "actions"),
        reward=reward,
        done=done,
        mask=_scalars(path, rows, "masks") if all("masks" in row for row in rows) else 1 - done,
        success=(reward > 0) | np.array(succeeded),
        has_infos=np.array([info is not None for info in infos]),
        human=np.array([info is not None and "intervene_action" in info for info in infos]),
        penalised=sum("grasp_penalty" in row | (info or {}) for row, info in zip(rows, infos, strict=True)),
        cameras=cameras,
        ignored=ignored,
        unread=tuple(sorted({text for row in rows for text in _unread(row.get("infos"))})),
        rows=rows,
    )


def _other_content(value: Any) -> str:
    """What a pickle holds in place of transitions; "" for a list of what may be some."""
    if type(value) is not list or not value:
        return "an empty list" if type(value) is list else kind_of(value)
    first = value[0]
    if type(first) in (list, tuple):
        return f"a list of {len(value)} lists, such as of trajectories"
    actions, rewards = (first.get(k) for k in ("actions", "rewards")) if type(first) is dict else (None, None)
    several = isinstance(rewards, list | np.ndarray) and np.size(rewards) > 1
    if isinstance(actions, list) or (isinstance(actions, np.ndarray) and actions.ndim == 2 and several):
        return f"a list of {len(value)} whole trajectories ({', '.join(map(str, first))})"
    return ""


def _vectors(path: Path, values: list[Any], name: str) -> np.ndarray:
    """Rows [D] or [1, D] as finite float32[N, D]."""
    out: list[np.ndarray] = []
    for i, value in enumerate(values):
        array = np.asarray(value if isinstance(value, np.ndarray) else None)
        if array.ndim == 2 and len(array) == 1:
            array = array[0]
        if array.ndim != 1 or array.dtype.kind not in "biuf" or (out and array.shape != out[0].shape):
            expected = f"[{len(out[0])}] as before" if out else "[D] or [1, D]; an observation horizon of 1 is read"
            raise DataError(
                f"{path}: transitions[{i}].{name} is {kind_of(value)}, expected numbers of shape {expected}"
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{path}: transitions[{i}].{name} is not finite. Record the episode again or leave it out")
        out.append(array)
    return np.stack(out)


def _unread(infos: Any) -> Iterator[str]:
    """Yield the name in a transition of each part of its `infos` that is not read, and what it is."""
    for name, value in infos.items() if type(infos) is dict else [("", infos)]:
        if type(name) is Unread or type(value) is Unread:
            yield f"infos{name and f'.{name}'} ({value if type(value) is Unread else name})"


def _scalars(path: Path, rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([_number(path, i, name, row[name]) for i, row in enumerate(rows)], np.float32)


def _number(path: Path, i: int, name: str, value: Any) -> float:
    array = np.asarray(value if isinstance(value, bool | int | float | np.generic | np.ndarray) else None)
    if array.size != 1 or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise DataError(f"{path}: transitions[{i}].{name} is {kind_of(value)}, expected one finite number")
    return float(array.reshape(()))


def _cameras(path: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """The cameras that every observation has, checked, and the names of the other observations."""
    first = rows[0]["observations"]
    cameras = {k: v.shape[-3:] for k, v in first.items() if type(k) is str and k != STATE and _is_image(v)}
    ignored = tuple(str(k) for k in first if k != STATE and k not in cameras)
    for i, row in enumerate(rows):
        for key in _OBSERVATIONS:
            for camera, shape in cameras.items():
                value = row[key].get(camera)
                if not _is_image(value) or value.shape[-3:] != shape:
                    what = "missing" if value is None else kind_of(value)
                    raise DataError(
                        f"{path}: transitions[{i}].{key}.{camera} is {what}, expected uint8{[*shape]} as in the first"
                    )
    return cameras, ignored


def _is_image(value: Any) -> bool:
    """Whether `value` is one image, uint8[H, W, 3] or [1, H, W, 3]."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (3, 4):
        return False
    return value.shape[-1] == 3 and (value.ndim == 3 or len(value) == 1)


class _Span(NamedTuple):
    """Transitions `start <= i < stop` of all files in a row, closed by "success", "done", "limit", "gap" or "last"."""

    start: int
    stop: int
    closed: str


class HilSerlSource:
    """Episodes of pickles, by file and first transition. The transitions of the last file read stay in memory."""

    format = "hil_serl"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        if options.success:
            raise ConfigError(
                f"{path}: HIL-SERL's transitions record their successes (reward > 0); success would turn time-outs "
                "into successes. Leave success out; failure sets the outcome of episodes without a success"
            )
        self.path, self._options = path, options
        self.hz = options.rate()
        self._files = next((f for f in map(_pickles, _folders(path)) if f), []) if path.is_dir() else [path]
        if not self._files:
            raise DataError(
                f"{path}: no .pkl file in it, nor in its buffer. Pass HIL-SERL's demo_data or a run's folder"
            )
        folder = self._files[0].parent
        marks = folder.parent / "demo_buffer"  # interventions among them
        self._marks = _pickles(marks) if folder.name == "buffer" and marks.is_dir() else []
        self._firsts: list[int] = []  # number of each file's first transition, and that of all
        self._counts: Counter[str] = Counter()
        self._cameras: dict[str, str] = {}  # name here -> name in the files
        self._ignored: tuple[str, ...] = ()
        self._unread: dict[str, None] = {}  # of all files
        self._interventions: set[bytes] = set()
        self._held: tuple[int, Transitions] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": None}  # other processes read for themselves

    def keys(self) -> list[str]:
        return list(self._spans)

    def read(self, key: str) -> Episode:
        """See Source. Its images are arrays: a pickle cannot be read in parts."""
        check_key(self._spans, key, self.path)
        span = self._spans[key]
        rows: list[list[np.ndarray]] = []  # of each file
        parts, cameras = self._parts(span), {IMAGE_PREFIX + name: stored for name, stored in self._cameras.items()}
        for file, start, stop in parts:
            t = self._load(file)
            columns = (each[start:stop] for each in (t.state, t.action, t.reward, self._sources(file, t)))
            rows.append([*columns, *(self._rgb(t.frames(stored, start, stop)) for stored in cameras.values())])
        last = stop - 1
        final = {STATE: t.next_state[last]}
        for name, stored in cameras.items():
            final[name] = self._rgb(t.frames(stored, last, stop, "next_observations")[0])
        state, action, reward, source, *images = map(np.concatenate, zip(*rows, strict=True))
        ticks = np.arange(len(action), dtype=np.int32)
        sparse = {name: SparseRows(ticks, frames) for name, frames in zip(cameras, images, strict=True)}
        steps = make_steps("", state, action, self.hz, sparse, reward=reward, source=source)
        path, first = self._files[parts[0][0]], parts[0][1]
        ending = Ending(final, False, Outcome.UNKNOWN)
        if span.closed == "success":
            ending = Ending(final, True, Outcome.SUCCESS, reward=1.0 if reward[-1] <= 0 else None)
        elif span.closed == "done" and self._options.success is False:
            ending = Ending(final, True, Outcome.FAILURE)
        return imported_episode(f"{path}, transition {first}", f"{path.stem}-{first}", steps, ending, self._options)

    def notes(self) -> list[str]:
        closed = Counter(span.closed for span in self._spans.values())
        count = self._counts
        failed = self._options.success is False
        fate = "failures, as failure sets" if failed else "truncated, outcome unknown (failure sets it)"
        known = {name: count[name] for name in ("infos", "demo_buffer", "file name") if count[name]}
        by = ", ".join(f"{name} ({plural(n, 'step')})" for name, n in known.items())
        rest = count["transitions"] - sum(known.values())
        renamed = [f"{stored} is {name}" for name, stored in self._cameras.items() if stored != name]
        transitions, penalised = (plural(count[name], "transition") for name in ("transitions", "grasp_penalty"))
        early, raised = plural(count["early"], "step"), plural(count["raised"], "episode")
        done, gap = plural(closed["done"], "episode"), plural(closed["gap"], "episode")
        no_color = self._cameras and self._options.color is None
        shown = {
            f"{transitions} in {plural(len(self._files), 'file')}; episodes recovered from `dones` and from states "
            "that follow one another": True,
            f"{done} ended without success: failure and time-out are stored alike; read as {fate}": closed["done"],
            f"{gap} broke off: the next transition begins in another state although no end is recorded; read as "
            "truncated": closed["gap"],
            "the last episode has no end (the file stops in it); read as truncated": closed["last"],
            f"{early} with a success before the end of their episode": count["early"],
            f"{raised} succeeded by infos['succeed'] alone: their last reward is 1": count["raised"],
            (f"the source of actions is known by {by}" if by else "the source of actions is not recorded")
            + (f"; {plural(rest, 'step')} taken for a human's" if rest else ""): True,
            f"{penalised} with a grasp_penalty, which is not part of the reward: not read": count["grasp_penalty"],
            f"cameras renamed: {', '.join(renamed)}": renamed,
            f"observations other than the state and images are not read: {', '.join(self._ignored)}": self._ignored,
            f"not read, being neither numbers nor texts: {', '.join(self._unread)}": self._unread,
            "colours: RGB, as HIL-SERL's cameras store them; the files do not record it (color=bgr)": no_color,
            "the files record no time: all stamps are 0; hz sets it (HIL-SERL's robots run at 10)": self.hz is None,
        }
        return [note for note, show in shown.items() if show]

    def _rgb(self, frames: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(frames[..., ::-1]) if self._options.color == "bgr" else frames

    def _load(self, file: int) -> Transitions:
        if self._held is None or self._held[0] != file:
            self._held = None  # first, so that there never are two
            self._held = (file, load_transitions(self._files[file]))
        return self._held[1]

    def _sources(self, file: int, t: Transitions) -> np.ndarray:
        """The source of each action, uint8[N]."""
        path = self._files[file]
        human: Any = _is_demo(path) or not _is_buffer(path)
        if self._marks and not _is_demo(path):
            human = [digest in self._interventions for digest in t.digests()]
        idle = (t.action == 0).all(axis=1)
        cases = {Source.HUMAN: np.where(t.has_infos, t.human, human), Source.HOLD: t.has_infos & idle}
        return np.select([*cases.values()], [*cases], Source.POLICY).astype(np.uint8)

    @functools.cached_property
    def _spans(self) -> dict[str, _Span]:
        """The episodes by their keys. Reads every file."""
        for mark in self._marks:
            self._interventions.update(load_transitions(mark).digests())
        shapes: tuple[Any, ...] = ()
        columns = []
        for file, path in enumerate(self._files):
            t = self._load(file)
            shapes = self._same_shapes(path, t, shapes)
            known, n = int(t.has_infos.sum()), len(t.done)
            by_name = "file name" if _is_demo(path) or _is_buffer(path) else "nothing"
            by = "demo_buffer" if self._marks and not _is_demo(path) else by_name
            self._unread.update(dict.fromkeys(t.unread))
            self._counts.update({"transitions": n, "grasp_penalty": t.penalised, "infos": known, by: n - known})
            columns.append((t.state, t.next_state, t.reward, t.done, t.mask, t.success))
        self._firsts = [0, *np.cumsum([len(done) for *_, done, _, _ in columns]).tolist()]
        state, after, reward, done, mask, success = map(np.concatenate, zip(*columns, strict=True))
        goes_on = np.append((state[1:] == after[:-1]).all(axis=1), False)
        stops = (np.flatnonzero(done | ~goes_on) + 1).tolist()
        kinds = np.select([done & success, done & (mask != 0), done], ["success", "limit", "done"], "gap").tolist()
        if not done[-1]:
            kinds[-1] = "last"
        self._counts.update(early=(success & ~done).sum(), raised=(done & success & (reward <= 0)).sum())
        spans = [_Span(start, stop, kinds[stop - 1]) for start, stop in itertools.pairwise([0, *stops])]
        begun = [self._parts(span)[0] for span in spans]
        keys = take_fraction([f"{self._files[file].name}:{i}" for file, i, _ in begun], self._options.proportion)
        return dict(zip(keys, spans, strict=False))

    def _parts(self, span: _Span) -> list[tuple[int, int, int]]:
        """The files that hold the span, with the first of its transitions in each and the one after the last."""
        bounds = enumerate(itertools.pairwise(self._firsts))
        parts = [(i, max(span.start, first) - first, min(span.stop, end) - first) for i, (first, end) in bounds]
        return [part for part in parts if part[1] < part[2]]

    def _same_shapes(self, path: Path, t: Transitions, before: tuple[Any, ...]) -> tuple[Any, ...]:
        """Dimensions that all files must share; sets the cameras by the first. Raises DataError."""
        shapes = (t.state.shape[1], t.next_state.shape[1], t.action.shape[1], tuple(sorted(t.cameras.items())))
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: states have {shapes[0]} values, those that follow them {shapes[1]}")
        if not before:
            named = {stored.replace("/", "_"): stored for stored in t.cameras}
            self._cameras = {k: named[k] for k in choose_cameras(path, named, self._options.cameras)}
            self._ignored = t.ignored
        elif shapes != before:
            raise DataError(
                f"{path}: {shapes[0]} state values, {shapes[2]} actions and cameras {sorted(t.cameras)}; the files "
                f"before it have {before[0]}, {before[2]} and {[name for name, _ in before[3]]}. Convert them apart"
            )
        return shapes


def _pickles(folder: Path) -> list[Path]:
    return sorted_files(p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES and p.is_file())


def _folders(path: Path) -> list[Path]:
    return [p for p in (path, path / "buffer", path / "demo_buffer") if p.is_dir()]


def _is_demo(path: Path) -> bool:
    return "demo" in path.name.lower() or "demo" in path.parent.name.lower()


def _is_buffer(path: Path) -> bool:
    return path.name.startswith("transitions_")


def _matches(path: Path) -> bool:
    if not path.is_file():
        return any(map(_pickles, _folders(path)))
    with path.open("rb") as file:  # by its first two bytes: each protocol from 2 on has its number there
        return path.suffix.lower() in _SUFFIXES or file.read(2) in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")


FORMAT = Format("hil_serl", _matches, HilSerlSource)
