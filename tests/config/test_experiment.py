"""Every combination that cannot work is refused where the configuration is built, with the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, NormaliserConfig, RewardConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import AlohaSimConfig, FakeAlohaConfig, GymConfig, OgbenchConfig, RobotConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.types import ConfigError

ZERO = ("journal_bytes", "journal_days", "sync_interval", "jpeg_quality")  # of TransportConfig: 0 has a meaning
LATE = FlowConfig(train_delay="sampled")
SPREAD: dict[str, Any] = {"prefix_lengths": 5, "replan_spread": 0.1}
REFUSED: list[tuple[type, dict[str, Any], tuple[object, ...]]] = [
    (CriticConfig, {"ensemble": 0}, ("agent.critic.ensemble", 0, 1)),
    (SacCriticConfig, {"target_subset": 11}, ("agent.critic.target_subset", 11, "1..10")),
    (SacCriticConfig, {"target_subset": 0}, ("agent.critic.target_subset", 0, 1)),
    (CriticConfig, {"tau": 0}, ("agent.critic.tau", 0, "(0, 1]")),
    (LanguageConfig, {"tokenizer": "words"}, ("agent.language.tokenizer", "words", "none", "bytes")),
    (LanguageConfig, {"length": 1}, ("agent.language.length", 1, "at least 2")),
    (SacCriticConfig, {"target_aggregate": "max"}, ("agent.critic.target_aggregate", "max", "mean", "min")),
    (
        BcConfig,
        {"bc_on": "demos"},
        ("agent.bc_on", "demos", "all", "demo", "demo+interventions", "+successes", "interventions"),
    ),
    (
        NormaliserConfig,
        {"actions": "delta"},
        ("normaliser.actions", "delta", "absolute_range", "absolute_demo", "relative"),
    ),
    (ReplayConfig, {"terminal_windows": True}, ("replay.terminal_windows", "True", "keep", "drop")),
    (ActorConfig, {"clock": "real"}, ("actor.clock", "real", "lockstep", "realtime")),
    (ActorConfig, {"gate": "always"}, ("actor.gate", "always", "none", "canary")),
    (ActorConfig, {"gate": "canary", "policy": "openpi://pc:1"}, ("actor.gate", "canary", "actor.policy")),
    (ActorConfig, {"inference": "fast"}, ("actor.inference", "fast", "auto", "sync", "async")),
    (RewardConfig, {"scale": float("nan")}, ("reward.scale", "nan")),
    (RewardConfig, {"offset": float("-inf")}, ("reward.offset", "-inf")),
    (EncoderConfig, {"latent": 0}, ("agent.encoder.latent", 0, 1)),
    (ReplayConfig, {"exclude_before_takeover": -1}, ("replay.exclude_before_takeover", -1, 0)),
    (ReplayConfig, {"exclude_before_takeover": 40}, ("replay.exclude_before_takeover", 40, 30, "ticks", "control_hz")),
    (ActorConfig, {"max_human_ticks": -1}, ("actor.max_human_ticks", -1, 0)),
    (GymConfig, {"make": print, "max_episode_s": 0.0}, ("robot.max_episode_s", 0.0)),
    (GymConfig, {"make": print, "max_episode_s": float("nan")}, ("robot.max_episode_s", "nan")),
    (ActorConfig, {"max_episodes": -1}, ("actor.max_episodes", -1, 0)),
    (CriticConfig, {"hidden": ()}, ("agent.critic.hidden", "()")),
    (EncoderConfig, {"features": (0,)}, ("agent.encoder.features", "(0,)")),
    (EncoderConfig, {"shift": -1}, ("agent.encoder.shift", -1, 0)),
    (FlowConfig, {"hidden": ()}, ("agent.flow.hidden", "()")),
    (FlowConfig, {"steps": 0}, ("agent.flow.steps", 0, 1)),
    (AcfqlConfig, {"lr": 0}, ("agent.lr", 0)),
    (AcfqlConfig, {"lr": float("nan")}, ("agent.lr", "nan")),
    (Pi0Config, {"grad_clip": -1}, ("agent.pi0.grad_clip", -1, 0)),
    (Pi0Config, {"lr_warmup": 9, "lr_cosine": 9}, ("agent.pi0.lr_cosine", 9, "agent.pi0.lr_warmup", 0)),
    (AcfqlConfig, {"critic_lr": 0}, ("agent.critic_lr", 0)),
    (FlowConfig, {"spread": 0}, ("agent.flow.spread", 0, 2)),
    (FlowConfig, {"spread": 2.5}, ("agent.flow.spread", 2.5, 2)),
    (AcfqlConfig, {"candidates": 0}, ("agent.candidates", 0, 1)),
    (AcfqlConfig, {"use_state": False}, ("agent.use_state", "False", "agent.image_keys")),
    (AcfqlConfig, {"policy_ema": 1.0}, ("agent.policy_ema", 1.0, "[0, 1)")),
    (BcConfig, {"policy_updates": 0}, ("agent.policy_updates", 0, 1)),
    (AcfqlConfig, {"expectile": 0.4}, ("agent.expectile", 0.4, "[0.5, 1)")),
    (AcfqlConfig, {"expectile": 1.0}, ("agent.expectile", 1.0, "[0.5, 1)")),
    (DecoupledConfig, {"prefix_expectile": 1.0}, ("agent.prefix_expectile", 1.0, "[0.5, 1)")),
    (DecoupledConfig, {"prefix_lengths": 0}, ("agent.prefix_lengths", 0, 1)),
    (DecoupledConfig, {"replan_spread": 0.1}, ("agent.replan_spread", 0.1, "agent.prefix_lengths", 1)),
    (DecoupledConfig, {**SPREAD, "replan_spread": -1.0}, ("agent.replan_spread", -1.0, 0)),
    (
        DecoupledConfig,
        {**SPREAD, "critic": CriticConfig(ensemble=1)},
        ("agent.replan_spread", "agent.critic.ensemble", 1),
    ),
    (AcfqlConfig, {"policy_updates": 0}, ("agent.policy_updates", 0, 1)),
    (AcrlpdConfig, {"hidden": (-1,)}, ("agent.hidden", "(-1,)")),
    (AcrlpdConfig, {"bc_alpha": -1}, ("agent.bc_alpha", -1, 0)),
    (AcrlpdConfig, {"init_temperature": 0}, ("agent.init_temperature", 0)),
    (RobotConfig, {"max_episode_steps": 0}, ("robot.max_episode_steps", 0, 1)),
    (FakeAlohaConfig, {"max_episode_steps": 0}, ("robot.max_episode_steps", 0, 1)),
    (FakeAlohaConfig, {"grasp_tolerance": 0}, ("robot.grasp_tolerance",)),
    (FakeAlohaConfig, {"image_size": 4}, ("robot.image_size", 4, 8)),
    (FakeAlohaConfig, {"control_hz": 0}, ("robot.control_hz", 0)),
    (AlohaSimConfig, {"image_size": 4}, ("robot.image_size", 4, 8)),
    (GymConfig, {}, ("robot.make", "make(fake_env, evaluating)")),
    (GymConfig, {"make": print, "control_hz": 0}, ("robot.control_hz", 0)),
    (ChunkConfig, {"horizon": 0}, ("chunk.horizon", 0, 1)),
    (ChunkConfig, {"critic_horizon": 0}, ("chunk.critic_horizon", 0, 1)),
    (ChunkConfig, {"execute_steps": 0}, ("chunk.execute_steps", 0, "1..5")),
    (NormaliserConfig, {"demo_range": 0}, ("normaliser.demo_range", 0, "(0, 1]")),
    *(
        (ReplayConfig, {name: 0}, (f"replay.{name}", 0, 1))
        for name in ("capacity", "demo_capacity", "human_capacity", "image_capacity")
    ),
    (ReplayConfig, {"demo_fraction": 1.5}, ("replay.demo_fraction", 1.5, "[0, 1]", "uniform")),
    (ReplayConfig, {"demo_fraction": "half"}, ("replay.demo_fraction", "half", "[0, 1]", "uniform")),
    (ReplayConfig, {"max_image_age": -1}, ("replay.max_image_age", -1, 0)),
    (ReplayConfig, {"prefetch": -1}, ("replay.prefetch", -1, 0)),
    *(
        (LearnerConfig, {name: 0}, (f"learner.{name}", 0, 1))
        for name in (
            "batch_size",
            "accumulate",
            "cta_ratio",
            "max_steps",
            "steps_per_update",
            "keep_checkpoints",
            "log_period",
        )
    ),
    *(
        (LearnerConfig, {name: -1}, (f"learner.{name}", -1, 0))
        for name in (
            "training_starts",
            "pretrain_steps",
            "critic_pretrain_steps",
            "warmup_episodes",
            "critic_warmup_steps",
            "random_steps",
            "checkpoint_period",
        )
    ),
    (LearnerConfig, {"batch_size": 3}, ("learner.batch_size", 3)),
    (LearnerConfig, {"policy_batch_size": 3}, ("learner.policy_batch_size", 3)),
    (LearnerConfig, {"policy_batch_size": 2, "accumulate": 4}, ("learner.accumulate", 4, "policy_batch_size", 2)),
    (LearnerConfig, {"batch_size": 8, "accumulate": 3}, ("learner.accumulate", 3, "learner.batch_size", 8)),
    (LearnerConfig, {"utd_ratio": 0}, ("learner.utd_ratio", 0)),
    (
        LearnerConfig,
        {"utd_ratio": 0.1, "max_lag_steps": 9},
        ("learner.max_lag_steps", 9, "utd_ratio", 10),
    ),
    (ActorConfig, {"delay_ticks": -1}, ("actor.delay_ticks", -1, 0)),
    (ActorConfig, {"clock": "realtime", "delay_ticks": 1}, ("actor.delay_ticks", "clock", "lockstep")),
    *(
        (TransportConfig, {field.name: -1 if field.name in ZERO else 0}, (f"transport.{field.name}",))
        for field in dataclasses.fields(TransportConfig)
        if field.name not in ("journal", "durability")
    ),
    (TransportConfig, {"durability": "disk"}, ("transport.durability", "disk", "process", "power")),
    (TransportConfig, {"jpeg_quality": 101}, ("transport.jpeg_quality", 101, "[0, 100]")),
    (TransportConfig, {"timeout_s": 2.0}, ("transport.timeout_s", "heartbeats")),
    (TransportConfig, {"piece_bytes": 65 << 20}, ("transport.piece_bytes", 65 << 20, "max_message_bytes", 64 << 20)),
    (TransportConfig, {"spool_bytes": 1 << 20}, ("transport.credit_bytes", 33554432, "spool_bytes", 1048576)),
]


@pytest.mark.parametrize(("cls", "values", "named"), REFUSED, ids=lambda v: getattr(v, "__name__", None))
def test_a_part_that_cannot_work_is_refused(cls, values, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        cls(**values)


PREFIX = DecoupledConfig()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"discount": 1.0}, ("discount", 1.0, "(0, 1)")),
        (
            {"reward": RewardConfig(offset=-0.1)},
            ("reward.offset", -0.1, "reward.failure_reward", -10),
        ),
        ({"reward": RewardConfig(scale=0.0)}, ("reward.scale", 0, "acfql", "range")),
        ({"robot": OgbenchConfig(reward="dense")}, ("robot.reward", "dense", "acfql", "sparse", "--preset qc")),
        (
            {"chunk": ChunkConfig(critic_horizon=6)},
            ("chunk.critic_horizon", 6, "1..5", "preset=decoupled"),
        ),
        (
            {"chunk": ChunkConfig(execute_steps=3)},
            ("chunk.execute_steps", 3, "chunk.critic_horizon", 5, "preset=decoupled"),
        ),
        (
            {"actor": ActorConfig(adaptive_execution=True)},
            ("actor.adaptive_execution", "True", "agent.replan_spread", "preset=decoupled"),
        ),
        ({"agent": PREFIX}, ("chunk.critic_horizon", 5, "chunk.execute_steps")),
        (
            {"agent": dataclasses.replace(PREFIX, prefix_lengths=2), "chunk": ChunkConfig(critic_horizon=9)},
            ("agent.prefix_lengths", 2, "chunk.execute_steps", 5),
        ),
        (
            {
                "agent": BcConfig(),
                "replay": ReplayConfig(windows="qc", terminal_windows="drop", demo_fraction=1),
            },
            ("agent.bc_on", "demo+interventions", "replay.windows", "qc", "episode"),
        ),
        (
            {
                "agent": AcrlpdConfig(image_keys=("top",), encoder=EncoderConfig(trained_by="critic")),
                "learner": LearnerConfig(offline_steps=100, critic_warmup_steps=50),
            },
            ("learner.critic_warmup_steps", 50, 0, "learner.offline_steps", 100, "agent.encoder.trained_by"),
        ),
        ({"actor": ActorConfig(delay_ticks=5)}, ("actor.delay_ticks", "chunk.execute_steps", 5)),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(values, named):
    defaults = {"name": "x", "robot": FakeAlohaConfig(), "discount": 0.99}
    with pytest.raises(ConfigError, match=naming(*named)):
        ExperimentConfig(**{**defaults, **values})


@pytest.mark.parametrize("agent", [AcfqlConfig(flow=LATE), BcConfig(flow=LATE)], ids=["acfql", "bc"])
def test_a_delay_that_is_trained_for_fits_the_chunk_and_the_actors(agent):
    def build(horizon, delay):
        chunk, actor = ChunkConfig(horizon), ActorConfig(delay_ticks=delay)
        return ExperimentConfig(name="x", robot=FakeAlohaConfig(), agent=agent, chunk=chunk, actor=actor, discount=0.99)

    assert build(5, 2).actor.delay_ticks == 2
    with pytest.raises(ConfigError, match=naming("agent.flow.train_delay", "chunk.horizon", 2)):
        build(2, 0)
    with pytest.raises(ConfigError, match=naming("actor.delay_ticks", 3, 2, "agent.flow.train_delay")):
        build(5, 3)


@pytest.mark.parametrize(
    ("reward", "low", "high"),
    [
        (RewardConfig(offset=-1.0, failure_reward=-100.0), -100.0, 0.0),
        (RewardConfig(offset=-0.1, failure_reward=-30.0), -30.0, 0.9),
        (RewardConfig(scale=2.0, failure_reward=-1.0), -1.0, 2.0),
        (RewardConfig(offset=0.5), 0.0, 50.0),
    ],
)
def test_the_range_of_a_critic_holds_every_return(reward, low, high):
    config = ExperimentConfig(name="x", robot=FakeAlohaConfig(), reward=reward, discount=0.99)
    assert config.value_range == pytest.approx((low, high))
    squared = dataclasses.replace(config, agent=AcrlpdConfig())
    assert squared.value_range is None
    # Nothing the settings can pay leaves the range.
    g = 0.99
    for k in (0, 1, 7, 500):
        waited = reward.offset * (1 - g**k) / (1 - g)
        for end in (reward.scale + reward.offset, reward.failure_reward):
            assert low - 1e-6 <= waited + g**k * end <= high + 1e-6, (k, end)


def test_a_step_cost_is_allowed_where_failing_early_does_not_pay():
    reward = RewardConfig(offset=-0.1, failure_reward=-10.0)
    config = ExperimentConfig(name="x", robot=FakeAlohaConfig(), reward=reward, discount=0.99)
    assert config.reward.failure_reward <= config.reward.offset / (1 - config.discount)


def test_lengths_default_to_the_horizon():
    assert (ChunkConfig(7).critic_steps, ChunkConfig(7).executed) == (7, 7)
    short = ChunkConfig(7, critic_horizon=3, execute_steps=4)
    assert (short.critic_steps, short.executed) == (3, 4)


def test_a_prefix_critic_permits_a_critic_of_more_actions_than_are_executed():
    for chunk, carried in ((ChunkConfig(5, 12), 12), (ChunkConfig(5, 4, execute_steps=2), 5)):
        config = ExperimentConfig(name="x", robot=FakeAlohaConfig(), agent=PREFIX, chunk=chunk)
        assert config.chunk.carried == carried
        assert config.chunk.returned == config.chunk.critic_steps


def test_limits_in_seconds_are_ticks_of_the_robots_rate():
    assert GymConfig(make=print, max_episode_steps=7).time_limit == 7
    assert GymConfig(make=print, max_episode_s=12.0, control_hz=10.0).time_limit == 120
    assert GymConfig(make=print, max_episode_s=12.0, control_hz=15.0).time_limit == 180
    unlimited = ActorConfig(max_human_ticks=20, max_episodes=3).without_human_limit()
    assert (
        unlimited == ActorConfig(max_episodes=3) == ActorConfig(max_human_ticks=9, max_episodes=3).without_human_limit()
    )


def test_only_a_gym_robot_that_says_so_is_real():
    assert not FakeAlohaConfig().real
    assert not GymConfig(make=print).real
    assert GymConfig(make=print, is_real=True).real


@pytest.mark.parametrize("cls", [AcfqlConfig, FakeAlohaConfig, ExperimentConfig], ids=lambda c: c.__name__)
def test_configurations_are_frozen(cls):
    config = cls(name="x", robot=FakeAlohaConfig()) if cls is ExperimentConfig else cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)


def test_a_real_robot_waits_for_no_policy_server_in_lockstep():
    server, simulated = (
        ActorConfig(policy="openpi://127.0.0.1:8000"),
        ExperimentConfig(name="x", robot=FakeAlohaConfig()),
    )
    robot = GymConfig(make=print, is_real=True)
    dataclasses.replace(simulated, actor=server)
    dataclasses.replace(simulated, robot=robot)
    dataclasses.replace(simulated, robot=robot, actor=dataclasses.replace(server, clock="realtime"))
    with pytest.raises(ConfigError, match=naming("actor.clock", "actor.policy", "actor.clock=realtime")):
        dataclasses.replace(simulated, robot=robot, actor=server)
