"""`serl-chunk record`: demonstrations of a script or a human, in the control loop of training."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.inference import while_polling
from serl_chunk.actor.policy import Policy, no_stop
from serl_chunk.actor.recorder import NullSink
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.operator import DEVICES
from serl_chunk.config.robots import GymConfig
from serl_chunk.console.bindings import ActorState
from serl_chunk.console.view import Obstacle
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.inspect.inspect import inspect
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.devices.recorded import ReplayedIntervention
from serl_chunk.devices.registry import make_intervention
from serl_chunk.io import Waiting, os_reason, plural
from serl_chunk.operator.operator import POLL_SECONDS, Operator
from serl_chunk.recording.ahead import EpisodesAhead
from serl_chunk.recording.stream import DemonstrationStream
from serl_chunk.robots.base import Expert, InterventionSource, RobotEnv
from serl_chunk.types import (
    IMAGE_PREFIX,
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
    Observation,
    Outcome,
    RecordSink,
    RobotSpec,
    Source,
    Step,
)

logger = logging.getLogger(__name__)

MAX_FAILURES_PER_DEMO = 20  # of a script or a recording: more are a mistake, not bad luck
ASIDE = ".undone"  # ending of a file that the operator took back
AGAIN_S = 1.0  # between two attempts to write
_USUAL = ("constant", "clipped")  # remarks that say little about a single episode


class Demonstration(NamedTuple):
    """The figures of an episode by hand."""

    length: int  # ticks from the first human one on; 0: the human did not move the robot, and nothing is recorded
    human_ticks: int  # of them, those on which the human moved it
    idle_before: int  # ticks before them
    outcome: Outcome
    outcome_by: str


class DemonstrationSink:
    """A RecordSink that leaves out the ticks before the first one with source HUMAN, and counts from there.

    Tick 0 gets the newest frame of a camera that it only repeats. Idle ticks later on remain. No policy has the arm
    that the human lets go of: the human holds it, and so no `human_dims` are kept.
    """

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self.clear()

    def clear(self) -> None:
        """Forget the last episode: the next one may end before its first step, and then leaves no record."""
        self._begin: Begin | None = None
        self._first: int | None = None  # tick that becomes tick 0
        self._length = self._human = self._idle = 0
        self._frames: dict[str, np.ndarray] = {}  # camera -> its newest frame before the first tick
        self._moved: dict[str, int] = {}  # camera -> the new tick that this frame was recorded with
        self.last = Demonstration(0, 0, 0, Outcome.UNKNOWN, "")

    def begin(self, record: Begin) -> None:
        self.clear()
        self._begin = record

    def step(self, record: Step) -> None:
        if self._first is None:
            if record.source is not Source.HUMAN:
                self._idle += 1
                for key, image in record.observation.items():
                    if key.startswith(IMAGE_PREFIX):
                        self._frames[key.removeprefix(IMAGE_PREFIX)] = image
                return
            assert self._begin is not None
            self._first = record.tick
            self._sink.begin(self._begin)
        first, tick = self._first, record.tick - self._first
        observation, repeats = self._since_first(tick, record.observation, record.repeats)
        decided = record.decision_tick - first if record.decision_tick >= first else -1
        self._length = tick + 1
        self._human += record.source is Source.HUMAN
        self._sink.step(
            record._replace(tick=tick, observation=observation, repeats=repeats, decision_tick=decided, human_dims=None)
        )

    def end(self, record: End) -> None:
        self.last = Demonstration(self._length, self._human, self._idle, record.outcome, record.outcome_by)
        if self._first is None:
            return
        final, repeats = record.final_observation, record.repeats
        if final is not None:
            final, repeats = self._since_first(self._length, final, repeats)
        self._sink.end(record._replace(length=self._length, final_observation=final, repeats=repeats))

    def _since_first(
        self, tick: int, observation: Observation, repeats: dict[str, int] | None
    ) -> tuple[Observation, dict[str, int] | None]:
        """Return an observation of the new `tick` whose repeats refer to new ticks alone."""
        assert self._first is not None
        frames, kept = {}, {}
        for camera, of in (repeats or {}).items():
            if of >= self._first:
                kept[camera] = of - self._first
            elif camera in self._moved:
                kept[camera] = self._moved[camera]
            else:
                frames[IMAGE_PREFIX + camera] = self._frames[camera]
                self._moved[camera] = tick
        return ({**observation, **frames} if frames else observation), kept or None


def nothing() -> None:
    """Do nothing before another attempt."""


def polling(work: Callable[[], None], operator: Operator | None, what: str, idle: Callable[[], None] = nothing) -> None:
    """Call `work` on a thread; the operator's keys, or else `idle`, work meanwhile. Raises what `work` raises."""
    while_polling(work, idle if operator is None else lambda: operator.waits(Obstacle(what, "wait: it takes a moment")))


