"""Grippers that are chosen among a few values, or fixed, beside any agent of the arm."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from agent_tools import fresh, marked_numbers, one_batch, output_bias, policy_gradient, same, seen_by

from serl_chunk.agents.discrete_gripper import FixedGripper, LearnedGripper
from serl_chunk.agents.optimiser import gradient
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.registry import robot_spec

HORIZON, GRIPPERS, ARM, CHOICES = 4, (1, 4), [0, 2, 3], (-1.0, 1.0)
SIZES = {"horizon": HORIZON, "actions": 5, "grippers": GRIPPERS}
PART = {"critic_steps": 6, "prefix_steps": 2}  # of chunks of 4: two are executed, and a critic of six teaches


def with_choices(variant: str, sizes: dict | None = None, changes: dict | None = None, **gripper):
    """An agent whose two grippers are chosen, and a state of it."""
    of = SacGripperConfig if variant.startswith("acrlpd") else GripperConfig
    sizes = {**SIZES, **(PART if variant.startswith("decoupled") else {}), **(sizes or {})}
    return fresh(variant, sizes=sizes, gripper=of(choices=CHOICES, **gripper), **(changes or {}))


@functools.cache
def _grasp_gradient(agent):
    loss = lambda state, rows: gradient(  # noqa: E731
        lambda critic, rows: agent.grasp_critic_loss(critic, state.grasp, rows), state.grasp["critic"], rows
    )
    return jax.jit(loss)


def grasp_gradient(agent, state, batch):
    return _grasp_gradient(agent)(state, batch)[0]


@pytest.mark.parametrize("variant", ["acfql", "bc"])
def test_a_chunk_holds_choices_in_the_grippers_dimensions_and_the_arms_agent_in_the_others(variant):
    agent, state = with_choices(variant, hold_steps=2, joint=False)
    params, seen = agent.policy_params(state), seen_by(agent)
    draw = lambda prefix=None: agent.sample(params, seen, jax.random.key(0), explore=False, committed=prefix)  # noqa: E731
    chunk, record = map(np.asarray, (lambda c, r: (c, r["gripper"]))(*draw()))
    assert set(np.unique(chunk[:, GRIPPERS])) <= set(CHOICES)
    np.testing.assert_array_equal(np.repeat(record, 2, axis=0), chunk[:, GRIPPERS])  # held for two ticks
    logits = np.asarray(jax.jit(agent.net.logits)(params["gripper"]["policy"], seen))
    if variant == "bc":
        np.testing.assert_array_equal(record, np.array(CHOICES)[logits.argmax(-1)])
    inputs, of_arm = {**seen, "gripper": record.reshape(-1)}, {k: v for k, v in params.items() if k != "gripper"}
    alone, _ = agent.inner.sample(of_arm, inputs, jax.random.key(0), explore=False)
    np.testing.assert_allclose(chunk[:, ARM], alone, atol=1e-6)
    committed = np.tile(np.array([0.1, 0.2, 0.3, 0.4, 0.5], np.float32), (4, 1))
    late, _ = draw((committed, np.array([1, 0, 0, 0], np.float32)))
    np.testing.assert_allclose(late[0], committed[0], atol=1e-6)
    np.testing.assert_array_equal(late[1:, GRIPPERS], chunk[1:, GRIPPERS])


def test_choices_are_of_the_executed_actions_and_last_for_as_long_as_a_chunk(monkeypatch):
    monkeypatch.setattr(GripperConfig, "epsilon", 0.5)
    assert with_choices("acfql", {"critic_steps": 2}, hold_steps=1, joint=False)[0].choices.shape == (2, 2, 2)
    agent, state = with_choices("decoupled", hold_steps=1, joint=False)
    assert agent.choices.shape == (2, 2, 2)
    params, drawn = agent.policy_params(state), set()
    for i in range(20):
        chunk, record = agent.sample(params, seen_by(agent), jax.random.key(i), explore=True)
        held = np.asarray(record["gripper"])[[0, 1, 1, 1]]
        np.testing.assert_array_equal(np.asarray(chunk)[:, GRIPPERS], held)
        drawn.add(held.tobytes())
    assert len(drawn) > 4


def test_the_grasp_critic_of_executed_actions_learns_from_returns_of_more_and_not_of_the_arm():
    agent, state = with_choices("decoupled", hold_steps=1)
    batch = one_batch(agent)
    plain = grasp_gradient(agent, state, batch)
    for tick, dims, matters in ((1, GRIPPERS, True), (2, GRIPPERS, False), (5, GRIPPERS, False), (1, ARM, False)):
        flipped = np.array(batch.actions)
        flipped[:, tick, list(dims)] *= -1
        assert same(plain, grasp_gradient(agent, state, batch._replace(actions=flipped))) != matters
    rewards = batch.rewards + np.where((np.arange(6) == 5) & (batch.valid > 0), np.float32(0.9), 0)
    assert not same(plain, grasp_gradient(agent, state, batch._replace(rewards=rewards)))
    ended = (batch.mask == 0)[:, None]
    later = {"state": np.where(ended, np.float32(100), batch.next_observations["state"])}
    for mask, matters in ((batch.mask, False), (np.ones_like(batch.mask), True)):  # nothing follows a termination
        after = batch._replace(next_observations=later, mask=mask)
        assert same(plain, grasp_gradient(agent, state, after)) != matters


def test_a_change_is_charged_as_far_as_the_return_goes_and_to_the_grasp_critic_alone():
    steps = 2
    agent, state = with_choices("acfql", {"critic_steps": steps}, penalty=-0.5)
    batch = one_batch(agent)
    length, actions = batch.actions.shape[1], np.array(batch.actions)
    actions[..., GRIPPERS] = 1
    batch = batch._replace(prev_action=actions[:, 0], valid=np.ones_like(batch.valid))
    charged = []
    with jax.numpy_rank_promotion("raise"):
        loss = jax.jit(lambda b: agent.grasp_critic_loss(state.grasp["critic"], state.grasp, b).metrics)
        for tick in range(length):  # both grippers close on this tick and stay closed
            closing = np.array(actions)
            closing[:, tick:, GRIPPERS] = -1
            rewards = loss(batch._replace(actions=closing))["grasp_critic/grasp_rewards"]
            charged.append(float(rewards.mean()) - float(np.mean(np.sum(batch.rewards, -1))))
    np.testing.assert_allclose(charged, [-1.0 if tick < steps else 0.0 for tick in range(length)], atol=1e-5)
    np.testing.assert_array_equal(jax.jit(agent.arm_batch)(state, batch).rewards, batch.rewards)


@pytest.mark.parametrize("sees", [True, False])
def test_whether_the_arms_critic_sees_the_gripper(sees):
    agent, state = with_choices("acfql", joint=False, critic_sees_gripper=sees)
    shift = np.random.default_rng(0).normal(size=(8, HORIZON, 5)).astype(np.float32)
    batch, masked = one_batch(agent, bc_action_shift=shift), agent.config.gripper.mask_unreachable
    arm, executed, preferred = jax.jit(
        lambda b: (
            agent.arm_batch(state, b),
            agent.executed(b),
            agent.preferred(state.grasp, b.next_observations, masked),
        )
    )(batch)
    np.testing.assert_array_equal(arm.bc_action_shift, shift[..., ARM])
    np.testing.assert_array_equal(arm.actions, batch.actions[..., ARM])
    assert agent.inner.spec.gripper_inputs == (2 if sees else 0)
    assert ("gripper" in arm.observations) == ("gripper" in arm.next_observations) == sees
    if sees:  # the executed choice, and at o' the preferred one
        for seen, option in ((arm.observations, executed), (arm.next_observations, preferred)):
            np.testing.assert_array_equal(seen["gripper"], np.array(CHOICES)[np.asarray(option)].reshape(8, -1))
        assert not np.array_equal(executed, preferred)
        of_policy = batch._replace(next_observations={})
        assert not jax.eval_shape(agent.arm_batch, state, of_policy).next_observations


@pytest.mark.parametrize(("value", "expected"), [(-0.5, -0.5), (None, 0.0)])
def test_a_fixed_gripper_is_no_part_of_what_is_learned(value, expected):
    agent, state = fresh("bc-gaussian", sizes=SIZES, gripper=GripperConfig(mode="fixed", fixed_value=value))
    batch = one_batch(agent)
    flipped = np.array(batch.actions)
    flipped[..., GRIPPERS] *= -1
    assert same(*(agent.arm_batch(state, b)._asdict() for b in (batch, batch._replace(actions=flipped))))
    assert state.grasp == {}
    chunk, _ = agent.sample(agent.policy_params(state), seen_by(agent), jax.random.key(0), explore=True)
    np.testing.assert_array_equal(chunk[:, GRIPPERS], np.full((HORIZON, 2), expected, np.float32))
    assert not np.array_equal(chunk[0, ARM], chunk[1, ARM])


ROBOT = robot_spec(FakeAlohaConfig())  # two grippers


def of_robot(gripper: GripperConfig, grippers=ROBOT.grippers):
    config = ExperimentConfig("x", FakeAlohaConfig(), agent=AcfqlConfig(gripper=gripper), chunk=ChunkConfig(5))
    return make_agent(config, dataclasses.replace(ROBOT, grippers=grippers))


@pytest.mark.parametrize(
    ("gripper", "grippers", "kind", "choices", "arm"),
    [
        ({"setup_mode": "dual-arm-learned-gripper"}, (6, 13), LearnedGripper, (1, 1, 9), 12),
        ({"setup_mode": "dual-arm-fixed-gripper"}, (6, 13), FixedGripper, None, 12),
        ({"setup_mode": "single-arm-fixed-gripper"}, (), FixedGripper, None, 14),  # taken away by HIL-SERL's wrapper
        ({}, (6, 13), None, None, 14),
    ],
)
def test_setup_modes_select_the_composition(gripper, grippers, kind, choices, arm):
    agent = of_robot(GripperConfig(**gripper), grippers)
    assert isinstance(agent, kind) if kind else not isinstance(agent, LearnedGripper | FixedGripper)
    assert (agent.choices.shape if choices else None) == choices
    assert getattr(agent, "inner", agent).spec.action_dim == arm


@pytest.mark.parametrize("joint", [False, True])
def test_a_grippers_choice_is_imitated_where_the_human_made_it(joint):
    """Jointly the human has to have had all grippers."""
    agent, state = with_choices("bc-gaussian", hold_steps=2, joint=joint)
    size = int(np.prod(agent.choices.shape))
    imitated = jax.jit(lambda rows: gradient(agent.grasp_policy_loss, state.grasp["policy"], rows)[:2])

    def loss(*marked):
        grads, metrics = imitated(one_batch(agent, bc_dims=marked_numbers(agent.spec, *marked)))
        bias = next(x for p, x in jax.tree_util.tree_leaves_with_path(grads) if x.shape == (size,))
        return np.asarray(bias).reshape(agent.choices.shape).any(axis=(0, 2)), metrics

    moved, metrics = loss(*ARM, GRIPPERS[1])
    assert moved.tolist() == ([False] if joint else [False, True])
    assert (float(metrics["grasp_critic/bc_loss"]) == 0) == joint
    moved, metrics = loss(*GRIPPERS)
    assert moved.all()
    for name, value in imitated(one_batch(agent))[1].items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5)
    if joint:
        return
    arm = agent.arm_batch(state, one_batch(agent, bc_dims=marked_numbers(agent.spec, 2, 4)))
    bias = output_bias(policy_gradient(agent.inner, state, arm)[0], agent.inner)
    assert (bias.any(0).tolist(), bias[:, 1].all()) == ([False, True, False], True)  # of actions 0, 2 and 3
