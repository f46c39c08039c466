"""The drivers of cameras, with stand-ins of their libraries, and the fake one."""

from __future__ import annotations

import os
import sys
import time
import types
from types import SimpleNamespace

import cv2_stand_in
import numpy as np
import pytest
from cv2_stand_in import VideoCapture

from serl_chunk_robot.drivers import v4l2_camera
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError
from serl_chunk_robot.drivers.fake_camera import FakeCamera
from serl_chunk_robot.drivers.realsense_camera import RealSenseCamera
from serl_chunk_robot.drivers.v4l2_camera import V4L2Camera


class RealSense(types.ModuleType):
    """pyrealsense2 with two cameras, of which one gives 8 x 6 pixels at 30 Hz; one object is each of its classes."""

    def __init__(self):
        super().__init__("pyrealsense2")
        self.age, self.domain, self.options, self.picture, self.stopped = 0.05, "global_time", {}, True, 0
        names = ["global_time_enabled", "exposure", "white_balance"]
        names += [f"enable_auto_{name}" for name in names[1:]]
        self.option = SimpleNamespace(**{name: name for name in names})
        self.camera_info = SimpleNamespace(serial_number="serial_number")
        self.stream, self.format = SimpleNamespace(color="color"), SimpleNamespace(rgb8="rgb8")
        self.timestamp_domain = SimpleNamespace(hardware_clock="hardware_clock")
        self.context = self.config = self.pipeline = self.get_device = self.first_color_sensor = lambda: self
        self.supports = lambda option: True
        self.query_devices = lambda: [SimpleNamespace(get_info=lambda what, s=s: s) for s in ("111", "222")]

    def enable_device(self, serial):
        self.serial = serial

    def enable_stream(self, *stream):
        self.asked = stream

    def start(self, config):
        if self.asked[1:3] != (8, 6):
            raise RuntimeError("Couldn't resolve requests")
        return self

    def set_option(self, option, value):
        self.options[option] = value

    def wait_for_frames(self, timeout):
        if not self.picture:
            raise RuntimeError(f"Frame didn't arrive within {timeout}")
        return self

    def get_color_frame(self):
        taken = 1e3 * (time.time() - self.age)
        return SimpleNamespace(
            get_data=lambda: np.full((6, 8, 3), 7, np.uint8), get_frame_number=lambda: 42,
            get_timestamp=lambda: taken, get_frame_timestamp_domain=lambda: self.domain,
        )  # fmt: skip

    def stop(self):
        self.stopped += 1


