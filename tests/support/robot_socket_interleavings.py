"""Random interleavings over sockets: a robot's server with real connections, on an injected clock.

One message is under way at a time, so that it is known which pass takes it. `robot_model` is the expectation of the
robot; who is admitted and who has the lease is modelled here, from the description of the protocol.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import zmq
from robot_fronts import FrontedDoor
from robot_interleavings import Interleaving
from robot_model import RobotModel
from robot_served import HERE, free_port, server
from robot_world import SeenGate, SeenPursuit, Way, World

from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.wire import arrays
from serl_chunk_robot.wire.protocol import MAX_REQUEST, PROTOCOL
from serl_chunk_robot.wire.sockets import connect, make_socket

ARRIVES = 5.0  # s until a message is there
LATE = 0.05  # s between two passes where nothing but time is to pass
SILENT = 2.0  # s without a message outside RUN, after which a lease ends
MOST = 64  # connections that are remembered


class SocketWorld(World):
    """A world whose passes are those of a server."""

    def __init__(self) -> None:
        super().__init__()
        with patch("robot_served.Gate", SeenGate):
            self.port = free_port()
            self.server = server(self.arms, Address(HERE, self.port), lambda: self.now, stepped=True)
        self.door: FrontedDoor = self.server._door  # type: ignore[assignment]
        self.gate, self.served_loop = self.server._gate, self.server.loop  # type: ignore[assignment]
        self.served_loop._clock = lambda: self.now + self.slept
        self.served_loop._pursuit = self.pursuit = SeenPursuit(self.limits, self.dt)
        self.loop = self.server  # type: ignore[assignment]  # `run_pass` is all that the model calls


class Peer:
    """One connection. `name`, `role` and `process`: of its hello."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], port: int, name: str, role: str, process: str = "1"
    ) -> None:
        self.name, self.role, self.process, self.asked = name, role, process, 0
        self.socket = make_socket(context, zmq.DEALER, 1 << 20)
        connect(self.socket, HERE, port)


