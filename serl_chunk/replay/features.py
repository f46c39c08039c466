"""Features of observations that an agent's fixed weights compute, kept with the rows of the replay that show them.

A *place* holds the features of one input: of a frame, where features depend on one camera's frame alone, else of an
observation. Several rows may show the same input.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from serl_chunk.replay.frame_storage import Fetch, FreeList
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, CameraSpec, ConfigError

_EMPTY, _MISSING, _KNOWN = 0, 1, 2  # no input; one whose features are not computed yet; one with features
PLACE_BYTES = 9  # of a place, in addition to its features: what it holds, and how often it was written
ROW_PLACE_BYTES = 16  # and of an observation's place: its row, and its entry in the free list
ROW_BYTES = 8  # of a row of the replay, for each group whose places are observations

Shapes = Mapping[str, tuple[int, ...]]  # of one input's features, by name
Values = dict[str, np.ndarray]  # features float16[N, ...] by name


class FeatureSpec(Protocol):
    """The shape of one feature, float16[N, *shape], and the entries of an observation that it is computed of."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]: ...


class Embedder(Protocol):
    """Computes features of observations as the agent reads them; safe to call from any thread."""

    @property
    def features(self) -> Mapping[str, FeatureSpec]:
        """All features by the names that they have in batches, without computing any."""

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> Values:
        """Return the features whose entries are all in `inputs`.

        These are state float32[N, S], images/<camera> uint8[N, H, W, 3], prompt int32[N, L], prompt_mask bool[N, L].
        """


class Group(NamedTuple):
    """Features that are computed of the same entries, at the same time."""

    reads: tuple[str, ...]
    shapes: Shapes

    @property
    def frame(self) -> str | None:
        """The entry `images/<camera>` where it alone is read."""
        return self.reads[0] if len(self.reads) == 1 and self.reads[0].startswith(IMAGE_PREFIX) else None

    @property
    def nbytes(self) -> int:
        """Bytes of one input's features."""
        return sum(2 * int(np.prod(shape)) for shape in self.shapes.values())


def groups_of(features: Mapping[str, FeatureSpec]) -> list[Group]:
    """Return the groups of `features`, in the order of their first ones."""
    shapes: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for name, spec in features.items():
        shapes.setdefault(tuple(sorted(spec.reads)), {})[name] = spec.shape
    return [Group(*pair) for pair in shapes.items()]


# Of what places int64[K] of a table hold: the entries [K, ...] that are read, and what completes them.
Inputs = Callable[["FeatureTable", np.ndarray], tuple[Mapping[str, np.ndarray], Sequence[Fetch]]]


