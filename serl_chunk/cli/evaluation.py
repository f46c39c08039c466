"""Evaluations: of a checkpoint (`--eval_checkpoint_step`), and a learner's own (`learner.eval_interval`)."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.console

from serl_chunk.actor import evaluate
from serl_chunk.actor.link import normaliser_of, open_link
from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.actor import log_waiting
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.logs import log_to_file
from serl_chunk.cli.process import warn_of_lockstep
from serl_chunk.cli.signals import exit_at_once_while, never
from serl_chunk.config.compatibility import affects_acting
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import os_reason
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import BY_LEARNER
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import CONFIG, read_config
from serl_chunk.runs.metrics import Counters, MetricsLog
from serl_chunk.runs.report import build_report
from serl_chunk.types import ConfigError, RobotSpec, SerlChunkError, Snapshot
from serl_chunk.viz.video import ffmpeg_program

logger = logging.getLogger(__name__)

FETCH_TIMEOUT = 120.0  # seconds for a checkpoint's parameters
CONNECT_TIMEOUT_EVAL = 30.0  # seconds; an evaluation is not left waiting for a learner that may never come
PROGRESS_EPISODES = 25  # between lines where standard output is no terminal
CUT_SHORT = "the learner is stopping"


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
    """Evaluate one checkpoint without interventions on held-out start states; print a table and a summary line.

    `source`: a learner, or a run folder to which the results are written (else returns 1). Raises SerlChunkError.
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
            result = evaluate.evaluate_snapshot(
                env, agent, checkpoint.normaliser, checkpoint.snapshot, config, n=options.n, deterministic=mean,
                seed_base=evaluate.VALIDATION_SEED_BASE if options.validation else evaluate.EVAL_SEED_BASE,
                save_video=videos if options.save_video else None,
                progress=lambda so_far: _show_progress(so_far, options.n),
            )  # fmt: skip
            if sys.stdout.isatty():
                print()
            if options.save_video:
                logger.info(f"videos: {videos}")
            results.append(result)
    rich.console.Console().print(evaluate.results_table(results))
    where, status = "none (a fetched checkpoint has no run folder here)", 0
    if run is not None:
        try:
            where = str(_save(run, checkpoint, results, validation=options.validation))
        except OSError as error:  # a full disk: the figures are worth more than a traceback
            logger.warning(f"the results could not be written to {run} ({os_reason(error)})")
            where, status = "none (it could not be written)", 1
    print(evaluate.summary_line(results[0], where), flush=True)
    return status


def _of_run(config: ExperimentConfig, agent: Agent, run: Path, step: str) -> _Checkpoint:
    """Read a checkpoint of a run folder; raises ConfigError where it does not fit `config`."""
    saved = read_config(run)
    if saved.get("name") != config.name:
        raise ConfigError(f"{run} is a run of experiment {saved.get('name')!r}, not {config.name!r}")
    for flag, ours in (("preset", config.preset), ("compat", config.compat)):  # another agent reads no parameters
        if (theirs := saved.get(flag, "")) != ours:
            remedy = f"give --{flag} {theirs} here too" if theirs else f"leave --{flag} {ours} out"
            raise ConfigError(f"{run} was trained with --{flag}={theirs or 'none'}: {remedy}")
    checkpoint = evaluations.wanted_policy(run, CheckpointStore(run), step)
    recorded = _recorded(saved, config)
    normaliser = Normaliser.from_arrays(checkpoint.meta["normaliser_mode"], checkpoint.normaliser)
    try:
        agent.load_params(checkpoint.params)
    except ConfigError as error:
        differ = f"settings ({run / CONFIG}), which differ in: {'; '.join(recorded) or 'nothing that is recorded'}"
        misfit = f"checkpoint {checkpoint.step} of {run} does not fit this agent ({error})"
        raise ConfigError(f"{misfit}. Evaluate with the run's {differ}") from error
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


def _recorded(saved: dict[str, Any], config: ExperimentConfig) -> list[str]:
    """List every setting of robot, lengths, agent and actor that is not the run's: `path: run's -> here`."""
    now = json.loads(json.dumps(to_dict(config)))
    parts = ("robot", "chunk", "agent", "actor")
    return [line for part in parts for line in difference(saved.get(part, {}), now[part], f"{part}.")]


def _differences(saved: dict[str, Any], recorded: list[str]) -> list[str]:
    """Warn of and return the lines of `recorded` that affect acting; settings newer than the run are left out."""
    lines = []
    for line in recorded:
        path = line.partition(": ")[0]
        *groups, name = path.split(".")
        group = saved
        for part in groups:
            group = group.get(part) or {}
        if name in group and affects_acting(path):
            logger.warning(f"evaluated with another setting than the run's (run -> here): {line}")
            lines.append(line)
    return lines


def _show_progress(result: evaluate.EvalResult, n: int) -> None:
    line = f"{result.mode} policy: {result.episodes}/{n} episodes, {result.successes} successes"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif result.episodes % PROGRESS_EPISODES == 0:
        logger.info(line)


def _save(run: Path, checkpoint: _Checkpoint, results: list[evaluate.EvalResult], *, validation: bool) -> Path:
    """Write an evaluation's file and, unless it chooses checkpoints, its metric rows; returns the run's new report."""
    purpose, step = evaluations.VALIDATION if validation else "evaluation", checkpoint.snapshot.version
    evaluations.save(run, step, purpose, [r.to_json() for r in results], checkpoint.differences)
    if not validation:
        with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
            for r in results:
                metrics.evaluation(checkpoint.counters, checkpoint=step, starts_repeat=r.starts_repeat, **r.figures())
    return build_report(run)


