"""A client of a robot's server, for actors, commands and labs. It has no thread; use one client from one thread."""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import zmq

from serl_chunk_robot.errors import SerlChunkError
from serl_chunk_robot.wire import arrays, codec
from serl_chunk_robot.wire.curve import Pair, key_of, read, use_keys
from serl_chunk_robot.wire.protocol import DEFAULT_PORT, MAX_PICTURE, MAX_STATE, PROTOCOL, STATE_PORT, address
from serl_chunk_robot.wire.sockets import connect, make_socket, try_receive, try_send, unknown_host

ANSWER = 2.0  # s
HISTORY = 0.5  # s for which the joints of states that were read are kept
PROCESS = uuid.uuid4().hex[:12]  # of this process, to which a lease belongs in addition to the actor's name
UNCONFIRMED = "THE ROBOT DID NOT CONFIRM. Press the hardware emergency stop."
SENT = 100  # commands whose moment is kept, until the server reports when they came
DRIFT = 250e-6  # s per s by which the clocks may run apart; those of computers differ by less
TRIPS = 100  # the newest, of which the shortest is taken for one without waiting


def boot_time() -> float:
    """Return the seconds since this machine started, with those of its suspends, which its monotonic clock leaves out.

    Where the system has no such clock, as macOS, it is the monotonic one.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ClockMap:
    """The difference between the clocks of one process of a server and of this machine. All moments are in seconds."""

    def __init__(self) -> None:
        # A bound widens by DRIFT. These are its values at moment 0 of this clock, so that all can be compared.
        self._above, self._below = math.inf, -math.inf
        self._trips: Deque[float] = deque(maxlen=TRIPS)

    def exchanged(self, sent: float, moment: float, received: float) -> None:
        """Take the times of a request.

        Args:
            sent: when it was sent.
            moment: when it came, on the server's clock.
            received: when its reply came.
        """
        self._trips.append(received - sent)
        self.arrived(sent, moment)
        self.came(moment, received)

    def arrived(self, sent: float, moment: float) -> None:
        """A message that was sent at `sent` was taken at `moment` of the server's clock."""
        self._above = min(self._above, moment - sent - DRIFT * sent)
        if self._above + DRIFT * sent < self._below - DRIFT * sent:  # a machine was suspended: its clock stood still
            self._below = -math.inf
            self._above = moment - sent - DRIFT * sent

    def came(self, moment: float, received: float) -> None:
        """A message of `moment` of the server's clock was read at `received`."""
        self._below = max(self._below, moment - received + DRIFT * received)
        if self._above + DRIFT * received < self._below - DRIFT * received:
            self._above = math.inf
            self._below = moment - received + DRIFT * received

    def server_time(self, now: float) -> float:
        """Return the server's clock at `now` of this one; NaN before the first message from the server."""
        above, below = self._above + DRIFT * now, self._below - DRIFT * now
        if below == -math.inf:
            return now + above - self._half() if above < math.inf else math.nan
        if above == math.inf:  # only states were read: they are as old as their delay
            return now + below
        return now + max(above - self._half(), below)

    def _half(self) -> float:
        return 0.5 * min(self._trips, default=0.0)


class RobotError(SerlChunkError):
    """The robot's server refused a request, in its own words, or did not answer."""


class Keys(NamedTuple):
    """The server's public key, and the pair that this client proves."""

    server: str
    pair: Pair

    @classmethod
    def of_file(cls, path: Path) -> Keys:
        """Read "server" and "secret" of a file, as `serl-chunk keys join` writes it. Raises ConfigError."""
        values = read(path)
        return cls(key_of(path, values, "server"), Pair.of_secret(key_of(path, values, "secret")))


class Picture(NamedTuple):
    """A frame of a camera. Times are on the server's clock, s."""

    image: np.ndarray  # uint8[H, W, 3], RGB; no later frame is written into it, and it cannot be written to
    number: int
    moment: float  # when it was taken
    changed: float  # `moment` of the newest picture that differed from the one before it


class Reading(NamedTuple):
    """A reading of an input device that the server hosts, with arrays of its own."""

    twist: Optional[np.ndarray]  # float64[6]; None: it has none
    joints: Optional[np.ndarray]  # float64[J]; None: it has none
    buttons: Tuple[bool, ...]
    stamp: float  # on the server's clock, s
    alive: bool
    began: float = 0.0  # the device's process, on the same clock
    keys: Tuple[Tuple[int, str, bool, float], ...] = ()  # see `protocol`; none of an earlier server
    pedals: Tuple[str, ...] = ()
    drive: Optional[Tuple[int, str, str]] = None  # number, phase and why it failed; None: the device cannot be driven


