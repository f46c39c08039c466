"""Images may travel as JPEG: smaller, almost the same, and nothing a stranger sends does harm."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming
from transport_tools import CONFIG, LIMITS, linked, serving

from serl_chunk.transport.sockets import free_port
from serl_chunk.transport.wire import codec, records
from serl_chunk.transport.wire.codec import WireError
from serl_chunk.transport.wire.records import decode_jpeg, encode_jpeg
from serl_chunk.types import Begin, End, Outcome, Source, Step, StepBlock

Y, X = np.mgrid[0:96, 0:128]
SMOOTH = np.stack([Y * 2, X, (X + Y)], -1).astype(np.uint8)


def block(n=4):
    rows = [
        Step(t, {"state": np.zeros(2, np.float32), "images/top": SMOOTH + np.uint8(t)}, np.zeros(2, np.float32), 0.0,
             Source.POLICY, t, 0, 0.0)
        for t in range(n)
    ]  # fmt: skip
    return StepBlock.from_steps("e", rows)


def test_images_come_back_almost_the_same_and_everything_else_exactly():
    sent = block()
    raw, small = records.encode_record(sent, 7), records.encode_record(sent, 7, jpeg_quality=95)
    assert codec.size_of(small) < codec.size_of(raw) / 8
    first, got = records.decode_record(codec.decode(small, LIMITS))
    assert first == 7
    assert (got.action == sent.action).all()
    a, b = got.sparse["images/top"], sent.sparse["images/top"]
    assert (a.index == b.index).all()
    assert a.values.shape == b.values.shape
    assert np.abs(a.values.astype(int) - b.values.astype(int)).mean() < 3  # of 255


def test_the_final_observation_too():
    end = End("e", 4, {"state": np.ones(2, np.float32), "images/top": SMOOTH}, False, True, Outcome.UNKNOWN)
    _, got = records.decode_record(codec.decode(records.encode_record(end, 0, jpeg_quality=90), LIMITS))
    assert got.final_observation.keys() == end.final_observation.keys()
    assert np.abs(got.final_observation["images/top"].astype(int) - SMOOTH.astype(int)).mean() < 3
    assert (got.final_observation["state"] == 1).all()


def test_a_link_with_the_option_delivers():
    got, port = [], free_port()
    config = dataclasses.replace(CONFIG, jpeg_quality=90)
    with serving(port, on_record=lambda info, record: got.append(record)), linked(port, config=config) as link:
        link.begin(Begin("e"))
        for t in range(3):
            link.step(Step(t, {"state": np.zeros(2, np.float32), "images/top": SMOOTH}, np.zeros(2, np.float32), 0.0,
                           Source.POLICY, t, 0, 0.0))  # fmt: skip
        assert link.flush(10)
        assert link.stats()["unacked_bytes"] == 0
    blocks = [r for r in got if isinstance(r, StepBlock)]
    assert sum(b.n for b in blocks) == 3
    assert all(b.sparse["images/top"].values.shape[1:] == SMOOTH.shape for b in blocks)


def bomb():
    """The head of an image of 5,000 x 5,000 pixels."""
    data, _ = encode_jpeg(SMOOTH[None], 50)
    data = data.copy()
    at = data.tobytes().index(b"\xff\xc0") + 5
    data[at : at + 4] = np.frombuffer((5_000).to_bytes(2, "big") * 2, np.uint8)
    return data


@pytest.mark.parametrize(
    ("data", "sizes", "named"),
    [
        (np.zeros(10, np.uint8), [10], ("images/top", "JPEG", "UnidentifiedImageError")),
        (encode_jpeg(SMOOTH[None], 50)[0][:200], [200], ("images/top", "JPEG", "OSError")),
        (bomb(), None, ("images/top", "5000x5000", records.MAX_JPEG_PIXELS)),
        (np.zeros(10, np.uint8), [4, 4], ("images/top", "sizes", 10)),
        (np.zeros(10, np.uint8), [-1, 11], ("images/top", "sizes", 10)),
        (np.zeros(0, np.uint8), [], ("images/top", "uint8[bytes]", "int32[images]")),
    ],
)
def test_what_is_no_image_is_refused(data, sizes, named):
    with pytest.raises(WireError, match=naming(*named)):
        decode_jpeg(data, np.array([len(data)] if sizes is None else sizes, np.int32), "images/top")


def test_images_of_two_sizes_are_refused():
    parts = [encode_jpeg(SMOOTH[None], 50)[0], encode_jpeg(SMOOTH[None, :48], 50)[0]]
    with pytest.raises(WireError, match=naming("images/top", SMOOTH.shape, SMOOTH[:48].shape)):
        decode_jpeg(np.concatenate(parts), np.array([len(p) for p in parts], np.int32), "images/top")


def test_sizes_must_match_the_index():
    message = codec.decode(records.encode_record(block(), 0, jpeg_quality=50), LIMITS)
    broken = dict(message.arrays) | {"sizes/images/top": message.arrays["sizes/images/top"][:-1]}
    with pytest.raises(WireError, match=naming("sizes/images/top")):
        records.decode_record(message._replace(arrays=broken))
    del broken["sizes/images/top"]
    with pytest.raises(WireError, match=naming("JPEG", "['images/top']", "[]")):
        records.decode_record(message._replace(arrays=broken))
