"""Whose request the front gives to the loop next: queues of peers, all of them bounded.

One request of a peer is under way at a time. Peers take turns, operators and the holder of the lease before all others.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, OrderedDict, deque
from typing import Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

from serl_chunk_robot.server.door import LEADS, MOST_UNDER_WAY, STRANGER, Request

QUEUED = 4  # requests of a peer that wait; a newer one is dropped
MOST_PEERS = 256  # that are remembered
BYTES_UNDER_WAY = 1 << 16  # of all requests
OF_OTHERS = MOST_UNDER_WAY // 2  # under way at most of peers that do not lead
HELD = 4 << 20  # bytes of requests that wait, all peers together


class Waiting(NamedTuple):
    """A request with what its answer needs."""

    request: Request
    op: str
    envelope: Tuple[bytes, ...]  # frames before the answer
    number: Optional[int]  # the request's "id"
    silent: bool  # a command without one, which gets no answer


class _Peer:
    def __init__(self) -> None:
        self.rank = STRANGER
        self.queue: Deque[Waiting] = deque()
        self.busy = 0  # serial of the request under way
        self.stop = 0  # serial of the stop under way


class Peers:
    """The queues. What is under way is known by its serial number, which no other front has."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()  # the longest silent one first
        self._under_way: Dict[int, Tuple[Waiting, bool]] = {}  # serial -> the request; whether it was answered already
        self._bytes = self._held = 0
        self._serials = itertools.count(int.from_bytes(os.urandom(7), "little") or 1)

    def __len__(self) -> int:
        return len(self._peers)

    def leading(self) -> List[bytes]:
        """The connections of operators and of the holder of the lease."""
        return [connection for connection, peer in self._peers.items() if peer.rank == LEADS]

    def add(self, waiting: Waiting) -> None:
        """Queue a request. A command replaces one that came just before it; what exceeds a bound is dropped."""
        peer = self._peer(waiting.request.connection)
        if waiting.silent and peer.queue and peer.queue[-1].silent:
            self._held -= len(peer.queue.pop().request.body)
            self.counts["overtaken"] += 1
        if len(peer.queue) >= QUEUED or self._held > HELD:
            self.counts["dropped"] += 1
            return
        peer.queue.append(waiting)
        self._held += len(waiting.request.body)

    def next(self) -> Optional[Waiting]:
        """Take the request whose turn it is, with its serial; None where none may be sent now."""
        if len(self._under_way) >= MOST_UNDER_WAY or self._bytes >= BYTES_UNDER_WAY:
            return None
        others = sum(not self._leads(each) for each, _ in self._under_way.values())
        found: Optional[bytes] = None
        for connection, peer in self._peers.items():
            if peer.queue and not peer.busy:
                if peer.rank == LEADS:
                    found = connection
                    break
                if found is None and others < OF_OTHERS:
                    found = connection
        if found is None:
            return None
        peer = self._peers[found]
        waiting = self._sent(peer.queue.popleft())
        self._held -= len(waiting.request.body)
        peer.busy = waiting.request.serial
        self._peers.move_to_end(found)
        return waiting

    def stop(self, waiting: Waiting) -> Optional[Waiting]:
        """Return a stop with its serial, which is sent at once; None where one of its peer is under way already."""
        peer = self._peer(waiting.request.connection)
        if peer.stop:
            return None
        sent = self._sent(waiting)
        peer.stop = sent.request.serial
        return sent

    def returned(self, serial: int, rank: int) -> Optional[Waiting]:
        """The loop is done with a request; returns it, None for one that was answered, or of another front."""
        waiting, answered = self._under_way.pop(serial, (None, True))
        if waiting is None:
            return None
        self._bytes -= len(waiting.request.body)
        peer = self._peers.get(waiting.request.connection)
        if peer is not None:
            peer.rank = rank
            peer.busy = 0 if peer.busy == serial else peer.busy
            peer.stop = 0 if peer.stop == serial else peer.stop
        return None if answered else waiting

    def given_up(self) -> Iterator[Waiting]:
        """Yield what waits, and once what is under way, for answers that do not come from the loop.

        What waits is forgotten. What is under way stays so: the loop will have it.
        """
        for serial, (waiting, answered) in self._under_way.items():
            if not answered:
                self._under_way[serial] = waiting, True
                yield waiting
        for peer in self._peers.values():
            yield from peer.queue
            peer.queue.clear()
        self._held = 0

    def _leads(self, waiting: Waiting) -> bool:
        peer = self._peers.get(waiting.request.connection)
        return waiting.request.stop or (peer is not None and peer.rank == LEADS)

    def _sent(self, waiting: Waiting) -> Waiting:
        sent = waiting._replace(request=waiting.request._replace(serial=next(self._serials)))
        self._under_way[sent.request.serial] = sent, False
        self._bytes += len(sent.request.body)
        return sent

    def _peer(self, connection: bytes) -> _Peer:
        if connection not in self._peers:
            if len(self._peers) >= MOST_PEERS:  # strangers make room, and who leads at the very last
                idle = [(p.rank, bool(p.queue or p.busy)) for p in self._peers.values()]
                self._forget(next(c for c, key in zip(self._peers, idle) if key == min(idle)))
            self._peers[connection] = _Peer()
        return self._peers[connection]

    def _forget(self, connection: bytes) -> None:
        gone = self._peers.pop(connection)
        self._held -= sum(len(each.request.body) for each in gone.queue)
        self.counts["dropped"] += len(gone.queue)
