"""The optimiser of a network is optax's Adam, but for the rate of encoders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agent_tools import close, drawn, made

from serl_chunk.agents.optimiser import adam
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.base import Optimiser
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.agents.published_qc import PublishedQcConfig

PARAMS = {
    "encoder": {"kernel": np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)},
    "q": {"bias": np.arange(4, dtype=np.float32), "net": {"encoder": {"kernel": np.ones(3, np.float32)}}},
}
GRADS = [jax.tree.map(lambda p, s=s: np.cos(3 * p + s), PARAMS) for s in range(5)]
PLAIN = Optimiser(0.1, 0.1)


def stepped(optimiser):
    @jax.jit
    def step(params, state, gradient):
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimiser.init(PARAMS)
    with jax.numpy_dtype_promotion("standard"):  # in optax
        for gradient in GRADS:
            params, state = step(params, state, gradient)
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
    changed = adam(Optimiser(0.1, 0.01, 3, 9, 0.1, 1.0, 0.95))
    states = adam(PLAIN).init(PARAMS), changed.init(PARAMS), stepped(changed)[1]
    assert len(set(map(jax.tree.structure, states))) == 1


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
    for changes, wanted in (
        ({"critic_lr": 0.01}, [PLAIN, Optimiser(0.01, 0.01)]),
        ({"critic_lr": 0.01, "encoder_lr": 0.001}, [Optimiser(0.1, 0.001), Optimiser(0.01, 0.001)]),
    ):
        assert [AcfqlConfig(lr=0.1, **changes).optimiser(network) for network in ("policy", "critic")] == wanted
    assert PublishedQcConfig(lr=0.1, weight_decay=0.5).optimiser("critic") == PLAIN._replace(weight_decay=0.5)
    pi0 = Pi0Config(lr_warmup=3, lr_cosine=9, weight_decay=0.1, grad_clip=1.0)
    assert BcConfig(lr=0.1, pi0=pi0).optimiser() == PLAIN  # its policy is another one; see test_pi0.py


def test_an_agent_updates_each_network_with_its_own():
    agent = made("acfql", critic_lr=1e-12)
    state = drawn(agent)
    of_critic, (of_policy, _) = jax.jit(
        lambda s: (
            agent._apply_critic_gradient(s, jax.tree.map(jnp.ones_like, s.critic)),
            agent._apply_policy_gradient(s, jax.tree.map(jnp.ones_like, s.policy), {}),
        )
    )(state)
    assert close(of_critic.critic, state.critic, 1e-9)
    assert close(of_policy.policy, jax.tree.map(lambda x: x - 1e-2, state.policy), 1e-5)
