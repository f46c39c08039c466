"""The learner's own evaluations (`learner.eval_interval`): in its process, on a simulator of its own."""

from __future__ import annotations

import contextlib
import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.actor.evaluate import EVAL_SEED_BASE, EvalResult, evaluate_snapshot
from serl_chunk.agents.base import Agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import os_reason
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import BY_LEARNER
from serl_chunk.robots.registry import make_env
from serl_chunk.runs import evaluations
from serl_chunk.types import ConfigError, SerlChunkError, Snapshot
from serl_chunk.viz.video import ffmpeg_program

logger = logging.getLogger(__name__)

CUT_SHORT = "the learner is stopping"


class OwnEvaluation:
    """Evaluates on the start states of `--eval_checkpoint_step`; writes rows and `evaluations/learner_<step>.json`.

    The environment is made here, so that what is missing is reported before anything is trained. Random state that
    simulators share with their process is put back after each evaluation: training is the same with them and without.
    An evaluation that fails, or is cut short because the process is `stopping`, leaves nothing and ends no training.

    Raises ConfigError for a physical robot, for the realtime clock, and where what `video_episodes` needs is missing.
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
        name, wanted = self._env.robot_spec.name, self._config.learner.video_episodes
        if not self._env.robot_spec.cameras:
            text = f"robot {name!r} has no camera to film with (got {wanted}, expected 0)"
            raise ConfigError(text, parameter="learner.video_episodes")
        try:
            self._env.reset(seed=EVAL_SEED_BASE)
            self._env.read_images()
        except Exception as error:  # of whatever the simulator draws with
            raise ConfigError(
                f"robot {name!r} cannot draw a frame here ({type(error).__name__}: {error}; got {wanted}, expected 0). "
                "Set it to 0, or repair the rendering (MUJOCO_GL)",
                parameter="learner.video_episodes",
            ) from error

    def __call__(self, learner: Learner, snapshot: Snapshot) -> None:
        """See `learner.schedule.Evaluate`; what the learner's `tick` raises is raised."""
        start = time.perf_counter()
        c, counters, run = self._config.learner, learner.counters(), learner.metrics.run_dir
        videos = run / "videos" / f"{snapshot.version}_{c.eval_mode}"
        before = _files(videos)
        raised: list[BaseException] = []

        def watch() -> str | None:
            try:
                learner.tick()
            except BaseException as error:
                raised.append(error)
                raise
            return CUT_SHORT if self._stopping() else None

        try:
            with _random_state_kept():
                result = self._result(snapshot, learner.normaliser, videos, watch)
        except BaseException as error:
            _remove_new(videos, before)
            # A full disk, an encoder or a simulator that gave up; not the transport, which `tick` looks at.
            if raised or not isinstance(error, Exception):
                raise
            logger.warning(
                f"the evaluation at step {counters.step} failed and is left out; training goes on "
                f"({type(error).__name__}: {error}{_where(error)})"
            )
            return
        if result.n < c.eval_episodes:
            _remove_new(videos, before)
            logger.info(f"the evaluation at step {counters.step} was cut short: its {result.n} episodes are not kept")
            return
        seconds, step = time.perf_counter() - start, counters.step
        more: dict[str, Any] = {"starts_repeat": result.starts_repeat, "seconds": seconds, "by": BY_LEARNER}
        learner.metrics.evaluation(counters, checkpoint=step, **result.figures(), **more)
        logger.info(f"evaluation at step {step}: {result}, took {seconds:.1f} s")
        try:
            evaluations.save(run, step, BY_LEARNER, [result.to_json() | {"seconds": seconds}])
        except OSError as error:  # a full disk ends no training; the row is in metrics.jsonl
            logger.warning(f"evaluation {step} could not be written to {run} ({os_reason(error)})")

    def _result(
        self, snapshot: Snapshot, normaliser: Normaliser, videos: Path, stop: Callable[[], str | None]
    ) -> EvalResult:
        c = self._config.learner
        return evaluate_snapshot(
            self._env, self._agent, normaliser, snapshot, self._config, n=c.eval_episodes,
            deterministic=c.eval_mode == "mean", stop=stop, filmed=c.video_episodes,
            save_video=videos if c.video_episodes else None,
        )  # fmt: skip

    def close(self) -> None:
        self._env.close()


def check_simulator(config: ExperimentConfig) -> None:
    """Raise ConfigError where a learner would have to move a physical robot."""
    if config.learner.eval_interval and config.robot.real:
        raise ConfigError(
            f"learner.eval_interval={config.learner.eval_interval} on a real robot: a learner evaluates in its own "
            "process, which has no robot. Set it to 0, and evaluate with --actor --eval_checkpoint_step on the robot PC"
        )
    if config.learner.eval_interval and config.actor.clock != "lockstep":
        raise ConfigError(
            "learner.eval_interval evaluates in lockstep: --config.actor.clock=lockstep, or leave it 0 and evaluate "
            "with --actor --eval_checkpoint_step"
        )


def _where(error: Exception) -> str:
    """Where an error that is none of ours arose, for the author of the simulator."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SerlChunkError | OSError) or not frames:
        return ""
    return f", raised in {frames[-1].filename}, line {frames[-1].lineno}"


def _files(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.is_dir() else set()


def _remove_new(folder: Path, before: set[Path]) -> None:
    """Remove new files of `folder`, and an empty folder, as far as the disk allows."""
    with contextlib.suppress(OSError):
        for path in _files(folder) - before:
            path.unlink()
        if folder.is_dir() and not before:
            folder.rmdir()


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """The global generators of Python and numpy as they were before, whatever a simulator does to them."""
    state, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what others use is what is kept)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(legacy)  # noqa: NPY002