class OwnEvaluation:
    """Evaluates on the start states of `--eval_checkpoint_step`; writes rows and `evaluations/learner_<step>.json`.

    Global random state is restored after each evaluation, so that training does not depend on them. An evaluation that
    fails, or is cut short because the process is `stopping`, leaves nothing and ends no training. Raises ConfigError
    for a physical robot, for the realtime clock, and where what `video_episodes` needs is missing.
    """

    def __init__(self, config: ExperimentConfig, agent: Agent, stopping: Callable[[], bool]) -> None:
        check_simulator(config)
        self._config, self._agent, self._stopping = config, agent, stopping
        if config.learner.video_episodes:
            ffmpeg_program()
        with _random_state_kept():
            self._env = make_env(config.robot, evaluating=True)
            if config.learner.video_episodes:
                try:
                    self._check_camera()
                except BaseException:
                    self._env.close()
                    raise

    def _check_camera(self) -> None:
        name, parameter = self._env.robot_spec.name, "learner.video_episodes"
        got = f"got {self._config.learner.video_episodes}, expected 0"
        if not self._env.robot_spec.cameras:
            raise ConfigError(f"robot {name!r} has no camera to film with ({got})", parameter=parameter)
        try:
            self._env.reset(seed=evaluate.EVAL_SEED_BASE)
            self._env.read_images()
        except Exception as error:  # of whatever the simulator draws with
            fault = f"robot {name!r} cannot draw a frame here ({type(error).__name__}: {error}; {got})"
            text = f"{fault}. Set it to 0, or repair the rendering (MUJOCO_GL)"
            raise ConfigError(text, parameter=parameter) from error

    def __call__(self, learner: Learner, snapshot: Snapshot) -> None:
        """See `learner.schedule.Evaluate`; what the learner's `tick` raises is raised."""
        start = time.perf_counter()
        c, counters, run = self._config.learner, learner.counters(), learner.metrics.run_dir
        step, videos = counters.step, run / "videos" / f"{snapshot.version}_{c.eval_mode}"
        before, in_tick = set(videos.glob("*")), False

        def watch() -> str | None:
            nonlocal in_tick
            in_tick = True
            learner.tick()
            in_tick = False
            return CUT_SHORT if self._stopping() else None

        try:
            with _random_state_kept():
                result = evaluate.evaluate_snapshot(
                    self._env, self._agent, learner.normaliser, snapshot, self._config, n=c.eval_episodes,
                    deterministic=c.eval_mode == "mean", stop=watch, filmed=c.video_episodes,
                    save_video=videos if c.video_episodes else None,
                )  # fmt: skip
        except BaseException as error:
            _remove_new(videos, before)
            # A full disk, an encoder or a simulator that gave up; not the transport, which `tick` looks at.
            if in_tick or not isinstance(error, Exception):
                raise
            logger.warning(
                f"the evaluation at step {step} failed and is left out; training goes on "
                f"({type(error).__name__}: {error}{_origin(error)})"
            )
            return
        if result.episodes < c.eval_episodes:
            _remove_new(videos, before)
            logger.info(f"the evaluation at step {step} was cut short: its {result.episodes} episodes are not kept")
            return
        seconds = time.perf_counter() - start
        figures = {**result.figures(), "starts_repeat": result.starts_repeat, "seconds": seconds, "by": BY_LEARNER}
        learner.metrics.evaluation(counters, checkpoint=step, **figures)
        logger.info(f"evaluation at step {step}: {result}, took {seconds:.1f} s")
        try:
            evaluations.save(run, step, BY_LEARNER, [result.to_json() | {"seconds": seconds}])
        except OSError as error:  # a full disk ends no training; the row is in metrics.jsonl
            logger.warning(f"evaluation {step} could not be written to {run} ({os_reason(error)})")

    def close(self) -> None:
        self._env.close()


def check_simulator(config: ExperimentConfig) -> None:
    """Raise ConfigError where a learner would have to move a physical robot."""
    if not config.learner.eval_interval:
        return
    if config.robot.real:
        why = f"learner.eval_interval={config.learner.eval_interval}: the learner's process has no real robot"
        raise ConfigError(f"{why}. Set it to 0, and evaluate with --actor --eval_checkpoint_step on the robot PC")
    if config.actor.clock != "lockstep":
        remedy = "Set --config.actor.clock=lockstep, or leave it 0 and evaluate with --actor --eval_checkpoint_step"
        raise ConfigError(f"learner.eval_interval evaluates in lockstep. {remedy}")


def _origin(error: Exception) -> str:
    """Return where an error of a simulator arose, for its author."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SerlChunkError | OSError) or not frames:
        return ""
    return f", raised in {frames[-1].filename}, line {frames[-1].lineno}"


def _remove_new(folder: Path, before: set[Path]) -> None:
    """Remove new files of `folder`, and an empty folder, as far as the disk allows."""
    with contextlib.suppress(OSError):
        for path in set(folder.glob("*")) - before:
            path.unlink()
        if folder.is_dir() and not before:
            folder.rmdir()


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the global generators of Python and numpy after the block, whatever a simulator does to them."""
    state, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what others use is what is kept)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(legacy)  # noqa: NPY002
