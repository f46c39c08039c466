"""Small agents and the batches that are fed to them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.base import Agent
from serl_chunk.agents.discrete_gripper import with_gripper
from serl_chunk.agents.optimiser import gradient
from serl_chunk.agents.registry import builder_of
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.types import CameraSpec, ChunkBatch

CAMERA = CameraSpec("top", 32, 32)
DISCOUNT = 0.9
UNIT = (0.0, 1.0)
PREFIX = {"critic_steps": 5, "prefix_steps": 2}  # beside chunks of 3: a critic of more, and one of fewer
FLOW = FlowConfig(hidden=(16,), steps=2)
ENCODER = EncoderConfig(features=(4,), latent=8, shift=2)


def critic(**changes: Any) -> CriticConfig:
    """Two heads of one layer."""
    return CriticConfig(**{"hidden": (16,), "ensemble": 2, "tau": 0.1, **changes})


def sac_critic(**changes: Any) -> SacCriticConfig:
    """Those of acrlpd, of which a target reads one."""
    return SacCriticConfig(**{"hidden": (16,), "ensemble": 2, "target_subset": 1, "tau": 0.1, **changes})


def config_of(variant: str, **changes: Any) -> AgentConfig:
    """The configuration of a variant: an agent's kind, what is special about it, and `image` for a camera.

    `published` is the kind `published_qc`: the best of N samples, `distill` or `gaussian`.
    """
    kind, *special = variant.split("-")
    if kind == "published":
        return _published(special, **changes)
    common: dict[str, Any] = {"lr": 1e-2, "policy_ema": 0.0, **changes}
    if "image" in special:
        common |= {"image_keys": (CAMERA.name,), "encoder": ENCODER}
    if kind == "bc":
        policy = "gaussian" if "gaussian" in special else "flow"
        return BcConfig(**{"flow": FLOW, "policy": policy, "hidden": (16,), **common})
    common.setdefault("candidates", 3)
    if kind == "acrlpd":
        common = {"critic": sac_critic(), "hidden": (16,), "backup_entropy": "entropy" in special, **common}
        return AcrlpdConfig(**common)
    common = {"critic": critic(), "flow": FLOW, "policy_updates": 2, **common}
    if kind == "acfql":
        return AcfqlConfig(**common)
    return DecoupledConfig(**({"prefix_lengths": 2, "replan_spread": 0.01} if "lengths" in special else {}), **common)


def _published(special: list[str], **changes: Any) -> PublishedQcConfig:
    seen = {"image_keys": (CAMERA.name,), "encoder": ENCODER} if "image" in special else {}
    return PublishedQcConfig(**{
        "lr": 1e-2, "agent_name": "acrlpd" if "gaussian" in special else "acfql", "num_qs": 2, "tau": 0.1,
        "value_hidden_dims": (16,), "actor_hidden_dims": (16,), "flow_steps": 2, "actor_num_samples": 3,
        "actor_type": "distill-ddpg" if "distill" in special else "best-of-n", "alpha": 3.0, "bc_alpha": 0.5,
        **seen, **changes,
    })  # fmt: skip


def build(
    config: AgentConfig, *, horizon: int = 3, critic_steps: int | None = None, actions: int = 2, prefix_steps: int = 0,
    micro_batches: int = 1, grippers: tuple[int, ...] = (), value_range: tuple[float, float] = UNIT,
) -> Agent:  # fmt: skip
    """An agent for 4 states."""
    cameras, bounds = (CAMERA,) if config.image_keys else (), value_range if config.bounded_critic else None
    spec = AgentSpec(
        4, actions, horizon, critic_steps or horizon, cameras, DISCOUNT, bounds, prefix_steps, grippers,
        micro_batches=micro_batches,
    )  # fmt: skip
    make = functools.partial(builder_of(config), config)
    return with_gripper(config, spec, make) if grippers else make(spec)


def make_batches(spec: AgentSpec, updates: int = 2, size: int = 8, seed: int = 0, **changes: Any) -> ChunkBatch:
    """Random windows, arrays [updates, size, ...]; a quarter ends in a termination after the first step."""
    rng = np.random.default_rng(seed)
    lead, h, a = (updates, size), max(spec.horizon, spec.critic_steps), spec.action_dim

    def observe() -> dict[str, np.ndarray]:
        out = {"state": rng.normal(size=(*lead, spec.state_dim)).astype(np.float32)}
        for c in spec.cameras:
            out[f"images/{c.name}"] = rng.integers(0, 256, (*lead, c.height, c.width, 3), dtype=np.uint8)
        return out

    valid = np.ones((*lead, h), np.float32)
    valid[:, : size // 4, 1:] = 0
    mask = np.ones(lead, np.float32)
    mask[:, : size // 4] = 0
    actions = rng.uniform(-0.9, 0.9, (*lead, h, a)).astype(np.float32)
    actions[:, : size // 4] = actions[:, : size // 4, :1]  # the sampler repeats the last action
    n = np.minimum(valid.sum(-1), spec.critic_steps)
    rewards = (rng.uniform(size=(*lead, h)) * valid * (np.arange(h) < spec.critic_steps) / h).astype(np.float32)
    fields: dict[str, Any] = {
        "observations": observe(),
        "actions": actions,
        "valid": valid,
        "rewards": rewards,
        "mask": mask,
        "discount_n": (spec.discount**n).astype(np.float32),
        "next_observations": observe(),
        "bc_weight": valid,
        "delay": np.zeros(lead, np.int32),
        "weight": np.ones(lead, np.float32),
    }
    return ChunkBatch(**{**fields, **changes})


@functools.cache
def _built(variant: str) -> tuple[Agent, AgentState]:
    agent = build(config_of(variant), **(PREFIX if variant.startswith("decoupled") else {}))
    return agent, agent.init(jax.random.key(0))


def fresh(variant: str) -> tuple[Agent, AgentState]:
    """A variant's agent, built once for all tests, and a copy of its first state (updates donate theirs)."""
    agent, state = _built(variant)
    return agent, jax.tree.map(jnp.copy, state)


