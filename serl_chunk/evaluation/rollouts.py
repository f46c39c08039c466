"""Evaluation: fixed held-out start states, no interventions, the training's delay and lengths."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from serl_chunk.actor.clock import Clock
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.many import ManyEpisodes
from serl_chunk.actor.policy import BLOCK, LocalPolicy, Policy, no_stop
from serl_chunk.actor.recorder import NullSink
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.agents.base import Agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.console.bindings import ActorState
from serl_chunk.console.view import Obstacle
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.results import INTERVENTION, EvalResult, is_decided
from serl_chunk.operator.operator import Operator
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import InterventionSource, RobotEnv, check_apart
from serl_chunk.types import EVAL_SEED_BASE, IMAGE_PREFIX, STATE, Amend, Outcome, Snapshot, Source, Step
from serl_chunk.viz.video import EpisodeVideo

logger = logging.getLogger(__name__)

FAULT_REPEATS = 2  # of an episode that the robot ended by a fault; after that it counts as a failure
STATE_TOLERANCE = 1e-4  # of a state's number, absolute and relative: a simulator's rounding is less
FRAME_TOLERANCE = 16  # levels of 0..255 of any pixel: a renderer's noise is less, an object in another place more


def _start_difference(env: RobotEnv, seed: int, cameras: tuple[str, ...]) -> str | None:
    """Describe how state or frames of `cameras` differ between two resets with one `seed`; None where they agree."""
    starts = []
    for _ in range(2):
        state = np.array(env.reset(seed=seed)[0][STATE], np.float64)
        frames = env.read_images(cameras) if cameras else {}
        starts.append((state, {c: frames[IMAGE_PREFIX + c].astype(np.int16) for c in cameras}))
    (state, frames), (again, frames_again) = starts
    differing = np.flatnonzero(~np.isclose(state, again, rtol=STATE_TOLERANCE, atol=STATE_TOLERANCE))
    if len(differing):
        i = differing[0]
        return f"state[{i}] is {state[i]:.4g} and {again[i]:.4g}"
    for c in cameras:
        if (pixels := np.abs(frames[c] - frames_again[c])).max() > FRAME_TOLERANCE:
            return f"camera {c!r} differs by up to {pixels.max()} levels"
    return None


def _compare_starts(env: RobotEnv, config: ExperimentConfig, seed: int, cameras: tuple[str, ...]) -> None:
    if env.starts_repeat is not None or config.robot.real:
        return
    difference = _start_difference(env, seed, cameras)
    env.starts_repeat = difference is None
    if difference is not None:
        logger.warning(
            f"robot {env.robot_spec.name!r} ignores the seed of reset(seed=...): after two resets with one seed "
            f"{difference}. There are then no held-out starts, and two evaluations begin differently. Draw starts from "
            "gymnasium's self.np_random, or seed the generator that the environment draws from in a wrapper's reset "
            "(docs/your_robot.md, section 2)"
        )


class _Film(NullSink):
    """Films episodes: images are taken before a tick, its source comes with its record."""

    def __init__(self, env: RobotEnv) -> None:
        self._env = env
        self._images: dict[int, dict[str, np.ndarray]] = {}  # by tick, until its record comes
        self.video: EpisodeVideo | None = None

    def observe(self, tick: int) -> None:
        if self.video is not None:
            self._images[tick] = self._env.read_images()

    def step(self, record: Step) -> None:
        images = self._images.pop(record.tick, None)
        if self.video is not None and images is not None:
            self.video.add(images, human=record.source is Source.HUMAN)


POLL_SECONDS = 0.02  # between looks at the keys while a label is waited for
UNJUDGED = Obstacle("the episode has no outcome", "press s or f; Backspace or r does it again")
FAILED = Obstacle("a human intervened: a failure", "press f to go on; Backspace or r does it again")


class EvaluationOperator:
    """What the operator decides of the episodes of an evaluation.

    An episode that ended without an outcome waits for a label before the next reset: the robot stands in HOLD, and
    nothing else waits. A discarded episode is done again at once, and one whose label was undone after the episode
    under way.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self.operator: Operator | None = None
        """Set once its console is open; it sends its corrections to `amend`. None: unjudged episodes are failures."""
        self.start = 0
        """Start of the episode under way, which every policy has."""
        self._wait = wait
        self._undone: set[str] = set()

    @property
    def quits(self) -> bool:
        """Whether the evaluation is to end after the episode under way."""
        return self.operator is not None and self.operator.quits

    def amend(self, amend: Amend) -> None:
        self._undone.add(amend.episode_id)

    def undone(self, *, last: bool = False) -> set[str]:
        """Return the episodes whose labels were undone, or that were discarded later, since the last call.

        `last`: no episode follows, which would make a discard final.
        """
        if last and self.operator is not None:
            self.operator.send_pending()
        undone, self._undone = self._undone, set()
        return undone

    def settle(
        self, summary: EpisodeSummary, episode_id: str, over: Callable[[], object], idle: Callable[[], None]
    ) -> EpisodeSummary | None:
        """Return an episode with its outcome, for which it waits where there is none; None: it is to be done again.

        Args:
            over: what is no longer None where the evaluation was ended, which ends the wait.
            idle: called while it waits (`RobotEnv.idle`).
        """
        operator = self.operator
        if operator is None or summary.fault:
            return summary
        labels = operator.labels
        intervened = summary.ended_by == INTERVENTION
        if intervened or summary.outcome is Outcome.UNKNOWN:
            label: Outcome | None = None
            while label is None and not (labels.discards_last or labels.repeats):
                if over() is not None:
                    return None
                idle()
                labels.ask()
                operator.poll(ActorState.HOLD, FAILED if intervened else UNJUDGED)
                label = labels.answer()
                self._wait(POLL_SECONDS)
            if label is not None and not intervened:
                summary = summary.judged(label, OPERATOR)
        if labels.discards_last or labels.repeats:
            operator.send_pending()  # that it is done again cannot be undone
            self._undone.discard(episode_id)
            return None
        return summary


