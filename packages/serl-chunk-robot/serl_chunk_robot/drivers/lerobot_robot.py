"""Arms of LeRobot whose motors are on its serial buses: SO-100, SO-101, Koch, OMX, two SO arms, and plug-ins like them.

It runs in LeRobot's own environment. A read of a bus takes some ms, and 50 ms or more where a motor does not answer.
So one thread has the buses: it sends the newest set point and reads the positions, over and over.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.drivers import lerobot_library as lerobot
from serl_chunk_robot.drivers.base import DriverError, DriverSpec, Reading, sendable, why
from serl_chunk_robot.drivers.stamps import Failures, StampedDriver

logger = logging.getLogger(__name__)

RATES = 50.0, 200.0  # Hz
PERIOD = 0.008  # s between two rounds on the buses without a new set point
POLL = 0.5  # s between two looks at the motors' torque
SPEED_WITHIN = 0.03  # s: of positions so far apart, a step of an encoder (1.5 mrad) is 0.05 rad/s
BEYOND = 0.06  # rad: the server lets an arm be 0.05 beyond its limits when it starts, and holds it there
UNREACHABLE = 1.0  # rad beyond the limits: a reading of the bus that is none
OTHER = 0.05  # of LeRobot's units, by which what it sent differs from the set point
LATE = 0.1  # s, after which a set point that waited for the buses is not sent any more
ENDS = 5.0  # s
TAUGHT = (
    "LeRobot knows no limits in rad. Write wide ones here (low = -3.2, high = 3.2; one number is not for grippers), "
    "and teach those of the profiles by hand: serl-chunk-robot teach"
)


class _State(NamedTuple):
    q: np.ndarray  # float64[J], as dq
    dq: np.ndarray
    stamp: float


class _Positions:
    """The newest positions, with the speeds that earlier ones show."""

    def __init__(self) -> None:
        self.newest: Optional[_State] = None
        self.past: Deque[_State] = deque()

    def take(self, q: np.ndarray, stamp: float) -> None:
        while len(self.past) > 1 and self.past[1].stamp <= stamp - SPEED_WITHIN:
            self.past.popleft()
        dq = np.zeros_like(q)
        if self.past and stamp - self.past[0].stamp >= SPEED_WITHIN / 2:
            dq = (q - self.past[0].q) / (stamp - self.past[0].stamp)
        self.newest = _State(q, dq, stamp)
        self.past.append(self.newest)


class LeRobotArms(StampedDriver):
    """Arms of LeRobot as one robot. A gripper's unit is its opening: 0 closed, 1 open. No effort is measured.

    Its cameras are not read: the robot's file has tables [[camera]]. The arms are calibrated before, by LeRobot.

    Args:
        type: LeRobot's name of the robot, as "so101_follower".
        params: of its config, as `port` and `id`.
        joints: names of the motors in the order of the command; without it those of an SO arm, or of two.
        grippers: names of those that are grippers; without it those that end with "gripper".
        low, high: what each joint can reach, rad, and a gripper's opening; one number is not for grippers.
        velocity: the fastest that each can move, per second; one number is for all.
        scale: what LeRobot's numbers are multiplied by; without it, joints are in degrees and grippers from 0 to 100.
        rate: Hz, of the server's loop.
        tick: s, of a control tick.

    Raises ValueError: an option that is missing or cannot be.
    """

    def __init__(
        self, *, type: str, params: Optional[Mapping[str, Any]] = None, joints: Sequence[str] = (),
        grippers: Sequence[str] = (), low: lerobot.Numbers = (), high: lerobot.Numbers = (),
        velocity: lerobot.Numbers = (), scale: lerobot.Numbers = (), rate: float = 50.0, tick: float = 0.02,
    ) -> None:  # fmt: skip
        self._joints = lerobot.Joints(type, joints, grippers)
        if not RATES[0] <= rate <= RATES[1]:
            raise ValueError(f"rate: {rate!r}, expected {RATES[0]:g} to {RATES[1]:g} Hz")
        numbers = self._joints.numbers
        self._low, self._high = numbers("low", low, 0.0, TAUGHT), numbers("high", high, 1.0, TAUGHT)
        if not (self._low < self._high).all():
            raise ValueError(f"low, high: {low!r} and {high!r}, expected low below high of each joint")
        fastest = numbers("velocity", velocity, None, "Write the motors' own, rad/s: 4.7 of an STS3215")
        if not (fastest > 0).all():
            raise ValueError(f"velocity: {velocity!r}, expected numbers above 0")
        self._type, self._params = type, dict(params or {})
        at = [side if side in lerobot.SIDES else "" for side in (n.partition("_")[0] for n in self._joints.names)]
        lengths = [len(list(group)) for _, group in itertools.groupby(at)]
        ends = list(itertools.accumulate(lengths))
        self._spec = DriverSpec(
            f"lerobot {type}", tuple(self._low.tolist()), tuple(self._high.tolist()), tuple(fastest.tolist()),
            tuple(np.flatnonzero(self._joints.gripper).tolist()),
            tuple((end - n, end) for n, end in zip(lengths, ends)), (("q", len(at)),), rate=rate, tick=tick,
        )  # fmt: skip
        given = self._joints.scale(scale)
        self._degrees = given is None
        self._scale = np.where(self._joints.gripper, 0.01, math.radians(1.0)) if given is None else given
        self._clock: Callable[[], float] = lambda: 0.0
        self._robot: Any = None
        self._arms: List[lerobot.Arm] = []
        self._positions, self._failures = _Positions(), Failures()
        self._next: Deque[Tuple[Dict[str, float], float]] = deque(maxlen=1)  # the newest set point, and when it came
        self._off: Tuple[str, ...] = ()  # joints without torque
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._new, self._ending = threading.Event(), threading.Event()
        self._thread: Optional[threading.Thread] = None

    def spec(self) -> DriverSpec:
        return self._spec

    def connect(self, clock: Callable[[], float]) -> None:
        """Open the buses, and begin to read; writes nothing to a motor.

        Raises DriverError: LeRobot or its robot cannot be used, its joints are others, or it is not calibrated.
        """
        self._clock = clock
        self._robot = lerobot.make_robot(self._type, self._params, self._degrees)
        self._arms = lerobot.arms_of(self._robot)
        self._check_joints()
        try:
            command = lerobot.calibration_command(lerobot.ROBOT, self._type, self._params)
            lerobot.open_buses(self._arms, f"Support the arm and run {command}")
            self._look_at_torque()
            self._exchange()
        except DriverError:
            self.close()
            raise
        except Exception as e:  # of LeRobot, of no common kind
            self.close()
            raise DriverError(f"{self._type}: its motors do not answer ({why(e)}). Check power and port") from e
        self._thread = threading.Thread(target=self._run, name="lerobot-bus", daemon=True)
        self._thread.start()

    def read(self) -> Reading:
        state = self._positions.newest
        if state is None:
            raise DriverError("the arms are not connected")
        q, dq, stamp = state
        off, faults = self._off, [self._failures.lasting, self._failures.silent]
        if 0 < len(off) < len(self._joints.names):
            faults.append(f"no torque: {', '.join(off)}. Is a motor overloaded or hot?")
        return Reading(q.copy(), dq.copy(), np.zeros_like(q), stamp, tuple(filter(None, faults)), torque=not off)

    def command(self, target: np.ndarray, dt: float) -> None:
        """Take a set point, which the thread sends. Raises DriverError where it would not get to the motors."""
        names, gripper = self._joints.names, self._joints.gripper
        sent = sendable(target, len(names))
        outside = (np.maximum(self._low - sent, sent - self._high) > BEYOND) & ~gripper
        if outside.any():
            joint = int(np.argmax(outside))
            raise DriverError(f"{names[joint]}: {sent[joint]:.3f} is beyond its limits. Nothing was sent")
        if self._thread is None or self._off:
            raise DriverError("a joint has no torque and takes no set points. Clear the robot first")
        silent = self._failures.silent
        if silent:
            raise DriverError(silent)
        sent[gripper] = np.clip(sent[gripper], self._low[gripper], self._high[gripper])
        self._next.append((dict(zip(self._joints.keys, (sent / self._scale).tolist())), self._clock()))
        self._new.set()

    def set(self, name: str, value: Any) -> None:
        """Set "torque" of all joints; the thread does it, and `read` reports it."""
        if name != "torque":
            raise DriverError(f"{name}: unknown. Valid: torque.")
        self._order(self._switch_on if value else self._switch_off)

    def clear_faults(self) -> None:
        """Switch torque on where it is off, with the joints where they are, and forget what was reported."""
        self._failures.lasting = ""
        self._order(self._switch_on)

    def close(self) -> None:
        self._ending.set()
        self._new.set()
        if self._thread is not None:
            self._thread.join(ENDS)
            if self._thread.is_alive():
                logger.warning("%s: a bus has not answered for %g s. It is left open.", self._type, ENDS)
                return
        for arm in self._arms:
            lerobot.close_bus(arm, torque_off=False)
        self._arms = []

    # By the thread that has the buses, once it runs.

    def _run(self) -> None:
        polled = self._clock()
        while not self._ending.is_set():
            try:
                self._work()
                self._exchange()
                if self._clock() - polled >= POLL:
                    polled = self._clock()
                    self._look_at_torque()
                self._failures.worked()
            except Exception as e:  # of LeRobot, of no common kind: the loop has to know it, and the thread goes on
                self._failures.failed(f"{self._type}: {why(e)}")
                lerobot.drop_late_answers(self._arms)
            self._new.wait(PERIOD)
            self._new.clear()

    def _work(self) -> None:
        """Do what was requested; what fails is a fault until it is cleared."""
        while not self._jobs.empty():
            try:
                self._jobs.get()()
                self._look_at_torque()
            except Exception as e:  # of LeRobot, of no common kind
                self._failures.lasting = f"{self._type}: {why(e)}"
            lerobot.drop_late_answers(self._arms)  # it tries again by itself where it switches torque

    def _exchange(self) -> None:
        """Send the newest set point, if it was not sent, and read the positions."""
        if self._next:
            action, came = self._next.pop()
            if self._clock() - came <= LATE and not self._off:  # motors of some kinds get torque by a set point
                self._send(action)
        began = self._clock()
        got = self._robot.get_observation()
        q = self._scale * np.array([got[key] for key in self._joints.keys], np.float64)
        beyond = np.maximum(self._low - q, q - self._high)
        if not beyond.max() <= UNREACHABLE:  # no speed is derived from a position that none can be
            joint = int(np.argmax(beyond))
            raise DriverError(f"{self._joints.names[joint]} reads {q[joint]:.3f}, which it cannot reach")
        self._positions.take(q, began)

    def _send(self, action: Dict[str, float]) -> None:
        sent = self._robot.send_action(dict(action))
        for name, value in action.items():
            if not abs(sent[name] - value) <= OTHER:
                what = f"LeRobot sent {sent[name]:.2f} instead of {value:.2f}"
                self._failures.lasting = (
                    f"{name}: {what}. Remove max_relative_target of its params: the profiles limit motion here"
                )

    def _look_at_torque(self) -> None:
        self._off = tuple(arm.prefix + motor for arm in self._arms for motor in lerobot.without_torque(arm))

    def _switch_on(self) -> None:
        for arm in self._arms:
            lerobot.switch_on(arm)
        self._next.clear()  # one of before is not sent any more
        self._positions.past.clear()

    def _switch_off(self) -> None:
        for arm in self._arms:
            arm.bus.disable_torque(num_retry=5)

    # Of any thread.

    def _order(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        self._new.set()

    def _check_joints(self) -> None:
        """Raise DriverError where LeRobot's robot has other joints, or units that the driver does not know."""
        self._joints.check(self._type, self._robot)
        modes = {
            arm.prefix + name: motor.norm_mode.value for arm in self._arms for name, motor in arm.bus.motors.items()
        }
        for joint, gripper in zip(self._joints.names, self._joints.gripper):
            if self._degrees and modes.get(joint) != (lerobot.SHARE if gripper else lerobot.DEGREES):
                raise DriverError(f"{joint}: its unit is {modes.get(joint)}. {lerobot.WRITE_SCALE}")