class SocketInterleaving(Interleaving):
    """One server's life with two actors, an operator and a watcher, which reconnect and vanish."""

    WEIGHTS: ClassVar[dict[str, float]] = {
        **Interleaving.WEIGHTS, "reconnect": 3, "killed": 2, "second_actor": 3, "leads": 2, "take": 2, "garbage": 3,
        "stranger": 2, "go_for_another": 2, "old_request": 3, "of_another": 3, "away": 0.3,
    }  # fmt: skip
    NAMES, CHANCES = list(WEIGHTS), np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world = self.sockets = SocketWorld()
        self.model = RobotModel(self.world)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.known: OrderedDict[Peer, None] = OrderedDict()  # that were greeted, the one heard last at the end
        self.holder: Peer | None = None  # of the lease; perhaps gone
        self.heard = 0.0
        self.replies = self.refusals = 0
        self.operator, self.watcher = self.peer("desk", "operator"), self.peer("watcher", "any")
        self.actors = {name: self.peer(name, "any") for name in ("left", "right")}
        for peer in (self.operator, self.watcher, *self.actors.values()):
            self.greet(peer)
        self.lead()

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.sockets.server.close()

    def peer(self, name: str, role: str, process: str = "1") -> Peer:
        return Peer(self._context, self.sockets.port, name, role, process)

    # Messages.

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.world.now += self.world.dt
            self.run_pass()

    def run_pass(self) -> None:
        """A lease ends whose holder is silent, and then the loop's pass."""
        if self.holder is not None and self.model.state != "RUN" and self.world.now - self.heard > SILENT:
            self.holder = None
            self.model.request("lost", "server")
        self.model.run_pass()
        self.check_consent()

    def deliver(self, peer: Peer, frames: list[bytes], *, answered: bool = True) -> dict[str, Any]:
        """Send a message, let the next pass take it, and return its reply."""
        self.step_until(lambda: peer.socket.poll(0, zmq.POLLOUT), "the server is there")
        peer.socket.send_multipart(frames)
        assert self.sockets.door.step_until_request(ARRIVES), "the message arrives"
        expected = self.model.state, self.model.generation
        self.run_pass()
        if peer in self.known:
            self.known.move_to_end(peer)
        if not answered:
            return {}
        self.step_until(lambda: peer.socket.poll(0), "each request is answered")
        reply = arrays.unpack(peer.socket.recv_multipart()[-1], 1 << 20)
        assert (reply["state"], reply["generation"]) == expected
        self.replies += 1
        self.refusals += not reply["ok"]
        assert not peer.socket.poll(0), "once"
        return reply

    def step_until(self, condition: Callable[[], object], what: str) -> None:
        ends = time.monotonic() + ARRIVES
        while not condition():
            assert time.monotonic() < ends, what
            self.sockets.door.front.step(0.001)

    def message(self, peer: Peer, op: str, **values: Any) -> list[bytes]:
        peer.asked += 1
        return [arrays.pack({"op": op, "id": peer.asked, "stamp": self.world.now, "held": 0.0, **values})]

    def demand(self, peer: Peer, op: str, wanted: bool, **values: Any) -> None:
        """Send a request whose outcome is known; the model has it already."""
        reply = self.deliver(peer, self.message(peer, op, **values))
        assert reply["id"] == peer.asked
        assert reply["ok"] == wanted, f"{op} of {peer.name}: {reply['error'] or 'done'}"
        assert bool(reply["error"]) != wanted

    def next_moment(self, peer: Peer) -> bool:
        """Advance the clock to the next pass; returns whether the server knows the peer, which it hears then."""
        self.world.now += self.world.dt
        if peer in self.known and peer is self.holder:
            self.heard = self.world.now
        return peer in self.known

    def next_moment_of_known(self, peer: Peer) -> None:
        if peer not in self.known:
            self.greet(peer)
        self.next_moment(peer)

    def takes(self, peer: Peer) -> bool:
        """Whether a peer gets the lease, and what that does to the robot."""
        holder = self.holder
        if holder is not None and (holder.name, holder.process) != (peer.name, peer.process):
            return False
        self.holder, self.heard = peer, self.world.now
        if holder not in (None, peer):
            self.model.request("moved", "server")
        return True

    def greet(self, peer: Peer) -> None:
        self.world.now += self.world.dt
        wanted = self.takes(peer) if peer.role == "controller" else True
        if wanted:
            self.known[peer] = None
            self.known.move_to_end(peer)
            if len(self.known) > MOST:
                others = [p for p in self.known if p is not self.holder]
                del self.known[next((p for p in others if p.role != "operator"), others[0])]
        self.demand(peer, "hello", wanted, name=peer.name, role=peer.role, process=peer.process, protocol=PROTOCOL)

    def lead(self) -> Peer:
        """The peer that has the lease and is there; lets one take it."""
        if self.holder is not None and self.holder.socket.closed:
            if self.rng.random() < 0.5:
                self.take()
            else:
                self.on_away()  # the lease of a process that is gone ends, once the robot stands
                if self.holder is not None:
                    self.on_away()
        if self.holder is not None:
            if self.holder in self.known:
                return self.holder
            self.greet(self.holder)
        peer = self.actors[str(self.rng.choice(["left", "right"])) if self.holder is None else self.holder.name]
        if peer not in self.known:
            self.greet(peer)
        if self.holder is not peer:
            self.next_moment(peer)
            self.demand(peer, "lease", self.takes(peer))
        return peer

    # What clients ask for, and what must become of it.

    def ask(self, event: str, role: str, motion: Way | None = None) -> None:
        peer = {"operator": self.operator, "any": self.watcher}.get(role) or self.lead()
        self.next_moment_of_known(peer)
        values: dict[str, Any] = {}
        moves = event in ("clear", "go", "arm", "reset", "park", "jog", "torque_off")
        unseen = self.rng.choice(["", "older", "later", "missing"], p=[0.88, 0.06, 0.02, 0.04])
        if self.model.generation == 0 and unseen == "older":
            unseen = ""
        if unseen != "missing":
            values["generation"] = self.model.generation + {"older": -1, "later": 1}.get(str(unseen), 0)
        led = event == "arm" or (event in ("release", "reset") and role != "operator")
        wanted = not (led and peer is not self.holder) and not (unseen and moves)
        if event == "go":
            wanted = wanted and self.holder is not None
            name, process = ("left", "1") if self.holder is None else (self.holder.name, self.holder.process)
            values |= {"controller": name, "process": process}
        if event in ("reset", "park", "jog") and self.model.path is None:
            wanted = False
        self.sockets.server._motions = lambda *_: motion  # type: ignore[assignment, return-value]
        wanted = wanted and self.model.request(event, role, motion)
        self.consent(event, wanted)
        self.demand(peer, event, wanted, **values)

    def reboot(self, role: str, motor: str) -> None:
        peer = {"operator": self.operator, "any": self.watcher}.get(role) or self.lead()
        self.next_moment_of_known(peer)
        generation = self.model.generation
        wanted, before = self.model.reboot(role, motor), len(self.world.arms.rebooted)
        self.demand(peer, "reboot", wanted, name=motor, generation=generation)
        self.check_reboot(wanted, wanted, before)

    def send(self, target: np.ndarray, number: int, generation: int, age: float = 0.0) -> str:
        peer = self.lead()
        self.next_moment(peer)
        if min(number, generation) < 0:
            self.demand(peer, "command", False, target=target, number=number, generation=generation)
            return "malformed"
        wanted = self.model.command(target, number, generation, age)
        values = {"target": target, "number": number, "generation": generation, "stamp": self.world.now - age}
        if self.rng.random() < 0.5:
            [frame] = self.message(peer, "command", **values)
            silent = arrays.unpack(zmq.Frame(frame), 1 << 20)
            del silent["id"]
            self.deliver(peer, [arrays.pack(silent)], answered=False)
        else:
            reply = self.deliver(peer, self.message(peer, "command", **values))
            assert reply["ok"] == (not wanted), reply["error"]
            assert reply["error"].endswith(wanted)
        assert self.sockets.served_loop._commands.number == self.model.number, "only what the model takes"
        return wanted

    def on_lost(self) -> None:
        peer = self.lead() if self.rng.random() < 0.7 else self.actors[str(self.rng.choice(["left", "right"]))]
        if self.next_moment(peer) and peer is self.holder:
            self.holder = None
            self.model.request("lost", "server")
        self.demand(peer, "drop", peer in self.known)

    def on_reconnect(self) -> None:
        """An actor's connection ends, and another one of its process wants the lease."""
        name = str(self.rng.choice(["left", "right"]))
        self.actors[name].socket.close()
        self.actors[name] = self.peer(name, "controller", self.actors[name].process)
        self.greet(self.actors[name])

    def on_killed(self) -> None:
        """An actor vanishes without a word; its next process gets the lease once that of the last has ended."""
        peer = self.lead()
        peer.socket.close()
        self.run(int(self.rng.choice([1, 10, 40])))
        self.actors[peer.name] = self.peer(peer.name, "controller", f"{int(peer.process) + 1}")
        self.greet(self.actors[peer.name])

    def take(self) -> None:
        """An operator ends the lease."""
        self.next_moment_of_known(self.operator)
        if self.holder is not None:
            self.holder = None
            self.model.request("lost", "server")
        self.demand(self.operator, "take", True)

    def on_take(self) -> None:
        if self.rng.random() < 0.5:
            self.take()
        elif self.next_moment(self.watcher):
            self.demand(self.watcher, "take", False)

    def on_go_for_another(self) -> None:
        """A go for another process than the one that has the lease: the operator saw that one."""
        holder = self.lead()
        self.next_moment_of_known(self.operator)
        values = {"controller": holder.name, "process": holder.process, "generation": self.model.generation}
        values[str(self.rng.choice(["controller", "process"]))] = "0"
        self.demand(self.operator, "go", False, **values)

    def on_second_actor(self) -> None:
        """Another one wants the lease, and is refused with the name of the one that has it."""
        first = self.lead()
        other = self.actors["left" if first.name == "right" else "right"]
        known = self.next_moment(other)
        reply = self.deliver(other, self.message(other, "lease"))
        assert not reply["ok"]
        assert not known or first.name in reply["error"]

    def on_leads(self) -> None:
        peer = self.actors[str(self.rng.choice(["left", "right"]))]
        self.demand(peer, "lease", self.next_moment(peer) and self.takes(peer))

    def on_of_another(self) -> None:
        """A command of a peer without the lease, right in all else."""
        holder = self.lead()
        other = self.actors["left" if holder.name == "right" else "right"]
        self.next_moment(other)
        self.number += 1
        values = {"target": self.place() + 0.01, "number": self.number, "generation": self.model.generation}
        self.demand(other, "command", False, **values)
        assert self.sockets.served_loop._commands.number == self.model.number

    def on_garbage(self) -> None:
        rng = self.rng
        peer = (self.watcher, self.operator, self.lead())[rng.integers(3)]
        kind = int(rng.integers(6))
        heard = kind == 4
        frames: list[bytes] = [
            [b""], [b"\xc1"], [rng.bytes(60)], [b"a", b"b"], [arrays.pack({"op": "fly", "id": 1})],
            [arrays.pack({"op": "ping", "more": b"x" * (MAX_REQUEST + 1)})],
        ][kind]  # fmt: skip
        if heard:
            self.next_moment(peer)
        else:
            self.world.now += self.world.dt
        assert not self.deliver(peer, frames)["ok"]

    def on_stranger(self) -> None:
        """A connection without a hello: it may stop, and nothing else."""
        peer = self.peer("stranger", "any")
        try:
            op = str(self.rng.choice(["arm", "clear", "hold", "lease", "command", "stop"], p=[0.19] * 5 + [0.05]))
            self.next_moment(peer)
            self.demand(peer, op, op == "stop" and self.model.request("stop", "any"))
        finally:
            peer.socket.close()

    def on_old_request(self) -> None:
        """A request that was seconds on its way moves nothing; one that calms is obeyed."""
        op = str(self.rng.choice(["arm", "reset", "clear", "hold", "release"]))
        peer = self.operator if op in ("clear", "hold") else self.lead()
        self.next_moment_of_known(peer)
        role = "operator" if peer is self.operator else "controller"
        values = {"generation": self.model.generation, "stamp": self.world.now - self.rng.choice([-9.0, 2.5, 60.0])}
        wanted = op in ("hold", "release") and self.model.request(op, role)
        self.consent(op, wanted)
        self.demand(peer, op, wanted, **values)

    def on_away(self) -> None:
        """No message for so long that a lease ends, unless the robot runs."""
        for _ in range(int((SILENT + 0.1) / LATE)):
            self.world.now += LATE - self.world.dt
            self.run(1)

    def on_silence(self) -> None:
        for _ in range(int(1.05 / LATE)):
            self.world.now += LATE - self.world.dt
            self.run(1)


def interleave_sockets(seed: int, steps: int) -> SocketInterleaving:
    """Run `steps` steps. Raises AssertionError, with the step's number, where a check fails."""
    life = SocketInterleaving(seed)
    try:
        for k in range(steps):
            try:
                life.step()
            except AssertionError as e:
                raise AssertionError(f"seed {seed}, step {k}, {life.model.state}: {e}") from e
    finally:
        life.close()
    return life
