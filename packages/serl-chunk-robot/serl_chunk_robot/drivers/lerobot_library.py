"""Makes robots and teleoperators of the package lerobot (0.4 and newer) from a robot's file, and opens their buses.

LeRobot's own `Robot.connect` switches torque off to configure the motors, and its `disconnect` does by default. Arms
without brakes fall. So a robot's motor buses are opened and closed here, and its `configure` is called only where no
motor has torque.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import pkgutil
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from serl_chunk_robot.drivers.base import DriverError, why

INSTALL = (
    "Install this package in LeRobot's environment, with LeRobot's extra of your motors (pip install "
    "'lerobot[feetech]' or 'lerobot[dynamixel]'), and start the server with that Python"
)
CAMERAS = "LeRobot's cameras are not read here. Remove them, and add tables [[camera]] to the robot's file"
ROBOT, TELEOPERATOR = "robot", "teleoperator"  # families of configs, whose packages have the same layout
# What a config is set to, wherever it has these fields, and why.
READ_ONCE: Dict[str, Tuple[Any, str]] = {
    "num_read_retries": (0, "a late answer to one try would be read as that of the next one"),
}
NEEDED: Dict[str, Tuple[Any, str]] = {"disable_torque_on_disconnect": (False, "the arms would fall"), **READ_ONCE}
IN_DEGREES: Dict[str, Tuple[Any, str]] = {"use_degrees": (True, "give scale, rad per unit")}
LATEST = 0.02  # s, after which no motor answers any more
DEGREES, PERCENT, SHARE = "degrees", "range_m100_100", "range_0_100"  # MotorNormMode of a motor
# Why a robot or a teleoperator without a serial bus of LeRobot's is refused, and the remedy.
FALLS = "connecting or disconnecting it may drop its arms. Write a driver of your own: copy drivers/sample.py"
REPEATS = (
    "it gives no joint positions, or may repeat the last one of a motor that is silent. Use a leader as so101_leader, "
    "or a device of your own: driver = 'my_device.py:MyDevice'"
)
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
SIDES = ("left", "right")
WRITE_SCALE = "Write scale, one number for each joint, by which LeRobot's numbers are rad or an opening"

Numbers = Union[float, Sequence[float]]
LIMIT, FULL = "Torque_Limit", 1000  # register, and its value for all of a motor's torque
TRIES = 3  # of a write that an answer confirms


class Arm(NamedTuple):
    """One arm of a robot or teleoperator, with the prefix that its motors have in actions."""

    prefix: str
    robot: Any  # lerobot.robots.Robot, or lerobot.teleoperators.Teleoperator
    bus: Any  # lerobot.motors.motors_bus.MotorsBus


def make_robot(kind: str, params: Mapping[str, Any], degrees: bool) -> Any:
    """Make a robot that keeps its torque when it is disconnected; opens nothing.

    Args:
        kind: LeRobot's name of the robot.
        params: of its config.
        degrees: joints are in degrees, wherever the config has the choice.

    Raises DriverError: the package is missing, the robot is unknown, or it cannot be made with these params.
    """
    robot = _make(ROBOT, kind, params, {**NEEDED, **IN_DEGREES} if degrees else NEEDED)
    if getattr(robot, "cameras", None):
        raise DriverError(f"params: {', '.join(robot.cameras)}. {CAMERAS}")
    return robot


def make_teleoperator(kind: str, params: Mapping[str, Any]) -> Any:
    """Make a teleoperator; opens nothing. Arguments and errors as of `make_robot`."""
    return _make(TELEOPERATOR, kind, params, READ_ONCE)


def arms_of(robot: Any, why: str = FALLS) -> List[Arm]:
    """The arms of a robot or teleoperator, left first.

    `why`: others than these are refused, and the remedy. Raises DriverError: motors that are not on a serial bus of
    LeRobot's.
    """
    from lerobot.motors.motors_bus import MotorsBus

    both = [getattr(robot, name, None) for name in ("left_arm", "right_arm")]
    named = [("", robot)] if None in both else list(zip(("left_", "right_"), both))
    arms = [Arm(prefix, each, getattr(each, "bus", None)) for prefix, each in named]
    if not all(isinstance(arm.bus, MotorsBus) for arm in arms):
        raise DriverError(f"{robot.name}: its motors are on no serial bus of LeRobot's, and {why}")
    return arms


def open_buses(arms: Sequence[Arm], remedy: str) -> None:
    """Open the buses; writes nothing to a motor.

    Raises DriverError: motors that do not have the calibration of this id, with the `remedy`; else errors of LeRobot's.
    """
    for arm in arms:
        arm.bus.connect()
        if not arm.robot.is_calibrated:
            raise DriverError(f"{arm.bus.port}: its motors do not have the calibration of this id. {remedy}")


def close_bus(arm: Arm, torque_off: bool) -> None:
    """Close a bus that is open, also one that was unplugged; with `torque_off`, switch torque off first."""
    with contextlib.suppress(Exception):  # it does not answer
        if torque_off and arm.bus.is_connected:
            arm.bus.disconnect()
    with contextlib.suppress(Exception):
        if arm.bus.is_connected:
            arm.bus.disconnect(disable_torque=False)


def calibration_command(family: str, kind: str, params: Mapping[str, Any]) -> str:
    """The command that calibrates a robot or teleoperator."""
    flag = "--robot." if family == ROBOT else "--teleop."
    return " ".join(["lerobot-calibrate", f"{flag}type={kind}", *_flags(flag, params)])


def per_unit(arm: Arm, motor: str, gripper: bool) -> Optional[float]:
    """What LeRobot's numbers of a calibrated motor are multiplied by to be rad, or an opening; None: not known."""
    mode = arm.bus.motors[motor].norm_mode.value
    if gripper:
        return 0.01 if mode == SHARE else None
    if mode == DEGREES:
        return math.radians(1.0)
    if mode != PERCENT:
        return None
    # From -100 to 100 over the calibrated range: as in degrees, 0 is in the middle of it.
    calibration, steps = arm.bus.calibration[motor], arm.bus.model_resolution_table[arm.bus.motors[motor].model] - 1
    return float((calibration.range_max - calibration.range_min) / 200 * math.tau / steps)


