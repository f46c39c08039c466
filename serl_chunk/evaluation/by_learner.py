"""A learner's own evaluations (`learner.eval_interval`), in simulators."""

from __future__ import annotations

import contextlib
import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.evaluation import rollouts
from serl_chunk.evaluation.results import EvalResult
from serl_chunk.io import os_reason
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import BY_LEARNER
from serl_chunk.outcomes.robot import observing
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.types import EVAL_SEED_BASE, ConfigError, SerlChunkError, Snapshot
from serl_chunk.viz.video import ffmpeg_program

logger = logging.getLogger(__name__)

CUT_SHORT = "the learner is stopping"


class OwnEvaluation:
    """Evaluates on the start states of `--eval_checkpoint_step`; writes rows and `evaluations/learner_<step>.json`.

    Global random state is restored after each evaluation, so that training does not depend on them. An evaluation that
    fails, or is cut short because the process is `stopping`, leaves nothing and ends no training. Raises ConfigError
    for a physical robot, for the realtime clock, and where what `video_episodes` needs is missing.

    `n_envs`: simulators, and so episodes at once, but for those that are filmed; see `rollouts.envs_at_once`.
    """

    def __init__(
        self, config: ExperimentConfig, agent: Agent, stopping: Callable[[], bool], *, n_envs: int | None = None
    ) -> None:
        check_simulator(config)
        self._config, self._agent, self._stopping = config, agent, stopping
        if config.learner.video_episodes:
            ffmpeg_program()
        with contextlib.ExitStack() as opened, _random_state_kept():
            self._envs = []
            unfilmed = config.learner.eval_episodes - config.learner.video_episodes
            for _ in range(rollouts.envs_at_once(config, n_envs, unfilmed)):
                self._envs.append(observing(make_env(config.robot, evaluating=True), config))
                opened.callback(self._envs[-1].close)
            self._env = self._envs[0]
            if config.learner.video_episodes:
                self._check_camera()
            self._opened = opened.pop_all()

    def _check_camera(self) -> None:
        name, parameter = self._env.robot_spec.name, "learner.video_episodes"
        got = f"got {self._config.learner.video_episodes}, expected 0"
        require(bool(self._env.robot_spec.cameras), parameter, f"robot {name!r} has no camera to film with ({got})")
        try:
            self._env.reset(seed=EVAL_SEED_BASE)
            self._env.read_images()
        except Exception as error:  # of whatever the simulator draws with
            fault = f"robot {name!r} cannot draw a frame here ({type(error).__name__}: {error}; {got})"
            text = f"{fault}. Set it to 0, or repair the rendering (MUJOCO_GL)"
            raise ConfigError(text, parameter=parameter) from error

    def __call__(self, learner: Learner, snapshot: Snapshot) -> None:
        """See `learner.schedule.Evaluate`; what the learner's `tick` raises is raised."""
        run, counters, found = learner.metrics.run_dir, learner.counters(), []
        step = counters.step
        for mode in self._config.eval_modes:
            if (each := self._evaluated(learner, snapshot, mode)) is None:
                return
            found.append(each)
        for result, seconds in found:  # all or none: by its rows a resume knows that an evaluation is complete
            figures = {**result.figures(), "starts_repeat": result.starts_repeat, "seconds": seconds, "by": BY_LEARNER}
            learner.metrics.evaluation(counters, checkpoint=step, **figures)
        try:
            evaluations.save(run, step, BY_LEARNER, [r.to_json() | {"seconds": seconds} for r, seconds in found])
        except OSError as error:  # a full disk ends no training; the rows are in metrics.jsonl
            logger.warning(f"evaluation {step} could not be written to {run} ({os_reason(error)})")

    def _evaluated(self, learner: Learner, snapshot: Snapshot, mode: str) -> tuple[EvalResult, float] | None:
        """Evaluate in one mode; returns the seconds that it took too. None where that failed, or was cut short."""
        start = time.perf_counter()
        c, run, step = self._config.learner, learner.metrics.run_dir, learner.counters().step
        videos = run / "videos" / f"{snapshot.version}_{mode}"
        before, in_tick = set(videos.glob("*")), False

        def watch() -> str | None:
            nonlocal in_tick
            in_tick = True
            learner.tick()
            in_tick = False
            return CUT_SHORT if self._stopping() else None

        try:
            with _random_state_kept():
                policy = rollouts.policy_of(self._env, self._agent, learner.preprocess, snapshot, self._config)
                result = rollouts.evaluate(
                    self._env, policy, self._config, n=c.eval_episodes,
                    deterministic=mode == "mean", stop=watch, filmed=c.video_episodes,
                    save_video=videos if c.video_episodes else None, others=self._envs[1:],
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
            logger.debug("of that evaluation:", exc_info=error)
            return None
        if result.episodes < c.eval_episodes:
            _remove_new(videos, before)
            logger.info(f"the evaluation at step {step} was cut short: its {result.episodes} episodes are not kept")
            return None
        seconds = time.perf_counter() - start
        logger.info(f"evaluation at step {step}: {result}, took {seconds:.1f} s")
        return result, seconds

    def close(self) -> None:
        self._opened.close()


def check_simulator(config: ExperimentConfig) -> None:
    """Raise ConfigError where a learner would have to move a physical robot."""
    if not config.eval_interval:
        return
    name = "group.eval_every" if config.agent.iterates else "learner.eval_interval"
    if config.robot.real:
        why = f"{name}={config.eval_interval}: the learner's process has no real robot"
        raise ConfigError(f"{why}. Set it to 0, and evaluate with --actor --eval_checkpoint_step on the robot PC")
    if config.actor.clock != "lockstep":
        remedy = "Set --config.actor.clock=lockstep, or leave it 0 and evaluate with --actor --eval_checkpoint_step"
        raise ConfigError(f"{name} evaluates in lockstep. {remedy}")


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
