"""What `serl-chunk doctor` reports of a robot's server, on real sockets with simulated arms and cameras."""

from __future__ import annotations

import dataclasses

import pytest
from robot_cameras import PublishedCamera
from robot_limits import GRIPPERS, HIGH, LOW, J
from robot_served import HERE, free_port, served, until
from robot_world import TICK

from serl_chunk.cli.doctor import served as doctor
from serl_chunk.cli.doctor.checks import check_devices
from serl_chunk.cli.doctor.served import check_served
from serl_chunk.config.loader import load_experiment
from serl_chunk.types import CameraSpec, RobotSpec

SPEC = RobotSpec(
    "arms", 1 / TICK, J, tuple(LOW), tuple(HIGH), tuple(range(J)), GRIPPERS,
    (CameraSpec("top", 12, 16), CameraSpec("left", 12, 16)), 500, ((0, 7), (7, 14)),
)  # fmt: skip


def configured(server, *cameras):
    config = load_experiment("fake_aloha")
    return dataclasses.replace(
        config,
        robot=dataclasses.replace(config.robot, server=server),
        agent=dataclasses.replace(config.agent, image_keys=cameras),
    )


def found(config, spec=SPEC):
    checks = list(check_served(config, spec))
    assert all(c.remedy for c in checks if c.status in ("warning", "FAIL"))
    return {(c.name, c.said.split(":")[0]) if c.name == "robot camera" else c.name: c for c in checks}


@pytest.fixture(scope="module")
def cell():
    port = free_port(4)
    sizes = (("top", 12, 16, port + 2), ("small", 6, 8, port + 3))
    camera = PublishedCamera("top", port + 2)
    with served(port=port, cameras=sizes) as robot:
        yield robot, camera, f"{HERE}:{port}"
    camera.close()


def test_a_robot_that_stands_is_fine(cell):
    robot, _, server = cell
    operator = robot.ready()
    until(operator, "HOLD")
    checks = found(configured(server, "top"))
    assert checks["robot server"].status == "ok"
    for part in ("HOLD", "cleared by operator", "profile fast", server):
        assert part in checks["robot server"].said
    assert checks["robot controller"].status == "ok"
    assert set(checks["robot lateness"].figures) == {"p50", "p99", "max"}
    assert checks["robot spec"].status == "ok"
    camera = checks["robot camera", "top"]
    assert camera.status == "ok"
    assert 0 <= camera.figures["age_s"] < 0.2
    [devices, *_] = [*check_devices(configured(server), SPEC), None]
    assert devices is None or devices.name == "SpaceMouse"  # the server has the others


def test_what_keeps_an_actor_from_working_is_named(cell, monkeypatch):
    robot, camera, server = cell
    monkeypatch.setattr(doctor, "PICTURES_S", 0.3)
    operator = robot.operator()
    operator.request("stop")
    until(operator, "STOPPED")
    robot.arms.fault = "joint 3 is in mode velocity"
    controller = robot.client("another actor")
    controller.hello()
    camera.silent = True
    try:
        other = dataclasses.replace(SPEC, control_hz=30.0, cameras=(*SPEC.cameras, CameraSpec("small", 12, 16)))
        checks = found(configured(server, "top", "left", "small"), other)
    finally:
        camera.silent, robot.arms.fault = False, ""
        controller.close()
    state = checks["robot server"]
    assert (state.status, "STOPPED" in state.said, "stopped by" in state.said) == ("warning", True, True)
    assert "joint 3 is in mode velocity" in state.said
    assert "control mode" in state.remedy
    assert checks["robot controller"].status == "warning"
    assert "another actor" in checks["robot controller"].said
    assert checks["robot spec"].status == "FAIL"
    assert "seconds of a tick 0.0333" in checks["robot spec"].said
    assert "no picture" in checks["robot camera", "top"].said
    assert "the server has top, small" in checks["robot camera", "left"].said
    assert "6 x 8" in checks["robot camera", "small"].said


def test_a_server_that_does_not_answer_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr("serl_chunk_robot.client.client.ANSWER", 0.2)
    [check] = check_served(configured(f"{HERE}:{free_port()}"), SPEC)
    assert (check.name, check.status) == ("robot server", "FAIL")
    assert "robot serve" in check.remedy
    [check] = check_served(configured("no:such:address"), SPEC)
    assert "brackets" in check.said
