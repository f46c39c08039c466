"""Records arrive exactly once and in order, over restarts, duplicates, gaps and garbage."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import Inbox, RawActor, block, end, eventually, linked, send_episode, serving, step

from serl_chunk.transport.client import outbox
from serl_chunk.transport.wire import handshake, records
from serl_chunk.types import Begin, DataError, SerlChunkError


def steps(link, first, last):
    for tick in range(first, last):
        link.step(step(tick, tick))


def test_duplicates_are_trimmed_and_gaps_refused(port, inbox):
    with serving(port, on_record=inbox) as server:
        actor = RawActor(port)

        def told(record, first):
            return actor.record(records.encode_record(record, first)).header["next"]

        assert told(Begin("e"), 0) == 1
        assert told(block("e", 0, 4), 1) == 5
        assert told(block("e", 0, 4), 1) == 5  # all known
        assert told(block("e", 2, 4), 3) == 7  # half known
        gap = actor.record(records.encode_record(block("e", 8, 2), 9))
        assert (gap.kind, gap.header["next"], gap.header["gap"]) == (handshake.ACK, 7, True)
        actor.receive(actor.data)  # the acknowledgement that follows every turn
        assert told(block("e", 6, 2), 7) == 9
        assert told(end("e", 8), 9) == 10
        assert inbox.episodes() == {"e": list(range(8))}
        stats = server.stats()
        assert (stats["duplicates"], stats["gaps"]) == (6, 1)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_message_is_sent_again(monkeypatch, lost):
    """The data connection swallows one, and the learner reports the gap; the first one has no successor."""
    inbox, port, send, sent = Inbox(), free_port(), outbox.try_send, []

    def swallow(s, frames):
        sent.append(frames)
        return True if len(sent) == lost else send(s, frames)

    monkeypatch.setattr(outbox, "try_send", swallow)
    with serving(port, on_record=inbox) as server, linked(port) as link:
        link.begin(Begin("first"))
        if lost == 1:
            assert link.flush(10)
            assert len(inbox.records) == 1
        steps(link, 0, 20)
        link.end(end("first", 20))
        for e in range(4):
            send_episode(link, f"e{e}", 20)
        assert link.flush(10)
        assert inbox.episodes() == {name: list(range(20)) for name in ("first", "e0", "e1", "e2", "e3")}
        assert server.stats()["gaps"] >= (lost > 1)
        assert link.stats()["retransmitted"] >= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_learner_stops_it_visibly(port):
    def broken(info, record):
        raise ZeroDivisionError("oops")

    told = pytest.raises(SerlChunkError, match=naming("ZeroDivisionError", "oops"))
    with told, serving(port, on_record=broken) as server, linked(port) as link:
        link.begin(Begin("e"))
        with contextlib.suppress(SerlChunkError):
            eventually(lambda: server.check())  # true never, over once it raises
        assert link.flush(0.05) is False


def test_records_out_of_order_are_refused_at_the_hand_over():
    with linked(free_port(), connect=False) as link:
        with pytest.raises(DataError, match=naming(0, "Begin")):
            link.step(step(0))
        link.begin(Begin("e"))
        with pytest.raises(DataError, match=naming("f", "e", "End")):
            link.begin(Begin("f"))
        with pytest.raises(DataError, match=naming("f", "e")):
            link.end(end("f", 0))


def test_steps_of_different_shape_do_not_share_a_block(port, inbox):
    with linked(port, connect=False) as link:
        link.begin(Begin("e"))
        for tick in range(6):
            s = step(tick)
            if tick >= 3:
                s = s._replace(observation={**s.observation, "images/top": np.zeros((tick, 4, 3), np.uint8)})
            link.step(s)
        with serving(port, on_record=inbox):
            link.connect(10)
            assert link.flush(10)
    assert sum(r.n for r in inbox.records[1:]) == 6
