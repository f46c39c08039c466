"""A stand-in of the packages lerobot and draccus, with simulated motors on serial ports.

Names and signatures are those of lerobot 0.6.1 and 0.4.4: test_lerobot_robot.py compares them where it is installed.
As the real one, `connect`, `configure` and `disconnect` of a robot switch torque off, and a bus is for one thread.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints
from unittest.mock import patch

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
START = (2048, 1900, 2300, 2048, 2048, 2200)  # encoder steps
LAG = 0.01  # s
RANGE = 1024, 3072  # encoder steps, as calibrated


class DeviceNotConnectedError(ConnectionError):
    pass


class Port:
    """Six motors at a serial port. Tests set its attributes."""

    def __init__(self) -> None:
        self.registers: dict[str, list[int]] = {
            "Torque_Enable": [0] * 6, "Goal_Position": [0] * 6, "Min_Position_Limit": [RANGE[0]] * 6,
            "Max_Position_Limit": [RANGE[1]] * 6,
        }  # fmt: skip
        self.at, self.since = [float(x) for x in START], time.monotonic()
        self.goals: list[dict[str, float]] = []  # of send_action, in LeRobot's units
        self.calls: list[str] = []
        self.broken = ""  # what an exchange raises
        self.open = False
        self.user = threading.Lock()

    def positions(self) -> list[float]:
        now = time.monotonic()
        share = min((now - self.since) / LAG, 1.0)
        goals, on = self.registers["Goal_Position"], self.registers["Torque_Enable"]
        self.at = [x + share * (goal - x) if torque else x for x, goal, torque in zip(self.at, goals, on, strict=True)]
        self.since = now
        return self.at


PORTS: dict[str, Port] = {}


class MotorNormMode(enum.StrEnum):
    RANGE_0_100 = "range_0_100"
    RANGE_M100_100 = "range_m100_100"
    DEGREES = "degrees"


@dataclasses.dataclass
class Motor:
    id: int
    model: str
    norm_mode: MotorNormMode


class MotorCalibration(NamedTuple):
    range_min: int
    range_max: int


class MotorsBus:
    """lerobot.motors.motors_bus.MotorsBus with Feetech's methods."""

    model_resolution_table: ClassVar[dict[str, int]] = {"sts3215": 4096}

    def __init__(self, port: str, motors: dict[str, Motor], calibration: dict[str, Any] | None = None) -> None:
        self.port, self.motors, self.calibration = port, motors, calibration
        self.port_handler = types.SimpleNamespace(ser=types.SimpleNamespace(reset_input_buffer=lambda: None))
        self._open = False

    @property
    def is_connected(self) -> bool:
        return self._open

    @property
    def is_calibrated(self) -> bool:
        limits = zip(*(self._need().registers[f"{end}_Position_Limit"] for end in ("Min", "Max")), strict=True)
        return self.calibration == {name: MotorCalibration(*of) for name, of in zip(JOINTS, limits, strict=True)}

    def connect(self, handshake: bool = True) -> None:
        if self.port not in PORTS:
            raise ConnectionError(
                f"\nCould not connect on port '{self.port}'. Make sure you are using the correct port."
                "\nTry running `lerobot-find-port`\n"
            )
        self._open = PORTS[self.port].open = True

    def disconnect(self, disable_torque: bool = True) -> None:
        if disable_torque:
            self.disable_torque(num_retry=5)
        self._need()
        self._open = PORTS[self.port].open = False

    def disable_torque(self, motors: str | list[str] | None = None, num_retry: int = 0) -> None:
        for motor in self._names(motors):
            self.write("Torque_Enable", motor, 0, num_retry=num_retry)

    def enable_torque(self, motors: int | str | list[str] | None = None, num_retry: int = 0) -> None:
        for motor in self._names(motors):
            self.write("Torque_Enable", motor, 1, num_retry=num_retry)

    @contextmanager
    def torque_disabled(self, motors: str | list[str] | None = None) -> Iterator[None]:
        self.disable_torque(motors)
        try:
            yield
        finally:
            self.enable_torque(motors)

    def write(self, data_name: str, motor: str, value: float, *, normalize: bool = True, num_retry: int = 0) -> None:
        with self._exchange() as port:
            port.positions()
            port.calls.append(f"{data_name} {motor} {value}")
            port.registers.setdefault(data_name, [0] * 6)[JOINTS.index(motor)] = int(value)

    def sync_read(
        self, data_name: str, motors: str | list[str] | None = None, *, normalize: bool = True, num_retry: int = 0
    ) -> dict[str, float]:
        with self._exchange() as port:
            values = port.positions() if data_name == "Present_Position" else port.registers[data_name]
            raw = {motor: int(values[JOINTS.index(motor)]) for motor in self._names(motors)}
        if not normalize or not data_name.endswith("Position"):
            return dict(raw)
        return {motor: self._normalized(motor, value) for motor, value in raw.items()}

    def sync_write(
        self, data_name: str, values: float | dict[str, float], *, normalize: bool = True, num_retry: int = 0
    ) -> None:
        assert isinstance(values, dict)
        with self._exchange() as port:
            port.positions()
            for motor, value in values.items():
                raw = self._raw(motor, value) if normalize else value
                port.registers[data_name][JOINTS.index(motor)] = int(raw)

    def _names(self, motors: Any) -> list[str]:
        return list(self.motors) if motors is None else [motors] if isinstance(motors, str) else list(motors)

    def _normalized(self, motor: str, raw: int) -> float:
        low, high = RANGE
        mode = self.motors[motor].norm_mode
        if mode is MotorNormMode.DEGREES:
            return (raw - (low + high) / 2) * 360 / 4095
        share = (min(max(raw, low), high) - low) / (high - low)
        return 100 * share if mode is MotorNormMode.RANGE_0_100 else 200 * share - 100

    def _raw(self, motor: str, value: float) -> int:
        low, high = RANGE
        mode = self.motors[motor].norm_mode
        if mode is MotorNormMode.DEGREES:
            return int(value * 4095 / 360 + (low + high) / 2)
        share = value / 100 if mode is MotorNormMode.RANGE_0_100 else (value + 100) / 200
        return int(low + min(max(share, 0.0), 1.0) * (high - low))

    def _need(self) -> Port:
        if not self._open:
            raise DeviceNotConnectedError("FeetechMotorsBus is not connected. Run `.connect()` first.")
        return PORTS[self.port]

    @contextmanager
    def _exchange(self) -> Iterator[Port]:
        port = self._need()
        if not port.user.acquire(blocking=False):
            port.calls.append("two threads")
            raise ConnectionError("Failed to sync read. [TxRxResult] Port is in use!")
        try:
            time.sleep(0.0005)
            if port.broken:
                raise ConnectionError(port.broken)
            yield port
        finally:
            port.user.release()


