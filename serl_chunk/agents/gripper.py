"""Agents whose grippers are no continuous dimensions: fixed, or chosen by a grasp critic beside the arm's agent.

The arm's agent is any chunked continuous agent, built for the action dimensions that are left. It keeps its own losses,
optimisers and part of the state; what the grippers need beside it is `AgentState.grasp`.
"""

from __future__ import annotations

from serl_chunk.agents.arm_and_gripper import Build
from serl_chunk.agents.base import Agent
from serl_chunk.agents.fixed_gripper import FixedGripper
from serl_chunk.agents.learned_gripper import LearnedGripper
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import AgentConfig
from serl_chunk.types import ConfigError


def with_gripper(config: AgentConfig, spec: AgentSpec, build: Build) -> Agent:
    """The agent of `build` for the arm, with grippers as `config.gripper` has them.

    Raises ConfigError where the robot has not the grippers that the configuration speaks of.
    """
    g, found = config.gripper, len(spec.grippers)
    if g.composition == "learned" and not found:
        raise ConfigError(
            "agent.gripper has choices, and the robot's specification names no gripper: list its action dimensions "
            "(robot.grippers of a gymnasium robot), or leave agent.gripper.choices and setup_mode out"
        )
    if g.mode == "fixed" and g.arms is None and not found:
        raise ConfigError(
            "agent.gripper.mode=fixed would fix nothing: the robot's specification names no gripper. List its action "
            "dimensions (robot.grippers of a gymnasium robot), or leave agent.gripper.mode out"
        )
    # A fixed gripper may be no action at all: HIL-SERL's wrapper takes it away.
    if g.arms is not None and found != g.arms and (found or g.composition == "learned"):
        raise ConfigError(
            f"agent.gripper.setup_mode={g.setup_mode} is for {g.arms} gripper{'s' if g.arms > 1 else ''}, and the "
            f"robot's specification names {found} (action dimensions {', '.join(map(str, spec.grippers))}): use the "
            "setup_mode of as many arms"
        )
    if found == spec.action_dim:
        raise ConfigError("agent.gripper: every action of this robot is a gripper, and nothing is left for the arm")
    return (FixedGripper if g.composition == "fixed" else LearnedGripper)(config, spec, build)
