"""Devices of a robot's server as the actor reads them: real sockets, clocks apart, losses, arms, a pedal."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np
import pytest
from actor_helpers import make_config
from errors import naming
from hosted_device import HostedDevice
from robot_served import HERE, free_port, served, wait

from serl_chunk.cli.console import console_of
from serl_chunk.config.operator import OperatorConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.console.bindings import Action
from serl_chunk.devices import robot_hosted
from serl_chunk.devices.robot_hosted import RemoteDevice, RemotePedal, open_hosted, open_pedal
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import ConfigError
from serl_chunk_robot.devices import polling
from serl_chunk_robot.devices.base import SILENT, DeviceError, Sample

AHEAD = 5000.0  # s: the robot's machine was started earlier
SPEC = robot_spec(FakeAlohaConfig())
SIDES = ("left", "middle", "right")
PEDAL = Sample(None, None, (False,) * 3, 0.0, True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(polling, "AGAIN", 0.02)
    monkeypatch.setattr(robot_hosted, "FIRST_S", 1.0)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def leader(joints: int = 14) -> Sample:
    return Sample(None, np.full(joints, 0.5), (), 0.0, True)


MOUSE = Sample(np.zeros(6), None, (False, False), 0.0, True)


class Cell:
    """A served robot, whose clock is ahead, with devices, by name: a sample and the arm of the table."""

    def __init__(self, stack: contextlib.ExitStack, **devices: tuple[Sample, int]) -> None:
        port = free_port(2 + len(devices))
        self.listed = tuple((name, port + 2 + k, arm) for k, (name, (_, arm)) in enumerate(devices.items()))
        clock = lambda: time.monotonic() + AHEAD  # noqa: E731
        self.robot = stack.enter_context(served(port=port, devices=self.listed, clock=clock, dt=0.02))
        self.config = FakeAlohaConfig(server=f"{HERE}:{port}")
        run = self.robot.server.run_id
        self.devices = {
            name: stack.enter_context(HostedDevice(run, name, at, devices[name][0], ahead=AHEAD))
            for name, at, _ in self.listed
        }

    def opened(self, stack: contextlib.ExitStack, name: str) -> tuple[HostedDevice, RemoteDevice]:
        device = RemoteDevice(self.config, name)
        stack.callback(device.close)
        wait(lambda: device.read().alive)
        return self.devices[name], device


def test_readings_come_with_stamps_of_this_machines_clock_and_stale_ones_are_not_alive(stack):
    published, device = Cell(stack, leaders=(leader(), -1)).opened(stack, "leaders")
    assert abs(time.monotonic() - device.read().stamp) < 0.2
    published.late = 0.3
    wait(lambda: not device.read().alive)
    for _ in range(20):
        time.sleep(0.01)
        assert not device.read().alive
    published.late, published.sample = 0.0, published.sample._replace(joints=np.full(14, 0.7))
    wait(lambda: device.read().alive and device.read().joints[3] == 0.7)
    published.sample = published.sample._replace(alive=False)
    wait(lambda: not device.read().alive)


def test_a_server_that_is_gone_and_comes_back_loses_and_returns_its_devices(stack):
    cell = Cell(stack, leaders=(leader(), -1))
    published, device = cell.opened(stack, "leaders")
    cell.robot.close()
    published.silent = True
    wait(lambda: not device.read().alive)
    again = stack.enter_context(served(port=cell.robot.port, devices=cell.listed))
    published.silent = False
    time.sleep(0.5)
    assert not device.read().alive, "these readings are of the earlier process"
    published.__exit__()
    with HostedDevice(again.server.run_id, "leaders", again.port + 2, leader()):
        wait(lambda: device.read().alive)


@pytest.mark.parametrize(
    ("devices", "names", "joints", "moved"),
    [
        ({"both": (leader(), -1)}, (), True, {0: "both", 1: "both"}),
        ({"a": (leader(7), 1), "b": (leader(7), 0)}, (), True, {0: "b", 1: "a"}),
        ({"a": (leader(7), -1), "b": (leader(7), -1)}, ("b",), True, {0: "b"}),
        ({"right": (leader(7), 1), "mouse": (MOUSE, 0)}, (), False, {0: "mouse"}),
        ({"m": (MOUSE, -1), "n": (MOUSE, -1)}, ("n", "m"), False, {0: "n", 1: "m"}),
    ],
)
def test_devices_move_the_arms_of_their_tables(stack, devices, names, joints, moved):
    found = open_hosted(Cell(stack, **devices).config, SPEC, names, joints=joints)
    assert {arm: device.name.partition(" at ")[0] for arm, device in found} == moved
    for _, device in found:
        stack.callback(device.close)
        sample = device.read()
        assert (sample.twist is None) == joints
        assert not joints or len(sample.joints) == 7


@pytest.mark.parametrize(
    ("devices", "names", "joints", "named"),
    [
        ({"m": (MOUSE, -1)}, ("m",), True, ("device.paths", "joints", "m")),
        ({"m": (MOUSE, -1)}, ("n",), False, ("device.paths", "'n'", "m")),
        ({"a": (leader(6), -1)}, (), True, ("device.paths", "6 joints", "7, 7")),
        ({"a": (leader(7), 1), "b": (leader(7), 1)}, (), True, ("device.paths", "arm 1", "b at")),
    ],
)
def test_devices_that_do_not_fit_are_refused(stack, devices, names, joints, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        open_hosted(Cell(stack, **devices).config, SPEC, names, joints=joints)


def test_a_device_without_readings_and_a_robot_without_a_server_are_named(stack):
    for attempt in (
        lambda: open_hosted(FakeAlohaConfig(), SPEC, (), joints=True),
        lambda: open_pedal(FakeAlohaConfig(), "foot"),
    ):
        with pytest.raises(ConfigError, match=naming("HOST")) as refused:
            attempt()
        assert refused.value.parameter == "robot.server"
    cell = Cell(stack, leaders=(leader(), -1))
    cell.devices["leaders"].silent = True
    time.sleep(0.1)
    with pytest.raises(DeviceError, match=naming("leaders at", "no reading within", "log")):
        open_hosted(cell.config, SPEC, (), joints=True)


class FootCell(Cell):
    def __init__(self, stack: contextlib.ExitStack, pedals: tuple[str, ...] = SIDES) -> None:
        super().__init__(stack, foot=(PEDAL, -1))
        self.foot = self.devices["foot"]
        self.foot.pedals = pedals

    def press(self, name: str, ago: float = 0.0, held: float = 0.0) -> None:
        """Press a pedal `ago` s before now, and release it `held` s later."""
        self.foot.press(name, ago=ago)
        self.foot.press(name, False, ago=ago - held)

    def console(self, stack: contextlib.ExitStack, name: str = "foot"):
        settings = OperatorConfig(pedal=name, pedal_hosted=True, countdown_s=1.0)
        config = dataclasses.replace(make_config(), robot=self.config, operator=settings)
        return stack.enter_context(console_of(config, "a", amend=lambda record: None, end=lambda: None))


@pytest.fixture
def cell(stack):
    return FootCell(stack)


@pytest.fixture
def pedal(cell, stack):
    pedal = open_pedal(cell.config, "foot")
    stack.callback(pedal.close)
    wait(lambda: pedal.read().alive)
    return pedal


def events_of(pedal: RemotePedal, count: int) -> list[tuple[str, bool]]:
    """Wait for so many events, and see that no more come."""
    found = []
    wait(lambda: found.extend(pedal.keys()) or len(found) >= count)
    time.sleep(0.1)
    found += pedal.keys()
    assert all(abs(time.monotonic() - event.stamp) < 2.0 for event in found)
    return [(event.name, event.pressed) for event in found]


def test_no_event_is_lost_or_comes_twice_where_readings_are_lost(cell, pedal, stack):
    """The newest reading wins at a client, so that most of these are never seen."""
    pressed = [(SIDES[k % 3], k % 2 == 0) for k in range(90)]
    for name, down in pressed:
        cell.foot.press(name, down)
        time.sleep(0.004)
    assert events_of(pedal, 90) == pressed
    cell.foot.press("middle")
    time.sleep(0.05)
    later = open_pedal(cell.config, "foot")
    stack.callback(later.close)
    time.sleep(0.1)
    assert later.keys() == [], "what was pressed before it was opened"
    cell.foot.press("middle", False)
    assert events_of(later, 1) == [("middle", False)]


def test_a_pedal_holds_in_time_and_its_long_press_stops(cell, pedal):
    devices, found = OperatorDevices(pedal=pedal), {}

    def look(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            devices.look()
            found.update((action, time.monotonic() - began) for action in devices.actions())
            time.sleep(0.01)

    began = time.monotonic()
    cell.foot.press("left")
    look(1.5)
    assert [*found] == [Action.HOLD, Action.STOP]
    assert found[Action.HOLD] < 0.2, "of 8 ms for a reading, and 10 for a look"
    assert 0.95 <= found[Action.STOP] < 1.3, "1 s from a stamp whose mapped clock may be early by the map's error"
    cell.foot.press("left", False)
    cell.press("right")
    look(0.2)
    assert [*found][2:] == [Action.SUCCESS]


def test_a_press_of_before_a_change_of_state_that_comes_after_it_counts_for_stops_alone(cell, pedal):
    devices = OperatorDevices(pedal=pedal)
    found: list[Action] = []
    devices.empty()
    for name in SIDES:
        cell.press(name, ago=0.1, held=0.05)
    wait(lambda: devices.look() or found.extend(devices.actions()) or bool(found))
    time.sleep(0.1)
    devices.look()
    assert [*found, *devices.actions()] == [Action.HOLD]


def test_a_pedal_that_is_lost_is_named_in_time_and_its_process_may_be_another_one_later(cell, pedal, stack):
    devices = OperatorDevices(pedal=pedal)
    began, cell.foot.silent = time.monotonic(), True
    wait(lambda: devices.look() or bool(devices.lost))
    assert time.monotonic() - began < SILENT + 0.3
    assert devices.lost == (f"foot at {cell.config.server}",)
    cell.foot.__exit__()
    again = HostedDevice(cell.robot.server.run_id, "foot", cell.robot.port + 2, PEDAL, ahead=AHEAD)
    again.pedals = SIDES
    stack.enter_context(again)
    wait(lambda: pedal.read().alive)
    pedal.keys()
    again.press("left")
    assert events_of(pedal, 1) == [("left", True)]


@pytest.mark.parametrize(
    ("pedals", "name", "named"),
    [(SIDES, "feet", ("'feet'", "foot", "[[device]]")), ((), "foot", ("foot at", "none", 'driver = "pedal"'))],
)
def test_a_name_without_a_table_and_a_device_that_is_no_pedal_are_refused(stack, pedals, name, named):
    with pytest.raises(ConfigError, match=naming(*named)) as refused:
        FootCell(stack, pedals).console(stack, name)
    assert refused.value.parameter == "operator.pedal"


def test_an_operator_with_a_pedal_alone_holds_by_it_and_by_its_loss(cell, stack):
    operator = cell.console(stack)

    def holds() -> bool:
        time.sleep(0.01)
        return operator.tick(by_human=False)

    wait(lambda: operator._robot.stopped)
    operator._robot.request("clear", operator._robot.shown)  # a robot's server starts so
    wait(lambda: not holds() or not operator._is_stopped())
    operator._permit.release()
    wait(lambda: not holds())
    cell.press("left")
    wait(holds)
    assert not operator._permit.latched
    # The stamp of a press is known to some ms only, and a press before the hold would not count.
    held = time.monotonic()
    wait(lambda: holds() and time.monotonic() - held > 0.2)
    began = time.monotonic()
    cell.foot.press("middle")
    wait(lambda: not holds())
    assert time.monotonic() - began > 1.0, "after the countdown"
    began = time.monotonic()
    cell.foot.silent = True
    wait(holds)
    assert time.monotonic() - began < SILENT + 0.3
    wait(lambda: holds() and any("foot at" in obstacle.what for obstacle in operator.view.obstacles))
