"""Who sets a field by name is told where nothing reads it; who sets a default in a file is not."""

from __future__ import annotations

import pytest
from errors import naming

from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.fields import check_unused
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig("x", FakeAlohaConfig())
CAMERA = ("agent.image_keys", "top")
CHOICES = ("agent.gripper.choices", "-1,1")
BLIND = [CAMERA, ("agent.use_state", "false")]
RESNET = [CAMERA, ("agent.encoder.kind", "resnet10")]
CACHED = [*RESNET, ("agent.encoder.shift", "0"), ("agent.encoder.frozen_backbone", "true"),
          ("agent.encoder.cache_features", "true")]  # fmt: skip
OPENPI = [("normaliser.norm_stats", "x.json"), ("normaliser.actions", "openpi")]
# (preset, a field, its value, what makes it count, and what else is set)
CASES = [
    (None, "agent.encoder.kind", "resnet10", [CAMERA]),
    (None, "agent.encoder.frame_size", "24,32", [CAMERA]),
    (None, "replay.frame_cache_bytes", "1000", [CAMERA]),
    ("qc", "agent.alpha", "3.0", [("agent.actor_type", "distill-ddpg")]),
    ("qc", "agent.bc_alpha", "8.0", [("agent.agent_name", "acrlpd")]),
    ("qc-rlpd", "agent.flow_steps", "8", [("agent.agent_name", "acfql")]),
    (None, "agent.language.length", "90", [("agent.language.tokenizer", "bytes")]),
    ("rlpd", "agent.gripper.epsilon", "0.1", [CHOICES]),
    ("rlpd-qc", "replay.exclude_before_takeover", "0.5", [("agent.bc_on", "+successes")]),
    (None, "robot.scripted_human.noise", "0.1", [("actor.intervention", "scripted")]),
    ("hg-dagger-gaussian", "agent.flow.hidden", "16", [("agent.policy", "flow")]),
    (None, "operator.keys", "success=s 2", [("actor.intervention", "spacemouse")]),
    ("hil-serl", "learner.max_lag_steps", "30", [("learner.utd_ratio", "2.0")]),
    *(
        (None, f"normaliser.{name}", value, OPENPI[1:], *OPENPI[:1])
        for name, value in (("scaling", "quantiles"), ("delta_mask", "6,-1,6,-1"), ("robot", "aloha"))
    ),
]


def asked(preset: str | None, *overrides: tuple[str, str], base: ExperimentConfig = BASE) -> None:
    compat = "qc" if preset == "qc-rlpd" else None
    check_unused(configured(base, overrides, preset=preset, compat=compat), [path for path, _ in overrides])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[1])
def test_a_field_that_nothing_reads_is_refused_until_something_does(case):
    preset, path, value, switched, *others = case
    with pytest.raises(ConfigError, match=naming(path, value, switched[0][0])):
        asked(preset, (path, value))
    asked(preset, *others, *switched, (path, value))


RULES = {
    None: [],
    "expert": [("agent.pi0.trainable", "expert")],
    "q_gradient": [("agent.pi0.trainable", "expert"), ("agent.improve_by", "q_gradient")],
    "edit": [("agent.improve_by", "edit")],
    "rlt": [("agent.improve_by", "rlt")],
    "dsrl": [("agent.improve_by", "dsrl"), ("agent.edit_scale", "0")],
    "policy": [("agent.target", "policy")],
}
OF_IMITATION = ("edit", "rlt", "dsrl", None)
# a setting, its value, by which rules nothing reads it, what the message names, by which rules something does
OF_RULES = [
    ("agent.bc_on", "demo", (None,), "agent.pi0.trainable", ("expert", "q_gradient", "rlt")),
    ("agent.bc_on", "demo", ("edit", "dsrl"), "agent.improve_by", ()),
    ("agent.policy_updates", "2", (None,), "agent.pi0.trainable", ("expert", "dsrl")),
    ("agent.policy_ema", "0.9", (None,), "agent.pi0.trainable", ("expert", "edit")),
    ("learner.policy_batch_size", "8", (None,), "agent.pi0.trainable", ("expert", "edit")),
    *(
        (path, value, OF_IMITATION, "agent.pi0.trainable", ("expert", "q_gradient"))
        for path, value in (("agent.pi0.flow_draws", "2"), ("agent.pi0.lr_warmup", "9"), ("agent.pi0.lr_cosine", "900"),
                            ("agent.pi0.weight_decay", "0.1"), ("agent.pi0.grad_clip", "0.5"),
                            ("replay.exclude_before_takeover", "0.5"))
    ),
    ("agent.pi0.augment", "True", OF_IMITATION, "agent.pi0.trainable", ("expert",)),
    ("agent.pi0.augment", "True", ("q_gradient",), "agent.improve_by", ()),
    ("agent.candidates", "8", ("rlt", "dsrl"), "agent.improve_by", (None, "expert", "q_gradient", "edit")),
    ("agent.expectile", "0.9", ("policy",), "agent.target", (None, "edit")),
]  # fmt: skip


@pytest.mark.parametrize("case", OF_RULES, ids=lambda c: c[0])
def test_what_a_rule_of_pi0_does_not_read_is_refused(case):
    path, value, without, named, others = case
    base = load_experiment("fake_aloha_pi0_rl")
    for rule in without:
        with pytest.raises(ConfigError, match=naming(path, value, named)):
            asked(None, *RULES[rule], (path, value), base=base)
    for rule in others:
        asked(None, *RULES[rule], (path, value), base=base)


def gym(*overrides: tuple[str, str]) -> None:
    asked(None, *overrides, base=ExperimentConfig("x", GymConfig(make=print), actor=ActorConfig(intervention="gello")))


def test_what_another_setting_takes_the_effect_from_is_refused():
    ticks, seconds = ("robot.max_episode_steps", "50"), ("robot.max_episode_s", "5")
    gym(ticks)
    gym(seconds)
    with pytest.raises(ConfigError, match=naming(*ticks, seconds[0])):
        gym(ticks, seconds)
    for others, path, value, named in (
        (BLIND, "agent.encoder.state_latent", "8", ("agent.use_state", "True")),
        (CACHED, "replay.frame_cache_bytes", "1000", ("agent.encoder.cache_features", "False")),
        (RESNET, "agent.encoder.features", "4,8", ("agent.encoder.kind", "conv", "impala")),
    ):
        with pytest.raises(ConfigError, match=naming(path, value, *named)):
            asked(None, *others, (path, value))
        asked(None, CAMERA, (path, value))
        if path != "agent.encoder.features":  # 0 is off, whatever else is set
            asked(None, *others, (path, "0"))


@pytest.mark.parametrize(("path", "value"), [
    ("agent.gripper.penalty", "-0.1"), ("learner.critic_pretrain_steps", "9"),
])  # fmt: skip
def test_an_agent_without_a_critic_reads_nothing_of_one(path, value):
    with pytest.raises(ConfigError, match=naming(path, value, "acfql", "acrlpd")):
        asked("hg-dagger", (path, value), CHOICES)
    asked("hg-dagger", ("agent.gripper.joint", "false"), CHOICES)
    asked("bc", ("learner.critic_pretrain_steps", "0"))  # none is what it has


@pytest.mark.parametrize("name", ["max_steps", "offline_steps", "online_steps", "eval_interval", "checkpoint_period"])
def test_iterations_read_no_length_of_phases(name):
    with pytest.raises(ConfigError, match=naming(f"learner.{name}", 500, "group.iterations")):
        asked("ript", (f"learner.{name}", "500"))
    asked("ript", ("learner.offline_steps", "0"))
