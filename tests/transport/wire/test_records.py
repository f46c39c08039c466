"""Images may travel as JPEG: smaller, almost the same, and nothing a stranger sends does harm."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
import threading
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from errors import naming
from growth import Growth
from hypothesis import given, settings
from PIL import Image, JpegImagePlugin
from ports import free_port
from properties import examples
from transport_tools import CONFIG, LIMITS, RawActor, end, eventually, linked, serving, shared, step

from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.jpeg import MAX_DECODED_BYTES, MAX_PIXELS, encode_jpeg, jpeg_images
from serl_chunk.transport.wire.records import MAX_PART_BYTES, Assembly, decode_part, encode_part
from serl_chunk.types import Amend, Begin, End, Outcome, Source, Step, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import WireError

Y, X = np.mgrid[0:96, 0:128]
SMOOTH = np.stack([Y * 2, X, (X + Y)], -1).astype(np.uint8)
ENDED = End("e", 4, {"state": np.ones(2, np.float32), "images/top": SMOOTH}, False, True, Outcome.UNKNOWN)
FILE = encode_jpeg(SMOOTH[None], 50)[0]


def block(n=4):
    zero = np.zeros(2, np.float32)
    seen = [{"state": zero, "images/top": SMOOTH + np.uint8(t)} for t in range(n)]
    return StepBlock.from_steps("e", [Step(t, seen[t], zero, 0.0, Source.POLICY, t, 0, 0.0) for t in range(n)])


def alike(a, b):
    return np.shape(a) == np.shape(b) and np.abs(np.asarray(a).astype(int) - np.asarray(b)).mean() < 3  # of 255


def bomb():
    """The head of an image of 5,000 x 5,000 pixels."""
    at = FILE.tobytes().index(b"\xff\xc0") + 5
    return np.concatenate([FILE[:at], np.frombuffer((5_000).to_bytes(2, "big") * 2, np.uint8), FILE[at + 4 :]])


LONG = np.concatenate([FILE, np.zeros(2 * SMOOTH.nbytes + (1 << 16), np.uint8)])  # more than its image can need
LOW = encode_jpeg(SMOOTH[None, :48], 50)[0]


@pytest.mark.parametrize(("data", "sizes", "named"), [
    (np.zeros(10, np.uint8), [10], ("images/top", "JPEG", "UnidentifiedImageError")),
    (bomb(), None, ("images/top", "5000x5000", MAX_PIXELS)), (LONG, None, ("images/top", "128x96", len(LONG))),
    (np.concatenate([FILE, LOW]), [len(FILE), len(LOW)], ("images/top", SMOOTH.shape, (48, 128, 3))),
    (np.zeros(10, np.uint8), [4, 4], ("images/top", "sizes", 10)),
    (np.zeros(0, np.uint8), [], ("images/top", "uint8[bytes]", "int32[images]")),
])  # fmt: skip
def test_what_is_no_image_is_refused(data, sizes, named):
    with pytest.raises(WireError, match=naming(*named)):
        np.asarray(jpeg_images(data, np.array([len(data)] if sizes is None else sizes, np.int32), "images/top"))


def test_sizes_must_match_the_index():
    message = codec.decode(records.encode_record(block(), 0, jpeg_quality=50), LIMITS)
    broken = dict(message.arrays) | {"sizes/images/top": message.arrays["sizes/images/top"][:-1]}
    with pytest.raises(WireError, match=naming("sizes/images/top")):
        records.decode_record(message._replace(arrays=broken))
    del broken["sizes/images/top"]
    with pytest.raises(WireError, match=naming("JPEG", "['images/top']", "[]")):
        records.decode_record(message._replace(arrays=broken))


@pytest.fixture
def no_pixels(monkeypatch):
    """Any decoding of pixels fails."""

    def refuse(self):
        raise AssertionError("pixels are decoded")

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", refuse)


def test_a_record_is_read_sliced_and_written_again_without_decoding_a_pixel(no_pixels):
    sent = records.encode_record(block(), 3, jpeg_quality=50)
    _, got = records.decode_record(codec.decode(sent, LIMITS))
    assert got.sparse["images/top"].values.shape == (4, *SMOOTH.shape)
    files = got.sparse["images/top"].values.files
    _, part = records.decode_record(codec.decode(records.encode_record(got.slice(1, 3), 4), LIMITS))
    assert part.sparse["images/top"].values.files == files[1:3]
    message = codec.decode(records.encode_record(ENDED, 0, jpeg_quality=90), LIMITS)
    _, got = records.decode_record(message)
    assert got.final_observation["images/top"][None].files == [message.arrays["jpeg/images/top"].tobytes()]
    noise = np.random.default_rng(0).integers(0, 256, SMOOTH.shape, np.uint8)  # the largest file that an image needs
    assert jpeg_images(*encode_jpeg(noise[None], 100), "images/top").shape == (1, *SMOOTH.shape)


def flat(height: int, width: int) -> bytes:
    """A small file of a large image."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "JPEG", quality=1)
    return buffer.getvalue()


