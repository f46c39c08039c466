"""The experiment of a command line: its flags (named as in HIL-SERL and Q-chunking), overrides and log lines."""

from __future__ import annotations

import argparse
import difflib
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from serl_chunk.config.compatibility import gripper_in_words
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import check_unused, require, settings_of
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.operator import OF_PAGES
from serl_chunk.config.presets import COMPAT, configured
from serl_chunk.data.prompts import make_prompts
from serl_chunk.extras import choose_opengl
from serl_chunk.io import format_bytes
from serl_chunk.replay.memory import available_bytes
from serl_chunk.transport.storage.spool import largest_episode_bytes
from serl_chunk.types import ConfigError, RobotSpec

logger = logging.getLogger(__name__)


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
    Alias("task", "robot.task", "TEXT", "the task in words: recorded, and an input of agents that read language"),
)
OF_THE_LEARNER = (
    Alias("start_from", "learner.start_from", "RUN", "a run, or RUN:CHECKPOINT, whose policy a new run begins with"),
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
OF_THE_ACTOR = (Alias("timeout", "actor.policy_timeout", "S", "longest wait for a policy server; 0: no limit"),)
SPARSE = "robot.reward"  # what --sparse sets
BOOLEANS = {"true": "sparse", "1": "sparse", "yes": "sparse", "false": "dense", "0": "dense", "no": "dense"}


def add_experiment_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that change the experiment; a learner and its actors get the same."""
    parser.add_argument(
        "--preset", metavar="NAME", help="an algorithm instead of the experiment's (serl-chunk presets)"
    )
    parser.add_argument("--compat", metavar="CODE", help=f"the conventions of published code: {', '.join(COMPAT)}")
    add_aliases(parser, OF_BOTH_SIDES)
    sparse = "robot.reward: 1 at success alone; --sparse=false: for each part of the task, for robots that have both"
    parser.add_argument("--sparse", nargs="?", const="true", metavar="BOOL", help=sparse)


def add_aliases(parser: argparse._ActionsContainer, aliases: Sequence[Alias]) -> None:
    """Add the flags of `aliases`."""
    for alias in aliases:
        parser.add_argument(f"--{alias.flag}", metavar=alias.metavar, help=f"{alias.help} ({alias.path})")


def load_flags(flags: argparse.Namespace) -> ExperimentConfig:
    """Return the experiment with its flags and the overrides in `rest`. ConfigError also for unused settings."""
    fields = {
        alias.path: getattr(flags, alias.flag, None) for alias in (*OF_BOTH_SIDES, *OF_THE_LEARNER, *OF_THE_ACTOR)
    }
    if flags.sparse is not None:
        require(flags.sparse.lower() in BOOLEANS, "sparse", f"got {flags.sparse!r}, expected true or false")
        fields[SPARSE] = BOOLEANS[flags.sparse.lower()]
    given = {path: text for path, text in fields.items() if text is not None}
    overrides = split_overrides(flags.rest, [f"--{name}" for name in vars(flags) if name != "rest"])
    for path, _ in overrides:
        require(path not in given, path, f"--config.{path} sets the same field. Give one of them.")
    values = [*given.items(), *overrides]
    seed = [("seed", str(flags.seed))] if getattr(flags, "seed", None) is not None else []
    config = load(flags.exp_name, [*values, *seed], preset=flags.preset, compat=flags.compat)
    watched = OF_PAGES if getattr(flags, "viewer", None) is not None else ()  # a page's operator of a simulator
    check_unused(config, [path for path, _ in values if path not in watched])
    make_prompts(config)  # refuses a text that is too long before a robot is opened or a run has a folder
    return config


def check_many(
    config: ExperimentConfig, spec: RobotSpec, n_envs: int,
    *, page: bool = False, served: bool = False, cameras: Iterable[str] = (), episodes: int = 1,
) -> None:  # fmt: skip
    """Raise ConfigError where no `n_envs` environments can run at once in this process.

    Args:
        page: one is to show them.
        served: a policy server may decide, of which each has a client.
        cameras: that are recorded in addition to the agent's.
        episodes: of each environment, whose records are held back.
    """
    require(n_envs >= 1, "n_envs", f"must be at least 1, got {n_envs}")
    if n_envs == 1:
        return
    actor, many = config.actor, f"{n_envs} environments at once"
    for wrong, what in (
        (config.robot.real, f"are for simulators, and robot {spec.name!r} is real. Start an --actor for each robot"),
        (actor.clock == "realtime", "wait for each other's decisions. Set actor.clock=lockstep"),
        (actor.intervention not in ("none", "scripted"),
         f"have no one human (actor.intervention={actor.intervention!r}, expected none or scripted)"),
        (actor.max_human_ticks > 0, "do not share actor.max_human_ticks. Leave it at 0"),
        (bool(actor.policy) and not served,
         f"are decided on here, and actor.policy={actor.policy!r} is a server. Remove one of them"),
        (page, "are no one robot that --viewer could show. Remove it"),
    ):  # fmt: skip
        require(not wrong, "n_envs", f"{many} {what}")
    needed, left = episodes * n_envs * largest_episode_bytes(spec, config, cameras), available_bytes()
    require(left is None or needed <= left, "n_envs",
        f"{many} hold back up to {format_bytes(needed)} of records, and {format_bytes(left or 0)} of memory are left. "
        "Give a smaller number")  # fmt: skip


def flag_of(parameter: str, arguments: Sequence[str], flags: Collection[str]) -> str:
    """Return the flag that sets a parameter of the library, as a user would give it next to `arguments`.

    An alias that was used (`--utd_ratio`), else one of `flags` (the command's) with that name or `demo_` and that name
    (`--from` for a format), else `--config.PATH` for a setting, else the parameter itself.
    """
    used = {argument.partition("=")[0] for argument in arguments}
    aliases = {alias.path: f"--{alias.flag}" for alias in (*OF_BOTH_SIDES, *OF_THE_LEARNER, *OF_THE_ACTOR)} | {
        SPARSE: "--sparse"
    }
    if aliases.get(parameter) in used:
        return aliases[parameter]
    for name in (parameter, f"demo_{parameter}", *(("from",) if parameter == "format" else ())):
        if f"--{name}" in flags:
            return f"--{name}"
    group, dot, _ = parameter.partition(".")
    settable = group in settings_of(ExperimentConfig) and parameter not in ("robot.make", "robot.check_devices")
    return f"--config.{parameter}" if settable and (dot or group == "discount") else parameter


def split_overrides(rest: Sequence[str], known: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return `--config.a.b=value` as (path, text); raises ConfigError with the nearest of the flags `known`."""
    out: list[tuple[str, str]] = []
    items = list(rest)
    while items:
        item = items.pop(0)
        if not item.startswith("--config."):
            flag = item.partition("=")[0]
            near = difflib.get_close_matches(flag, known, 1, cutoff=0.8)
            hint = f"Did you mean {near[0]}?" if near else "A setting is --config.FIELD=VALUE."
            if flag in known:
                hint = f"This command has no {flag}; see its --help."
            if Path(item).exists():  # the shell has put all that a pattern matches in its place
                hint = "A flag takes one path; quote a pattern: --demo_path 'demos/*.hdf5'."
            raise ConfigError(f"unknown argument {item!r}. {hint} See serl-chunk --help_all.")
        path, equals, text = item[len("--config.") :].partition("=")
        if not equals:
            if not items or items[0].startswith("--"):
                raise ConfigError(f"{item} needs a value: {item}=VALUE")
            text = items.pop(0)
        out.append((path, text))
    return out


def load(
    exp_name: str | None, overrides: Sequence[tuple[str, str]], *, preset: str | None = None, compat: str | None = None
) -> ExperimentConfig:
    """Return the experiment with `--preset`, `--compat` and, last, the `overrides` (path, text), which win."""
    if exp_name is None:
        text = "missing. Give a name that `serl-chunk experiments` lists (fake_aloha), or a .py file."
        raise ConfigError(text, parameter="exp_name")
    for path, _ in overrides:
        if path in ("preset", "compat"):
            raise ConfigError(f"--config.{path} only records what was applied. Use --{path}.")
    choose_opengl()  # before the experiment's file, which may import MuJoCo
    return configured(load_experiment(exp_name), overrides, preset=preset, compat=compat)


def print_config(config: ExperimentConfig, spec: RobotSpec) -> None:
    """Log the effective settings, with warnings for unsuitable ones. Raises ConfigError for an unknown camera."""
    for key in config.agent.image_keys:
        spec.camera(key)
    reach = config.discount**spec.max_episode_steps
    chunk = config.chunk
    logger.info(
        f"{config.name}: {spec.name}, state {spec.state_dim}, actions {spec.action_dim}, {spec.control_hz:g} Hz; "
        f"{config.agent.kind}{gripper_in_words(config)}, chunks of {chunk.horizon} ({chunk.horizon * spec.dt:.2f} s), "
        f"{config.normaliser.actions} actions; discount {config.discount:g} per tick, "
        f"discount**{spec.max_episode_steps} = {reach:.3f}"
    )
    if config.agent.prefix_critic:
        teacher = f"a critic that learns from one of {chunk.critic_steps}"
        logger.info(f"decoupled: {chunk.executed} actions are executed and scored by {teacher}")
    applied = {"preset": config.preset, "conventions of the published code": config.compat}
    if any(applied.values()):
        logger.info(", ".join(f"{kind} {name}" for kind, name in applied.items() if name))
    r = config.reward
    logger.info(f"effective reward: {r.scale:g} * reward + {r.offset:g}; a declared failure gives {r.failure_reward:g}")
    delay, agent = config.actor.delay_ticks, config.agent
    if delay and getattr(agent, "train_delay", "none") == "none":
        remedy = (
            "Train it for them with --config.agent.train_delay=sampled"
            if agent.acts_by_flow or agent.as_pi0
            else "Only flows and pi0 can be (agent acfql, or bc with policy=flow or pi0)"
        )
        untrained = "this policy is not trained for actions that are committed during inference"
        logger.warning(f"actor.delay_ticks={delay}: {untrained}. {remedy} (docs/algorithms/delay.md).")
    if reach < 0.05:
        better = 0.2 ** (1 / spec.max_episode_steps)
        worth = f"a success at the time limit is worth {reach:.2g} at the start, so early steps hardly learn"
        logger.warning(f"discount={config.discount:g}: {worth}. --config.discount={better:.4f} would make it 0.2.")


def warn_of_lockstep(config: ExperimentConfig) -> None:
    """Warn where a real robot is driven by the clock of simulators."""
    if config.robot.real and config.actor.clock == "lockstep":
        logger.warning(
            "actor.clock=lockstep on a real robot: it receives no command while a chunk is computed, or in training "
            "while the learner is behind. Give --config.actor.clock=realtime to --learner and --actor (not --local)."
        )
