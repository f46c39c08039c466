"""Which device moves which arm, and what is refused before anything moves."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from actor_helpers import LineEnv
from errors import naming
from human_desk import Clock, Mouse

from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.operator import DEVICES, DeviceConfig
from serl_chunk.config.robots import FakeAlohaConfig, FakeSingleArmConfig, GymConfig
from serl_chunk.devices import human, operator
from serl_chunk.devices.operator import make_human
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.arms import fake_aloha_arms
from serl_chunk.robots.registry import make_env
from serl_chunk.types import STATE, ConfigError, RobotSpec
from serl_chunk_robot.devices import spacemouse
from serl_chunk_robot.geometry.kinematics import Arms, Chain, Link


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    made = functools.partial(human.HumanIntervention, now=lambda: clock.now)
    monkeypatch.setattr(operator, "HumanIntervention", made)
    return clock


@pytest.fixture
def mice(clock, monkeypatch) -> dict[str, Mouse]:
    """Mice that are opened, by path, in place of real ones."""
    opened: dict[str, Mouse] = {}

    def open_mice(paths=(), count=1):
        assert count == max(1, len(paths))
        for path in paths or ("the only one",):
            opened[path] = Mouse(path, clock)
        return list(opened.values())

    monkeypatch.setattr(spacemouse, "open_mice", open_mice)
    return opened


def experiment(robot, kind: str = "spacemouse", **device) -> ExperimentConfig:
    return ExperimentConfig("x", robot, actor=ActorConfig(intervention=kind), device=DeviceConfig(**device))


class Robot:
    """The robot of a configuration, whose joints go where they are commanded, and the human at it."""

    def __init__(self, config: ExperimentConfig, clock: Clock) -> None:
        self.env, self.clock = make_env(config.robot), clock
        self.source = make_intervention(config.actor.intervention, self.env, config)
        observation, _ = self.env.reset(seed=1)
        self.state = np.array(observation[STATE])
        spec = self.env.robot_spec
        measured = np.array(spec.joint_of_action)
        self.command = np.where(measured >= 0, self.state[np.maximum(measured, 0)], 0.0).astype(np.float32)
        self.source.reset(0)

    def run(self, ticks: int):
        dims = None
        for _ in range(ticks):
            self.clock.now += self.env.robot_spec.dt
            given = self.source.poll(0, {STATE: self.state}, False, self.command)
            if given is not None:
                self.command, dims = given.action, given.dims
                self.state[: len(self.command)] = self.command
        return dims


def test_one_mouse_moves_the_first_arm_of_the_fake_aloha(mice, clock):
    robot = Robot(experiment(FakeAlohaConfig(), translation=0.1), clock)
    robot.run(20)
    start = robot.command.copy()
    mice["the only one"].push = 1.0
    assert robot.run(50).tolist() == [True] * 7 + [False] * 7
    before, after = (fake_aloha_arms().tip(0, q.astype(float))[0][:3, 3] for q in (start, robot.command))
    np.testing.assert_allclose(after - before, [0.1, 0, 0], atol=6e-3)
    assert (robot.command[7:] == start[7:]).all()


def test_two_mice_move_an_arm_each_and_the_grippers_follow_their_buttons(mice, clock):
    robot = Robot(experiment(FakeAlohaConfig(), paths=("/dev/left", "/dev/right")), clock)
    robot.run(20)
    start = robot.command[6]
    mice["/dev/right"].buttons = (True, False, False)
    mice["/dev/left"].push = -0.5
    assert robot.run(40) is None, "both arms: all of the command"
    assert robot.command[[6, 13]].tolist() == [start, 0.0]


def test_a_deflection_is_the_action_of_an_arm_that_takes_velocities(mice, clock):
    robot = Robot(experiment(FakeSingleArmConfig(), scale=(1.0, 0.5, 1.0, 0.0, 0.0, 1.0)), clock)
    robot.run(5)
    mice["the only one"].push = 0.4
    robot.run(1)
    assert robot.command[0] == np.float32(0.4)


class Pusher(LineEnv):
    """Takes numbers without a meaning that a device has, the last one a gripper's where it has one."""

    def __init__(self, numbers: int = 4, gripper: tuple[float, float] | None = None) -> None:
        low, high = gripper or (-1.0, 1.0)
        lows, highs = (-1.0,) * (numbers - 1) + (low,), (1.0,) * (numbers - 1) + (high,)
        grippers = (numbers - 1,) if gripper else ()
        super().__init__(spec=RobotSpec("odd", 10.0, 3, lows, highs, (-1,) * numbers, grippers, (), 10))


