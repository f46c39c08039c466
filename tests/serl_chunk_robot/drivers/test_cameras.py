"""The drivers of cameras with stand-ins of their libraries; their processes, started anew where they end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from robot_served import HERE, free_port, wait
from robot_served import served as served_robot

from serl_chunk_robot.client.client import RobotClient
from serl_chunk_robot.drivers import v4l2_camera
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError
from serl_chunk_robot.drivers.fake_camera import FakeCamera
from serl_chunk_robot.drivers.realsense_camera import RealSenseCamera
from serl_chunk_robot.drivers.v4l2_camera import V4L2Camera
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.streams import camera_children


class RealSense(types.ModuleType):
    """pyrealsense2 with two cameras, of which one gives 8 x 6 pixels at 30 Hz; one object is each of its classes."""

    def __init__(self):
        super().__init__("pyrealsense2")
        self.age, self.domain, self.options, self.picture, self.stopped = 0.05, "global_time", {}, True, 0
        self.option = self.camera_info = self.stream = self.format = self.timestamp_domain = self
        self.context = self.config = self.pipeline = self.get_device = self.first_color_sensor = lambda: self
        self.supports = lambda option: True
        self.query_devices = lambda: [SimpleNamespace(get_info=lambda what, s=s: s) for s in ("111", "222")]

    def __getattr__(self, name):
        return name

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
            get_data=lambda: np.full((6, 8, 3), 7, np.uint8),
            get_frame_number=lambda: 42,
            get_timestamp=lambda: taken,
            get_frame_timestamp_domain=lambda: self.domain,
        )

    def stop(self):
        self.stopped += 1


class Cv2(types.ModuleType):
    """OpenCV with a webcam of 8 x 6 pixels, which each capture is, and links to it, as udev makes them."""

    COLOR_BGR2RGB = "BGR2RGB"

    def __init__(self, folder):
        super().__init__("cv2")
        self.folder, self.now, self.delay, self.opened = folder, 1000.0, 0.03, []
        self.image = np.zeros((6, 8, 3), np.uint8) + np.array([1, 2, 3], np.uint8)  # None: no picture comes
        self.refuses, self.fixed, self.released = set(), {}, 0  # settings that are refused, and those it always has
        (folder / "by-id").mkdir()
        self.link = self.named("usb-046d_C920_ABC12-video-index0", 0)
        self.named("usb-046d_C920_ABC12-video-index1", 1)
        self.isOpened = lambda: True

    def __getattr__(self, name):
        if not name.startswith("CAP_"):
            raise AttributeError(name)
        return name.removeprefix("CAP_PROP_")

    def named(self, name, number):
        link = self.folder / "by-id" / name
        (self.folder / f"video{number}").touch()
        link.symlink_to(self.folder / f"video{number}")
        return link

    def camera(self, device="ABC12", **more):
        camera = V4L2Camera(device, 8, 6, **more)
        camera.open(lambda: self.now)
        return camera

    def VideoCapture(self, path, backend):
        self.opened.append(os.path.basename(path))
        self.values = {}
        return self

    def VideoWriter_fourcc(self, *letters):
        return int.from_bytes("".join(letters).encode(), "little")

    def cvtColor(self, image, code, into):
        np.copyto(into, image[:, :, ::-1])

    def set(self, name, value):
        self.values[name] = value
        return name not in self.refuses

    def get(self, name):
        return {**self.values, "POS_MSEC": 1e3 * (self.now - self.delay), **self.fixed}[name]

    def read(self):
        return self.image is not None, self.image

    def release(self):
        self.released += 1


@pytest.fixture
def device(tmp_path, monkeypatch):
    made = Cv2(tmp_path)
    monkeypatch.setitem(sys.modules, "cv2", made)
    monkeypatch.setattr(v4l2_camera, "BY_ID", str(tmp_path / "by-id"))
    return made


@pytest.fixture
def library(monkeypatch):
    made = RealSense()
    monkeypatch.setitem(sys.modules, "pyrealsense2", made)
    return made


def realsense(serial="222", width=8, **more):
    camera = RealSenseCamera(serial, width, 6, **more)
    camera.open(lambda: 500.0)
    return camera


def test_a_picture_of_v4l2_is_rgb_with_the_kernels_stamp_where_it_is_of_this_clock(device):
    made = device.camera()
    device.now = 1010.0
    first, second = made.read(), made.read()
    assert first.image.tolist() == [[[3, 2, 1]] * 8] * 6
    assert (first.stamp, first.number, second.number) == (pytest.approx(1009.97), 1, 2)
    device.delay = 1.5  # the reader stood still: the picture is as old as it is
    assert made.read().stamp == pytest.approx(1008.5)
    made.close()
    assert device.released == 1
    device.delay = -1.7e9
    assert device.camera().read().stamp == 1010.0


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
    library.domain, library.age = "hardware_clock", 1.7e9
    assert realsense().read().stamp == 500.0


def test_exposure_and_white_balance_are_set_or_made_automatic(device, library):
    device.camera(exposure=150, white_balance=4600)
    wanted = {"AUTO_EXPOSURE": 1, "EXPOSURE": 150, "AUTO_WB": 0, "WB_TEMPERATURE": 4600}
    assert device.values.items() >= wanted.items()
    device.refuses = {"EXPOSURE"}
    device.camera()
    assert device.values.items() >= {"AUTO_EXPOSURE": 3, "AUTO_WB": 1}.items()
    with pytest.raises(CameraError, match=r"does not take exposure 150.*--list-ctrls"):
        device.camera(exposure=150)
    realsense(exposure=8000, white_balance=4600)
    assert library.options == {"global_time_enabled": 1, "enable_auto_exposure": 0, "exposure": 8000,
                               "enable_auto_white_balance": 0, "white_balance": 4600}  # fmt: skip
    realsense()
    assert (library.options["enable_auto_exposure"], library.options["enable_auto_white_balance"]) == (1, 1)
    with pytest.raises(CameraError, match=r"serial '333': no such camera \(111, 222 found\)"):
        realsense("333")


def test_a_camera_is_found_by_its_serial_number_where_it_is_plugged_in_anew(device):
    device.camera().close()
    device.link.unlink()
    with pytest.raises(CameraError, match="'ABC12': no such camera"):
        device.camera()
    device.named(device.link.name, 2)
    device.camera()
    device.camera(str(device.link))
    assert device.opened == ["video0", "video2", "video2"]


@pytest.mark.parametrize("fixed", [{"FRAME_WIDTH": 16.0}, {"FPS": 15.0}, {"FOURCC": 0.0}])
def test_a_camera_that_takes_another_format_is_named_with_what_it_gives(device, fixed):
    device.fixed = fixed
    with pytest.raises(CameraError, match=r"gives .* not 8 x 6 at 30 Hz as MJPG. Set .*--list-formats-ext"):
        device.camera()


def test_no_picture_and_one_of_another_size_are_errors(device, library):
    made, real, faked = device.camera(), realsense(), FakeCamera(12, 16, 200.0)
    faked.open(time.monotonic)
    device.image = np.zeros((6, 9, 3), np.uint8)
    with pytest.raises(CameraError, match="9 x 6 pixels came"):
        made.read()
    device.image = None
    library.picture, faked.stopped = False, True
    for camera in (made, real, faked):
        began = time.monotonic()
        with pytest.raises(CameraError, match="no picture within 1 s"):
            camera.read()
        assert time.monotonic() - began < READ_WITHIN + 0.5


# Processes.

CAMERAS = """
import os, time
from pathlib import Path
from serl_chunk_robot.drivers.fake_camera import FakeCamera

