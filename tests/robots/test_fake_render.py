"""Pictures of the fake ALOHA, drawn by its environment or from what a robot's server publishes."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from robot_served import HERE, served, wait
from robot_world import FaultyArms

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.camera import FakeAlohaCamera
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.render import render
from serl_chunk_robot.drivers.camera import CameraError
from serl_chunk_robot.robot_file.config import load

JOINTS = list(task.HOME_JOINTS)
CUBE = (0.15, 0.1, task.CUBE_REST_Z)


def _where(image, colour):
    """Mean pixel (row, column) of a colour, and how many pixels have it."""
    rows, columns = np.nonzero(np.all(image == colour, axis=-1))
    return rows.mean(), columns.mean(), len(rows)


def test_the_top_camera_shows_where_the_cube_is_and_whether_it_is_held():
    picture = render("top", 64, JOINTS, CUBE, False)
    here = _where(picture, (210, 40, 40))
    there = _where(render("top", 64, JOINTS, (0.25, -0.1, 0.02), False), (210, 40, 40))
    assert there[1] > here[1] + 2  # further right
    assert there[0] > here[0] + 5  # and nearer: y points up in the image
    assert 3 <= here[2] <= 30
    assert not np.array_equal(picture, render("top", 64, JOINTS, CUBE, True))


@pytest.mark.parametrize(("camera", "own", "other"), [("left_wrist", 0, 7), ("right_wrist", 7, 0)])
def test_wrist_cameras_turn_with_their_own_arm_and_show_their_fingers(camera, own, other):
    still = render(camera, 64, JOINTS, CUBE, False)
    turned, fingers, behind = list(JOINTS), list(JOINTS), list(JOINTS)
    turned[own] += 0.3
    fingers[own + 6] = 0.0
    behind[other + 1] -= 1.0  # the other arm leans back, out of sight
    assert np.mean(np.any(render(camera, 64, turned, CUBE, False) != still, axis=-1)) > 0.05
    assert not np.array_equal(render(camera, 64, fingers, CUBE, False), still)
    assert np.mean(np.any(render(camera, 64, behind, CUBE, False) != still, axis=-1)) < 0.3


def test_a_wrist_camera_sees_the_cube_between_the_fingers():
    env = FakeAlohaEnv(FakeAlohaConfig())
    env.reset(seed=0)
    expert = env.make_expert()
    while env.holder < 0:
        env.step(expert.act())
    row, column, count = _where(env.read_images()["images/right_wrist"], (40, 190, 70))
    assert abs(column - 31.5) < 6
    assert abs(row - 31.5) < 12
    assert count > 10


@pytest.mark.parametrize("camera", task.CAMERAS)
def test_extreme_poses_render_in_any_size(camera):
    for seed in range(20):
        joints = np.random.default_rng(seed).uniform(task.ACTION_LOW, task.ACTION_HIGH).tolist()
        image = render(camera, (8, 16)[seed % 2], joints, CUBE, False)
        assert image.shape == ((8, 16)[seed % 2],) * 2 + (3,)
        assert image.dtype == np.uint8


class Aloha(FaultyArms):
    """Arms with a cube."""

    holder = -1.0

    def read(self):
        return super().read()._replace(extra={"cube": np.array(CUBE), "holder": np.array([self.holder])})


@contextlib.contextmanager
def opened(view, robot, **more):
    """A camera of a robot that was measured."""
    camera = FakeAlohaCamera(view, server=f"{HERE}:{robot.port}", **more)
    camera.open(time.monotonic)
    try:
        client = robot.client("a", "any")
        wait(lambda: client.next_state()["q"] is not None)
        yield camera
    finally:
        camera.close()


@pytest.mark.parametrize("view", task.CAMERAS)
def test_a_served_camera_draws_the_measured_joints_and_the_cube(view):
    arms = Aloha()
    with served(arms=arms) as robot, opened(view, robot, size=32, rate=100.0) as camera:
        assert camera.spec() == (32, 32, False)
        frames = [camera.read() for _ in range(3)]
        q = arms.q.tolist()
        assert np.array_equal(frames[-1].image, render(view, 32, q, CUBE, False))
        assert [f.number for f in frames] == [1, 2, 3]
        assert frames[0].stamp < frames[1].stamp < frames[2].stamp < time.monotonic()
        arms.holder = 1.0
        wait(lambda: np.array_equal(camera.read().image, render(view, 32, q, CUBE, True)))


def test_a_served_camera_names_another_robot_and_is_set_in_a_robots_file(tmp_path):
    with (
        served() as robot,
        opened("top", robot) as camera,
        pytest.raises(CameraError, match="serves 'fake arms', whose state has no cube, holder"),
    ):
        camera.read()
    path = tmp_path / "robot.toml"
    path.write_text(
        'name = "a"\ndriver = "fake"\n[[camera]]\nname = "top"\ndriver = "fake_aloha"\nview = "top"\nsize = 48\n'
    )
    assert load(path).cameras[0].spec == (48, 48, False)
