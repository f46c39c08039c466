"""`robot new`: what it finds, and that what it writes loads."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from unittest.mock import patch

import pytest

from serl_chunk_robot.commands.new import EXAMPLES, Camera, Found, find, write_new
from serl_chunk_robot.drivers import BUILT_IN
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.main import main
from serl_chunk_robot.robot_file.config import load

ROOT = Path(__file__).resolve().parents[3]


def test_addresses_are_tried():
    with socket.create_server(("127.0.0.1", 0)) as there:
        open_port = there.getsockname()[1]
        assert find([f"127.0.0.1:{open_port}"]).addresses == [f"127.0.0.1:{open_port} answers"]
    assert "does not answer" in find([f"127.0.0.1:{open_port}"]).addresses[0]
    with pytest.raises(ConfigError, match="HOST:PORT"):
        find(["192.168.1.2"])


FOUND = Found(
    ["serial port /dev/serial/by-id/left (perhaps motors)"],
    [Camera("v4l2", "device", "/dev/v4l/by-id/cam-video-index0", "not permitted. Run: x")],
    "http://arms:11311",
    ["arm:7000 answers"],
)


@pytest.mark.parametrize("driver", sorted(BUILT_IN))
def test_what_is_written_loads_or_names_what_is_missing(tmp_path, driver):
    path = tmp_path / "cell 3.toml"
    missing = write_new(path, driver, FOUND)
    text = path.read_text()
    assert "/dev/serial/by-id/left (perhaps motors)" in text
    assert "ROS master: http://arms:11311" in text
    assert "arm:7000 answers" in text
    if missing:
        with pytest.raises((ConfigError, ImportError)):
            load(path)
    else:
        file = load(path)
        assert file.name == "cell_3"
        assert [(c.name, c.source.driver) for c in file.cameras] == [("camera_0", "v4l2")]
        assert file.cameras[0].source.options["device"] == "/dev/v4l/by-id/cam-video-index0"
    assert driver not in ("fake", "fake_aloha") or not missing


def test_a_camera_of_which_the_number_is_not_known_is_to_be_filled_in(tmp_path):
    path = tmp_path / "robot.toml"
    missing = write_new(path, "fake", FOUND._replace(cameras=[Camera("realsense", "serial", "", "its number: x")]))
    assert "serial number" in missing
    text = path.read_text()
    assert 'serial = ""  # FILL IN: its number: x' in text
    path.write_text(text.replace('serial = ""', 'serial = "130322274175"'))
    assert load(path).cameras[0].source.options["serial"] == "130322274175"


def test_no_file_is_overwritten_and_no_driver_guessed(tmp_path, capsys):
    path = tmp_path / "robot.toml"
    with patch("serl_chunk_robot.commands.new.find", lambda addresses: FOUND):
        assert main(["new", str(path)]) == 0
    out = capsys.readouterr().out
    assert "found  serial port /dev/serial/by-id/left (perhaps motors)" in out
    assert "found  v4l2 camera /dev/v4l/by-id/cam-video-index0 (not permitted. Run: x)" in out
    before = path.read_text()
    assert main(["new", str(path)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["new", str(tmp_path / "b.toml"), "--driver", "fakee"]) == 2
    assert "Did you mean fake" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "none" / "b.toml")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    for command in ("dry", "replay"):
        assert main([command]) == 2
        assert f"serl-chunk robot {command}" in capsys.readouterr().err, "what reads episodes is in another package"


def test_a_driver_with_an_example_names_its_files_which_exist(tmp_path):
    for driver in EXAMPLES:
        write_new(tmp_path / f"{driver}.toml", driver, find(root=tmp_path, env={}))
        line = next(x for x in (tmp_path / f"{driver}.toml").read_text().splitlines() if "experiments/robots/" in x)
        assert driver.partition("_")[0] in line or driver == "lerobot"
        for name in re.findall(r"\w+\.toml", line):
            assert (ROOT / "experiments/robots" / name).is_file()
    write_new(tmp_path / "fake.toml", "fake", find(root=tmp_path, env={}))
    assert "experiments/robots" not in (tmp_path / "fake.toml").read_text()
