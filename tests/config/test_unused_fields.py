"""Who sets a field by name is told where nothing reads it; who sets a default in a file is not."""

from __future__ import annotations

import dataclasses

import pytest
from errors import naming

from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.fields import check_unused
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig("x", FakeAlohaConfig())
# (preset, a field, its value, what makes it count)
CASES = [
    (None, "agent.encoder.kind", "resnet10", [("agent.image_keys", "top")]),
    ("qc", "agent.alpha", "3.0", [("agent.actor_type", "distill-ddpg")]),
    ("qc-fql", "agent.actor_num_samples", "4", [("agent.actor_type", "best-of-n")]),
    (None, "agent.encoder.trained_by", "critic", [("agent.image_keys", "top")]),
    (None, "agent.language.length", "90", [("agent.language.tokenizer", "bytes")]),
    ("rlpd", "agent.gripper.epsilon", "0.1", [("agent.gripper.choices", "-1,1")]),
    ("rlpd-qc", "replay.exclude_before_takeover", "0.5", [("agent.bc_on", "+successes")]),
    (None, "robot.scripted_human.noise", "0.1", [("actor.intervention", "scripted")]),
    ("hg-dagger-gaussian", "agent.flow.hidden", "16", [("agent.policy", "flow")]),
    ("hg-dagger", "agent.hidden", "16", [("agent.policy", "gaussian")]),
    (None, "operator.keys", "success=s 2", [("actor.intervention", "spacemouse")]),
    (None, "operator.gestures", "success=pedal_left", [("actor.intervention", "keyboard")]),
    (None, "operator.pedal", "foot", [("actor.intervention", "gello")]),
    (None, "replay.image_capacity", "9000", [("agent.image_keys", "top")]),
    (None, "replay.max_image_age", "2", [("agent.image_keys", "top")]),
    (None, "replay.frame_cache_bytes", "1000", [("agent.image_keys", "top")]),
    ("hil-serl", "learner.max_lag_steps", "30", [("learner.utd_ratio", "2.0")]),
]  # fmt: skip


GYM = ExperimentConfig("x", GymConfig(make=print), actor=ActorConfig(intervention="gello"))


@pytest.mark.parametrize(
    ("ticks", "seconds"),
    [("robot.max_episode_steps", "robot.max_episode_s")],
)
def test_a_limit_in_ticks_has_no_effect_beside_one_in_seconds(ticks, seconds):
    check_unused(configured(GYM, [(ticks, "50")]), [ticks])
    check_unused(configured(GYM, [(seconds, "5")]), [seconds])
    with pytest.raises(ConfigError, match=naming(ticks, 50, seconds)):
        check_unused(configured(GYM, [(ticks, "50"), (seconds, "5")]), [ticks, seconds])


def asked(preset: str | None, *overrides: tuple[str, str]) -> None:
    check_unused(configured(BASE, overrides, preset=preset), [path for path, _ in overrides])


@pytest.mark.parametrize(("preset", "path", "value", "switched"), CASES, ids=[c[1] for c in CASES])
def test_a_field_that_nothing_reads_is_refused_until_something_does(preset, path, value, switched):
    missing = switched[0][0]
    with pytest.raises(ConfigError, match=naming(path, value, missing)):
        asked(preset, (path, value))
    asked(preset, *switched, (path, value))


OF_A_CRITIC = {
    "agent.gripper.penalty": "-0.1", "learner.critic_pretrain_steps": "9", "learner.critic_warmup_steps": "9",
}  # fmt: skip


@pytest.mark.parametrize("path", OF_A_CRITIC)
def test_an_agent_without_a_critic_reads_nothing_of_one(path):
    value = OF_A_CRITIC[path]
    with pytest.raises(ConfigError, match=naming(path, value, "acfql", "acrlpd")):
        asked("hg-dagger", (path, value), ("agent.gripper.choices", "-1,1"))
    asked("hg-dagger", ("agent.gripper.joint", "false"), ("agent.gripper.choices", "-1,1"))


@pytest.mark.parametrize("path", ["learner.critic_pretrain_steps", "learner.critic_warmup_steps"])
@pytest.mark.parametrize("preset", ["bc", "hg-dagger-gaussian"])
def test_no_updates_of_a_critic_are_what_a_clone_has(preset, path):
    asked(preset, (path, "0"))


def test_a_state_that_is_no_input_has_no_latent():
    blind = [("agent.image_keys", "top"), ("agent.use_state", "false")]
    with pytest.raises(ConfigError, match=naming("agent.encoder.state_latent", 8, "agent.use_state", "True")):
        asked(None, *blind, ("agent.encoder.state_latent", "8"))
    asked(None, *blind, ("agent.encoder.state_latent", "0"))
    asked(None, blind[0], ("agent.encoder.state_latent", "8"))


def test_features_stand_for_decoded_frames():
    cached = [("agent.image_keys", "top"), ("agent.encoder.kind", "resnet10"), ("agent.encoder.shift", "0"),
              ("agent.encoder.frozen_backbone", "true"), ("agent.encoder.cache_features", "true")]  # fmt: skip
    with pytest.raises(
        ConfigError, match=naming("replay.frame_cache_bytes", 1000, "agent.encoder.cache_features", "False")
    ):
        asked(None, *cached, ("replay.frame_cache_bytes", "1000"))
    for cameras in ((), cached):
        asked(None, *cameras, ("replay.frame_cache_bytes", "0"))


def test_channels_are_not_those_of_a_network_that_has_its_own():
    cameras = [("agent.image_keys", "top"), ("agent.encoder.features", "4,8")]
    asked(None, *cameras)
    with pytest.raises(
        ConfigError, match=naming("agent.encoder.features", "4,8", "agent.encoder.kind", "conv", "impala")
    ):
        asked(None, *cameras, ("agent.encoder.kind", "resnet10"))


def test_a_default_in_a_file_is_no_mistake():
    encoder = dataclasses.replace(BASE.agent.encoder, latent=5)
    agent = dataclasses.replace(BASE.agent, encoder=encoder)
    config = configured(dataclasses.replace(BASE, agent=agent), [("agent.lr", "0.1")])
    check_unused(config, ["agent.lr"])
    assert config.agent.encoder == encoder