def test_more_pixels_than_any_sender_has_are_refused_by_their_heads(no_pixels):
    file = flat(1000, 1000)
    n = MAX_DECODED_BYTES // 3_000_000 + 1
    data = np.frombuffer(file * n, np.uint8)
    with pytest.raises(WireError, match=naming("images/top", n, (1000, 1000, 3))):
        jpeg_images(data, np.full(n, len(file), np.int32), "images/top")
    assert len(jpeg_images(data[: len(file) * 9], np.full(9, len(file), np.int32), "images/top")) == 9


def test_a_bomb_is_refused_unread_while_another_actor_is_served(monkeypatch):
    """Twenty black images of 16 megapixels in one record: a gigabyte, for minutes of the only thread that receives."""
    decoded_by = []
    load = JpegImagePlugin.JpegImageFile.load

    def noted(self):
        decoded_by.append(threading.current_thread().name)
        return load(self)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", noted)
    n, file = 20, np.frombuffer(flat(4096, 4096), np.uint8)
    message = codec.decode(records.encode_record(block(n), 1, jpeg_quality=50), LIMITS)
    bomb = {"jpeg/images/top": np.concatenate([file] * n), "sizes/images/top": np.full(n, len(file), np.int32)}
    frames = codec.encode(records.STEPS, dict(message.header), message.arrays | bomb)
    got, port = [], free_port()
    growth = Growth()
    with (
        serving(port, on_record=lambda info, record: got.append(record)) as server,
        linked(port) as good,
        contextlib.closing(RawActor(port)) as bad,
    ):
        bad.record(records.encode_record(Begin("e"), 0))
        total = codec.size_of(frames)
        for offset in range(0, total, MAX_PART_BYTES):
            part = encode_part(1, n, frames, offset, min(MAX_PART_BYTES, total - offset))
            bad.data.send_multipart([bad.token, *part])
        good.begin(Begin("good"))
        assert good.flush(10)
        eventually(lambda: server.stats()["malformed"] == 1)
        refusal = bad.receive(bad.control)
    assert re.search(naming("images/top", n, (4096, 4096, 3)), str(refusal.header))
    assert ([r.episode_id for r in got], decoded_by) == (["e", "good"], [])
    assert growth.close() < 300 << 20  # bytes


def test_a_link_with_the_option_delivers_images_almost_the_same_and_everything_else_exactly():
    got, port, sent = [], free_port(), block()
    config = dataclasses.replace(CONFIG, jpeg_quality=90)
    with serving(port, on_record=lambda info, record: got.append(record)), linked(port, config=config) as link:
        link.begin(Begin("e"))
        for t in range(4):
            seen = {"state": np.zeros(2, np.float32), "images/top": sent.sparse["images/top"].values[t]}
            link.step(Step(t, seen, sent.action[t], 0.0, Source.POLICY, t, 0, 0.0))
        link.end(ENDED)
        assert link.flush(10)
        assert link.stats()["unacked_bytes"] == 0
    blocks = [r for r in got if isinstance(r, StepBlock)]
    assert sum(b.n for b in blocks) == 4
    for b in blocks:
        rows = b.sparse["images/top"]
        assert rows.index.tolist() == list(range(b.n))
        assert alike(rows.values, sent.sparse["images/top"].values[b.first_tick :][: b.n])
        assert (b.action == sent.action[b.first_tick :][: b.n]).all()
    final = got[-1].final_observation
    assert alike(final["images/top"], SMOOTH)
    assert (final["state"] == 1).all()
    raw, small = records.encode_record(sent, 7), records.encode_record(sent, 7, jpeg_quality=95)
    assert codec.size_of(small) < codec.size_of(raw) / 8


