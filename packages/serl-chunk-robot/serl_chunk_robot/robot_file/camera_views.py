"""What a table [[camera]] of robot.toml shows of its device's pictures: a crop, turned, mirrored and resized."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from serl_chunk_robot.drivers.camera import CameraSpec
from serl_chunk_robot.robot_file.toml_file import Table

TURNS, FLIPS = (0, 90, 180, 270), ("horizontal", "vertical")


class View(NamedTuple):
    """Operations on a picture, in the order of the fields. The fields are keys of a table [[camera]]."""

    crop: Optional[Tuple[int, int, int, int]] = None  # x, y, width and height, in the device's pixels
    rotate: int = 0  # degrees clockwise: one of TURNS
    flip: str = ""  # one of FLIPS: left and right, or top and bottom, change places
    resize: Optional[Tuple[int, int]] = None  # height and width; a pixel is the mean of the area that it covers

    def size(self, device: CameraSpec) -> CameraSpec:
        height, width = device.height, device.width
        if self.crop is not None:
            _, _, width, height = self.crop
        if self.rotate in (90, 270):
            height, width = width, height
        if self.resize is not None:
            height, width = self.resize
        return CameraSpec(height, width, device.noisy)

    def apply(self, image: np.ndarray) -> np.ndarray:
        """Return the view of a picture, uint8[H, W, 3]; the picture itself where nothing is changed."""
        if self.crop is not None:
            x, y, width, height = self.crop
            image = image[y : y + height, x : x + width]
        if self.rotate:
            image = np.rot90(image, -self.rotate // 90)
        if self.flip:
            image = image[:, ::-1] if self.flip == "horizontal" else image[::-1]
        if self.resize is not None:
            rows = np.ascontiguousarray(_averaged(image, self.resize[0]).swapaxes(0, 1))
            image = (_averaged(rows, self.resize[1]) + 0.5).astype(np.uint8).swapaxes(0, 1)
        return np.ascontiguousarray(image)


def read_view(table: Table, device: CameraSpec) -> View:
    """Read a view of a device. Raises ConfigError, as for a crop that is not within the device's pictures."""
    crop, turn, flip = _pixels(table, "crop", 4), table.values.get("rotate", 0), table.values.get("flip", "")
    if crop is not None:
        x, y, width, height = crop
        if min(x, y) < 0 or min(width, height) < 1 or x + width > device.width or y + height > device.height:
            raise table.wrong("crop", f"x, y, width and height within {device.width} x {device.height} pixels")
    if type(turn) is not int or turn not in TURNS:
        raise table.wrong("rotate", "0, 90, 180 or 270 degrees, clockwise")
    if flip not in ("", *FLIPS):
        raise table.wrong("flip", " or ".join(FLIPS))
    resize = _pixels(table, "resize", 2)
    if resize is not None and min(resize) < 1:
        raise table.wrong("resize", "height and width above 0")
    part = None if crop is None else (crop[0], crop[1], crop[2], crop[3])
    return View(part, turn, flip, None if resize is None else (resize[0], resize[1]))


def _pixels(table: Table, key: str, count: int) -> Optional[List[int]]:
    value = table.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != count or not all(type(n) is int for n in value):
        raise table.wrong(key, f"a list of {count} whole numbers, pixels")
    return value


def _averaged(image: np.ndarray, size: int) -> np.ndarray:
    """Means over `size` equal parts of the rows, float32[size, W, 3]. An edge of a part may be within a pixel."""
    length = len(image)
    edges = np.arange(size + 1) * length / size
    pixel = np.minimum(edges.astype(int), length - 1)  # that each edge is in, and the share of it before the edge
    share = (edges - pixel).astype(np.float32)[:, None, None] * image[pixel]
    whole = np.add.reduceat(image, pixel[:-1], 0, dtype=np.float32)  # from the pixel of one edge to that of the next
    if pixel[-2] != pixel[-1]:
        whole[-1] -= image[-1]  # `reduceat` has it in the last part, and `share` too
    whole[pixel[:-1] == pixel[1:]] = 0.0  # `reduceat` has the whole pixel where both edges are in it
    return (whole + share[1:] - share[:-1]) * np.float32(size / length)  # type: ignore[no-any-return]
