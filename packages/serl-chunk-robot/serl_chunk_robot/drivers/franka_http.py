"""One or two Franka arms behind HIL-SERL's HTTP server (`franka_server.py`), each behind one of its own.

An arm's numbers are x, y and z (m), the Euler angles of `geometry.rotations`, unwrapped (rad), and its gripper:
0 told to close, 1 told to open, 0.5 neither. Effort is the external force and torque at the tip (N, Nm), and 0.

Nothing here waits for HTTP but threads of its own, two an arm: one sends the newest target and asks for the state, over
and over; the other one sends what may take longer, and commands of the gripper.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple
from urllib.parse import urlsplit

import numpy as np

from serl_chunk_robot.drivers.base import Driver, DriverError, DriverSpec, Reading, equal_arms, sendable, why
from serl_chunk_robot.drivers.stamps import Failures
from serl_chunk_robot.geometry.rotations import euler_of_matrix, euler_rates, matrix_of_quat, quat_of_euler, unwrapped

REACH = (-0.9, -0.9, -0.4), (0.9, 0.9, 1.3)  # m, of a tip
TURNS, PITCH = 3.0, 1.4  # rad, either side of the centre, in which the angles are unique
# 1.7 m/s, and 2.5 rad/s, which changes Euler angles twice as fast at a pitch of 60 degrees. A gripper's set point gets
# there in one pass. The controller clips its own error: it takes targets that jump by a step of HIL-SERL's.
VELOCITY = (1.7, 1.7, 1.7, 5.0, 5.0, 5.0, 100.0)
ACCELERATION = (100.0, 100.0, 100.0, 500.0, 500.0, 500.0, 1e5)
JERK = (1e4, 1e4, 1e4, 5e4, 5e4, 5e4, 1e8)
PERIOD = 0.01  # s between two rounds of requests
# The server has no stamps, and repeats a state until it has the next one, which takes its robot 33 ms.
REPEATS = 0.05  # s that a repeated state may be old
# A reflex of the arm shows in no state: it stands still while its targets go on.
STILL = 0.001, 0.005  # m and rad that an arm without a reflex moves
AWAY = 0.01, 0.05  # m and rad that its targets went on meanwhile
STUCK = 0.5  # s
ORDER_LASTS = 2.0  # s, at most
_SETS = {
    "params": "a name or a table", "load": "a table", "slow_gripper": "true or false",
    "gripper": "'activate' or 'reset'", "recover": "true", "joint_reset": "true",
}  # fmt: skip # what `set` takes
JOINT_RESET_LASTS, JOINT_RESET_EVERY = 60.0, 600.0  # s
FAILED = OSError, http.client.HTTPException  # what a request raises
CLOSED, OPEN, AS_IT_IS = 0.0, 1.0, 0.5
TELLS = 0.25  # of a gripper's set point, from 0 or 1: HIL-SERL's actions of -0.5 and 0.5
DEFAULT_URL, TIMEOUT = "http://127.0.0.1:5000/", 0.2  # s of a request
LOOKS = 0.02  # s between two looks whether a lock-out is over


class Http:
    """A server, for one thread. Raises ValueError for what is no URL of one."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url if "://" in url else "http://" + url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: expected http://HOST:PORT/")
        self.url = f"http://{parts.hostname}:{parts.port or 80}/"
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)

    def post(self, path: str, body: Any = None) -> bytes:
        """Return what is answered. Raises what FAILED names, for another status than 200 too."""
        content = None if body is None else json.dumps(body).encode()
        try:
            self._connection.request("POST", "/" + path, content, {"Content-Type": "application/json"})
            reply = self._connection.getresponse()
            answer = reply.read()
        except BaseException:
            self._connection.close()  # the next request makes a new one
            raise
        if reply.status != 200:
            raise http.client.HTTPException(f"HTTP {reply.status} {reply.reason}")
        return answer

    def close(self) -> None:
        self._connection.close()