def write_with_room(
    write: Callable[[], None], operator: Operator | None, given_up: Callable[[], bool],
    before_again: Callable[[], None] = nothing, idle: Callable[[], None] = nothing,
) -> None:  # fmt: skip
    """Call `write` until it succeeds. Where the disk is at fault the operator sees why, and all keys work meanwhile.

    Args:
        write: may be called again after it failed.
        operator: None: a failure is raised at once.
        given_up: whether to raise the failure, a DataError, instead of another attempt.
        idle: as of `polling`.
    """
    lines = Waiting(logger, math.inf)
    while True:
        try:
            polling(write, operator, "the episode is being written", idle)
        except DataError as error:
            if operator is None or not isinstance(error.__cause__, OSError) or given_up():
                raise
            again = "it is tried again until there is room; Ctrl-C gives it up"
            lines.log(str(error), again, level=logging.WARNING)
            why, ends = Obstacle(str(error), "free some space, or give it up by Ctrl-C"), time.monotonic() + AGAIN_S
            lines.until(lambda: time.monotonic() >= ends, given_up, lambda: operator.waits(why), every=POLL_SECONDS)  # noqa: B023
            before_again()
        else:
            return


def lets_human_in(config: ExperimentConfig) -> bool:
    """Return whether a human can act on the robot of `config`."""
    # An environment of the user's own may let a human in (`info["intervene_action"]`), which shows only as it runs.
    return config.actor.intervention != "none" or isinstance(config.robot, GymConfig)


def check_source(config: ExperimentConfig) -> None:
    """Raise ConfigError unless a human can act on the robot of `config`."""
    require(lets_human_in(config), "actor.intervention",
        f"--policy=human has no one to record (got none, expected {', '.join(DEVICES)}, scripted or a file). Give "
        "--config.actor.intervention=spacemouse, or another device (docs/operator.md)")  # fmt: skip


def open_human(config: ExperimentConfig, env: RobotEnv, attempts: int) -> InterventionSource | None:
    """Open the human's device, or the recording in its place, of which `attempts` episodes were repeated already."""
    source = make_intervention(config.actor.intervention, env, config)
    if isinstance(source, ReplayedIntervention):
        source.begin_at(attempts)
    return source


class NothingKept(NullSink):
    """Stands in for the writer of a recording that records nothing."""

    written: Sequence[Path] = ()

    def flush(self) -> None: ...

    def again(self) -> None: ...


class _Kept(NamedTuple):
    demonstration: Demonstration
    files: Sequence[Path]


