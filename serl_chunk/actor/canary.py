"""Chooses the snapshot of each episode, by success without intervention.

With `actor.gate=canary` a newer snapshot is a *candidate* first: it has every fourth episode until it has acted in
KNOWN. Then it acts in all, unless it is worse than the acting one: then it is dropped, and the newest one is next.

The test is not that of `evaluation.comparison`, whose verdict needs 8 pairs that all go one way: a candidate that
always fails would act in 8 episodes in place of 3. It has few looks: 6 % of the candidates that are as good as an
acting snapshot of 70 % are dropped (`benchmarks/comparison.py`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import NamedTuple

from serl_chunk.actor.policy import Policy
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.robots import AlohaConfig, FrankaConfig, GymConfig
from serl_chunk.types import Amend, Outcome, Snapshot

logger = logging.getLogger(__name__)

WINDOW = 40  # newest episodes of a snapshot that count
KNOWN = 8  # episodes below which a snapshot is on trial
EVERY = 4  # episodes, of which one is by a snapshot on trial
LEAST = 3  # episodes of a candidate before it may be dropped
ERROR = 0.05  # of dropping, at one look, a candidate that is as good


def succeeded_alone(summary: EpisodeSummary) -> bool | None:
    """Return whether an episode succeeded without a human; None where that is not known, as it was cut short.

    A helped episode is no success. The time limit and a fault of the robot are failures, as in metrics.jsonl.
    """
    cut_short = summary.outcome is Outcome.UNKNOWN and summary.ended_by not in ("environment", "fault")
    return None if cut_short else summary.success and not summary.segments


class Counts(NamedTuple):
    """Episodes that count, and how many of them succeeded without a human."""

    successes: int
    episodes: int

    def __str__(self) -> str:
        return f"{self.successes}/{self.episodes}"


class Evidence:
    """Results of the newest WINDOW episodes of one snapshot."""

    def __init__(self) -> None:
        self._results: deque[tuple[str, bool]] = deque(maxlen=WINDOW)  # id, success

    def add(self, episode_id: str, success: bool) -> None:
        self._results.append((episode_id, success))

    def correct(self, episode_id: str, success: bool | None) -> None:
        """Replace the result of an episode; None removes it."""
        kept = [(i, success if i == episode_id else s) for i, s in self._results]
        self._results = deque(((i, s) for i, s in kept if s is not None), maxlen=WINDOW)

    @property
    def counts(self) -> Counts:
        return Counts(sum(success for *_, success in self._results), len(self._results))


def chance(candidate: Counts, acting: Counts) -> float:
    """Return the probability of so few successes of the candidate where both are equally good (Fisher, one-sided)."""
    n, total = candidate.episodes, candidate.episodes + acting.episodes
    good = candidate.successes + acting.successes
    ways = sum(math.comb(good, k) * math.comb(total - good, n - k) for k in range(candidate.successes + 1))
    return ways / math.comb(total, n)


def check_signal(config: ExperimentConfig, *, operator: bool) -> None:
    """Raise ConfigError for a gate where nothing would judge episodes; `operator`: there is one, who may."""
    robot, outcome = config.robot, config.outcome
    # A real arm's environment judges nothing, nor does a served one; HIL-SERL's and simulated ones do.
    by_environment = not isinstance(robot, FrankaConfig | AlohaConfig | GymConfig)
    by_environment |= isinstance(robot, GymConfig) and not robot.server
    judged = operator or by_environment or bool(outcome.classifier) or outcome.success is not None
    require(judged or config.actor.gate == "none", "actor.gate",
        f"{config.actor.gate} compares snapshots by their success, and nothing judges episodes here: there is no "
        "outcome.classifier or outcome.success, and no operator. Set one of them, start the actor at a terminal or "
        "with --viewer, or set it to none.")  # fmt: skip


class Verdict(NamedTuple):
    """The end of a candidate's trial."""

    promoted: bool
    version: int
    counts: Counts
    former: int  # version that acted
    former_counts: Counts
    chance: float  # see `chance`

    def log(self) -> None:
        text = (
            f"version={self.version} alone={self.counts} acting={self.former} acting_alone={self.former_counts} "
            f"p={self.chance:.3f}"
        )
        if self.promoted:
            logger.info(f"snapshot promoted: {text}")
        else:
            logger.warning(f"snapshot dropped: {text}. It is worse than the acting one, which goes on")


class Canary:
    """Lets a newer snapshot earn the robot. Of one session; `offer` may be called by another thread."""

    def __init__(self) -> None:
        self.acting: Snapshot | None = None
        self.candidate: Snapshot | None = None
        self._newest: Snapshot | None = None
        self._tried = -1  # version of the newest candidate so far
        self._waited = 0  # episodes since the candidate acted
        self._of_acting, self._of_candidate = Evidence(), Evidence()

    def offer(self, snapshot: Snapshot) -> None:
        """Note the newest snapshot; the first one acts at once."""
        self._newest = snapshot
        if self.acting is None:
            self.acting, self._tried = snapshot, snapshot.version

    def draw(self) -> Snapshot | None:
        """Return the snapshot of the next episode; None before the first one."""
        newest = self._newest
        if self.candidate is None and newest is not None and newest.version > self._tried:
            self.candidate, self._tried, self._waited = newest, newest.version, 0
            self._of_candidate = Evidence()
        if self.candidate is None:
            return self.acting
        self._waited += 1
        if self._waited < EVERY:
            return self.acting
        self._waited = 0
        return self.candidate

    def add(self, version: int, episode_id: str, success: bool) -> Verdict | None:
        """Count an episode of `version`; returns what ends a trial."""
        if self.candidate is None or version != self.candidate.version:
            self._of_acting.add(episode_id, success)
            return None
        self._of_candidate.add(episode_id, success)
        return self._verdict(self.candidate)

    def correct(self, episode_id: str, success: bool | None) -> None:
        """Replace the result of an episode; None removes it."""
        self._of_acting.correct(episode_id, success)
        self._of_candidate.correct(episode_id, success)

    def _verdict(self, candidate: Snapshot) -> Verdict | None:
        acting, mine, former = self.acting, self._of_candidate.counts, self._of_acting.counts
        assert acting is not None
        probability = chance(mine, former)
        worse = probability < ERROR and mine.episodes >= LEAST
        if not worse and mine.episodes < KNOWN:
            return None
        self.candidate = None
        if not worse:
            self.acting, self._of_acting = candidate, self._of_candidate
        return Verdict(not worse, candidate.version, mine, acting.version, former, probability)


def count_episode(policy: Policy, version: int, episode_id: str, summary: EpisodeSummary) -> None:
    """Count an episode of snapshot `version`, where `policy` has a gate."""
    gate, success = policy.gate, succeeded_alone(summary)
    if gate is not None and success is not None and (verdict := gate.add(version, episode_id, success)):
        verdict.log()


def correct_episode(policy: Policy, record: Amend) -> None:
    """Count an episode as it was corrected."""
    if policy.gate is None or (not record.discard and record.outcome in (None, Outcome.SUCCESS)):
        return  # no correction makes a success
    policy.gate.correct(record.episode_id, None if record.discard or record.outcome is Outcome.UNKNOWN else False)
