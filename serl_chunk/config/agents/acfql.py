"""Settings of acfql, the default, and of decoupled, which adds a second critic."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from serl_chunk.config.agents.base import ActorCriticConfig, CriticSees
from serl_chunk.config.agents.policy import OF_PI0, PolicyConfig
from serl_chunk.config.fields import TRAINED, acting, needs, require, setting, shaping

_BY_GRADIENT = (OF_PI0, needs("agent.improve_by", "q_gradient"))


@dataclasses.dataclass(frozen=True)
class AcfqlConfig(PolicyConfig, ActorCriticConfig):
    """Q-chunking with a flow policy (Li, Zhou and Levine 2025) or pi0: the best of N of its chunks acts."""

    kind: ClassVar[str] = "acfql"
    acting_critic = "target"
    bounded_critic = True
    learns_to_choose = True

    expectile: float = setting(
        0.8, "expectile of Q over the data, the V of the critic's target", least=0.5, below=1,
        requires=needs("agent.target", "data"),
    )  # fmt: skip
    policy_updates: int = setting(
        3, "flow updates after the last critic update: same batch, new noise", least=1, requires=TRAINED
    )

    critic_sees: CriticSees = shaping(
        "features",
        "what the critic sees beside the state: pi0's features of the observation, which are kept with it; pixels, by "
        "agent.encoder; or the state alone",
        requires=OF_PI0,
    )
    # docs/algorithms/pi0.md has what was measured.
    edit_scale: float = acting(
        0.0,
        "all candidates but the first are its chunk with a random step in each number of an action, the same on all "
        "ticks, of this deviation; 0: samples of the policy. Of edit the largest step, of rlt the deviation around its "
        "chunk",
        least=0,
    )

    target: Literal["data", "policy"] = setting(
        "data",
        "V of the critic's target: an expectile of Q over the data, or (policy) Q of the best of the policy's "
        "candidates, for which next observations bring their pictures",
        requires=OF_PI0,
    )
    improve_by: Literal["none", "distil", "q_gradient", "edit", "rlt", "dsrl"] = shaping(
        "none",
        "how pi0 itself gets better: by imitating what agent.bc_on names, or (distil) at all replayed observations the "
        "best of its candidates, which it then needs no critic to find, or (q_gradient) by the critic's gradient "
        "through its samples; or a small actor next to a constant pi0: of edits, whole chunks (rlt) or noise (dsrl)",
        requires=OF_PI0,
    )
    actor_samples: int = setting(
        4, "samples of pi0 at an observation, the best of which climbs the critic", least=1, requires=_BY_GRADIENT
    )
    bc_weight: float = setting(
        1.0,
        "weight of imitation next to the critic's value; of rlt that of the squared distance from pi0's chunk",
        least=0,
        requires=(OF_PI0, needs("agent.improve_by", "q_gradient", "rlt")),
    )

    def _check(self) -> None:
        # fmt: off
        rule, few = self.improvement, self.pi0.trainable
        require(rule not in ("distil", "q_gradient") or few != "none", "agent.improve_by",
            f"{rule} trains nothing with agent.pi0.trainable=none. Set that to expert or lora_expert, or this to none.")
        require(not self.has_small_actor or few == "none", "agent.improve_by",
            f"{rule} changes what a constant pi0 does, and agent.pi0.trainable={few} changes pi0. Set that to none.")
        require(rule not in ("edit", "rlt") or self.edit_scale > 0, "agent.edit_scale",
            f"must be above 0 with agent.improve_by={rule}, whose steps have that size, got 0. Set 0.05, say.")
        require(rule != "dsrl" or not self.edit_scale, "agent.edit_scale",
            f"{self.edit_scale:g} has no effect with agent.improve_by=dsrl, which chooses pi0's noise. Set it to 0.")
        require(rule != "rlt" or self.bc_on != "all", "agent.bc_on",
            "all counts each step as a human's, whose action agent.improve_by=rlt stays near. Leave it out.")
        require(self.as_pi0 is None or self.target == "data" or bool(self.image_keys), "agent.target",
            "policy needs the pictures of next observations, and agent.image_keys names no camera. Name cameras, or "
            "set it to data.")
        require(not self.relabels or self.candidates > 1, "agent.improve_by",
            "distil imitates the best of several candidates, got agent.candidates=1. Raise that, or set this to none.")
        require(not self.edit_scale or self.candidates > 1 or rule == "rlt", "agent.edit_scale",
            f"{self.edit_scale:g} has no effect with agent.candidates=1: the first candidate is not edited. Raise "
            "that, or set it to 0.")

    @property
    def improvement(self) -> str:
        return self.improve_by if self.as_pi0 else "none"

    @property
    def relabels(self) -> bool:
        return self.improvement == "distil"

    @property
    def follows_critic(self) -> bool:
        """Whether the policy's loss reads the critic, at all windows."""
        return self.has_small_actor or self.improvement == "q_gradient"

    @property
    def has_small_actor(self) -> bool:
        """Whether what is trained is a network next to a constant pi0."""
        return self.improvement in ("edit", "rlt", "dsrl")

    @property
    def trains_policy(self) -> bool:
        return super().trains_policy or self.has_small_actor

    @property
    def seen_by_critic(self) -> CriticSees:
        return self.critic_sees if self.as_pi0 else "pixels"

    @property
    def as_published(self) -> dict[str, Any]:
        require(self.acts_by_flow, "compat",
            "Q-chunking's code has no acfql with agent.policy=pi0. Use agent.policy=flow.")  # fmt: skip
        return {**super().as_published, **self.flow.as_published, "actor_num_samples": self.candidates}


@dataclasses.dataclass(frozen=True)
class DecoupledConfig(AcfqlConfig):
    """acfql whose policy is compared by a second critic, of the executed actions (Li, Park and Levine 2025).

    The first critic may score more actions than the policy outputs, `chunk.critic_horizon`, and teaches the second.
    """

    kind: ClassVar[str] = "decoupled"
    prefix_critic = True

    prefix_expectile: float = setting(
        0.8, "of the first critic's value over the data's futures; 0.5: the mean", least=0.5, below=1
    )
    prefix_lengths: int = acting(1, "lengths the second critic can score: equal parts of the executed actions", least=1)
    replan_spread: float | None = acting(None, "disagreement of heads that ends a chunk; none: never", least=0)

    def _check(self) -> None:
        # fmt: off
        if self.replan_spread is not None:
            require(self.prefix_lengths > 1, "agent.replan_spread",
                f"{self.replan_spread} compares lengths of a chunk, and agent.prefix_lengths is "
                f"{self.prefix_lengths}. Set that to 2 or more, or set it to none.")
            require(self.critic.ensemble > 1, "agent.replan_spread",
                f"{self.replan_spread} compares heads, and agent.critic.ensemble is 1. Raise that, or set it to none.")
