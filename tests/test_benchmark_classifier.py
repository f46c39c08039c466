"""The near misses of the benchmark are what they are called, and its cameras move and change their light."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "classifier_fake_aloha.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("classifier_fake_aloha", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["success", "next_to", "held", "occluded", "empty"])
def test_an_episode_ends_as_its_kind_does(script, kind, monkeypatch):
    envs = []
    make = script.FakeAlohaEnv
    monkeypatch.setattr(script, "FakeAlohaEnv", lambda *args: envs.append(make(*args)) or envs[-1])
    episode = next(e for e in (script.record(kind, seed) for seed in range(10)) if e is not None)
    env, labels = envs[-1], episode.labels
    away = math.dist(env.cube[:2], script.task.PLACE[:2])
    assert (env.holder == script.LEFT) == (kind == "held")
    assert away < 0.05 if kind in ("success", "held") else away > 0.06
    first = int(np.argmax(labels)) if labels.any() else len(labels)
    assert labels[first:].all()
    assert (len(labels) - first >= 8) == (kind == "success")
    assert set(episode.images) == set(script.task.CAMERAS)
    above = math.dist(env.grips[script.LEFT][:2], script.task.PLACE[:2])
    assert above < 0.03 or kind not in ("occluded", "empty")


def test_another_camera_sees_the_same_motion_elsewhere_and_in_another_light(script):
    images = np.zeros((2, 24, 24, 3), np.uint8)
    images[:, 8:12, 8:12] = 100
    images[1, 16:20, 16:20] = 200
    found = [script.seen_by_another_camera(images, np.random.default_rng(seed)) for seed in range(20)]
    light = [f[0].max() for f in found]
    assert min(light) < 80
    assert max(light) > 120
    places = [np.argwhere(f[0, ..., 0] > 0.6 * f[0].max()).mean(axis=0) for f in found]
    assert np.ptp(places, axis=0).min() > 2  # pixels
    assert all(f[1].astype(int).sum() > f[0].astype(int).sum() for f in found)


def test_successes_and_near_misses_alternate(script):
    data = script.episodes(10, 0)
    kinds = [e.name.split()[0] for e in data.episodes]
    assert kinds[::2] == ["success"] * 5
    assert kinds[1::2] == [*script.MISSES, script.MISSES[0]]
    assert len({e.name for e in data.episodes}) == 10
