"""What learner and actor must agree on."""

import dataclasses
import json

import pytest

from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.compatibility import affects_acting, contract
from serl_chunk.config.fields import leaves
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.transport.wire.handshake import compare

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)

_RANKED = [("agent.pi0.vlm.attention_rank", "2"), ("agent.pi0.expert.attention_rank", "2")]
PI0 = [("agent.language.tokenizer", "bytes"), ("agent.language.length", "99"), ("agent.policy", "pi0"), *_RANKED]
# For each setting an actor acts by, another value than `fake_aloha` has; settings in front of it make it count.
OTHER: dict[str, list[tuple[str, str]]] = {
    "agent.image_keys": [("agent.image_keys", "top")],
    "agent.candidates": [("agent.candidates", "5")],
    "agent.edit_scale": [("agent.edit_scale", "0.05")],
    "agent.critic.target_aggregate": [("agent.critic.target_aggregate", "mean")],
    "agent.replan_spread": [("agent.prefix_lengths", "5"), ("agent.replan_spread", "0.125")],
    "agent.prefix_lengths": [("agent.prefix_lengths", "5")],
    "agent.critic.activation": [("agent.critic.activation", "tanh")],
    "agent.flow.steps": [("agent.flow.steps", "9")],
    "agent.flow.spread": [("agent.flow.spread", "0.5")],
    "agent.train_delay": [("agent.train_delay", "sampled")],
    "agent.language.tokenizer": [("agent.language.tokenizer", "bytes")],
    "agent.language.length": [
        ("agent.language.tokenizer", "bytes"), ("agent.language.length", "90"), ("agent.language.length", "100"),
    ],
    "agent.encoder.frame_size": [("agent.image_keys", "top"), ("agent.encoder.frame_size", "24,32")],
    "agent.pi0.pi05": [*PI0, ("agent.pi0.pi05", "True")],
    "agent.pi0.state_in_prompt": [*PI0, ("agent.pi0.pi05", "True"), ("agent.pi0.state_in_prompt", "False")],
    "agent.pi0.state_dims": [*PI0, ("agent.pi0.state_dims", "9")],
    "agent.pi0.cameras": [*PI0, ("agent.pi0.cameras", "left,right")],
    "agent.pi0.steps": [*PI0, ("agent.pi0.steps", "9")],
    "agent.pi0.published": [*PI0, ("agent.pi0.published", "True")],
    "agent.pi0.dtype": [*PI0, ("agent.pi0.dtype", "float32")],
    "agent.pi0.vlm.attention_alpha": [*PI0, ("agent.pi0.vlm.attention_alpha", "5.0")],
    "agent.pi0.expert.attention_alpha": [*PI0, ("agent.pi0.expert.attention_alpha", "5.0")],
    "agent.log_std_min": [("agent.log_std_min", "-20.0")],
    "agent.policy_activation": [("agent.policy_activation", "tanh")],
    "agent.q_agg": [("agent.q_agg", "min")],
    "agent.flow_steps": [("agent.flow_steps", "4")],
    "agent.actor_num_samples": [("agent.actor_num_samples", "4")],
    "agent.gripper.epsilon": [("agent.gripper.choices", "-1,1"), ("agent.gripper.epsilon", "0.5")],
    "group.density": [("group.density", "end")],
    "group.noise": [("group.noise", "0.5")],
    "group.sigma": [("group.sigma", "0.5")],
    "reward.failure_reward": [("reward.failure_reward", "-0.5")],
    "learner.random_steps": [("learner.random_steps", "100")],
    "actor.clock": [("actor.clock", "realtime")],
    "actor.adaptive_execution": [
        ("agent.prefix_lengths", "5"), ("agent.replan_spread", "0.125"), ("actor.adaptive_execution", "True"),
    ],
}  # fmt: skip
# Decide acting, under another name in the contract.
DERIVED = {
    "agent.gripper.choices", "agent.gripper.mode", "agent.gripper.fixed_value", "agent.gripper.setup_mode",
    "agent.gripper.joint", "agent.gripper.hold_steps", "chunk.horizon", "chunk.execute_steps", "actor.delay_ticks",
    "actor.inference",
}  # fmt: skip
AGENTS = (AgentConfig, AcfqlConfig, DecoupledConfig, AcrlpdConfig, BcConfig, PublishedQcConfig, GroupAgentConfig)
OF_PRESETS = {
    "agent.critic.target_aggregate": "rlpd", "agent.critic.activation": "rlpd", "agent.log_std_min": "qc-rlpd",
    "agent.policy_activation": "qc-rlpd", "agent.gripper.epsilon": "rlpd", "agent.replan_spread": "decoupled",
    "agent.prefix_lengths": "decoupled", "actor.adaptive_execution": "decoupled",
    "group.density": "ript-flow-sde", "group.noise": "ript-flow-sde", "group.sigma": "ript-flow-sde",
}  # fmt: skip
PUBLISHED = ("agent.q_agg", "agent.flow_steps", "agent.actor_num_samples")


