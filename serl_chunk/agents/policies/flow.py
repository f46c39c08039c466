"""Policies that integrate a velocity field: how decisions of any are sampled, and the flow policy."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from serl_chunk.agents.losses import imitation_sum
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkNetwork, ChunkPolicy, Record, observation_key
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.policy import TrainDelay
from serl_chunk.models.distributions import normal_log_prob
from serl_chunk.models.flow import VelocityField, integrate, interpolate, linear_share, linear_steps, random_step
from serl_chunk.models.sums import Sum
from serl_chunk.types import ChunkBatch

# Wider ones differ more than a young critic can tell.
WIDEST = 0.25  # scale of the noise of the last candidate
ALONE = 0.14  # scale of the noise that a candidate explores from which is compared with no other


class SampledFlow(ChunkPolicy, Protocol):
    """Base of policies that integrate a velocity field from noise (t = 0) to chunks (t = 1).

    Its decisions in iterations: `group.sigma` 0 is the ODE, which has no density.
    `sde`: one step of a decision, whose number is drawn, is random (`models.flow.random_step`), the others are the
    ODE's. Its density is of all numbers of the policy, because later steps mix them. `end`: a Gaussian of fixed
    deviation around the ODE's chunk, whose density is each action's.
    """

    spec: AgentSpec
    steps: int  # of the integration
    train_delay: TrainDelay

    def velocity(self, params: Params, context: Context, x: jax.Array, t: jax.Array, given: jax.Array) -> jax.Array:
        """v at x float32[..., *noise_shape] and t float32[...]; `given` float32[..., H]."""

    def advance(self, params: Params, context: Context, x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step of the ODE from x float32[..., *noise_shape], number `step` int32[...], and the velocity at x."""

    @property
    def sees_given(self) -> bool:
        return self.train_delay != "none"

    def drawn_delay(self, key: jax.Array, size: int) -> Noise:
        """ "delay" int32[B], actions of a window that are given, where `train_delay` is "sampled"."""
        if self.train_delay != "sampled":
            return {}
        return {"delay": jax.random.randint(key_of(key, "delay"), (size,), 0, self.spec.executed)}

    def given(self, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """float32[B, H]: 1 for a window's first d actions, which were committed at its decision (`train_delay`)."""
        b, h = batch.actions.shape[:2]
        if not self.sees_given:
            return jnp.zeros((b, h))
        delay = batch.delay if self.train_delay == "recorded" else draws["delay"]
        return (jnp.arange(h)[None] < delay[:, None]).astype(jnp.float32)

    def record_noise(self, key: jax.Array) -> Noise:
        """ "x0", where the flow starts, and where `group.sigma` is above 0 "z", standard normal, and "step" int32[]."""
        group, shape = self.spec.group, self.noise_shape
        noise = {"x0": group.noise * jax.random.normal(key_of(key, "x0"), shape)}
        if group.sigma:
            noise["z"] = jax.random.normal(key_of(key, "z"), shape)
            noise["step"] = jax.random.randint(key_of(key, "step"), (), 0, self.steps)
        return noise

    def record(self, params: Params, context: Context, noise: Noise) -> Record:
        """ "sample" [..., *noise_shape], and "x0"; or with `sde` "step" int32[...], where it began "x", "next"."""
        group = self.spec.group
        if not group.sigma or group.density == "end":
            end = self.integrated(params, context, noise["x0"])
            return {"x0": noise["x0"], "sample": end + group.sigma * noise["z"] if group.sigma else end}
        step, drawn = noise["step"], self._numbers(noise["step"])

        def advance(carry: tuple[jax.Array, Record], i: jax.Array) -> tuple[tuple[jax.Array, Record], None]:
            x, found = carry
            mean, deviation, ahead = self._random_step(params, context, x, jnp.broadcast_to(i, step.shape))
            ahead = jnp.where(drawn == i, mean + deviation * noise["z"], ahead)
            new = {"x": x, "next": ahead}
            return (ahead, {name: jnp.where(drawn == i, new[name], found[name]) for name in new}), None

        start = noise["x0"], {"x": noise["x0"], "next": noise["x0"]}
        (x, found), _ = jax.lax.scan(advance, start, jnp.arange(self.steps))
        return {**found, "step": step, "sample": x}

    def log_prob(self, params: Params, context: Context, record: Record) -> jax.Array:
        """float32[..., 1] of a random step, float32[..., H] of an end."""
        if self.spec.group.density == "sde":
            mean, deviation, _ = self._random_step(params, context, record["x"], record["step"])
            each = normal_log_prob(record["next"], mean, jnp.broadcast_to(deviation, mean.shape))
            return jnp.sum(each, axis=tuple(range(-len(self.noise_shape), 0)))[..., None]
        mean = self.recorded_chunk({"sample": self.integrated(params, context, record["x0"])})
        return jnp.sum(normal_log_prob(self.recorded_chunk(record), mean, self.spec.group.sigma), axis=-1)

    def integrated(self, params: Params, context: Context, noise: jax.Array) -> jax.Array:
        """Where the ODE takes noise float32[..., *noise_shape], in all numbers of the policy."""
        lead = noise.shape[: noise.ndim - len(self.noise_shape)]

        def advance(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return self.advance(params, context, x, jnp.broadcast_to(i, lead))[0], None

        return jax.lax.scan(advance, noise, jnp.arange(self.steps))[0]

    def _random_step(
        self, params: Params, context: Context, x: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mean and deviation of the random step from x, and the ODE's."""
        ahead, velocity = self.advance(params, context, x, step)
        t = self._numbers(step.astype(jnp.float32) / self.steps)
        return *random_step(x, ahead, velocity, t, 1 / self.steps, self.spec.group.sigma), ahead

    def _numbers(self, values: jax.Array) -> jax.Array:
        """Values [...] with an axis of size 1 for each of `noise_shape`."""
        return values.reshape(*values.shape, *(1 for _ in self.noise_shape))


class FlowPolicy(ChunkNetwork, SampledFlow):
    """Chunks by integrating a learned velocity field, whose parameters are those of the policy.

    The field is v(o, x, t) = net(o, x, t) + k(t) x, where k(t) x is the velocity's regression on x_t of chunks whose
    deviation is `flow.spread`: the net does not carry the noise through its layers in order to subtract it. `published`
    fields have no such part, and start from noise of scale 1 (Li, Zhou and Levine 2025).

    With `train_delay` the field has H more inputs, 1 where an action is given, and sees those actions as they are at
    every t (training-time RTC, Black et al. 2025, with a mask in place of a time per action).

    `layers` are those of `VelocityField`.
    """

    name = "flow"

    def __init__(
        self, flow: FlowConfig, perception: Perception, train_delay: TrainDelay = "none", *, published: bool = False,
        **layers: Any,
    ) -> None:  # fmt: skip
        super().__init__(perception)
        self.flow, self.published, self.train_delay = flow, published, train_delay
        self.steps = flow.steps
        self.field: Any = VelocityField(flow.hidden, self.chunk_dim, **layers)

    def init_network(self, key: jax.Array, features: jax.Array) -> Params:
        batch = features.shape[:-1]
        x = jnp.zeros((*batch, self.chunk_dim), jnp.float32)
        inputs = self._inputs(features, jnp.zeros((*batch, self.spec.horizon)))
        return self.field.init(key, inputs, x, jnp.zeros(batch))["params"]

    def _inputs(self, features: jax.Array, given: jax.Array) -> jax.Array:
        """The field's inputs next to x and t: features float32[..., F] and, with `train_delay`, `given` [..., H]."""
        return jnp.concatenate([features, given], axis=-1) if self.sees_given else features

    def draws(self, key: jax.Array, size: int) -> Noise:
        """ "x0" float32[B, D], standard normal, "t" float32[B], uniform in [0, 1), and "delay" int32[B] if sampled."""
        draws = {
            "x0": jax.random.normal(key_of(key, "x0"), (size, self.chunk_dim)),
            "t": jax.random.uniform(key_of(key, "t"), (size,)),
        }
        return draws | self.drawn_delay(key, size)

    def velocity(self, params: Params, context: Context, x: jax.Array, t: jax.Array, given: jax.Array) -> jax.Array:
        net = self._net(params, context, x, t, given)
        return net if self.published else net + linear_share(t, self.flow.spread)[..., None] * x

    def advance(self, params: Params, context: Context, x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        t = step.astype(jnp.float32) / self.steps
        net = self._net(params, context, x, t, jnp.zeros((*x.shape[:-1], self.spec.horizon)))
        scale, gain = (jnp.asarray(of)[step][..., None] for of in linear_steps(self.steps, self.flow.spread))
        return scale * x + gain * net, net + linear_share(t, self.flow.spread)[..., None] * x

    def recorded_chunk(self, record: Record) -> jax.Array:
        return self.chunks(record["sample"])

    def _net(self, params: Params, context: Context, x: jax.Array, t: jax.Array, given: jax.Array) -> jax.Array:
        return self.field.apply({"params": params}, self._inputs(context.features, given), x, t)

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """Conditional flow matching of |v(o, x_t, t) - (a - z)|^2; x_t of a given action is itself, without weight."""
        flat = chunks.reshape(chunks.shape[0], -1)
        x, velocity = interpolate(draws["x0"], draws["t"], flat)
        if self.sees_given:
            x = jnp.where(jnp.repeat(given, chunks.shape[-1], axis=-1) > 0, flat, x)
            free = 1.0 - given
            weight = weight * (free if weight.ndim == free.ndim else free[..., None])
        error = (self.velocity(params, context, x, draws["t"], given) - velocity) ** 2
        return imitation_sum(error.reshape(chunks.shape), weight)

    def sample(self, params: Params, context: Context, noise: Noise, committed: Committed | None = None) -> jax.Array:
        lead = context.features.shape[:-1]
        given, fixed = jnp.zeros((*lead, self.spec.horizon)), None
        if committed is not None:
            given = jnp.asarray(committed.mask)
            actions = committed.actions.reshape(*lead, 1, self.chunk_dim)
            fixed = (actions, jnp.repeat(given, self.spec.action_dim, axis=-1)[..., None, :])
        features = context.features[..., None, :]

        def net(x: jax.Array, t: jax.Array) -> jax.Array:
            inputs = self._inputs(features, given[..., None, :])
            return self.field.apply({"params": params}, inputs, x, t, repeated=True)

        spread = None if self.published else self.flow.spread
        return self.chunks(integrate(net, noise, self.steps, fixed, clean=self.sees_given, spread=spread))

    def candidate_noise(
        self, key: jax.Array, observation: Observation, count: int, *, explore: bool, alone: jax.Array | bool = False
    ) -> jax.Array:
        """Starting noise of N candidates float32[N, D], scaled from 0 for the first to WIDEST; `published`: all by 1.

        Where the first one explores and is compared with no other, N = 1 or `alone` bool[], its scale is ALONE: an
        imitation that starts from its mode tries nothing.

        A flow policy reproduces its demonstrators' tremor from the noise it starts with; less noise gives chunks nearer
        to the mode. Not exploring, the noise is a function of the observation: the policy is deterministic, but does
        not repeat a draw where the robot got stuck.
        """
        noise = jax.random.normal(key if explore else observation_key(observation), (count, self.chunk_dim))
        if self.published:
            return noise
        scale = jnp.linspace(0.0, WIDEST, count)
        if explore:
            scale = scale.at[0].set(jnp.where(jnp.logical_or(alone, count == 1), ALONE, 0.0))
        return scale[:, None] * noise
