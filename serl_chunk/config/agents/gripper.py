"""Settings of grippers: continuous like any joint, chosen among a few values by a grasp critic, or left alone."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from serl_chunk.config.fields import CRITIC, LEARNED_GRIPPER, Group, acting, derived, require, setting, shaping

SetupMode = Literal[
    "", "single-arm-fixed-gripper", "dual-arm-fixed-gripper", "single-arm-learned-gripper", "dual-arm-learned-gripper"
]
HIL_SERL_CHOICES = (-1.0, 0.0, 1.0)  # close, hold, open
_LEARNED_CRITIC = (LEARNED_GRIPPER, CRITIC)


@dataclasses.dataclass(frozen=True)
class GripperConfig(Group, path="agent.gripper."):
    """What becomes of the action dimensions that `RobotSpec.grippers` names (docs/algorithms/gripper.md).

    Off by default: without `choices` and with `mode="learned"` grippers are continuous dimensions as all others are.
    """

    choices: tuple[float, ...] = derived((), "values, -1 closed .. 1 open; empty: continuous", least=-1, most=1)
    # A few ticks of "close" among many of `neutral` are a decision to close. None where choices are openings.
    neutral: float | None = setting(None, "the choice that leaves a gripper as it is; 0 for HIL-SERL's grippers")
    mode: Literal["learned", "fixed"] = derived("learned", "fixed: `fixed_value`, or what it had at reset")
    fixed_value: float | None = derived(None, "in model space; none: as at reset or a human left it", least=-1, most=1)
    setup_mode: SetupMode = derived("", "HIL-SERL's name of arms and mode; learned ones have its three choices")
    joint: bool = derived(True, "one choice for all grippers (HIL-SERL), or one for each", requires=LEARNED_GRIPPER)
    hold_steps: int | None = derived(None, "time a choice is held; none: chunk.execute_steps", unit="ticks", least=1)
    penalty: float = setting(0.0, "reward per change, for the grasp critic (HIL-SERL: -0.02)", most=0, requires=CRITIC)
    # Without it, what the fingers do is averaged over as the data had it (HIL-SERL: False).
    critic_sees_gripper: bool = shaping(True, "the choice is an input of the critic", requires=_LEARNED_CRITIC)

    # Of the critic and the classifier; their widths, rate and average are the critic's (bc: 256, 256 and agent.lr).
    epsilon = 0.02  # probability of a random choice
    tau = cast(float | None, None)  # share of the new critic in its target; None: agent.critic.tau
    mask_unreachable = 0.3  # least share of the likeliest choice's imitation probability: discrete BCQ (Fujimoto 2019)

    def _check(self) -> None:
        # fmt: off
        require(len(self.choices) != 1 and len(set(self.choices)) == len(self.choices), "agent.gripper.choices",
            f"must be at least two different values, or none for continuous grippers, got {self.choices}")
        require("learned" not in self.setup_mode or self.mode != "fixed", "agent.gripper.mode",
            f"fixed contradicts agent.gripper.setup_mode={self.setup_mode}. Leave one of them out.")
        require(self.composition != "fixed" or not self.choices, "agent.gripper.choices",
            f"{self.choices} has no effect: a fixed gripper chooses nothing. Leave it out, or use "
            "agent.gripper.mode=learned and a learned-gripper setup_mode.")
        require(self.fixed_value is None or self.composition == "fixed", "agent.gripper.fixed_value",
            f"{self.fixed_value} has no effect on a learned gripper. Set agent.gripper.mode=fixed, or leave it out.")
        for name, off in (("neutral", None), ("hold_steps", None), ("penalty", 0.0)):
            require(getattr(self, name) == off or self.composition == "learned", f"agent.gripper.{name}",
                f"{getattr(self, name)} has no effect: it is for chosen grippers. Set agent.gripper.choices (or a "
                "learned-gripper setup_mode), or leave it out.")
        require(self.neutral is None or self.neutral in self.values, "agent.gripper.neutral",
            f"must be one of agent.gripper.choices={self.values}, or none, got {self.neutral}")

    @property
    def composition(self) -> Literal["continuous", "fixed", "learned"]:
        if self.mode == "fixed" or "fixed" in self.setup_mode:
            return "fixed"
        return "learned" if self.choices or self.setup_mode else "continuous"

    @property
    def values(self) -> tuple[float, ...]:
        """The choices of a learned gripper, in model space."""
        return self.choices or HIL_SERL_CHOICES

    @property
    def stays(self) -> float | None:
        """The choice that leaves a gripper as it is: `neutral`, and 0 among HIL-SERL's three."""
        return 0.0 if self.neutral is None and not self.choices else self.neutral

    @property
    def arms(self) -> int | None:
        """Number of arms in `setup_mode`; None where it is empty."""
        return {"single": 1, "dual": 2}.get(self.setup_mode.partition("-")[0])

    @property
    def reads_before(self) -> bool:
        """Whether batches hold the action before each window, which shows what moves at the window's start."""
        return self.composition == "learned"

    @property
    def kept(self) -> bool:
        """Whether the actor keeps every gripper at its last opening, whatever the policy outputs."""
        return self.composition == "fixed" and self.fixed_value is None


@dataclasses.dataclass(frozen=True)
class SacGripperConfig(GripperConfig):
    """A gripper with what HIL-SERL's has besides."""

    epsilon: float = acting(0.02, "probability of a random choice", least=0, most=1, requires=LEARNED_GRIPPER)
    mask_unreachable: float = setting(
        0.3, "least share of the likeliest choice's imitation probability; 0 considers all (HIL-SERL)",
        least=0, most=1, requires=_LEARNED_CRITIC,
    )  # fmt: skip
    tau: float = setting(0.005, "share of the new critic in its target", above=0, most=1, requires=_LEARNED_CRITIC)
