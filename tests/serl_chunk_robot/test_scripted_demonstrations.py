"""The profile for evaluations leaves the scripted experts of simulated ALOHA alone, tick by tick.

That of the cube keeps within what every driver's profile has by default. That of the insertion turns its wrists by up
to 39 rad/s^2, with kinks: the driver of its arms has to tell more.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from robot_limits import J
from robot_world import World

from serl_chunk.config.robots import AlohaSimConfig
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.robot_file.profiles import built_in

SHARE = 0.01  # of ticks that may be gated
LONGEST = 400  # ticks
ARM = [j % 7 != 6 for j in range(J)]
DEFAULT = viperx_arms().spec()
INSERTION = DEFAULT._replace(
    acceleration=tuple(np.where(ARM, 60.0, 1e4)), jerk=tuple(np.where(ARM, 6000.0, 1e7))
)  # rad/s^2 and rad/s^3


def demonstration(task: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The joints at the start of an episode, float64[J], and the expert's commands, float64[T, J]."""
    env = make_env(AlohaSimConfig(env_name=task, max_episode_steps=LONGEST))
    try:
        expert = make_expert(env)
        observation, _ = env.reset(seed=seed)
        start = np.array(observation["state"][:14], np.float64)
        expert.reset(seed)
        commands, done, success = [], False, False
        while not done:
            commands.append(np.array(expert.act(), np.float64))
            _, _, terminated, truncated, info = env.step(commands[-1].astype(np.float32))
            done, success = terminated or truncated, info["success"]
        assert success, "a demonstration"
        return start, np.array(commands)
    finally:
        env.close()


def gated(start: np.ndarray, commands: np.ndarray, spec: DriverSpec) -> tuple[int, Counter[str]]:
    """Drive simulated arms along commands; returns the ticks that did not end on their target, and the reasons."""
    world = World(built_in(spec)["evaluating"])
    world.arms.q, world.arms.target = start.copy(), start.copy()
    world.armed()
    off = 0
    for target in commands:
        assert world.send(target) == ""
        world.run(4)
        off += int(np.abs(world.arms.sent[-1] - target).max() > 1e-6)
    assert world.state == "RUN"
    return off, world.gate.counts


def check(task: str, seeds: range, spec: DriverSpec = DEFAULT) -> None:
    ticks, off, reasons = 0, 0, Counter[str]()
    for seed in seeds:
        start, commands = demonstration(task, seed)
        changed, why = gated(start, commands, spec)
        ticks, off, reasons = ticks + len(commands), off + changed, reasons + why
    assert ticks > 100 * len(seeds)
    assert off < SHARE * ticks, f"{off} of {ticks}: {dict(reasons)}"


def test_an_expert_is_left_alone():
    check("transfer_cube", range(3))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec"), [("transfer_cube", DEFAULT), ("insertion", INSERTION)])
def test_experts_are_left_alone(task: str, spec: DriverSpec):
    check(task, range(1, 7), spec)
