"""The benchmarks of transport and updates run and add up; their figures are not judged on a busy machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_benchmark_can_be_started():
    names = sorted(file.stem for file in BENCHMARKS.glob("*.py"))
    code = f"import importlib\nfor name in {names}: assert callable(importlib.import_module(name).main), name"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, float]]:
    """The table that a quick run prints, and its figures."""
    folder = tmp_path_factory.mktemp("benchmark")
    file = folder / "figures.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "transport.py"),
        "--quick",
        "--json",
        str(file),
        "--folder",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in folder.iterdir()] == [file.name], "the journals it wrote are removed"
    return done.stdout, json.loads(file.read_text())


@pytest.mark.slow  # the whole benchmark
def test_every_row_arrives_and_costs_something(run: tuple[str, dict[str, float]]):
    figures = run[1]
    for load, raw in (("cameras", 3 * 128 * 128 * 3), ("state", 2 * 14 * 4)):
        for batch in ("live", "catchup"):
            for actors in (1, 4):
                ours, bare = (f"{load}_{batch}_{actors}_{team}" for team in ("ours", "bare"))
                assert figures[f"{ours}_steps_per_s"] > 0
                assert figures[f"{bare}_steps_per_s"] > 0
                assert raw < figures[f"{bare}_bytes_per_step"] <= figures[f"{ours}_bytes_per_step"] < raw + 2048
                assert figures[f"{ours}_actor_cpu_us_per_step"] > 0
                assert figures[f"{ours}_learner_cpu_us_per_step"] > 0
    assert figures["cameras_live_1_keys_steps_per_s"] > 0


@pytest.mark.slow  # the whole benchmark
def test_live_rows_travel_alone_and_others_together(run: tuple[str, dict[str, float]]):
    for load in ("cameras", "state"):
        assert run[1][f"{load}_live_1_ours_steps_per_message"] == 1
        assert 2 < run[1][f"{load}_catchup_1_ours_steps_per_message"] <= 100


@pytest.mark.slow  # the whole benchmark
def test_a_restarted_learner_gets_everything_once(run: tuple[str, dict[str, float]]):
    for spool in ("memory", "disk"):
        assert run[1][f"recovery_{spool}_ours_missing"] == 0
        assert run[1][f"recovery_{spool}_ours_delivered_again"] == 0
        assert run[1][f"recovery_{spool}_ours_s"] > 0


@pytest.mark.slow  # the whole benchmark
def test_the_table_shows_it(run: tuple[str, dict[str, float]]):
    table, figures = run
    assert f"{figures['state_live_1_ours_steps_per_s']:,.0f}" in table
    for section in ("steps per second", "bytes per step", "journal", "published until applied", "50 Hz", "backlog"):
        assert f"\n{section}" in table
    assert "the whole actor, 50 MB/s, late" in table


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path):
    command = [sys.executable, str(BENCHMARKS / "transport.py"), "--quick", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--agentlace", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"--agentlace={tmp_path}: no checkout of agentlace" in done.stderr


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, dict[str, float]]]]:
    """The tables of a quick run of updates.py, and its figures."""
    file = tmp_path_factory.mktemp("updates") / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "updates.py"), "--quick", "--json", str(file), "--presets", "qc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.slow  # compiles whole agents
def test_our_update_is_the_plain_one_and_is_compiled_once(updates: tuple[str, dict[str, dict[str, dict[str, float]]]]):
    table, figures = updates
    assert figures["qc"]["ours"]["loss_difference"] < 1e-4
    assert figures["qc"]["ours"]["recompiled"] == 0
    assert f"{figures['qc']['plain']['updates_per_s']:.2f}" in table


@pytest.mark.slow  # compiles whole agents
def test_our_recipe_is_measured_beside_small_presets(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "updates.py"), "--small", "--presets", "qc-fql", "--json", str(file)]
    done = subprocess.run([*command, "--rounds=1", "--seconds=0.1"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["qc-fql"]
    assert set(figures) == {"ours", "plain", "recipe"}
    assert figures["ours"]["loss_difference"] < 1e-4
    assert f"{figures['recipe']['updates_per_s']:.2f}" in done.stdout


@pytest.mark.parametrize(
    ("script", "option", "message"),
    [
        ("updates", "--qc=.", "no checkout of Q-chunking's code"),
        ("updates", "--presets=qcc", "'qcc' is none; valid: qc-rlpd, qc-fql, qc"),
        ("updates", "--small", "--small goes with neither --quick nor --savings"),
        ("pi0_device", "--cases=lora,half", "'half' is none; valid: lora_expert, lora, expert, full, decide"),
        ("pi0_device", "--batch=3", "--batch=3 --rounds=20: expected an even batch"),
        ("vision", "--cases=cached,resnet", "'resnet' is none; valid: none, conv, impala, resnet10, frozen, cached"),
        ("vision", "--sizes=128", "--sizes=128: expected PIXELS:BATCH"),
        ("vision", "--sizes=48:3", "48:3 is no size: 8 pixels or more, an even batch"),
    ],
)
def test_what_cannot_be_measured_is_refused(script: str, option: str, message: str):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow  # compiles whole agents
def test_a_pi0_is_measured_on_a_device(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "pi0_device.py"), "--quick", "--batch=2", "--rounds=1"]
    command += ["--cases=lora_expert,decide", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert 0 < figures["lora_expert"]["update_ms"] < figures["lora_expert"]["total_ms"]
    assert set(figures["decide"]["decide_ms"]) == {"1", "8", "32"}
    assert f"{figures['lora_expert']['total_ms']:.1f} ms an update of 2" in done.stdout


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, float]]]:
    """The table of a quick run of vision.py, and its figures at the one size it has."""
    file = tmp_path_factory.mktemp("vision") / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "vision.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())["32"]


@pytest.mark.slow  # compiles ResNet-10
def test_kept_features_stand_for_pixels_in_the_vision_benchmark(vision: tuple[str, dict[str, dict[str, float]]]):
    table, figures = vision
    assert set(figures) == {"none", "conv", "frozen", "cached"}
    cached = figures["cached"]
    assert cached["loss_difference"] < 1e-2
    assert (cached["pixel_bytes_per_frame"], cached["feature_bytes_per_frame"]) == (32 * 32 * 3, 512 * 2)
    assert cached["embed_ms_per_frame"] > 0
    assert cached["batch_mb"] < figures["frozen"]["batch_mb"]
    for case, f in figures.items():
        assert f["total_ms"] > 0
        assert case == "none" or f["camera_share"] == pytest.approx(1 - figures["none"]["total_ms"] / f["total_ms"])
    assert f"{100 * cached['saved_share']:.0f} %" in table
