"""What learner and actor must agree on."""

import dataclasses
import json

import pytest

from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig
from serl_chunk.config.compatibility import ACTING_FIELDS, affects_acting, contract
from serl_chunk.transport.wire.handshake import compare

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)

PREFIX = [("agent.prefix_critic", "True"), ("chunk.critic_horizon", "10")]
# For each setting an actor acts by, another value than `fake_aloha` has; settings in front of it make it count.
OTHER: dict[str, list[tuple[str, str]]] = {
    "agent.image_keys": [("agent.image_keys", "top")],
    "agent.candidates": [("agent.candidates", "5")],
    "agent.choose_by": [("agent.choose_by", "min")],
    "agent.choose_std": [("agent.choose_std", "0.5")],
    "agent.exploration_knots": [("agent.exploration_knots", "2")],
    "agent.replan_spread": [
        *PREFIX, ("agent.prefix_lengths", "5"), ("agent.replan_spread", "0.125"),
    ],
    "agent.prefix_lengths": [*PREFIX, ("agent.prefix_lengths", "5")],
    "agent.critic.activation": [("agent.critic.activation", "gelu")],
    "agent.critic.layer_norm": [("agent.critic.layer_norm", "after")],
    "agent.flow.steps": [("agent.flow.steps", "9")],
    "agent.flow.noise_low": [("agent.flow.noise_low", "0.75")],
    "agent.flow.activation": [("agent.flow.activation", "gelu")],
    "agent.flow.time": [("agent.flow.time", "raw")],
    "agent.flow.train_delay": [("agent.flow.train_delay", "sampled")],
    "agent.improve.steps": [("agent.improve.steps", "3")],
    "agent.improve.top": [("agent.improve.steps", "3"), ("agent.improve.top", "2")],
    "agent.improve.rate": [("agent.improve.steps", "3"), ("agent.improve.rate", "0.5")],
    "agent.improve.radius": [("agent.improve.steps", "3"), ("agent.improve.radius", "0.5")],
    "agent.log_std_min": [("agent.log_std_min", "-20.0")],
    "agent.gripper.epsilon": [("agent.gripper.choices", "-1,1"), ("agent.gripper.epsilon", "0.5")],
    "agent.gripper.loss": [("agent.gripper.choices", "-1,1"), ("agent.gripper.loss", "squared")],
    "reward.failure_reward": [("agent.critic.loss", "squared"), ("reward.failure_reward", "-0.5")],
    "learner.random_steps": [("learner.random_steps", "100")],
    "actor.clock": [("actor.clock", "realtime")],
    "actor.adaptive_execution": [
        *PREFIX, ("agent.prefix_lengths", "5"), ("agent.replan_spread", "0.125"),
        ("actor.adaptive_execution", "True"),
    ],
}  # fmt: skip
# Seen otherwise: in the shapes of the parameters that travel (`network`), or in a value that has a name of its own.
SHAPES = {
    "agent.use_state", "agent.prefix_critic", "agent.hidden", "agent.policy_layer_norm", "agent.actor_type",
    "agent.policy", "agent.flow.hidden", "agent.flow.layer_norm", "agent.flow.fourier_dim", "agent.critic.hidden",
    "agent.critic.ensemble", "agent.critic.bins", "agent.encoder.kind", "agent.encoder.features",
    "agent.encoder.pooling", "agent.encoder.latent", "agent.encoder.share_cameras", "agent.encoder.state_latent",
    "agent.encoder.trained_by", "agent.encoder.frozen_backbone", "agent.gripper.hidden",
    "agent.gripper.critic_sees_gripper",
}  # fmt: skip
NAMED = {
    "agent.critic.loss", "agent.critic.value_low", "agent.critic.value_high", "agent.critic.sigma_bins",
    "agent.gripper.choices", "agent.gripper.mode", "agent.gripper.fixed_value", "agent.gripper.setup_mode",
    "agent.gripper.joint", "agent.gripper.hold_steps",
}  # fmt: skip
# The learner's own: they decide which parameters and counts it publishes, and acting does not look at them.
LEARNT_BY = {
    "agent.lr", "agent.grad_clip", "agent.weight_decay", "agent.kernel_init", "agent.pretrain_candidates",
    "agent.policy_ema", "agent.acting_critic", "agent.prefix_expectile", "agent.update_order", "agent.bc_mean",
    "agent.bc_on",
    "agent.bc_alpha", "agent.init_temperature", "agent.target_entropy_per_dim", "agent.backup_entropy",
    "agent.log_prob", "agent.bc_clip", "agent.target_candidates", "agent.bc_invalid", "agent.target",
    "agent.expectile", "agent.target_flow_steps", "agent.alpha", "agent.normalise_q", "agent.policy_updates",
    "agent.improve.imitate", "agent.improve.candidates", "agent.flow.train_delay_max", "agent.critic.target_subset",
    "agent.critic.target_aggregate", "agent.critic.initial_logit", "agent.critic.target_floor", "agent.critic.tau",
    "agent.critic.tail", "agent.critic.target_average", "agent.encoder.weights", "agent.encoder.shift",
    "agent.encoder.cache_features", "agent.gripper.neutral",
    "agent.gripper.penalty", "agent.gripper.mask_unreachable", "agent.gripper.lr", "agent.gripper.tau",
}  # fmt: skip


