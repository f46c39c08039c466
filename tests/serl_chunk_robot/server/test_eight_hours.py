"""Eight hours of an injected clock: memory, threads and files stay flat, counters are sane, and time stays exact."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from robot_limits import HIGH, HOME, LOW, J, limits
from robot_world import Way, World

from serl_chunk_robot.control.loop import Refused

DT = TICK = 0.02  # s: a pass each tick, as 5.8 million at 200 Hz would take an hour
EPISODE = 30.0  # s, with the reset before it
SMOOTH = 1.5  # s, after which an episode's sines have no kink any more
WARM = 0.25  # hours after which nothing may grow
GROWS = 2e6  # bytes that a process may grow by in the hours after


class Kept(list):
    """The end of what arms were sent: tests' arms keep all of it."""

    def append(self, item: object) -> None:
        super().append(item)
        if len(self) > 8:
            del self[:4]


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> tuple[int, int]:
    """Threads and open files."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


class Shift:
    """A robot that works: resets, episodes of sines, and every so often a stop, a lapse, a fault or a hold."""

    def __init__(self) -> None:
        self.world = World(limits(2.0, 15.0, 300.0), dt=DT, tick=TICK)
        self.world.arms.sent, self.world.heard = Kept(), Kept()
        self.world.loop._on_transition = self.world.heard.append
        self.world.arms.stops = Kept()
        self.rng = np.random.default_rng(0)
        self.episodes = self.stops = self.taken = self.off = 0
        self.world.ready()

    def episode(self) -> None:
        """A reset and an episode, which something may end."""
        world, rng = self.world, self.rng
        self.episodes += 1
        self.clear()
        world.ask("reset", "controller", motion=Way(HOME))
        world.until("HOLD", 3000)
        world.ask("arm", "controller")
        world.number = 0
        ends = int(rng.integers(100, 1200))
        for k in range(ends):
            t, phase = k * TICK, np.arange(J)
            wave = 0.1 * (np.sin(2 * t + phase) - np.sin(phase)) * min(t, 1.0) * (np.arange(J) % 7 != 6)
            assert world.send(HOME + wave) == ""
            world.run()
            self.taken += 1
            # A target in time is reached at the end of its tick, after hours as after seconds.
            if t > SMOOTH:
                self.off += not np.allclose(world.arms.sent[-1], HOME + wave, atol=1e-9)
        self.ended()
        # Cleared by and by; the robot stands for the rest of the time.
        world.run(int(rng.integers(1, round(EPISODE / DT) - ends)))

    def ended(self) -> None:
        """End an episode in one of the ways that there are."""
        world, ways = self.world, ["release", "release", "lapse", "stop", "hold", "fault", "-pi", "lost"]
        how = self.rng.choice(ways)
        if how in ("release", "hold", "lost"):
            world.ask(how, {"release": "controller", "hold": "operator", "lost": "server"}[how])
            world.until("HOLD" if how == "release" else "HELD")
        elif how == "lapse":  # the third within a minute stops
            while world.state not in ("HOLD", "STOPPED"):
                world.run()
            self.stops += world.state == "STOPPED"
        else:
            self.stops += 1
            if how == "stop":
                world.ask("stop", "any")
            elif how == "fault":
                world.arms.fault = "left elbow: overload"
            else:
                world.arms.minus_pi = 3
            world.until("STOPPED")
            world.arms.fault = ""

    def clear(self) -> None:
        world = self.world
        for _ in range(5):
            if world.state == "HELD":
                world.ask("go", "operator")
            if world.state == "HOLD":
                return
            try:
                world.ask("clear", "operator")
            except Refused:
                world.run(2)
        raise AssertionError(f"not cleared: {world.loop.machine.word}")


def work(hours: float) -> tuple[Shift, int]:
    """Work for so many hours; returns the shift, and the bytes that it grew by after the first of them."""
    shift = Shift()
    began = shift.world.now
    size, before, warm = 0, (0, 0), min(WARM, hours / 4)
    while shift.world.now - began < 3600 * hours:
        shift.episode()
        if not size and shift.world.now - began > 3600 * warm:
            size, before = resident(), held()
    grown = resident() - size
    assert held() == before, "threads and files"
    return shift, grown


def checks(shift: Shift, grown: int) -> None:
    world = shift.world
    assert grown < GROWS
    assert shift.episodes > 3
    assert shift.off == 0, f"{shift.off} of {shift.taken} targets were not reached in their ticks"
    assert world.gate.counts["generation"] == world.gate.counts["order"] == world.gate.counts["age"] == 0
    assert len(world.loop._watchdog._lapses) <= 3
    assert world.loop.machine.generation < 5 * shift.episodes
    assert (np.array(world.arms.sent) >= LOW).all()
    assert (np.array(world.arms.sent) <= HIGH).all()


def test_minutes_of_work_leave_nothing_behind():
    checks(*work(0.04))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_eight_hours_of_work_leave_nothing_behind():
    checks(*work(8.0))