def without_torque(arm: Arm) -> List[str]:
    """The names, without the prefix, of an arm's motors that have no torque."""
    return [motor for motor, on in arm.bus.sync_read("Torque_Enable", normalize=False).items() if not on]


def switch_on(arm: Arm) -> None:
    """Give torque to the motors of an arm that have none, where they are. Configure them if no motor has torque."""
    off = without_torque(arm)
    if not off:
        return
    # The set point first: a motor goes to the one that it has as soon as it gets torque.
    arm.bus.sync_write("Goal_Position", arm.bus.sync_read("Present_Position", off, normalize=False), normalize=False)
    if len(off) == len(arm.bus.motors):
        arm.robot.configure()
        off = without_torque(arm)
    if off:
        arm.bus.enable_torque(off)


def drop_late_answers(arms: Sequence[Arm]) -> None:
    """Empty the buffers of the buses. An answer that is late would be read as that of the next request.

    LeRobot leaves them. Lengths differ between registers, so that the checksum of one may become part of a position.
    """
    time.sleep(LATEST)
    for arm in arms:
        with contextlib.suppress(Exception):  # of a port that was unplugged, which the next request reports
            arm.bus.port_handler.ser.reset_input_buffer()


def _make(family: str, kind: str, params: Mapping[str, Any], needed: Mapping[str, Tuple[Any, str]]) -> Any:
    """Make one of a family, with the config's fields that are `needed`; errors as of `make_robot`."""
    try:
        import draccus

        configs = getattr(importlib.import_module(f"lerobot.{family}s.config"), f"{family.capitalize()}Config")
        maker = getattr(importlib.import_module(f"lerobot.{family}s.utils"), f"make_{family}_from_config")
    except ImportError as e:
        raise DriverError(f"{e.name or 'lerobot'} cannot be imported ({why(e)}). {INSTALL}.") from e
    broken = _register(family, configs, kind)
    known = configs.get_known_choices()
    if kind not in known:
        raise DriverError(
            f"type: {kind!r} is no {family} of LeRobot that can be used here, expected one of "
            f"{', '.join(sorted(known))}. Not imported: {'; '.join(broken) or 'none'}"
        )
    try:
        config = draccus.decode(configs, {**params, "type": kind})
        _set(config, params, needed)
        return maker(config)
    except ImportError as e:  # of the motors' own package
        raise DriverError(f"{kind}: it cannot be made ({why(e)}). {INSTALL}.") from e
    except DriverError:
        raise
    except Exception as e:  # of draccus and of LeRobot's own code
        valid = ", ".join(field.name for field in dataclasses.fields(known[kind]))
        raise DriverError(
            f"{kind}: it cannot be made ({why(e)}). Correct its params (valid: {valid}); lerobot-find-port finds a port"
        ) from e


