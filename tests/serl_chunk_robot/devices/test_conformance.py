"""What every device must do: one that is lost rests and is not alive, and it comes back under its name."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from typing import Any, NamedTuple

import dynamixel_bus
import evdev_stand_in
import fake_hid
import lerobot_stand_in
import numpy as np
import pytest
from driver_rigs import sets
from evdev_stand_in import XBOX
from robot_served import wait

from serl_chunk_robot.devices import lerobot_teleoperator
from serl_chunk_robot.devices.base import DeviceError, Sample
from serl_chunk_robot.devices.evdev_device import FootPedal, Gamepad, Keyboard
from serl_chunk_robot.devices.gello import Gello
from serl_chunk_robot.devices.leader import leaders_ros2
from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator
from serl_chunk_robot.devices.neutral import NeutralFirst
from serl_chunk_robot.devices.spacemouse import SpaceMouse, open_mice


class Rig(NamedTuple):
    device: Any
    deflect: Any  # these are what its user does
    lose: Any
    give_back: Any


def pedal(stack, folder):
    user = stack.enter_context(evdev_stand_in.installed(folder)).device("usb-Foot-event-kbd")
    return Rig(FootPedal("Foot"), lambda: user.press("KEY_A"), user.unplug, user.plug)


def gamepad(stack, folder):
    user = stack.enter_context(evdev_stand_in.installed(folder)).device("usb-Pad-event-joystick", XBOX)
    return Rig(Gamepad("Pad"), lambda: user.move("ABS_Y", -32768), user.unplug, user.plug)


def spacemouse(stack, folder):
    mouse = stack.enter_context(fake_hid.installed(folder)).mouse()
    deflect = lambda: mouse.push(fake_hid.translation(y=-350), fake_hid.buttons(1))  # noqa: E731
    return Rig(SpaceMouse(mouse.path, silence=math.inf), deflect, mouse.unplug, mouse.plug)


def gello(stack, folder):
    servos = dynamixel_bus.Servos(1, 2)
    stack.enter_context(dynamixel_bus.stand_in(servos))
    device = Gello("/dev/any", (1, 2), (math.pi, math.pi), (1, 1))
    return Rig(device, lambda: servos.turn(1, 4.0), sets(servos, unplugged=True), sets(servos, unplugged=False))


def lerobot(stack, folder):
    port = stack.enter_context(lerobot_stand_in.installed("/dev/left"))["/dev/left"]
    device = LeRobotTeleoperator(type="so101_leader", params={"port": "/dev/left", "id": "mine"})
    moved = sets(port, at=[2500, *port.at[1:]])
    return Rig(device, moved, sets(port, broken="There is no status packet!"), sets(port, broken=""))


@pytest.fixture(params=[pedal, gamepad, spacemouse, gello, lerobot])
def rig(request, tmp_path, monkeypatch):
    monkeypatch.setattr(lerobot_teleoperator, "SILENT", 0.05)
    with contextlib.ExitStack() as stack:
        rig = request.param(stack, tmp_path)
        stack.callback(rig.device.close)
        yield rig


def places(reading) -> list[float]:
    return [
        *(reading.buttons or ()),
        *(() if reading.twist is None else reading.twist),
        *(() if reading.joints is None else reading.joints),
    ]


def test_a_lost_device_rests_and_is_opened_again_by_its_name(rig, caplog):
    caplog.set_level(logging.INFO)
    device, first = rig.device, rig.device.read()
    rig.deflect()
    wait(lambda: device.read().alive and places(device.read()) != places(first))
    moved = device.read()
    rig.lose()
    wait(lambda: not device.read().alive)
    lost = device.read()
    assert not any(lost.buttons or ())
    assert lost.twist is None or not lost.twist.any()
    if lost.joints is not None:
        np.testing.assert_allclose(lost.joints, moved.joints, atol=1e-9)
    time.sleep(0.1)  # several attempts
    assert not device.read().alive
    rig.give_back()
    wait(lambda: device.read().alive)
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if m.startswith(f"{device.name}: lost")]) == 1
    assert messages.count(f"{device.name}: connected again.") == 1
    device.close()
    assert not device.read().alive
    device.close()


# Options that cannot be, and libraries that are missing.

PORT = "/dev/left"
GELLO = {"port": PORT, "ids": (1, 2, 7), "offsets": (math.pi, 1.0), "signs": (1, -1), "gripper_closed": 2.0,
         "gripper_open": 3.0}  # fmt: skip
LEROBOT = {"type": "so101_leader", "params": {"port": PORT, "id": "mine"}}
KEYS, PEDAL = {"device": "Keyboard"}, {"device": "Foot"}
PARAMS = "so101_leader: .*"
REFUSED = [  # what is made, options that are right, those that are not, what the error names, and its parameter
    (Keyboard, KEYS, {"moves": {"hyper": (0, 1.0)}}, "'hyper'", "moves, buttons"),
    (FootPedal, PEDAL, {"pedals": {"left": "a", "right": "a"}}, "'a'", "pedals"),
    (Gamepad, {"device": "Pad"}, {"dead_zone": math.nan}, "nan", "dead_zone"),
    *((Gello, GELLO, {name: value}, repr(list(value)), name) for name, value in (
        ("ids", (1, 1, 7)), ("offsets", (0.0,)), ("signs", (1, 0)))),
    *((Gello, GELLO, {name: value}, repr(value), name) for name, value in (
        ("baud", 12345), ("gripper_open", 2.0))),
    (leaders_ros2, {}, {"arms": ("a", "a")}, "", "arms"),
    (leaders_ros2, {}, {"gripper_open": -0.0552}, "", "gripper_closed, gripper_open"),
    *((open_mice, {}, {"paths": paths, "count": count}, "expected a list", "paths") for paths, count in (
        (["a"], 2), ("ab", 2))),
    *((LeRobotTeleoperator, LEROBOT, options, match, None) for options, match in (
        ({"type": "gamepad", "params": None}, r"wheels: .*no serial bus.*no joint positions.*so101_leader"),
        ({"params": {"prt": 1}}, PARAMS + r"`prt`.*valid: .*port"),
        ({"params": {"port": "/dev/none"}}, r"so101_leader /dev/none: .*lerobot-find-port.*Check power and port"),
        ({"joints": ["a", "b"]}, r"joints: a, b, but LeRobot's so101_leader has shoulder_pan"),
        ({"grippers": ["wrist_roll"]}, r"wrist_roll: its unit is range_m100_100\. Write scale"),
        ({"drive_torque": 1.5}, "drive_torque"))),
]  # fmt: skip


@pytest.fixture
def plugged(inputs, hid):
    """A keyboard, a pedal, and a port whose motors are those of LeRobot's leaders and, at another bus, of a GELLO."""
    for name in ("Keyboard", "Foot"):
        inputs.device(f"usb-{name}-event-kbd")
    with dynamixel_bus.stand_in(dynamixel_bus.Servos(1, 2, 7)), lerobot_stand_in.installed(PORT) as ports:
        yield ports[PORT]


