"""Records as messages, with images raw or as JPEG.

Every record has a sequence number within its session; a block of N steps takes N numbers, `first` is its lowest.
Decoding validates everything a reader relies on, the pixels of JPEG images excepted. JPEG is lossy: ten to seventeen
times smaller at quality 95 on camera images, at a tenth of a millisecond per 128x128 frame.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.transport.wire.jpeg import JpegImage, JpegImages, encode_jpeg, jpeg_images
from serl_chunk.types import (
    DECISION_PREFIX,
    HUMAN_DIMS,
    IMAGE_PREFIX,
    REPEAT_PREFIX,
    STEP_COLUMNS,
    Amend,
    Begin,
    End,
    Outcome,
    Record,
    Source,
    SparseRows,
    Step,
    StepBlock,
    human_dims_fault,
)
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Frame, Limits, Message, WireError

BEGIN, STEPS, END, AMEND = "begin", "steps", "end", "amend"
KINDS = (BEGIN, STEPS, END, AMEND)
LOST = "lost"  # stands for records that a damaged disk took
_KIND_OF: dict[type, str] = dict(zip((Begin, StepBlock, End, Amend), KINDS, strict=True))

_NONE = type(None)
_LAST_SOURCE = max(Source)
_MAX_REWARD = float(np.finfo(np.float32).max)
_MAX_BLOCK_STEPS = 512
# Measured with camera rows: more means fresh memory pages for every block, less means more calls.
MAX_BLOCK_BYTES = 1 << 20
_TURN_BYTES = 4 * MAX_BLOCK_BYTES  # packed at a time, so that sending and heartbeats get their turn
_TURN_RECORDS = 256  # the same for small ones: each takes some 50 us to pack and send
_FIXED_STEP_BYTES = 64  # of a step in addition to its arrays, rounded up
_NAMES: codec.Checks = dict.fromkeys(("episode_id", "outcome_by"), codec.identifier)
_MAX_CONDITIONS = 1 << 16  # characters
_BEGIN: codec.Checks = {
    **dict.fromkeys(Begin._fields, codec.identifier),
    "task": codec.text,
    "conditions": functools.partial(codec.identifier, limit=_MAX_CONDITIONS),
    "demonstration": codec.exactly(bool),
}
_COLUMNS = np.dtype([*STEP_COLUMNS.items()])  # of one step; packed: what has one value a step travels as one array
PART = "part"
MAX_PART_BYTES = (1 << 20) + (1 << 16)  # and so of a frame: what is larger travels in parts


class Item(NamedTuple):
    """The part of a record that the numbering of a stream depends on (`storage/record_store.py`)."""

    kind: str  # of KINDS, or LOST
    first: int  # lowest sequence number
    span: int  # sequence numbers it takes: steps of a block, else 1
    episode: str = ""
    lost_steps: int = 0  # of a LOST item: how many of its numbers were steps
    demonstration: bool = False  # of a BEGIN: see `types.Begin`

    @classmethod
    def of(cls, record: Record, first: int) -> Item:
        span = record.n if isinstance(record, StepBlock) else 1
        demonstration = isinstance(record, Begin) and record.demonstration
        return cls(_KIND_OF[type(record)], first, span, record.episode_id, demonstration=demonstration)

    @property
    def end(self) -> int:
        return self.first + self.span

    @property
    def steps(self) -> int:
        return self.span if self.kind == STEPS else self.lost_steps


QueuedRecord = tuple[str, Step | Record, int]  # episode, step or other record, bytes of its arrays
PackedRecord = tuple[Record, int, int]  # a record, bytes of its arrays, how many queued ones are in it


def step_bytes(step: Step) -> int:
    """Bytes that a step takes in memory, rounded up."""
    arrays = [step.action, *step.observation.values(), *(np.asarray(v) for v in (step.decision or {}).values())]
    arrays += [] if step.human_dims is None else [np.asarray(step.human_dims)]
    return _FIXED_STEP_BYTES + sum(a.nbytes for a in arrays)


def pack_steps(queue: deque[QueuedRecord], packed: deque[PackedRecord], block_bytes: int) -> None:
    """Move a turn's worth of `queue` into `packed`; consecutive steps become blocks of at most `block_bytes`."""
    block: list[Step] = []
    nbytes_of_block, block_episode, moved = 0, "", 0
    shapes: dict[str, Any] = {}  # of a block of two steps or more: the live case, one step, does not need them

    def finish() -> None:
        nonlocal nbytes_of_block
        if block:
            packed.append((StepBlock.from_steps(block_episode, block), nbytes_of_block, len(block)))
            block.clear()
            shapes.clear()
            nbytes_of_block = 0

    def fits(step: Step) -> bool:
        if not shapes:
            shapes.update(_shapes(block[0]))
        return all(shapes.setdefault(key, shape) == shape for key, shape in _shapes(step).items())

    while queue and moved < _TURN_BYTES and len(packed) < _TURN_RECORDS:
        episode, record, nbytes = queue.popleft()
        moved += nbytes + _FIXED_STEP_BYTES
        if not isinstance(record, Step):
            finish()
            packed.append((record, nbytes, 1))
            continue
        if block and (
            episode != block_episode
            or record.tick != block[-1].tick + 1
            or len(block) == _MAX_BLOCK_STEPS
            or nbytes_of_block + nbytes > block_bytes
            or not fits(record)
        ):
            finish()
        block.append(record)
        nbytes_of_block, block_episode = nbytes_of_block + nbytes, episode
    finish()


