"""ALOHA's ViperX arms behind Interbotix's nodes: what is the same in ROS 1 and ROS 2."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol, Sequence, Set, Tuple, Union

import numpy as np

from serl_chunk_robot.drivers.base import SUPPORTED, DriverError, DriverSpec, Reading, equal_arms, sendable, why
from serl_chunk_robot.drivers.stamps import StampedDriver, StampMap

logger = logging.getLogger(__name__)

JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
MOTORS = (*JOINTS, "gripper")
# Of a ViperX 300 s, rad and rad/s. A gripper's opening is measured a little beyond its ends.
LOW = (-math.pi, -1.85, -1.763, -math.pi, -1.868, -math.pi, -0.2)
HIGH = (math.pi, 1.257, 1.606, math.pi, 2.234, math.pi, 1.2)
VELOCITY = (3.14,) * 6 + (10.0,)
BEYOND = 0.06  # rad: the server lets an arm be 0.05 beyond its limits when it starts, and holds it there
DIFFERS = 0.05  # rad between the limits that an arm's node reports and a ViperX's
RATE = 100.0  # Hz, of joint states
FIRST_STATE = 2.0  # s
POLL = 1.0  # s between checks of publishers and, while no set points are sent, of torque and errors
IDLE = 0.5  # s without a set point before registers are read: a node has one thread for both, and they take tens of ms
HANGS = 5.0  # s
RELAUNCH = 0.4  # s without a state, after which an arm's node may be another one
BOOTS = 1.0  # s, of a motor, before its registers are read
ERRORS = {0: "input voltage", 2: "overheating", 3: "encoder", 4: "electrical shock", 5: "overload"}  # bits

# Interbotix's services and their types, and the topics on which nodes command an arm.
TYPES = {"get_robot_info": "RobotInfo", "get_motor_registers": "RegisterValues", "torque_enable": "TorqueEnable",
         "reboot_motors": "Reboot"}  # fmt: skip
COMMANDS = ("joint_group", "joint_single", "joint_trajectory")
ANSWERS = 2.0  # s, of a service
CRANK, ROD = 0.022, 0.036  # m


class Gripper(NamedTuple):
    """Angles of a gripper's motor, rad, at which its fingers are closed and open."""

    closed: float
    open: float

    def opening(self, finger: float) -> float:
        """Return the opening of a finger at a position, m."""
        closed, opened = finger_at(self.closed), finger_at(self.open)
        return (finger - closed) / (opened - closed)

    def speed(self, angle: float, velocity: float) -> float:
        """Return openings per second at a motor's angle, rad, and velocity, rad/s."""
        rod = math.sqrt(ROD**2 - (CRANK * math.cos(angle)) ** 2)
        slope = CRANK * math.cos(angle) * (1 + CRANK * math.sin(angle) / rod)
        return slope * velocity / (finger_at(self.open) - finger_at(self.closed))

    def angle(self, opening: float) -> float:
        """Return the motor's angle of an opening, clipped to [0, 1]."""
        closed, opened = finger_at(self.closed), finger_at(self.open)
        finger = closed + min(max(opening, 0.0), 1.0) * (opened - closed)
        return math.asin(min((CRANK**2 + finger**2 - ROD**2) / (2 * CRANK * finger), 1.0))


def finger_at(angle: float) -> float:
    """Return the position of a finger, m, at a motor's angle, rad."""
    return CRANK * math.sin(angle) + math.sqrt(ROD**2 - (CRANK * math.cos(angle)) ** 2)


