"""Base of the agents: pure functions over one state, compiled once per shape."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from serl_chunk.agents.losses import soft_update
from serl_chunk.agents.spec import GRIPPER, AgentSpec
from serl_chunk.agents.state import (
    AgentState,
    Loss,
    Metrics,
    Noise,
    Observation,
    Params,
    Prefix,
    Updated,
    flatten_params,
    unflatten_params,
)
from serl_chunk.agents.vision import FrameEmbedder, Vision
from serl_chunk.config.agents import AgentConfig
from serl_chunk.models.encoder import random_shift
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, ChunkBatch

# Without it XLA for CPUs copies each network once an update, because losses read what the update replaces.
_COMPILER_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}

_AUGMENTATION = 2  # folded into a state's key, which updates split (the same as folding in 0 and 1)
_BACKBONE = 3  # folded into a key that updates split and fold 0 to 2 into


def descend(optimiser: optax.GradientTransformation, grads: Params, opt: Any, params: Params) -> tuple[Params, Any]:
    """The parameters after one step of `optimiser`, and its state."""
    updates, opt = optimiser.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def _scan(step: Callable[[AgentState, Any], Updated], state: AgentState, xs: Any, length: int | None = None) -> Updated:
    state, metrics = jax.lax.scan(step, state, xs, length=length)
    return state, jax.tree.map(jnp.mean, metrics)


class Agent(abc.ABC):
    """Base of the agents: updates from the losses and draws that a subclass supplies, and acting.

    `update(state, batches)` takes batches with a leading axis U and runs U critic updates in one compiled scan. The
    policy's update follows the last, or runs on each batch (`update_order`). `update_policy` and `update_critic` run
    one half; where the critic trains the policy's encoder, the latter lets the policy imitate on each batch, so that it
    follows the features. All three donate the state: use the one they return.

    Losses are functions of the parameters they train, with `state` a constant, and of explicit draws: `critic_draws`
    and `policy_draws` make them from a key; `step` takes them.
    """

    supports_prefix = True  # whether `sample` takes the committed actions of a delayed decision
    has_critic = True
    imitates_critic = False  # whether the policy imitates chunks that the critic improved
    imitates = True  # whether the policy's loss has imitation in it
    policy_updates = 1  # policy steps after the critic's, on the last batch

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        self.config, self.spec = config, spec
        self.chunk_dim = spec.horizon * spec.action_dim
        self.optimiser = self._network_optimiser(config.lr)
        self.vision = Vision(config, spec.cameras)
        self.caches_features = config.encoder.cache_features and self.vision.frozen
        # Donated buffers go to outputs of their shape in order: dropping an unused one would shift and copy the rest.
        options = _COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
        compiled = functools.partial(jax.jit, donate_argnums=0, keep_unused=True, compiler_options=options)
        self.update = compiled(self._update)
        self.update_policy = compiled(self._update_policy)
        self.update_critic = compiled(self._update_critic)
        self._sample = jax.jit(self._sample_chunk, static_argnames="explore")

    def _network_optimiser(self, lr: float) -> optax.GradientTransformation:
        decay = self.config.weight_decay
        return self._clipped(optax.adamw(lr, weight_decay=decay) if decay else optax.adam(lr))

    def _clipped(self, optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
        # `identity` keeps the optimiser's tree, so that a resume may switch clipping on or off.
        clip = optax.clip_by_global_norm(self.config.grad_clip) if self.config.grad_clip > 0 else optax.identity()
        return optax.chain(clip, optimiser)

    @abc.abstractmethod
    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise: ...

    @abc.abstractmethod
    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise: ...

    def _critic_loss(self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Noise) -> Loss:
        raise NotImplementedError

    def _policy_loss(self, policy: Params, state: AgentState, batch: ChunkBatch, draws: Noise, bc_only: bool) -> Loss:
        """The policy's loss on the `policy_part` of a batch; with `bc_only` the part of it that needs no critic."""
        raise NotImplementedError

    def batches_used(self, updates: int) -> int:
        """Number of batches that `update` takes for so many critic updates of the learner."""
        return updates

    def with_encoder(self, policy: Params, encoder: Params) -> Params:
        """`policy` with the critic's `encoder` wherever one of its networks reads an observation."""
        return {**policy, "encoder": encoder}

    def _update(self, state: AgentState, batches: ChunkBatch) -> Updated:
        if self.config.update_order == "joint":
            state, metrics = _scan(self._joint_step, state, batches)
            return self._averaged(state), metrics
        state, metrics = _scan(self._critic_step, state, batches)
        last = self._augment(state, jax.tree.map(lambda x: x[-1], batches))
        state, of_policy = self._policy_steps(state, last, self.policy_updates)
        return self._averaged(state), metrics | of_policy

    def _update_policy(self, state: AgentState, batches: ChunkBatch) -> Updated:
        def step(s: AgentState, batch: ChunkBatch) -> Updated:
            return self._policy_steps(s, self._augment(s, batch), 1, bc_only=True)

        state, metrics = _scan(step, state, batches)
        return self._averaged(state), metrics

    def _update_critic(self, state: AgentState, batches: ChunkBatch) -> Updated:
        shared = self.config.encoder.trained_by == "critic" and jax.tree.leaves(state.critic["encoder"])
        if not (shared and self.imitates):
            return _scan(self._critic_step, state, batches)

        def step(s: AgentState, batch: ChunkBatch) -> Updated:
            batch = self._augment(s, batch)
            s, metrics = self._drawn_step(s, batch, "critic")
            s, of_policy = self._policy_steps(s, batch, 1, bc_only=True)
            return s, metrics | of_policy

        state, metrics = _scan(step, state, batches)
        return self._averaged(state), metrics

    def _critic_step(self, state: AgentState, batch: ChunkBatch) -> Updated:
        return self._drawn_step(state, self._augment(state, batch), "critic")

    def _joint_step(self, state: AgentState, batch: ChunkBatch) -> Updated:
        return self._drawn_step(state, self._augment(state, batch), "critic", "policy")

    def _policy_steps(self, state: AgentState, batch: ChunkBatch, updates: int, *, bc_only: bool = False) -> Updated:
        return _scan(lambda s, _: self._drawn_step(s, batch, "policy", bc_only=bc_only), state, None, updates)

    def _drawn_step(self, state: AgentState, batch: ChunkBatch, *parts: str, bc_only: bool = False) -> Updated:
        rng, draws = state.rng, {}
        for part in parts:
            rng, key = jax.random.split(rng)
            draws[part] = (self.critic_draws if part == "critic" else self.policy_draws)(key, batch)
        return self.step(state.replace(rng=rng), batch, draws, bc_only=bc_only)

    def step(
        self, state: AgentState, batch: ChunkBatch, draws: Mapping[str, Noise], *, bc_only: bool = False
    ) -> Updated:
        """One gradient step of "critic", "policy" or both, those that `draws` names.

        Each is updated by its gradient at the parameters before the step (Q-chunking's code).
        """
        metrics: Metrics = {}
        if "critic" in draws:
            critic_grads, metrics = self._critic_gradient(state, batch, draws["critic"])
        if "policy" in draws:
            policy_grads, of_policy = self._policy_gradient(state, batch, draws["policy"], bc_only)
        if "critic" in draws:
            state = self._apply_critic_gradient(state, critic_grads)
        if "policy" in draws:
            state, of_policy = self._apply_policy_gradient(state, policy_grads, of_policy)
            metrics = metrics | of_policy
        return state, metrics

    def _critic_gradient(self, state: AgentState, batch: ChunkBatch, draws: Noise) -> tuple[Params, Metrics]:
        grads, metrics = jax.grad(self._critic_loss, has_aux=True)(state.critic, self._whole(state), batch, draws)
        return grads, {**metrics, "critic/grad_norm": optax.tree.norm(grads)}

    def _policy_gradient(
        self, state: AgentState, batch: ChunkBatch, draws: Noise, bc_only: bool
    ) -> tuple[Params, Metrics]:
        batch = self.policy_part(batch)

        def loss(policy: Params) -> Loss:
            whole = self._whole(state.replace(policy=policy)).policy
            return self._policy_loss(whole, self._whole(state), batch, draws, bc_only)

        return jax.grad(loss, has_aux=True)(state.policy)

    def _whole(self, state: AgentState) -> AgentState:
        """`state` with the acting critic's encoder, a constant, in the policy where the critic trains the encoder."""
        if self.config.encoder.trained_by == "each":
            return state
        encoder = jax.lax.stop_gradient(self.choosing_params(state)["encoder"])
        return state.replace(policy=self.with_encoder(state.policy, encoder))

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        """The target moves towards the critic after the step, or before it (`target_average`)."""
        critic, opt = descend(self.optimiser, grads, state.critic_opt, state.critic)
        followed = critic if self.config.critic.target_average == "new" else state.critic
        target = soft_update({k: followed[k] for k in state.target}, state.target, self.config.critic.tau)
        return state.replace(critic=critic, critic_opt=opt, target=target, critic_updates=state.critic_updates + 1)

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> Updated:
        policy, opt = descend(self.optimiser, grads, state.policy_opt, state.policy)
        average, updates = self._average(state, policy, state.policy_average), state.policy_updates + 1
        return state.replace(policy=policy, policy_average=average, policy_opt=opt, policy_updates=updates), metrics

    def _average(self, state: AgentState, policy: Params, average: Params) -> Params:
        """The exponential average after a step to `policy`; with `policy_ema` 0, `average`."""
        if not self.config.policy_ema:
            return average
        n = state.policy_updates.astype(jnp.float32)
        decay = jnp.minimum(self.config.policy_ema, (1 + n) / (10 + n))  # forgets the first policies soon
        return soft_update(policy, average, 1 - decay)

    def _averaged(self, state: AgentState) -> AgentState:
        return state if self.config.policy_ema else state.replace(policy_average=state.policy)

    def choosing_params(self, state: AgentState) -> Params:
        return state.target if self.config.acting_critic == "target" else state.critic

    def _augment(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        """Both observations shifted at random with independent offsets (DrQ), with a frozen backbone's features."""
        both, pixels = [batch.observations, batch.next_observations], self.config.encoder.shift
        if self.config.image_keys and pixels:
            keys = jax.random.split(jax.random.fold_in(state.rng, _AUGMENTATION))
            both = [random_shift(key, o, pixels) for key, o in zip(keys, both, strict=True)]
        now, later = (self.vision.encode_images(state.frozen, o) for o in both)
        return batch._replace(observations=now, next_observations=later)

    def policy_part(self, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with as many actions as the policy outputs; a critic may score more."""
        h = self.spec.horizon
        if batch.actions.shape[1] == h:
            return batch
        names = ("actions", "valid", "is_demo", "bc_weight", "bc_dims", "bc_action_shift")
        values = {name: getattr(batch, name) for name in names}
        return batch._replace(**{name: value[:, :h] for name, value in values.items() if value is not None})

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> AgentState:
        """A fresh state from a typed key, without the weights of `pretrained`."""

    @abc.abstractmethod
    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool) -> Noise:
        """Starting noise float32[N, H*A] of one decision's candidates; `key` is used only where `explore`."""

    @abc.abstractmethod
    def act(self, params: Params, observation: Observation, noise: Noise, prefix: Prefix) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space from one observation and `acting_noise`, and the decision's record."""

    @abc.abstractmethod
    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The parameters that `sample` needs, `shared_params` among them; `pretrained`: the critic saw no failure."""

    def pretrained(self, state: AgentState) -> AgentState:
        """A fresh state with the weights of `encoder.weights`, a run's start, in every backbone. Raises ConfigError."""
        return self.vision.pretrained(state)

    def sample(
        self, params: Params, observation: Observation, key: jax.Array, *, explore: bool, prefix: Prefix | None = None
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one normalised observation (no batch axis)."""
        h = self.spec.horizon
        if prefix is None:
            prefix = (np.zeros((h, self.spec.action_dim), np.float32), np.zeros(h, np.float32))
        elif len(prefix[1]) > h:  # of the normaliser of a critic of more actions
            prefix = (prefix[0][:h], prefix[1][:h])
        return self._sample(params, dict(observation), key, prefix, explore=explore)

    flatten_params = staticmethod(flatten_params)

    def load_params(self, flat: Mapping[str, np.ndarray]) -> Params:
        """The inverse of `flatten_params`; raises ConfigError as `unflatten_params`."""
        return unflatten_params(flat, self._abstract_params)

    @functools.cached_property  # tracing at every swap would delay a robot
    def _abstract_params(self) -> Params:
        return jax.eval_shape(lambda: self.policy_params(self.init(jax.random.key(0))))

    def network_shape(self) -> str:
        """The travelling parameters' paths and shapes as one text, for the handshake."""
        leaves = sorted(flatten_dict(self._abstract_params, sep="/").items())
        return ";".join(f"{path}{tuple(leaf.shape)}" for path, leaf in leaves)

    def seen_example(self) -> dict[str, jax.Array]:
        """A batch of one observation as networks read it, all zeros."""
        out: dict[str, jax.Array] = {STATE: jnp.zeros((1, self.spec.state_dim), jnp.float32)}
        for c in self.spec.cameras:
            if self.vision.frozen:
                out[FEATURE_PREFIX + c.name] = jnp.zeros((1, *self.vision.feature_shape(c)), jnp.float16)
            else:
                out[IMAGE_PREFIX + c.name] = jnp.zeros((1, c.height, c.width, 3), jnp.uint8)
        if self.config.language.reads:
            out[PROMPT] = jnp.zeros((1, self.config.language.length), jnp.int32)
            out[PROMPT_MASK] = jnp.zeros((1, self.config.language.length), jnp.bool_)
        if self.spec.gripper_inputs:
            out[GRIPPER] = jnp.zeros((1, self.spec.gripper_inputs), jnp.float32)
        return out

    def fresh_state(
        self, key: jax.Array, policy: Params, critic: Params | None = None, *, averaged: tuple[str, ...] = ()
    ) -> AgentState:
        """A state of fresh networks; `averaged` names the critic's parts in the target."""
        critic = critic or {}
        return AgentState(
            rng=key,
            frozen=self.vision.init(jax.random.fold_in(key, _BACKBONE)) if self.vision.frozen else {},
            critic_updates=jnp.zeros((), jnp.int32),
            policy_updates=jnp.zeros((), jnp.int32),
            policy=policy,
            policy_average=jax.tree.map(jnp.copy, policy),
            policy_opt=self.optimiser.init(policy),
            critic=critic,
            critic_opt=self.optimiser.init(critic) if critic else {},
            target={k: jax.tree.map(jnp.copy, critic[k]) for k in averaged},
        )

    def shared_params(self, state: AgentState) -> Params:
        return {"frozen": state.frozen} if self.vision.frozen else {}

    def frame_embedder(self, state: AgentState) -> FrameEmbedder | None:
        """Computes features of stored frames for `encoder.cache_features`; None where it is off."""
        return FrameEmbedder(self.vision, state.frozen) if self.caches_features else None

    def cached_shapes(self) -> list[tuple[int, int, int]]:
        """(h, w, C) of one frame's features of each camera where they are cached, else empty."""
        return [self.vision.feature_shape(c) for c in self.spec.cameras] if self.caches_features else []

    def acting_policy(self, state: AgentState) -> Params:
        return state.policy_average if self.config.policy_ema else state.policy

    def _sample_chunk(
        self, params: Params, observation: Observation, key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        observation = self.vision.encode_images(params.get("frozen", {}), observation)
        if self.config.encoder.trained_by == "critic":
            encoder = params["critic"].get("encoder", {})  # an empty one does not travel
            params = {**params, "policy": self.with_encoder(params["policy"], encoder)}
        return self.act(params, observation, self.acting_noise(key, observation, explore=explore), prefix)
