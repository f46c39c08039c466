"""`serl-chunk record --policy human`: demonstrations by hand, in the control loop of training."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Protocol

from serl_chunk.actor.clock import Clock, MonotonicClock
from serl_chunk.actor.demonstration import Demonstration, DemonstrationSink
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.devices import DEVICES
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.formats import open_source
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.inspect.inspect import inspect
from serl_chunk.data.source import ReadOptions
from serl_chunk.devices.recorded import ReplayedIntervention
from serl_chunk.devices.registry import make_intervention
from serl_chunk.io import plural
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import ConfigError, DataError, Outcome

logger = logging.getLogger(__name__)

SUCCESS, FAILURE, DISCARD, REPEAT, STOP = "success", "failure", "discard", "repeat", "stop"
MAX_FAILURES_PER_DEMO = 20  # of a script or a recording: more are a mistake, not bad luck
OPERATOR = "operator"  # `outcome_by` of an episode that a request ended
_USUAL = ("constant", "clipped")  # remarks that say little about a single episode


class Requests(Protocol):
    """What the operator requests while a recording runs."""

    def poll(self) -> str | None:
        """Return the oldest request since the last call, or None. Never waits.

        "success" and "failure" end the episode as one. "discard" drops it, "repeat" too, and the same start state comes
        again. "stop" drops it and ends the recording.
        """


class NoRequests:
    """No operator's console: episodes end by themselves."""

    def poll(self) -> None:
        return None


class Stream(Protocol):
    """Sends demonstrations to a running learner, see `record_stream.DemonstrationStream`."""

    def start(self, folder: Path) -> None: ...
    def add(self, file: Path) -> None: ...


def check_source(config: ExperimentConfig) -> None:
    """Raise ConfigError unless a human can act on the robot of `config`."""
    # An environment of the user's own may let a human in (`info["intervene_action"]`), which shows only as it runs.
    if config.actor.intervention == "none" and not isinstance(config.robot, GymConfig):
        raise ConfigError(
            f"--policy=human has no one to record (got none, expected {', '.join(DEVICES)}, scripted or a file). Give "
            "--config.actor.intervention=spacemouse, or another device (docs/operator.md)",
            parameter="actor.intervention",
        )


def open_human(config: ExperimentConfig, env: RobotEnv, attempts: int) -> InterventionSource | None:
    """Open the human's device, or the recording in its place, of which `attempts` episodes were repeated already."""
    source = make_intervention(config.actor.intervention, env, config)
    if isinstance(source, ReplayedIntervention):
        source.begin_at(attempts)
    return source


@dataclasses.dataclass
class Totals:
    """Counts of a recording by hand."""

    attempts: int = 0
    kept: int = 0  # successes
    failures: int = 0  # that were kept as well
    ticks: int = 0  # of the successes
    human_ticks: int = 0

    def add(self, demonstration: Demonstration, *, kept: bool) -> None:
        self.attempts += 1
        if kept and demonstration.outcome is Outcome.SUCCESS:
            self.kept += 1
            self.ticks += demonstration.length
            self.human_ticks += demonstration.human_ticks
        else:
            self.failures += kept

    def summary(self) -> str:
        text = f"{plural(self.kept, 'demonstration')} recorded in {plural(self.attempts, 'episode')}"
        if self.kept:
            share = 100 * self.human_ticks / self.ticks
            text += f", {self.ticks / self.kept:.0f} ticks on average, human {share:.0f} %"
        return f"{text}, {plural(self.failures, 'failure')} kept" if self.failures else text


