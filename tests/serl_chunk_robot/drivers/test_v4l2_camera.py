"""The camera of OpenCV, with a stand-in of the library: a device that takes settings and gives one picture a read."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest

from serl_chunk_robot.drivers import v4l2_camera
from serl_chunk_robot.drivers.camera import CameraError, CameraSpec
from serl_chunk_robot.drivers.v4l2_camera import V4L2Camera

PROPERTIES = ("AUTO_EXPOSURE", "AUTO_WB", "BUFFERSIZE", "EXPOSURE", "FOURCC", "FPS", "FRAME_HEIGHT", "FRAME_WIDTH",
              "POS_MSEC", "WB_TEMPERATURE")  # fmt: skip


class Device:
    """A camera as OpenCV shows it. Class attributes are what the test gives it."""

    opened: list[str]
    refuses: set[str]  # properties
    fixed: dict[str, float]  # that it has whatever is set
    delay = 0.03  # s between the stamp and the read
    image: np.ndarray | None

    def __init__(self, path, backend):
        assert backend == "V4L2"
        self.opened.append(path)
        self.values: dict[str, float] = {}
        Device.last = self

    def isOpened(self):
        return True

    def set(self, name, value):
        if name not in self.refuses:
            self.values[name] = value
        return name not in self.refuses

    def get(self, name):
        if name == "POS_MSEC":
            return 1e3 * (Device.now - self.delay)
        return {**self.values, **self.fixed}[name]

    def read(self):
        return self.image is not None, self.image

    def release(self):
        self.released = True


def clock():
    return Device.now


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A folder of links to one camera, /dev/video0."""
    Device.opened, Device.refuses, Device.fixed, Device.now = [], set(), {}, 1000.0
    Device.delay, Device.image = 0.03, np.zeros((6, 8, 3), np.uint8) + np.array([1, 2, 3], np.uint8)
    library = types.ModuleType("cv2")
    for name in PROPERTIES:
        setattr(library, "CAP_PROP_" + name, name)
    library.CAP_V4L2, library.COLOR_BGR2RGB, library.VideoCapture = "V4L2", "BGR2RGB", Device
    library.VideoWriter_fourcc = lambda *letters: int.from_bytes("".join(letters).encode(), "little")
    library.cvtColor = lambda image, code, into: np.copyto(into, image[:, :, ::-1])
    monkeypatch.setitem(sys.modules, "cv2", library)
    monkeypatch.setattr(v4l2_camera, "BY_ID", str(tmp_path / "by-id"))
    (tmp_path / "by-id").mkdir()
    for k in (0, 2):
        (tmp_path / f"video{k}").touch()
    link = tmp_path / "by-id" / "usb-046d_C920_ABC12-video-index0"
    link.symlink_to(tmp_path / "video0")
    link.with_name("usb-046d_C920_ABC12-video-index1").symlink_to(tmp_path / "video1")
    return link


def camera(device="ABC12", **more):
    return V4L2Camera(device, 8, 6, **more)


def test_a_picture_is_rgb_with_the_kernels_stamp(device):
    made = camera()
    made.open(clock)
    Device.now = 1010.0
    first, second = made.read(), made.read()
    assert first.image.tolist() == [[[3, 2, 1]] * 8] * 6
    assert (first.stamp, first.number, second.number) == (pytest.approx(1009.97), 1, 2)
    Device.delay = 1.5  # the reader stood still: the picture is as old as it is
    assert made.read().stamp == pytest.approx(1008.5)
    made.close()
    assert Device.last.released


def test_a_stamp_of_another_clock_is_replaced_by_the_time_of_the_read(device):
    made = camera()
    made.open(clock)
    Device.delay = -1.7e9
    assert made.read().stamp == 1000.0


def test_a_camera_is_found_by_its_serial_number_where_it_is_plugged_in_anew(device, tmp_path):
    made = camera()
    made.open(clock)
    made.close()
    device.unlink()
    with pytest.raises(CameraError, match="'ABC12': no such camera"):
        camera().open(clock)
    device.symlink_to(tmp_path / "video2")
    camera().open(clock)
    camera(str(device)).open(clock)
    assert [os.path.basename(path) for path in Device.opened] == ["video0", "video2", "video2"]


def test_two_cameras_of_the_same_name_are_not_guessed_between(device, tmp_path):
    (device.parent / "usb-046d_C920_XYZ-video-index0").symlink_to(tmp_path / "video2")
    with pytest.raises(CameraError, match=r"2 cameras have this in their names.*C920_ABC12.*C920_XYZ"):
        camera("C920").open(clock)


def test_exposure_and_white_balance_are_set_or_made_automatic(device):
    camera(exposure=150, white_balance=4600).open(clock)
    values = Device.last.values
    assert (values["AUTO_EXPOSURE"], values["EXPOSURE"]) == (1, 150)
    assert (values["AUTO_WB"], values["WB_TEMPERATURE"]) == (0, 4600)
    camera().open(clock)
    assert (Device.last.values["AUTO_EXPOSURE"], Device.last.values["AUTO_WB"]) == (3, 1)
    Device.refuses = {"EXPOSURE"}
    camera().open(clock)
    with pytest.raises(CameraError, match=r"does not take exposure 150.*--list-ctrls"):
        camera(exposure=150).open(clock)


@pytest.mark.parametrize(
    "fixed", [{"FRAME_WIDTH": 16.0}, {"FPS": 15.0}, {"FOURCC": float(int.from_bytes(b"YUYV", "little"))}]
)
def test_a_camera_that_takes_another_format_is_named_with_what_it_gives(device, fixed):
    Device.fixed = fixed
    with pytest.raises(CameraError, match=r"gives .* not 8 x 6 at 30 Hz as MJPG. Set .*--list-formats-ext"):
        camera().open(clock)


def test_no_picture_and_one_of_another_size_are_errors(device):
    made = camera()
    made.open(clock)
    Device.image = np.zeros((6, 9, 3), np.uint8)
    with pytest.raises(CameraError, match="9 x 6 pixels came"):
        made.read()
    Device.image = None
    with pytest.raises(CameraError, match="no picture within 1 s"):
        made.read()


def test_missing_rights_and_a_missing_library_are_named_with_their_command(device, monkeypatch):
    monkeypatch.setattr(v4l2_camera.os, "access", lambda *_: False)
    with pytest.raises(CameraError, match="sudo usermod -aG video"):
        camera().open(clock)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(CameraError, match="pip install opencv-python-headless"):
        V4L2Camera(str(device), 8, 6).open(clock)


def test_pictures_of_a_still_scene_differ_unless_the_file_says_so():
    assert V4L2Camera("x", 8, 6).spec() == CameraSpec(6, 8, noisy=True)
    assert V4L2Camera("x", 8, 6, noisy=False).spec() == CameraSpec(6, 8, noisy=False)


@pytest.mark.parametrize("wrong", [{"device": ""}, {"width": 0}, {"fps": 0.0}, {"fourcc": "MJPEG"}])
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="a camera has a device"):
        V4L2Camera(**{"device": "ABC12", **wrong})
