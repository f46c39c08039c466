"""Small networks on the critic's features that change what a constant policy does, and `acfql`, which chooses.

s are the features of an observation that the critic sees, a_ref is the policy's own chunk, z and eps are normal noise.

    edit (EXPO, Dong et al. 2025)         a = a_ref + scale tanh(m(s, a_ref) + sigma(s, a_ref) eps)
                                          L = alpha log pi - mean_k Q_k(o, a); the best of a_ref and N - 1 edits acts
    rlt (RL Token, Xu et al. 2026)        a = m(s, a_ref or 0) + scale eps, which acts
                                          L = beta |a - a_ref|^2 - mean_k Q_k(o, a), with a human's action as its a_ref
    dsrl (DSRL, Wagenmaker et al. 2025)   w = 1.5 tanh(m(s) + sigma(s) eps), and ODE(o, w) acts
                                          L = alpha log pi - mean_k Q^w_k(s, w) + L_w
                                          L_w: regression of Q^w_k(s, w) to mean_k Q_k(o, ODE(o, w)), w half z

Until the critic chooses, a_ref acts. Log-probabilities are means over numbers, before these are scaled.
No loss has a gradient through the ODE, or into another network than its own.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.acfql import Acfql
from serl_chunk.agents.base import PolicyAgent
from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.losses import of_human, rlt_loss, soft_actor_loss
from serl_chunk.agents.policies.base import observation_key
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Alone, Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.models.distributions import TanhNormal
from serl_chunk.models.mlp import Mlp
from serl_chunk.models.sums import Loss, mean_of
from serl_chunk.types import ChunkBatch

_LOG_STD = (-10.0, 2.0)
_WIDEST_NOISE = 1.5  # the paper's bound: a flow knows no noise that is far from its own
_KEPT = 0.5  # share of rows in which rlt's actor reads the reference: it would copy one that is always there


class SmallActor(Acfql):
    """Base; the policy's tree is {"actor"}, next to a policy that is all base."""

    imitates = False
    outputs = 2  # of the actor for each of its numbers
    steers = False  # whether it chooses the noise; else it reads and changes the chunk

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.numbers = math.prod(self.net.noise_shape) if self.steers else self.chunk_dim
        self.actor: Any = Mlp(config.critic.hidden, self.outputs * self.numbers, "before")

    def init(self, rng: jax.Array) -> AgentState:
        _, features = self.perception.init_encoder(key_of(rng, "shape"))
        return self.initial_state(rng, self.fresh(key_of(rng, "actor"), features))

    def fresh(self, key: jax.Array, features: jax.Array) -> Params:
        """The policy's tree behind features float32[1, F]."""
        inputs = features if self.steers else jnp.concatenate([features, jnp.zeros((1, self.numbers))], axis=-1)
        return {"actor": self.actor.init(key, inputs)["params"]}

    def pretrained(self, state: AgentState) -> AgentState:
        return super(PolicyAgent, self).pretrained(state)

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        """ "x" of the policy's own chunk, and "actor" float32[1, D], which is 0 where it does not explore."""
        own = self.net.candidate_noise(key, observation, 1, explore=explore)
        drawn = jax.random.normal(key_of(key, "actor"), (1, self.numbers))
        return {"x": own, "actor": drawn if explore else jnp.zeros_like(drawn)}

    def candidates(
        self, policy: Params, critic: Params, base: Params, observation: Observation, noise: Any,
        committed: Committed | None = None,
    ) -> tuple[jax.Array, Context]:  # fmt: skip
        context, _, seen = self.read(critic, base, observation)

        def sampled(noise: jax.Array) -> jax.Array:
            return self.samples({}, base, context, noise, committed)

        alone = committed is not None and committed.alone
        return self.acted(policy, sampled, seen.features[..., None, :], noise, alone), seen

    @abc.abstractmethod
    def acted(self, policy: Params, sampled: Any, features: jax.Array, noise: Noise, alone: Alone) -> jax.Array:
        """Candidates float32[..., N, H, A] by features float32[..., 1, F] and by `sampled` chunks of noise."""

    def read(self, critic: Params, base: Params, observation: Observation) -> tuple[Context, Observation, Context]:
        """An observation as the policy sees it, with its features, and as the critic sees it, all constants."""
        context = self.net.context({}, base, observation)
        described = self.net.described(context, base, observation)
        seen = self.perception.critic_context(critic, base, described)
        return jax.lax.stop_gradient((context, described, seen))

    def output(self, policy: Params, features: jax.Array, reference: jax.Array | None = None) -> jax.Array:
        """Of the actor, float32[..., outputs * numbers]; `reference` float32[..., H, A] unless it steers."""
        if reference is not None:
            features = jnp.concatenate([features, reference.reshape(*reference.shape[:-2], -1)], axis=-1)
        return self.actor.apply({"params": policy["actor"]}, features)

    def distribution(self, policy: Params, features: jax.Array, reference: jax.Array | None = None) -> TanhNormal:
        mean, log_std = jnp.split(self.output(policy, features, reference), 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, *_LOG_STD))

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """ "x" float32[B, 1, ...] of the policy's own chunk, and "actor" float32[B, D]."""
        rows = len(batch.actions)
        return {
            "x": jax.random.normal(key_of(key, "x"), (rows, 1, *self.net.noise_shape)),
            "actor": jax.random.normal(key_of(key, "actor"), (rows, self.numbers)),
        }

    def chunks(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)


