"""`serl-chunk config`: the settings of an experiment."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import Leaf, as_text, leaves, range_in_words
from serl_chunk.config.overrides import to_dict
from serl_chunk.types import ConfigError

DESCRIPTION = "Show an experiment's settings: value, unit, meaning. * marks what differs from the default."


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.add_argument("exp_name", metavar="EXP", help="a packaged experiment, one in ./experiments, or a .py file")
    p.add_argument("field", nargs="?", default="", metavar="FIELD", help="a setting or a group, such as agent.critic")
    add_experiment_flags(p)


def run(flags: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the settings. Raises ConfigError."""
    return run_config(load_flags(flags, rest), flags.field)


def run_config(config: ExperimentConfig, field: str = "") -> int:
    """Print the settings of an experiment: those of the group `field`, or all. Raises ConfigError for another one."""
    all_leaves = list(leaves(config))
    shown = [leaf for leaf in all_leaves if not field or leaf.path == field or leaf.path.startswith(f"{field}.")]
    if not shown:
        groups = {leaf.path.rpartition(".")[0] for leaf in all_leaves if "." in leaf.path}
        near = difflib.get_close_matches(field, [*groups, *(leaf.path for leaf in all_leaves)], 1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{config.name} has no setting or group {field!r}.{hint}")
    if shown[0].path == field:
        _print_one(config, shown[0])
        return 0
    values = [_value(leaf) for leaf in shown]
    wide = max(len(leaf.path) for leaf in shown)
    print(f"{config.name}: agent {config.agent.kind}, robot {config.robot.kind}; * differs from the default")
    for leaf, value in zip(shown, values, strict=True):
        mark = "*" if leaf.value != leaf.default else " "
        print(f"{mark} {leaf.path:{wide}}  {value:{min(30, max(map(len, values)))}}  {leaf.setting.help}")
    return 0


def _value(leaf: Leaf) -> str:
    value = as_text(to_dict(leaf.value) if callable(leaf.value) else leaf.value) or '""'
    return f"{value} {leaf.setting.unit}".rstrip() if leaf.value is not None else value


def _print_one(config: ExperimentConfig, leaf: Leaf) -> None:
    unmet = next((r.needs for r in leaf.requires if not r.met(config) and leaf.value != leaf.setting.off), "")
    lines = {
        "value": _value(leaf),
        "default": "" if leaf.value == leaf.default else as_text(leaf.default),
        "meaning": leaf.setting.help,
        "valid": range_in_words(config, leaf.path),
        "no effect": f"it needs {unmet}" if unmet else "",
        "set it": f"--config.{leaf.path}=VALUE",
    }
    print(leaf.path)
    for name, text in lines.items():
        if text:
            print(f"  {name:9}  {text}")
