"""The border between the control loop and a driver, which is a lab's code: what crosses it, and what does not.

A reading is checked and copied, so that the loop owns all that it compares later. Whatever a driver raises, also what
would end the process, arrives as a DriverError: the loop takes it for a fault and brakes. `brake_alone` is for a loop
that has itself failed.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Callable, Mapping, Optional, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import Driver, DriverError, DriverSpec, Event, Reading
from serl_chunk_robot.safety.motion import Rates, SetPoint, braked

logger = logging.getLogger(__name__)

ANSWER = 0.1  # s until a driver that did not answer a stop is stopped by its next level
LONGEST, MOST = 400, 16  # characters of a text, and faults, that are kept
LARGEST = 1 << 19  # bytes of all extras: a state with more would reach no client
FAILURES = 20  # set points in a row that the driver does not take, until `brake_alone` gives up


def checked(reading: Any, spec: DriverSpec) -> Reading:
    """Return a copy of a driver's reading that owns its arrays. Numbers of joints may be NaN: the loop judges these.

    Raises DriverError: not a Reading, or one of its fields is not what `Reading` says.
    """
    if not isinstance(reading, Reading):
        raise DriverError(f"read() returned {_kind(reading)}, expected a Reading")
    size, sizes = len(spec.low), dict(spec.state)
    if not isinstance(reading.extra, Mapping):
        raise DriverError(f"extra: {_kind(reading.extra)}, expected a dict of arrays")
    extra = {}
    for name, values in reading.extra.items():
        if type(name) is not str or len(name) > LONGEST:
            raise DriverError(f"extra: a name is {_kind(name)}, expected str of {LONGEST} characters at most")
        extra[name] = _numbers(f"extra {name!r}", values, sizes.get(name), "fiub")
        if not np.isfinite(extra[name]).all():
            raise DriverError(f"extra {name!r}: a number is not finite")
    if sum(values.nbytes for values in extra.values()) > LARGEST:
        raise DriverError(f"extra: more than {LARGEST} bytes, which no published state holds")
    missing = [name for name in sizes if name != "q" and name not in extra]
    if missing:
        raise DriverError(f"extra: {missing[0]!r} is missing, which spec().state names")
    q, dq, effort = (_numbers(name, getattr(reading, name), size) for name in ("q", "dq", "effort"))
    return Reading(
        q, dq, effort, _number("stamp", reading.stamp), _faults(reading.faults), extra, _events(reading.events),
        _bool("torque", reading.torque),
    )  # fmt: skip


def text_of(error: BaseException) -> str:
    """Return an error's text for a fault or a log, and its type where it has none or would end the process."""
    try:
        text = _printable(str(error))
    except BaseException:  # of its own __str__
        text = ""
    if not isinstance(error, Exception):
        return f"{type(error).__name__} {text}".strip()
    return text or type(error).__name__


class Border:
    """A driver as the loop calls it. Methods raise DriverError, and nothing else."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._spec = driver, driver.spec()
        self.grippers = list(self._spec.grippers)

    def read(self) -> Reading:
        return self._guarded(lambda: checked(self._driver.read(), self._spec))  # type: ignore[no-any-return]

    def command(self, target: np.ndarray, dt: float) -> None:
        self._guarded(lambda: self._driver.command(target, dt))

    def set(self, name: str, value: Any) -> None:
        self._guarded(lambda: self._driver.set(name, value))

    def clear_faults(self) -> None:
        self._guarded(lambda: self._driver.clear_faults())

    def stop(self, reason: str, level: int = 0) -> bool:
        return self._guarded(lambda: _bool("stop() returned", self._driver.stop(reason, level)))  # type: ignore[no-any-return]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as e:  # SystemExit of a library, too: the arms need a loop that brakes them
            raise DriverError(text_of(e)) from e


class DriverStop:
    """A stop on its way to the driver: it is reported until the driver answers, each time by a higher level."""

    def __init__(self, driver: Border) -> None:
        self._driver = driver
        self._pending: Optional[Tuple[float, int, str]] = None  # since when, level, why
        self._own_means = False  # the driver stopped the robot without the loop

    @property
    def answered(self) -> bool:
        return self._pending is None

    def begin(self, now: float, why: str) -> None:
        self._pending = self._pending or (now, 0, why)

    def forget(self) -> None:
        self._pending = None

    def report(self, now: float) -> None:
        """Report the stop once more, if there is one. For each pass."""
        if self._pending is None:
            return
        since, level, why = self._pending
        if now - since >= ANSWER:
            since, level = now, level + 1
            self._own_means = True
        try:
            answered = self._driver.stop(why, level)
        except DriverError as e:
            logger.warning("the driver failed to stop the robot (level %d): %s", level, e)
            answered = False
        self._pending = None if answered else (since, level, why)

    def used_own_means(self) -> bool:
        used, self._own_means = self._own_means, False
        return used


def brake_alone(
    driver: Border, at: SetPoint, rates: Rates, dt: float, began: float, gap: float,
    clock: Callable[[], float], pause: Callable[[], None],
) -> Optional[SetPoint]:  # fmt: skip
    """Command set points until they stand, by `braked` alone.

    Args:
        began: moment of `clock` of the pass that failed.
        gap: seconds since then, or between two set points, after which the next one stands at once.
        pause: waits until the next set point is due.

    Returns the set point that stands; None where the driver does not take any.
    """
    failures = 0
    while not at.stands:
        before, began = began, clock()
        after = braked(at, rates, dt) if began - before <= gap else SetPoint.standing(at.position)
        try:
            driver.command(after.position.copy(), dt)
            at, failures = after, 0
        except DriverError:
            failures += 1
        if failures >= FAILURES:
            return None
        pause()
    return at


def _kind(value: Any) -> str:
    if type(value) is np.ndarray:
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _numbers(name: str, values: Any, size: Optional[int], kinds: str = "f") -> np.ndarray:
    """A copy, of floats float64. `size`: of a vector; None: any shape."""
    shaped = type(values) is np.ndarray and (size is None or values.shape == (size,))
    if not shaped or values.dtype.kind not in kinds:
        raise DriverError(f"{name}: {_kind(values)}, expected float64[{'...' if size is None else size}]")
    return np.array(values, np.float64 if values.dtype.kind == "f" else values.dtype)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float, np.floating)) or isinstance(value, bool) or not math.isfinite(value):
        shown = f" {value}" if isinstance(value, float) else ""
        raise DriverError(f"{name}: {_kind(value)}{shown}, expected a finite number")
    return float(value)


def _bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise DriverError(f"{name}: {_kind(value)}, expected True or False. Use bool(...)")
    return value


def _faults(faults: Any) -> Tuple[str, ...]:
    if type(faults) not in (tuple, list) or not all(type(text) is str for text in faults):
        raise DriverError(f"faults: {_kind(faults)}, expected a tuple of texts")
    return tuple(_printable(text) or "a fault without a text" for text in faults[:MOST])


def _events(events: Any) -> Tuple[Event, ...]:
    if type(events) not in (tuple, list) or not all(isinstance(event, Event) for event in events):
        raise DriverError(f"events: {_kind(events)}, expected a tuple of Event")
    return tuple(
        Event(_number("reward", e.reward), _bool("success", e.success), _bool("failure", e.failure)) for e in events
    )


def _printable(text: str) -> str:
    return text[:LONGEST].encode(errors="backslashreplace").decode()
