"""Small agents that all tests of a worker share, states that need no compilation, and batches."""

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
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.types import CameraSpec, ChunkBatch

CAMERA = CameraSpec("top", 32, 32)
DISCOUNT = 0.9
UNIT = (0.0, 1.0)
PREFIX = {"critic_steps": 5, "prefix_steps": 2}  # beside chunks of 3: a critic of more, and one of fewer
FLOW = FlowConfig(hidden=(16,), steps=2)
ENCODER = EncoderConfig(features=(4,), latent=8, shift=2)
# What is compiled as a whole, once a worker: every kind, and every part that an agent may have.
FROZEN = ("decoupled-lengths", "acrlpd-entropy-grasp", "published-distill-image", "bc-delay")


def critic(**changes: Any) -> CriticConfig:
    """Two heads of one layer."""
    return CriticConfig(**{"hidden": (16,), "ensemble": 2, "tau": 0.1, **changes})


def sac_critic(**changes: Any) -> SacCriticConfig:
    """Those of acrlpd, of which a target reads one."""
    return SacCriticConfig(**{"hidden": (16,), "ensemble": 2, "target_subset": 1, "tau": 0.1, **changes})


def config_of(variant: str, **changes: Any) -> AgentConfig:
    """The configuration of a variant: an agent's kind, and what is special about it.

    `image` is a camera, `grasp` a choice for each gripper. `published` is the kind `published_qc`: the best of N
    samples, `distill` or `gaussian`.
    """
    kind, *special = variant.split("-")
    common: dict[str, Any] = {"lr": 1e-2}
    if "image" in special:
        common |= {"image_keys": (CAMERA.name,), "encoder": ENCODER}
    if "grasp" in special:
        choices = {"choices": (-1.0, 1.0), "joint": False}
        common["gripper"] = SacGripperConfig(tau=0.1, **choices) if kind == "acrlpd" else GripperConfig(**choices)
    if kind == "published":
        return PublishedQcConfig(**{
            "agent_name": "acrlpd" if "gaussian" in special else "acfql", "num_qs": 2, "tau": 0.1,
            "value_hidden_dims": (16,), "actor_hidden_dims": (16,), "flow_steps": 2, "actor_num_samples": 3,
            "actor_type": "distill-ddpg" if "distill" in special else "best-of-n", "alpha": 3.0, "bc_alpha": 0.5,
            **common, **changes,
        })  # fmt: skip
    common["policy_ema"] = 0.0
    flow = {"flow": FLOW, "train_delay": "sampled" if "delay" in special else "none"}
    if kind == "bc":
        policy = "gaussian" if "gaussian" in special else "flow"
        ema = {"policy_ema": 0.9} if "delay" in special else {}
        return BcConfig(**{**flow, "policy": policy, "hidden": (16,), **common, **ema, **changes})
    common["candidates"] = 3
    if kind == "acrlpd":
        more = {"backup_entropy": "entropy" in special, "policy_ema": 0.9 if "grasp" in special else 0.0}
        return AcrlpdConfig(**{"critic": sac_critic(), "hidden": (16,), **common, **more, **changes})
    common |= {"critic": critic(), **flow, "policy_updates": 2}
    if kind == "acfql":
        return AcfqlConfig(**{**common, **changes})
    lengths = {"prefix_lengths": 2, "replan_spread": 0.01} if "lengths" in special else {}
    return DecoupledConfig(**{**lengths, **common, **changes})


def build(
    config: AgentConfig, *, horizon: int = 3, critic_steps: int | None = None, actions: int = 2, prefix_steps: int = 0,
    grippers: tuple[int, ...] = (), value_range: tuple[float, float] = UNIT, **sizes: Any,
) -> Agent:  # fmt: skip
    """An agent for 4 states."""
    cameras, bounds = (CAMERA,) if config.image_keys else (), value_range if config.bounded_critic else None
    spec = AgentSpec(
        4,
        actions,
        horizon,
        critic_steps or horizon,
        cameras,
        DISCOUNT,
        bounds,
        prefix_steps,
        grippers,
        executed=horizon,
        **sizes,
    )
    make = functools.partial(builder_of(config), config)
    return make(spec) if config.gripper.composition == "continuous" else with_gripper(config, spec, make)


_once = functools.cache(build)


def made(variant: str, sizes: dict[str, Any] | None = None, **changes: Any) -> Agent:
    """The agent of a variant, the same one for all tests: they leave it as it is."""
    own: dict[str, Any] = PREFIX if variant.startswith("decoupled") else {}
    if "grasp" in variant:
        own = own | {"actions": 3, "grippers": (1,)}
    return _once(config_of(variant, **changes), **(own | (sizes or {})))


def drawn(agent: Agent, seed: int = 0) -> AgentState:
    """A state of random parameters, the target's others than the critic's; nothing is compiled for it."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, like: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if "_opt" in name or not jnp.issubdtype(like.dtype, jnp.floating):
            return np.zeros(like.shape, like.dtype)
        if "log_alpha" in name:
            return np.float32(-2)
        width = {"kernel": np.prod(like.shape[-4 if "camera" in name else -2 : -1]), "bias": 100, "scale": 100}
        noise = rng.normal(size=like.shape) * next((w**-0.5 for end, w in width.items() if end in name), 1.0)
        return (noise + ("scale" in name)).astype(like.dtype)

    return jax.device_put(jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(agent.init, jax.random.key(0))))


def fresh(variant: str, **changes: Any) -> tuple[Agent, AgentState]:
    """A variant's agent, and a state of its own (updates donate it)."""
    agent = made(variant, **changes)
    return agent, drawn(agent)


