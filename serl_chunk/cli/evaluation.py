"""Evaluations of checkpoints (`--eval_checkpoint_step`), by an operator or alone."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from serl_chunk.actor.link import open_link, preprocess_of
from serl_chunk.actor.remote_policy import remote_policy
from serl_chunk.actor.stats import RolloutStats
from serl_chunk.agents.base import Agent
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.actor import log_waiting
from serl_chunk.cli.console import console_of, page_on
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import check_many, warn_of_lockstep
from serl_chunk.config.compatibility import affects_acting
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.operator import DEVICES
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.devices.registry import make_intervention
from serl_chunk.evaluation import rollouts
from serl_chunk.evaluation.results import EvalResult, comparison_json, results_table, summary_line
from serl_chunk.evaluation.rollouts import EvaluationOperator
from serl_chunk.io import os_reason
from serl_chunk.logs import log_to_file
from serl_chunk.outcomes.robot import observing, spec_of
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import CONFIG, read_config
from serl_chunk.runs.metrics import Counters, MetricsLog
from serl_chunk.runs.report.report import build_report
from serl_chunk.signals import exit_at_once_while, never, stop_on_signals
from serl_chunk.types import EVAL_SEED_BASE, VALIDATION_SEED_BASE, ConfigError, RobotSpec, Snapshot

logger = logging.getLogger(__name__)

FETCH_TIMEOUT = 120.0  # seconds for a checkpoint's parameters
CONNECT_TIMEOUT_EVAL = 30.0  # seconds; an evaluation is not left waiting for a learner that may never come
PROGRESS_EPISODES = 25  # between lines where standard output is no terminal
INTERRUPTED = "interrupted"


class EvaluationOptions(NamedTuple):
    """Checkpoints to evaluate, and how."""

    steps: tuple[str, ...]  # of the checkpoints; latest; best; or last:N
    n: int  # episodes of each
    filmed: int = 0  # how many of these, the first ones
    stochastic: bool = False  # the mean policy and the sampled one
    validation: bool = False  # on the start states that checkpoints are chosen on
    arms: tuple[str, ...] = ("",)  # see `policy.Request`; empty: who acts is as in a run without arms
    n_envs: int | None = None  # simulators, and so episodes at once; see `rollouts.envs_at_once`
    until_decided: bool = False  # ends once one of two policies is better


class Checkpoint(NamedTuple):
    """A policy of a run or learner. `differences`: settings that act and that are not the run's, a line for each."""

    snapshot: Snapshot
    preprocess: Preprocess
    counters: Counters
    differences: Sequence[str] = ()


