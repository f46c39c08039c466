"""Open-loop check: a policy's chunks against the recorded actions of demonstrations, before it moves anything.

Every chunk is decided on a recorded observation, and its actions are compared with those that were recorded on the same
ticks. What this finds no success rate has to be paid for with: a gripper that never closes, a policy that stands still.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.actor.handover import HoldPolicy
from serl_chunk.actor.policy import LocalPolicy, PolicyError, Request
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.source import ReadOptions
from serl_chunk.data.validate import cameras_of
from serl_chunk.io import plural
from serl_chunk.runs.episodes import DEMOS, RunDemos
from serl_chunk.runs.evaluations import save_check
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, DataError, Episode, Outcome, RobotSpec, Snapshot

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)

DECISIONS = 256  # after so many no further episode is compared
BATCH = 8  # observations decided at once
END = 0.25  # of the range that demonstrations use of a gripper: as near as that to an end it is there
USED = 0.05  # of a gripper's limits: demonstrations that use less of them do not move it
RARELY = 0.5  # of the chunks in which demonstrations are at an end of a gripper: below it the policy misses that end
CHATTER = 3  # times as many ways of a gripper from end to end as the demonstrations': above it they are named
SWITCH = 0.1  # of the ticks at neither end: a number that is no oftener between them is used like a gripper
COMMON = 1 / 3  # of the episodes: an end that fewer of them reach is not part of the task
STILL = 0.1  # of the demonstration's motion in a chunk
STALLS = 0.1  # of the chunks in which demonstrations move: above it they are named
AT_LIMIT, FROM_LIMIT = 1e-3, 0.05  # of a number's limits: the policy is at one, the demonstration is not
SATURATED = 0.1  # of the ticks: above it a number is named
LONGER = "Train it longer (learner.pretrain_steps)"


class Played(NamedTuple):
    """An episode of T ticks, all float32[T, A] in the robot's units."""

    recorded: np.ndarray
    predicted: np.ndarray  # of the chunks' executed actions, one chunk after the other
    held: np.ndarray  # the command that would have kept the robot where it was at each chunk's decision


@dataclasses.dataclass(frozen=True)
class DimensionCheck:
    """One number of the action. Errors are mean absolute ones, in the robot's units."""

    dimension: int
    name: str
    error: float
    held_error: float  # of repeating the current command
    mean_error: float  # of the demonstrations' mean command
    saturated: float  # share of ticks on which the policy is at a limit of the action space, the demonstration is not


@dataclasses.dataclass(frozen=True)
class GripperCheck:
    """A gripper that demonstrations move; an event is its way from one end of the range that they use to the other."""

    dimension: int
    ends: tuple[float, float]
    recorded: tuple[int, int]  # chunks that reach each end
    predicted: tuple[int, int]
    common: tuple[bool, bool]  # whether enough demonstrations reach that end
    recorded_events: int
    predicted_events: int
    between: float  # share of recorded ticks at neither end; where it is most, commands push and name no opening
    declared: bool  # by the robot's specification; else demonstrations use it like one

    @property
    def is_switch(self) -> bool:
        return self.between <= SWITCH and all(self.common)


@dataclasses.dataclass(frozen=True)
class PolicyCheck:
    """The comparison; `findings` names what would go wrong on a robot, a few sentences each, empty for nothing."""

    checkpoint: int
    held_out: bool  # whether the policy was not trained on these demonstrations
    episodes: int
    chunks: int
    moving: int  # chunks in which the demonstration moves
    stalled: int  # of these, in which the policy does not
    relative_error: float | None  # of all numbers but grippers, against the mean command's; None: they never move
    dimensions: tuple[DimensionCheck, ...]
    grippers: tuple[GripperCheck, ...]
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "lines": self.lines()}

    def lines(self) -> list[str]:
        """Return a line for each finding, or the one line of a policy without any."""
        of = "held-out" if self.held_out else "training"
        where = f"policy check, checkpoint {self.checkpoint}, {plural(self.episodes, f'{of} demonstration')}"
        if self.findings:
            return [f"{where}: {finding}" for finding in self.findings]
        error = "" if self.relative_error is None else f", {self.relative_error:.2f} of the mean command's error"
        moved = sum(g.predicted_events for g in self.grippers), sum(g.recorded_events for g in self.grippers)
        grippers = f", {moved[0]} gripper events (recorded: {moved[1]})" if self.grippers else ""
        return [f"{where}: passed, {plural(self.chunks, 'chunk')}{error}{grippers}, {self.stalled} stalled"]

    def log(self) -> None:
        for line in self.lines():
            (logger.warning if self.findings else logger.info)(line)


