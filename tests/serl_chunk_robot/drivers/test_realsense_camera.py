"""The camera of librealsense, with a stand-in of pyrealsense2."""

from __future__ import annotations

import sys
import time
import types
from types import SimpleNamespace

import numpy as np
import pytest

from serl_chunk_robot.drivers.camera import CameraError
from serl_chunk_robot.drivers.realsense_camera import RealSenseCamera


class Library(types.ModuleType):
    """pyrealsense2 with two cameras, of which one gives 8 x 6 pixels at 30 Hz."""

    def __init__(self):
        super().__init__("pyrealsense2")
        self.age, self.domain, self.options, self.picture, self.stopped = 0.05, "global_time", {}, True, 0
        self.serials, self.limits = ["111", "222"], {}
        names = (
            "global_time_enabled",
            "enable_auto_exposure",
            "exposure",
            "enable_auto_white_balance",
            "white_balance",
        )
        self.option = SimpleNamespace(**{name: name for name in names})
        self.camera_info = SimpleNamespace(serial_number="serial_number")
        self.stream, self.format = SimpleNamespace(color="color"), SimpleNamespace(rgb8="rgb8")
        self.timestamp_domain = SimpleNamespace(hardware_clock="hardware_clock")
        self.config = lambda: self
        self.pipeline = lambda: self

    # What each class of the library is asked for; one object is all of them.
    def context(self):
        return self

    def query_devices(self):
        return [SimpleNamespace(get_info=lambda what, s=s: s) for s in self.serials]

    def enable_device(self, serial):
        self.serial = serial

    def enable_stream(self, *stream):
        self.asked = stream

    def start(self, config):
        if self.asked[1:3] != (8, 6):
            raise RuntimeError("Couldn't resolve requests")
        return self

    def get_device(self):
        return self

    def first_color_sensor(self):
        return self

    def supports(self, option):
        return True

    def set_option(self, option, value):
        if value > self.limits.get(option, 1e9):
            raise RuntimeError("out of range")
        self.options[option] = value

    def get_option_range(self, option):
        return SimpleNamespace(min=1.0, max=self.limits[option], step=1.0)

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


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "pyrealsense2", made)
    return made


def opened(serial="222", **more):
    camera = RealSenseCamera(serial, 8, 6, **more)
    camera.open(lambda: 500.0)
    return camera


def test_a_picture_has_the_cameras_number_and_its_stamp_on_the_clock_of_open(library):
    camera = opened()
    frame = camera.read()
    assert (frame.number, frame.image.shape, int(frame.image[0, 0, 0])) == (42, (6, 8, 3), 7)
    assert frame.stamp == pytest.approx(499.95, abs=0.02)
    assert (library.serial, library.asked) == ("222", ("color", 8, 6, "rgb8", 30))
    camera.close()
    assert library.stopped == 1


def test_stamps_of_the_cameras_own_clock_are_replaced_by_the_time_of_the_read(library):
    library.domain, library.age = "hardware_clock", 1.7e9
    assert opened().read().stamp == 500.0


def test_a_computer_whose_clock_was_set_is_noticed(library):
    camera = opened()
    library.age = 3600.0
    with pytest.raises(CameraError, match="3600"):
        camera.read()


def test_exposure_and_white_balance_are_set_or_made_automatic(library):
    opened(exposure=8000, white_balance=4600)
    assert library.options == {"global_time_enabled": 1, "enable_auto_exposure": 0, "exposure": 8000,
                               "enable_auto_white_balance": 0, "white_balance": 4600}  # fmt: skip
    opened()
    assert (library.options["enable_auto_exposure"], library.options["enable_auto_white_balance"]) == (1, 1)
    library.limits = {"exposure": 10000.0}
    with pytest.raises(CameraError, match="exposure 20000: expected 1 to 10000 in steps of 1"):
        opened(exposure=20000)


def test_what_is_missing_is_named_with_what_helps(library, monkeypatch):
    with pytest.raises(CameraError, match=r"serial '333': no such camera \(111, 222 found\)"):
        opened("333")
    with pytest.raises(CameraError, match=r"9 x 6 pixels at 30 Hz.*rs-enumerate-devices"):
        RealSenseCamera("222", 9, 6).open(lambda: 0.0)
    camera = opened()
    library.picture = False
    with pytest.raises(CameraError, match="no picture within 1 s"):
        camera.read()
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    with pytest.raises(CameraError, match="pip install pyrealsense2"):
        opened()


@pytest.mark.parametrize("wrong", [{"serial": ""}, {"serial": 817512070000}, {"fps": 0}, {"height": 0}])
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="a camera has a serial number, a text"):
        RealSenseCamera(**{"serial": "222", **wrong})
