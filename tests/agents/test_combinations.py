"""Options of different pages together: they train, travel, act, are saved, and go on as if nothing had been."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import CAMERA, DISCOUNT, ENCODER, FLOW, UNIT, config_of, make_batches, named, same

from serl_chunk.agents.discrete_gripper import with_gripper
from serl_chunk.agents.registry import builder_of
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.runs.checkpoints import CheckpointStore

HORIZON, ACTIONS, GRIPPERS = 4, 5, (1, 4)
CHOSEN = GripperConfig(choices=(-1.0, 1.0))
FIXED = GripperConfig(mode="fixed", fixed_value=0.5)


def made(variant: str, *, critic_steps: int = HORIZON, prefix_steps: int = 0, **changes):
    config = config_of(variant, **changes)
    cameras = (CAMERA,) if config.image_keys else ()
    bounds = UNIT if config.bounded_critic else None
    spec = AgentSpec(4, ACTIONS, HORIZON, critic_steps, cameras, DISCOUNT, bounds, prefix_steps, GRIPPERS)
    build = functools.partial(builder_of(config), config)
    return build(spec) if config.gripper.composition == "continuous" else with_gripper(config, spec, build)


def encoder(**changes):
    return dataclasses.replace(ENCODER, **changes)


COMBINATIONS = {
    "choices, prefix critic": lambda: made("decoupled-lengths", gripper=CHOSEN, prefix_steps=2),
    "Gaussian, choices for each gripper": lambda: made(
        "acrlpd", gripper=SacGripperConfig(choices=(-1.0, 1.0), joint=False)
    ),
    "fixed gripper, a critic of more actions than the chunk": lambda: made(
        "decoupled", gripper=FIXED, critic_steps=7, prefix_steps=2
    ),
    "trained with a delay, choices": lambda: made(
        "acfql", gripper=CHOSEN, flow=dataclasses.replace(FLOW, train_delay="sampled")
    ),
    "the critic's encoder without cameras": lambda: made("acfql", encoder=encoder(trained_by="critic")),
    "one-step policy, choices, a camera, the critic's encoder": lambda: made(
        "published-distill-image", gripper=CHOSEN, encoder=encoder(trained_by="critic", state_latent=4)
    ),
    "one-step policy, choices with a penalty": lambda: made(
        "published-distill", gripper=dataclasses.replace(CHOSEN, penalty=-0.1)
    ),
    "choices, a camera, the critic's encoder": lambda: made(
        "acfql-image", gripper=CHOSEN, encoder=encoder(trained_by="critic")
    ),
    "clone with choices, trained with recorded delays": lambda: made(
        "bc", gripper=CHOSEN, flow=dataclasses.replace(FLOW, train_delay="recorded")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_trains_travels_acts_and_is_saved(name: str, tmp_path: Path) -> None:
    agent = COMBINATIONS[name]()

    def batches(seed: int):
        drawn = make_batches(agent.spec, seed=seed)
        return jax.device_put(drawn._replace(prev_action=drawn.actions[:, :, 0]) if "penalty" in name else drawn)

    state = agent.init(jax.random.key(0))
    fresh = jax.tree.map(jnp.copy, (state.policy, state.critic, state.target, state.grasp))
    updates = (agent.update_policy, *([agent.update_critic] if agent.has_critic else []), agent.update)
    for seed in range(2):
        for update in updates:
            given = named(agent, batches(seed)) if update is agent.update else batches(seed)
            state, metrics = update(state, {}, given)
            assert all(np.isfinite(value) for value in metrics.values()), metrics
    trees = (state.policy, state.critic, state.target, state.grasp)
    resting = [
        jax.tree_util.keystr(path)
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(trees), jax.tree.leaves(fresh), strict=True)
        if np.array_equal(new, old)
    ]
    assert not resting  # every parameter is trained by something

    observation = {k: v[0, 0] for k, v in make_batches(agent.spec).observations.items()}
    length = max(agent.spec.critic_steps, HORIZON)
    committed = np.full((length, ACTIONS), 0.3, np.float32), np.eye(1, length, dtype=np.float32)[0]
    for pretrained in (False, True):
        own = agent.policy_params(state, pretrained=pretrained)
        travelled = agent.load_params(agent.flatten_params(own))
        for prefix in (None, committed):
            chunks = [
                agent.sample(params, observation, jax.random.key(1), explore=True, committed=prefix)[0]
                for params in (own, travelled)
            ]
            np.testing.assert_array_equal(*chunks)
            assert chunks[0].shape == (HORIZON, ACTIONS)
            assert np.abs(chunks[0]).max() <= 1
            if prefix is not None:
                np.testing.assert_allclose(chunks[0][0], 0.3, atol=1e-6)

    store = CheckpointStore(tmp_path)
    flat = agent.flatten_params(agent.policy_params(state))
    assert store.save(1, state, flat, {"mean": np.zeros(2, np.float32)}, {"env_steps": 0})
    store.close()
    restored = CheckpointStore(tmp_path).restore_state(agent.init(jax.random.key(5)))
    assert restored is not None
    assert same(restored.state, state)
    later = [agent.update(s, {}, named(agent, batches(7)))[0] for s in (restored.state, state)]
    assert same(*later)
    assert {update._cache_size() for update in updates} == {1}
