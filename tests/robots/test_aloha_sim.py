"""aloha_sim, both tasks: the model's constants, gym-aloha's dynamics and stages, rendering on request, experts."""

import contextlib
import dataclasses
import importlib.util
import socket
import threading
import time

import numpy as np
import pytest
from demonstrations import started
from simulated_loop import FILES, LoopedTask

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots import registry
from serl_chunk.robots.aloha_sim import driver as driver_module
from serl_chunk.robots.aloha_sim import process
from serl_chunk.robots.aloha_sim.driver import AlohaSimDriver, inject
from serl_chunk.robots.aloha_sim.env import ARM_HIGH, ARM_LOW, CAMERAS, HOME, AlohaSimEnv, insertion_stage
from serl_chunk.robots.aloha_sim.process import Simulation
from serl_chunk.robots.drawn_camera import AlohaSimCamera
from serl_chunk.robots.served.task import Seen, make_expert
from serl_chunk.types import ConfigError
from serl_chunk_robot.control.loop import Refused
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.drivers.camera import CameraError
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.wire import arrays

HOLD = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2, np.float32)  # the start pose, as a command
CUBE, PEG = AlohaSimConfig(max_episode_steps=300), AlohaSimConfig(env_name="insertion", max_episode_steps=300)
# Looked up, not imported: how MuJoCo renders is fixed by its first import, which is what is tested here.
installed = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("mujoco", "gym_aloha")),
    reason="the [aloha-sim] extra is not installed",
)


@pytest.fixture(scope="module")
def env():
    env = registry.make_env(CUBE)
    yield env
    env.close()


@pytest.fixture(scope="module")
def peg_env():
    env = registry.make_env(PEG)
    yield env
    env.close()


@pytest.fixture(params=["env", "peg_env"])
def either(request):
    return request.getfixturevalue(request.param)


def test_stages_of_an_insertion_are_gym_alohas():
    left, right = "vx300s_left/10_left_gripper_finger", "vx300s_right/10_right_gripper_finger"
    held = (("socket-3", left), ("red_peg", right))
    for expected, *touching in (
        (0,), (0, held[0]), (0, held[1]), (1, *held, ("red_peg", "table")), (1, *held, ("socket-2", "table")),
        (2, *held), (3, *held, ("red_peg", "socket-4")), (0, ("red_peg", "socket-4"), ("socket-1", "table")),
        (4, ("red_peg", "pin"), ("red_peg", "table")),
    ):  # fmt: skip
        assert insertion_stage({frozenset(pair) for pair in touching}) == expected, touching


