"""What is sent, and what is measured where it is sent: the same for every contestant. Needs numpy only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")
CAMERAS = ("top", "left", "right")
IMAGE_SHAPE = (128, 128, 3)
JOINTS = 14
EPISODE = 300  # steps: 44 MB with three cameras
PERIOD = 0.02  # seconds of a control tick
LAYERS = 10  # arrays in a set of parameters


class Row(NamedTuple):
    """What one tick sends."""

    observation: dict[str, np.ndarray]  # float32[JOINTS], with cameras three uint8 images of noise
    action: np.ndarray  # float32[JOINTS]

    @property
    def nbytes(self) -> int:
        return self.action.nbytes + sum(v.nbytes for v in self.observation.values())


def rows(cameras: bool, *, fresh: bool = False) -> Iterator[Row]:
    """Rows without end. Sixteen sets of images take turns as a camera's buffers do; with `fresh` each is a copy."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (16, len(CAMERAS), *IMAGE_SHAPE), np.uint8) if cameras else None
    for tick in itertools.count():
        observation = {"state": rng.random(JOINTS, np.float32)}
        if frames is not None:
            images = frames[tick % 16].copy() if fresh else frames[tick % 16]
            observation.update({f"images/{name}": images[i] for i, name in enumerate(CAMERAS)})
        yield Row(observation, rng.random(JOINTS, np.float32))


class Parameters:
    """Sets of parameters of `megabytes` MB (10**6 bytes) that take turns: no array of one equals one of the last."""

    def __init__(self, megabytes: float) -> None:
        rng = np.random.default_rng(1)
        n = round(megabytes * 1e6) // (4 * LAYERS)
        self._sets = [{f"layer{i}": rng.random(n, np.float32) for i in range(LAYERS)} for _ in range(2)]
        self._turn = 0

    def next(self) -> dict[str, np.ndarray]:
        """The next set; it must not be changed."""
        self._turn += 1
        return dict(self._sets[self._turn % 2])


class Publisher:
    """A learner's process as far as it is the same for every contestant: parameters, and its processor time."""

    _parameters: Parameters

    def make_parameters(self, megabytes: float) -> None:
        """Make them beforehand: `publish` then costs nothing but itself."""
        self._parameters = Parameters(megabytes)

    def publish(self) -> float:
        """Publish other parameters than the last; seconds the call took."""
        raise NotImplementedError

    def publish_often(self, seconds: float, period: float) -> dict[str, float]:
        start = time.monotonic()
        calls = []
        while (now := time.monotonic()) - start < seconds:
            calls.append(self.publish())
            time.sleep(max(0.0, period - (time.monotonic() - now)))
        return {"published": len(calls), "publish_max_s": max(calls)}

    def cpu(self) -> float:
        return time.process_time()


def percentiles(values: list[float]) -> list[float]:
    """[p50, p99, max]."""
    return [float(x) for x in (*np.percentile(values, (50, 99)), max(values))]


def control_loop(
    seconds: float, cameras: bool, make: Callable[[int, Row], T], hand_over: Callable[[T], None]
) -> dict[str, list[float]]:
    """50 Hz against absolute deadlines: how late each tick begins, and how long it takes to hand a row over.

    Both in seconds, as `percentiles`; what `make` does is not part of it. A tick whose time passed while another ran is
    late too, not left out.
    """
    source = rows(cameras, fresh=True)
    late, took = [], []
    deadline = time.monotonic() + PERIOD
    for tick in range(round(seconds / PERIOD)):
        row = next(source)  # a camera's copy; before the deadline, as a grabbing thread would
        time.sleep(max(0.0, deadline - time.monotonic()))
        late.append(time.monotonic() - deadline)
        record = make(tick, row)
        begin = time.monotonic()
        hand_over(record)
        took.append(time.monotonic() - begin)
        deadline += PERIOD
    return {"late": percentiles(late), "hand_over": percentiles(took)}


def memory(name: str = "VmRSS") -> int:
    """Bytes of this process in memory; with "VmHWM", the most there ever were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
