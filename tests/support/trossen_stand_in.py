"""A stand-in of the package trossen_arm: methods and signatures are the wheel's (test_trossen.py compares them)."""

from __future__ import annotations

import builtins
import enum
import sys
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


Mode = enum.Enum("Mode", ["idle", "position", "velocity", "external_effort", "effort"], start=0)
Model = enum.Enum("Model", ["wxai_v0"], start=0)


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
        self.configured_at = 0.0

    def q(self) -> np.ndarray:
        share = min((time.monotonic() - self.began) / self.takes, 1.0) if self.takes else 1.0
        return np.array(self.start) + share * (np.array(self.goal) - self.start)


CONTROLLERS: dict[str, Controller] = {}


class TrossenArmDriver:
    """As the wheel's: getters of an arm that is not configured return nothing, and setters raise LogicError."""

    _controller: Controller | None = None
    _arguments: tuple[Any, ...] = ()

    def configure(self, model, end_effector, serv_ip, clear_error, timeout=20.0) -> None:
        if serv_ip not in CONTROLLERS:
            raise RuntimeError(f"Failed to connect to the arm controller's TCP server at {serv_ip}:50001\nSee")
        controller = CONTROLLERS[serv_ip]
        if controller.error and not clear_error:
            raise RuntimeError(controller.error)
        if clear_error:
            controller.error, controller.modes = "", [Mode.idle] * 7
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
        if self._controller is None:
            return output([], 0)
        controller = self._need()
        if controller.silent not in (None, True):
            return controller.silent
        found = output(controller.q().tolist(), int(COUNT * (time.monotonic() - controller.configured_at)))
        if controller.silent:
            controller.silent = found
        return found

    def set_all_modes(self, mode: Mode = Mode.idle) -> None:
        controller = self._need()
        controller.calls.append(f"set_all_modes {mode.name}")
        time.sleep(0.02)  # a round trip
        controller.modes = [mode] * 7
        controller.start = controller.goal = controller.q().tolist()

    def set_all_positions(
        self, goal_positions, goal_time=2.0, blocking=True, goal_feedforward_velocities=None,
        goal_feedforward_accelerations=None,
    ) -> None:  # fmt: skip
        controller = self._need()
        assert all(type(value) is float for value in goal_positions)
        assert not blocking
        if controller.modes != [Mode.position] * 7:
            controller.error = "Robot input with modes different than configured modes received"
            raise RuntimeError(controller.error)
        controller.commands.append((list(goal_positions), goal_time))
        controller.start, controller.goal = controller.q().tolist(), list(goal_positions)
        controller.began, controller.takes = time.monotonic(), goal_time

    def _need(self) -> Controller:
        if self._controller is None:
            raise LogicError("This TrossenArmDriver is not configured\nPlease refer to our troubleshooting guide")
        if self._controller.error:
            raise RuntimeError(self._controller.error)
        return self._controller


def output(positions: list[float], count: int) -> Any:
    """What a controller sends after `count` others."""
    n = len(positions)
    every = types.SimpleNamespace(positions=positions, velocities=[0.0] * n, efforts=[0.1] * n)
    header = types.SimpleNamespace(id=count, timestamp=int(1e6 / COUNT) * count)
    return types.SimpleNamespace(header=header, joint=types.SimpleNamespace(all=every))


@contextmanager
def installed(*addresses: str) -> Iterator[dict[str, Controller]]:
    CONTROLLERS.clear()
    CONTROLLERS.update({address: Controller() for address in addresses})
    with patch.dict(sys.modules, {"trossen_arm": sys.modules[__name__]}):
        yield CONTROLLERS
