import numpy as np
import pytest
from errors import naming

from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.fake import spec as task
from serl_chunk.robots.fake.env import FakeAlohaEnv
from serl_chunk.robots.fake.render import render
from serl_chunk.types import ConfigError

JOINTS = list(task.HOME_JOINTS)
CUBE = (0.15, 0.1, task.CUBE_REST_Z)


def _where(image, colour):
    """Mean pixel (row, column) of a colour, and how many pixels have it."""
    rows, columns = np.nonzero(np.all(image == colour, axis=-1))
    return rows.mean(), columns.mean(), len(rows)


@pytest.mark.parametrize("camera", task.CAMERAS)
@pytest.mark.parametrize("size", [8, 64])
def test_shape_and_dtype(camera, size):
    image = render(camera, size, JOINTS, CUBE, False)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8


def test_the_top_camera_shows_where_the_cube_is():
    here = _where(render("top", 64, JOINTS, CUBE, False), (210, 40, 40))
    there = _where(render("top", 64, JOINTS, (0.25, -0.1, 0.02), False), (210, 40, 40))
    assert there[1] > here[1] + 2  # further right
    assert there[0] > here[0] + 5  # and nearer: y points up in the image
    assert 3 <= here[2] <= 30


def test_holding_shows():
    free, held = (render("top", 64, JOINTS, CUBE, h) for h in (False, True))
    assert not np.array_equal(free, held)


@pytest.mark.parametrize(("camera", "own", "other"), [("left_wrist", 0, 7), ("right_wrist", 7, 0)])
def test_wrist_cameras_turn_with_their_own_arm_and_show_their_fingers(camera, own, other):
    still = render(camera, 64, JOINTS, CUBE, False)
    turned, fingers = list(JOINTS), list(JOINTS)
    turned[own] += 0.3
    fingers[own + 6] = 0.0
    assert np.mean(np.any(render(camera, 64, turned, CUBE, False) != still, axis=-1)) > 0.05
    assert not np.array_equal(render(camera, 64, fingers, CUBE, False), still)
    behind = list(JOINTS)
    behind[other + 1] -= 1.0  # the other arm leans back, out of sight
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


def test_images_on_request_and_always():
    env = FakeAlohaEnv(FakeAlohaConfig(image_size=16))
    assert set(env.reset(seed=0)[0]) == {"state"}
    assert set(env.read_images(["top"])) == {"images/top"}
    always = FakeAlohaEnv(FakeAlohaConfig(image_size=16), images="always")
    observation, _ = always.reset(seed=0)
    assert always.observation_space.contains(observation)
    np.testing.assert_array_equal(observation["images/top"], env.read_images()["images/top"])
    with pytest.raises(ConfigError, match=naming("front", "left_wrist")):
        env.read_images(["front"])


def test_extreme_poses_render():
    for seed in range(20):
        joints = np.random.default_rng(seed).uniform(task.ACTION_LOW, task.ACTION_HIGH).tolist()
        for camera in task.CAMERAS:
            assert render(camera, 16, joints, CUBE, False).shape == (16, 16, 3)
