"""What every agent is: pure functions over one state, compiled once per shape.

An agent supplies its losses; this module turns them into the three compiled updates the learner calls, and
into the parameter trees that travel.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.agents.exploration import chunk_noise
from serl_chunk.agents.losses import replace_tail, soft_update
from serl_chunk.agents.registry import GRIPPER, AgentSpec
from serl_chunk.agents.vision import Vision
from serl_chunk.config.agents import AgentConfig
from serl_chunk.models.encoder import random_shift
from serl_chunk.types import IMAGE_PREFIX, STATE, Array, ChunkBatch, ConfigError

Params = Any  # a nested dict of arrays
Metrics = dict[str, jax.Array]
Draws = dict[str, jax.Array]  # the random numbers of one loss, by what they are for
Noise = Any  # an array, or a dict of them: what `acting_noise` gives and `act` takes
Prefix = tuple[Array, Array]  # committed actions float32[H, A] in model space, mask float32[H]

# Folded into a state's key; `split(key)` is the same as folding in 0 and 1, which updates use.
_AUGMENTATION = 2
_BACKBONE = 3


class AgentState(flax.struct.PyTreeNode):
    """Everything an update changes. Trees an agent does not use are empty dicts."""

    rng: jax.Array
    critic_updates: jax.Array  # int32 scalar
    policy_updates: jax.Array  # int32 scalar
    policy: Params
    policy_average: Params  # exponential average of `policy`: what acts
    policy_opt: Any
    critic: Params
    critic_opt: Any
    target: Params
    temperature: Params
    temperature_opt: Any
    frozen: Params = flax.struct.field(default_factory=dict)  # the frozen backbone, in no optimiser
    grasp: Params = flax.struct.field(default_factory=dict)  # of a grasp critic, see agents/gripper.py


class Agent(abc.ABC):
    """Base of the agents.

    `update(state, batches)` takes batches with a leading axis U and runs U critic updates in one compiled scan, the
    last followed by the policy's, or the two side by side on each (`update_order`); `update_policy` and `update_critic`
    run only one half (pretraining and critic warm-up). All three donate the state: use what they return.

    Losses are functions of explicit draws: `critic_draws` and `policy_draws` make them of a key, `critic_step`,
    `policy_step` and `joint_step` take them.
    """

    supports_prefix = True  # whether `sample` takes the committed actions of a delayed decision
    has_critic = True
    policy_updates = 1  # policy steps after the critic's, on the last batch

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        self.config = config
        self.spec = spec
        self.chunk_dim = spec.horizon * spec.action_dim
        self.optimiser = self._network_optimiser(config.lr)
        self.vision = Vision(config, spec.cameras)
        # Donated buffers go to the outputs of their shape in order. Were an unused one left out, all behind it would
        # move up by one, and each would be copied.
        self.update = jax.jit(self._update, donate_argnums=0, keep_unused=True)
        self.update_policy = jax.jit(self._update_policy, donate_argnums=0, keep_unused=True)
        self.update_critic = jax.jit(self._update_critic, donate_argnums=0, keep_unused=True)
        self._sample = jax.jit(self._sample_chunk, static_argnames="explore")

    def _network_optimiser(self, lr: float) -> optax.GradientTransformation:
        decay = self.config.weight_decay
        return self._clipped(optax.adamw(lr, weight_decay=decay) if decay else optax.adam(lr))

    def _clipped(self, optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
        # `identity` keeps the optimiser's tree the same, so that a resume may switch clipping on or off.
        clip = optax.clip_by_global_norm(self.config.grad_clip) if self.config.grad_clip > 0 else optax.identity()
        return optax.chain(clip, optimiser)

    # -- what an agent supplies ------------------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, rng: jax.Array) -> AgentState:
        """A fresh state from a typed key; pretrained weights come by `pretrained`."""

    @abc.abstractmethod
    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Draws:
        """The random numbers of the critic's loss on `batch`."""

    @abc.abstractmethod
    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Draws:
        """The random numbers of the policy's loss on `batch`."""

    @abc.abstractmethod
    def _critic_loss(
        self, critic: Params, state: AgentState, batch: ChunkBatch, draws: Draws
    ) -> tuple[jax.Array, Metrics]:
        """The critic's loss as a function of `critic`; everything in `state` is a constant."""

    @abc.abstractmethod
    def _policy_loss(
        self, policy: Params, state: AgentState, batch: ChunkBatch, draws: Draws, *, imitate_only: bool
    ) -> tuple[jax.Array, Metrics]:
        """The policy's loss as a function of `policy`; everything in `state` is a constant.

        Of `batch` it is given the `policy_part`.
        """

    @abc.abstractmethod
    def acting_noise(self, key: jax.Array, observation: Mapping[str, jax.Array], *, explore: bool) -> Noise:
        """What the candidates of one decision start from, float32[N, H*A]; the key counts only where `explore`."""

    @abc.abstractmethod
    def act(
        self, params: Params, observation: Mapping[str, jax.Array], noise: Noise, prefix: Prefix
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one observation and `acting_noise`, and the decision's record."""

    @abc.abstractmethod
    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The tree that `sample` needs, nothing else; `pretrained`: as long as the critic has seen no failure.

        `shared_params` is a part of it.
        """

    def batches_used(self, updates: int) -> int:
        """How many batches `update` wants for `updates` of the learner's critic updates; all of them, as a rule."""
        return updates

    # -- what callers use ------------------------------------------------------------------------------------

    def pretrained(self, state: AgentState) -> AgentState:
        """A fresh state with the weights of `encoder.weights` in every backbone; raises ConfigError.

        Only what begins a run needs the file: a resume has them in its checkpoint, an actor in its first snapshot.
        """
        return self.vision.pretrained(state)

    def sample(
        self,
        params: Params,
        observation: Mapping[str, jax.Array],
        key: jax.Array,
        *,
        explore: bool,
        prefix: Prefix | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """A chunk float32[H, A] in model space for one normalised observation (no batch axis).

        `prefix` may be longer than a chunk, as a normaliser for a critic of more actions makes it; the rest is ignored.
        """
        h = self.spec.horizon
        if prefix is None:
            prefix = (np.zeros((h, self.spec.action_dim), np.float32), np.zeros(h, np.float32))
        elif len(prefix[1]) > h:
            prefix = (prefix[0][:h], prefix[1][:h])
        return self._sample(params, dict(observation), key, prefix, explore=explore)

    def flatten_params(self, params: Params) -> dict[str, np.ndarray]:
        """`path -> array` on the host: what a snapshot carries."""
        return {k: np.asarray(v) for k, v in flatten_dict(params, sep="/").items()}

    def load_params(self, flat: Mapping[str, np.ndarray]) -> Params:
        """The inverse of `flatten_params`, copied to the device.

        Raises ConfigError naming the first missing, unknown or wrongly shaped path.
        """
        expected = flatten_dict(self._abstract_params, sep="/")
        for path, leaf in expected.items():
            if path not in flat:
                raise ConfigError(f"the snapshot lacks {path!r}; it comes from another agent or network shape")
            if tuple(flat[path].shape) != tuple(leaf.shape):
                raise ConfigError(
                    f"snapshot parameter {path!r} has shape {tuple(flat[path].shape)}, this agent's is "
                    f"{tuple(leaf.shape)}: use the same --exp_name and --config.agent options on both sides"
                )
        unknown = sorted(set(flat) - set(expected))
        if unknown:
            raise ConfigError(f"the snapshot carries {unknown[0]!r}, which this agent does not have")
        return unflatten_dict({k: jnp.array(v) for k, v in flat.items()}, sep="/")  # jnp.array copies

    @functools.cached_property
    def _abstract_params(self) -> Params:
        """Shapes of the travelling parameters; cached, because tracing them at every swap would delay a robot."""
        return jax.eval_shape(lambda: self.policy_params(self.init(jax.random.key(0))))

    def network_shape(self) -> str:
        """The travelling parameters' paths and shapes as one text, for the handshake."""
        leaves = flatten_dict(self._abstract_params, sep="/")
        return ";".join(f"{k}{tuple(v.shape)}" for k, v in sorted(leaves.items()))

    def example_observation(self, batch: int | None = None) -> dict[str, jax.Array]:
        """Zeros of an observation's shapes, with a batch axis or without."""
        lead = () if batch is None else (batch,)
        out: dict[str, jax.Array] = {STATE: jnp.zeros((*lead, self.spec.state_dim), jnp.float32)}
        for c in self.spec.cameras:
            out[IMAGE_PREFIX + c.name] = jnp.zeros((*lead, c.height, c.width, 3), jnp.uint8)
        if self.spec.gripper_inputs:
            out[GRIPPER] = jnp.zeros((*lead, self.spec.gripper_inputs), jnp.float32)
        return out

    def seen_example(self, batch: int) -> dict[str, jax.Array]:
        """`example_observation` as the networks see it: with a frozen backbone's features in place of images."""
        out = self.example_observation(batch)
        return self.vision.seen(self.vision.zeros(), out) if self.vision.frozen else out

    def frozen_params(self, key: jax.Array) -> Params:
        """A fresh state's `frozen`, from the key that becomes its `rng`: the frozen backbone, or nothing."""
        return self.vision.init(jax.random.fold_in(key, _BACKBONE)) if self.vision.frozen else {}

    def shared_params(self, state: AgentState) -> Params:
        """What `policy_params` holds for all networks together: {"frozen"} where a backbone is frozen."""
        return {"frozen": state.frozen} if self.vision.frozen else {}

    def with_encoder(self, policy: Params, encoder: Params) -> Params:
        """`policy` with the critic's `encoder` wherever one of its networks reads an observation."""
        return {**policy, "encoder": encoder}

    # -- compiled updates ------------------------------------------------------------------------------------

    def _update(self, state: AgentState, batches: ChunkBatch) -> tuple[AgentState, Metrics]:
        if self.config.update_order == "together":
            state, metrics = jax.lax.scan(self._joint_step, state, batches)
            return self._averaged(state), jax.tree.map(jnp.mean, metrics)
        state, metrics = self._update_critic(state, batches)
        last = self._augment(state, jax.tree.map(lambda x: x[-1], batches))
        state, policy_metrics = self._policy_steps(state, last, self.policy_updates, imitate_only=False)
        return self._averaged(state), {**metrics, **policy_metrics}

    def _update_policy(self, state: AgentState, batches: ChunkBatch) -> tuple[AgentState, Metrics]:
        def step(s: AgentState, batch: ChunkBatch) -> tuple[AgentState, Metrics]:
            return self._policy_steps(s, self._augment(s, batch), 1, imitate_only=True)

        state, metrics = jax.lax.scan(step, state, batches)
        return self._averaged(state), jax.tree.map(jnp.mean, metrics)

    def _update_critic(self, state: AgentState, batches: ChunkBatch) -> tuple[AgentState, Metrics]:
        state, metrics = jax.lax.scan(self._critic_step, state, batches)
        return state, jax.tree.map(jnp.mean, metrics)

    def _critic_step(self, state: AgentState, batch: ChunkBatch) -> tuple[AgentState, Metrics]:
        batch = self._augment(state, batch)
        rng, key = jax.random.split(state.rng)
        return self.critic_step(state.replace(rng=rng), batch, self.critic_draws(key, batch))

    def _joint_step(self, state: AgentState, batch: ChunkBatch) -> tuple[AgentState, Metrics]:
        batch = self._augment(state, batch)
        rng, critic_key = jax.random.split(state.rng)
        rng, policy_key = jax.random.split(rng)
        draws = self.critic_draws(critic_key, batch), self.policy_draws(policy_key, batch)
        return self.joint_step(state.replace(rng=rng), batch, *draws)

    def _policy_steps(
        self, state: AgentState, batch: ChunkBatch, updates: int, *, imitate_only: bool
    ) -> tuple[AgentState, Metrics]:
        """`updates` policy steps on one batch with fresh draws; the metrics' means."""

        def step(s: AgentState, _: None) -> tuple[AgentState, Metrics]:
            rng, key = jax.random.split(s.rng)
            return self.policy_step(s.replace(rng=rng), batch, self.policy_draws(key, batch), imitate_only=imitate_only)

        state, metrics = jax.lax.scan(step, state, None, length=updates)
        return state, jax.tree.map(jnp.mean, metrics)

    # -- one gradient step each, with explicit draws -----------------------------------------------------------

    def critic_step(self, state: AgentState, batch: ChunkBatch, draws: Draws) -> tuple[AgentState, Metrics]:
        """One critic update, and the target's: towards the critic of after it, or before (`target_average`)."""
        grads, metrics = self._critic_gradient(state, batch, draws)
        return self._apply_critic_gradient(state, grads), metrics

    def policy_step(
        self, state: AgentState, batch: ChunkBatch, draws: Draws, *, imitate_only: bool
    ) -> tuple[AgentState, Metrics]:
        """One policy update; what else belongs to it (a temperature) is the agent's."""
        grads, metrics = self._policy_gradient(state, batch, draws, imitate_only=imitate_only)
        return self._apply_policy_gradient(state, grads, metrics)

    def joint_step(
        self, state: AgentState, batch: ChunkBatch, critic_draws: Draws, policy_draws: Draws
    ) -> tuple[AgentState, Metrics]:
        """Critic and policy, each by its gradient at the parameters of before the step (Q-chunking's code)."""
        critic_grads, metrics = self._critic_gradient(state, batch, critic_draws)
        policy_grads, policy_metrics = self._policy_gradient(state, batch, policy_draws, imitate_only=False)
        state = self._apply_critic_gradient(state, critic_grads)
        state, policy_metrics = self._apply_policy_gradient(state, policy_grads, policy_metrics)
        return state, {**metrics, **policy_metrics}

    def _critic_gradient(self, state: AgentState, batch: ChunkBatch, draws: Draws) -> tuple[Params, Metrics]:
        grads, metrics = jax.grad(self._critic_loss, has_aux=True)(state.critic, self._whole(state), batch, draws)
        return grads, {**metrics, "critic/grad_norm": optax.tree.norm(grads)}

    def _policy_gradient(
        self, state: AgentState, batch: ChunkBatch, draws: Draws, *, imitate_only: bool
    ) -> tuple[Params, Metrics]:
        batch = self.policy_part(batch)

        def loss(policy: Params) -> tuple[jax.Array, Metrics]:
            whole = self._whole(state.replace(policy=policy)).policy
            return self._policy_loss(whole, self._whole(state), batch, draws, imitate_only=imitate_only)

        return jax.grad(loss, has_aux=True)(state.policy)

    def _whole(self, state: AgentState) -> AgentState:
        """`state` as losses see it: where the critic trains the encoder, the policy has the acting critic's, constant.

        One encoder then serves updates and acting, and travels once. With `act_by=target` it is the averaged one.
        """
        if self.config.encoder.trained_by == "each":
            return state
        encoder = jax.lax.stop_gradient(self.choosing_params(state)["encoder"])
        return state.replace(policy=self.with_encoder(state.policy, encoder))

    def choosing_params(self, state: AgentState) -> Params:
        """The parameters of the critic that chooses among candidates: the online ones, or their average (`act_by`)."""
        return state.target if self.config.act_by == "target" else state.critic

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        updates, critic_opt = self.optimiser.update(grads, state.critic_opt, state.critic)
        critic = optax.apply_updates(state.critic, updates)
        followed = critic if self.config.critic.target_average == "new" else state.critic
        target = soft_update({k: followed[k] for k in state.target}, state.target, self.config.critic.tau)
        return state.replace(
            critic=critic, critic_opt=critic_opt, target=target, critic_updates=state.critic_updates + 1
        )

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> tuple[AgentState, Metrics]:
        updates, policy_opt = self.optimiser.update(grads, state.policy_opt, state.policy)
        policy, average = optax.apply_updates(state.policy, updates), state.policy_average
        if self.config.policy_ema:
            average = soft_update(policy, average, 1 - self._ema_decay(state))
        state = state.replace(
            policy=policy, policy_average=average, policy_opt=policy_opt, policy_updates=state.policy_updates + 1
        )
        return state, metrics

    def _ema_decay(self, state: AgentState) -> jax.Array:
        n = state.policy_updates.astype(jnp.float32)
        return jnp.minimum(self.config.policy_ema, (1 + n) / (10 + n))  # the first policies are soon forgotten

    def _averaged(self, state: AgentState) -> AgentState:
        """Where nothing is averaged, the average is the policy; once a call is enough for that."""
        return state if self.config.policy_ema else state.replace(policy_average=state.policy)

    def acting_policy(self, state: AgentState) -> Params:
        """The policy that acts: the average, or the newest where `policy_ema` is 0."""
        return state.policy_average if self.config.policy_ema else state.policy

    def _sample_chunk(
        self, params: Params, observation: Mapping[str, jax.Array], key: jax.Array, prefix: Prefix, *, explore: bool
    ) -> tuple[jax.Array, Metrics]:
        observation = self.vision.seen(params.get("frozen", {}), observation)
        if self.config.encoder.trained_by == "critic":
            encoder = params["critic"].get("encoder", {})  # an empty one does not travel
            params = {**params, "policy": self.with_encoder(params["policy"], encoder)}
        return self.act(params, observation, self.acting_noise(key, observation, explore=explore), prefix)

    def _augment(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        """Both observations of an image batch shifted at random, with independent offsets (DrQ), and then as the
        networks see them: a frozen backbone looks at each image once, whatever number of networks reads it."""
        batch = self._shifted(state, batch)
        return batch._replace(
            observations=self.vision.seen(state.frozen, batch.observations),
            next_observations=self.vision.seen(state.frozen, batch.next_observations),
        )

    def _shifted(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        pixels = self.config.encoder.shift
        if not self.config.image_keys or pixels == 0:
            return batch
        now, nxt = jax.random.split(jax.random.fold_in(state.rng, _AUGMENTATION))
        return batch._replace(
            observations=random_shift(now, batch.observations, pixels),
            next_observations=random_shift(nxt, batch.next_observations, pixels),
        )

    def flat_critic_actions(self, batch: ChunkBatch, sampled_tail: jax.Array | None) -> jax.Array:
        """The chunk the critic scores, float32[B, critic_steps * A]."""
        return self.critic_part(self.critic_actions(batch, sampled_tail))

    def critic_actions(self, batch: ChunkBatch, sampled_tail: jax.Array | None) -> jax.Array:
        """The batch's actions float32[B, L, A], those after a termination taken from `sampled_tail` where given."""
        return batch.actions if sampled_tail is None else replace_tail(batch.actions, batch.valid, sampled_tail)

    def policy_part(self, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with as many actions as the policy outputs; where a critic scores more, it has those as well."""
        h = self.spec.horizon
        if batch.actions.shape[1] == h:
            return batch
        return batch._replace(
            actions=batch.actions[:, :h],
            valid=batch.valid[:, :h],
            demonstrated=batch.demonstrated[:, :h],
            bc=batch.bc[:, :h],
        )

    def critic_part(self, chunk: jax.Array) -> jax.Array:
        """The first `critic_steps` actions of chunks float32[..., L, A], flattened."""
        part = chunk[..., : self.spec.critic_steps, :]
        return part.reshape(*part.shape[:-2], -1)

    def exploration_noise(self, key: jax.Array, count: int) -> jax.Array:
        """Standard normal noise of `count` chunks, float32[count, H*A], smooth where `exploration_knots` say so."""
        knots = self.config.exploration_knots
        return chunk_noise(key, count, self.spec.horizon, self.spec.action_dim, knots)

    def published_candidates(self, *, pretrained: bool, climbs: bool = False) -> jax.Array:
        """How many candidates may be looked at when acting, int32 scalar: what `best_of` takes; 0 for all there are.

        Above 0 the critic is not trusted, so that nothing climbs it either: `climbs` says whether chunks would, and
        then one candidate of one is published too.
        """
        few = self.config.pretrain_candidates
        limited = few < self.config.candidates or (climbs and few == 1)
        return jnp.asarray(few if pretrained and limited else 0, jnp.int32)

    def best_of(
        self, values: jax.Array, chunks: jax.Array, published: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The chunk of the highest value among N candidates, its value float32[], and its index int32[].

        N is the acting side's `agent.candidates`, which an evaluation may set to another number than the run had;
        `published_candidates` bounds it while the critic has seen no failure.
        """
        limit = jnp.where(published == 0, len(values), published)
        masked = jnp.where(jnp.arange(len(values)) < limit, values, -jnp.inf)
        best = jnp.argmax(masked)
        return chunks[best], values[best], best