class Orders:
    """Requests that a thread sends one after the other: orders as they come, and commands to open or close a gripper.

    A gripper's request is sent where a set point gets to the other side, so that a robot that is cleared moves none.
    `lock`: seconds between two requests to the gripper; of those that come meanwhile, the last one is sent.
    """

    def __init__(self, http: Http, lock: float) -> None:
        self.told, self.slow = AS_IT_IS, False  # what the gripper was told, and whether it is to close slowly
        self.fault = ""  # what failed; nothing is sent again
        self.clock: Callable[[], float] = lambda: 0.0
        self._http, self._lock = http, lock
        self._orders: Deque[Tuple[str, Any]] = deque()
        self._side = AS_IT_IS  # of the last set point that had one
        self._wanted: Optional[float] = None  # CLOSED or OPEN
        self._acted, self._ends, self._new = float("-inf"), False, threading.Event()

    def order(self, path: str, body: Any = None) -> None:
        self._orders.append((path, body))
        self._new.set()

    def aim(self, place: float) -> None:
        side = CLOSED if place <= TELLS else OPEN if place >= 1 - TELLS else AS_IT_IS
        if side not in (AS_IT_IS, self._side):
            self._side = self._wanted = side
            self._new.set()

    def end(self) -> None:
        self._ends = True
        self._new.set()

    def run(self) -> None:
        while not self._ends:
            self._new.wait(None if self._wanted is None else LOOKS)
            self._new.clear()
            self.act()
        self._http.close()

    def act(self) -> None:
        """Send all orders, and tell the gripper what is new once its lock-out is over."""
        while self._orders:
            self._send(*self._orders.popleft())
        side, now = self._wanted, self.clock()
        if side is None or (side != self.told and now - self._acted < self._lock):
            return
        if side != self.told:
            self._acted = now
            path = "open_gripper" if side == OPEN else "close_gripper_slow" if self.slow else "close_gripper"
            if self._send(path):
                self.told = side
        if self._wanted is side:
            self._wanted = None

    def _send(self, path: str, body: Any = None) -> bool:
        try:
            self._http.post(path, body)
        except FAILED as e:
            self.fault = f"{self._http.url}{path}: {why(e)}"
            return False
        return True


def stop_outside(options: Mapping[str, Any], reason: str) -> None:
    """Let the arms stay where they are: the driver's own stop, by another process than the loop's.

    `options`: of the driver, as in the robot's file. Raises what FAILED names, once the stop was requested of each arm.
    """
    failed: Optional[BaseException] = None
    for url in options.get("urls", (DEFAULT_URL,)):
        http = Http(url, float(options.get("timeout", TIMEOUT)))
        try:
            http.post("pose", {"arr": json.loads(http.post("getstate"))["pose"]})
        except (*FAILED, ValueError, KeyError, TypeError) as e:
            failed = e
        finally:
            http.close()
    if failed is not None:
        raise failed


class _State(NamedTuple):
    """What an arm's server answered, with the moment of it on the loop's clock, s."""

    pose: np.ndarray  # float64[7]: x, y, z, and the quaternion
    place: np.ndarray  # float64[6], as the driver has it
    speed: np.ndarray  # float64[6]
    values: Dict[str, np.ndarray]
    stamp: float