def run_evaluation(
    config: ExperimentConfig, options: EvaluationOptions, source: Path | LearnerAddress | None,
    *, viewer: str | None = None,
) -> int:  # fmt: skip
    """Evaluate checkpoints in turns, or a policy server, on held-out start states; print a table and summary lines.

    At a terminal or a page an operator labels what a real robot's environment does not judge, and may take the robot
    over with the device of `actor.intervention`, which is a failure. An interruption reports and writes what was done
    before it.

    `source`: a learner, or a run folder to which the results are written (else returns 1); None: the policy server.
    `viewer`: port of the live page. Raises SerlChunkError, and KeyboardInterrupt after an interruption.
    """
    warn_of_lockstep(config)
    exit_at_once_while(never)  # an open robot is closed, however long it takes
    run: Path | None = None
    stop, labels = threading.Event(), EvaluationOperator()
    with page_on(viewer) as page, contextlib.ExitStack() as stack:  # the page before anything can move
        spec = spec_of(config)
        if options.n_envs is not None:
            check_many(config, spec, options.n_envs, page=page is not None)
        films = Path() / "videos" if options.filmed else None
        checkpoints: list[Checkpoint] = []
        remote = agent = None
        if source is None:
            remote = stack.enter_context(remote_policy(config, spec, stop.is_set))
        else:  # before the robot: an evaluation without a policy must not take its lease
            agent = make_agent(config, spec)
            if isinstance(source, LearnerAddress):
                checkpoints = _of_learner(config, spec, agent, source, options.steps)
            else:
                run = source.expanduser()
                checkpoints = checkpoints_of_run(config, spec, agent, run, options.steps)
                films = films and run / films
                log_to_file(run / "actor.log")
            _check_policies(options, checkpoints)
        with contextlib.ExitStack() as opened:
            envs, wanted = [], options.n_envs if page is None and not options.until_decided else 1
            for _ in range(rollouts.envs_at_once(config, wanted, options.n - options.filmed)):
                envs.append(observing(make_env(config.robot, evaluating=True), config))
                opened.callback(envs[-1].close)
            env = envs[0]
            if (human := _open_human(config, env)) is not None:
                stack.callback(human.close)
            robot = stack.enter_context(opened.pop_all())  # closed before the device, and before any network
        if agent is None:
            assert remote is not None
            entries = [rollouts.Entry(remote, videos=films and films / "policy_server")]
        else:
            modes = (True, False) if options.stochastic else (config.learner.eval_mode == "mean",)
            entries = [
                rollouts.Entry(
                    rollouts.policy_of(env, agent, c.preprocess, c.snapshot, config), mean,
                    films and films / f"{c.snapshot.version}_{'mean' if mean else 'sampled'}{arm and f'_{arm}'}", arm,
                )
                for c in checkpoints for mean in modes for arm in options.arms
            ]  # fmt: skip
        stop_on_signals(stop, "reporting the finished episodes")
        console = console_of(config, "evaluation", amend=labels.amend, end=stop.set, page=page, spec=spec)
        labels.operator = stack.enter_context(console)
        progress = _Progress(options.n * len(entries), labels, config.robot.real)
        results = rollouts.evaluate_in_turns(
            env, stack.enter_context(_unnamed_films(entries)), config, n=options.n, progress=progress.show,
            intervention=human, operator=labels, until_decided=options.until_decided,
            seed_base=VALIDATION_SEED_BASE if options.validation else EVAL_SEED_BASE,
            filmed=options.filmed, others=envs[1:],
            stop=lambda: INTERRUPTED if stop.is_set() else None,
        )  # fmt: skip
        if labels.operator is not None and labels.quits and not stop.is_set():
            robot.close()
            labels.operator.park()
    progress.close()
    done = [(entry, result) for entry, result in zip(entries, results, strict=True) if result.episodes]
    status = _report(run, checkpoints, done, options) if done else 0
    if stop.is_set():
        raise KeyboardInterrupt
    return status


def _report(
    run: Path | None,
    checkpoints: Sequence[Checkpoint],
    done: Sequence[tuple[rollouts.Entry, EvalResult]],
    options: EvaluationOptions,
) -> int:
    """Print the results, and write them to a run folder; returns 1 where that fails."""
    results = [result for _, result in done]
    for entry, _ in done:
        if entry.videos is not None:
            logger.info(f"videos: {entry.videos}")
    rich.console.Console().print(results_table(results))
    what = "fetched checkpoint" if checkpoints else "policy server"
    where, status = f"none (a {what} has no run folder here)", 0
    if run is not None:
        try:
            for checkpoint in checkpoints:
                own = [r for r in results if r.policy_version == checkpoint.snapshot.version]
                if own:
                    _save(run, checkpoint, own, results, validation=options.validation)
            where = str(build_report(run))
        except OSError as error:  # a full disk: the figures are worth more than a traceback
            logger.warning(f"the results could not be written to {run} ({os_reason(error)})")
            where, status = "none (it could not be written)", 1
    for checkpoint in checkpoints:
        own = [r for r in results if r.policy_version == checkpoint.snapshot.version]
        for result in own[: len(options.arms)]:  # those of the first mode
            line = summary_line(result, where)
            print(line if len(checkpoints) == 1 else f"{line} checkpoint={checkpoint.snapshot.version}", flush=True)
    if not checkpoints:
        print(summary_line(results[0], where), flush=True)
    return status


