"""Episodes as mp4 files. The only module that imports imageio's ffmpeg, on use."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serl_chunk.types import ConfigError, SerlChunkError

WIDTH = 480  # pixels
MAX_FPS = 15.0  # every tick is shown: faster robots are shown slower than they move, so that one can follow
_FRAME = 8  # pixels of the frame around the images ...
_HUMAN = (0xD5, 0x5E, 0x00)  # ... which has this colour while a human acts, and is black otherwise


class VideoError(SerlChunkError):
    """A video could not be written."""


def side_by_side(images: Sequence[np.ndarray]) -> np.ndarray:
    """Put images uint8[H_i, W_i, 3] in one row, top-aligned on black."""
    out = np.zeros((max(f.shape[0] for f in images), sum(f.shape[1] for f in images), 3), np.uint8)
    left = 0
    for image in images:
        out[: image.shape[0], left : left + image.shape[1]] = image
        left += image.shape[1]
    return out


def framed(image: np.ndarray, human: bool) -> np.ndarray:
    """Scale an image uint8[H, W, 3] to `WIDTH` pixels, of even height, its frame coloured where a human acts."""
    from PIL import Image

    width = WIDTH - 2 * _FRAME
    height = 2 * max(1, round(image.shape[0] * width / image.shape[1] / 2))
    out = np.zeros((height + 2 * _FRAME, WIDTH, 3), np.uint8)
    if human:
        out[:] = _HUMAN
    scaled = Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS)
    out[_FRAME:-_FRAME, _FRAME:-_FRAME] = np.asarray(scaled)
    return out


class EpisodeVideo:
    """One episode's video, encoded by a thread so that the caller of `add` does not wait for the encoder.

    The file has a temporary name in the folder of `path` until `finish`. The frames go to ffmpeg's standard input,
    because imageio's own writer would fork this process, JAX's threads and all. Films play in real time up to `MAX_FPS`
    ticks a second, else slower. Raises ConfigError where imageio's ffmpeg is missing.
    """

    def __init__(self, path: Path, control_hz: float) -> None:
        self._ffmpeg = ffmpeg_program()
        self.path = path
        self._partial = path.with_name(f".{path.stem}.partial.mp4")
        self._fps = min(control_hz, MAX_FPS)
        self._frames: queue.SimpleQueue[tuple[np.ndarray, bool] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="video", daemon=True)
        self._thread.start()

    def add(self, images: Mapping[str, np.ndarray], *, human: bool = False) -> None:
        """Add one tick: the images uint8[H, W, 3] of all cameras, in their order, and whether a human acts on it."""
        self._frames.put((side_by_side(list(images.values())), human))

    def finish(self, name: str) -> Path:
        """Wait for the encoder, give the file its final `name`, and return its path. Raises VideoError."""
        self._frames.put(None)
        self._thread.join()
        target = self.path.with_name(name)
        if self._error is not None:
            self._partial.unlink(missing_ok=True)
            raise VideoError(f"{target}: cannot be written: {self._error}. Evaluate without videos") from self._error
        os.replace(self._partial, target)
        return target

    def discard(self) -> None:
        """Stop encoding and leave no file."""
        self._frames.put(None)
        self._thread.join()
        self._partial.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            self._encode()
        except (OSError, VideoError) as error:  # raised by finish(), in the thread that expects the file
            self._error = error

    def _encode(self) -> None:
        first = self._frames.get()
        if first is None:
            raise VideoError("no frames")
        frame: np.ndarray | None = framed(*first)
        command = [
            self._ffmpeg, "-y", "-loglevel", "error",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{WIDTH}x{len(framed(*first))}", "-r", f"{self._fps:g}",
            "-i", "-", "-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(self._partial),
        ]  # fmt: skip
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as encoder:
            assert encoder.stdin is not None
            assert encoder.stderr is not None
            try:
                while frame is not None:
                    encoder.stdin.write(frame.tobytes())
                    following = self._frames.get()
                    frame = None if following is None else framed(*following)
                encoder.stdin.close()
            except BrokenPipeError:
                pass  # it gave up; its errors are read below
            errors = encoder.stderr.read().decode(errors="replace").strip()
        if encoder.returncode != 0:
            raise VideoError(errors or f"ffmpeg ended with status {encoder.returncode}")


def ffmpeg_program() -> str:
    """Return the path of an ffmpeg; raises ConfigError with the install hint."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"videos need ffmpeg ({error}). Install it with pip install 'serl-chunk[video]', or write no videos"
        ) from error