class RecordingTotals:
    """Counts of a recording, and the files of what was kept.

    A file is written when its episode ends, so that a killed process loses none. What the operator takes back later is
    renamed at once, and counts no more once that is final.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self._kept: dict[str, _Kept] = {}  # by episode
        self._noted, self._aside = "", dict[Path, Path]()  # the episode to be discarded; its files, and where they are
        self._early: set[str] = set()  # episodes that were taken back before they were written

    def add(self, episode_id: str, demonstration: Demonstration, files: Sequence[Path]) -> None:
        """Count an attempt; `files`: what was kept of it."""
        self.attempts += 1
        if files:
            self._kept[episode_id] = _Kept(demonstration, files)
            if episode_id == self._noted:
                self.note_discard(episode_id)
        if episode_id in self._early:
            self._set_aside(episode_id)

    def amend(self, amend: Amend) -> None:
        if amend.episode_id in self._kept:
            self._set_aside(amend.episode_id)
        else:
            self._early.add(amend.episode_id)

    def _set_aside(self, episode_id: str) -> None:
        kept = self._kept.pop(episode_id, None)
        for file in kept.files if kept else ():
            if (aside := self._aside.pop(file, None) or _set_aside(file)) is not None:
                logger.info(f"not kept after all: {file.name} is now {aside.name}, and no demonstration")

    def note_discard(self, episode_id: str) -> None:
        """Set the file of an episode aside at once; an empty id, or another one, brings it back until `amend`."""
        for file, aside in self._aside.items():
            with contextlib.suppress(OSError):  # it was moved by hand meanwhile
                aside.rename(file)
        self._aside, self._noted = {}, episode_id
        for file in self._kept[episode_id].files if episode_id in self._kept else ():
            if (moved := _set_aside(file)) is not None:
                self._aside[file] = moved

    @property
    def discard_noted(self) -> bool:
        return True

    @property
    def successes(self) -> list[Demonstration]:
        return [k.demonstration for k in self._kept.values() if k.demonstration.outcome is Outcome.SUCCESS]

    @property
    def failures(self) -> int:
        return len(self._kept) - len(self.successes)

    def summary(self, *, human: bool) -> str:
        """Return the counts in words; `human`: with the share of a human's ticks."""
        found = self.successes
        text = f"{plural(len(found), 'demonstration')} recorded in {plural(self.attempts, 'episode')}"
        if found:
            ticks = sum(d.length for d in found)
            text += f", {ticks / len(found):.0f} ticks on average"
            if human:
                text += f", human {100 * sum(d.human_ticks for d in found) / ticks:.0f} %"
        return f"{text}, {plural(self.failures, 'failure')} kept" if self.failures else text


class Pace:
    """The rate of a simulator that a human moves or watches (`paced`); a real robot keeps its own."""

    def __init__(self, config: ExperimentConfig, spec: RobotSpec, clock: Clock | None = None, *, paced: bool) -> None:
        self._clock, self._dt = clock or Clock(), spec.dt
        self._paced = paced and not config.robot.real
        self._start = 0.0  # of tick 0

    def wait(self, tick: int) -> None:
        if not self._paced:
            return
        now, due = self._clock.now(), self._start + tick * self._dt
        if tick == 0 or now > due:  # a late tick delays those after it
            self._start += now - due
        else:
            self._clock.sleep_until(due)


def _set_aside(file: Path) -> Path | None:
    """Rename a file that is no demonstration; returns its new path, or None where it cannot be renamed."""
    names = (file.with_name(f"{file.name}{ASIDE}{i or ''}") for i in itertools.count())
    aside = next(name for name in names if not name.exists())
    try:
        return file.rename(aside)
    except OSError as error:  # the control loop calls this, and goes on
        logger.warning(f"{file} cannot be renamed ({os_reason(error)}). Remove it: it is no demonstration")
        return None


