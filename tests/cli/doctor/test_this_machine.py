"""What `serl-chunk doctor` looks at on the robot PC itself: the spool's disk, the devices, a SpaceMouse."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from classifier_sets import save_random

from serl_chunk.cli.doctor import checks
from serl_chunk.cli.doctor.checks import Check, check_classifier, check_devices, check_spool
from serl_chunk.cli.doctor.doctor import run_checks
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.storage import journal
from serl_chunk.transport.storage.spool import largest_episode_bytes


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentConfig:
    """The demo's, in a folder of the test's own."""
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
