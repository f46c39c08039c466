"""Former names of settings and modules, for command lines, `config.json` files and experiments of earlier versions.

Last used by f1f5725. Settings keep their meaning under the new name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serl_chunk.config.former_qc import published_agent
from serl_chunk.config.removed import REMOVED, agent_kind, removal_hint, without_removed

SETTINGS = {
    "agent.act_by": "agent.acting_critic",
    "agent.gripper.plausible": "agent.gripper.mask_unreachable",
    "normaliser.extreme": "normaliser.demo_range",
    "robot.helper": "robot.scripted_human",  # a group
    "transport.silence": "transport.timeout_s",
    "transport.snapshots": "transport.snapshot_dtype",
}
# Presets of run folders before format 2, where a new preset has the former name.
PRESETS = {"rlpd": "rlpd-qc"}
PRESETS_FORMAT = 2
VALUES = {("replay.windows", "adjacent"): "qc"}
# Settings that f1f5725 did not have, and the value that its files stand for.
ADDED: dict[str, Any] = {
    "actor.frames": "auto", "actor.max_human_s": 0.0,
    "actor.policy": "", "actor.policy_key": "", "actor.policy_observation": [],
    "robot.server": "", "robot.server_keys": "", "robot.joints_at": "now",
    "device": {
        "paths": [], "scale": [1.0] * 6, "translation": 0.2, "rotation": 1.0, "frame": "base", "lead": 0.15,
        "gripper": "hold", "switch_button": -1, "dead_man": -1, "start": 0.05, "end": 0.02, "hold_s": 0.4,
        "hosted": False, "align": "near",
    },
    "device.hosted": False, "device.align": "near",  # of folders that have the group
    "operator": {"keys": [], "gestures": [], "pedal": "", "countdown_s": 2.0, "ready": "first", "attention": "",
                 "attention_holds": False, "approve": 0},
    "operator.pedal_hosted": False,
    "outcome": {"success": None, "cameras": [], "classifier": "", "condition": None},
    "agent.language": {"tokenizer": "none", "model": "", "length": 48}, "agent.language.model": "",
    "agent.encoder.frame_size": None, "agent.pi0.published": False, "agent.pi0.state_in_prompt": True,
    "normaliser.scaling": "z_score", "normaliser.delta_mask": [], "normaliser.robot": "none",
    "agent.flow.noise_alone": 0.0, "agent.flow.predicts": "velocity",
    "agent.bc_joint_noise": 0.0,
    "agent.lr_warmup": 0, "agent.lr_cosine": 0,
    **{
        f"agent.{component}_optimiser": dict.fromkeys(("lr", "lr_warmup", "lr_cosine", "weight_decay", "grad_clip"))
        for component in ("critic", "encoder")
    },
    "learner.accumulate": 1, "learner.policy_batch_size": None,
    "outcome.classifier": "", "outcome.condition": None, "outcome.environment": True, "outcome.stages": [],
    "outcome.stage_reward": 0.0, "outcome.observed": [],  # of folders that have the group, too
}  # fmt: skip
ADDED_TO: dict[tuple[str, str], dict[str, Any]] = {  # (group, its kind) -> as ADDED
    ("agent", "acrlpd"): {"agent.policy_activation": "relu"},
    ("robot", "gym"): {"robot.max_episode_s": None},
}
MODULES = {
    "serl_chunk.actor.timing": "serl_chunk.actor.clock",
    "serl_chunk.config.actor": "serl_chunk.config.experiment",
    "serl_chunk.config.chunks": "serl_chunk.config.experiment",
    "serl_chunk.config.helpers": "serl_chunk.config.robots",
    "serl_chunk.config.normaliser": "serl_chunk.config.experiment",
    "serl_chunk.config.reward": "serl_chunk.config.experiment",
    "serl_chunk.data.writer": "serl_chunk.data.formats.hdf5_writer",
    "serl_chunk.robots.replayed": "serl_chunk.devices.recorded",
}
CLASSES = {"HelperConfig": "ScriptedHumanConfig"}
# Groups that lost settings -> their classes.
GROUPS = {"agent.critic": "CriticConfig", "agent.flow": "FlowConfig"}
REMOVED_NAMES = {"ImproveConfig": "agent.improve", "serl_chunk.config.improvement": "agent.improve"}


def current_overrides(overrides: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (dotted path, text) pairs under current names, and a line for each name that was replaced."""
    out, lines = [], []
    for path, text in overrides:
        new_path = _current_path(path)
        new_text = VALUES.get((new_path, text), text)
        if (new_path, new_text) != (path, text):
            lines.append(f"--config.{path}={text} is now --config.{new_path}={new_text}")
        out.append((new_path, new_text))
    return out, lines


