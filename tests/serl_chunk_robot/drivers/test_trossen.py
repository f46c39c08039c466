"""Trossen's arms: the real wheel as far as it goes without a controller, and motion against a stand-in of it.

The environment's SERL_CHUNK_TROSSEN names a folder into which the wheel was installed: `.ci/run` does so.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import trossen_stand_in
from driver_rigs import fixture
from trossen_stand_in import Mode

from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.trossen import TrossenArms

ENVIRONMENT = "SERL_CHUNK_TROSSEN"
FOLDER = Path(os.environ.get(ENVIRONMENT, "missing")).absolute()
needs_wheel = pytest.mark.skipif(
    not (FOLDER / "trossen_arm").is_dir(), reason=f"no trossen-arm here: {ENVIRONMENT} names no folder (see .ci/run)"
)
LEFT, RIGHT = "10.0.0.4", "10.0.0.5"


rig = fixture("trossen")


def signature(function: ast.FunctionDef) -> list[tuple[str, str]]:
    arguments = function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    return [(a.arg, "" if d is None else ast.unparse(d)) for a, d in zip(arguments.args, defaults, strict=True)]


@needs_wheel
def test_the_stand_in_is_like_the_wheel(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "trossen_arm", raising=False)
    wheel = importlib.import_module("trossen_arm")
    tree = ast.parse((FOLDER / "trossen_arm" / "trossen_arm.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    real = {f.name: signature(f) for f in classes["TrossenArmDriver"].body if isinstance(f, ast.FunctionDef)}
    ours = {
        name: ast.parse(inspect.cleandoc("\n" + inspect.getsource(method))).body[0]
        for name, method in vars(trossen_stand_in.TrossenArmDriver).items()
        if not name.startswith("_")
    }
    assert len(ours) == 9
    for name, function in ours.items():
        assert isinstance(function, ast.FunctionDef)
        wanted = [(p, d.replace("...", "Mode.idle")) for p, d in real[name]]
        assert signature(function) == wanted, name
    assert {name: m.value for name, m in wheel.Mode.__members__.items()} == {m.name: m.value for m in Mode}
    assert wheel.Model.wxai_v0.value == trossen_stand_in.Model.wxai_v0.value
    for name in ("wxai_v0_follower", "wxai_v0_leader"):
        assert hasattr(wheel.StandardEndEffector, name)
    assert wheel.LogicError.__bases__ == trossen_stand_in.LogicError.__bases__ == (AssertionError,)
    assert wheel.RuntimeError.__bases__ == trossen_stand_in.RuntimeError.__bases__ == (builtins.RuntimeError,)
    output = wheel.RobotOutput()
    assert {"id", "timestamp"} <= {*dir(output.header)}
    assert {"positions", "velocities", "efforts"} <= {*dir(output.joint.all)}


def test_connecting_clears_no_error(rig):
    rig.connect()
    with pytest.raises(DriverError, match="idle"):
        rig.driver.command(rig.read().q, 0.02)
    rig.driver.close()
    rig.controllers[1].error = "Joint overheated"
    rig.driver = TrossenArms(addresses=[LEFT, RIGHT])
    with pytest.raises(DriverError, match=f"{RIGHT}: no controller can be used .Joint overheated"):
        rig.connect()
    assert rig.controllers[1].error
    assert [c.calls + c.commands for c in rig.controllers] == [[], []]


def test_set_points_are_radians_and_metres_in_one_period(rig):
    rig.ready()
    for controller in rig.controllers:  # a clear switches to position where the arms are
        assert controller.calls == ["set_all_modes position"]
        assert controller.commands[0] == (pytest.approx(trossen_stand_in.POSE), 0.0)
    target = rig.read().q
    target[6], target[13], target[1] = 0.25, 1.1, 0.95
    rig.driver.command(target, 0.005)
    left, right = (c.commands[-1] for c in rig.controllers)
    assert (left[1], right[1], left[0][1]) == (0.005, 0.005, 0.95)
    assert (left[0][6], right[0][6]) == pytest.approx((0.01, 0.04)), "an opening above 1 is 1"


def test_an_arm_that_lost_its_configuration_is_an_error_and_no_empty_state(rig):
    rig.ready()
    rig.driver._arms[1].cleanup()
    with pytest.raises(DriverError, match=f"{RIGHT}: 0 joints, expected 7"):
        rig.driver.read()
    with pytest.raises(DriverError, match="disconnected"):
        rig.driver.command(np.tile([0.0, 0.9, 0.8, 0.1, 0.0, 0.0, 0.5], 2), 0.02)
    assert len(rig.controllers[0].commands) == 1


def test_a_controllers_error_is_cleared_by_a_thread_or_stays_a_fault(rig, monkeypatch):
    rig.ready()
    target = rig.read().q
    rig.fault()
    assert rig.read(lambda reading: bool(reading.faults)).faults == (f"{RIGHT}: Joint overheated",)
    with pytest.raises(DriverError, match="Joint overheated"):
        rig.driver.command(target, 0.02)
    rig.driver.clear_faults()
    rig.driver.clear_faults()  # an operator who presses twice
    assert "being switched" in rig.driver.read().faults[-1]
    with pytest.raises(DriverError, match="Clear the robot first"):
        rig.driver.command(target, 0.02)
    rig.read(lambda reading: reading.torque and not reading.faults)
    assert rig.controllers[1].calls.count("clear_error") == 1
    assert {*rig.controllers[0].calls} == {"set_all_modes position"}

    def fails(self: object) -> None:
        raise trossen_stand_in.RuntimeError("Joint clear error command failed")

    monkeypatch.setattr(trossen_stand_in.TrossenArmDriver, "clear_error", fails)
    rig.fault()
    rig.read(lambda reading: bool(reading.faults))
    rig.driver.clear_faults()
    assert len(rig.read(lambda reading: "Joint clear error" in " ".join(reading.faults)).faults) <= 2
