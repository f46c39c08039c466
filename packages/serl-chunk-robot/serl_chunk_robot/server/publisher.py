"""The state that a robot's server publishes after each pass, as `protocol` describes it."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Deque, Dict, List, Optional

import numpy as np

from serl_chunk_robot.control.loop import Status
from serl_chunk_robot.wire import arrays, codec

logger = logging.getLogger(__name__)

PASSES = 1000  # whose lateness is reported
REPORTED = 200  # passes between two reports
EVENTS = 64  # the newest that the state repeats, so that a subscriber that misses a message loses none


class Publisher:
    """Makes the messages of one server. `robot`: its name; `run`: that of the server's process."""

    def __init__(self, robot: str, run: str) -> None:
        self._names = {"run": run, "robot": robot}
        self._passes = self._events_seen = 0
        self._events: Deque[List[Any]] = deque(maxlen=EVENTS)
        self._late, self._lateness = np.zeros(PASSES), {"p50": 0.0, "p99": 0.0, "max": 0.0}
        self._more: Dict[str, Any] = {}
        self._failed = ""

    def begin(self, late: float) -> None:
        """A pass begins `late` seconds after its deadline."""
        self._late[self._passes % PASSES] = late
        self._passes += 1
        if self._passes % REPORTED == 0:
            known = self._late[: self._passes]
            p50, p99 = np.percentile(known, (50, 99))
            self._lateness = {"p50": float(p50), "p99": float(p99), "max": float(known.max())}

    def message(self, status: Status, more: Optional[Dict[str, Any]] = None) -> bytes:
        """Return the state after a pass, with the server's own fields `more`; None: those of the last message.

        A driver's extras or events that no message can hold are left out and logged: they must not end the loop.
        """
        self._more = self._more if more is None else more
        own = {
            **self._names, **self._more, "pass": self._passes, "late": self._lateness, **status._asdict(),
            "word": codec.shown(status.word),
            "held": None if status.held is None else {"by": codec.shown(status.held[0]), "since": status.held[1]},
        }  # fmt: skip
        del own["reading"]
        nothing: Dict[str, Any] = {"q": None, "dq": None, "effort": None, "stamp": None, "extra": {}, "events": [],
                                   "torque": None}  # fmt: skip
        try:
            return arrays.pack({**own, **nothing, **self._measured(status)})
        except Exception as e:
            if str(e) != self._failed:
                self._failed = str(e)
                logger.error("what the driver reports cannot be published: %s %s", type(e).__name__, e)
            return arrays.pack({**own, **nothing})

    def _measured(self, status: Status) -> Dict[str, Any]:
        for event in status.events:
            self._events.append([self._events_seen, float(event.reward), bool(event.success), bool(event.failure)])
            self._events_seen += 1
        r, events = status.reading, list(self._events)
        if r is None:
            return {"events": events}
        return {"q": r.q, "dq": r.dq, "effort": r.effort, "stamp": r.stamp, "extra": dict(r.extra), "events": events,
                "torque": r.torque}  # fmt: skip