@installed
class TestSimulation:
    def test_an_episode_follows_gym_aloha_bit_for_bit(self, either):
        """Joints, objects and reward equal those of gym-aloha's own task through a whole demonstration."""
        dm_mujoco = pytest.importorskip("dm_control.mujoco")
        from dm_control.rl import control
        from gym_aloha.constants import ASSETS_DIR
        from gym_aloha.tasks import sim

        peg = "insertion" in either.robot_spec.name

        class Unrendered(sim.InsertionTask if peg else sim.TransferCubeTask):
            def get_observation(self, physics):
                return {"joints": self.get_qpos(physics), "objects": self.get_env_state(physics)}

        model = f"bimanual_viperx_{'insertion' if peg else 'transfer_cube'}.xml"
        physics = dm_mujoco.Physics.from_xml_path(str(ASSETS_DIR / model))
        theirs = control.Environment(physics, Unrendered(), float("inf"), control_timestep=0.02)
        expert = registry.make_expert(either)
        started(either, expert, 11)
        sim.BOX_POSE[0] = either.object_poses.ravel() if peg else either.object_poses[0]
        theirs.reset()
        stages = set()
        for _ in range(212 if peg else 170):
            action = expert.act()
            observation, reward, terminated, _, info = either.step(action)
            step = theirs.step(action.astype(np.float64))
            expected = np.concatenate([step.observation["joints"], step.observation["objects"]])
            np.testing.assert_array_equal(observation["state"], expected.astype(np.float32))
            assert info["stage"] == step.reward
            ended = (1.0, True, True) if step.reward == 4 else (0, False, False)
            assert (reward, terminated, info["success"]) == ended
            stages.add(info["stage"])
        # 3 only where the peg brushes the socket's wall on its way to the pin
        assert stages >= ({0, 1, 2, 4} if peg else {0, 2, 4})

    def test_constants_are_the_models_and_objects_begin_in_their_regions(self, env, peg_env):
        limits = env.model.actuator_ctrlrange
        for first in (0, 8):
            np.testing.assert_allclose(limits[first : first + 6].T, (ARM_LOW, ARM_HIGH))
        assert tuple(env.model.camera(i).name for i in range(env.model.ncam)) == CAMERAS
        for _ in range(20):
            x, y = env.reset()[0]["state"][14:16]
            assert 0 <= x <= 0.2
            peg, socket = peg_env.reset()[0]["state"][14:].reshape(2, 7)
            assert 0.1 <= peg[0] <= 0.2
            assert -0.2 <= socket[0] <= -0.1
            assert all(0.4 <= each <= 0.6 for each in (y, peg[1], socket[1]))

    def test_a_saved_state_is_restored_bit_for_bit_with_the_whole_time_limit(self, tmp_path):
        made = registry.make_env(CUBE)
        first, _ = made.reset(seed=3)
        np.savez(tmp_path / "states.npz", lifted=made._data.qpos)
        np.savez(tmp_path / "short.npz", short=made._data.qpos[1:])
        with (tmp_path / "one.npz").open("wb") as file:
            np.save(file, made._data.qpos)
        env = registry.make_env(dataclasses.replace(CUBE, init_states=str(tmp_path / "states.npz")))
        assert env.init_states == ("lifted",)
        ends = []
        for _ in range(2):
            restored, _ = env.reset(seed=5, options={"init_state": "lifted"})
            np.testing.assert_array_equal(restored["state"], first["state"])
            assert env.tick == 0
            ends.append([env.step(HOLD)[0]["state"] for _ in range(5)])
        np.testing.assert_array_equal(*ends)
        with pytest.raises(ConfigError, match=r"aloha_sim.*'other'.*seed-N, lifted"):
            env.reset(options={"init_state": "other"})
        for bad, named in (("short", "expected 23 finite"), ("none", "cannot be read"), ("one", "cannot be read")):
            with pytest.raises(ConfigError, match=named):
                registry.make_env(dataclasses.replace(CUBE, init_states=str(tmp_path / f"{bad}.npz")))

    @pytest.mark.parametrize("config", [CUBE, PEG])
    def test_a_camera_behind_a_robot_server_draws_the_same_picture(self, config):
        env = registry.make_env(dataclasses.replace(config, cameras=("top",), image_size=48))
        env.reset(seed=3)
        for _ in range(3):
            env.step(HOLD + np.float32(0.02))
        try:
            expected = env.read_images()["images/top"].astype(int)
        except ConfigError as error:
            if "OpenGL" not in str(error):
                raise
            pytest.skip(f"no rendering here: {error}")
        assert ((expected[..., 0] > 150) & (expected[..., 1] < 80)).any(), "the cube, or the peg"
        camera = AlohaSimCamera("top", config.env_name, size=48)
        objects = env.object_poses.reshape(-1)
        drawn = camera._draw(env.joints, {"objects": objects}).astype(int)
        assert np.abs(drawn - expected).mean() < 0.02, "fingers of a simulation mirror each other but nearly"
        objects[:2] += 0.1
        assert np.abs(camera._draw(env.joints, {"objects": objects}) - expected).mean() > 0.1
        with pytest.raises(CameraError, match="14 joints and 3 numbers of objects, expected 14 and"):
            camera._draw(env.joints, {"objects": objects[:3]})
        env.close()


DT, TICK = 0.005, 4  # s of a pass, passes of a control tick


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


@installed
def test_the_evaluating_profile_leaves_the_demonstrator_alone(world):
    episodes = []
    for seed in (0, 7):
        world.reset(seed)
        episodes.append(world.demonstrated(make_expert(AlohaSimConfig(), world.driver), seed, 220, TICK))
    assert [success for success, _, _ in episodes] == [True, True]
    assert sum(gated for _, _, gated in episodes) < 0.01 * sum(passes for _, passes, _ in episodes)


@installed
@pytest.mark.parametrize(("faults", "word"), [
    ({"lag": 0.15}, "ms old"), ({"dropped": 30}, "ms old"), ({"minus_pi": 2}, "which the mechanism cannot reach"),
    ({"fault": "joint 3 is hot"}, "joint 3 is hot"), ({"torque": False}, "no torque"),
])  # fmt: skip
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


@installed
def test_success_is_reported_once_and_lost_time_is_lost(world, monkeypatch):
    monkeypatch.setattr(world.driver.env, "stage", lambda: 4)
    events = [event for _ in range(40) for event in world.run().events]
    assert [tuple(e) for e in events] == [(1.0, True, False)]
    world.reset(2)
    assert len(world.driver._state["events"]) == 2
    steps = world.driver.simulation._steps
    world.driver.simulation.run_until(world.now + 10.0)
    assert world.driver.simulation._steps - steps < 10, "time in which a process stood still is not made up for"


@installed
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
