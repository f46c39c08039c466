"""gym-aloha's task behind a robot's loop: the driver and its process's simulation, with an injected clock."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time

import numpy as np
import pytest
from simulated_loop import FILES, LoopedTask

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.aloha_sim import driver as driver_module
from serl_chunk.robots.aloha_sim import process
from serl_chunk.robots.aloha_sim.driver import AlohaSimDriver, inject
from serl_chunk.robots.aloha_sim.env import HOME, AlohaSimEnv
from serl_chunk.robots.aloha_sim.process import Simulation
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.robots.served.task import Seen, make_expert
from serl_chunk.types import STATE
from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.wire import arrays

if not all(importlib.util.find_spec(name) for name in ("mujoco", "gym_aloha")):  # not imported: see test_aloha_sim
    pytest.skip("the [aloha-sim] extra is not installed", allow_module_level=True)

DT, TICK = 0.005, 4  # s of a pass, passes of a control tick

ARMS = ~np.isin(np.arange(14), (6, 13))


class Local(AlohaSimDriver):
    """The driver with its simulation in this process; time is injected."""

    def connect(self, clock) -> None:
        self.clock, self.env = clock, AlohaSimEnv(self._config)
        self.simulation = Simulation(self.env, clock())
        self._receive()

    def _send(self, op, **values) -> None:
        self.simulation.take(arrays.unpack(arrays.pack({"op": op, **values}), 10_000))

    def _receive(self) -> None:
        self.simulation.run_until(self.clock())
        state = self.simulation.state(self.clock())
        if state is not None:
            self._state = arrays.unpack(arrays.pack(state), 10_000)

    def seen(self) -> Seen:
        return Seen(self._state["q"], self._state["target"], {"objects": self._state["objects"]})

    @property
    def robot_spec(self):
        return self._robot


@pytest.fixture
def world():
    driver = Local()
    return LoopedTask(
        load(FILES / "aloha_sim.toml"), driver, np.array(HOME), DT, fastest=np.array(driver.spec().fastest)
    )


def cleared(world):
    """Clear the robot, which takes more than once where its faults are cleared first."""
    for _ in range(50):
        world.run(4)
        with contextlib.suppress(Refused):
            world.ask("clear", "operator")
            assert world.loop.machine.state == "HOLD"
            return
    raise AssertionError(world.loop.machine.word)


def test_the_evaluating_profile_leaves_the_demonstrator_alone(world):
    episodes = []
    for seed in (0, 7):
        world.reset(seed)
        episodes.append(world.demonstrated(make_expert(AlohaSimConfig(), world.driver), seed, 220, TICK))
    assert [success for success, _, _ in episodes] == [True, True]
    assert sum(gated for _, _, gated in episodes) < 0.01 * sum(passes for _, passes, _ in episodes)


def test_a_reset_begins_where_the_environment_does(world):
    env = AlohaSimEnv(AlohaSimConfig())
    assert differing_fields(env.robot_spec, world.driver.spec()._asdict()) == []
    parts = [name for name, _ in world.driver.spec().state]
    for seed in (3, 4):
        observation, _ = env.reset(seed=seed)
        world.reset(seed)
        for _ in range(2):  # until the arms move, the objects are where the environment begins
            reading = world.run(30).reading
            state = np.concatenate([reading.q if name == "q" else reading.extra[name] for name in parts])
            assert np.array_equal(state[14:].astype(np.float32), observation[STATE][14:])
            np.testing.assert_allclose(state[:14], observation[STATE][:14], atol=1e-6)
        world.ask("arm")
        world.send(np.array(HOME) + 0.01)
        assert world.run(60).reading.extra["objects"][2] < observation[STATE][16] - 0.01, "it falls"
        assert world.loop.machine.state == "HOLD", "no command came in time"


@pytest.mark.parametrize(
    ("faults", "word"),
    [({"lag": 0.15}, "ms old"), ({"dropped": 30}, "ms old"), ({"minus_pi": 2}, "which the mechanism cannot reach"),
     ({"fault": "joint 3 is hot"}, "joint 3 is hot"), ({"torque": False}, "no torque")],
)  # fmt: skip
def test_injected_faults_stop_the_robot(world, faults, word):
    world.reset(1)
    world.ask("arm")
    world.send(np.array(HOME) + 0.01)
    world.run(4)
    world.driver.simulation.inject(**faults)
    for _ in range(12):
        if world.loop.machine.state == "RUN":
            world.send(np.array(HOME) + 0.01)
        status = world.run(4)
    assert status.state == "STOPPED"
    assert word in status.word
    world.driver.simulation.inject(lag=0.0)
    cleared(world)


def test_one_minus_pi_read_is_no_target_and_a_frozen_one_stops_what_moves(world):
    world.reset(1)
    world.ask("arm")
    goal = np.array(HOME)
    for k in range(60):
        goal = goal + 0.01 * (np.arange(14) % 7 < 6) * (-1 if k // 30 else 1)
        if k == 10:
            world.driver.simulation.inject(minus_pi=1)
        if k == 40:
            world.driver.simulation.inject(frozen=100)
        if world.loop.machine.state == "RUN":
            world.send(goal)
        status = world.run(4)
        assert (status.state == "RUN") or k > 40
        assert np.abs(status.set_point - HOME).max() < 0.5
    assert "repeated" in status.word


@pytest.mark.parametrize(
    ("what", "values"), [("speeds", np.where(np.arange(14) == 9, 0.8, 0.0)), ("joints", np.where(ARMS, HOME, 1.15))]
)
def test_arms_that_never_rest_at_a_target_are_entangled(world, monkeypatch, what, values):
    world.run(20)
    monkeypatch.setattr(type(world.driver.env), what, property(lambda env: values.copy()))
    world.run(450)
    assert "entangled" in world.driver._state["faults"][0]
    assert not world.driver._state["torque"]
    monkeypatch.undo()
    cleared(world)
    world.run(100)
    np.testing.assert_allclose(world.driver.env.joints, HOME, atol=0.03)


def test_success_is_reported_once_and_lost_time_is_lost(world, monkeypatch):
    monkeypatch.setattr(world.driver.env, "stage", lambda: 4)
    events = [event for _ in range(40) for event in world.run().events]
    assert [tuple(e) for e in events] == [(1.0, True, False)]
    world.reset(2)
    assert len(world.driver._state["events"]) == 2
    steps = world.driver.simulation._steps
    world.driver.simulation.run_until(world.now + 10.0)
    assert world.driver.simulation._steps - steps < 10, "time in which a process stood still is not made up for"


def test_the_process_over_a_socket_and_a_missing_simulator(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    thread = threading.Thread(target=process.serve, args=(AlohaSimEnv(AlohaSimConfig()), port, 1.0))
    thread.start()
    driver = AlohaSimDriver(port=port)
    driver.connect(time.monotonic)
    driver.reset_scene(3)
    driver.command(np.array(HOME) + 0.02, DT)
    inject(port, fault="joint 3 is hot")
    ends = time.monotonic() + 10
    while (reading := driver.read()).faults == () or driver._state["scene"] != 0:
        assert time.monotonic() < ends
        time.sleep(0.005)
    assert abs(reading.stamp - time.monotonic()) < 1
    np.testing.assert_allclose(driver._state["target"], np.array(HOME) + 0.02)
    other = AlohaSimDriver(port=port, env_name="insertion")
    with pytest.raises(DriverError, match="'aloha_sim', not of 'aloha_sim insertion'"):
        other.connect(time.monotonic)
    for each in (driver, other):
        each.close()
    thread.join(20)
    assert not thread.is_alive(), "it ends once no server sends anything"
    monkeypatch.setattr(driver_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DriverError, match=r"pip install 'serl-chunk\[aloha-sim\]'"):
        AlohaSimDriver(port=port).connect(time.monotonic)
