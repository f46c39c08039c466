"""Settings, robots and helpers that cannot be: each error names what is at fault, and what would do."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from errors import naming
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from hil_serl_shape import HilSerlShape

from serl_chunk.config.hil_serl import hil_serl_task
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import (
    AlohaConfig,
    AlohaSimConfig,
    FakeAlohaConfig,
    FrankaConfig,
    GymConfig,
    LiberoConfig,
    OgbenchConfig,
    RobomimicConfig,
    ScriptedHumanConfig,
)
from serl_chunk.devices.registry import make_intervention
from serl_chunk.extras import opengl_error
from serl_chunk.robots.drawn_camera import AlohaSimCamera
from serl_chunk.robots.gym_spaces import ObservationLayout
from serl_chunk.robots.hil_serl import hil_serl_robot
from serl_chunk.robots.registry import make_env, make_expert, robot_spec
from serl_chunk.robots.served import task as served_task
from serl_chunk.robots.served.task import Seen
from serl_chunk.types import ConfigError

LOW, HIGH = (0.523, 0.147, 0.221, 3.04, -0.1, -1.87), (0.583, 0.237, 0.301, 3.24, 0.1, -1.27)
FRAME = spaces.Box(0, 255, (8, 8, 3), np.uint8)


def franka(**changes: Any) -> FrankaConfig:
    return dataclasses.replace(FrankaConfig(server="pc", scale=(0.015, 0.1), box_low=LOW, box_high=HIGH), **changes)


def box(*shape: int) -> spaces.Box:
    return spaces.Box(-9, 9, shape, np.float32)


def layout(**parts: spaces.Space) -> ObservationLayout:
    return ObservationLayout.of(spaces.Dict(parts))


def environment(name: str = "gym", **attributes: Any) -> Any:
    """A user's environment with such attributes; a function is a method."""
    env = PendulumEnv()
    for key, value in attributes.items():
        setattr(env, key, value)
    return make_env(GymConfig(make=lambda fake_env: env, robot_name=name, max_episode_steps=12, grippers=()))


def adapted(make: Any = lambda fake_env: HilSerlShape(7, ("side",)), **changes: Any) -> Any:
    return make_env(GymConfig(make=make, robot_name="franka", **changes))


def template(task: str, actions: int, *cameras: str) -> Any:
    return make_env(hil_serl_robot(task, lambda name, fake: HilSerlShape(actions, cameras), "f"))


def aloha_expert(expert: Any = None) -> Any:
    return served_task.make_expert(AlohaConfig(server="pc", expert=expert), served(AlohaConfig()))


def served(config: Any, *published: str) -> Any:
    """A served robot that publishes such extra numbers."""
    seen = Seen(np.zeros(14), np.zeros(14), {name: np.zeros(3) for name in published})
    return SimpleNamespace(robot_spec=robot_spec(config), seen=lambda: seen)


def raised(error: Exception | None) -> None:
    assert error is not None
    raise error


