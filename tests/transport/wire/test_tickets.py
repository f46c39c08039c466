"""Tickets on the wire, and between a link and a server: whatever is lost, the newest request has its answer."""

from __future__ import annotations

import string
import time

import hypothesis.strategies as st
from hypothesis import given, settings
from properties import examples
from transport_tools import CONFIG, LIMITS, eventually, linked, serving

from serl_chunk.transport.wire.tickets import MAX_TICKETS, TicketRequest, decode_grant, encode_grant
from serl_chunk.types import MAX_TICKET_TEXT, Grant, Snapshot, Ticket
from serl_chunk_robot.wire import codec

COUNTS = st.integers(0, 2**62 - 1)
TEXTS = st.text(string.printable.strip() + "größer 推", max_size=MAX_TICKET_TEXT)
TICKETS = st.builds(
    Ticket, COUNTS, COUNTS, COUNTS, COUNTS, TEXTS, TEXTS, st.integers(-1, 2**62 - 1), COUNTS,
    st.floats(0, 1e9, exclude_min=True),
)  # fmt: skip


@settings(max_examples=examples(100))
@given(st.lists(TICKETS, max_size=4), TEXTS)
def test_a_grant_comes_as_it_was_sent(tickets, waiting):
    grant = Grant(tuple(tickets), waiting)
    assert decode_grant(codec.decode(encode_grant(grant), LIMITS)) == grant


def test_the_largest_grant_fits_a_message():
    text = "🦾" * MAX_TICKET_TEXT
    grant = Grant((Ticket(*[2**61] * 4, text, text, 2**61, 2**61, 1e300),) * MAX_TICKETS)
    assert decode_grant(codec.decode(encode_grant(grant), LIMITS)) == grant


class Desk:
    """Gives the first tickets of what there is, and notes the requests."""

    def __init__(self, there: int) -> None:
        self.there, self.requests = there, [TicketRequest(-2, (), 0)]

    def tickets(self, session, version, held, capacity):
        if (request := TicketRequest(version, tuple(held), capacity)) != self.requests[-1]:
            self.requests.append(request)
        n = min(self.there, capacity)
        return Grant(tuple(Ticket(0, 0, i, 0, "", "seed-1", 3, i, 1.0) for i in range(n)), "" if n else "wait")


def test_an_answer_comes_at_once_and_again_when_it_changes(port):
    desk = Desk(0)
    with serving(port, tickets=desk.tickets) as server, linked(port) as link:
        assert link.grant is None
        began = time.monotonic()
        link.request_tickets([], 2)
        assert link.wait_until(lambda: link.grant == Grant((), "wait"), 5)
        desk.there = 1
        assert link.wait_until(lambda: link.grant is not None and len(link.grant.tickets) == 1, 5)
        link.request_tickets(["0.0.0.0"], 1000)
        eventually(lambda: desk.requests[-1] == (-1, ("0.0.0.0",), MAX_TICKETS))
        assert time.monotonic() - began < CONFIG.heartbeat  # none of it waited for one
        server.publish(Snapshot(3, {}), {})
        eventually(lambda: desk.requests[-1].version == 3)


def test_a_lost_answer_and_a_new_connection_are_repaired(port, monkeypatch):
    desk = Desk(1)
    with linked(port, connect=False) as link:
        with serving(port, tickets=desk.tickets):
            link.connect(timeout=10)
            link.request_tickets([], 2)
            assert link.wait_until(lambda: link.grant is not None, 5)
            link._tickets.grant = None  # as if its message had been lost
            assert link.wait_until(lambda: link.grant is not None, 5)
        desk.requests.clear()
        desk.requests.append(TicketRequest(-2, (), 0))
        with serving(port, tickets=desk.tickets):
            eventually(lambda: desk.requests[-1].capacity == 2)
        with serving(port, tickets=desk.tickets, run_id="another"):
            assert link.wait_until(lambda: link.run == "another", 5)
            assert link.grant is None


def test_a_learner_without_tickets_answers_nothing(port):
    with serving(port), linked(port) as link:
        link.request_tickets([], 2)
        time.sleep(0.1)
        assert link.grant is None
        assert link.away == 0
