"""Settings of agents that cannot work, refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from errors import naming
from pi0_agents import SIZE, SMALL

from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.gripper import GripperConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import ConfigError

CONFIG = ExperimentConfig("x", FakeAlohaConfig(), chunk=ChunkConfig(5))
ROBOT = robot_spec(CONFIG.robot)  # with two grippers
CACHED = {"kind": "resnet10", "frozen_backbone": True, "cache_features": True}
LEARNED_1, FIXED_2 = "single-arm-learned-gripper", "dual-arm-fixed-gripper"


@dataclasses.dataclass(frozen=True)
class Unheard(AgentConfig):
    """No agent implements this."""


def pi0(config=BcConfig, **changes):
    base = {"policy": "pi0", "pi0": SMALL, "image_keys": ("top",), "encoder": EncoderConfig(frame_size=SIZE)}
    return lambda: config(**{**base, **changes})


def on_robot(agent, grippers=ROBOT.grippers):
    robot = dataclasses.replace(ROBOT, grippers=grippers)
    return lambda: make_agent(dataclasses.replace(CONFIG, agent=agent), robot)


def gripper(grippers, **changes):
    return on_robot(AcfqlConfig(gripper=GripperConfig(**changes)), grippers)


def openpi(preset):
    return lambda: configured(ExperimentConfig("x", FakeAlohaConfig()), preset=preset, compat="openpi")


def improved(rule, trainable="none", **changes):
    return pi0(AcfqlConfig, pi0=dataclasses.replace(SMALL, trainable=trainable), improve_by=rule, **changes)


PI05 = dataclasses.replace(SMALL, pi05=True)
ROWS = [  # what is made, what the message names or `ConfigError.parameter` is
    (lambda: Pi0Config(lr_warmup=5, lr_cosine=5), ("agent.pi0.lr_cosine", 5, "agent.pi0.lr_warmup=5")),
    (lambda: AcrlpdConfig(log_std_min=2.5), ("agent.log_std_min", 2.5, 2)),
    (lambda: FlowConfig(spread=2.5), ("agent.flow.spread", 2.5, "(0, 2]")),
    (lambda: EncoderConfig(kind="vit"), ("agent.encoder.kind", "vit", "conv", "impala", "resnet10")),
    (
        lambda: EncoderConfig(frozen_backbone=True),
        ("agent.encoder.frozen_backbone", "agent.encoder.kind", "resnet10", "conv"),
    ),
    (
        lambda: EncoderConfig(kind="impala", weights="w.npz"),
        ("agent.encoder.weights", "agent.encoder.kind", "resnet10", "impala"),
    ),
    (
        lambda: EncoderConfig(cache_features=True, shift=0),
        ("agent.encoder.cache_features", "True", "agent.encoder.frozen_backbone"),
    ),
    (lambda: EncoderConfig(**CACHED, shift=3), ("agent.encoder.cache_features", "True", "agent.encoder.shift", 3, 0)),
    (
        lambda: AcrlpdConfig(encoder=EncoderConfig(**CACHED, shift=0)),
        ("agent.encoder.cache_features", "True", "agent.image_keys"),
    ),
    (
        lambda: BcConfig(encoder=EncoderConfig(trained_by="critic")),
        ("agent.encoder.trained_by", "critic", "each", "bc"),
    ),
    (on_robot(Unheard()), ("Unheard", "AcfqlConfig", "AcrlpdConfig", "BcConfig")),
    (on_robot(AcfqlConfig(image_keys=("roof",))), ("fake_aloha", "roof", ROBOT.cameras[0].name)),
    (gripper((), choices=(-1, 1)), ("agent.gripper", "robot.grippers", "agent.gripper.choices")),
    (gripper((6, 13), setup_mode=LEARNED_1), ("agent.gripper.setup_mode", LEARNED_1, 1, 2, "6, 13")),
    (gripper((6,), setup_mode=FIXED_2), ("agent.gripper.setup_mode", FIXED_2, 2, 1, 6)),
    (gripper((), mode="fixed"), ("agent.gripper.mode", "fixed", "robot.grippers")),
    (gripper(tuple(range(14)), mode="fixed"), ("agent.gripper:", "arm")),
    (openpi(None), ("agent.policy=pi0",)),
    (openpi("bc"), ("agent.policy=pi0",)),
    (pi0(encoder=EncoderConfig()), "agent.encoder.frame_size"),
    (pi0(image_keys=tuple("abcd")), "agent.image_keys"),
    (
        pi0(image_keys=("top", "cam_right_wrist")),
        ("agent.pi0.cameras", "cam_right_wrist", "left_wrist_0_rgb", "base_0_rgb,right_wrist_0_rgb"),
    ),
    (pi0(language=LanguageConfig("bytes"), pi0=dataclasses.replace(SMALL, vocabulary=9)), "agent.pi0.vocabulary"),
    (pi0(pi0=dataclasses.replace(SMALL, trainable="none")), "agent.pi0.trainable"),
    (pi0(use_state=False), "agent.use_state"),
    (improved("q_gradient"), ("agent.improve_by", "q_gradient", "agent.pi0.trainable=none", "expert")),
    (improved("distil"), ("agent.improve_by", "distil", "agent.pi0.trainable=none", "expert")),
    (improved("distil", "expert", candidates=1), ("agent.improve_by", "distil", "agent.candidates=1")),
    (improved("dsrl", "expert"), ("agent.improve_by", "dsrl", "agent.pi0.trainable=expert", "none")),
    (improved("rlt", edit_scale=0.1, bc_on="all"), ("agent.bc_on", "all", "agent.improve_by=rlt")),
    (improved("edit"), ("agent.edit_scale", "agent.improve_by=edit", "above 0")),
    (improved("dsrl", edit_scale=0.1), ("agent.edit_scale", 0.1, "agent.improve_by=dsrl")),
    (improved("edit", edit_scale=0.1, candidates=1), ("agent.edit_scale", 0.1, "agent.candidates=1")),
    (improved("none", "full", critic_sees="features"), ("agent.critic_sees", "agent.pi0.trainable=full", "expert")),
    (
        improved("none", image_keys=(), language=LanguageConfig("bytes"), target="policy"),
        ("agent.target", "agent.image_keys", "data"),
    ),
    (pi0(encoder=EncoderConfig(frame_size=SIZE, latent=99)), "agent.encoder.latent"),
    (pi0(encoder=EncoderConfig("resnet10", frame_size=SIZE, frozen_backbone=True)), "agent.encoder.kind"),
    (pi0(pi0=PI05), "agent.language.tokenizer"),
    (pi0(pi0=PI05, language=LanguageConfig("bytes"), bc_joint_noise=0.1), "agent.bc_joint_noise"),
]


@pytest.mark.parametrize(("make", "named"), ROWS)
def test_settings_that_cannot_work_are_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named) if isinstance(named, tuple) else None) as refused:
        make()
    assert isinstance(named, tuple) or refused.value.parameter == named