@pytest.mark.parametrize(
    ("gripper", "axes", "closed", "moved"),
    [(None, "x", "low", [1.0]), (None, "y,x", "low", [0, 1.0]), (None, "x,y,z,yaw", "low", [1.0, 0, 0, 0]),
     (None, "pitch,z,yaw,roll,x", "low", [0, 0, 0, 0, 1.0]), ((-1, 1), "", "high", [1.0, 0, 0, 0, 0, 0, 1.0]),
     ((-1, 1), "y,x", "low", [0, 1.0, -1.0]), ((-1, 1), "", "low", [1.0, 0, 0, -1.0]),
     ((0, 1), "x", "low", [1.0, 0.0]), ((0, 1), "x", "high", [1.0, 1.0])],
)  # fmt: skip
def test_axes_move_a_robots_numbers_in_its_order_and_the_first_button_closes_its_gripper(
    mice, clock, gripper, axes, closed, moved
):
    env = Pusher(len(moved), gripper)
    device = {"axes": tuple(filter(None, axes.split(","))), "gripper_closed": closed, "gripper": "press"}
    human = make_human(experiment(GymConfig(make=lambda fake_env: env), **device), env)
    human.reset(0)
    last = np.full(len(moved), 0.5, np.float32)
    for tick in range(40):
        clock.now += 0.1
        if tick >= 10:
            mice["the only one"].push, mice["the only one"].buttons = 1.0, (tick >= 12, False, False)
        given = human.poll(0, {STATE: np.zeros(3, np.float32)}, False, last)
        last = last if given is None else given.action
    np.testing.assert_allclose(last, moved)
    mice["the only one"].buttons = (False,) * 3
    stays = human.poll(0, {STATE: np.zeros(3, np.float32)}, False, last).action
    assert stays[-1] == (0.0 if gripper == (-1, 1) else moved[-1]), "a position is kept"


PANDA = [((0, 0, 0.33), (0, 0, 1)), ((0, 0, 0), (0, 1, 0)), ((0, 0, 0.32), (0, 0, 1)), ((0.08, 0, 0), (0, -1, 0)),
         ((-0.08, 0, 0.38), (0, 0, 1)), ((0, 0, 0), (0, -1, 0)), ((0.09, 0, 0), (0, 0, -1))]  # fmt: skip
LOW, HIGH = (-2.8, -1.7, -2.8, -3.0, -2.8, 0.1, -2.8), (2.8, 1.7, 2.8, -0.1, 2.8, 3.6, 2.8)