class ServerProcess:
    """What the messages of one process of the server tell: its clock, which commands came, where the joints were."""

    def __init__(self, run: Any) -> None:
        self.run, self.clock = run, ClockMap()
        self.moment, self._heard = float("nan"), 0.0  # the server's newest moment, and this clock's when it came
        self._sent: Dict[int, float] = {}  # number of a command since the last arm -> when it was sent
        self._armed = 0.0  # moment of the last arm
        self._history: Deque[Tuple[float, np.ndarray]] = deque()  # stamps of states and their joints, float64[J]

    def hear(self, moment: float) -> None:
        self.moment, self._heard = moment, time.monotonic()

    def age(self) -> Dict[str, float]:
        """Return the fields by which the server knows how old a request is; none before its first message."""
        if np.isnan(self.moment):
            return {}
        return {"stamp": self.moment, "held": time.monotonic() - self._heard}

    def armed(self, moment: float) -> None:
        """The server armed the robot at `moment` of its clock: numbers of commands begin anew."""
        self._armed = moment
        self._sent.clear()

    def sent(self, number: int) -> None:
        self._sent[number] = time.monotonic()
        if len(self._sent) > SENT:
            del self._sent[next(iter(self._sent))]

    def exchanged(self, sent: float) -> None:
        """The message that was heard last is the reply to a request of the moment `sent`."""
        self.clock.exchanged(sent, self.moment, self._heard)

    def published(self, state: Dict[str, Any]) -> None:
        self.clock.came(self.moment, self._heard)
        number, came = state.get("came") or (-1, 0.0)
        if came >= self._armed and number in self._sent:
            self.clock.arrived(self._sent.pop(number), came)
        if state.get("q") is not None and (not self._history or state["stamp"] > self._history[-1][0]):
            self._history.append((state["stamp"], state["q"]))
            while self._history[0][0] < state["stamp"] - HISTORY:
                self._history.popleft()

    def joints_at(self, moment: float) -> Optional[np.ndarray]:
        if not self._history or moment < self._history[0][0]:
            return None
        after = next((k for k, (stamp, _) in enumerate(self._history) if stamp > moment), 0)
        if not after:
            return self._history[-1][1]
        (t0, q0), (t1, q1) = self._history[after - 1], self._history[after]
        return q0 + (q1 - q0) * ((moment - t0) / (t1 - t0))  # type: ignore[no-any-return]


