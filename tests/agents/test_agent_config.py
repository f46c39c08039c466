"""Values of agents' settings that cannot work are refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import SacCriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.types import ConfigError


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SacCriticConfig(activation="gelu"), ("agent.critic.activation", "gelu", "relu", "tanh")),
        (lambda: PublishedQcConfig(weight_decay=-0.1), ("agent.weight_decay", -0.1, 0)),
        (lambda: AcfqlConfig(critic_lr=0.0), ("agent.critic_lr", 0.0)),
        (lambda: Pi0Config(lr_warmup=-1), ("agent.pi0.lr_warmup", -1, 0)),
        (lambda: Pi0Config(lr_warmup=5, lr_cosine=5), ("agent.pi0.lr_cosine", 5, "agent.pi0.lr_warmup=5")),
        (lambda: AcrlpdConfig(kernel_init="xavier"), ("agent.kernel_init", "xavier", "lecun_normal", "xavier_uniform")),
        (lambda: AcrlpdConfig(log_prob="max"), ("agent.log_prob", "max", "mean", "sum")),
        (lambda: AcrlpdConfig(log_std_min=2.5), ("agent.log_std_min", 2.5, 2)),
        (
            lambda: AcrlpdConfig(policy_activation="silu"),
            ("agent.policy_activation", "silu", "relu", "tanh"),
        ),
        (lambda: FlowConfig(train_delay="some"), ("agent.flow.train_delay", "some", "none", "recorded", "sampled")),
        (lambda: FlowConfig(spread=0.0), ("agent.flow.spread", 0.0, "(0, 2]")),
        (lambda: FlowConfig(spread=-1.0), ("agent.flow.spread", -1.0, "(0, 2]")),
        (lambda: FlowConfig(spread=2.5), ("agent.flow.spread", 2.5, "(0, 2]")),
        (lambda: FlowConfig(spread=math.nan), ("agent.flow.spread", "nan", "(0, 2]", "finite")),
        (lambda: BcConfig(policy="mlp"), ("agent.policy", "mlp", "flow", "gaussian")),
    ],
)
def test_a_value_that_cannot_work_is_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make()


@pytest.mark.parametrize("cls", [AcfqlConfig, BcConfig])
def test_a_setting_that_an_agent_does_not_have_is_a_value_that_others_read(cls):
    assert "kernel_init" not in {field.name for field in dataclasses.fields(cls)}
    assert cls().kernel_init == "lecun_normal"
    with pytest.raises(TypeError, match="kernel_init"):
        cls(kernel_init="xavier_uniform")
    assert AcrlpdConfig(kernel_init="xavier_uniform").kernel_init == "xavier_uniform"
