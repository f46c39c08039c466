"""Faults that are planted in the product. The interleavings catch those that are here, named tests all others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import planted_faults
import pytest
from planted_faults import Plant, around, both, edited, put
from robot_interleavings import interleave
from robot_socket_interleavings import interleave_sockets

from serl_chunk_robot.control import border, loop
from serl_chunk_robot.control.border import DriverStop
from serl_chunk_robot.control.loop import RobotLoop
from serl_chunk_robot.safety import gate, measured, table, watchdog
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import SetPoint
from serl_chunk_robot.safety.watchdog import Watchdog
from serl_chunk_robot.server import leases, server
from serl_chunk_robot.server.leases import Client, Lease
from serl_chunk_robot.server.server import RobotServer

STEPS, SEEDS = 2500, (0, 1, 2)
TESTS = Path(__file__).resolve().parents[1]


def row(state: str, event: str, **change: Any) -> Plant:
    old = table.BY_EVENT[state, event]
    return lambda patch: patch.setitem(table.BY_EVENT, (state, event), old._replace(**change))


def unchecked(reason: str) -> Plant:
    def change(method: Any, self: Gate, *args: Any) -> str:
        found = method(self, *args)
        return "" if found == reason else found

    return around(Gate, "_rejects", change)


def longer_validity(method: Any, self: Watchdog, tick: float) -> None:
    method(self, tick)
    self.validity *= 10


def rejected_renews(method: Any, self: RobotLoop, command: Any, now: float) -> str:
    reason = method(self, command, now)
    if reason not in ("", "state"):
        self._watchdog.commanded(now)
    return reason


def one_arm(method: Any, self: Gate, limits: Any, *args: Any) -> None:
    rates = [np.where(np.arange(len(x)) < 7, x, 100 * x) for x in limits.rates]
    method(self, limits._replace(rates=type(limits.rates)(*rates)), *args)


def one_arm_position(method: Any, self: Gate, limits: Any, *args: Any) -> None:
    second = np.arange(len(limits.low)) >= 7
    method(self, limits._replace(low=limits.low - 9 * second, high=limits.high + 9 * second), *args)


def doubtful_is_good(method: Any, self: Measured, sample: Any, *args: Any) -> bool:
    believed = method(self, sample, *args)
    self.good = sample
    return believed


def each_joint_alone(method: Any, self: Gate, at: SetPoint, goal: Any, q: np.ndarray) -> Any:
    passed = method(self, at, goal, q)
    if goal is None or passed.factor == 1:
        return passed
    position = passed.set_point.position.copy()
    position[7:] = at.position[7:] + at.velocity[7:] * self.dt
    return passed._replace(set_point=at.to(position, self.dt))


def at_once(at: SetPoint, rates: Any, dt: float) -> SetPoint:
    return SetPoint.standing(at.position)


# Parts of methods of RobotLoop, and what is there instead.
GOOD = "self._measured.good"
FORGETS = ('no torque", now, before)\n        self._at = None', 'no torque", now, before)')
HOLDS = f"""goal = None
    if self.machine.state == HOLD and {GOOD} is not None:
        at = SetPoint.standing({GOOD}.q)
