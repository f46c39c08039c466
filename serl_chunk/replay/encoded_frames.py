"""Frames of one camera that arrived encoded: they are decoded for a batch, not by the thread that receives them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from serl_chunk.data.frames import Frames
from serl_chunk.types import DataError

log = logging.getLogger(__name__)

_LOGGED = 3  # frames that could not be decoded and are logged one by one


class EncodedFrames:
    """Which slots of `images` uint8[K, H, W, 3] wait for their frame, and what they wait for.

    Its caller holds the replay's lock. A frame that was decoded is held decoded alone; until then its slot of `images`
    was never touched and takes no memory, and its file, which is smaller, does.
    """

    def __init__(self, images: np.ndarray, camera: str) -> None:
        self._images, self._camera = images, camera
        self._waiting: dict[int, Any] = {}
        self.undecodable = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, slots: np.ndarray, values: Any) -> None:
        """Frame k of `values` uint8[N, H, W, 3] belongs in slot k of `slots`; of JPEG files once it is asked for."""
        if isinstance(values, np.ndarray | Frames):
            self._images[slots] = np.asarray(values)
            return
        for i, slot in enumerate(slots.tolist()):
            self._waiting[slot] = values[i : i + 1]

    def drop(self, slots: np.ndarray) -> None:
        """These slots are free, or hold other frames now."""
        if self._waiting:
            for slot in slots.tolist():
                self._waiting.pop(slot, None)

    def settle(self, slots: np.ndarray) -> None:
        """Decode what waits for these slots. A frame that cannot be is black: its other steps are worth keeping."""
        if not self._waiting:
            return
        for slot in set(slots.tolist()) & self._waiting.keys():
            values = self._waiting.pop(slot)
            try:
                self._images[slot] = values[0]
            except DataError as error:
                self._images[slot] = 0
                self.undecodable += 1
                if self.undecodable <= _LOGGED:
                    log.error("camera %s: a frame of an actor cannot be decoded, and is black: %s", self._camera, error)
