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
    assert main(["new", str(path)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["new", str(tmp_path / "b.toml"), "--driver", "fakee"]) == 2
    assert "Did you mean fake" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "none" / "b.toml")]) == 2
    assert "cannot be written" in capsys.readouterr().err


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def camera(self, first: int, usb: str, link: str = "", product: str = "Webcam", vendor: str = "046d") -> None:
        """Plug in a UVC camera: a node of pictures and one of metadata, with links as udev makes them."""
        device = self.write(f"sys/bus/usb/devices/{usb}/idVendor", vendor + "\n").parent
        (device / "product").write_text(product + "\n")
        interface = device / f"{usb}:1.0"
        interface.mkdir()
        for index in (0, 1):
            name = f"video{first + index}"
            self.write(f"dev/{name}")
            of = self.write(f"sys/class/video4linux/{name}/index", f"{index}\n").parent
            (of / "device").symlink_to(interface)
            for kind, text in (("by-id", link), ("by-path", f"pci-0-usb-{usb}")):
                if text:
                    at = self.root / "dev/v4l" / kind / f"{text}-video-index{index}"
                    at.parent.mkdir(parents=True, exist_ok=True)
                    at.symlink_to(f"../../{name}")

    def v4l2(self, path: str, note: str = "") -> Camera:
        return Camera("v4l2", "device", str(self.root / path), note)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    return Machine(tmp_path)


def test_cameras_are_named_by_serial_number_then_place_and_metadata_is_left_out(machine):
    machine.camera(0, "1-1", "usb-Logi_A1")
    machine.camera(2, "1-2")  # has no serial number: udev makes no link by it
    machine.camera(10, "1-3", "usb-Logi_B2")
    assert find_cameras(machine.root) == [
        machine.v4l2("dev/v4l/by-id/usb-Logi_A1-video-index0"),
        machine.v4l2("dev/v4l/by-path/pci-0-usb-1-2-video-index0"),
        machine.v4l2("dev/v4l/by-id/usb-Logi_B2-video-index0"),
    ]
    machine.write("dev/video20")
    assert find_cameras(machine.root)[-1] == machine.v4l2("dev/video20"), "a node without links"
    assert find_cameras(machine.root / "none") == []
