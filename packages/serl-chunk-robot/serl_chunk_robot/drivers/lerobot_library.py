"""Makes robots of the package lerobot (0.4 and newer) from a table of a robot's file, and opens only their buses.

LeRobot's own `Robot.connect` switches torque off to configure the motors, and its `disconnect` does by default. Arms
without brakes fall. So a robot's motor buses are opened and closed here, and `Arm.configure` is called only where no
motor has torque.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from serl_chunk_robot.driver import DriverError

INSTALL = (
    "Install this package in LeRobot's environment, with LeRobot's extra of your motors (pip install "
    "'lerobot[feetech]' or 'lerobot[dynamixel]'), and start the server with that Python"
)
CAMERAS = "LeRobot's cameras are not read here. Remove them, and add tables [[camera]] to the robot's file"
# What a config is set to, wherever it has these fields, and why.
NEEDED: Dict[str, Tuple[Any, str]] = {
    "disable_torque_on_disconnect": (False, "the arms would fall"),
    "num_read_retries": (0, "a late answer to one try would be read as that of the next one"),
}
IN_DEGREES: Dict[str, Tuple[Any, str]] = {"use_degrees": (True, "give scale, rad per unit")}
LATEST = 0.02  # s, after which no motor answers any more
DEGREES, SHARE = "degrees", "range_0_100"  # MotorNormMode of a motor


class Arm(NamedTuple):
    """One arm of a robot, with the prefix that its motors have in actions."""

    prefix: str
    robot: Any  # lerobot.robots.Robot
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
    try:
        import draccus
        from lerobot.robots.config import RobotConfig
        from lerobot.robots.utils import make_robot_from_config
    except ImportError as e:
        raise DriverError(f"{e.name or 'lerobot'} cannot be imported ({text(e)}). {INSTALL}.") from e
    broken = _register(RobotConfig, kind)
    known = RobotConfig.get_known_choices()
    if kind not in known:
        raise DriverError(f"type: {kind!r} is no robot of LeRobot that can be used here, expected one of "
                          f"{', '.join(sorted(known))}. Not imported: {'; '.join(broken) or 'none'}")  # fmt: skip
    try:
        config = draccus.decode(RobotConfig, {**params, "type": kind})
        _set(config, params, {**NEEDED, **IN_DEGREES} if degrees else NEEDED)
        robot = make_robot_from_config(config)
    except ImportError as e:  # of the motors' own package
        raise DriverError(f"{kind}: it cannot be made ({text(e)}). {INSTALL}.") from e
    except DriverError:
        raise
    except Exception as e:  # of draccus and of the robot's own code
        raise DriverError(f"{kind}: it cannot be made ({text(e)}). Correct the driver's params") from e
    if getattr(robot, "cameras", None):
        raise DriverError(f"params: {', '.join(robot.cameras)}. {CAMERAS}")
    return robot


def arms_of(robot: Any) -> List[Arm]:
    """The arms of a robot, left first. Raises DriverError for motors that are not on a serial bus of LeRobot's."""
    from lerobot.motors.motors_bus import MotorsBus

    both = [getattr(robot, name, None) for name in ("left_arm", "right_arm")]
    named = [("", robot)] if None in both else list(zip(("left_", "right_"), both))
    arms = [Arm(prefix, each, getattr(each, "bus", None)) for prefix, each in named]
    if not all(isinstance(arm.bus, MotorsBus) for arm in arms):
        raise DriverError(
            f"{robot.name}: its motors are on no serial bus of LeRobot's, and connecting or disconnecting it may drop "
            "its arms. Write a driver of your own: copy drivers/sample.py"
        )
    return arms


def calibration_command(kind: str, params: Mapping[str, Any]) -> str:
    """The command that calibrates a robot."""
    return " ".join(["lerobot-calibrate", f"--robot.type={kind}", *_flags("--robot.", params)])


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


def _register(config: Any, kind: str) -> List[str]:
    """Import LeRobot's robots and its plug-ins until one registers itself under that name.

    Returns:
        the robots that could not be imported, and why.
    """
    import lerobot.robots
    from lerobot.utils import import_utils

    broken: List[str] = []
    for module in pkgutil.iter_modules(lerobot.robots.__path__):
        if kind in config.get_known_choices():
            return broken
        try:
            importlib.import_module(f"lerobot.robots.{module.name}")
        except Exception as e:  # of a robot whose own packages are missing
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
