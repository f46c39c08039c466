"""SpaceMice of 3Dconnexion, by pyspacemouse."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.devices.base import NEUTRAL, SILENT, DeviceError, Sample, lifeless, listed
from serl_chunk_robot.devices.polling import PolledDevice
from serl_chunk_robot.drivers.base import vendor

logger = logging.getLogger(__name__)

AT_ONCE = 256  # reports of one look; the kernel keeps 63
RULE = 'KERNEL=="hidraw*", ATTRS{idVendor}=="046d|256f", ATTRS{idProduct}=="c6*", MODE="0660", GROUP="input"'
RIGHTS = (
    f"Write this line to /etc/udev/rules.d/70-spacemouse.rules: {RULE} . Run: sudo udevadm control --reload && "
    "sudo udevadm trigger && sudo usermod -aG input $USER, and log in anew"
)
_hidapi = threading.Lock()  # hidapi keeps its last error in one place for all threads


class SpaceMouse(PolledDevice):
    """One mouse. Its twist has the axes of ROS: x forward, y left, z up; a full deflection is 1.

    The kernel keeps the last 63 reports, and pyspacemouse reads one a call: the thread reads all of them at each look.

    **Silence.** A mouse at rest sends nothing and is alive as long as its handle can be read. A deflected mouse sends a
    report every 8 ms, and zeros when it is let go. One that is deflected and silent for `silence` seconds is out of its
    receiver's reach, or its zeros were lost in a full queue: its twist is zero and it is not alive until the next
    report.

    A lost mouse is opened again under its own path, if model and serial number are the same. Mice may exchange the
    numbers of their paths /dev/hidrawN when both are plugged in anew: name two mice by links of udev.

    Args:
        path: of its hidraw device, or a link to it; default: the only mouse that is connected.
        silence: s; `math.inf` for a device that reports changes only.

    Raises DeviceError: no library, no such mouse, no rights, or several mice without a path.
    """

    pause = 0.003

    def __init__(self, path: str = "", silence: float = SILENT, clock: Callable[[], float] = time.monotonic) -> None:
        self._mouse: Any = None
        self._model: Optional[Tuple[str, str]] = None  # and serial number
        self._seen = 0.0  # pyspacemouse's time of the last report
        self._reported, self._silence, self._mute = clock(), silence, False
        super().__init__(path or _only(), clock)

    def _open(self) -> None:
        library = _library()
        try:
            with _hidapi:
                mouse = library.open_by_path(self.name, nonblocking=True, axis_convention="ros")
        except AttributeError as e:
            raise _no_hidapi(e) from e
        except FileNotFoundError as e:
            raise DeviceError(f"{self.name}: no such mouse. {_connected_text()}") from e
        except ValueError as e:
            raise DeviceError(f"{self.name}: no mouse that pyspacemouse supports ({e}). {_connected_text()}") from e
        except RuntimeError as e:
            if os.access(self.name, os.R_OK | os.W_OK):
                raise DeviceError(f"{self.name}: cannot be opened ({e}). Plug it in again") from e
            raise DeviceError(f"{self.name}: not permitted. {RIGHTS}") from e
        self._mouse, self._reported, self._mute = mouse, self._clock(), False
        model = mouse.name, mouse.serial_number
        if self._model not in (None, model):
            now, before = (" ".join(filter(None, each or ())) for each in (model, self._model))
            raise DeviceError(f"{self.name}: now another mouse, {now} instead of {before}")
        self._model = model

    def _look(self) -> Sample:
        now = self._clock()
        for _ in range(AT_ONCE):
            state = self._mouse.read()  # the same object at each call
            if state.t == self._seen:
                break
            self._seen, self._reported = state.t, now
        twist = np.clip([state.x, state.y, state.z, state.roll, state.pitch, state.yaw], -1.0, 1.0)
        sample = Sample(twist, None, tuple(map(bool, state.buttons)), now, True)
        mute = now - self._reported > self._silence and bool((np.abs(twist) >= NEUTRAL).any())
        if mute and not self._mute:
            logger.warning("%s: deflected and silent for %g s. Its twist is zero.", self.name, self._silence)
        self._mute = mute
        return lifeless(sample) if mute else sample

    def _release(self) -> None:
        if self._mouse is not None:
            self._mouse.close()
        self._mouse = None


def open_mice(paths: Sequence[str] = (), count: int = 1) -> List[SpaceMouse]:
    """Open one or two mice.

    Args:
        paths: of the mice, left first; may be empty for one mouse.
        count: 1 or 2.

    Raises DeviceError: as `SpaceMouse`; a wrong number of paths, or two of one mouse.
    """
    if not paths and count == 1:
        return [SpaceMouse()]
    if isinstance(paths, str) or count not in (1, 2) or len(paths) != count:
        raise DeviceError(
            f"{paths!r}, expected a list of {count} paths, of 1 or 2 mice. {_connected_text()}", parameter="paths"
        )
    if len({Path(path).resolve() for path in paths}) < count:
        raise DeviceError(f"{' and '.join(paths)} are one mouse, expected two. {_connected_text()}", parameter="paths")
    with contextlib.ExitStack() as opened:
        mice = [opened.enter_context(contextlib.closing(SpaceMouse(path))) for path in paths]
        opened.pop_all()
        return mice


def connected() -> Dict[str, str]:
    """Return path -> model of the mice that are plugged in. Raises DeviceError without the libraries."""
    library = _library()
    try:
        with _hidapi:
            return dict(library.get_connected_devices_by_path())
    except RuntimeError as e:
        raise _no_hidapi(e) from e


def _library() -> Any:
    remedy = "Run: pip install 'pyspacemouse>=2.1'"
    library, api = (vendor(name, DeviceError, remedy) for name in ("pyspacemouse", "pyspacemouse.api"))
    vars(api)["print"] = lambda *_, **__: None  # it prints at each opening, into the operator's console
    return library


def _no_hidapi(error: Exception) -> DeviceError:
    return DeviceError(f"SpaceMouse: no library libhidapi ({error}). Run: sudo apt install libhidapi-hidraw0")


def _only() -> str:
    mice = connected()
    if not mice:
        raise DeviceError("SpaceMouse: none is plugged in. `lsusb` lists one as 256f:c6.. or 046d:c6..")
    if len(mice) > 1:
        raise DeviceError(f"SpaceMouse: several are plugged in; pass the path of one. {_connected_text()}")
    return next(iter(mice))


def _connected_text() -> str:
    return "Plugged in: " + listed([f"{path} ({model})" for path, model in sorted(connected().items())])
