"""Gestures on devices as actions of the operator: a foot pedal, buttons of a mouse, grippers of leader arms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from serl_chunk.console.bindings import MOVES, REPEAT, STOPS, Action, bind_gestures
from serl_chunk_robot.devices.base import KeyEvent

LONG = 1.0  # seconds of a long press
# Seconds after which an event counts for stops alone: it comes from another machine, or the loop stood still.
LATE = 0.5
CLOSED, OPENED = 0.1, 0.3  # positions of a leader's gripper (0 closed, 1 open) from which it counts as such


class Gestures:
    """What hands and feet do on devices, as actions. Call `update` on every tick, which never waits.

    A short press counts when it ends before `LONG` seconds, or when it begins, if it stops the robot or the same pedal
    has no long one. A long press counts once, after `LONG` seconds. Another press of a pedal within `REPEAT` seconds is
    a bounce, unless it stops. Buttons and grippers count after they were seen released. A press from before the last
    `empty` counts for stops alone, and one older than `LATE` for nothing that moves.
    """

    def __init__(
        self, bindings: Mapping[str, Action] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bindings = bind_gestures() if bindings is None else bindings
        self._clock = clock
        self._down: dict[str, float] = {}  # pedal -> since when it is pressed, while it may still count as long
        self._short: set[str] = set()  # pedals that are down and count as short if released in time
        self._newest: dict[str, float] = {}  # pedal -> its newest press
        self._since: dict[str, float | None] = {}  # gesture of `_held` -> since when; None: it has counted
        self._closed = False
        self._emptied_at = float("-inf")

    def update(
        self, events: Iterable[KeyEvent] = (), *, buttons: Sequence[bool] = (), grippers: Sequence[float] = ()
    ) -> list[Action]:
        """Return the actions since the last call.

        Args:
            events: of the pedal, in order; names are `left`, `middle` and `right`.
            buttons: of the right mouse; the gesture is the first two.
            grippers: of all leader arms, 0 closed to 1 open.
        """
        actions: list[Action | None] = []
        for event in events:
            actions += self._pressed(event) if event.pressed else self._released(event)
        now = self._clock()
        for name, since in list(self._down.items()):
            if now - since >= LONG:
                actions.append(self._long(name))
        limit = OPENED if self._closed else CLOSED
        self._closed = bool(grippers) and all(position < limit for position in grippers)
        actions.append(self._held("mouse_long", len(buttons) >= 2 and buttons[0] and buttons[1], now))
        actions.append(self._held("grippers_long", self._closed, now))
        return [action for action in actions if action is not None]

    def empty(self) -> None:
        """Forget what was begun, but for a long press that stops. Call it at each change of state."""
        self._down = {name: since for name, since in self._down.items() if self._bound(name, long=True) in STOPS}
        self._short.clear()
        self._since = {}
        self._emptied_at = self._clock()

    def _bound(self, name: str, *, long: bool = False) -> Action | None:
        return self._bindings.get(f"pedal_{name}_long" if long else f"pedal_{name}")

    def _pressed(self, event: KeyEvent) -> list[Action | None]:
        action, long = self._bound(event.name), self._bound(event.name, long=True)
        before, self._newest[event.name] = self._newest.get(event.name), event.stamp
        if before is not None and event.stamp - before < REPEAT and not {action, long} & STOPS:
            return []
        if event.stamp < self._emptied_at:
            action, long = (each if each in STOPS else None for each in (action, long))
        elif self._clock() - event.stamp > LATE:
            action, long = (None if each in MOVES else each for each in (action, long))
        if long is not None:
            self._down[event.name] = event.stamp
        if long is None or action is None or action in STOPS:
            return [action]
        self._short.add(event.name)
        return []

    def _released(self, event: KeyEvent) -> list[Action | None]:
        since = self._down.get(event.name)
        if since is not None and event.stamp - since >= LONG:  # a tick came late
            return [self._long(event.name)]
        self._down.pop(event.name, None)
        if event.name not in self._short:
            return []
        self._short.remove(event.name)
        return [self._bound(event.name)]

    def _long(self, name: str) -> Action | None:
        del self._down[name]
        self._short.discard(name)
        return self._bound(name, long=True)

    def _held(self, gesture: str, held: bool, now: float) -> Action | None:
        """The action of something held for `LONG` seconds; `_since` lacks the gesture until it was seen released."""
        if not held:
            self._since[gesture] = now
        elif (since := self._since.get(gesture)) is not None and now - since >= LONG:
            self._since[gesture] = None
            return self._bindings.get(gesture)
        return None
