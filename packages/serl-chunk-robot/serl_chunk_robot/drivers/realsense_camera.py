"""The colour camera of an Intel RealSense, by its serial number."""

from __future__ import annotations

import time
from typing import Any, Callable, Optional

import numpy as np

from serl_chunk_robot.drivers.base import vendor
from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError, CameraSpec, Frame


class RealSenseCamera:
    """A camera that pyrealsense2 opens.

    A picture's stamp is that of the camera's own clock, which librealsense maps to the computer's. Without that mapping
    it is the time of the read.

    Args:
        serial: number on the camera's housing, as a text.
        fps: pictures a second.
        exposure: microseconds; default: automatic.
        white_balance: K; default: automatic.

    Raises ValueError: no serial number, size or rate.
    """

    def __init__(
        self, serial: str, width: int = 640, height: int = 480, fps: int = 30,
        exposure: Optional[float] = None, white_balance: Optional[float] = None,
    ) -> None:  # fmt: skip
        if not isinstance(serial, str) or not serial or min(width, height, fps) < 1:
            raise ValueError("a camera has a serial number, a text, and a width, a height and a rate above 0")
        self._serial, self._spec, self._fps = serial, CameraSpec(height, width), fps
        self._exposure, self._white_balance = exposure, white_balance
        self._pipeline: Any = None

    def spec(self) -> CameraSpec:
        return self._spec

    def open(self, clock: Callable[[], float]) -> None:
        """Open the camera. Raises CameraError with the command or the setting that helps."""
        rs = vendor("pyrealsense2", CameraError, "Run: pip install pyrealsense2")
        self._rs, self._clock = rs, clock
        there = [device.get_info(rs.camera_info.serial_number) for device in rs.context().query_devices()]
        if self._serial not in there:
            raise CameraError(
                f"serial {self._serial!r}: no such camera ({', '.join(there) or 'none'} found). Plug it into a USB 3 "
                "port. If rs-enumerate-devices lists it for root alone, install librealsense's udev rules"
            )
        config, pipeline = rs.config(), rs.pipeline()
        config.enable_device(self._serial)
        config.enable_stream(rs.stream.color, self._spec.width, self._spec.height, rs.format.rgb8, self._fps)
        try:
            profile = pipeline.start(config)
        except RuntimeError as e:
            wanted = f"{self._spec.width} x {self._spec.height} pixels at {self._fps} Hz"
            raise CameraError(f"serial {self._serial!r} does not give {wanted} ({e}). Run: rs-enumerate-devices") from e
        self._pipeline = pipeline
        self._set_options(profile.get_device().first_color_sensor())

    def read(self) -> Frame:
        try:
            picture = self._pipeline.wait_for_frames(int(1e3 * READ_WITHIN)).get_color_frame()
        except RuntimeError as e:
            raise CameraError(f"no picture within {READ_WITHIN:g} s ({e})") from e
        now = self._clock()
        image = np.asanyarray(picture.get_data())
        return Frame(image, now - self._age(picture), picture.get_frame_number())

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()

    def _age(self, picture: Any) -> float:
        """Seconds since a picture was taken. Raises CameraError where its stamp is of another time of this computer."""
        if picture.get_frame_timestamp_domain() == self._rs.timestamp_domain.hardware_clock:
            return 0.0  # since the camera was connected, on its own clock
        age = time.time() - picture.get_timestamp() / 1e3
        if not -READ_WITHIN < age < 10 * READ_WITHIN:  # the computer's clock was set
            raise CameraError(f"its picture is {age:.1f} s old by this computer's clock")
        return age

    def _set_options(self, sensor: Any) -> None:
        """Set exposure and white balance, also to automatic: the camera keeps what another program has set."""
        option = self._rs.option
        if sensor.supports(option.global_time_enabled):
            sensor.set_option(option.global_time_enabled, 1)
        for name, value, switch, of in (
            ("exposure", self._exposure, option.enable_auto_exposure, option.exposure),
            ("white_balance", self._white_balance, option.enable_auto_white_balance, option.white_balance),
        ):
            try:
                sensor.set_option(switch, float(value is None))
                if value is not None:
                    sensor.set_option(of, value)
            except RuntimeError as e:
                if value is not None:
                    bounds = sensor.get_option_range(of)
                    valid = f"{bounds.min:g} to {bounds.max:g} in steps of {bounds.step:g}"
                    raise CameraError(f"{name} {value:g}: expected {valid} ({e})") from e
