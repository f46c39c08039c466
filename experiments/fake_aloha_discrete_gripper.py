"""The fake ALOHA task with grippers that close or open for a whole chunk, chosen by a grasp critic."""

from dataclasses import replace

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment


def experiment() -> ExperimentConfig:
    """Everything but the grippers is `fake_aloha`'s.

    The normaliser puts the demonstrations' closed and open at -0.9 and 0.9.
    """
    agent = AcfqlConfig(gripper=GripperConfig(choices=(-0.9, 0.9)))
    return replace(load_experiment("fake_aloha"), name="fake_aloha_discrete_gripper", agent=agent)
