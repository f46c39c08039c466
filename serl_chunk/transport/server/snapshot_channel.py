"""Where the learner hands parameters out: announcements, pieces of snapshots, checkpoints on request."""

from __future__ import annotations

from serl_chunk.transport.server.sessions import Session
from serl_chunk.transport.server.snapshot_publisher import Fetched, Publisher
from serl_chunk.transport.server.sockets import ServerSockets
from serl_chunk.transport.sockets import Counters
from serl_chunk.transport.wire import codec, message_types, snapshots
from serl_chunk.transport.wire.codec import Message, WireError
from serl_chunk.transport.wire.snapshots import Published


class SnapshotChannel:
    """The snapshots channel, and the answers to fetches. Used by the control thread."""

    def __init__(
        self, sockets: ServerSockets, publisher: Publisher, counters: Counters, max_message_bytes: int
    ) -> None:
        self.newest: Published | None = None  # what was announced last
        self._sockets, self._publisher, self._counters = sockets, publisher, counters
        self._max_bytes = max_message_bytes

    @property
    def version(self) -> int:
        """The newest announced version, -1 for none."""
        return self.newest.manifest.version if self.newest else -1

    @property
    def nbytes(self) -> int:
        """Bytes of the newest announced snapshot, 0 for none."""
        return sum(leaf.nbytes for leaf in self.newest.manifest.leaves) if self.newest else 0

    def receive(self, session: Session, message: Message) -> None:
        """Answer a message of the snapshots channel; raises WireError for one that is none."""
        if message.kind == snapshots.SUBSCRIBE:
            session.holds = codec.field(message.header, "version", int)
            session.pulling = None
            self.announce(session)
        elif message.kind == snapshots.PULL:
            self._pull(session, message)
        elif message.kind == snapshots.RELEASE:
            session.fetched = None
        else:
            raise WireError(f"unknown kind {message.kind!r}")

    def renew(self) -> bool:
        """Take over what the publisher has prepared; True where that is new."""
        before, self.newest = self.newest, self._publisher.newest
        return self.newest is not before

    def announce(self, session: Session) -> None:
        """Tell a session that waits of a newer snapshot, once."""
        newest = self.newest
        if (
            newest is not None
            and session.holds is not None
            and newest.manifest.version > session.holds
            and self._sockets.send("snapshots", session.snapshots_id, newest.announcement)
        ):
            session.holds, session.pulling = None, newest

    def _pull(self, session: Session, message: Message) -> None:
        key = codec.text(message.header, "key")
        for published in (session.pulling, session.fetched, self.newest):
            if published is not None and published.manifest.key == key:
                frames = published.piece(message, self._max_bytes)
                self._counters["pieces"] += 1
                self._counters["snapshot_bytes"] += codec.size_of(frames)
                self._sockets.send("snapshots", session.snapshots_id, frames)
                return
        self._sockets.send("snapshots", session.snapshots_id, codec.encode(snapshots.GONE, {"key": key}))

    def fetch(self, session: Session, message: Message) -> None:
        """Begin to read the checkpoint a session asks for; `answer` has the result. Raises WireError."""
        request, step = codec.count(message.header, "request"), codec.text(message.header, "step", 64)
        if session.fetch_request is None:
            session.fetch_request = request
            self._publisher.request(session.info.session, request, step)
        elif session.fetch_request != request:
            fields = {"request": request, "reason": "another checkpoint is being fetched for this actor"}
            self._sockets.send("control", session.control_id, codec.encode(message_types.FETCH_FAILED, fields))

    def answer(self, session: Session | None, answer: Fetched) -> None:
        """Tell a session what became of its request, unless it is gone or has given up."""
        if session is None or session.fetch_request != answer.request:
            return
        session.fetch_request, session.fetched = None, answer.published
        if answer.published is None:
            frames = codec.encode(message_types.FETCH_FAILED, {"request": answer.request, "reason": answer.reason})
        else:
            frames = codec.encode(
                message_types.FETCHED, {"request": answer.request, **answer.published.manifest.header()}
            )
        self._sockets.send("control", session.control_id, frames)