def _open_human(config: ExperimentConfig, env: RobotEnv) -> InterventionSource | None:
    """Open the device by which a human may take a real robot over; a script or a recording helps no evaluation."""
    if not config.robot.real or config.actor.intervention.lower() not in DEVICES:
        return None
    return make_intervention(config.actor.intervention, env, config)


@contextlib.contextmanager
def _unnamed_films(entries: Sequence[rollouts.Entry]) -> Iterator[Sequence[rollouts.Entry]]:
    """Yield the entries; folders of several have no names before the end, as an operator could read who acts there."""
    folders = [entry.videos for entry in entries if entry.videos is not None]
    if len(folders) < 2:
        yield entries
        return
    folders[0].parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folders[0].parent, prefix=".in_turns_") as folder:
        unnamed = [Path(tempfile.mkdtemp(dir=folder)) for _ in entries]
        try:
            yield [entry._replace(videos=path) for entry, path in zip(entries, unnamed, strict=True)]
        finally:
            for path, named in zip(unnamed, folders, strict=True):
                for film in path.iterdir():
                    named.mkdir(exist_ok=True)
                    film.replace(named / film.name)


def _check_policies(options: EvaluationOptions, checkpoints: Sequence[Checkpoint]) -> None:
    for i, checkpoint in enumerate(checkpoints):
        step = checkpoint.snapshot.version
        require(step not in [c.snapshot.version for c in checkpoints[:i]], "eval_checkpoint_step",
            f"names checkpoint {step} twice (got {','.join(options.steps)}). Name each one once")  # fmt: skip
    n = len(checkpoints) * (1 + options.stochastic) * len(options.arms)
    require(not options.until_decided or n == 2, "eval_until_decided",
        f"compares two policies (got {n}, expected 2). Name two checkpoints, or leave it out")  # fmt: skip


def checkpoints_of_run(
    config: ExperimentConfig, spec: RobotSpec, agent: Agent, run: Path, steps: Sequence[str]
) -> list[Checkpoint]:
    """Read checkpoints of a run folder; raises ConfigError where they do not fit `config`."""
    saved = read_config(run)
    if saved.get("name") != config.name:
        raise ConfigError(f"{run} is a run of experiment {saved.get('name')!r}, not {config.name!r}")
    for flag, ours in (("preset", config.preset), ("compat", config.compat)):  # another agent reads no parameters
        if (theirs := saved.get(flag, "")) != ours:
            remedy = f"give --{flag} {theirs} here too" if theirs else f"leave --{flag} {ours} out"
            raise ConfigError(f"{run} was trained with --{flag}={theirs or 'none'}: {remedy}")
    store, recorded = CheckpointStore(run), _recorded(saved, config)
    found = [evaluations.wanted_policy(run, store, step) for step in evaluations.expand(run, store, steps)]
    for each in found:
        if chosen := evaluations.better_arm(run, each.step):
            logger.info(f"checkpoint {each.step}: {chosen}")
    differences = _differences(saved, recorded, config)
    checkpoints = []
    for each in found:
        preprocess = Preprocess.restored(config, spec, each.meta, each.normaliser)
        agent.check_base(each.meta["base_digest"])
        try:
            agent.load_params(each.params)
        except ConfigError as error:
            differ = f"settings ({run / CONFIG}), which differ in: {'; '.join(recorded) or 'nothing that is recorded'}"
            misfit = f"checkpoint {each.step} of {run} does not fit this agent ({error})"
            raise ConfigError(f"{misfit}. Evaluate with the run's {differ}") from error
        counters = Counters(each.step, int(each.meta["env_steps"]), int(each.meta["human_ticks"]))
        checkpoints.append(Checkpoint(Snapshot(each.step, each.params), preprocess, counters, differences))
    return checkpoints


