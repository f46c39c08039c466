"""Each component has its own Adam; what none sets is optax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agent_tools import build, config_of, fresh, named, on_device
from errors import naming

from serl_chunk.agents.optimiser import network_optimiser
from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.config.optimisers import CriticOptimiserConfig, EncoderOptimiserConfig
from serl_chunk.types import ConfigError

PARAMS = {
    "encoder": {"kernel": jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)},
    "q": {"bias": jnp.arange(4.0), "net": {"encoder": {"kernel": jnp.ones(3)}}},
}
GRADS = [jax.tree.map(lambda p, s=s: jnp.cos(3.0 * p + s), PARAMS) for s in range(5)]


def stepped(optimiser, grads=GRADS):
    params, state = PARAMS, optimiser.init(PARAMS)
    for g in grads:
        updates, state = optimiser.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def moved(config, network="critic", grads=GRADS):
    """How far each leaf went, by its path."""
    after, _ = stepped(network_optimiser(config, network), grads)
    paths = jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda a, b: np.asarray(a - b), after, PARAMS))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): value for path, value in paths}


OF_ENCODERS = ("encoder/kernel", "q/net/encoder/kernel")
PLAIN = {
    "adam": ({}, optax.adam(3e-4)),
    "decay": ({"weight_decay": 0.1}, optax.adamw(3e-4, weight_decay=0.1)),
    "clip": ({"grad_clip": 0.5, "lr": 0.1}, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))),
    "warm-up and cosine": (
        {"lr": 0.1, "lr_warmup": 2, "lr_cosine": 4},
        optax.adam(optax.warmup_cosine_decay_schedule(0.1 / 3, 0.1, 2, 4, 0.01)),
    ),
    "cosine": ({"lr": 0.1, "lr_cosine": 4}, optax.adam(optax.cosine_decay_schedule(0.1, 4, 0.1))),
}


@pytest.mark.parametrize("name", PLAIN)
def test_one_optimiser_for_all_is_that_of_optax(name):
    changes, expected = PLAIN[name]
    ours, _ = stepped(network_optimiser(AcfqlConfig(**changes), "policy"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, stepped(expected)[0])


def test_the_state_has_one_tree_whatever_is_set():
    expected = optax.chain(optax.identity(), optax.adam(1e-3)).init(PARAMS)
    changed = AcfqlConfig(
        lr_warmup=3, lr_cosine=9, weight_decay=0.1, grad_clip=1.0,
        encoder_optimiser=EncoderOptimiserConfig(lr=0.1, grad_clip=0.1),
    )  # fmt: skip
    paths = lambda tree: [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]  # noqa: E731
    for config in (AcfqlConfig(), changed):
        assert paths(network_optimiser(config, "critic").init(PARAMS)) == paths(expected)
        assert paths(stepped(network_optimiser(config, "critic"))[1]) == paths(expected)


def test_a_rate_rises_falls_and_stays():
    config = AcfqlConfig(lr=1.0, lr_warmup=4, lr_cosine=20)
    steps = []
    params, optimiser = {"w": jnp.zeros(())}, network_optimiser(config, "policy")
    state = optimiser.init(params)
    for _ in range(30):
        updates, state = optimiser.update({"w": jnp.ones(())}, state, params)  # Adam's direction is 1 then
        steps.append(-float(updates["w"]))
    np.testing.assert_allclose(steps[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-4)
    assert (np.diff(steps[4:21]) < 0).all()
    np.testing.assert_allclose(steps[20:], 0.1, rtol=1e-4)
    rising = AcfqlConfig(lr=1.0, lr_warmup=4)
    np.testing.assert_allclose(moved(rising, grads=GRADS[:1])["q/bias"], 0.2 * moved(
        AcfqlConfig(lr=1.0), grads=GRADS[:1])["q/bias"], rtol=1e-5)  # fmt: skip


def test_encoders_have_their_own_rate_and_decay_in_both_networks():
    config = AcfqlConfig(lr=0.1, encoder_optimiser=EncoderOptimiserConfig(lr=0.01, weight_decay=0.0), weight_decay=0.5)
    alone = moved(AcfqlConfig(lr=0.01))
    for network in ("policy", "critic"):
        found, together = moved(config, network), moved(AcfqlConfig(lr=0.1, weight_decay=0.5), network)
        for path, value in found.items():
            np.testing.assert_allclose(value, (alone if path in OF_ENCODERS else together)[path], rtol=1e-5)


def test_an_encoder_is_clipped_with_its_network_unless_it_has_a_norm_of_its_own():
    half = [jax.tree.map(lambda g: 100 * g, GRADS[0]), *GRADS[1:]]
    together = moved(AcfqlConfig(lr=0.1, grad_clip=1.0), grads=half)
    expected, _ = stepped(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), half)
    np.testing.assert_allclose(together["q/bias"], expected["q"]["bias"] - PARAMS["q"]["bias"], rtol=1e-5)

    apart = moved(AcfqlConfig(lr=0.1, encoder_optimiser=EncoderOptimiserConfig(grad_clip=1.0)), grads=half)
    free = moved(AcfqlConfig(lr=0.1), grads=half)
    np.testing.assert_array_equal(apart["q/bias"], free["q/bias"])  # its own is not clipped
    of_encoders = [{"a": g["encoder"]["kernel"], "b": g["q"]["net"]["encoder"]["kernel"]} for g in half]
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    params = {"a": PARAMS["encoder"]["kernel"], "b": PARAMS["q"]["net"]["encoder"]["kernel"]}
    start, state = params, optimiser.init(params)
    for g in of_encoders:
        updates, state = optimiser.update(g, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(apart["encoder/kernel"], params["a"] - start["a"], rtol=1e-4)
    np.testing.assert_allclose(apart["q/net/encoder/kernel"], params["b"] - start["b"], rtol=1e-4)


def test_the_critics_optimiser_is_the_critics_alone():
    config = AcfqlConfig(lr=0.1, lr_warmup=5, critic_optimiser=CriticOptimiserConfig(lr=0.01, lr_warmup=0))
    np.testing.assert_array_equal(moved(config, "policy")["q/bias"], moved(AcfqlConfig(lr=0.1, lr_warmup=5))["q/bias"])
    for path, value in moved(config, "critic").items():  # encoders follow their network
        np.testing.assert_array_equal(value, moved(AcfqlConfig(lr=0.01))[path])


def test_an_agent_updates_each_network_with_its_own():
    config = config_of("acfql", critic_optimiser=CriticOptimiserConfig(lr=1e-12))
    agent, state = build(config), fresh("acfql")[1]
    critic_before, policy_before = jax.tree.map(np.array, (state.critic, state.policy))
    state, _ = agent.update(state, {}, named(agent, on_device(agent.spec)))
    largest = lambda tree, old: max(  # noqa: E731
        float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(old), strict=True)
    )
    assert largest(state.critic, critic_before) < 1e-9
    assert largest(state.policy, policy_before) > 1e-5


WRONG = [
    (lambda: AcfqlConfig(lr_warmup=5, lr_cosine=5), ("agent.lr_cosine", 5, "agent.lr_warmup=5")),
    (lambda: AcfqlConfig(lr_warmup=-1), ("agent.lr_warmup", -1, 0)),
    (lambda: CriticOptimiserConfig(lr=0.0), ("agent.critic_optimiser.lr", 0.0)),
    (
        lambda: AcfqlConfig(lr_cosine=5, critic_optimiser=CriticOptimiserConfig(lr_warmup=7)),
        ("agent.critic_optimiser.lr_cosine", "agent.critic_optimiser.lr_warmup=7", 5),
    ),
    (
        lambda: AcfqlConfig(encoder_optimiser=EncoderOptimiserConfig(lr_warmup=9, lr_cosine=3)),
        ("agent.encoder_optimiser.lr_cosine", 9, 3),
    ),
]


@pytest.mark.parametrize(("make", "told"), WRONG)
def test_bad_schedules_are_named(make, told):
    with pytest.raises(ConfigError, match=naming(*told)):
        make()
