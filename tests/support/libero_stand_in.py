"""What of LIBERO is used: tasks with two saved states, whose hand, drawn on reset, moves by the action; solved at 1."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

SAVED = np.array([[0.25], [0.5]])


class ControlEnv:
    """A simulation of LIBERO. As there, a reset keeps the gripper's opening and what the solver starts from."""

    def __init__(self, bddl_file: str, **settings: Any) -> None:
        self.settings, self.actions = {"bddl_file": bddl_file, **settings}, list[np.ndarray]()
        gripper = SimpleNamespace(dof=1, current_action=np.zeros(1))
        self.robots, self.env = [SimpleNamespace(gripper=gripper)], self
        self.sim = SimpleNamespace(data=SimpleNamespace(qacc_warmstart=np.zeros(1)))

    def reset(self) -> dict[str, Any]:
        self.furniture = np.random.uniform()  # noqa: NPY002 (as robosuite does)
        return self.set_init_state(np.random.uniform(0, 0.1, 1))  # noqa: NPY002

    def set_init_state(self, state: np.ndarray) -> dict[str, Any]:
        (self.at,), self.actions = state, []
        return self.observe()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.actions.append(action)
        left, opening = self.sim.data.qacc_warmstart, self.robots[0].gripper.current_action
        self.at += float(action[2] + 1e-3 * (left[0] + opening[0]))
        left += 1
        opening += action[6]
        return self.observe(), 0.0, self.at >= 1, {}

    def observe(self) -> dict[str, Any]:
        half = np.array([0, 0, np.sin(2.0), np.cos(2.0)])  # a turn of 4 rad around z
        return {
            "robot0_gripper_qpos": np.array([7.0, 8.0]),
            "robot0_eef_quat": half,
            "robot0_eef_pos": np.array([self.at, 1, self.furniture]),
        }

    def close(self) -> None:
        del self.env


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace robosuite and LIBERO."""

    def suite(name: str) -> Any:
        print("the order of its tasks")
        return SimpleNamespace(
            get_task_init_states=lambda n: SAVED, get_task_bddl_file_path=lambda n: f"{name}/{n}.bddl"
        )

    suites = {name: functools.partial(suite, name) for name in ("libero_goal", "libero_90")}
    benchmark = SimpleNamespace(get_benchmark_dict=lambda: suites)
    envs = SimpleNamespace(env_wrapper=SimpleNamespace(ControlEnv=ControlEnv))
    package = SimpleNamespace(benchmark=benchmark, envs=envs)
    modules = {"": package, ".benchmark": benchmark, ".envs": envs}
    monkeypatch.setitem(sys.modules, "robosuite", SimpleNamespace())
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"libero.libero{name}", module)