class Entry(NamedTuple):
    """A policy to evaluate.

    `deterministic`: its mean instead of a sample. `videos`: a folder for its films. `arm`: see `policy.Request`.
    """

    policy: Policy
    deterministic: bool = True
    videos: Path | None = None
    arm: str = ""


def envs_at_once(config: ExperimentConfig, wanted: int | None, n: int) -> int:
    """Return how many simulators play `n` episodes: those `wanted`; else as many as a computation decides for, or 1.

    1 where it is not known that a process may open several, and where no keys of decisions follow from the start.
    """
    if wanted is None:
        many = config.robot.several and _keyed(config) and not config.actor.policy
        wanted = BLOCK if many else 1
    return max(1, min(wanted, n))


def _keyed(config: ExperimentConfig) -> bool:
    """Return whether the keys of decisions follow from an episode's start, which another process can repeat."""
    return config.actor.clock == "lockstep" and not config.robot.real


def evaluate(
    env: RobotEnv, policy: Policy, config: ExperimentConfig,
    *, n: int, seed_base: int = EVAL_SEED_BASE, deterministic: bool = True, save_video: Path | None = None,
    filmed: int | None = None, progress: Callable[[EvalResult], None] | None = None, clock: Clock | None = None,
    stop: Callable[[], str | None] = no_stop, others: Sequence[RobotEnv] = (),
) -> EvalResult:  # fmt: skip
    """Run `n` episodes from the start states `seed_base + i`, without interventions; nothing is recorded.

    One that the robot ended by a fault is repeated, at most FAULT_REPEATS times; the last of these counts. In a
    simulator the keys of an episode's decisions follow from `config.seed` and its start, and so its outcome does.

    Args:
        others: more simulators like `env`. So many episodes run at once, but for those that are filmed; their outcomes
            are those of `env` alone.
        config: the training's: its clock, delay and lengths apply here too.
        deterministic: the policy's mean instead of a sample.
        save_video: a folder for one mp4 of each of the first `filmed` episodes (None: all), named by its outcome.
        progress: called after each episode with the result so far.
        stop: polled on every tick; a string ends the evaluation. The episode that it cuts short is not counted.

    Raises ConfigError for n < 1, and with the install hint where videos cannot be written.
    """
    [result] = evaluate_in_turns(
        env, [Entry(policy, deterministic, save_video)], config, n=n, seed_base=seed_base, filmed=filmed,
        progress=None if progress is None else lambda results: progress(results[0]), clock=clock, stop=stop,
        others=others,
    )  # fmt: skip
    return result


