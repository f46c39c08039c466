"""How many batches are drawn as one piece."""

from __future__ import annotations

import pytest

from serl_chunk.learner.trainers.phases import PIECE_BYTES, SCAN, updates_at_once
from serl_chunk.types import CameraSpec


@pytest.mark.parametrize(("size", "batch", "expected"), [(48, 64, SCAN), (128, 256, 10), (480, 256, 1)])
def test_large_images_come_in_smaller_pieces(size, batch, expected):
    camera = CameraSpec("top", size, size)
    assert updates_at_once(batch, [camera]) == expected
    assert expected == 1 or 2 * expected * batch * size * size * 3 <= PIECE_BYTES


def test_without_cameras_pieces_are_as_long_as_they_may_be():
    assert updates_at_once(256, []) == SCAN
