"""Base of the agents with a chunk critic: parameters, the critic's regression, and the best of N candidates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.action_selection import best_of_n, is_trusted
from serl_chunk.agents.base import Agent
from serl_chunk.agents.critic import ChunkCritic
from serl_chunk.agents.prefix_critic import PrefixCritic
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Metrics, Observation, Params
from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig
from serl_chunk.types import ChunkBatch

_PREFIX = 3  # folded into a key of which `split` takes 0 to 2


class ActorCritic(Agent):
    """Base of agents whose policy is improved by a chunk critic, with or without a prefix critic."""

    config: AcfqlConfig | AcrlpdConfig

    def __init__(self, config: AcfqlConfig | AcrlpdConfig, spec: AgentSpec, *, with_value: bool) -> None:
        super().__init__(config, spec)
        self.critic = ChunkCritic(config, spec, with_value=with_value)
        self.prefix = PrefixCritic(config, spec) if config.prefix_critic else None
        self.acting_critic = self.prefix or self.critic  # its values compare chunks and are bootstrapped from

    def initial_state(
        self, key: jax.Array, k_critic: jax.Array, policy: Params, observation: Observation
    ) -> AgentState:
        critic = self.critic.init(k_critic, observation)
        if self.prefix is not None:
            features = self.critic.features(critic, observation)
            critic[self.prefix.heads] = self.prefix.init_heads(jax.random.fold_in(k_critic, _PREFIX), features)
        return self.fresh_state(key, policy, critic, averaged=("encoder", self.acting_critic.heads))

    def best_candidate(self, critic: Params, observations: Observation, chunks: jax.Array) -> jax.Array:
        """Of flat chunks float32[B, N, Hc*A] the one that `acting_critic` values most, float32[B, Hc*A]."""
        if chunks.shape[1] == 1:
            return chunks[:, 0]
        features = self.acting_critic.features(critic, observations)
        best = jnp.argmax(self.acting_critic.candidate_values(critic, features, chunks), axis=1)
        return jnp.take_along_axis(chunks, best[:, None, None], axis=1)[:, 0]

    def regression(
        self, critic: Params, batch: ChunkBatch, actions: jax.Array, target: jax.Array
    ) -> tuple[jax.Array, Metrics, jax.Array]:
        """The loss of regressing Q(o, actions) to a target float32[B], and a prefix critic to Q; metrics; features."""
        features = self.critic.features(critic, batch.observations)
        chunk = self.critic.truncate_flatten(actions)
        loss, outputs = self.critic.regression(critic, features, chunk, target, batch.weight)
        metrics = self.critic.metrics(loss, outputs, target, batch)
        if self.prefix is None:
            return loss, metrics, features
        teacher = self.critic.expected_value(outputs)
        distilled, more = self.prefix.distil(critic, features, actions, teacher, batch.weight)
        return loss + distilled, metrics | more, features

    def choose(
        self, params: Params, observation: Observation, chunks: jax.Array
    ) -> tuple[jax.Array, Metrics, jax.Array]:
        """The chunk that acts of candidates float32[N, H, A], the decision's record, and the best one's index."""
        truncate, trusted = self.acting_critic.truncate_flatten, params["trusted"]
        features = self.acting_critic.features(params["critic"], observation)
        values = self.acting_critic.candidate_values(params["critic"], features, truncate(chunks))
        best = best_of_n(values, trusted, self.config.pretrain_candidates)
        chunk = chunks[best]
        record = {"q": values[best], "values": values}
        if self.config.critic.ensemble > 1:
            record["q_std"] = self.acting_critic.head_std(params["critic"], features, truncate(chunk))
        if self.prefix is not None:
            record |= self.prefix.plan(params["critic"], observation, chunk, trusted)
        return chunk, record, best

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        critic = self.choosing_params(state)
        return {
            "policy": self.acting_policy(state),
            "critic": {k: critic[k] for k in ("encoder", self.acting_critic.heads)},
            "trusted": is_trusted(self.config, pretrained=pretrained),
        } | self.shared_params(state)
