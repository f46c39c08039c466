"""Devices of a robot's server as the actor reads them: real sockets, clocks apart, losses, and which arm they move."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from errors import naming
from hosted_device import HostedDevice
from robot_served import HERE, free_port, served, wait

from serl_chunk.config.devices import DeviceConfig
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action
from serl_chunk.devices import robot_hosted
from serl_chunk.devices.registry import make_intervention
from serl_chunk.devices.robot_hosted import RemoteDevice, open_hosted
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.types import STATE, ConfigError
from serl_chunk_robot.devices import polling
from serl_chunk_robot.devices.base import DeviceError, Sample

AHEAD = 5000.0  # s: the robot's machine was started earlier
SPEC = robot_spec(FakeAlohaConfig())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(polling, "AGAIN", 0.02)
    monkeypatch.setattr(robot_hosted, "FIRST_S", 0.5)


def leader(joints: int = 14) -> Sample:
    return Sample(None, np.full(joints, 0.5), (), 0.0, True)


def mouse(push: float = 0.0) -> Sample:
    return Sample(np.array([push, 0, 0, 0, 0, 0]), None, (False, False), 0.0, True)


class Cell:
    """A served robot with devices, by name: a sample and the arm of the table."""

    def __init__(self, stack: contextlib.ExitStack, ahead: float = 0.0, **devices: tuple[Sample, int]) -> None:
        port = free_port(2 + len(devices))
        listed = tuple((name, port + 2 + k, arm) for k, (name, (_, arm)) in enumerate(devices.items()))
        clock = (lambda: time.monotonic() + ahead) if ahead else time.monotonic
        self.robot = stack.enter_context(served(port=port, devices=listed, clock=clock))
        self.config = FakeAlohaConfig(server=f"{HERE}:{port}")
        self.run = self.robot.server.run_id
        self.devices = {
            name: stack.enter_context(HostedDevice(self.run, name, at, devices[name][0], ahead=ahead))
            for name, at, _ in listed
        }


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_readings_come_with_stamps_of_this_machines_clock_and_stale_ones_are_not_alive(stack):
    cell = Cell(stack, AHEAD, leaders=(leader(), -1))
    device = RemoteDevice(cell.config, "leaders")
    stack.callback(device.close)
    published = cell.devices["leaders"]
    wait(lambda: device.read().alive)
    assert abs(time.monotonic() - device.read().stamp) < 0.2
    published.late = 0.3
    wait(lambda: not device.read().alive)
    for _ in range(20):
        time.sleep(0.01)
        assert not device.read().alive
    published.late = 0.0
    wait(lambda: device.read().alive)
    published.sample = published.sample._replace(alive=False)
    wait(lambda: not device.read().alive)
    published.sample = published.sample._replace(alive=True, joints=np.full(14, 0.7))
    wait(lambda: device.read().alive and device.read().joints[3] == 0.7)
    published.silent = True
    wait(lambda: not device.read().alive)
    published.silent = False
    wait(lambda: device.read().alive)


def test_a_server_that_is_gone_and_comes_back_loses_and_returns_its_devices(stack):
    cell = Cell(stack, leaders=(leader(), -1))
    device = RemoteDevice(cell.config, "leaders")
    stack.callback(device.close)
    wait(lambda: device.read().alive)
    cell.robot.close()
    cell.devices["leaders"].silent = True
    wait(lambda: not device.read().alive)
    listed = (("leaders", cell.robot.port + 2, -1),)
    again = stack.enter_context(served(port=cell.robot.port, devices=listed))
    cell.devices["leaders"].silent = False
    time.sleep(0.5)
    assert not device.read().alive, "these readings are of the earlier process"
    cell.devices["leaders"].__exit__()
    with HostedDevice(again.server.run_id, "leaders", again.port + 2, leader()):
        wait(lambda: device.read().alive)


@pytest.mark.parametrize(
    ("devices", "names", "joints", "moved"),
    [
        ({"both": (leader(), -1)}, (), True, {0: "both", 1: "both"}),
        ({"a": (leader(7), -1), "b": (leader(7), -1)}, (), True, {0: "a", 1: "b"}),
        ({"a": (leader(7), 1), "b": (leader(7), 0)}, (), True, {0: "b", 1: "a"}),
        ({"a": (leader(7), -1), "b": (leader(7), -1)}, ("b",), True, {0: "b"}),
        ({"right": (leader(7), 1), "mouse": (mouse(), 0)}, (), True, {1: "right"}),
        ({"right": (leader(7), 1), "mouse": (mouse(), 0)}, (), False, {0: "mouse"}),
        ({"m": (mouse(), -1), "n": (mouse(), -1)}, ("n", "m"), False, {0: "n", 1: "m"}),
    ],
)
def test_devices_move_the_arms_of_their_tables(stack, devices, names, joints, moved):
    cell = Cell(stack, **devices)
    found = open_hosted(cell.config, SPEC, names, joints=joints)
    for _, device in found:
        stack.callback(device.close)
    assert {arm: device.name.partition(" at ")[0] for arm, device in found} == moved
    for _, device in found:
        sample = device.read()
        assert (sample.twist is None) == joints
        assert not joints or len(sample.joints) == 7


@pytest.mark.parametrize(
    ("devices", "names", "joints", "named"),
    [
        ({}, (), True, ("actor.intervention", "joints", "none")),
        ({"m": (mouse(), -1)}, (), True, ("actor.intervention", "joints", "m")),
        ({"m": (mouse(), -1)}, ("m",), True, ("device.paths", "joints", "m")),
        ({"m": (mouse(), -1)}, ("n",), False, ("device.paths", "'n'", "m")),
        ({"a": (leader(6), -1)}, (), True, ("device.paths", "6 joints", "7, 7")),
        ({"a": (leader(7), 1), "b": (leader(7), 1)}, (), True, ("device.paths", "arm 1", "b at")),
        ({"a": (leader(14), 1)}, (), True, ("device.paths", "14 joints")),
    ],
)
def test_devices_that_do_not_fit_are_refused(stack, devices, names, joints, named):
    cell = Cell(stack, **devices)
    with pytest.raises(ConfigError, match=naming(*named)):
        open_hosted(cell.config, SPEC, names, joints=joints)


def test_a_device_without_readings_and_a_robot_without_a_server_are_named(stack):
    with pytest.raises(ConfigError, match=naming("robot.server", "HOST")):
        open_hosted(FakeAlohaConfig(), SPEC, (), joints=True)
    cell = Cell(stack, leaders=(leader(), -1))
    cell.devices["leaders"].silent = True
    time.sleep(0.1)
    with pytest.raises(DeviceError, match=naming("leaders at", "no reading within", "log")):
        open_hosted(cell.config, SPEC, (), joints=True)


def human(stack: contextlib.ExitStack, cell: Cell, **device):
    """The intervention source of `actor.intervention=leader`, and the task's robot as it is at first."""
    env = make_env(FakeAlohaConfig())
    stack.callback(env.close)
    observation, _ = env.reset(seed=1)
    config = ExperimentConfig("x", cell.config, actor=ActorConfig(intervention="leader"), device=DeviceConfig(**device))
    source = make_intervention("leader", env, config)
    stack.callback(source.close)
    source.reset(0)
    return source, np.array(observation[STATE])