@pytest.mark.parametrize(("make", "right", "wrong", "match", "parameter"), REFUSED)
def test_options_that_cannot_be_are_named_and_no_motor_is_written_to(plugged, make, right, wrong, match, parameter):
    with pytest.raises(DeviceError) as error:
        make(**{**right, **wrong})
    error.match(match) if make is LeRobotTeleoperator else None
    assert make is LeRobotTeleoperator or match in str(error.value)
    assert parameter is None or parameter in error.value.parameter
    assert not plugged.calls
    assert not plugged.open


MISSING = [  # the modules that cannot be imported, what is opened, and what helps
    (("evdev",), lambda: FootPedal("Foot"), r"serl-chunk\[devices\]"),
    (("dynamixel_sdk",), lambda: Gello(**GELLO), "pip install dynamixel-sdk"),
    (("rosgraph", "rclpy"), leaders_ros2, r"cannot be imported.*interbotix_ws"),
    (("pyspacemouse",), lambda: SpaceMouse("/dev/hidraw0"), r"pip install 'pyspacemouse>=2\.1'"),
]


@pytest.mark.parametrize(("modules", "make", "helps"), MISSING)
def test_a_missing_library_is_named_with_what_helps(monkeypatch, modules, make, helps):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceError, match=helps):
        make()


