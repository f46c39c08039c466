"""Imitation from joints that are moved, with targets that stay (`agent.bc_joint_noise`)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agent_tools import (
    FLOW,
    PREFIX,
    build,
    config_of,
    critic_gradient,
    imitation_gradient,
    one_batch,
    policy_gradient,
    same,
)

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.loader import load_experiment
from serl_chunk.robots.registry import make_env


def shifted(agent):
    """A batch with shifts, and the same windows with these added to state and actions."""
    rng, batch = np.random.default_rng(3), one_batch(agent)
    state = np.asarray(batch.observations["state"])
    of_state = rng.normal(size=state.shape).astype(np.float32)
    of_actions = rng.normal(size=batch.actions.shape).astype(np.float32)
    added = batch._replace(observations={"state": state + of_state}, actions=batch.actions + of_actions)
    return batch._replace(bc_state_shift=of_state, bc_action_shift=of_actions), added


@pytest.mark.parametrize("variant", ["bc", "bc-gaussian", "decoupled", "acrlpd"])
def test_imitation_sees_what_the_shifts_make_of_a_batch(variant):
    agent = build(config_of(variant), **(PREFIX if variant == "decoupled" else {}))
    state = agent.init(jax.random.key(0))
    moved, added = shifted(agent)
    loss, grads = imitation_gradient(agent, state, moved)
    expected_loss, expected = imitation_gradient(agent, state, added)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert float(loss) != pytest.approx(float(imitation_gradient(agent, state, one_batch(agent))[0]), rel=1e-3)


def test_critics_see_nothing_of_them():
    agent = build(config_of("acfql", flow=FLOW))
    state = agent.init(jax.random.key(0))
    moved, _ = shifted(agent)
    plain = one_batch(agent)
    draws = agent.critic_draws(jax.random.key(1), plain)
    assert same(*(critic_gradient(agent, state, batch, draws)[0] for batch in (moved, plain)))
    draws = agent.policy_draws(jax.random.key(2), plain)
    metrics = [policy_gradient(agent, state, batch, draws)[1] for batch in (moved, plain)]
    assert float(metrics[0]["actor/bc_loss"]) != float(metrics[1]["actor/bc_loss"])


def test_an_arm_is_shifted_in_its_own_dimensions():
    config = load_experiment("fake_aloha_discrete_gripper")
    agent = make_agent(config, make_env(config.robot).robot_spec)
    batch = one_batch(agent, prev_action=np.zeros((2, 8, agent.spec.action_dim), np.float32))
    shift = np.random.default_rng(0).normal(size=batch.actions.shape).astype(np.float32)
    of_arm = agent.arm_batch(agent.init(jax.random.key(0)), batch._replace(bc_action_shift=shift))
    arm = np.setdiff1d(np.arange(agent.spec.action_dim), agent.grippers)
    assert len(arm) < agent.spec.action_dim
    np.testing.assert_array_equal(of_arm.bc_action_shift, shift[..., arm])