class HumanRecording:
    """Records episodes in which a human moves the robot, from the first motion on.

    A simulator under a device runs at the robot's rate, any other one as fast as it can.

    Args:
        source: of the human's commands; None: the environment lets the human in.
        writer: of what is kept; the caller closes it.
        number: demonstrations that the folder shall hold, and `there`, those that it holds.
        stream: takes each file once it was checked.
    """

    def __init__(
        self, env: RobotEnv, source: InterventionSource | None, writer: EpisodeWriter, *, config: ExperimentConfig,
        cameras: tuple[str, ...], number: int, there: int, requests: Requests, clock: Clock | None = None,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        # It limits how much an operator helps a policy in training.
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, max_human_ticks=0))
        self._config, self._writer, self._requests, self._stream = config, writer, requests, stream
        self._clock, self._spec = clock or MonotonicClock(), env.robot_spec
        self._paced = config.actor.intervention.lower() in DEVICES and not config.robot.real
        self._number, self._there, self.totals = number, there, Totals()
        self._sink = DemonstrationSink(writer)
        self._request: str | None = None  # that ended the episode
        self._running = False  # within an episode; a reset may wait for a person
        self._start = 0.0  # of tick 0
        self._runner = EpisodeRunner(
            env, None, self._sink, config=config, cameras=cameras, intervention=source, stop=self._stop,
            observer=self._observe,
        )  # fmt: skip

    def close(self) -> None:
        self._runner.close()

    @property
    def missing(self) -> int:
        """Demonstrations still to be recorded."""
        return self._number - self._there - self.totals.kept

    def run(self, seed: int) -> None:
        """Record from start state `seed` on until no demonstration is missing, or the operator stops.

        Raises ConfigError where a script or a recording in a human's place hardly ever succeeds. A human may try again.
        """
        source, totals = self._config.actor.intervention, self.totals
        human = source == "none" or source.lower() in DEVICES
        while self.missing > 0:
            request = self.attempt(seed)
            if request == STOP:
                return
            failed = totals.attempts - totals.kept
            if not human and failed > MAX_FAILURES_PER_DEMO * self._number:
                raise ConfigError(
                    f"{failed} of {totals.attempts} episodes were no success (got {source!r}); giving up",
                    parameter="actor.intervention",
                )
            seed += request != REPEAT

    def attempt(self, seed: int) -> str | None:
        """Run one episode, and check what was written of it. Returns the request that ended it.

        Raises DataError where the file is damaged.
        """
        self._sink.clear()
        self._request, self._running = None, False
        before = len(self._writer.written)
        self._runner.run_episode(seed, episode_id=f"demo-{self._spec.name}-{seed:06d}")
        self._writer.flush()
        files = self._writer.written[before:]
        demonstration = self._sink.last
        self.totals.add(demonstration, kept=bool(files))
        logger.info(self._line(demonstration, files))
        for file in files:
            self._check(file)
            if self._stream is not None:
                self._stream.add(file)
        return self._request

    def _observe(self, tick: int) -> None:
        self._running = True
        if not self._paced:
            return
        now, due = self._clock.now(), self._start + tick * self._spec.dt
        if tick == 0 or now > due:  # a late tick delays those after it
            self._start += now - due
        else:
            self._clock.sleep_until(due)

    def _stop(self) -> str | None:
        request = self._requests.poll()
        if request is None or not (self._running or request == STOP):
            return None
        self._request = request
        if request == SUCCESS:
            self._sink.label(Outcome.SUCCESS, 1.0)
        elif request == FAILURE:
            self._sink.label(Outcome.FAILURE, self._config.reward.failure_reward)
        return OPERATOR

    def _line(self, demonstration: Demonstration, files: list[Path]) -> str:
        length, human, idle, outcome, by = demonstration
        if not length:
            return f"not kept: the human did not move the robot in {plural(idle, 'tick')}"
        figures = f"{plural(length, 'tick')}, {length * self._spec.dt:.1f} s, human {100 * human / length:.0f} %"
        if not files:
            ended = f"{outcome} by {by}" if outcome is not Outcome.UNKNOWN else f"no success, ended by {by}"
            return f"not kept: {figures}, {self._request if self._request in (DISCARD, REPEAT) else ended}"
        if outcome is Outcome.FAILURE:
            return f"failure kept: {figures}, by {by} ({files[0].name})"
        number = f"demonstration {self._there + self.totals.kept} of {self._number}"
        return f"{number}: {figures}, success by {by} ({files[0].name})"

    def _check(self, file: Path) -> None:
        """Read a file as `serl-chunk data inspect` does."""
        spec = self._spec
        report = inspect(open_source(str(file), ReadOptions(spec=spec)), spec=spec, horizon=self._config.chunk.horizon)
        if report.faults:
            raise DataError(
                f"{report.faults[0].text}. The file was written just now: check the disk, remove the file, and run the "
                "same command again"
            )
        for remark in report.remarks:
            if remark.kind not in _USUAL and (remark.kind != "reward" or report.count(Outcome.SUCCESS)):
                named = remark.text.startswith(file.name)
                logger.warning(remark.text if named else f"{file.name}: {remark.text}")