def _shapes(step: Step) -> dict[str, Any]:
    """Return the shapes of a step's arrays; under "" those that all steps of a block have."""
    sparse = {DECISION_PREFIX + k: np.asarray(v) for k, v in (step.decision or {}).items()}
    sparse |= {k: v for k, v in step.observation.items() if k.startswith(IMAGE_PREFIX)}
    sparse |= {} if step.human_dims is None else {HUMAN_DIMS: np.asarray(step.human_dims, np.uint8)}
    dense = {k: v.shape for k, v in step.observation.items() if not k.startswith(IMAGE_PREFIX)}
    return {"": (step.action.shape, dense)} | {k: (v.shape, v.dtype) for k, v in sparse.items()}


def encode_record(record: Record, first: int, *, jpeg_quality: int = 0) -> list[Frame]:
    """Return frames of `record`, numbered from `first`; images as JPEG where a quality (1..100) is given.

    Raises WireError for a value that cannot travel.
    """
    header: dict[str, Any] = {"first": first}
    arrays: dict[str, np.ndarray] = {}
    match record:
        case Begin():
            header.update(record._asdict())
        case StepBlock():
            header.update(episode_id=record.episode_id, first_tick=record.first_tick)
            arrays["action"] = record.action
            table = np.empty(record.n, _COLUMNS)
            for name in STEP_COLUMNS:
                table[name] = getattr(record, name)
            arrays["columns"] = table.view(np.uint8).reshape(record.n, _COLUMNS.itemsize)
            arrays.update({f"observation/{k}": v for k, v in record.observation.items()})
            for key, rows in record.sparse.items():
                arrays[f"index/{key}"] = rows.index
                if isinstance(rows.values, JpegImages) or (jpeg_quality and key.startswith(IMAGE_PREFIX)):
                    arrays[f"jpeg/{key}"], arrays[f"sizes/{key}"] = encode_jpeg(rows.values, jpeg_quality)
                else:
                    arrays[f"values/{key}"] = rows.values
        case End():
            header.update(record._asdict(), outcome=record.outcome.value, reward=_plain(record.reward))
            header["environment"] = None if record.environment is None else record.environment.value
            header["final_observation"] = record.final_observation is not None
            for key, value in (record.final_observation or {}).items():
                if jpeg_quality and key.startswith(IMAGE_PREFIX):
                    arrays[f"jpeg/{key}"], _ = encode_jpeg(np.asarray(value)[None], jpeg_quality)
                else:
                    arrays[key] = np.asarray(value)
        case Amend():
            header.update(record._asdict(), reward=_plain(record.reward))
            header["outcome"] = None if record.outcome is None else record.outcome.value
    return codec.encode(_KIND_OF[type(record)], header, arrays)


