"""The flow-matching chunk policy that acfql and bc share, and the one-step policy that acfql distils from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Draws, Params, Prefix
from serl_chunk.agents.critic import observation_encoder
from serl_chunk.agents.losses import imitation_mean
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import AgentConfig, FlowConfig
from serl_chunk.models.flow import VelocityField, integrate, interpolate
from serl_chunk.models.mlp import Mlp
from serl_chunk.types import STATE, ChunkBatch


def _layers(config: AgentConfig, flow: FlowConfig) -> dict[str, Any]:
    norm = "after" if flow.layer_norm else "none"
    return {"norm": norm, "activation": flow.activation, "kernel_init": config.kernel_init}


class FlowPolicy:
    """Chunks by integrating a learned velocity field. Parameters: {"encoder", "flow"}."""

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        self.spec = spec
        self.steps = flow.steps
        self.bc_mean = config.bc_mean
        self.encoder: Any = observation_encoder(config)
        self.field: Any = VelocityField(
            flow.hidden,
            spec.horizon * spec.action_dim,
            time=flow.time,
            fourier_dim=flow.fourier_dim,
            **_layers(config, flow),
        )

    def init(self, key: jax.Array, observation: Mapping[str, jax.Array]) -> Params:
        """Fresh parameters, for a batch of observations."""
        k_encoder, k_flow = jax.random.split(key)
        encoder = self.encoder.init(k_encoder, observation).get("params", {})
        features = self.encoder.apply({"params": encoder}, observation)
        batch = features.shape[:-1]
        x = jnp.zeros((*batch, self.spec.horizon * self.spec.action_dim), jnp.float32)
        return {"encoder": encoder, "flow": self.field.init(k_flow, features, x, jnp.zeros(batch))["params"]}

    def draws(self, key: jax.Array, batch: ChunkBatch) -> Draws:
        """Of `loss`: "x0" float32[B, D], standard normal, and "t" float32[B], uniform in [0, 1)."""
        k_noise, k_time = jax.random.split(key)
        b, h, a = batch.actions.shape
        return {"x0": jax.random.normal(k_noise, (b, h * a)), "t": jax.random.uniform(k_time, (b,))}

    def loss(self, params: Params, batch: ChunkBatch, draws: Draws) -> jax.Array:
        """Conditional flow matching, mean over imitated steps of |v(o, x_t, t) - (a - z)|^2."""
        flat = batch.actions.reshape(batch.actions.shape[0], -1)
        x, velocity = interpolate(draws["x0"], draws["t"], flat)
        features = self.encoder.apply({"params": params.get("encoder", {})}, batch.observations)
        error = (self.field.apply({"params": params["flow"]}, features, x, draws["t"]) - velocity) ** 2
        return imitation_mean(error.reshape(batch.actions.shape), batch.bc, self.bc_mean)

    def sample(
        self,
        params: Params,
        observation: Mapping[str, jax.Array],
        noise: jax.Array,
        prefix: Prefix | None = None,
        steps: int | None = None,
    ) -> jax.Array:
        """Chunks float32[..., N, H, A] from noise float32[..., N, H*A]; observations have batch axes `...`.

        The observation is encoded once for its N candidates. `steps` of Euler where given, instead of the policy's.
        """
        features = self.encoder.apply({"params": params.get("encoder", {})}, observation)
        features = jnp.broadcast_to(features[..., None, :], (*noise.shape[:-1], features.shape[-1]))
        h, a = self.spec.horizon, self.spec.action_dim
        committed = None if prefix is None else (prefix[0].reshape(-1), jnp.repeat(prefix[1], a))

        def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
            return self.field.apply({"params": params["flow"]}, features, x, t)

        flat = integrate(velocity, noise, steps or self.steps, committed)
        return flat.reshape(*flat.shape[:-1], h, a)


class OneStepPolicy:
    """Chunks mu(o, z) by one pass from noise z (FQL, Park 2025). Parameters: {"encoder", "net"}."""

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        self.spec = spec
        self.encoder: Any = observation_encoder(config)
        self.net: Any = Mlp(flow.hidden, spec.horizon * spec.action_dim, **_layers(config, flow))

    def init(self, key: jax.Array, observation: Mapping[str, jax.Array]) -> Params:
        """Fresh parameters, for a batch of observations."""
        k_encoder, k_net = jax.random.split(key)
        encoder = self.encoder.init(k_encoder, observation).get("params", {})
        features = self.encoder.apply({"params": encoder}, observation)
        noise = jnp.zeros((*features.shape[:-1], self.spec.horizon * self.spec.action_dim), jnp.float32)
        return {"encoder": encoder, "net": self.net.init(k_net, jnp.concatenate([features, noise], -1))["params"]}

    def raw(self, params: Params, observation: Mapping[str, jax.Array], noise: jax.Array) -> jax.Array:
        """mu before it is clipped, float32[..., N, H, A] from noise float32[..., N, H*A]."""
        features = self.encoder.apply({"params": params.get("encoder", {})}, observation)
        features = jnp.broadcast_to(features[..., None, :], (*noise.shape[:-1], features.shape[-1]))
        flat = self.net.apply({"params": params["net"]}, jnp.concatenate([features, noise], -1))
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)

    def sample(
        self,
        params: Params,
        observation: Mapping[str, jax.Array],
        noise: jax.Array,
        prefix: Prefix | None = None,
    ) -> jax.Array:
        """As FlowPolicy.sample. Committed actions replace the policy's own: it has no way to be told of them."""
        chunks = jnp.clip(self.raw(params, observation, noise), -1.0, 1.0)
        return chunks if prefix is None else with_prefix(chunks, prefix)


def with_prefix(chunks: jax.Array, prefix: Prefix) -> jax.Array:
    """Chunks float32[N, H, A] with the committed actions in place of their own."""
    committed = jnp.broadcast_to(prefix[1][:, None] > 0, prefix[0].shape)
    return jnp.where(committed[None], prefix[0][None], chunks)


def candidate_noise(
    key: jax.Array, observation: Mapping[str, jax.Array], count: int, dim: int, *, low: float, explore: bool
) -> jax.Array:
    """Starting noise of N candidates float32[N, D], scaled from `low` for the first to 1 for the last.

    A flow policy reproduces its demonstrators' tremor from the noise it starts with; less of it gives chunks
    nearer to the mode, and best-of-N decides between the two. Not exploring, the noise is a function of the
    observation: the policy is deterministic, and yet does not repeat the same draw where it got stuck.
    """
    if not explore:
        bits = jax.lax.bitcast_convert_type(observation[STATE].astype(jnp.float32), jnp.uint32)
        weights = 2 * jnp.arange(bits.shape[0], dtype=jnp.uint32) + 1
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(bits * weights, dtype=jnp.uint32))
    scale = jnp.linspace(low, 1.0, count) if count > 1 else jnp.full((1,), low)
    return scale[:, None] * jax.random.normal(key, (count, dim))
