"""The benchmarks run and add up; their figures are not judged on a busy machine, but the outcomes of trainings are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from support.results import Run, read
from support.transport_baselines.figures import CPU_RATIOS

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.system


def run(script: str, *flags: object, timeout: float | None = 280) -> str:
    """Run a benchmark to its end; returns what it printed."""
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(script: str, folder: Path, *flags: object, **more: Any) -> tuple[str, dict[str, Any]]:
    file = folder / "figures.json"
    return run(script, *flags, "--json", file, **more), json.loads(file.read_text())


REFUSED = [
    ("transport", "--agentlace=.", "--agentlace=.: no checkout of agentlace"),
    ("updates", "--small", "--small goes with neither --quick nor --savings"),
    ("pi0_device", "--batch=3", "--batch=3 --rounds=20: expected an even batch"),
    ("vision", "--sizes=48:3", "48:3 is no size: 8 pixels or more, an even batch"),
]
START = """
import importlib, sys
for name in {names}:
    assert callable(importlib.import_module(name).main), name
for name, option, message in {refused}:
    sys.argv = [name, "--quick", option]
    try:
        importlib.import_module(name).main()
    except SystemExit as error:
        assert message in error.code, error
    else:
        raise AssertionError(name)
"""


def test_every_benchmark_can_be_started_and_refuses_what_it_cannot_measure(tmp_path):
    code = START.format(names=sorted(file.stem for file in BENCHMARKS.glob("*.py")), refused=REFUSED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # the whole benchmark
def test_every_row_arrives_once_costs_something_and_is_in_the_table_of_transport(tmp_path):
    table, figures = measured("transport", tmp_path, "--quick", "--folder", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"], "the journals it wrote are removed"
    for load_, raw in (("cameras", 3 * 128 * 128 * 3), ("state", 2 * 14 * 4)):
        for case in (f"{load_}_{batch}_{actors}" for batch in ("live", "catchup") for actors in (1, 4)):
            ours, bare = f"{case}_ours", f"{case}_bare"
            costs = (f"{ours}_steps_per_s", f"{bare}_steps_per_s", f"{ours}_actor_cpu_us_per_step")
            assert min(figures[name] for name in (*costs, f"{ours}_learner_cpu_us_per_step")) > 0
            assert raw < figures[f"{bare}_bytes_per_step"] <= figures[f"{ours}_bytes_per_step"] < raw + 2048
        assert figures[f"{load_}_live_1_ours_steps_per_message"] == 1  # live rows travel alone, others together
        assert 2 < figures[f"{load_}_catchup_1_ours_steps_per_message"] <= 100
    assert figures["cameras_live_1_keys_steps_per_s"] > 0
    assert min(figures[f"cameras_live_1_{a}_cpu_of_{b}"] for a, b in CPU_RATIOS if b != "agentlace") > 0
    for spool in ("memory", "disk"):  # a restarted learner
        at = f"recovery_{spool}_ours"
        assert (figures[f"{at}_missing"], figures[f"{at}_delivered_again"], figures[f"{at}_s"] > 0) == (0, 0, True)
    sections = ("processor time", "steps per second", "bytes per step", "journal", "published", "50 Hz", "backlog")
    shown = (f"{figures['state_live_1_ours_steps_per_s']:,.0f}", "the whole actor, 50 MB/s, late")
    assert [text for text in (*(f"\n{section}" for section in sections), *shown) if text not in table] == []


@pytest.mark.slow  # compiles whole agents
def test_our_update_is_the_plain_one_and_is_compiled_once_and_our_recipe_is_measured_beside_it(tmp_path):
    table, figures = measured("updates", tmp_path, "--quick", "--presets", "qc")
    assert figures["qc"]["ours"]["loss_difference"] < 1e-4
    assert figures["qc"]["ours"]["recompiled"] == 0
    assert f"{figures['qc']['plain']['updates_per_s']:.2f}" in table
    small = ("--small", "--presets", "qc-fql", "--rounds=1", "--seconds=0.1")
    table, figures = measured("updates", tmp_path, *small, timeout=600)
    assert set(figures["qc-fql"]) == {"ours", "plain", "recipe"}
    assert figures["qc-fql"]["ours"]["loss_difference"] < 1e-4
    assert f"{figures['qc-fql']['recipe']['updates_per_s']:.2f}" in table


@pytest.mark.slow  # compiles whole agents
def test_a_pi0_is_measured_on_a_device(tmp_path):
    cases = ("--cases=lora_expert,decide", "--batch=2", "--rounds=1")
    table, figures = measured("pi0_device", tmp_path, "--quick", *cases)
    assert 0 < figures["lora_expert"]["update_ms"] < figures["lora_expert"]["total_ms"]
    assert set(figures["decide"]["decide_ms"]) == {"1", "8", "32"}
    assert f"{figures['lora_expert']['total_ms']:.1f} ms an update of 2" in table


@pytest.mark.slow  # compiles ResNet-10
def test_kept_features_stand_for_pixels_in_the_vision_benchmark(tmp_path):
    table, sizes = measured("vision", tmp_path, "--quick")
    figures = sizes["32"]
    cached = figures["cached"]
    assert cached["loss_difference"] < 1e-2
    assert (cached["pixel_bytes_per_frame"], cached["feature_bytes_per_frame"]) == (32 * 32 * 3, 512 * 2)
    assert cached["batch_mb"] < figures["frozen"]["batch_mb"]
    for case in ("conv", "frozen", "cached"):
        share = 1 - figures["none"]["total_ms"] / figures[case]["total_ms"]
        assert figures[case]["camera_share"] == pytest.approx(share)
    assert f"{100 * cached['saved_share']:.0f} %" in table


def test_nothing_moves_between_an_operators_hold_and_go_or_after_a_drivers_exit(tmp_path):
    """Two cases of real processes, once each; times are not judged."""
    cases = ("terminal_run", "driver_exits")
    _, figures = measured("robot_processes", tmp_path, "--times", "1", "--cases", *cases, timeout=300)
    assert [(figures[name]["n"], figures[name]["changed"], figures[name]["broken"]) for name in cases] == [
        (1, 0, [])
    ] * 2


# Trainings whose outcome the documentation promises: minutes to an hour each.


def training(tmp_path: Path, script: str, *flags: object) -> list[Run]:
    run(script, "--out", tmp_path / "out", "--json", tmp_path / "figures.json", *flags, timeout=None)
    return list(read(tmp_path / "figures.json").runs)


@pytest.mark.slow
def test_every_method_with_a_human_runs(tmp_path):
    plot, methods = tmp_path / "plot.png", ["ours", "advised", "rlpd-qc", "hil-serl", "hg-dagger", "bc"]
    runs = training(tmp_path, "human_in_the_loop", "--quick", "--methods", ",".join(methods), "--plot", plot)
    assert [r.name for r in runs] == methods
    assert all(r.figures["human_share_high"] > 0 for r in runs)
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gym_hils_operator_is_seen_and_the_cube_is_picked(tmp_path):
    pytest.importorskip("gym_hil")
    (result,) = training(tmp_path, "learn_gym_hil")
    last = result.checkpoints[-1]
    assert last.human_ticks > 100
    assert result.figures["episodes_with_intervention"] > 10
    assert last.episodes == 50
    assert last.rate >= 0.9