def _plain(value: float | None) -> float | None:
    return None if value is None else float(value)  # msgpack takes no numpy scalar


def decode_record(message: Message) -> tuple[int, Record]:
    """(`first`, record) of a decoded message; raises WireError naming what is wrong."""
    header, arrays = message.header, message.arrays
    first = codec.count(header, "first")
    if message.kind == STEPS:
        return first, _steps(header, arrays)
    if message.kind == END:
        return first, _end(header, arrays)
    if arrays:
        raise WireError(f"a {message.kind!r} record carries no arrays")
    if message.kind == BEGIN:
        return first, Begin(**codec.fields(header, _BEGIN))
    if message.kind == AMEND:
        return first, Amend(**codec.fields(header, _AMEND))
    raise WireError(f"{message.kind!r} is not a record; valid are {', '.join(KINDS)}")


def _outcome(header: Mapping[str, Any], name: str) -> Outcome | None:
    value = codec.field(header, name, (str, _NONE))
    if value is not None and value not in set(Outcome):
        raise WireError(f"outcome {value!r} is not one of {', '.join(Outcome)}")
    return None if value is None else Outcome(value)


def _reward(header: Mapping[str, Any], name: str) -> float | None:
    value = codec.field(header, name, (float, int, _NONE))
    if value is not None and not math.isfinite(value):
        raise WireError(f"reward must be finite, got {value}")
    if value is not None and abs(value) > _MAX_REWARD:
        raise WireError(f"reward must fit a float32, whose largest is {_MAX_REWARD:g}, got {value}")
    return None if value is None else float(value)


_AMEND: codec.Checks = {
    **_NAMES, "outcome": _outcome, "reward": _reward, "terminated": codec.exactly(bool, _NONE),
    "discard": codec.exactly(bool),
}  # fmt: skip
_END: codec.Checks = {
    **_NAMES, "length": codec.count, "outcome": _outcome, "reward": _reward, "environment": _outcome,
    **dict.fromkeys(("terminated", "truncated"), codec.exactly(bool)),
}  # fmt: skip


