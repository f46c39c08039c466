"""The choices of grippers and the grasp critic's losses, against numbers worked out by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent_tools import make_batches

from serl_chunk.agents.grasp_critic import (
    GripperActions,
    best_option,
    choice_imitation,
    grasp_loss,
    grasp_target,
    reachable_actions,
    select_action,
)
from serl_chunk.agents.spec import AgentSpec

THREE = (-1.0, 0.0, 1.0)


@functools.cache
def _label(choices: GripperActions):
    return jax.jit(choices.label)


def label(choices: GripperActions, *args):
    """Its label, compiled once for each shape."""
    return np.asarray(_label(choices)(*args))


@pytest.mark.parametrize(("joint", "shape"), [(True, (2, 1, 9)), (False, (2, 2, 3))])
def test_a_label_is_what_was_executed_and_decodes_to_it(joint, shape):
    choices = GripperActions(THREE, 2, 4, 2, joint=joint)
    assert choices.shape == shape
    rng = np.random.default_rng(0)
    wanted = rng.choice(THREE, (8, 2, 2)).astype(np.float32)
    noisy = np.repeat(wanted, 2, axis=1) + rng.uniform(-0.24, 0.24, (8, 4, 2)).astype(np.float32)
    option = label(choices, noisy, np.ones((8, 4), np.float32))
    np.testing.assert_array_equal(choices.decode(option), wanted)
    np.testing.assert_array_equal(choices.chunk(option, 4), np.repeat(wanted, 2, axis=1))
    longer = np.asarray(choices.chunk(option, 7))
    np.testing.assert_array_equal(longer[:, :4], choices.chunk(option, 4))
    np.testing.assert_array_equal(longer[:, 4:], np.repeat(wanted[:, -1:], 3, axis=1))  # nothing decided anew


def test_a_part_is_where_most_of_its_steps_that_exist_go():
    choices = GripperActions((-1.0, 1.0), 1, 4, 4, joint=True)
    closing = np.array([[[1.0], [0.6], [0.5], [-0.9]], [[1.0], [0.6], [0.5], [-0.9]]], np.float32)
    valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.float32)
    before = np.ones((2, 1), np.float32)
    assert label(choices, closing, valid, before)[:, 0, 0].tolist() == [1, 1]  # 3 : 1 open, the last one closes
    closing[:, 2] = -0.2
    assert label(choices, closing, valid, before)[:, 0, 0].tolist() == [0, 1]  # 2 : 2, and the later ones close
    halves = GripperActions((-1.0, 1.0), 1, 4, 2, joint=True)
    assert label(halves, closing, valid, before)[1, :, 0].tolist() == [1, 0]  # nothing exists: what the sampler repeats


@pytest.mark.parametrize("values", [(-0.9, 0.9), (0.9, -0.9)])
def test_a_limited_gripper_is_on_its_way_from_its_first_ticks_on(values):
    """The positions that a driver records which allows 0.4 a tick: an episode that ends when the fingers let go."""
    choices = GripperActions(values, 1, 1, 1, joint=True)
    opens, closes = values.index(0.9), values.index(-0.9)
    way = np.array([0.9, 0.9, 0.5, 0.1, -0.3, -0.7, -0.9, -0.9, -0.9, -0.15], np.float32)
    expected = [opens] * 3 + [closes] * 6 + [opens]
    got = label(choices, way[1:, None, None], np.ones((9, 1), np.float32), way[:-1, None])
    assert got[:, 0, 0].tolist() == expected[1:]
    whole = label(GripperActions(values, 1, 9, 1, joint=True), way[None, 1:, None], np.ones((1, 9), np.float32))
    assert whole[0, :, 0].tolist() == expected[1:]  # the tick before is no matter here: nothing moves at first


def test_a_command_between_two_of_three_goes_to_the_next_one_in_its_direction():
    choices = GripperActions(THREE, 1, 1, 1, joint=True)
    now, earlier = np.array([0.4, 0.4, 0.4, -0.6, -0.6]), np.array([0.1, 0.9, 0.4, -0.2, -1.0])
    got = label(choices, now[:, None, None].astype(np.float32), np.ones((5, 1), np.float32), earlier[:, None])
    assert choices.values[got[:, 0, 0]].tolist() == [1, 0, 0, -1, 0]


def test_a_tap_is_a_decision_where_a_value_is_neutral():
    """HIL-SERL's SpaceMouse: about -1 while the button is held, and 0 means that the gripper stays as it is."""
    choices = GripperActions(THREE, 1, 4, 4, joint=True, neutral=0.0)
    taps = [[0, -0.95, 0, 0], [0, 0, 0, -0.95], [-0.95, 0, 0, 0], [-0.95, 0, 0.9, 0], [0, 0, 0, 0], [0, 0, -1, 0]]
    valid = np.ones((6, 4), np.float32)
    valid[5, 2:] = 0  # the tap is beyond the episode's end
    actions = np.array(taps, np.float32)[..., None]
    assert choices.values[label(choices, actions, valid)[:, 0, 0]].tolist() == [-1, -1, -1, 1, 0, 0]
    halves = label(GripperActions(THREE, 1, 4, 2, joint=True, neutral=0.0), actions, valid)[:, :, 0]
    assert halves.tolist() == [[0, 1], [1, 0], [0, 1], [0, 2], [1, 1], [1, 1]]
    two = GripperActions(THREE, 2, 4, 4, joint=True, neutral=0.0)
    both = np.stack([actions[0], actions[3]], axis=-1).reshape(1, 4, 2)
    assert two.decode(label(two, both, valid[:1]))[0, 0].tolist() == [-1, 1]


