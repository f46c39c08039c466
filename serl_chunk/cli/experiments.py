"""`serl-chunk experiments`, `config`, `new` and `presets`: what `--exp_name` and `--preset` may name."""

from __future__ import annotations

import argparse
import ast
import difflib
from pathlib import Path

from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import Leaf, as_text, leaves, range_in_words
from serl_chunk.config.loader import known_experiments, load_experiment, packaged_folder
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.presets import PRESETS
from serl_chunk.config.robots import GymConfig
from serl_chunk.types import ConfigError, SerlChunkError

TEMPLATE = "_template.py"


def presets_command(flags: argparse.Namespace) -> int:
    """Print the presets, one a line."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.description}")
    return 0


def experiments_command(flags: argparse.Namespace) -> int:
    """Print name, robot and purpose of every experiment, packaged or in ./experiments."""
    rows = [(name, *_described(name, path)) for name, path in known_experiments().items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, robot, purpose in rows:
        print(f"{name:{widths[0]}}  {robot:{widths[1]}}  {purpose}")
    return 0


def _described(name: str, path: Path) -> tuple[str, str]:
    try:
        purpose = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        robot = load_experiment(name).robot
    except (SerlChunkError, SyntaxError, OSError, UnicodeDecodeError) as error:
        return "?", f"cannot be loaded: {error}"
    return (robot.robot_name if isinstance(robot, GymConfig) else robot.kind), purpose


def new_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `new`."""
    p.description = "Write an experiment with a small robot, to fill in with yours."
    p.add_argument("file", metavar="FILE", help="the file to write, such as my_robot.py; it must not exist")


def new_command(flags: argparse.Namespace) -> int:
    """Write the template to a new .py file, and print the next commands. Raises ConfigError."""
    file = flags.file
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{file}: an experiment is a Python file with a name such as my_robot.py")
    if not path.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {path.parent}. Make it first.")
    try:
        template = (packaged_folder() / TEMPLATE).read_text()
        with path.open("x") as out:
            out.write(template.replace("my_robot", path.stem))
    except FileExistsError:
        raise ConfigError(f"{file}: it exists already. Choose another name, or remove it.") from None
    shown = file if "/" in file else f"./{file}"
    print(f"wrote {file}: an arm that reaches a target. It runs as it is; replace its environment by your robot's.")
    print("next:")
    print(f"  serl-chunk record --exp_name {shown} --n_demos 10 --out demos/{path.stem}")
    print(f"  serl-chunk --exp_name {shown} --learner --actor --demo_path demos/{path.stem}")
    return 0


def config_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `config`."""
    p.description = "Show an experiment's settings: value, unit, meaning. * marks what differs from the default."
    p.add_argument("exp_name", metavar="EXP", help="a packaged experiment, one in ./experiments, or a .py file")
    p.add_argument("field", nargs="?", default="", metavar="FIELD", help="a setting or a group, such as agent.critic")
    add_experiment_flags(p)


def config_command(flags: argparse.Namespace) -> int:
    """Print the settings of an experiment: those of the group `field`, or all. Raises ConfigError for another one."""
    config, field = load_flags(flags), flags.field
    all_leaves = list(leaves(config))
    shown = [leaf for leaf in all_leaves if not field or leaf.path == field or leaf.path.startswith(f"{field}.")]
    if not shown:
        groups = {leaf.path.rpartition(".")[0] for leaf in all_leaves if "." in leaf.path}
        near = difflib.get_close_matches(field, [*groups, *(leaf.path for leaf in all_leaves)], 1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Groups: {', '.join(sorted(groups))}."
        raise ConfigError(f"{config.name} has no setting or group {field!r}. {hint}")
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
