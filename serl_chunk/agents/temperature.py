"""The temperature of SAC: the weight of the policy's entropy, which is kept near a target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.losses import descend
from serl_chunk.agents.state import AgentState, Metrics, Params, Updated


class Temperature:
    """alpha = exp(`log_alpha`), of `AgentState.temperature` (Haarnoja et al. 2018, section 6)."""

    def __init__(self, optimiser: optax.GradientTransformation, initial: float, target_entropy: float) -> None:
        self.optimiser, self.initial, self.target_entropy = optimiser, initial, target_entropy

    def added(self, state: AgentState) -> AgentState:
        """A fresh `state` with a temperature."""
        temperature = {"log_alpha": jnp.log(jnp.asarray(self.initial, jnp.float32))}
        return state.replace(temperature=temperature, temperature_opt=self.optimiser.init(temperature))

    def value(self, temperature: Params) -> jax.Array:
        return jnp.exp(temperature["log_alpha"])

    def loss(self, temperature: Params, entropy: jax.Array) -> jax.Array:
        """alpha (entropy - target): more noise while entropy is below its target."""
        return self.value(temperature) * (entropy - self.target_entropy)

    def step(self, before: AgentState, after: AgentState, metrics: Metrics) -> Updated:
        """`after`, a step of the policy from `before`, with one of the temperature by that step's entropy."""
        if "actor/entropy" not in metrics:  # imitation alone
            return after, metrics
        loss, grad = jax.value_and_grad(self.loss)(before.temperature, metrics["actor/entropy"])
        temperature, opt = descend(self.optimiser, grad, before.temperature_opt, before.temperature)
        after = after.replace(temperature=temperature, temperature_opt=opt)
        return after, {**metrics, "temperature/temperature_loss": loss}
