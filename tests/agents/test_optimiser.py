"""The optimiser of a network is optax's Adam, but for the rate of encoders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agent_tools import build, config_of, fresh, named, on_device

from serl_chunk.agents.optimiser import adam
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.optimiser import Optimiser
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.agents.published_qc import PublishedQcConfig

PARAMS = {
    "encoder": {"kernel": jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)},
    "q": {"bias": jnp.arange(4.0), "net": {"encoder": {"kernel": jnp.ones(3)}}},
}
GRADS = [jax.tree.map(lambda p, s=s: jnp.cos(3.0 * p + s), PARAMS) for s in range(5)]
PLAIN = Optimiser(0.1, 0.1)


def stepped(optimiser):
    params, state = PARAMS, optimiser.init(PARAMS)
    for g in GRADS:
        updates, state = optimiser.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


CASES = {
    "adam": ({}, optax.adam(0.1)),
    "b2": ({"b2": 0.95}, optax.adam(0.1, b2=0.95)),
    "decay": ({"weight_decay": 0.1}, optax.adamw(0.1, weight_decay=0.1)),
    "clip": ({"grad_clip": 0.5}, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))),  # of all together
    "warm-up and cosine": (
        {"lr_warmup": 2, "lr_cosine": 4},
        optax.adam(optax.warmup_cosine_decay_schedule(0.1 / 3, 0.1, 2, 4, 0.01)),
    ),
    "cosine": ({"lr_cosine": 4}, optax.adam(optax.cosine_decay_schedule(0.1, 4, 0.1))),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rate_for_all_is_optaxs_adam(name):
    changes, expected = CASES[name]
    ours, _ = stepped(adam(PLAIN._replace(**changes)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, stepped(expected)[0])


def test_the_state_has_one_tree_whatever_is_set():
    paths = lambda tree: [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]  # noqa: E731
    plain, changed = adam(PLAIN), adam(Optimiser(0.1, 0.01, 3, 9, 0.1, 1.0, 0.95))
    states = plain.init(PARAMS), changed.init(PARAMS), stepped(changed)[1]
    assert paths(states[0]) == paths(states[1]) == paths(states[2])
    assert len(set(map(jax.tree.structure, states))) == 1


def test_a_rate_rises_falls_and_stays():
    params, optimiser = {"w": jnp.zeros(())}, adam(Optimiser(1.0, 1.0, lr_warmup=4, lr_cosine=20))
    state, steps = optimiser.init(params), []
    for _ in range(30):
        updates, state = optimiser.update({"w": jnp.ones(())}, state, params)  # Adam's direction is 1 then
        steps.append(-float(updates["w"]))
    np.testing.assert_allclose(steps[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-4)
    assert (np.diff(steps[4:21]) < 0).all()
    np.testing.assert_allclose(steps[20:], 0.1, rtol=1e-4)


def test_encoders_have_a_rate_of_their_own_wherever_they_are():
    settings = {"lr_warmup": 2, "grad_clip": 0.5, "weight_decay": 0.5}
    found, fast, slow = (
        stepped(adam(Optimiser(*rates, **settings)))[0] for rates in ((0.1, 0.01), (0.1, 0.1), (0.01, 0.01))
    )
    # Weight decay makes a step depend on the earlier ones, which are those of the same rate.
    wanted = {"encoder": slow["encoder"], "q": {"bias": fast["q"]["bias"], "net": slow["q"]["net"]}}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_each_network_has_its_configured_rates():
    assert AcfqlConfig(lr=0.1).optimiser("critic") == PLAIN
    config = AcfqlConfig(lr=0.1, critic_lr=0.01)
    assert (config.optimiser("policy"), config.optimiser("critic")) == (PLAIN, Optimiser(0.01, 0.01))
    config = AcfqlConfig(lr=0.1, critic_lr=0.01, encoder_lr=0.001)
    rates = [config.optimiser(network)[:2] for network in ("policy", "critic")]
    assert rates == [(0.1, 0.001), (0.01, 0.001)]
    assert PublishedQcConfig(lr=0.1, weight_decay=0.5).optimiser("critic") == PLAIN._replace(weight_decay=0.5)
    pi0 = Pi0Config(lr_warmup=3, lr_cosine=9, weight_decay=0.1, grad_clip=1.0)
    assert BcConfig(lr=0.1, pi0=pi0).optimiser() == PLAIN  # its policy is another one; see test_published_pi0.py


def test_an_agent_updates_each_network_with_its_own():
    agent, state = build(config_of("acfql", critic_lr=1e-12)), fresh("acfql")[1]
    critic_before, policy_before = jax.tree.map(np.array, (state.critic, state.policy))
    state, _ = agent.update(state, {}, named(agent, on_device(agent.spec)))
    largest = lambda tree, old: max(  # noqa: E731
        float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(old), strict=True)
    )
    assert largest(state.critic, critic_before) < 1e-9
    assert largest(state.policy, policy_before) > 1e-5