def check_policy(
    policy: LocalPolicy, config: ExperimentConfig, spec: RobotSpec, episodes: Iterable[Episode],
    *, checkpoint: int, held_out: bool = False, batch: int = BATCH,
) -> PolicyCheck:  # fmt: skip
    """Compare a policy with `episodes`, the failed ones left out, until it has decided DECISIONS times.

    A policy that reinforcement learning has changed is not blamed for other commands than the demonstrations'.

    Args:
        checkpoint: step of the policy's; above 0 an agent with a critic has been trained by it.
        batch: observations decided at once, a number that is compiled.

    Raises:
        ConfigError: there is no episode to compare with.
        PolicyError: an action is not finite.
    """
    played: list[Played] = []
    chunks = 0
    for episode in episodes:
        if episode.end.outcome is Outcome.FAILURE:
            continue
        played.append(_play(policy, config, spec, end_at_first_success(episode)[0], batch))
        chunks += -(-len(played[-1].recorded) // config.chunk.executed)
        if chunks >= DECISIONS:
            break
    if not played:
        raise ConfigError("no demonstration that did not fail. Give others", parameter="demo_path")
    imitates = not (policy.agent.has_critic and checkpoint)
    return compare(played, spec, config.chunk.executed, checkpoint=checkpoint, held_out=held_out, imitates=imitates)


def _play(policy: LocalPolicy, config: ExperimentConfig, spec: RobotSpec, episode: Episode, batch: int) -> Played:
    steps, executed, hold = episode.steps, config.chunk.executed, HoldPolicy(spec)
    task, cameras = episode.begin.task or config.robot.task, cameras_of(episode)
    decided = range(0, steps.n, executed)
    holds = [hold.next(steps.action[t - 1]) if t else hold.initial(steps.observation[STATE][0]) for t in decided]
    rows = []
    for t in decided:
        observation = {STATE: steps.observation[STATE][t]}
        for name in policy.image_keys:  # the newest frame of that tick
            if name not in cameras:
                raise DataError(
                    f"episode {episode.begin.episode_id}: no frame of camera {name!r}. Give demonstrations with it"
                )
            at = max(0, int(np.searchsorted(cameras[name].index, t, "right")) - 1)
            observation[IMAGE_PREFIX + name] = np.asarray(cameras[name].values[at])
        rows.append(policy.prepare(Request(observation, task=task)))
    chunks: list[np.ndarray] = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        full = part + part[:1] * (batch - len(part))
        for decision in policy.decide_each(full, explore=config.learner.eval_mode != "mean")[: len(part)]:
            if isinstance(decision, PolicyError):
                raise decision
            chunks.append(decision.actions[:executed])
    predicted = np.concatenate(chunks)[: steps.n]
    if config.agent.gripper.kept:  # the actor keeps these where they are, whatever the policy outputs
        predicted[:, spec.grippers] = steps.action[:, spec.grippers]
    held = np.repeat(holds, executed, 0)[: steps.n]
    return Played(steps.action, predicted, held)


def compare(
    played: Sequence[Played], spec: RobotSpec, executed: int,
    *, checkpoint: int = 0, held_out: bool = False, imitates: bool = True,
) -> PolicyCheck:  # fmt: skip
    """Return the comparison of episodes that were played in chunks of `executed` ticks.

    `imitates`: the policy is to give the demonstrations' commands, which findings of errors and limits are about.
    """
    recorded, predicted, held = (np.concatenate(column) for column in zip(*played, strict=True))
    lengths = np.array([len(e.recorded) for e in played])
    first = np.cumsum(lengths) - lengths  # tick of each episode's start, among all
    starts = np.concatenate([f + np.arange(0, n, executed) for f, n in zip(first, lengths, strict=True)])
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    span = high - low
    possible = (_gripper(d, spec, played, executed) for d in range(spec.action_dim))
    grippers = [g for g in possible if g is not None and (g.declared or (imitates and g.is_switch))]
    free = np.setdiff1d(np.arange(spec.action_dim), [*spec.grippers, *(g.dimension for g in grippers)])
    errors = [np.abs(other - recorded).mean(0) for other in (predicted, held, recorded.mean(0))]
    saturated = (
        (predicted <= low + AT_LIMIT * span) & (recorded > low + FROM_LIMIT * span)
        | (predicted >= high - AT_LIMIT * span) & (recorded < high - FROM_LIMIT * span)
    ).mean(0)  # fmt: skip
    names = [_name(spec, d) for d in range(spec.action_dim)]
    moves = [
        np.maximum.reduceat((np.abs(commands - held) / span)[:, free].max(1, initial=0.0), starts)
        for commands in (recorded, predicted)
    ]
    moving = moves[0] >= 0.5 * max(np.median(moves[0]), 1e-6)
    stalled = moving & (moves[1] < STILL * moves[0])
    motion = (errors[2] / span)[free].sum()
    relative = float((errors[0] / span)[free].sum() / motion) if motion > 0 else None
    columns = zip(range(spec.action_dim), names, *(e.tolist() for e in (*errors, saturated)), strict=True)
    dimensions = tuple(DimensionCheck(*column) for column in columns)
    findings = [text for g in grippers for text in _gripper_findings(g, dimensions[g.dimension])]
    if stalled.sum() > STALLS * moving.sum():
        findings.append(
            f"the policy stands still in {stalled.sum()} of {plural(int(moving.sum()), 'chunk')} in which the "
            f"demonstrations move: the robot would stop there. {LONGER}, and leave out demonstrations that pause"
        )
    if imitates and relative is not None and relative >= 1:
        findings.append(
            f"its commands are no nearer to the recorded ones than their mean is (error {relative:.2f} of that one's): "
            f"it has not learnt the task. {LONGER}, and look with serl-chunk data inspect whether the demonstrations "
            "are this robot's, in its units"
        )
    if imitates and (at := [d for d in free if saturated[d] > SATURATED]):
        listed = ", ".join(f"{names[d]} on {saturated[d]:.0%} of the ticks" for d in at)
        findings.append(
            f"at a limit of the action space where the demonstrations are not: {listed}. The robot would be driven as "
            f"far as its limits permit. {LONGER}, and check that they and normaliser.actions suit the demonstrations"
        )
    return PolicyCheck(
        checkpoint, held_out, len(played), len(starts), int(moving.sum()), int(stalled.sum()), relative,
        dimensions, tuple(grippers), tuple(findings),
    )  # fmt: skip


def _gripper(d: int, spec: RobotSpec, played: Sequence[Played], executed: int) -> GripperCheck | None:
    """Return how a policy moves a number as if it were a gripper; None where the demonstrations do not move it."""
    columns = [np.stack([e.recorded[:, d], e.predicted[:, d]]) for e in played]  # each float32[2, T]
    low, high = (float(f(np.concatenate(columns, 1)[0])) for f in (np.min, np.max))
    if high - low < USED * (spec.action_high[d] - spec.action_low[d]):
        return None
    near = END * (high - low)
    reached, episodes, events, between = np.zeros((2, 2), int), np.zeros(2, int), np.zeros(2, int), 0
    for column in columns:
        at_end = np.stack([column <= low + near, column >= high - near])  # [end, whose, tick]
        chunks = np.logical_or.reduceat(at_end, np.arange(0, column.shape[1], executed), axis=2)
        reached += chunks.sum(2)
        episodes += chunks[:, 0].any(1)
        place = np.where(at_end[0], -1, np.where(at_end[1], 1, 0))
        events += [int((np.diff(of[of != 0]) != 0).sum()) for of in place]
        between += int((place[0] == 0).sum())
    recorded, predicted = zip(*reached.tolist(), strict=True)
    common = tuple((episodes >= COMMON * len(played)).tolist())
    share = between / sum(column.shape[1] for column in columns)
    of_recorded, of_predicted = events.tolist()
    return GripperCheck(
        d, (low, high), recorded, predicted, common, of_recorded, of_predicted, share, d in spec.grippers
    )


def _gripper_findings(gripper: GripperCheck, about: DimensionCheck) -> Iterator[str]:
    name_it = "" if gripper.declared else "name it (robot.grippers of a gymnasium robot) and "
    choose = f"{LONGER}, or {name_it}let it choose among the gripper's ends (agent.gripper.choices)"
    columns = zip(gripper.ends, gripper.recorded, gripper.predicted, gripper.common, strict=True)
    missed = [(end, r, p) for end, r, p, common in columns if common and p < RARELY * r]
    if missed:
        how = "rarely" if all(p for _, _, p in missed) else "never"
        ends, recorded, predicted = (" and ".join(f"{value:.3g}" for value in of) for of in zip(*missed, strict=True))
        what = f"close that gripper (or open it, if {ends} is open)"
        if len(missed) > 1 or not gripper.declared:
            what = (
                "close or open that gripper" if gripper.declared else "go there, which demonstrations use as a gripper"
            )
        yield (
            f"{about.name} goes to about {ends} in {predicted} of its chunks, the demonstrations in {recorded}: this "
            f"policy will {how} {what}. {choose}; where the observations do not show when it moves, record others"
        )
    if not missed and gripper.between < 0.5 and about.error >= about.mean_error:
        yield (
            f"{about.name} is no nearer to the recorded openings than their mean is (error {about.error:.3g}, "
            f"{about.mean_error:.3g}): this policy closes that gripper at other times, or the wrong way round. "
            f"{choose}; check that open and closed are the same in all demonstrations"
        )
    if gripper.predicted_events > CHATTER * max(gripper.recorded_events, 1):
        yield (
            f"{about.name} opens and closes {gripper.predicted_events} times, in the demonstrations "
            f"{gripper.recorded_events}: this policy will drop what it holds. {choose}"
        )


def _name(spec: RobotSpec, d: int) -> str:
    about = [f"arm {i}" for i, (first, stop) in enumerate(spec.arms) if first <= d < stop]
    about += ["gripper"] if d in spec.grippers else []
    return f"action {d}" + (f" ({', '.join(about)})" if about else "")


def demonstrations_of(run: Path, config: ExperimentConfig) -> Iterator[Episode]:
    """Return a run's demonstrations in a drawn order, each read when it is wanted. Raises ConfigError and DataError."""
    options = ReadOptions(cameras=tuple(config.agent.image_keys))
    source = RunDemos(run, options) if (run / DEMOS).exists() else None
    keys = [] if source is None else source.keys()
    if source is None or not keys:
        text = f"{run} has no demonstrations of its own to compare with (a data set of --dataset_dir is not noted)"
        raise ConfigError(f"{text}. Give some", parameter="demo_path")
    return (source.read(keys[i]) for i in np.random.default_rng(0).permutation(len(keys)))


class CheckOfLearner:
    """Checks what a learner has trained on demonstrations, on these, before an actor gets it.

    Logs the findings, and writes them to the run. A check that fails ends no training.
    """

    def __init__(self, config: ExperimentConfig, spec: RobotSpec) -> None:
        self._config, self._spec = config, spec

    def __call__(self, learner: Learner, snapshot: Snapshot) -> None:
        run = learner.metrics.run_dir
        try:
            policy = LocalPolicy(learner.agent, learner.preprocess, self._spec, seed=self._config.seed + 1)
            policy.swap(snapshot)
            episodes = demonstrations_of(run, self._config)
            check = check_policy(policy, self._config, self._spec, episodes, checkpoint=snapshot.version)
            check.log()
            save_check(run, check.to_json())
        except Exception as error:  # a file that is gone, a full disk, memory: the policy is as good as without it
            logger.warning(f"the policy was not checked against its demonstrations ({type(error).__name__}: {error})")
