"""gym_adapter: HIL-SERL's shape of environment, LeRobot's names, plain gymnasium ones, and what they may bring."""

import contextlib
import ctypes
import enum
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from demonstrations import helped
from errors import naming
from gymnasium import spaces
from hil_serl_shape import HilSerlShape

from serl_chunk.config.robots import GymConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots import registry
from serl_chunk.robots.base import InterventionCommand
from serl_chunk.robots.gym_adapter import GymAdapter
from serl_chunk.robots.gym_spaces import ObservationLayout
from serl_chunk.types import ConfigError, DataError, success_step

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "your_robot.md"
LIMIT = 12
ZERO, POLICY = np.zeros(7), np.full(7, 0.5)  # what the policy commands
HUMAN = np.array([0.1, 0, 0, 0, 0, 0, -0.95])  # float64, as SpaceMouse wrappers give it


class Scripted(HilSerlShape):
    """HIL-SERL's Franka, done (never truncated) at its time limit; a script of `info` plays what happens at a step."""

    max_episode_length = LIMIT

    def __init__(self, script=None):
        super().__init__(7, ("wrist_1", "wrist_2"))
        self.script, self.closed, self.buffers = script or {}, False, {}

    def _observation(self):
        for key, value in super()._observation().items():  # in one buffer for all, as camera drivers have
            self.buffers.setdefault(key, value)[:] = value
        return dict(self.buffers)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation, {**info, **self.script.get(0, {})}

    def step(self, action):
        self.t += 1
        info = {"succeed": False, **self.script.get(self.t, {})}
        done = self.t >= LIMIT or info["succeed"] or info.pop("esc", False)
        return self._observation(), int(info["succeed"]), done and not info.pop("goes on", False), False, info

    def close(self):
        self.closed = True


