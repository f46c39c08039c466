"""Frames of a run's journal that stay there until somebody looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from serl_chunk.data.frames import Encoded, Frames, decode_image
from serl_chunk.learner.run_segments import Segment
from serl_chunk.types import DataError


class Piece(NamedTuple):
    """Where the bytes of one frame lie: in a file, or here where the message held them in its header."""

    segment: int  # names the file
    offset: int
    size: int
    jpeg: bool  # a JPEG file; else the pixels
    data: bytes | None = None


class JournalFrames(Frames):
    """Frames in the segments of a journal.

    Args:
        shape: [H, W, 3].
        pieces: of each frame.
        segments: by their numbers, those of the pieces at least; old ones are dropped unless they are held.
        where: begins every error.
    """

    def __init__(
        self, shape: tuple[int, int, int], pieces: list[Piece], segments: Mapping[int, Segment], where: str
    ) -> None:
        super().__init__(shape, np.arange(len(pieces)))
        self._pieces, self._where = pieces, where
        self._segments = {n: segments[n] for n in {p.segment for p in pieces if p.data is None}}

    def decode(self, at: int) -> np.ndarray:
        """See Frames."""
        piece, shape = self._pieces[at], self.shape[1:]
        data = self._read(piece)
        if piece.jpeg:
            return decode_image(data, f"{self._where}, frame {at}", shape)
        return np.frombuffer(data, np.uint8).reshape(shape)

    def encoded_at(self, at: int) -> Encoded | None:
        """See Frames."""
        piece = self._pieces[at]
        return Encoded("jpeg", self._read(piece)) if piece.jpeg else None

    def _read(self, piece: Piece) -> bytes:
        if piece.data is not None:
            return piece.data
        segment = self._segments[piece.segment]
        data = segment.read(piece.offset, piece.size, self._where)
        if len(data) != piece.size:
            raise DataError(f"{self._where}: {segment.path} ends inside a frame; it was cut since it was indexed")
        return data
