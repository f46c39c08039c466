"""A pedal of the robot's server as the operator's: real sockets, clocks apart, lost readings and lost pedals."""

from __future__ import annotations

import contextlib
import dataclasses
import time

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
from serl_chunk.devices.robot_hosted import RemotePedal, open_pedal
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.types import ConfigError
from serl_chunk_robot.devices import polling
from serl_chunk_robot.devices.base import SILENT, Sample

AHEAD = 5000.0  # s: the robot's machine was started earlier
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


class Cell:
    """A served robot with a pedal `foot`."""

    def __init__(self, stack: contextlib.ExitStack, pedals: tuple[str, ...] = SIDES, *, ahead: float = AHEAD) -> None:
        port = free_port(3)
        clock = lambda: time.monotonic() + ahead  # noqa: E731
        self.robot = stack.enter_context(served(port=port, devices=(("foot", port + 2, -1),), clock=clock))
        self.config = FakeAlohaConfig(server=f"{HERE}:{port}")
        self.ahead, self.pedals = ahead, pedals
        self.foot = stack.enter_context(self.started())

    def started(self) -> HostedDevice:
        """A process of the pedal."""
        foot = HostedDevice(self.robot.server.run_id, "foot", self.robot.port + 2, PEDAL, ahead=self.ahead)
        foot.pedals = self.pedals
        return foot


@pytest.fixture
def cell(stack):
    return Cell(stack)


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
    devices = OperatorDevices(pedal=pedal)
    actions: list[tuple[Action, float]] = []

    def look(seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            devices.look()
            actions.extend((action, time.monotonic()) for action in devices.actions())
            time.sleep(0.01)

    look(0.1)
    began = time.monotonic()
    cell.foot.press("left")
    look(1.5)
    assert [action for action, _ in actions] == [Action.HOLD, Action.STOP]
    assert actions[0][1] - began < 0.2, "of 8 ms for a reading, and 10 for a look"
    assert 1.0 <= actions[1][1] - began < 1.3
    cell.foot.press("left", False)
    cell.foot.press("right")
    cell.foot.press("right", False)
    look(0.2)
    assert [action for action, _ in actions[2:]] == [Action.SUCCESS]


def test_a_press_of_before_a_change_of_state_that_comes_after_it_counts_for_stops_alone(cell, pedal):
    devices = OperatorDevices(pedal=pedal)
    found: list[Action] = []
    devices.empty()
    for name in SIDES:
        cell.foot.press(name, ago=0.1)
        cell.foot.press(name, False, ago=0.05)
    wait(lambda: devices.look() or found.extend(devices.actions()) or bool(found))
    time.sleep(0.1)
    devices.look()
    assert [*found, *devices.actions()] == [Action.HOLD]


@pytest.mark.parametrize("how", ["silent", "unplugged"])
def test_a_pedal_that_is_lost_is_named_in_time_and_its_process_may_be_another_one_later(cell, pedal, how, stack):
    devices = OperatorDevices(pedal=pedal)
    began = time.monotonic()
    if how == "silent":
        cell.foot.silent = True
    else:
        cell.foot.sample = PEDAL._replace(alive=False)
    wait(lambda: devices.look() or bool(devices.lost))
    assert time.monotonic() - began < SILENT + 0.3
    assert devices.lost == (f"foot at {cell.config.server}",)
    cell.foot.__exit__()
    again = stack.enter_context(cell.started())
    wait(lambda: pedal.read().alive)
    pedal.keys()
    again.press("left")
    assert events_of(pedal, 1) == [("left", True)]
    cell.foot.__exit__ = lambda *_: None  # it ended already


@pytest.mark.parametrize(
    ("pedals", "name", "named"),
    [(SIDES, "feet", ("'feet'", "foot", "[[device]]")), ((), "foot", ("foot at", "none", 'driver = "pedal"')),
     (("left", "rihgt"), "foot", ("left, rihgt", "middle"))],
)  # fmt: skip
def test_a_name_without_a_table_and_a_device_that_is_no_pedal_are_refused(stack, pedals, name, named):
    cell = Cell(stack, pedals)
    config = dataclasses.replace(
        make_config(), robot=cell.config, operator=OperatorConfig(pedal=name, pedal_hosted=True)
    )
    console = console_of(config, "a", amend=lambda record: None, end=lambda: None)
    with pytest.raises(ConfigError, match=naming(*named)) as refused:
        stack.enter_context(console)
    assert refused.value.parameter == "operator.pedal"
    with pytest.raises(ConfigError, match=naming("HOST")) as refused:
        open_pedal(FakeAlohaConfig(), "foot")
    assert refused.value.parameter == "robot.server"


def test_an_operator_with_a_pedal_alone_holds_by_it_and_by_its_loss(cell, stack):
    settings = OperatorConfig(pedal="foot", pedal_hosted=True, countdown_s=1.0)
    config = dataclasses.replace(make_config(), robot=cell.config, operator=settings)
    operator = stack.enter_context(console_of(config, "a", amend=lambda record: None, end=lambda: None))
    assert operator is not None

    def holds() -> bool:
        time.sleep(0.01)
        return operator.tick(by_human=False)

    wait(lambda: operator._robot.stopped)
    operator._robot.request("clear", operator._robot.shown)  # a robot's server starts so
    wait(lambda: not holds() or not operator._is_stopped())
    operator._permit.release()
    wait(lambda: not holds())
    cell.foot.press("left")
    cell.foot.press("left", False)
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
