"""HIL-SERL's tasks on an environment of its shape: settings, control modes, cameras, missing robots."""

import dataclasses
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from errors import naming
from hil_serl_shape import HilSerlShape

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.agents.discrete_gripper import FixedGripper
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.process import load
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.hil_serl import TASKS, hil_serl_encoder
from serl_chunk.config.loader import known_experiments, load_experiment
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.robots import registry
from serl_chunk.robots.hil_serl import hil_serl_robot
from serl_chunk.types import ConfigError

VISION = Path(__file__).parents[2] / "docs" / "algorithms" / "vision.md"
EGG, USB = "HilSerlShape(3, ('wrist_1', 'side'))", "HilSerlShape(7, ('side_policy', 'wrist_1', 'wrist_2'))"


def shape_of(name, fake_env):
    task = TASKS[name]
    named = {"left_wrist": "left/wrist", "right_wrist": "right/wrist", "left_side": "left/side"}  # as HIL-SERL has them
    return HilSerlShape(task.action_dim, tuple(named.get(c, c) for c in task.cameras))


def filled(folder, returned, imported="from hil_serl_shape import HilSerlShape", **constants):
    """A copy of the template whose make_robot returns something, with other constants."""
    copy = folder / "my_robot.py"
    text = Path(known_experiments()["hil_serl_template"]).read_text()
    missing = '    raise NotImplementedError("make_robot() is to be filled in")\n'
    text = text.replace(missing, f"    {imported}\n    return {returned}\n")
    for name, value in constants.items():
        text, found = re.subn(rf"^({name}(: .*?)?) = (None|\"\")", rf"\1 = {value!r}", text, flags=re.M)
        assert found == 1
    copy.write_text(text)
    return copy


def test_a_filled_copy_serves_with_its_time_limit_in_seconds(tmp_path):
    copy = filled(tmp_path, EGG, EPISODE_S=4.0)
    env = registry.make_env(load_experiment(f"{copy}:egg_flip").robot)
    assert env.reset(seed=0)[0]["state"].shape == (19,)
    assert env.read_images()["images/side"].shape == (128, 128, 3)
    limits = [load(f"{copy}:egg_flip", [("robot.control_hz", hz)]).robot.time_limit for hz in ("10", "25")]
    assert limits == [40, 100]


@pytest.mark.parametrize(("mode", "actions", "said", "grippers"), [
    ("single-arm-fixed-gripper", 6, None, ()), ("single-arm-learned-gripper", 4, 4, (3,)),
    ("dual-arm-fixed-gripper", 12, None, ()), ("dual-arm-learned-gripper", 8, 8, (3, 7)),
])  # fmt: skip
def test_a_copy_says_another_composition_and_other_cameras(tmp_path, mode, actions, said, grippers):
    cameras = ("left/wrist", "top")
    given = {"SETUP_MODE": mode, "CAMERAS": cameras, **({} if said is None else {"ACTION_DIM": said})}
    config = load_experiment(f"{filled(tmp_path, f'HilSerlShape({actions}, {cameras})', **given)}:usb_pickup_insertion")
    spec = registry.robot_spec(config.robot)
    assert (spec.action_dim, spec.grippers) == (actions, grippers)
    assert config.agent.image_keys == ("left_wrist", "top")
    assert (config.agent.gripper.setup_mode, config.agent.gripper.penalty) == (mode, -0.02 if grippers else 0)
    make_agent(config, spec)


def test_a_copy_with_weights_has_hil_serls_vision(tmp_path):
    assert load_experiment("hil_serl_template:egg_flip").agent.encoder.kind == "conv"
    config = load_experiment(f"{filled(tmp_path, EGG, WEIGHTS='resnet10.npz')}:egg_flip")
    assert config.agent.encoder == hil_serl_encoder("resnet10.npz")
    # An actor has no such file, and needs none: the shapes are enough.
    shapes = make_agent(config, registry.robot_spec(config.robot)).network_shape()
    assert "critic/encoder/camera_side/Dense_0/kernel(4096, 256)" in shapes
    flags = re.findall(r"--config\.(agent\.encoder\.\w+)=(\S+)", VISION.read_text().split("```")[1])
    documented = load("fake_aloha_images", flags).agent.encoder
    own = {"features": EncoderConfig().features, "shift": EncoderConfig().shift}  # the experiment's
    assert dataclasses.replace(documented, **own) == hil_serl_encoder("resnet10.npz")


def test_a_fixed_setup_mode_is_checked_against_the_robot_and_on_the_command_line_holds_the_grippers(tmp_path):
    """The template's cost of a gripper change does not contradict it; another one does."""
    copy = filled(tmp_path, USB, SETUP_MODE="single-arm-fixed-gripper")
    named = naming("usb_pickup_insertion", 6, "(7,)", "my_robot.py", "SETUP_MODE", "ACTION_DIM")
    with pytest.raises(ConfigError, match=named):
        registry.robot_spec(load_experiment(f"{copy}:usb_pickup_insertion").robot)
    name, mode = f"{filled(tmp_path, USB)}:usb_pickup_insertion", "single-arm-fixed-gripper"
    config = load(name, [("agent.gripper.setup_mode", mode)])
    assert config.agent.gripper.penalty == 0.0
    agent = make_agent(config, registry.robot_spec(config.robot))
    assert isinstance(agent, FixedGripper)
    assert agent.spec.grippers == (6,)
    with pytest.raises(ConfigError, match=naming("agent.gripper.penalty", -0.01, "agent.gripper.choices")):
        load(name, [("agent.gripper.setup_mode", mode), ("agent.gripper.penalty", "-0.01")])


def test_an_episode_with_cameras_of_a_slash_is_recorded_and_read_again(tmp_path):
    cameras = TASKS["object_handover"].cameras
    config = load_experiment("hil_serl_template:object_handover")
    config = dataclasses.replace(config, robot=hil_serl_robot("object_handover", shape_of, "f"))
    env, still = registry.make_env(config.robot), Mock(act=lambda: np.zeros(14, np.float32))
    with EpisodeWriter(tmp_path, env.robot_spec, keep=lambda e: True) as writer:
        summary = EpisodeRunner(env, still, writer, config=config, cameras=cameras).run_episode(0)
        assert (summary.success, summary.length) == (True, HilSerlShape.SOLVED)
    steps = load_demos([tmp_path], env.robot_spec, cameras=cameras).episodes[0].steps
    frames = [int(np.asarray(steps.sparse[f"images/{c}"].values[2])[0, 0, 0]) for c in cameras]
    assert frames == [2, 12, 22]
    for tick in HilSerlShape.HUMAN_STEPS:
        np.testing.assert_allclose(steps.action[tick - 1], HilSerlShape.HUMAN_ACTION, rtol=1e-6)
    assert steps.reward.tolist() == [0.0] * 5 + [1.0]  # HIL-SERL's grasp_penalty is in info alone