class EditActor(SmallActor):
    """EXPO's edits."""

    initial_temperature, target_entropy = 0.01, -0.5

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        """ "x" of the policy's own chunk, and "actor" float32[N - 1, D] of its edits."""
        noise = super().acting_noise(key, observation, explore=explore, alone=alone)
        key = key_of(key if explore else observation_key(observation), "edit")
        return noise | {"actor": jax.random.normal(key, (self.config.candidates - 1, self.numbers))}

    def acted(self, policy: Params, sampled: Any, features: jax.Array, noise: Noise, alone: Alone) -> jax.Array:
        reference = sampled(noise["x"])
        edit, _ = self.distribution(policy, features, reference).sample_and_log_prob(noise["actor"])
        return jnp.concatenate([reference, reference + self.config.edit_scale * self.chunks(edit)], axis=-3)

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        context, described, seen = self.read(self.choosing_params(state), base, batch.observations)
        reference = self.samples({}, base, context, draws["x"])[:, 0]
        edit, log_prob = self.distribution(policy, seen.features, reference).sample_and_log_prob(draws["actor"])
        chunk = self.bounded(reference + self.config.edit_scale * self.chunks(edit))
        q = self.climbed(state, base, described, chunk)
        # Entropy of actions that no critic scores costs nothing.
        compared = log_prob[:, : self.spec.compared_steps * self.spec.action_dim]
        return soft_actor_loss(jnp.mean(compared, axis=-1), state.temperature["log_alpha"], q)


class RltActor(SmallActor):
    """RL Token's actor."""

    outputs = 1

    def acted(self, policy: Params, sampled: Any, features: jax.Array, noise: Noise, alone: Alone) -> jax.Array:
        reference = sampled(noise["x"])
        chunk = self.chunks(self.output(policy, features, reference))
        chunk = chunk + self.config.edit_scale * self.chunks(noise["actor"])
        return jnp.where(alone, reference, chunk)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """Also "kept" float32[B], 1 where the actor reads the reference."""
        kept = jax.random.bernoulli(key_of(key, "kept"), _KEPT, (len(batch.actions),)).astype(jnp.float32)
        return super().policy_draws(key, batch) | {"kept": kept}

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        context, described, seen = self.read(self.choosing_params(state), base, batch.observations)
        human = of_human(batch, self.config.own_weight)
        reference = jnp.where(human, batch.actions, self.samples({}, base, context, draws["x"])[:, 0])
        chunk = self.chunks(self.output(policy, seen.features, reference * draws["kept"][:, None, None]))
        chunk = chunk + self.config.edit_scale * self.chunks(draws["actor"])
        q = self.climbed(state, base, described, self.bounded(chunk))
        # The distance is that of the output itself: beyond the bounds nothing else has a gradient.
        return rlt_loss(q, chunk, reference, self.config.bc_weight)


class DsrlActor(SmallActor):
    """DSRL's actor of all numbers of the noise; the policy's tree has the values of noise, too, as "noise"."""

    initial_temperature, target_entropy = 0.01, -0.5
    steers = True

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        horizon, width = self.net.noise_shape
        self.noise_critic = ChunkCritic(config, dataclasses.replace(spec, action_dim=width, critic_steps=horizon))

    def fresh(self, key: jax.Array, features: jax.Array) -> Params:
        return super().fresh(key, features) | {"noise": self.noise_critic.init(key_of(key, "noise"), features)}

    def acted(self, policy: Params, sampled: Any, features: jax.Array, noise: Noise, alone: Alone) -> jax.Array:
        own, _ = self.distribution(policy, features).sample_and_log_prob(noise["actor"])
        own = _WIDEST_NOISE * own.reshape(noise["x"].shape)
        return sampled(jnp.where(alone, noise["x"], own))

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """Also "own" bool[B], where the actor's noise is valued in place of "x"."""
        own = jax.random.bernoulli(key_of(key, "own"), 0.5, (len(batch.actions),))
        return super().policy_draws(key, batch) | {"own": own}

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        context, described, seen = self.read(self.choosing_params(state), base, batch.observations)
        squashed, log_prob = self.distribution(policy, seen.features).sample_and_log_prob(draws["actor"])
        own = _WIDEST_NOISE * squashed
        q = mean_of(self.noise_critic.mean_value(policy["noise"], seen.features, own))
        loss = soft_actor_loss(jnp.mean(log_prob, axis=-1), state.temperature["log_alpha"], q)
        valued = jax.lax.stop_gradient(jnp.where(draws["own"][:, None], own, draws["x"].reshape(own.shape)))
        chunk = self.samples({}, base, context, valued.reshape(draws["x"].shape))
        target = jax.lax.stop_gradient(self.climbed_values(state, base, described, chunk)[:, 0])
        of_noise, _ = self.noise_critic.regression(policy["noise"], seen.features, valued, target, batch.weight)
        return Loss((*loss.terms, of_noise), loss.metrics | {"actor/noise_loss": of_noise})


_RULES = {"edit": EditActor, "rlt": RltActor, "dsrl": DsrlActor}


def acfql(config: AcfqlConfig, spec: AgentSpec) -> Acfql:
    """Build the agent that `config.improve_by` names."""
    return _RULES.get(config.improvement, Acfql)(config, spec)
