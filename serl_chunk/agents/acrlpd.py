"""SAC with prior data on flattened chunks (RLPD, Ball 2023; ACRLPD). Horizon 1 is plain RLPD.

Differences from the published code: log-probabilities are averaged over the H*A dimensions, so that the temperature
does not exceed Q <= 1 as H grows; the target holds no entropy by default; the imitation term is weighted by
`bc_weight`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.losses import imitated, imitated_numbers, soft_actor_loss
from serl_chunk.agents.policies.heads import GaussianPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Acted, AgentState, Alone, Committed, Noise, Observation, Params, key_of
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.models.distributions import TanhNormal
from serl_chunk.models.sums import Loss, mean_of
from serl_chunk.types import ChunkBatch


class GaussianActor(ActorCritic):
    """Base of agents that act by a Gaussian, of parameters {"encoder", "net"}."""

    net: GaussianPolicy

    def init(self, rng: jax.Array) -> AgentState:
        return self.initial_state(rng, self.net.init(key_of(rng, "policy")))

    def distribution(self, policy: Params, critic: Params, base: Params, observations: Observation) -> TanhNormal:
        context = self.perception.policy_context(policy, critic, base, observations)
        return self.net.distribution(policy["net"], context)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return {"pi": jax.random.normal(key_of(key, "pi"), (batch.actions.shape[0], self.chunk_dim))}

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        return self.net.candidate_noise(key, observation, self.config.candidates, explore=explore)

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        policy = params["policy"]
        context = self.perception.policy_context(policy, params["critic"], base, observation)
        chunks, log_prob = self.net.sample_and_log_prob(policy["net"], context, noise)
        seen = self.perception.critic_context(params["critic"], base, observation)
        chunk, record, best = self.choose(params, seen, self.finished(chunks, committed), committed.alone)
        # Committed actions were not drawn from the policy.
        free = jnp.broadcast_to(committed.mask[:, None] == 0, committed.actions.shape)
        return chunk, record | {
            "log_prob": jnp.sum(log_prob[best], where=free) / jnp.maximum(jnp.sum(free, dtype=jnp.float32), 1)
        }


class Acrlpd(GaussianActor):
    """SAC on chunks; see the module's docstring."""

    config: AcrlpdConfig

    def __init__(self, config: AcrlpdConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.imitates = config.bc_alpha > 0
        self.act_by(GaussianPolicy(
            config.hidden, self.perception, layer_norm=config.policy_layer_norm, log_std_min=config.log_std_min,
            kernel_init=config.kernel_init, activation=config.policy_activation,
        ))  # fmt: skip
        # Factors of mean log-probabilities per dimension: of whole chunks (imitated), and of their compared actions.
        # Entropy counts the latter alone, because entropy of actions that no critic scores costs nothing.
        self.compared_dim = spec.compared_steps * spec.action_dim
        summed = config.log_prob == "sum"
        self.dimensions, self.compared_dimensions = (self.chunk_dim, self.compared_dim) if summed else (1, 1)
        self.target_entropy = config.target_entropy_per_dim * self.compared_dimensions
        self.initial_temperature = config.init_temperature

    def joint_log_prob(self, log_prob: jax.Array) -> jax.Array:
        """Mean or sum over compared actions of log-probabilities per dimension float32[..., H*A]: float32[...]."""
        return self.compared_dimensions * jnp.mean(log_prob[..., : self.compared_dim], -1)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads' and "next" float32[B, D], standard normal."""
        following = jax.random.normal(key_of(key, "next"), (batch.actions.shape[0], self.chunk_dim))
        return {"next": following} | self.critic.head_noise(key_of(key, "heads"))

    def critic_target(self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """R + gamma^n mask min_subset Q'(o', a'), a' ~ pi, float32[B] (RLPD)."""
        dist = self.distribution(state.policy, self.choosing_params(state), base, batch.next_observations)
        flat, log_prob = dist.sample_and_log_prob(draws["next"])
        chunk = self.acting_critic.truncate_flatten(self.net.chunks(flat))
        price = jnp.exp(state.temperature["log_alpha"]) * self.joint_log_prob(log_prob)
        return self.bootstrapped(state, base, batch, draws, chunk, price if self.config.backup_entropy else 0.0)

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """E[alpha log pi - mean_k Q_k] - bc_alpha mean over imitated steps of log pi(a) (SAC; QC-RLPD).

        log pi is the mean over dimensions, or the sum (`log_prob`).
        """
        acting, shown = self.choosing_params(state), imitated(batch)
        dist = at_shown = self.distribution(policy, acting, base, batch.observations)
        if shown is not batch:  # else once, and one gradient of it
            at_shown = self.distribution(policy, acting, base, shown.observations)
        weight = imitated_numbers(shown.bc_weight, shown.bc_dims)
        imitation = self.net.imitation(at_shown, shown.actions, weight).times(self.dimensions)
        metrics = {"actor/bc_loss": imitation, "actor/bc_share": mean_of(batch.bc_weight)}
        if bc_only:
            return Loss((imitation,), metrics)
        flat, log_prob = dist.sample_and_log_prob(draws["pi"])
        q = self.climbed(state, base, batch.observations, self.net.chunks(flat))
        loss = soft_actor_loss(self.joint_log_prob(log_prob), state.temperature["log_alpha"], q)
        return Loss((*loss.terms, imitation.times(self.config.bc_alpha)), metrics | loss.metrics)
