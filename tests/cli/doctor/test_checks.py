"""What an experiment needs of a link, a disk, devices and cameras, next to what there is."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import easyhid.easyhid
import evdev_stand_in
import fake_hid
import pytest
from robot_cameras import PublishedCamera
from robot_limits import GRIPPERS, HIGH, LOW, J
from robot_served import HERE, free_port, served, until
from robot_world import TICK

from serl_chunk.cli.doctor import checks, operator
from serl_chunk.cli.doctor import served as doctor
from serl_chunk.cli.doctor.checks import (
    Bandwidth,
    Check,
    check_bandwidth,
    check_devices,
    check_run_disk,
    check_snapshots,
    check_spool,
)
from serl_chunk.cli.doctor.operator import check_operator
from serl_chunk.cli.doctor.served import check_served
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.operator import OperatorConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.spool import largest_episode_bytes
from serl_chunk.types import CameraSpec, RobotSpec

FAKE = load_experiment("fake_aloha")


def changed(*cameras: str, robot: dict[str, Any] | GymConfig | None = None, **transport: Any) -> ExperimentConfig:
    return dataclasses.replace(
        FAKE,
        agent=dataclasses.replace(FAKE.agent, image_keys=cameras),
        robot=robot if isinstance(robot, GymConfig) else dataclasses.replace(FAKE.robot, **robot or {}),
        transport=dataclasses.replace(FAKE.transport, **transport),
    )


def camera_config(**transport: Any) -> ExperimentConfig:
    return changed(*(c.name for c in spec_of(FAKE).cameras), **transport)


NEED = Bandwidth(mean=10e6, human=40e6, images=0.9, episode_seconds=10.0)


@pytest.mark.parametrize(("measured", "status", "words"), [
    (50e6, "ok", "records 10.0 MB/s (40.0 MB/s while a human acts); measured 50.0 MB/s"),
    (20e6, "warning", "is sent between episodes"), (5e6, "warning", "an episode of 10.0 s needs 10.0 s more to arrive"),
    (2e6, "FAIL", "would mostly wait"),
])  # fmt: skip
def test_records_and_snapshots_against_a_link(measured, status, words):
    check = check_bandwidth(NEED, measured, camera_config())
    assert (check.status, words in check.said, "jpeg_quality=90" in check.remedy) == (status, True, status != "ok")
    assert "jpeg_quality" not in check_bandwidth(NEED, measured, camera_config(jpeg_quality=80)).remedy
    assert "jpeg_quality" not in check_bandwidth(NEED._replace(images=0.0), measured, camera_config()).remedy
    snapshots = [check_snapshots(4, 10 << 20, speed, camera_config()).status for speed in (100e6, 1e6)]
    assert snapshots == ["ok", "warning"]


def test_what_an_experiments_records_weigh():
    frames, none, jpeg = (
        checks.expected(c, spec_of(FAKE)) for c in (camera_config(), changed(), camera_config(jpeg_quality=90))
    )
    assert frames.images > 0.9
    assert 5 * (frames.mean - none.mean) == pytest.approx(frames.human - none.mean, rel=0.01)  # once a chunk of five
    assert 0.05 < jpeg.mean / frames.mean < 0.2


def test_the_spools_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = spec_of(FAKE)
    episode = largest_episode_bytes(spec, FAKE)

    def check(nbytes: int, **transport: Any) -> Check:
        monkeypatch.setattr(journal, "free_bytes", lambda folder: nbytes)
        return check_spool(changed(**transport), spec, "actor", str(tmp_path / "s"))

    assert check(1 << 40).status == "ok"
    assert check(FAKE.transport.spool_bytes - 1).status == "warning"
    assert check(2 * episode - 1).status == "FAIL"
    assert f"spool_bytes={2 * episode}" in check(1 << 40, spool_bytes=episode - 1).remedy
    assert check_spool(FAKE, spec, "../x", None).status == "FAIL"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert (check(1 << 40).status, "--spool_path" in check(1 << 40).remedy) == ("FAIL", True)
    assert not (tmp_path / "s").exists()


def test_the_disk_of_a_run_is_tried(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "new"
    assert check_run_disk(run).status == "ok"
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as slow:
        slow.setattr(checks, "SLOW_FSYNC", 0.0)
        assert (check_run_disk(run).status, "durability" in check_run_disk(run).remedy) == ("warning", True)
    with monkeypatch.context() as network:
        network.setattr("fcntl.flock", lambda *args: None)
        assert (check_run_disk(run).status, "locks do not hold" in check_run_disk(run).said) == ("FAIL", True)
    monkeypatch.setattr("tempfile.mkdtemp", raising(PermissionError(13, "Permission denied")))
    assert (check_run_disk(run).status, "Permission denied" in check_run_disk(run).said) == ("FAIL", True)


def raising(error: Exception):
    def fail(*args: Any, **kwargs: Any):
        raise error

    return fail


def real(*cameras: str, check: Any = None) -> ExperimentConfig:
    return changed(*cameras, robot=GymConfig(make=lambda fake: None, is_real=True, check_devices=check))


def broken() -> list[str]:
    raise OSError("driver is gone")


@pytest.mark.parametrize(("found", "status", "said"), [
    (None, "ok", "none needed"), (lambda: [], "ok", "the robot's own check finds everything"),
    (lambda: ["no arm at 10.0.0.2", "camera is unplugged"], "FAIL", "no arm at 10.0.0.2; camera is unplugged"),
    (broken, "FAIL", "OSError: driver is gone"), (lambda: time.sleep(2), "FAIL", "did not end in 0.2 s"),
])  # fmt: skip
def test_devices_of_a_robot(tmp_path, monkeypatch, found, status, said):
    monkeypatch.setattr(checks, "CHECK_S", 0.2)
    [check] = check_devices(real(check=found), spec_of(FAKE), tmp_path)
    assert (check.status, said in check.said) == (status, True)


def test_devices_of_a_simulator_and_cameras(tmp_path):
    [check] = check_devices(FAKE, spec_of(FAKE), tmp_path)
    assert (check.status, check.said) == ("ok", "none needed: robot 'fake_aloha' is simulated")
    _, check = check_devices(real("wrist"), spec_of(FAKE), tmp_path)
    assert (check.name, check.status) == ("cameras", "warning")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "video3").write_text("")
    _, check = check_devices(real("wrist"), spec_of(FAKE), tmp_path)
    assert (check.status, "dev/video3" in check.said) == ("ok", True)


def operated(intervention: str = "none", **operator: str) -> ExperimentConfig:
    actor = dataclasses.replace(FAKE.actor, intervention=intervention)
    return dataclasses.replace(FAKE, actor=actor, operator=OperatorConfig(**operator))


@pytest.fixture
def inputs(tmp_path):
    with fake_hid.installed(tmp_path) as hid, evdev_stand_in.installed(tmp_path) as inputs:
        yield hid, inputs


@pytest.mark.parametrize(("config", "said", "remedy"), [
    (operated("spacemouse"), ("actor.intervention", "libhidapi"), "Run: sudo apt install libhidapi-hidraw0"),
    (operated("keyboard"), ("device.paths", "names no device"), "/dev/input/by-id"),
    (operated("telepathy"), ("actor.intervention", "telepathy"), "correct"),
    (operated(pedal="Foot"), ("operator.pedal", "no such device"), "Is it plugged in"),
    (operated(attention="alarm.json"), ("operator.attention", "alarm.json"), ""),
])  # fmt: skip
def test_what_an_actors_operator_lacks_is_named_with_the_setting(inputs, monkeypatch, config, said, remedy):
    monkeypatch.setattr(easyhid.easyhid, "hidapi", object())  # as without the library
    [*_, check] = check_operator(config, spec_of(FAKE))
    assert (check.status, [part for part in said if part not in check.said]) == ("FAIL", [])
    assert remedy in check.remedy


def test_the_operators_devices_are_opened_and_a_mouse_names_its_interface_once_it_moves(inputs, tmp_path, monkeypatch):
    hid, links = inputs
    mouse, pedal = hid.mouse(), links.device("usb-Foot-event-kbd")
    found = [*check_operator(operated("spacemouse", pedal="Foot"), spec_of(FAKE))]
    assert [(c.name, c.status) for c in found] == [
        (f"input device {mouse.path}", "ok"), ("operator's keys", "ok"), ("pedal", "ok")
    ]  # fmt: skip
    assert (mouse.handles, pedal.handles) == ([], [])
    mouse.unplug()
    interfaces = hid.receiver(1, "usb-1")
    checks = check_operator(operated("spacemouse"), spec_of(FAKE))
    assert "move the mouse" in next(checks).said
    interfaces[2].push(fake_hid.motion(0, -350, 0, 0, 0, 0))
    [check] = checks
    assert (check.status, interfaces[2].path in check.said) == ("ok", True)
    monkeypatch.setattr(operator, "MOVES_S", 0.02)
    _, check = check_operator(operated("spacemouse"), spec_of(FAKE))
    assert (check.status, "no interface moved" in check.said) == ("warning", True)
    assert not any(each.handles for each in interfaces)


SPEC = RobotSpec(
    "arms", 1 / TICK, J, tuple(LOW), tuple(HIGH), tuple(range(J)), GRIPPERS,
    (CameraSpec("top", 12, 16), CameraSpec("left", 12, 16)), 500, ((0, 7), (7, 14)),
)  # fmt: skip


def configured(server, *cameras):
    return changed(*cameras, robot={"server": server})


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
    assert (checks["robot controller"].status, set(checks["robot lateness"].figures)) == ("ok", {"p50", "p99", "max"})
    assert checks["robot spec"].status == "ok"
    camera = checks["robot camera", "top"]
    assert camera.status == "ok"
    assert 0 <= camera.figures["age_s"] < 0.2


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
