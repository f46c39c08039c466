"""How decisions of a flow are sampled, and their densities: one random step on the way, or an end around it."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from serl_chunk.agents.policies.base import ChunkPolicy, Record
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Context, Noise, Params, key_of
from serl_chunk.config.agents.policy import TrainDelay
from serl_chunk.models.distributions import normal_log_prob
from serl_chunk.models.flow import random_step
from serl_chunk.types import ChunkBatch


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
