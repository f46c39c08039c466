"""Records arrive exactly once and in order, over restarts, duplicates, gaps and garbage."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket

import numpy as np
import pytest
import zmq
from errors import naming
from ports import free_port
from transport_tools import CONFIG, Inbox, RawActor, end, eventually, linked, send_episode, serving, step

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import RefusedError
from serl_chunk.types import Amend, Begin, DataError, Outcome, SerlChunkError, StepBlock
from serl_chunk_robot.wire import codec


def test_two_thousand_steps_arrive_once_and_in_order():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server, linked(port) as link:
        for e in range(20):
            send_episode(link, f"e{e}", 100)
            link.amend(Amend(f"e{e}", Outcome.FAILURE))
        assert link.flush(10)
        assert inbox.episodes() == {f"e{e}": list(range(100)) for e in range(20)}
        assert sum(isinstance(r, Amend) for r in inbox.records) == 20
        stats = server.stats()
        assert (stats["steps"], stats["records"]) == (2000, 2060)
        assert stats["duplicates"] == stats["gaps"] == stats["orphans"] == 0
        sent = link.stats()
        assert (sent["unacked_records"], sent["in_flight_bytes"], sent["unacked_bytes"]) == (0, 0, 0)
        assert link.steps_recorded == 2000


def test_small_credit_and_small_messages_still_deliver():
    inbox, port = Inbox(), free_port()
    config = TransportConfig(heartbeat=0.1, timeout_s=0.6, credit_bytes=2000, max_message_bytes=8000, piece_bytes=8000)
    with serving(port, config=config, on_record=inbox), linked(port, config=config) as link:
        send_episode(link, "e", 300)
        assert link.flush(10)
    assert inbox.episodes() == {"e": list(range(300))}


def test_steps_leave_during_the_episode():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox), linked(port) as link:
        link.begin(Begin("e"))
        link.step(step(0))
        assert link.flush(10)
        assert isinstance(inbox.records[-1], StepBlock)


def test_a_learner_that_is_replaced_gets_the_open_episode_whole():
    """And what else the spool's oldest segment still holds."""
    first, second, port = Inbox(), Inbox(), free_port()
    with linked(port, connect=False) as link:
        with serving(port, on_record=first):
            link.connect(10)
            send_episode(link, "closed", 50)
            link.begin(Begin("open"))
            for tick in range(60):
                link.step(step(tick, tick))
            assert link.flush(10)
        for tick in range(60, 90):  # no learner listens
            link.step(step(tick, tick))
        with serving(port, on_record=second) as server:
            for tick in range(90, 120):
                link.step(step(tick, tick))
            link.end(end("open", 120))
            send_episode(link, "next", 30)
            assert link.flush(10)
            assert server.stats()["orphans"] == server.stats()["duplicates"] == 0
        assert first.episodes() == {"closed": list(range(50)), "open": list(range(60))}
        assert second.episodes() == {"closed": list(range(50)), "open": list(range(120)), "next": list(range(30))}
        assert link.stats()["retransmitted"] >= 61
        assert link.stats()["connections"] == 2


def test_a_learner_of_another_run_gets_nothing_of_the_last_one():
    first, second, port = Inbox(), Inbox(), free_port()
    with linked(port, connect=False) as link:
        with serving(port, on_record=first, run_id="one"):
            link.connect(10)
            link.begin(Begin("old"))
            for tick in range(10):
                link.step(step(tick, tick))
            assert link.flush(10)
        with serving(port, on_record=second, run_id="two") as server:
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            link.step(step(10, 10))
            link.end(end("old", 11))
            send_episode(link, "new", 5)
            assert link.flush(10)
            assert server.stats()["orphans"] == 0
            assert (link.stats()["abandoned"], link.stats()["set_aside"]) == (0, 2)  # the rest of the old episode
        assert second.episodes() == {"new": list(range(5))}