class Ros(Protocol):
    """A node in the graph of ROS. Every method raises DriverError."""

    def open(self, arms: Sequence[str], heard: Callable[[str, Any, float], None]) -> None:
        """Make the node, and call `heard` by a thread with each arm's joint states and their stamp, s; 0: none."""

    def alive(self) -> bool:
        """Whether the node is a part of the graph."""

    def send(self, arm: str, joints: List[float], gripper: float) -> None:
        """Publish a set point, rad."""

    def heard_by_none(self, arm: str) -> str:
        """Return a command topic of the arm that no node subscribes to; empty if there is none."""

    def others(self, arm: str) -> List[str]:
        """Return the other nodes that publish commands of the arm."""

    def call(self, arm: str, service: str, **fields: Any) -> Any:
        """Call a service, by any thread; None if no node has it."""

    def close(self) -> None:
        """Leave the graph; also where it was never opened."""


class _State(NamedTuple):
    q: np.ndarray  # float64[7], as dq and effort
    dq: np.ndarray
    effort: np.ndarray
    stamp: float


class AlohaArms(StampedDriver):
    """ViperX arms, each with a gripper, as one robot; each arm's node publishes and obeys topics below its name.

    `connect` checks joints, limits, modes, profiles, torque and publishers. It changes none of them. A thread checks
    publishers from then on, torque and hardware errors while no set points are sent, and all of it again once an arm's
    node was launched anew.

    `set("reboot", "ARM/gripper")` reboots a motor while the robot is stopped. A motor that carries the arm lets it
    fall meanwhile: it is rebooted only with "ARM/MOTOR: the arm is supported". Until the reboot is done it is a fault.

    Args:
        ros: the node, not opened yet.
        arms: names of the arms' nodes, left first.
        gripper: of all arms.
    """

    def __init__(self, ros: Ros, arms: Sequence[str], gripper: Gripper) -> None:
        if isinstance(arms, str) or not arms or len({*arms}) < len(arms) or not all(isinstance(a, str) for a in arms):
            raise ValueError(f"arms: {arms!r}, expected a list of different names of nodes")
        if not finger_at(gripper.closed) < finger_at(gripper.open):
            raise ValueError(f"gripper_closed, gripper_open: {tuple(gripper)} rad, expected fingers that open")
        self._ros, self._arms, self._gripper = ros, tuple(arms), gripper
        self._clock: Callable[[], float] = time.monotonic
        self._stamps = {arm: StampMap() for arm in self._arms}
        self._states: Dict[str, Union[_State, DriverError]] = {}
        self._torque = dict.fromkeys(self._arms, True)
        self._hardware: Dict[str, Tuple[str, ...]] = {}
        self._others: Dict[str, Tuple[str, ...]] = {}
        self._checkable: Set[str] = set()  # arms whose node has services
        self._gone: Set[str] = set()  # arms whose node was gone, until they are checked again
        self._arrivals: Dict[str, float] = {}  # of the newest states
        self._failed: Dict[str, str] = {}  # what failed -> why, until it works or is cleared
        self._rebooting: List[str] = []  # motors, from the request on
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._watching: Optional[threading.Thread] = None
        self._ending = threading.Event()
        self._busy = math.inf  # since when the thread is at work
        self._sent = -math.inf  # when the last set point was

    def spec(self) -> DriverSpec:
        n, size = len(self._arms), len(LOW)
        return DriverSpec(
            "aloha " + " ".join(self._arms), LOW * n, HIGH * n, VELOCITY * n, *equal_arms(n, size), (("q", size * n),),
            rate=RATE,
        )  # fmt: skip

    def connect(self, clock: Callable[[], float]) -> None:
        """Wait for each arm's state, at most 2 s, and check it. Raises DriverError with what differs."""
        self._clock = clock
        self._ros.open(self._arms, self._heard)
        until = time.monotonic() + FIRST_STATE
        while time.monotonic() < until:
            if len(self._states) == len(self._arms) and not any(map(self._ros.heard_by_none, self._arms)):
                break
            time.sleep(0.005)
        for arm in self._arms:
            if arm not in self._states:
                raise DriverError(f"/{arm}/joint_states: no state within {FIRST_STATE:g} s. Launch the arms' nodes.")
            topic = self._ros.heard_by_none(arm)
            if topic:
                raise DriverError(f"{topic}: no node takes commands. Launch the arms' nodes.")
            self._look_for_others(arm)
            if self._others[arm]:
                raise DriverError(self._publishes(arm))
            if self._check(arm):
                self._checkable.add(arm)
            else:
                logger.warning("/%s/get_robot_info: no such service. Joints, limits and modes are not checked.", arm)
            self._look_at_motors(arm)
        self._watching = threading.Thread(target=self._watch, name="aloha-watch", daemon=True)
        self._watching.start()

    def read(self) -> Reading:
        """Return each arm's newest state, with the stamp of the older one. Raises DriverError for one that is none."""
        self._need_node()
        states = []
        for arm in self._arms:
            state = self._states[arm]
            if isinstance(state, DriverError):
                raise state
            states.append(state)
        faults = [fault for arm in self._arms for fault in self._hardware.get(arm, ())]
        faults += [self._publishes(arm) for arm in self._arms if self._others.get(arm)]
        faults += [f"{motor} reboots" for motor in self._rebooting]
        faults += [
            f"{arm}: its node is gone, or was launched again and is checked" for arm in self._arms if arm in self._gone
        ]
        faults += list(self._failed.values())
        if time.monotonic() - self._busy > HANGS:
            faults.append(f"ROS has not answered for {HANGS:g} s")
        q, dq, effort = (np.concatenate([state[k] for state in states]) for k in range(3))
        stamp = min(state.stamp for state in states)
        return Reading(q, dq, effort, stamp, tuple(faults), torque=all(self._torque.values()))

    def command(self, target: np.ndarray, dt: float) -> None:
        self._need_node()
        n, size = len(self._arms), len(LOW)
        sent = sendable(target, n * size).reshape(n, size)
        for arm, values in zip(self._arms, sent):
            outside = np.maximum(np.array(LOW) - values, values - np.array(HIGH))[:-1] > BEYOND
            if outside.any():
                joint = int(np.argmax(outside))
                raise DriverError(f"{arm}: {values[joint]:.3f} is beyond the limits of {JOINTS[joint]}")
            topic = self._ros.heard_by_none(arm)
            if topic:
                self._gone.add(arm)
                raise DriverError(f"{topic}: no node takes commands. Is {arm}'s node running?")
        self._sent = time.monotonic()
        for arm, values in zip(self._arms, sent):
            self._ros.send(arm, values[:-1].tolist(), self._gripper.angle(float(values[-1])))

    def set(self, name: str, value: Any) -> None:
        """Set "torque" of all arms, or "reboot" a motor by its name; a thread does it, and `read` reports it."""
        if name == "torque":
            self._jobs.put(lambda: self._switch(bool(value), self._arms))
        elif name == "reboot":
            arm, motor = self._motor(value)
            self._rebooting.append(f"{arm}/{motor}")
            self._jobs.put(lambda: self._reboot(arm, motor))
        else:
            raise DriverError(f"{name}: unknown. Valid: reboot, torque.")

    def clear_faults(self) -> None:
        """Switch torque on where it is off, and forget failed calls. A motor's error needs its reboot."""
        self._failed.clear()
        self._jobs.put(lambda: self._switch(True, [arm for arm in self._arms if not self._torque[arm]]))

    def close(self) -> None:
        self._ending.set()
        if self._watching is not None:
            self._watching.join(1.0)
        self._ros.close()

    # By threads of ROS.

    def _heard(self, arm: str, message: Any, stamp: float) -> None:
        arrival = self._clock()
        if arrival - self._arrivals.get(arm, arrival) > RELAUNCH:
            self._gone.add(arm)
        self._arrivals[arm] = arrival
        try:
            self._states[arm] = self._parse(message, self._stamps[arm].moment(stamp, arrival) if stamp else arrival)
        except (ValueError, IndexError) as e:
            self._states[arm] = DriverError(f"/{arm}/joint_states: no state of an ALOHA arm ({e})")

    def _parse(self, message: Any, stamp: float) -> _State:
        names = list(message.name)
        at = [names.index(name) for name in MOTORS]
        q, dq, effort = (np.array(x, np.float64)[at] for x in (message.position, message.velocity, message.effort))
        dq[-1] = self._gripper.speed(q[-1], dq[-1])
        q[-1] = self._gripper.opening(message.position[names.index("left_finger")])
        return _State(q, dq, effort, stamp)

    # By the thread that watches.

    def _watch(self) -> None:
        polled = 0.0
        while not self._ending.is_set():
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=0.1)
                self._do("request", job)
            now = time.monotonic()
            if now - polled < POLL:
                continue
            polled = now
            for arm in self._arms:
                self._do(f"node of {arm}", lambda arm=arm: self._look_for_node(arm))  # type: ignore[misc]
                self._do(f"publishers of {arm}", lambda arm=arm: self._look_for_others(arm))  # type: ignore[misc]
                if now - self._sent > IDLE:
                    self._do(f"motors of {arm}", lambda arm=arm: self._look_at_motors(arm))  # type: ignore[misc]

    def _do(self, what: str, job: Callable[[], None]) -> None:
        self._busy = time.monotonic()
        try:
            job()
            if what != "request":
                self._failed.pop(what, None)
        except Exception as e:  # of the graph: the loop has to know it, and the thread goes on
            self._failed[what] = why(e)
        self._busy = math.inf

    def _look_for_node(self, arm: str) -> None:
        """Check an arm again whose node was launched anew: that may have set other modes and profiles."""
        if self._ros.heard_by_none(arm):
            self._gone.add(arm)
        elif arm in self._gone and (arm not in self._checkable or self._check(arm)):
            self._look_at_motors(arm)
            self._gone.discard(arm)

    def _look_for_others(self, arm: str) -> None:
        self._others[arm] = tuple(sorted(self._ros.others(arm)))

    def _look_at_motors(self, arm: str) -> None:
        torque, errors = self._registers(arm, "Torque_Enable"), self._registers(arm, "Hardware_Error_Status")
        if torque:
            self._torque[arm] = all(torque.values())
        found = []
        for motor, bits in errors.items():
            if bits is None:
                found.append(f"{arm}/{motor}: it has an error, or does not answer. Reboot it")
            elif bits:
                what = [ERRORS.get(bit, f"bit {bit}") for bit in range(8) if 1 << bit & bits]
                found.append(f"{arm}/{motor}: {', '.join(what)}. Reboot it")
        self._hardware[arm] = tuple(found)

    def _registers(self, arm: str, register: str) -> Dict[str, Optional[int]]:
        """A register of each motor, None of one that does not answer; empty where the arm's node gives none.

        A node takes the answer of a motor with an error for a failed read, and a group's values end there.
        """
        values = self._values(arm, register, "group", "all")
        if values is None or len(values) > len(MOTORS):
            return {f"motor {k}": value for k, value in enumerate(values or ())}
        singles = (self._values(arm, register, "single", motor) for motor in MOTORS[len(values) :])
        found = dict(zip(MOTORS, [*values, *(next(iter(single or ()), None) for single in singles)]))
        if not values and {*found.values()} == {None} and self._values(arm, "Profile_Velocity", "group", "all"):
            return {}  # Interbotix's simulated arms have registers of profiles alone
        return found

    def _values(self, arm: str, register: str, cmd_type: str, name: str) -> Optional[List[int]]:
        answer = self._ros.call(arm, "get_motor_registers", cmd_type=cmd_type, name=name, reg=register)
        return None if answer is None else list(map(int, answer.values))

    def _switch(self, on: bool, arms: Sequence[str]) -> None:
        for arm in arms:
            if self._ros.call(arm, "torque_enable", cmd_type="group", name="all", enable=on) is None:
                raise DriverError(f"/{arm}/torque_enable: no such service. Launch the arms' nodes.")
            self._torque[arm] = on

    def _reboot(self, arm: str, motor: str) -> None:
        fields = {"cmd_type": "single", "name": motor, "enable": True, "smart_reboot": False}
        try:
            if self._ros.call(arm, "reboot_motors", **fields) is None:
                raise DriverError(f"/{arm}/reboot_motors: no such service. Launch the arms' nodes.")
            self._ending.wait(BOOTS)
            self._look_at_motors(arm)
            self._check(arm)  # a motor that was rebooted has lost what its RAM held
        finally:
            self._rebooting.remove(f"{arm}/{motor}")

    # Checks.

    def _check(self, arm: str) -> bool:
        """Return whether the arm's node has services to check it by.

        Raises DriverError where an arm is no ViperX, or is in a mode or profile that does not follow set points.
        """
        info = self._ros.call(arm, "get_robot_info", cmd_type="group", name="arm")
        gripper = self._ros.call(arm, "get_robot_info", cmd_type="single", name="gripper")
        if info is None or gripper is None:
            return False
        if tuple(info.joint_names) != JOINTS:
            raise DriverError(f"{arm}: its joints are {', '.join(info.joint_names)}, expected {', '.join(JOINTS)}")
        for what, limits, ours in (("lower", info.joint_lower_limits, LOW), ("upper", info.joint_upper_limits, HIGH)):
            if len(limits) == len(JOINTS) and np.abs(np.array(limits) - ours[:-1]).max() > DIFFERS:
                joint = int(np.argmax(np.abs(np.array(limits) - ours[:-1])))
                raise DriverError(
                    f"{arm}: the {what} limit of {JOINTS[joint]} is {limits[joint]:.3f}, expected {ours[joint]:.3f}. "
                    "It is no ViperX 300 s: did you name a leader?"
                )
        for part, mode, valid in (
            ("arm", info.mode, ("position",)),
            ("gripper", gripper.mode, ("current_based_position", "position")),
        ):
            if mode not in valid:
                raise DriverError(
                    f"{arm}: its {part} is in mode {mode!r}, expected {valid[0]!r}. Put the arm in its sleep pose, as "
                    f"it loses torque, and call /{arm}/set_operating_modes."
                )
        for register in ("Profile_Velocity", "Profile_Acceleration"):
            set_to = {motor: n for motor, n in self._registers(arm, register).items() if n and motor != "gripper"}
            for motor, n in set_to.items():
                raise DriverError(
                    f"{arm}/{motor}: {register} is {n}, expected 0: it would lag behind set points. "
                    f"Call /{arm}/set_motor_registers."
                )
        return True

    def _publishes(self, arm: str) -> str:
        names = ", ".join(self._others[arm])
        return f"{arm}: {names} publishes commands too. End that program, a teleoperation script for example."

    def _motor(self, value: Any) -> Tuple[str, str]:
        text = value if isinstance(value, str) else ""
        supported = text.endswith(SUPPORTED)
        arm, _, motor = (text[: -len(SUPPORTED)] if supported else text).partition("/")
        if arm not in self._arms or motor not in MOTORS:
            raise DriverError(
                f"reboot: {value!r}, expected ARM/MOTOR of {', '.join(self._arms)} and {', '.join(MOTORS)}"
            )
        if motor != "gripper" and not supported:
            raise DriverError(f"reboot: the arm falls while {motor} reboots. Support it, and pass arm_is_supported")
        if time.monotonic() - self._sent < IDLE:
            raise DriverError(f"reboot: a set point was sent less than {IDLE:g} s ago. Stop the robot, and try again")
        return arm, motor

    def _need_node(self) -> None:
        if not self._ros.alive():
            raise DriverError("the ROS node was shut down. Start the server again.")
