"""Grippers that are chosen among a few values, or fixed, beside any agent of the arm."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import (
    CAMERA,
    DISCOUNT,
    UNIT,
    build,
    config_of,
    imitation_gradient,
    make_batches,
    marked_numbers,
    named,
    on_device,
    one_batch,
    output_bias,
    same,
)
from errors import naming

from serl_chunk.agents.discrete_gripper import FixedGripper, LearnedGripper, with_gripper
from serl_chunk.agents.optimiser import gradient
from serl_chunk.agents.registry import builder_of, make_agent
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import ConfigError

HORIZON, ACTIONS, GRIPPERS = 4, 5, (1, 4)
ARM = [0, 2, 3]
CHOICES = (-1.0, 1.0)
COMPILED = ["acfql", "acrlpd", "bc"]
RARELY_COMPILED = [pytest.param(v, marks=pytest.mark.slow) for v in ("acfql", "acrlpd")]
TRACED = ["acrlpd", "decoupled-lengths", "bc"]  # and rarely:
RARE = ["acfql", "published-distill", "bc-gaussian", "published-image"]
PART = {"critic_steps": 6, "prefix_steps": 2}  # of chunks of 4: two are executed, and a critic of six teaches


def compose(variant: str, gripper: dict, grippers: tuple[int, ...] = GRIPPERS, *, steps=None, **changes):
    gripper = SacGripperConfig(tau=0.1, **gripper) if variant.startswith("acrlpd") else GripperConfig(**gripper)
    config = config_of(variant, gripper=gripper, **changes)
    cameras = (CAMERA,) if config.image_keys else ()
    sizes = {"critic_steps": HORIZON, **(steps or {}), "grippers": grippers}
    bounds = UNIT if config.bounded_critic else None
    spec = AgentSpec(4, ACTIONS, HORIZON, cameras=cameras, discount=DISCOUNT, value_range=bounds, **sizes)
    return with_gripper(config, spec, functools.partial(builder_of(config), config))


def learned(**changes) -> dict:
    return {"choices": CHOICES, **changes}


@functools.cache
def _fresh(variant: str):
    agent = compose(variant, learned(hold_steps=2, joint=False))
    return agent, agent.init(jax.random.key(0))


def fresh(variant: str):
    agent, state = _fresh(variant)
    return agent, jax.tree.map(jnp.copy, state)


def see(agent, seed=0):
    return {k: v[0, 0] for k, v in make_batches(agent.spec, seed=seed).observations.items()}


@pytest.mark.parametrize("variant", [*RARELY_COMPILED, "bc"])
def test_every_update_compiles_once_and_moves_its_own_half(variant):
    agent, state = fresh(variant)
    for seed in range(2):
        for update, moved, kept in (
            (agent.update_policy, "policy", "critic"),
            *([(agent.update_critic, "critic", "policy")] if agent.has_critic else []),
            (agent.update, "policy", None),
        ):
            before, batches = jax.tree.map(jnp.copy, state), on_device(agent.spec, seed)
            state, metrics = update(state, {}, named(agent, batches) if update is agent.update else batches)
            assert all(np.isfinite(v) for v in metrics.values())
            if moved in before.grasp:
                assert not same(state.grasp[moved], before.grasp[moved])
            if kept in before.grasp:
                assert same(state.grasp[kept], before.grasp[kept])
    has_critic = not variant.startswith("bc")
    assert ("critic" in state.grasp) == has_critic
    assert ("grasp_critic/grasp_critic_loss" in metrics) == has_critic
    assert "grasp_critic/bc_loss" in metrics
    for update in (agent.update, agent.update_policy, *([agent.update_critic] if has_critic else [])):
        assert update._cache_size() == 1


@pytest.mark.parametrize("variant", [*TRACED, *(pytest.param(v, marks=pytest.mark.slow) for v in RARE)])
def test_no_ranks_are_promoted_silently(variant):
    for gripper in (learned(joint=True, penalty=-0.1), learned(joint=False, hold_steps=1, critic_sees_gripper=False)):
        agent = compose(variant, gripper, steps=PART if "decoupled" in variant else None)
        batches = make_batches(agent.spec)
        batches = batches._replace(prev_action=batches.actions[:, :, 0])
        prefix = (np.zeros((HORIZON, ACTIONS), np.float32), np.zeros(HORIZON, np.float32))
        state = jax.eval_shape(agent.init, jax.random.key(0))
        with jax.numpy_rank_promotion("raise"):
            # The critic's own is a part of the first. A learner gives the policy's no later observations.
            alone = batches._replace(next_observations={})
            for update, given in ((agent._update, named(agent, batches)), (agent._update_policy, alone)):
                new, _ = jax.eval_shape(update, state, {}, given)
                kept = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), new, state)
                assert all(jax.tree.leaves(kept))
            chunk, _ = jax.eval_shape(
                lambda s, k, agent=agent, prefix=prefix: agent._sample_chunk(
                    agent.policy_params(s), see(agent), k, prefix, explore=True
                ),
                state,
                jax.random.key(0),
            )
        assert chunk.shape == (HORIZON, ACTIONS)


@pytest.mark.parametrize("variant", COMPILED)
def test_a_chunk_holds_choices_in_the_grippers_dimensions_and_the_arms_agent_in_the_others(variant):
    agent, state = fresh(variant)
    params = agent.policy_params(state)
    draw = lambda key, prefix=None: agent.sample(params, see(agent), key, explore=False, committed=prefix)  # noqa: E731
    chunk, record = draw(jax.random.key(0))
    chunk = np.asarray(chunk)
    assert set(np.unique(chunk[:, GRIPPERS])) <= set(CHOICES)
    np.testing.assert_array_equal(chunk[0::2][:, GRIPPERS], chunk[1::2][:, GRIPPERS])  # held for two ticks
    np.testing.assert_array_equal(chunk[::2][:, GRIPPERS], record["gripper"])
    inputs = {**see(agent), "gripper": np.asarray(record["gripper"]).reshape(-1)}
    of_arm = {k: v for k, v in params.items() if k != "gripper"}
    alone, _ = agent.inner.sample(of_arm, inputs, jax.random.key(0), explore=False)
    np.testing.assert_allclose(chunk[:, ARM], alone, atol=1e-6)
    committed = np.zeros((HORIZON, ACTIONS), np.float32)
    committed[0] = (0.1, 0.2, 0.3, 0.4, 0.5)
    late, _ = draw(jax.random.key(0), (committed, np.array([1, 0, 0, 0], np.float32)))
    np.testing.assert_allclose(late[0], committed[0], atol=1e-6)
    np.testing.assert_array_equal(late[1:, GRIPPERS], chunk[1:, GRIPPERS])


@pytest.mark.parametrize("steps", [PART, {"critic_steps": 2}])
def test_choices_are_of_the_executed_actions_and_last_for_as_long_as_a_chunk(monkeypatch, steps):
    monkeypatch.setattr(GripperConfig, "epsilon", 0.5)
    variant = "decoupled" if "prefix_steps" in steps else "acfql"
    agent = compose(variant, learned(hold_steps=1, joint=False), steps=steps)
    assert agent.choices.shape == (2, 2, 2)
    params = agent.policy_params(agent.init(jax.random.key(0)))
    seen = set()
    for i in range(20):
        chunk, record = agent.sample(params, see(agent), jax.random.key(i), explore=True)
        held = np.asarray(record["gripper"])[[0, 1, 1, 1]]
        np.testing.assert_array_equal(np.asarray(chunk)[:, GRIPPERS], held)
        seen.add(held.tobytes())
    assert len(seen) > 4


@pytest.mark.slow
def test_the_grasp_critic_of_executed_actions_learns_from_returns_of_more():
    agent = compose("decoupled", learned(hold_steps=1), steps=PART)
    batches = make_batches(agent.spec)
    one = lambda b: agent.update_critic(agent.init(jax.random.key(0)), {}, jax.device_put(b))  # noqa: E731
    a, _ = one(batches)
    for tick, matters in ((1, True), (2, False), (5, False)):
        flipped = np.array(batches.actions)
        flipped[:, :, tick, GRIPPERS] *= -1
        b, _ = one(batches._replace(actions=flipped))
        assert same(a.grasp["critic"], b.grasp["critic"]) != matters
    alive = batches.valid[..., 5:] > 0
    rewards = np.concatenate([batches.rewards[..., :5], np.where(alive, np.float32(0.9), 0)], axis=-1)
    b, _ = one(batches._replace(rewards=rewards))
    assert not same(a.grasp["critic"], b.grasp["critic"])


@pytest.mark.parametrize(("critic_steps", "prefix_steps"), [pytest.param(6, 2, marks=pytest.mark.slow), (2, 0)])
def test_a_change_is_charged_as_far_as_the_return_goes(critic_steps, prefix_steps):
    steps = {"critic_steps": critic_steps, "prefix_steps": prefix_steps}
    agent = compose("decoupled" if prefix_steps else "acfql", learned(penalty=-0.5), steps=steps)
    batches = make_batches(agent.spec)
    length = batches.actions.shape[2]
    actions = np.array(batches.actions)
    actions[..., GRIPPERS] = 1
    batches = batches._replace(prev_action=actions[:, :, 0], valid=np.ones_like(batches.valid), actions=actions)
    charged = []
    for tick in range(length):  # both grippers close on this tick and stay closed
        closing = np.array(actions)
        closing[:, :, tick:, GRIPPERS] = -1
        batch = jax.tree.map(lambda x: x[0], batches._replace(actions=closing))
        grasp = agent.init(jax.random.key(0)).grasp
        rewards = agent.grasp_critic_loss(grasp["critic"], grasp, batch).metrics["grasp_critic/grasp_rewards"]
        charged.append(float(rewards.mean()) - float(np.mean(np.sum(batch.rewards, -1))))
    expected = [-1.0 if tick < critic_steps else 0.0 for tick in range(length)]
    np.testing.assert_allclose(charged, expected, atol=1e-5)


def test_exploring_takes_random_choices_as_often_as_epsilon_says():
    agent = compose("acrlpd", learned(epsilon=0.5, hold_steps=1, joint=False))
    params = agent.policy_params(agent.init(jax.random.key(0)))
    observation = see(agent)
    choose = jax.jit(
        lambda key: agent.choose(
            params["gripper"], observation, agent.acting_noise(params, key, observation, explore=True)["gripper"]
        )
    )
    best = agent.choose(params["gripper"], observation, jnp.ones((HORIZON, 2, 2)))
    others = np.mean([np.asarray(choose(jax.random.key(i)) != best) for i in range(200)])
    assert others == pytest.approx(0.5 / 2, abs=0.04)  # half of the random ones are the best one


def gripper_task(spec: AgentSpec, updates: int, size: int, seed: int):
    """One decision each: reward 1 where gripper 1 follows the sign of the first state and gripper 4 is its opposite."""
    rng = np.random.default_rng(seed)
    batch = make_batches(spec, updates, size, seed)
    state = rng.uniform(-1, 1, (updates, size, 4)).astype(np.float32)
    side = np.sign(state[..., 0])
    taken = rng.choice([-1.0, 1.0], (updates, size, 2)).astype(np.float32)
    actions = rng.uniform(-0.9, 0.9, (updates, size, HORIZON, ACTIONS)).astype(np.float32)
    actions[..., GRIPPERS] = 0.8 * taken[:, :, None]
    good = (taken[..., 0] == side) & (taken[..., 1] == -side)
    rewards = np.zeros((updates, size, HORIZON), np.float32)
    rewards[..., 0] = good
    ones = np.ones((updates, size, HORIZON), np.float32)
    return batch._replace(
        observations={"state": state}, actions=actions, rewards=rewards, mask=np.zeros((updates, size), np.float32),
        valid=ones, bc_weight=good[..., None] * ones,
    )  # fmt: skip


def right(agent, state, *, pretrained=False) -> float:
    params = agent.policy_params(state, pretrained=pretrained)
    states = gripper_task(agent.spec, 1, 64, 99).observations["state"][0]
    chunks = np.array([agent.sample(params, {"state": s}, jax.random.key(0), explore=False)[0] for s in states])
    side = np.sign(states[:, :1])
    return float(np.mean((np.sign(chunks[:, :, 1]) == side) & (np.sign(chunks[:, :, 4]) == -side)))


@pytest.mark.parametrize(("joint", "plausible"), [(True, 0.0), pytest.param(False, 0.3, marks=pytest.mark.slow)])
def test_the_grasp_critic_learns_which_choice_pays(joint, plausible):
    agent = compose("acrlpd", learned(joint=joint, mask_unreachable=plausible, epsilon=0.0), candidates=1)
    state = agent.init(jax.random.key(0))
    before = right(agent, state)
    for i in range(12):
        state, metrics = agent.update(state, {}, named(agent, gripper_task(agent.spec, 20, 64, i)))
    assert right(agent, state) > max(0.9, before + 0.1)
    if joint:  # of one decision a branch for each gripper sees the mean over the other one's choices
        assert float(metrics["grasp_critic/grasp_critic_loss"]) < 0.1


def test_before_the_critic_has_seen_a_failure_imitation_chooses():
    agent = compose("acrlpd", learned(mask_unreachable=0.0), candidates=1)
    state = agent.init(jax.random.key(0))
    for i in range(12):
        state, metrics = agent.update_policy(state, {}, gripper_task(agent.spec, 20, 64, i))
    assert right(agent, state, pretrained=True) > 0.9
    assert right(agent, state) < 0.9  # a critic that never learnt
    assert float(metrics["grasp_critic/bc_accuracy"]) > 0.95


def test_cloning_imitates_the_choices():
    agent = compose("bc-gaussian", learned())
    state = agent.init(jax.random.key(0))
    for i in range(12):
        state, _ = agent.update(state, {}, named(agent, gripper_task(agent.spec, 20, 64, i)))
    assert right(agent, state) > 0.9


@pytest.mark.parametrize("sees", [pytest.param(True, marks=pytest.mark.slow), False])
def test_whether_the_arms_critic_sees_the_gripper(sees):
    agent = compose("acrlpd", learned(critic_sees_gripper=sees, mask_unreachable=0.0))
    batches = make_batches(agent.spec)
    flipped = np.array(batches.actions)
    flipped[..., GRIPPERS] *= -1
    one = lambda actions: agent.update_critic(  # noqa: E731
        agent.init(jax.random.key(0)), {}, jax.device_put(batches._replace(actions=actions))
    )[0]
    a, b = one(batches.actions), one(flipped)
    assert same(a.critic, b.critic) != sees
    assert not same(a.grasp["critic"], b.grasp["critic"])
    other = np.array(batches.actions)
    other[..., ARM] *= -1
    assert same(a.grasp, one(other).grasp)  # the grasp critic knows nothing of the arm


@pytest.mark.slow
def test_the_penalty_of_a_change_reaches_the_grasp_critic_alone():
    batches = make_batches(compose("acrlpd", learned()).spec)
    batches = batches._replace(prev_action=-batches.actions[:, :, 0])
    after = {}
    for penalty in (0.0, -0.5):
        agent = compose("acrlpd", learned(penalty=penalty, critic_sees_gripper=False))
        after[penalty], metrics = agent.update_critic(agent.init(jax.random.key(0)), {}, jax.device_put(batches))
        rewards = metrics["critic/rewards"], metrics["grasp_critic/grasp_rewards"]
        assert (rewards[1] < rewards[0]) == (penalty < 0)
    # Two programs: what rounds elsewhere in them is not the penalty, which would move every parameter by a whole step.
    for a, b in zip(jax.tree.leaves(after[0.0].critic), jax.tree.leaves(after[-0.5].critic), strict=True):
        np.testing.assert_allclose(np.mean(np.abs(a - b)), 0, atol=1e-6)
    assert not same(after[0.0].grasp["critic"], after[-0.5].grasp["critic"])


def test_what_follows_a_termination_does_not_reach_the_grasp_critic():
    agent, state = fresh("acfql")
    batches = make_batches(agent.spec)
    ended = batches.mask == 0
    later = np.array(batches.next_observations["state"])
    later[ended] = 100
    actions = np.where(batches.valid[..., None] > 0, batches.actions, np.float32(0.7))
    a, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, jax.device_put(batches))
    changed = batches._replace(next_observations={"state": later}, actions=actions)
    b, _ = agent.update_critic(jax.tree.map(jnp.copy, state), {}, jax.device_put(changed))
    assert same(a.grasp["critic"], b.grasp["critic"])
    c, _ = agent.update_critic(state, {}, jax.device_put(changed._replace(mask=np.ones_like(batches.mask))))
    assert not same(a.grasp["critic"], c.grasp["critic"])


def test_parameters_that_travel_suffice_for_acting():
    agent, state = fresh("acfql")
    params = agent.policy_params(state)
    loaded = agent.load_params(agent.flatten_params(params))
    here, there = (agent.sample(p, see(agent), jax.random.key(1), explore=True)[0] for p in (params, loaded))
    np.testing.assert_array_equal(here, there)
    assert "gripper/policy/net/Dense_0/kernel(4, 16)" in agent.network_shape()
    assert agent.network_shape() != build(config_of("acfql"), horizon=HORIZON, actions=ACTIONS).network_shape()


def test_weights_of_the_grasp_critic_decay_as_those_of_every_network_do():
    agent, weights = compose("published", learned(), weight_decay=0.5), {"w": jnp.ones(2)}
    optimiser = agent.grasp_optimiser
    update, _ = optimiser.update({"w": jnp.zeros(2)}, optimiser.init(weights), weights)
    np.testing.assert_allclose(update["w"], -0.005, rtol=1e-6)


def test_the_average_of_the_imitated_choices_acts():
    agent = compose("acfql", learned(), policy_ema=0.9)
    state, _ = agent.update_policy(agent.init(jax.random.key(0)), {}, on_device(agent.spec))
    published = agent.policy_params(state)["gripper"]["policy"]
    assert same(published, state.grasp["policy_average"])
    assert not same(published, state.grasp["policy"])


@pytest.mark.parametrize(
    ("variant", "value", "expected"),
    [pytest.param("acfql", None, 0.0, marks=pytest.mark.slow), ("acrlpd", -0.5, -0.5), ("bc", None, 0.0)],
)
def test_a_fixed_gripper_is_no_part_of_what_is_learned(variant, value, expected):
    agent = compose(variant, {"mode": "fixed", "fixed_value": value})
    assert isinstance(agent, FixedGripper)
    batches = make_batches(agent.spec)
    flipped = np.array(batches.actions)
    flipped[..., GRIPPERS] *= -1
    a, b = (
        agent.update(agent.init(jax.random.key(0)), {}, named(agent, jax.device_put(batches._replace(actions=x))))[0]
        for x in (batches.actions, flipped)
    )
    assert same(a, b)
    assert a.grasp == {}
    chunk, _ = agent.sample(agent.policy_params(a), see(agent), jax.random.key(0), explore=True)
    np.testing.assert_array_equal(chunk[:, GRIPPERS], np.full((HORIZON, 2), expected, np.float32))
    assert not np.array_equal(chunk[0, ARM], chunk[1, ARM])


ROBOT = robot_spec(FakeAlohaConfig())  # two grippers


def made(gripper: GripperConfig, grippers=ROBOT.grippers):
    config = ExperimentConfig("x", FakeAlohaConfig(), agent=AcfqlConfig(gripper=gripper), chunk=ChunkConfig(5))
    return make_agent(config, dataclasses.replace(ROBOT, grippers=grippers))


def test_setup_modes_select_the_composition():
    dual = made(GripperConfig(setup_mode="dual-arm-learned-gripper"))
    assert isinstance(dual, LearnedGripper)
    assert (dual.choices.shape, dual.inner.spec.action_dim) == ((1, 1, 9), 12)
    single = made(GripperConfig(setup_mode="single-arm-learned-gripper"), grippers=(6,))
    assert isinstance(single, LearnedGripper)
    assert (single.choices.shape, single.inner.spec.action_dim) == ((1, 1, 3), 13)
    own = made(GripperConfig(setup_mode="dual-arm-learned-gripper", choices=(-1, 1), hold_steps=1, joint=False))
    assert own.choices.shape == (5, 2, 2)
    assert isinstance(made(GripperConfig(setup_mode="dual-arm-fixed-gripper")), FixedGripper)
    taken_away = made(GripperConfig(setup_mode="single-arm-fixed-gripper"), grippers=())  # as HIL-SERL's wrapper does
    assert (taken_away.inner.spec.action_dim, type(taken_away)) == (14, FixedGripper)
    assert not isinstance(made(GripperConfig()), LearnedGripper | FixedGripper)


@pytest.mark.parametrize(
    ("gripper", "grippers", "named"),
    [
        (GripperConfig(choices=(-1, 1)), (), ("agent.gripper", "robot.grippers", "agent.gripper.choices")),
        (
            GripperConfig(setup_mode="single-arm-learned-gripper"),
            (6, 13),
            ("agent.gripper.setup_mode", "single-arm-learned-gripper", 1, 2, "6, 13"),
        ),
        (
            GripperConfig(setup_mode="dual-arm-fixed-gripper"),
            (6,),
            ("agent.gripper.setup_mode", "dual-arm-fixed-gripper", 2, 1, 6),
        ),
        (GripperConfig(mode="fixed"), (), ("agent.gripper.mode", "fixed", "robot.grippers")),
        (GripperConfig(mode="fixed"), tuple(range(14)), ("agent.gripper:", "arm")),
    ],
)
def test_a_robot_without_these_grippers_is_named(gripper, grippers, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        made(gripper, grippers)


@pytest.mark.parametrize("joint", [False, True])
def test_a_grippers_choice_is_imitated_where_the_human_made_it(joint):
    """Jointly the human has to have had all grippers."""
    agent = compose("bc-gaussian", learned(hold_steps=2, joint=joint))
    state, size = agent.init(jax.random.key(0)), int(np.prod(agent.choices.shape))

    def loss(*marked):
        batch = one_batch(agent, bc_dims=marked_numbers(agent.spec, *marked))
        grads, metrics, _ = gradient(agent.grasp_policy_loss, state.grasp["policy"], batch)
        bias = next(x for p, x in jax.tree_util.tree_leaves_with_path(grads) if x.shape == (size,))
        return np.asarray(bias).reshape(agent.choices.shape).any(axis=(0, 2)), metrics

    moved, metrics = loss(*ARM, GRIPPERS[1])
    assert moved.tolist() == ([False] if joint else [False, True])
    assert (float(metrics["grasp_critic/bc_loss"]) == 0) == joint
    moved, metrics = loss(*GRIPPERS)
    assert moved.all()
    plain = agent.grasp_policy_loss(state.grasp["policy"], one_batch(agent)).metrics
    for name, value in plain.items():
        assert float(metrics[name]) == pytest.approx(float(value.mean()), rel=1e-5)
    _, arm = imitation_gradient(
        agent.inner, state, agent.arm_batch(state, one_batch(agent, bc_dims=marked_numbers(agent.spec, 2, 4)))
    )
    bias = output_bias(arm, agent.inner)
    assert bias[:, 1].all()  # of actions 0, 2 and 3
    assert not bias[:, ::2].any()
