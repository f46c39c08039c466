"""Values of agents' settings that cannot work are refused by name."""

from __future__ import annotations

import pytest
from errors import naming

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig, FlowConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.types import ConfigError

LATE = FlowConfig(train_delay="sampled", train_delay_max=3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CriticConfig(activation="silu"), ("agent.critic.activation", "silu", "relu", "gelu", "tanh")),
        (lambda: CriticConfig(layer_norm="yes"), ("agent.critic.layer_norm", "yes", "before", "after", "none")),
        (lambda: CriticConfig(target_average="mean"), ("agent.critic.target_average", "mean", "new", "old")),
        (lambda: AgentConfig(weight_decay=-0.1), ("agent.weight_decay", -0.1, 0)),
        (lambda: AgentConfig(kernel_init="xavier"), ("agent.kernel_init", "xavier", "lecun_normal", "xavier_uniform")),
        (lambda: AgentConfig(update_order="both"), ("agent.update_order", "both", "critic_first", "joint")),
        (lambda: AgentConfig(bc_mean="sum"), ("agent.bc_mean", "sum", "weights", "batch")),
        (lambda: AcrlpdConfig(log_prob="max"), ("agent.log_prob", "max", "mean", "sum")),
        (lambda: AcrlpdConfig(log_std_min=2.5), ("agent.log_std_min", 2.5, 2)),
        (
            lambda: AcrlpdConfig(policy_activation="silu"),
            ("agent.policy_activation", "silu", "relu", "gelu", "tanh"),
        ),
        (lambda: AcrlpdConfig(bc_clip=0.0), ("agent.bc_clip", 0.0, "(0, 0.1)")),
        (lambda: AcfqlConfig(actor_type="ddpg"), ("agent.actor_type", "ddpg", "best-of-n", "distill-ddpg")),
        (lambda: AcfqlConfig(alpha=-1.0), ("agent.alpha", -1.0, 0)),
        (lambda: FlowConfig(train_delay="some"), ("agent.flow.train_delay", "some", "none", "recorded", "sampled")),
        (lambda: FlowConfig(train_delay_max=0), ("agent.flow.train_delay_max", 0, 1)),
        (
            lambda: AcfqlConfig(flow=LATE, actor_type="distill-ddpg"),
            ("agent.flow.train_delay", "sampled", "agent.actor_type", "best-of-n"),
        ),
        (lambda: BcConfig(flow=LATE, policy="gaussian"), ("agent.flow.train_delay", "sampled", "agent.policy", "flow")),
        (lambda: FlowConfig(activation="silu"), ("agent.flow.activation", "silu", "relu", "gelu")),
        (lambda: FlowConfig(time="sine"), ("agent.flow.time", "sine", "cosine", "raw", "fourier")),
        (lambda: FlowConfig(fourier_dim=5), ("agent.flow.fourier_dim", 5, "even")),
        (lambda: BcConfig(policy="mlp"), ("agent.policy", "mlp", "flow", "gaussian")),
        (
            lambda: AcfqlConfig(update_order="joint", policy_updates=3),
            ("agent.policy_updates", 3, 1, "agent.update_order", "joint"),
        ),
        (
            lambda: BcConfig(update_order="joint", policy_updates=2),
            ("agent.policy_updates", 2, 1, "agent.update_order", "joint"),
        ),
    ],
)
def test_a_value_that_cannot_work_is_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make()


@pytest.mark.parametrize("cls", [AcfqlConfig, BcConfig])
def test_together_with_one_policy_update_is_fine(cls):
    assert cls(update_order="joint", policy_updates=1).update_order == "joint"
    assert AcrlpdConfig(update_order="joint").update_order == "joint"