# Neutral first, on a clock of the test's own.

TICK = 0.02  # s


class Hand:
    def __init__(self) -> None:
        self.first, self.now = NeutralFirst(), 100.0

    def look(self, seconds: float = TICK, follower=None, stamp=None, **fields) -> list[bool]:
        """Hold the device in one place for a time; returns whether it counted, tick by tick."""
        out = []
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            at = self.now if stamp is None else stamp
            sample = Sample(np.zeros(6), None, (False,), at, True)._replace(**fields)
            out.append(self.first.admit(sample, self.now, follower))
        return out


def twist(value, axis=0):
    out = np.zeros(6)
    out[axis] = value
    return out


def admitted() -> Hand:
    hand = Hand()
    assert hand.look(0.3) == [False] * 15  # from the first look on, 0.28 s
    assert hand.look(0.04)[-1]
    return hand


def test_a_device_counts_after_a_moment_at_rest_and_never_while_it_is_held_deflected():
    hand = Hand()
    assert not any(hand.look(10.0, twist=twist(0.5)) + hand.look(0.2))
    assert not any(hand.look(twist=twist(-0.02, axis=5)) + hand.look(0.28))  # the moment begins anew
    assert hand.look(0.06)[-1]


@pytest.mark.parametrize(
    ("fields", "rests"),
    [({"twist": twist(0.019)}, True), ({"twist": twist(0.02)}, False), ({"twist": twist(float("nan"))}, False),
     ({"buttons": (False, True)}, False), ({"twist": None}, True), ({"alive": False}, False)],
)  # fmt: skip
def test_what_neutral_is(fields, rests):
    assert any(Hand().look(1.0, **fields)) == rests


def test_once_it_counts_it_goes_on_counting_until_it_is_restarted_or_lost():
    hand = admitted()
    for ends in (hand.first.restart, lambda: hand.look(alive=False)):
        assert all(hand.look(1.0, twist=twist(1.0), buttons=(True,)))
        assert not any(ends() or ())
        assert not any(hand.look(1.0, twist=twist(1.0)))
        assert hand.look(0.4)[-1]


def test_a_reading_that_gets_old_and_looks_that_are_far_apart_are_silence():
    hand = admitted()
    counted = hand.look(0.4, stamp=hand.now, twist=twist(1.0))
    assert counted[:9] == [True] * 9
    assert not any(counted[11:])
    hand = admitted()
    hand.now += 0.3
    assert not any(hand.look(twist=twist(1.0)))
    hand = Hand()
    hand.look()
    hand.now += 0.3  # a moment at rest is not what was not seen
    assert not any(hand.look(0.28))


def leads(*joints):
    return {"twist": None, "joints": np.array(joints), "buttons": ()}


def test_a_leader_counts_where_its_follower_is():
    hand, follower = Hand(), np.array([1.0, -1.0, 0.5])
    assert not any(hand.look(1.0, follower, **leads(1.0, -1.06, 0.5)))
    assert not any(hand.look(1.0, follower, **leads(1.0, float("nan"), 0.5)))
    assert hand.look(0.4, follower, **leads(1.04, -1.04, 0.5))[-1]
    assert hand.look(0.4, follower, **leads(2.0, -1.0, 0.5))[-1]
    assert Hand().look(0.4, np.array([1.0, np.nan]), **leads(1.0, 0.7))[-1], "what is not known is not compared"
    for other in (None, np.zeros(2), np.zeros((3, 1))):
        with pytest.raises(ValueError, match="follower: shape"):
            Hand().look(follower=other, **leads(0.0, 0.0, 0.0))