class Faulty(FakeCamera):
    def __init__(self, fault=""):
        super().__init__(12, 16, 60.0)
        self.fault = fault

    def open(self, clock):
        super().open(clock)
        if self.fault == "open":
            raise OSError("no such device")

    def read(self):
        if self.fault == "exit":
            os._exit(3)
        return super().read()
"""


def robot_file(folder: Path, *options: str) -> Path:
    (folder / "faulty.py").write_text(CAMERAS)
    tables = "".join(f'[[camera]]\nname = "c{k}"\n{each}\n' for k, each in enumerate(options))
    path = folder / "robot.toml"
    path.write_text(f'name = "cell_{free_port()}"\ndriver = "fake"\nport = {free_port(2 + len(options))}\n{tables}')
    return path


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # what ended, and no one waited for, is gone as well


def test_one_that_ends_is_started_anew_with_its_reason_and_they_end_with_the_context(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="serl_chunk_robot")
    good, fails = 'driver = "fake"\nheight = 12\nwidth = 16', 'driver = "faulty.py:Faulty"\nfault = "{}"'
    file = load(robot_file(tmp_path, good, fails.format("open"), fails.format("exit")))
    first, *others = camera_children(file.cameras, HERE, None, "run")
    with Processes([first, *(child._replace(pause=60.0) for child in others)]) as cameras:
        killed = cameras._processes[0].process.pid
        wait(lambda: caplog.text.count("restarts_in=60s") == 2)
        os.kill(killed, signal.SIGSEGV)
        wait(lambda: "name=c0 reason=SIGSEGV restarts_in=1s" in caplog.text)
        wait(lambda: cameras._processes[0].process is not None)
        again = cameras.pids()
        assert killed not in again
    assert "name=c1 reason=OSError: no such device restarts_in=60s" in caplog.text
    assert "name=c2 reason=exit status 3 restarts_in=60s" in caplog.text
    assert not any(alive(pid) for pid in [killed, *again])


def test_views_of_one_device_come_from_one_process_at_the_same_moments(tmp_path):
    device = 'driver = "fake"\nheight = 12\nwidth = 16\nrate = 60'
    path = robot_file(tmp_path, device, 'of = "c0"\ncrop = [4, 2, 8, 10]\nrotate = 90', 'of = "c0"\nresize = [6, 8]')
    file = load(path)
    listed = [(c.name, c.spec.height, c.spec.width, c.port) for c in file.cameras]
    processes = Processes(camera_children(file.cameras, HERE, None, "run"))
    with served_robot(port=file.port, cameras=listed) as robot, processes as cameras:
        assert len(cameras.pids()) == 1
        client = robot.client()
        names = [name for name, *_ in client.cameras()]

        def look() -> bool:
            pictures = [client.newest_picture(name) for name in names]
            return None not in pictures and len({p.number for p in pictures}) == 1

        wait(look)
        whole, cut, small = (client._pictures[name] for name in names)
    assert whole.moment == cut.moment == small.moment
    assert np.array_equal(cut.image, np.rot90(whole.image[2:12, 4:12], -1))
    assert small.image.shape == (6, 8, 3)


SERVE = "import sys; from serl_chunk_robot.main import main; sys.exit(main(['serve', sys.argv[1]]))"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_of_a_camera_outlives_its_server(tmp_path, number):
    view = 'crop = [4, 2, 8, 10]\nrotate = 90\nflip = "vertical"'
    path = robot_file(tmp_path, f'driver = "fake"\nheight = 12\nwidth = 16\n{view}')
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(path)], stderr=subprocess.DEVNULL, env=environment)
    try:
        with RobotClient(f"{HERE}:{load(path).port}", name="a", answer=60.0) as client:
            assert [name for name, *_ in client.cameras()] == ["c0"]
            assert client.views() == {"c0": [4, 2, 8, 10, 90, "vertical"]}
            wait(lambda: client.newest_picture("c0") is not None, 60)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, check=False)
        pids = [*map(int, listed.stdout.split())]
        assert len(pids) == 2  # the front's too
        server.send_signal(number)
        server.wait(20)
        wait(lambda: not any(alive(pid) for pid in pids), 5)
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_camera_whose_library_hangs_is_ended_and_started_anew(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="serl_chunk_robot")
    path = robot_file(tmp_path, 'driver = "faulty.py:Hangs"')
    code = "\nclass Hangs(Faulty):\n    def read(self):\n        time.sleep(1000)\n"
    (tmp_path / "faulty.py").write_text(CAMERAS + code)
    with Processes(camera_children(load(path).cameras, HERE, None, "run")):
        wait(lambda: "name=c0 reason=read does not return" in caplog.text, 20)
