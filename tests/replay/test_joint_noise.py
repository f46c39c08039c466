"""Batches in which imitation sees joints moved (`agent.bc_joint_noise`)."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import config, feed, normaliser
from coded_replay import RNG, build, coded

from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig


def noisy(noise: float, horizon: int = 6):
    cfg = config(horizon, 4, demo_fraction=0.0)
    return dataclasses.replace(cfg, agent=AcfqlConfig(bc_joint_noise=noise))


def test_shifts_are_those_of_moved_joints_under_the_same_targets():
    """Encoding the moved state and the unchanged targets gives the batch plus its shifts."""
    horizon, norm = 6, normaliser(6)
    replay = build(noisy(0.3, horizon))
    feed(replay, [coded(k) for k in range(10)], RNG(0))
    batch = replay.sample(RNG(0), 4000)
    assert batch.bc_state_shift.dtype == batch.bc_action_shift.dtype == np.float32
    moved = batch.bc_state_shift * norm.state_std
    np.testing.assert_array_equal(moved[:, [0, 2]], 0)  # only state[1] is a joint that an action is relative to
    reach = norm.scale[0, norm.joint == 1].max()
    assert moved[:, 1].std() == pytest.approx(0.3 * reach, rel=0.05)
    state = batch.observations["state"] * norm.state_std + norm.state_mean
    targets = norm.decode(state, batch.actions)
    np.testing.assert_allclose(
        norm.observe(state + moved), batch.observations["state"] + batch.bc_state_shift, rtol=1e-4
    )
    again = norm.encode(state + moved, targets)
    np.testing.assert_allclose(again, batch.actions + batch.bc_action_shift, rtol=1e-4, atol=1e-4)


def test_without_noise_nothing_is_drawn_or_shifted():
    """Windows of a critic that is longer are shifted to their end."""
    cfg = dataclasses.replace(config(2, 4, demo_fraction=0.0), agent=DecoupledConfig(bc_joint_noise=0.1))
    batches = []
    for each in (noisy(0.0), noisy(0.3), cfg):
        replay = build(each)
        feed(replay, [coded(k) for k in range(3)], RNG(0))
        batches.append(replay.sample(RNG(0), 16, updates=2))
    plain, moved, longer = batches
    assert (plain.bc_state_shift, plain.bc_action_shift) == (None, None)
    assert moved.bc_state_shift.shape == (2, 16, 3)
    assert moved.bc_action_shift.shape == (2, 16, 6, 2)
    np.testing.assert_array_equal(plain.actions, moved.actions)  # the windows that are drawn are the same
    assert longer.bc_action_shift.shape == longer.actions.shape == (2, 16, 4, 2)
