"""A stand-in of the packages lerobot and draccus: robots and teleoperators with simulated motors on serial ports.

Names and signatures are those of lerobot 0.6.1 and 0.4.4: the tests of both compare them where it is installed.
As the real one, `configure` of an arm switches torque off, and a bus is for one thread.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
START = (2048, 1900, 2300, 2048, 2048, 2200)  # encoder steps
LAG = 0.01  # s
RANGE = LOW, HIGH = 1024, 3072  # encoder steps, as calibrated


class Port:
    """Six motors at a serial port. Tests set its attributes."""

    def __init__(self) -> None:
        self.registers: dict[str, list[int]] = {
            "Torque_Enable": [0] * 6,
            "Goal_Position": [0] * 6,
            "Min_Position_Limit": [LOW] * 6,
            "Max_Position_Limit": [HIGH] * 6,
        }
        self.at, self.since = [float(x) for x in START], time.monotonic()
        self.goals, self.calls = [], []  # of send_action, in LeRobot's units; and what was written
        self.broken, self.open, self.user = "", False, threading.Lock()  # the first: what an exchange raises

    @property
    def torque(self) -> list[int]:
        return self.registers["Torque_Enable"]

    def positions(self) -> list[float]:
        now = time.monotonic()
        share = min((now - self.since) / LAG, 1.0)
        goals, on = self.registers["Goal_Position"], self.torque
        self.at = [x + share * (goal - x) if torque else x for x, goal, torque in zip(self.at, goals, on, strict=True)]
        self.since = now
        return self.at


PORTS: dict[str, Port] = {}


MotorNormMode = enum.StrEnum("MotorNormMode", ["RANGE_0_100", "RANGE_M100_100", "DEGREES"])


class MotorCalibration(NamedTuple):
    range_min: int
    range_max: int


class MotorsBus:
    """lerobot.motors.motors_bus.MotorsBus with Feetech's methods."""

    model_resolution_table: ClassVar[dict[str, int]] = {"sts3215": 4096}
    model_ctrl_table: ClassVar[dict[str, dict[str, tuple[int, int]]]] = {"sts3215": {"Torque_Limit": (48, 2)}}

    def __init__(self, port: str, motors: dict[str, Any], calibration: dict[str, Any] | None = None) -> None:
        self.port, self.motors, self.calibration = port, motors, calibration
        self.port_handler = types.SimpleNamespace(ser=types.SimpleNamespace(reset_input_buffer=lambda: None))
        self.is_connected = False

    @property
    def is_calibrated(self) -> bool:
        limits = zip(*(PORTS[self.port].registers[f"{end}_Position_Limit"] for end in ("Min", "Max")), strict=True)
        return self.calibration == {name: MotorCalibration(*of) for name, of in zip(JOINTS, limits, strict=True)}

    def connect(self, handshake: bool = True) -> None:
        if self.port not in PORTS:
            raise ConnectionError(f"\nCould not connect on port '{self.port}'.\nTry running `lerobot-find-port`\n")
        self.is_connected = PORTS[self.port].open = True

    def disconnect(self, disable_torque: bool = True) -> None:
        if disable_torque:
            self.disable_torque(num_retry=5)
        self.is_connected = PORTS[self.port].open = False

    def disable_torque(self, motors: Any = None, num_retry: int = 0) -> None:
        for motor in self._names(motors):
            self.write("Torque_Enable", motor, 0)

    def enable_torque(self, motors: Any = None, num_retry: int = 0) -> None:
        for motor in self._names(motors):
            self.write("Torque_Enable", motor, 1)

    def write(self, data_name: str, motor: str, value: float, *, normalize: bool = True, num_retry: int = 0) -> None:
        with self._exchange() as port:
            port.positions()
            port.calls.append(f"{data_name} {motor} {value}")
            port.registers.setdefault(data_name, [0] * 6)[JOINTS.index(motor)] = int(value)

    def sync_read(self, data_name: str, motors: Any = None, *, normalize: bool = True, num_retry: int = 0) -> Any:
        with self._exchange() as port:
            values = port.positions() if data_name == "Present_Position" else port.registers[data_name]
            raw = {motor: int(values[JOINTS.index(motor)]) for motor in self._names(motors)}
        if not normalize or not data_name.endswith("Position"):
            return dict(raw)
        units = {motor: self._unit(motor) for motor in raw}
        return {motor: (value - units[motor][0]) / units[motor][1] for motor, value in raw.items()}

    def sync_write(self, data_name: str, values: Any, *, normalize: bool = True, num_retry: int = 0) -> None:
        with self._exchange() as port:
            port.positions()
            for motor, value in values.items():
                zero, steps = self._unit(motor) if normalize else (0, 1)
                port.registers[data_name][JOINTS.index(motor)] = int(zero + steps * value)

    def _names(self, motors: Any) -> list[str]:
        return list(self.motors) if motors is None else [motors] if isinstance(motors, str) else list(motors)

    def _unit(self, motor: str) -> tuple[float, float]:
        """The encoder's step at 0, and its steps of 1, in the motor's unit."""
        middle, size = (LOW + HIGH) / 2, HIGH - LOW
        return {
            MotorNormMode.DEGREES: (middle, 4095 / 360),
            MotorNormMode.RANGE_0_100: (LOW, size / 100),
            MotorNormMode.RANGE_M100_100: (middle, size / 200),
        }[self.motors[motor].norm_mode]

    @contextmanager
    def _exchange(self) -> Iterator[Port]:
        if not self.is_connected:
            raise ConnectionError("FeetechMotorsBus is not connected. Run `.connect()` first.")
        port = PORTS[self.port]
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
class Config:
    id: str | None = None
    calibration_dir: Path | None = None
    CHOICES: ClassVar[dict[str, type]] = {}

    @classmethod
    def get_known_choices(cls) -> dict[str, type]:
        return cls.CHOICES


