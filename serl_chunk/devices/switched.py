"""One device for two arms: a button of it switches between them."""

from __future__ import annotations

from serl_chunk_robot.devices.base import InputDevice, KeyEvent, Sample, lifeless


class _Shared:
    """Reads the device once for both arms.

    The arms read it in turns, the first one first in every tick.
    """

    def __init__(self, device: InputDevice, button: int) -> None:
        self.device, self.button, self.arm = device, button, 0
        self.sample: Sample | None = None
        self._pressed = True  # a button that is down at the start switches once it was let go

    def read(self) -> Sample:
        sample = self.device.read()
        pressed = sample.alive and self.button < len(sample.buttons) and sample.buttons[self.button]
        if pressed and not self._pressed:
            self.arm = 1 - self.arm
        self._pressed = pressed
        buttons = tuple(down for k, down in enumerate(sample.buttons) if k != self.button)
        return sample._replace(buttons=buttons)


class SwitchedDevice:
    """The device as one of two arms has it: at rest while it moves the other one."""

    def __init__(self, shared: _Shared, arm: int) -> None:
        self._shared, self._arm = shared, arm
        self.name = shared.device.name

    def read(self) -> Sample:
        shared = self._shared
        if self._arm == 0 or shared.sample is None:
            shared.sample = shared.read()
        sample = shared.sample
        return sample if shared.arm == self._arm else lifeless(sample)._replace(alive=sample.alive)

    def keys(self) -> list[KeyEvent]:
        """Return the events of the device's keys, once for both arms."""
        keys = getattr(self._shared.device, "keys", None)
        return keys() if keys is not None and self._arm == 0 else []

    def close(self) -> None:
        if self._arm == 0:
            self._shared.device.close()


def switched(device: InputDevice, button: int) -> list[InputDevice]:
    """Return the device of the first and of the second arm; `button` switches between them."""
    shared = _Shared(device, button)
    return [SwitchedDevice(shared, arm) for arm in (0, 1)]
