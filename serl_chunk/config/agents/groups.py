"""Settings of agents that train in iterations on groups of episodes (RIPT-VLA, FlowIPO)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from serl_chunk.config.agents.base import Optimiser
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.fields import needs, require, setting, shaping, widths
from serl_chunk.config.groups import GroupConfig

_FLOW_IPO = needs("agent.rule", "flow_ipo")
_CLONES = needs("agent.rule", "filtered_bc")
_HEADS = needs("agent.policy", "gaussian", "laplace", note="the flow's layers are agent.flow.hidden")


@dataclasses.dataclass(frozen=True)
class GroupAgentConfig(BcConfig):
    """A clone that its own outcomes improve, in iterations on groups of episodes; `group.*` says which episodes."""

    kind: ClassVar[str] = "group"
    iterates: ClassVar[bool] = True
    own_weight = 1.0

    policy: Literal["flow", "gaussian", "laplace", "pi0"] = shaping("flow", "the kind of policy")  # type: ignore[assignment]
    hidden: tuple[int, ...] = widths((256, 256), "widths of the hidden layers of a head", requires=_HEADS)
    rule: Literal["ppo", "flow_ipo", "filtered_bc"] = setting(
        "ppo", "clipped ratios (RIPT), velocities by preference (FlowIPO), or cloning of successes"
    )
    successes: Literal["iteration", "all"] = setting(
        "iteration", "cloned ones: the iteration's, or all so far with the demonstrations", requires=_CLONES
    )
    # docs/algorithms/groups.md: with 3e-5 the flow gained less in as many iterations.
    iteration_lr: float = setting(1e-4, "learning rate (Adam) in iterations; agent.lr is imitation's before", above=0)
    iteration_grad_clip: float = setting(1.0, "norm of the gradient in iterations; 0: any", least=0)
    flow_ipo_alpha: float = setting(2.0, "sharpness of the weights (FlowIPO)", above=0, requires=_FLOW_IPO)
    flow_ipo_beta_ref: float = setting(
        0.995, "decay of the averaged reference policy, once an iteration", least=0, below=1, requires=_FLOW_IPO
    )
    flow_ipo_t_min: float = setting(
        0.2, "least time that velocities are compared at, 0 at the data", least=0, most=1, requires=_FLOW_IPO
    )
    flow_ipo_t_max: float = setting(0.8, "greatest time, 1 at the noise", least=0, most=1, requires=_FLOW_IPO)

    def _check(self) -> None:
        # fmt: off
        require(self.rule != "flow_ipo" or self.integrates, "agent.rule",
            f"flow_ipo compares velocities, and agent.policy={self.policy} has none. Set agent.policy to flow or pi0, "
            "or agent.rule=ppo.")
        require(self.flow_ipo_t_min < self.flow_ipo_t_max, "agent.flow_ipo_t_min",
            f"must be below agent.flow_ipo_t_max={self.flow_ipo_t_max:g}, got {self.flow_ipo_t_min:g}")
        require(not self.clones_successes or self.bc_on in (None, "+successes", "all"), "agent.bc_on",
            f"must be none, +successes or all with agent.successes=all, which clones own ones, got {self.bc_on}")
        require(self.gripper.composition == "continuous", "agent.gripper",
            f"has grippers that are {self.gripper.composition}, and groups train the policy alone, whose samples they "
            "are not. Leave it out: grippers are then numbers of the policy's actions.")

    def check_sampling(self, group: GroupConfig) -> None:
        """Raise ConfigError where `group` samples decisions without what the policy and the rule need."""
        # fmt: off
        densities = ("sde", "end") if self.integrates else ("tick", "chunk")
        require(group.density in densities, "group.density",
            f"must be {' or '.join(densities)} with agent.policy={self.policy}, got {group.density}")
        if not self.integrates:
            return
        require(group.noise > 0 or group.sigma > 0, "group.sigma",
            "0 with group.noise=0 makes the episodes of a group equal: nothing in them is random. Set one of them "
            "above 0.")
        require(group.sigma > 0 or self.rule != "ppo", "group.sigma",
            "0 is the ODE, whose samples have no density for the ratio of agent.rule=ppo. Set it above 0.")
        require(group.sigma == 0 or self.rule != "flow_ipo", "group.sigma",
            f"must be 0 with agent.rule=flow_ipo, which compares where the ODE leads, got {group.sigma:g}. Set it to "
            "0, and group.noise to 1.")
        steps = self.pi0.steps if self.as_pi0 else self.flow.steps
        require(steps > 1 or group.density == "end", "group.density",
            "sde takes one of several steps at random, and the flow has 1. Set more steps, or end.")

    @property
    def clones_successes(self) -> bool:  # type: ignore[override]
        return self.rule == "filtered_bc" and self.successes == "all"

    @property
    def integrates(self) -> bool:
        """Whether the policy is a velocity field."""
        return self.policy in ("flow", "pi0")

    @property
    def as_published(self) -> dict[str, Any]:
        require(False, "compat", "Q-chunking's code has no training on groups. Leave it out.")
        return {}

    @property
    def iteration_optimiser(self) -> Optimiser:
        """Adam in iterations, of the policy and of its encoder alike."""
        rate = self.iteration_lr
        return self.optimiser()._replace(
            lr=rate, encoder_lr=rate, lr_warmup=0, lr_cosine=0, grad_clip=self.iteration_grad_clip
        )
