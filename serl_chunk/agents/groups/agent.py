"""The agent that trains in iterations on groups of episodes: RIPT-VLA, FlowIPO, and cloning of successes.

It imitates as `Bc` does. Then each iteration goes: `prepare` and `credit` all its rows, `update_rows` minibatch by
minibatch, `end_iteration`. Where all successes so far are cloned, `update_clone` takes batches of the replay instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from serl_chunk.agents.bc import Bc
from serl_chunk.agents.compilation import Compile, Place, compiled
from serl_chunk.agents.groups.advantages import BASELINES, decision_weights, leave_one_out
from serl_chunk.agents.groups.losses import compute_flow_ipo_weights, flow_ipo_loss, ppo_loss
from serl_chunk.agents.groups.rows import Episodes, GroupRows, blocks, taken
from serl_chunk.agents.optimiser import adam, descend
from serl_chunk.agents.policies.flow import SampledFlow
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import (
    Acted,
    AgentState,
    Alone,
    Committed,
    Context,
    Noise,
    Observation,
    Params,
    Updated,
    key_of,
)
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.models.flow import interpolate
from serl_chunk.models.sums import Loss, Metrics
from serl_chunk.types import ChunkBatch


class GroupAgent(Bc):
    """Sampled decisions, their densities, and one gradient step of a rule on rows of groups.

    Exploring, a decision is sampled as `group.density` says, and its record has what the density needs: "sample",
    before any bound, what `ChunkPolicy.record` adds, and "log_prob" float32[R] where there is a density. Not
    exploring, it is the policy's mean.
    """

    config: GroupAgentConfig

    def __init__(self, config: GroupAgentConfig, spec: AgentSpec) -> None:
        super().__init__(config, spec)
        self.group = spec.group
        self.scores = not config.integrates or self.group.sigma > 0  # whether samples have a density
        self.refers = config.rule == "flow_ipo"  # whether the rule reads a reference
        self.iteration_optimiser = adam(config.iteration_optimiser)
        self.baseline = BASELINES[self.group.baseline]() if self.group.baseline in BASELINES else None
        self._block = self.group.minibatch // self.spec.micro_batches  # rows at a time, outside of gradient steps too

    def compile(self, by: Compile = compiled, *, shares: int = 1, place: Place = jnp.array) -> None:
        super().compile(by, shares=shares, place=place)
        self._step_rows = by(self._update_rows, batch=3, updates=True)
        self.update_clone = by(self._update_clone, batch=2, updates=True)
        self._prepare_rows = by(self._prepare, batch=3)
        self._first_features = by(lambda policy, base, seen: self._context(policy, base, seen).features, batch=2)
        self._contexts = by(self._stored_context, batch=1)
        self._begun, self._moved_reference = by(self._fresh_iterations), by(self._averaged_reference)

    def init(self, rng: jax.Array) -> AgentState:
        state = super().init(rng)
        if self.baseline is None:
            return state
        seen = self.perception.seen_example()
        features = self.net.context(state.policy, self.with_base.random(key_of(rng, "base")), seen).features
        critic, opt = self.baseline.init(key_of(rng, "baseline"), features)
        return state.replace(critic=critic, critic_opt=opt)

    # -- acting ----------------------------------------------------------------------------------------------

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        if explore:
            return self.net.record_noise(key)
        return super().acting_noise(key, observation, explore=False)

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        if not isinstance(noise, Mapping):  # of the mean
            return super().act(params, base, observation, noise, committed)
        net, context = self._shown(params["policy"], base, observation)
        record = self.net.record(net, context, noise)
        if self.scores:
            record["log_prob"] = self.net.log_prob(net, context, record)
        return self.finished(self.net.recorded_chunk(record)[None], committed)[0], record

    def states(self, rng: jax.Array) -> Sequence[AgentState]:
        fresh = self.init(rng)
        return [fresh, self._fresh_iterations(fresh)]

    # -- iterations ------------------------------------------------------------------------------------------

    def begin_iterations(self, state: AgentState) -> AgentState:
        """The state at the end of imitation.

        The policy becomes its average, so that what is published is what is trained; the optimiser is fresh.
        """
        begun = self._begun(state)
        return begun.replace(reference=self._kept(begun.reference))

    def _fresh_iterations(self, state: AgentState) -> AgentState:
        policy = self.acting_policy(state)
        reference = jax.tree.map(jnp.copy, policy) if self.refers else {}
        opt = self.iteration_optimiser.init(policy)
        return state.replace(policy=policy, policy_average={}, policy_opt=opt, reference=reference)

    def end_iteration(self, state: AgentState) -> AgentState:
        """Move the reference towards the policy (FlowIPO's average, once an iteration)."""
        if not self.refers:
            return state
        moved = self._averaged_reference if self.group.reference_on == "host" else self._moved_reference
        return state.replace(reference=moved(self._kept(state.policy), state.reference))

    def _averaged_reference(self, policy: Params, reference: Params) -> Params:
        return optax.incremental_update(policy, reference, 1 - self.config.flow_ipo_beta_ref)

    def _kept(self, tree: Params) -> Params:
        """A tree where `group.reference_on` keeps the reference."""
        return jax.device_get(tree) if self.group.reference_on == "host" else tree

    def learns_from(self, outcomes: Sequence[float]) -> bool:
        """Whether a group with these outcomes R changes the policy."""
        if self.config.rule == "flow_ipo":  # which compares decisions of one episode
            return True
        if self.config.rule == "filtered_bc":
            return any(outcomes)
        return self.baseline is not None or len(set(outcomes)) > 1

    def with_contexts(self, base: Params, rows: GroupRows, free: int | None, device: int | None) -> GroupRows:
        """`rows` with contexts in place of observations, where updates do not change them.

        Reference, old policy and all epochs then read one context of each row (document 004's cached observations).
        Rows stay as they are where their contexts would take more than half of the host's `free` bytes, or those of a
        minibatch more than half of what is free of each `device`.
        """
        if self.net.context_axes is None:
            return rows
        total, size = len(rows.weight), self._block
        shapes: Any = jax.eval_shape(self._stored_context, base, next(blocks(rows, size)).observations)
        row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) // size
        needed = (total * row_bytes, free), (self.group.minibatch * row_bytes // self.shares, device)
        if any(most is not None and 2 * takes > most for takes, most in needed):
            return rows
        kept = jax.tree.map(lambda x: np.empty((total, *x.shape[1:]), x.dtype), shapes)
        for i, block in enumerate(blocks(rows, size)):
            contexts = jax.tree.leaves(self._contexts(base, block.observations))
            for whole, part in zip(jax.tree.leaves(kept), contexts, strict=True):
                whole[i * size : (i + 1) * size] = np.asarray(part)[: total - i * size]
        return rows._replace(observations=kept)

    def prepare(self, state: AgentState, base: Params, rows: GroupRows) -> dict[str, np.ndarray]:
        """What `credit` needs of the policy before an iteration's first update, for any number n of rows.

        Returns:
            "old_log_prob" float32[n, R] and "logp_gap" float32[n], the greatest difference from what the actor
            computed; or FlowIPO's "deviation" float32[n], |a - a_ref| over H x A; or nothing.
        """
        if self.config.rule == "filtered_bc":
            return {}
        cut = blocks(rows, self._block)
        parts = [self._prepare_rows(state.policy, state.reference, base, block) for block in cut]
        return {n: np.concatenate([np.asarray(part[n]) for part in parts])[: len(rows.weight)] for n in parts[0]}

    def _prepare(self, policy: Params, reference: Params, base: Params, rows: GroupRows) -> dict[str, jax.Array]:
        if self.refers:
            seen = self._shown(reference, base, self._observed(base, rows))
            ahead = {"sample": cast(SampledFlow, self.net).integrated(*seen, rows.record["x0"])}
            chunk, other = (self.net.recorded_chunk(of) for of in (rows.record, ahead))
            return {"deviation": jnp.sqrt(jnp.sum((chunk - other) ** 2, axis=(1, 2)))}
        log_prob = self.net.log_prob(*self._shown(policy, base, self._observed(base, rows)), rows.record)
        gap = jnp.max(jnp.abs(log_prob - rows.record["log_prob"]), axis=-1)
        return {"old_log_prob": log_prob, "logp_gap": gap}

    def credit(
        self, state: AgentState, base: Params, rows: GroupRows, episodes: Episodes, prepared: Mapping[str, np.ndarray]
    ) -> tuple[AgentState, GroupRows, dict[str, float]]:
        """Fill the advantages, weights and targets of all rows of an iteration, from what `prepare` returned.

        A learned baseline is fitted after its use. The figures are FlowIPO's mean weights, of all rows, and of those
        of successes and failures.
        """
        of, success = episodes.of_rows, episodes.reward > 0.5
        weight, figures = decision_weights(episodes, self.group.weigh), {}
        if self.config.rule == "filtered_bc":
            return state, rows._replace(weight=weight * episodes.reward[of].astype(np.float32)), {}
        if self.refers:
            target = compute_flow_ipo_weights(prepared["deviation"], episodes, self.config.flow_ipo_alpha)
            parts = {"": np.ones(len(of), bool), "_successes": success[of], "_failures": ~success[of]}
            means = {name: float(target[part].mean()) for name, part in parts.items() if part.any()}
            figures = {f"actor/mean_weight{name}": mean for name, mean in means.items()}
            return state, rows._replace(weight=weight, target=target), figures
        state, advantage = self._advantages(state, base, rows, episodes)
        old = prepared["old_log_prob"]
        return state, rows._replace(weight=weight, advantage=advantage[of], old_log_prob=old), figures

    def _advantages(
        self, state: AgentState, base: Params, rows: GroupRows, episodes: Episodes
    ) -> tuple[AgentState, np.ndarray]:
        if self.baseline is None:
            return state, leave_one_out(episodes)
        first, size = np.cumsum(episodes.decisions) - episodes.decisions, self.group.minibatch
        cut = [taken(rows, first[at : at + size], size).observations for at in range(0, len(first), size)]
        features = np.concatenate([self._first_features(state.policy, base, seen) for seen in cut])
        critic, opt = jax.device_get(self.gathered((state.critic, state.critic_opt)))
        critic, opt, advantage = self.baseline.used(critic, opt, features, episodes.reward)
        return state.replace(critic=critic, critic_opt=opt), advantage

    def update_rows(self, state: AgentState, base: Params, rows: GroupRows) -> Updated:
        """One gradient step on `group.minibatch` credited rows; donates the state but for the reference."""
        reference = state.reference
        after, metrics = self._step_rows(state.replace(reference={}), base, reference, rows)
        return after.replace(reference=reference), metrics

    def _update_rows(self, state: AgentState, base: Params, reference: Params, rows: GroupRows) -> Updated:
        rng, key = jax.random.split(state.rng)
        rows = rows._replace(observations=self._observed(base, rows))
        loss = lambda policy, cut: self.rows_loss(policy, reference, base, *cut)  # noqa: E731
        grads, metrics, _ = self.gradient(loss, state.policy, (rows, self.row_draws(key, rows)))
        return self._descended(state.replace(rng=rng), grads, metrics)

    def _update_clone(self, state: AgentState, base: Params, batch: ChunkBatch) -> Updated:
        """One gradient step of imitation with the iterations' optimiser, on a batch of the replay."""
        rng, key = jax.random.split(state.rng)
        batch = self.seen_by_policy(state, base, batch)
        grads, metrics = self._policy_gradient(state, base, batch, self.policy_draws(key, batch), True)
        return self._descended(state.replace(rng=rng), grads, metrics)

    def _descended(self, state: AgentState, grads: Params, metrics: Metrics) -> Updated:
        policy, opt = descend(self.iteration_optimiser, grads, state.policy_opt, state.policy)
        state = state.replace(policy=policy, policy_opt=opt, policy_updates=state.policy_updates + 1)
        return state, metrics | {"actor/grad_norm": optax.tree.norm(grads)}

    def row_draws(self, key: jax.Array, rows: GroupRows) -> Noise:
        """What `rows_loss` draws: nothing for a ratio, else the noise and times of velocities."""
        size = rows.weight.shape[0]
        if self.refers:
            least, most = 1 - self.config.flow_ipo_t_max, 1 - self.config.flow_ipo_t_min  # ours is 0 at the noise
            return {
                "x0": jax.random.normal(key_of(key, "x0"), (size, *self.net.noise_shape)),
                "t": jax.random.uniform(key_of(key, "t"), (size,), minval=least, maxval=most),
            }
        return self.net.draws(key, size) if self.config.rule == "filtered_bc" else {}

    def rows_loss(self, policy: Params, reference: Params, base: Params, rows: GroupRows, draws: Noise) -> Loss:
        """The rule's loss of credited rows."""
        net, context = self._shown(policy, base, rows.observations)
        executed = rows.weight[:, None] * rows.executed
        if self.config.rule == "ppo":
            log_prob = self.net.log_prob(net, context, rows.record)
            # A ratio of the whole decision has the actions that were not executed in it.
            weight = executed if log_prob.shape[-1] == self.spec.horizon > 1 else rows.weight[:, None]
            return ppo_loss(log_prob, rows.old_log_prob, rows.advantage, weight, self.group.clip)
        given = jnp.zeros_like(executed)
        if self.config.rule == "filtered_bc":
            chunk = self.bounded(self.net.recorded_chunk(rows.record))
            loss = self.net.loss(net, context, chunk, executed, given, draws)
            return Loss((loss,), {"actor/bc_loss": loss})
        sample, per_action = rows.record["sample"], (*given.shape, -1)
        x, straight = interpolate(draws["x0"], draws["t"], sample)
        of = cast(SampledFlow, self.net).velocity  # the configuration refuses others
        velocity = of(net, context, x, draws["t"], given)
        seen = context if self.net.context_axes is not None else self._context(reference, base, rows.observations)
        other = of(self.net.network(reference, base), seen, x, draws["t"], given)
        velocity, other, straight = (v.reshape(per_action) for v in (velocity, other, straight))
        return flow_ipo_loss(velocity, other, straight, rows.target, executed)

    def _observed(self, base: Params, rows: GroupRows) -> Observation | Context:
        """Observations as networks read them, once for all encoders."""
        seen = rows.observations
        return seen if isinstance(seen, Context) else self.perception.vision.encode_images(base, seen)

    def _context(self, policy: Params, base: Params, seen: Observation | Context) -> Context:
        if isinstance(seen, Context):
            return jax.tree.map(lambda x, axis: jnp.moveaxis(x, 0, axis), seen, self.net.context_axes)
        return self.net.context(policy, base, seen)

    def _stored_context(self, base: Params, seen: Observation) -> Context:
        """The context with the axis of rows first in each array."""
        context = self.net.context({}, base, seen)
        return jax.tree.map(lambda x, axis: jnp.moveaxis(x, axis, 0), context, self.net.context_axes)

    def _shown(self, policy: Params, base: Params, seen: Observation | Context) -> tuple[Params, Context]:
        return self.net.network(policy, base), self._context(policy, base, seen)
