"""The training of a small classifier, its augmentation, and the report."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from classifier_sets import CAMERAS, SIZE, episode, toy
from errors import naming

from serl_chunk.classifier import report
from serl_chunk.classifier.dataset import Labelled, split
from serl_chunk.classifier.files import read_classifier, save
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
    assert len(report.table_lines(found)) == 1 + len(missed)
    files = report.write_report(tmp_path, "test", found)
    assert {row["episode"] for row in json.loads(files[0].read_text())["misjudged"]} == missed
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert f"{len(missed)} missed" in " ".join(report.summary_lines(found))


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
        made = {k: np.asarray(v) for k, v in augment(jax.random.key(0), {"a": image, "b": image}, options).items()}
        assert np.array_equal(made["a"], made["b"])  # alike in all cameras
        return made["a"]

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
    assert np.allclose(probabilities(np.array([[0.0, 0.0, 0.0]])), 1 / 3)


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
    for name, value in (("steps", 0), ("patience", 0), ("learning_rate", 2), ("brightness", 1), ("shift", -1)):
        with pytest.raises(ConfigError, match=naming(value)) as refused:
            TrainingOptions(**{name: value})
        assert refused.value.parameter == name
    cameras = (CameraSpec("a", 8, 8), CameraSpec("b", 8, 16))
    network(cameras, TINY, 2)
    with pytest.raises(ConfigError, match=naming("a 8x8", "b 8x16")):  # sized weights are not shared
        network(cameras, dataclasses.replace(TINY, share_cameras=True), 2)