class RobotConfig(Config):
    CHOICES: ClassVar[dict[str, type]] = {}


class TeleoperatorConfig(Config):
    CHOICES: ClassVar[dict[str, type]] = {}


def config(base: type, *needed: str, **defaults: Any) -> type:
    """A config with fields that are needed, and others with defaults."""
    fields: list[Any] = [*((name, Any) for name in needed), *((k, Any, v) for k, v in defaults.items())]
    return dataclasses.make_dataclass("Config", fields, bases=(base,), kw_only=True)


class Arm:
    name = "arm"

    def __init__(self, config: Any) -> None:
        self.config, self.cameras = config, getattr(config, "cameras", ())
        degrees = getattr(config, "use_degrees", False)
        body = MotorNormMode.DEGREES if degrees else MotorNormMode.RANGE_M100_100
        motors = {name: types.SimpleNamespace(model="sts3215", norm_mode=body) for name in JOINTS}
        motors["gripper"].norm_mode = MotorNormMode.RANGE_0_100
        calibration = {name: MotorCalibration(*RANGE) for name in JOINTS} if config.id else {}
        self.bus = MotorsBus(config.port, motors, calibration)
        self.action_features = {f"{motor}.pos": float for motor in motors}

    @property
    def is_calibrated(self) -> bool:
        return self.bus.is_calibrated

    def get_action(self) -> dict[str, float]:
        return {f"{motor}.pos": value for motor, value in self.bus.sync_read("Present_Position").items()}


class SOFollower(Arm):
    def configure(self) -> None:
        self.bus.disable_torque()
        for motor in self.bus.motors:
            self.bus.write("P_Coefficient", motor, 16)
        self.bus.enable_torque()

    def get_observation(self) -> dict[str, Any]:
        return self.get_action()

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        goal = {key.removesuffix(".pos"): value for key, value in action.items() if key.endswith(".pos")}
        if self.config.max_relative_target is not None:
            most, at = self.config.max_relative_target, self.bus.sync_read("Present_Position")
            # As LeRobot's: min and max let a number through that is none.
            goal = {name: at[name] + max(min(value - at[name], most), -most) for name, value in goal.items()}
        self.bus.sync_write("Goal_Position", goal)
        PORTS[self.bus.port].goals.append(goal)
        return {f"{motor}.pos": value for motor, value in goal.items()}


class SOLeader(Arm):
    def configure(self) -> None:
        self.bus.disable_torque()
        for motor in self.bus.motors:
            self.bus.write("Operating_Mode", motor, 0)


class KochLeader(SOLeader):
    """One whose gripper springs open, and whose motors' torque has no limit."""

    def configure(self) -> None:
        self.bus.model_ctrl_table = {"sts3215": {}}  # type: ignore[misc]
        super().configure()
        self.bus.enable_torque("gripper")
        self.bus.sync_write("Goal_Position", {"gripper": self.config.gripper_open_pos})


