"""`--eval_checkpoint_step`: evaluates a checkpoint of a run folder, or one fetched from a learner."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from serl_chunk.actor.evaluate import (
    EVAL_SEED_BASE,
    VALIDATION_SEED_BASE,
    EvalResult,
    evaluate_snapshot,
    results_table,
    summary_line,
)
from serl_chunk.actor.link import normaliser_of, open_link
from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.actor import LearnerAddress, log_waiting
from serl_chunk.cli.logs import log_to_file
from serl_chunk.cli.process import interactive, warn_of_lockstep
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.compatibility import affects_acting
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import os_reason
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import CONFIG, read_config
from serl_chunk.runs.metrics import Counters, MetricsLog
from serl_chunk.runs.report import build_report
from serl_chunk.types import ConfigError, RobotSpec, Snapshot

logger = logging.getLogger(__name__)

FETCH_TIMEOUT = 120.0  # seconds for a checkpoint's parameters
CONNECT_TIMEOUT_EVAL = 30.0  # seconds; an evaluation is not left waiting for a learner that may never come
PROGRESS_EPISODES = 25  # between lines where standard output is no terminal


class EvaluationOptions(NamedTuple):
    """A checkpoint to evaluate, and how."""

    step: str  # of the checkpoint; latest; or best
    n: int  # episodes
    save_video: bool = False
    stochastic: bool = False  # the mean policy and the sampled one
    validation: bool = False  # on the start states that checkpoints are chosen on


class _Checkpoint(NamedTuple):
    """A policy to evaluate. `differences`: settings that act and that are not the run's, a line for each."""

    snapshot: Snapshot
    normaliser: Normaliser
    counters: Counters
    differences: Sequence[str] = ()


def run_evaluation(config: ExperimentConfig, options: EvaluationOptions, source: Path | LearnerAddress) -> int:
    """Evaluate one checkpoint without interventions on held-out start states; prints a table and a last line.

    `source`: a run folder, to which the results are written (1 is returned where that fails), or a learner. Raises
    ConfigError, CheckpointError, or what the connection to the learner fails with.
    """
    warn_of_lockstep(config)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    run: Path | None = None
    with contextlib.closing(make_env(config.robot, evaluating=True)) as env:
        agent = make_agent(config, env.robot_spec)
        if isinstance(source, LearnerAddress):
            checkpoint = _of_learner(config, env.robot_spec, agent, source, options.step)
        else:
            run = source.expanduser()
            checkpoint = _of_run(config, agent, run, options.step)
            log_to_file(run / "actor.log")
        results = []
        for mean in (True, False) if options.stochastic else (config.learner.eval_mode == "mean",):
            mode = "mean" if mean else "sampled"
            videos = (run or Path()) / "videos" / f"{checkpoint.snapshot.version}_{mode}"
            result = evaluate_snapshot(
                env, agent, checkpoint.normaliser, checkpoint.snapshot, config, n=options.n, deterministic=mean,
                seed_base=VALIDATION_SEED_BASE if options.validation else EVAL_SEED_BASE,
                save_video=videos if options.save_video else None,
                progress=lambda so_far: _show_progress(so_far, options.n),
            )  # fmt: skip
            if interactive():
                print()
            if options.save_video:
                logger.info(f"videos: {videos}")
            results.append(result)
    rich.console.Console().print(results_table(results))
    where, status = "none (a fetched checkpoint has no run folder here)", 0
    if run is not None:
        try:
            where = str(_save(run, checkpoint, results, validation=options.validation))
        except OSError as error:  # a full disk: the figures are worth more than a traceback
            logger.warning(f"the results could not be written to {run} ({os_reason(error)})")
            where, status = "none (it could not be written)", 1
    print(summary_line(results[0], where), flush=True)
    return status


