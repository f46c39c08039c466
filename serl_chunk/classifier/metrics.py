"""Figures of a classifier: ROC and its area by episode and by frame, the threshold, and which episodes it misjudges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from serl_chunk.classifier.dataset import IGNORED, LabelledEpisode

_LEAST = 1e-12  # distance of a threshold from 0 and 1


def roc(positives: np.ndarray, negatives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the curve of two sets of scores, of which neither is empty; equal scores share a point.

    It is the share of negatives and of positives at or above each threshold, from (0, 0) to (1, 1): float64[K] each.
    """
    thresholds = np.unique(np.concatenate([positives, negatives]))[::-1]
    false, true = (
        np.searchsorted(np.sort(-np.asarray(scores)), -thresholds, side="right") / len(scores)
        for scores in (negatives, positives)
    )
    return np.append(0.0, false), np.append(0.0, true)


def auc(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Return the area under the curve: how often a positive scores above a negative, ties half; NaN without one."""
    if not len(positives) or not len(negatives):
        return math.nan
    false, true = roc(positives, negatives)
    return float(np.trapezoid(true, false))


def in_a_row(probability: np.ndarray, frames: int) -> np.ndarray:
    """Return float[N]: the least of the last `frames` probabilities, 0 where there are not so many yet.

    A threshold is reached `frames` times in a row where this reaches it.
    """
    out = np.zeros(len(probability))
    if len(probability) >= frames:
        out[frames - 1 :] = np.lib.stride_tricks.sliding_window_view(probability, frames).min(axis=-1)
    return out


@dataclasses.dataclass(frozen=True)
class EpisodeScore:
    """The highest thresholds at which the classifier still ends an episode."""

    name: str
    success: bool  # whether the episode has a frame of success
    score: float  # of a success, the highest reached from its first frame of success on; of a failure, anywhere
    false_score: float  # the highest reached on a frame of another class, of a success before its first one; NaN: none
    first: int  # tick of the first frame of success, -1 without one
    ticks: np.ndarray  # int32[N], of the frames
    reached: np.ndarray  # float64[N], of each frame

    @classmethod
    def of(cls, episode: LabelledEpisode, probability: np.ndarray, frames: int, success_class: int) -> EpisodeScore:
        """Score an episode by its probabilities of success, float[N].

        An episode that ends with fewer than `frames` frames of success is judged by these: it ended because of them.
        """
        labels = episode.labels
        shown = np.flatnonzero(labels == success_class)
        first = int(shown[0]) if len(shown) else len(labels)
        reached = in_a_row(probability[:first], frames)
        if len(shown):
            reached = np.concatenate([reached, in_a_row(probability[first:], min(frames, len(labels) - first))])
        wrong = reached[:first][labels[:first] != IGNORED]
        false_score = float(wrong.max()) if len(wrong) else math.nan
        score = float(reached[first:].max()) if len(shown) else false_score
        tick = int(episode.ticks[first]) if len(shown) else -1
        return cls(episode.name, bool(len(shown)), score, false_score, tick, episode.ticks, reached)

    def ended_at(self, threshold: float) -> int | None:
        """Return the tick on which the classifier ends the episode; None: it does not."""
        at = np.flatnonzero(self.reached >= threshold)
        return int(self.ticks[at[0]]) if len(at) else None

    def fault(self, threshold: float) -> str:
        """Return `false success`, `early`, `missed`, or nothing where the classifier is right."""
        if self.false_score >= threshold:
            return "early" if self.success else "false success"
        return "missed" if self.success and self.score < threshold else ""


def threshold_for(scores: Sequence[EpisodeScore], false_positives: float) -> float:
    """Return the threshold at which at most a share `false_positives` of episodes ends falsely.

    It lies in the middle, in log odds, between the highest false score that it must exclude and the lowest score of a
    success above that.
    """
    wrong = np.sort([s.false_score for s in scores if not math.isnan(s.false_score)])[::-1]
    allowed = math.floor(false_positives * len(wrong))
    below = float(wrong[allowed]) if allowed < len(wrong) else 0.0
    above = min((s.score for s in scores if s.success and s.score > below), default=1.0)
    middle = float(expit(logit(np.clip([below, above], _LEAST, 1 - _LEAST)).mean()))
    return min(max(middle, math.nextafter(below, 1)), 1 - _LEAST)


class Evaluation(NamedTuple):
    """Figures of a classifier on a set of episodes at one threshold."""

    threshold: float
    frames: int
    episodes: list[EpisodeScore]
    positives: np.ndarray  # float[P]: probability of success of each frame of success
    negatives: np.ndarray  # float[M]: of each frame of another class

    @property
    def successes(self) -> np.ndarray:
        """float[E]: scores of the successful episodes."""
        return np.array([s.score for s in self.episodes if s.success])

    @property
    def failures(self) -> np.ndarray:
        """float[F]: scores of the failed episodes; where there is none, of what comes before each success."""
        failed = [s.score for s in self.episodes if not s.success]
        return np.array(failed or [s.false_score for s in self.episodes if not math.isnan(s.false_score)])

    def faults(self) -> dict[str, list[EpisodeScore]]:
        """Return the misjudged episodes by fault."""
        out: dict[str, list[EpisodeScore]] = {"false success": [], "early": [], "missed": []}
        for s in self.episodes:
            if fault := s.fault(self.threshold):
                out[fault].append(s)
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the figures; an area that no scores give is None."""
        successes = int(sum(s.success for s in self.episodes))
        by_episode, by_frame = auc(self.successes, self.failures), auc(self.positives, self.negatives)
        return {
            "auc_by_episode": None if math.isnan(by_episode) else by_episode,
            "auc_by_frame": None if math.isnan(by_frame) else by_frame,
            "threshold": self.threshold,
            "frames": self.frames,
            "successes": successes,
            "failures": len(self.episodes) - successes,
            "faults": {fault.replace(" ", "_"): len(found) for fault, found in self.faults().items()},
        }


def evaluate(
    episodes: Sequence[LabelledEpisode], probabilities: Sequence[np.ndarray], frames: int, success_class: int,
    *, threshold: float | None = None, false_positives: float = 0.01,
) -> Evaluation:  # fmt: skip
    """Compute the figures of `probabilities` of success, float[N] for each episode.

    Without a `threshold` it is chosen on these episodes, for the share `false_positives` of false ends.
    """
    scores = [
        EpisodeScore.of(episode, p, frames, success_class) for episode, p in zip(episodes, probabilities, strict=True)
    ]
    labels = np.concatenate([e.labels for e in episodes])
    p = np.concatenate(list(probabilities))
    if threshold is None:
        threshold = threshold_for(scores, false_positives)
    other = (labels != success_class) & (labels != IGNORED)
    return Evaluation(threshold, frames, scores, p[labels == success_class], p[other])