class SpacesEnv(gymnasium.Env):
    """An environment of given spaces that answers with samples of them."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Box(-1, 1, (2,), np.float32)
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.received.append(action)
        return self.observation_space.sample(), 0.5, False, False, {}


def hil_serl_config(script=None, **changes):
    given = {"max_episode_steps": LIMIT, "grippers": (6,), **changes}
    return GymConfig(make=lambda fake_env: Scripted(script), robot_name="franka", **given)


def scripted(script=None, **changes):
    """An adapter that was reset, of an environment that plays a script."""
    env = GymAdapter(hil_serl_config(script, **changes))
    env.reset()
    return env


def ends(env, ticks):
    """(terminated, truncated) of so many ticks; the last is expected to be the only end."""
    found = [env.step(ZERO)[2:4] for _ in range(ticks)]
    assert set(found[:-1]) <= {(False, False)}
    return found[-1]


def adapt(observation_space, action_space=None, **changes):
    return GymAdapter(GymConfig(make=lambda fake_env: SpacesEnv(observation_space, action_space), **changes))


def box(*shape, dtype=np.float32):
    return spaces.Box(0, 255, shape, dtype) if dtype == np.uint8 else spaces.Box(-9, 9, shape, dtype)


def equal(found, expected):
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.float32(expected))


def test_the_learner_asks_for_the_fake_and_closes_it_and_a_factory_gets_whether_it_only_evaluates():
    made = []

    def make(fake_env, evaluating):
        made.append((fake_env, evaluating, Scripted()))
        return made[-1][2]

    config = GymConfig(make=make, max_episode_steps=LIMIT)
    registry.robot_spec(config)
    for evaluating in (False, True):
        registry.make_env(config, evaluating=evaluating)
    assert [each[:2] for each in made] == [(True, False), (False, False), (False, True)]
    assert made[0][2].closed


def test_an_episode_end_to_end():
    env = scripted({3: {"intervene_action": HUMAN, "grasp_penalty": -0.02}, 5: {"succeed": True}})
    steps = [env.step(POLICY) for _ in range(5)]
    for i, (observation, *_) in enumerate(steps):
        assert env.observation_space.contains(observation)
        equal(observation["state"], np.full(19, i + 1))
    # The penalty is the grasp critic's, who counts it itself.
    found = [(s[1], s[2], s[3], s[4]["success"]) for s in steps]
    assert found == [(0.0, False, False, False)] * 4 + [(1.0, True, False, True)]
    equal(steps[2][4]["intervene_action"], HUMAN)
    equal(steps[2][4]["executed_action"], HUMAN)
    assert "intervene_action" not in steps[1][4]
    equal(steps[1][4]["executed_action"], POLICY)


@pytest.mark.parametrize(("tick", "info", "end"), [
    (LIMIT, {}, (False, True)), (LIMIT, {"succeed": True}, (True, False)), (LIMIT, {"failure": True}, (True, False)),
    (LIMIT, {"failure": True, "goes on": True}, (True, False)), (3, {"failure": True}, (True, False)),
    (2, {"esc": True}, (True, False)), (2, {"rerecord_episode": True, "esc": True}, (False, True)),
])  # fmt: skip
def test_its_time_limit_is_a_truncation_and_a_true_end_stays_one(tick, info, end):
    """An episode that is to be recorded again says nothing of the task."""
    assert ends(scripted({tick: info}), tick) == end


def test_frames_are_of_the_present_moment_and_safe_to_keep():
    env = GymAdapter(hil_serl_config())
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.read_images()
    env.reset()
    kept = env.read_images(["wrist_2"])
    assert list(kept) == ["images/wrist_2"]
    env.step(ZERO)
    now = env.read_images()
    assert {k: (v.shape, int(v.min()), int(v.max())) for k, v in now.items()} == {
        "images/wrist_1": ((128, 128, 3), 1, 1),
        "images/wrist_2": ((128, 128, 3), 11, 11),
    }
    assert (kept["images/wrist_2"] == 10).all()
    with pytest.raises(ConfigError, match=naming("franka", "side", "wrist_1", "wrist_2")):
        env.read_images(["side"])
    always = registry.make_env(hil_serl_config(), images="always")
    for observation in (always.reset()[0], always.step(ZERO)[0]):
        assert always.observation_space.contains(observation)


def test_a_human_acted_on_what_was_seen_before_the_step_which_is_copied_where_it_was_not_requested():
    env = scripted({2: {"intervene_action": POLICY}, 3: {"intervene_action": POLICY}})
    env.step(ZERO)
    assert env.step(ZERO)[4]["intervene_images"] == {}  # the cameras are not read
    env.reset()
    env.read_images(["wrist_2"])
    assert "intervene_images" not in env.step(ZERO)[4]
    seen = env.step(ZERO)[4]["intervene_images"]
    assert (env.read_images(["wrist_1"])["images/wrist_1"] == 2).all()
    assert env.step(ZERO)[4]["intervene_images"] == {}, "requested just now"
    assert {k: int(v.max()) for k, v in seen.items()} == {"images/wrist_1": 1, "images/wrist_2": 11}


class TeleopEvents(enum.Enum):
    """LeRobot's names of what an operator does; its processors use the members themselves as keys."""

    IS_INTERVENTION = "is_intervention"
    SUCCESS = "success"


@pytest.mark.parametrize(
    "human",
    [
        {"is_intervention": True, "teleop_action": HUMAN},  # gym-hil 0.1.14
        {"is_intervention": True, "action_intervention": HUMAN},  # its versions before, LeRobot's before 0.4
        {TeleopEvents.IS_INTERVENTION: True, "teleop_action": HUMAN},
        {"is_intervention": np.array([True]), "teleop_action": HUMAN[None]},
        {"intervene_flag": np.ones(1), "intervene_action": HUMAN},
    ],  # RLinf's
)
def test_an_intervention_in_lerobots_words_is_the_humans_command(human):
    """A flag on every tick, beside an action that is the human's where it is true."""
    env = scripted({1: {"is_intervention": False, "teleop_action": POLICY}, 2: human})
    own, theirs = env.step(POLICY)[4], env.step(POLICY)[4]
    assert "intervene_action" not in own
    equal(own["executed_action"], POLICY)
    equal(theirs["intervene_action"], HUMAN)
    equal(theirs["executed_action"], HUMAN)
    assert theirs["intervene_images"] == {}


@pytest.mark.parametrize("info", [
    {"intervene_flag": np.zeros(1), "intervene_action": HUMAN}, {"intervene_action": None}, {"is_intervention": None},
    {"humanoid_height": 1}, {"discrete_penalty": 1}, {"distance_to_human": 1}, {"overtaken": 1}, {3: 1},
])  # fmt: skip
def test_what_says_that_no_human_acts_is_none_and_other_keys_pass(info):
    passed = scripted({1: info}).step(POLICY)[4]
    assert "intervene_action" not in passed
    assert all(passed[key] == 1 for key, value in info.items() if isinstance(value, int))


