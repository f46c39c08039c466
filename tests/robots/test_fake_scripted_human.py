"""When the fake ALOHA's scripted human intervenes, for how long, and with which faults."""

import numpy as np
import pytest
from demonstrations import begin_of, helped, joints_of, started

from serl_chunk.config.robots import FakeAlohaConfig, ScriptedHumanConfig
from serl_chunk.robots.fake.env import FakeAlohaEnv

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
