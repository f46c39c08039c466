"""Agents whose grippers are no continuous dimensions: fixed, or chosen by a grasp critic (`AgentState.grasp`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from serl_chunk.agents.base import Agent
from serl_chunk.agents.compilation import Compile, Place, compiled
from serl_chunk.agents.grasp_critic import (
    GraspCritic,
    GripperActions,
    best_option,
    choice_imitation,
    grasp_loss,
    grasp_target,
    reachable_actions,
    select_action,
)
from serl_chunk.agents.losses import chunk_return, imitated_numbers
from serl_chunk.agents.optimiser import adam, descend
from serl_chunk.agents.spec import GRIPPER, AgentSpec
from serl_chunk.agents.state import Acted, AgentState, Alone, Committed, Noise, Observation, Params, Updated, key_of
from serl_chunk.config.agents.base import ActorCriticConfig, AgentConfig
from serl_chunk.models.sums import Loss, Metrics, Sum, mean_of
from serl_chunk.types import ChunkBatch, ConfigError

Build = Callable[[AgentSpec], Agent]


class ArmAndGripper(Agent):
    """Any agent learns and acts in the other, the arm's dimensions; a subclass decides about the grippers."""

    def __init__(self, config: AgentConfig, spec: AgentSpec, build: Build, *, gripper_inputs: int = 0) -> None:
        super().__init__(config, spec)
        self.grippers = np.array(spec.grippers, np.int32)
        self.arm = np.setdiff1d(np.arange(spec.action_dim), self.grippers)
        of_arm = dataclasses.replace(spec, action_dim=len(self.arm), grippers=(), gripper_inputs=gripper_inputs)
        self.inner = build(of_arm)
        for name in ("policy_updates", "together", "imitates"):
            setattr(self, name, getattr(self.inner, name))
        self._order = np.argsort(np.concatenate([self.arm, self.grippers]))

    def compile(self, by: Compile = compiled, *, shares: int = 1, place: Place = jnp.array) -> None:
        super().compile(by, shares=shares, place=place)
        if shares > 1:  # else the arm's agent is not made yet, or is as it was made
            self.inner.compile(by, shares=shares, place=place)

    def arm_batch(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        values = {name: getattr(batch, name) for name in ("actions", "bc_dims", "bc_action_shift")}
        of_arm = {name: value[..., self.arm] for name, value in values.items() if value is not None}
        return batch._replace(prev_action=None, **of_arm)

    def merged(self, arm: jax.Array, gripper: jax.Array, committed: Committed) -> jax.Array:
        """A chunk float32[H, A] of the arm's [H, A - G] and the grippers' [H, G]; committed actions are kept."""
        gripper = jnp.where(committed.mask[:, None] > 0, committed.actions[:, self.grippers], gripper)
        return jnp.concatenate([arm, gripper], axis=-1)[:, self._order]

    def act_arm(self, params: Params, base: Params, seen: Observation, noise: Noise, committed: Committed) -> Acted:
        of_arm = committed._replace(actions=committed.actions[:, self.arm])
        return self.inner.act(params, base, seen, noise, of_arm)

    def init(self, rng: jax.Array) -> AgentState:
        return self.inner.init(rng)

    def critic_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.inner.critic_draws(key, batch)

    def policy_draws(self, key: jax.Array, batch: ChunkBatch) -> Noise:
        return self.inner.policy_draws(key, batch)

    def step(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Mapping[str, Noise], *, bc_only: bool = False
    ) -> Updated:
        return self.inner.step(state, base, self.arm_batch(state, batch), draws, bc_only=bc_only)

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        return self.inner.acting_noise(key, observation, explore=explore, alone=alone)

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        return self.inner.policy_params(state, pretrained=pretrained)


class FixedGripper(ArmAndGripper):
    """Grippers get `fixed_value`; without one 0, and the actor keeps the opening at reset (`GripperConfig.kept`)."""

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        chunk, record = self.act_arm(params, base, observation, noise, committed)
        value = self.config.gripper.fixed_value or 0.0
        return self.merged(chunk, jnp.full((self.spec.horizon, len(self.grippers)), value), committed), record


class LearnedGripper(ArmAndGripper):
    """A grasp critic chooses the grippers' values, and the arm's agent the rest.

    `state.grasp`: "critic", "target" and "critic_opt" of Q; "policy", "policy_average" and "policy_opt" of the imitated
    probabilities, with bc the latter three alone.
    """

    def __init__(self, config: AgentConfig, spec: AgentSpec, build: Build) -> None:
        g = config.gripper
        # A choice is for the executed actions, which are the compared ones (checked by the experiment).
        values, steps = g.values, spec.compared_steps
        held = g.hold_steps or steps
        self.choices = GripperActions(values, len(spec.grippers), steps, held, joint=g.joint, neutral=g.stays)
        seen = self.choices.parts * len(spec.grippers) if g.critic_sees_gripper else 0
        super().__init__(config, spec, build, gripper_inputs=seen)
        self.tau = g.tau or (config.critic.tau if isinstance(config, ActorCriticConfig) else 0.0)
        self.net = GraspCritic(config, self.choices, spec.value_range)
        self.grasp_optimiser = adam(config.optimiser("critic"))

    def init(self, rng: jax.Array) -> AgentState:
        critic, policy = self.net.init(key_of(rng, "gripper"), self.perception.seen_example())
        grasp: dict[str, Params] = {}
        for name, copy, params in (("policy", "policy_average", policy), ("critic", "target", critic)):
            if name == "policy" or self.has_critic:
                copied = name == "critic" or self.config.policy_ema > 0
                grasp |= {name: params, copy: jax.tree.map(jnp.copy, params) if copied else {}}
                grasp[f"{name}_opt"] = self.grasp_optimiser.init(params)
        return self.inner.init(rng).replace(grasp=grasp)

    def executed(self, batch: ChunkBatch) -> jax.Array:
        """The options that were executed, by human or policy, int32[B, J, P]."""
        before = None if batch.prev_action is None else batch.prev_action[..., self.grippers]
        part = slice(self.choices.steps)
        return self.choices.label(batch.actions[:, part, self.grippers], batch.valid[:, part], before)

    def _of_parts(self, steps: jax.Array) -> jax.Array:
        """Numbers of steps float32[B, L, ...] by part, float32[B, J, hold_steps, ...]."""
        return steps[:, : self.choices.steps].reshape(-1, self.choices.parts, self.choices.held, *steps.shape[2:])

    def preferred(self, grasp: Params, observations: Observation, share: jax.Array | float) -> jax.Array:
        """argmax of Q over the options that `reachable_actions` leaves, int32[..., J, P]."""
        allowed = reachable_actions(self.net.logits(grasp["policy"], observations), share)
        return best_option(self.net.outputs(grasp["critic"], observations), allowed)

    def arm_batch(self, state: AgentState, batch: ChunkBatch) -> ChunkBatch:
        """The batch of the arm's agent. Its critic may see the choice: the executed one, at o' the preferred."""
        arm = super().arm_batch(state, batch)
        if not (self.config.gripper.critic_sees_gripper and self.has_critic):
            return arm
        arm = arm._replace(observations={**batch.observations, GRIPPER: self._seen(self.executed(batch))})
        if not batch.next_observations:  # of a step of the policy alone
            return arm
        preferred = self.preferred(state.grasp, batch.next_observations, self.config.gripper.mask_unreachable)
        return arm._replace(next_observations={**batch.next_observations, GRIPPER: self._seen(preferred)})

    def _seen(self, option: jax.Array) -> jax.Array:
        values = self.choices.decode(option)
        return values.reshape(*values.shape[:-2], -1)

    def grasp_critic_loss(self, critic: Params, grasp: Params, batch: ChunkBatch) -> Loss:
        g = self.config.gripper
        rewards = jnp.sum(batch.rewards, axis=-1)
        penalties = jnp.zeros_like(rewards)
        if batch.prev_action is not None and g.penalty:
            returned = slice(self.spec.critic_steps)
            actions, before = batch.actions[:, returned, self.grippers], batch.prev_action[..., self.grippers]
            changes = self.choices.changes(actions, before, batch.valid[:, returned])
            penalties = g.penalty * chunk_return(changes, self.spec.discount)
            rewards = rewards + g.penalty * jnp.sum(changes, axis=-1)
        preferred = self.preferred(grasp, batch.next_observations, g.mask_unreachable)
        chosen = select_action(self.net.values(grasp["target"], batch.next_observations), preferred)
        target = grasp_target(batch, self.spec.discount, penalties, chosen)
        outputs, option = self.net.outputs(critic, batch.observations), self.executed(batch)
        # The choice of a part that begins after the episode's end had no effect.
        weight = self._of_parts(batch.valid)[..., 0] * batch.weight[:, None]
        loss = grasp_loss(outputs, option, target, self.net.bounds, weight)
        values = self.net.expected_value(select_action(outputs, option))
        metrics = {
            "grasp_critic/grasp_critic_loss": loss,
            "grasp_critic/predicted_grasp_qs": mean_of(values),
            "grasp_critic/target_grasp_qs": mean_of(target),
            "grasp_critic/grasp_rewards": mean_of(rewards),
        }
        return Loss((loss,), metrics)

    def grasp_policy_loss(self, policy: Params, batch: ChunkBatch) -> Loss:
        """`choice_imitation` as a function of `policy`; a part's weight is the mean of its steps' weights.

        Where `bc_dims` names numbers, a branch has the weights of its gripper, the joint one those of all grippers.
        """
        logits, option = self.net.logits(policy, batch.observations), self.executed(batch)
        dims = None if batch.bc_dims is None else batch.bc_dims[..., self.grippers]
        if dims is not None and self.choices.joint:
            dims = jnp.min(dims, axis=-1, keepdims=True)
        bc = jnp.mean(self._of_parts(imitated_numbers(batch.bc_weight, dims)), axis=2)
        loss = choice_imitation(logits, option, bc)
        hit = (jnp.argmax(logits, axis=-1) == option).astype(jnp.float32)
        weight = jnp.broadcast_to(bc[..., None], hit.shape) if dims is None else bc
        accuracy = Sum(jnp.sum(hit * weight), jnp.sum(weight))
        return Loss((loss,), {"grasp_critic/bc_loss": loss, "grasp_critic/bc_accuracy": accuracy})

    def step(
        self, state: AgentState, base: Params, batch: ChunkBatch, draws: Mapping[str, Noise], *, bc_only: bool = False
    ) -> Updated:
        grasp = {**state.grasp}
        metrics: Metrics = {}
        if "critic" in draws:
            loss = lambda critic, part: self.grasp_critic_loss(critic, state.grasp, part)  # noqa: E731
            grads, metrics, _ = self.gradient(loss, grasp["critic"], batch)
            critic, opt = descend(self.grasp_optimiser, grads, grasp["critic_opt"], grasp["critic"])
            target = optax.incremental_update(critic, grasp["target"], self.tau)
            grasp |= {"critic": critic, "target": target, "critic_opt": opt}
        if "policy" in draws:
            grads, of_policy, _ = self.gradient(self.grasp_policy_loss, grasp["policy"], batch)
            policy, opt = descend(self.grasp_optimiser, grads, grasp["policy_opt"], grasp["policy"])
            average = self.averaged(state, policy, grasp["policy_average"])
            grasp |= {"policy": policy, "policy_average": average, "policy_opt": opt}
            metrics |= of_policy
        state, of_arm = super().step(state, base, batch, draws, bc_only=bc_only)
        return state.replace(grasp=grasp), {**of_arm, **metrics}

    def acting_noise(self, key: jax.Array, observation: Observation, *, explore: bool, alone: Alone = False) -> Noise:
        """{"arm": the arm's, "gripper": uniform float32[J, P, 2], or ones (nothing is drawn) where not `explore`}."""
        arm = super().acting_noise(key_of(key, "arm"), observation, explore=explore, alone=alone)
        shape = (*self.choices.shape[:2], 2)
        drawn = jax.random.uniform(key_of(key, "gripper"), shape) if explore else jnp.ones(shape)
        return {"arm": arm, "gripper": drawn}

    def choose(self, params: Params, observation: Observation, drawn: jax.Array) -> jax.Array:
        """Options int32[J, P] for one observation: the best reachable ones, or, with probability epsilon, any."""
        if self.has_critic:
            best = self.preferred(params, observation, params["plausible"])
        else:
            best = jnp.argmax(self.net.logits(params["policy"], observation), axis=-1).astype(jnp.int32)
        options = self.choices.options
        any_of = jnp.minimum((drawn[..., 1] * options).astype(jnp.int32), options - 1)
        return jnp.where(drawn[..., 0] < self.config.gripper.epsilon, any_of, best)

    def act(self, params: Params, base: Params, observation: Observation, noise: Noise, committed: Committed) -> Acted:
        grasp = params["gripper"]
        option = self.choose(grasp, observation, noise["gripper"])
        inputs = {**observation, GRIPPER: self._seen(option)}
        arm, record = self.act_arm(params, base, inputs, noise["arm"], committed)
        record = {**record, "gripper": self.choices.decode(option)}
        if self.has_critic:
            record["gripper_q"] = select_action(self.net.values(grasp["critic"], observation), option)
        return self.merged(arm, self.choices.chunk(option, self.spec.horizon), committed), record

    def policy_params(self, state: AgentState, *, pretrained: bool = False) -> Params:
        """The arm's, and "gripper"; while the critic has seen no failure, imitation chooses."""
        gripper = {"policy": state.grasp["policy_average" if self.config.policy_ema else "policy"]}
        if self.has_critic:
            share = 1.0 if pretrained else self.config.gripper.mask_unreachable
            gripper["critic"] = state.grasp["target" if self.config.acting_critic == "target" else "critic"]
            gripper["plausible"] = jnp.asarray(share, jnp.float32)
        return {**super().policy_params(state, pretrained=pretrained), "gripper": gripper}


def with_gripper(config: AgentConfig, spec: AgentSpec, build: Build) -> Agent:
    """Build an agent with the grippers of `config.gripper`. Raises ConfigError where the robot does not have them."""
    g, found = config.gripper, len(spec.grippers)
    if g.composition == "learned" and not found:
        raise ConfigError(
            "agent.gripper has choices, and the robot's specification names no gripper: list its action dimensions "
            "(robot.grippers of a gymnasium robot), or leave agent.gripper.choices and setup_mode out"
        )
    if g.mode == "fixed" and g.arms is None and not found:
        raise ConfigError(
            "agent.gripper.mode=fixed would fix nothing: the robot's specification names no gripper. List its action "
            "dimensions (robot.grippers of a gymnasium robot), or leave agent.gripper.mode out"
        )
    # A fixed gripper may be no action at all: HIL-SERL's wrapper takes it away.
    if g.arms is not None and found != g.arms and (found or g.composition == "learned"):
        raise ConfigError(
            f"agent.gripper.setup_mode={g.setup_mode} is for {g.arms} gripper{'s' if g.arms > 1 else ''}, and the "
            f"robot's specification names {found} (action dimensions {', '.join(map(str, spec.grippers))}): use the "
            "setup_mode of as many arms"
        )
    if found == spec.action_dim:
        raise ConfigError("agent.gripper: every action of this robot is a gripper, and nothing is left for the arm")
    return (FixedGripper if g.composition == "fixed" else LearnedGripper)(config, spec, build)
