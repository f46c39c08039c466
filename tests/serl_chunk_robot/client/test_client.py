"""A client of a robot's server: what it raises, and how it finds a restarted one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from errors import naming
from robot_served import HERE, Reading, drive, served, until, wait

from serl_chunk_robot.client.client import ClockMap, RobotError
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.opening import claimed
from serl_chunk_robot.wire.protocol import address


def test_addresses_have_a_host_and_perhaps_a_port():
    for text, where in (
        ("127.0.0.1", ("127.0.0.1", 5600)),
        ("arm:5700", ("arm", 5700)),
        ("[::1]:5700", ("::1", 5700)),
        ("[::1]", ("::1", 5600)),
    ):
        assert address(text) == where
    for text in ("", ":5600", "arm:", "arm:x", "arm:65535", "::1"):
        with pytest.raises(ConfigError) as e:
            address(text)
        assert repr(text) in str(e.value)


def test_a_client_finds_a_restarted_server_which_is_stopped():
    with served() as robot:
        robot.ready()
        actor = Reading(f"{HERE}:{robot.port}", name="left", role="controller", answer=10.0)
        actor.request("arm")
        drive(actor, 10, 0.002)
        stood = actor.next_state()
    with served(port=robot.port, arms=robot.arms) as again:
        wait(lambda: (actor.newest_state() or stood)["run"] != stood["run"])
        with pytest.raises(RobotError, match=naming("arm", "STOPPED")):
            actor.request("arm")
        at = again.arms.target.copy()
        for _ in range(10):
            actor.send_command(at + 0.05)
            time.sleep(0.02)
        assert actor.next_state()["controller"] == "left"
        np.testing.assert_array_equal(again.arms.target, at)
        again.ready()
        actor.request("arm")
        drive(actor, 5)
        wait(lambda: actor.next_state()["number"] == 5)
        watcher = again.client("watcher", "any")
        assert watcher.next_state()["controller"] == "left"
        actor.close()
        actor.close()
        began = time.monotonic()
        wait(lambda: watcher.next_state()["controller"] == "")  # it dropped its lease
        assert time.monotonic() - began < 1


def test_joints_of_a_moment_are_those_between_the_states_that_were_read():
    with served() as robot:
        robot.ready()
        actor = robot.client("left")
        actor.request("arm")
        drive(actor, 10, 0.004)
        states = [actor.next_state() for _ in range(6)]
        gap = lambda pair: pair[1]["stamp"] - pair[0]["stamp"]  # noqa: E731
        pairs = list(itertools.pairwise(states))  # on a busy machine more are read between two
        first, second = next(pair for pair in pairs if gap(pair) < 1.5 * min(map(gap, pairs)))
        middle = actor.joints_at(0.5 * (first["stamp"] + second["stamp"]))
        np.testing.assert_allclose(middle, 0.5 * (first["q"] + second["q"]))
        assert np.abs(middle - first["q"]).max() > 0, "the arms move"
        np.testing.assert_array_equal(actor.joints_at(states[-1]["stamp"] + 1), states[-1]["q"])
        assert actor.joints_at(first["stamp"] - 2) is None


def test_a_state_is_of_a_pass_after_the_last_reply_and_the_servers_clock_is_known_though_it_is_another_one():
    def clock() -> float:
        return 3600.0 + 1.0002 * time.monotonic()

    with served(clock=clock) as robot:
        operator = robot.ready()
        actor, watcher = robot.client("left"), robot.client("watcher", "any")
        assert np.isnan(actor.server_time())
        actor.request("arm")
        drive(actor, 20)
        assert len(actor._server._sent) < 10, "the server reports when commands came"
        assert abs(actor.server_time() - clock()) < 5e-3
        watcher.next_state()
        assert abs(watcher.server_time() - clock()) < 50e-3
        until(actor, "HOLD")
        for _ in range(20):
            time.sleep(0.01)
            reply = operator.request("stop")
            state = operator.next_state()
            assert (state["state"], state["generation"]) == ("STOPPED", reply["generation"])


def test_one_process_serves_a_robot(tmp_path):
    code = """import sys, pathlib, serl_chunk_robot.robot_file.opening as opening
with opening.claimed('arm', pathlib.Path(sys.argv[1])): pass"""
    for name in ("", "../arm", "a/b", ".", "x" * 65):
        with pytest.raises(ConfigError, match="name"), claimed(name, tmp_path):
            pass
    (read, end), forked = os.pipe(), os.pipe()
    with claimed("arm", tmp_path):
        child = os.fork()  # of a driver: it does not keep the lock
        if child == 0:
            os.write(forked[1], b"!")
            os.close(end)
            os.read(read, 1)
            os._exit(0)
        os.read(forked[0], 1)
        with pytest.raises(ConfigError, match=naming("arm", os.getpid())), claimed("arm", tmp_path):
            pass
        with claimed("other", tmp_path):
            pass
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert f"process {os.getpid()}" in done.stderr
    with claimed("arm", tmp_path):
        pass
    os.close(end)
    os.waitpid(child, 0)


# The server's clock at a client, over a simulated link.

TICK = 0.02


class Link:
    """A server with a clock an hour ahead that drifts. `up`, `down`: the least delays of messages, s; `jitter`: mean of
    what is added to each, exponentially; one in a hundred waits for 0.2 s more."""

    def __init__(self, drift: float, up: float, down: float, jitter: float, seed: int) -> None:
        self._drift, self._up, self._down, self._jitter = drift, up, down, jitter
        self._rng = np.random.default_rng(seed)
        self.map, self.now = ClockMap(), 1e5

    def server(self, now: float) -> float:
        return 3600.0 + (1 + self._drift) * now

    def delay(self, least: float) -> float:
        return least + self._rng.exponential(self._jitter) + (0.2 if self._rng.random() < 0.01 else 0.0)

    def reset(self) -> None:
        for _ in range(100):
            taken = self.now + self.delay(self._up)
            received = taken + self.delay(self._down)
            self.map.exchanged(self.now, self.server(taken), received)
            self.now = received + TICK

    def tick(self) -> None:
        taken = self.now + self.delay(self._up)
        self.map.arrived(self.now, self.server(taken))
        waited = self._rng.uniform(0.0, 0.005)
        self.map.came(self.server(self.now - waited - self.delay(self._down)), self.now)
        self.now += TICK

    def error(self) -> float:
        return abs(self.map.server_time(self.now) - self.server(self.now))


@pytest.mark.parametrize(
    ("drift", "up", "down", "jitter"),
    [
        (0.0, 0.0001, 0.0001, 0.0002),  # a cable
        (-200e-6, 0.002, 0.002, 0.005),  # a radio link
        (200e-6, 0.001, 0.003, 0.001),  # ways that differ by 2 ms, of which half remains
    ],
)
def test_clocks_an_hour_apart_that_drift_are_mapped_within_2_ms(drift, up, down, jitter):
    link = Link(drift, up, down, jitter, seed=1)
    errors = []
    for _ in range(4):
        link.reset()
        for _ in range(round(30 / TICK)):
            link.tick()
            errors.append(link.error())
    assert max(errors) < 0.002


@pytest.mark.parametrize("jump", [-100.0, 100.0])
def test_a_clock_that_jumped_is_mapped_anew(jump):
    link = ClockMap()
    link.exchanged(10.0, 110.001, 10.002)
    link.exchanged(11.0, 111.001 + jump, 11.002)
    assert link.server_time(12.0) == pytest.approx(112.0 + jump, abs=1.5e-3)