def test_a_backlog_of_another_run_is_set_aside_and_not_counted():
    port, inbox = free_port(), Inbox()
    big = np.zeros((512, 512, 3), np.uint8)
    with linked(port, connect=False) as link:
        with serving(port, run_id="one"):
            link.connect(10)
        eventually(lambda: link.stats()["connected"] == 0)
        link.begin(Begin("old"))
        for tick in range(20):
            link.step(step(tick)._replace(observation={"images/top": big}))
        link.end(end("old", 20))
        with serving(port, on_record=inbox, run_id="two", allowance=lambda session: 7):
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            send_episode(link, "new", 5)
            assert link.flush(10)
            assert inbox.episodes() == {"new": list(range(5))}
            assert (link.stats()["abandoned"], link.stats()["set_aside"]) == (0, 22)
            assert link.allowance - link.steps_recorded == 2


def block(first, n):
    return StepBlock.from_steps("e", [step(t, t) for t in range(first, first + n)])


def test_duplicates_are_trimmed_and_gaps_refused():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server:
        actor = RawActor(port)
        try:
            assert actor.record(records.encode_record(Begin("e"), 0)).header["next"] == 1
            assert actor.record(records.encode_record(block(0, 4), 1)).header["next"] == 5
            assert actor.record(records.encode_record(block(0, 4), 1)).header["next"] == 5  # all known
            assert actor.record(records.encode_record(block(2, 4), 3)).header["next"] == 7  # half known
            gap = actor.record(records.encode_record(block(8, 2), 9))
            assert (gap.kind, gap.header["next"], gap.header["gap"]) == (handshake.ACK, 7, True)
            actor.receive(actor.data)  # the acknowledgement that follows every turn
            assert actor.record(records.encode_record(block(6, 2), 7)).header["next"] == 9
            assert actor.record(records.encode_record(end("e", 8), 9)).header["next"] == 10
            assert inbox.episodes() == {"e": list(range(8))}
            stats = server.stats()
            assert (stats["duplicates"], stats["gaps"]) == (6, 1)
        finally:
            actor.close()


def test_a_lost_message_is_sent_again(monkeypatch):
    """The data connection swallows a message: the learner reports the gap and the link goes back."""
    from serl_chunk.transport.client import sender

    inbox, port = Inbox(), free_port()
    send, sent = sender.try_send, []

    def swallow(s, frames):
        sent.append(frames)
        return True if len(sent) == 3 else send(s, frames)

    monkeypatch.setattr(sender, "try_send", swallow)
    with serving(port, on_record=inbox) as server, linked(port) as link:
        for e in range(5):
            send_episode(link, f"e{e}", 20)
        assert link.flush(10)
        assert inbox.episodes() == {f"e{e}": list(range(20)) for e in range(5)}
        assert server.stats()["gaps"] >= 1
        assert link.stats()["retransmitted"] >= 1


def test_a_lost_last_message_is_noticed_without_a_successor(monkeypatch):
    from serl_chunk.transport.client import sender

    inbox, port = Inbox(), free_port()
    send, sent = sender.try_send, []

    def swallow(s, frames):
        sent.append(frames)
        return True if len(sent) == 1 else send(s, frames)

    monkeypatch.setattr(sender, "try_send", swallow)
    with serving(port, on_record=inbox), linked(port) as link:
        link.begin(Begin("e"))
        assert link.flush(10)
        assert len(inbox.records) == 1


def test_steps_without_a_begin_are_dropped_and_counted():
    inbox, port = Inbox(), free_port()
    with serving(port, on_record=inbox) as server:
        actor = RawActor(port, first=100, steps_before_first=99)
        try:
            assert actor.record(records.encode_record(block(40, 4), 100)).header["next"] == 104
            assert actor.record(records.encode_record(end("e", 44), 104)).header["next"] == 105
            actor.record(records.encode_record(Begin("f"), 105))
            assert inbox.records == [Begin("f")]
            assert server.stats()["orphans"] == 5
        finally:
            actor.close()