class Device:
    """A webcam with a folder of links to it, as udev makes them."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.set, self.now = folder, monkeypatch.setattr, 1000.0
        image = np.zeros((6, 8, 3), np.uint8) + np.array([1, 2, 3], np.uint8)
        self.has(image=image, clock=lambda: self.now, delay=0.03, opened=[])
        monkeypatch.setitem(sys.modules, "cv2", cv2_stand_in)
        monkeypatch.setattr(v4l2_camera, "BY_ID", str(folder / "by-id"))
        (folder / "by-id").mkdir()
        for k in (0, 2):
            (folder / f"video{k}").touch()
        self.link = self.named("usb-046d_C920_ABC12-video-index0", 0)
        self.named("usb-046d_C920_ABC12-video-index1", 1)

    def named(self, name, number):
        link = self.folder / "by-id" / name
        link.symlink_to(self.folder / f"video{number}")
        return link

    def has(self, **attributes):
        for name, value in attributes.items():
            self.set(VideoCapture, name, staticmethod(value) if name == "clock" else value)

    def opened(self, device="ABC12", **more):
        camera = V4L2Camera(device, 8, 6, **more)
        camera.open(lambda: self.now)
        return camera


@pytest.fixture
def device(tmp_path, monkeypatch):
    return Device(tmp_path, monkeypatch)


@pytest.fixture
def library(monkeypatch):
    made = RealSense()
    monkeypatch.setitem(sys.modules, "pyrealsense2", made)
    return made


def realsense(serial="222", width=8, **more):
    camera = RealSenseCamera(serial, width, 6, **more)
    camera.open(lambda: 500.0)
    return camera


def fake(**more):
    camera = FakeCamera(**{"height": 12, "width": 16, "rate": 200.0, **more})
    camera.open(time.monotonic)
    return camera


def test_a_picture_of_v4l2_is_rgb_with_the_kernels_stamp(device):
    made = device.opened()
    device.now = 1010.0
    first, second = made.read(), made.read()
    assert first.image.tolist() == [[[3, 2, 1]] * 8] * 6
    assert (first.stamp, first.number, second.number) == (pytest.approx(1009.97), 1, 2)
    device.has(delay=1.5)  # the reader stood still: the picture is as old as it is
    assert made.read().stamp == pytest.approx(1008.5)
    made.close()
    assert VideoCapture.opened[0].released


def test_a_picture_of_a_realsense_has_the_cameras_number_and_its_stamp_on_the_clock_of_open(library):
    camera = realsense()
    frame = camera.read()
    assert (frame.number, frame.image.shape, int(frame.image[0, 0, 0])) == (42, (6, 8, 3), 7)
    assert frame.stamp == pytest.approx(499.95, abs=0.02)
    assert (library.serial, library.asked) == ("222", ("color", 8, 6, "rgb8", 30))
    library.age = 3600.0
    with pytest.raises(CameraError, match="3600"):  # the computer's clock was set
        camera.read()
    camera.close()
    assert library.stopped == 1


def test_stamps_of_another_clock_are_replaced_by_the_time_of_the_read(device, library):
    made = device.opened()
    device.has(delay=-1.7e9)
    assert made.read().stamp == 1000.0
    library.domain, library.age = "hardware_clock", 1.7e9
    assert realsense().read().stamp == 500.0


def test_exposure_and_white_balance_are_set_or_made_automatic(device, library):
    device.opened(exposure=150, white_balance=4600)
    device.opened()
    set_ones, automatic = (camera.values for camera in VideoCapture.opened)
    assert (set_ones["AUTO_EXPOSURE"], set_ones["EXPOSURE"]) == (1, 150)
    assert (set_ones["AUTO_WB"], set_ones["WB_TEMPERATURE"]) == (0, 4600)
    assert (automatic["AUTO_EXPOSURE"], automatic["AUTO_WB"]) == (3, 1)
    device.has(refuses={"EXPOSURE"})
    device.opened()
    with pytest.raises(CameraError, match=r"does not take exposure 150.*--list-ctrls"):
        device.opened(exposure=150)
    realsense(exposure=8000, white_balance=4600)
    assert library.options == {"global_time_enabled": 1, "enable_auto_exposure": 0, "exposure": 8000,
                               "enable_auto_white_balance": 0, "white_balance": 4600}  # fmt: skip
    realsense()
    assert (library.options["enable_auto_exposure"], library.options["enable_auto_white_balance"]) == (1, 1)
    with pytest.raises(CameraError, match=r"serial '333': no such camera \(111, 222 found\)"):
        realsense("333")


def test_a_camera_is_found_by_its_serial_number_where_it_is_plugged_in_anew(device):
    device.opened().close()
    device.link.unlink()
    with pytest.raises(CameraError, match="'ABC12': no such camera"):
        device.opened()
    device.link.symlink_to(device.folder / "video2")
    device.opened()
    device.opened(str(device.link))
    assert [os.path.basename(camera.path) for camera in VideoCapture.opened] == ["video0", "video2", "video2"]
    device.named("usb-046d_C920_XYZ-video-index0", 2)
    with pytest.raises(CameraError, match=r"2 cameras have this in their names.*C920_ABC12.*C920_XYZ"):
        device.opened("C920")


@pytest.mark.parametrize(
    "fixed", [{"FRAME_WIDTH": 16.0}, {"FPS": 15.0}, {"FOURCC": float(int.from_bytes(b"YUYV", "little"))}]
)
def test_a_camera_that_takes_another_format_is_named_with_what_it_gives(device, fixed):
    device.has(fixed=fixed)
    with pytest.raises(CameraError, match=r"gives .* not 8 x 6 at 30 Hz as MJPG. Set .*--list-formats-ext"):
        device.opened()


def test_no_picture_and_one_of_another_size_are_errors(device, library):
    made, real, faked = device.opened(), realsense(), fake()
    device.has(image=np.zeros((6, 9, 3), np.uint8))
    with pytest.raises(CameraError, match="9 x 6 pixels came"):
        made.read()
    device.has(image=None)
    library.picture, faked.stopped = False, True
    for camera in (made, real, faked):
        began = time.monotonic()
        with pytest.raises(CameraError, match="no picture within 1 s"):
            camera.read()
        assert time.monotonic() - began < READ_WITHIN + 0.5