"""
MOVES = "self._at = at.to(at.position + at.velocity * self._gate.dt, self._gate.dt)"
UNSENT = ("self._unsent = now if", f"{MOVES}\n        self._unsent = now if")

FAULTS: dict[str, Plant] = {
    "a command is valid ten times as long": around(Watchdog, "__init__", longer_validity),
    "rejected commands renew": around(RobotLoop, "command", rejected_renews),
    "NaN is accepted": unchecked("not_finite"),
    "the generation is not checked": unchecked("generation"),
    "the order is not checked": unchecked("order"),
    "the age is not checked": unchecked("age"),
    "the first command is not checked": unchecked("first"),
    "a stop latches without braking": row("RUN", "stop", next="STOPPED", then=""),
    "a stop does not raise the generation": row("RUN", "stop", drops=False),
    "a stop does not latch": row("RUN", "stop", then="HOLD"),
    "a controller clears": row("STOPPED", "clear", who=table.CONTROLLER),
    "braking stands at once": lambda patch: patch.setattr(gate, "braked", at_once),
    "the rates of one arm are ignored": around(Gate, "__init__", one_arm),
    "the range of one arm is ignored": around(Gate, "__init__", one_arm_position),
    "each arm is slowed alone": around(Gate, "step", each_joint_alone),
    "HOLD commands the measured pose": edited(RobotLoop, "_move", ("goal = None\n", HOLDS), HOLD=table.HOLD),
    "a doubtful sample is used": around(Measured, "judge", doubtful_is_good),
    "doubtful samples never stop": put(measured, "DOUBTFUL_IN_A_ROW", 10**9),
    "frozen samples are believed": around(Measured, "_frozen", lambda method, self, *args: ""),
    "stale samples are believed": put(measured, "STALE", 10.0),
    "lapses are not counted": put(watchdog, "LAPSES", 10**9),
    "silence is never due": put(watchdog, "SILENCE", 1e9),
    "rejections are not counted": put(watchdog, "REJECTED_IN_A_ROW", 10**9),
    "a clear keeps the set point after torque was lost": edited(RobotLoop, "_read", FORGETS),
    "a reboot keeps the set point": edited(RobotLoop, "reboot", ("self._at = None", "pass")),
    "a motor of a moving robot is rebooted": edited(RobotLoop, "reboot", ("self.machine.state != STOPPED", "False")),
    "a robot is cleared before it was read after a reboot": edited(RobotLoop, "reboot", ('self.causes["reboot"]', "_")),
    "torque of an arm is not checked": edited(RobotLoop, "_read", ("if not reading.torque", "if False")),
    "a set point that the driver did not take counts": edited(RobotLoop, "_move", UNSENT),
    "a pass after a gap goes on": put(loop, "GAP", 1e9),
    "a driver that does not answer is left alone": both(put(loop, "ANSWER", 1e9), put(border, "ANSWER", 1e9)),
    "a driver is not told of stops": around(DriverStop, "report", lambda method, self, now: None),
    "overspeed is not checked": around(
        Gate, "__init__", lambda method, self, limits, *args: method(self, limits._replace(overspeed=np.inf), *args)
    ),
}


def live() -> None:
    for seed in (4, *SEEDS):
        interleave(seed, STEPS)


def live_over_sockets() -> None:
    for seed in SEEDS:
        interleave_sockets(seed, 1400)


# A fifth of them at once, which seed 4 catches soon: others take seconds of interleavings before they are caught.
@pytest.mark.parametrize(
    "fault", [f if k % 5 == 0 else pytest.param(f, marks=pytest.mark.slow) for k, f in enumerate(FAULTS)]
)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        live()


def no_one_is_lost(method: Any, self: RobotServer, *args: Any) -> None:
    self._newest = None


def keeps_the_other(method: Any, self: Lease, *args: Any) -> bool:
    return method(self, *args) and False


def second_gets(method: Any, self: Lease, connection: bytes, client: Client, now: float) -> bool:
    held = client._replace(name=self.holder, process=self.process)
    return bool(method(self, connection, held if self.holder else client, now))


SERVER_FAULTS: dict[str, Plant] = {
    "commands of any client are taken": around(Lease, "check", lambda method, self, *args: None),
    "a second actor gets the lease": around(Lease, "take", second_gets),
    "an actor that comes back finds the robot moving": around(Lease, "take", keeps_the_other),
    "a dropped lease leaves the robot moving": around(RobotServer, "_lost", no_one_is_lost),
    "a command's age is not computed": around(
        RobotServer,
        "_command",
        lambda method, self, values, connection, age, now: method(self, values, connection, 0.0, now),
    ),
    "any client clears": around(
        RobotLoop,
        "request",
        lambda method, self, event, role, *args, **more: method(self, event, "operator", *args, **more),
    ),
    "any client reboots": around(
        RobotLoop, "reboot", lambda method, self, motor, role, *args: method(self, motor, "operator", *args)
    ),
    "a silent actor keeps its lease": put(leases, "SILENCE", 1e9),
    "a request of a minute ago moves the robot": put(server, "OLD", 1e9),
}


@pytest.mark.parametrize(
    "fault", [f if k < 3 else pytest.param(f, marks=pytest.mark.slow) for k, f in enumerate(SERVER_FAULTS)]
)
def test_a_planted_fault_of_the_server_is_caught_over_sockets(fault: str, monkeypatch: pytest.MonkeyPatch):
    SERVER_FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        live_over_sockets()


def pytest_fails(nodes: tuple[str, ...], fault: str = "") -> bool:
    """Run tests, with a fault planted in all of their processes; returns whether one failed."""
    paths = [str(TESTS / "support" / "plant"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "SERL_CHUNK_PLANT": fault, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(TESTS / node) for node in nodes)],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "sitecustomize" not in done.stderr, done.stderr
    return done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted_faults.FAULTS)
def test_a_planted_fault_is_caught_by_the_tests_that_are_named(fault: str):
    assert pytest_fails(planted_faults.FAULTS[fault].caught_by, fault)


@pytest.mark.slow
def test_without_a_fault_these_tests_pass():
    assert not pytest_fails(tuple(dict.fromkeys(sum((each.caught_by for each in planted_faults.FAULTS.values()), ()))))
