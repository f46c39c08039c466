"""When the fake ALOHA's scripted human intervenes, for how long, and with which faults."""

import numpy as np
import pytest
from demonstrations import begin_of, helped, joints_of, started

from serl_chunk.config.robots import FakeAlohaConfig, ScriptedHumanConfig
from serl_chunk.robots.fake.env import NO_ARM, FakeAlohaEnv
from serl_chunk.robots.fake.kinematics import RIGHT
from serl_chunk.robots.fake.scripted_human import progress

USUAL = ScriptedHumanConfig()


def env_with(**human):
    return FakeAlohaEnv(FakeAlohaConfig(max_episode_steps=1000, scripted_human=ScriptedHumanConfig(**human)))


@pytest.fixture
def env():
    return env_with()


def begins(env, seeds, ticks=60):
    """The first ticks of a human's in episodes of a policy that does nothing."""
    human, found = env.make_scripted_human(), []
    for seed in range(seeds):
        started(env, human, seed)
        found.append(begin_of(helped(env, human, joints_of(env), ticks)[0]))
    return found


def test_it_interrupts_a_stalled_policy_after_a_reaction_delay(env):
    found = begins(env, 20)
    assert min(found) >= USUAL.stall_ticks + USUAL.reaction_ticks[0] - 1
    assert max(found) <= USUAL.stall_ticks + USUAL.reaction_ticks[1]
    assert len(set(found)) > 5
    assert begins(env, 20) == found
    assert set(begins(env_with(stall_ticks=5, reaction_ticks=(3, 3)), 5)) == {5 + 3 - 1}  # counted from tick 0


def test_a_human_who_misses_occasions_comes_later_or_not_at_all():
    often, half, never = (
        begins(env_with(stall_ticks=10, reaction_ticks=(2, 2), miss_rate=rate), 30) for rate in (0.0, 0.5, 1.0)
    )
    assert (set(often), set(never)) == ({11}, {None})
    assert 5 <= half.count(11) <= 25  # of 30, 15 are expected
    assert {21, 31} & set(half)  # the next occasions


@pytest.mark.parametrize("still_for", [0, USUAL.stall_ticks + USUAL.reaction_ticks[0] - 2])
def test_it_leaves_a_policy_alone_that_makes_progress_or_recovers_within_the_delay(env, still_for):
    human, expert = env.make_scripted_human(), env.make_expert()
    for seed in range(1 if still_for else 10):
        started(env, human, seed)
        expert.reset(seed)
        done = False
        while not done:
            assert human.poll(env.tick, {}, True, None) is None
            done = env.step(joints_of(env)() if env.tick < still_for else expert.act())[2]


def test_it_reacts_to_a_dropped_cube_before_a_stall(env):
    expert = env.make_expert()
    env.reset(seed=0)
    while progress(env) < 1.9 or env.holder != RIGHT:
        env.step(expert.act())
    human = env.make_scripted_human()
    human.reset(0)
    assert human.poll(0, {}, True, None) is None
    home = joints_of(env)()
    home[13] = 1.0
    env.step(home)
    assert env.holder == NO_ARM
    joints = np.array(env.joints)
    joints[7:13] += 0.12  # the arm backs off, so that the cube counts as lost and not as put down
    env.place(joints.tolist(), (0.2, -0.15, 0.02))
    commands, _ = helped(env, human, joints_of(env), USUAL.reaction_ticks[1] + 2)
    assert begin_of(commands) < USUAL.stall_ticks + USUAL.reaction_ticks[0]


def test_it_corrects_then_idles_until_the_policy_decides(env):
    human = env.make_scripted_human()
    started(env, human, 1)
    tick = 0
    while (command := human.poll(tick, {}, True, None)) is None:
        env.step(joints_of(env)())
        tick += 1
    corrections = 0
    while not command.idle:
        corrections += 1
        env.step(command.action)
        command = human.poll(tick + corrections, {}, False, None)
    assert USUAL.correction_ticks[0] <= corrections <= USUAL.correction_ticks[1]
    before = list(env.joints)
    for _ in range(7):
        assert command.idle
        np.testing.assert_array_equal(command.action, joints_of(env)())
        env.step(command.action)
        command = human.poll(0, {}, False, None)
    np.testing.assert_allclose(env.joints, before, atol=1e-5)
    assert [human.poll(tick, {}, True, None) for tick in (0, 1)] == [None, None], "and keeps its hands off"


@pytest.mark.parametrize(("fault_rate", "seeds", "solved"), [(0.0, 10, 10), (1.0, 5, 0)])
def test_corrections_solve_the_task_for_a_policy_that_does_nothing_unless_fumbled(fault_rate, seeds, solved):
    env = env_with(fault_rate=fault_rate)
    human, found = env.make_scripted_human(), 0
    for seed in range(seeds):
        started(env, human, seed)
        found += helped(env, human, joints_of(env), 300 if fault_rate else 600)[1]
    assert found == solved
