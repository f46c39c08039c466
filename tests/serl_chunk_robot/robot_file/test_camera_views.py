"""Views of a camera's pictures: which pixels they show, and what their tables may hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk_robot.drivers.camera import CameraSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.camera_views import FLIPS, TURNS, View, read_view
from serl_chunk_robot.robot_file.toml_file import Table

DEVICE = CameraSpec(6, 8)
IMAGE = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)


def read(**values):
    return read_view(Table(Path("robot.toml"), "camera[0]", values, None), DEVICE)


def by_area(image, size, axis):
    """Means over equal parts of an axis, from a matrix of the share of each pixel in each part."""
    length = image.shape[axis]
    edges = np.arange(size + 1) * length / size
    low, high = np.maximum(edges[:-1, None], np.arange(length)), np.minimum(edges[1:, None], np.arange(length) + 1)
    return np.moveaxis(np.tensordot(np.maximum(high - low, 0) * size / length, image, (1, axis)), 0, axis)


@given(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 2)), st.sampled_from(TURNS),
    st.sampled_from(("", *FLIPS)),
)  # fmt: skip
def test_each_pixel_is_where_crop_rotation_and_flip_lead_it(crop, rotate, flip):
    view = View(crop, rotate, flip)
    x, y, width, height = crop
    shown = view.apply(IMAGE)
    size = view.size(DEVICE)
    assert shown.shape == (size.height, size.width, 3)
    assert shown.flags.c_contiguous
    for i in range(height):
        for j in range(width):
            turned = {0: (i, j), 90: (j, height - 1 - i), 180: (height - 1 - i, width - 1 - j), 270: (width - 1 - j, i)}
            row, column = turned[rotate]
            if flip:
                across = flip == "horizontal"
                row, column = (row, size.width - 1 - column) if across else (size.height - 1 - row, column)
            assert np.array_equal(shown[row, column], IMAGE[y + i, x + j])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_a_resized_pixel_is_the_mean_of_its_area(height, width, rows, columns):
    image = np.random.default_rng(height * 20 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    shown = View(resize=(rows, columns)).apply(image).astype(float)
    exact = by_area(by_area(image.astype(float), rows, 0), columns, 1)
    assert np.abs(shown - exact).max() < 0.5 + 1e-3


def test_a_crop_is_as_hil_serl_writes_it_and_nothing_to_change_copies_nothing():
    assert np.array_equal(read(crop=[3, 1, 4, 2]).apply(IMAGE), IMAGE[1:3, 3:7])
    assert View().apply(IMAGE) is IMAGE
    assert View().size(DEVICE) == DEVICE


NOT_WITHIN = [{"crop": x} for x in ([0, 0, 9, 2], [0, 5, 2, 2], [-1, 0, 2, 2], [0, 0, 0, 2])]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        *((each, "within 8 x 6 pixels") for each in NOT_WITHIN), ({"crop": [0, 0, 2.0, 2]}, "4 whole numbers"),
        ({"crop": 3}, "4 whole numbers"), *(({"rotate": x}, "0, 90, 180 or 270") for x in (45, True)),
        ({"flip": "both"}, "horizontal or vertical"), ({"resize": [128]}, "2 whole numbers"),
        ({"resize": [0, 128]}, "above 0"),
    ],
)  # fmt: skip
def test_a_view_that_cannot_be_is_refused_with_its_key(values, named):
    with pytest.raises(ConfigError, match=named) as raised:
        read(**values)
    assert raised.value.parameter == f"camera[0].{next(iter(values))}"
