"""`serl-chunk data stats`: the table, and the file in openpi's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.cli.process import load, spec_of
from serl_chunk.cli.record import run_record
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.normalise.chunk_statistics import read_norm_stats
from serl_chunk.main import main

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert run_record(CONFIG, 3, str(folder), policy="scripted", noise=None, cameras=()) == 0
    return folder


def test_absolute_statistics_are_those_of_the_steps(recorded, tmp_path, capsys):
    assert main(["data", "stats", str(recorded), "--out", str(tmp_path / "s.json"), "--std_floor", "1e-6"]) == 0
    stats = read_norm_stats(tmp_path / "s.json")
    steps = [read_episode(f).steps for f in recorded.iterdir()]
    for name, values in (
        ("state", np.concatenate([s.observation["state"] for s in steps])),
        ("actions", np.concatenate([s.action for s in steps])),
    ):
        values = values.astype(np.float64)
        np.testing.assert_allclose(stats[name].mean, values.mean(0), atol=1e-6)
        np.testing.assert_allclose(stats[name].std, values.std(0), rtol=1e-5)
        np.testing.assert_allclose(stats[name].q99, np.quantile(values, 0.99, axis=0), rtol=1e-9)
    out = capsys.readouterr().out
    assert f"all {sum(s.n for s in steps)} steps of 3 episodes; absolute actions, chunks of 1" in out
    assert out.count("state ") >= SPEC.state_dim
    assert out.splitlines()[-1] == f"wrote {tmp_path / 's.json'}"


def test_delta_statistics_take_the_mask_or_the_robot(recorded, tmp_path, capsys):
    by_mask = ["--mask=6,-1,6,-1", "--horizon", "10"]
    assert main(["data", "stats", str(recorded), "--actions", "delta", *by_mask, "--out", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "delta actions, chunks of 10" in out
    assert sum(line.startswith("actions") and "delta" in line for line in out.splitlines()) == 12
    by_robot = ["--exp_name", "fake_aloha", "--horizon", "10"]
    assert main(["data", "stats", str(recorded), "--actions", "delta", *by_robot, "--out", str(tmp_path / "b")]) == 0
    a, b = (json.loads((tmp_path / x / "norm_stats.json").read_text()) for x in "ab")
    assert a["norm_stats"] == b["norm_stats"]
    assert a["serl_chunk"]["horizon"] == 10
    assert sum(a["serl_chunk"]["mask"]) == 12


def test_the_experiments_horizon_is_taken(recorded, capsys):
    assert main(["data", "stats", str(recorded), "--actions", "delta", "--exp_name", "fake_aloha"]) == 0
    assert f"chunks of {CONFIG.chunk.horizon}" in capsys.readouterr().out


def test_a_subset_is_said(recorded, tmp_path, capsys):
    flags = ["--max_samples", "20", "--seed", "5", "--out", str(tmp_path)]
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert "20 of " in capsys.readouterr().out
    first = (tmp_path / "norm_stats.json").read_text()
    assert main(["data", "stats", str(recorded), *flags]) == 0
    assert (tmp_path / "norm_stats.json").read_text() == first
    assert json.loads(first)["serl_chunk"]["samples"] == 20


def test_floored_dimensions_are_named(recorded, capsys):
    assert main(["data", "stats", str(recorded), "--std_floor", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "state: std raised to 0.1 in dimension 0 (0.0" in out
    (row,) = [line for line in out.splitlines() if line.startswith("state 0 ")]
    assert row.split()[3] == "0.1"
    assert "floored" in row.split()[8:]