def evaluate_in_turns(
    env: RobotEnv, entries: Sequence[Entry], config: ExperimentConfig,
    *, n: int, seed_base: int = EVAL_SEED_BASE, filmed: int | None = None,
    progress: Callable[[list[EvalResult]], None] | None = None, clock: Clock | None = None,
    stop: Callable[[], str | None] = no_stop, intervention: InterventionSource | None = None,
    operator: EvaluationOperator | None = None, others: Sequence[RobotEnv] = (), until_decided: bool = False,
) -> list[EvalResult]:  # fmt: skip
    """Evaluate policies in turns: from each start state an episode of each, in an order drawn by `config.seed`.

    With an operator no seed repeats the order, which an earlier evaluation has shown. With `others` the policies follow
    one another; results and `turns` are the same.

    An episode in which a human acted is a failure, whatever else was decided of it. Other arguments, and what is
    raised, are as of `evaluate`; `progress` gets the results of all entries.

    Args:
        intervention: of a human who may take the robot over; letting it go ends the episode.
        operator: labels what nothing else judged, and has episodes done again.
        until_decided: ends once one of two policies is better (`comparison`); without `others`.
    """
    require(n >= 1, "n", f"must be at least 1 episode, got {n}")
    require(bool(env.robot_spec.cameras) or all(e.videos is None for e in entries), "save_video",
        f"robot {env.robot_spec.name!r} has no camera to film with. Evaluate without films")  # fmt: skip
    check_apart([env, *others])
    _compare_starts(env, config, seed_base, entries[0].policy.image_keys)
    # It limits how much an operator helps a policy in training. For safety a human may act here at any time.
    config = dataclasses.replace(config, actor=config.actor.without_human_limit())
    operator = operator or EvaluationOperator()
    manned = intervention is not None or operator.operator is not None
    one = manned or not all(isinstance(e.policy, LocalPolicy) for e in entries)
    require(not (others and one), "n_envs",
        f"an operator or a policy server has one robot (got {len(others) + 1}, expected 1). Leave it out")  # fmt: skip
    drawn = np.random.default_rng(None if manned else config.seed)
    turns = [(i, int(k)) for i in range(n) for k in drawn.permutation(len(entries))]
    films = [filmed is None or i < filmed for i, _ in turns]
    at_once = [t for t, (_, k) in enumerate(turns) if others and not (films[t] and entries[k].videos is not None)]
    left = deque(sorted(set(range(len(turns))) - set(at_once)))

    def take_back(undone: set[str]) -> None:
        for again in sorted(int(name.split("-")[1]) for name in undone):
            players[turns[again][1]].result.take_back(again)
            left.appendleft(again)

    with contextlib.ExitStack() as stack:
        players = [_Player(env, e, config, seed_base, clock, stop, intervention, operator) for e in entries]
        for player in players:
            stack.callback(player.close)
        results = [player.result for player in players]
        for result in results:
            result.until_decided = until_decided
        while left and stop() is None and not operator.quits and not (until_decided and is_decided(results)):
            turn = left.popleft()
            i, k = turns[turn]
            operator.start = i
            counts = players[k].play(i, turn, film=films[turn])
            if not counts:
                left.appendleft(turn)
            take_back(operator.undone())
            if not counts:
                break
            if progress is not None:
                progress(results)
        take_back(operator.undone(last=True))
        for k, player in enumerate(players if others else ()):
            own = [(turns[turn][0], turn) for turn in at_once if turns[turn][1] == k]
            left += player.play_at_once([env, *others], own, lambda: progress(results) if progress else None)
    for player in players:
        player.result.policy_version = player.entry.policy.version
        player.result.interrupted = bool(left) and not (until_decided and is_decided(results))
    return results


