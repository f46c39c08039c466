"""A camera of Linux, by OpenCV: a webcam, or any other device /dev/videoN that gives colour pictures."""

from __future__ import annotations

import os
from typing import Any, Callable, Optional

import numpy as np

from serl_chunk_robot.drivers.base import linked, vendor
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError, CameraSpec, Frame

BY_ID = "/dev/v4l/by-id"  # links with the serial number of each camera, which udev makes
BUFFERS = 2  # one is filled while the other is read: with a single one, cameras drop every second picture
AUTO, MANUAL = 3, 1  # of V4L2's exposure
OURS = 1.0  # s: a driver's stamp that is as close to the monotonic clock is of that clock


class V4L2Camera:
    """A camera that OpenCV opens with its V4L2 backend.

    A picture's stamp is the kernel's where that is of the monotonic clock, and the time of the read else. OpenCV does
    not report pictures that were not read: `number` counts those that were.

    Args:
        device: a path, or part of the camera's name in /dev/v4l/by-id, as its serial number. /dev/videoN may be another
            camera after each start of the machine.
        fps: pictures a second.
        fourcc: the format in which the camera sends. Few cameras send 640 x 480 YUYV at 30 Hz next to three others.
        exposure: as V4L2 counts, mostly 0.1 ms; default: automatic.
        white_balance: K; default: automatic.
        noisy: False for a source that repeats the picture of a still scene, as a screen that is grabbed.

    Raises ValueError: no device, size, rate or format.
    """

    def __init__(
        self, device: str, width: int = 640, height: int = 480, fps: float = 30.0, fourcc: str = "MJPG",
        exposure: Optional[float] = None, white_balance: Optional[float] = None, noisy: bool = True,
    ) -> None:  # fmt: skip
        if not device or min(width, height) < 1 or not fps > 0 or len(fourcc) != 4:
            raise ValueError("a camera has a device, a width, a height and a rate above 0, and four letters of format")
        self._device, self._spec, self._fps, self._fourcc = device, CameraSpec(height, width, noisy), fps, fourcc
        self._exposure, self._white_balance = exposure, white_balance
        self._capture: Any = None

    def spec(self) -> CameraSpec:
        return self._spec

    def open(self, clock: Callable[[], float]) -> None:
        """Open the device. Raises CameraError with the command or the setting that helps."""
        path = find(self._device)
        # Read when the library is loaded. Its 10 s are longer than a read may take.
        os.environ.setdefault("OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT", str(int(READ_WITHIN)))
        cv2 = vendor("cv2", CameraError, "Run: pip install opencv-python-headless")
        self._cv2, self._clock, self._number = cv2, clock, 0
        self._stamped: Optional[bool] = None  # whether the driver's stamps are of the monotonic clock
        self._image = np.empty((self._spec.height, self._spec.width, 3), np.uint8)
        self._capture = cv2.VideoCapture(path, cv2.CAP_V4L2)
        if not self._capture.isOpened():
            raise CameraError(f"{path} is no camera, or another program has it open. Run: fuser -v {path}")
        self._set_format(path)
        self._set_light(path)

    def read(self) -> Frame:
        got, image = self._capture.read()
        now = self._clock()
        if not got:
            raise CameraError(f"no picture within {READ_WITHIN:g} s")
        if image.shape != self._image.shape:
            raise CameraError(f"a picture of {image.shape[1]} x {image.shape[0]} pixels came")
        stamp = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1e3
        if self._stamped is None:
            self._stamped = abs(now - stamp) < OURS
        self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB, self._image)
        self._number += 1
        return Frame(self._image, stamp if self._stamped else now, self._number)

    def close(self) -> None:
        if self._capture is not None:
            self._capture.release()

    def _set_format(self, path: str) -> None:
        cv2, wanted = self._cv2, self._spec
        self._capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter_fourcc(*self._fourcc))  # first: sizes depend on it
        for prop, value in (
            (cv2.CAP_PROP_FRAME_WIDTH, wanted.width),
            (cv2.CAP_PROP_FRAME_HEIGHT, wanted.height),
            (cv2.CAP_PROP_FPS, self._fps),
            (cv2.CAP_PROP_BUFFERSIZE, BUFFERS),
        ):
            self._capture.set(prop, value)
        get = self._capture.get
        letters = int(get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little").decode(errors="replace")
        got = int(get(cv2.CAP_PROP_FRAME_WIDTH)), int(get(cv2.CAP_PROP_FRAME_HEIGHT)), letters
        if got != (wanted.width, wanted.height, self._fourcc) or abs(get(cv2.CAP_PROP_FPS) - self._fps) > 0.5:
            raise CameraError(
                f"{path} gives {got[0]} x {got[1]} pixels at {get(cv2.CAP_PROP_FPS):g} Hz as {letters}, not "
                f"{wanted.width} x {wanted.height} at {self._fps:g} Hz as {self._fourcc}. Set width, height, fps and "
                f"fourcc to what it can, as listed by: v4l2-ctl -d {path} --list-formats-ext"
            )

    def _set_light(self, path: str) -> None:
        """Set exposure and white balance, also to automatic: the camera keeps what another program has set."""
        cv2 = self._cv2
        for name, value, switch, values, prop in (
            ("exposure", self._exposure, cv2.CAP_PROP_AUTO_EXPOSURE, (AUTO, MANUAL), cv2.CAP_PROP_EXPOSURE),
            ("white_balance", self._white_balance, cv2.CAP_PROP_AUTO_WB, (1, 0), cv2.CAP_PROP_WB_TEMPERATURE),
        ):
            switched = self._capture.set(switch, values[value is not None])
            if value is not None and not (switched and self._capture.set(prop, value)):
                raise CameraError(f"{path} does not take {name} {value:g}. Valid: v4l2-ctl -d {path} --list-ctrls")


def find(device: str) -> str:
    """Return the path of a device that `V4L2Camera` names. Raises CameraError for none, or one that it may not open."""
    # Not a camera's further devices, as that of its metadata.
    path = os.path.realpath(linked(device, BY_ID, "*-video-index0", "camera", CameraError))
    if not os.access(path, os.R_OK | os.W_OK):
        raise CameraError(f"{path}: not permitted. Run: sudo usermod -aG video $USER, and log in again")
    return path