class FrankaHttp(Driver):
    """Franka arms under HIL-SERL's impedance controllers.

    Args:
        urls: of the servers, one an arm; of two arms the left one first.
        timeout: seconds of a request, after which it failed.
        gripper_lock: seconds between two requests to a gripper.
        recoveries: error recoveries in a row that did not make an arm move, after which it is a fault.
        centre: Euler angles, rad, around which those of the tips are measured; a list an arm, or one of all.
        params: name -> parameters of the impedance controller, a table or a list with one an arm.
    """

    def __init__(
        self, urls: Sequence[str] = (DEFAULT_URL,), *, timeout: float = TIMEOUT, gripper_lock: float = 0.6,
        recoveries: int = 10, centre: Sequence[Any] = (np.pi, 0.0, 0.0), params: Optional[Mapping[str, Any]] = None,
    ) -> None:  # fmt: skip
        if isinstance(urls, str) or not urls:
            raise ValueError("urls is a list with one URL an arm")
        centres = np.broadcast_to(np.array(centre, np.float64), (len(urls), 3))
        self._arms = [_Arm(url, timeout, gripper_lock, recoveries, c) for url, c in zip(urls, centres)]
        self._params = dict(params or {})
        for name, value in self._params.items():
            _each(name, value, len(urls))
        self._stop: Optional[Tuple[int, List[int]]] = None  # level, and the rounds that answer it

    def spec(self) -> DriverSpec:
        n, low, high = len(self._arms), [], []  # type: Tuple[int, List[float], List[float]]
        for arm in self._arms:
            roll, _, yaw = arm.centre.tolist()
            low += [*REACH[0], roll - TURNS, -PITCH, yaw - TURNS, CLOSED]
            high += [*REACH[1], roll + TURNS, PITCH, yaw + TURNS, OPEN]
        state = (("q", 7 * n), ("vel", 6 * n), ("force", 3 * n), ("torque", 3 * n), ("gripper", n))
        return DriverSpec(
            "franka", tuple(low), tuple(high), VELOCITY * n, *equal_arms(n, 7), state, rate=50.0, tick=0.1,
            acceleration=ACCELERATION * n, jerk=JERK * n, targets="poses",
            stop_outside="serl_chunk_robot.drivers.franka_http:stop_outside",
        )  # fmt: skip

    def connect(self, clock: Callable[[], float]) -> None:
        """Ask each server for a state, and begin to ask over and over; commands nothing."""
        try:
            for arm in self._arms:
                arm.open(clock)
        except BaseException:
            self.close()
            raise

    def read(self) -> Reading:
        """Return the newest states, with the stamp of the oldest one."""
        states = [arm.states.newest for arm in self._arms]
        q = [x for s, arm in zip(states, self._arms) for x in (*s.place, arm.orders.told)]
        extra = {name: np.concatenate([s.values[name] for s in states]) for name in states[0].values}
        extra["recoveries"] = np.array([float(arm.recovered) for arm in self._arms])
        still = np.zeros(1)
        return Reading(
            np.array(q), np.concatenate([x for s in states for x in (s.speed, still)]),
            np.concatenate([x for s in states for x in (s.values["force"], s.values["torque"], still)]),
            min(s.stamp for s in states), tuple(fault for arm in self._arms for fault in arm.faults()), extra,
            torque=not any(arm.resetting for arm in self._arms),
        )  # fmt: skip

    def command(self, target: np.ndarray, dt: float) -> None:
        """Take the next poses of the arms and commands of their grippers; the threads send them."""
        target = sendable(target, 7 * len(self._arms))
        for k, arm in enumerate(self._arms):
            arm.aim(target[7 * k : 7 * k + 6])
            arm.orders.aim(float(target[7 * k + 6]))

    def set(self, name: str, value: Any) -> None:
        """Order what a thread sends next.

        "params": a name of the option `params`, or such parameters themselves. "load": mass, F_x_center_load and
        load_inertia. "slow_gripper": whether it closes slowly from now on. "gripper": "activate" or "reset", of a
        Robotiq. "recover": true. "joint_reset": true; the arm then leaves its set point by itself, so that the robot is
        stopped by a fault until it is done, and an operator clears it. At most one in ten minutes. Raises DriverError:
        an unknown name or value.
        """
        arms = self._arms
        if name == "params":
            if isinstance(value, str) and value not in self._params:
                known = ", ".join(sorted(self._params)) or "none"
                raise DriverError(f"params: {value!r} is none of the driver's option params ({known})")
            tables = _each(name, self._params[value] if isinstance(value, str) else value, len(arms))
            for arm, table in zip(arms, tables):
                arm.orders.order("update_param", table)
        elif name == "load":
            for arm, table in zip(arms, _each(name, value, len(arms))):
                if set(table) != {"mass", "F_x_center_load", "load_inertia"}:
                    raise DriverError(f"load: {sorted(table)}, expected mass, F_x_center_load and load_inertia")
                arm.orders.order("set_load", table)
        elif name == "slow_gripper" and type(value) is bool:
            for arm in arms:
                arm.orders.slow = value
        elif name == "gripper" and value in ("activate", "reset"):
            for arm in arms:
                arm.orders.order(f"{value}_gripper")
        elif name in ("recover", "joint_reset") and value is True:
            for arm in arms:
                arm.recover() if name == "recover" else arm.reset_joints()
        elif name in _SETS:
            raise DriverError(f"{name}: {value!r}, expected {_SETS[name]}")
        else:
            raise DriverError(
                f"{name}: unknown. Valid: {', '.join(_SETS)}. A Franka loses torque by its user stop alone"
            )

    def clear_faults(self) -> None:
        for arm in self._arms:
            arm.clear()

    def stop(self, reason: str, level: int = 0) -> bool:
        """True once each server answered a round of requests; above level 0, with what was measured as its target."""
        if self._stop is None or self._stop[0] != level:
            if level:
                for arm in self._arms:
                    arm.stay()
            self._stop = level, [arm.rounds + 2 for arm in self._arms]  # the one in progress may be older
        answered = all(arm.rounds >= wanted for arm, wanted in zip(self._arms, self._stop[1]))
        if answered:
            self._stop = None
        return answered

    def close(self) -> None:
        for arm in self._arms:
            arm.close()


