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
    assert auc(positives, positives - 1) == 1.0
    assert math.isnan(auc(positives, np.empty(0)))


def test_curve_goes_from_nothing_to_everything():
    curve = roc(np.array([0.8, 0.4]), np.array([0.6, 0.1]))
    assert curve.false_positives.tolist() == [0, 0, 0.5, 0.5, 1]
    assert curve.true_positives.tolist() == [0, 0.5, 0.5, 1, 1]


def test_frames_in_a_row():
    p = np.array([0.9, 0.2, 0.8, 0.7, 0.9])
    assert in_a_row(p, 1).tolist() == p.tolist()
    assert in_a_row(p, 3).tolist() == [0, 0, 0.2, 0.2, 0.7]
    assert in_a_row(p, 6).tolist() == [0] * 5


def test_a_success_is_scored_from_its_first_frame_on_and_falsely_before():
    s = score([0, 0, 0, 1, 1], [0.1, 0.6, 0.2, 0.9, 0.7])
    assert (s.success, s.score, s.false_score, s.first) == (True, 0.9, 0.6, 3)
    assert s.fault(0.5) == "early"
    assert s.ended_at(0.5) == 1
    assert s.fault(0.8) == ""
    assert s.ended_at(0.8) == 3
    assert s.fault(0.95) == "missed"
    assert s.ended_at(0.95) is None


def test_single_frames_do_not_end_an_episode_where_more_in_a_row_are_wanted():
    s = score([0, 0, 0, 0], [0.9, 0.1, 0.9, 0.8], frames=2)
    assert (s.success, s.score, s.first) == (False, 0.8, -1)
    assert s.fault(0.75) == "false success"
    assert s.ended_at(0.75) == 3


def test_an_episode_that_ended_at_its_success_needs_no_more_frames_than_it_has():
    s = score([0, 0, 1], [0.1, 0.2, 0.9], frames=3)
    assert s.score == 0.9
    assert score([0, 1, 1], [0.1, 0.2, 0.9], frames=3).score == 0.2


def test_frames_of_no_class_are_no_fault():
    s = score([0, IGNORED, 1], [0.1, 0.9, 0.9])
    assert s.false_score == 0.1
    assert math.isnan(score([1], [0.5]).false_score)


def test_ticks_are_those_of_the_frames():
    s = score([0, 0, 1], [0.1, 0.7, 0.9], step=5)
    assert (s.first, s.ended_at(0.5)) == (10, 5)


@pytest.mark.parametrize(("allowed", "found", "false_ends"), [(0.0, False, 0), (0.19, False, 1), (0.2, True, 2)])
def test_threshold_keeps_the_wanted_share_of_false_ends(allowed, found, false_ends):
    failures = [score([0], [p]) for p in np.linspace(0.05, 0.95, 10)]  # two above the success
    success = score([1], [0.8])
    threshold = threshold_for([*failures, success], allowed)
    assert (success.score >= threshold) == found
    assert sum(s.false_score >= threshold for s in failures) <= false_ends == int(10 * allowed)


def test_threshold_lies_between_the_two_kinds():
    threshold = threshold_for([score([0], [0.01]), score([1], [0.99])], 0.01)
    assert threshold == pytest.approx(0.5)
    certain = threshold_for([score([0], [1 - 1e-9]), score([1], [0.5])], 0.0)
    assert 1 - 1e-9 < certain < 1


def test_evaluation_of_episodes():
    episodes = [labelled([0, 1], "good"), labelled([0, 0], "bad"), labelled([0, IGNORED, 1], "missed")]
    given = [np.array([0.1, 0.9]), np.array([0.2, 0.8]), np.array([0.1, 0.5, 0.3])]
    found = evaluate(episodes, given, 1, 1, threshold=0.6)
    figures = found.to_json()
    assert figures["faults"] == {"false_success": 1, "early": 0, "missed": 1}
    assert (figures["successes"], figures["failures"]) == (2, 1)
    assert figures["auc_by_episode"] == 0.5  # 0.9 > 0.8 > 0.3
    assert sorted(found.positives) == [0.3, 0.9]
    assert sorted(found.negatives) == [0.1, 0.1, 0.2, 0.8]
    assert [s.name for s in found.faults()["missed"]] == ["missed"]


def test_without_failures_what_comes_before_the_successes_counts():
    episodes = [labelled([0, 1]), labelled([0, 1])]
    found = evaluate(episodes, [np.array([0.1, 0.9]), np.array([0.3, 0.2])], 1, 1)
    assert found.failures.tolist() == [0.1, 0.3]
    assert found.to_json()["auc_by_episode"] == 0.75
