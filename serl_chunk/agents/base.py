"""Base of the agents: pure functions over one state and a base that no update changes, compiled once per shape."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from serl_chunk.agents.compilation import Compile, Place, compiled
from serl_chunk.agents.losses import imitated, imitated_numbers
from serl_chunk.agents.optimiser import adam, descend, gradient
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import ChunkPolicy, HasBase
from serl_chunk.agents.spec import AgentSpec, BatchSpec, FeatureSpec
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
    flatten_params,
    key_of,
    unflatten_params,
)
from serl_chunk.agents.vision import ObservationEmbedder, digest_of
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.models.sums import Loss, Metrics, mean_of
from serl_chunk.types import Array, ChunkBatch, ConfigError

Given = tuple[Array, Array]  # committed actions float32[..., L, A] of L >= H steps, and their mask float32[..., L]
# Of the blocks in which `Agent.decide` computes `rows`: products of matrices of another size round otherwise. One state
# alone costs what a block does, and larger blocks are hardly faster. Frames cost the same each: a block has one row.
ROWS = 4


def _scan(step: Callable[[AgentState, Any], Updated], state: AgentState, xs: Any, length: int | None = None) -> Updated:
    state, metrics = jax.lax.scan(step, state, xs, length=length)
    return state, jax.tree.map(jnp.mean, metrics)


class Agent(abc.ABC):
    """Base of the agents: updates from the losses and draws that a subclass supplies, and acting.

    `update(state, base, {name: batch})` takes the batches of `wants`, with a leading axis each, and runs U critic
    updates in one compiled scan, the last followed by the policy's. `update_policy` and `update_critic` run one half,
    on a batch with a leading axis; where the critic trains the policy's encoder, the latter lets the policy imitate on
    each batch, so that it follows the features. All three donate the state: use the one they return. The `base` is
    read alone.

    Losses are functions of the parameters they train, with `state` a constant, and of explicit draws: `critic_draws`
    and `policy_draws` make them of a whole batch from a key; `step` takes them, and cuts them into
    `spec.micro_batches`.
    """

    imitates = True  # whether the policy's loss has imitation in it
    policy_updates = 1  # policy steps after the critic's, on the last batch
    together = False  # whether one step on each batch trains critic and policy, as in Q-chunking's code
    gathered: Callable[[Any], Any] = staticmethod(lambda tree: tree)  # arrays that this process can read, see `Devices`

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        self.config, self.spec, self.has_critic = config, spec, config.has_critic
        self.trains_policy = config.trains_policy
        self.perception = Perception(config, spec)
        self.with_base: HasBase = self.perception.vision
        self.chunk_dim = spec.horizon * spec.action_dim
        self.rows = 1 if config.image_keys else ROWS
        self.policy_optimiser = adam(config.optimiser("policy"))
        self.critic_optimiser = adam(config.optimiser("critic"))
        self.new_state = jax.jit(self.init)  # op by op it takes twice as long
        self._sample = jax.jit(self._sample_chunk, static_argnames="explore")
        self._decide = jax.jit(self._decide_each, static_argnames="explore")
        self._decide_some = jax.jit(self._decide_blocks, static_argnames="explore")
        self.compile()

    def compile(self, by: Compile = compiled, *, shares: int = 1, place: Place = jnp.array) -> None:
        """Compile what a learner calls.

        Args:
            shares: parts of a batch, one after the other, of which each is on a device of its own.
            place: takes each array that is read from a file of weights.
        """
        self.shares, self.place = shares, place
        self.copied = by(lambda tree: jax.tree.map(jnp.copy, tree))  # of trees that updates donate
        self.update = by(self._update, batch=2, axis=1, updates=True)
        self.update_policy = by(self._update_policy, batch=2, axis=1, updates=True)
        self.update_critic = by(self._update_critic, batch=2, axis=1, updates=True)

    def updates_of(self, gather: Callable[[Any, Any], tuple[Mapping[str, ChunkBatch], Metrics]]) -> Any:
        """Return calls of `update`, one after the other in one program: (state, base, held, drawn) -> as `update`,
        with `lower` as `jax.jit` has it.

        `gather(held, drawn)` makes the batches of a call on the device, and metrics of them. `drawn` and the metrics
        have a leading axis, the calls.
        """

        def updates(state: AgentState, base: Params, held: Any, drawn: Any) -> Updated:
            def call(state: AgentState, of_call: Any) -> Updated:
                batches, of_batches = gather(held, of_call)
                state, metrics = self._update(state, base, batches)
                return state, metrics | of_batches

            return jax.lax.scan(call, state, drawn)

        return compiled(updates, updates=True)

    # -- parts of agents -------------------------------------------------------------------------------------

    def bounded(self, chunks: jax.Array) -> jax.Array:
        """Chunks within model space, which has bounds or none (`spec.bounded`)."""
        return jnp.clip(chunks, -1.0, 1.0) if self.spec.bounded else chunks

    def finished(self, chunks: jax.Array, committed: Committed) -> jax.Array:
        """Chunks float32[N, H, A] within model space, with the committed actions in place of their own."""
        fixed = jnp.broadcast_to(committed.mask[:, None] > 0, committed.actions.shape)
        return jnp.where(fixed[None], committed.actions[None], self.bounded(chunks))

    # -- what a subclass supplies ----------------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> AgentState:
        """A fresh state from a typed key, without the weights of `pretrained`."""

    @abc.abstractmethod
    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise: ...

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        raise NotImplementedError

    def critic_loss(self, critic: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise) -> Loss:
        raise NotImplementedError

    def policy_loss(
        self, policy: Params, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, *, bc_only: bool
    ) -> Loss:
        """The policy's loss on the `policy_part` of a batch; with `bc_only` the part of it that needs no critic."""
        raise NotImplementedError

    @abc.abstractmethod
    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        """Starting noise float32[N, H*A] of one decision's candidates; `key` is used only where `explore`."""

    @abc.abstractmethod
    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        """Decide by `acting_noise`; with `committed.alone` the first candidate acts, and the critic has no say."""

    @abc.abstractmethod
    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The parameters that `sample` needs besides the base; `pretrained`: the critic saw no failure."""

    def wants(self) -> dict[str, BatchSpec]:
        """The batches of `update` by name. Without one of "policy" the policy has the critic's last.

        What an agent that relabels imitates is made of the replay by the trainer.
        """
        parts = ["critic"] if self.has_critic else []
        if self.config.relabels:
            return {"critic": self.batch_spec("critic")}
        if self.trains_policy and (not parts or self.spec.policy_batch or self.config.imitated_batches):
            parts.append("policy")
        return {part: self.batch_spec(part) for part in parts}

    def batch_spec(self, part: str) -> BatchSpec:
        """The batches of "critic" that `update_critic` takes, or of "policy" that `update_policy` does."""
        if part == "critic":
            return BatchSpec(frames=None if self.config.seen_by_critic == "pixels" else False)
        few = self.config.imitated_batches
        size = self.spec.policy_batch
        return BatchSpec(size, each=False, next_observations=False, frames=few or None, imitated=few)

    # -- updates ---------------------------------------------------------------------------------------------

    def seen(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        """`batch` as critics read it in an update, its images augmented."""
        return self.perception.shifted(state.rng, base, batch)

    def seen_by_policy(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        """`batch` as policies read it in an update, its images augmented."""
        return self.seen(state, base, batch)

    def _update(self, state: AgentState, base: Params, batches: Mapping[str, ChunkBatch]) -> Updated:
        if not self.has_critic:
            return self._update_policy(state, base, batches["policy"], self.policy_updates, bc_only=False)
        parts = ("critic", "policy") if self.together else ("critic",)
        step = lambda s, b: self._drawn_step(s, base, self.seen(s, base, b), *parts)  # noqa: E731
        state, metrics = _scan(step, state, batches["critic"])
        if self.together or not self.trains_policy:
            return state, metrics
        last = jax.tree.map(lambda x: x[-1], batches.get("policy", batches["critic"]))
        state, of_policy = self._policy_steps(state, base, self.seen_by_policy(state, base, last), self.policy_updates)
        return state, metrics | of_policy

    def _update_policy(
        self, state: AgentState, base: Params, batches: ChunkBatch, updates: int = 1, *, bc_only: bool = True
    ) -> Updated:
        def step(s: AgentState, batch: ChunkBatch) -> Updated:
            return self._policy_steps(s, base, self.seen_by_policy(s, base, batch), updates, bc_only=bc_only)

        return _scan(step, state, batches)

    def _update_critic(self, state: AgentState, base: Params, batches: ChunkBatch) -> Updated:
        follows = self.imitates and self.perception.shares_encoder and jax.tree.leaves(state.critic["encoder"])

        def step(s: AgentState, batch: ChunkBatch) -> Updated:
            batch = self.seen(s, base, batch)
            s, metrics = self._drawn_step(s, base, batch, "critic")
            if not follows:
                return s, metrics
            s, of_policy = self._policy_steps(s, base, batch, 1, bc_only=True)
            return s, metrics | of_policy

        return _scan(step, state, batches)

    def _policy_steps(
        self, state: AgentState, base: Params, batch: ChunkBatch, updates: int, *, bc_only: bool = False
    ) -> Updated:
        return _scan(lambda s, _: self._drawn_step(s, base, batch, "policy", bc_only=bc_only), state, None, updates)

    def _drawn_step(
        self, state: AgentState, base: Params, batch: ChunkBatch, *parts: str, bc_only: bool = False
    ) -> Updated:
        rng, draws = state.rng, {}
        for part in parts:
            rng, key = jax.random.split(rng)
            draws[part] = (self.critic_draws if part == "critic" else self.policy_draws)(key, batch)
        return self.step(state.replace(rng=rng), base, batch, draws, bc_only=bc_only)

    def step(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Mapping[str, Noise], *, bc_only: bool = False
    ) -> Updated:
        """One gradient step of "critic", "policy" or both, those that `draws` names.

        Each is updated by its gradient at the parameters before the step (Q-chunking's code).
        """
        metrics: Metrics = {}
        if "critic" in draws:
            with jax.named_scope("critic"):  # for a profiler's trace
                critic_grads, metrics = self._critic_gradient(state, base, batch, draws["critic"])
        if "policy" in draws:
            with jax.named_scope("policy"):
                policy_grads, of_policy = self._policy_gradient(state, base, batch, draws["policy"], bc_only)
        if "critic" in draws:
            state = self._apply_critic_gradient(state, critic_grads)
        if "policy" in draws:
            state, of_policy = self._apply_policy_gradient(state, policy_grads, of_policy)
            metrics = metrics | of_policy
        return state, metrics

    def gradient(self, loss: Callable[[Params, Any], Loss], params: Params, rows: Any) -> Any:
        """`optimiser.gradient` over the micro-batches, to each of which every device has rows."""
        return gradient(loss, params, rows, self.spec.micro_batches, self.shares)

    def _critic_gradient(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise
    ) -> tuple[Params, Metrics]:
        whole = {name: draws[name] for name in draws if name == "heads"}  # of no row of the batch
        rows = batch, {name: value for name, value in draws.items() if name not in whole}

        def loss(critic: Params, cut: tuple[ChunkBatch, Noise]) -> Loss:
            return self.critic_loss(critic, state, base, cut[0], {**cut[1], **whole})

        grads, metrics, _ = self.gradient(loss, state.critic, rows)
        return grads, {**metrics, "critic/grad_norm": optax.tree.norm(grads)}

    def _policy_gradient(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Noise, bc_only: bool
    ) -> tuple[Params, Metrics]:
        loss = lambda policy, cut: self.policy_loss(policy, state, base, *cut, bc_only=bc_only)  # noqa: E731
        grads, metrics, value = self.gradient(loss, state.policy, (self.policy_part(batch), draws))
        return grads, metrics | ({"actor/actor_loss": value} if "actor/q" in metrics else {})

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        raise NotImplementedError

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> Updated:
        policy, opt = descend(self.policy_optimiser, grads, state.policy_opt, state.policy)
        average, updates = self.averaged(state, policy, state.policy_average), state.policy_updates + 1
        return state.replace(policy=policy, policy_average=average, policy_opt=opt, policy_updates=updates), metrics

    def averaged(self, state: AgentState, policy: Params, average: Params) -> Params:
        """The exponential average after a step to `policy`; empty with `policy_ema` 0."""
        if not self.config.policy_ema:
            return {}
        n = state.policy_updates.astype(jnp.float32)
        decay = jnp.minimum(self.config.policy_ema, (1 + n) / (10 + n))  # forgets the first policies soon
        return optax.incremental_update(policy, average, 1 - decay)

    def choosing_params(self, state: AgentState) -> Params:
        return state.target if self.config.acting_critic == "target" else state.critic

    def policy_part(self, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with as many actions as the policy outputs; a critic may score more."""
        h = self.spec.horizon
        if batch.actions.shape[1] == h:
            return batch
        names = ("actions", "valid", "bc_weight", "bc_dims", "bc_action_shift")
        values = {name: getattr(batch, name) for name in names}
        return batch._replace(**{name: value[:, :h] for name, value in values.items() if value is not None})

    def fresh_state(
        self, key: jax.Array, policy: Params, critic: Params | None = None, *, target: tuple[str, ...] = ()
    ) -> AgentState:
        """A state of fresh networks; `target` names the critic's parts in the target network."""
        critic = critic or {}
        return AgentState(
            rng=key,
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy) if self.config.policy_ema else {},
            policy_opt=self.policy_optimiser.init(policy),
            critic=critic,
            critic_opt=self.critic_optimiser.init(critic) if critic else {},
            target={k: jax.tree.map(jnp.copy, critic[k]) for k in target},
        )

    def states(self, rng: jax.Array) -> Sequence[AgentState]:
        """States of which a checkpoint may be, to take their shapes."""
        return [self.init(rng)]

    # -- features of stored observations ---------------------------------------------------------------------

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        """What computes the features that batches have in place of frames; None where there are none."""
        return self.perception.embedder(base)

    def cached_features(self) -> dict[str, FeatureSpec]:
        """The features that `embedder` computes, by name."""
        embedder = self.embedder({})
        return {} if embedder is None else dict(embedder.features)

    # -- base ------------------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The file that the base is read from, on each side; empty where it travels with the parameters."""
        return self.with_base.source

    def new_base(self, rng: jax.Array) -> Params:
        """The base of a run: of its `source`, else random. Raises ConfigError."""
        return self.with_base.base(key_of(rng, "base"), self.place)

    @functools.cached_property
    def source_base(self) -> Params:
        """The base of `source`, read once; empty without one. Raises ConfigError."""
        return self.new_base(jax.random.key(0)) if self.source else {}

    @functools.cached_property
    def base_digest(self) -> str:
        """The digest of the base that both sides read themselves; empty without one. Raises ConfigError."""
        return digest_of(self.source_base, self.gathered)

    def check_base(self, recorded: str) -> None:
        """Raise ConfigError where `recorded`, the digest that a run's checkpoint has, is not that of our base."""
        if recorded and recorded != self.base_digest:
            raise ConfigError(
                f"{self.source or 'no file'} has other weights (digest {self.base_digest or 'none'}) than this run's "
                f"base (digest {recorded}). Give the file that the run began with, and let the same parameters be "
                "trained",
                parameter=self.with_base.source_setting,
            )

    def pretrained(self, state: AgentState) -> AgentState:
        """A fresh state with the weights of `encoder.weights`, a run's start, in every backbone. Raises ConfigError."""
        return self.perception.vision.pretrained(state, self.place)

    def with_policy(self, state: AgentState, published: Mapping[str, np.ndarray]) -> AgentState:
        """A fresh state with the policy of a run, of its published parameters. Raises ConfigError: another network."""
        prefix = "policy/"
        leaves = {path.removeprefix(prefix): leaf for path, leaf in published.items() if path.startswith(prefix)}
        policy = unflatten_params(leaves, state.policy, self.place)
        average = self.copied(policy) if state.policy_average else {}
        return state.replace(policy=policy, policy_average=average)

    # -- acting ----------------------------------------------------------------------------------------------

    def published(self, state: AgentState, base: Params, *, pretrained: bool = False) -> Params:
        """What travels to the actors: `policy_params`, with a base that has no source."""
        params = self.policy_params(state, pretrained=pretrained)
        return params | ({"base": base} if base and not self.source else {})

    def acting_policy(self, state: AgentState) -> Params:
        return state.policy_average or state.policy

    def sample(
        self, params: Params, observation: Observation, key: jax.Array,
        *, explore: bool, committed: Given | None = None, alone: bool = False,
    ) -> Acted:  # fmt: skip
        """A chunk float32[H, A] in model space for one normalised observation (no batch axis).

        `params` are those of `load_params`, or `published` ones with "base" where there is a base. `alone`: see `act`.
        """
        settled = self._committed(committed, np.bool_(alone))
        return self._sample(params, dict(observation), key, settled, explore=explore)

    def decide(
        self, params: Params, observations: Observation, keys: jax.Array,
        *, explore: bool, committed: Given | None = None, alone: np.ndarray | bool = False, rows: int | None = None,
    ) -> Acted:  # fmt: skip
        """`sample` for each of E observations of as many environments, a key each: chunks float32[E, H, A].

        Every array has a leading axis E; `alone` is bool[E], or one for all. Each number of E is compiled once.

        Args:
            rows: only the first ones are wanted, each the same bit for bit whatever runs with it. E is a multiple of
                `self.rows`. What the others hold is not defined.
        """
        n = len(keys)
        each = dict(observations), keys, self._committed(committed, np.broadcast_to(alone, n))
        if rows is None:
            return self._decide(params, each, explore=explore)
        return self._decide_some(params, each, np.int32(-(-rows // self.rows)), explore=explore)

    def _committed(self, given: Given | None, alone: np.ndarray | np.bool_) -> Committed:
        """The committed actions of H steps; none where there are none."""
        h = self.spec.horizon
        if given is None:
            actions = np.zeros((*alone.shape, h, self.spec.action_dim), np.float32)
            return Committed(actions, np.zeros((*alone.shape, h), np.float32), alone)
        return Committed(given[0][..., :h, :], given[1][..., :h], alone)  # a critic of more has a normaliser of more

    def _decide_each(self, params: Params, each: Any, *, explore: bool) -> Acted:
        return jax.vmap(lambda one: self._sample_chunk(params, *one, explore=explore))(each)

    def _decide_blocks(self, params: Params, each: Any, blocks: jax.Array, *, explore: bool) -> Acted:
        split = jax.tree.map(lambda x: x.reshape(-1, self.rows, *x.shape[1:]), each)

        def block(i: int | jax.Array) -> Acted:
            return self._decide_each(params, jax.tree.map(lambda x: x[i], split), explore=explore)

        def put(i: jax.Array, made: Any) -> Any:
            return jax.tree.map(lambda all_, own: all_.at[i].set(own), made, block(i))

        none = jax.tree.map(lambda s: jnp.zeros((len(split[1]), *s.shape), s.dtype), jax.eval_shape(block, 0))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.fori_loop(0, blocks, put, none))

    def _sample_chunk(
        self, params: Params, observation: Observation, key: jax.Array, committed: Committed, *, explore: bool
    ) -> Acted:
        base = params.get("base", {})
        seen = self.perception.vision.encode_images(base, observation)  # once for all encoders
        noise = self.acting_noise(key, observation, explore=explore, alone=committed.alone)
        return self.act(params, base, seen, noise, committed)

    flatten_params = staticmethod(flatten_params)

    def load_params(self, flat: Mapping[str, np.ndarray]) -> Params:
        """The inverse of `flatten_params` of `published`, with the base; raises ConfigError as `unflatten_params`."""
        params = unflatten_params(flat, self._abstract_params)
        return params | ({"base": self.source_base} if self.source else {})

    @functools.cached_property  # tracing at every swap would delay a robot
    def _abstract_params(self) -> Params:
        def made() -> Params:
            key = jax.random.key(0)
            return self.published(self.init(key), self.with_base.random(key))

        return jax.eval_shape(made)

    def network_shape(self) -> str:
        """The travelling parameters' paths and shapes as one text, for the handshake."""
        leaves = sorted(flatten_dict(self._abstract_params, sep="/").items())
        return ";".join(f"{path}{tuple(leaf.shape)}" for path, leaf in leaves)


class PolicyAgent(Agent):
    """Base of agents whose `AgentState.policy` is the tree of a `ChunkPolicy`."""

    net: ChunkPolicy

    def act_by(self, net: ChunkPolicy) -> None:
        """Take the policy, once."""
        self.net, self.with_base = net, net.with_base

    def pretrained(self, state: AgentState) -> AgentState:
        state = super().pretrained(state)
        policy = self.net.pretrained(state.policy, self.place)
        average = self.copied(policy) if state.policy_average else {}
        return state.replace(policy=policy, policy_average=average)

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        return self.net.embedder(base)

    def seen_by_policy(self, state: AgentState, base: Params, batch: ChunkBatch) -> ChunkBatch:
        return self.net.augmented(state.rng, base, batch)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.net.draws(key, len(batch.actions))

    def imitation(
        self, policy: Params, critic: Params, base: Params, batch: ChunkBatch, draws: Noise
    ) -> tuple[Loss, Context]:
        """The policy's own loss over the steps that `bc_weight` marks, and what the policy read of the batch."""
        shown = imitated(batch)
        context, net = self.net.context(policy, base, shown.observations, critic), self.net.network(policy, base)
        weight, given = imitated_numbers(shown.bc_weight, shown.bc_dims), self.net.given(shown, draws)
        loss = self.net.loss(net, context, shown.actions, weight, given, draws)
        return Loss((loss,), {"actor/bc_loss": loss, "actor/bc_share": mean_of(batch.bc_weight)}), context