class _States:
    """What one server answers: its newest state, with a stamp by which repeated answers get older."""

    def __init__(self, centre: np.ndarray) -> None:
        self.newest: _State = None  # type: ignore[assignment] # of the first answer
        self._near, self._answer, self._since = centre, b"", 0.0  # the last answer, and since when it repeats

    def take(self, answer: bytes, asked: float) -> None:
        """Take an answer that was asked for at `asked`. Raises HTTPException for one that is no state."""
        try:
            got = json.loads(answer)
            pose, vel = _vector(got, "pose", 7), _vector(got, "vel", 6)
            values = {"vel": vel, "force": _vector(got, "force", 3), "torque": _vector(got, "torque", 3)}
            values["gripper"] = _vector({"gripper_pos": [got["gripper_pos"]]}, "gripper_pos", 1)
            if abs(np.linalg.norm(pose[3:]) - 1.0) > 0.01:
                raise ValueError("pose has no quaternion of length 1")
        except (ValueError, KeyError, TypeError, RecursionError) as e:  # the last: of deep JSON
            raise http.client.HTTPException(f"what came is no state: {type(e).__name__} {e}") from e
        if answer != self._answer:
            self._answer, self._since = answer, asked
        self._near = euler = unwrapped(euler_of_matrix(matrix_of_quat(pose[3:])), self._near)
        speed = np.concatenate([vel[:3], euler_rates(euler, vel[3:])])
        stamp = max(self._since, asked - REPEATS)
        self.newest = _State(pose, np.concatenate([pose[:3], euler]), speed, values, stamp)


