"""Settings of earlier versions that measurements did not support, and what was found; docs/ablations.md has figures.

An experiment that sets one is refused. In a run folder's `config.json` one is ignored where it had no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LAST = "2514010"  # the last commit that has all of them
Saved = Mapping[str, Any]  # a config.json


class Removed(NamedTuple):
    """A removed setting, or a group of them."""

    why: str  # one sentence
    unused: Callable[[Saved, Any], bool]  # whether a run with this config.json, and this value of it, goes on unchanged


def _only(*values: Any) -> Callable[[Saved, Any], bool]:
    return lambda saved, value: value in values


def _improves_nothing(saved: Saved, value: Any) -> bool:
    return not value.get("steps") and not value.get("imitate")


def _compares_as_the_target(saved: Saved, value: Any) -> bool:
    agent = saved["agent"]
    return agent.get("candidates", 1) == 1 or value == agent.get("critic", {}).get("target_aggregate", value)


REMOVED = {
    "agent.improve": Removed("Chunks that climbed the critic did not act better.", _improves_nothing),
    "agent.exploration_knots": Removed("Noise that is smooth in time did not explore better.", _only(0)),
    "agent.choose_std": Removed("Candidates compared with a penalty on disagreement did not act better.", _only(0)),
    "agent.choose_by": Removed(
        "Candidates are compared by agent.critic.target_aggregate.", _compares_as_the_target
    ),
    "agent.critic.tail": Removed("Actions after a termination are the last one repeated.", _only("repeat")),
}  # fmt: skip


def without_removed(saved: Saved) -> dict[str, Any]:
    """Return a copy of a `config.json` without the removed settings that had no effect on its run."""
    return _without(saved, saved, "")


def _without(saved: Saved, group: Saved, prefix: str) -> dict[str, Any]:
    out = {}
    for name, value in group.items():
        removed = REMOVED.get(f"{prefix}{name}")
        if removed is not None and removed.unused(saved, value):
            continue
        out[name] = _without(saved, value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
    return out


def removal_hint(path: str) -> str:
    """Return what became of the setting, or field of a removed group, at `path`; empty where it was none."""
    for removed, (why, _) in REMOVED.items():
        if f"{path}.".startswith(f"{removed}."):
            return f"{removed} was removed: {why} The last commit with it is {LAST}"
    return ""
