"""What `benchmarks/served_policy.py` computes, the robot's file that its server gets, and `robot_processes.py`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.robot_file.toml_file import read_toml

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


def test_nothing_moves_between_an_operators_hold_and_go_or_after_a_drivers_exit(tmp_path):
    """Two cases of real processes, once each; times are not judged."""
    figures = tmp_path / "figures.json"
    arguments = ["--times", "1", "--cases", "terminal_run", "driver_exits", "--json", str(figures)]
    script = subprocess.run(
        [sys.executable, str(BENCHMARKS / "robot_processes.py"), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert script.returncode == 0, script.stdout + script.stderr
    made = json.loads(figures.read_text())
    for name in ("terminal_run", "driver_exits"):
        assert (made[name]["n"], made[name]["changed"], made[name]["broken"]) == (1, 0, [])
