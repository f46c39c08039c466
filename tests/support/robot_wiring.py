"""Simulated arms with faults of wiring and configuration, as a lab's first day has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from serl_chunk_robot.drivers.base import DriverSpec, Reading
from serl_chunk_robot.drivers.fake import viperx_arms

Map = Callable[[np.ndarray], np.ndarray]


class WiredArms:
    """Two ViperX arms behind wires: commands and measurements pass `commanded` and `measured` on their way.

    Args:
        start: joints of one arm at connection, float64[7]; default: the driver's.
        state_hz: samples a second; 0: one for each read.
        latency: seconds until a command arrives.
        dead: joints without torque.
        faults: that the driver reports.
        stale: seconds by which stamps are old.
    """

    def __init__(
        self, *, arms: int = 2, start: Any = None, commanded: Map = lambda x: x, measured: Map = lambda x: x,
        state_hz: float = 0.0, latency: float = 0.0, dead: tuple[int, ...] = (), faults: tuple[str, ...] = (),
        stale: float = 0.0,
    ) -> None:  # fmt: skip
        self.arms = viperx_arms(arms=arms)
        if start is not None:
            self.arms.q = np.tile(np.array(start, np.float64), arms)
            self.arms.target = self.arms.q.copy()
        self._commanded, self._measured = commanded, measured
        self._period, self._latency, self._dead = 1 / state_hz if state_hz else 0.0, latency, list(dead)
        self._faults, self._stale = faults, stale
        self._queue: deque[tuple[float, np.ndarray]] = deque()
        self._last: Reading | None = None
        self._clock: Callable[[], float] = lambda: 0.0

    def spec(self) -> DriverSpec:
        return self.arms.spec()

    def connect(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.arms.connect(clock)

    def read(self) -> Reading:
        now = self._clock()
        while self._queue and self._queue[0][0] <= now:
            self._send(self._queue.popleft()[1])
        if self._last is None or now - self._last.stamp >= self._period - 1e-9:
            self._last = self.arms.read()
        r = self._last
        # Velocities and efforts travel with the positions: maps are linear but for a constant.
        zero = self._measured(np.zeros_like(r.q))
        return r._replace(
            q=self._measured(r.q), dq=self._measured(r.dq) - zero, effort=r.effort, stamp=r.stamp - self._stale,
            faults=self._faults,
        )  # fmt: skip

    def command(self, target: np.ndarray, dt: float) -> None:
        self._queue.append((self._clock() + self._latency, np.array(target)))
        if not self._latency:
            self._send(self._queue.popleft()[1])

    def _send(self, target: np.ndarray) -> None:
        target = self._commanded(target)
        target[self._dead] = self.arms.target[self._dead]
        self.arms.command(target, 0.005)

    def hold(self) -> None:
        self.arms.hold()

    def set(self, name: str, value: Any) -> None:
        self.arms.set(name, value)

    def clear_faults(self) -> None:
        self.arms.clear_faults()

    def stop(self, reason: str, level: int = 0) -> bool:
        return self.arms.stop(reason, level)

    def close(self) -> None:
        self.arms.close()
