"""Q-chunking with a flow policy (Li, Zhou and Levine 2025).

The flow imitates. *best-of-n* (QC): the critic chooses among N of its chunks. *distill-ddpg* (QC-FQL): a one-step
policy, kept near the flow, climbs the critic and acts. The critic's target is either V, an expectile of Q over the data
(IQL), or the target critic's value of the chunk that the policy would choose, as published.

With `prefix_critic` (decoupled Q-chunking, Li, Park and Levine 2025) the critic Q_h of h actions teaches Q_e of the e
executed ones, and chunks are compared by Q_e:

    Q_h(o, a_0..a_{h-1})  <-  R + gamma^n mask V'(o_{t+n})     online heads; V' below
    Q_e(o, a_0..a_{e-1})  <-  kappa-expectile of Q_h           head k by the online head k, as before this step
    V(o)                  <-  expectile of Q_e                 by the target (averaged) heads of Q_e; V' = V, online
    or V'                  =  Q_e(o', a')                      by the target heads, a' chosen by the online heads of Q_e

Only Q_e has a target network, and candidates are compared by Q_e.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.policies import FlowPolicy, OneStepPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Loss, Metrics, Noise, Observation, Params, Prefix
from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.models.convolutions import map_blocks
from serl_chunk.types import ChunkBatch

_ONE_STEP = 2  # folded into keys of which `split` takes 0 and 1


class Acfql(ActorCritic):
    """Q-chunking; see the module's docstring."""

    config: AcfqlConfig

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, with_value=config.target == "expectile")
        self.policy_updates = config.policy_updates
        self.flow = FlowPolicy(config, config.flow, spec)
        self.one_step = OneStepPolicy(config, config.flow, spec) if config.actor_type == "distill-ddpg" else None

    def init(self, rng: jax.Array) -> AgentState:
        k_policy, k_critic, k_state = jax.random.split(rng, 3)
        observation = self.seen_example()
        policy = self.flow.init(k_policy, observation)
        if self.one_step is not None:
            policy["onestep"] = self.one_step.init(jax.random.fold_in(k_policy, _ONE_STEP), observation)
        return self.initial_state(k_state, k_critic, policy, observation)

    def policy_chunks(
        self, policy: Params, observation: Observation, noise: jax.Array, prefix: Prefix | None = None, steps: int = 0
    ) -> jax.Array:
        if self.one_step is not None:
            return self.one_step.sample(policy["onestep"], observation, noise, prefix)
        return self.flow.sample(policy, observation, noise, prefix, steps)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads', and where needed "next" float32[B, N, D], standard normal."""
        _, k_target = jax.random.split(key)
        c, b, draws = self.config, batch.actions.shape[0], {}
        if c.target == "expectile":
            return self.critic.head_noise(k_target)
        k_noise, k_heads = jax.random.split(k_target)
        candidates = c.target_candidates if self.one_step is None else 1
        draws["next"] = jax.random.normal(k_noise, (b, candidates, self.chunk_dim))
        return draws | self.critic.head_noise(k_heads)

    def next_chunk(self, state: AgentState, observations: Observation, noise: jax.Array) -> jax.Array:
        """The best of N chunks at o' by the online critic (QC, equation 7), flat, from noise float32[B, N, D]."""

        def choose(observations: Observation, noise: jax.Array) -> jax.Array:
            chunks = self.policy_chunks(state.policy, observations, noise, steps=self.config.target_flow_steps or 0)
            return self.best_candidate(state.critic, observations, self.acting_critic.truncate_flatten(chunks))

        return map_blocks(choose, (observations, noise), rows=noise.shape[1])

    def critic_target(self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """R + gamma^n mask V', float32[B]: V' of the value head, or the target critic's value of `next_chunk`."""
        if self.config.target == "expectile":
            features = self.critic.features(critic, batch.next_observations)
            next_value = self.critic.expected_value(self.critic.value_output(critic, features))
        else:
            chunk = self.next_chunk(state, batch.next_observations, draws["next"])
            features = self.critic.features(state.target, batch.next_observations)
            next_value = self.acting_critic.target_values(state.target, draws, features, chunk)
        return self.critic.target(batch, next_value)

    def _critic_loss(self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Noise) -> Loss:
        """Q regression to the target, plus, for `expectile`, V regression to Q or Q_e (IQL, equations 5 and 6)."""
        target = self.critic_target(critic, state, batch, draws)
        loss, metrics, features = self.regression(critic, batch, batch.actions, target)
        if self.config.target == "expectile":
            chunk = self.acting_critic.truncate_flatten(batch.actions)
            seen = self.critic.features(state.target, batch.observations)
            q = self.acting_critic.target_values(state.target, draws, seen, chunk)
            # The value head reads the encoder without training it: the Q loss alone shapes the features.
            output = self.critic.value_output(critic, jax.lax.stop_gradient(features))
            value_loss = self.critic.expectile_loss(output, q, self.config.expectile, batch.weight)
            loss = loss + value_loss
            metrics |= {"critic/value_loss": value_loss, "critic/values": jnp.mean(self.critic.expected_value(output))}
        return loss, metrics

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The flow's; for distill-ddpg "distill" float32[B, D], standard normal."""
        draws = self.flow.draws(key, batch)
        if self.one_step is not None:
            draws["distill"] = jax.random.normal(jax.random.fold_in(key, _ONE_STEP), draws["x0"].shape)
        return draws

    def _policy_loss(self, policy: Params, state: AgentState, batch: ChunkBatch, draws: Noise, bc_only: bool) -> Loss:
        """L_flow, and for distill-ddpg + alpha mean |mu(o, z) - flow(o, z)|^2 - mean Q(o, clip(mu)) (FQL, eq. 8)."""
        imitation = self.flow.loss(policy, batch, draws)
        metrics = {"actor/bc_loss": imitation, "actor/bc_share": jnp.mean(batch.bc_weight)}
        if self.one_step is None:
            return imitation, metrics
        noise = draws["distill"][:, None]
        teacher = self.flow.sample(jax.lax.stop_gradient(policy), batch.observations, noise)
        student = self.one_step.raw(policy["onestep"], batch.observations, noise)
        distance = jnp.mean((student - teacher) ** 2)
        loss = imitation + self.config.alpha * distance
        metrics["actor/distill_loss"] = distance
        if bc_only:
            return loss, metrics
        features = self.critic.features(state.critic, batch.observations)
        chunk = self.acting_critic.truncate_flatten(jnp.clip(student[:, 0], -1.0, 1.0))
        values = self.acting_critic.mean_value(state.critic, features, chunk)
        q = jnp.mean(values)
        scale = jnp.mean(jnp.abs(jax.lax.stop_gradient(values))) if self.config.normalise_q else 1.0
        loss = loss - q / jnp.maximum(scale, 1e-6)
        return loss, {**metrics, "actor/actor_loss": loss, "actor/q": q}

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool) -> jax.Array:
        return self.flow.candidate_noise(key, observation, self.config.candidates, explore=explore)

    def act(self, params: Params, observation: Observation, noise: Noise, prefix: Prefix) -> tuple[jax.Array, Metrics]:
        chunks = self.policy_chunks(params["policy"], observation, noise, prefix)
        return self.choose(params, observation, chunks)[:2]

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        params = super().policy_params(state, pretrained=pretrained)
        if self.one_step is not None:  # the teacher does not travel
            params["policy"] = {"onestep": params["policy"]["onestep"]}
        return params

    def with_encoder(self, policy: Params, encoder: Params) -> Params:
        whole = super().with_encoder(policy, encoder)
        if self.one_step is not None:
            whole["onestep"] = {**policy["onestep"], "encoder": encoder}
        return whole
