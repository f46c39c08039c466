"""Settings of training in iterations on groups of episodes: what is collected, and how it is trained on."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from serl_chunk.config.fields import Group, Requirement, acting, needs, require, setting

_RATIO, _REFERENCE = needs("agent.rule", "ppo"), needs("agent.rule", "flow_ipo")
_ROWS = Requirement("agent.successes=iteration", lambda c: not c.agent.clones_successes)
ITERATES = Requirement("an agent that trains in iterations (--preset ript, ...)", lambda c: c.agent.iterates)


@dataclasses.dataclass(frozen=True)
class GroupConfig(Group, path="group."):
    """An iteration: collect groups of episodes that share a start and a policy, update, publish."""

    # The defaults are those of --preset ript-flow-sde (docs/algorithms/groups.md has what was measured).
    iterations: int = setting(60, "iterations after which the run ends (RIPT's n_steps)", least=1)
    eval_every: int = setting(5, "iterations between evaluations of the mean and the sampled policy; 0: none", least=0)
    size: int = setting(8, "K, episodes of a group (RIPT's rloo_batch_size)", least=1)
    groups: int = setting(80, "groups of an iteration whose outcomes are mixed (RIPT's demo_batch_size)", least=1)
    max_groups: int = setting(128, "groups that an iteration tries at most", least=1)
    max_seconds: float = setting(3600.0, "time in which an iteration collects at most", unit="s", above=0)
    patience: int = setting(3, "iterations without a mixed group that end the run", least=1)
    oversubscribe: float = setting(1.25, "episodes under way for each that is missing: hides stragglers", least=1)
    tasks: tuple[str, ...] = setting((), "tasks in turn; empty: all of the robot's")
    init_states: str = setting(
        "seeds",
        "starts: seeds (a range of them), seeds:N (N fixed ones), demos (those of the demonstrations), or saved",
    )
    mastered: int = setting(16, "successes in a row that master a start, which is then rarely drawn; 0: none", least=0)
    retest: float = setting(0.1, "share of the draws that tests mastered starts again", least=0, most=1)
    baseline: Literal["loo", "mean", "value"] = setting(
        "loo",
        "of outcomes: the group's others (RLOO), a running mean, or learned from the first observation",
        requires=_RATIO,
    )
    weigh: Literal["decision", "episode"] = setting(
        "decision", "what counts alike: decisions, or whole episodes", requires=_ROWS
    )
    density: Literal["sde", "end", "tick", "chunk"] = acting(
        "sde", "what is sampled: one random step of a flow, or an end around it; of heads: the ratio's unit"
    )
    noise: float = acting(0.0, "scale of the noise that a flow starts from in sampled episodes", least=0)
    sigma: float = acting(0.2, "of the random step, of the end, or of a Gaussian head (0: its own)", least=0)
    epochs: int = setting(2, "passes over an iteration's decisions", least=1)
    minibatch: int = setting(2048, "decisions of a gradient step", least=1)
    clip: float = setting(0.05, "of the probability ratio (PPO)", above=0, below=1, requires=_RATIO)
    target_kl: float = setting(
        0.0, "approximate KL that ends an iteration's updates; 0: no limit", least=0, requires=_RATIO
    )
    reference_on: Literal["device", "host"] = setting(
        "device", "where the reference policy is kept", requires=_REFERENCE
    )

    def _check(self) -> None:
        # fmt: off
        require(self.baseline != "loo" or self.size > 1, "group.baseline",
            "loo compares the episodes of a group, and group.size=1 has no others. Set mean or value, or a larger "
            "group.size.")
        require(re.fullmatch(r"seeds(:[1-9]\d{0,5})?|demos|saved", self.init_states) is not None, "group.init_states",
            f"valid: seeds, seeds:N with N from 1 to 999999, demos, saved; got {self.init_states!r}")
        require(self.max_groups >= self.groups, "group.max_groups",
            f"must be at least group.groups={self.groups}, got {self.max_groups}")
