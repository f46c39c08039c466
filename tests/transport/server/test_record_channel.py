"""Records in parts at the learner, by hand: order, gaps, limits, and what is kept of a session that is away."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ports import free_port
from transport_tools import CONFIG, Inbox, RawActor, eventually, serving, step

from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import REFUSED
from serl_chunk.transport.wire.records import PART, encode_part
from serl_chunk.types import Begin, StepBlock
from serl_chunk_robot.wire import codec

FRAMES = records.encode_record(StepBlock.from_steps("e", [step(t, t) for t in range(12)]), 1)
TOTAL = codec.size_of(FRAMES)


def session_of(server, name):
    return next(s for s in server._sessions if s.info.session == name)


def send(actor, offset, nbytes, first=1, span=12, frames=FRAMES):
    """(next, partial, gap) as the learner answers a part."""
    h = actor.record(encode_part(first, span, frames, offset, nbytes)).header
    return h["next"], h["partial"] and h["partial"]["received"], h["gap"]


def test_a_record_is_taken_with_its_last_part(learner, actor):
    _, server, inbox = learner
    actor.data.send_multipart([b"x" * 16, *encode_part(1, 12, FRAMES, 0, 700)])  # a stranger's
    eventually(lambda: server.stats()["stale"] == 1)
    assert server.stats()["parts"] == 0
    assert send(actor, 0, 300) == (1, 300, False)
    assert send(actor, 300, 300) == (1, 600, False)
    assert len(inbox.records) == 1
    assert send(actor, 600, TOTAL - 600) == (13, None, False)
    assert inbox.episodes() == {"e": list(range(12))}
    assert send(actor, 600, TOTAL - 600) == (13, None, False)  # once more: it is here
    assert send(actor, 0, 300) == (13, None, False)
    assert (server.stats()["parts"], server.stats()["gaps"]) == (5, 0)
    assert server.stats()["received_bytes"] == TOTAL + codec.size_of(records.encode_record(Begin("e"), 0))


def test_a_part_whose_predecessor_is_missing_is_told_once(learner, actor):
    _, server, inbox = learner
    assert send(actor, 300, 300) == (1, None, True)
    assert actor.receive(actor.data).header["gap"] is False  # what follows every turn
    assert send(actor, 600, 300) == (1, None, False)
    assert send(actor, 0, 300) == (1, 300, False)
    assert send(actor, 500, 300) == (1, 300, True)
    actor.receive(actor.data)
    assert send(actor, 0, 10, first=13) == (1, 300, False)  # of the next record: the same gap
    # A whole record in the middle: the learner was not sure to keep it, and the actor sends it once more.
    answer = actor.record(records.encode_record(Begin("e"), 0)).header
    assert (answer["taken"], answer["partial"]) == (1, {"first": 1, "received": 300})
    assert send(actor, 300, TOTAL - 300) == (13, None, False)
    assert (server.stats()["gaps"], server.stats()["duplicates"]) == (4, 1)
    assert inbox.episodes() == {"e": list(range(12))}


def test_a_record_that_is_begun_again_takes_the_place_of_its_parts(learner, actor):
    other = records.encode_record(StepBlock.from_steps("e", [step(t, t) for t in range(5)]), 1)
    send(actor, 0, 700)
    assert send(actor, 0, 50, span=5, frames=other) == (1, 50, False)
    assert send(actor, 50, codec.size_of(other) - 50, span=5, frames=other) == (6, None, False)
    assert learner[2].episodes() == {"e": list(range(5))}


@pytest.mark.parametrize(("incarnation", "kept"), [(1, 700), (2, None)])
def test_a_process_goes_on_within_its_record_and_its_successor_does_not(learner, actor, incarnation, kept):
    port, _, inbox = learner
    send(actor, 0, 700)
    actor.close()
    again = RawActor(port, incarnation=incarnation)
    partial = again.welcome.header["partial"]
    assert (partial and partial["received"]) == kept
    assert send(again, kept or 0, TOTAL - (kept or 0)) == (13, None, False)
    assert inbox.episodes() == {"e": list(range(12))}


@pytest.mark.parametrize("how", ["bye", "replaced"])
def test_parts_of_a_session_that_is_gone_are_freed(learner, actor, how):
    port, server, _ = learner
    send(actor, 0, 700)
    session = session_of(server, "raw")
    assert session.assembly is not None
    if how == "bye":
        actor.control.send_multipart(codec.encode(handshake.BYE, {"token": actor.token}))
        eventually(lambda: session.assembly is None)
    else:
        eventually(lambda: not session.live)
        assert session.assembly is not None  # it may come back
        RawActor(port, session="another")
        assert session.assembly is None


def test_silent_sessions_together_keep_no_more_parts_than_one_message():
    port, config = free_port(), dataclasses.replace(CONFIG, max_message_bytes=2 * TOTAL - 1)
    with serving(port, config=config) as server:
        for actor in [begun(port, session=name, actor_id=name) for name in ("first", "second")]:
            send(actor, 0, 700)
        sessions = [session_of(server, name) for name in ("first", "second")]
        eventually(lambda: not any(s.live for s in sessions))
        assert [s.assembly is not None for s in sessions] == [False, True]


@pytest.mark.parametrize("change", ["size", "content"])
def test_a_record_in_parts_that_is_malformed_refuses_the_session(learner, actor, change):
    """Sent again it would be as malformed."""
    _, server, inbox = learner
    header = {"first": 1, "span": 12, "sizes": [CONFIG.max_message_bytes + 1], "offset": 0}
    frames = codec.encode(PART, header, {"data": np.zeros(10, np.uint8)})
    actor.data.send_multipart(
        [actor.token, *(frames if change == "size" else encode_part(1, 12, [b"\xc1" * 50], 0, 50))]
    )
    refusal = actor.receive(actor.control)
    assert (refusal.kind, refusal.header["retry"]) == (REFUSED, False)
    assert "record after 1 of this session is malformed" in refusal.header["reason"]
    eventually(lambda: server.stats()["malformed"] == 1)
    assert session_of(server, "raw").assembly is None
    assert len(inbox.records) == 1


@pytest.fixture
def learner():
    """(port, server, inbox)"""
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server:
        yield port, server, inbox


@pytest.fixture
def actor(learner):
    return begun(learner[0])


def begun(port, **changes):
    """An actor whose episode is open."""
    actor = RawActor(port, **changes)
    assert actor.record(records.encode_record(Begin("e"), 0)).header["next"] == 1
    return actor
