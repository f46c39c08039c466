"""The training of a small classifier, its folder, and the figures of its report."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from classifier_sets import CAMERAS, SIZE, episode, toy
from errors import naming

from serl_chunk.classifier import report
from serl_chunk.classifier.dataset import IGNORED, Labelled, LabelledEpisode, split
from serl_chunk.classifier.files import (
    DESCRIPTION,
    WEIGHTS,
    Description,
    check_free,
    read_classifier,
    read_description,
    save,
)
from serl_chunk.classifier.metrics import EpisodeScore, auc, evaluate, roc, threshold_for
from serl_chunk.classifier.model import HIL_SERL, Predictor, flat_arrays, initial, network, probabilities
from serl_chunk.classifier.train import BalancedBatches, TrainingOptions, augment, in_blocks, judge, train
from serl_chunk.config.agents.encoder import EncoderConfig, resnet10_leaves
from serl_chunk.data.encoder_weights import write_weights
from serl_chunk.types import CameraSpec, ConfigError

TINY = EncoderConfig(features=(4, 4), latent=8, share_cameras=False)
QUICK = TrainingOptions(steps=300, batch_size=16, learning_rate=3e-3, evaluate_every=25, patience=3, shift=1)


@pytest.fixture(scope="module")
def trained():
    training, held = split(toy(24), 0.25, 0)
    seen = []
    done = train(training, held, CAMERAS, encoder=TINY, options=QUICK, progress=lambda *news: seen.append(news))
    return done, held, seen


@pytest.mark.compiles
def test_it_learns_stops_early_and_predicts_the_same_once_saved(trained, tmp_path):
    done, held, seen = trained
    assert done.loss < 0.2
    assert done.step <= done.steps == seen[-1][0] <= QUICK.steps
    found = judge(dataclasses.replace(done.description, frames=2), done.weights, toy(20, first=1000))
    assert found.to_json()["auc_by_episode"] == 1.0
    assert found.to_json()["auc_by_frame"] > 0.99
    save(tmp_path, done.description, done.weights)
    images = {c: held.episodes[0].images[c][:3] for c in CAMERAS}
    before = Predictor(done.description, done.weights)(images)
    assert np.array_equal(before, Predictor(*read_classifier(tmp_path))(images))
    assert before.shape == (3, 2)
    assert np.allclose(before.sum(axis=1), 1)
    other = dataclasses.replace(done.description, encoder=dataclasses.replace(TINY, latent=9))
    with pytest.raises(ConfigError, match=naming("here", "Dense_0/kernel", "(16, 256)")):
        Predictor(other, done.weights, "here")
    # The report has the figures and the misjudged.
    found = judge(done.description, done.weights, held, threshold=1 - 1e-12)  # everything is missed
    missed = {e.name for e in held.episodes if e.labels.any()}
    assert {row[:2] for row in report.fault_rows(found)} == {(name, "missed") for name in missed}
    files = report.write_report(tmp_path, "test", found)
    assert {row["episode"] for row in json.loads(files[0].read_text())["misjudged"]} == missed
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.compiles
def test_the_best_parameters_are_kept():
    """Held-out labels that contradict the training ones: the loss rises, and the first look stays the best."""
    wrong = [e._replace(labels=(1 - e.labels).astype(np.int8)) for e in toy(8, first=50).episodes]
    options, seen = dataclasses.replace(QUICK, evaluate_every=20, patience=2), []
    held = Labelled(wrong, ("a", "b"), [])
    done = train(toy(8), held, CAMERAS, encoder=TINY, options=options, progress=lambda *news: seen.append(news))
    assert (done.step, done.steps) == (20, 60)
    assert [step for step, _, _ in seen] == [20, 40, 60]


@pytest.mark.slow
@pytest.mark.compiles
def test_three_classes():
    episodes = [episode(i, True, label=1 + i % 2) for i in range(4)]  # bright squares are of two classes, at random
    data = Labelled([*episodes, *(episode(9 + i, False) for i in range(2))], ("none", "near", "in"), [])
    done = train(data, data, CAMERAS, encoder=TINY, options=dataclasses.replace(QUICK, steps=5, batch_size=9))
    p = Predictor(done.description, done.weights)({c: episodes[0].images[c] for c in CAMERAS})
    assert p.shape == (12, 3)
    assert np.allclose(p.sum(axis=1), 1)
    images, labels = BalancedBatches(data, CAMERAS, 9, 0).draw()
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert images["top"].shape == (9, SIZE, SIZE, 3)


def test_batches_have_the_frames_of_their_labels_and_more_of_the_corrected_ones():
    images, labels = BalancedBatches(toy(6), CAMERAS, 32, 0).draw()
    bright = images["wrist"].max(axis=(1, 2, 3)) > 200
    assert bright.tolist() == (labels == 1).tolist()
    assert labels.sum() == 16
    data = toy(11)  # five failures of 12 frames, in which a frame is 1 of 104 without success
    marked = [e._replace(corrected=2) if i == 3 else e for i, e in enumerate(data.episodes)]
    rows = {image.tobytes() for image in marked[3].images["wrist"][-2:]}

    def share(episodes) -> float:
        images, labels = BalancedBatches(data._replace(episodes=episodes), CAMERAS, 4000, 0).draw()
        return float(np.mean([image.tobytes() in rows for image in images["wrist"][labels == 0]]))

    assert 0.005 < share(data.episodes) < 0.04
    assert 0.12 < share(marked) < 0.21


def test_augmentation_moves_and_colours_frames():
    image = np.random.default_rng(0).integers(40, 200, (5, 12, 10, 3), np.uint8)

    def augmented(**how):
        options = TrainingOptions(**{"shift": 0, "brightness": 0, "colour": 0} | how)
        made = augment(jax.random.key(0), {"a": image, "b": image}, options)
        assert np.array_equal(made["a"], made["b"]) or "shift" not in how  # moved alike in all cameras
        return np.asarray(made["b"])

    assert np.array_equal(augmented(), image.astype(np.float32))
    assert not np.array_equal(augmented(shift=4)[0], image[0])
    light = augmented(brightness=0.2) / image
    assert np.allclose(light, light[:, :1, :1, :1], atol=1e-4)  # one factor for a frame
    assert len(np.unique(light[:, 0, 0, 0].round(5))) == 5
    assert np.abs(light - 1).max() <= 0.2 + 1e-5
    assert len(np.unique((augmented(colour=0.1) / image)[0, 0, 0].round(5))) == 3


def test_frames_are_classified_in_blocks_of_one_size():
    sizes, long = [], episode(1, True, frames=70)

    def logits(images):
        sizes.append(len(images["top"]))
        return images["top"][:, 0, 0, :1].astype(float)

    out = in_blocks(logits, [long, episode(2, False)], ["top"])
    assert (set(sizes), [len(o) for o in out]) == ({64}, [70, 12])
    assert np.array_equal(out[0][:, 0], long.images["top"][:, 0, 0, 0])
    assert np.allclose(probabilities(np.array([[0.0], [50.0], [-800.0]]))[:, 1], [0.5, 1, 0])


@pytest.mark.slow
@pytest.mark.compiles
def test_the_pretrained_backbone_is_read_and_stays(tmp_path):
    rng = np.random.default_rng(0)
    weights = {n: 0.05 * rng.standard_normal(shape).astype(np.float32) for n, shape in resnet10_leaves().items()}
    write_weights(tmp_path / "resnet.npz", weights)
    training = toy(4)
    options = dataclasses.replace(QUICK, steps=2, batch_size=4)
    file = str(tmp_path / "resnet.npz")
    done = train(training, training, ("top",), encoder=HIL_SERL, weights=file, options=options)
    assert {n.removeprefix("backbone/") for n in done.weights if n.startswith("backbone/")} == weights.keys()
    assert all(np.array_equal(done.weights[f"backbone/{n}"], w) for n, w in weights.items())
    cameras = (CameraSpec("top", SIZE, SIZE),)
    fresh = flat_arrays(initial(network(cameras, HIL_SERL, 2), cameras, options.seed))
    moved = [n for n in fresh if not n.startswith("backbone/") and not np.array_equal(fresh[n], done.weights[n])]
    assert any(n.startswith("encoder/camera_top") for n in moved)


def test_options_and_cameras_that_are_refused():
    for name, value in (("steps", 0), ("learning_rate", 2), ("shift", -1)):
        with pytest.raises(ConfigError, match=naming(value)) as refused:
            TrainingOptions(**{name: value})
        assert refused.value.parameter == name
    cameras = (CameraSpec("a", 8, 8), CameraSpec("b", 8, 16))
    network(cameras, TINY, 2)
    with pytest.raises(ConfigError, match=naming("a 8x8", "b 8x16")):  # sized weights are not shared
        network(cameras, dataclasses.replace(TINY, share_cameras=True), 2)


ARRAYS = {"a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}
SPECS = (CameraSpec("top", 16, 24), CameraSpec("wrist", 8, 8))
ENCODER = EncoderConfig(features=(4, 8), share_cameras=False)
WRITTEN = Description(SPECS, ("failure", "success"), 0.7, 3, ENCODER, 10, 90, {"auc_by_episode": 0.9}, ("demos",))


@pytest.fixture
def folder(tmp_path):
    check_free(tmp_path / "c")
    save(tmp_path / "c", WRITTEN, ARRAYS)
    return tmp_path / "c"


def test_what_is_written_is_read_and_not_overwritten(folder):
    found, arrays = read_classifier(folder)
    assert found == dataclasses.replace(WRITTEN, digest=found.digest)
    assert len(found.digest) == 16
    assert arrays.keys() == ARRAYS.keys()
    assert all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    for taken in (folder, folder / DESCRIPTION):
        with pytest.raises(ConfigError, match=naming(taken)) as refused:
            check_free(taken)
        assert refused.value.parameter == "out"


@pytest.mark.parametrize(
    "changes",
    [
        None, "{", "[]", {"format": 99}, {"threshold": 1.5}, {"threshold": "high"}, {"frames": 0},
        {"classes": ["success"]}, {"cameras": []}, {"cameras": [{"name": "top"}]}, {"encoder": {"kind": "vgg"}},
        {"encoder": {"unknown": 1}}, {"surprise": 1},
    ],
)  # fmt: skip
def test_what_is_no_description_is_refused(folder, changes):
    file = folder / DESCRIPTION
    if changes is None:
        file.unlink()
    else:
        file.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=naming(folder, DESCRIPTION)):
        read_description(folder)


def test_weights_that_are_missing_or_of_another_classifier_are_refused(folder, tmp_path):
    save(tmp_path, WRITTEN, {"other": np.zeros(2, np.float32)})
    (folder / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes())
    with pytest.raises(ConfigError, match=naming(WEIGHTS, read_description(folder).digest)):
        read_classifier(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=naming(WEIGHTS)):
        read_classifier(folder)


def labelled(labels: list[int], name: str = "e") -> LabelledEpisode:
    return LabelledEpisode(name, {}, np.array(labels, np.int8), np.arange(len(labels), dtype=np.int32))


def score(labels: list[int], probability: list[float], frames: int = 1) -> EpisodeScore:
    return EpisodeScore.of(labelled(labels), np.array(probability), frames, 1)


def test_area_counts_pairs_in_the_right_order_and_ties_half():
    positives, negatives = np.array([0.9, 0.5, 0.5, 0.2]), np.array([0.5, 0.1, 0.3])
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    assert auc(positives, negatives) == pytest.approx(np.mean(pairs))
    assert math.isnan(auc(positives, np.empty(0)))
    curve = roc(np.array([0.8, 0.4]), np.array([0.6, 0.1]))
    assert curve[0].tolist() == [0, 0, 0.5, 0.5, 1]
    assert curve[1].tolist() == [0, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("labels", "probability", "frames", "found", "faults"),
    [
        # scored from the first frame of a success on, and falsely before
        ([0, 0, 0, 1, 1], [0.1, 0.6, 0.2, 0.9, 0.7], 1, (True, 0.9, 0.6, 3),
         {0.5: ("early", 1), 0.6: ("early", 1), 0.8: ("", 3), 0.9: ("", 3), 0.95: ("missed", None)}),
        # single frames do not end an episode where more in a row are wanted
        ([0, 0, 0, 0], [0.9, 0.1, 0.9, 0.8], 2, (False, 0.8, 0.8, -1),
         {0.75: ("false success", 3), 0.8: ("false success", 3)}),
        # one that ended at its success needs no more frames than it has
        ([0, 1, 1], [0.1, 0.2, 0.9], 3, (True, 0.2, 0.0, 1), {}),
        ([0, IGNORED, 1], [0.1, 0.9, 0.9], 1, (True, 0.9, 0.1, 2), {}),  # of no class: no fault
    ],
)  # fmt: skip
def test_the_score_and_the_fault_of_an_episode(labels, probability, frames, found, faults):
    s = score(labels, probability, frames)
    assert (s.success, s.score, s.false_score, s.first) == found
    for threshold, fault in faults.items():
        assert (s.fault(threshold), s.ended_at(threshold)) == fault


@pytest.mark.parametrize(("allowed", "found", "false_ends"), [(0.19, False, 1), (0.2, True, 2)])
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
