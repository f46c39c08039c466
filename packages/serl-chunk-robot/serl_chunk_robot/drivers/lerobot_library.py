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
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from serl_chunk_robot.drivers.base import DriverError

INSTALL = (
    "Install this package in LeRobot's environment, with LeRobot's extra of your motors (pip install "
    "'lerobot[feetech]' or 'lerobot[dynamixel]'), and start the server with that Python"
)
CAMERAS = "LeRobot's cameras are not read here. Remove them, and add tables [[camera]] to the robot's file"
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


class Family(NamedTuple):
    """What LeRobot makes from one kind of configs. Its modules `config` and `utils` have the same layout in each."""

    package: str
    config: str  # class of the configs
    maker: str  # function that makes one from a config
    word: str  # in errors
    flag: str  # of LeRobot's commands


ROBOTS = Family("lerobot.robots", "RobotConfig", "make_robot_from_config", "robot", "robot")
TELEOPERATORS = Family(
    "lerobot.teleoperators", "TeleoperatorConfig", "make_teleoperator_from_config", "teleoperator", "teleop"
)


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

    Raises:
        DriverError: the package is missing, the robot is unknown, or it cannot be made with these params.
    """
    robot = _make(ROBOTS, kind, params, {**NEEDED, **IN_DEGREES} if degrees else NEEDED)
    if getattr(robot, "cameras", None):
        raise DriverError(f"params: {', '.join(robot.cameras)}. {CAMERAS}")
    return robot


def make_teleoperator(kind: str, params: Mapping[str, Any]) -> Any:
    """Make a teleoperator; opens nothing. Arguments and errors as of `make_robot`."""
    return _make(TELEOPERATORS, kind, params, READ_ONCE)


def arms_of(robot: Any, why: str = FALLS) -> List[Arm]:
    """The arms of a robot or teleoperator, left first.

    Args:
        why: others than these are refused, and the remedy.

    Raises:
        DriverError: motors that are not on a serial bus of LeRobot's.
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

    Raises:
        DriverError: motors that do not have the calibration of this id, with the `remedy`; else errors of LeRobot's.
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


def calibration_command(family: Family, kind: str, params: Mapping[str, Any]) -> str:
    """The command that calibrates a robot or teleoperator."""
    flag = f"--{family.flag}."
    return " ".join(["lerobot-calibrate", f"{flag}type={kind}", *_flags(flag, params)])


def per_unit(arm: Arm, motor: str, gripper: bool) -> Optional[float]:
    """What LeRobot's numbers of a calibrated motor are multiplied by to be rad, or a gripper's opening.

    Returns:
        None where that is not known.
    """
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


def text(error: BaseException) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _make(family: Family, kind: str, params: Mapping[str, Any], needed: Mapping[str, Tuple[Any, str]]) -> Any:
    """Make one of a family, with the config's fields that are `needed`; errors as of `make_robot`."""
    try:
        import draccus

        configs = getattr(importlib.import_module(f"{family.package}.config"), family.config)
        maker = getattr(importlib.import_module(f"{family.package}.utils"), family.maker)
    except ImportError as e:
        raise DriverError(f"{e.name or 'lerobot'} cannot be imported ({text(e)}). {INSTALL}.") from e
    broken = _register(family, configs, kind)
    known = configs.get_known_choices()
    if kind not in known:
        raise DriverError(f"type: {kind!r} is no {family.word} of LeRobot that can be used here, expected one of "
                          f"{', '.join(sorted(known))}. Not imported: {'; '.join(broken) or 'none'}")  # fmt: skip
    try:
        config = draccus.decode(configs, {**params, "type": kind})
        _set(config, params, needed)
        return maker(config)
    except ImportError as e:  # of the motors' own package
        raise DriverError(f"{kind}: it cannot be made ({text(e)}). {INSTALL}.") from e
    except DriverError:
        raise
    except Exception as e:  # of draccus and of LeRobot's own code
        valid = ", ".join(field.name for field in dataclasses.fields(known[kind]))
        raise DriverError(f"{kind}: it cannot be made ({text(e)}). Correct its params (valid: {valid}); "
                          "lerobot-find-port finds a port") from e  # fmt: skip


def _register(family: Family, config: Any, kind: str) -> List[str]:
    """Import LeRobot's modules of a family and its plug-ins until one registers itself under that name.

    Returns:
        the modules that could not be imported, and why.
    """
    from lerobot.utils import import_utils

    broken: List[str] = []
    for module in pkgutil.iter_modules(importlib.import_module(family.package).__path__):
        if kind in config.get_known_choices():
            return broken
        try:
            importlib.import_module(f"{family.package}.{module.name}")
        except Exception as e:  # of one whose own packages are missing
            broken.append(f"{module.name} ({text(e)})")
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
