"""Builds the intervention source of a human operator from the configuration: devices, and the arms that they move."""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.operator import AXES, LEADERS, DeviceConfig, changes
from serl_chunk.devices.arm_control import ArmControl, Gripper, JointArm, LeaderArm, TwistArm
from serl_chunk.devices.human import HumanIntervention, Thresholds
from serl_chunk.devices.leader_requests import LeaderDrives
from serl_chunk.devices.robot_hosted import open_hosted
from serl_chunk.devices.teleoperation import Tips, TwistFollower, TwistLimits
from serl_chunk.io import os_reason, plural
from serl_chunk.robots.arms import kinematics_of
from serl_chunk.robots.base import RobotEnv
from serl_chunk.types import ConfigError, RobotSpec
from serl_chunk_robot.devices.base import DeviceError, InputDevice, KeyEvent, Sample, lifeless
from serl_chunk_robot.devices.evdev_device import Gamepad, Keyboard


def make_human(config: ExperimentConfig, env: RobotEnv) -> HumanIntervention:
    """Open the device of `actor.intervention`.

    Raises:
        ConfigError: the device cannot move this robot, or the configuration does not fit it.
        DeviceError: it cannot be opened.
    """
    device, spec = config.device, env.robot_spec
    controls = _controls(config, env)
    # The button that switches is none of the others.
    dead_man = device.dead_man - (0 <= device.switch_button < device.dead_man)
    thresholds = Thresholds(device.start, device.end, device.hold_s, dead_man, near=device.align != "blend")
    kind = config.actor.intervention.lower()
    hosted = device.hosted or kind == "leader"
    count = 1 if device.switch_button >= 0 else min(len(controls), max(1, len(device.paths)))
    if len(device.paths) > len(controls):
        arms = plural(len(controls), "arm")
        raise ConfigError(
            f"names {len(device.paths)} devices, and robot {spec.name!r} has {arms}", parameter="device.paths"
        )
    if device.switch_button >= 0 and len(device.paths) > 1:
        raise ConfigError(f"lets a single device move both arms (got {len(device.paths)} in device.paths, expected 1). "
                          "Name one of them, or leave switch_button out", parameter="device.switch_button")  # fmt: skip
    with contextlib.ExitStack() as opened:
        moved: list[tuple[int, InputDevice]]
        if hosted:
            moved = open_hosted(config.robot, spec, device.paths, joints=kind in LEADERS)
        else:
            moved = list(enumerate(_open(kind, config, count)))
        for _, each in moved:
            opened.callback(each.close)
            _check_buttons(device, each)
        if device.switch_button >= 0:
            if len(controls) != 2:
                raise ConfigError(f"robot {spec.name!r} has one arm", parameter="device.switch_button")
            moved = list(enumerate(switched(moved[0][1], device.switch_button)))
        pairs = [(each, controls[arm]) for arm, each in moved]
        drives = _drives(env, spec, moved) if device.align == "drive" else None
        human = HumanIntervention(pairs, thresholds, grippers=spec.grippers, drives=drives)
        opened.pop_all()
        return human


def _drives(env: RobotEnv, spec: RobotSpec, leaders: Sequence[tuple[int, InputDevice]]) -> LeaderDrives:
    """Return the drives of the leaders to their arms. Raises ConfigError where one of them cannot be driven."""
    request = getattr(env, "drive_leaders", None)
    first: dict[str, tuple[InputDevice, int]] = {}
    for arm, each in leaders:
        table = getattr(each, "table", "")
        if request is None or not table or each.read().drive is None:
            raise ConfigError(
                f"drive, and {each.name} cannot be driven: leaders of LeRobot with Feetech motors can, as devices of "
                "the robot's server. Set near, and put it at its arm by hand, or blend",
                parameter="device.align",
            )
        first.setdefault(table, (each, spec.arms[arm][0] if spec.arms else 0))
    return LeaderDrives(request, first)  # type: ignore[arg-type]


def _check_buttons(device: DeviceConfig, opened: InputDevice) -> None:
    """Raise ConfigError for a setting that names a button which the device lacks."""
    buttons = len(opened.read().buttons)
    for name in ("dead_man", "switch_button"):
        number = getattr(device, name)
        if number >= buttons:
            valid = f"0 to {buttons - 1}" if buttons else "-1"
            raise ConfigError(
                f"{opened.name} has {plural(buttons, 'button')} (got {number}, expected {valid}). Choose another one",
                parameter=f"device.{name}",
            )


