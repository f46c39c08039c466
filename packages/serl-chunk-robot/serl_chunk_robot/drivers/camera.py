"""What a camera is: four methods of one class, which a process of its own calls.

A camera of a lab is one class in one file (`driver = "my_camera.py:MyCamera"` in a table [[camera]] of robot.toml). The
robot's server makes it too, for its `spec` alone: import a vendor's library in `open`, not at the top of the file.
`drivers/fake_camera.py` is one to copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

READ_WITHIN = 1.0  # s: how long `read` may wait


class CameraSpec(NamedTuple):
    """The size of a camera's pictures, in pixels.

    `noisy`: two pictures of a scene in which nothing moves differ, as those of every sensor do. A picture that is
    repeated is then as old as when it came first: the camera is frozen. False for a drawn scene.
    """

    height: int
    width: int
    noisy: bool = True


class Frame(NamedTuple):
    """One picture."""

    image: np.ndarray  # uint8[H, W, 3], RGB; may be overwritten by the next `read`
    stamp: float  # s on the clock that `open` was given: when it was taken
    number: int  # rises by one with each picture of the camera, also of those that were not read


class CameraError(Exception):
    """The camera does not give what it was asked for, in one sentence."""


class Camera(Protocol):
    """One camera. What `open` or `read` raises is logged, and the camera is opened anew in another process."""

    def spec(self) -> CameraSpec:
        """Describe the pictures; opens nothing."""

    def open(self, clock: Any) -> None:
        """Open the camera. `clock()` is the machine's monotonic clock, seconds."""

    def read(self) -> Frame:
        """Wait for the next picture, for READ_WITHIN seconds at most, and return it."""

    def close(self) -> None:
        """Close the camera."""
