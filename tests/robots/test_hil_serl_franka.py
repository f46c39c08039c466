"""HIL-SERL's tasks on Frankas behind a robot server: experiments, and the robot files that belong to them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.config.hil_serl import TASKS
from serl_chunk.config.loader import load_experiment
from serl_chunk.robots import franka
from serl_chunk.robots.registry import robot_spec
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.types import STATE
from serl_chunk_robot.control.motions import Reset
from serl_chunk_robot.robot_file.config import load, load_driver

ROBOTS = Path(__file__).parents[2] / "experiments" / "robots"
# Its file; HIL-SERL's ACTION_SCALE, actions, numbers of a state; of the state's condition: index, threshold, cameras.
EXPECTED = {
    "ram_insertion": ("franka_ram", (0.01, 0.06), 6, 19, 6, 0.04, ("wrist_1", "wrist_2")),
    "usb_pickup_insertion": ("franka_usb", (0.015, 0.1), 7, 19, 0, 0.4, ("side_classifier",)),
    "object_handover": ("franka_handover", (0.04, 0.2), 14, 26, 0, 0.5, ("left_side_classifier",)),
}


@pytest.mark.parametrize("task", EXPECTED)
def test_each_task_has_hil_serl_s_numbers_and_condition(task):
    config = load_experiment(f"hil_serl_franka:{task}")
    spec, settings = robot_spec(config.robot), TASKS[task]
    _, scale, actions, state, number, above, cameras = EXPECTED[task]
    assert (config.robot.scale, spec.action_dim, spec.state_dim) == (scale, actions, state)
    assert (spec.max_episode_steps, config.discount) == (settings.max_episode_steps, settings.discount)
    assert (config.agent.image_keys, spec.grippers) == (settings.cameras, settings.grippers)
    assert config.agent.gripper.setup_mode == settings.setup_mode
    assert {c.name for c in spec.cameras} == {*settings.cameras, *cameras}
    assert (config.name, config.outcome.classifier) == (f"hil_serl_franka_{task}", f"classifiers/{task}")
    assert config.robot.mirrored_yaw == (task == "object_handover")
    at = np.full(state, 9.0, np.float32)
    at[number] = above
    beyond = at.copy()
    beyond[number] = np.nextafter(at[number], np.float32(1))
    assert [config.outcome.condition({STATE: each}) for each in (at, beyond)] == [False, True]


@pytest.mark.parametrize("task", EXPECTED)
def test_a_task_fits_its_robot_s_file_and_a_reset_is_within_the_profile_from_every_corner_of_the_box(task):
    config = load_experiment(f"hil_serl_franka:{task}").robot
    file = load(ROBOTS / f"{EXPECTED[task][0]}.toml")
    driver, limits = load_driver(file), file.profiles[file.start].limits
    spec = franka._served_spec(config, robot_spec(config))
    assert differing_fields(spec, driver.spec()._asdict()) == []
    assert (limits.low <= spec.action_low).all()
    assert (limits.high >= spec.action_high).all()
    there = {c.name: (c.spec.height, c.spec.width) for c in file.cameras}
    assert {c.name: there.get(c.name) for c in spec.cameras} == {c.name: (c.height, c.width) for c in spec.cameras}
    turning = 5.0  # rad/s, the driver's
    wanted = np.minimum(40 * np.repeat(config.scale, 3), [9.0] * 3 + [turning] * 3)
    for first, _ in driver.spec().arms:  # docs/robot_server.md: this changes no step
        assert (limits.rates.velocity[first : first + 6] >= wanted - 1e-9).all()
    driver.close()
    sides = np.array([spec.action_low, spec.action_high])
    for corner in itertools.product((0, 1), repeat=6):
        start = np.array([sides[corner[j % 7] if j % 7 < 6 else 0, j] for j in range(len(sides[0]))])
        for episode in (0, 1):
            todo = Reset(start, file.reset, limits, episode=episode, rng=np.random.default_rng(0))._todo
            assert len(todo) == len(file.reset) - (7 if task == "ram_insertion" and episode else 0)
    for k, box in enumerate(franka._boxes(config)):
        least, most = box.interval()
        begins = file.reset[-2].joints[7 * k : 7 * k + 6]
        assert (begins >= least - 1e-5).all()
        assert (begins <= most + 1e-5).all()