@dataclasses.dataclass(kw_only=True)
class RobotConfig:
    id: str | None = None
    calibration_dir: Path | None = None
    CHOICES: ClassVar[dict[str, type]] = {}

    @property
    def type(self) -> str:
        return next(name for name, config in self.CHOICES.items() if config is type(self))

    @classmethod
    def get_known_choices(cls) -> dict[str, type]:
        return cls.CHOICES


@dataclasses.dataclass
class SOFollowerConfig:
    port: str
    disable_torque_on_disconnect: bool = True
    max_relative_target: float | None = None
    cameras: dict[str, Any] = dataclasses.field(default_factory=dict)
    use_degrees: bool = False
    num_read_retries: int = 2


@dataclasses.dataclass
class SOFollowerRobotConfig(RobotConfig, SOFollowerConfig):
    pass


@dataclasses.dataclass
class BiSOFollowerConfig(RobotConfig):
    left_arm_config: SOFollowerConfig
    right_arm_config: SOFollowerConfig


@dataclasses.dataclass
class WheelsConfig(RobotConfig):
    pass


class Robot:
    """lerobot.robots.robot.Robot with what the robots below have in common."""

    name = "robot"

    def __init__(self, config: Any) -> None:
        self.config, self.id = config, config.id


def calibration_of(id: str | None) -> dict[str, MotorCalibration]:
    """Return the calibration in the file of an id."""
    return {name: MotorCalibration(*RANGE) for name in JOINTS} if id else {}


class SOFollower(Robot):
    """One arm."""

    name = "so_follower"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        body = MotorNormMode.DEGREES if config.use_degrees else MotorNormMode.RANGE_M100_100
        motors = {name: Motor(k + 1, "sts3215", body) for k, name in enumerate(JOINTS)}
        motors["gripper"].norm_mode = MotorNormMode.RANGE_0_100
        self.bus = MotorsBus(config.port, motors, calibration_of(config.id))
        self.cameras = dict(config.cameras)

    @cached_property
    def observation_features(self) -> dict[str, type | tuple[int, ...]]:
        return {f"{motor}.pos": float for motor in self.bus.motors}

    @cached_property
    def action_features(self) -> dict[str, type]:
        return {f"{motor}.pos": float for motor in self.bus.motors}

    @property
    def is_connected(self) -> bool:
        return self.bus.is_connected

    def connect(self, calibrate: bool = True) -> None:
        self.bus.connect()
        if not self.is_calibrated and calibrate:
            self.calibrate()
        self.configure()

    @property
    def is_calibrated(self) -> bool:
        return self.bus.is_calibrated

    def calibrate(self) -> None:
        raise AssertionError("it would wait for a person")

    def configure(self) -> None:
        with self.bus.torque_disabled():
            for motor in self.bus.motors:
                self.bus.write("P_Coefficient", motor, 16)

    def get_observation(self) -> dict[str, Any]:
        return {f"{motor}.pos": value for motor, value in self.bus.sync_read("Present_Position").items()}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        goal = {key.removesuffix(".pos"): value for key, value in action.items() if key.endswith(".pos")}
        if self.config.max_relative_target is not None:
            most, at = self.config.max_relative_target, self.bus.sync_read("Present_Position")
            # As LeRobot's: min and max let a number through that is none.
            goal = {name: at[name] + max(min(value - at[name], most), -most) for name, value in goal.items()}
        self.bus.sync_write("Goal_Position", goal)
        PORTS[self.bus.port].goals.append(goal)
        return {f"{motor}.pos": value for motor, value in goal.items()}

    def disconnect(self) -> None:
        self.bus.disconnect(self.config.disable_torque_on_disconnect)