class _Player:
    """Plays the episodes of one entry, and counts them in `result`."""

    def __init__(
        self, env: RobotEnv, entry: Entry, config: ExperimentConfig, seed_base: int, clock: Clock | None,
        stop: Callable[[], str | None], human: InterventionSource | None, operator: EvaluationOperator,
    ) -> None:  # fmt: skip
        self.entry, self._env, self._config, self._seed_base = entry, env, config, seed_base
        self._stop, self._operator, self._clock = stop, operator, clock
        self._film = _Film(env)
        self._runner = EpisodeRunner(
            env, entry.policy, self._film, config=config, clock=clock, intervention=human,
            stop=lambda: INTERVENTION if self._runner.interventions.released else stop(),
            observer=None if entry.videos is None else self._film.observe, operator=operator.operator,
        )  # fmt: skip
        mode: Literal["mean", "sampled"] = "mean" if entry.deterministic else "sampled"
        self.result = EvalResult(
            mode=mode, arm=entry.arm, seed_base=seed_base, policy_version=entry.policy.version,
            tick_seconds=env.robot_spec.dt, starts_repeat=env.starts_repeat,
        )  # fmt: skip

    def close(self) -> None:
        self._drop_film()
        self._runner.close()

    def play(self, i: int, turn: int, *, film: bool) -> bool:
        """Play the episode of start `i`, again where a fault or the operator ended it; returns whether it counts."""
        name, faults = f"{self.result.mode}_{i:03d}", 0
        for attempt in itertools.count():
            if (videos := self.entry.videos) is not None and film:
                self._film.video = EpisodeVideo(videos / f"{name}.mp4", self._env.robot_spec.control_hz)
            episode_id = f"evaluation-{turn:06d}-{attempt}"
            self._runner.interventions.released = False  # else that of the episode before ends this one's reset
            summary = self._runner.run_episode(**self._options(i), episode_id=episode_id)
            stopped = self._stop()
            if summary.length == 0 and stopped is None and not self._operator.quits:  # stopped in its reset
                self._drop_film()
                continue
            if _cut_short(summary, stopped):
                return False
            summary = _alone(summary)
            faults += bool(summary.fault)
            settled: EpisodeSummary | None = None
            if not summary.fault or faults > FAULT_REPEATS or stopped is not None:
                if self._film.video is not None:
                    self._film.video.add(self._env.read_images())
                settled = self._operator.settle(summary, episode_id, self._stop, self._env.idle)
            if settled is not None:
                break
            if self._stop() is not None:  # while a label was waited for
                return False
            self.result.repeated.append(summary)
            self._drop_film()
        assert settled is not None
        self.result.add(settled, turn)
        if self._film.video is not None:
            self._film.video.finish(f"{name}_{settled.outcome}.mp4")
            self._film.video = None
        return True

    def play_at_once(
        self, envs: Sequence[RobotEnv], starts: Sequence[tuple[int, int]], progress: Callable[[], object]
    ) -> list[int]:
        """Play the episodes of `starts` (start, turn), one on each of `envs` at once; returns turns that do not count.

        One that ends by a fault is played again, as in `play`.
        """
        left = deque((i, turn, 0) for i, turn in starts)  # and its faults
        under_way: dict[str, tuple[int, int, int]] = {}  # by id of an episode
        with contextlib.ExitStack() as stack:
            runners = [
                EpisodeRunner(e, self.entry.policy, NullSink(), config=self._config, clock=self._clock, stop=self._stop)
                for e in envs[: len(starts)]
            ]
            for runner in runners:
                stack.callback(runner.close)
            many = ManyEpisodes(runners, cast(LocalPolicy, self.entry.policy))
            while True:
                while left and many.free and self._stop() is None:
                    i, turn, faults = left.popleft()
                    name = f"evaluation-{turn:06d}-{faults}"
                    many.begin(**self._options(i), episode_id=name)
                    under_way[name] = i, turn, faults
                if not many.open:
                    break
                for ended in many.advance():
                    i, turn, faults = under_way.pop(ended.state.id)
                    summary = ended.runner.summary(ended.state)
                    if _cut_short(summary, self._stop()):
                        left.append((i, turn, faults))
                    elif summary.fault and faults < FAULT_REPEATS:
                        self.result.repeated.append(summary)
                        left.appendleft((i, turn, faults + 1))
                    else:
                        self.result.add(_alone(summary), turn)
                        progress()
        self.result.sort()
        return [turn for _, turn, _ in left]

    def _options(self, i: int) -> dict[str, Any]:
        """Return what `EpisodeRunner.begin` takes for start `i`."""
        seed = self._seed_base + i
        (word,) = np.random.SeedSequence([self._config.seed, seed]).generate_state(1)
        return {
            "seed": seed, "explore": not self.entry.deterministic, "arm": self.entry.arm,
            "decision_seed": int(word) if _keyed(self._config) else None,
        }  # fmt: skip

    def _drop_film(self) -> None:
        if self._film.video is not None:
            self._film.video.discard()
            self._film.video = None


def _cut_short(summary: EpisodeSummary, stopped: str | None) -> bool:
    """Return whether the evaluation's end, for which `stopped` names who ended it, left the episode undecided."""
    ended = summary.length == 0 or (stopped is not None and summary.ended_by in (stopped, OPERATOR))
    return summary.outcome is Outcome.UNKNOWN and ended


def _alone(summary: EpisodeSummary) -> EpisodeSummary:
    """Return the episode as a failure where a human acted in it."""
    return summary.judged(Outcome.FAILURE, INTERVENTION) if summary.human_ticks else summary


def policy_of(
    env: RobotEnv, agent: Agent, preprocess: Preprocess, snapshot: Snapshot, config: ExperimentConfig
) -> LocalPolicy:
    """Return the policy of a snapshot. Its noise depends on `config.seed` and, in a simulator, on the start."""
    policy = LocalPolicy(agent, preprocess, env.robot_spec, seed=config.seed + 1)
    policy.swap(snapshot)
    return policy
