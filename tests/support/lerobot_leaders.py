"""A stand-in of lerobot's teleoperators, over the simulated motors of `lerobot_stand_in`.

Names and signatures are those of lerobot 0.4.4: test_lerobot_teleoperator.py compares them where it is installed.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import lerobot_stand_in
from lerobot_stand_in import JOINTS, Motor, MotorNormMode, MotorsBus, Port, calibration_of


@dataclasses.dataclass(kw_only=True)
class TeleoperatorConfig:
    id: str | None = None
    calibration_dir: Path | None = None
    CHOICES: ClassVar[dict[str, type]] = {}

    @classmethod
    def get_known_choices(cls) -> dict[str, type]:
        return cls.CHOICES


@dataclasses.dataclass
class SOLeaderConfig:
    port: str
    use_degrees: bool = False


@dataclasses.dataclass
class SOLeaderTeleopConfig(TeleoperatorConfig, SOLeaderConfig):
    pass


@dataclasses.dataclass
class BiSOLeaderConfig(TeleoperatorConfig):
    left_arm_config: SOLeaderConfig
    right_arm_config: SOLeaderConfig


@dataclasses.dataclass
class KochLeaderConfig(TeleoperatorConfig):
    port: str
    gripper_open_pos: float = 50.0


@dataclasses.dataclass
class GamepadTeleopConfig(TeleoperatorConfig):
    use_gripper: bool = True


class SOLeader:
    """One arm of motors without torque."""

    name = "so_leader"
    body = MotorNormMode.RANGE_M100_100
    limits_torque = True  # as Feetech's motors, and not Dynamixel's

    def __init__(self, config: Any) -> None:
        self.config, self.id = config, config.id
        body = MotorNormMode.DEGREES if getattr(config, "use_degrees", False) else self.body
        motors = {name: Motor(k + 1, "sts3215", body) for k, name in enumerate(JOINTS)}
        motors["gripper"].norm_mode = MotorNormMode.RANGE_0_100
        self.bus = MotorsBus(config.port, motors, calibration_of(config.id))
        self.bus.model_ctrl_table = {"sts3215": {"Torque_Limit": (48, 2)} if self.limits_torque else {}}  # type: ignore[attr-defined]

    @property
    def action_features(self) -> dict[str, type]:
        return {f"{motor}.pos": float for motor in self.bus.motors}

    @property
    def is_calibrated(self) -> bool:
        return self.bus.is_calibrated

    def configure(self) -> None:
        self.bus.disable_torque()
        for motor in self.bus.motors:
            self.bus.write("Operating_Mode", motor, 0)

    def get_action(self) -> dict[str, float]:
        return {f"{motor}.pos": value for motor, value in self.bus.sync_read("Present_Position").items()}


class KochLeader(SOLeader):
    """One arm whose gripper springs open."""

    name = "koch_leader"
    limits_torque = False

    def configure(self) -> None:
        super().configure()
        self.bus.enable_torque("gripper")
        self.bus.sync_write("Goal_Position", {"gripper": self.config.gripper_open_pos})


class BiSOLeader:
    """Two arms. Of their configs the ports alone are used, as lerobot 0.4.4 does."""

    name = "bi_so_leader"

    def __init__(self, config: Any) -> None:
        def arm(side: str) -> SOLeader:
            port = getattr(config, f"{side}_arm_config").port
            return SOLeader(SOLeaderTeleopConfig(id=config.id and f"{config.id}_{side}", port=port))

        self.left_arm, self.right_arm = arm("left"), arm("right")

    @property
    def action_features(self) -> dict[str, type]:
        return {f"{side}_{joint}.pos": float for side in ("left", "right") for joint in JOINTS}

    def get_action(self) -> dict[str, float]:
        both = {"left": self.left_arm, "right": self.right_arm}
        return {f"{side}_{key}": x for side, arm in both.items() for key, x in arm.get_action().items()}


class GamepadTeleop:
    """A teleoperator that gives no joint positions."""

    name = "gamepad"
    action_features: ClassVar[dict[str, Any]] = {"dtype": "float32", "shape": (4,), "names": {"delta_x": 0}}

    def __init__(self, config: Any) -> None:
        self.config = config


class CanLeader(SOLeader):
    """Joint positions from a bus that is not LeRobot's serial one."""

    name = "openarm_leader"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bus = types.SimpleNamespace(motors=self.bus.motors)  # type: ignore[assignment]


@dataclasses.dataclass
class CanLeaderConfig(TeleoperatorConfig):
    port: str


def make_teleoperator_from_config(config: Any) -> Any:
    made = {SOLeaderTeleopConfig: SOLeader, BiSOLeaderConfig: BiSOLeader, KochLeaderConfig: KochLeader,
            GamepadTeleopConfig: GamepadTeleop, CanLeaderConfig: CanLeader}  # fmt: skip
    return made[type(config)](config)


def register_leaders() -> None:
    """What importing lerobot.teleoperators.so_leader does, and its like."""
    TeleoperatorConfig.CHOICES.update(
        so101_leader=SOLeaderTeleopConfig, bi_so_leader=BiSOLeaderConfig, koch_leader=KochLeaderConfig,
        gamepad=GamepadTeleopConfig, openarm_leader=CanLeaderConfig,
    )  # fmt: skip


@contextmanager
def installed(*ports: str) -> Iterator[dict[str, Port]]:
    """The packages can be imported, with teleoperators, and motors are at these ports."""
    with tempfile.TemporaryDirectory() as folder, lerobot_stand_in.installed(*ports) as found:
        register = "import lerobot_leaders\nlerobot_leaders.register_leaders()\n"
        for name, text in (("broken", "import a_package_that_is_missing"), ("so_leader", register)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "__init__.py").write_text(text)
        module = lerobot_stand_in.module
        modules = {
            "lerobot.teleoperators": module("lerobot.teleoperators", __path__=[folder]),
            "lerobot.teleoperators.config": module("config", TeleoperatorConfig=TeleoperatorConfig),
            "lerobot.teleoperators.utils": module("utils", make_teleoperator_from_config=make_teleoperator_from_config),
        }
        TeleoperatorConfig.CHOICES.clear()
        with patch.dict(sys.modules, modules):
            yield found
