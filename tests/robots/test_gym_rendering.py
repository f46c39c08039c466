"""gym_adapter: user environments that render with MuJoCo on a machine without a display."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytest.importorskip("mujoco")

MODEL = "<mujoco><worldbody><light pos='0 0 3'/><geom type='sphere' size='1'/></worldbody></mujoco>"
EXPERIMENT = f'''
import dataclasses
import gymnasium
import mujoco
import numpy as np

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.robots import GymConfig


class Rendering(gymnasium.Env):
    """Draws a frame when it is made (gym-hil's habit), or at its first reset; it is its own expert."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, when):
        if when == "made":
            self.draw()

    def draw(self):
        model = mujoco.MjModel.from_xml_string("""{MODEL}""")
        with mujoco.Renderer(model, 16, 16) as renderer:
            renderer.update_scene(mujoco.MjData(model))
            assert renderer.render().shape == (16, 16, 3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.draw()
        return np.zeros(3, np.float32), {{}}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, True, False, {{"succeed": True}}

    def make_expert(self):
        return type("Expert", (), {{"reset": lambda self, seed: None, "act": lambda self: np.zeros(2, np.float32)}})()


def experiment(when):
    robot = GymConfig(make=lambda fake_env: Rendering(when), max_episode_steps=12)
    return dataclasses.replace(load_experiment("fake_single_arm"), name="rendering", robot=robot)
'''
LEARNER = ("--exp_name", "rendering.py:made", "--learner", "--debug", "--demo_path", "nothing", "--insecure")
RECORD = ("record", "--exp_name", "rendering.py:reset", "--policy", "scripted", "--n_demos", "1", "--out", "demos")


def serl_chunk(folder, *arguments, **environment) -> subprocess.CompletedProcess[str]:
    (folder / "rendering.py").write_text(EXPERIMENT)
    names = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    command = [sys.executable, "-m", "serl_chunk", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**kept, **environment}, timeout=120)


@pytest.mark.parametrize("arguments", [LEARNER, RECORD], ids=["learner", "record"])
def test_without_opengl_there_is_one_sentence(tmp_path, arguments):
    done = serl_chunk(tmp_path, *arguments, MUJOCO_GL="disabled")
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    for part in ("serl-chunk: ", "'gym'", "OpenGL", "MUJOCO_GL='disabled'", "MUJOCO_GL=egl", "apt install libegl1"):
        assert part in sentence


def test_a_headless_machine_renders_although_the_experiment_imports_mujoco_first(tmp_path):
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        pytest.skip("no EGL on this machine")
    done = serl_chunk(tmp_path, *RECORD)
    assert done.returncode == 0, done.stderr
    assert "1 demonstration recorded" in done.stdout