def test_a_push_changes_a_gripper_once_and_letting_go_does_not():
    choices = GripperActions(THREE, 1, 5, 5, joint=True, neutral=0.0)
    valid = np.ones((1, 5), np.float32)

    changed = jax.jit(choices.changes)

    def changes(before, *ticks):
        return changed(np.array(ticks, np.float32)[None, :, None], np.array([[before]], np.float32), valid)[0]

    assert changes(0.0, 0, -1, 0, 0, 0).tolist() == [0, 1, 0, 0, 0]
    assert changes(0.0, -1, -1, 0, -1, 1).tolist() == [1, 0, 0, 0, 1]  # the same push again moves nothing
    assert changes(-1.0, -1, 0, -1, 0, 1).tolist() == [0, 0, 0, 0, 1]
    assert changes(1.0, 0, 0, 0, 0, -1).tolist() == [0, 0, 0, 0, 1]


def test_changes_are_counted_against_the_tick_before():
    choices = GripperActions((-1.0, 1.0), 2, 3, 3, joint=False)
    actions = np.array([[[0.9, -0.9], [0.2, 0.8], [-0.7, 0.9]]], np.float32)
    before = np.array([[-0.5, -0.5]], np.float32)
    changes = choices.changes(actions, before, np.ones((1, 3), np.float32))
    assert changes.tolist() == [[1, 1, 1]]
    assert choices.changes(actions, before, np.array([[1, 1, 0]], np.float32)).tolist() == [[1, 1, 0]]


def test_the_target_is_double_dqn_averaged_over_branches():
    batch = make_batches(AgentSpec(4, 2, 2, 2, (), 0.5), 1, 2)
    batch = batch._replace(
        rewards=np.array([[1.0, 2.0], [1.0, 0.0]], np.float32),
        mask=np.array([1.0, 0.0], np.float32),
        discount_n=np.array([0.25, 0.5], np.float32),
    )
    online = jnp.array([[[[1.0, 3.0, 2.0]], [[5.0, 0.0, 9.0]]]] * 2)  # [B, J, 1, O]
    target = jnp.array([[[[10.0, 20.0, 30.0]], [[40.0, 50.0, 60.0]]]] * 2)
    allowed = jnp.ones((2, 2, 1, 3), bool).at[:, 1, 0, 2].set(False)
    option = best_option(online, allowed)
    assert option[0, :, 0].tolist() == [1, 0]
    y = grasp_target(batch, 0.5, jnp.array([-0.5, 0.0]), select_action(target, option))
    np.testing.assert_allclose(y, [1 + 0.5 * 2 - 0.5 + 0.25 * (20 + 40) / 2, 1.0])


def test_the_loss_is_of_the_executed_choice_where_it_had_an_effect():
    outputs = jnp.array([[[[1.0, 3.0]], [[5.0, 2.0]]], [[[1.0, 3.0]], [[5.0, 2.0]]]])
    option = jnp.array([[[1], [0]], [[0], [1]]], jnp.int32)
    exists = jnp.array([[1.0, 1.0], [1.0, 0.0]])
    loss = grasp_loss(outputs, option, jnp.array([2.0, 0.0]), None, exists * jnp.array([[1.0], [0.5]]))
    assert float(loss.mean()) == pytest.approx((1 + 9 + 0.5 * 1) / 4)


def test_plausible_options():
    logits = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    for share, allowed in ((0.0, [True] * 3), (0.4, [True, True, False]), (1.0, [True, False, False])):
        assert reachable_actions(logits, share).tolist() == allowed


def test_imitation_is_the_cross_entropy_of_marked_parts():
    logits = jnp.log(jnp.array([[[[0.75, 0.25]], [[0.5, 0.5]]], [[[0.1, 0.9]], [[0.2, 0.8]]]]))
    option = jnp.zeros((2, 2, 1), jnp.int32)
    bc = jnp.array([[1.0, 0.5], [0.0, 0.0]])
    loss = choice_imitation(logits, option, bc).mean()
    assert float(loss) == pytest.approx((-np.log(0.75) - 0.5 * np.log(0.5)) / 1.5)
