"""Compiled updates from an agent's losses: gradient steps of critic and policy, and scans of them."""

from __future__ import annotations

import abc
import functools

import jax
import jax.numpy as jnp
import optax

from serl_chunk.agents.losses import soft_update
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import AgentState, LossAndMetrics, LossNoise, Metrics, Params, StateAndMetrics
from serl_chunk.agents.vision import Vision
from serl_chunk.config.agents import AgentConfig
from serl_chunk.models.encoder import random_shift
from serl_chunk.types import ChunkBatch

# Without it XLA for CPUs copies each network once an update, because losses read what the update replaces.
_COMPILER_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}

_AUGMENTATION = 2  # folded into a state's key, which updates split (the same as folding in 0 and 1)


class UpdateFns(abc.ABC):
    """The updates of an agent, from the losses and draws that it supplies.

    `update(state, batches)` takes batches with a leading axis U and runs U critic updates in one compiled scan. The
    policy's update follows the last, or runs on each batch (`update_order`). `update_policy` and `update_critic` run
    one half (pretraining and critic warm-up). Where the critic trains the encoder that the policy reads,
    `update_critic` also lets the policy imitate on each batch, so that it follows the features. All three donate the
    state: use the one they return.

    Losses are functions of explicit draws: `critic_draws` and `policy_draws` make them from a key; `critic_step`,
    `policy_step` and `joint_step` take them.
    """

    policy_updates = 1  # policy steps after the critic's, on the last batch
    imitates = True  # whether the policy's loss has imitation in it

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        self.config = config
        self.spec = spec
        self.optimiser = self._network_optimiser(config.lr)
        self.vision = Vision(config, spec.cameras)
        # Donated buffers go to outputs of their shape in order: dropping an unused one would shift and copy the rest.
        options = _COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
        compiled = functools.partial(jax.jit, donate_argnums=0, keep_unused=True, compiler_options=options)
        self.update = compiled(self._update)
        self.update_policy = compiled(self._update_policy)
        self.update_critic = compiled(self._update_critic_alone)

    def _network_optimiser(self, lr: float) -> optax.GradientTransformation:
        decay = self.config.weight_decay
        return self._clipped(optax.adamw(lr, weight_decay=decay) if decay else optax.adam(lr))

    def _clipped(self, optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
        # `identity` keeps the optimiser's tree, so that a resume may switch clipping on or off.
        clip = optax.clip_by_global_norm(self.config.grad_clip) if self.config.grad_clip > 0 else optax.identity()
        return optax.chain(clip, optimiser)

    @abc.abstractmethod
    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> LossNoise: ...

    @abc.abstractmethod
    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> LossNoise: ...

    def _critic_loss(self, critic: Params, state: AgentState, batch: ChunkBatch, draws: LossNoise) -> LossAndMetrics:
        """The critic's loss as a function of `critic`; `state` is a constant."""
        raise NotImplementedError

    def _policy_loss(
        self, policy: Params, state: AgentState, batch: ChunkBatch, draws: LossNoise, *, imitate_only: bool
    ) -> LossAndMetrics:
        """The policy's loss on the `policy_part` of a batch, as a function of `policy`; `state` is a constant."""
        raise NotImplementedError

    def batches_used(self, updates: int) -> int:
        """Number of batches that `update` takes for so many critic updates of the learner."""
        return updates

    def with_encoder(self, policy: Params, encoder: Params) -> Params:
        """`policy` with the critic's `encoder` wherever one of its networks reads an observation."""
        return {**policy, "encoder": encoder}

    def _update(self, state: AgentState, batches: ChunkBatch) -> StateAndMetrics:
        if self.config.update_order == "joint":
            state, metrics = jax.lax.scan(self._joint_step, state, batches)
            return self._averaged(state), jax.tree.map(jnp.mean, metrics)
        state, metrics = self._update_critic(state, batches)
        last = self._augment(state, jax.tree.map(lambda x: x[-1], batches))
        state, policy_metrics = self._policy_steps(state, last, self.policy_updates, imitate_only=False)
        return self._averaged(state), {**metrics, **policy_metrics}

    def _update_policy(self, state: AgentState, batches: ChunkBatch) -> StateAndMetrics:
        def step(s: AgentState, batch: ChunkBatch) -> StateAndMetrics:
            return self._policy_steps(s, self._augment(s, batch), 1, imitate_only=True)

        state, metrics = jax.lax.scan(step, state, batches)
        return self._averaged(state), jax.tree.map(jnp.mean, metrics)

    def _update_critic(self, state: AgentState, batches: ChunkBatch) -> StateAndMetrics:
        state, metrics = jax.lax.scan(self._critic_step, state, batches)
        return state, jax.tree.map(jnp.mean, metrics)

    def _update_critic_alone(self, state: AgentState, batches: ChunkBatch) -> StateAndMetrics:
        shared = self.config.encoder.trained_by == "critic" and jax.tree.leaves(state.critic["encoder"])
        if not (shared and self.imitates):
            return self._update_critic(state, batches)

        def step(s: AgentState, batch: ChunkBatch) -> StateAndMetrics:
            batch = self._augment(s, batch)
            s, metrics = self._critic_step_on(s, batch)
            s, of_policy = self._policy_steps(s, batch, 1, imitate_only=True)
            return s, {**metrics, **of_policy}

        state, metrics = jax.lax.scan(step, state, batches)
        return self._averaged(state), jax.tree.map(jnp.mean, metrics)

    def _critic_step(self, state: AgentState, batch: ChunkBatch) -> StateAndMetrics:
        return self._critic_step_on(state, self._augment(state, batch))

    def _critic_step_on(self, state: AgentState, batch: ChunkBatch) -> StateAndMetrics:
        rng, key = jax.random.split(state.rng)
        return self.critic_step(state.replace(rng=rng), batch, self.critic_draws(key, batch))

    def _joint_step(self, state: AgentState, batch: ChunkBatch) -> StateAndMetrics:
        batch = self._augment(state, batch)
        rng, critic_key = jax.random.split(state.rng)
        rng, policy_key = jax.random.split(rng)
        draws = self.critic_draws(critic_key, batch), self.policy_draws(policy_key, batch)
        return self.joint_step(state.replace(rng=rng), batch, *draws)

    def _policy_steps(
        self, state: AgentState, batch: ChunkBatch, updates: int, *, imitate_only: bool
    ) -> StateAndMetrics:
        def step(s: AgentState, _: None) -> StateAndMetrics:
            rng, key = jax.random.split(s.rng)
            return self.policy_step(s.replace(rng=rng), batch, self.policy_draws(key, batch), imitate_only=imitate_only)

        state, metrics = jax.lax.scan(step, state, None, length=updates)
        return state, jax.tree.map(jnp.mean, metrics)

    def critic_step(self, state: AgentState, batch: ChunkBatch, draws: LossNoise) -> StateAndMetrics:
        """One critic update, and the target's: towards the critic after it, or before it (`target_average`)."""
        grads, metrics = self._critic_gradient(state, batch, draws)
        return self._apply_critic_gradient(state, grads), metrics

    def policy_step(
        self, state: AgentState, batch: ChunkBatch, draws: LossNoise, *, imitate_only: bool
    ) -> StateAndMetrics:
        """One policy update, with a temperature's where the agent has one."""
        grads, metrics = self._policy_gradient(state, batch, draws, imitate_only=imitate_only)
        return self._apply_policy_gradient(state, grads, metrics)

    def joint_step(
        self, state: AgentState, batch: ChunkBatch, critic_draws: LossNoise, policy_draws: LossNoise
    ) -> StateAndMetrics:
        """Critic and policy, each by its gradient at the parameters before the step (Q-chunking's code)."""
        critic_grads, metrics = self._critic_gradient(state, batch, critic_draws)
        policy_grads, policy_metrics = self._policy_gradient(state, batch, policy_draws, imitate_only=False)
        state = self._apply_critic_gradient(state, critic_grads)
        state, policy_metrics = self._apply_policy_gradient(state, policy_grads, policy_metrics)
        return state, {**metrics, **policy_metrics}

    def _critic_gradient(self, state: AgentState, batch: ChunkBatch, draws: LossNoise) -> tuple[Params, Metrics]:
        grads, metrics = jax.grad(self._critic_loss, has_aux=True)(state.critic, self._whole(state), batch, draws)
        return grads, {**metrics, "critic/grad_norm": optax.tree.norm(grads)}

    def _policy_gradient(
        self, state: AgentState, batch: ChunkBatch, draws: LossNoise, *, imitate_only: bool
    ) -> tuple[Params, Metrics]:
        batch = self.policy_part(batch)

        def loss(policy: Params) -> LossAndMetrics:
            whole = self._whole(state.replace(policy=policy)).policy
            return self._policy_loss(whole, self._whole(state), batch, draws, imitate_only=imitate_only)

        return jax.grad(loss, has_aux=True)(state.policy)

    def _whole(self, state: AgentState) -> AgentState:
        """`state` with the acting critic's encoder, a constant, in the policy where the critic trains the encoder.

        One encoder then serves updates and acting, and travels once. With `acting_critic=target` it is the average.
        """
        if self.config.encoder.trained_by == "each":
            return state
        encoder = jax.lax.stop_gradient(self.choosing_params(state)["encoder"])
        return state.replace(policy=self.with_encoder(state.policy, encoder))

    def _apply_critic_gradient(self, state: AgentState, grads: Params) -> AgentState:
        updates, critic_opt = self.optimiser.update(grads, state.critic_opt, state.critic)
        critic = optax.apply_updates(state.critic, updates)
        followed = critic if self.config.critic.target_average == "new" else state.critic
        target = soft_update({k: followed[k] for k in state.target}, state.target, self.config.critic.tau)
        return state.replace(
            critic=critic, critic_opt=critic_opt, target=target, critic_updates=state.critic_updates + 1
        )

    def _apply_policy_gradient(self, state: AgentState, grads: Params, metrics: Metrics) -> StateAndMetrics:
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
        return jnp.minimum(self.config.policy_ema, (1 + n) / (10 + n))  # forgets the first policies soon

    def _averaged(self, state: AgentState) -> AgentState:
        return state if self.config.policy_ema else state.replace(policy_average=state.policy)

    def choosing_params(self, state: AgentState) -> Params:
        """Parameters of the critic that compares candidates: online, or their average (`acting_critic`)."""
        return state.target if self.config.acting_critic == "target" else state.critic

    def _augment(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        """Both observations shifted at random with independent offsets (DrQ), with a frozen backbone's features.

        The backbone reads each image once for all networks.
        """
        pixels = self.config.encoder.shift
        if self.config.image_keys and pixels:
            now, nxt = jax.random.split(jax.random.fold_in(state.rng, _AUGMENTATION))
            batch = batch._replace(
                observations=random_shift(now, batch.observations, pixels),
                next_observations=random_shift(nxt, batch.next_observations, pixels),
            )
        return batch._replace(
            observations=self.vision.encode_images(state.frozen, batch.observations),
            next_observations=self.vision.encode_images(state.frozen, batch.next_observations),
        )

    def policy_part(self, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with as many actions as the policy outputs; a critic may score more."""
        h = self.spec.horizon
        if batch.actions.shape[1] == h:
            return batch
        return batch._replace(
            actions=batch.actions[:, :h],
            valid=batch.valid[:, :h],
            is_demo=batch.is_demo[:, :h],
            bc_weight=batch.bc_weight[:, :h],
        )
