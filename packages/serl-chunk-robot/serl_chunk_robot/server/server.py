"""The server of one robot: the thread that keeps the loop's deadlines, takes requests and publishes the state.

One thread calls the driver and the loop, so that no lock is in their way. Sockets are those of another
process (`front`), which gives requests through a `door`. Nothing here switches torque off but an operator's torque_off.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import Counter, deque
from time import monotonic, sleep
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from serl_chunk_robot.client.client import boot_time
from serl_chunk_robot.control.loop import Refused, RobotLoop, Status
from serl_chunk_robot.control.own_motion import Motion
from serl_chunk_robot.drivers.base import SUPPORTED, Driver
from serl_chunk_robot.errors import SerlChunkError, named_once
from serl_chunk_robot.robot_file.profiles import Profile
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits
from serl_chunk_robot.safety.table import ANY, CONTROLLER, HELD, MOVE, OPERATOR, RUN, STOPPED, Transition
from serl_chunk_robot.server.door import A_PASS, GREETED, LEADS, STRANGER, Door, Request
from serl_chunk_robot.server.history import History
from serl_chunk_robot.server.leader_permissions import Drives
from serl_chunk_robot.server.leases import Client, Clients, Lease
from serl_chunk_robot.wire import arrays, codec
from serl_chunk_robot.wire.codec import WireError
from serl_chunk_robot.wire.protocol import MAX_REQUEST, PROTOCOL

logger = logging.getLogger(__name__)

OLD = 2.0  # s: an older request that would let the robot move is refused
LAY = 0.25  # s that such a request may have waited for the loop: its client was told by then that it is not confirmed
END_WITHIN = 5.0  # s for braking, once the server is to end
LED = ("arm", "release", "reset")  # need the lease; an operator's release and reset do not
MOTIONS = ("reset", "park", "jog", "end")
CALMING = ("stop", "hold", "release", "drop", "take")  # are obeyed however old they are, and of any generation
REQUESTS = {*LED, *MOTIONS, "stop", "clear", "go", "hold", "torque_off"}  # events of the table
# What lets something move is of the generation that was shown to the person, or read by the program.
MOVING = {*MOTIONS, "clear", "go", "proceed", "arm", "drive", "torque_off", "reboot", "profile"}
OTHERS = ("hello", "lease", "take", "drop", "command", "drive", "profile", "reboot", "proceed", "ping", "history")
REMEMBERED = ("hold", "stop", "clear", "go", "take", "end")  # in the server's history
PASSES = 1000  # whose lateness is reported
REPORTED = 200  # passes between two reports
EVENTS = 64  # the newest that the state repeats, so that a subscriber that misses a message loses none


class Publisher:
    """Makes the messages of one server. `robot`: its name; `run`: that of the server's process."""

    def __init__(self, robot: str, run: str) -> None:
        self._names = {"run": run, "robot": robot}
        self._passes = self._events_seen = 0
        self._events: Deque[List[Any]] = deque(maxlen=EVENTS)
        self._late, self._lateness = np.zeros(PASSES), {"p50": 0.0, "p99": 0.0, "max": 0.0}
        self._more: Dict[str, Any] = {}
        self._failed = ""

    def begin(self, late: float) -> None:
        """A pass begins `late` seconds after its deadline."""
        self._late[self._passes % PASSES] = late
        self._passes += 1
        if self._passes % REPORTED == 0:
            known = self._late[: self._passes]
            p50, p99 = np.percentile(known, (50, 99))
            self._lateness = {"p50": float(p50), "p99": float(p99), "max": float(known.max())}

    def message(self, status: Status, more: Optional[Dict[str, Any]] = None) -> bytes:
        """Return the state after a pass, with the server's own fields `more`; None: those of the last message.

        A driver's extras or events that no message can hold are left out and logged: they must not end the loop.
        """
        self._more = self._more if more is None else more
        own = {
            **self._names, **self._more, "pass": self._passes, "late": self._lateness, **status._asdict(),
            "word": codec.shown(status.word),
            "held": None if status.held is None else {"by": codec.shown(status.held[0]), "since": status.held[1]},
        }  # fmt: skip
        del own["reading"]
        nothing: Dict[str, Any] = {"q": None, "dq": None, "effort": None, "stamp": None, "extra": {}, "events": [],
                                   "torque": None}  # fmt: skip
        try:
            return arrays.pack({**own, **nothing, **self._measured(status)})
        except Exception as e:
            if str(e) != self._failed:
                self._failed = str(e)
                logger.error("what the driver reports cannot be published: %s %s", type(e).__name__, e)
            return arrays.pack({**own, **nothing})

    def _measured(self, status: Status) -> Dict[str, Any]:
        for event in status.events:
            self._events.append([self._events_seen, float(event.reward), bool(event.success), bool(event.failure)])
            self._events_seen += 1
        r, events = status.reading, list(self._events)
        if r is None:
            return {"events": events}
        return {"q": r.q, "dq": r.dq, "effort": r.effort, "stamp": r.stamp, "extra": dict(r.extra), "events": events,
                "torque": r.torque}  # fmt: skip


