"""Trossen's WidowX AI arms through the package trossen-arm, without ROS."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import DriverError, DriverSpec, Reading, equal_arms, sendable, vendor
from serl_chunk_robot.drivers.stamps import StampedDriver, StampMap

INSTALL = "Run pip install trossen-arm (Python 3.10 or newer), in the version of the controllers' firmware"
SIZE = 7  # numbers of an arm: six joints, rad, and a gripper
# Of a wxai_v0, rad and rad/s. A gripper's opening is measured a little beyond its ends.
LOW = (-math.pi, 0.0, 0.0, -math.pi / 2, -math.pi / 2, -math.pi, -0.2)
HIGH = (math.pi, math.pi, 2.356, math.pi / 2, math.pi / 2, math.pi, 1.2)
VELOCITY = (2 * math.pi,) * 2 + (3 * math.pi,) * 4 + (6.25,)
BEYOND = 0.06  # rad: the server lets an arm be 0.05 beyond its limits when it starts, and holds it there
OPEN = 0.04  # m, of a gripper


class TrossenArms(StampedDriver):
    """WidowX AI arms as one robot. A gripper's unit is its opening: 0 at 0 m, 1 at 0.04 m.

    An arm that was connected is in the mode idle, in which it takes no set points: the server reports that as no
    torque, and an operator's `clear` switches all joints to the mode position where they are.

    Args:
        addresses: IP addresses of the arms' controllers, left first.
        end_effector: an attribute of trossen_arm.StandardEndEffector.
        timeout: s, of the connection to each controller.
    """

    def __init__(
        self, *, addresses: Sequence[str] = ("192.168.1.4", "192.168.1.5"), end_effector: str = "wxai_v0_follower",
        timeout: float = 5.0,
    ) -> None:  # fmt: skip
        if isinstance(addresses, str) or not addresses or len({*addresses}) < len(addresses):
            raise ValueError(f"addresses: {addresses!r}, expected a list of different addresses")
        self._addresses, self._end_effector, self._timeout = tuple(addresses), end_effector, timeout
        self._library: Any = None
        self._arms: List[Any] = []
        self._clock: Callable[[], float] = lambda: 0.0
        self._stamps: List[StampMap] = []
        self._newest: List[Tuple[int, float]] = []  # number of each arm's output, and its moment
        self._faults: Dict[str, str] = {}  # address -> what its controller reported
        self._torque = False
        self._last: Any = None  # the newest reading
        self._busy: Optional[threading.Thread] = None  # that switches modes

    def spec(self) -> DriverSpec:
        n = len(self._addresses)
        return DriverSpec(
            "trossen arms", LOW * n, HIGH * n, VELOCITY * n, *equal_arms(n, SIZE), (("q", SIZE * n),), rate=200.0,
        )  # fmt: skip

    def connect(self, clock: Callable[[], float]) -> None:
        """Connect to each controller; clears no error and sets no mode. Raises DriverError with the address."""
        trossen_arm = vendor("trossen_arm", DriverError, INSTALL)
        self._library, self._clock = trossen_arm, clock
        if not hasattr(trossen_arm.TrossenArmDriver, "get_robot_output"):
            raise DriverError("trossen_arm: this version stamps no outputs. Run pip install 'trossen-arm>=1.11'.")
        tool = getattr(trossen_arm.StandardEndEffector, self._end_effector, None)
        if tool is None:
            names = ", ".join(n for n in dir(trossen_arm.StandardEndEffector) if not n.startswith("_"))
            raise DriverError(f"end_effector: {self._end_effector!r} is unknown, expected one of {names}")
        for address in self._addresses:
            arm = trossen_arm.TrossenArmDriver()
            try:
                arm.configure(trossen_arm.Model.wxai_v0, tool, address, False, timeout=self._timeout)
            except Exception as e:
                raise DriverError(
                    f"{address}: no controller can be used ({_first_line(e)}). Check its power, network and firmware."
                ) from e
            self._arms.append(arm)
            self._stamps.append(StampMap())
            self._newest.append((-1, clock()))
        self._look_at_modes()
        self.read()

    def read(self) -> Reading:
        """Return the newest outputs, with the stamp of the oldest. Raises DriverError where there are none.

        An arm whose controller reports an error keeps its last output and stamp, and the error is a fault.
        """
        if self._busy is not None and self._busy.is_alive():
            return self._last._replace(faults=(*self._faults.values(), "the modes of the arms are being switched"))
        arrays: List[List[np.ndarray]] = [[], [], []]
        for k, address in enumerate(self._addresses):
            try:
                output = self._ask(k, "get_robot_output")
            except DriverError:
                if address not in self._faults or self._last is None:
                    raise
                return self._last._replace(faults=tuple(self._faults.values()), torque=self._torque)
            every = output.joint.all
            for values, into in zip((every.positions, every.velocities, every.efforts), arrays):
                row = np.array(list(values), np.float64)
                if len(row) != SIZE:  # an arm that is not configured returns none, and raises nothing
                    raise DriverError(f"{address}: {len(row)} joints, expected {SIZE}. The controller was disconnected")
                into.append(row)
            if output.header.id != self._newest[k][0]:
                moment = self._stamps[k].moment(1e-6 * output.header.timestamp, self._clock())
                self._newest[k] = output.header.id, moment
        q, dq, effort = map(np.concatenate, arrays)
        q[SIZE - 1 :: SIZE] /= OPEN
        dq[SIZE - 1 :: SIZE] /= OPEN
        stamp = min(moment for _, moment in self._newest)
        self._last = Reading(q, dq, effort, stamp, tuple(self._faults.values()), torque=self._torque)
        return self._last

    def command(self, target: np.ndarray, dt: float) -> None:
        """Send a set point that each arm reaches after `dt`. Raises DriverError, before it sends any, if it cannot."""
        n = len(self._addresses)
        sent = sendable(target, n * SIZE).reshape(n, SIZE)
        outside = np.maximum(np.array(LOW) - sent, sent - np.array(HIGH))[:, :-1] > BEYOND
        if outside.any():
            k, joint = (int(i) for i in np.argwhere(outside)[0])
            raise DriverError(f"{self._addresses[k]}: {sent[k, joint]:.3f} is beyond the limits of joint {joint}")
        if not self._torque or (self._busy is not None and self._busy.is_alive()):
            raise DriverError("an arm is idle and takes no set points. Clear the robot first")
        if len(self._arms) < n or not all(self._ask(k, "get_is_configured") for k in range(n)):
            raise DriverError("a controller was disconnected. Start the server again")
        sent[:, -1] = OPEN * np.clip(sent[:, -1], 0.0, 1.0)
        for k, row in enumerate(sent):
            self._ask(k, "set_all_positions", row.tolist(), dt, False)

    def set(self, name: str, value: Any) -> None:
        """Set "torque": False is the mode idle of all joints. A thread does it, and `read` reports it."""
        if name != "torque":
            raise DriverError(f"{name}: unknown. Valid: torque.")
        self._begin(self._switch_on if value else self._switch_off)

    def clear_faults(self) -> None:
        """Clear the controllers' errors, and switch to the mode position where the arms are, by a thread.

        It takes seconds where a controller had an error: the vendor's package connects anew.
        """
        self._begin(self._clear)

    def close(self) -> None:
        for arm in self._arms:
            with contextlib.suppress(Exception):
                arm.cleanup()
        self._arms = []

    def _begin(self, job: Callable[[], None]) -> None:
        """Let a thread do what waits for the controllers; nothing, while one is at work."""

        def work() -> None:
            try:
                job()
            except DriverError as e:
                self._faults.setdefault("", str(e))  # until the next clear

        if self._busy is None or not self._busy.is_alive():
            self._faults.pop("", None)
            self._busy = threading.Thread(target=work, name="trossen", daemon=True)
            self._busy.start()

    def _clear(self) -> None:
        for k, address in enumerate(self._addresses):
            if address in self._faults:
                del self._faults[address]
                self._ask(k, "clear_error")
                self._stamps[k], self._newest[k] = StampMap(), (-1, self._clock())  # its clock began anew
        self._switch_on()

    def _switch_off(self) -> None:
        for k in range(len(self._arms)):
            self._ask(k, "set_all_modes", self._library.Mode.idle)
        self._look_at_modes()

    def _switch_on(self) -> None:
        """Switch to the mode position, where the arms are, if a joint is in another one."""
        self._look_at_modes()
        if self._torque:
            return
        pose = np.array([list(self._ask(k, "get_all_positions")) for k in range(len(self._arms))])
        for k, row in enumerate(pose):
            self._ask(k, "set_all_modes", self._library.Mode.position)
            self._ask(k, "set_all_positions", row.tolist(), 0.0, False)
        self._look_at_modes()

    def _look_at_modes(self) -> None:
        wanted, found = self._library.Mode.position, []
        for k in range(len(self._arms)):
            found += list(self._ask(k, "get_modes"))
        self._torque = len(found) == SIZE * len(self._addresses) and all(mode == wanted for mode in found)

    def _ask(self, k: int, method: str, *arguments: Any) -> Any:
        """Call a method of an arm. Raises DriverError with the address; the controller's own error stays a fault."""
        address = self._addresses[k]
        if k >= len(self._arms):
            raise DriverError(f"{address}: not connected")
        try:
            return getattr(self._arms[k], method)(*arguments)
        except Exception as e:  # LogicError is an AssertionError, and RuntimeError is none of ours
            if not isinstance(e, AssertionError):
                self._faults[address] = f"{address}: {_first_line(e)}"
            raise DriverError(f"{address}: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
