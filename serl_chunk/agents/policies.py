"""Chunk policies: the flow and the Gaussian, of acfql, acrlpd and bc, and the one-step policy distilled from a flow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.losses import imitated, imitated_numbers, imitation_mean
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Noise, Observation, Params, Prefix
from serl_chunk.agents.vision import Encoded
from serl_chunk.config.agents import AcrlpdConfig, AgentConfig, BcConfig, FlowConfig
from serl_chunk.models.distributions import EDGE, TanhNormal
from serl_chunk.models.flow import VelocityField, integrate, interpolate
from serl_chunk.models.mlp import Activation, Mlp
from serl_chunk.types import STATE, ChunkBatch

_DELAY = 4  # folded into a key that is split in two
_LOG_STD_MAX = 2.0


def knot_weights(horizon: int, knots: int) -> np.ndarray:
    """W float32[H, K]: standard normal values z at K >= 1 knots become standard normal noise W z at each of H steps.

    The knots lie evenly from the first step to the last, with a Catmull-Rom cubic between them and the outermost values
    repeated beyond the ends. Each row has length 1, which makes the variance 1 at every step.
    """
    if knots == 1:
        return np.ones((horizon, 1), np.float32)
    at = np.linspace(0.0, knots - 1.0, horizon)
    left = np.minimum(at.astype(int), knots - 2)
    t = at - left
    cubic = 0.5 * np.stack(
        [-(t**3) + 2 * t**2 - t, 3 * t**3 - 5 * t**2 + 2, -3 * t**3 + 4 * t**2 + t, t**3 - t**2], axis=-1
    )
    weights = sum(cubic[:, i, None] * np.eye(knots)[np.clip(left - 1 + i, 0, knots - 1)] for i in range(4))
    return (weights / np.linalg.norm(weights, axis=1, keepdims=True)).astype(np.float32)


def chunk_noise(key: jax.Array, count: int, horizon: int, action_dim: int, knots: int) -> jax.Array:
    """Standard normal noise of `count` chunks, float32[count, H*A]: independent, or smooth in time through `knots`."""
    if knots == 0:
        return jax.random.normal(key, (count, horizon * action_dim))
    at_knots = jax.random.normal(key, (count, knots, action_dim))
    noise = jnp.einsum("hk,nka->nha", jnp.asarray(knot_weights(horizon, knots)), at_knots)
    return noise.reshape(count, horizon * action_dim)


class _ChunkPolicy(Encoded):
    """Base: a network of flat chunks float32[..., H*A]."""

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        super().__init__(config, own=config.encoder.trained_by == "each")
        self.config, self.spec, self.chunk_dim = config, spec, spec.horizon * spec.action_dim

    def chunks(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)


def _layers(config: AgentConfig, flow: FlowConfig) -> dict[str, Any]:
    norm = "after" if flow.layer_norm else "none"
    return {"norm": norm, "activation": flow.activation, "kernel_init": config.kernel_init}


class FlowPolicy(_ChunkPolicy):
    """Chunks by integrating a learned velocity field. Parameters: {"encoder", "flow"}.

    The network predicts the velocity, or with `predicts=chunk` the chunk a' that a path ends at: the velocity is
    (a' - x_t) / (1 - t) then (Li and He 2025).

    With `train_delay` the field has H more inputs, 1 where an action is given, and sees those actions as they are at
    every t (training-time RTC, Black et al. 2025, with a mask in place of a time per action).
    """

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.flow, self.prefixed = flow, flow.train_delay != "none"
        layers = {**_layers(config, flow), "time": flow.time, "fourier_dim": flow.fourier_dim}
        self.field: Any = VelocityField(flow.hidden, self.chunk_dim, **layers)

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_flow = jax.random.split(key)
        encoder, features = self.init_encoder(k_encoder, observation)
        batch = features.shape[:-1]
        x = jnp.zeros((*batch, self.chunk_dim), jnp.float32)
        inputs = self._inputs(features, jnp.zeros((*batch, self.spec.horizon)))
        flow = self.field.init(k_flow, inputs, x, jnp.zeros(batch))["params"]
        return encoder | {"flow": flow}

    def _inputs(self, features: jax.Array, given: jax.Array) -> jax.Array:
        """The field's inputs next to x and t: features float32[..., F] and, with `train_delay`, `given` [..., H]."""
        return jnp.concatenate([features, given], axis=-1) if self.prefixed else features

    def draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """ "x0" float32[B, D], standard normal, "t" float32[B], uniform in [0, 1), and "delay" int32[B] if sampled."""
        k_noise, k_time = jax.random.split(key)
        b = batch.actions.shape[0]
        draws = {"x0": jax.random.normal(k_noise, (b, self.chunk_dim)), "t": jax.random.uniform(k_time, (b,))}
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
        """Conditional flow matching, mean by `bc_weight` and `bc_dims` of |v(o, x_t, t) - (a - z)|^2: float32[].

        With `predicts=chunk` the mean of |a'(o, x_t, t) - a|^2, a clipped to [-1, 1]: what the former would be for this
        a and v = (a' - x_t) / (1 - t), times (1 - t)^2. Where `given` float32[B, H] (`prefix_mask`) is 1, x_t is the
        action itself, and the step has no weight.
        """
        given = self.prefix_mask(batch, draws) if given is None else given
        batch = imitated(batch)
        chunks, weight = batch.actions, batch.bc_weight
        flat = chunks.reshape(chunks.shape[0], -1)
        if self.flow.predicts == "chunk":  # none that acts is further out; steps of an arm that was pushed away are
            flat = jnp.clip(flat, -1.0, 1.0)
        x, velocity = interpolate(draws["x0"], draws["t"], flat)
        if self.prefixed:
            x = jnp.where(jnp.repeat(given, chunks.shape[-1], axis=-1) > 0, flat, x)
            weight = weight * (1.0 - given)
        inputs = self._inputs(self.features(params, batch.observations), given)
        output = self.field.apply({"params": params["flow"]}, inputs, x, draws["t"])
        error = (output - (flat if self.flow.predicts == "chunk" else velocity)) ** 2
        weight = imitated_numbers(weight, batch.bc_dims)
        return imitation_mean(error.reshape(chunks.shape), weight, self.config.bc_mean)

    def sample(
        self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix | None = None, steps: int = 0
    ) -> jax.Array:
        """Chunks float32[..., N, H, A] from noise float32[..., N, H*A]; observations `...` are encoded once.

        Prefixes are float32[..., H, A] and [..., H]; `steps` of Euler's method, 0: the policy's number.
        """
        features = self.features(params, observation)
        given, committed = jnp.zeros((*features.shape[:-1], self.spec.horizon)), None
        if prefix is not None:
            given = jnp.asarray(prefix[1])
            flat_prefix = prefix[0].reshape(*features.shape[:-1], 1, self.chunk_dim)
            committed = (flat_prefix, jnp.repeat(given, self.spec.action_dim, axis=-1)[..., None, :])

        inputs = self._inputs(features, given)[..., None, :]

        def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
            output = self.field.apply({"params": params["flow"]}, inputs, x, t, repeated=True)
            # Euler's method takes no t nearer to 1 than a step.
            return output if self.flow.predicts == "velocity" else (output - x) / (1 - t)[..., None]

        return self.chunks(integrate(velocity, noise, steps or self.flow.steps, committed, clean=self.prefixed))

    def candidate_noise(self, key: jax.Array, observation: Observation, count: int, *, explore: bool) -> jax.Array:
        """Starting noise of N candidates float32[N, D], scaled from `noise_low` for the first to `noise_high`.

        A flow policy reproduces its demonstrators' tremor from the noise it starts with; less noise gives chunks nearer
        to the mode. Not exploring, the noise is a function of the observation: the policy is deterministic, but does
        not repeat a draw where the robot got stuck.
        """
        if not explore:
            bits = jax.lax.bitcast_convert_type(observation[STATE].astype(jnp.float32), jnp.uint32)
            weights = 2 * jnp.arange(bits.shape[0], dtype=jnp.uint32) + 1
            key = jax.random.fold_in(jax.random.key(0), jnp.sum(bits * weights, dtype=jnp.uint32))
        low, knots = self.flow.noise_low, self.config.exploration_knots if explore else 0
        scale = jnp.linspace(low, self.flow.noise_high, count) if count > 1 else jnp.full((1,), low)
        return scale[:, None] * chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, knots)