def test_the_contract_tells_apart_what_must_agree_and_nothing_else():
    base = contract(CONFIG, SPEC, "net")
    json.dumps(base)
    learner_side = load("fake_aloha", [("agent.lr", "0.1"), ("learner.batch_size", "2"), ("discount", "0.5")])
    assert contract(learner_side, SPEC, "net") == base
    for override, field in [
        (("chunk.horizon", "6"), "horizon"),
        (("actor.delay_ticks", "1"), "delay_ticks"),
        (("normaliser.actions", "absolute_range"), "actions"),
        (("reward.scale", "2"), "critic"),
        (("name", "x"), "experiment"),
    ]:
        changed = contract(load("fake_aloha", [override]), SPEC, "net")
        assert changed[field] != base[field]
    assert contract(CONFIG, SPEC, "other net")["network"] != base["network"]
    returns = [("chunk.return_steps", "10")]  # what an actor shows to a learner with cameras, and to no other
    assert contract(load("fake_aloha", returns), SPEC, "net") == base
    ten, five = (contract(load("fake_aloha", [("agent.image_keys", "top"), *r]), SPEC, "net") for r in (returns, []))
    assert (ten["return_steps"], five["return_steps"]) == ("10", "5")
    faster = dataclasses.replace(SPEC, control_hz=10.0)
    differing = {k for k, v in contract(CONFIG, faster, "net").items() if v != base[k]}
    assert differing == {"control_hz", "robot_specs"}


EACH = [dataclasses.replace(CONFIG, agent=agent()) for agent in AGENTS if not agent.prefix_critic]
EACH.append(configured(CONFIG, preset="decoupled"))


def acting(kind: str) -> set[str]:
    marked = (leaf for config in EACH for leaf in leaves(config) if leaf.acts == kind)
    return {leaf.path for leaf in marked if not leaf.path.startswith("robot.")}


def test_what_is_compared_is_what_an_actor_acts_by():
    assert acting("value") == set(OTHER)
    assert acting("derived") == DERIVED


def test_an_evaluation_is_the_runs_own_whatever_only_trained():
    acts = {*OTHER, *DERIVED, "robot.max_episode_steps", "robot.no_longer_there"}
    trained = {"chunk.return_steps", "actor.intervention", "robot.scripted_human.speed", "reward.scale", "nothing"}
    for config in EACH:
        own = {leaf.path for leaf in leaves(config)}
        assert all(affects_acting(config, path) for path in acts if path in own or path.startswith("robot."))
        assert not any(affects_acting(config, path) for path in acting("") | acting("shape") | trained)


@pytest.mark.parametrize("path", OTHER)
def test_a_setting_that_an_actor_acts_by_is_named_where_it_differs(path):
    *first, last = OTHER[path]
    preset, compat = ("qc", "qc") if path in PUBLISHED else (OF_PRESETS.get(path), None)
    preset = "bc" if path.startswith("agent.pi0.") else preset
    learner, actor = (
        configured(load_experiment("fake_aloha"), overrides, preset=preset, compat=compat)
        for overrides in (first, [*first, last])
    )
    sentence = compare(contract(learner, SPEC, "net"), contract(actor, SPEC, "net"))
    value = last[1]
    assert f"{path} is " in sentence
    assert f"at the learner and {value!r} at the actor" in sentence
    assert "Start both with the same experiment, configuration" in sentence


def test_both_sides_compare_what_grippers_are():
    def said(*overrides):
        config = load("fake_aloha", [(f"agent.gripper.{k}" if "." not in k else k, v) for k, v in overrides])
        return contract(config, spec_of(config), "")["agent"]

    assert said() == "acfql"
    two = ("choices", "-1,1")
    assert said(two) == "acfql, grippers jointly of (-1, 1) for 5 ticks"
    assert said(("choices", "-1,0,1")) not in (said(two), said())
    lengths = [("chunk.horizon", "8"), ("chunk.execute_steps", "4"), ("chunk.critic_horizon", "4")]
    assert said(two, *lengths).endswith("for 4 ticks")
    assert said(("setup_mode", "dual-arm-fixed-gripper")) == "acfql, grippers fixed (as at reset)"