@pytest.mark.parametrize("home", [None, (0.4, 0.3, 0.6, -1.8, 0.2, 2.0, 0.3)])
def test_free_joints_of_an_arm_of_seven_move_home_and_its_tip_does_not(mice, clock, monkeypatch, home):
    links = [Link(*link) for link in PANDA]
    arms = Arms([Chain((0, 0, 0), 0.0, links, (0.0, 0.0, -0.2))], [range(7)], 7, home)
    monkeypatch.setattr(operator, "kinematics_of", lambda robot: arms)
    env = LineEnv(spec=RobotSpec("seven", 50.0, 7, LOW, HIGH, tuple(range(7)), (), (), 10))
    goal = (np.array(LOW) + HIGH) / 2 if home is None else np.array(home)
    away, tips = [], []
    for freely in (True, False):
        mice.clear()
        human = make_human(experiment(GymConfig(make=lambda fake_env: env), translation=0.02), env)
        if not freely:
            human._arms[0].control._follower._home = None
        human.reset(0)
        state = np.array([0.3, 0.4, -0.5, -1.6, 0.4, 2.0, 0.2], np.float32)
        for tick in range(220):
            clock.now += 0.02
            mice["the only one"].push = 1.0 if tick >= 20 else 0.0
            given = human.poll(0, {STATE: state}, False, state)
            state = state if given is None else given.action
        tip, jacobian = arms.tip(0, state.astype(float))
        away.append(abs(np.linalg.svd(jacobian)[2][-1] @ (goal - state)))  # along what moves no tip
        tips.append(tip)
    np.testing.assert_allclose(tips[0], tips[1], atol=2e-3)
    assert away[0] < 0.35 * away[1]


def test_a_button_switches_one_mouse_between_the_arms_and_the_dead_mans_is_counted_before_it(mice, clock):
    robot = Robot(experiment(FakeAlohaConfig(), switch_button=0, dead_man=2), clock)
    robot.run(20)
    mouse = mice["the only one"]
    left, right = [True] * 7 + [False] * 7, [False] * 7 + [True] * 7
    for buttons, moved in (((False, True, False), None), ((False, False, True), left), ((True, False, True), right)):
        mouse.buttons, mouse.push = buttons, 0.0
        robot.run(2)
        mouse.push = 0.5
        dims = robot.run(5)
        assert (None if dims is None else dims.tolist()) == moved
        mouse.push = 0.0
        robot.run(30)


@pytest.mark.parametrize(
    ("robot", "kind", "device", "named"),
    [(Pusher, "spacemouse", {}, ("actor.intervention", "odd", 4, "device.axes=x,y,z,roll", "device.gripper_closed")),
     (functools.partial(Pusher, 7), "spacemouse", {}, ("actor.intervention", "odd", 7, "robot.grippers")),
     (Pusher, "spacemouse", {"axes": ("y", "x")}, ("device.axes", "odd", 4, "y,x", "device.gripper_closed")),
     (FakeAlohaConfig, "spacemouse", {"axes": ("y", "x")}, ("device.axes", "fake_aloha", "targets of joints")),
     (LineEnv, "spacemouse", {}, ("actor.intervention", "kinematics", "line")),
     (FakeSingleArmConfig, "spacemouse", {"paths": ("a", "b")}, ("device.paths",)),
     (FakeAlohaConfig, "spacemouse", {"dead_man": 3}, ("device.dead_man", "the only one", "3 buttons", 3, "0 to 2")),
     (FakeAlohaConfig, "spacemouse", {"switch_button": 1, "paths": ("/dev/a", "/dev/b")},
      ("device.switch_button", "a single device", 2)),
     (FakeAlohaConfig, "gello", {"paths": ("left.toml",)}, ("device.paths", "left.toml")),
     *((FakeAlohaConfig, kind, {}, ("device.paths", kind))
       for kind in DEVICES if kind not in ("spacemouse", "leader"))],
)  # fmt: skip
def test_what_the_device_cannot_do_is_refused_and_devices_are_closed(
    mice, tmp_path, monkeypatch, robot, kind, device, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "left.toml").write_text("port = 3\nwheels = 4\n")
    own = getattr(robot, "func", robot) in (Pusher, LineEnv)
    env, config = (robot(), GymConfig(make=lambda fake_env: robot())) if own else (make_env(robot()), robot())
    with pytest.raises(ConfigError, match=naming(*named)) as refused:
        make_intervention(kind, env, experiment(config, kind, **device))
    assert refused.value.parameter == named[0]
    assert all(mouse.closed for mouse in mice.values())
    assert not (mice and own)