class RobotClient:
    """Connects when it is made, and greets the server with its first request, also that of a restarted server.

    Args:
        robot: HOST[:PORT].
        name: the actor's identity: a controller that comes back under its name gets its lease back.
        role: "any", "controller" or "operator".
        answer: seconds to wait for a reply.
        process: that the lease belongs to.

    Raises ConfigError: `robot` is no address.
    """

    def __init__(
        self, robot: str = f"127.0.0.1:{DEFAULT_PORT}", *, name: str, role: str = "any", keys: Optional[Keys] = None,
        answer: float = ANSWER, process: str = PROCESS,
    ) -> None:  # fmt: skip
        self.host, self.port = address(robot)
        self.name, self.role, self.process = name, role, process
        self.generation = -1  # of the last arm
        self._keys, self._answer = keys, answer
        self._greeting: Dict[str, Any] = {}  # the reply to hello
        self._asked = self._number = 0
        self._server = ServerProcess(None)  # that sent the newest message
        self._replied: Tuple[Any, float] = None, 0.0  # the server's process and its moment, of the last reply
        self._newest: Optional[Dict[str, Any]] = None
        # (camera or device, its name) -> port and socket, of those that are read
        self._streams: Dict[Tuple[str, str], Tuple[int, zmq.Socket[bytes]]] = {}
        self._pictures: Dict[str, Picture] = {}  # the newest
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._requests = self._connected(zmq.DEALER, MAX_STATE, self.port)
            self._states = self._connected(zmq.SUB, MAX_STATE, self.port + STATE_PORT)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> RobotClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hello(self) -> Dict[str, Any]:
        """Greet the server; returns its reply: robot, profiles, spec and more (`protocol`). Raises RobotError."""
        self._greeting = {}
        hello = {"name": self.name, "role": self.role, "process": self.process, "protocol": PROTOCOL}
        reply = self._exchange("hello", hello)
        self._greeting = _taken(reply)
        ports = self._ports()
        for stream, (port, socket) in list(self._streams.items()):
            if ports.get(stream) != port:  # the server was started anew with another file
                socket.close()
                del self._streams[stream]
        return self._greeting

    def request(self, op: str, **arguments: Any) -> Dict[str, Any]:
        """Send a request and return its reply. Raises RobotError with the server's words, or where none came.

        What lets something move (`protocol`) needs `generation=`: that of the state which its operator was shown, or
        which the program read last. A reply's own is of after the request.
        """
        if op == "stop":  # needs no greeting, and does not wait for one
            arguments = {"name": self.name, **arguments}
        elif not self._greeting:
            self.hello()
        reply = self._exchange(op, arguments)
        if reply.get("greet") and not reply.get("ok"):  # another process of the server, which did nothing
            self.hello()
            reply = self._exchange(op, arguments)
        reply = _taken(reply)
        if op == "arm":
            self.generation, self._number = reply["generation"], 0
            self._server.armed(reply["moment"])
        return reply

    def send_command(self, target: np.ndarray, number: Optional[int] = None) -> bool:
        """Send a target, float64[J], of the generation of the last arm. It is not answered: see the state.

        `number`: rises from each arm on; default: one more than the last. Returns whether it was sent: False without a
        connection.
        """
        self._number = self._number + 1 if number is None else number
        values = {"op": "command", "target": np.asarray(target, np.float64), "number": self._number,
                  "generation": self.generation, **self._server.age()}  # fmt: skip
        self._server.sent(self._number)
        return try_send(self._requests, [arrays.pack(values)])

    def newest_state(self) -> Optional[Dict[str, Any]]:
        """Return the newest state that has come, perhaps the last one again; None before the first. Never waits."""
        while self._states.poll(0):
            frames = try_receive(self._states)
            state = _decoded(frames[0]) if frames else {}
            if "moment" in state:
                self._newest = state
                self._hear(state)
                self._server.published(state)
        return self._newest

    def next_state(self, seconds: float = ANSWER) -> Dict[str, Any]:
        """Wait for a state that was not returned before, of a pass after the last reply. Raises RobotError."""
        run, moment = self._replied
        ends = time.monotonic() + seconds
        while True:
            if not self._states.poll(max(int(1e3 * (ends - time.monotonic())), 0)):
                raise RobotError(self._silent("no state", self.port + STATE_PORT, seconds))
            state = self.newest_state()
            if state is not None and (state["run"] != run or state["moment"] >= moment):
                return state

    def cameras(self) -> List[Tuple[str, int, int, int]]:
        """Return name, height, width and port of the server's cameras, as of the last hello. Raises RobotError."""
        listed = (self._greeting or self.hello()).get("cameras", [])  # none of a server that has no such field
        return [(str(name), int(height), int(width), int(port)) for name, height, width, port in listed]

    def views(self) -> Dict[str, List[Union[int, str]]]:
        """Return x, y, width, height, rotate and flip of cameras' views, as of the last hello. Raises RobotError."""
        return dict((self._greeting or self.hello()).get("views", {}))  # none of a server that has no such field

    def newest_picture(self, camera: str) -> Optional[Picture]:
        """Return the newest picture of a camera, perhaps the last one again; None before the first. Never waits.

        The first call subscribes: pictures of other cameras are not sent here. Raises RobotError for a camera that the
        server does not have.
        """
        frames = self._stream("camera", camera, MAX_PICTURE)
        while frames.poll(0):
            got = try_receive(frames)
            picture = _picture(got[0], camera) if got else None
            if picture is not None:
                self._pictures[camera] = picture
        return self._pictures.get(camera)

    def devices(self) -> List[Tuple[str, int, int]]:
        """Return name, port and first arm (-1: the next one) of the server's input devices, as of the last hello.

        Raises RobotError.
        """
        listed = (self._greeting or self.hello()).get("devices", [])  # none of a server that has no such field
        return [(str(name), int(port), int(arm)) for name, port, arm in listed]

    def next_reading(self, device: str, seconds: float) -> Optional[Reading]:
        """Wait for a device's newest reading that was not returned before; None where none comes.

        The first call subscribes. Readings of another process of the server than the one that answered last are left
        out. Raises RobotError for a device that the server does not have.
        """
        socket = self._stream("device", device, MAX_STATE)
        if not socket.poll(int(1e3 * seconds)):
            return None
        frames = try_receive(socket)
        return _reading(frames[0], device, self._server.run) if frames else None

    def server_time(self) -> float:
        """Return the server's clock, s, as of the messages so far (`clocks`); NaN before the first."""
        return self._server.clock.server_time(time.monotonic())

    def joints_at(self, moment: float) -> Optional[np.ndarray]:
        """Return the joints measured at a moment of the server's clock, float64[J], as of the states that were read.

        Between two states they are interpolated. After the newest one they are its joints; None before the oldest one
        of HISTORY.
        """
        return self._server.joints_at(moment)

    def close(self) -> None:
        """Drop the lease, if there is one, and disconnect."""
        if self._context.closed:
            return
        if self._greeting and try_send(self._requests, [arrays.pack({"op": "drop", "id": 0})]):
            self._requests.linger = 200
            self._requests.close()
        self._context.destroy(linger=0)

    def _ports(self) -> Dict[Tuple[str, str], int]:
        cameras = {("camera", name): port for name, _, _, port in self.cameras()}
        return {**cameras, **{("device", name): port for name, port, _ in self.devices()}}

    def _stream(self, kind: str, name: str, largest: int) -> zmq.Socket[bytes]:
        if (kind, name) not in self._streams:
            ports = self._ports()
            if (kind, name) not in ports:
                there = ", ".join(each for of, each in ports if of == kind)
                raise RobotError(f"{kind} {name!r}: the server has {there or 'none'}")
            port = ports[kind, name]
            self._streams[kind, name] = port, self._connected(zmq.SUB, largest, port)
        return self._streams[kind, name][1]

    def _connected(self, kind: int, largest: int, port: int) -> zmq.Socket[bytes]:
        s = make_socket(self._context, kind, largest)
        if kind == zmq.SUB:
            # The newest message wins, also while none is read. libzmq does so for messages of one part alone: a frame's
            # header and picture are therefore one.
            s.setsockopt(zmq.CONFLATE, 1)
            s.setsockopt(zmq.SUBSCRIBE, b"")
        if self._keys is not None:
            use_keys(s, self._keys.server, self._keys.pair)
        connect(s, self.host, port)
        return s

    def _exchange(self, op: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
        """Send one request and wait for its reply. Raises RobotError."""
        self._asked += 1
        message = [arrays.pack({**arguments, "op": op, "id": self._asked, **self._server.age()})]
        ends, began = time.monotonic() + self._answer, 0.0
        sent = False
        while True:
            left = int(1e3 * (ends - time.monotonic())) + 1
            if left <= 0 or not self._requests.poll(left, zmq.POLLIN if sent else zmq.POLLOUT):
                raise RobotError(self._silent("no answer", self.port, self._answer))
            if not sent:
                began, sent = time.monotonic(), try_send(self._requests, message)
                continue
            frames = try_receive(self._requests)
            reply = _decoded(frames[-1]) if frames else {}
            if reply.get("id") == self._asked:  # else it is late, of a request that was given up
                self._hear(reply)
                self._server.exchanged(began)
                self._replied = reply.get("run"), self._server.moment
                return reply

    def _hear(self, message: Dict[str, Any]) -> None:
        if message.get("run") != self._server.run:  # another process, perhaps after a start of its machine
            self._server = ServerProcess(message.get("run"))
        self._server.hear(float(message.get("moment", "nan")))

    def _silent(self, what: str, port: int, seconds: float) -> str:
        if unknown := unknown_host(self.host):
            return unknown
        keys = "without keys, as this client is" if self._keys is None else "and does it admit this key"
        return f"{what} of {self.host}:{port} within {seconds:g} s: is serl-chunk-robot serve running there, {keys}?"


def _decoded(frame: codec.Frame, largest: int = MAX_STATE) -> Dict[str, Any]:
    """The map in a message of the server; empty where it is none."""
    try:
        return arrays.unpack(frame, largest)
    except codec.WireError:
        return {}


def _picture(frame: codec.Frame, camera: str) -> Optional[Picture]:
    """The picture in a message of this camera; None where it is none, or another camera's."""
    values = _decoded(frame, MAX_PICTURE)
    image: Any = values.get("image")
    fits = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    if values.get("camera") != camera or not fits:
        return None
    try:
        return Picture(image, int(values["number"]), float(values["moment"]), float(values["changed"]))
    except (KeyError, TypeError, ValueError):
        return None


def _reading(frame: codec.Frame, device: str, run: Any) -> Optional[Reading]:
    """The reading in a message of this device; None where it is none, or of another device or process."""
    values = _decoded(frame)
    try:
        if (values["device"], values["run"]) != (device, run):
            return None
        parts = values["twist"], values["joints"]
        twist, joints = (None if part is None else np.array(part, np.float64) for part in parts)
        shaped = (twist is None or twist.shape == (6,)) and (joints is None or joints.ndim == 1)
        if not (shaped and all(part is None or np.isfinite(part).all() for part in (twist, joints))):
            return None
        buttons = tuple(pressed is True for pressed in values["buttons"])
        keys = tuple((int(n), str(key), down is True, float(at)) for n, key, down, at in values.get("keys", ()))
        number, phase, why = values.get("drive") or (0, "", "")  # none of a server that has no such field
        drive = (int(number), str(phase), str(why)) if phase else None
        return Reading(twist, joints, buttons, float(values["stamp"]), values["alive"] is True,
                       float(values.get("began", 0.0)), keys, tuple(map(str, values.get("pedals", ()))),
                       drive)  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _taken(reply: Dict[str, Any]) -> Dict[str, Any]:
    if not reply.get("ok"):
        raise RobotError(codec.shown(str(reply.get("error", "the server refused without a word"))))
    return reply
