"""Flags that stand for fields of the experiment, under the names that HIL-SERL and Q-chunking gave them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import NamedTuple

from serl_chunk.cli.process import load, split_overrides
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import check_unused, settings_of
from serl_chunk.config.presets import COMPAT, PRESETS
from serl_chunk.types import ConfigError


class Alias(NamedTuple):
    """`--FLAG VALUE` for `--config.PATH=VALUE`."""

    flag: str
    path: str
    metavar: str
    help: str


OF_BOTH_SIDES = (
    Alias("horizon_length", "chunk.horizon", "H", "actions in a chunk"),
    Alias("setup_mode", "agent.gripper.setup_mode", "MODE", "HIL-SERL's {single,dual}-arm-{fixed,learned}-gripper"),
    Alias("env_name", "robot.env_name", "NAME", "environment, for robots that have several"),
)
OF_THE_LEARNER = (
    Alias("pretrain_steps", "learner.pretrain_steps", "N", "imitation updates on demonstrations before actors begin"),
    Alias("offline_steps", "learner.offline_steps", "N", "updates on demonstrations before actors begin"),
    Alias("online_steps", "learner.online_steps", "N", "online steps after which training ends; 0: offline only"),
    Alias("start_training", "learner.training_starts", "N", "online steps before training"),
    Alias("utd_ratio", "learner.utd_ratio", "R", "critic updates per online step"),
    Alias("eval_interval", "learner.eval_interval", "N", "updates between the learner's own evaluations (simulators)"),
    Alias("eval_episodes", "learner.eval_episodes", "K", "episodes of each"),
    Alias("video_episodes", "learner.video_episodes", "K", "of them, how many are filmed"),
    Alias("dataset_replace_interval", "replay.dataset_replace_interval", "N", "updates between two shards"),
)
SPARSE = "robot.reward"  # what --sparse sets
BOOLEANS = {"true": "sparse", "1": "sparse", "yes": "sparse", "false": "dense", "0": "dense", "no": "dense"}


def add_experiment_flags(parser: argparse._ActionsContainer) -> None:
    """Those that say which experiment it is; a learner and its actors get the same."""
    parser.add_argument(
        "--preset", metavar="NAME", help="an algorithm instead of the experiment's; `serl-chunk presets` lists them"
    )
    parser.add_argument(
        "--compat", metavar="CODE", help=f"the conventions of published code instead of ours: {', '.join(COMPAT)}"
    )
    _add(parser, OF_BOTH_SIDES)
    parser.add_argument(
        "--sparse", nargs="?", const="true", metavar="BOOL",
        help="robot.reward: 1 at success alone; --sparse=false: for each part of the task, for robots that have both",
    )  # fmt: skip


def add_learner_flags(parser: argparse._ActionsContainer) -> None:
    """Those of the training loop."""
    _add(parser, OF_THE_LEARNER)


def _add(parser: argparse._ActionsContainer, aliases: Sequence[Alias]) -> None:
    for alias in aliases:
        parser.add_argument(f"--{alias.flag}", metavar=alias.metavar, help=f"{alias.help} ({alias.path})")


def load_flags(flags: argparse.Namespace, rest: Sequence[str]) -> ExperimentConfig:
    """Return the experiment with `--preset`, `--compat`, the flags of this module and the overrides in `rest`.

    Raises ConfigError, also for a setting that would have no effect.
    """
    given = _given(flags)
    overrides = split_overrides(rest, [f"--{name}" for name in vars(flags)])
    for path, _ in overrides:
        if path in given:
            raise ConfigError(f"--config.{path} sets the same field. Give one of them.", parameter=path)
    values = [*given.items(), *overrides]
    seed = getattr(flags, "seed", None)
    config = load(flags.exp_name, values, seed, preset=flags.preset, compat=flags.compat)
    check_unused(config, [path for path, _ in values])
    return config


def _given(flags: argparse.Namespace) -> dict[str, str]:
    """Path -> text of the flags of this module on the command line."""
    given = {alias.path: getattr(flags, alias.flag, None) for alias in (*OF_BOTH_SIDES, *OF_THE_LEARNER)}
    if flags.sparse is not None:
        if flags.sparse.lower() not in BOOLEANS:
            raise ConfigError(f"got {flags.sparse!r}, expected true or false", parameter="sparse")
        given[SPARSE] = BOOLEANS[flags.sparse.lower()]
    return {path: text for path, text in given.items() if text is not None}


def flag_of(parameter: str, arguments: Sequence[str], flags: Collection[str]) -> str:
    """Return the flag that sets a parameter of the library, as a user would give it next to `arguments`.

    An alias where it was used (`--utd_ratio`), else the one of `flags` (those of the command) with that name, else
    `--config.PATH` for a setting of the experiment; the parameter itself where there is none.
    """
    used = {argument.partition("=")[0] for argument in arguments}
    aliases = {alias.path: f"--{alias.flag}" for alias in (*OF_BOTH_SIDES, *OF_THE_LEARNER)} | {SPARSE: "--sparse"}
    if aliases.get(parameter) in used:
        return aliases[parameter]
    if f"--{parameter}" in flags:
        return f"--{parameter}"
    group, dot, _ = parameter.partition(".")
    settable = group in settings_of(ExperimentConfig) and parameter not in ("robot.make", "robot.check_devices")
    return f"--config.{parameter}" if settable and (dot or group == "discount") else parameter


def run_presets() -> int:
    """Print the presets, one a line."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:{width}}  {preset.description}")
    return 0
