"""Trainings of the benchmarks whose outcome the documentation promises: minutes to an hour each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import human_in_the_loop

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(tmp_path: Path, script: str, *flags: str) -> dict[str, Any]:
    """The figures of one benchmark, run from its beginning."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), "--out", str(tmp_path / "out"), "--json", str(file), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_method_with_a_human_runs(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    methods = ["ours", "rlpd-qc", "hil-serl", "hg-dagger", "bc"]
    flags = ("--quick", "--methods", ",".join(methods), "--plot", str(plot))
    results = run(tmp_path, "human_in_the_loop.py", *flags)["results"]
    assert [r["method"] for r in results] == methods
    assert all(r["people"][-1]["human_ticks"] > 0 for r in results)
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_human_is_needed_less_and_less(tmp_path: Path) -> None:
    (ours,) = run(tmp_path, "human_in_the_loop.py", "--methods", "ours", "--checkpoints", "1")["results"]
    assert human_in_the_loop.later_share(ours["people"]) < 0.05
    assert ours["curve"][-1]["low"] > 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gym_hils_operator_is_seen_and_the_cube_is_picked(tmp_path: Path) -> None:
    pytest.importorskip("gym_hil")
    (result,) = run(tmp_path, "learn_gym_hil.py")["results"]
    assert result["human_ticks"] > 100
    assert result["episodes_with_intervention"] > 10
    last = result["curve"][-1]
    assert (last["n"], last["human_ticks"], last["starts_repeat"]) == (50, 0, True)
    assert last["success_rate"] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_cameras_are_enough(tmp_path: Path) -> None:
    last = run(tmp_path, "learn_fake_aloha_images.py")["curve"][-1]
    assert last["success_rate"] >= 0.8
