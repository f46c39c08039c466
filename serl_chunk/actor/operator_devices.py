"""Devices of an operator as inputs of the console: a foot pedal, and gestures on the devices that move the robot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from serl_chunk.console.bindings import STOPS, Action
from serl_chunk.console.gestures import Gestures, KeyEvent
from serl_chunk.console.view import Obstacle
from serl_chunk.robots.base import Hands, InterventionSource


class Pedal(Protocol):
    """A foot pedal, as serl_chunk_robot.devices.evdev_keys.FootPedal."""

    name: str

    def read(self) -> _Alive: ...

    def keys(self) -> Sequence[KeyEvent]: ...


class _Alive(Protocol):
    @property
    def alive(self) -> bool: ...


def untaken(action: Action) -> bool:
    """Leave every action to the operator."""
    return False


class OperatorDevices:
    """The devices of one operator. No method waits.

    Args:
        bindings: of `bind_gestures`.
        pedal: None without one.
        clock: monotonic seconds, that of the pedal's events.
        takes: called with each action; True where it has another meaning, and is not the operator's.
    """

    def __init__(
        self, bindings: Mapping[str, Action] | None = None, pedal: Pedal | None = None,
        clock: Callable[[], float] = time.monotonic, takes: Callable[[Action], bool] = untaken,
    ) -> None:  # fmt: skip
        self._gestures, self._pedal, self._takes = Gestures(bindings, clock=clock), pedal, takes
        self._source: InterventionSource | None = None
        self._hands = Hands()
        self._pedal_lost = False
        self._actions: list[Action] = []

    def watch(self, source: InterventionSource | None) -> None:
        """Take gestures from an intervention source that has `hands() -> Hands`; other sources have none."""
        self._source = source

    def look(self) -> None:
        """Take in what the devices do."""
        hands = getattr(self._source, "hands", None)
        self._hands = Hands() if hands is None else hands()
        self._pedal_lost = self._pedal is not None and not self._pedal.read().alive
        events = [] if self._pedal is None else self._pedal.keys()
        self._actions += self._gestures.update(events, buttons=self._hands.buttons, grippers=self._hands.grippers)

    def actions(self) -> Iterator[Action]:
        """Yield what was requested up to the last look. After `empty`, only stops are left."""
        while self._actions:
            action = self._actions.pop(0)
            if not self._takes(action):
                yield action

    def empty(self) -> None:
        """Drop what was requested and begun, but for stops. Call it at each change of state."""
        self._actions = [action for action in self._actions if action in STOPS]
        self._gestures.empty()

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the devices that are unplugged, or silent."""
        return self._hands.lost + ((self._pedal.name,) if self._pedal is not None and self._pedal_lost else ())

    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return why no motion may begin."""
        return tuple(Obstacle(f"device {name} is lost", "plug it in again") for name in self.lost)

    def remarks(self) -> tuple[Obstacle, ...]:
        """Return which devices command nothing yet: they have to be neutral first."""
        return tuple(Obstacle(f"device {name} is not at rest", "let go of it") for name in self._hands.busy)

    def resume(self) -> None:
        """Give the arms of devices that were lost back to the policy."""
        resume = getattr(self._source, "resume", None)
        if resume is not None:
            resume()
