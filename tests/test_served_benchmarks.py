"""What `benchmarks/served_policy.py` computes, and the robot's file that its server gets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from serl_chunk_robot.config import load
from serl_chunk_robot.toml_file import read_toml

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("served_policy", BENCHMARKS / "served_policy.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def pairs(both: int, first: int, second: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    table = ((both, 1, 1), (first, 1, 0), (second, 0, 1), (neither, 0, 0))
    return tuple(np.concatenate([np.full(n, values[k], bool) for n, *values in table]) for k in (0, 1))


def test_the_paired_interval_holds_the_difference_in_95_of_100_cases(script):
    rng, held, n = np.random.default_rng(0), 0, 100
    for _ in range(400):
        luck = rng.random((2, n))
        first = luck[0] < 0.95
        second = np.where(rng.random(n) < 0.5, luck[0], luck[1]) < 0.88
        difference, low, high = script.paired_interval(first, second)
        assert difference == pytest.approx(second.mean() - first.mean())
        assert low <= difference <= high
        held += low <= -0.07 <= high
    assert 0.92 * 400 <= held <= 0.99 * 400
    assert script.paired_interval(second, first) == pytest.approx((-difference, -high, -low))


def test_pairs_that_agree_leave_a_narrow_interval(script):
    _, low, high = script.paired_interval(*pairs(90, 0, 0, 10))
    _, apart_low, apart_high = script.paired_interval(*pairs(81, 9, 9, 1))
    assert high - low < 0.4 * (apart_high - apart_low)
    assert -0.1 < low <= 0 <= high < 0.1


def test_the_servers_file_has_the_options_of_its_experiment(script, tmp_path):
    robots, with_option = script.ROBOTS, sys.modules["support.served"]._with_option
    file = tmp_path / "robot.toml"
    file.write_text(with_option((robots / "aloha_sim.toml").read_text(), "env_name", "insertion"))
    table = read_toml(file, ("name", "driver", "start", "reset")).values
    assert table["driver"]["env_name"] == "insertion"
    file.write_text(with_option((robots / "fake_aloha.toml").read_text(), "observe_objects", False))
    loaded = load(file)
    assert (loaded.driver, loaded.options) == ("fake_aloha", {"observe_objects": False})
    assert len(loaded.reset) == 1
