"""Settings of grippers: continuous like any joint, chosen among a few values by a grasp critic, or left alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from serl_chunk.config.validation import require, require_choices, require_widths

SetupMode = Literal[
    "",
    "single-arm-fixed-gripper",
    "dual-arm-fixed-gripper",
    "single-arm-learned-gripper",
    "dual-arm-learned-gripper",
]
HIL_SERL_CHOICES = (-1.0, 0.0, 1.0)  # close, hold, open


@dataclasses.dataclass(frozen=True)
class GripperConfig:
    """What becomes of the action dimensions that `RobotSpec.grippers` names (docs/algorithms/gripper.md).

    Off by default: without `choices` and with `mode="learned"` grippers are continuous dimensions as all others are.
    """

    choices: tuple[float, ...] = ()  # values of a gripper in model space (about -1 closed .. 1 open); none: continuous
    # The choice that leaves a gripper as it is: 0 for HIL-SERL's grippers, whose commands are pushes and not openings.
    # A few ticks of "close" among many of it are then a decision to close. None where choices are openings.
    neutral: float | None = None
    # fixed: grippers are no part of what is learned; they get `fixed_value`, or keep what they had at reset.
    mode: Literal["learned", "fixed"] = "learned"
    fixed_value: float | None = None  # in model space; none: the measured opening at reset, until a human changes it
    # HIL-SERL's name of the composition: how many grippers the robot must have, and the mode. Learned ones have
    # HIL-SERL's three choices unless `choices` says others.
    setup_mode: SetupMode = ""
    joint: bool = True  # one choice for all grippers (9 for two of three, HIL-SERL); False: one for each gripper
    hold_steps: int | None = None  # ticks that a choice is held; divides chunk.execute_steps; none: all of it
    penalty: float = 0.0  # reward per change of a gripper's choice, for the grasp critic alone (HIL-SERL: -0.02)
    epsilon: float = 0.02  # probability that an exploring decision takes a random choice, each held part apart
    # Choices that imitation gives less than this share of the likeliest one's probability are not considered (discrete
    # BCQ, Fujimoto 2019: 0.3). 0 considers all, as HIL-SERL; 1 is imitation alone.
    mask_unreachable: float = 0.3
    hidden: tuple[int, ...] = (256, 256)  # of the grasp critic, and of the imitation beside it
    lr: float | None = None  # Adam; none: agent.lr
    tau: float = 0.005  # target <- tau * grasp critic + (1 - tau) * target
    loss: Literal["as_critic", "squared"] = "as_critic"  # agent.critic.loss (bounded for hl_gauss), or squared
    # Whether the critic of the continuous dimensions has the choice as an input. What an arm's chunk is worth depends
    # on what the fingers do meanwhile; without it they are averaged over as the data had them (HIL-SERL: False).
    critic_sees_gripper: bool = True

    def __post_init__(self) -> None:
        require_choices(self, "agent.gripper.")
        require(
            len(self.choices) != 1 and len(set(self.choices)) == len(self.choices),
            f"agent.gripper.choices must be at least two different values, or none for continuous grippers, got "
            f"{self.choices}",
        )
        require(
            all(math.isfinite(c) and abs(c) <= 1 for c in self.choices),
            f"agent.gripper.choices are in model space and must be in [-1, 1], got {self.choices}",
        )
        wants = self.setup_mode.rpartition("arm-")[2].partition("-")[0]
        require(
            wants != "learned" or self.mode != "fixed",
            f"agent.gripper.mode=fixed contradicts agent.gripper.setup_mode={self.setup_mode}: leave one of them out",
        )
        require(
            self.composition != "fixed" or not self.choices,
            f"agent.gripper.choices={self.choices} would not be read: a fixed gripper chooses nothing. Leave them out, "
            "or use agent.gripper.mode=learned and a learned-gripper setup_mode",
        )
        require(
            self.fixed_value is None or (self.composition == "fixed" and abs(self.fixed_value) <= 1),
            f"agent.gripper.fixed_value={self.fixed_value} must be in [-1, 1] (model space), and needs "
            "agent.gripper.mode=fixed",
        )
        require(
            self.hold_steps is None or self.hold_steps >= 1,
            f"agent.gripper.hold_steps must be at least 1 tick, or none for what is executed, got {self.hold_steps}",
        )
        require(
            math.isfinite(self.penalty) and self.penalty <= 0,
            f"agent.gripper.penalty is a reward for changing a gripper and must be <= 0, got {self.penalty}",
        )
        for name, off in (("neutral", None), ("hold_steps", None), ("penalty", 0.0)):
            require(
                getattr(self, name) == off or self.composition == "learned",
                f"agent.gripper.{name}={getattr(self, name)} would not be read: it is for chosen grippers. Set "
                "agent.gripper.choices (or a learned-gripper setup_mode), or leave it out",
            )
        require(
            self.neutral is None or self.neutral in self.values,
            f"agent.gripper.neutral={self.neutral} must be one of agent.gripper.choices={self.values}, or none",
        )
        for name in ("epsilon", "mask_unreachable"):
            require(0 <= getattr(self, name) <= 1, f"agent.gripper.{name} must be in [0, 1], got {getattr(self, name)}")
        require_widths("agent.gripper.hidden", self.hidden)
        require(
            self.lr is None or 0 < self.lr < math.inf,
            f"agent.gripper.lr must be positive and finite, or none, got {self.lr}",
        )
        require(0 < self.tau <= 1, f"agent.gripper.tau must be in (0, 1], got {self.tau}")

    @property
    def composition(self) -> Literal["continuous", "fixed", "learned"]:
        """What the settings come to."""
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
        """How many arms `setup_mode` speaks of; None where it says nothing."""
        return {"single": 1, "dual": 2}.get(self.setup_mode.partition("-")[0])

    @property
    def reads_before(self) -> bool:
        """Whether batches hold the action before each window, where they can: what moves at its start shows by it."""
        return self.composition == "learned"

    @property
    def kept(self) -> bool:
        """Whether the actor keeps every gripper at what it last had, whatever the policy says."""
        return self.composition == "fixed" and self.fixed_value is None
