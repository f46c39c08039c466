"""Frames of a run's journal that stay there until somebody looks at them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.frames import Encoded, Frames, decode_image
from serl_chunk.types import DataError


class Piece(NamedTuple):
    """Where the bytes of one frame lie: in a file, or here where the message held them in its header."""

    segment: int  # names the file
    offset: int
    size: int
    jpeg: bool  # a JPEG file; else the pixels
    data: bytes | None = None


class JournalFrames(Frames):
    """Frames in the segments of a journal. Nothing in a segment ever changes, but old ones are dropped.

    Args:
        shape: [H, W, 3].
        pieces: of each frame.
        folder: of the journal.
        suffix: of its segments' names.
        where: begins every error.
    """

    def __init__(self, shape: tuple[int, int, int], pieces: list[Piece], folder: Path, suffix: str, where: str) -> None:
        super().__init__(shape, np.arange(len(pieces)))
        self._pieces, self._folder, self._suffix, self._where = pieces, folder, suffix, where

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
        path = segment_path(self._folder, piece.segment, self._suffix)
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), piece.size, piece.offset)
        except FileNotFoundError:
            raise gone(self._where, path) from None
        except OSError as error:
            raise DataError(f"{self._where}: {path} cannot be read: {error.strerror}") from error
        if len(data) != piece.size:
            raise DataError(f"{self._where}: {path} ends inside a frame; it was cut since it was indexed")
        return data


def segment_path(folder: Path, segment: int, suffix: str) -> Path:
    """The file of a segment."""
    return folder / f"{segment:020d}{suffix}"


def gone(where: str, path: Path) -> DataError:
    """A segment is not there any more."""
    return DataError(
        f"{where}: {path} is there no more: the learner dropped it, because its replay does not need it "
        "(transport.journal_bytes keeps more). Leave the episode out (--skip-bad), or list the run's episodes again"
    )
