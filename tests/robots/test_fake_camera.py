"""The fake ALOHA's cameras behind a robot server draw what its state says."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from robot_served import HERE, served, wait
from robot_world import FaultyArms

from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.camera import FakeAlohaCamera
from serl_chunk.robots.fake.render import render
from serl_chunk_robot.drivers.camera import CameraError
from serl_chunk_robot.robot_file.config import load

CUBE = (0.1, 0.05, 0.02)


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
def test_the_picture_is_that_of_the_measured_joints_and_the_cube(view):
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


def test_another_robot_is_named():
    with (
        served() as robot,
        opened("top", robot) as camera,
        pytest.raises(CameraError, match="serves 'fake arms', whose state has no cube, holder"),
    ):
        camera.read()


@pytest.mark.parametrize("options", [{"view": "front"}, {"view": "top", "size": 0}, {"view": "top", "rate": 0.0}])
def test_views_and_sizes_that_are_not_there_are_refused(options):
    with pytest.raises(ValueError, match=r"valid are top|above 0"):
        FakeAlohaCamera(**options)


def test_a_robots_file_names_it(tmp_path):
    path = tmp_path / "robot.toml"
    path.write_text(
        'name = "a"\ndriver = "fake"\n[[camera]]\nname = "top"\ndriver = "fake_aloha"\nview = "top"\nsize = 48\n'
    )
    assert load(path).cameras[0].spec == (48, 48, False)
