"""Trainings of the benchmarks whose outcome the documentation promises: minutes to an hour each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from support.results import Run, read

from serl_chunk.evaluation.results import wilson_interval

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(tmp_path: Path, script: str, *flags: str) -> list[Run]:
    """The runs of one benchmark, from its beginning."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), "--out", str(tmp_path / "out"), "--json", str(file), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(read(file).runs)


@pytest.mark.slow
def test_every_method_with_a_human_runs(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    methods = ["ours", "rlpd-qc", "hil-serl", "hg-dagger", "bc"]
    flags = ("--quick", "--methods", ",".join(methods), "--plot", str(plot))
    runs = run(tmp_path, "human_in_the_loop.py", *flags)
    assert [r.name for r in runs] == methods
    assert all(r.figures["human_share_high"] > 0 for r in runs)
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_human_is_needed_less_and_less(tmp_path: Path) -> None:
    (ours,) = run(tmp_path, "human_in_the_loop.py", "--methods", "ours", "--checkpoints", "1")
    assert ours.figures["later_share"] < 0.05
    last = ours.checkpoints[-1]
    assert wilson_interval(last.successes, last.episodes).low > 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gym_hils_operator_is_seen_and_the_cube_is_picked(tmp_path: Path) -> None:
    pytest.importorskip("gym_hil")
    (result,) = run(tmp_path, "learn_gym_hil.py")
    last = result.checkpoints[-1]
    assert last.human_ticks is not None
    assert last.human_ticks > 100
    assert result.figures["episodes_with_intervention"] > 10
    assert (last.episodes, result.figures["starts_repeat"]) == (50, 1)
    assert last.rate >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_three_cameras_are_enough(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "learn_fake_aloha_images.py")
    assert result.checkpoints[-1].rate >= 0.8