CASES = [
    (lambda: raised(opengl_error(ImportError("libGL.so.1: cannot open shared object file"), "robot libero")),
     "robot libero", "libGL.so.1", "libgl1"),
    (lambda: ScriptedHumanConfig(reaction_ticks=(9, 3)), "robot.scripted_human.reaction_ticks", "(9, 3)"),
    (lambda: AlohaSimConfig(env_name="insert"), "robot.env_name", "insert", "transfer_cube", "insertion"),
    (lambda: robot_spec(AlohaSimConfig(cameras=("top", "wrist"))), "robot.cameras", "wrist", "left_wrist"),
    (lambda: AlohaSimCamera("front"), "front", "valid are left_pillar"),
    (lambda: robot_spec(OgbenchConfig(env_name="cube-singel-play-singletask-task1-v0")), "robot.env_name",
     "cube-single-play-singletask-task1-v0"),
    (lambda: LiberoConfig(env_name="libero_gaol/3"), "robot.env_name", "libero_gaol/3", "libero_goal (N up to 9)"),
    (lambda: LiberoConfig(env_name="libero_goal/10"), "robot.env_name", "libero_goal/10", "7 (turn on the stove)"),
    (lambda: franka(box_low=LOW[:5]), "robot.box_low", "6 numbers"),
    (lambda: franka(box_high=LOW), "below robot.box_high"),
    (lambda: franka(proprio=("pose",)), "robot.proprio", "different ones of gripper_pose"),
    (lambda: make_env(franka(server="")), "robot.server", "franka_http"),
    (aloha_expert, "no scripted expert"),
    (lambda: aloha_expert(lambda robot: 3), "robot.expert", "int"),
    (lambda: aloha_expert(lambda robot: 1 // 0), Path(__file__).name, "ZeroDivisionError", "expert()"),
    (lambda: served_task.make_expert(FakeAlohaConfig(), served(FakeAlohaConfig())), "publishes no 'cube'"),
    (lambda: make_intervention("scripted", served(AlohaSimConfig())), "aloha_sim", "actor.intervention", "none"),
    (lambda: make_expert(environment("rail")), "rail", "make_expert()", "reset()", "act()"),
    (lambda: make_intervention("scripted", environment("rail")), "rail", "make_scripted_human()",
     "actor.intervention", "none"),
    (lambda: make_expert(environment("rail", make_expert=lambda: 3)), "make_expert()", "rail", "int", "reset()"),
    (lambda: make_intervention("scripted", environment("rail", make_scripted_human=PendulumEnv)),
     "make_scripted_human()", "rail", "PendulumEnv", "poll()"),
    (lambda: environment(max_episode_length=10), "max_episode_length", 10, "robot.max_episode_steps", 12),
    (lambda: adapted(joint_of_action=(0, 1)), "robot.joint_of_action", 2, 7),
    (lambda: adapted(grippers=(7,)), "robot.grippers", "(7,)", "0..6"),
    (lambda: adapted(lambda fake_env: 3), "robot.make", "gymnasium.Env", "int"),
    (lambda: layout(state=box(1), top=FRAME, images=spaces.Dict({"top": FRAME})), "top"),
    (lambda: template("ram_insertion", 7, "wrist_1", "wrist_2"), "ram_insertion", 6, "(7,)", "GripperCloseEnv"),
    (lambda: template("ram_insertion", 6, "wrist_1"), "ram_insertion", "wrist_2", "wrist_1"),
    (lambda: hil_serl_task("egg_flip", setup_mode="single-arm"), "egg_flip", "setup_mode", "'single-arm'",
     "single-arm-fixed-gripper"),
    (lambda: hil_serl_task("object_handover", action_dim=7), "object_handover", "action_dim", 7),
    (lambda: load_experiment("hil_serl_template:ram"), "ram", "ram_insertion"),
    (lambda: load_experiment("hil_serl_franka:egg_flip"), "egg_flip", "hil_serl_template:egg_flip"),
    (lambda: make_env(load_experiment("hil_serl_template").robot), "ram_insertion", "hil_serl_template.py",
     "make_robot()", "exp_name"),
]  # fmt: skip


@pytest.mark.parametrize(("attempt", "named"), [(attempt, named) for attempt, *named in CASES])
def test_what_cannot_be_is_refused_by_name(attempt, named):
    with pytest.raises((ConfigError, ValueError), match=naming(*named)):
        attempt()


def old_ogbench(name: str, env_only: bool) -> None:
    """Before 1.2 an environment cannot be told which state to judge."""


@pytest.mark.parametrize(
    ("config", "modules", "named"),
    [(AlohaSimConfig(), {"mujoco": None}, ("pip install 'serl-chunk[aloha-sim]'",)),
     (OgbenchConfig(), {"ogbench": None}, ("ogbench", "pip install 'serl-chunk[ogbench]'")),
     (OgbenchConfig(), {"ogbench": SimpleNamespace(make_env_and_datasets=old_ogbench),
      "ogbench.relabel_utils": SimpleNamespace()},
      ("ogbench", "success_timing", "pip install --upgrade 'serl-chunk[ogbench]'")),
     (RobomimicConfig(), {"robosuite": None}, ("robomimic", "robosuite", "pip install 'serl-chunk[robomimic]'")),
     (LiberoConfig(), {"robosuite": None}, ("libero", "robosuite", "pip install 'serl-chunk[libero]'"))],
)  # fmt: skip
def test_without_its_extra_or_with_an_old_one_a_robot_says_what_to_install(monkeypatch, config, modules, named):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=naming(*named)):
        make_env(config)
