"""Settings of earlier versions that measurements did not support, and what was found; docs/ablations.md has figures.

An experiment that sets one is refused. In a run folder's `config.json` one is ignored where it had no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

FIRST_SET, CONVENTIONS = "2514010", "514fce5"  # the last commits that have all of a set
Saved = Mapping[str, Any]  # a config.json


class Removed(NamedTuple):
    """A removed setting, or a group of them."""

    why: str  # one sentence
    unused: Callable[[Saved, Any], bool]  # whether a run with this config.json, and this value of it, goes on unchanged
    kinds: tuple[str, ...] = ()  # of the agents that lost it; empty: all agents
    acts: bool = True  # it also decided how a trained policy acts
    last: str = FIRST_SET

    def lost_by(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def _only(*values: Any) -> Callable[[Saved, Any], bool]:
    return lambda saved, value: value in values


def _improves_nothing(saved: Saved, value: Any) -> bool:
    return not value.get("steps") and not value.get("imitate")


def _compares_as_the_target(saved: Saved, value: Any) -> bool:
    agent = saved["agent"]
    in_target = agent.get("target_candidates", 1) if agent.get("target") == "policy" else 1
    compares = agent.get("candidates", 1) > 1 or in_target > 1
    return not compares or value in ("mean", agent.get("critic", {}).get("target_aggregate"))  # mean was the default


def _no_flow(saved: Saved) -> bool:
    return saved["agent"].get("policy") == "gaussian"


def _critic_loss(saved: Saved) -> str:
    return str(saved["agent"].get("critic", {}).get("loss", "squared"))


_PUBLISHED = "--compat qc has the published code's way"
_convention = functools.partial(Removed, last=CONVENTIONS)

REMOVED = {
    "agent.improve": Removed("Chunks that climbed the critic did not act better.", _improves_nothing),
    "agent.exploration_knots": Removed("Noise that is smooth in time did not explore better.", _only(0)),
    "agent.choose_std": Removed("Candidates compared with a penalty on disagreement did not act better.", _only(0)),
    "agent.choose_by": Removed(
        "Candidates are compared by agent.critic.target_aggregate.", _compares_as_the_target
    ),
    "agent.critic.tail": Removed(
        "Actions after a termination are the last one repeated.", _only("repeat"), acts=False
    ),
    "agent.target_candidates": Removed(
        "The best of several samples in acrlpd's target did not act better.", _only(1), ("acrlpd",), acts=False
    ),
    "reward.intervention_penalty": Removed(
        "A price on interventions did not make policies need fewer of them.", _only(0), acts=False
    ),
    "replay.intervention_windows": Removed(
        "Windows that ended at interventions did not act better.", _only("keep"), acts=False
    ),
    "agent.update_order": _convention(
        f"The policy's step follows the critic's; {_PUBLISHED}, both at once.", _only("critic_first"), acts=False
    ),
    "agent.bc_mean": _convention(
        f"Imitation is averaged over its weights; {_PUBLISHED}, all steps.", _only("weights"), acts=False
    ),
    "agent.bc_invalid": _convention(
        f"What `bc_on` leaves out is not imitated; {_PUBLISHED}, every row.", _only(False), ("acrlpd",), acts=False
    ),
    "agent.bc_clip": _convention(
        f"Imitated actions are moved to within 1 - 1e-6; {_PUBLISHED}, 1e-5.", _only(1e-6), ("acrlpd",), acts=False
    ),
    "agent.kernel_init": _convention(
        f"Networks of flows begin as flax's do; {_PUBLISHED}, xavier_uniform.", _only("lecun_normal"), ("acfql", "bc"),
        acts=False,
    ),
    "agent.normalise_q": _convention(
        "No recipe divided the one-step policy's Q term by its size.",
        lambda saved, value: not value or saved["agent"].get("actor_type") != "distill-ddpg", ("acfql",), acts=False,
    ),
    "agent.critic.target_average": _convention(
        f"The target follows the critic after its step; {_PUBLISHED}, before it.",
        lambda saved, value: value == "new" or agent_kind(saved) == "bc", acts=False,
    ),
    "agent.flow.activation": _convention(
        f"The flow's activation is relu; {_PUBLISHED}, gelu.", lambda saved, value: value == "relu" or _no_flow(saved)
    ),
    "agent.flow.time": _convention(
        "agent.flow.fourier_dim above 0 shows t to the flow as so many sines and cosines, 0 as its cosine and sine; "
        f"{_PUBLISHED}, t alone.", lambda saved, value: value == "cosine" or _no_flow(saved),
    ),
    "agent.flow.noise_high": _convention(
        "The last of several candidates starts from noise of scale 1.",
        lambda saved, value: value == 1 or _no_flow(saved),
    ),
    "agent.critic.sigma_bins": _convention(
        "hl_gauss has the published width, 0.75 bins.",
        lambda saved, value: value == 0.75 or _critic_loss(saved) != "hl_gauss",
    ),
    "agent.critic.initial_logit": _convention(
        "A new critic of a range begins at an eighth of it.",
        lambda saved, value: value == -2 or _critic_loss(saved) == "squared", acts=False,
    ),
}  # fmt: skip
# Values of settings that are still there: (path, value) -> the agents that had a use for it.
REMOVED_VALUES = {
    ("agent.critic.layer_norm", "after"): ("acfql", "acrlpd"),
    ("agent.critic.activation", "gelu"): ("acfql", "acrlpd"),
    ("agent.policy_activation", "gelu"): ("acrlpd",),
}


def without_removed(saved: Saved) -> dict[str, Any]:
    """Return a copy of a `config.json` without the removed settings that had no effect on its run."""
    return _without(saved, saved, "")


def _without(saved: Saved, group: Saved, prefix: str) -> dict[str, Any]:
    out = {}
    for name, value in group.items():
        removed = removed_at(f"{prefix}{name}", agent_kind(saved))
        published = removed is not None and removed.last == CONVENTIONS and saved.get("compat") == "qc"
        if removed is not None and not published and removed.unused(saved, value):  # what compat set differs from that
            continue
        out[name] = _without(saved, value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
    return out


def agent_kind(saved: Saved) -> str:
    """Return the kind of agent of a `config.json`; empty where it has none."""
    agent = saved.get("agent")
    return str(agent.get("kind", "")) if isinstance(agent, Mapping) else ""


def removed_at(path: str, kind: str) -> Removed | None:
    """Return the entry of the setting `path` of an agent of `kind`; None where that agent lost no such setting."""
    removed = REMOVED.get(path)
    return removed if removed is not None and removed.lost_by(kind) else None


def still_acting(saved: Saved) -> list[str]:
    """Return the removed settings left in a `current_config` by which its run's policies acted."""
    return [path for path in _paths(saved) if (found := removed_at(path, agent_kind(saved))) and found.acts]


def _paths(group: Saved, prefix: str = "") -> Iterator[str]:
    for name, value in group.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")


def removal_hint(path: str, kind: str = "") -> str:
    """Return what became of the setting, or field of a removed group, at `path`; empty where it was none.

    `kind`: of the agent, for settings that one kind of agent lost.
    """
    for name, removed in REMOVED.items():
        if f"{path}.".startswith(f"{name}.") and removed.lost_by(kind):
            return f"{name} was removed: {removed.why} The last commit with it is {removed.last}"
    return ""


def removed_value(saved: Saved) -> str:
    """Return the first of a `config.json`'s values that its setting no longer has, and since when; empty for none."""
    for (path, value), kinds in REMOVED_VALUES.items():
        found: Any = saved
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found == value and agent_kind(saved) in kinds:
            return f"{path}={value} was removed: {_PUBLISHED}. The last commit with it is {CONVENTIONS}"
    return ""
