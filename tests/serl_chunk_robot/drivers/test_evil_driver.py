"""An evil driver: whatever it returns or raises, the loop survives and brakes, and commands nothing but set points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import robot_world
from robot_limits import HOME, J
from robot_world import DT, JOINTS, SPEC, FaultyArms, Way, World, speed

from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.drivers.base import Event, Reading
from serl_chunk_robot.safety.motion import stopping_distance


class Mute(Exception):
    """An error without a text that can be had."""

    def __str__(self) -> str:
        raise RuntimeError


def evilly(name: str) -> Callable[..., Any]:
    """A method of the arms whose answer is replaced by what `evil` has under its name, which may raise."""

    def method(self: EvilArms, *args: Any) -> Any:
        answer = getattr(super(EvilArms, self), name)(*args)
        if name == "read":
            answer = answer._replace(extra={"force": np.zeros(3)})
        return self.evil[name](answer) if name in self.evil else answer

    return method


class EvilArms(FaultyArms):
    """Arms with an extra in the state."""

    read, command, stop, set, clear_faults = map(evilly, ("read", "command", "stop", "set", "clear_faults"))

    def __init__(self) -> None:
        super().__init__()
        self.evil: dict[str, Callable[[Any], Any]] = {}

    def spec(self) -> Any:
        return SPEC._replace(state=(("q", J), ("force", 3)))


def raises(error: BaseException) -> Callable[[Any], Any]:
    def evil(answer: Any) -> Any:
        raise error

    return evil


def field(**values: Any) -> Callable[[Reading], Reading]:
    return lambda reading: reading._replace(**values)


def buffers(then: Callable[[np.ndarray], None] | None) -> Callable[[Reading], Reading]:
    """The driver returns the same arrays each time. `then`: changes joints from the third read on; None: it freezes."""
    own: list[Reading] = []

    def evil(reading: Reading) -> Reading:
        own.append(reading)
        first = own[0]
        if then is None:
            first.dq[:], first.effort[:] = 0.0, 0.0
        else:
            first.q[:], first.dq[:], first.effort[:] = reading.q, reading.dq, reading.effort
            then(first.q) if len(own) > 2 else None
        return first._replace(stamp=reading.stamp)

    return evil


def jumps(q: np.ndarray) -> None:
    q[2] += 0.3


ZEROS = np.zeros(J)
CASES: dict[str, tuple[str, Callable[[Any], Any], str]] = {  # the method, what it does, and what the fault names
    "nothing": ("read", lambda r: None, "read() returned NoneType, expected a Reading"),
    "a joint less": ("read", field(q=HOME[:-1]), "q: float64[13], expected float64[14]"),
    "whole numbers": ("read", field(q=HOME.astype(int)), "q: int64[14]"),
    "a masked array": ("read", field(q=np.ma.masked_greater(HOME, 1.0)), "q: MaskedArray"),
    "no joint is finite": ("read", field(q=ZEROS * np.nan), "q is not 14 finite numbers"),
    "a stamp of NaN": ("read", field(stamp=np.nan), "stamp: float nan"),
    "a stamp an arm": ("read", field(stamp=np.array([100.0, 100.0])), "stamp: float64[2]"),
    "torque an arm": ("read", field(torque=np.array([True, False])), "torque: bool[2], expected True or False"),
    "faults in one text": ("read", field(faults="hot"), "faults: str, expected a tuple of texts"),
    "a fault without a text": ("read", field(faults=("",)), "a fault without a text"),
    "no extra": ("read", field(extra={}), "'force' is missing"),
    "an extra of NaN": ("read", field(extra={"force": ZEROS[:3] * np.nan}), "extra 'force': a number is not finite"),
    "an extra without a name": ("read", field(extra={"force": ZEROS[:3], 3: ZEROS}), "a name is int"),
    "an event that is none": ("read", field(events=(1.0,)), "events: tuple, expected a tuple of Event"),
    "a success of two": ("read", field(events=(Event(1.0, np.ones(2)),)), "success: float64[2]"),  # type: ignore[arg-type]
    "it exits": ("read", raises(SystemExit(3)), "SystemExit 3"),
    "it is interrupted": ("read", raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "its error has no text": ("read", raises(Mute()), "Mute"),
    "its own buffers jump": ("read", buffers(jumps), "joint 2 jumped"),
    "a command exits": ("command", raises(SystemExit()), "SystemExit"),
    "a setting exits": ("set", raises(SystemExit("no setting")), "a motion failed: SystemExit no setting"),
}


class Sets(Way):
    def __init__(self, world: World) -> None:
        super().__init__(HOME + 0.4 * JOINTS)
        self.arms = world.arms

    def goal(self, *args: object) -> np.ndarray | None:
        self.arms.set("load", 0.0)
        return super().goal(*args)  # type: ignore[arg-type]


def moving(state: str = "RUN") -> tuple[World, EvilArms]:
    arms = EvilArms()
    return robot_world.moving(state, arms, Sets), arms


def brakes(world: World, start: np.ndarray, first: np.ndarray) -> None:
    """Run until the robot is stopped; what it was commanded since `start` leads to rest, and no further."""
    before = len(world.arms.sent)
    world.until("STOPPED", 60)
    path = np.array([start, *world.arms.sent[before:]])
    assert np.isfinite(path).all()
    assert (np.abs(np.diff(path, axis=0)) / DT <= np.abs(first) + 0.2).all(), "no joint goes on"
    bound = stopping_distance(np.abs(first), np.full(J, 8.0), world.limits.rates, DT) + 4 * DT * np.abs(first)
    assert (np.abs(path[-1] - start) <= bound + 1e-9).all()
    count = len(world.arms.sent)
    world.run(20)
    assert len(world.arms.sent) == count, "nothing is commanded in STOPPED"


@pytest.mark.parametrize("case", CASES)
def test_it_brakes(case: str):
    method, evil, word = CASES[case]
    world, arms = moving("MOVE" if method == "set" else "RUN")
    if case.startswith("its own buffers"):
        arms.evil[method] = evil
        world.run(2)  # these are sound
        assert world.state == "RUN"
    start, first = arms.sent[-1], speed(world)
    arms.evil[method] = evil
    brakes(world, start, first)
    assert word in world.loop.machine.word
    assert world.loop.machine.word.isprintable()


@pytest.mark.parametrize(
    "evil", [lambda a: None, lambda a: 1, lambda a: np.array([True, True]), raises(SystemExit()), raises(Mute())]
)
def test_a_stop_that_is_not_answered_by_a_plain_bool_is_not_answered(evil: Callable[[Any], Any]):
    world, arms = moving()
    arms.evil["stop"] = evil
    world.ask("stop", "any")
    start, first = arms.sent[-1], speed(world)
    brakes(world, start, first)
    world.run(20)
    assert not world.run().answered
    assert max(level for _, _, level in arms.stops) >= 1
    with pytest.raises(Refused, match="has not answered"):
        world.ask("clear", "operator")


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), Mute()])
def test_a_request_that_the_driver_cannot_do_is_refused(error: BaseException):
    world, arms = moving()
    world.ask("stop", "any")
    world.until("STOPPED")
    arms.fault = "overload"
    arms.evil = {"set": raises(error), "clear_faults": raises(error)}
    world.run()
    with pytest.raises(Refused, match=type(error).__name__):
        world.ask("clear", "operator")
    with pytest.raises(Refused, match=type(error).__name__):
        world.loop.reboot("left/gripper", "operator", "K", world.now)
    world.run(2)
    arms.evil.clear()
    world.ask("clear", "operator")
    arms.evil["set"] = raises(error)
    world.ask("torque_off", "operator")
    assert world.run().state == "STOPPED"


def test_a_driver_with_buffers_of_its_own_is_believed_and_noticed_when_it_freezes():
    world, arms = moving()
    arms.evil["read"] = buffers(lambda q: None)
    world.drive(20)
    assert world.state == "RUN"
    arms.evil["read"] = buffers(None)
    for _ in range(20):
        world.send(arms.sent[-1] + 0.01 * (np.arange(J) % 7 == 0))
        world.run(4)
    assert "has repeated" in world.loop.machine.word