def _open(kind: str, config: ExperimentConfig, count: int) -> list[InputDevice]:
    device, keys = config.device, changes(config.operator.keys, "operator.keys")
    if kind == "spacemouse":
        from serl_chunk_robot.devices.spacemouse import open_mice

        with _naming_setting(device.paths):
            return list(open_mice(device.paths, count))
    if not device.paths:
        raise ConfigError(f"names no device, and actor.intervention={kind} needs one for each arm that it moves. See "
                          "/dev/input/by-id", parameter="device.paths")  # fmt: skip
    gamepad = functools.partial(Gamepad, keys=" ".join(keys.values()).split())
    makes: dict[str, Callable[[str], InputDevice]] = {"gamepad": gamepad, "keyboard": Keyboard, "gello": _gello}
    with _naming_setting(device.paths), contextlib.ExitStack() as opened:
        devices = []
        for path in device.paths:
            devices.append(makes[kind](path))
            opened.callback(devices[-1].close)
        opened.pop_all()
        return devices


@contextlib.contextmanager
def _naming_setting(paths: Sequence[str]) -> Iterator[None]:
    """Let errors of devices name the setting in place of an argument: the paths, or else the kind of device."""
    try:
        yield
    except DeviceError as error:
        text = error.message if error.parameter == "paths" else str(error)  # of a GELLO's file it names the entry
        named = error.parameter or any(path in text for path in paths)
        raise DeviceError(text, parameter="device.paths" if named else "actor.intervention") from error


def _gello(path: str) -> InputDevice:
    """Open the leader that a TOML file describes: the arguments of serl_chunk_robot.devices.gello.Gello."""
    from serl_chunk_robot.devices.gello import Gello

    try:
        values: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text())
        return Gello(**values)
    except FileNotFoundError as e:
        raise ConfigError(
            f"{path}: no such file (expected a GELLO's, with port, ids, offsets and signs). Write it",
            parameter="device.paths",
        ) from e
    except (OSError, tomllib.TOMLDecodeError, TypeError) as e:
        raise ConfigError(
            f"{path} describes no GELLO ({os_reason(e)}). It has port, ids, offsets and signs", parameter="device.paths"
        ) from e


def _controls(config: ExperimentConfig, env: RobotEnv) -> list[ArmControl]:
    spec = env.robot_spec
    arms = spec.arms or ((0, spec.action_dim),)
    if config.actor.intervention.lower() in LEADERS:
        return [_leader(spec, arm) for arm in arms]
    if all(joint < 0 for k, joint in enumerate(spec.joint_of_action) if k not in spec.grippers):
        return [_twists(config.device, spec, arm, k, env) for k, arm in enumerate(arms)]
    tips = kinematics_of(config.robot)
    if config.device.axes:
        raise ConfigError(
            f"is of robots that take velocities, and {spec.name!r} takes targets of joints. Leave it out; a 0 in "
            "device.scale switches an axis off",
            parameter="device.axes",
        )
    if tips is None:
        raise ConfigError(
            f"{config.actor.intervention} moves tips of arms, and the kinematics of robot {spec.name!r} are not known. "
            "Let its environment have a method kinematics() -> serl_chunk_robot.geometry.kinematics.Arms, or use gello",
            parameter="actor.intervention",
        )
    return [_joints(config.device, spec, tips, k) for k in range(len(arms))]


def _joints(device: DeviceConfig, spec: RobotSpec, tips: Tips, arm: int) -> ArmControl:
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    limits = TwistLimits(device.translation, device.rotation, device.scale, device.frame, device.lead)
    home = None  # the pose towards which joints move that the twist leaves free: a tip's pose leaves none of six free
    if len(tips.joints[arm]) > len(AXES):
        given: np.ndarray | None = getattr(tips, "home", None)
        home = (low + high) / 2 if given is None else given
    follower = TwistFollower(tips, arm, low, high, spec.dt, limits, home)
    measured = np.array(spec.joint_of_action)[follower.joints]
    first, end = spec.arms[arm] if spec.arms else (0, spec.action_dim)
    return JointArm(follower, _gripper(device, spec, first, end, None), measured, spec.dt)


