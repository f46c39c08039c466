"""The viewers of a page: which of them has control, and what their keys request.

Any of them may hold and stop. All else is for the one that has control, so that two operators do not contradict each
other. The keys of a terminal count in addition.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from serl_chunk.console.bindings import EFFECTIVE, MEANING, MOVES, STOPS, Action
from serl_chunk.types import SerlChunkError, ShownRobot

if TYPE_CHECKING:
    from serl_chunk.operator.operator import Operator

GONE = 4.0  # seconds without a sign of life after which a viewer has left
OLD = 1.5  # seconds after which a state is too old for a key that moves the robot
MOST = 16  # viewers; each has threads


class RefusedError(SerlChunkError):
    """A viewer's request that has no effect, and why."""


@dataclasses.dataclass
class _Viewer:
    number: int
    seen: float


class Viewers:
    """Viewers, each known by a name that it made up. Thread-safe.

    The first viewer has control. Where the one that has it leaves, the one that has been there for longest gets it. One
    that releases it leaves it to the first that takes it.

    Args:
        operator: of the actor, whose `view` and `request` are for any thread.
        bindings: key -> action, as of `bind_keys`.
        clock: monotonic seconds.
    """

    def __init__(
        self, operator: Operator, bindings: Mapping[str, Action], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._operator, self._clock = operator, clock
        self.bindings = {key: action for key, action in bindings.items() if action is not Action.END}
        self._lock = threading.Lock()
        self._viewers: dict[str, _Viewer] = {}
        self._holder: str | None = None
        self._released = False
        self._numbers = 0

    def here(self, name: str) -> None:
        """Note a sign of life. Raises RefusedError for one viewer too many."""
        with self._lock:
            self._note(name)

    def view(self, name: str) -> dict[str, Any]:
        """Return who has control, as plain values."""
        with self._lock:
            self._settle()
            viewer, holder = self._viewers.get(name), self._viewers.get(self._holder or "")
            return {
                "viewers": len(self._viewers),
                "you": None if viewer is None else viewer.number,
                "holder": None if holder is None else holder.number,
                "mine": viewer is not None and viewer is holder,
            }

    def take(self, name: str) -> None:
        """Give control to a viewer. Raises RefusedError while another one has it."""
        with self._lock:
            self._note(name)
            if self._holder not in (None, name):
                self._refuse_for_holder("It can release it, or close its page")
            self._holder, self._released = name, False

    def release(self, name: str) -> None:
        """Take control from a viewer that has it."""
        with self._lock:
            self._note(name)
            if self._holder == name:
                self._holder, self._released = None, True

    def press(
        self, name: str, key: str, shown: str, seen: float, proposed: int | None = None, robot: ShownRobot | None = None
    ) -> None:
        """Request what a key does.

        Args:
            shown: the state that the viewer saw. What was pressed for another one does nothing, but for stops.
            proposed: number of the chunk that it showed for approval. A key that moves the robot counts for that one.
            seen: when that was, by this clock. Neither does what was pressed for an old one.
            robot: of that state. Its server refuses what would let it move in another one.

        Raises RefusedError.
        """
        action = self.bindings.get(key)
        if action in STOPS:  # neither a lock nor a check comes before it
            self._operator.request(action, f"viewer {name}")
            return
        with self._lock:
            self._note(name)
            state = self._operator.view
            if action is None:
                raise RefusedError(f"{key!r} does nothing")
            if shown != state.word:
                raise RefusedError(f"the state is {state.word} now: nothing was done")
            if action in MOVES and proposed != (None if state.proposed is None else state.proposed.number):
                raise RefusedError("the chunk to approve has changed: nothing was done")
            if not 0 <= self._clock() - seen < OLD:
                raise RefusedError("the page shows an old state: nothing was done")
            if self._holder is None:
                raise RefusedError("take control first")
            if self._holder != name:
                self._refuse_for_holder("You can hold and stop")
            if action not in EFFECTIVE[state.word] and not state.question:
                raise RefusedError(f"{MEANING[action]}: not in the state {state.word}")
            self._operator.request(action, f"viewer {name}", seen, robot)

    def _note(self, name: str) -> None:
        now = self._settle()
        if name not in self._viewers:
            if len(self._viewers) >= MOST:
                raise RefusedError(f"{MOST} viewers are there already. Close one of them")
            self._numbers += 1
            self._viewers[name] = _Viewer(self._numbers, now)
        self._viewers[name].seen = now
        self._settle()

    def _settle(self) -> float:
        now = self._clock()
        for name in [n for n, viewer in self._viewers.items() if now - viewer.seen > GONE]:
            del self._viewers[name]
        if self._holder not in self._viewers:
            self._holder = None
        if not self._viewers:
            self._released = False
        elif self._holder is None and not self._released:
            self._holder = next(iter(self._viewers))
        return now

    def _refuse_for_holder(self, remedy: str) -> None:
        raise RefusedError(f"viewer {self._viewers[self._holder or ''].number} has control. {remedy}")