class _Arm:
    """One server. `open`, `aim` and the orders are called by the loop's thread, `exchange` by one of its own."""

    def __init__(self, url: str, timeout: float, gripper_lock: float, recoveries: int, centre: np.ndarray) -> None:
        self.centre, self.resetting, self.rounds, self.recovered = centre, False, 0, 0
        self.orders = Orders(Http(url, ORDER_LASTS), gripper_lock)
        self._http, self._recoveries = Http(url, timeout), recoveries
        self._clock: Callable[[], float] = lambda: 0.0
        self.states = _States(centre)
        self._target: Optional[np.ndarray] = None  # float64[7]; None: as the arm stands
        self._sent: Optional[np.ndarray] = None
        self._failures = Failures()
        self._moved: Tuple[float, np.ndarray, np.ndarray] = (0.0, np.zeros(7), np.zeros(7))  # when, where, its target
        self._tried, self._reset_at = 0, float("-inf")
        self._new, self._ends = threading.Event(), threading.Event()
        self._threads: List[threading.Thread] = []

    def open(self, clock: Callable[[], float]) -> None:
        """Ask for the first state. Raises DriverError where no server answers, or none of HIL-SERL's."""
        self._clock = self.orders.clock = clock
        try:
            self._take_state()
        except FAILED as e:
            raise DriverError(
                f"{self._http.url}: no state of a robot ({why(e)}). Start HIL-SERL's franka_server.py "
                "there with --gripper_type, or correct the URL"
            ) from e
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._run, self.orders.run)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ends.set()
        self._new.set()
        self.orders.end()
        for thread in self._threads:
            thread.join(1.0)
        self._http.close()

    def faults(self) -> List[str]:
        moves = f"{self._http.url}: a joint reset moves the arm" if self.resetting else ""
        return list(filter(None, (self._failures.lasting, self.orders.fault, self._failures.silent, moves)))

    def aim(self, place: np.ndarray) -> None:
        if not self.resetting:
            self._target = np.concatenate([place[:3], quat_of_euler(place[3:])])
            self._new.set()

    def stay(self) -> None:
        self._target = self.states.newest.pose
        self._new.set()

    def recover(self) -> None:
        self.recovered += 1
        self.orders.order("clearerr")

    def clear(self) -> None:
        if not self.resetting:
            self._failures.lasting = self.orders.fault = ""
            self._tried = 0
            self.stay()
            self.recover()

    def reset_joints(self) -> None:
        if not self.resetting and self._clock() - self._reset_at >= JOINT_RESET_EVERY:
            self.resetting, self._target = True, None
            threading.Thread(target=self._reset_joints, daemon=True).start()

    def _reset_joints(self) -> None:
        try:
            Http(self._http.url, JOINT_RESET_LASTS).post("jointreset")
            self._reset_at = self._clock()
        except FAILED as e:
            self._failures.lasting = f"{self._http.url}jointreset: {why(e)}"
        finally:
            self._target = None
            self.resetting = False

    def _run(self) -> None:
        while not self._ends.is_set():
            self.exchange()
            self._new.wait(PERIOD)
            self._new.clear()

    def exchange(self) -> None:
        target, path = self._target, "pose"
        try:
            if target is not None and target is not self._sent:
                self._http.post(path, {"arr": target.tolist()})
                self._sent = target
            path = "getstate"
            self._take_state()
        except FAILED as e:
            self._failures.failed(f"{self._http.url}{path}: {why(e)}")
            self._ends.wait(PERIOD)
            return
        self._failures.worked()
        self.rounds += 1
        if target is not None:
            self._watch(target)

    def _take_state(self) -> None:
        asked = self._clock()
        self.states.take(self._http.post("getstate"), asked)

    def _watch(self, target: np.ndarray) -> None:
        """Recover an arm that stands still while its targets go on."""
        now, pose = self._clock(), self.states.newest.pose
        since, place, aimed = self._moved
        if _beyond(pose, place, STILL):
            self._moved, self._tried = (now, pose, target), 0
        elif now - since >= STUCK and _beyond(target, aimed, AWAY):
            self._moved = now, place, target
            self._tried += 1
            if self._tried <= self._recoveries:
                self.recover()
            else:
                self._failures.lasting = (
                    f"{self._http.url}: the arm stands still while its targets go on, and "
                    f"{self._recoveries} error recoveries did not help"
                )


def _each(name: str, value: Any, arms: int) -> List[Dict[str, Any]]:
    """A table for each arm, of one or of a list."""
    tables = [value] * arms if isinstance(value, dict) else value
    if not isinstance(tables, list) or len(tables) != arms or not all(isinstance(t, dict) for t in tables):
        raise DriverError(f"{name}: {value!r}, expected a table, or a list of {arms}, one an arm")
    return tables


def _vector(got: Mapping[str, Any], name: str, size: int) -> np.ndarray:
    values = np.array(got[name], np.float64)
    if values.shape != (size,) or not np.isfinite(values).all():
        raise ValueError(f"{name} is not {size} finite numbers")
    return values


def _beyond(pose: np.ndarray, other: np.ndarray, limits: Tuple[float, float]) -> bool:
    """Whether two poses, float64[7], are further apart than m and rad."""
    if np.linalg.norm(pose[:3] - other[:3]) > limits[0]:
        return True
    cosine = abs(float(pose[3:] @ other[3:]))  # of half the angle
    return 2 * np.arccos(min(cosine, 1.0)) > limits[1]
