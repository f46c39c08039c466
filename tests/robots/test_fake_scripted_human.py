import numpy as np
import pytest
from errors import naming

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.robots import FakeAlohaConfig, ScriptedHumanConfig
from serl_chunk.devices.registry import make_intervention
from serl_chunk.robots.fake import scripted_human
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.kinematics import RIGHT
from serl_chunk.robots.fake.scripted_human import progress
from serl_chunk.robots.fake.spec import GRIPPER
from serl_chunk.types import ConfigError

USUAL = ScriptedHumanConfig()
STALL_TICKS, REACTION_TICKS, CORRECTION_TICKS = USUAL.stall_ticks, USUAL.reaction_ticks, USUAL.correction_ticks


@pytest.fixture
def env():
    return FakeAlohaEnv(FakeAlohaConfig(max_episode_steps=1000))


def _stay(env):
    return np.array(env.joints, np.float32)


def _polls(env, human, ticks, decision_every=5):
    """Poll a policy that does nothing; a list of its commands, the environment moved accordingly."""
    said = []
    for tick in range(ticks):
        command = human.poll(tick, {}, tick % decision_every == 0, None)
        said.append(command)
        env.step(_stay(env) if command is None else command.action)
    return said


def test_it_interrupts_a_stalled_policy_after_a_reaction_delay(env):
    human = make_intervention("scripted", env)
    begins = []
    for seed in range(20):
        env.reset(seed=seed)
        human.reset(seed)
        said = _polls(env, human, 60)
        begins.append(next(i for i, s in enumerate(said) if s is not None))
    assert min(begins) >= STALL_TICKS + REACTION_TICKS[0] - 1
    assert max(begins) <= STALL_TICKS + REACTION_TICKS[1]
    assert len(set(begins)) > 5


def test_it_leaves_a_policy_that_makes_progress_alone(env):
    human, expert = env.make_scripted_human(), env.make_expert()
    for seed in range(10):
        env.reset(seed=seed)
        human.reset(seed)
        expert.reset(seed)
        done = False
        while not done:
            assert human.poll(env.tick, {}, True, None) is None
            done = env.step(expert.act())[2]


def test_a_policy_that_recovers_within_the_reaction_delay_keeps_the_robot(env):
    human, expert = env.make_scripted_human(), env.make_expert()
    env.reset(seed=0)
    human.reset(0)
    expert.reset(0)
    for tick in range(STALL_TICKS + REACTION_TICKS[0] - 2):
        assert human.poll(tick, {}, True, None) is None
        env.step(_stay(env))
    done = False
    while not done:
        assert human.poll(env.tick, {}, True, None) is None
        done = env.step(expert.act())[2]


def test_it_reacts_to_a_dropped_cube_before_a_stall(env):
    expert = env.make_expert()
    env.reset(seed=0)
    while progress(env) < 1.9 or env.holder != RIGHT:
        env.step(expert.act())
    human = env.make_scripted_human()
    human.reset(0)
    assert human.poll(0, {}, True, None) is None
    home = _stay(env)
    home[13] = 1.0
    env.step(home)
    assert env.holder == NO_ARM
    away = [0.12] * 6  # the arm backs off, so that the cube counts as lost and not as put down
    joints = np.array(env.joints)
    joints[7:13] += away
    env.place(joints.tolist(), (0.2, -0.15, 0.02))
    said = _polls(env, human, REACTION_TICKS[1] + 2)
    begin = next(i for i, s in enumerate(said) if s is not None)
    assert begin < STALL_TICKS + REACTION_TICKS[0]


def test_it_corrects_then_idles_until_the_policy_decides(env):
    env.reset(seed=1)
    human = env.make_scripted_human()
    human.reset(1)
    tick = 0
    while (command := human.poll(tick, {}, True, None)) is None:
        env.step(_stay(env))
        tick += 1
    corrections = 0
    while not command.idle:
        corrections += 1
        env.step(command.action)
        command = human.poll(tick + corrections, {}, False, None)
    assert CORRECTION_TICKS[0] <= corrections <= CORRECTION_TICKS[1]
    before = list(env.joints)
    for _ in range(7):
        assert command.idle
        np.testing.assert_array_equal(command.action, np.array(env.joints, np.float32))
        env.step(command.action)
        command = human.poll(0, {}, False, None)
    np.testing.assert_allclose(env.joints, before, atol=1e-5)
    assert human.poll(0, {}, True, None) is None
    assert human.poll(1, {}, True, None) is None  # and keeps its hands off


def test_corrections_solve_the_task_for_a_policy_that_does_nothing(env):
    human = env.make_scripted_human()
    solved = 0
    for seed in range(10):
        env.reset(seed=seed)
        human.reset(seed)
        for tick in range(600):
            command = human.poll(tick, {}, tick % 5 == 0, None)
            if env.step(_stay(env) if command is None else command.action)[2]:
                solved += 1
                break
    assert solved == 10


