"""Many actors in one process, on plain sockets: recorded steps at their pace, and when each was acknowledged.

    python -m support.traffic PORT '{"sessions": 64, "block": 1, ...}'     (in benchmarks/)

prints a JSON of `Traffic`'s figures. It keeps no spool and resends nothing: it measures the learner, not an actor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import zmq

from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import Hello
from serl_chunk.types import Begin, End, Outcome, Record, Source, Step, StepBlock
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message

LIMITS = Limits(64 << 20, 64)
PING_S = 1.0  # an actor's sign of life on its control socket


@dataclasses.dataclass
class Traffic:
    """What actors send; `cameras` of `pixels` squared show noise at each decision, every `decision` ticks."""

    sessions: int
    block: int = 1  # steps a message
    hz: float = 50.0
    seconds: float = 30.0
    episode: int = 100  # steps
    state_dim: int = 23
    action_dim: int = 14
    cameras: tuple[str, ...] = ()
    decision: int = 10
    pixels: int = 128
    contract: dict[str, str] = dataclasses.field(default_factory=dict)


class Actor:
    """One session. Ticks are due at their time; a message carries those of `Traffic.block`."""

    def __init__(self, traffic: Traffic, number: int, port: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.traffic, self.name = traffic, f"{number}-{time.time_ns()}"
        rng = np.random.default_rng(number)
        self.image = rng.integers(0, 255, (traffic.pixels, traffic.pixels, 3), np.uint8)
        self.data, self.control = (self._dealer(context, port + i) for i in (0, 2))
        run = self._ask(codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL})).header["run"]
        hello = Hello(self.name, 1, self.name, traffic.contract, run, -1, 0, 0, 0, 0)
        answer = self._ask(hello.encode())
        if answer.kind != handshake.WELCOME:
            raise SystemExit(f"{self.name} was not admitted: {answer.header}")
        self.token = answer.header["token"]
        self.seq = self.sent = self.acked = self.tick = self.episodes = 0  # records; steps
        self.steps: list[Step] = []
        self.waiting: deque[tuple[int, int, float]] = deque()  # (record behind a message, its steps, when it left)

    def _ask(self, frames: list[Any]) -> Message:
        self.control.send_multipart(frames)
        return codec.decode(self.control.recv_multipart(), LIMITS)

    @staticmethod
    def _dealer(context: zmq.Context[zmq.Socket[bytes]], port: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo = 0, 30_000
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    def send(self, record: Record, steps: int = 0) -> None:
        self.data.send_multipart([self.token, *records.encode_record(record, self.seq)])
        self.seq += steps or 1
        self.sent += steps
        self.waiting.append((self.seq, steps, time.monotonic()))

    def act(self) -> None:
        """Record one tick."""
        traffic, t = self.traffic, self.tick
        episode = f"e{self.episodes}"
        if t == 0:
            self.send(Begin(episode))
        seen: dict[str, np.ndarray] = {"state": np.full(traffic.state_dim, t, np.float32)}
        decides = t % traffic.decision == 0
        if decides:
            seen |= {f"images/{name}": self.image for name in traffic.cameras}
        action = np.zeros(traffic.action_dim, np.float32)
        self.steps.append(Step(t, seen, action, 0.0, Source.POLICY, t - t % traffic.decision, 0, 0.0))
        self.tick = (t + 1) % traffic.episode
        if len(self.steps) == traffic.block or not self.tick:
            self.send(StepBlock.from_steps(episode, self.steps), len(self.steps))
            self.steps = []
        if not self.tick:
            final = {key: value for key, value in seen.items() if key == "state"}
            self.send(End(episode, traffic.episode, final, False, True, Outcome.FAILURE, "environment"))
            self.episodes += 1

    def read(self, latencies: list[float]) -> None:
        """Read acknowledgements; adds the seconds that each step waited for its own."""
        while True:
            try:
                message = codec.decode(self.data.recv_multipart(zmq.NOBLOCK), LIMITS)
            except zmq.Again:
                return
            if message.kind != handshake.ACK or message.header.get("gap"):
                raise SystemExit(f"{self.name}: {message.kind} {message.header}")
            while self.waiting and self.waiting[0][0] <= message.header["next"]:
                _, steps, at = self.waiting.popleft()
                self.acked += steps
                latencies += [time.monotonic() - at] * steps


def run(traffic: Traffic, port: int) -> dict[str, Any]:
    """Send for `seconds`, and return what arrived in that time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 4 * traffic.sessions + 100
    actors = [Actor(traffic, number, port, context) for number in range(traffic.sessions)]
    poller = zmq.Poller()
    by_socket = {actor.data: actor for actor in actors}
    for actor in actors:
        poller.register(actor.data, zmq.POLLIN)
    latencies: list[float] = []
    began = time.monotonic()
    due = [began + (i / len(actors)) / traffic.hz for i in range(len(actors))]
    pinged, late = began, 0.0
    while (now := time.monotonic()) < began + traffic.seconds:
        for i, actor in enumerate(actors):
            if due[i] <= now:
                late = max(late, now - due[i])
                actor.act()
                due[i] += 1 / traffic.hz
        if now - pinged > PING_S:
            pinged = now
            for actor in actors:
                actor.control.send_multipart(codec.encode(handshake.PING, {"token": actor.token, "timeout_s": 5.0}))
        for socket, _ in poller.poll(max(0, math.ceil(1e3 * (min(due) - time.monotonic())))):
            by_socket[socket].read(latencies)
    waits = sorted(latencies) or [float("nan")]
    figures = {
        "asked": sum(actor.sent for actor in actors), "acknowledged": sum(actor.acked for actor in actors),
        "p50_ms": 1e3 * waits[len(waits) // 2], "p99_ms": 1e3 * waits[int(0.99 * (len(waits) - 1))],
        "generator_late_ms": 1e3 * late, "seconds": time.monotonic() - began,
    }  # fmt: skip
    for actor in actors:
        actor.control.send_multipart(codec.encode(handshake.BYE, {"token": actor.token, "retired_at": None}))
    context.destroy(linger=500)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(Traffic(**json.loads(sys.argv[2])), int(sys.argv[1]))))