class Recording:
    """Records episodes until a folder holds enough demonstrations; those of a human from the first motion on.

    A simulator under a device runs at the robot's rate, any other one as fast as it can. With `NothingKept` the
    operator drives the robot in the same way, for as long as they want, and a simulator runs at its rate.

    Args:
        demonstrator: the robot's script, or a policy; None: a human demonstrates.
        source: of the human's commands; None: the environment lets the human in.
        writer: of what is kept; the caller closes it.
        totals: receives the operator's corrections.
        number: demonstrations that the folder shall hold, and `there`, those that it holds.
        operator: of the console; None: episodes end by themselves.
        stop: polled on every tick; a string ends the recording.
        progress: called with the number of demonstrations recorded, after each attempt.
        stream: takes each file once the operator cannot take it back any more.
        others: more simulated robots, each with a policy, whose episodes run ahead; without an operator or a human.
    """

    def __init__(
        self, env: RobotEnv, demonstrator: Expert | Policy | None, source: InterventionSource | None,
        writer: EpisodeWriter | NothingKept, totals: RecordingTotals,
        *, config: ExperimentConfig, cameras: tuple[str, ...], number: float, there: int,
        operator: Operator | None = None, stop: Callable[[], str | None] = no_stop, clock: Clock | None = None,
        progress: Callable[[int], object] | None = None, stream: DemonstrationStream | None = None,
        others: Sequence[tuple[RobotEnv, Policy]] = (),
    ) -> None:  # fmt: skip
        # It limits how much an operator helps a policy in training.
        config = dataclasses.replace(config, actor=config.actor.without_human_limit())
        self._config, self._writer, self._operator, self._stop = config, writer, operator, stop
        self._spec, self._progress, self._idle = env.robot_spec, progress, env.idle
        self._named = "the policy server" if isinstance(demonstrator, Policy) else "the expert"
        self._number, self._there, self.totals = number, there, totals
        self._stream, self._unsent = stream, list[Path]()
        self._tries: dict[int, int] = {}  # by start state
        self._sink = DemonstrationSink(writer) if demonstrator is None else None
        self._keeps = not isinstance(writer, NothingKept)
        by_device = demonstrator is None and (config.actor.intervention.lower() in DEVICES or not self._keeps)
        self._runner: EpisodeRunner | EpisodesAhead
        if others:
            assert isinstance(demonstrator, Policy)
            self._runner = EpisodesAhead(
                [(env, demonstrator), *others], writer, config=config, cameras=cameras, name=self._name, stop=stop
            )
        else:
            self._runner = EpisodeRunner(
                env, demonstrator, self._sink or writer, config=config, cameras=cameras, intervention=source,
                stop=stop, observer=Pace(config, env.robot_spec, clock, paced=by_device).wait, clock=clock,
                operator=operator, from_motion=demonstrator is None,
            )  # fmt: skip
        if operator is not None:
            operator.actor.describe = self._described
            operator.actor.without_human = ActorState.POLICY if demonstrator is not None else ActorState.HUMAN

    def close(self) -> None:
        self._runner.close()

    def _name(self, seed: int) -> str:
        return f"demo-{self._spec.name}-{seed:06d}"

    @property
    def missing(self) -> float:
        return self._number - self._there - len(self.totals.successes)

    def run(self, seed: int) -> None:
        """Record from start state `seed` on until no demonstration is missing, or the operator ends it.

        Raises ConfigError where a script or a recording in a human's place hardly ever succeeds. A human may try again.
        """
        operator = self._operator
        while self.missing > 0 and self._stop() is None and not (operator is not None and operator.quits):
            began = self.attempt(seed)
            self._give_up()
            seed += began and (operator is None or not operator.labels.repeats)
        if operator is not None:
            operator.send_pending()
        self._send()

    def attempt(self, seed: int) -> bool:
        """Run one episode, and check what was written of it; returns False where the operator stopped its reset.

        Raises DataError where a human's file is damaged.
        """
        if self._sink is not None:
            self._sink.clear()
        again = self._tries[seed] = self._tries.get(seed, 0) + 1
        name = f"{self._name(seed)}{f'-{again}' if again > 1 else ''}"
        before = len(self._writer.written)
        if isinstance(self._runner, EpisodesAhead):
            summary = self._runner.run_episode(seed)
        else:
            summary = self._runner.run_episode(seed, episode_id=name)
        if summary.length == 0 and (self._operator is not None or self._stop() is not None):
            return False
        # Now, as a fast simulator would leave thousands of episodes waiting in memory.
        ended = lambda: self._stop() is not None  # noqa: E731
        write_with_room(self._writer.flush, self._operator, ended, self._writer.again, self._idle)
        files = self._writer.written[before:]
        if self._sink is not None:
            demonstration = self._sink.last
        else:
            demonstration = Demonstration(summary.length, summary.human_ticks, 0, summary.outcome, summary.ended_by)
        self.totals.add(name, demonstration, files)
        files = [file for file in files if file.exists()]
        if self._sink is not None or self._operator is not None:
            logger.info(self._line(demonstration, files))
        if self._progress is not None:
            self._progress(len(self.totals.successes))
        if self._sink is not None:
            polling(lambda: self._check(files), self._operator, "the demonstration is being checked", self._idle)
        self._send()  # of the attempt before: the end of this one made it final
        self._unsent = [*files]
        if self._operator is None:
            self._send()
        return True

    def _send(self) -> None:
        """Stream files that were not set aside meanwhile."""
        for file in self._unsent:
            if self._stream is not None and file.exists():
                self._stream.add(file)
        self._unsent = []

    def _give_up(self) -> None:
        source, attempts = self._config.actor.intervention, self.totals.attempts
        failed = attempts - len(self.totals.successes)
        if failed <= MAX_FAILURES_PER_DEMO * self._number:
            return
        if self._sink is None:
            raise ConfigError(f"{self._named} failed {failed} of {attempts} episodes; giving up")
        require(source == "none" or source.lower() in DEVICES, "actor.intervention",
            f"{failed} of {attempts} episodes were no success (got {source!r}); giving up")  # fmt: skip

    def _described(self) -> dict[str, object]:
        done, totals = self._there + len(self.totals.successes), self.totals
        if not self._keeps:
            driven = f"nothing is recorded: {plural(totals.attempts, 'episode')} driven"
            return {"progress": driven, "rate_target": self._spec.control_hz}
        number = f"demonstration {min(done + 1, self._number)} of {self._number}"
        failures = f", {plural(totals.failures, 'failure')} kept" if totals.failures else ""
        return {
            "progress": f"{number}: {plural(totals.attempts, 'attempt')}, {len(totals.successes)} kept{failures}",
            "rate_target": self._spec.control_hz,
        }

    def _line(self, demonstration: Demonstration, files: Sequence[Path]) -> str:
        length, human, idle, outcome, by = demonstration
        kept = "not kept" if self._keeps else f"episode {self.totals.attempts}"
        if not length:
            return f"{kept}: the human did not move the robot in {plural(idle, 'tick')}"
        figures = f"{plural(length, 'tick')}, {length * self._spec.dt:.1f} s"
        if self._sink is not None:
            figures += f", human {100 * human / length:.0f} %"
        if not files:
            late = by == "environment" and length >= self._spec.max_episode_steps
            ended = f"no success, ended by {'the time limit' if late else by}"
            ended = ended if outcome is Outcome.UNKNOWN else f"{outcome} by {by}"
            if self._operator is not None and self._operator.labels.discards_last:
                ended = "discarded"
            elif self._operator is not None and self._operator.labels.repeats:
                ended = "to be repeated"
            return f"{kept}: {figures}, {ended}"
        if outcome is Outcome.FAILURE:
            return f"failure kept: {figures}, by {by} ({files[0].name})"
        number = f"demonstration {self._number - self.missing} of {self._number}"
        return f"{number}: {figures}, success by {by} ({files[0].name})"

    def _check(self, files: Sequence[Path]) -> None:
        """Read files as `serl-chunk data inspect` does, but for what the operator takes back meanwhile."""
        for file in files:
            try:
                self._inspect(file)
            except (DataError, OSError):
                if file.exists():
                    raise

    def _inspect(self, file: Path) -> None:
        spec = self._spec
        report = inspect(
            open_episodes(str(file), ReadOptions(spec=spec)), spec=spec, horizon=self._config.chunk.horizon
        )
        if report.faults:
            raise DataError(
                f"{report.faults[0].text}. The file was written just now: check the disk, remove the file, and run the "
                "same command again"
            )
        for remark in report.remarks:
            if remark.kind not in _USUAL and (remark.kind != "reward" or report.count(Outcome.SUCCESS)):
                named = remark.text.startswith(file.name)
                logger.warning(remark.text if named else f"{file.name}: {remark.text}")