def _of_run(config: ExperimentConfig, agent: Agent, run: Path, step: str) -> _Checkpoint:
    """A checkpoint of a run folder; raises ConfigError where it does not fit `config`."""
    saved = read_config(run)
    if saved.get("name") != config.name:
        raise ConfigError(f"{run} is a run of experiment {saved.get('name')!r}, not {config.name!r}")
    _check_algorithm(run, saved, config)
    checkpoint = evaluations.wanted_policy(run, CheckpointStore(run), step)
    recorded = _recorded(saved, config)
    normaliser = Normaliser.from_arrays(checkpoint.meta["normaliser_mode"], checkpoint.normaliser)
    try:
        agent.load_params(checkpoint.params)
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {checkpoint.step} of {run} does not fit this agent ({error}). Evaluate with the run's "
            f"settings ({run / CONFIG}); they differ in: {'; '.join(recorded) or 'nothing that is recorded'}"
        ) from error
    counters = Counters(checkpoint.step, int(checkpoint.meta["env_steps"]), int(checkpoint.meta["human_ticks"]))
    snapshot = Snapshot(checkpoint.step, checkpoint.params)
    return _Checkpoint(snapshot, normaliser, counters, _differences(saved, recorded))


def _of_learner(
    config: ExperimentConfig, spec: RobotSpec, agent: Agent, address: LearnerAddress, step: str
) -> _Checkpoint:
    name, keys = address.credentials()
    logger.info(f"fetching checkpoint {step} from the learner at {address.ip}:{address.port}")
    # A second id: the same robot PC may be training meanwhile.
    link = open_link(config, spec, agent, address.ip, address.port, f"{name}-evaluation", keys=keys)
    with contextlib.closing(link):
        welcome = link.connect(CONNECT_TIMEOUT_EVAL, on_waiting=log_waiting())
        snapshot, _ = link.fetch_checkpoint(step, timeout=FETCH_TIMEOUT)
        return _Checkpoint(snapshot, normaliser_of(welcome), Counters(snapshot.version, 0, 0))


def _check_algorithm(run: Path, saved: dict[str, Any], config: ExperimentConfig) -> None:
    """Raise ConfigError where the run's --preset or --compat is not given here: another agent reads no parameters."""
    for flag, ours in (("preset", config.preset), ("compat", config.compat)):
        theirs = saved.get(flag, "")
        if theirs != ours:
            remedy = f"give --{flag} {theirs} here too" if theirs else f"leave --{flag} {ours} out"
            raise ConfigError(f"{run} was trained with --{flag}={theirs or 'none'}: {remedy}")


def _recorded(saved: dict[str, Any], config: ExperimentConfig) -> list[str]:
    """Every setting of robot, lengths, agent and actor that is not the run's: `path: run's -> here`."""
    now = json.loads(json.dumps(to_dict(config)))
    parts = ("robot", "chunk", "agent", "actor")
    return [line for part in parts for line in difference(saved.get(part, {}), now[part], f"{part}.")]


def _differences(saved: dict[str, Any], recorded: list[str]) -> list[str]:
    """One line for each setting of the run that affects acting and that the command line, which counts, has otherwise.

    Settings that only training reads are left out. So are settings newer than the run.
    """
    paths = {line: line.partition(": ")[0] for line in recorded}
    lines = [line for line in recorded if affects_acting(paths[line]) and _known(saved, paths[line])]
    for line in lines:
        logger.warning(f"evaluated with another setting than the run's (run -> here): {line}")
    return lines


def _known(saved: dict[str, Any], path: str) -> bool:
    *parts, last = path.split(".")
    for part in parts:
        saved = saved.get(part) or {}
    return last in saved


def _show_progress(result: EvalResult, n: int) -> None:
    line = f"{result.mode} policy: {result.n}/{n} episodes, {result.total.successes} successes"
    if interactive():
        print(f"\r{line}", end="", flush=True)
    elif result.n % PROGRESS_EPISODES == 0:
        logger.info(line)


def _save(run: Path, checkpoint: _Checkpoint, results: list[EvalResult], *, validation: bool) -> Path:
    """Write an evaluation's file and, unless it chooses checkpoints, its metric rows; returns the run's new report."""
    purpose = evaluations.VALIDATION if validation else "evaluation"
    step, plain = checkpoint.snapshot.version, [r.to_json() for r in results]
    evaluations.save(run, step, purpose, plain, checkpoint.differences)
    if not validation:
        with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
            for r in results:
                counters = checkpoint.counters
                metrics.evaluation(counters, checkpoint=step, starts_repeat=r.starts_repeat, **r.figures())
    return build_report(run)