@pytest.mark.parametrize(
    "info",
    [
        {"next.success": True, "succeed": False, "esc": True},
        {TeleopEvents.SUCCESS: True, "succeed": False},
        {"succeed": True, "next.success": False},
    ],  # gym-hil's, where the operator pressed nothing
)
def test_an_operators_success_and_the_environments_own_are_success(info):
    env = scripted({3: info})
    found = [env.step(POLICY) for _ in range(3)]
    assert [s[4]["success"] for s in found] == [False, False, True]
    assert found[-1][2:4] == (True, False)


@pytest.mark.parametrize(
    ("info", "named"),
    [({"is_intervention": True}, ('info["is_intervention"]', "teleop_action", "intervene_action")),
     # There on the policy's ticks too, in gym-hil: without the flag nothing tells whose it is.
     *(({key: HUMAN}, (f'info["{key}"]', "franka", 'info["is_intervention"]'))
       for key in ("teleop_action", "action_intervention")),
     *(({"is_intervention": True, "teleop_action": bad}, ('info["teleop_action"]', "franka", 7))
       for bad in ({"shoulder": 1.0}, "left")),
     ({"intervene_action": np.zeros(6)}, ('info["intervene_action"]', "franka", 7)),
     # Before a human's first tick, too: what is not understood must not wait for it.
     *(({key: value}, (f'info["{key}"]', "franka", "is_intervention", "intervene_action")) for key, value in (
       ("intervened", False), ("human_action", HUMAN), ("is_human", False), ("teleop_command", HUMAN),
       ("take_over", 0), ("takeover", True), ("HumanIntervention", True)))],
)  # fmt: skip
def test_an_intervention_that_is_not_understood_is_refused_also_where_a_reset_reports_it(info, named):
    with pytest.raises(DataError, match=naming(*named)):
        scripted({1: info}).step(POLICY)
    with pytest.raises(DataError, match=naming('info["human_control"]', "franka")):
        scripted({0: {"human_control": False}})


def test_actions_are_clipped_to_the_box_in_its_own_type():
    env = adapt(box(3), spaces.Box(np.array([0.1, -2.0]), np.array([0.7, 3.0]), dtype=np.float64))
    env.reset()
    info = env.step(np.array([-5.0, 5.0], np.float32))[4]
    (seen,) = env.env.unwrapped.received
    assert seen.dtype == np.float64
    assert env.env.action_space.contains(seen)  # float32(0.1) > 0.1 > float32(0.1) - eps: bounds hold exactly
    equal(info["executed_action"], [0.1, 3.0])
    for bad in (np.zeros(3), np.array([np.nan, 0])):
        with pytest.raises(DataError, match=naming("action", "gym", 2)):
            env.step(bad)


def test_a_dictionary_of_actions_is_one_vector_of_which_integers_are_rounded():
    arm, inner = spaces.Box(-1, 1, (2,), np.float64), spaces.Dict(b=spaces.Box(0, 255, (2,), np.uint8))
    env = adapt(box(3), spaces.Dict({"z": inner, "arm": arm}))
    env.reset()
    info = env.step(np.array([0.25, -7, 3.7, 300], np.float32))[4]
    equal(info["executed_action"], [0.25, -1, 4, 255])
    (seen,) = env.env.unwrapped.received
    assert (seen["arm"].tolist(), seen["z"]["b"].tolist()) == ([0.25, -1], [4, 255])
    assert (env.robot_spec.action_low, env.robot_spec.action_high) == ((-1, -1, 0, 0), (1, 1, 255, 255))
    human = {"arm": np.ones(2), "z": {"b": np.array([1, 2], np.uint8)}}
    env.env.step = lambda action: (env.env.last, 0.0, False, False, {"intervene_action": human})
    equal(env.step(np.zeros(4))[4]["intervene_action"], [1, 1, 1, 2])


@pytest.mark.parametrize("human", [{}, {"intervene_action": POLICY}])
def test_the_environments_report_of_what_it_executed_wins(human):
    info = scripted({1: {"executed_action": np.full(7, 0.25), **human}}).step(np.ones(7))[4]
    equal(info["executed_action"], np.full(7, 0.25))


