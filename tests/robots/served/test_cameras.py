"""Cameras of a robot's server in the control loop: real sockets, a real EpisodeRunner, pictures that go missing."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
import time

import driven_leader
import numpy as np
import pytest
from actor_helpers import ListSink, make_config
from robot_cameras import PublishedCamera
from robot_limits import GRIPPERS, HOME, J
from robot_served import HERE, Served, free_port, served, wait
from robot_world import TICK

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.served import cameras
from serl_chunk.robots.served.cameras import ServedPictures
from serl_chunk.robots.served.robot import HELD_S, ServedRobot
from serl_chunk.types import IMAGE_PREFIX, CameraSpec, ConfigError, Source
from serl_chunk_robot.client.client import RobotError

TOP = IMAGE_PREFIX + "top"
SPEC = dataclasses.replace(driven_leader.SPEC, cameras=(CameraSpec("top", 12, 16), CameraSpec("left", 12, 16)))


class Cell:
    """A served robot that is cleared, with two cameras; `top` sends frames."""

    def __init__(self, robot: Served, camera: PublishedCamera) -> None:
        self.robot, self.top, self.operator = robot, camera, robot.ready()
        self.config = FakeAlohaConfig(server=f"{HERE}:{robot.port}")
        self._made: list[ServedRobot] = []

    def env(self, **more) -> ServedRobot:
        spec = dataclasses.replace(SPEC, **more)
        self._made.append(ServedRobot(self.config, spec, name="actor"))
        return self._made[-1]

    def wait(self, condition) -> None:
        """Wait for a condition, and clear a robot that a busy machine stopped meanwhile."""

        def look() -> bool:
            with contextlib.suppress(RobotError):
                self.operator.request("clear")
            return condition()

        wait(look, 30)

    def close(self) -> None:
        for env in self._made:
            env.close()


@pytest.fixture
def cell(monkeypatch):
    monkeypatch.setattr(cameras, "STALE_S", 0.4)  # machines that run tests may stand still for longer
    port = free_port(4)
    with served(port=port, cameras=(("top", 12, 16, port + 2), ("wrist", 8, 16, port + 3))) as robot:
        camera = PublishedCamera("top", port + 2)
        made = Cell(robot, camera)
        yield made
        made.close()
        camera.close()


class Moves:
    """A demonstrator that moves the joints slowly up, and calls `then` at its `at`-th tick."""

    def __init__(self, at: int, then) -> None:
        self.at, self.then, self.ticks = at, then, 0

    def reset(self, seed):
        self.ticks = 0

    def act(self):
        self.ticks += 1
        if self.ticks == self.at:
            self.then()
        rising = np.array([i not in GRIPPERS for i in range(J)])
        return (HOME + 0.004 * min(self.ticks, 60) * rising).astype(np.float32)


def episode(cell, env, expert, **more):
    """Run one episode; returns its records, the runner's summary and its configuration."""
    config = dataclasses.replace(make_config(**more), robot=cell.config)
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, frames="every_tick"))
    sink = ListSink()
    runner = EpisodeRunner(env, expert, sink, config=config, cameras=("top",))
    try:
        return sink, runner.run_episode(1), config
    finally:
        runner.close()


@pytest.mark.parametrize(("fault", "words"), [("silent", "no new picture for"), ("frozen", "the same picture for")])
def test_a_camera_that_stays_away_ends_the_episode_and_the_next_one_waits_for_it(cell, caplog, fault, words):
    env, moments = cell.env(), []

    def fail():
        moments.append(time.monotonic())
        setattr(cell.top if fault == "silent" else cell.top.camera, fault, True)

    sink, summary, _ = episode(cell, env, Moves(15, fail))
    after = time.monotonic() - moments[0]
    assert f"camera 'top': {words}" in summary.fault
    assert (sink.last_end.outcome_by, sink.last_end.final_observation) == ("fault", None)
    late = [s for s in sink.steps if s.lost_ticks]
    assert after > HELD_S
    assert len(late) > 0.5 * HELD_S / TICK, "the loop went on"
    assert {s.source for s in late} == {Source.HOLD}
    assert np.abs(late[-1].action - late[0].action).max() < 0.05, "the arms were held"
    if fault == "silent":
        began = threading.Event()
        thread = threading.Thread(target=lambda: (env.reset(seed=2), began.set()))
        thread.start()
        try:
            cell.wait(lambda: "waiting for the robot's cameras: camera 'top'" in caplog.text)
            assert not began.is_set()
            cell.top.silent = False
            cell.wait(began.is_set)
        finally:
            env.stop = lambda: "the test"
            thread.join(10)


@pytest.mark.parametrize("noisy", [True, False])
def test_a_picture_that_a_sensor_repeats_gets_old_also_while_the_robot_stands(cell, noisy):
    cell.top._publisher._spec = cell.top._publisher._spec._replace(noisy=noisy)
    env = cell.env()
    env.watch(["top"])
    env.reset(seed=1)
    cell.top.camera.frozen = True
    infos = [env.step(HOME.astype(np.float32))[4] for _ in range(round(2 * cameras.STALE_S / TICK))]
    if not noisy:
        assert not any("unseen" in i for i in infos), "a drawn scene in which nothing moves"
        return
    assert re.search(r"camera 'top': the same picture for [01]\.\d s", infos[-1]["unseen"])
    assert env._cameras.captured() < env._client.server_time() - cameras.STALE_S
    cell.top.camera.frozen = False
    ends = time.monotonic() + 5
    while "unseen" in env.step(HOME.astype(np.float32))[4]:
        assert time.monotonic() < ends