def test_a_record_the_learner_rejects_refuses_the_session():
    def reject(info, record):
        if isinstance(record, StepBlock):
            raise DataError("state has 2 values, the robot has 14")

    port = free_port()
    with serving(port, on_record=reject) as server, linked(port) as link:
        send_episode(link, "e", 3)
        with pytest.raises(RefusedError, match=naming("state", 2, 14)):
            link.flush(10)
        assert link.can_begin() == (False, "state has 2 values, the robot has 14")
        assert server.stats()["rejected"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_learner_stops_it_visibly():
    def broken(info, record):
        raise ZeroDivisionError("oops")

    port = free_port()
    told = pytest.raises(SerlChunkError, match=naming("ZeroDivisionError", "oops"))
    with told, serving(port, on_record=broken) as server, linked(port) as link:
        link.begin(Begin("e"))
        with contextlib.suppress(SerlChunkError):
            eventually(lambda: server.check())  # true never, over once it raises
        assert link.flush(0.05) is False


def test_garbage_on_every_port_while_a_good_client_continues():
    inbox, port = Inbox(), free_port()
    rng = random.Random(0)
    sound = [bytes(f) for f in records.encode_record(block(0, 4), 1)]
    every = dataclasses.replace(CONFIG, max_malformed=10**6)  # is read
    with serving(port, config=every, on_record=inbox) as server, linked(port) as link:
        context = zmq.Context()
        try:
            noise = []
            for offset in range(3):
                s = context.socket(zmq.DEALER)
                s.linger = 0
                s.connect(f"tcp://127.0.0.1:{port + offset}")
                noise.append(s)
                with socket.create_connection(("127.0.0.1", port + offset)) as raw:
                    raw.sendall(rng.randbytes(500))
            for e in range(10):
                for s in noise:
                    s.send(b"")
                    s.send(rng.randbytes(100))
                    s.send_multipart([rng.randbytes(16), *sound])
                    s.send_multipart([rng.randbytes(8) for _ in range(rng.randint(1, 90))])
                    s.send_multipart(codec.encode("nonsense", {"token": rng.randbytes(16)}))
                    s.send_multipart(codec.encode("hello", {"protocol": "x"}))
                    s.send_multipart(codec.encode("pull", {"token": 3, "ranges": [[0, 0, 1 << 60]]}))
                send_episode(link, f"e{e}", 20)
            assert link.flush(10)
            eventually(lambda: server.stats()["malformed"] >= 120 and server.stats()["stale"] >= 30)
            assert inbox.episodes() == {f"e{e}": list(range(20)) for e in range(10)}
            assert len(server.sessions()) == 1
        finally:
            context.destroy(linger=0)


def test_a_malformed_record_of_a_good_session_ends_it():
    port = free_port()
    with serving(port):
        actor = RawActor(port)
        try:
            frames = codec.encode("steps", {"first": 0}, {"action": np.zeros((2, 2), np.float32)})
            actor.data.send_multipart([actor.token, *frames])
            answer = actor.receive(actor.control)
            while answer.kind == handshake.STATUS:
                answer = actor.receive(actor.control)
            assert "malformed: a block of steps without 'reward'" in answer.header["reason"]
        finally:
            actor.close()


def test_records_out_of_order_are_refused_at_the_hand_over():
    with linked(free_port(), connect=False) as link:
        with pytest.raises(DataError, match=naming(0, "Begin")):
            link.step(step(0))
        link.begin(Begin("e"))
        with pytest.raises(DataError, match=naming("f", "e", "End")):
            link.begin(Begin("f"))
        with pytest.raises(DataError, match=naming("f", "e")):
            link.end(end("f", 0))


def test_a_full_spool_holds_the_next_episode_and_drops_nothing():
    inbox, port = Inbox(), free_port()
    config = TransportConfig(heartbeat=0.1, timeout_s=0.6, credit_bytes=1000, spool_bytes=20_000)
    with linked(port, connect=False, config=config) as link:
        assert link.can_begin() == (True, "")
        send_episode(link, "e", 200)
        may, why = link.can_begin()
        assert not may
        assert "transport.spool_bytes=20000" in why
        with serving(port, config=config, on_record=inbox):
            link.connect(10)
            assert link.flush(10)
            assert link.can_begin() == (True, "")
        assert inbox.episodes() == {"e": list(range(200))}


def test_steps_of_different_shape_do_not_share_a_block():
    inbox, port = Inbox(), free_port()
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
