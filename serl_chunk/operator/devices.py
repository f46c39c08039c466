"""Devices of an operator as inputs of the console: a foot pedal, gestures and keys of devices that move the robot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from serl_chunk.console.bindings import STOPS, Action, Keys
from serl_chunk.console.gestures import Gestures
from serl_chunk.console.keys import CTRL_C
from serl_chunk.console.view import Obstacle
from serl_chunk.devices.leader_requests import LeaderDrives
from serl_chunk.devices.robot_hosted import RemotePedal
from serl_chunk.robots.base import DeviceActivity, InterventionSource
from serl_chunk_robot.devices.base import KeyEvent
from serl_chunk_robot.devices.evdev_device import FootPedal

_CTRL = frozenset({"leftctrl", "rightctrl"})
_MODIFIERS = _CTRL | {"leftalt", "rightalt", "leftmeta", "rightmeta"}
_CHARACTERS = {
    "comma": ",", "dot": ".", "slash": "/", "minus": "-", "equal": "=", "semicolon": ";", "apostrophe": "'",
    "leftbrace": "[", "rightbrace": "]", "backslash": "\\", "grave": "`",
}  # fmt: skip
"""Keys of a keyboard -> their names at a terminal."""


Pedal = FootPedal | RemotePedal


class _DeviceKeys(Keys):
    """Keys of a keyboard that moves the robot, under the rules of a terminal's.

    With Ctrl, Alt or Meta a key does nothing, as at a terminal, but for Ctrl-C and what stops.
    """

    def __init__(self, bindings: Mapping[str, Action] | None) -> None:
        super().__init__(bindings)
        self._held: set[str] = set()  # of the modifiers

    def update(self, events: Iterable[KeyEvent]) -> list[Action]:
        actions = [self._typed(event) for event in events]
        return [action for action in actions if action is not None]

    def _typed(self, event: KeyEvent) -> Action | None:
        name = _CHARACTERS.get(event.name, event.name)
        if name in _MODIFIERS:
            self._held = self._held | {name} if event.pressed else self._held - {name}
        elif event.pressed:
            if self._held & _CTRL and name == "c":
                name = CTRL_C
            if not self._held or self.bindings.get(name) in STOPS:
                return self.press(name, event.stamp)
        return None

    def release(self) -> None:
        """Forget modifiers that are held: a lost device does not report that they are released."""
        self._held.clear()


class OperatorDevices:
    """The devices of one operator. No method waits. `keys`: for devices with keys that move nothing."""

    def __init__(
        self, bindings: Mapping[str, Action] | None = None, pedal: Pedal | None = None,
        clock: Callable[[], float] = time.monotonic, keys: Mapping[str, Action] | None = None,
    ) -> None:  # fmt: skip
        self._gestures, self._pedal = Gestures(bindings, clock=clock), pedal
        self._keys = _DeviceKeys(keys)
        self._source: InterventionSource | None = None
        self._hands = DeviceActivity()
        self._pedal_lost = False
        self._actions: list[Action] = []

    def watch(self, source: InterventionSource | None) -> None:
        """Take gestures and keys from a source with `hands() -> DeviceActivity` or `keys()`; others have none.

        Keys that were pressed before do nothing, but for stops.
        """
        if source is not self._source:
            self._source = source
            self._actions += self._typed()
            self.empty()

    def look(self) -> None:
        hands = getattr(self._source, "hands", None)
        self._hands = DeviceActivity() if hands is None else hands()
        self._pedal_lost = self._pedal is not None and not self._pedal.read().alive
        events = [] if self._pedal is None else self._pedal.keys()
        self._actions += self._gestures.update(events, buttons=self._hands.buttons, grippers=self._hands.grippers)
        if self._hands.lost:
            self._keys.release()
        self._actions += self._typed()
        self._actions.sort(key=lambda action: action not in STOPS)

    def actions(self) -> Iterator[Action]:
        """Yield what was requested up to the last look. After `empty`, only stops are left."""
        while self._actions:
            yield self._actions.pop(0)

    def empty(self) -> None:
        """Drop what was requested and begun, but for stops. Call it at each change of state."""
        self._actions = [action for action in self._actions if action in STOPS]
        self._gestures.empty()
        self._keys.empty()

    def question(self, now: float) -> str:
        """Return what a device's key has to confirm; empty where none has begun an action of two keys."""
        return self._keys.question(now)

    def _typed(self) -> list[Action]:
        keys = getattr(self._source, "keys", None)
        return [] if keys is None else self._keys.update(keys())

    @property
    def drives(self) -> LeaderDrives | None:
        """The leaders that are driven to their arms before an episode; None: there are none."""
        found: LeaderDrives | None = getattr(self._source, "drives", None)
        return found

    @property
    def lost(self) -> tuple[str, ...]:
        return self._hands.lost + ((self._pedal.name,) if self._pedal is not None and self._pedal_lost else ())

    def obstacles(self) -> tuple[Obstacle, ...]:
        return tuple(Obstacle(f"device {name} is lost", "plug it in again") for name in self.lost)

    def remarks(self) -> tuple[Obstacle, ...]:
        """Return which devices command nothing yet: they have to be neutral first."""
        return tuple(Obstacle(f"device {name} is not at rest", "let go of it") for name in self._hands.busy)

    def resume(self) -> None:
        """Give the arms of devices that were lost back to the policy."""
        resume = getattr(self._source, "resume", None)
        if resume is not None:
            resume()
