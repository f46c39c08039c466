"""Q-chunking with a flow policy (Li, Zhou and Levine 2025) or pi0, and V in its critic's target.

The policy imitates, and the critic chooses among N of its chunks. The critic's target is V, an expectile of Q over the
data (IQL). As published the target is the critic's value of the chunk that the policy would choose: `published_qc`.

With `DecoupledConfig` (decoupled Q-chunking, Li, Park and Levine 2025) the critic Q_h of h actions teaches Q_e of the e
executed ones, which has a target network, and by which candidates are compared:

    Q_h(o, a_0..a_{h-1})  <-  R + gamma^n mask V'(o_{t+n})     online heads; V' below
    Q_e(o, a_0..a_{e-1})  <-  kappa-expectile of Q_h           head k by the online head k, as before this step
    V(o)                  <-  expectile of Q_e                 by the target (averaged) heads of Q_e; V' = V, online
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from serl_chunk.agents.actor_critic import ActorCritic
from serl_chunk.agents.bc import policy_of
from serl_chunk.agents.compilation import Compile, Place, compiled
from serl_chunk.agents.losses import q_gradient_loss
from serl_chunk.agents.policies.base import observation_key
from serl_chunk.agents.spec import AgentSpec, BatchSpec
from serl_chunk.agents.state import Acted, AgentState, Alone, Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.models.sums import Loss, Metrics, mean_of
from serl_chunk.types import STATE, ChunkBatch


class FlowActor(ActorCritic):
    """Base of agents that act by the best of some samples of a policy."""

    def init(self, rng: jax.Array) -> AgentState:
        return self.initial_state(rng, self.net.init(key_of(rng, "flow")))

    def shown(self, policy: Params, critic: Params, base: Params, observation: Observation) -> Context:
        """An observation as what samples it reads it."""
        return self.net.context(policy, base, observation, critic)

    def candidates(
        self, policy: Params, critic: Params, base: Params, observation: Observation, noise: Any,
        committed: Committed | None = None,
    ) -> tuple[jax.Array, Context]:  # fmt: skip
        """The candidates float32[..., N, H, A] of an observation, and what the critic sees of it."""
        context = self.shown(policy, critic, base, observation)
        seen = self.perception.critic_context(critic, base, self.net.described(context, base, observation))
        return self.samples(policy, base, context, noise, committed), seen

    def samples(
        self, policy: Params, base: Params, context: Context, noise: Any, committed: Committed | None = None
    ) -> jax.Array:
        """Chunks float32[..., N, H, A] of the policy that acts, within model space, from noise [..., N, ...]."""
        return self.bounded(self.net.sample(self.net.network(policy, base), context, noise, committed))

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        return self.net.candidate_noise(key, observation, self.config.candidates, explore=explore, alone=alone)

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        policy, critic = params.get("policy", {}), params["critic"]  # a constant one has no parameters
        chunks, seen = self.candidates(policy, critic, base, observation, noise, committed)
        return self.choose(params, seen, self.finished(chunks, committed), committed.alone)[:2]


class Acfql(FlowActor):
    """Q-chunking; see the module's docstring."""

    config: AcfqlConfig

    def __init__(self, config: AcfqlConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec, with_value=config.target == "data")
        self.policy_updates = config.policy_updates
        self.act_by(policy_of(config, self.perception))

    def compile(self, by: Compile = compiled, *, shares: int = 1, place: Place = jnp.array) -> None:
        super().compile(by, shares=shares, place=place)
        self.relabel = by(self._relabel, batch=2)

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        """The candidates'; with `edit_scale` that of the first, "x", and the steps of the others, "edit"."""
        noise = super().acting_noise(key, observation, explore=explore, alone=alone)
        if not (scale := self.config.edit_scale):
            return noise
        key = key_of(key if explore else observation_key(observation), "edit")
        steps = jax.random.normal(key, (self.config.candidates - 1, 1, self.spec.action_dim))
        return {"x": noise[:1], "edit": scale * steps}

    def samples(
        self, policy: Params, base: Params, context: Context, noise: Any, committed: Committed | None = None
    ) -> jax.Array:
        if not isinstance(noise, dict):
            return super().samples(policy, base, context, noise, committed)
        first = super().samples(policy, base, context, noise["x"], committed)
        return jnp.concatenate([first, first + noise["edit"]], axis=-3)

    def _relabel(self, state: AgentState, base: Params, batch: ChunkBatch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """The best float32[B, H, A] of the acting policy's candidates by the mean of the target's heads."""
        noise = self.candidate_draws(key, batch.observations)
        chunks, context = self.candidates(self.acting_policy(state), state.target, base, batch.observations, noise)
        chunks = self.bounded(chunks)
        features, flat = context.features[:, None], self.acting_critic.truncate_flatten(chunks)
        values = jnp.mean(self.acting_critic.values(state.target, features, flat), axis=0)
        best = jnp.argmax(values, axis=1)
        metrics = {
            "relabel/other_share": jnp.mean(best > 0),
            "relabel/q_first": jnp.mean(values[:, 0]),
            "relabel/q_best": jnp.mean(jnp.max(values, axis=1)),
        }
        return jnp.take_along_axis(chunks, best[:, None, None, None], axis=1)[:, 0], metrics

    def candidate_draws(self, key: jax.Array, observations: Observation) -> Noise:
        """The noise of candidates that explore, a leading axis B on every array."""
        draw = lambda key, one: self.acting_noise(key, one, explore=True)  # noqa: E731
        return jax.vmap(draw)(jax.random.split(key, len(observations[STATE])), observations)

    def batch_spec(self, part: str) -> BatchSpec:
        spec = super().batch_spec(part)
        if part == "critic":
            return spec._replace(frames=True) if self.config.target == "policy" else spec
        return spec._replace(imitated=spec.imitated and not self.config.follows_critic)

    def seen(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        # Features are of frames without augmentation.
        features = self.perception.segments and self.config.target == "policy"
        return batch if features else super().seen(state, base, batch)

    def seen_by_policy(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        return batch if self.config.follows_critic else super().seen_by_policy(state, base, batch)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The policy's, and "samples" float32[B, N, ...] of `q_gradient`."""
        draws = super().policy_draws(key, batch)
        if self.config.improve_by != "q_gradient":
            return draws
        shape = (len(batch.actions), self.config.actor_samples, *self.net.noise_shape)
        return draws | {"samples": jax.random.normal(key_of(key, "samples"), shape)}

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        """The heads', and of candidates "next" with `target=policy`."""
        heads = self.critic.head_noise(key_of(key, "heads"))
        if self.config.target == "data":
            return heads
        return heads | {"next": self.candidate_draws(key_of(key, "next"), batch.next_observations)}

    def critic_loss(self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> Loss:
        """Q regression to R + gamma^n mask V(o'), plus V regression to Q or Q_e (IQL, equations 5 and 6).

        With `target=policy` V(o') is Q' of that candidate at o' which Q' compares best.
        """
        if self.config.target == "policy":
            policy, shown = self.acting_policy(state), cast(Observation, batch.observations)
            chunks, context = self.candidates(policy, state.target, base, batch.next_observations, draws["next"])
            flat = self.acting_critic.truncate_flatten(self.bounded(chunks))
            best = self.best_candidate(state.target, context, flat)
            value = self.acting_critic.target_values(state.target, draws, context.features, best)
            if self.perception.segments:
                shown = self.net.described(self.net.context(policy, base, shown), base, shown)
            seen = self.perception.critic_context(critic, base, shown)
            return self.regression(critic, seen, batch, self.critic.target(batch, value))
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
        """Imitation of what `bc_on` names; with `q_gradient` also the critic's value of the best of some samples."""
        acting = self.choosing_params(state)
        imitation, context = self.imitation(policy, acting, base, batch, draws)
        if bc_only or self.config.improve_by != "q_gradient":
            return imitation
        if batch.bc_state_shift is not None:  # which imitation alone sees
            context = self.net.context(policy, base, batch.observations, acting)
        seen = self.net.described(context, base, batch.observations)
        values = self.climbed_values(state, base, seen, self.samples(policy, base, context, draws["samples"]))
        loss = q_gradient_loss(values, imitation.terms[0], self.config.bc_weight)
        return Loss(loss.terms, imitation.metrics | loss.metrics)
