"""`robot new`: what it finds, and that what it writes loads."""

from __future__ import annotations

import socket

import pytest

from serl_chunk_robot.config import load
from serl_chunk_robot.drivers import BUILT_IN
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.main import main
from serl_chunk_robot.new import Found, find, write_new


def test_devices_of_a_machine_are_found_by_stable_names(tmp_path):
    arm = tmp_path / "dev/serial/by-id/usb-FTDI_left-if00-port0"
    arm.parent.mkdir(parents=True)
    arm.touch()
    for k in (0, 2):
        (tmp_path / f"dev/video{k}").touch()
    found = find(root=tmp_path, env={"ROS_MASTER_URI": "http://arms:11311"})
    assert found == Found([str(arm)], [str(tmp_path / f"dev/video{k}") for k in (0, 2)], "http://arms:11311", [])
    camera = tmp_path / "dev/v4l/by-id/usb-cam-video-index0"
    camera.parent.mkdir(parents=True)
    camera.touch()
    assert find(root=tmp_path, env={}).video == [str(camera)]


def test_addresses_are_tried():
    with socket.create_server(("127.0.0.1", 0)) as there:
        open_port = there.getsockname()[1]
        assert find([f"127.0.0.1:{open_port}"]).addresses == [(f"127.0.0.1:{open_port}", "answers")]
    assert "does not answer" in find([f"127.0.0.1:{open_port}"]).addresses[0][1]
    with pytest.raises(ConfigError, match="HOST:PORT"):
        find(["192.168.1.2"])


@pytest.mark.parametrize("driver", sorted(BUILT_IN))
def test_what_is_written_loads_or_names_what_is_missing(tmp_path, driver):
    found = Found(["/dev/serial/by-id/left"], ["/dev/video0"], "", [("arm:7000", "answers")])
    path = tmp_path / "cell 3.toml"
    missing = write_new(path, driver, found)
    text = path.read_text()
    assert "/dev/serial/by-id/left" in text
    assert "/dev/video0" in text
    assert "arm:7000 answers" in text
    if missing:
        with pytest.raises((ConfigError, ImportError)):
            load(path)
    else:
        assert load(path).name == "cell_3"
        # What is commented out is valid too, so that an uncommented option does what its line shows.
        options = [line[2:] for line in text.splitlines() if line.startswith("# ") and "= " in line]
        assert any("=" in line for line in options)
    assert driver not in ("fake", "fake_aloha") or not missing


def test_no_file_is_overwritten_and_no_driver_guessed(tmp_path, capsys):
    path = tmp_path / "robot.toml"
    assert main(["new", str(path)]) == 0
    before = path.read_text()
    assert main(["new", str(path)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["new", str(tmp_path / "b.toml"), "--driver", "fakee"]) == 2
    assert "Did you mean fake" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "none" / "b.toml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dry", "replay"])
def test_what_reads_episodes_names_what_it_needs(command, capsys):
    assert main([command]) == 2
    assert f"serl-chunk robot {command}" in capsys.readouterr().err
