"""`robot check` on arms that are right, and on arms with each planted fault of wiring and configuration."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from robot_simulated_time import simulated

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.commands import check
from serl_chunk_robot.commands.check import RobotCheck, write_report
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.robot_file.config import load

Map = Callable[[np.ndarray], np.ndarray]


class WiredArms:
    """ViperX arms behind wires, which tests set: commands and measurements pass maps on their way."""

    commanded: Map = staticmethod(lambda x: x)
    measured: Map = staticmethod(lambda x: x)
    period = latency = stale = 0.0  # s: between two states, until a command arrives, by which stamps are old
    dead: tuple[int, ...] = ()  # joints without torque
    faults: tuple[str, ...] = ()

    def __init__(self, *, arms: int = 2, start: tuple[float, ...] | None = None, **wires: Any) -> None:
        self.arms = viperx_arms(arms=arms)
        if start is not None:
            self.arms.q = np.tile(np.array(start, np.float64), arms)
            self.arms.target = self.arms.q.copy()
        vars(self).update(wires)
        self.queue: deque[tuple[float, np.ndarray]] = deque()
        self.last: Reading | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arms, name)

    def connect(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.arms.connect(clock)

    def read(self) -> Reading:
        now = self.clock()
        while self.queue and self.queue[0][0] <= now:
            self.send(self.queue.popleft()[1])
        if self.last is None or now - self.last.stamp >= self.period - 1e-9:
            self.last = self.arms.read()
        r = self.last
        # Velocities travel with the positions: maps are linear but for a constant.
        dq = self.measured(r.dq) - self.measured(np.zeros_like(r.q))
        return r._replace(q=self.measured(r.q), dq=dq, stamp=r.stamp - self.stale, faults=self.faults)

    def command(self, target: np.ndarray, dt: float) -> None:
        self.queue.append((self.clock() + self.latency, np.array(target)))
        if not self.latency:
            self.send(self.queue.popleft()[1])

    def send(self, target: np.ndarray) -> None:
        target, dead = self.commanded(target), list(self.dead)
        target[dead] = self.arms.target[dead]
        self.arms.command(target, 0.005)


BENT = (0.1, -0.9, 1.1, 0.2, -0.3, 0.15, 0.5)
LEVEL = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5)  # where a wrong sign moves nothing before a joint is commanded
FLIP = np.where(np.arange(14) == 2, -1.0, 1.0)


def swapped(x):
    return np.concatenate([x[7:], x[:7]])


def exchanged(x):
    return x[[0, 1, 2, 4, 3, 5, 6]]


def gripper(scale=1.0, offset=0.0):
    return lambda x: np.where(np.arange(len(x)) == 6, scale * x + offset, x)


def checked(arms, tmp_path, table="", operator_clears=True):
    path = tmp_path / "robot.toml"
    path.write_text(f'name = "cell_3"\nrate = 50\n{table}\n[driver]\nname = "fake"\narms = {len(arms.spec().arms)}\n')
    lines, file = [], load(path)
    with simulated(file, arms) as server:
        clearing = server.client("operator", "hands")
        try:
            clearing.request("clear")
        except RobotError as e:
            lines.append(str(e))

        def attend(state):
            asked = lines[-1] if lines and f"within {check.PATIENCE:g} s" in lines[-1] else ""
            if operator_clears and state["state"] == "STOPPED" and state["answered"] and "robot clear" in asked:
                clearing.request("clear")
            elif state["state"] == "HELD" and "robot go" in asked and state["controller"]:
                clearing.request("go", controller=state["controller"], process=state["process"])

        server.each_pass = attend
        made = RobotCheck(server.client("operator"), lambda: server.client("controller"), file, lines.append)
        made.run()
        final = server.state
    return {f.name: f for f in made.findings}, lines, final


STOPS = ("release", "hold", "controller gone", "lapse", "stop", "silence", "rejected")


@pytest.mark.parametrize("start", [pytest.param(None, marks=pytest.mark.slow), LEVEL], ids=["home", "level"])
def test_arms_that_are_right_pass(tmp_path, start):
    found, _, final = checked(WiredArms(arms=1, start=start), tmp_path)
    wrong = [str(f) for f in found.values() if f.status != "ok"]
    assert wrong == []
    assert set(STOPS) < set(found)
    assert {f"joint {j}" for j in range(6)} | {"gripper 6"} < set(found)
    assert final["state"] == "STOPPED"  # by the last stop
    assert 0.9 < found["joint 3"].figures["share"] < 1.1
    assert found["joint 3"].figures["lag"] == pytest.approx(0.03, abs=0.01)  # half a pass more than the arms


@pytest.mark.slow
def test_where_nobody_clears_a_stop_later_ones_are_not_tried(tmp_path):
    with patch.object(check, "PATIENCE", 3.0):
        found, _, final = checked(WiredArms(arms=1), tmp_path, operator_clears=False)
    assert {found[name].status for name in STOPS} == {"ok", "-"}
    assert found["stop"].status == "ok"
    assert found["silence"].status == "-"
    assert "stopped by" in final["word"]


def turned(unit):
    return lambda x: np.where(np.arange(len(x)) % 7 == 6, x, unit(x))


# Arms, more of the robot's file, and the findings that name what is wrong with what they say.
FAULTS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "swapped arms": (dict(arms=2, commanded=swapped), "", {"joint 0": "Swap the arms' ports"}),
    "inverted joint": (dict(start=LEVEL, commanded=lambda x: x * FLIP[:7]), "", {"joint 2": "sign of this joint"}),
    "inverted joint, bent": (dict(start=BENT, commanded=lambda x: x * FLIP[:7]), "", {"robot": "sign, order"}),
    "inverted gripper": (dict(start=LEVEL, commanded=gripper(-1.0, 1.0)), "", {"gripper 6": "swap the sign"}),
    "order of joints": (
        dict(start=LEVEL, commanded=exchanged), "", {"joint 3": "order of the joints", "joint 4": "order of the joints"}
    ),
    "dead joint, gripper's scale, limits too narrow": (
        dict(start=(*LEVEL[:6], 0.0), dead=(4,), commanded=gripper(0.4)),
        "profile.evaluating.high = [3, -1.1, 1.5, 3, 2, 3, 1]",
        {"joint 4": "does not move", "gripper 6": "gripper's scale", "limits evaluating": "Widen"},
    ),
    "limits too wide": ({}, "profile.evaluating.high = 9", {"file": "beyond the driver's"}),
    "measured in degrees": (dict(start=BENT, measured=turned(np.degrees)), "", {"robot": "rad, not degrees"}),
    "commanded in degrees": (dict(start=LEVEL, commanded=turned(np.radians)), "", {"joint 0": "takes degrees"}),
    "states too seldom": (dict(period=0.05), "", {"state": "states a second"}),
    "late commands": (dict(latency=0.15), "", {"joint 0": "behind its set point"}),
    "stale state": (dict(stale=0.2), "", {"robot": "ms old"}),
    "two publishers": (
        dict(faults=("another publisher on /puppet/commands: teleop",)), "", {"robot": "teleoperation"}
    ),
    "control mode": (dict(faults=("joint 3 is in mode velocity",)), "", {"robot": "control mode"}),
}  # fmt: skip
SLOW = {"inverted joint", "inverted gripper", "commanded in degrees", "states too seldom", "order of joints"}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FAULTS])
def test_each_planted_fault_is_found(tmp_path, fault):
    arms, table, named = FAULTS[fault]
    found, lines, _ = checked(WiredArms(**{"arms": 1, **arms}), tmp_path, table)
    for name, says in named.items():
        assert found[name].status == "FAIL", lines
        assert says in f"{found[name].said} {found[name].remedy}", lines
        assert found[name].remedy
    if any(name.startswith(("joint", "gripper")) for name in named):
        if fault not in ("swapped arms", "late commands", "commanded in degrees"):  # of these, all joints are wrong
            assert {f.name for f in found.values() if f.status == "FAIL"} == set(named)
        assert "stop" not in found  # no stop is provoked on arms that do not obey
    if fault == "control mode":
        text = write_report(list(found.values()), "cell_3", tmp_path)
        assert "-> Set the control mode" in text.read_text()
        values = json.loads(text.with_suffix(".json").read_text())
        assert values["ok"] is False
        assert [f["name"] for f in values["findings"]] == list(found)