def _twists(device: DeviceConfig, spec: RobotSpec, arm: tuple[int, int], number: int, env: RobotEnv) -> ArmControl:
    dims = np.array([k for k in range(*arm) if k not in spec.grippers])
    axes = device.axes or {3: AXES[:3], 6: AXES}.get(len(dims), ())
    if len(axes) != len(dims):
        each = f"Name an axis for each, in their order: device.axes={','.join(AXES[: len(dims)])}, of {', '.join(AXES)}"
        raise ConfigError(
            f"robot {spec.name!r} takes {plural(len(dims), 'number')} of an arm besides its gripper's, of six at most "
            f"(got device.axes={','.join(device.axes) or 'nothing'}). "
            f"{each if len(dims) <= len(AXES) else 'Name its gripper'}. A gripper's number belongs in robot.grippers, "
            "and device.gripper_closed=low or high is its closed end",
            parameter="device.axes" if device.axes else "actor.intervention",
        )
    # A device's axes are those of the world. Where the robot's actions have others, it knows how to turn them.
    turned = getattr(env, "action_of_twist", None)
    turn = None if turned is None or device.frame == "tool" else (lambda twist: turned(number, twist))
    numbers = tuple(map(AXES.index, axes))
    return TwistArm(numbers, np.array(device.scale), dims, _gripper(device, spec, *arm, 0.0), turn)


def _leader(spec: RobotSpec, arm: tuple[int, int]) -> ArmControl:
    dims = np.arange(*arm)
    if any(spec.joint_of_action[k] < 0 for k in dims if k not in spec.grippers):
        raise ConfigError(
            f"a leader commands joints, and robot {spec.name!r} takes other actions", parameter="actor.intervention"
        )
    low, high = np.array(spec.action_low)[dims], np.array(spec.action_high)[dims]
    return LeaderArm(dims, np.array(spec.joint_of_action)[dims], low, high, spec.dt)


def _gripper(
    device: DeviceConfig, spec: RobotSpec, first: int, end: int, stays: float | None
) -> tuple[int, Gripper] | None:
    index = next((k for k in spec.grippers if first <= k < end), None)
    if index is None:
        return None
    low, high = spec.action_low[index], spec.action_high[index]
    closed, opened = (low, high) if device.gripper_closed == "low" else (high, low)
    # Where 0 is an end of its range it is a position as any other one, and stays what it was.
    return index, Gripper(device.gripper, closed, opened, stays if low < 0 < high else None, spec.dt)


class _Shared:
    """Reads the device once for both arms, which read it in turns, the first one first in every tick."""

    def __init__(self, device: InputDevice, button: int) -> None:
        self.device, self.button, self.arm = device, button, 0
        self.sample: Sample | None = None
        self._pressed = True  # a button that is down at the start switches once it was let go

    def read(self) -> Sample:
        sample = self.device.read()
        pressed = sample.alive and self.button < len(sample.buttons) and sample.buttons[self.button]
        if pressed and not self._pressed:
            self.arm = 1 - self.arm
        self._pressed = pressed
        buttons = tuple(down for k, down in enumerate(sample.buttons) if k != self.button)
        return sample._replace(buttons=buttons)


class SwitchedDevice:
    """The device as one of two arms has it: at rest while it moves the other one."""

    def __init__(self, shared: _Shared, arm: int) -> None:
        self._shared, self._arm = shared, arm
        self.name = shared.device.name

    def read(self) -> Sample:
        shared = self._shared
        if self._arm == 0 or shared.sample is None:
            shared.sample = shared.read()
        sample = shared.sample
        return sample if shared.arm == self._arm else lifeless(sample)._replace(alive=sample.alive)

    @property
    def interfaces(self) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self._shared.device, "interfaces", ())
        return found if self._arm == 0 else found[:1]

    def keys(self) -> list[KeyEvent]:
        keys = getattr(self._shared.device, "keys", None)
        return keys() if keys is not None and self._arm == 0 else []

    def close(self) -> None:
        if self._arm == 0:
            self._shared.device.close()


def switched(device: InputDevice, button: int) -> list[InputDevice]:
    """Return the device of the first and of the second arm; `button` switches between them."""
    shared = _Shared(device, button)
    return [SwitchedDevice(shared, arm) for arm in (0, 1)]
