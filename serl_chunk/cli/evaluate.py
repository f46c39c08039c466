"""`--eval_checkpoint_step`: evaluates a checkpoint of a run folder, or one fetched from a learner."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from serl_chunk.actor.evaluate import (
    EVAL_SEED_BASE,
    VALIDATION_SEED_BASE,
    EvalResult,
    evaluate,
    results_table,
    summary_line,
)
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.actor import connect_to_learner, normaliser_of
from serl_chunk.cli.keys import actor_keys, actor_name
from serl_chunk.cli.process import interactive, say, warn_of_lockstep
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.compatibility import affects_acting
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import CONFIG, read_config
from serl_chunk.runs.metric_rows import Counters
from serl_chunk.runs.metrics import MetricsLog
from serl_chunk.runs.report import build_report
from serl_chunk.types import ConfigError, Snapshot

FETCH_TIMEOUT = 120.0  # seconds for a checkpoint's parameters
CONNECT_TIMEOUT_EVAL = 30.0  # seconds; an evaluation is not left waiting for a learner that may never come


def run_evaluation(
    config: ExperimentConfig,
    step: str,
    n: int,
    *,
    checkpoint_path: str | None,
    ip: str | None,
    port: int,
    actor_id: str | None,
    save_video: bool,
    stochastic: bool,
    validation: bool,
    keys: str | None = None,
    insecure: bool = False,
) -> int:
    """Evaluate one checkpoint without interventions on held-out start states; prints a table and a last line.

    `keys`, `insecure`: for a learner at `ip`, as in training.
    With a run folder the results are written there; 1 is returned where that failed. Raises ConfigError,
    CheckpointError, or what the connection to the learner fails with.
    """
    warn_of_lockstep(config)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    with contextlib.closing(make_env(config.robot, evaluating=True)) as env:
        agent = make_agent(config, env.robot_spec)
        run: Path | None = None
        differences: list[str] = []
        if checkpoint_path is not None:
            run = Path(checkpoint_path).expanduser()
            saved = read_config(run)
            if saved.get("name") != config.name:
                raise ConfigError(f"{run} is a run of experiment {saved.get('name')!r}, not {config.name!r}")
            _check_algorithm(run, saved, config)
            store = CheckpointStore(run)
            checkpoint = evaluations.wanted_policy(run, store, step)
            recorded = _recorded(saved, config)
            normaliser = Normaliser.from_arrays(checkpoint.meta["normaliser_mode"], checkpoint.normaliser)
            snapshot = Snapshot(checkpoint.step, checkpoint.params)
            try:
                agent.load_params(snapshot.params)
            except ConfigError as error:
                raise ConfigError(
                    f"checkpoint {checkpoint.step} of {run} does not fit this agent ({error}). Evaluate with the run's "
                    f"settings ({run / CONFIG}); they differ in: {'; '.join(recorded) or 'nothing that is recorded'}"
                ) from error
            differences = _differences(saved, recorded)
            counters = Counters(checkpoint.step, int(checkpoint.meta["env_steps"]), int(checkpoint.meta["human_ticks"]))
        else:
            if ip is None:
                say(f"no --checkpoint_path: the learner at 127.0.0.1:{port} is asked for its checkpoint")
            host = ip or "127.0.0.1"
            own_keys = actor_keys(host, keys, insecure=insecure)
            # A second id: the same robot PC may be training while it is asked for an evaluation.
            link, welcome = connect_to_learner(
                config, env.robot_spec, agent.network_shape(), host, port,
                f"{actor_name(actor_id, own_keys, host)}-evaluation", CONNECT_TIMEOUT_EVAL, keys=own_keys,
            )  # fmt: skip
            with contextlib.closing(link):
                snapshot, _ = link.fetch_checkpoint(step, timeout=FETCH_TIMEOUT)
                normaliser = normaliser_of(welcome)
            counters = Counters(snapshot.version, 0, 0)
        results = _evaluate(config, env, agent, normaliser, snapshot, n, run, save_video, stochastic, validation)
    where, status = "none (a fetched checkpoint has no run folder here)", 0
    if run is not None:
        try:
            purpose = evaluations.VALIDATION if validation else "evaluation"
            evaluations.save(run, snapshot.version, purpose, [r.to_json() for r in results], differences)
            if not validation:
                _log(run, counters, results)
            where = str(build_report(run))
        except OSError as error:  # a full disk: the figures are worth more than a traceback
            say(f"WARNING: the results could not be written to {run} ({error})")
            where, status = "none (it could not be written)", 1
    say(summary_line(results[0], where))
    return status


def _check_algorithm(run: Path, saved: dict[str, Any], config: ExperimentConfig) -> None:
    """Raise ConfigError where the run's --preset or --compat is not given here: another agent reads no parameters."""
    for flag in ("preset", "compat"):
        theirs, ours = saved.get(flag, ""), getattr(config, flag)
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

    Settings that only training reads are left out. One that the run does not know is newer than the run.
    """
    paths = {line: line.partition(": ")[0] for line in recorded}
    lines = [line for line in recorded if affects_acting(paths[line]) and _known(saved, paths[line])]
    for line in lines:
        say(f"evaluated with another setting than the run's (run -> here): {line}")
    return lines


def _known(saved: dict[str, Any], path: str) -> bool:
    *parts, last = path.split(".")
    for part in parts:
        saved = saved.get(part) or {}
    return last in saved


def _evaluate(
    config: ExperimentConfig, env, agent, normaliser, snapshot, n, run, save_video, stochastic, validation
) -> list[EvalResult]:  # fmt: skip
    import rich.console

    results: list[EvalResult] = []
    own = config.learner.eval_mode == "mean"
    for deterministic in (True, False) if stochastic else (own,):
        policy = ChunkPolicy(
            agent, normaliser, env.robot_spec, image_keys=config.agent.image_keys, seed=config.seed + 1
        )
        policy.swap(snapshot)
        mode = "mean" if deterministic else "sampled"
        videos = (run or Path()) / "videos" / f"{snapshot.version}_{mode}" if save_video else None
        successes = 0

        def progress(done: int, summary, mode: str = mode) -> None:
            nonlocal successes
            successes += summary.success
            if interactive():
                print(f"\r{mode} policy: {done}/{n} episodes, {successes} successes", end="", flush=True)
            elif done % 25 == 0:
                say(f"{mode} policy: {done}/{n} episodes, {successes} successes")

        results.append(
            evaluate(
                env,
                policy,
                config,
                n=n,
                seed_base=VALIDATION_SEED_BASE if validation else EVAL_SEED_BASE,
                deterministic=deterministic,
                save_video=videos,
                progress=progress,
                say=None if results else say,
            )
        )
        if interactive():
            print()
        if videos is not None:
            say(f"videos: {videos}")
    rich.console.Console().print(results_table(results))
    return results


def _log(run: Path, counters: Counters, results: list[EvalResult]) -> None:
    with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
        for r in results:
            metrics.evaluation(
                counters,
                success_rate=r.success_rate,
                n=r.n,
                low=r.interval.low,
                high=r.interval.high,
                mode="mean" if r.mode == "mean" else "sampled",
                mean_time_s=r.mean_time_s,
                mean_length=r.mean_length,
                mean_return=r.mean_return,
                checkpoint=counters.step,
                starts_repeat=r.starts_repeat,
            )
