"""Settings of earlier versions that measurements did not support, and what was found; docs/ablations.md has figures.

An experiment that sets one is refused. In a run folder's `config.json` one is ignored where it had no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

LAST = "2514010"  # the last commit that has all of them
Saved = Mapping[str, Any]  # a config.json


class Removed(NamedTuple):
    """A removed setting, or a group of them."""

    why: str  # one sentence
    unused: Callable[[Saved, Any], bool]  # whether a run with this config.json, and this value of it, goes on unchanged
    kind: str = ""  # of the only agent that lost it; empty: all agents
    acts: bool = True  # it also decided how a trained policy acts


def _only(*values: Any) -> Callable[[Saved, Any], bool]:
    return lambda saved, value: value in values


def _improves_nothing(saved: Saved, value: Any) -> bool:
    return not value.get("steps") and not value.get("imitate")


def _compares_as_the_target(saved: Saved, value: Any) -> bool:
    agent = saved["agent"]
    in_target = agent.get("target_candidates", 1) if agent.get("target") == "policy" else 1
    compares = agent.get("candidates", 1) > 1 or in_target > 1
    return not compares or value in ("mean", agent.get("critic", {}).get("target_aggregate"))  # mean was the default


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
        "The best of several samples in acrlpd's target did not act better.", _only(1), "acrlpd", acts=False
    ),
    "reward.intervention_penalty": Removed(
        "A price on interventions did not make policies need fewer of them.", _only(0), acts=False
    ),
    "replay.intervention_windows": Removed(
        "Windows that ended at interventions did not act better.", _only("keep"), acts=False
    ),
}  # fmt: skip


def without_removed(saved: Saved) -> dict[str, Any]:
    """Return a copy of a `config.json` without the removed settings that had no effect on its run."""
    return _without(saved, saved, "")


def _without(saved: Saved, group: Saved, prefix: str) -> dict[str, Any]:
    out = {}
    for name, value in group.items():
        removed = removed_at(f"{prefix}{name}", agent_kind(saved))
        if removed is not None and removed.unused(saved, value):
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
    return removed if removed is not None and removed.kind in ("", kind) else None


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
        if f"{path}.".startswith(f"{name}.") and removed.kind in ("", kind):
            return f"{name} was removed: {removed.why} The last commit with it is {LAST}"
    return ""