def _of_learner(
    config: ExperimentConfig, spec: RobotSpec, agent: Agent, address: LearnerAddress, steps: Sequence[str]
) -> list[Checkpoint]:
    name, keys = address.credentials()
    logger.info(f"fetching checkpoint {','.join(steps)} from the learner at {address.ip}:{address.port}")
    # A second id: the same robot PC may be training meanwhile.
    link = open_link(config, spec, agent, address.ip, address.port, f"{name}-evaluation", keys=keys)
    with contextlib.closing(link):
        welcome = link.connect(CONNECT_TIMEOUT_EVAL, on_waiting=log_waiting())
        snapshots = [link.fetch_checkpoint(step, timeout=FETCH_TIMEOUT)[0] for step in steps]
    preprocess = preprocess_of(welcome, config, spec)
    return [Checkpoint(each, preprocess, Counters(each.version, 0, 0)) for each in snapshots]


def _recorded(saved: dict[str, Any], config: ExperimentConfig) -> list[str]:
    """List every setting of robot, lengths, agent and actor that is not the run's: `path: run's -> here`."""
    now = json.loads(json.dumps(to_dict(config)))
    parts = ("robot", "chunk", "agent", "actor")
    return [line for part in parts for line in difference(saved.get(part, {}), now[part], f"{part}.")]


def _differences(saved: dict[str, Any], recorded: list[str], config: ExperimentConfig) -> list[str]:
    """Warn of and return the lines of `recorded` that affect acting; settings that the run lacks are left out."""
    lines = []
    for line in recorded:
        path = line.partition(": ")[0]
        *groups, name = path.split(".")
        group = saved
        for part in groups:
            group = group.get(part) or {}
        if name in group and affects_acting(config, path):
            logger.warning(f"evaluated with another setting than the run's (run -> here): {line}")
            lines.append(line)
    return lines


class _Progress:
    """Shows how far an evaluation is. Which checkpoint runs, and how each one does, is shown at its end alone."""

    def __init__(self, total: int, labels: EvaluationOperator, real: bool) -> None:
        self._total, self._operator = total, labels.operator
        self._done = 0
        if labels.operator is not None:  # the start is named, for the operator sets up the scene of each one again
            labels.operator.actor.describe = lambda: {
                "progress": f"episode {min(self._done + 1, total)} of {total}, start {labels.start + 1}"
            }
        elif real:
            logger.info("no terminal, no operator: an episode that nothing judges is a failure")

    def show(self, results: Sequence[EvalResult]) -> None:
        total = RolloutStats.over(results)
        self._done = total.episodes
        mode = f"{results[0].mode} policy: " if len(results) == 1 else ""
        line = f"{mode}{self._done}/{self._total} episodes, {total.successes} successes"
        if self._operator is None and sys.stdout.isatty():
            print(f"\r{line}", end="", flush=True)
        elif self._operator is not None or self._done % PROGRESS_EPISODES == 0:
            logger.info(line)

    def close(self) -> None:
        if self._operator is None and sys.stdout.isatty():
            print()


def _save(
    run: Path, checkpoint: Checkpoint, own: list[EvalResult], results: list[EvalResult], *, validation: bool
) -> None:
    """Write a checkpoint's file and, unless it chooses checkpoints or is incomplete, its metric rows.

    `results`: of all checkpoints that were evaluated in turns with this one.
    """
    purpose, step = evaluations.VALIDATION if validation else "evaluation", checkpoint.snapshot.version
    others = sorted({r.policy_version for r in results} - {step})
    in_turns = {} if len(own) == len(results) else {"in_turns_with": others}
    rows = [r.to_json() | ({"turns": r.turns} if in_turns else {}) for r in own]
    evaluations.save(run, step, purpose, rows, checkpoint.differences, {**in_turns, **comparison_json(results)})
    if not validation and not own[0].interrupted:
        with MetricsLog(run, wandb_project=None, wandb_name="", config={}) as metrics:
            for r in own:
                metrics.evaluation(checkpoint.counters, checkpoint=step, starts_repeat=r.starts_repeat, **r.figures())