def test_the_newest_pictures_are_read_with_their_numbers(cell):
    env = cell.env()
    first = env.read_images(["top"])[TOP]  # not watched before: waited for
    assert (first.shape, first.dtype) == ((12, 16, 3), np.uint8)
    kept, number = first.copy(), env.frame_numbers()["top"]
    env.reset(seed=1)
    for _ in range(3):
        env.step(HOME.astype(np.float32))
    assert env.frame_numbers().keys() == {"top"}
    assert env.frame_numbers()["top"] > number
    for _ in range(3):  # of ten pictures one is like the first
        env.step(HOME.astype(np.float32))
        if not np.array_equal(again := env.read_images(["top"])[TOP], kept):
            break
    assert not np.array_equal(again, kept)
    assert np.array_equal(first, kept), "what was read does not change"
    assert env.read_images(["top"])[TOP] is again


@pytest.mark.parametrize("joints_at", ["now", "capture"])
def test_the_joints_of_an_observation_are_the_newest_or_those_of_its_oldest_picture(cell, joints_at):
    cell.config = dataclasses.replace(cell.config, joints_at=joints_at)
    env = cell.env()
    env.watch(["top"])
    cell.top.late = 0.1  # s between a picture's capture and its arrival
    moving = np.array([i not in GRIPPERS for i in range(J)])

    def lag() -> float:
        """In s."""
        env.reset(seed=1)
        behind = []
        for tick in range(40):
            q = env.step((HOME + 0.004 * tick * moving).astype(np.float32))[0]["state"][1]
            behind.append(env.seen().q[1] - q)
        return float(np.median(behind[20:])) / (0.004 / TICK)

    if joints_at == "now":
        assert lag() == pytest.approx(0, abs=1e-5)
    else:  # a busy machine gets its pictures later: one of a few
        assert any(0.08 < lag() < 0.2 for _ in range(4))


def test_a_camera_that_no_episode_reads_is_not_waited_for_nor_any_by_a_session_that_ends(cell):
    cell.top.silent = True
    env = cell.env()
    env.watch([])
    env.reset(seed=1)
    assert "unseen" not in env.step(HOME.astype(np.float32))[4]
    env.watch(["top"])
    env.stop = lambda: "operator"
    env.reset(seed=1)
    assert not env.read_images(["top"])[TOP].any()


def test_a_camera_of_another_size_is_refused_at_once_and_one_that_the_server_lacks_where_it_is_read(cell):
    for camera, named in (
        (CameraSpec("top", 12, 20), "'top' with 12 x 16 pixels, expected 12 x 20"),
        (CameraSpec("wrist", 12, 16), "'wrist' with 8 x 16 pixels, expected 12 x 16"),
    ):
        with pytest.raises(ConfigError, match=named) as raised:
            cell.env(cameras=(camera,))
        assert raised.value.parameter == "robot.server"
    env = cell.env(cameras=(CameraSpec("left", 12, 16),))
    for read in (env.watch, env.read_images):
        with pytest.raises(ConfigError, match=r"no camera 'left' \(it has top, wrist\)"):
            read(["left"])


def test_a_picture_of_another_size_is_not_decided_on(cell, caplog):
    caplog.set_level(logging.WARNING)
    env = cell.env()
    env.watch(["top"])
    env.reset(seed=1)
    cell.top.close()
    cell.top.__init__("top", cell.robot.port + 2, height=12, width=18)
    ends = time.monotonic() + 5
    while "unseen" not in (info := env.step(HOME.astype(np.float32))[4]) or "(12, 18)" not in info["unseen"]:
        assert time.monotonic() < ends


def test_a_viewer_sees_pictures_between_episodes_and_none_of_a_server_that_is_gone(cell):
    pictures = ServedPictures(cell.config, "page")
    try:
        cell.wait(pictures.newest)
        first = pictures.newest()["top"]
        assert first.image.shape == (12, 16, 3)
        assert 0 <= time.monotonic() - first.moment < 5
        cell.wait(lambda: pictures.newest()["top"].serial != first.serial)
        cell.top.camera.frozen = True  # the same picture, again and again
        time.sleep(0.5)
        frozen = pictures.newest()["top"]
        time.sleep(0.3)
        assert pictures.newest()["top"].moment == pytest.approx(frozen.moment, abs=0.05)
        pictures.rest()
        cell.top.camera.frozen = False
        cell.wait(pictures.newest)
    finally:
        pictures.rest()
    gone = ServedPictures(dataclasses.replace(cell.config, server=f"{HERE}:{free_port()}"), "page")
    assert gone.newest() == {}
    began = time.monotonic()
    assert gone.newest() == {}  # not at once again
    assert time.monotonic() - began < 1
