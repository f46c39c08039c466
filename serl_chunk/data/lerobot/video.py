"""Videos: encoded, joined without encoding them again, and read frame by frame. PyAV is imported on first use.

Every second frame at least is a key frame and none refers to a later one, so that a training program finds any frame
in two steps, and files can be joined packet by packet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data.frames import FileVersion, Frames, OpenFiles, Shape
from serl_chunk.data.lerobot.arrow import LateModule
from serl_chunk.io import os_reason
from serl_chunk.types import DataError

_QUALITY = 20  # x264's quantiser: 18 is visually lossless
_AHEAD = 32  # frames that are decoded rather than sought past


av: Any = LateModule("av", "videos need PyAV (or set mode to image), which is not installed")


def codec_for(height: int, width: int) -> dict[str, str]:
    """Return {"encoder", "codec", "pix_fmt"}: H.264, or MPEG-4 where PyAV was built without it."""
    if "libx264" in av.codecs_available:
        # Colour at half resolution, which every player shows, needs even sides.
        even = height % 2 == 0 and width % 2 == 0
        return {"encoder": "libx264", "codec": "h264", "pix_fmt": "yuv420p" if even else "yuv444p"}
    return {"encoder": "mpeg4", "codec": "mpeg4", "pix_fmt": "yuv420p"}


def encode(path: Path, frames: Iterable[np.ndarray], height: int, width: int, hz: float, codec: dict[str, str]) -> None:
    """Write `frames` uint8[H, W, 3] to the new mp4 file `path`, `hz` a second. Raises OSError."""
    rate = Fraction(hz).limit_denominator(10_000)
    with av.open(str(path), "w", format="mp4") as container:
        # The same episode must become the same bytes. One thread, since their number changes them (episodes are encoded
        # in parallel anyway). A fixed quantiser and no look at frames to come: with x264's rate control (crf), small
        # frames became other bytes in one of six processes (seen with PyAV 18), without it in none of 70.
        options = {"g": "2", "bf": "0", "threads": "1"}
        if codec["encoder"] == "libx264":
            alone = "scenecut=0:rc-lookahead=0:sync-lookahead=0:mbtree=0:weightp=0"
            options |= {"qp": str(_QUALITY), "preset": "fast", "x264-params": alone}
        else:
            options |= {"qscale": "2"}
        stream = container.add_stream(codec["encoder"], rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, codec["pix_fmt"]
        stream.codec_context.thread_count = 1
        if codec["encoder"] == "mpeg4":
            stream.codec_context.qmax = 2
        for i, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def join(path: Path, parts: Sequence[Path], lengths: Sequence[int], hz: float) -> None:
    """Join the videos `parts`, which have `lengths` frames, in `path` without encoding them again."""
    rate = Fraction(hz).limit_denominator(10_000)
    with av.open(str(path), "w", format="mp4") as out:
        target, at = None, 0
        for part, length in zip(parts, lengths, strict=True):
            start = at
            with av.open(str(part)) as container:
                source = container.streams.video[0]
                target = target or out.add_stream_from_template(source)
                for packet in container.demux(source):
                    if packet.size == 0:  # the demuxer's end
                        continue
                    # Frames are equally spaced: whole numbers of them, whatever units the file counts in.
                    packet.pts = packet.dts = at
                    packet.duration, packet.time_base = 1, 1 / rate
                    packet.stream = target
                    out.mux(packet)
                    at += 1
            if at - start != length:
                raise DataError(f"{part}: the video has {at - start} frames (expected {length}); is the disk at fault?")


class _Video:
    """An open video and the position of its decoder."""

    def __init__(self, path: Path) -> None:
        self._container = av.open(str(path))
        self.close = self._container.close
        if not self._container.streams.video:
            raise ValueError("there is no video in it")
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # loaders have processes, and single frames gain nothing
        self._frames: Iterator[Any] = iter(())
        self._now: tuple[float, Any] | None = None
        rate = self._stream.average_rate
        self._period = float(1 / rate) if rate else 0.02

    def frame_at(self, seconds: float) -> tuple[float, np.ndarray]:
        """The first frame that is not earlier than half a period before `seconds`, and its time."""
        earliest = seconds - self._period / 2
        if self._now is None or not earliest - _AHEAD * self._period < self._now[0] < earliest + self._period:
            at = max(0, int(seconds / self._stream.time_base))
            self._container.seek(at, stream=self._stream, backward=True, any_frame=False)
            self._frames, self._now = self._container.decode(self._stream), None
        while self._now is None or self._now[0] < earliest:
            frame = next(self._frames, None)
            if frame is None:
                self._now = None
                raise ValueError("the video ends before it")
            if frame.pts is not None:
                self._now = (float(frame.pts * self._stream.time_base), frame)
        try:
            # swscale's threads do not survive a fork, and a child that frees their pool (at its exit at the latest)
            # waits for them forever.
            return self._now[0], self._now[1].to_ndarray(format="rgb24", threads=1)
        except TypeError:  # PyAV before it had threads there
            return self._now[0], self._now[1].to_ndarray(format="rgb24")


_videos = OpenFiles(_Video, 8)  # two robots' cameras


class VideoFrames(Frames):
    """Frames uint8[H, W, 3] = `shape` of a video.

    Args:
        seconds: float64[N], times of the frames in the video.
        tolerance_s: largest distance of a frame from its time.
    """

    def __init__(
        self, path: Path, version: FileVersion, shape: Shape, seconds: np.ndarray, tolerance_s: float, where: str
    ) -> None:
        super().__init__(shape, np.arange(len(seconds)))
        self._path, self._version, self._seconds = path, version, seconds
        self._tolerance_s, self._where = tolerance_s, where

    def decode(self, at: int) -> np.ndarray:
        seconds, where = float(self._seconds[at]), f"{self._where}, step {at}: {self._path}"
        try:
            found, image = _videos.use(self._path, self._version, lambda video: video.frame_at(seconds))
        except DataError as error:
            raise DataError(f"{self._where}, step {at}: {error}") from error
        except (OSError, ValueError, ArithmeticError, av.FFmpegError) as error:
            raise DataError(
                f"{where}: the frame at {seconds:.4f} s cannot be decoded ({os_reason(error)}): the video is truncated "
                "or damaged, or PyAV lacks its codec"
            ) from error
        if abs(found - seconds) > self._tolerance_s:
            raise DataError(
                f"{where}: no frame at {seconds:.4f} s, the next one is at {found:.4f} s: more than "
                f"{self._tolerance_s:.3g} s away. Raise tolerance_s, or leave the video out of cameras"
            )
        if image.shape != self.shape[1:]:
            raise DataError(
                f"{where} has frames of {image.shape[0]}x{image.shape[1]} pixels, meta/info.json has "
                f"{self.shape[1]}x{self.shape[2]}"
            )
        return image