class BiSOLeader:
    name, cameras = "two arms", ()

    def __init__(self, config: Any) -> None:
        for side in ("left", "right"):
            of = dataclasses.replace(getattr(config, f"{side}_arm_config"), id=config.id and f"{config.id}_{side}")
            setattr(self, f"{side}_arm", make(of))
        self._arms = {"left_": self.left_arm, "right_": self.right_arm}  # type: ignore[attr-defined]
        self.action_features = {f"{side}{joint}.pos": float for side in self._arms for joint in JOINTS}

    def get_action(self) -> dict[str, float]:
        return {side + key: x for side, arm in self._arms.items() for key, x in arm.get_action().items()}


class BiSOFollower(BiSOLeader):
    def get_observation(self) -> dict[str, Any]:
        return self.get_action()

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        sent = {}
        for side, arm in self._arms.items():
            own = {key.removeprefix(side): value for key, value in action.items() if key.startswith(side)}
            sent.update({side + key: value for key, value in arm.send_action(own).items()})
        return sent


class Wheels:
    """What has no bus, and gives no joint positions."""

    name = "wheels"

    def __init__(self, config: Any) -> None:
        self.config = config


R, T, BOTH = RobotConfig, TeleoperatorConfig, ("left_arm_config", "right_arm_config")
FOLLOWER: dict[str, Any] = {"disable_torque_on_disconnect": True, "max_relative_target": None, "cameras": (),
                            "use_degrees": False, "num_read_retries": 2}  # fmt: skip
KINDS: dict[str, dict[str, tuple[type, type]]] = {  # the first of a family is an arm of two
    "robot": {"so101_follower": (config(R, "port", **FOLLOWER), SOFollower),
              "bi_so_follower": (config(R, *BOTH), BiSOFollower), "wheels": (config(R), Wheels)},
    "teleoperator": {"so101_leader": (config(T, "port", use_degrees=False), SOLeader),
                     "bi_so_leader": (config(T, *BOTH), BiSOLeader), "gamepad": (config(T), Wheels),
                     "koch_leader": (config(T, "port", gripper_open_pos=50.0), KochLeader)},
}  # fmt: skip


def make(config: Any) -> Any:
    return {of: kind for family in KINDS.values() for of, kind in family.values()}[type(config)](config)


def register(family: str) -> None:
    """What importing lerobot.robots.so_follower does, and its like."""
    (R if family == "robot" else T).CHOICES.update((name, of) for name, (of, _) in KINDS[family].items())


def decode(configs: Any, raw: dict[str, Any]) -> Any:
    given = dict(raw)
    kind = configs.CHOICES[given.pop("type", next(iter(configs.CHOICES)))]
    fields = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in fields:
            raise ValueError(f"The fields `{name}` are not valid for {kind.__name__}")
        if name in BOTH:
            given[name] = decode(configs, given[name])
    return kind(**given)


def module(name: str, **values: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(values)
    return made


@contextmanager
def installed(*ports: str) -> Iterator[dict[str, Port]]:
    """Both packages can be imported, and motors are at these ports."""
    modules = {
        "draccus": module("draccus", decode=decode),
        "lerobot": module("lerobot", __path__=[]),
        "lerobot.motors": module("lerobot.motors", __path__=[]),
        "lerobot.motors.motors_bus": module("lerobot.motors.motors_bus", MotorsBus=MotorsBus),
        "lerobot.utils": module("lerobot.utils", __path__=[], import_utils=module("import_utils")),
    }
    with ExitStack() as stack:
        for family, configs in (("robot", RobotConfig), ("teleoperator", TeleoperatorConfig)):
            configs.CHOICES.clear()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            registers = f"import lerobot_stand_in\nlerobot_stand_in.register({family!r})\n"
            for name, text in (("broken", "import a_package_that_is_missing"), ("so_arm", registers)):
                (folder / name).mkdir()
                (folder / name / "__init__.py").write_text(text)
            package = f"lerobot.{family}s"
            modules[package] = module(package, __path__=[str(folder)])
            modules[f"{package}.config"] = module("config", **{configs.__name__: configs})
            modules[f"{package}.utils"] = module("utils", **{f"make_{family}_from_config": make})
        PORTS.clear()
        PORTS.update({port: Port() for port in ports})
        stack.enter_context(patch.dict(sys.modules, modules))
        yield PORTS
    PORTS.clear()