def _register(family: str, config: Any, kind: str) -> List[str]:
    """Import LeRobot's modules of a family and its plug-ins until one registers itself under that name.

    Returns the modules that could not be imported, and why.
    """
    from lerobot.utils import import_utils

    broken: List[str] = []
    for module in pkgutil.iter_modules(importlib.import_module(f"lerobot.{family}s").__path__):
        if kind in config.get_known_choices():
            return broken
        try:
            importlib.import_module(f"lerobot.{family}s.{module.name}")
        except Exception as e:  # of one whose own packages are missing
            broken.append(f"{module.name} ({why(e)})")
    if kind not in config.get_known_choices() and hasattr(import_utils, "register_third_party_plugins"):
        import_utils.register_third_party_plugins()
    return broken


def _set(config: Any, params: Mapping[str, Any], needed: Mapping[str, Tuple[Any, str]]) -> None:
    """Set what the driver needs in a config and in those within it. Raises DriverError for a param against it."""
    for field in dataclasses.fields(config):
        value, given = getattr(config, field.name), params.get(field.name)
        if field.name in needed:
            wanted, why = needed[field.name]
            if given is not None and given != wanted:
                raise DriverError(f"params.{field.name}: {given!r}, expected {wanted!r}: {why}")
            setattr(config, field.name, wanted)
        elif dataclasses.is_dataclass(value):
            _set(value, given if isinstance(given, Mapping) else {}, needed)


def _flags(start: str, params: Mapping[str, Any]) -> List[str]:
    flags: List[str] = []
    for name, value in params.items():
        flags += _flags(f"{start}{name}.", value) if isinstance(value, Mapping) else [f"{start}{name}={value}"]
    return flags


class Joints:
    """The joints of one arm or of two, in the order of the command.

    `names`: J of them; `keys`: their names in LeRobot's actions and observations; `gripper`: bool[J].

    Args:
        type: LeRobot's name of the robot or teleoperator, as "so101_follower".
        joints: names of the motors; empty: those of an SO arm, or of two.
        grippers: names of those that are grippers; empty: those that end with "gripper".

    Raises ValueError: a type or names that cannot be.
    """

    def __init__(self, type: str, joints: Sequence[str], grippers: Sequence[str]) -> None:
        if not isinstance(type, str):
            raise ValueError(f"type: {type!r}, expected LeRobot's name, as 'so101_follower' or 'so101_leader'")
        two = [f"{side}_{joint}" for side in SIDES for joint in JOINTS]
        self.names = tuple(joints or (two if type.startswith("bi_") else JOINTS))
        if isinstance(joints, str) or len({*self.names}) < len(self.names):
            raise ValueError(f"joints: {joints!r}, expected a list of different names")
        self.keys = [f"{joint}.pos" for joint in self.names]
        named = tuple(grippers) or tuple(joint for joint in self.names if joint.endswith("gripper"))
        if isinstance(grippers, str) or not {*named} <= {*self.names}:
            raise ValueError(f"grippers: {grippers!r}, expected names of {', '.join(self.names)}")
        self.gripper = np.isin(self.names, named)

    def numbers(self, name: str, value: Numbers, of_grippers: Optional[float], missing: str) -> np.ndarray:
        """Return an option as float64[J].

        Args:
            name: of the option.
            of_grippers: what a gripper has where the option is one number; None: that number.
            missing: the remedy where the option is empty.

        Raises ValueError: it is empty, or not a number for each joint.
        """
        if isinstance(value, Sequence) and not len(value):
            raise ValueError(f"{name}: missing. {missing}")
        values = np.array(value, np.float64)
        if values.ndim == 0:
            values = np.where(self.gripper, values if of_grippers is None else of_grippers, values)
        if values.shape != self.gripper.shape or not np.isfinite(values).all():
            raise ValueError(f"{name}: {value!r}, expected one number, or {len(self.names)}, one a joint")
        return values

    def scale(self, scale: Numbers) -> Optional[np.ndarray]:
        """Return the option `scale` as float64[J], none of them 0; None where it is empty. Raises ValueError."""
        if isinstance(scale, Sequence) and not len(scale):
            return None
        values = self.numbers("scale", scale, 0.01, "")
        if not values.all():
            raise ValueError(f"scale: {scale!r}, expected no number that is 0")
        return values

    def check(self, type: str, made: Any) -> None:
        """Raise DriverError where LeRobot's robot or teleoperator `made` has other joints."""
        if {*self.keys} != {*made.action_features}:
            found = ", ".join(dict.fromkeys(str(feature).partition(".")[0] for feature in made.action_features))
            raise DriverError(f"joints: {', '.join(self.names)}, but LeRobot's {type} has {found}. Write these names")


