"""Values of agents' settings that cannot work are refused by name."""

from __future__ import annotations

import pytest

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig, FlowConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.types import ConfigError


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CriticConfig(activation="tanh"), r"agent.critic.activation must be one of relu, gelu, got 'tanh'"),
        (lambda: CriticConfig(layer_norm="yes"), r"agent.critic.layer_norm must be one of before, after, none"),
        (lambda: CriticConfig(target_average="mean"), r"agent.critic.target_average must be one of new, old"),
        (lambda: AgentConfig(weight_decay=-0.1), r"agent.weight_decay must be >= 0 \(0 is Adam\) and finite, got -0.1"),
        (lambda: AgentConfig(kernel_init="xavier"), r"agent.kernel_init must be one of lecun_normal, xavier_uniform"),
        (lambda: AgentConfig(choose_by="max"), r"agent.choose_by must be one of mean, min, got 'max'"),
        (lambda: AgentConfig(update_order="both"), r"agent.update_order must be one of critic_first, together"),
        (lambda: AgentConfig(bc_mean="sum"), r"agent.bc_mean must be one of weights, batch, got 'sum'"),
        (lambda: AcrlpdConfig(log_prob="max"), r"agent.log_prob must be one of mean, sum, got 'max'"),
        (lambda: AcrlpdConfig(log_std_min=2.5), r"agent.log_std_min must be below 2, got 2.5"),
        (lambda: AcrlpdConfig(bc_clip=0.0), r"agent.bc_clip must be in \(0, 0.1\), got 0.0"),
        (lambda: AcfqlConfig(actor_type="ddpg"), r"agent.actor_type must be one of best-of-n, distill-ddpg"),
        (lambda: AcfqlConfig(alpha=-1.0), r"agent.alpha must be >= 0, got -1.0"),
        (lambda: FlowConfig(activation="silu"), r"agent.flow.activation must be one of relu, gelu, got 'silu'"),
        (lambda: FlowConfig(time="sine"), r"agent.flow.time must be one of cosine, raw, fourier, got 'sine'"),
        (lambda: FlowConfig(fourier_dim=5), r"agent.flow.fourier_dim must be an even number of at least 4, got 5"),
        (lambda: BcConfig(policy="mlp"), r"agent.policy must be one of flow, gaussian, got 'mlp'"),
        (
            lambda: AcfqlConfig(update_order="together", policy_updates=3),
            r"agent.policy_updates must be 1 with agent.update_order=together, got 3: there the policy takes one step",
        ),
        (
            lambda: BcConfig(update_order="together", policy_updates=2),
            r"agent.policy_updates must be 1 with agent.update_order=together, got 2",
        ),
    ],
)
def test_a_value_that_cannot_work_is_named(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize("cls", [AcfqlConfig, BcConfig])
def test_together_with_one_policy_update_is_fine(cls):
    assert cls(update_order="together", policy_updates=1).update_order == "together"
    assert AcrlpdConfig(update_order="together").update_order == "together"