def test_leaders_take_their_arm_once_they_were_near_it_and_a_lost_one_brakes_it(stack):
    cell = Cell(stack, AHEAD, leaders=(leader(), -1))
    source, state = human(stack, cell)
    published = cell.devices["leaders"]
    command = state[:14].astype(np.float32)

    def poll(ticks: int):
        nonlocal command
        for _ in range(ticks):
            time.sleep(0.02)
            given = source.poll(0, {STATE: state}, False, command)
            if given is not None:
                command = given.action
                state[:14] = command
        return given

    assert poll(25) is None, "it is elsewhere"
    published.sample = published.sample._replace(joints=command.astype(float))
    assert poll(30) is None
    moved, start = command.astype(float), command.copy()
    moved[2] += 0.1
    published.sample = published.sample._replace(joints=moved)
    wait(lambda: poll(1) is not None)
    assert poll(10).dims.tolist() == [True] * 7 + [False] * 7
    assert start[2] < command[2] < moved[2] + 1e-6
    published.silent = True
    time.sleep(0.3)
    assert poll(10).idle
    assert source.lost
    at = command.copy()
    assert poll(5).idle
    np.testing.assert_array_equal(command, at)


def test_closing_both_grippers_of_hosted_leaders_is_the_gesture_of_enter(stack):
    cell = Cell(stack, leaders=(leader(), -1))
    source, _ = human(stack, cell)
    now = [0.0]
    devices = OperatorDevices(clock=lambda: now[0])
    devices.watch(source)

    def hold(left: float, right: float, seconds: float) -> list[Action]:
        joints = np.full(14, 0.5)
        joints[[6, 13]] = left, right
        cell.devices["leaders"].sample = leader()._replace(joints=joints)
        wait(lambda: source.hands().grippers == (left, right))
        for _ in range(int(seconds / 0.1)):
            now[0] += 0.1
            devices.look()
        return list(devices.actions())

    assert hold(1.0, 1.0, 0.5) == []
    assert hold(0.0, 1.0, 1.5) == []
    assert hold(0.0, 0.0, 0.8) == []
    assert hold(0.0, 0.0, 0.5) == [Action.GO]
    assert devices.lost == ()
