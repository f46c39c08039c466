"""Servers, links and records for the transport's tests: short times, small limits, free ports."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import ServerHandler
from serl_chunk.transport.storage.record_store import RecordStore, SessionState, Verdict
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import Hello
from serl_chunk.transport.wire.records import LOST, Item
from serl_chunk.types import Begin, End, Outcome, Record, Source, Step, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message

CONFIG = TransportConfig(timeout_s=0.6)
CONTRACT = {"robot": "fake", "horizon": "5"}
LIMITS = Limits(64 << 20, 64)
SHAPE = (12, 16, 3)  # of an image


class Inbox:
    """Collects what a learner is given, and rebuilds the steps of each episode."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sessions: list[str] = []
        self.silent: list[str] = []

    def __call__(self, info: Any, record: Record) -> None:
        self.records.append(record)
        self.sessions.append(info.session)

    def episodes(self) -> dict[str, list[float]]:
        """First state value of each step, by episode, in order of arrival; checks ticks, images and the order."""
        out: dict[str, list[float]] = {}
        ended: set[str] = set()
        for r in self.records:
            if isinstance(r, Begin):
                assert r.episode_id not in out
                out[r.episode_id] = []
            elif isinstance(r, StepBlock):
                assert r.episode_id not in ended
                values = out[r.episode_id]
                assert r.first_tick == len(values)
                for i in range(r.n):
                    tick = r.first_tick + i
                    observation = r.observation_at(i)
                    assert ("images/top" in observation) == (tick % 3 == 0)
                    if tick % 3 == 0:
                        assert (observation["images/top"] == tick % 251).all()
                    values.append(float(r.observation["state"][i, 0]))
            elif isinstance(r, End):
                assert r.length == len(out[r.episode_id])
                ended.add(r.episode_id)
        return out


def step(tick: int, value: float = 0.0) -> Step:
    """A step whose arrays tell where it belongs; every third has an image, every fifth a decision."""
    observation = {"state": np.array([value, tick], np.float32)}
    if tick % 3 == 0:
        observation["images/top"] = np.full(SHAPE, tick % 251, np.uint8)
    decision = {"chunk": np.full((5, 2), tick, np.float32)} if tick % 5 == 0 else None
    action = np.array([tick, -tick], np.float32)
    return Step(tick, observation, action, 0.0, Source.POLICY, tick - tick % 5, 3, 0.02 * tick, decision, tick / 4)


def shared(step: Step, dims: Sequence[bool] = (True, False)) -> Step:
    """`step` with a human who commanded the numbers `dims` of its action alone."""
    return step._replace(source=Source.HUMAN, decision_tick=-1, human_dims=np.array(dims, np.bool_))


def end(episode: str, length: int) -> End:
    """A successful end."""
    final = {"state": np.zeros(2, np.float32), "images/top": np.zeros(SHAPE, np.uint8)}
    return End(episode, length, final, True, False, Outcome.SUCCESS, reward=1.0)


def block(episode: str, first: int, n: int) -> StepBlock:
    """Of every third step a human had a part."""
    steps = [step(t, t) for t in range(first, first + n)]
    return StepBlock.from_steps(episode, [shared(s) if s.tick % 3 == 1 else s for s in steps])


