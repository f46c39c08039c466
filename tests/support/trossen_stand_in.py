"""A stand-in of the package trossen_arm: methods and signatures are the wheel's (test_trossen.py compares them)."""

from __future__ import annotations

import builtins
import enum
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np

POSE = [0.0, 0.9, 0.8, 0.1, 0.0, 0.0, 0.02]
COUNT = 500.0  # outputs a second


class LogicError(AssertionError):
    """Of a call in the wrong state."""


class RuntimeError(builtins.RuntimeError):
    """Of a controller."""


class Mode(enum.Enum):
    idle = 0
    position = 1
    velocity = 2
    external_effort = 3
    effort = 4


class Model(enum.Enum):
    wxai_v0 = 0


class StandardEndEffector:
    wxai_v0_follower: ClassVar[object] = object()
    wxai_v0_leader: ClassVar[object] = object()


class Controller:
    """A controller at an address. Tests set its attributes."""

    def __init__(self) -> None:
        self.modes = [Mode.idle] * 7
        self.start = self.goal = list(POSE)
        self.began, self.takes = time.monotonic(), 0.0
        self.commands: list[tuple[list[float], float]] = []
        self.calls: list[str] = []
        self.error = ""
        self.silent: Any = None  # the output that is repeated
        self.configured_at: float | None = None
        self.lock = threading.Lock()

    def q(self) -> np.ndarray:
        share = min((time.monotonic() - self.began) / self.takes, 1.0) if self.takes else 1.0
        return np.array(self.start) + share * (np.array(self.goal) - self.start)


CONTROLLERS: dict[str, Controller] = {}


class TrossenArmDriver:
    """As the wheel's: getters of an arm that is not configured return nothing, and setters raise LogicError."""

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._arguments: tuple[Any, ...] = ()

    def configure(
        self, model: Model, end_effector: object, serv_ip: str, clear_error: bool, timeout: float = 20.0
    ) -> None:
        if serv_ip not in CONTROLLERS:
            raise RuntimeError(
                f"Failed to connect to the arm controller's TCP server at {serv_ip}:50001 within {timeout} seconds\nSee"
            )
        controller = CONTROLLERS[serv_ip]
        if controller.error and not clear_error:
            raise RuntimeError(controller.error)
        if clear_error:
            controller.error = ""
            controller.modes = [Mode.idle] * 7
        controller.configured_at = time.monotonic()
        self._controller, self._arguments = controller, (model, end_effector, serv_ip)

    def cleanup(self, reboot_controller: bool = False) -> None:
        self._controller = None

    def clear_error(self) -> None:
        if not self._arguments:
            raise LogicError("Driver must be configured at least once before calling clear_error()")
        CONTROLLERS[self._arguments[2]].calls.append("clear_error")
        self.cleanup()
        time.sleep(0.1)
        self.configure(*self._arguments, True)

    def get_is_configured(self) -> bool:
        return self._controller is not None

    def get_modes(self) -> list[Mode]:
        return list(self._need().modes)

    def get_all_positions(self) -> list[float]:
        return [] if self._controller is None else self._controller.q().tolist()

    def get_robot_output(self) -> Any:
        controller = self._controller
        if controller is None:
            nothing = types.SimpleNamespace(positions=[], velocities=[], efforts=[])
            header = types.SimpleNamespace(id=0, timestamp=0)
            return types.SimpleNamespace(header=header, joint=types.SimpleNamespace(all=nothing))
        self._need()
        if controller.silent not in (None, True):
            return controller.silent
        assert controller.configured_at is not None
        elapsed = time.monotonic() - controller.configured_at
        q = controller.q().tolist()
        every = types.SimpleNamespace(positions=q, velocities=[0.0] * 7, efforts=[0.1] * 7)
        header = types.SimpleNamespace(id=int(COUNT * elapsed), timestamp=int(1e6 / COUNT) * int(COUNT * elapsed))
        output = types.SimpleNamespace(header=header, joint=types.SimpleNamespace(all=every))
        if controller.silent:
            controller.silent = output
        return output

    def set_all_modes(self, mode: Mode = Mode.idle) -> None:
        controller = self._need()
        controller.calls.append(f"set_all_modes {mode.name}")
        time.sleep(0.02)  # a round trip
        controller.modes = [mode] * 7
        controller.start = controller.goal = controller.q().tolist()

    def set_all_positions(
        self, goal_positions: list[float], goal_time: float = 2.0, blocking: bool = True,
        goal_feedforward_velocities: list[float] | None = None,
        goal_feedforward_accelerations: list[float] | None = None,
    ) -> None:  # fmt: skip
        controller = self._need()
        assert all(type(value) is float for value in goal_positions)
        assert not blocking
        if controller.modes != [Mode.position] * 7:
            controller.error = "Robot input with modes different than configured modes received"
            raise RuntimeError(controller.error)
        with controller.lock:
            controller.commands.append((list(goal_positions), goal_time))
            controller.start, controller.goal = controller.q().tolist(), list(goal_positions)
            controller.began, controller.takes = time.monotonic(), goal_time

    def _need(self) -> Controller:
        if self._controller is None:
            raise LogicError("This TrossenArmDriver is not configured\nPlease refer to our troubleshooting guide")
        if self._controller.error:
            raise RuntimeError(self._controller.error)
        return self._controller


@contextmanager
def installed(*addresses: str) -> Iterator[dict[str, Controller]]:
    """Let the package be imported, with a controller at each address."""
    CONTROLLERS.clear()
    CONTROLLERS.update({address: Controller() for address in addresses})
    with patch.dict(sys.modules, {"trossen_arm": sys.modules[__name__]}):
        yield CONTROLLERS