def on_device(spec: AgentSpec, seed: int = 0, **changes: Any) -> ChunkBatch:
    """`make_batches` of the one shape that tests compile for, put where the learner puts them."""
    return jax.device_put(make_batches(spec, seed=seed, **changes))


def named(agent: Agent, batches: ChunkBatch) -> dict[str, ChunkBatch]:
    """Batches [U, B] as `update` takes them; an agent without a critic gets as many as it wants."""
    if agent.has_critic:
        return {"critic": batches}
    each = agent.wants()["policy"].each
    return {"policy": batches if each else jax.tree.map(lambda x: x[-1:], batches)}


def one_batch(agent: Agent, **changes: Any) -> ChunkBatch:
    """The first of `on_device`."""
    return jax.tree.map(lambda x: x[0], on_device(agent.spec, **changes))


def marked_numbers(spec: AgentSpec, *marked: int) -> np.ndarray:
    """`ChunkBatch.bc_dims` of `on_device` that marks the same numbers of every action."""
    dims = np.zeros((2, 8, max(spec.horizon, spec.critic_steps), spec.action_dim), np.float32)
    dims[..., list(marked)] = 1
    return dims


def imitation_gradient(agent: Agent, state: AgentState, batch: ChunkBatch) -> tuple[jax.Array, Any]:
    """The value of the policy's loss without a critic, and its gradient."""
    batch = agent.policy_part(batch)
    grads, metrics = policy_gradient(agent, state, batch, agent.policy_draws(jax.random.key(1), batch), bc_only=True)
    return metrics["value"], grads


def policy_gradient(
    agent: Agent, state: AgentState, batch: ChunkBatch, draws: Any, *, bc_only: bool = False, base: Any = None
) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of the policy's loss, and its metrics with its value as "value"."""
    loss = lambda policy, rows: agent.policy_loss(policy, state, base or {}, rows, draws, bc_only=bc_only)  # noqa: E731
    grads, metrics, value = gradient(loss, state.policy, batch)
    return grads, {**metrics, "value": value}


def critic_gradient(
    agent: Agent, state: AgentState, batch: ChunkBatch, draws: Any, *, base: Any = None
) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of the critic's loss, and its metrics with its value as "value"."""
    loss = lambda critic, rows: agent.critic_loss(critic, state, base or {}, rows, draws)  # noqa: E731
    grads, metrics, value = gradient(loss, state.critic, batch)
    return grads, {**metrics, "value": value}


def output_bias(grads: Any, agent: Agent) -> np.ndarray:
    """The gradient of the last layer's bias, [H, A]; a Gaussian's of its means."""
    sizes = (agent.chunk_dim, 2 * agent.chunk_dim)
    (found,) = [
        np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(grads)
        if x.ndim == 1 and x.size in sizes and "bias" in jax.tree_util.keystr(path)
    ]  # fmt: skip
    return found[: agent.chunk_dim].reshape(agent.spec.horizon, agent.spec.action_dim)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return all(np.array_equal(raw(x), raw(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def bandit(spec: AgentSpec, updates: int, size: int, seed: int) -> tuple[ChunkBatch, np.ndarray]:
    """One-decision tasks, and the chunk float32[updates, size, H, A] that each rewards most.

    Actions are uniform; the first step's reward falls from 1 with the distance to a chunk that depends on the state.
    """
    rng = np.random.default_rng(seed)
    lead = (updates, size)
    state = rng.uniform(-1, 1, (*lead, spec.state_dim)).astype(np.float32)
    best = 0.7 * state[..., :1, None] * np.where(np.arange(spec.horizon) % 2, -1, 1)[:, None]
    best = np.broadcast_to(best, (*lead, spec.horizon, spec.action_dim)).astype(np.float32)
    actions = rng.uniform(-1, 1, best.shape).astype(np.float32)
    rewards = np.zeros((*lead, spec.horizon), np.float32)
    rewards[..., 0] = np.exp(-2 * ((actions - best) ** 2).sum((-1, -2)))
    return make_batches(
        spec, updates, size, seed,
        observations={"state": state}, actions=actions, rewards=rewards,
        mask=np.zeros(lead, np.float32), valid=np.ones_like(rewards), bc_weight=np.ones_like(rewards),
    ), best  # fmt: skip


def bandit_error(agent: Agent, state: AgentState, *, pretrained: bool = False, explore: bool = False) -> float:
    """Mean distance per dimension between the chosen and the most rewarded chunk, on 64 states not trained on."""
    batch, best = bandit(agent.spec, 1, 64, 10_000)
    params = agent.policy_params(state, pretrained=pretrained)
    chunks = [
        agent.sample(params, {"state": s}, jax.random.key(i), explore=explore)[0]
        for i, s in enumerate(batch.observations["state"][0])
    ]
    return float(np.abs(np.array(chunks) - best[0]).mean())
