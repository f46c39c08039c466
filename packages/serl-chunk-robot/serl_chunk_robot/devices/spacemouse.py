"""SpaceMice of 3Dconnexion, by pyspacemouse."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.devices.base import AXES, NEUTRAL, SILENT, DeviceError, Sample, lifeless, listed
from serl_chunk_robot.devices.polling import PolledDevice
from serl_chunk_robot.drivers.base import vendor, why

logger = logging.getLogger(__name__)

AT_ONCE = 256  # reports of one look; the kernel keeps 63
RULE = 'KERNEL=="hidraw*", ATTRS{idVendor}=="046d|256f", ATTRS{idProduct}=="c6*", MODE="0660", GROUP="input"'
RIGHTS = (
    f"Write this line to /etc/udev/rules.d/70-spacemouse.rules: {RULE} . Run: sudo udevadm control --reload && "
    "sudo udevadm trigger && sudo usermod -aG input $USER, and log in anew"
)
SYSFS = Path("/sys/class/hidraw")
MULTI_AXIS = b"\x05\x01\x09\x08"  # of a report descriptor: Generic Desktop, Multi-axis Controller
_hidapi = threading.Lock()  # hidapi keeps its last error in one place for all threads


class Interface(NamedTuple):
    """A HID interface of a mouse or a receiver: what one path /dev/hidrawN opens."""

    path: str
    model: str
    receiver: Tuple[object, ...]  # vendor, product, serial number, place on the bus: of all interfaces of one device
    number: str  # which of them it is, also after it was plugged in anew

    @property
    def identified(self) -> bool:
        """Whether another device of the same model would have another `receiver`."""
        return any(self.receiver[2:])


class _Handle:
    """An interface that is open."""

    def __init__(self, interface: Interface, mouse: Any) -> None:
        self.interface, self.mouse = interface, mouse
        self._state: Any = None
        self._seen = 0.0  # pyspacemouse's time of the last report

    def take(self) -> bool:
        """Take in all reports; returns whether there was one."""
        reported = False
        for _ in range(AT_ONCE):
            self._state = self.mouse.read()  # the same object at each call
            if self._state.t == self._seen:
                break
            self._seen, reported = self._state.t, True
        return reported

    @property
    def twist(self) -> np.ndarray:
        state = self._state
        return np.clip([state.x, state.y, state.z, state.roll, state.pitch, state.yaw], -1.0, 1.0)

    @property
    def deflected(self) -> bool:
        return bool((np.abs(self.twist) >= NEUTRAL).any())

    @property
    def buttons(self) -> Tuple[bool, ...]:
        return tuple(map(bool, self._state.buttons))


class SpaceMouse(PolledDevice):
    """One mouse. Its twist has the axes of ROS: x forward, y left, z up; a full deflection is 1.

    The kernel keeps the last 63 reports, and pyspacemouse reads one a call: the thread reads all of them at each look.

    **Receivers.** A wireless mouse is one of several HID interfaces of its receiver, and only its first motion shows
    which. All of them are open until then, and the mouse is at rest: alive, without a deflection or button. The first
    one with a deflection is the mouse, as long as this object lives; the others are closed.

    **Silence.** A mouse at rest sends nothing and is alive as long as its handle can be read. A deflected mouse sends a
    report every 8 ms, and zeros when it is let go. One that is deflected and silent for `silence` seconds is out of its
    receiver's reach, or its zeros were lost in a full queue: its twist is zero and it is not alive until the next
    report.

    A lost mouse is opened again under its own path, if model, serial number and interface are the same. Mice may
    exchange the numbers of their paths /dev/hidrawN when both are plugged in anew: name two mice by links of udev.

    Args:
        path: of a hidraw device of the mouse or its receiver, or a link to it; default: the only one that is connected.
        silence: s; `math.inf` for a device that reports changes only.
        others: paths of other mice, which are none of this one's interfaces.

    Raises DeviceError: no library, no such mouse, no rights, or several mice without a path.
    """

    pause = 0.003

    def __init__(
        self, path: str = "", silence: float = SILENT, clock: Callable[[], float] = time.monotonic,
        others: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._handles: List[_Handle] = []  # of which one may be the mouse
        self._moving: Optional[_Handle] = None  # once it is known
        self._number: Optional[str] = None  # of its interface
        self._count = 1  # of interfaces that were opened
        self._others = {_resolved(other) for other in others}
        self._model: Optional[Tuple[str, str]] = None  # and serial number
        self._reported, self._silence, self._mute = clock(), silence, False
        super().__init__(path or _only(), clock)

    @property
    def interfaces(self) -> Tuple[str, ...]:
        """Paths that are open: of the mouse alone, once it has moved."""
        return tuple(handle.interface.path for handle in self._handles)

    def _open(self) -> None:
        there = [i for i in _of_one_device(self.name) if _resolved(i.path) not in self._others]
        if self._number is not None:
            there = [i for i in there if i.number == self._number]
        if len(there) < (self._count if self._number is None else 1):  # others of a receiver come a moment later
            raise DeviceError(f"{self.name}: not all of it is there. Plug the mouse, or its receiver, in again")
        self._count = len(there)
        for interface in there:
            self._handles.append(_Handle(interface, _opened(interface.path)))
        mouse = self._handles[0].mouse
        model = mouse.name, mouse.serial_number
        if self._model not in (None, model):
            now, before = (" ".join(filter(None, each or ())) for each in (model, self._model))
            raise DeviceError(f"{self.name}: now another mouse, {now} instead of {before}")
        self._model, self._reported, self._mute = model, self._clock(), False
        if len(self._handles) == 1:
            self._choose(self._handles[0])

    def _look(self) -> Sample:
        now = self._clock()
        if self._moving is None:
            self._find_moving()
        elif self._moving.take():
            self._reported = now
        if self._moving is None:
            return Sample(np.zeros(AXES), None, (False,) * len(self._handles[0].buttons), now, True)
        sample = Sample(self._moving.twist, None, self._moving.buttons, now, True)
        mute = now - self._reported > self._silence and self._moving.deflected
        if mute and not self._mute:
            logger.warning("%s: deflected and silent for %g s. Its twist is zero.", self.name, self._silence)
        self._mute = mute
        return lifeless(sample) if mute else sample

    def _find_moving(self) -> None:
        """Read all interfaces, and choose the first one that is deflected. One that is lost before that is left out."""
        for handle in [*self._handles]:
            try:
                handle.take()
            except Exception as e:  # of a library: of no common kind
                if len(self._handles) == 1:
                    raise
                logger.warning("%s: interface %s is lost (%s).", self.name, handle.interface.path, why(e))
                self._close(handle)
                continue
            if handle.deflected:
                logger.info("%s: %s moves, and is the mouse.", self.name, handle.interface.path)
                self._choose(handle)
                return

    def _choose(self, handle: _Handle) -> None:
        self._moving, self._number, self._reported = handle, handle.interface.number, self._clock()
        for other in [*self._handles]:
            if other is not handle:
                self._close(other)

    def _close(self, handle: _Handle) -> None:
        self._handles.remove(handle)
        with contextlib.suppress(Exception):  # of a handle whose device is gone
            handle.mouse.close()

    def _release(self) -> None:
        self._moving = None
        for handle in [*self._handles]:
            self._close(handle)


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
    known = interfaces()
    named = [[i.receiver for i in known if i.identified and _resolved(i.path) == _resolved(path)] for path in paths]
    if count == 2 and (_resolved(paths[0]) == _resolved(paths[1]) or named[0] == named[1] != []):
        raise DeviceError(f"{' and '.join(paths)} are one mouse, expected two. {_connected_text()}", parameter="paths")
    with contextlib.ExitStack() as opened:
        others = [[other for other in paths if other != path] for path in paths]
        mice = [
            opened.enter_context(contextlib.closing(SpaceMouse(path, others=each))) for path, each in zip(paths, others)
        ]
        opened.pop_all()
        return mice


def interfaces() -> List[Interface]:
    """Return the interfaces of all supported mice and receivers that are plugged in, in the order of hidapi.

    Raises DeviceError without the libraries.
    """
    library = _library()
    try:
        with _hidapi:
            found = library.api.Enumeration().find()
    except AttributeError as e:
        raise _no_hidapi(e) from e
    models = {(vendor_id, product): model for model, vendor_id, product in library.get_supported_devices()}
    there = {}  # hidapi lists a path once for each of its collections
    for each in found:
        model = models.get((each.vendor_id, each.product_id))
        if model is not None:
            place, number = _place(each.path)
            receiver = (each.vendor_id, each.product_id, each.serial_number or "", place)
            there[each.path] = Interface(each.path, model, receiver, number or each.path)
    return list(there.values())


def _place(path: str) -> Tuple[str, str]:
    """Return where an interface's device is plugged in, and the interface's number; both empty where it is unknown."""
    try:
        lines = (SYSFS / Path(path).resolve().name / "device/uevent").read_text(errors="replace").splitlines()
    except OSError:
        return "", ""
    place, _, number = dict(line.split("=", 1) for line in lines if "=" in line).get("HID_PHYS", "").rpartition("/")
    return place, number


def _moves(interface: Interface) -> bool:
    """Return whether the kernel knows an interface for one with axes of a mouse; others are of keys, or of pointers."""
    try:
        return MULTI_AXIS in (SYSFS / Path(interface.path).resolve().name / "device/report_descriptor").read_bytes()
    except OSError:
        return False


def _of_one_device(path: str) -> List[Interface]:
    """Return the interfaces of the device to which a path belongs: those with axes, or all where that is unknown."""
    known = interfaces()
    named = next((i for i in known if _resolved(i.path) == _resolved(path)), None)
    if named is None:  # opening it raises what is wrong
        return [Interface(path, "", (), path)]
    own = [i._replace(path=path) if i is named else i for i in known if i.receiver == named.receiver]
    return [i for i in own if _moves(i)] or own


def _resolved(path: str) -> Path:
    return Path(path).resolve()


def _opened(path: str) -> Any:
    """Open an interface. Raises DeviceError."""
    library = _library()
    try:
        with _hidapi:
            return library.open_by_path(path, nonblocking=True, axis_convention="ros")
    except AttributeError as e:
        raise _no_hidapi(e) from e
    except FileNotFoundError as e:
        raise DeviceError(f"{path}: no such mouse. {_connected_text()}") from e
    except ValueError as e:
        raise DeviceError(f"{path}: no mouse that pyspacemouse supports ({e}). {_connected_text()}") from e
    except RuntimeError as e:
        if os.access(path, os.R_OK | os.W_OK):
            raise DeviceError(f"{path}: cannot be opened ({e}). Plug it in again") from e
        raise DeviceError(f"{path}: not permitted. {RIGHTS}") from e


def _library() -> Any:
    remedy = "Run: pip install 'pyspacemouse>=2.1'"
    library, api = (vendor(name, DeviceError, remedy) for name in ("pyspacemouse", "pyspacemouse.api"))
    vars(api)["print"] = lambda *_, **__: None  # it prints at each opening, into the operator's console
    return library


def _no_hidapi(error: Exception) -> DeviceError:
    return DeviceError(f"SpaceMouse: no library libhidapi ({error}). Run: sudo apt install libhidapi-hidraw0")


def _only() -> str:
    devices = _devices()
    if not devices:
        raise DeviceError("SpaceMouse: none is plugged in. `lsusb` lists one as 256f:c6.. or 046d:c6..")
    if len(devices) > 1:
        text = f"several SpaceMice are plugged in; pass the path of one. {_connected_text()}"
        raise DeviceError(text, parameter="paths")
    return devices[0][0].path


def _devices() -> List[List[Interface]]:
    """Return the interfaces of each mouse or receiver that is plugged in."""
    devices: Dict[Tuple[object, ...], List[Interface]] = {}
    for interface in interfaces():
        devices.setdefault(interface.receiver, []).append(interface)
    return list(devices.values())


def _connected_text() -> str:
    return "Plugged in: " + listed(sorted(f"{' '.join(i.path for i in d)} ({d[0].model})" for d in _devices()))
