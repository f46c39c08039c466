"""Episodes as mp4 files. The only module that imports imageio's ffmpeg."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serl_chunk.types import ConfigError, SerlChunkError


class VideoError(SerlChunkError):
    """A video could not be written."""


def side_by_side(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Frames uint8[H_i, W_i, 3] in one row, top-aligned on black; even sizes, as the codec wants them."""
    height = max(f.shape[0] for f in frames)
    width = sum(f.shape[1] for f in frames)
    out = np.zeros((height + height % 2, width + width % 2, 3), np.uint8)
    left = 0
    for frame in frames:
        out[: frame.shape[0], left : left + frame.shape[1]] = frame
        left += frame.shape[1]
    return out


class EpisodeVideo:
    """One episode's video, encoded by a thread so that the caller that adds frames does not wait for the encoder.

    Written beside its final name and moved there by `finish`; memory holds only what is not encoded yet. The
    frames go to ffmpeg's standard input; imageio's own writer would fork this process, JAX's threads and all.
    Raises ConfigError with the install hint where imageio's ffmpeg is missing.

    Args:
        path: a file in the folder the video goes to; `finish` gives the name.
        fps: frames per second.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._ffmpeg = ffmpeg_program()
        self.path = path
        self._partial = path.with_name(f".{path.stem}.partial.mp4")
        self._fps = fps
        self._frames: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="video", daemon=True)
        self._thread.start()

    def add(self, images: Mapping[str, np.ndarray]) -> None:
        """One moment: the frames uint8[H, W, 3] of all cameras, in their order."""
        self._frames.put(side_by_side(list(images.values())))

    def finish(self, name: str) -> Path:
        """Wait for the encoder and give the file its final `name`; returns its path. Raises VideoError."""
        self._frames.put(None)
        self._thread.join()
        target = self.path.with_name(name)
        if self._error is not None:
            self._partial.unlink(missing_ok=True)
            raise VideoError(f"could not write {target}: {self._error}; evaluate without --save_video") from self._error
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
        except (OSError, VideoError) as error:  # raised by finish(), in the thread that wants the file
            self._error = error

    def _encode(self) -> None:
        first = self._frames.get()
        if first is None:
            raise VideoError("no frames")
        height, width = first.shape[:2]
        command = [
            self._ffmpeg, "-y", "-loglevel", "error",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self._fps:g}", "-i", "-",
            "-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", str(self._partial),
        ]  # fmt: skip
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as encoder:
            assert encoder.stdin is not None
            assert encoder.stderr is not None
            frame: np.ndarray | None = first
            try:
                while frame is not None:
                    encoder.stdin.write(frame.tobytes())
                    frame = self._frames.get()
                encoder.stdin.close()
            except BrokenPipeError:
                pass  # it gave up; what it says is below
            said = encoder.stderr.read().decode(errors="replace").strip()
        if encoder.returncode != 0:
            raise VideoError(said or f"ffmpeg ended with status {encoder.returncode}")


def ffmpeg_program() -> str:
    """The path of an ffmpeg; raises ConfigError with the install hint."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"saving videos needs ffmpeg ({error}): pip install 'serl-chunk[video]', or evaluate without --save_video"
        ) from error
