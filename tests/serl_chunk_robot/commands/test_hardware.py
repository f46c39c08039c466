"""What is found on a machine whose files are those of a folder, as Linux and udev make them."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from serl_chunk_robot.commands import new as hardware
from serl_chunk_robot.commands.new import Camera, find_cameras, find_ports


class Machine:
    """A folder with devices. `root`: of its file system."""

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


class RealSense(types.ModuleType):
    """The library, which finds cameras with these serial numbers."""

    def __init__(self, *serials: str) -> None:
        super().__init__("pyrealsense2")
        self.camera_info = types.SimpleNamespace(serial_number="number")
        devices = [types.SimpleNamespace(get_info={"number": serial}.get) for serial in serials]
        self.context = lambda: types.SimpleNamespace(query_devices=lambda: devices)


@pytest.mark.parametrize(("library", "hint"), [
    (RealSense("130322274175"), ""), (None, "pip install pyrealsense2"), (RealSense(), "udev rules"),
])  # fmt: skip
def test_a_realsense_is_named_by_its_library_or_with_what_helps_and_is_no_v4l2_camera(
    machine, monkeypatch, library, hint
):
    machine.camera(0, "2-1", "usb-Intel_RealSense_9", "Intel(R) RealSense(TM) Depth Camera 435", "8086")
    machine.camera(2, "2-2", "usb-Other", "Bluetooth", "8086")
    monkeypatch.setitem(sys.modules, "pyrealsense2", library)
    camera, other = find_cameras(machine.root)
    assert camera[:3] == ("realsense", "serial", "" if hint else "130322274175")
    assert hint in camera.note if hint else camera.note == ""
    assert other == machine.v4l2("dev/v4l/by-id/usb-Other-video-index0")


@pytest.mark.parametrize(
    ("port", "words"),
    [
        ("dev/ttyDXL_puppet_left", "--driver aloha_ros1"), ("dev/ttyDXL_follower_right", "--driver aloha_ros2"),
        ("dev/ttyDXL_master_left", "leader"),
        ("dev/serial/by-id/usb-FTDI_USB__-__Serial_Converter_FT1-if00-port0", "Dynamixel"),
        ("dev/serial/by-id/usb-1a86_USB_Single_Serial_58-if00", "Feetech"),
        ("dev/serial/by-id/usb-Arduino", ""),
    ],
)  # fmt: skip
def test_a_serial_port_suggests_a_driver(machine, port, words):
    path = machine.write(port)
    (found,) = find_ports(machine.root)
    assert found.startswith(f"serial port {path}")
    assert words in found if words else found == f"serial port {path}"


def test_a_device_without_rights_is_named_with_the_command_that_helps(machine, monkeypatch):
    machine.camera(0, "1-1")
    machine.write("dev/serial/by-id/usb-FTDI")
    monkeypatch.setattr(hardware.os, "access", lambda *_: False)
    (camera,), (port,) = find_cameras(machine.root), find_ports(machine.root)
    assert "sudo usermod -aG video $USER, and log in again" in str(camera)
    assert "sudo usermod -aG dialout $USER, and log in again" in str(port)
    assert "aloha_ros1" in str(port)
    monkeypatch.undo()
    path = machine.write("video0")
    assert hardware.rights(path, "video") == ""
    path.chmod(0o000)
    assert os.geteuid() == 0 or "not permitted" in hardware.rights(path, "video")
