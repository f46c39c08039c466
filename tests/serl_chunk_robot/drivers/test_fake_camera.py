"""The fake camera keeps the contract of cameras, at its rate and without two equal pictures."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from serl_chunk_robot.drivers.camera import READ_WITHIN, CameraError
from serl_chunk_robot.drivers.fake_camera import FakeCamera


def opened(**more):
    camera = FakeCamera(**{"height": 12, "width": 16, "rate": 200.0, **more})
    camera.open(time.monotonic)
    return camera


def test_pictures_differ_and_have_rising_numbers_and_stamps():
    camera = opened()
    assert camera.spec()[:2] == (12, 16)
    frames = [(f.image.copy(), f.stamp, f.number) for f in (camera.read() for _ in range(40))]
    for (image, stamp, number), (after, later, next_number) in itertools.pairwise(frames):
        assert (image.dtype, image.shape) == (np.uint8, (12, 16, 3))
        assert not np.array_equal(image, after)
        assert later > stamp
        assert next_number > number
    assert frames[-1][1] - frames[0][1] > 0.9 * 39 / 200
    camera.close()


def test_a_late_reader_misses_pictures_and_gets_no_old_one():
    camera = opened()
    first = camera.read().number
    time.sleep(0.1)
    late = camera.read()
    assert late.number >= first + 19
    assert time.monotonic() - late.stamp < 0.05


def test_a_frozen_one_repeats_its_picture_with_new_stamps():
    camera = opened()
    camera.read()
    camera.frozen = True
    first = camera.read()
    image, stamp = first.image.copy(), first.stamp
    again = camera.read()
    assert np.array_equal(again.image, image)
    assert again.stamp > stamp


def test_a_stopped_one_gives_up_in_time():
    camera = opened()
    camera.stopped = True
    began = time.monotonic()
    with pytest.raises(CameraError, match="no picture within 1 s"):
        camera.read()
    assert time.monotonic() - began < READ_WITHIN + 0.5


@pytest.mark.parametrize("options", [{"height": 0}, {"width": 8}, {"rate": 0.0}])
def test_sizes_and_rates_that_give_no_picture_are_refused(options):
    with pytest.raises(ValueError, match="a picture has"):
        FakeCamera(**options)