def test_vectors_are_concatenated_in_sorted_order_and_images_may_have_a_dictionary():
    cameras = spaces.Dict({"top": box(6, 8, 3, dtype=np.uint8), "left": box(1, 4, 4, 3, dtype=np.uint8)})
    inner = spaces.Dict({"pose": box(2), "force": box(3)})
    flat = {"z": box(1), "a": box(2, dtype=np.float64), "scalar": box()}
    env = adapt(spaces.Dict({**flat, "state": inner, "images": cameras}))
    observation, _ = env.reset()
    raw = env.env.unwrapped.last
    parts = [raw["a"], [raw["scalar"]], raw["state"]["force"], raw["state"]["pose"], raw["z"]]
    equal(observation["state"], np.concatenate(parts))
    assert env.robot_spec.state_dim == 9
    frames = env.read_images()
    assert {k: v.shape for k, v in frames.items()} == {"images/left": (4, 4, 3), "images/top": (6, 8, 3)}
    np.testing.assert_array_equal(frames["images/top"], raw["images"]["top"])


class OldArm(SpacesEnv):
    """Old gym's: `reset` takes nothing and returns an observation, `step` returns four values."""

    def __init__(self):
        super().__init__(box(3))

    def reset(self):
        return super().reset()[0]

    def step(self, action):
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class OldStep(OldArm):
    def reset(self, *, seed=None, options=None):
        return SpacesEnv.reset(self, seed=seed)


class OldReset(OldArm):
    def reset(self, *, seed=None, options=None):
        return super().reset()

    step = SpacesEnv.step


