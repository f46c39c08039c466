"""Run folders of `--compat qc` up to commit 514fce5, when its agents were acfql and acrlpd with settings of their own.

Parameters and optimisers have the same trees as those of the agent `published_qc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serl_chunk.config.overrides import to_dict
from serl_chunk.config.published_qc import PublishedQcConfig
from serl_chunk.config.removed import CONVENTIONS, removed_value

Saved = Mapping[str, Any]  # a config.json, or a group of one

_SAME = dict.fromkeys(("lr", "lr_warmup", "lr_cosine", "weight_decay", "grad_clip"))  # the policy's
# Settings of the agent, with dots, that `--compat qc` gave; all of them are in what `published_qc` computes.
_ALL: dict[str, Any] = {
    "lr_warmup": 0, "lr_cosine": 0, "critic_optimiser": _SAME, "encoder_optimiser": _SAME,
    "grad_clip": 0.0, "update_order": "joint", "bc_mean": "batch", "kernel_init": "xavier_uniform", "policy_ema": 0.0,
    "acting_critic": "online", "bc_on": "all", "bc_joint_noise": 0.0, "prefix_critic": False, "prefix_lengths": 1,
    "replan_spread": None, "gripper.choices": [], "gripper.mode": "learned", "gripper.setup_mode": "",
    "critic.loss": "squared", "critic.target_floor": "none", "critic.target_average": "old",
}  # fmt: skip
_OF: dict[str, dict[str, Any]] = {
    "acfql": _ALL | {
        "target": "policy", "target_flow_steps": None, "normalise_q": False, "policy_updates": 1,
        "critic.activation": "gelu", "flow.activation": "gelu", "flow.noise_low": 1.0,
        "flow.train_delay": "none", "flow.predicts": "velocity",
    },
    "acrlpd": _ALL | {
        "policy_activation": "relu", "policy_layer_norm": False, "log_prob": "sum", "log_std_min": -20.0,
        "backup_entropy": False, "bc_clip": 1e-5, "bc_invalid": True, "candidates": 1, "critic.activation": "relu",
    },
}  # fmt: skip
_NORM = {"acfql": ("after", "none"), "acrlpd": ("before", "none")}  # of the critic
_SHARED = ("lr", "weight_decay", "encoder", "language", "image_keys", "use_state")


def published_agent(saved: Saved) -> dict[str, Any] | None:
    """Return the agent of a `config.json` as one of `published_qc`; None where it is no such agent.

    None too for a run of `--compat qc` that changed a convention, see `former_convention`.
    """
    agent = saved.get("agent")
    if saved.get("compat") != "qc" or not isinstance(agent, Mapping) or agent.get("kind") not in _OF:
        return None
    return None if _other_convention(saved) else _published(agent)


def former_convention(saved: Saved) -> str:
    """Return a sentence on the first setting of a `current_config` whose value no agent has today; empty for none."""
    if text := _other_convention(saved):
        why = "published_qc computes what the published code does"
        return f"{text} with compat=qc was removed: {why}. The last commit with it is {CONVENTIONS}"
    return removed_value(saved)


def _other_convention(saved: Saved) -> str:
    """Return the first setting of a run of `--compat qc` that `published_qc` does not have, with its value."""
    agent = saved.get("agent")
    if saved.get("compat") != "qc" or not isinstance(agent, Mapping) or agent.get("kind") == "published_qc":
        return ""
    kind = str(agent.get("kind"))
    if kind not in _OF:
        return f"agent.kind={kind}"
    for path, value in _OF[kind].items():
        found = _at(agent, path, value)
        if found != value and (path, found) != ("update_order", "together"):  # its name until f1f5725
            return f"agent.{path}={found}"
    critic, best = agent["critic"], agent.get("actor_type") == "best-of-n"
    subset, heads = critic["target_subset"], critic["ensemble"]
    wanted = agent["candidates"] if best else 1
    compared = "target_candidates" if best else "candidates"
    checks = {
        f"critic.target_subset={subset}": subset == heads,
        f"critic.layer_norm={critic['layer_norm']}": critic["layer_norm"] in _NORM[kind],
        f"flow.time={_at(agent, 'flow.time', 'raw')}": _at(agent, "flow.time", "raw") in ("raw", "fourier"),
        f"{compared}={agent[compared]}": agent[compared] == wanted,
    }
    return next((f"agent.{text}" for text, same in checks.items() if not same), "")


def _at(agent: Saved, path: str, default: Any) -> Any:
    value: Any = agent
    for name in path.split("."):
        value = value.get(name, default) if isinstance(value, Mapping) else default
    return value


def _published(agent: Saved) -> dict[str, Any]:
    """Return the settings under their names of today; what the agent does not use has its default."""
    critic = agent["critic"]
    out: dict[str, Any] = to_dict(PublishedQcConfig())
    out |= {"agent_name": agent["kind"]} | {name: agent[name] for name in _SHARED if name in agent}
    out |= {"num_qs": critic["ensemble"], "q_agg": critic["target_aggregate"], "tau": critic["tau"]}
    out |= {"value_hidden_dims": critic["hidden"], "layer_norm": critic["layer_norm"] != "none"}
    if agent["kind"] == "acrlpd":
        return out | {
            "actor_hidden_dims": agent["hidden"], "bc_alpha": agent["bc_alpha"],
            "init_temp": agent["init_temperature"], "target_entropy_multiplier": -agent["target_entropy_per_dim"],
        }  # fmt: skip
    flow = agent["flow"]
    return out | {
        "actor_hidden_dims": flow["hidden"], "actor_layer_norm": flow["layer_norm"], "flow_steps": flow["steps"],
        "use_fourier_features": flow["time"] == "fourier", "fourier_feature_dim": flow["fourier_dim"],
        "actor_type": agent["actor_type"], "actor_num_samples": agent["candidates"], "alpha": agent["alpha"],
    }  # fmt: skip