def can_drive(arms: Sequence[Arm]) -> bool:
    """Whether the torque of all motors can be limited, so that a hand holds them."""
    tables = [(arm.bus, getattr(arm.bus, "model_ctrl_table", {})) for arm in arms]
    return all(LIMIT in table.get(motor.model, {}) for bus, table in tables for motor in bus.motors.values())


class LeRobotMotors:
    """The motors of a leader with one arm or two: joints in rad, and grippers from 0 closed to 1 open.

    All calls come from the thread that reads the leader, and raise what LeRobot raises.

    Args:
        arms: whose buses are open.
        joints: names and order.
        scale: of each joint, float64[J]: what LeRobot's numbers are multiplied by.
        torque: share of a motor's torque, above 0, to 1.
    """

    def __init__(self, arms: Sequence[Arm], joints: Joints, scale: np.ndarray, torque: float) -> None:
        self._arms, self._names, self._scale = arms, joints.names, scale
        self._limit = max(1, round(FULL * torque))

    def reach(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest joints of the calibrated ranges, float64[J] each."""
        ends: Dict[str, Tuple[float, float]] = {}
        for arm in self._arms:
            for name, motor in arm.bus.motors.items():
                calibration, mode = arm.bus.calibration[name], motor.norm_mode.value
                half = 100.0
                if mode == DEGREES:  # 0 is in the middle of the range
                    steps = arm.bus.model_resolution_table[motor.model] - 1
                    half = 180.0 * (calibration.range_max - calibration.range_min) / steps
                ends[arm.prefix + name] = (0.0 if mode == SHARE else -half), half
        both = self._scale * np.array([ends[name] for name in self._names], np.float64).T
        return both.min(axis=0), both.max(axis=0)

    def hold(self, joints: np.ndarray) -> None:
        """Limit the torque of all motors, and give it to them with a set point where they are."""
        for arm in self._arms:
            for motor in arm.bus.motors:
                arm.bus.write(LIMIT, motor, self._limit, normalize=False, num_retry=TRIES - 1)
        # The set point first: a motor goes to the one that it has as soon as it gets torque.
        self.move(joints)
        for arm in self._arms:
            arm.bus.enable_torque(num_retry=TRIES - 1)

    def move(self, joints: np.ndarray) -> None:
        values = dict(zip(self._names, (joints / self._scale).tolist()))
        for arm in self._arms:
            arm.bus.sync_write("Goal_Position", {motor: values[arm.prefix + motor] for motor in arm.bus.motors})

    def release(self) -> None:
        """Take the torque of all motors by one packet an arm, and see that it is gone.

        LeRobot's `disable_torque` writes to one motor after the other, and ends at the first that does not answer.
        """
        failed: Dict[str, str] = {}
        for arm in self._arms:
            kept = "a motor keeps its torque"
            for _ in range(TRIES):
                try:
                    arm.bus.sync_write("Torque_Enable", dict.fromkeys(arm.bus.motors, 0), normalize=False)
                    if not any(arm.bus.sync_read("Torque_Enable", normalize=False).values()):
                        break
                except Exception as e:  # of LeRobot, of no common kind; the other arm's motors lose theirs
                    kept = why(e)
                    drop_late_answers([arm])
            else:
                failed[arm.bus.port] = kept
        if failed:
            ports = "; ".join(f"{port} ({kept})" for port, kept in failed.items())
            raise DriverError(f"its motors may have torque: {ports}. Switch their power off")