class FeatureTable:
    """Features of one group by their places; safe to use from several threads.

    Each write of an input calls `placed`: features that were computed of the one before are not kept. `places`: those
    at first; more are made as inputs need them. Memory becomes resident as it is filled.

    Args:
        place: int64[rows], the place of each row's input; what reads it holds the replay's lock.
        cameras: numbers of the cameras whose frames are read.
    """

    def __init__(self, group: Group, place: np.ndarray, cameras: Sequence[int], places: int) -> None:
        self.group, self.place, self.cameras = group, place, list(cameras)
        self._values = {name: np.empty((places, *shape), np.float16) for name, shape in group.shapes.items()}
        self._holds = np.zeros(places, np.uint8)
        self._writes = np.zeros(places, np.int64)
        self._lock = threading.Lock()
        self.computed, self.seconds = 0, 0.0  # so far, and the time that it took

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in self._values.values()) + self._holds.nbytes + self._writes.nbytes

    @property
    def known(self) -> int:
        return int((self._holds == _KNOWN).sum())

    @property
    def missing(self) -> int:
        return int((self._holds == _MISSING).sum())

    @property
    def held_bytes(self) -> int:
        return self.known * self.group.nbytes

    def placed(self, places: np.ndarray) -> None:
        """New inputs are in `places` int64[K], which are made where there are fewer."""
        with self._lock:
            more = int(places.max(initial=-1)) + 1 - len(self._holds)
            if more > 0:
                more = max(more, len(self._holds) // 4)
                self._values = {name: _longer(values, more) for name, values in self._values.items()}
                self._holds, self._writes = _longer(self._holds, more), _longer(self._writes, more)
            self._holds[places] = _MISSING
            self._writes[places] += 1

    def released(self, places: np.ndarray) -> None:
        with self._lock:
            self._holds[places] = _EMPTY
            self._writes[places] += 1

    def read(self, places: np.ndarray) -> tuple[Values, np.ndarray]:
        """Return fresh features [B, ...] of `places` int64[B], and bool[B], which of them are defined."""
        with self._lock:
            return {name: values[places] for name, values in self._values.items()}, self._holds[places] == _KNOWN

    def first_missing(self, limit: int) -> np.ndarray:
        """Up to `limit` places of inputs without features, int64[K]."""
        return np.flatnonzero(self._holds == _MISSING)[:limit]

    def computation(
        self, places: np.ndarray, embed: Embedder, inputs: Mapping[str, np.ndarray], loads: Sequence[Fetch]
    ) -> Callable[[], Values]:
        """Return what computes the features of different `places` int64[K] and keeps those that are still theirs.

        It needs no lock. `inputs` [K, ...] are what the places hold now, once `loads` were called.
        """
        with self._lock:
            writes = self._writes[places]

        def compute() -> Values:
            for load in loads:
                load()
            start = time.perf_counter()
            computed = embed(inputs)
            values = {name: computed[name] for name in self._values}
            self._keep(places, writes, values, time.perf_counter() - start)
            return values

        return compute

    def _keep(self, places: np.ndarray, writes: np.ndarray, values: Values, seconds: float) -> None:
        """Keep `values` [K, ...] of the inputs in `places` that were not written since `writes` int64[K]."""
        with self._lock:
            self.computed += len(places)
            self.seconds += seconds
            same = self._writes[places] == writes
            places = places[same]
            for name, kept in self._values.items():
                kept[places] = values[name][same]
            self._holds[places] = _KNOWN


class RowTable(FeatureTable):
    """Features that are computed of more than one frame: a place is an observation.

    Consecutive rows of an episode share a place where nothing that is read changes between them. Rows that no batch
    shows have none, place -1. The caller of every method of this class holds the replay's lock.
    `frame`: int64[rows, C], the slots of the frames that the replay's rows show.
    """

    def __init__(self, group: Group, frame: np.ndarray, cameras: Sequence[int], places: int) -> None:
        super().__init__(group, np.empty(len(frame), np.int64), cameras, places)
        self.row = np.empty(places, np.int64)  # the first one that shows what is in each place
        self._slots = FreeList(places)
        self._frame = frame

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.place.nbytes + self.row.nbytes + self._slots.nbytes

    def enter(self, rows: np.ndarray, shown: np.ndarray, held: list[np.ndarray]) -> int:
        """Give `rows` int64[K], behind those that their episode has, their places; return how many are new.

        `shown`: bool[K], the rows that batches may show; `held`: the episode's places, in order; gets the new ones.
        """
        self.place[rows] = -1
        rows = rows[shown]
        if not len(rows):
            return 0
        latest = held[-1][-1:] if held else np.empty(0, np.int64)
        before = np.concatenate([self.row[latest] if held else rows[:1], rows[:-1]])
        new = np.full(len(rows), STATE in self.group.reads)
        new |= (self._frame[rows] != self._frame[before])[:, self.cameras].any(1)
        new[0] |= not held
        places = self._slots.take(int(new.sum()))
        self.place[rows] = np.concatenate([latest, places])[np.cumsum(new) - (not held)]
        self.row[places] = rows[new]
        self.placed(places)
        held += [places] if len(places) else []
        return len(places)

    def withdraw(self, row: int, held: list[np.ndarray]) -> int:
        """Undo `enter` of an episode's last row; return how many places are free again, 0 or 1."""
        if not held or self.row[held[-1][-1]] != row:
            return 0
        last = held.pop()
        held += [last[:-1]] if len(last) > 1 else []
        self.leave(last[-1:])
        return 1

    def leave(self, places: np.ndarray) -> None:
        self._slots.give_back(places)
        self.released(places)


class ObservationFeatures:
    """What an embedder computes of the replay's observations; nothing without one. Its caller holds the replay's lock.

    Args:
        frame: int64[rows, C], the slots of the frames that the replay's rows show.
        frames: places for each camera's frames; `observations`: for what is computed of more than one frame.
        texts: whether observations have the tasks' texts.

    Raises ConfigError for a feature of an entry that observations do not have.
    """

    def __init__(
        self, embed: Embedder | None, cameras: Sequence[CameraSpec], frame: np.ndarray,
        *, frames: int, observations: int, texts: bool,
    ) -> None:  # fmt: skip
        self._embed, self.tables = embed, list[FeatureTable]()
        keys = [IMAGE_PREFIX + camera.name for camera in cameras]
        entries = [STATE, *keys, *([PROMPT, PROMPT_MASK] if texts else [])]
        for group in () if embed is None else groups_of(embed.features):
            if lacking := [key for key in group.reads if key not in entries]:
                raise ConfigError(
                    f"{', '.join(group.shapes)}: computed of {', '.join(lacking)}, which no stored observation has "
                    f"(valid: {', '.join(entries)}). Name cameras in agent.image_keys, or set agent.language.tokenizer"
                )
            read = [c for c, key in enumerate(keys) if key in group.reads]
            if group.frame is None:
                self.tables.append(RowTable(group, frame, read, observations))
            else:
                self.tables.append(FeatureTable(group, frame[:, read[0]], read, frames))
        self.row_tables = [table for table in self.tables if isinstance(table, RowTable)]
        self.of_frames = {t.cameras[0]: t for t in self.tables if t.group.frame is not None}
        # Entries that batches have features in place of. The state stays, for networks read it in addition.
        self.replaced = {key for table in self.tables for key in table.group.reads} - {STATE}

    def at(self, rows: np.ndarray, inputs: Inputs) -> tuple[Values, list[Fetch]]:
        """Return the features [B, ...] at `rows` int64[B], fresh, and what computes those that are missing."""
        out: Values = {}
        pending: list[Fetch] = []
        for table in self.tables:
            places = table.place[rows]
            assert places.min(initial=0) >= 0, "a row that has no features is shown"
            values, known = table.read(places)
            out |= values
            if not known.all():
                at = np.flatnonzero(~known)
                different, which = np.unique(places[at], return_inverse=True)
                compute = self._computation(table, different, inputs)
                pending.append(functools.partial(_fill, values, at, which, compute))
        return out, pending

    def missing(self, limit: int, inputs: Inputs) -> tuple[int, Fetch] | None:
        """Return of how many inputs, up to `limit`, features are missing, and what computes these; None: of none."""
        for table in self.tables:
            if len(places := table.first_missing(limit)):
                return len(places), self._computation(table, places, inputs)
        return None

    def _computation(self, table: FeatureTable, places: np.ndarray, inputs: Inputs) -> Callable[[], Values]:
        assert self._embed is not None
        return table.computation(places, self._embed, *inputs(table, places))


def _fill(values: Values, at: np.ndarray, which: np.ndarray, compute: Callable[[], Values]) -> None:
    for name, computed in compute().items():
        values[name][at] = computed[which]


def _longer(values: np.ndarray, more: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((more, *values.shape[1:]), values.dtype)])