def test_it_is_deterministic(env):
    runs = []
    for _ in range(2):
        env.reset(seed=4)
        human = env.make_scripted_human()
        human.reset(9)
        runs.append(_polls(env, human, 120))
    assert sum(s is not None for s in runs[0]) > CORRECTION_TICKS[0]
    for a, b in zip(*runs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.action, b.action)
            assert a.idle == b.idle


def test_progress_rises_along_a_demonstration(env):
    expert = env.make_expert()
    env.reset(seed=0)
    trace = [progress(env)]
    while not env.step(expert.act())[2]:
        trace.append(progress(env))
    assert trace[0] < 1 < 2 < trace[-1]
    drops = np.maximum.accumulate(trace) - trace
    assert drops.max() < scripted_human.FALL


def _interventions(config, seeds=30, ticks=60):
    """First human tick in episodes of a policy that does nothing; None without intervention."""
    env = FakeAlohaEnv(FakeAlohaConfig(max_episode_steps=1000, scripted_human=config))
    human, begins = env.make_scripted_human(), []
    for seed in range(seeds):
        env.reset(seed=seed)
        human.reset(seed)
        said = _polls(env, human, ticks)
        begins.append(next((i for i, s in enumerate(said) if s is not None), None))
    return begins


def test_the_delay_is_as_configured():
    begins = _interventions(ScriptedHumanConfig(stall_ticks=5, reaction_ticks=(3, 3)))
    assert set(begins) == {5 + 3 - 1}  # counted from tick 0


def test_a_human_who_misses_occasions_comes_later_or_not_at_all():
    often, half, never = (
        _interventions(ScriptedHumanConfig(stall_ticks=10, reaction_ticks=(2, 2), miss_rate=rate))
        for rate in (0.0, 0.5, 1.0)
    )
    assert set(often) == {11}
    assert set(never) == {None}
    at_once = half.count(11)
    assert 5 <= at_once <= 25  # of 30, 15 are expected
    assert {21, 31} & set(half)  # the next occasions


def test_a_fumbled_correction_does_the_opposite_with_the_fingers():
    usual, fumbled = [], []
    for rate, out in ((0.0, usual), (1.0, fumbled)):
        env = FakeAlohaEnv(
            FakeAlohaConfig(scripted_human=ScriptedHumanConfig(stall_ticks=1, reaction_ticks=(0, 0), fault_rate=rate))
        )
        human = env.make_scripted_human()
        env.reset(seed=3)
        human.reset(3)
        while (command := human.poll(0, {}, True, None)) is None:
            env.step(_stay(env))
        out.append(command.action)
    arms = [i for i in range(14) if i not in GRIPPER]
    np.testing.assert_allclose(fumbled[0][list(GRIPPER)], 1 - usual[0][list(GRIPPER)], atol=1e-6)
    assert usual[0][arms].shape == (12,)
    env = FakeAlohaEnv(FakeAlohaConfig(max_episode_steps=1000, scripted_human=ScriptedHumanConfig(fault_rate=1.0)))
    human, solved = env.make_scripted_human(), 0
    for seed in range(5):
        env.reset(seed=seed)
        human.reset(seed)
        solved += any(
            env.step(_stay(env) if (c := human.poll(t, {}, t % 5 == 0, None)) is None else c.action)[2]
            for t in range(300)
        )
    assert solved == 0  # impossible with such hands


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"stall_ticks": 0}, ("robot.scripted_human.stall_ticks", 0, 1)),
        ({"reaction_ticks": (9, 3)}, ("robot.scripted_human.reaction_ticks", "(9, 3)")),
        ({"correction_ticks": (5,)}, ("robot.scripted_human.correction_ticks", "(5,)")),
        ({"speed": (0.5, 1.5)}, ("robot.scripted_human.speed", "(0.5, 1.5)", "(0, 1]")),
        ({"noise": -1}, ("robot.scripted_human.noise", -1, 0)),
        ({"noise": float("inf")}, ("robot.scripted_human.noise", "inf", 0)),
        ({"miss_rate": 1.5}, ("robot.scripted_human.miss_rate", 1.5, "[0, 1]")),
        ({"fault_rate": -0.1}, ("robot.scripted_human.fault_rate", -0.1, "[0, 1]")),
    ],
)
def test_a_scripted_human_that_cannot_be_is_refused(bad, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        ScriptedHumanConfig(**bad)


def test_it_is_set_from_the_command_line():
    config = apply_overrides(
        load_experiment("fake_aloha"),
        [("robot.scripted_human.reaction_ticks", "0,5"), ("robot.scripted_human.fault_rate", "0.2")],
    )
    assert config.robot.scripted_human == ScriptedHumanConfig(reaction_ticks=(0, 5), fault_rate=0.2)