class BiSOFollower(Robot):
    """Two arms."""

    name = "bi_so_follower"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for side in ("left", "right"):
            given = dataclasses.asdict(getattr(config, f"{side}_arm_config"))
            arm = SOFollower(SOFollowerRobotConfig(id=config.id and f"{config.id}_{side}", **given))
            setattr(self, f"{side}_arm", arm)
        self.left_arm: SOFollower
        self.right_arm: SOFollower
        self.cameras = {**self.left_arm.cameras, **self.right_arm.cameras}

    @cached_property
    def action_features(self) -> dict[str, type]:
        return {f"{side}_{joint}.pos": float for side in ("left", "right") for joint in JOINTS}

    def get_observation(self) -> dict[str, Any]:
        both = {"left": self.left_arm, "right": self.right_arm}
        return {f"{side}_{key}": x for side, arm in both.items() for key, x in arm.get_observation().items()}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        sent = {}
        for side, arm in (("left_", self.left_arm), ("right_", self.right_arm)):
            own = {key.removeprefix(side): value for key, value in action.items() if key.startswith(side)}
            sent.update({side + key: value for key, value in arm.send_action(own).items()})
        return sent


class Wheels(Robot):
    """A robot without a bus."""

    name = "wheels"


def make_robot_from_config(config: Any) -> Robot:
    made = {SOFollowerRobotConfig: SOFollower, BiSOFollowerConfig: BiSOFollower, WheelsConfig: Wheels}
    return made[type(config)](config)


def register_so_followers() -> None:
    """What importing lerobot.robots.so_follower does, and its like."""
    RobotConfig.CHOICES.update(
        so101_follower=SOFollowerRobotConfig, bi_so_follower=BiSOFollowerConfig, wheels=WheelsConfig
    )


def decode(cls: type, raw: dict[str, Any]) -> Any:
    """draccus.decode of a config."""
    given = dict(raw)
    kind = getattr(cls, "CHOICES", {}).get(given.pop("type", None), cls)
    fields = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in fields:
            raise ValueError(f"The fields `{name}` are not valid for {kind.__name__}")
        if name.endswith("_arm_config"):
            given[name] = decode(get_type_hints(kind)[name], given[name])
    return kind(**given)


def module(name: str, **values: Any) -> types.ModuleType:
    """Make a module of these values."""
    made = types.ModuleType(name)
    made.__dict__.update(values)
    return made


@contextmanager
def installed(*ports: str) -> Iterator[dict[str, Port]]:
    """Both packages can be imported, and motors are at these ports."""
    with tempfile.TemporaryDirectory() as folder:
        register = "import lerobot_stand_in\nlerobot_stand_in.register_so_followers()\n"
        for name, text in (("broken", "import a_package_that_is_missing"), ("so_follower", register)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "__init__.py").write_text(text)
        robots = module("lerobot.robots", __path__=[folder])
        modules = {
            "draccus": module("draccus", decode=decode),
            "lerobot": module("lerobot", __path__=[], robots=robots),
            "lerobot.robots": robots,
            "lerobot.robots.config": module("lerobot.robots.config", RobotConfig=RobotConfig),
            "lerobot.robots.utils": module("lerobot.robots.utils", make_robot_from_config=make_robot_from_config),
            "lerobot.motors": module("lerobot.motors", __path__=[]),
            "lerobot.motors.motors_bus": module("lerobot.motors.motors_bus", MotorsBus=MotorsBus),
            "lerobot.utils": module("lerobot.utils", __path__=[], import_utils=module("import_utils")),
        }
        RobotConfig.CHOICES.clear()
        PORTS.clear()
        PORTS.update({port: Port() for port in ports})
        with patch.dict(sys.modules, modules):
            yield PORTS
        PORTS.clear()
