"""Two tasks that undo each other on the simulated single arm: `pick` takes a block from bin B to A, `return` back.

Each has a learner, and one actor gives both the robot in turns (docs/new_task.md).
"""

from dataclasses import replace

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import FakeSingleArmConfig, GymConfig
from serl_chunk.robots.base import AS_IS
from serl_chunk.robots.fake.single_arm import PLACE, FakeSingleArmEnv
from serl_chunk.types import ConfigError

TASKS = {"pick": "put the block into bin A", "return": "put the block back into bin B"}
BINS = {TASKS["pick"]: PLACE, TASKS["return"]: (0.48, -0.08, PLACE[2])}  # m, where the block must be released
AROUND_A = 0.03  # m, uniform +-, of the block's start in bin A


class TwoBins(FakeSingleArmEnv):
    """A reset puts the block where the task begins, as a person would; `as-is` leaves it where it lies."""

    tasks = tuple(BINS)
    init_states = (AS_IS,)

    def _start(self, seed):
        super()._start(seed)
        self.place = np.array(BINS[self.task])
        if self.task == TASKS["return"]:
            self.block[:2] = PLACE[:2] + self.np_random.uniform(-AROUND_A, AROUND_A, 2)
        return {}

    def _restore(self, init_state):
        block, yaw = self.block, self.yaw
        self._start(None)
        self.block, self.yaw = np.array((*block[:2], PLACE[2])), yaw  # a hand that held it has let it fall
        return {}


def make(fake_env, evaluating):
    """Build the robot, which has both tasks."""
    return TwoBins(FakeSingleArmConfig())


def experiment(variant: str = "pick") -> ExperimentConfig:
    """Return the experiment of `pick` or `return`: but for the robot that of `fake_single_arm`, without a human."""
    if variant not in TASKS:
        raise ConfigError(f"fake_pick_return has no task {variant!r}. Give {' or '.join(TASKS)}", parameter="exp_name")
    base = load_experiment("fake_single_arm")
    robot = GymConfig(
        make=make,
        robot_name="two_bins",
        task=TASKS[variant],
        max_episode_steps=FakeSingleArmConfig.max_episode_steps,
    )
    return replace(base, name=f"fake_{variant}", robot=robot, actor=replace(base.actor, intervention="none"))
