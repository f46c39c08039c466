"""QC-FQL: the one-step policy between its teacher and the critic."""

from __future__ import annotations

import jax
import numpy as np
from agent_tools import build, config_of, critic_gradient, on_device, policy_gradient, same

VARIANT = "published-distill"


def setting(**changes):
    agent = build(config_of(VARIANT, **changes))
    batch = jax.tree.map(lambda x: x[0], on_device(agent.spec))
    return agent, agent.init(jax.random.key(0)), batch, agent.policy_draws(jax.random.key(1), batch)


def gradients(agent, state, batch, draws, **changes):
    return jax.jit(lambda s: policy_gradient(agent, s, batch, draws, **changes)[0])(state)


def test_what_each_part_of_the_loss_trains():
    grads = {}
    for alpha in (0.0, 3.0):
        agent, state, batch, draws = setting(alpha=alpha)
        grads[alpha] = gradients(agent, state, batch, draws)
    assert same(grads[0.0]["flow"], grads[3.0]["flow"])  # the teacher is not drawn towards its pupil
    assert not same(grads[0.0]["onestep"], grads[3.0]["onestep"])
    other = state.replace(critic=jax.tree.map(lambda x: x * 2, state.critic))
    assert same(gradients(agent, other, batch, draws)["flow"], grads[3.0]["flow"])
    assert not same(gradients(agent, other, batch, draws)["onestep"], grads[3.0]["onestep"])
    pretraining = [gradients(agent, s, batch, draws, bc_only=True) for s in (state, other)]
    assert same(*pretraining)  # no critic in it
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(pretraining[0]["onestep"]))


def test_the_critics_loss_reads_the_policy_without_training_it():
    agent, state, batch, _ = setting()
    draws = agent.critic_draws(jax.random.key(1), batch)
    value = lambda **read: critic_gradient(agent, state.replace(**read), batch, draws)[1]["value"]  # noqa: E731
    by_policy, by_target = (lambda p: value(policy=p)), (lambda t: value(target=t))
    for gradient in (jax.grad(by_policy)(state.policy), jax.grad(by_target)(state.target)):
        assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient))
