"""ROC, areas, thresholds and the faults of episodes, against hand-made scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serl_chunk.classifier.dataset import IGNORED, LabelledEpisode
from serl_chunk.classifier.metrics import EpisodeScore, auc, evaluate, in_a_row, roc, threshold_for


def labelled(labels: list[int], name: str = "e", step: int = 1) -> LabelledEpisode:
    ticks = np.arange(0, step * len(labels), step, dtype=np.int32)
    return LabelledEpisode(name, {}, np.array(labels, np.int8), ticks)


def score(labels: list[int], probability: list[float], frames: int = 1, step: int = 1) -> EpisodeScore:
    return EpisodeScore.of(labelled(labels, step=step), np.array(probability), frames, 1)


def test_area_counts_pairs_in_the_right_order_and_ties_half():
    positives, negatives = np.array([0.9, 0.5, 0.5, 0.2]), np.array([0.5, 0.1, 0.3])
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    assert auc(positives, negatives) == pytest.approx(np.mean(pairs))
    assert math.isnan(auc(positives, np.empty(0)))
    curve = roc(np.array([0.8, 0.4]), np.array([0.6, 0.1]))
    assert curve.false_positives.tolist() == [0, 0, 0.5, 0.5, 1]
    assert curve.true_positives.tolist() == [0, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("labels", "probability", "frames", "found", "faults"),
    [
        # scored from the first frame of a success on, and falsely before
        ([0, 0, 0, 1, 1], [0.1, 0.6, 0.2, 0.9, 0.7], 1, (True, 0.9, 0.6, 3),
         {0.5: ("early", 1), 0.8: ("", 3), 0.95: ("missed", None)}),
        # single frames do not end an episode where more in a row are wanted
        ([0, 0, 0, 0], [0.9, 0.1, 0.9, 0.8], 2, (False, 0.8, 0.8, -1), {0.75: ("false success", 3)}),
        # one that ended at its success needs no more frames than it has
        ([0, 0, 1], [0.1, 0.2, 0.9], 3, (True, 0.9, 0.0, 2), {}),
        ([0, 1, 1], [0.1, 0.2, 0.9], 3, (True, 0.2, 0.0, 1), {}),
        ([0, IGNORED, 1], [0.1, 0.9, 0.9], 1, (True, 0.9, 0.1, 2), {}),  # of no class: no fault
    ],
)  # fmt: skip
def test_the_score_and_the_fault_of_an_episode(labels, probability, frames, found, faults):
    s = score(labels, probability, frames)
    assert (s.success, s.score, s.false_score, s.first) == found
    for threshold, fault in faults.items():
        assert (s.fault(threshold), s.ended_at(threshold)) == fault


def test_frames_in_a_row_and_their_ticks():
    p = np.array([0.9, 0.2, 0.8, 0.7, 0.9])
    assert [in_a_row(p, n).tolist() for n in (1, 3, 6)] == [p.tolist(), [0, 0, 0.2, 0.2, 0.7], [0] * 5]
    s = score([0, 0, 1], [0.1, 0.7, 0.9], step=5)
    assert (s.first, s.ended_at(0.5)) == (10, 5)
    assert math.isnan(score([1], [0.5]).false_score)


@pytest.mark.parametrize(("allowed", "found", "false_ends"), [(0.0, False, 0), (0.19, False, 1), (0.2, True, 2)])
def test_threshold_keeps_the_wanted_share_of_false_ends_and_lies_between_the_kinds(allowed, found, false_ends):
    failures = [score([0], [p]) for p in np.linspace(0.05, 0.95, 10)]  # two above the success
    success = score([1], [0.8])
    threshold = threshold_for([*failures, success], allowed)
    assert (success.score >= threshold) == found
    assert sum(s.false_score >= threshold for s in failures) <= false_ends == int(10 * allowed)
    assert threshold_for([score([0], [0.01]), score([1], [0.99])], 0.01) == pytest.approx(0.5)
    assert 1 - 1e-9 < threshold_for([score([0], [1 - 1e-9]), score([1], [0.5])], 0.0) < 1


def test_evaluation_of_episodes():
    episodes = [labelled([0, 1], "good"), labelled([0, 0], "bad"), labelled([0, IGNORED, 1], "missed")]
    given = [np.array([0.1, 0.9]), np.array([0.2, 0.8]), np.array([0.1, 0.5, 0.3])]
    found = evaluate(episodes, given, 1, 1, threshold=0.6)
    figures = found.to_json()
    assert figures["faults"] == {"false_success": 1, "early": 0, "missed": 1}
    assert (figures["successes"], figures["failures"], figures["auc_by_episode"]) == (2, 1, 0.5)  # 0.9 > 0.8 > 0.3
    assert (sorted(found.positives), sorted(found.negatives)) == ([0.3, 0.9], [0.1, 0.1, 0.2, 0.8])
    assert [s.name for s in found.faults()["missed"]] == ["missed"]
    # Without failures what comes before the successes counts.
    found = evaluate([labelled([0, 1]), labelled([0, 1])], [np.array([0.1, 0.9]), np.array([0.3, 0.2])], 1, 1)
    assert (found.failures.tolist(), found.to_json()["auc_by_episode"]) == ([0.1, 0.3], 0.75)