def _end(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> End:
    present = codec.field(header, "final_observation", bool)
    if arrays and not present:
        raise WireError("an end without a final observation carries no arrays")
    final: dict[str, Any] = {}
    for name, value in arrays.items():
        if name.startswith("jpeg/"):
            key = name.removeprefix("jpeg/")
            final[key] = JpegImage(jpeg_images(value, np.array([value.size], np.int32), name))
            continue
        final[name] = value
        if name.startswith(IMAGE_PREFIX):
            _check_array(name, value, np.dtype(np.uint8), 3)
        else:
            _check_array(name, value, np.dtype(np.float32), None)
    codec.field(header, "outcome", str)  # an Amend's may be None
    repeats, length = codec.field(header, "repeats", (dict, _NONE)) if present else None, codec.count(header, "length")
    if any(type(k) is not str for k in repeats or ()):
        raise WireError("repeats must be a map of cameras to ticks")
    if any(type(tick) is not int or not 0 <= tick < length for tick in (repeats or {}).values()):
        raise WireError(f"repeats of a final observation must name ticks 0..{length - 1}")
    return End(**codec.fields(header, _END), final_observation=final if present else None, repeats=repeats)


def _check_array(name: str, array: np.ndarray | JpegImages, dtype: np.dtype[Any], ndim: int | None) -> None:
    if array.dtype != dtype or (ndim is not None and array.ndim != ndim):
        wanted = f"{dtype}" + (f" with {ndim} dimensions" if ndim is not None else "")
        raise WireError(f"array {name!r} must be {wanted}, got {array.dtype} {array.shape}")


def columns_in(table: np.ndarray) -> dict[str, np.ndarray]:
    """Return `STEP_COLUMNS` by name, views of the array `columns` of a block of steps. Raises WireError."""
    if table.dtype != np.uint8 or table.ndim != 2 or table.shape[1] != _COLUMNS.itemsize:
        raise WireError(
            f"array 'columns' must be uint8 with {_COLUMNS.itemsize} bytes a step, got {table.dtype} {table.shape}"
        )
    rows = table.view(_COLUMNS)[:, 0]
    return {name: rows[name] for name in STEP_COLUMNS}


def _steps(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> StepBlock:
    left = dict(arrays)
    try:
        action = left.pop("action")
        columns = columns_in(left.pop("columns"))
    except KeyError as e:
        raise WireError(f"a block of steps without {e}") from e
    _check_array("action", action, np.dtype(np.float32), 2)
    n = len(action)
    if n < 1:
        raise WireError("a block of no steps")
    _check_rows("columns", columns["reward"], n)
    groups: dict[str, dict[str, Any]] = {name: {} for name in ("observation", "index", "values", "jpeg", "sizes")}
    for path, array in left.items():
        group, _, key = path.partition("/")
        if group not in groups or not key:
            raise WireError(f"a block of steps has no array {path!r}")
        groups[group][key] = array
        if group == "observation":
            _check_array(path, array, np.dtype(np.float32), None)
            _check_rows(path, array, n)
    observation, indices, values, files, sizes = groups.values()
    if files.keys() != sizes.keys() or files.keys() & values.keys():
        raise WireError(f"JPEG images need their sizes and no values: {sorted(files)}, {sorted(sizes)}")
    for key, data in files.items():
        if sizes[key].shape != indices.get(key, sizes[key]).shape:
            raise WireError(f"sizes/{key} must have one entry for each index")
        values[key] = jpeg_images(data, sizes[key], key)
    if indices.keys() != values.keys():
        raise WireError(f"sparse arrays need an index and values each, got {sorted(indices)} and {sorted(values)}")
    sparse = {key: _sparse(key, index, values[key], n) for key, index in indices.items()}
    first_tick = codec.count(header, "first_tick")
    _check_columns(columns, first_tick, n)
    for key, rows in sparse.items():
        if key.startswith(REPEAT_PREFIX):
            _check_array(f"values/{key}", rows.values, np.dtype(np.int32), 1)
            ticks = (first_tick + rows.index).tolist()
            if not all(0 <= named < tick for tick, named in zip(ticks, rows.values.tolist(), strict=True)):
                raise WireError(f"values/{key} must name ticks before the step's own")
    episode = codec.identifier(header, "episode_id")
    block = StepBlock(episode, first_tick, observation, action, **columns, sparse=sparse)
    if fault := human_dims_fault(block):
        raise WireError(f"values/{fault}")
    return block


def _check_rows(name: str, array: np.ndarray | JpegImages, n: int) -> None:
    if array.ndim < 1 or len(array) != n:
        raise WireError(f"array {name!r} must have a row for each of {n} steps, got shape {array.shape}")


def _check_columns(columns: dict[str, np.ndarray], first_tick: int, n: int) -> None:
    # Lists: for the single step of a live message numpy's reductions take ten times as long.
    source, decided = max(columns["source"].tolist()), columns["decision_tick"].tolist()
    if min(columns["lost_ticks"].tolist()) < 0:
        raise WireError("lost_ticks must not be negative")
    if source > _LAST_SOURCE:
        raise WireError(f"source must be 0..{int(_LAST_SOURCE)}, got {source}")
    if first_tick + n >= 2**31:
        raise WireError(f"first_tick {first_tick} is out of any bound")
    if not all(-1 <= at <= tick for tick, at in enumerate(decided, first_tick)):
        raise WireError("decision_tick must lie between -1 and the step's own tick")


def _sparse(key: str, index: np.ndarray, values: Any, n: int) -> SparseRows:
    if key != HUMAN_DIMS and not key.startswith((IMAGE_PREFIX, DECISION_PREFIX, REPEAT_PREFIX)):
        raise WireError(
            f"sparse array {key!r} must be {HUMAN_DIMS!r} or start with {IMAGE_PREFIX!r}, {DECISION_PREFIX!r} or "
            f"{REPEAT_PREFIX!r}"
        )
    _check_array(f"index/{key}", index, np.dtype(np.int32), 1)
    if key.startswith(IMAGE_PREFIX):
        _check_array(f"values/{key}", values, np.dtype(np.uint8), 4)
    _check_rows(f"values/{key}", values, len(index))
    at = index.tolist()
    if not at or at[0] < 0 or at[-1] >= n or any(b <= a for a, b in itertools.pairwise(at)):
        raise WireError(f"index/{key} must increase within 0..{n - 1}")
    return SparseRows(index, values)


class Part(NamedTuple):
    """A range of a record's bytes."""

    first: int  # lowest sequence number of the record
    span: int  # sequence numbers it takes
    sizes: tuple[int, ...]  # bytes of each of its frames
    offset: int  # of `data` in these frames together
    data: np.ndarray  # uint8[bytes]

    @property
    def end(self) -> int:
        return self.first + self.span


def encode_part(first: int, span: int, frames: Sequence[Frame], offset: int, nbytes: int) -> list[Frame]:
    """Return the part of a record that begins at byte `offset`; not copied where it lies within one frame."""
    buffers = [codec.buffer_of(f) for f in frames]
    header = {"first": first, "span": span, "sizes": [b.nbytes for b in buffers], "offset": offset}
    pieces, start, end = [], 0, offset + nbytes
    for b in buffers:
        if start < end and offset < start + b.nbytes:
            pieces.append(b[max(0, offset - start) : end - start])
        start += b.nbytes
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return codec.encode(PART, header, {"data": np.frombuffer(data, np.uint8)})


def decode_part(message: Message, limits: Limits) -> Part:
    """Return the part in a message. Raises WireError, also for a part of a record beyond the limits."""
    h = message.header
    sizes = codec.field(h, "sizes", list)
    if not 1 <= len(sizes) <= limits.max_arrays + 1:
        raise WireError(f"a part of a record of {len(sizes) - 1} arrays; the limit is {limits.max_arrays}")
    if any(type(n) is not int or n < 0 for n in sizes):
        raise WireError("a part's record has frames whose sizes are non-negative integers")
    total = sum(sizes)
    if total > limits.max_message_bytes:
        raise WireError(f"a part of a record of {total} bytes; the limit is {limits.max_message_bytes}")
    part = Part(
        codec.count(h, "first"), codec.count(h, "span"), tuple(sizes), codec.count(h, "offset"),
        message.arrays.get("data", np.empty(0, np.uint8)),
    )  # fmt: skip
    if part.data.dtype != np.uint8 or part.data.ndim != 1 or not part.data.size or len(message.arrays) != 1:
        raise WireError("a part carries one array, uint8[bytes], and not an empty one")
    if part.span < 1 or part.offset + part.data.size > total:
        raise WireError(f"a part of {part.data.size} bytes from {part.offset} lies outside its record of {total} bytes")
    return part


class Assembly:
    """The parts of one record that have arrived. `first` and `received` are where the sender continues."""

    def __init__(self, part: Part) -> None:
        self.first = part.first
        self.received = 0  # bytes
        self._sizes = part.sizes
        self._bytes = np.empty(sum(part.sizes), np.uint8)  # the system gives the memory as parts are written into it

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def add(self, part: Part) -> bool:
        """Add a part; False where it leaves a gap or is of another record. A repeated one is ignored."""
        end = part.offset + part.data.size
        if (part.first, part.sizes) != (self.first, self._sizes) or part.offset > self.received:
            return False
        if end > self.received:
            self._bytes[part.offset : end] = part.data
            self.received = end
        return True

    def frames(self) -> list[Frame] | None:
        if self.received < len(self._bytes):
            return None
        whole, ends = self._bytes.data.toreadonly(), itertools.accumulate(self._sizes)
        return [whole[end - n : end] for n, end in zip(self._sizes, ends, strict=True)]
