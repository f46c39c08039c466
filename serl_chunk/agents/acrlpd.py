"""SAC with prior data on flattened chunks (RLPD, Ball 2023; ACRLPD). Horizon 1 is plain RLPD.

Differences from the published code: log-probabilities are averaged over the H*A dimensions, so that the temperature
does not exceed Q <= 1 as H grows; the target holds no entropy by default; the imitation term is weighted by
`bc_weight`.

With `prefix_critic` (decoupled Q-chunking, see prefix_critic.py) the critic Q_h of h actions is regressed to
R + gamma^n mask Q_e'(o', a'). Only Q_e has a target network (Q_e'); the policy climbs the online Q_e.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.base import descend
from serl_chunk.agents.losses import imitated
from serl_chunk.agents.policies import GaussianPolicy, with_prefix
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Loss, Metrics, Noise, Observation, Params, Prefix, Updated
from serl_chunk.config.agents import AcrlpdConfig
from serl_chunk.models.distributions import TanhNormal
from serl_chunk.types import ChunkBatch


class Acrlpd(ActorCritic):
    """SAC on chunks; see the module's docstring."""

    config: AcrlpdConfig

    def __init__(self, config: AcrlpdConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, with_value=False)
        self.imitates = config.bc_alpha > 0
        self.gaussian = GaussianPolicy(config, spec)
        self.temperature_optimiser = self._clipped(optax.adam(config.lr))  # weight decay would draw it to 1
        # Factors of mean log-probabilities per dimension: of whole chunks (imitated), and of their compared actions.
        # Entropy counts the latter alone, because entropy of actions that no critic scores costs nothing.
        self.compared_dim = spec.compared_steps * spec.action_dim
        summed = config.log_prob == "sum"
        self.dimensions, self.compared_dimensions = (self.chunk_dim, self.compared_dim) if summed else (1, 1)

    def init(self, rng: jax.Array) -> AgentState:
        k_encoder, k_net, k_critic, k_state = jax.random.split(rng, 4)
        observation = self.seen_example()
        policy = self.gaussian.init_from(k_encoder, k_net, observation)
        state = self.initial_state(k_state, k_critic, policy, observation)
        temperature = {"log_alpha": jnp.log(jnp.asarray(self.config.init_temperature, jnp.float32))}
        return state.replace(temperature=temperature, temperature_opt=self.temperature_optimiser.init(temperature))

    def joint_log_prob(self, log_prob: jax.Array) -> jax.Array:
        """Mean or sum over compared actions of log-probabilities per dimension float32[..., H*A]: float32[...]."""
        return self.compared_dimensions * jnp.mean(log_prob[..., : self.compared_dim], -1)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads' and "next" float32[B, D], standard normal."""
        k_next, k_heads, _ = jax.random.split(key, 3)
        following = jax.random.normal(k_next, (batch.actions.shape[0], self.chunk_dim))
        return {"next": following} | self.critic.head_noise(k_heads)

    def critic_target(self, state: AgentState, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """R + gamma^n mask min_subset Q'(o', a'), a' ~ pi, float32[B] (RLPD)."""
        observations = batch.next_observations
        flat, log_prob = self.gaussian.distribution(state.policy, observations).sample_and_log_prob(draws["next"])
        chunk = self.acting_critic.truncate_flatten(self.gaussian.chunks(flat))
        features = self.critic.features(state.target, observations)
        next_value = self.acting_critic.target_values(state.target, draws, features, chunk)
        if self.config.backup_entropy:
            next_value -= jnp.exp(state.temperature["log_alpha"]) * self.joint_log_prob(log_prob)
        return self.critic.target(batch, next_value)

    def _critic_loss(self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Noise) -> Loss:
        return self.regression(critic, batch, batch.actions, self.critic_target(state, batch, draws))[:2]

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return {"pi": jax.random.normal(key, (batch.actions.shape[0], self.chunk_dim))}

    def _policy_loss(self, policy: Params, state: AgentState, batch: ChunkBatch, draws: Noise, bc_only: bool) -> Loss:
        """E[alpha log pi - mean_k Q_k] - bc_alpha mean over imitated steps of log pi(a) (SAC; QC-RLPD).

        log pi is the mean over dimensions, or the sum (`log_prob`).
        """
        dist = self.gaussian.distribution(policy, batch.observations)
        if self.config.bc_invalid:
            batch = batch._replace(bc_weight=jnp.ones_like(batch.bc_weight), bc_dims=None)
        shown = imitated(batch)
        at_shown = dist if shown is batch else self.gaussian.distribution(policy, shown.observations)
        imitation = self.dimensions * self.gaussian.imitation(at_shown, shown)
        metrics = {"actor/bc_loss": imitation, "actor/bc_share": jnp.mean(batch.bc_weight)}
        if bc_only:
            return imitation, metrics
        flat, log_prob = dist.sample_and_log_prob(draws["pi"])
        entropy = -jnp.mean(self.joint_log_prob(log_prob))
        alpha = jnp.exp(state.temperature["log_alpha"])
        features = jax.lax.stop_gradient(self.critic.features(state.critic, batch.observations))
        chunk = self.acting_critic.truncate_flatten(self.gaussian.chunks(flat))
        q = jnp.mean(self.acting_critic.mean_value(state.critic, features, chunk))
        loss = -alpha * entropy - q + self.config.bc_alpha * imitation
        metrics |= {"actor/actor_loss": loss, "actor/entropy": entropy, "actor/temperature": alpha, "actor/q": q}
        return loss, metrics

    def _temperature_loss(self, temperature: Params, entropy: jax.Array) -> jax.Array:
        """alpha (entropy - target): more noise while entropy is below its target (SAC, section 6)."""
        target = self.config.target_entropy_per_dim * self.compared_dimensions
        return jnp.exp(temperature["log_alpha"]) * (entropy - target)

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> Updated:
        before = state.temperature
        state, metrics = super()._apply_policy_gradient(state, grads, metrics)
        if "actor/entropy" not in metrics:  # imitation alone
            return state, metrics
        loss, grad = jax.value_and_grad(self._temperature_loss)(before, metrics["actor/entropy"])
        temperature, opt = descend(self.temperature_optimiser, grad, state.temperature_opt, before)
        state = state.replace(temperature=temperature, temperature_opt=opt)
        return state, {**metrics, "temperature/temperature_loss": loss}

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool) -> jax.Array:
        return self.gaussian.candidate_noise(key, observation, self.config.candidates, explore=explore)

    def act(self, params: Params, observation: Observation, noise: Noise, prefix: Prefix) -> tuple[jax.Array, Metrics]:
        one = self.gaussian.distribution(params["policy"], observation)
        dist = TanhNormal(*(jnp.broadcast_to(x, noise.shape) for x in one))
        flat, log_prob = dist.sample_and_log_prob(noise)
        chunks = with_prefix(self.gaussian.chunks(flat), prefix)
        chunk, record, best = self.choose(params, observation, chunks)
        drawn = self.gaussian.chunks(log_prob)[best]
        # Committed actions were not drawn from the policy.
        free = jnp.broadcast_to(prefix[1][:, None] == 0, prefix[0].shape)
        return chunk, record | {"log_prob": jnp.sum(drawn * free) / jnp.maximum(jnp.sum(free), 1)}