def test_the_contract_tells_apart_what_must_agree_and_nothing_else():
    base = contract(CONFIG, SPEC, "net")
    json.dumps(base)
    learner_side = load("fake_aloha", [("agent.lr", "0.1"), ("learner.batch_size", "2"), ("discount", "0.5")])
    assert contract(learner_side, SPEC, "net") == base
    for override, field in [
        (("chunk.horizon", "6"), "horizon"),
        (("actor.delay_ticks", "1"), "delay_ticks"),
        (("normaliser.actions", "absolute_range"), "actions"),
        (("agent.critic.value_high", "2"), "critic"),
        (("name", "x"), "experiment"),
    ]:
        changed = contract(load("fake_aloha", [override]), SPEC, "net")
        assert changed[field] != base[field]
    bins = [("agent.critic.loss", "hl_gauss"), ("agent.critic.sigma_bins", "0.75")]
    wide = [bins[0], ("agent.critic.sigma_bins", "2")]  # the same shapes over a wider support
    assert len({contract(load("fake_aloha", o), SPEC, "net")["critic"] for o in (bins, wide)}) == 2
    assert contract(CONFIG, SPEC, "other net")["network"] != base["network"]
    returns = [("chunk.return_steps", "10")]  # what an actor shows to a learner with cameras, and to no other
    assert contract(load("fake_aloha", returns), SPEC, "net") == base
    ten, five = (contract(load("fake_aloha", [("agent.image_keys", "top"), *r]), SPEC, "net") for r in (returns, []))
    assert (ten["return_steps"], five["return_steps"]) == ("10", "5")
    faster = dataclasses.replace(SPEC, control_hz=10.0)
    differing = {k for k, v in contract(CONFIG, faster, "net").items() if v != base[k]}
    assert differing == {"control_hz", "robot_specs"}


def paths(config: object, prefix: str) -> set[str]:
    """Dotted names of all settings below `config`."""
    out: set[str] = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        out |= paths(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else {prefix + field.name}
    return out


def test_every_setting_of_an_agent_is_compared_or_does_not_matter_to_acting():
    """A new one is put where it belongs, which is a question about `Agent.sample`."""
    known = set().union(*(paths(kind(), "agent.") for kind in (AgentConfig, AcfqlConfig, AcrlpdConfig, BcConfig)))
    groups = [{p for p in ACTING_FIELDS if p.startswith("agent.")}, SHAPES, NAMED, LEARNT_BY]
    assert known == set().union(*groups)
    assert sum(map(len, groups)) == len(known)


def test_an_evaluation_is_the_runs_own_whatever_only_trained():
    assert all(
        map(
            affects_acting,
            {*ACTING_FIELDS, *NAMED, "chunk.execute_steps", "actor.delay_ticks", "robot.max_episode_steps"},
        )
    )
    trained = {
        "chunk.return_steps",
        "actor.intervention",
        "actor.max_human_ticks",
        "robot.scripted_human.speed",
        "reward.scale",
    }
    assert not any(map(affects_acting, LEARNT_BY | trained))


@pytest.mark.parametrize("path", ACTING_FIELDS)
def test_a_setting_that_an_actor_acts_by_is_named_where_it_differs(path):
    *first, last = OTHER[path]
    gaussian = path == "agent.log_std_min"
    learner, actor = (
        load("fake_aloha", overrides, preset="qc-rlpd" if gaussian else None) for overrides in (first, [*first, last])
    )
    sentence = compare(contract(learner, SPEC, "net"), contract(actor, SPEC, "net"))
    value = last[1]
    assert f"{path} is " in sentence
    assert f"at the learner and {value!r} at the actor" in sentence
    assert "Start both with the same --exp_name, the same configuration" in sentence


def test_settings_that_nothing_looks_at_are_not_compared():
    said = contract(CONFIG, SPEC, "net")
    assert not {"agent.improve.rate", "agent.gripper.epsilon", "agent.log_std_min"} & set(said)
    base, other = (contract(load("fake_aloha", [("agent.improve.top", n)]), SPEC, "net") for n in "23")
    assert base == other
