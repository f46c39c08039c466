"""Eight hours of an injected clock: memory, threads and files stay flat, counters are sane, and time stays exact."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import numpy as np
import pytest
from growth import resident
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


def begin(world: World) -> None:
    for _ in range(5):
        with contextlib.suppress(Refused):
            if world.state == "STOPPED":
                world.ask("clear", "operator")
            if world.state == "HELD":
                world.ask("go", "operator")
        if world.state == "HOLD":
            break
        world.run(2)
    world.ask("reset", "controller", motion=Way(HOME))
    world.until("HOLD", 3000)
    world.ask("arm", "controller")
    world.number = 0


def end(world: World, how: str) -> None:
    if role := {"release": "controller", "hold": "operator", "lost": "server", "stop": "any"}.get(how):
        world.ask(how, role)
    elif how == "fault":
        world.arms.fault = "left elbow: overload"
    elif how == "-pi":
        world.arms.minus_pi = 3
    while world.state not in ("HOLD", "HELD", "STOPPED"):  # without a command it lapses; the third one stops
        world.run()
    assert how == "lapse" or world.state == {"release": "HOLD", "hold": "HELD", "lost": "HELD"}.get(how, "STOPPED")
    world.arms.fault = ""


def held() -> tuple[int, int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("hours", [0.04, pytest.param(8.0, marks=pytest.mark.slow)])
def test_hours_of_work_leave_nothing_behind(hours: float):
    world, rng, phase = World(limits(2.0, 15.0, 300.0), dt=DT, tick=TICK), np.random.default_rng(0), np.arange(J)
    world.arms.sent, world.arms.stops, world.heard = Kept(), Kept(), Kept()
    world.loop._on_transition = world.heard.append
    world.ready()
    began, before, episodes, off = world.now, None, 0, 0
    while world.now - began < 3600 * hours:
        episodes += 1
        begin(world)
        ends = int(rng.integers(100, 1200))
        for k in range(ends):
            t = k * TICK
            wave = 0.1 * (np.sin(2 * t + phase) - np.sin(phase)) * min(t, 1.0) * (phase % 7 != 6)
            assert world.send(HOME + wave) == ""
            world.run()
            if t > SMOOTH:  # a target in time is reached at the end of its tick, after hours as after seconds
                off += not np.allclose(world.arms.sent[-1], HOME + wave, atol=1e-9)
        end(world, rng.choice(["release", "release", "lapse", "stop", "hold", "fault", "-pi", "lost"]))
        world.run(int(rng.integers(1, round(EPISODE / DT) - ends)))  # it stands for the rest of the time
        if before is None and world.now - began > 3600 * min(WARM, hours / 4):
            before = held()
    after = held()
    assert after[:2] == before[:2], "threads and files"
    assert after[2] - before[2] < GROWS
    assert episodes > 3
    assert off == 0, "targets that were not reached in their ticks"
    assert world.gate.counts["generation"] == world.gate.counts["order"] == world.gate.counts["age"] == 0
    assert len(world.loop._watchdog._lapses) <= 3
    assert world.loop.machine.generation < 5 * episodes
    assert (np.array(world.arms.sent) >= LOW).all()
    assert (np.array(world.arms.sent) <= HIGH).all()
