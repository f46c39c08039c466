"""The loop of a simulated task's shipped robot file, with an injected clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk_robot.control.loop import RobotLoop, Status
from serl_chunk_robot.robot_file.config import HAIR, RobotFile, checked
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.server.serve import Motions

FILES = Path(__file__).resolve().parents[2] / "experiments" / "robots"


class LoopedTask:
    """A file's robot, its loop and the time: that of the driver if it has one."""

    def __init__(self, file: RobotFile, driver: Any, start: np.ndarray, dt: float, *, fastest: np.ndarray) -> None:
        spec = driver.spec()
        checked(file, spec, start)
        self.driver, self.dt, self.now, self.number = driver, dt, 50.0, 0
        driver.connect(lambda: self.now)
        self.limits = file.profiles[file.start].limits
        low, high = np.array(spec.low), np.array(spec.high)
        measured = Measured(low - HAIR, high + HAIR, fastest)
        self.loop = RobotLoop(
            driver, Gate(self.limits, dt), measured=measured, tick=spec.tick,
            clock=lambda: self.now, needs_go=False,
        )  # fmt: skip
        self.motions = Motions(file, driver)
        self.run(3)
        self.ask("clear", "operator")

    def ask(self, event: str, role: str = "controller", **more: Any) -> None:
        self.loop.request(event, role, "K", self.now, **more)

    def run(self, passes: int = 1) -> Status:
        for _ in range(passes):
            self.now += self.dt
            status = self.loop.run_pass(self.now)
        return status

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        """Reset; returns what was drawn."""
        motion = self.motions("reset", {"seed": seed}, self.run().set_point, self.limits)
        self.ask("reset", motion=motion)
        for _ in range(2000):
            if self.run().state == "HOLD":
                return motion.draws
        raise AssertionError("the reset does not end")

    def send(self, target: np.ndarray) -> None:
        self.number += 1
        command = Command(np.asarray(target, np.float64), self.number, self.loop.machine.generation)
        assert self.loop.command(command, self.now) == ""

    def demonstrated(self, expert: Any, seed: int, ticks: int, passes: int) -> tuple[bool, int, int]:
        """Run a scripted demonstration of armed arms: success, passes, and those that were gated."""
        expert.reset(seed)
        self.ask("arm")
        ran = gated = 0
        for _ in range(ticks):
            self.send(expert.act())
            for _ in range(passes):
                status = self.run()
                assert status.state == "RUN", status.word
                ran, gated = ran + 1, gated + (status.factor != 1)
                if any(event.success for event in status.events):
                    self.ask("release")
                    self.run(100)
                    return True, ran, gated
        return False, ran, gated
