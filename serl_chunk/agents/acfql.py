"""Q-chunking with a flow policy (Li, Zhou and Levine 2025), its best-of-N form.

The policy imitates (flow matching); the critic improves on it by choosing among N of its chunks. The critic's
target is either V, an expectile of Q over the data (IQL; no policy sample needed, hence fast), or the target
critic's value of the best of N policy samples, as published.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Agent, AgentState, Metrics, Params, Prefix
from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.flow_policy import FlowPolicy, candidate_noise
from serl_chunk.agents.losses import bootstrap_target, critic_values, expectile_weight, regression_loss
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.types import ChunkBatch


class Acfql(Agent):
    """See the module's docstring; `config` is an AcfqlConfig."""

    config: AcfqlConfig

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.flow = FlowPolicy(config, config.flow, spec)
        self.critic = ChunkCritic(config, spec, with_value=config.target == "expectile")

    def init(self, rng: jax.Array) -> AgentState:
        k_policy, k_critic, k_state = jax.random.split(rng, 3)
        observation = self.example_observation(1)
        policy = self.flow.init(k_policy, observation)
        critic = self.critic.init(k_critic, observation)
        return AgentState(
            rng=k_state,
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy),
            policy_opt=self.optimiser.init(policy),
            critic=critic,
            critic_opt=self.optimiser.init(critic),
            target={k: jax.tree.map(jnp.copy, critic[k]) for k in ("encoder", "q")},
            temperature={},
            temperature_opt={},
        )

    def _critic_loss(
        self, critic: Params, state: AgentState, batch: ChunkBatch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Q regression to R + gamma^n mask V', plus, for `expectile`, V regression to Q (IQL, equations 5 and 6)."""
        k_tail, k_target = jax.random.split(key)
        tail = self._policy_chunk(state, batch, k_tail) if self.config.critic.tail == "policy" else None
        chunk = self.flat_critic_actions(batch, tail)
        kind = self.config.critic.loss
        if self.config.target == "expectile":
            next_value = critic_values(
                self.critic.value_output(critic, self.critic.features(critic, batch.next_observations)), kind
            )
        else:
            next_value = self._best_of_policy(state, batch.next_observations, k_target)
        target = bootstrap_target(batch, self.spec.discount, next_value)
        features = self.critic.features(critic, batch.observations)
        outputs = self.critic.outputs(critic, features, chunk)
        loss = regression_loss(outputs, target, kind)
        metrics = self.critic.metrics(loss, critic_values(outputs, kind), target, batch.rewards)
        if self.config.target == "expectile":
            q = self.critic.target_values(
                state.target, k_target, self.critic.features(state.target, batch.observations), chunk
            )
            # The value head reads the encoder without training it: the Q loss alone shapes the features.
            output = self.critic.value_output(critic, jax.lax.stop_gradient(features))
            value = critic_values(output, kind)
            weight = expectile_weight(q, value, self.config.expectile)
            value_loss = regression_loss(output, jax.lax.stop_gradient(q), kind, weight)
            loss = loss + value_loss
            metrics |= {"critic/value_loss": value_loss, "critic/values": jnp.mean(value)}
        return loss, metrics

    def _policy_chunk(self, state: AgentState, batch: ChunkBatch, key: jax.Array) -> jax.Array:
        """One policy sample for each observation of the batch, float32[B, H, A]."""
        noise = jax.random.normal(key, (batch.actions.shape[0], 1, self.chunk_dim))
        return self.flow.sample(state.policy, batch.observations, noise)[:, 0]

    def _best_of_policy(self, state: AgentState, observations: Mapping[str, jax.Array], key: jax.Array) -> jax.Array:
        """max over N policy chunks by the online critic, valued by the target critic: float32[B] (QC, equation 7)."""
        k_noise, k_heads = jax.random.split(key)
        batch = observations["state"].shape[0]
        noise = jax.random.normal(k_noise, (batch, self.config.target_candidates, self.chunk_dim))
        chunks = self.critic_part(self.flow.sample(state.policy, observations, noise))  # [B, N, Hc*A]
        features = self.critic.features(state.critic, observations)
        broadcast = jnp.broadcast_to(features[:, None], (*chunks.shape[:2], features.shape[-1]))
        best = jnp.argmax(self.critic.mean_value(state.critic, broadcast, chunks), axis=1)
        chosen = jnp.take_along_axis(chunks, best[:, None, None], axis=1)[:, 0]
        return self.critic.target_values(
            state.target, k_heads, self.critic.features(state.target, observations), chosen
        )

    def _policy_step(self, state: AgentState, batch: ChunkBatch, *, imitate_only: bool) -> tuple[AgentState, Metrics]:
        updates = 1 if imitate_only else self.config.policy_updates
        state, loss = self._policy_gradient_steps(self.flow.loss, state, batch, updates)
        return state, {"actor/bc_loss": loss, "actor/bc_share": jnp.mean(batch.bc)}

    def _sample_chunk(
        self, params: Params, observation: Mapping[str, jax.Array], key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        noise = candidate_noise(
            key, observation, self.config.candidates, self.chunk_dim, low=self.config.flow.noise_low, explore=explore
        )
        chunks = self.flow.sample(params["policy"], observation, noise, prefix)
        features = self.critic.features(params["critic"], observation)
        features = jnp.broadcast_to(features, (len(chunks), features.shape[-1]))
        values = self.critic.mean_value(params["critic"], features, self.critic_part(chunks))
        chunk, q, _ = self.best_of(values, chunks, params["candidates"])
        return chunk, {"q": q, "values": values}

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        critic = state.target if self.config.act_by == "target" else state.critic
        return {
            "policy": state.policy_average,
            "critic": {k: critic[k] for k in ("encoder", "q")},
            "candidates": self.published_candidates(pretrained=pretrained),
        }
