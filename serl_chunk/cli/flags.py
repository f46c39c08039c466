"""Flags that stand for fields of the experiment, under the names that HIL-SERL and Q-chunking gave them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from serl_chunk.cli.process import load, say, split_overrides
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import check_unused
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
    """The experiment with `--preset`, `--compat`, the flags of this module and the overrides in `rest`.

    Raises ConfigError, for a bad value under the name of the flag that was used.
    """
    given = _given(flags)
    overrides = split_overrides(rest, [f"--{name}" for name in vars(flags)])
    for path, _ in overrides:
        if path in given:
            raise ConfigError(f"--{given[path][0]} and --config.{path} set the same field: give one of them")
    values = [(path, value) for path, (_, value) in given.items()]
    try:
        config = load(
            flags.exp_name,
            [*values, *overrides],
            getattr(flags, "seed", None),
            preset=flags.preset,
            compat=flags.compat,
        )
        check_unused(config, [*given, *(path for path, _ in overrides)])
        return config
    except ConfigError as error:
        text = str(error)
        for path, (flag, _) in given.items():
            if text.startswith(f"--config.{path} does not exist"):
                raise ConfigError(
                    f"--{flag} sets {path}, which the robot of experiment {flags.exp_name!r} does not have: leave it "
                    "out, or take an experiment whose robot has one"
                ) from None
            text = text.replace(f"--config.{path}=", f"--{flag}=")
        raise ConfigError(text) from error


def _given(flags: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """path -> (flag, value) of what is on the command line."""
    out = {}
    for alias in (*OF_BOTH_SIDES, *OF_THE_LEARNER):
        value = getattr(flags, alias.flag, None)
        if value is not None:
            out[alias.path] = (alias.flag, value)
    if flags.sparse is not None:
        if flags.sparse.lower() not in BOOLEANS:
            raise ConfigError(f"--sparse={flags.sparse!r}: expected true or false")
        out[SPARSE] = ("sparse", BOOLEANS[flags.sparse.lower()])
    return out


def check_flag_combinations(
    flags: argparse.Namespace, config: ExperimentConfig, *, networked: bool, evaluating: bool
) -> None:
    """Raises ConfigError for flags that would be ignored beside the others, as the experiment now is.

    `networked`: a flag says how learner and actors find each other.
    """
    for flag in ("eval_episodes", "video_episodes"):
        if getattr(flags, flag) is not None and not config.learner.eval_interval:
            raise ConfigError(
                f"--{flag} is about a learner's own evaluations: add --eval_interval N; the evaluation of a checkpoint "
                "has --eval_n_trajs and --save_video"
            )
    if flags.dataset_replace_interval is not None and flags.dataset_dir is None:
        raise ConfigError("--dataset_replace_interval is about the shards of a data set: add --dataset_dir DIR")
    if config.learner.online_steps != 0 or evaluating:
        return
    if flags.actor:
        raise ConfigError("--online_steps 0 trains without actors: leave --actor out")
    if networked:
        raise ConfigError("--online_steps 0 has no network: leave --bind, --port, --keys and --insecure out")


def run_presets() -> int:
    """Print the presets, one a line."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        say(f"{name:{width}}  {preset.description}")
    return 0
