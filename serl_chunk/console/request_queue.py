"""Actions that come from other threads than the control loop's, as of a page, under the rules of keys."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator

from serl_chunk.console.bindings import STOPS, Action, Keys, second_key
from serl_chunk.types import ShownRobot

BUTTONS = {action.value: action for action in Action}  # a source's keys: one for each action


class RequestQueue:
    """Requested actions until the control loop takes them. Only `put` may be called from other threads.

    Each source is as a keyboard of its own: repeats count once, and two actions need two requests (`Keys`).

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: collections.deque[tuple[Action, str, float, float, ShownRobot | None]] = collections.deque()
        self.shown: ShownRobot | None = None  # at the newest action, as its source was shown it
        self._keys: dict[str, Keys] = {}  # source -> what it pressed
        self._emptied, self._emptied_at = False, -1.0

    def put(
        self, action: Action, source: str, now: float, seen: float | None = None, robot: ShownRobot | None = None
    ) -> None:
        """Request an action at `now` (monotonic seconds).

        Args:
            seen: of when the state was that it is requested for, where that is older: what came later than `seen`, a
                change or a stop, drops it.
            robot: that was shown to the person who requested it.
        """
        self._waiting.append((action, source, now, now if seen is None else seen, robot))

    def actions(self) -> Iterator[Action]:
        """Yield what was requested since the last call. After `empty`, only stops of this call are left."""
        self._emptied = False
        for _ in range(len(self._waiting)):
            if not self._waiting:  # emptied meanwhile
                return
            requested, source, stamp, seen, robot = self._waiting.popleft()
            if (self._emptied or seen < self._emptied_at) and requested not in STOPS:
                continue
            action = self._keys.setdefault(source, Keys(BUTTONS)).press(requested.value, stamp)
            if action is not None:
                self.shown = robot
                yield action

    def empty(self) -> None:
        """Drop what was requested so far, but for stops. Call it at each change of state."""
        self._emptied, self._emptied_at = True, self._clock()
        for keys in self._keys.values():
            keys.empty()
        for _ in range(len(self._waiting)):
            entry = self._waiting.popleft()
            if entry[0] in STOPS:
                self._waiting.append(entry)

    def question(self, now: float) -> str:
        """Return what a source has to confirm; empty where none has begun an action of two requests."""
        for keys in self._keys.values():
            begun = keys.begun(now)
            if begun is not None:
                return second_key(begun, BUTTONS)
        return ""
