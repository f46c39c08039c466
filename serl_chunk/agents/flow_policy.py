"""The flow-matching chunk policy that acfql and bc share, and the one-step policy that acfql distils from it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.encoded import EncodedPolicy
from serl_chunk.agents.exploration import chunk_noise
from serl_chunk.agents.losses import imitation_mean
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Noise, Observation, Params, Prefix
from serl_chunk.config.agents import AgentConfig, FlowConfig
from serl_chunk.models.flow import VelocityField, integrate, interpolate
from serl_chunk.models.mlp import Mlp
from serl_chunk.types import STATE, ChunkBatch

_DELAY = 4  # folded into a key that is split in two


def _layers(config: AgentConfig, flow: FlowConfig) -> dict[str, Any]:
    norm = "after" if flow.layer_norm else "none"
    return {"norm": norm, "activation": flow.activation, "kernel_init": config.kernel_init}


class FlowPolicy(EncodedPolicy):
    """Chunks by integrating a learned velocity field. Parameters: {"encoder", "flow"}.

    With `train_delay` the field has H more inputs, 1 where an action is given, and sees those actions as they are at
    every t (training-time RTC, Black et al. 2025, with a mask in place of a time per action).
    """

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        super().__init__(config)
        self.config, self.flow, self.spec = config, flow, spec
        self.prefixed = flow.train_delay != "none"
        layers = {**_layers(config, flow), "time": flow.time, "fourier_dim": flow.fourier_dim}
        self.field: Any = VelocityField(flow.hidden, spec.horizon * spec.action_dim, **layers)

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_flow = jax.random.split(key)
        encoder, features = self.init_encoder(k_encoder, observation)
        batch = features.shape[:-1]
        x = jnp.zeros((*batch, self.spec.horizon * self.spec.action_dim), jnp.float32)
        inputs = self._inputs(features, jnp.zeros((*batch, self.spec.horizon)))
        flow = self.field.init(k_flow, inputs, x, jnp.zeros(batch))["params"]
        return encoder | {"flow": flow}

    def _inputs(self, features: jax.Array, given: jax.Array) -> jax.Array:
        """The field's inputs next to x and t: features float32[..., F] and, with `train_delay`, `given` [..., H]."""
        return jnp.concatenate([features, given], axis=-1) if self.prefixed else features

    def draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """ "x0" float32[B, D], standard normal, and "t" float32[B], uniform in [0, 1), for `loss`.

        With train_delay=sampled also "delay" int32[B], uniform in 0..train_delay_max.
        """
        k_noise, k_time = jax.random.split(key)
        b, dim = batch.actions.shape[0], self.spec.horizon * self.spec.action_dim
        draws = {"x0": jax.random.normal(k_noise, (b, dim)), "t": jax.random.uniform(k_time, (b,))}
        if self.flow.train_delay == "sampled":
            draws["delay"] = jax.random.randint(jax.random.fold_in(key, _DELAY), (b,), 0, self.flow.train_delay_max + 1)
        return draws

    def prefix_mask(self, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """float32[B, H]: 1 for a window's first d actions, which were committed at its decision (`train_delay`)."""
        b, h = batch.actions.shape[0], self.spec.horizon
        if not self.prefixed:
            return jnp.zeros((b, h))
        delay = batch.delay if self.flow.train_delay == "recorded" else draws["delay"]
        return (jnp.arange(h)[None] < delay[:, None]).astype(jnp.float32)

    def loss(self, params: Params, batch: ChunkBatch, draws: Noise, given: jax.Array | None = None) -> jax.Array:
        """Conditional flow matching, mean over steps by `bc_weight` of |v(o, x_t, t) - (a - z)|^2: float32[].

        Draws "x0" and "t". Where `given` float32[B, H] (`prefix_mask`) is 1, x_t is the action itself, and the step has
        no weight.
        """
        given = self.prefix_mask(batch, draws) if given is None else given
        chunks, weight = batch.actions, batch.bc_weight
        flat = chunks.reshape(chunks.shape[0], -1)
        x, velocity = interpolate(draws["x0"], draws["t"], flat)
        if self.prefixed:
            x = jnp.where(jnp.repeat(given, chunks.shape[-1], axis=-1) > 0, flat, x)
            weight = weight * (1.0 - given)
        inputs = self._inputs(self.features(params, batch.observations), given)
        error = (self.field.apply({"params": params["flow"]}, inputs, x, draws["t"]) - velocity) ** 2
        return imitation_mean(error.reshape(chunks.shape), weight, self.config.bc_mean)

    def sample(
        self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix | None = None, steps: int = 0
    ) -> jax.Array:
        """Chunks float32[..., N, H, A] from noise float32[..., N, H*A]; observations `...` are encoded once.

        Prefixes are float32[..., H, A] and [..., H]; `steps` of Euler's method, 0: the policy's number.
        """
        features = self.features(params, observation)
        h, a = self.spec.horizon, self.spec.action_dim
        given, committed = jnp.zeros((*features.shape[:-1], h)), None
        if prefix is not None:
            given = jnp.asarray(prefix[1])
            flat_prefix = prefix[0].reshape(*features.shape[:-1], 1, h * a)
            committed = (flat_prefix, jnp.repeat(given, a, axis=-1)[..., None, :])

        inputs = self._inputs(features, given)[..., None, :]

        def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
            return self.field.apply({"params": params["flow"]}, inputs, x, t, repeated=True)

        flat = integrate(velocity, noise, steps or self.flow.steps, committed, clean=self.prefixed)
        return flat.reshape(*flat.shape[:-1], h, a)

    def candidate_noise(self, key: jax.Array, observation: Observation, count: int, *, explore: bool) -> jax.Array:
        """Starting noise of N candidates float32[N, D], scaled from `noise_low` for the first to 1 for the last.

        A flow policy reproduces its demonstrators' tremor from the noise it starts with. Less noise gives chunks nearer
        to the mode, and best-of-N decides between the two. Not exploring, the noise is a function of the observation:
        the policy is deterministic, but does not repeat a draw where the robot got stuck. Exploring, it is smooth over
        the chunk with `exploration_knots` (`chunk_noise`).
        """
        if not explore:
            bits = jax.lax.bitcast_convert_type(observation[STATE].astype(jnp.float32), jnp.uint32)
            weights = 2 * jnp.arange(bits.shape[0], dtype=jnp.uint32) + 1
            key = jax.random.fold_in(jax.random.key(0), jnp.sum(bits * weights, dtype=jnp.uint32))
        low, knots = self.flow.noise_low, self.config.exploration_knots if explore else 0
        scale = jnp.linspace(low, 1.0, count) if count > 1 else jnp.full((1,), low)
        return scale[:, None] * chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, knots)