class OneStepPolicy(_ChunkPolicy):
    """Chunks mu(o, z) by one pass from noise z (FQL, Park 2025). Parameters: {"encoder", "net"}."""

    def __init__(self, config: AgentConfig, flow: FlowConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.net: Any = Mlp(flow.hidden, self.chunk_dim, **_layers(config, flow))

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_net = jax.random.split(key)
        encoder, features = self.init_encoder(k_encoder, observation)
        noise = jnp.zeros((*features.shape[:-1], self.chunk_dim), jnp.float32)
        net = self.net.init(k_net, jnp.concatenate([features, noise], -1))["params"]
        return encoder | {"net": net}

    def raw(self, params: Params, observation: Observation, noise: jax.Array) -> jax.Array:
        """mu before it is clipped, float32[..., N, H, A] from noise float32[..., N, H*A]."""
        features = self.features(params, observation)
        features = jnp.broadcast_to(features[..., None, :], (*noise.shape[:-1], features.shape[-1]))
        return self.chunks(self.net.apply({"params": params["net"]}, jnp.concatenate([features, noise], -1)))

    def sample(
        self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix | None = None
    ) -> jax.Array:
        chunks = jnp.clip(self.raw(params, observation, noise), -1.0, 1.0)
        return chunks if prefix is None else with_prefix(chunks, prefix)


class GaussianPolicy(_ChunkPolicy):
    """TanhNormal over flat chunks. Parameters: {"encoder", "net"}; the net's outputs are means, then log sigmas."""

    def __init__(self, config: AcrlpdConfig | BcConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        layer_norm, self.log_std_min, self.bc_clip = True, -10.0, EDGE
        activation: Activation = "relu"
        if isinstance(config, AcrlpdConfig):
            layer_norm, self.log_std_min, self.bc_clip = config.policy_layer_norm, config.log_std_min, config.bc_clip
            activation = config.policy_activation
        self.net: Any = Mlp(
            config.hidden,
            2 * self.chunk_dim,
            norm="before" if layer_norm else "none",
            activation=activation,
            kernel_init=config.kernel_init,
            # Published code has one layer for means and one for log sigmas, which matters for xavier's fan-out.
            out_blocks=1 if config.kernel_init == "lecun_normal" else 2,
        )

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_net = jax.random.split(key)
        return self.init_from(k_encoder, k_net, observation)

    def init_from(self, k_encoder: jax.Array, k_net: jax.Array, observation: Observation) -> Params:
        encoder, features = self.init_encoder(k_encoder, observation)
        return encoder | {"net": self.net.init(k_net, features)["params"]}

    def distribution(self, params: Params, observation: Observation) -> TanhNormal:
        outputs = self.net.apply({"params": params["net"]}, self.features(params, observation))
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, self.log_std_min, _LOG_STD_MAX))

    def imitation(self, dist: TanhNormal, batch: ChunkBatch) -> jax.Array:
        """Mean over what `bc_weight` and `bc_dims` mark of -log pi(a | o) per dimension."""
        flat = batch.actions.reshape(batch.actions.shape[0], -1)
        weight = imitated_numbers(batch.bc_weight, batch.bc_dims)
        return -imitation_mean(self.chunks(dist.log_prob(flat, self.bc_clip)), weight, self.config.bc_mean)

    def draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return {}

    def loss(self, params: Params, batch: ChunkBatch, draws: Noise) -> jax.Array:
        batch = imitated(batch)
        return self.imitation(self.distribution(params, batch.observations), batch)

    def candidate_noise(self, key: jax.Array, observation: Observation, count: int, *, explore: bool) -> jax.Array:
        """Standard normal; not exploring, the first candidate is the mode and the others are always the same."""
        if explore:
            return chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, self.config.exploration_knots)
        return jax.random.normal(jax.random.key(0), (count, self.chunk_dim)).at[0].set(0.0)

    def sample(self, params: Params, observation: Observation, noise: jax.Array, prefix: Prefix) -> jax.Array:
        """Chunks float32[N, H, A] for one observation, from noise float32[N, H*A]."""
        dist = TanhNormal(*(jnp.broadcast_to(x, noise.shape) for x in self.distribution(params, observation)))
        return with_prefix(self.chunks(dist.sample_and_log_prob(noise)[0]), prefix)


def with_prefix(chunks: jax.Array, prefix: Prefix) -> jax.Array:
    """Chunks float32[N, H, A] with the committed actions in place of their own."""
    committed = jnp.broadcast_to(prefix[1][:, None] > 0, prefix[0].shape)
    return jnp.where(committed[None], prefix[0][None], chunks)
