"""Delays of arms and cameras, measured with simulated ones whose delays are known."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from robot_limits import HOME, limits
from robot_served import HERE, Reading, free_port, wait
from robot_world import World

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.commands.measure import Recording, camera_latency, motion_lag, record, report
from serl_chunk_robot.control.motions import LONGEST_SWING, Oscillation
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.main import main

JOINT = 1


def swing(world: World, angle: float = 0.05, **more) -> Oscillation:
    return Oscillation(HOME, JOINT, angle, world.limits, stands=0.0, **more)


@functools.cache
def recorded(lag: float, latency: float, noise: float = 0.0, rate: float = 30.0) -> Recording:
    """A swing of simulated arms, and a camera whose stamps are late. `noise`: of its pictures, of 255."""
    world = World(lag=lag).ready()
    world.ask("jog", "operator", motion=swing(world))
    rows = []
    while world.state == "MOVE":
        status = world.run()
        rows.append((status.moment, status.set_point[JOINT], status.reading.stamp, status.reading.q[JOINT]))
    assert world.state == "HELD"
    moments, set_point, stamps, q = np.array(rows).T
    rng = np.random.default_rng(0)
    taken = np.arange(moments[0] + 0.1, moments[-1], 1 / rate) + rng.uniform(0, 0.003, 1)
    bars = 10 * (np.interp(taken - latency, stamps, q) - q[0])  # where an edge is, share of the width
    pictures = [(np.arange(160) / 160 < 0.5 + bar) * 200.0 + rng.normal(0, noise, (120, 160)) for bar in bars]
    changes = [float(np.abs(b - a).mean()) for a, b in itertools.pairwise(pictures)]
    seen = list(zip(taken, taken[1:], changes, strict=False))
    return Recording(moments, set_point, stamps, q, {"top": seen}, {"top": [0.01] * len(seen)})


@pytest.mark.parametrize(
    ("lag", "latency", "noise"), [(0.04, 0.08, 2.0), pytest.param(0.01, 0.2, 1.0, marks=pytest.mark.slow)]
)
def test_a_motion_lag_and_a_camera_latency_are_measured_to_10_ms(lag, latency, noise):
    recording = recorded(lag, latency, noise)
    motion, camera = motion_lag(recording), camera_latency(recording, "top")
    assert motion.seconds == pytest.approx(lag, abs=0.01)
    assert camera.seconds == pytest.approx(latency, abs=0.01)
    assert motion.uncertainty < 0.01
    assert camera.uncertainty < 0.02
    lines = report(recording)
    assert "`following`" in lines[0]
    assert f"{1e3 * camera.seconds:.1f} ms +- " in lines[1]
    assert f"`latency` in the [[camera]] table of its device: {camera.seconds:.3f}" in lines[1]


def test_a_camera_that_does_not_show_the_joint_is_named():
    recording = recorded(0.04, 0.08, 2.0)
    rng = np.random.default_rng(0)
    noise = [(a, b, float(x)) for (a, b, _), x in zip(recording.pictures["top"], rng.random(10**4), strict=False)]
    recording = recording._replace(pictures={"top": noise, "left": noise[:5]}, ages={"top": [0.0], "left": [0.0]})
    assert [camera_latency(recording, name) for name in ("top", "left")] == [None, None]
    assert "camera left  does not show the motion" in report(recording)[2]


def test_a_swing_is_within_the_profile_and_ends_where_it_began():
    world = World().ready()
    world.ask("jog", "operator", motion=swing(world, 0.1))
    while world.state == "MOVE":
        world.run()
    sent = np.array(world.arms.sent)
    assert not world.gate.counts
    assert np.abs(sent[:, JOINT] - HOME[JOINT]).max() == pytest.approx(0.1, rel=0.01)
    np.testing.assert_allclose(sent[-1], HOME, atol=1e-6)
    others = np.arange(len(HOME)) != JOINT
    np.testing.assert_allclose(sent[:, others], np.broadcast_to(HOME[others], sent[:, others].shape), atol=1e-9)


@pytest.mark.parametrize(
    ("joint", "angle", "parameter", "named"),
    [
        (14, 0.05, "joint", "0 to 13"), (1, 0.0, "angle", "0"), (1, np.nan, "angle", "finite"),
        (1, 3.0, "angle", "within the profile"), (1, 0.3, "angle", f"expected {LONGEST_SWING:g} s"),
    ],
)  # fmt: skip
def test_a_swing_that_cannot_be_is_refused_before_anything_moves(joint, angle, parameter, named):
    of = limits(0.01 if angle == 0.3 else 3.2)
    with pytest.raises(ConfigError, match=named) as raised:
        Oscillation(HOME, joint, angle, of)
    assert raised.value.parameter == parameter


LATE = """
import time
from collections import deque
import numpy as np
from serl_chunk_robot.drivers.camera import CameraSpec, Frame
from serl_chunk_robot.client.client import RobotClient