def current_config(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a `config.json` under current names, with newer settings, and a line for each replaced name."""
    lines: list[str] = []

    def renamed(group: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        out = {}
        for name, value in group.items():
            old = f"{prefix}{name}"
            path = _current_path(old)
            if isinstance(value, Mapping):
                value = renamed(value, f"{path}.")
            new = VALUES.get((path, value), value) if isinstance(value, str) else value
            if path != old:
                lines.append(f"{old} is now {path}")
            if new != value:
                lines.append(f"{path}={value} is now {path}={new}")
            out[path.rpartition(".")[2]] = new
        return out

    current = renamed(saved, "")
    lines += _ticks_to_seconds(current)
    if (preset := _former_preset(saved)) is not None:
        current["preset"] = PRESETS[preset]
        lines.append(f"preset={preset} is now preset={PRESETS[preset]}")
    added = dict(ADDED)
    for (name, kind), of_kind in ADDED_TO.items():
        group = current.get(name)
        added |= of_kind if isinstance(group, dict) and group.get("kind") == kind else {}
    newer = agent_kind(saved) == "published_qc"  # than all of them
    for path, value in added.items():
        *groups, name = path.split(".")
        parent: Any = {} if newer and groups[:1] == ["agent"] else current
        for group in groups:
            parent = parent.get(group) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.setdefault(name, value)
    if (agent := published_agent(current)) is not None:
        lines.append(f"agent.kind={current['agent']['kind']} of compat=qc is now agent.kind=published_qc")
        current["agent"] = agent
    lines += _features_of_time(current)
    return without_removed(current), lines


def _ticks_to_seconds(config: dict[str, Any]) -> list[str]:
    """Convert `replay.exclude_before_takeover` of a version that counted ticks, an integer, and return a line."""
    replay, spec = config.get("replay"), config.get("robot_spec")
    if not isinstance(replay, dict) or not isinstance(spec, dict) or not spec.get("control_hz"):
        return []
    ticks = replay.get("exclude_before_takeover")
    if not isinstance(ticks, int):
        return []
    seconds = ticks / spec["control_hz"]
    replay["exclude_before_takeover"] = seconds
    return [f"replay.exclude_before_takeover={ticks} (ticks) is now {seconds:g} (s)"]


def _features_of_time(config: dict[str, Any]) -> list[str]:
    """Convert `agent.flow.time` of a version that had it, and return a line where the flow reads Fourier features."""
    flow = (config.get("agent") or {}).get("flow")
    if not isinstance(flow, dict) or flow.get("time") not in ("cosine", "fourier") or config.get("compat") == "qc":
        return []
    if flow.pop("time") == "cosine":
        flow["fourier_dim"] = 0
        return []
    return [f"agent.flow.time=fourier is now agent.flow.fourier_dim={flow['fourier_dim']}"]


def _former_preset(saved: Mapping[str, Any]) -> str | None:
    """Return the preset of a `config.json` where it has another name now."""
    number, preset = saved.get("format", 0), saved.get("preset")
    former = isinstance(number, int) and number < PRESETS_FORMAT and isinstance(preset, str) and preset in PRESETS
    return preset if former else None


def rename_hint(error: BaseException) -> str:
    """Return what replaced the module, class or setting that `error` misses, or that it was removed; else empty."""
    names: dict[str, str] = {}
    if isinstance(error, ImportError):
        names = {f"'{old}'": old for old in MODULES | CLASSES}
    elif isinstance(error, TypeError):
        names = {f"unexpected keyword argument '{old.rpartition('.')[2]}'": old for old in SETTINGS}
    known = MODULES | CLASSES | SETTINGS
    if found := next((f"{old} is now {known[old]}" for part, old in names.items() if part in str(error)), ""):
        return found
    if name := next((name for name in REMOVED_NAMES if f"'{name}'" in str(error)), ""):
        return removal_hint(REMOVED_NAMES[name])
    for path, removed in REMOVED.items():
        group, _, name = path.rpartition(".")
        kinds = [f"{kind.capitalize()}Config" for kind in removed.kinds]
        classes = [GROUPS[group]] if group in GROUPS else kinds or [""]
        messages = (f"{cls}.__init__() got an unexpected keyword argument '{name}'" for cls in classes)
        if any(message in str(error) for message in messages):
            return removal_hint(path, *removed.kinds[:1])
    return ""


def _current_path(path: str) -> str:
    old = next((old for old in SETTINGS if f"{path}.".startswith(f"{old}.")), "")
    return SETTINGS[old] + path[len(old) :] if old else path
