"""Values and parts that cannot work are refused where they are built, by name and with the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.process import load
from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS, ExpertConfig, Pi0Config, SiglipConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
    RewardConfig,
)
from serl_chunk.config.groups import GroupConfig
from serl_chunk.config.operator import DeviceConfig
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.config.robots import FakeAlohaConfig, GymConfig, OgbenchConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.types import ConfigError

TWO = (-1.0, 1.0)
SPREAD: dict[str, Any] = {"prefix_lengths": 5, "replan_spread": 0.1}
CHOICES = ("agent.gripper.choices", "setup_mode")


def tiny(**changes: Any) -> Pi0Config:
    return dataclasses.replace(PI0_PRESETS["tiny"], **changes)


# group, values, what the message names; ranges of numbers: test_fields.py
REFUSED: list[tuple[Any, dict[str, Any], tuple[object, ...]]] = [
    (SacCriticConfig, {"target_subset": 11}, ("agent.critic.target_subset", 11, "1..10")),
    (DecoupledConfig, {"replan_spread": 0.1}, ("agent.replan_spread", 0.1, "agent.prefix_lengths", 1)),
    (DecoupledConfig, {**SPREAD, "critic": CriticConfig(ensemble=1)},
     ("agent.replan_spread", "agent.critic.ensemble", 1)),
    (AcfqlConfig, {"use_state": False}, ("agent.use_state", "False", "agent.image_keys")),
    (AcfqlConfig, {"encoder": EncoderConfig(kind="resnet10", weights="resnet10.npz")},
     ("agent.encoder.weights", "resnet10.npz", "agent.image_keys")),
    (ActorConfig, {"gate": "canary", "policy": "openpi://pc:1"}, ("actor.gate", "canary", "actor.policy")),
    (ActorConfig, {"clock": "realtime", "delay_ticks": 1}, ("actor.delay_ticks", "clock", "lockstep")),
    (ActorConfig, {"clock": "realtime", "block_steps": 5}, ("actor.block_steps", "clock", "lockstep")),
    (ReplayConfig, {"terminal_windows": True}, ("replay.terminal_windows", "True", "keep", "drop")),
    (ReplayConfig, {"exclude_before_takeover": 40}, ("replay.exclude_before_takeover", 40, 30, "ticks", "control_hz")),
    (GymConfig, {}, ("robot.make", "make(fake_env, evaluating)")),
    (DeviceConfig, {"axes": ("x", "w")}, ("device.axes", "x, y, z, roll, pitch, yaw", "w")),
    (DeviceConfig, {"axes": ("x", "x")}, ("device.axes", "different", "x, x")),
    (LearnerConfig, {"policy_batch_size": 3}, ("learner.policy_batch_size", 3)),
    (LearnerConfig, {"policy_batch_size": 2, "accumulate": 4}, ("learner.accumulate", 4, "policy_batch_size", 2)),
    (LearnerConfig, {"batch_size": 8, "accumulate": 3}, ("learner.accumulate", 3, "learner.batch_size", 8)),
    (LearnerConfig, {"utd_ratio": 0.1, "max_lag_steps": 9}, ("learner.max_lag_steps", 9, "utd_ratio", 10)),
    (SacGripperConfig, {"choices": (1.0,)}, ("agent.gripper.choices", "(1.0,)")),
    (SacGripperConfig, {"choices": (0.0, 1.5)}, ("agent.gripper.choices", "(0.0, 1.5)", "[-1, 1]")),
    (SacGripperConfig, {"mode": "fixed", "setup_mode": "dual-arm-learned-gripper"},
     ("agent.gripper.mode", "fixed", "agent.gripper.setup_mode", "dual-arm-learned-gripper")),
    (SacGripperConfig, {"mode": "fixed", "choices": TWO}, ("agent.gripper.choices", "agent.gripper.mode")),
    (SacGripperConfig, {"neutral": 0.0}, ("agent.gripper.neutral", 0.0, *CHOICES)),
    (SacGripperConfig, {"neutral": 0.0, "choices": TWO}, ("agent.gripper.neutral", 0.0, CHOICES[0], "(-1.0, 1.0)")),
    (SacGripperConfig, {"fixed_value": 0.5}, ("agent.gripper.fixed_value", 0.5, "agent.gripper.mode", "fixed")),
    (SiglipConfig, {"width": 64, "heads": 5}, ("agent.pi0.siglip.heads", 64, 5)),
    (Pi0Config, {"lr_warmup": 9, "lr_cosine": 9}, ("agent.pi0.lr_cosine", 9, "agent.pi0.lr_warmup", 0)),
    (GroupConfig, {"size": 1}, ("group.baseline", "loo", "group.size", 1, "mean", "value")),
    (GroupConfig, {"max_groups": 3}, ("group.max_groups", 80, 3)),
    (GroupAgentConfig, {"policy": "laplace", "rule": "flow_ipo"}, ("agent.rule", "agent.policy", "laplace")),
    (GroupAgentConfig, {"rule": "filtered_bc", "successes": "all", "bc_on": "demo"}, ("agent.bc_on", "+successes")),
    (GroupAgentConfig, {"flow_ipo_t_min": 0.9}, ("agent.flow_ipo_t_min", 0.9, "agent.flow_ipo_t_max", 0.8)),
    (GroupAgentConfig, {"gripper": GripperConfig(choices=TWO)}, ("agent.gripper", "learned")),
    (GroupAgentConfig, {"encoder": EncoderConfig(trained_by="critic")}, ("agent.encoder.trained_by", "group")),
    (tiny, {"head_dim": 15}, ("agent.pi0.head_dim", 15)),
    (tiny, {"kv_heads": 3}, ("agent.pi0.kv_heads", 4, 3)),
    (tiny, {"expert": ExpertConfig(width=33)}, ("agent.pi0.expert.width", 33)),
    (tiny, {"cameras": ("a", "a")}, ("agent.pi0.cameras", "a, a")),
    (tiny, {"image_size": (48, 8)}, ("agent.pi0.image_size", "48, 8", 12)),
    (tiny, {"feature_grid": 3}, ("agent.pi0.feature_grid", 3)),
    (tiny, {"trainable": "lora"}, ("agent.pi0.trainable", "agent.pi0.vlm.mlp_rank")),
    (tiny, {"trainable": "lora_expert"}, ("agent.pi0.trainable", "lora_expert")),
    (GroupConfig, {"init_states": "seeds:0"}, ("group.init_states", "seeds:0", "seeds:N")),
    (GroupConfig, {"groups": 129}, ("group.max_groups", 129, 128)),
    (PublishedQcConfig, {"fourier_feature_dim": 5}, ("agent.fourier_feature_dim", 5, "even")),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "values", "named"), REFUSED, ids=lambda v: getattr(v, "__name__", None))
def test_a_part_that_cannot_work_is_refused(cls, values, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        cls(**values)


def with_choices(**gripper: Any) -> AcfqlConfig:
    return AcfqlConfig(gripper=GripperConfig(choices=TWO, **gripper))


EXECUTED = ("chunk.execute_steps", 5)
PENALTY = ("agent.gripper.penalty", "replay.windows", "episode", "chunk.return_steps")
GROUPS: dict[str, Any] = {"agent": GroupAgentConfig()}
HEAD, IPO = ({"agent": GroupAgentConfig(**own)} for own in ({"policy": "gaussian"}, {"rule": "flow_ipo"}))
ONE_STEP = {"agent": GroupAgentConfig(flow=FlowConfig(steps=1))}
QC = ReplayConfig(windows="qc", terminal_windows="drop")
OPENPI = NormaliserConfig("openpi", norm_stats="norm_stats.json")
MISFITS: list[tuple[dict[str, Any], tuple[object, ...]]] = [  # values of an experiment, what the message names
    ({"reward": RewardConfig(offset=-0.1)}, ("reward.offset", -0.1, "reward.failure_reward", -10)),
    ({"reward": RewardConfig(scale=0.0)}, ("reward.scale", 0, "acfql", "range")),
    ({"robot": OgbenchConfig(reward="dense")}, ("robot.reward", "dense", "acfql", "sparse", "--preset qc")),
    ({"chunk": ChunkConfig(critic_horizon=6)}, ("chunk.critic_horizon", 6, "1..5", "preset=decoupled")),
    ({"chunk": ChunkConfig(execute_steps=3)},
     ("chunk.execute_steps", 3, "chunk.critic_horizon", 5, "preset=decoupled")),
    ({"actor": ActorConfig(adaptive_execution=True)},
     ("actor.adaptive_execution", "True", "agent.replan_spread", "preset=decoupled")),
    ({"agent": DecoupledConfig()}, ("chunk.critic_horizon", 5, "chunk.execute_steps")),
    ({"agent": DecoupledConfig(prefix_lengths=2), "chunk": ChunkConfig(critic_horizon=9)},
     ("agent.prefix_lengths", 2, *EXECUTED)),
    ({"agent": BcConfig(), "replay": dataclasses.replace(QC, demo_fraction=1)},
     ("agent.bc_on", "demo+interventions", "replay.windows", "qc", "episode")),
    ({"actor": ActorConfig(delay_ticks=5)}, ("actor.delay_ticks", *EXECUTED)),
    (GROUPS | {"group": GroupConfig(sigma=0.0)}, ("group.sigma", 0, "group.noise", "equal")),
    (GROUPS | {"group": GroupConfig(sigma=0.0, noise=1.0)}, ("group.sigma", "agent.rule", "ppo")),
    (GROUPS | {"group": GroupConfig(density="tick")}, ("group.density", "tick", "sde or end", "agent.policy", "flow")),
    (HEAD, ("group.density", "sde", "tick or chunk", "gaussian")),
    (IPO, ("group.sigma", 0.2, "flow_ipo", "group.noise")),
    (ONE_STEP, ("group.density", "sde", 1, "end")),
    (GROUPS | {"learner": LearnerConfig(accumulate=16), "group": GroupConfig(minibatch=40)},
     ("learner.accumulate", 16, "group.minibatch", 40)),
    (GROUPS | {"learner": LearnerConfig(online_steps=0, pretrain_steps=9)}, ("learner.online_steps", 0, "group")),
    (GROUPS | {"learner": LearnerConfig(random_steps=5)}, ("learner.random_steps", 5)),
    (GROUPS | {"actor": ActorConfig(clock="realtime")}, ("actor.clock", "lockstep", "realtime")),
    (GROUPS | {"actor": ActorConfig(delay_ticks=1)}, ("actor.delay_ticks", 0, 1)),
    (GROUPS | {"actor": ActorConfig(gate="canary")}, ("actor.gate", "canary")),
    (GROUPS | {"actor": ActorConfig(policy="openpi://a:1")}, ("actor.policy", "openpi://a:1")),
    (GROUPS | {"transport": TransportConfig(snapshot_dtype="bfloat16")}, ("transport.snapshot_dtype", "bfloat16")),
    ({"agent": with_choices(hold_steps=4)}, ("agent.gripper.hold_steps", 4, *EXECUTED)),
    ({"agent": with_choices(), "chunk": ChunkConfig(6, critic_horizon=3)},
     ("agent.gripper.choices", 6, "chunk.critic_horizon", 3, "chunk.execute_steps")),
    ({"agent": with_choices(penalty=-0.02), "chunk": ChunkConfig(5, return_steps=9)}, PENALTY),
    ({"agent": AcrlpdConfig(), "normaliser": OPENPI}, ("normaliser.actions", "openpi", "acrlpd", "agent.policy=flow")),
    ({"agent": with_choices(), "normaliser": OPENPI}, ("normaliser.actions", "openpi", "agent.gripper")),
    ({"agent": AcfqlConfig(gripper=GripperConfig(mode="fixed", fixed_value=0.5)), "normaliser": OPENPI},
     ("normaliser.actions", "openpi", "agent.gripper")),
    ({"robot": GymConfig(make=print, is_real=True), "actor": ActorConfig(policy="openpi://127.0.0.1:8000")},
     ("actor.clock", "actor.policy", "actor.clock=realtime")),
]  # fmt: skip
FIT: list[dict[str, Any]] = [
    IPO | {"group": GroupConfig(sigma=0.0, noise=1.0)},
    HEAD | {"group": GroupConfig(density="chunk", sigma=0.0)},
    ONE_STEP | {"group": GroupConfig(density="end")},
    {"agent": with_choices(hold_steps=5, penalty=-0.02)},
    {"agent": AcfqlConfig(gripper=GripperConfig(mode="fixed")), "normaliser": OPENPI},  # the actor keeps it
    {"agent": BcConfig(policy="flow"), "normaliser": OPENPI},
    {"reward": RewardConfig(offset=-0.1, failure_reward=-10.0)},  # failing early does not pay
    {"robot": GymConfig(make=print, is_real=True), "actor": ActorConfig(policy="openpi://a:1", clock="realtime")},
    {"robot": GymConfig(make=print, is_real=True)},
    {"actor": ActorConfig(policy="openpi://127.0.0.1:8000")},
]


def experiment(**values: Any) -> ExperimentConfig:
    return ExperimentConfig(**{"name": "x", "robot": FakeAlohaConfig(), "discount": 0.99, **values})


@pytest.mark.parametrize(("values", "named"), MISFITS)
def test_parts_that_do_not_fit_together_are_refused(values, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        experiment(**values)


@pytest.mark.parametrize("values", FIT)
def test_what_fits_beside_them_is_not_refused(values):
    experiment(**values)


def test_the_bins_of_pi05_need_quantiles():
    pi05 = [("agent.policy", "pi0"), ("agent.pi0.pi05", "True"), ("agent.language.tokenizer", "bytes")]
    openpi = [*pi05, ("normaliser.actions", "openpi"), ("normaliser.norm_stats", "x.json")]
    clone = dataclasses.replace(load("fake_aloha", []), agent=BcConfig())
    with pytest.raises(ConfigError, match=naming("normaliser.scaling", "quantiles", "z_score")):
        apply_overrides(clone, openpi)
    for more in (("normaliser.scaling", "quantiles"), ("agent.pi0.state_in_prompt", "False")):
        apply_overrides(clone, [*openpi, more])
