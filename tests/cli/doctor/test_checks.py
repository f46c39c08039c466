"""What an experiment needs of a link, a disk, devices and cameras, next to what there is."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classifier_sets import save_random
from ports import free_port

from serl_chunk.cli.doctor import checks
from serl_chunk.cli.doctor.checks import (
    Bandwidth,
    Check,
    check_bandwidth,
    check_classifier,
    check_devices,
    check_snapshots,
    check_spool,
    expected,
)
from serl_chunk.cli.doctor.doctor import run_checks
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.spool import Spool, largest_episode_bytes
from serl_chunk.types import Begin, End, Outcome, Source, Step
from serl_chunk_robot.wire.codec import Limits, size_of

HERE = "127.0.0.1"


def camera_config(**transport: Any) -> ExperimentConfig:
    config = load_experiment("fake_aloha")
    cameras = tuple(c.name for c in spec_of(config).cameras)
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, image_keys=cameras),
        transport=dataclasses.replace(config.transport, **transport),
    )


@pytest.mark.parametrize("images", [False, True])
def test_the_expected_bandwidth_is_what_an_actor_sends(tmp_path, images):
    config = camera_config() if images else load_experiment("fake_aloha")
    spec, every = spec_of(config), config.chunk.executed
    ticks = round(spec.control_hz)
    spool = Spool(tmp_path / "spool", Limits(1 << 30, 64))
    link = LearnerLink(
        config.transport, host=HERE, port=free_port(), actor_id="a", contract={}, spools=lambda run: spool
    )
    out = link._out
    out.attach("run")
    try:
        link.begin(Begin("actor-01234567-000000"))
        for tick in range(ticks):
            observation = {"state": np.zeros(spec.state_dim, np.float32)}
            decision = None
            if tick % every == 0:
                decision = {"chunk": np.zeros((config.chunk.horizon, spec.action_dim), np.float32)}
                decision |= dict.fromkeys(("q", "q_std"), np.zeros((), np.float32))
                decision |= {"values": np.zeros(config.agent.candidates)}
                for c in map(spec.camera, config.agent.image_keys):
                    observation[f"images/{c.name}"] = np.zeros((c.height, c.width, 3), np.uint8)
            action = np.zeros(spec.action_dim, np.float32)
            link.step(Step(tick, observation, action, 0.0, Source.POLICY, tick, 1, 0.0, decision))
            out.pack()
        link.end(End("actor-01234567-000000", ticks, None, False, True, Outcome.UNKNOWN))
        sent, seq = 0, 0
        while (kept := spool.at(seq)) is not None:
            sent, seq = sent + size_of(kept.frames), kept.item.end
        assert sent == pytest.approx(expected(config, spec).mean, rel=0.03)
    finally:
        link.close()
    if images:
        need = expected(config, spec)
        assert need.images > 0.9
        assert need.human > 4 * need.mean  # frames on every tick instead of every fifth
        jpeg = expected(camera_config(jpeg_quality=90), spec)
        assert 0.05 < jpeg.mean / need.mean < 0.2
        often = expected(
            dataclasses.replace(config, actor=dataclasses.replace(config.actor, frames="every_tick")), spec
        )
        assert often.mean == often.human == pytest.approx(need.human, rel=0.01)


NEED = Bandwidth(mean=10e6, human=40e6, images=0.9, episode_seconds=10.0)


@pytest.mark.parametrize(
    ("measured", "status", "words"),
    [
        (50e6, "ok", "records 10.0 MB/s (40.0 MB/s while a human acts); measured 50.0 MB/s"),
        (20e6, "warning", "is sent between episodes"),
        (5e6, "warning", "an episode of 10.0 s needs 10.0 s more to arrive"),
        (2e6, "FAIL", "would mostly wait"),
    ],
)
def test_records_and_snapshots_against_a_link(measured, status, words):
    check = check_bandwidth(NEED, measured, camera_config())
    assert (check.status, words in check.said) == (status, True)
    assert ("jpeg_quality=90" in check.remedy) == (status != "ok")
    assert "jpeg_quality" not in check_bandwidth(NEED, measured, camera_config(jpeg_quality=80)).remedy
    assert "jpeg_quality" not in check_bandwidth(NEED._replace(images=0.0), measured, camera_config()).remedy
    snapshots = [check_snapshots(4, 10 << 20, speed, camera_config()).status for speed in (100e6, 1e6)]
    assert snapshots == ["ok", "warning"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    monkeypatch.chdir(tmp_path)
    return load_experiment("fake_aloha")


def test_the_spools_disk(config, tmp_path, monkeypatch):
    spec = spec_of(config)
    episode = largest_episode_bytes(spec, config)
    free = [0]
    monkeypatch.setattr(journal, "free_bytes", lambda folder: free[0])

    def check(nbytes: int, **transport: Any) -> Check:
        free[0] = nbytes
        changed = dataclasses.replace(config.transport, **transport)
        return check_spool(dataclasses.replace(config, transport=changed), spec, "actor", str(tmp_path / "s"))

    assert check(1 << 40).status == "ok"
    assert check(config.transport.spool_bytes - 1).status == "warning"
    assert check(2 * episode - 1).status == "FAIL"
    assert f"spool_bytes={2 * episode}" in check(1 << 40, spool_bytes=episode - 1).remedy
    assert check_spool(config, spec, "../x", None).status == "FAIL"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert (check(1 << 40).status, "--spool_path" in check(1 << 40).remedy) == ("FAIL", True)
    assert not (tmp_path / "s").exists()


@pytest.mark.compiles
def test_the_classifier(config, tmp_path, monkeypatch):
    spec = spec_of(config)
    camera = spec.cameras[0]
    save_random(tmp_path / "good", camera)
    save_random(tmp_path / "other", dataclasses.replace(camera, name="belly"))

    def check(folder: str) -> Check:
        return check_classifier(dataclasses.replace(config, outcome=OutcomeConfig(classifier=folder)), spec)

    monkeypatch.setattr(checks, "LOOK_SHARE", 1e6)
    assert check("good").status == "ok"
    monkeypatch.setattr(checks, "LOOK_SHARE", 0.0)
    slow = check("good")
    assert (slow.status, slow.figures["look_s"] > 0) == ("warning", True)
    for folder, named in (("other", "belly"), ("missing", "missing")):
        assert check(folder).status == "FAIL"
        assert named in check(folder).said
    nowhere = LearnerAddress("127.0.0.1", 1, None, None, insecure=True)
    missing = dataclasses.replace(config, outcome=OutcomeConfig(classifier="missing"))
    for changed, count in ((missing, 1), (config, 0)):
        assert [c.name for c in run_checks(changed, nowhere)].count("classifier") == count


def real(config: ExperimentConfig, check: Any = None, cameras: tuple[str, ...] = ()) -> ExperimentConfig:
    robot = GymConfig(make=lambda fake: None, is_real=True, check_devices=check)
    return dataclasses.replace(config, robot=robot, agent=dataclasses.replace(config.agent, image_keys=cameras))


def broken() -> list[str]:
    raise OSError("driver is gone")


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (None, "ok", "none needed"),
        (lambda: [], "ok", "the robot's own check finds everything"),
        (lambda: ["no arm at 10.0.0.2", "camera is unplugged"], "FAIL", "no arm at 10.0.0.2; camera is unplugged"),
        (broken, "FAIL", "OSError: driver is gone"),
        (lambda: time.sleep(2), "FAIL", "did not end in 0.2 s"),
    ],
)
def test_devices_of_a_robot(config, tmp_path, monkeypatch, found, status, said):
    monkeypatch.setattr(checks, "CHECK_S", 0.2)
    [check] = check_devices(real(config, found), spec_of(config), tmp_path)
    assert (check.status, said in check.said) == (status, True)


def test_devices_of_a_simulator_and_cameras(config, tmp_path):
    [check] = check_devices(config, spec_of(config), tmp_path)
    assert (check.status, check.said) == ("ok", "none needed: robot 'fake_aloha' is simulated")
    _, check = check_devices(real(config, cameras=("wrist",)), spec_of(config), tmp_path)
    assert (check.name, check.status) == ("cameras", "warning")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "video3").write_text("")
    _, check = check_devices(real(config, cameras=("wrist",)), spec_of(config), tmp_path)
    assert (check.status, "dev/video3" in check.said) == ("ok", True)


@pytest.mark.parametrize(("ids", "is_one"), [("0000256F:0000C635", True), ("0000046D:0000C626", True),
                                             ("0000046D:0000C52F", False), ("00001050:00000407", False)])  # fmt: skip
def test_a_spacemouse(config, tmp_path, monkeypatch, ids, is_one):
    folder = tmp_path / "sys/class/hidraw/hidraw2/device"
    folder.mkdir(parents=True)
    (folder / "uevent").write_text(f"DRIVER=hid-generic\nHID_ID=0003:{ids}\nHID_NAME=3Dconnexion SpaceMouse Compact\n")
    (tmp_path / "dev").mkdir()
    node = tmp_path / "dev" / "hidraw2"
    node.write_text("")
    known: list[str] = ["SpaceMouse Compact"]
    monkeypatch.setattr("pyspacemouse.get_connected_devices", lambda: known)

    def look() -> list[Check]:
        return [c for c in check_devices(config, spec_of(config), tmp_path) if c.name == "SpaceMouse"]

    if not is_one:
        assert look() == []
        return
    [check] = look()
    assert (check.status, check.said) == ("ok", f"SpaceMouse Compact at {node}")
    known.clear()
    assert look()[0].status == "warning"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [check] = look()
    assert (check.status, "may not open" in check.said, "udev" in check.remedy) == ("warning", True, True)
    monkeypatch.undo()

    def no_library() -> None:
        raise RuntimeError("HID API is probably not installed")

    monkeypatch.setattr("pyspacemouse.get_connected_devices", no_library)
    [check] = look()
    assert ("HID API" in check.said, "libhidapi" in check.remedy) == (True, True)