class Late:
    # Draws joint 1 as it was 80 ms ago, and stamps the picture as it is drawn.
    def __init__(self, port, rate=30.0):
        self.port, self.period = port, 1 / rate
    def spec(self):
        return CameraSpec(48, 64)
    def open(self, clock):
        self.client = RobotClient("127.0.0.1:%d" % self.port, name="late")
        self.clock, self.number, self.due, self.states = clock, 0, clock(), deque(maxlen=200)
    def read(self):
        self.due += self.period
        while self.clock() < self.due:
            state = self.client.next_state()
            if state["q"] is not None:
                self.states.append((state["stamp"], state["q"][1]))
        now = self.clock()
        stamps, q = zip(*self.states)
        edge = 0.5 + 5 * (np.interp(now - 0.08, stamps, q) + 0.96)
        image = np.zeros((48, 64, 3), np.uint8)
        image[:] = np.clip((edge - np.arange(64) / 64) * 640, 0, 200)[None, :, None]
        image += np.random.randint(0, 4, image.shape).astype(np.uint8)
        self.number += 1
        return Frame(image, now, self.number)
    def close(self):
        self.client.close()
"""
SERVE = "import sys; from serl_chunk_robot.main import main; sys.exit(main(['serve', sys.argv[1]]))"


@pytest.mark.slow
def test_measure_with_a_server_and_a_camera_process(tmp_path: Path, capsys, monkeypatch):
    port = free_port(3)
    (tmp_path / "late.py").write_text(LATE)
    path = tmp_path / "robot.toml"
    path.write_text(
        f'name = "cell_{port}"\nport = {port}\nstart = "evaluating"\n[driver]\nname = "fake"\nlag = 0.04\n'
        f'[[camera]]\nname = "top"\ndriver = "late.py:Late"\nport = {port}\n'
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(path)], env=environment)
    try:
        with Reading(f"{HERE}:{port}", name="operator", role="operator", answer=20.0) as client:
            client.hello()
            seen = lambda: client.next_state()["generation"]  # noqa: E731
            wait(lambda: client.newest_picture("top") is not None, 20)
            recording = None
            while recording is None:  # a machine that runs tests may stand still for longer than robot PCs may
                wait(lambda: bool(client.next_state()["answered"]))
                if client.next_state()["state"] == "STOPPED":
                    client.request("clear")
                with contextlib.suppress(RobotError):
                    recording = record(client, JOINT, 0.05, ["top"], seen())
            assert motion_lag(recording).seconds == pytest.approx(0.04, abs=0.01)
            assert camera_latency(recording, "top").seconds == pytest.approx(0.08, abs=0.01)
            with pytest.raises(RobotError, match="angle"):
                record(client, JOINT, 3.0, ["top"], seen())
            generation = str(seen())
        monkeypatch.setattr("serl_chunk_robot.commands.measure.record", lambda *_: recording)
        assert main(["measure", "--robot", f"{HERE}:{port}", "--joint", "1", "--generation", generation]) == 0
        out = capsys.readouterr().out
        assert out.startswith("motion lag  ")
        assert "camera top  " in out
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
