"""Q-chunking with a flow policy (Li, Zhou and Levine 2025), and V in its critic's target.

The flow imitates, and the critic chooses among N of its chunks. The critic's target is V, an expectile of Q over the
data (IQL). As published the target is the critic's value of the chunk that the policy would choose: `published_qc`.

With `DecoupledConfig` (decoupled Q-chunking, Li, Park and Levine 2025) the critic Q_h of h actions teaches Q_e of the e
executed ones, and chunks are compared by Q_e:

    Q_h(o, a_0..a_{h-1})  <-  R + gamma^n mask V'(o_{t+n})     online heads; V' below
    Q_e(o, a_0..a_{e-1})  <-  kappa-expectile of Q_h           head k by the online head k, as before this step
    V(o)                  <-  expectile of Q_e                 by the target (averaged) heads of Q_e; V' = V, online

Only Q_e has a target network, and candidates are compared by Q_e.
"""

from __future__ import annotations

import jax

from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.losses.imitation import imitated, imitated_numbers
from serl_chunk.agents.policies.flow import FlowPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Alone, Committed, Loss, Metrics, Noise, Observation, Params, key_of
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.models.sums import mean_of
from serl_chunk.types import ChunkBatch


class FlowActor(ActorCritic):
    """Base of agents that act by a flow. The policy's parameters: {"encoder", "flow"}."""

    flow: FlowPolicy

    def init(self, rng: jax.Array) -> AgentState:
        return self.initial_state(rng, self.flow.init(key_of(rng, "flow")))

    def sampled(
        self, policy: Params, critic: Params, base: Params, observation: Observation, noise: jax.Array,
        committed: Committed | None = None,
    ) -> jax.Array:  # fmt: skip
        """Chunks float32[..., N, H, A] of the policy that acts, within model space, from noise float32[..., N, H*A]."""
        context = self.perception.policy_context(policy, critic, base, observation)
        return self.bounded(self.flow.sample(policy["flow"], context, noise, committed))

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The flow's."""
        return self.flow.draws(key, len(batch.actions))

    def acting_noise(
        self, params: Params, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False
    ) -> jax.Array:
        return self.flow.candidate_noise(key, observation, self.config.candidates, explore=explore, alone=alone)

    def act(
        self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed,
        alone: Alone = False,
    ) -> tuple[jax.Array, Metrics]:  # fmt: skip
        chunks = self.sampled(params["policy"], params["critic"], base, observation, noise, committed)
        context = self.perception.critic_context(params["critic"], base, observation)
        return self.choose(params, context, self.finished(chunks, committed), alone)[:2]


class Acfql(FlowActor):
    """Q-chunking; see the module's docstring."""

    config: AcfqlConfig

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, with_value=True)
        self.policy_updates = config.policy_updates
        self.flow = FlowPolicy(config.flow, self.perception)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads'."""
        return self.critic.head_noise(key_of(key, "heads"))

    def critic_loss(self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> Loss:
        """Q regression to R + gamma^n mask V(o'), plus V regression to Q or Q_e (IQL, equations 5 and 6)."""
        later = self.perception.critic_context(critic, base, batch.next_observations)
        target = self.critic.target(batch, self.critic.expected_value(self.critic.value_output(critic, later.features)))
        now = self.perception.critic_context(critic, base, batch.observations)
        loss = self.regression(critic, now, batch, target)
        averaged = self.perception.critic_context(state.target, base, batch.observations)
        chunk = self.acting_critic.truncate_flatten(batch.actions)
        q = self.acting_critic.target_values(state.target, draws, averaged.features, chunk)
        # The value head reads the encoder without training it: the Q loss alone shapes the features.
        output = self.critic.value_output(critic, jax.lax.stop_gradient(now.features))
        of_value = self.critic.expectile_loss(output, q, self.config.expectile, batch.weight)
        metrics = {"critic/value_loss": of_value, "critic/values": mean_of(self.critic.expected_value(output))}
        return Loss((*loss.terms, of_value), loss.metrics | metrics)

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """L_flow over what `bc_on` names."""
        shown = imitated(batch)
        context = self.perception.policy_context(policy, self.choosing_params(state), base, shown.observations)
        weight, given = imitated_numbers(shown.bc_weight, shown.bc_dims), self.flow.given(shown, draws)
        imitation = self.flow.loss(policy["flow"], context, shown.actions, weight, given, draws)
        return Loss((imitation,), {"actor/bc_loss": imitation, "actor/bc_share": mean_of(batch.bc_weight)})