def make_batches(spec: AgentSpec, updates: int = 2, size: int = 8, seed: int = 0, **changes: Any) -> ChunkBatch:
    """Random windows, arrays [updates, size, ...]; a quarter ends in a termination after the first step."""
    rng = np.random.default_rng(seed)
    lead, h, a = (updates, size), max(spec.horizon, spec.critic_steps), spec.action_dim

    def observe() -> dict[str, np.ndarray]:
        out = {"state": rng.normal(size=(*lead, spec.state_dim)).astype(np.float32)}
        for c in spec.cameras:
            out[f"images/{c.name}"] = rng.integers(0, 256, (*lead, c.height, c.width, 3), dtype=np.uint8)
        return out

    valid, mask = np.ones((*lead, h), np.float32), np.ones(lead, np.float32)
    valid[:, : size // 4, 1:] = 0
    mask[:, : size // 4] = 0
    actions = rng.uniform(-0.9, 0.9, (*lead, h, a)).astype(np.float32)
    actions[:, : size // 4] = actions[:, : size // 4, :1]  # the sampler repeats the last action
    n = np.minimum(valid.sum(-1), spec.critic_steps)
    rewards = (rng.uniform(size=(*lead, h)) * valid * (np.arange(h) < spec.critic_steps) / h).astype(np.float32)
    fields: dict[str, Any] = {
        "observations": observe(), "actions": actions, "valid": valid, "rewards": rewards, "mask": mask,
        "discount_n": (spec.discount**n).astype(np.float32), "next_observations": observe(), "bc_weight": valid,
        "delay": np.zeros(lead, np.int32), "weight": np.ones(lead, np.float32),
    }  # fmt: skip
    if spec.grippers:
        fields["prev_action"] = actions[:, :, 0]
    return ChunkBatch(**{**fields, **changes})


def one_batch(agent: Agent, seed: int = 0, **changes: Any) -> ChunkBatch:
    """The first of `make_batches` with other arrays [8, ...]."""
    return jax.tree.map(lambda x: x[0], make_batches(agent.spec, seed=seed))._replace(**changes)


def seen_by(agent: Agent, seed: int = 0) -> dict[str, np.ndarray]:
    """One observation."""
    return {k: v[0, 0] for k, v in make_batches(agent.spec, seed=seed).observations.items()}


def named(agent: Agent, batches: ChunkBatch) -> dict[str, ChunkBatch]:
    """Batches [U, B] as `update` takes them; an agent without a critic gets as many as it wants."""
    if agent.has_critic:
        return {"critic": batches}
    each = agent.wants()["policy"].each
    return {"policy": batches if each else jax.tree.map(lambda x: x[-1:], batches)}


def marked_numbers(spec: AgentSpec, *marked: int) -> np.ndarray:
    """`ChunkBatch.bc_dims` of `one_batch` that marks the same numbers of every action."""
    dims = np.zeros((8, max(spec.horizon, spec.critic_steps), spec.action_dim), np.float32)
    dims[..., list(marked)] = 1
    return dims


@functools.cache
def _gradient(agent: Agent, part: str, bc_only: bool) -> Any:
    """Compiled once for an agent and the arrays that a batch has. Its results become NumPy's, which compile nothing."""

    def run(state: AgentState, base: Any, batch: ChunkBatch, draws: Any) -> Any:
        def loss(params: Any, rows: ChunkBatch) -> Any:
            if part == "critic":
                return agent.critic_loss(params, state, base, rows, draws)
            return agent.policy_loss(params, state, base, rows, draws, bc_only=bc_only)

        grads, metrics, value = gradient(loss, getattr(state, part), batch)
        return grads, {**metrics, "value": value}

    return jax.jit(run)


def policy_gradient(
    agent: Agent, state: AgentState, batch: ChunkBatch, draws: Any = None, *, bc_only: bool = False
) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of the policy's loss, and its metrics with its value as "value"."""
    batch = agent.policy_part(batch)
    draws = agent.policy_draws(jax.random.key(1), batch) if draws is None else draws
    return jax.device_get(_gradient(agent, "policy", bc_only)(state, {}, batch, draws))


def critic_gradient(
    agent: Agent, state: AgentState, batch: ChunkBatch, draws: Any = None
) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient of the critic's loss, and its metrics with its value as "value"."""
    draws = agent.critic_draws(jax.random.key(1), batch) if draws is None else draws
    return jax.device_get(_gradient(agent, "critic", False)(state, {}, batch, draws))


def output_bias(grads: Any, agent: Agent) -> np.ndarray:
    """The gradient of the last layer's bias, [H, A]; a Gaussian's of its means."""
    sizes = (agent.chunk_dim, 2 * agent.chunk_dim)
    (found,) = [
        np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(grads)
        if x.ndim == 1 and x.size in sizes and "bias" in jax.tree_util.keystr(path)
    ]
    return found[: agent.chunk_dim].reshape(agent.spec.horizon, agent.spec.action_dim)


def shaken(tree: Any, by: float = 0.1) -> Any:
    """Every number of a tree moved by `by`."""
    return jax.tree.map(lambda x: np.asarray(x) + np.asarray(by, x.dtype), tree)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return all(np.array_equal(raw(x), raw(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def close(a: Any, b: Any, atol: float = 1e-6) -> bool:
    """Whether two trees of one structure are equal but for rounding."""
    return all(np.allclose(x, y, atol=atol) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
