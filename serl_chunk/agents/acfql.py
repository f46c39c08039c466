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
from serl_chunk.agents.losses import imitated, imitated_numbers
from serl_chunk.agents.policies import FlowPolicy, OneStepPolicy
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Committed, Context, Loss, Metrics, Noise, Observation, Params, key_of
from serl_chunk.config.agents import AcfqlConfig
from serl_chunk.models.sums import Sum, mean_of
from serl_chunk.types import ChunkBatch


class FlowActor(ActorCritic):
    """Base of agents that act by a flow, or by a one-step policy distilled from it.

    The policy's parameters: {"encoder", "flow"} and {"onestep"}.
    """

    flow: FlowPolicy
    one_step: OneStepPolicy | None
    target_steps = 0  # of Euler's method in a target, 0: as in acting

    def init(self, rng: jax.Array) -> AgentState:
        policy = self.init_policy(key_of(rng, "flow"), self.flow, "flow")
        if self.one_step is not None:
            policy["onestep"] = self.init_policy(key_of(rng, "one step"), self.one_step, "net")
        return self.initial_state(rng, policy)

    def sampled(
        self, policy: Params, critic: Params, base: Params, observation: Observation, noise: jax.Array,
        committed: Committed | None = None, steps: int = 0,
    ) -> jax.Array:  # fmt: skip
        """Chunks float32[..., N, H, A] of the policy that acts, within model space, from noise float32[..., N, H*A]."""
        if self.one_step is not None:
            student = policy["onestep"]
            context = self.policy_context(student, critic, base, observation)
            return self.bounded(self.one_step.sample(student["net"], context, noise))
        context = self.policy_context(policy, critic, base, observation)
        return self.bounded(self.flow.sample(policy["flow"], context, noise, committed, steps))

    def next_chunk(self, state: AgentState, base: Params, observations: Observation, noise: jax.Array) -> jax.Array:
        """The best of N chunks at o' by the online critic (QC, equation 7), flat, from noise float32[B, N, D]."""
        acting, steps = self.choosing_params(state), self.target_steps
        sampled = lambda o, z: self.sampled(state.policy, acting, base, o, z, steps=steps)  # noqa: E731
        return self.best_sample(sampled, state.critic, base, observations, noise)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The flow's; for distill-ddpg "distill" float32[B, D], standard normal."""
        draws = self.flow.draws(key, batch)
        if self.one_step is not None:
            draws["distill"] = jax.random.normal(key_of(key, "distill"), draws["x0"].shape)
        return draws

    def distilled(
        self, policy: Params, acting: Params, base: Params, context: Context, batch: ChunkBatch, noise: jax.Array
    ) -> tuple[Sum, jax.Array]:
        """mean (mu(o, z) - clip flow(o, z))^2 without a gradient to the flow, and clip mu(o, z) float32[B, H, A].

        `context` is the flow's; z float32[B, D].
        """
        assert self.one_step is not None
        noise = noise[:, None]
        teacher = jax.lax.stop_gradient(self.bounded(self.flow.sample(policy["flow"], context, noise)))
        seen = self.policy_context(policy["onestep"], acting, base, batch.observations)
        student = self.one_step.sample(policy["onestep"]["net"], seen, noise)
        return mean_of((student - teacher) ** 2), self.bounded(student[:, 0])

    def acting_noise(self, params: Params, key: jax.Array, observation: Observation, *, explore: bool) -> jax.Array:
        alone = jnp.logical_not(params["trusted"]) if self.config.pretrain_candidates == 1 else False
        return self.flow.candidate_noise(key, observation, self.config.candidates, explore=explore, alone=alone)

    def act(
        self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed
    ) -> tuple[jax.Array, Metrics]:
        chunks = self.sampled(params["policy"], params["critic"], base, observation, noise, committed)
        context = self.critic_context(params["critic"], base, observation)
        return self.choose(params, context, self.finished(chunks, committed))[:2]

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        params = super().policy_params(state, pretrained=pretrained)
        if self.one_step is not None:  # the teacher does not travel
            params["policy"] = {"onestep": params["policy"]["onestep"]}
        return params


class Acfql(FlowActor):
    """Q-chunking; see the module's docstring."""

    config: AcfqlConfig

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, with_value=config.target == "expectile")
        self.policy_updates, self.target_steps = config.policy_updates, config.target_flow_steps or 0
        self.flow = FlowPolicy(config.flow, spec)
        self.one_step = OneStepPolicy(config.flow, spec) if config.actor_type == "distill-ddpg" else None

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads', and where needed "next" float32[B, N, D], standard normal."""
        draws = self.critic.head_noise(key_of(key, "heads"))
        if self.config.target == "policy":
            n = self.config.target_candidates if self.one_step is None else 1
            draws["next"] = jax.random.normal(key_of(key, "next"), (batch.actions.shape[0], n, self.chunk_dim))
        return draws

    def critic_target(
        self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise
    ) -> jax.Array:
        """R + gamma^n mask V', float32[B]: V' of the value head, or the target critic's value of `next_chunk`."""
        if self.config.target == "policy":
            chunk = self.next_chunk(state, base, batch.next_observations, draws["next"])
            return self.bootstrapped(state, base, batch, draws, chunk)
        later = self.critic_context(critic, base, batch.next_observations)
        return self.critic.target(batch, self.critic.expected_value(self.critic.value_output(critic, later.features)))

    def critic_loss(self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> Loss:
        """Q regression to the target, plus, for `expectile`, V regression to Q or Q_e (IQL, equations 5 and 6)."""
        now = self.critic_context(critic, base, batch.observations)
        loss = self.regression(critic, now, batch, self.critic_target(critic, state, base, batch, draws))
        if self.config.target != "expectile":
            return loss
        averaged = self.critic_context(state.target, base, batch.observations)
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
        """L_flow, and for distill-ddpg + alpha mean |mu(o, z) - flow(o, z)|^2 - mean Q(o, clip(mu)) (FQL, eq. 8)."""
        acting = self.choosing_params(state)
        shown = imitated(batch)
        context = self.policy_context(policy, acting, base, shown.observations)
        weight, given = imitated_numbers(shown.bc_weight, shown.bc_dims), self.flow.given(shown, draws)
        imitation = self.flow.loss(policy["flow"], context, shown.actions, weight, given, draws)
        metrics = {"actor/bc_loss": imitation, "actor/bc_share": mean_of(batch.bc_weight)}
        if self.one_step is None:
            return Loss((imitation,), metrics)
        if shown is not batch:
            context = self.policy_context(policy, acting, base, batch.observations)
        distance, chunk = self.distilled(policy, acting, base, context, batch, draws["distill"])
        metrics["actor/distill_loss"] = distance
        terms = imitation, distance.times(self.config.alpha)
        if bc_only:
            return Loss(terms, metrics)
        q = self.climbed(state, base, batch.observations, chunk)
        return Loss((*terms, q.times(-1.0)), {**metrics, "actor/q": q})