class OneStepPolicy(EncodedPolicy):
    """Chunks mu(o, z) by one pass from noise z (FQL, Park 2025). Parameters: {"encoder", "net"}."""

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        super().__init__(config)
        self.spec = spec
        self.net: Any = Mlp(flow.hidden, spec.horizon * spec.action_dim, **_layers(config, flow))

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_net = jax.random.split(key)
        encoder, features = self.init_encoder(k_encoder, observation)
        noise = jnp.zeros((*features.shape[:-1], self.spec.horizon * self.spec.action_dim), jnp.float32)
        net = self.net.init(k_net, jnp.concatenate([features, noise], -1))["params"]
        return encoder | {"net": net}

    def raw(self, params: Params, observation: Observation, noise: jax.Array) -> jax.Array:
        """mu before it is clipped, float32[..., N, H, A] from noise float32[..., N, H*A]."""
        features = self.features(params, observation)
        features = jnp.broadcast_to(features[..., None, :], (*noise.shape[:-1], features.shape[-1]))
        flat = self.net.apply({"params": params["net"]}, jnp.concatenate([features, noise], -1))
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)

    def sample(
        self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix | None = None
    ) -> jax.Array:
        """As FlowPolicy.sample; committed actions are no input of this policy, and replace its own."""
        chunks = jnp.clip(self.raw(params, observation, noise), -1.0, 1.0)
        return chunks if prefix is None else with_prefix(chunks, prefix)


def with_prefix(chunks: jax.Array, prefix: Prefix) -> jax.Array:
    """Chunks float32[N, H, A] with the committed actions in place of their own."""
    committed = jnp.broadcast_to(prefix[1][:, None] > 0, prefix[0].shape)
    return jnp.where(committed[None], prefix[0][None], chunks)