class Wrappers:
    """Those of docs/your_robot.md."""

    exec(re.search(r"# wrappers.py\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)[1])


def printed(error):
    """The code in an error: from `env... = ` to where it is a statement."""
    code = str(error)[re.search(r"env\S* = ", str(error)).start() :]
    for end in (found.end() for found in re.finditer(r"\)", code)):
        with contextlib.suppress(SyntaxError):
            return compile(code[:end], "printed", "exec")
    raise AssertionError(code)


def seen(**entries):
    return SpacesEnv(spaces.Dict(state=box(3), **entries))


def acted(space):
    return SpacesEnv(box(3), space)


def camera(convert, key="view"):
    return lambda env: Wrappers.AsCamera(env, key, convert)


def wrapped(func, box):
    return lambda env: gymnasium.wrappers.TransformAction(env, func, box)


HUGE = float(np.finfo(np.float32).max)
OLD = ("old gym", "terminated", "OldGym")
old_gym = lambda env: Wrappers.OldGym(env.unwrapped)  # noqa: E731
REMEDIES = [  # an environment, what its error names, and the remedy; None: the code that the error prints
    (lambda: acted(spaces.Discrete(3)), ("Box", "Discrete(3)"), None),
    (lambda: acted(spaces.Discrete(3, start=2)), ("Discrete(3, start=2)",), None),
    (lambda: acted(spaces.MultiBinary(2)), ("MultiBinary(2)", "gymnasium.wrappers.TransformAction"),
     wrapped(lambda a: (a > 0.5).astype(np.int8), box(2))),
    (lambda: acted(spaces.Dict(arm=box(2), grip=spaces.Discrete(2))), ("action 'grip'", "Discrete(2)"),
     wrapped(lambda a: {"arm": a[:2], "grip": int(a[2] > 0)}, box(3))),
    (lambda: acted(box(2, 3)), ("(2, 3)", "several actions per step"), None),
    (lambda: acted(spaces.Box(-np.inf, np.inf, (2,))), ("Box(-inf, inf, (2,), float32)",), None),
    (lambda: acted(spaces.Box(-HUGE, HUGE, (2,), np.float64)), ("finite limits", "float64"), None),
    (lambda: acted(spaces.Dict(arm=box(2), hand=spaces.Dict(grip=spaces.Box(0, np.inf, (1,), np.int32)))),
     ("action 'hand/grip'", "int32"), None),
    *((lambda entry=entry: seen(view=entry), ("'view'", kind, "(H, W, 3)"), way)
      for entry, kind, convert in (
        (spaces.Box(0, 9000, (48, 64), np.uint16), "depth image", Wrappers.depth_frame),
        (spaces.Box(0, 9, (48, 64), np.float32), "depth image", Wrappers.depth_frame),
        (spaces.Box(0, 9, (48, 64, 1), np.float32), "depth image", Wrappers.depth_frame),
        (spaces.Box(0, 255, (1, 48, 64), np.uint8), "grey image", Wrappers.depth_frame),
        (spaces.Box(0, 255, (48, 64, 4), np.uint8), "picture", lambda image: image[..., :3]),
        (spaces.Box(0, 255, (3, 48, 64), np.uint8), "picture", lambda image: image.transpose(1, 2, 0)),
        (spaces.Box(0, 1, (48, 64, 3), np.float32), "picture", lambda image: np.uint8(image * 255)),
      ) for way in (None, camera(convert))),
    (lambda: seen(depth=box(8, 8)), ("'depth'", "depth image"), None),
    (lambda: seen(past=box(4, 3)), ("'past'", "(4, 3)", "obs_horizon"), None),
    (lambda: seen(mode=spaces.Discrete(2)), ("'mode'", "Discrete"), None),
    (lambda: seen(mode=spaces.Discrete(2), top=box(8, 8, 3, dtype=np.uint8)), ("'mode'", "['state', 'top']"), None),
    (lambda: seen(goal=type("Words", (spaces.Space,), {"sample": lambda self, **_: 0})()), ("'goal'", "Words"), None),
    (lambda: SpacesEnv(box(4, 3)), ("(4, 3)", "obs_horizon"), None),
    (lambda: SpacesEnv(spaces.Discrete(5)), ("Discrete",), None),
    (lambda: SpacesEnv(box(8, 8, 3, dtype=np.uint8)), ("state", "vector", "constant"),
     lambda env: Wrappers.Keyed(env, "image")),
    *((make, OLD, old_gym) for make in (
        OldArm, OldStep, OldReset, lambda: gymnasium.wrappers.TimeLimit(OldArm(), 9),
        lambda: gymnasium.wrappers.TimeLimit(OldStep(), 9))),
    (lambda: SimpleNamespace(**{name: getattr(OldArm(), name) for name in ("observation_space", "action_space", "reset",
     "step")}), ("robot.make", "gymnasium.Env", "SimpleNamespace", "OldGym"), lambda env: Wrappers.OldGym(env)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "named", "remedy"), REMEDIES)
def test_each_remedy_works(make, named, remedy):
    env = make()

    def use():
        adapter = GymAdapter(GymConfig(make=lambda fake_env: env))
        adapter.reset(seed=0)
        adapter.step(adapter.action_space.sample())

    with pytest.raises(ConfigError, match=naming(*named)) as raised:
        use()
    if remedy is None:
        scope = {"env": env, "gymnasium": gymnasium}
        exec(printed(raised.value), scope)
        env = scope["env"]
    else:
        env = remedy(env)
    use()


@pytest.mark.parametrize(
    ("rewards", "info", "success"),
    [((0, 0, 1), {}, True), ((-1, 0, 10), {}, True), ((0.3, 0.9, 1), {}, True), ((0, 0, 1), {"success": False}, False),
     ((0.5, 0.9, 1.2), {}, False), ((1, 1, 1), {}, False), ((0, 1.2, 2), {}, False), ((0, 0, 0.5), {}, False),
     ((0, 0, 1), {"failure": True}, False)],
)  # fmt: skip
def test_a_terminating_reward_marks_a_success_by_the_rule_of_data_and_is_warned_of_once(rewards, info, success, caplog):
    env = adapt(box(3))
    for _ in range(2):
        env.reset()
        given = iter(rewards)
        env.env.step = lambda action: (env.env.last, reward := next(given), reward == rewards[-1], False, info)  # noqa: B023
        found = [env.step(np.zeros(2))[4]["success"] for _ in rewards]
        assert found == [False] * (len(rewards) - 1) + [success] or rewards[0] == rewards[-1]
    if not info:
        assert success == (success_step(rewards) == len(rewards) - 1)
    assert sum("info['success']" in line for line in caplog.messages) == (not info and max(rewards) >= 1)


def test_an_environment_that_breaks_its_word_is_named():
    layout = ObservationLayout.of(spaces.Dict({"state": box(3), "top": box(8, 8, 3, dtype=np.uint8)}))
    for read, observation, named in (
        (layout.state, {"state": np.zeros(4)}, ("state", 3, 4)),
        (layout.state, {"state": np.array([0, np.nan, 0])}, ("state[1]", "nan")),
        (layout.state, {"state": "three"}, ("not numbers", "vectors state")),
        (layout.state, {}, ("lacks 'state'",)),
        (layout.frames, {"top": np.zeros((8, 8, 3))}, ("top", "uint8", "float64")),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            read(observation)


def test_frames_have_the_numbers_that_the_environment_gives():
    numbers = {tick: {"frame_numbers": {"left/side": 70 + tick // 2}} for tick in range(4)}
    env = GymAdapter(hil_serl_config({**numbers, 4: {}, 5: {"frame_numbers": {"left/side": "71"}}}))
    assert env.frame_numbers() == {}
    env.reset(seed=0)
    found = [env.frame_numbers()]
    for _ in range(4):
        env.step(ZERO)
        found.append(env.frame_numbers())
    assert found == [*({"left_side": n} for n in (70, 70, 71, 71)), {}]
    with pytest.raises(DataError, match=naming('info["frame_numbers"]', "'71'")):
        env.step(ZERO)


class Helper:
    """A demonstrator, and a human who commands what the environment was told."""

    def __init__(self, env):
        self.env = env

    def reset(self, seed):
        assert self.env.t == 0  # the environment's reset came first

    def act(self):
        return np.full(7, 0.1, np.float32)

    def poll(self, tick, observation, decision_tick, last):
        return InterventionCommand(self.act()) if tick else None

    def close(self):
        pass


def test_the_environments_own_expert_human_and_states_are_used_through_its_wrappers():
    inner = Scripted()
    inner.init_states = True  # of another meaning, as LeRobot's
    assert registry.make_env(GymConfig(make=lambda fake_env: inner, max_episode_steps=LIMIT)).init_states == ()
    inner.init_states, inner.tasks, inner.task = ["left", "right"], ["push", "lift"], "lift"
    inner.make_expert = inner.make_scripted_human = lambda: Helper(inner)
    wrapped = gymnasium.wrappers.OrderEnforcing(inner)  # gymnasium's wrappers pass no attributes on
    env = registry.make_env(GymConfig(make=lambda fake_env: wrapped, max_episode_steps=LIMIT, grippers=(6,)))
    expert, human = registry.make_expert(env), make_intervention("scripted", env)
    assert env.init_states == ("left", "right")
    env.reset(seed=3)
    assert (env.tasks, env.task) == (("push", "lift"), "lift")
    for inner.task, options in (("lift", {"task": "push"}), ("juggle", None), (None, None)):
        with pytest.raises(ConfigError, match=naming("attribute task", inner.task, "push", "options")):
            env.reset(seed=3, options=options)
    inner.task = "push"
    env.reset(seed=3, options={"task": "push"})
    for helper in (expert, human):
        helper.reset(3)
    equal(expert.act(), np.full(7, 0.1))
    commands, _ = helped(env, human, lambda: ZERO, 3)
    assert [c is not None for c in commands] == [False, True, True]
    assert make_intervention("none", env) is None


MODEL = "<mujoco><worldbody><light pos='0 0 3'/><geom type='sphere' size='1'/></worldbody></mujoco>"
EXPERIMENT = f'''
import mujoco
import numpy as np
from gymnasium.envs.classic_control import PendulumEnv

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig


class Rendering(PendulumEnv):
    """Draws a frame when it is made (gym-hil's habit), or at its resets; it is its own expert."""

    def __init__(self, when):
        super().__init__()
        if when == "made":
            self.draw()

    def draw(self):
        model = mujoco.MjModel.from_xml_string("""{MODEL}""")
        with mujoco.Renderer(model, 16, 16) as renderer:
            renderer.update_scene(mujoco.MjData(model))
            assert renderer.render().shape == (16, 16, 3)

    def reset(self, **options):
        self.draw()
        return super().reset(**options)

    def step(self, action):
        return super().step(action)[0], 1.0, True, False, {{"succeed": True}}

    def make_expert(self):
        return type("Expert", (), {{"reset": lambda self, seed: None, "act": lambda self: np.zeros(1, np.float32)}})()


def experiment(when):
    return ExperimentConfig("rendering", GymConfig(make=lambda fake_env: Rendering(when), max_episode_steps=12))
'''
LEARNER = ("--exp_name", "rendering.py:made", "--learner", "--debug", "--demo_path", "nothing", "--insecure")
RECORD = ("record", "--exp_name", "rendering.py:reset", "--policy", "scripted", "--n_demos", "1", "--out", "demos")


def serl_chunk(folder, *arguments, **environment) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mujoco")
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