def round_trip(record, first=7):
    message = codec.decode([bytes(f) for f in records.encode_record(record, first)], LIMITS)
    assert message.kind == records.Item.of(record, 0).kind
    got_first, got = records.decode_record(message)
    assert got_first == first
    return got


def assert_equal(a, b):
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        a, b = vars(a), vars(b)
    elif hasattr(a, "_asdict"):
        a, b = a._asdict(), b._asdict()
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def joint_block(n=8, first=0):
    return StepBlock.from_steps("e", [step(t, t) for t in range(first, first + n)])


@pytest.mark.parametrize("record", [
    Begin("e", "do it", "fake", "abc", "s1", "g1", '{"profile": "p"}'), Begin("e", demonstration=True), joint_block(),
    end("e", 8), End("e", 0, None, False, True, Outcome.UNKNOWN),
    Amend("e", Outcome.FAILURE, "operator", True, 0.5, True),
    StepBlock.from_steps("e", [step(4), *(step(5 + i)._replace(repeats={"top": 4 * i}) for i in (0, 1))]),
    end("e", 8)._replace(repeats={"top": 7, "side": 0}),
    StepBlock.from_steps("e", [step(4), shared(step(5)), shared(step(6), (True, True))]),
])  # fmt: skip
def test_round_trip(record):
    assert_equal(round_trip(record), record)
    if isinstance(record, Amend) and record.reward:
        assert round_trip(record._replace(reward=np.float32(0.5))) == record


# Of each step: the policy's, a human's, or the numbers of the action that a human commanded.
actors = st.lists(st.sampled_from(["policy", "human", (True, False), (False, True), (True, True)]), min_size=1)


def acted(first, actors):
    steps = []
    for s, actor in zip(map(step, range(first, first + len(actors))), actors, strict=True):
        human = s._replace(source=Source.HUMAN, decision_tick=-1)
        steps.append(s if actor == "policy" else human if actor == "human" else shared(s, actor))
    return steps


@settings(max_examples=examples(50), deadline=None)
@given(actors, st.integers(0, 1000), st.data())
def test_partial_interventions_travel_in_any_blocks(actors, first, data):
    steps = acted(first, actors)
    whole = StepBlock.from_steps("e", steps)
    assert_equal(round_trip(whole), whole)
    start = data.draw(st.integers(0, len(steps) - 1))
    stop = data.draw(st.integers(start + 1, len(steps)))
    assert_equal(round_trip(whole.slice(start, stop)), StepBlock.from_steps("e", steps[start:stop]))
    queue, packed = deque(("e", s, records.step_bytes(s)) for s in steps), deque()
    while queue:
        records.pack_steps(queue, packed, data.draw(st.integers(1, 4000)))
    at = 0
    for joint_block, _, n in packed:
        assert_equal(round_trip(joint_block), whole.slice(at, at + n))
        at += n
    assert at == len(steps)


def _large() -> list[bytes]:
    """The frames of a joint_block of steps: its head, and images as a frame of their own."""
    rng = np.random.default_rng(0)
    steps = [step(t) for t in range(24)]
    for s in steps[::3]:
        s.observation["images/top"] = rng.integers(0, 256, (12, 16, 3), np.uint8)
    return [bytes(memoryview(f)) for f in records.encode_record(StepBlock.from_steps("e", steps), 3)]


FRAMES = _large()
TOTAL = codec.size_of(FRAMES)


def part(offset: int, nbytes: int, first: int = 3, frames: list[bytes] = FRAMES):
    sent = [bytes(memoryview(f)) for f in encode_part(first, 24, frames, offset, nbytes)]
    return decode_part(codec.decode(sent, LIMITS), LIMITS)


@given(st.lists(st.integers(1, TOTAL - 1), max_size=8, unique=True))
def test_parts_cut_anywhere_give_the_record_back(cuts):
    edges = [0, *sorted(cuts), TOTAL]
    assembly = Assembly(part(0, edges[1]))
    for start, stop in itertools.pairwise(edges):
        assert assembly.frames() is None
        assert (assembly.first, assembly.received) == (3, start)
        assert assembly.add(part(start, stop - start))
        assert assembly.add(part(start, stop - start))  # a repeated one changes nothing
    frames = assembly.frames()
    assert frames is not None
    assert [bytes(memoryview(f)) for f in frames] == FRAMES
    assert len(FRAMES) > 1
    message = codec.decode(frames, LIMITS)
    assert records.decode_record(message)[0] == 3
    assert not any(a.flags.writeable for a in message.arrays.values())
