"""SAC with prior data on flattened chunks (RLPD, Ball 2023; ACRLPD). Horizon 1 is plain RLPD.

Against the published code: log-probabilities are averaged over the H*A dimensions, so that the temperature
does not drown Q <= 1 as H grows; the target holds no entropy by default; the imitation term honours `bc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.base import Agent, AgentState, Metrics, Params, Prefix
from serl_chunk.agents.critic import ChunkCritic, observation_encoder
from serl_chunk.agents.losses import bootstrap_target, critic_values, imitation_mean, regression_loss
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import AcrlpdConfig
from serl_chunk.models.distributions import TanhNormal
from serl_chunk.models.mlp import Mlp
from serl_chunk.types import ChunkBatch

_LOG_STD = (-10.0, 2.0)  # bounds of log sigma


class Acrlpd(Agent):
    """See the module's docstring; `config` is an AcrlpdConfig."""

    config: AcrlpdConfig

    def __init__(self, config: AcrlpdConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.critic = ChunkCritic(config, spec, with_value=False)
        self.encoder: Any = observation_encoder(config)
        self.net: Any = Mlp(config.hidden, 2 * self.chunk_dim, layer_norm=True)

    def init(self, rng: jax.Array) -> AgentState:
        k_encoder, k_net, k_critic, k_state = jax.random.split(rng, 4)
        observation = self.example_observation(1)
        encoder = self.encoder.init(k_encoder, observation).get("params", {})
        features = self.encoder.apply({"params": encoder}, observation)
        policy = {"encoder": encoder, "net": self.net.init(k_net, features)["params"]}
        critic = self.critic.init(k_critic, observation)
        temperature = {"log_alpha": jnp.log(jnp.asarray(self.config.init_temperature, jnp.float32))}
        return AgentState(
            rng=k_state,
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy),
            policy_opt=self.optimiser.init(policy),
            critic=critic,
            critic_opt=self.optimiser.init(critic),
            target=jax.tree.map(jnp.copy, critic),
            temperature=temperature,
            temperature_opt=self.optimiser.init(temperature),
        )

    def distribution(self, policy: Params, observation: Mapping[str, jax.Array]) -> TanhNormal:
        """The policy's TanhNormal over flat chunks float32[..., H*A]."""
        features = self.encoder.apply({"params": policy.get("encoder", {})}, observation)
        mean, log_std = jnp.split(self.net.apply({"params": policy["net"]}, features), 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, *_LOG_STD))

    def _chunks(self, flat: jax.Array) -> jax.Array:
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)

    def _critic_loss(
        self, critic: Params, state: AgentState, batch: ChunkBatch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Mean over heads of the regression of Q_k to R + gamma^n mask min_subset Q'(o', a'), a' ~ pi (RLPD)."""
        k_next, k_heads, k_tail = jax.random.split(key, 3)
        flat, log_prob = self.distribution(state.policy, batch.next_observations).sample_and_log_prob(k_next)
        next_value = self.critic.target_values(
            state.target,
            k_heads,
            self.critic.features(state.target, batch.next_observations),
            self.critic_part(self._chunks(flat)),
        )
        if self.config.backup_entropy:
            next_value = next_value - jnp.exp(state.temperature["log_alpha"]) * jnp.mean(log_prob, -1)
        target = bootstrap_target(batch, self.spec.discount, next_value)
        tail = None
        if self.config.critic.tail == "policy":
            tail_flat, _ = self.distribution(state.policy, batch.observations).sample_and_log_prob(k_tail)
            tail = self._chunks(tail_flat)
        features = self.critic.features(critic, batch.observations)
        outputs = self.critic.outputs(critic, features, self.flat_critic_actions(batch, tail))
        loss = regression_loss(outputs, target, self.config.critic.loss)
        return loss, self.critic.metrics(loss, critic_values(outputs, self.config.critic.loss), target, batch.rewards)

    def _policy_loss(
        self, policy: Params, state: AgentState, batch: ChunkBatch, key: jax.Array, *, imitate_only: bool
    ) -> tuple[jax.Array, Metrics]:
        """E[alpha mean_d log pi - mean_k Q_k] - bc_alpha mean over imitated steps of log pi(a) (SAC; QC-RLPD)."""
        dist = self.distribution(policy, batch.observations)
        imitation = -imitation_mean(
            self._chunks(dist.log_prob(batch.actions.reshape(len(batch.actions), -1))), batch.bc
        )
        if imitate_only:
            return imitation, {"actor/bc_loss": imitation, "actor/bc_share": jnp.mean(batch.bc)}
        flat, log_prob = dist.sample_and_log_prob(key)
        entropy = -jnp.mean(log_prob)
        alpha = jnp.exp(state.temperature["log_alpha"])
        features = jax.lax.stop_gradient(self.critic.features(state.critic, batch.observations))
        q = jnp.mean(self.critic.mean_value(state.critic, features, self.critic_part(self._chunks(flat))))
        loss = -alpha * entropy - q + self.config.bc_alpha * imitation
        return loss, {
            "actor/actor_loss": loss,
            "actor/bc_loss": imitation,
            "actor/bc_share": jnp.mean(batch.bc),
            "actor/entropy": entropy,
            "actor/temperature": alpha,
            "actor/q": q,
        }

    def _policy_step(self, state: AgentState, batch: ChunkBatch, *, imitate_only: bool) -> tuple[AgentState, Metrics]:
        rng, key = jax.random.split(state.rng)
        state = state.replace(rng=rng)
        grads, metrics = jax.grad(
            lambda p: self._policy_loss(p, state, batch, key, imitate_only=imitate_only), has_aux=True
        )(state.policy)
        state = self._apply_policy_gradient(state, grads)
        if imitate_only:
            return state, metrics
        # d/d log_alpha of alpha * (entropy - target): more noise while entropy is below its target (SAC, section 6)
        gap = metrics["actor/entropy"] - self.config.target_entropy_per_dim
        grad = {"log_alpha": jnp.exp(state.temperature["log_alpha"]) * gap}
        updates, temperature_opt = self.optimiser.update(grad, state.temperature_opt, state.temperature)
        temperature = optax.apply_updates(state.temperature, updates)
        metrics["temperature/temperature_loss"] = grad["log_alpha"]
        return state.replace(temperature=temperature, temperature_opt=temperature_opt), metrics

    def _sample_chunk(
        self, params: Params, observation: Mapping[str, jax.Array], key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        n = self.config.candidates
        dist = self.distribution(params["policy"], observation)
        dist = TanhNormal(*(jnp.broadcast_to(x, (n, self.chunk_dim)) for x in dist))
        flat, log_prob = dist.sample_and_log_prob(key if explore else jax.random.key(0))
        if not explore:
            flat, log_prob = flat.at[0].set(dist.mode()[0]), log_prob.at[0].set(dist.mode_log_prob()[0])
        free = jnp.broadcast_to(prefix[1][:, None] == 0, prefix[0].shape)
        chunks = jnp.where(free[None], self._chunks(flat), prefix[0][None])
        features = self.critic.features(params["critic"], observation)
        features = jnp.broadcast_to(features, (n, features.shape[-1]))
        values = self.critic.mean_value(params["critic"], features, self.critic_part(chunks))
        chunk, q, best = self.best_of(values, chunks, params["candidates"])
        # Of what the policy chose: committed actions were not drawn from it.
        own = jnp.sum(self._chunks(log_prob)[best] * free) / jnp.maximum(jnp.sum(free), 1)
        return chunk, {"q": q, "values": values, "log_prob": own}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return {
            "policy": state.policy_average,
            "critic": state.target if self.config.act_by == "target" else state.critic,
            "candidates": self.published_candidates(pretrained=pretrained),
        }
