"""`robot new`: what it finds, and that what it writes loads."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from serl_chunk_robot.commands.new import Camera, Found, find, find_cameras, write_new
from serl_chunk_robot.drivers import BUILT_IN
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.main import main
from serl_chunk_robot.robot_file.config import load

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
    before = path.read_text()
    for arguments, named in (
        ([str(path)], "is not overwritten"),
        ([str(tmp_path / "b.toml"), "--driver", "fakee"], "Did you mean fake"),
        ([str(tmp_path / "none" / "b.toml")], "cannot be written"),
        ([str(tmp_path / "b.toml"), "--address", "192.168.1.2"], "HOST:PORT"),
    ):
        assert main(["new", *arguments]) == 2
        assert named in capsys.readouterr().err
    assert path.read_text() == before
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        assert find([address]).addresses == [f"{address} answers"]
    assert "does not answer" in find([address]).addresses[0]


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def plug(root: Path, first: int, usb: str, link: str = "", vendor: str = "046d") -> None:
    """Plug in a UVC camera: a node of pictures and one of metadata, with links as udev makes them."""
    device = write(root / "sys/bus/usb/devices" / usb / "idVendor", vendor + "\n").parent
    write(device / "product", "RealSense\n")
    (device / "1.0").mkdir()
    for index in (0, 1):
        node = write(root / f"dev/video{first + index}")
        of = write(root / "sys/class/video4linux" / node.name / "index", f"{index}\n").parent
        (of / "device").symlink_to(device / "1.0")
        for kind, text in (("by-id", link), ("by-path", f"pci-0-usb-{usb}")):
            if text:
                at = root / "dev/v4l" / kind / f"{text}-video-index{index}"
                at.parent.mkdir(parents=True, exist_ok=True)
                at.symlink_to(node)


def test_cameras_are_named_by_serial_number_then_place_and_metadata_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    plug(tmp_path, 0, "1-1", "usb-Logi_A1")
    plug(tmp_path, 2, "1-2")  # has no serial number: udev makes no link by it
    plug(tmp_path, 4, "2-1", vendor="8086")
    plug(tmp_path, 10, "1-3", "usb-Logi_B2")
    write(tmp_path / "dev/video20")  # a node without links
    real, *others = find_cameras(tmp_path)
    assert (real.driver, real.value) == ("realsense", "")
    assert "pip install pyrealsense2" in real.note
    paths = "by-id/usb-Logi_A1", "by-path/pci-0-usb-1-2", "by-id/usb-Logi_B2"
    nodes = [*(f"v4l/{path}-video-index0" for path in paths), "video20"]
    assert others == [Camera("v4l2", "device", str(tmp_path / "dev" / node), "") for node in nodes]
    assert find_cameras(tmp_path / "none") == []
