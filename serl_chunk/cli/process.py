"""Shared by commands: the experiment with its overrides, and lines for a terminal."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Sequence

from serl_chunk.config.compatibility import gripper_in_words
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.config.renamed import current_overrides
from serl_chunk.extras import choose_opengl
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import ConfigError, RobotSpec

logger = logging.getLogger(__name__)


def split_overrides(rest: Sequence[str], known: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return `--config.a.b=value` and `--config.a.b value` as (path, text); raise ConfigError for anything else.

    `known`: flags of the command, of which the error names the nearest. Former names become the current ones, each
    with a line that gives the new name.
    """
    out: list[tuple[str, str]] = []
    items = list(rest)
    while items:
        item = items.pop(0)
        if not item.startswith("--config."):
            near = difflib.get_close_matches(item.partition("=")[0], known, 1, cutoff=0.8)
            hint = f"Did you mean {near[0]}?" if near else "A setting is --config.FIELD=VALUE."
            raise ConfigError(f"unknown argument {item!r}. {hint} See serl-chunk --help_all.")
        path, equals, text = item[len("--config.") :].partition("=")
        if not equals:
            if not items or items[0].startswith("--"):
                raise ConfigError(f"{item} needs a value: {item}=VALUE")
            text = items.pop(0)
        out.append((path, text))
    current, lines = current_overrides(out)
    for line in lines:
        logger.info(line)
    return current


def load(
    exp_name: str | None,
    overrides: Sequence[tuple[str, str]],
    seed: int | None = None,
    *,
    preset: str | None = None,
    compat: str | None = None,
) -> ExperimentConfig:
    """Return the experiment with `--preset`, `--compat`, and last `--config.…` and `--seed`, which win."""
    if exp_name is None:
        raise ConfigError(
            "missing. Give a packaged experiment (fake_aloha), one in ./experiments, or a .py file; `serl-chunk "
            "experiments` lists them.",
            parameter="exp_name",
        )
    for path, _ in overrides:
        if path in ("preset", "compat"):
            raise ConfigError(f"--config.{path} only records what was applied. Use --{path}.")
    extra = [] if seed is None else [("seed", str(seed))]
    choose_opengl()  # before the experiment's file, which may import MuJoCo
    return configured(load_experiment(exp_name), [*overrides, *extra], preset=preset, compat=compat)


def print_config(config: ExperimentConfig, spec: RobotSpec) -> None:
    """Log the effective values that the operator checks before a run, with warnings for unsuitable ones.

    Raises ConfigError where `agent.image_keys` names a camera that the robot does not have.
    """
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
        logger.info(
            f"decoupled: {chunk.executed} actions are executed and scored by a critic that learns from one of "
            f"{chunk.critic_steps}"
        )
    preset = f"preset {config.preset}" if config.preset else ""
    compat = f"conventions of the published code {config.compat}" if config.compat else ""
    if preset or compat:
        logger.info(", ".join(filter(None, (preset, compat))))
    r = config.reward
    charged = f", the step before an intervention {r.intervention_penalty:g} less" if r.intervention_penalty else ""
    logger.info(
        f"effective reward: {r.scale:g} * reward + {r.offset:g}; a declared failure gives {r.failure_reward:g}{charged}"
    )
    delay, flow = config.actor.delay_ticks, getattr(config.agent, "flow", None)
    if delay and (flow is None or flow.train_delay == "none"):
        acts = getattr(config.agent, "actor_type", getattr(config.agent, "policy", None))
        remedy = (
            "Train it for them with --config.agent.flow.train_delay=sampled"
            if acts in ("best-of-n", "flow")
            else "Only flows that act themselves can be (agent acfql with actor_type=best-of-n, bc with policy=flow)"
        )
        logger.warning(
            f"actor.delay_ticks={delay}: this policy is not trained for actions that are committed during inference. "
            f"{remedy} (docs/algorithms/delay.md)."
        )
    if reach < 0.05:
        better = 0.2 ** (1 / spec.max_episode_steps)
        logger.warning(
            f"discount={config.discount:g}: a success at the time limit is worth only {reach:.2g} at the start, so "
            f"early steps hardly learn. --config.discount={better:.4f} would make it 0.2."
        )


def warn_of_lockstep(config: ExperimentConfig) -> None:
    """Warn where a real robot is driven by the clock of simulators."""
    if config.robot.real and config.actor.clock == "lockstep":
        logger.warning(
            "actor.clock=lockstep on a real robot: within episodes it waits for every chunk to be computed, and in "
            "training for the learner (with --local, for its updates), without a command meanwhile and without a rate. "
            "Give --config.actor.clock=realtime to --learner and --actor (--local has no such clock)."
        )


def spec_of(config: ExperimentConfig) -> RobotSpec:
    """The robot's specification, without its devices."""
    return robot_spec(config.robot)


def interactive() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()
