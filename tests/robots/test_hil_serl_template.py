"""HIL-SERL's tasks on an environment of its shape: settings, control modes, cameras, missing robots."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from actor_helpers import ListSink, SimClock
from errors import naming
from hil_serl_shape import HilSerlShape

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.agents.discrete_gripper import FixedGripper, LearnedGripper
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.process import load
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.hil_serl import TASKS, hil_serl_encoder
from serl_chunk.config.loader import known_experiments, load_experiment
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.data.preprocess import fit_preprocess
from serl_chunk.replay.replay import Replay
from serl_chunk.robots import registry
from serl_chunk.robots.hil_serl import hil_serl_robot
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Begin, ConfigError, StepBlock

VISION = Path(__file__).parents[2] / "docs" / "algorithms" / "vision.md"
EGG, USB = "HilSerlShape(3, ('wrist_1', 'side'))", "HilSerlShape(7, ('side_policy', 'wrist_1', 'wrist_2'))"


def shape_of(name, fake_env):
    task = TASKS[name]
    named = {"left_wrist": "left/wrist", "right_wrist": "right/wrist", "left_side": "left/side"}  # as HIL-SERL has them
    return HilSerlShape(task.action_dim, tuple(named.get(c, c) for c in task.cameras))


@pytest.mark.parametrize(
    ("name", "discount", "limit", "actions", "cameras", "options"),
    [("ram_insertion", 0.97, 100, 6, 2, None), ("usb_pickup_insertion", 0.98, 120, 7, 3, 3),
     ("object_handover", 0.97, 200, 14, 3, 9), ("egg_flip", 0.985, 100, 3, 2, None)],
)  # fmt: skip
def test_each_task_has_its_settings(name, discount, limit, actions, cameras, options):
    config = load_experiment(f"hil_serl_template:{name}")
    assert config.name == f"hil_serl_{name}"
    assert (config.discount, config.robot.max_episode_s, config.robot.real) == (discount, limit / 10, True)
    assert config.learner.utd_ratio is None
    assert len(config.agent.image_keys) == cameras
    spec = registry.robot_spec(hil_serl_robot(name, shape_of, "file.py"))
    assert (spec.action_dim, spec.control_hz, spec.state_dim, spec.max_episode_steps) == (actions, 10.0, 19, limit)
    assert {c.name for c in spec.cameras} == set(config.agent.image_keys)
    assert spec.grippers == tuple(i for i in (6, 13) if i < actions)
    assert (config.agent.gripper.composition, config.agent.gripper.penalty) == (
        ("learned", -0.02) if options else ("fixed", 0)
    )
    agent = make_agent(config, spec)
    assert isinstance(agent, LearnedGripper if options else FixedGripper)
    assert not options or (agent.choices.options, agent.choices.neutral) == (options, 1)


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


def test_a_run_of_one_task_is_no_run_of_another(tmp_path):
    spec = registry.robot_spec(hil_serl_robot("ram_insertion", shape_of, "f"))
    run = open_run(load_experiment("hil_serl_template:ram_insertion"), spec, str(tmp_path))
    with run.lock:
        run.write_config()
    with pytest.raises(ConfigError, match=naming("hil_serl_ram_insertion", "hil_serl_egg_flip")):
        open_run(load_experiment("hil_serl_template:egg_flip"), spec, str(tmp_path))


def test_what_a_copy_cannot_import_is_said_with_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    copy = filled(tmp_path, "Env()", "from beside_me import Env")
    line = copy.read_text().splitlines().index("    from beside_me import Env") + 1
    for beside, named in (
        ("", ("make()", copy, line, "ModuleNotFoundError", "beside_me", sys.executable)),
        ("import no_such_robot", ("beside_me.py", 1, "ModuleNotFoundError", "no_such_robot")),
        ("Other = 1", ("my_robot.py", "ImportError", "Env")),
    ):
        monkeypatch.delitem(sys.modules, "beside_me", raising=False)
        if beside:
            (tmp_path / "beside_me.py").write_text(beside)
        with pytest.raises(ConfigError, match=naming(*named)):
            registry.make_env(load_experiment(str(copy)).robot)


@pytest.mark.parametrize(
    ("mode", "actions", "said", "grippers"),
    [("single-arm-fixed-gripper", 6, None, ()), ("single-arm-learned-gripper", 4, 4, (3,)),
     ("dual-arm-fixed-gripper", 12, None, ()), ("dual-arm-learned-gripper", 8, 8, (3, 7))],
)  # fmt: skip
def test_a_copy_says_another_composition_and_other_cameras(tmp_path, mode, actions, said, grippers):
    cameras = ("left/wrist", "top")
    given = {"SETUP_MODE": mode, "CAMERAS": cameras, **({} if said is None else {"ACTION_DIM": said})}
    config = load_experiment(f"{filled(tmp_path, f'HilSerlShape({actions}, {cameras})', **given)}:usb_pickup_insertion")
    spec = registry.robot_spec(config.robot)
    assert (spec.action_dim, spec.grippers) == (actions, grippers)
    assert config.agent.image_keys == ("left_wrist", "top")
    assert config.agent.gripper.setup_mode == mode
    assert config.agent.gripper.penalty == (-0.02 if grippers else 0)
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


class BelowTheWrappers(gymnasium.Env):
    """Observations of HIL-SERL's Env itself, below SERLObsWrapper and ChunkingWrapper."""

    VECTORS: ClassVar = {"tcp_pose": 6, "tcp_vel": 6, "gripper_pose": 1, "tcp_force": 3, "tcp_torque": 3}

    def __init__(self):
        vectors = {k: gymnasium.spaces.Box(-np.inf, np.inf, (n,)) for k, n in self.VECTORS.items()}
        frame = gymnasium.spaces.Box(0, 255, (128, 128, 3), np.uint8)
        images = gymnasium.spaces.Dict({"wrist_1": frame, "wrist_2": frame})
        self.observation_space = gymnasium.spaces.Dict({"state": gymnasium.spaces.Dict(vectors), "images": images})
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (6,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        self.given = self.observation_space.sample()
        return self.given, {"succeed": False}


def test_observations_are_read_below_hil_serls_wrappers_in_the_order_of_theirs():
    env = registry.make_env(hil_serl_robot("ram_insertion", lambda name, fake: BelowTheWrappers(), "f"))
    observation, _ = env.reset(seed=0)
    state = env.env.given["state"]
    flattened = gymnasium.spaces.flatten(env.env.observation_space["state"], state)  # what SERLObsWrapper does
    np.testing.assert_array_equal(observation["state"], flattened)
    assert observation["state"][0] == state["gripper_pose"][0]
    np.testing.assert_array_equal(env.read_images()["images/wrist_2"], env.env.given["images"]["wrist_2"])


class Still:
    """A demonstrator that moves nothing."""

    def __init__(self, size):
        self.size = size

    def reset(self, seed):
        pass

    def act(self):
        return np.zeros(self.size, np.float32)


def test_an_episode_with_cameras_of_a_slash_is_recorded_and_read_again(tmp_path):
    cameras = TASKS["object_handover"].cameras
    config = load_experiment("hil_serl_template:object_handover")
    config = dataclasses.replace(config, robot=hil_serl_robot("object_handover", shape_of, "f"))
    env = registry.make_env(config.robot)
    with EpisodeWriter(tmp_path, env.robot_spec, keep=lambda e: True) as writer:
        summary = EpisodeRunner(env, Still(14), writer, config=config, cameras=cameras).run_episode(0)
        assert (summary.success, summary.length) == (True, HilSerlShape.SOLVED)
    steps = load_demos([tmp_path], env.robot_spec, cameras=cameras).episodes[0].steps
    frames = [int(np.asarray(steps.sparse[f"images/{c}"].values[2])[0, 0, 0]) for c in cameras]
    assert frames == [2, 12, 22]
    for tick in HilSerlShape.HUMAN_STEPS:
        np.testing.assert_allclose(steps.action[tick - 1], HilSerlShape.HUMAN_ACTION, rtol=1e-6)
    assert steps.reward.tolist() == [0.0] * 5 + [1.0]  # HIL-SERL's grasp_penalty is in info alone


class HalfRate(HilSerlShape):
    """An episode of 30 steps; every picture shows its tick, as the state does, or the last `every`-th one."""

    SOLVED, every = 30, 1

    def _observation(self):
        observation, t = super()._observation(), self.t
        self.t = t - t % self.every
        observation |= {k: v for k, v in super()._observation().items() if k != "state"}
        self.t = t
        return observation


@pytest.mark.parametrize("every", [1, 2])
def test_windows_show_pictures_as_old_as_the_state_and_hold_each_once(every):
    """One window begins on every tick, and both of its observations show what its states were measured with, or the
    last picture before that where a slow camera gives one on every second tick.
    """
    shape = type("Shape", (HalfRate,), {"every": every})
    robot = hil_serl_robot("ram_insertion", lambda name, fake: shape(6, ("wrist_1", "wrist_2")), "f")
    config = load_experiment("hil_serl_template:ram_insertion")
    small = {"capacity": 500, "demo_capacity": 500, "human_capacity": 500, "image_capacity": 500, "prefetch": 0}
    config = dataclasses.replace(
        config, robot=robot, replay=dataclasses.replace(config.replay, **small),
        normaliser=dataclasses.replace(config.normaliser, state=False),
    )  # fmt: skip
    env, sink = registry.make_env(robot), ListSink()
    preprocess = fit_preprocess(config, env.robot_spec, [])
    runner = EpisodeRunner(env, Still(6), sink, config=config, cameras=preprocess.image_keys, clock=SimClock())
    assert runner.run_episode(0).length == shape.SOLVED
    replay = Replay(env.robot_spec, config, preprocess)
    begin = next(r for r in sink.records if isinstance(r, Begin))
    for record in (begin, StepBlock.from_steps(begin.episode_id, sink.steps), sink.last_end):
        replay.insert("s", record)
    batch = replay.sample(np.random.default_rng(0), 400, half="online")
    for observed in (batch.observations, batch.next_observations):
        state = observed["state"][:, 0].astype(int)
        for camera, offset in (("wrist_1", 0), ("wrist_2", 10)):
            picture = observed[f"images/{camera}"][:, 0, 0, 0].astype(int) - offset
            np.testing.assert_array_equal(picture, state // every * every, err_msg=camera)
    assert set(batch.observations["state"][:, 0].tolist()) == set(range(shape.SOLVED))
    assert replay.stats()["replay/online_frames"] == 2 * (shape.SOLVED // every + 1)
