"""`serl-chunk classifier`: from recorded demonstrations to a folder and its figures."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.classifier.dataset import LABELS
from serl_chunk.classifier.files import read_description
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.formats import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.main import main
from serl_chunk.outcomes.classifier import Classifier
from serl_chunk.outcomes.robot import spec_of

CONFIG = apply_overrides(load("fake_aloha", []), [("robot.image_size", "16")])


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demos")
    assert run_record(CONFIG, 6, str(folder), policy="scripted", noise=None, cameras=("top", "left_wrist")) == 0
    return folder


@pytest.fixture(scope="module")
def trained(demos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classifiers") / "c"
    printed = io.StringIO()
    words = ["classifier", "train", str(demos), "--cameras", "left_wrist,top", "--out", str(folder)]
    with contextlib.redirect_stdout(printed):
        assert main([*words, "--steps", "20", "--batch_size", "8", "--frames", "2", "--positives", "3"]) == 0
    assert "update 20 of 20: " in printed.getvalue()
    assert "note: 1 held-out episode " in printed.getvalue()  # too few for a share of 0.01
    assert f"outcome.classifier={folder}" in printed.getvalue()
    return folder


@pytest.mark.compiles
def test_training_writes_a_folder_that_the_actor_reads(trained):
    description = read_description(trained)
    assert [(c.name, c.height, c.width) for c in description.cameras] == [("left_wrist", 16, 16), ("top", 16, 16)]
    assert (description.frames, description.positives) == (2, 5 * 3)
    assert description.negatives > 100
    assert description.validation["successes"] == 1
    assert (trained / "validation.png").read_bytes().startswith(b"\x89PNG")
    classifier = Classifier(trained)
    classifier.check(spec_of(CONFIG))
    black = {f"images/{c}": np.zeros((16, 16, 3), np.uint8) for c in classifier.cameras}
    assert classifier.probability(black).shape == (2,)


@pytest.mark.compiles
def test_test_prints_the_figures_and_writes_them(trained, demos, tmp_path, capsys):
    key = open_episodes(demos, ReadOptions()).keys()[2]
    labels = {"classes": ["failure", "success"], "episodes": {key: [[0, 10, "failure"]]}}
    (demos / LABELS).write_text(json.dumps(labels))
    try:
        assert main(["classifier", "test", str(trained), str(demos), "--out", str(tmp_path)]) == 0
    finally:
        (demos / LABELS).unlink()
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "test.json").read_text())
    assert (figures["successes"], figures["failures"]) == (5, 1)
    assert f"AUC {figures['auc_by_episode']:.4f} by episode" in out
    assert str(tmp_path / "test.png") in out
    assert len(figures["misjudged"]) == sum(figures["faults"].values())
    for row in figures["misjudged"]:
        assert row["episode"] in out


@pytest.mark.compiles
def test_figures_of_frames_of_another_size_are_refused(trained, demos, tmp_path, capsys):
    other = apply_overrides(CONFIG, [("robot.image_size", "12")])
    assert run_record(other, 1, str(tmp_path), policy="scripted", noise=None, cameras=("top", "left_wrist")) == 0
    assert main(["classifier", "test", str(trained), str(tmp_path)]) == 2
    assert "top 12x12" in capsys.readouterr().err