def whole(episode: str, lengths: Sequence[int] = (4, 3)) -> list[Record]:
    """The records of an episode whose blocks have these lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = [block(episode, first, n) for first, n in zip(starts, lengths, strict=True)]
    return [Begin(episode), *blocks, end(episode, sum(lengths))]


def spools(folder: Path) -> Callable[[str], Spool]:
    """What a link has that keeps a spool of each run in `folder`."""
    return lambda run: Spool(folder / run, LIMITS)


def send_episode(link: LearnerLink, episode: str, length: int) -> None:
    """Hand over a whole episode."""
    link.begin(Begin(episode))
    for tick in range(length):
        link.step(step(tick, tick))
    link.end(end(episode, length))


def handler_of(values: dict[str, Any]) -> ServerHandler:
    """One that answers by those of `values` that are methods of a handler, which are taken out."""
    handler = ServerHandler()
    for name in {name for name in vars(ServerHandler) if not name.startswith("_")} & values.keys():
        setattr(handler, name, values.pop(name))
    return handler


@contextlib.contextmanager
def serving(port: int, **changes: Any) -> Iterator[LearnerServer]:
    """A running server on loopback; fails the test if its thread met an error."""
    values: dict[str, Any] = {
        "config": CONFIG,
        "bind": "127.0.0.1",
        "port": port,
        "contract": CONTRACT,
        "run_id": "run",
    }
    values.update(changes)
    server = LearnerServer(values.pop("config"), handler_of(values), **values)
    server.start()
    try:
        yield server
        server.check()
    finally:
        server.close()


@contextlib.contextmanager
def linked(port: int, *, connect: bool = True, **changes: Any) -> Iterator[LearnerLink]:
    """A link with a spool, connected by default."""
    values: dict[str, Any] = {
        "config": CONFIG,
        "host": "127.0.0.1",
        "port": port,
        "actor_id": "a",
        "contract": CONTRACT,
    }
    values.update(changes)
    with tempfile.TemporaryDirectory() as folder:
        values.setdefault("spools", lambda run: Spool(Path(folder) / run, LIMITS))
        link = LearnerLink(values.pop("config"), **values)
        try:
            if connect:
                link.connect(timeout=10)
            yield link
        finally:
            link.close()


class StoredSession:
    """A session whose records are written into a store as the record channel does it."""

    def __init__(self, name: str) -> None:
        self.state = SessionState(name, f"actor {name}", 1, 0, 0, 0, None)

    def delivers(self, record: Record) -> bool:
        """Whether the next record belongs to an open episode."""
        return self.state.judge(Item.of(record, self.state.expected)) is Verdict.NEW

    def put(self, store: RecordStore, record: Record, *, jpeg_quality: int = 0) -> int:
        """Write the next record; the number of its entry."""
        item, delivered = Item.of(record, self.state.expected), self.delivers(record)
        frames = records.encode_record(record, item.first, jpeg_quality=jpeg_quality)
        number = store.append(self.state, item, frames, delivered=delivered)
        self.state = self.state.after(item, delivered=delivered)
        return number

    def skip(self, store: RecordStore, span: int, steps: int) -> None:
        """Step over numbers that the actor's disk lost."""
        item = Item(LOST, self.state.expected, span, lost_steps=steps)
        self.state = self.state.after(item, delivered=False)
        store.settle(self.state)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait for something another thread does."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.002)


@contextlib.contextmanager
def raw(port: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain socket to a learner."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    s = context.socket(zmq.DEALER)
    s.linger, s.rcvtimeo, s.sndtimeo = 0, 5000, 5000
    s.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield s
    finally:
        context.destroy(linger=0)


RAW_ACTORS: list[RawActor] = []  # of the present test


class RawActor:
    """An actor by hand: plain sockets that say what they are told."""

    def __init__(self, port: int, **changes: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        RAW_ACTORS.append(self)
        self.data, self.snapshots, self.control = (self._dealer(port) for _ in range(3))
        hello = Hello("raw", 1, "raw", CONTRACT, "run", -1, 0, 10**6, 0, 10**6)._replace(**changes)
        self.control.send_multipart(hello.encode())
        self.welcome = self.receive(self.control)
        assert self.welcome.kind == handshake.WELCOME, self.welcome
        self.token: bytes = self.welcome.header["token"]

    def _dealer(self, port: int) -> zmq.Socket[bytes]:
        s = self.context.socket(zmq.DEALER)
        s.linger, s.rcvtimeo = 0, 5000
        s.connect(f"tcp://127.0.0.1:{port}")
        return s

    def receive(self, s: zmq.Socket[bytes]) -> Message:
        """The next message of a socket."""
        return codec.decode(s.recv_multipart(), LIMITS)

    def record(self, frames: list[Any]) -> Message:
        """Send a record's frames and return the answer on the data socket."""
        self.data.send_multipart([self.token, *frames])
        return self.receive(self.data)

    def close(self) -> None:
        """Leave without a goodbye."""
        self.context.destroy(linger=0)
