"""Draws who acts in an episode: the policy's first candidate (ONE), or the best of N by the critic (BEST).

A critic that has seen little chooses badly, and no figure of its training shows when that ends. So an actor compares
success without intervention, and BEST acts as often as it has earned it (Thompson sampling).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.types import BEST, ONE, Outcome

WINDOW = 40  # newest episodes of an arm, or of a snapshot, that count
KNOWN = 8  # episodes below which an arm or a snapshot is tried
EVERY = 4  # episodes, of which one tries it
MEMORY = 160  # episodes of all arms after which one is forgotten: the critic of then is another one


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
    """Results of the newest WINDOW episodes of one arm or snapshot."""

    def __init__(self) -> None:
        self._results: deque[tuple[str, int, bool]] = deque(maxlen=WINDOW)  # id, number, success

    def add(self, episode_id: str, number: int, success: bool) -> None:
        self._results.append((episode_id, number, success))

    def correct(self, episode_id: str, success: bool | None) -> None:
        """Replace the result of an episode; None removes it."""
        kept = [r if r[0] != episode_id else (r[0], r[1], success) for r in self._results]
        self._results = deque(((i, n, s) for i, n, s in kept if s is not None), maxlen=WINDOW)

    def forget(self, number: int) -> None:
        """Drop what is older than the episode `number`."""
        while self._results and self._results[0][1] < number:
            self._results.popleft()

    @property
    def counts(self) -> Counts:
        return Counts(sum(success for *_, success in self._results), len(self._results))


class Drawn(NamedTuple):
    """The arm of an episode."""

    arm: str
    tries: bool = False  # it is drawn because too little is known of it


class Arms:
    """Decides between ONE and BEST. Of one actor; a seed and the results reproduce its draws."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._evidence = {ONE: Evidence(), BEST: Evidence()}
        self._waited = 0  # episodes since an arm was tried
        self._number = 0  # of the newest episode that counts
        self._judged = False  # whether anything has judged an episode

    def counts(self, arm: str) -> Counts:
        return self._evidence[arm].counts

    def draw(self, *, critic_chooses: bool, may_try: bool = True) -> Drawn:
        """Draw the arm of the next episode.

        It is ONE before anything has judged an episode, and while the critic is not to choose. An arm of fewer than
        KNOWN episodes has every fourth one, while the other acts, ONE where both are such.

        Args:
            critic_chooses: see `types.CRITIC_CHOOSES`.
            may_try: False: an arm of which too little is known is not tried in this episode.
        """
        for evidence in self._evidence.values():
            evidence.forget(self._number - MEMORY + 1)
        if not (critic_chooses and self._judged):
            return Drawn(ONE)
        unknown = next((arm for arm in (BEST, ONE) if self.counts(arm).episodes < KNOWN), None)
        if unknown is not None:
            self._waited += may_try
            if may_try and self._waited >= EVERY:
                self._waited = 0
                return Drawn(unknown, tries=True)
            return Drawn(ONE if unknown == BEST else BEST)
        chances = {arm: self._rng.beta(1 + s, 1 + n - s) for arm in (ONE, BEST) for s, n in [self.counts(arm)]}
        return Drawn(max(chances, key=chances.__getitem__))

    def judged(self) -> None:
        """Note that something judges episodes here: a success or failure was reported, whoever acted."""
        self._judged = True

    def add(self, arm: str, episode_id: str, success: bool) -> None:
        self._number += 1
        self._evidence[arm].add(episode_id, self._number, success)

    def correct(self, episode_id: str, success: bool | None) -> None:
        """Replace the result of an episode; None removes it."""
        for evidence in self._evidence.values():
            evidence.correct(episode_id, success)