class Inbox:
    """What came for the next pass of the loop."""

    def __init__(self) -> None:
        self.taken = 0  # requests of this pass
        self.came: Optional[Tuple[int, float]] = None  # number of the newest command, taken or not, and when it came
        self._command: Optional[Tuple[Command, float]] = None  # the newest, and when it came

    def put(self, command: Command, now: float) -> bool:
        overtook = self._command is not None
        self._command, self.came = (command, now), (command.number, now)
        return overtook

    def take(self) -> Optional[Tuple[Command, float]]:
        """Take the command that waits, and when it came; None where none does."""
        command, self._command = self._command, None
        return command


class RobotServer:
    """Serves one robot that is connected already, on the clock that `clock` is.

    Args:
        profiles: by name; the gate has the limits of the one called `profile`.
        motions: makes the motion of an event (MOTIONS) from the request's arguments, the set point, float64[J], and the
            profile's limits. What it raises refuses the request: ConfigError, TypeError, ValueError, KeyError.
        door: where requests come from, and replies and states go.
        cameras: name, height, width and port of each, for clients. Other processes publish their frames.
        views: camera -> the part of its device's pictures that it shows, and how it is turned and mirrored.
        devices: name, port and first arm of each input device; the same of their readings.
        drives: of leaders among them; None: none can be driven.
        needs_go: False: a clear alone lets a controller move the robot. For simulated robots.
        park: the pose, float64[J], in which the robot may lose its torque; None: it has none.
        history: keeps who held, stopped, cleared and let go.
    """

    def __init__(
        self, driver: Driver, gate: Gate, *, measured: Measured, profiles: Mapping[str, Profile], profile: str,
        motions: Callable[[str, Dict[str, Any], np.ndarray, Limits], Motion], door: Door,
        clock: Callable[[], float] = monotonic, cameras: Sequence[Tuple[str, int, int, int]] = (),
        devices: Sequence[Tuple[str, int, int]] = (), drives: Optional[Drives] = None, needs_go: bool = True,
        park: Optional[np.ndarray] = None, history: Optional[History] = None,
        views: Mapping[str, Sequence[Union[int, str]]] = {},
    ) -> None:  # fmt: skip
        spec, self._clock = driver.spec(), clock
        self._gate, self._profiles, self._profile = gate, profiles, profiles[profile]
        self._motions, self._drives, self._park = motions, drives or Drives(), park
        self._history = history or History(None)
        streams = {"cameras": [list(each) for each in cameras], "devices": [list(each) for each in devices]}
        shown = {camera: list(view) for camera, view in views.items()}
        self._greeting: Dict[str, Any] = {"robot": spec.name, "spec": spec._asdict(), "views": shown, **streams}
        self.loop = RobotLoop(
            driver, gate, measured=measured, tick=spec.tick, on_transition=self._transition, needs_go=needs_go,
            clock=boot_time if clock is monotonic else clock,
        )  # fmt: skip
        self.run_id = uuid.uuid4().hex[:12]
        self._clients, self._lease = Clients(), Lease()
        self._inbox = Inbox()
        self._counts: Counter[str] = Counter()
        self._publisher = Publisher(spec.name, self.run_id)
        self._logged_word = self._ending = ""
        self._door, self._deaf = door, ""  # why no request can be received

    def run(self) -> None:
        """Serve until `end`; then brake and return. The door is closed in any case.

        Raises what a pass raised, which is a bug: the robot has braked, by `RobotLoop.fail`, and is latched.
        """
        due, gives_up = self._clock(), 0.0
        try:
            while True:
                self._wait(due)
                self.run_pass(due)
                now = self._clock()
                if self._ending:
                    gives_up = gives_up or now + END_WITHIN
                    if self.loop.machine.state in (RUN, MOVE):
                        self._event("hold", OPERATOR, self._ending, now)
                    if not self.loop.machine.moving or now > gives_up:
                        return
                # A late pass moves no deadline, and those that it missed are left out.
                due += self._gate.dt * max(1, int(np.ceil((now - due) / self._gate.dt)))
        except BaseException as e:
            status = self.loop.fail(e, lambda: sleep(self._gate.dt))
            self._door.publish(self._publisher.message(status))
            raise
        finally:
            self.close()

    def run_pass(self, due: float) -> Status:
        self._drain()
        now = self._clock()
        self._listen(now)
        silent = self._lease.expire(now, self.loop.machine.state)
        if silent:
            logger.warning("lease ended: controller=%s is silent", silent)
            self._lost(now)
        self._publisher.begin(now - due)
        status = self.loop.run_pass(now)
        self._drives.run_pass(status, self._lease.connection)
        counts = Counter(self._counts)
        counts.update(self._door.counts)
        own = {
            "controller": self._lease.holder, "process": self._lease.process,
            "profile": self._profile.name, "digest": self._profile.digest,
            "counts": {**self._gate.counts, **counts}, "came": self._inbox.came,
            "waiting": status.state == MOVE and self.loop.motion.waiting,
            "causes": {event: codec.shown(detail) for event, detail in self.loop.causes.items()},
        }  # fmt: skip
        self._door.publish(self._publisher.message(status, own))
        return status

    def end(self, by: str) -> None:
        """Let `run` brake and return. From any thread, or a handler of signals."""
        self._ending = by

    def close(self) -> None:
        self._door.close()

    def _event(self, event: str, role: str, by: str, now: float) -> None:
        with contextlib.suppress(Refused):  # it stands, or brakes already
            self.loop.request(event, role, by, now)

    def _lost(self, now: float, event: str = "lost") -> None:
        self._inbox.take()
        self._event(event, "server", "the server", now)

    def _transition(self, done: Transition) -> None:
        self._drives.end(done.word)
        if done.word and done.word != self._logged_word:
            logger.info("%s: %s", self.loop.machine.state, done.word)
        self._logged_word = done.word

    def _wait(self, due: float) -> None:
        """Answer requests until a pass is due; commands wait for it."""
        while self._inbox.taken < A_PASS:
            left = due - self._clock()
            if left < 0.001 or not self._door.wait(left):
                break
            self._take()
        left = due - self._clock()
        if left > 0:
            sleep(left)

    def _drain(self) -> None:
        """Take what has come, for a quarter of a pass at most. What then comes before the next pass counts with it."""
        until, self._inbox.taken = self._clock() + self._gate.dt / 4, 0
        while self._inbox.taken < A_PASS and self._take() and self._clock() <= until:
            pass
        self._take_newest()

    def _take(self) -> bool:
        request = self._door.take()
        if request is not None:
            self._inbox.taken += 1
            self._receive(request, self._clock())
        return request is not None

    def _listen(self, now: float) -> None:
        """Stop where no request can be received: no one could stop the robot."""
        deaf = self._door.fault()
        if deaf and not self._deaf:
            logger.error("no request can be received: %s", deaf)
            self._event("stop", "server", f"the server: requests cannot be received, {deaf}", now)
        self._deaf = deaf

    def _take_newest(self) -> str:
        """Give the loop the newest command; returns why it was rejected."""
        newest = self._inbox.take()
        return "" if newest is None else self.loop.command(*newest)

    def _receive(self, request: Request, now: float) -> None:
        """Answer one message. No message raises: the loop must go on."""
        connection = request.connection
        op, number, silent, extra, error = "", None, False, {}, ""
        try:
            if request.problem:
                raise WireError(request.problem)
            values = arrays.unpack(request.body, MAX_REQUEST)
            number = codec.count(values, "id") if "id" in values else None
            op = codec.identifier(values, "op", 32)
            silent = op == "command" and number is None
            extra = self._answer(op, values, connection, request, now)
        except WireError as e:
            self._counts["malformed"] += 1
            error = f"not a request: {e}"
        except (Refused, SerlChunkError) as e:
            self._counts["refused"] += 1
            error = str(e)
        except Exception as e:
            logger.exception("a request failed")
            error = f"the server failed to answer: {type(e).__name__} {e}"
        if silent:
            self._door.reply(request, self._rank(connection))
            return
        try:
            reply = arrays.pack({**self._facts(connection, now), **extra, **_outcome(number, error)})
        except WireError as e:  # what a driver says of itself
            reply = arrays.pack({**self._facts(connection, now), **_outcome(number, f"{op}: {e}")})
        self._door.reply(request, self._rank(connection), reply)

    def _rank(self, connection: bytes) -> int:
        client = self._clients.heard_from(connection)
        leads = bool(self._lease.holder) and connection == self._lease.connection
        return LEADS if leads or (client and client.role == OPERATOR) else GREETED if client else STRANGER

    def _facts(self, connection: bytes, now: float) -> Dict[str, Any]:
        machine = self.loop.machine
        return {
            "generation": machine.generation, "state": machine.state, "word": codec.shown(machine.word), "moment": now,
            "run": self.run_id, "greet": self._clients.heard_from(connection) is None,
        }  # fmt: skip

    def _answer(
        self, op: str, values: Dict[str, Any], connection: bytes, request: Request, now: float
    ) -> Dict[str, Any]:
        """Do what a request wants; returns what its reply has in addition. Raises Refused, WireError, ConfigError."""
        if not request.most:
            raise Refused("the key of this client is not admitted any more")
        most, key = request.most, f" (key {request.key})" if request.key else ""
        if op == "hello":
            return self._greet(values, connection, most, key, now)
        client = self._clients.heard_from(connection)
        if client is None and op == "stop":  # any admitted client may stop, also one that said nothing before
            name = "a client without a name"
            with contextlib.suppress(WireError):  # a name that is none must not keep it from stopping
                name = codec.identifier(values, "name", 64)
            client = Client(name + key, ANY)
        if client is None:
            raise Refused(f"{op}: send hello first")
        if client.role == OPERATOR and most != OPERATOR:
            client = client._replace(role=ANY)  # the key's role was changed since
        self._lease.renew(connection, now)
        if op in MOVING and not (op == "drive" and values.get("first") == {}):  # that one ends a drive
            self._check_generation(op, values)
        age = 0.0
        if "stamp" in values or op == "command":
            age = now - _number(values, "stamp") - (_number(values, "held") if "held" in values else 0.0)
        if op == "command":
            self._command(values, connection, age, now)
            return {}
        if op not in CALMING and request.waited > max(LAY, 3 * self._gate.dt):
            raise Refused(f"{op}: it waited for {request.waited:.1f} s, as the loop stood still. Request it again")
        self._take_newest()  # what came before is done before
        if op in CALMING:
            self._drives.end(f"{op} by {client.name}")
        if op not in CALMING and not -OLD <= age <= OLD:
            raise Refused(f"{op}: it was sent {age:.1f} s ago")
        if self._ending and op not in CALMING:
            raise Refused(f"{op}: the server is ending ({self._ending})")
        done = self._obey(op, values, connection, client, now, age)
        if op in REMEMBERED:
            generation = self.loop.machine.generation
            self._history.add(op, by=client.name, address=request.address, generation=generation)
        return done

    def _obey(
        self, op: str, values: Dict[str, Any], connection: bytes, client: Client, now: float, age: float
    ) -> Dict[str, Any]:
        """Do what a client that may send requests wants; returns what its reply has in addition."""
        if op == "lease":
            self._take_lease(connection, client, now)
        elif op == "drop":
            if self._lease.drop(connection):
                self._lost(now)
        elif op == "take":
            if client.role != OPERATOR:
                raise Refused(f"take is for the operator; {client.name} is {client.role}")
            if self._lease.end():
                self._lost(now)
        elif op == "history":
            return {"history": self._history.recent()}
        elif op == "drive":
            self._lease.check(connection, op)
            if self.loop.machine.state == HELD and values.get("first"):
                raise Refused(f"drive: {self.loop.shown_hold(now)}")
            self._drives.request(values, connection, self.loop.machine.state, self.loop.set_point, now, age)
        elif op == "profile":
            self._choose(codec.identifier(values, "name", 64), client)
        elif op == "reboot":
            support = SUPPORTED if values.get("arm_is_supported") is True else ""
            self.loop.reboot(codec.identifier(values, "name", 64) + support, client.role, client.name, now)
        elif op in REQUESTS:
            return self._request(op, values, connection, client, now)
        elif op == "proceed":
            if client.role != OPERATOR or self.loop.machine.state != MOVE or not self.loop.motion.proceed():
                raise Refused("proceed is for the operator, while a motion waits for one")
        elif op != "ping":
            known = ", ".join(sorted({*REQUESTS, *OTHERS}))
            raise Refused(f"{op!r} is no request. Valid: {known}.")
        return {}

    def _greet(self, values: Dict[str, Any], connection: bytes, most: str, key: str, now: float) -> Dict[str, Any]:
        protocol = codec.count(values, "protocol")
        if protocol != PROTOCOL:
            raise Refused(
                f"protocol {protocol}: this server has {PROTOCOL}. Install the same version on both machines."
            )
        name, role = codec.identifier(values, "name", 64), codec.identifier(values, "role", 16)
        process = codec.identifier(values, "process", 32)
        if not name.strip():
            raise Refused("name: a client needs a name that is not empty")
        if role not in (ANY, CONTROLLER, OPERATOR):
            raise Refused(f"role {role!r}: valid are {ANY}, {CONTROLLER} and {OPERATOR}")
        if role == OPERATOR != most:
            raise Refused(f'role operator:{key} is no operator\'s. Add "role": "operator" to its file on the server.')
        client = Client(name + key, OPERATOR if role == OPERATOR else ANY, process)
        if role == CONTROLLER:
            self._take_lease(connection, client, now)
        self._clients.add(connection, client, self._lease.connection)
        return {**self._greeting, "profiles": {p.name: p.digest for p in self._profiles.values()}}

    def _take_lease(self, connection: bytes, client: Client, now: float) -> None:
        if self._lease.take(connection, client, now):
            self._lost(now, "moved")  # the commands of another connection are not this one's

    def _command(self, values: Dict[str, Any], connection: bytes, age: float, now: float) -> None:
        self._lease.check(connection, "command")
        target = values.get("target")
        if isinstance(target, list):
            if not all(type(x) in (int, float) for x in target):
                raise WireError("field 'target' must hold numbers alone")
            target = np.array(target, np.float64)
        if not isinstance(target, np.ndarray):
            raise WireError("field 'target' must be an array or a list of numbers")
        command = Command(target, codec.count(values, "number"), codec.count(values, "generation"), age)
        self._counts["overtaken"] += self._inbox.put(command, now)
        if "id" in values:
            reason = self._take_newest()
            if reason:
                raise Refused(f"command {command.number} was rejected: {reason}")

    def _request(
        self, event: str, values: Dict[str, Any], connection: bytes, client: Client, now: float
    ) -> Dict[str, Any]:
        if event == "arm" or (event in LED and client.role != OPERATOR):
            self._lease.check(connection, event)
        leads = bool(self._lease.holder) and connection == self._lease.connection
        role = client.role if client.role == OPERATOR else CONTROLLER if leads else ANY
        motion, detail = None, ""
        if event == "go":
            controller, process = codec.identifier(values, "controller", 160), codec.identifier(values, "process", 32)
            self._lease.check_shown(controller, process)
            detail = self._lease.holder
        if event in MOTIONS:
            if (at := self.loop.set_point) is None or self.loop.machine.state == STOPPED:
                raise Refused(
                    f"{event}: the robot is {self.loop.machine.state} ({self.loop.machine.word}). Look at "
                    "the cell, and run `serl-chunk robot clear` first"
                )
            arguments = {k: v for k, v in values.items() if k not in ("op", "id", "generation", "stamp", "held")}
            try:
                motion = self._motions("park" if event == "end" else event, arguments, at, self._profile.limits)
            except (TypeError, ValueError, KeyError) as e:  # ConfigError among them
                raise Refused(named_once(event, e)) from e
        ends = self._park if event == "end" else None
        self.loop.request(event, role, client.name, now, motion=motion, ends=ends, detail=detail)
        if motion is None:
            return {}
        return {"draws": dict(getattr(motion, "draws", {})), "motion": self.loop.motion.number}

    def _check_generation(self, op: str, values: Dict[str, Any]) -> None:
        """Raise Refused for a request without the generation of the robot as it is now."""
        if "generation" not in values:
            raise Refused(
                f"{op}: it has no generation. Send that of the state which was shown to the operator, or read."
            )
        self.loop.check_generation(op, codec.count(values, "generation"))

    def _choose(self, name: str, client: Client) -> None:
        if client.role != OPERATOR:
            raise Refused(f"profile is for the operator; {client.name} is {client.role}")
        if name not in self._profiles:
            raise Refused(f"profile {name!r}: the robot's file has {', '.join(self._profiles)}")
        self.loop.limit(self._profiles[name].limits)
        self._profile = self._profiles[name]
        logger.info("profile: name=%s digest=%s by=%s", name, self._profile.digest, client.name)


def _number(values: Dict[str, Any], name: str) -> float:
    return float(codec.field(values, name, (float, int)))


def _outcome(number: Optional[int], error: str) -> Dict[str, Any]:
    return {"id": number, "ok": not error, "error": codec.shown(error)}
