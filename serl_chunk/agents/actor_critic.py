"""Base of the agents with a chunk critic: parameters, the critic's regression, and the best of N candidates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.base import PolicyAgent
from serl_chunk.agents.critic import ChunkCritic, PrefixCritic
from serl_chunk.agents.losses import aggregate_heads, of_human
from serl_chunk.agents.optimiser import adam, descend
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, Alone, Context, Noise, Observation, Params, Updated, key_of
from serl_chunk.config.agents.acfql import DecoupledConfig
from serl_chunk.config.agents.base import ActorCriticConfig
from serl_chunk.models.sums import Loss, Metrics, Sum, mean_of
from serl_chunk.types import CRITIC_CHOOSES, ChunkBatch


class ActorCritic(PolicyAgent):
    """Base of agents whose policy is improved by a chunk critic, with or without a short critic.

    With `initial_temperature` above 0 alpha = exp(`log_alpha`) of `AgentState.temperature` keeps a density's entropy,
    the metric "actor/entropy" of the policy's loss, near `target_entropy`.
    """

    config: ActorCriticConfig
    initial_temperature = 0.0
    target_entropy = 0.0

    def __init__(self, config: ActorCriticConfig, spec: AgentSpec, *, with_value: bool = False, **layers: Any) -> None:
        super().__init__(config, spec)
        self.critic = ChunkCritic(config, spec, with_value=with_value, **layers)
        self.short_critic = PrefixCritic(config, spec) if isinstance(config, DecoupledConfig) else None
        self.acting_critic = self.short_critic or self.critic  # its values compare chunks and are bootstrapped from

    def initial_state(self, rng: jax.Array, policy: Params) -> AgentState:
        encoder, _ = self.perception.init_encoder(key_of(rng, "critic encoder"))
        features = self.perception.critic_context({"encoder": encoder}, {}, self.perception.seen_example()).features
        critic = {"encoder": encoder} | self.critic.init(key_of(rng, "critic"), features)
        if self.short_critic is not None:
            critic[self.short_critic.heads] = self.short_critic.init_heads(key_of(rng, "short critic"), features)
        state = self.fresh_state(key_of(rng, "state"), policy, critic, target=("encoder", self.acting_critic.heads))
        if not self.initial_temperature:
            return state
        temperature = {"log_alpha": jnp.log(jnp.asarray(self.initial_temperature, jnp.float32))}
        return state.replace(temperature=temperature, temperature_opt=self.temperature_optimiser.init(temperature))

    @property
    def temperature_optimiser(self) -> optax.GradientTransformation:
        return adam(self.config.optimiser("policy")._replace(weight_decay=0.0))  # decay would draw it to 1

    def temperature_loss(self, temperature: Params, entropy: jax.Array) -> jax.Array:
        """alpha (entropy - target): more noise while entropy is below its target (SAC, section 6)."""
        return jnp.exp(temperature["log_alpha"]) * (entropy - self.target_entropy)

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> Updated:
        before = state.temperature
        state, metrics = super()._apply_policy_gradient(state, grads, metrics)
        if "actor/entropy" not in metrics:  # imitation alone
            return state, metrics
        loss, grad = jax.value_and_grad(self.temperature_loss)(before, metrics["actor/entropy"])
        temperature, opt = descend(self.temperature_optimiser, grad, state.temperature_opt, before)
        state = state.replace(temperature=temperature, temperature_opt=opt)
        return state, {**metrics, "temperature/temperature_loss": loss}

    def best_candidate(self, critic: Params, context: Context, chunks: jax.Array) -> jax.Array:
        """Of flat chunks float32[B, N, Hc*A] the one that `acting_critic` values most, float32[B, Hc*A]."""
        if chunks.shape[1] == 1:
            return chunks[:, 0]
        best = jnp.argmax(self.acting_critic.candidate_values(critic, context.features, chunks), axis=1)
        return jnp.take_along_axis(chunks, best[:, None, None], axis=1)[:, 0]

    def regression(self, critic: Params, context: Context, batch: ChunkBatch, target: jax.Array) -> Loss:
        """The loss of regressing Q(o, a) to a target float32[B], and of a short critic's to Q."""
        chunk = self.critic.truncate_flatten(batch.actions)
        loss, outputs = self.critic.regression(critic, context.features, chunk, target, batch.weight)
        metrics = self.critic.metrics(loss, outputs, target, batch)
        teacher = self.critic.expected_value(outputs)
        of_others = (batch.valid[..., None] > 0) & ~of_human(batch, self.config.own_weight)
        human = jnp.all(~of_others[:, : self.critic.steps], axis=(1, 2)).astype(jnp.float32)
        total = jnp.sum(human * jnp.mean(teacher, axis=0))
        metrics |= {"critic/q_human": Sum(total, jnp.sum(human)), "critic/human_share": mean_of(human)}
        if self.short_critic is None:
            return Loss((loss,), metrics)
        distilled, more = self.short_critic.distil(critic, context.features, batch.actions, teacher, batch.weight)
        return Loss((loss, distilled), metrics | more)

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        critic, opt = descend(self.critic_optimiser, grads, state.critic_opt, state.critic)
        target = optax.incremental_update({k: critic[k] for k in state.target}, state.target, self.config.critic.tau)
        return state.replace(critic=critic, critic_opt=opt, target=target, critic_updates=state.critic_updates + 1)

    def critic_target(self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> jax.Array:
        """y float32[B] of `critic_loss`."""
        raise NotImplementedError

    def critic_loss(self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> Loss:
        now = self.perception.critic_context(critic, base, batch.observations)
        return self.regression(critic, now, batch, self.critic_target(state, base, batch, draws))

    def bootstrapped(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, chunk: jax.Array,
        price: jax.Array | float = 0.0,
    ) -> jax.Array:  # fmt: skip
        """R + gamma^n mask (Q'(o', a') - price), float32[B], of flat chunks a' float32[B, Hc*A]; Q' by `draws`."""
        later = self.perception.critic_context(state.target, base, batch.next_observations)
        value = self.acting_critic.target_values(state.target, draws, later.features, chunk)
        return self.critic.target(batch, value - price)

    def climbed(self, state: AgentState, base: Params, observation: Observation, chunk: jax.Array) -> Sum:
        """The mean of Q(o, a) over heads and chunks a float32[B, H, A], with a gradient to the chunks alone."""
        return mean_of(self.climbed_values(state, base, observation, chunk[:, None]))

    def climbed_values(self, state: AgentState, base: Params, observation: Observation, chunks: jax.Array) -> jax.Array:
        """The mean of Q(o, a) over heads float32[B, N], of chunks float32[B, N, H, A] with a gradient to them alone."""
        now = jax.lax.stop_gradient(self.perception.critic_context(state.critic, base, observation))
        flat = self.acting_critic.truncate_flatten(chunks)
        features = jnp.repeat(now.features, flat.shape[1], axis=0)
        values = self.acting_critic.mean_value(state.critic, features, flat.reshape(-1, flat.shape[-1]))
        return values.reshape(flat.shape[:2])

    def choose(
        self, params: Params, context: Context, chunks: jax.Array, alone: Alone = False
    ) -> tuple[jax.Array, Metrics, jax.Array]:
        """The chunk that acts of candidates float32[N, H, A], the decision's record, and that one's index.

        `alone`: it is the first, and the record has the values of all the same.
        """
        critic, flat = params["critic"], self.acting_critic.truncate_flatten(chunks)
        of_heads = self.acting_critic.values(critic, context.features[None], flat)
        values = aggregate_heads(of_heads, self.acting_critic.config.target_aggregate)
        best = jnp.where(alone, 0, jnp.argmax(values))
        chunk = chunks[best]
        record = {"q": values[best], "values": values}
        if self.config.critic.ensemble > 1:
            record["q_std"] = jnp.std(of_heads[:, best])
        if self.short_critic is not None:
            record |= self.short_critic.plan(critic, context.features, chunk, alone)
        return chunk, record, best

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        critic = self.choosing_params(state)
        return {
            "policy": self.acting_policy(state),
            "critic": {k: critic[k] for k in ("encoder", self.acting_critic.heads)},
            CRITIC_CHOOSES: jnp.asarray(not (pretrained and self.config.learns_to_choose)),
        }
