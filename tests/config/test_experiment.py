"""Every combination that cannot work is refused where the configuration is built, with the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, BcConfig, FlowConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.config.encoders import EncoderConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, NormaliserConfig, RewardConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import AlohaSimConfig, FakeAlohaConfig, GymConfig, OgbenchConfig, RobotConfig
from serl_chunk.config.transport import TransportConfig
from serl_chunk.types import ConfigError

ZERO = ("journal_bytes", "journal_days", "sync_interval", "jpeg_quality")  # of TransportConfig: 0 has a meaning
SPREAD: dict[str, Any] = {"prefix_critic": True, "prefix_lengths": 5, "replan_spread": 0.1}
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (CriticConfig, {"ensemble": 0, "target_subset": 0}, r"agent\.critic\.ensemble must be at least 1, got 0"),
    (CriticConfig, {"target_subset": 11}, r"agent\.critic\.target_subset must be 1\.\.10 \(ensemble\), got 11"),
    (CriticConfig, {"target_subset": 0}, r"target_subset must be 1\.\.10"),
    (CriticConfig, {"tau": 0}, r"agent\.critic\.tau must be in \(0, 1\], got 0"),
    (CriticConfig, {"loss": "bound"}, r"agent\.critic\.loss must be one of squared, bounded, hl_gauss, got 'bound'"),
    (
        CriticConfig,
        {"value_low": 1.0},
        r"agent\.critic\.value_low must be below agent\.critic\.value_high.*1\.0 and 1\.0",
    ),
    (CriticConfig, {"value_high": float("inf")}, r"value_low must be below agent\.critic\.value_high, and both finite"),
    (CriticConfig, {"initial_logit": float("nan")}, r"agent\.critic\.initial_logit must be finite, got nan"),
    (CriticConfig, {"sigma_bins": 0.2}, r"agent\.critic\.sigma_bins must be at least 0\.5, got 0\.2"),
    (CriticConfig, {"bins": 7}, r"agent\.critic\.bins must be at least 8 with agent\.critic\.sigma_bins=0\.75 .*got 7"),
    (CriticConfig, {"target_floor": "min"}, r"agent\.critic\.target_floor must be one of none, mc, got 'min'"),
    (AcfqlConfig, {"choose_std": -1.0}, r"agent\.choose_std must be >= 0, got -1\.0"),
    (
        AcfqlConfig,
        {"choose_std": 1.0, "choose_by": "min"},
        r"subtracted from a mean over heads: set agent\.choose_by=mean",
    ),
    (
        AcfqlConfig,
        {"choose_std": 0.5, "critic": CriticConfig(ensemble=1, target_subset=1)},
        r"agent\.choose_std=0\.5 needs heads that may disagree: set agent\.critic\.ensemble to 2 or more",
    ),
    (BcConfig, {"critic": CriticConfig(loss="hl_gauss")}, r"agent\.critic\.loss=hl_gauss would change nothing: bc has"),
    (BcConfig, {"critic": CriticConfig(target_floor="mc")}, r"target_floor=mc would change nothing: bc has no critic"),
    (BcConfig, {"choose_std": 1.0}, r"agent\.choose_std must be 0 for bc: it has no critic"),
    (
        AcrlpdConfig,
        {"backup_entropy": True, "critic": CriticConfig(target_floor="mc")},
        r"agent\.critic\.target_floor=mc .* agent\.backup_entropy adds entropy to it: switch one of them off",
    ),
    (CriticConfig, {"target_aggregate": "max"}, r"agent\.critic\.target_aggregate must be one of mean, min, got 'max'"),
    (CriticConfig, {"tail": None}, r"agent\.critic\.tail must be one of repeat, policy, got None"),
    (AcfqlConfig, {"target": "expectiles"}, r"agent\.target must be one of policy, expectile, got 'expectiles'"),
    (AcrlpdConfig, {"act_by": "mean"}, r"agent\.act_by must be one of online, target"),
    (BcConfig, {"bc_on": "demos"}, r"agent\.bc_on must be one of all, demo, demo\+interventions, \+successes, interv"),
    (NormaliserConfig, {"actions": "delta"}, r"normaliser\.actions must be one of absolute_range, absolute_demo, rela"),
    (ReplayConfig, {"terminal_windows": True}, r"replay\.terminal_windows must be one of keep, drop, got True"),
    (ActorConfig, {"clock": "real"}, r"actor\.clock must be one of lockstep, realtime, got 'real'"),
    (ActorConfig, {"inference": "fast"}, r"actor\.inference must be one of auto, sync, async"),
    (RewardConfig, {"scale": float("nan")}, r"reward\.scale must be a finite number, got nan"),
    (RewardConfig, {"offset": float("-inf")}, r"reward\.offset must be a finite number, got -inf"),
    (EncoderConfig, {"latent": 0}, r"agent\.encoder\.latent must be at least 1"),
    (ReplayConfig, {"exclude_before_takeover": -1}, r"replay\.exclude_before_takeover must be >= 0 ticks, got -1"),
    (ActorConfig, {"max_human_ticks": -1}, r"actor\.max_human_ticks must be >= 0, got -1"),
    (ActorConfig, {"max_episodes": -1}, r"actor\.max_episodes must be >= 0"),
    (CriticConfig, {"hidden": ()}, r"agent\.critic\.hidden must list at least one positive width"),
    (EncoderConfig, {"features": (0,)}, r"agent\.encoder\.features must list at least one positive width"),
    (EncoderConfig, {"shift": -1}, r"agent\.encoder\.shift must be >= 0 pixels"),
    (FlowConfig, {"hidden": ()}, r"agent\.flow\.hidden must list"),
    (FlowConfig, {"steps": 0}, r"agent\.flow\.steps must be at least 1"),
    (AcfqlConfig, {"lr": 0}, r"agent\.lr must be positive"),
    (AcfqlConfig, {"lr": float("nan")}, r"agent\.lr must be positive and finite, got nan"),
    (AcfqlConfig, {"grad_clip": -1}, r"agent\.grad_clip must be >= 0 \(0 switches it off\)"),
    (AcfqlConfig, {"candidates": 0}, r"agent\.candidates must be at least 1"),
    (AcfqlConfig, {"pretrain_candidates": 0}, r"agent\.pretrain_candidates must be at least 1"),
    (AcfqlConfig, {"use_state": False}, r"leaves the agent blind: name cameras in agent\.image_keys"),
    (AcfqlConfig, {"policy_ema": 1.0}, r"agent\.policy_ema must be in \[0, 1\), got 1\.0"),
    (FlowConfig, {"noise_low": 1.5}, r"agent\.flow\.noise_low must be in \[0, 1\], got 1\.5"),
    (BcConfig, {"policy_updates": 0}, r"agent\.policy_updates must be at least 1"),
    (AcfqlConfig, {"expectile": 0.4}, r"agent\.expectile must be in \[0\.5, 1\)"),
    (AcfqlConfig, {"expectile": 1.0}, r"agent\.expectile must be in \[0\.5, 1\)"),
    (AcfqlConfig, {"target_candidates": 0}, r"agent\.target_candidates must be at least 1"),
    (AcfqlConfig, {"prefix_expectile": 1.0}, r"agent\.prefix_expectile must be in \[0\.5, 1\)"),
    (AcfqlConfig, {"prefix_lengths": 0}, r"agent\.prefix_lengths must be at least 1"),
    (
        AcfqlConfig,
        {"prefix_critic": True, "replan_spread": 0.1},
        r"replan_spread=0\.1 compares .*\.prefix_lengths is 1",
    ),
    (AcfqlConfig, {**SPREAD, "replan_spread": -1.0}, r"agent\.replan_spread must be >= 0 .* got -1\.0"),
    (AcfqlConfig, {**SPREAD, "critic": CriticConfig(ensemble=1, target_subset=1)}, r"agent\.critic\.ensemble is 1"),
    (AcfqlConfig, {"prefix_lengths": 2}, r"agent\.prefix_lengths=2 needs agent\.prefix_critic=True"),
    (BcConfig, {"prefix_critic": True}, r"agent\.prefix_critic must be False for bc"),
    (AcfqlConfig, {"policy_updates": 0}, r"agent\.policy_updates must be at least 1"),
    (AcrlpdConfig, {"hidden": (-1,)}, r"agent\.hidden must list"),
    (AcrlpdConfig, {"bc_alpha": -1}, r"agent\.bc_alpha must be >= 0"),
    (AcrlpdConfig, {"init_temperature": 0}, r"agent\.init_temperature must be positive"),
    (BcConfig, {"candidates": 2}, r"agent\.candidates must be 1 for bc: it has no critic"),
    (RobotConfig, {"max_episode_steps": 0}, r"robot\.max_episode_steps must be at least 1"),
    (FakeAlohaConfig, {"max_episode_steps": 0}, r"robot\.max_episode_steps must be at least 1"),
    (FakeAlohaConfig, {"grasp_tolerance": 0}, r"robot\.grasp_tolerance must be positive metres"),
    (FakeAlohaConfig, {"place_tolerance": 0}, r"robot\.place_tolerance must be positive metres"),
    (FakeAlohaConfig, {"image_size": 4}, r"robot\.image_size must be at least 8 pixels"),
    (FakeAlohaConfig, {"control_hz": 0}, r"robot\.control_hz must be positive"),
    (AlohaSimConfig, {"image_size": 4}, r"robot\.image_size must be at least 8 pixels"),
    (GymConfig, {}, r"robot\.make must be a callable make\(fake_env: bool\)"),
    (GymConfig, {"make": print, "control_hz": 0}, r"robot\.control_hz must be positive"),
    (ChunkConfig, {"horizon": 0}, r"chunk\.horizon must be at least 1"),
    (ChunkConfig, {"critic_horizon": 0}, r"chunk\.critic_horizon must be at least 1, got 0"),
    (ChunkConfig, {"execute_steps": 0}, r"chunk\.execute_steps must be 1\.\.5"),
    (NormaliserConfig, {"extreme": 0}, r"normaliser\.extreme must be in \(0, 1\]"),
    (NormaliserConfig, {"state_std_floor": 0}, r"normaliser\.state_std_floor must be positive"),
    (NormaliserConfig, {"action_scale_floor": 0}, r"normaliser\.action_scale_floor must be positive"),
    *(
        (ReplayConfig, {name: 0}, rf"replay\.{name} must be at least 1, got 0")
        for name in ("capacity", "demo_capacity", "human_capacity", "image_capacity")
    ),
    (ReplayConfig, {"demo_fraction": 1.5}, r'replay\.demo_fraction must be a number in 0\.\.1 or "uniform", got 1\.5'),
    (ReplayConfig, {"demo_fraction": "half"}, r"demo_fraction must be a number .* got 'half'"),
    (ReplayConfig, {"max_image_age": -1}, r"replay\.max_image_age must be >= 0 ticks"),
    (ReplayConfig, {"prefetch": -1}, r"replay\.prefetch must be >= 0"),
    *(
        (LearnerConfig, {name: 0}, rf"learner\.{name} must be at least 1, got 0")
        for name in ("batch_size", "cta_ratio", "max_steps", "steps_per_update", "keep_checkpoints", "log_period")
    ),
    *(
        (LearnerConfig, {name: -1}, rf"learner\.{name} must be >= 0, got -1")
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
    (LearnerConfig, {"batch_size": 3}, r"learner\.batch_size must be even, got 3"),
    (LearnerConfig, {"utd_ratio": 0}, r"learner\.utd_ratio must be positive"),
    (
        LearnerConfig,
        {"utd_ratio": 0.1, "max_lag_steps": 9},
        r"the actor would wait .* Set max_lag_steps to at least 10",
    ),
    (LearnerConfig, {"actor_timeout": 0}, r"learner\.actor_timeout must be positive seconds"),
    (ActorConfig, {"delay_ticks": -1}, r"actor\.delay_ticks must be >= 0"),
    (ActorConfig, {"clock": "realtime", "delay_ticks": 1}, r"belongs to clock=lockstep; in real time .* measured"),
    *(
        (TransportConfig, {field.name: -1 if field.name in ZERO else 0}, rf"transport\.{field.name} must be ")
        for field in dataclasses.fields(TransportConfig)
        if field.name not in ("journal", "durability")
    ),
    (TransportConfig, {"durability": "disk"}, "transport.durability must be one of process, power, got 'disk'"),
    (TransportConfig, {"jpeg_quality": 101}, r"transport\.jpeg_quality must be 0\.\.100"),
    (TransportConfig, {"silence": 2.0}, r"transport\.silence must exceed two heartbeats"),
    (TransportConfig, {"spool_bytes": 1 << 20}, r"transport\.credit_bytes=33554432 exceeds spool_bytes=1048576"),
]


@pytest.mark.parametrize(("cls", "values", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None))
def test_a_part_that_cannot_work_is_refused(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        cls(**values)


SQUARED = AcfqlConfig(critic=CriticConfig(loss="squared"))
PREFIX = AcfqlConfig(prefix_critic=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"discount": 1.0}, r"discount must be in \(0, 1\), got 1\.0"),
        (
            {"reward": RewardConfig(offset=-0.1)},
            r"failing early would pay: set reward\.failure_reward to at most .*=-10 ",
        ),
        ({"reward": RewardConfig(offset=-0.1, failure_reward=-10)}, r"loss=bounded needs returns in \[0, 1\]"),
        ({"reward": RewardConfig(scale=2)}, r"loss=bounded needs returns in \[0, 1\].*or agent\.critic\.loss=squared"),
        ({"reward": RewardConfig(offset=0.5)}, r"loss=bounded needs returns"),
        ({"reward": RewardConfig(failure_reward=-1)}, r"loss=bounded needs returns"),
        (
            {"chunk": ChunkConfig(critic_horizon=6)},
            r"must be 1\.\.5 \(horizon\), got 6: .* set agent\.prefix_critic=True",
        ),
        (
            {"chunk": ChunkConfig(execute_steps=3)},
            r"nothing ever corrects the tail's value\. .* or set agent\.prefix_critic=True",
        ),
        (
            {"actor": ActorConfig(adaptive_execution=True)},
            r"adaptive_execution=True plans .* while agent\.replan_spread is none",
        ),
        ({"agent": PREFIX}, r"chunk\.critic_horizon is 5: raise chunk\.critic_horizon, lower chunk\.execute_steps"),
        (
            {"agent": dataclasses.replace(PREFIX, prefix_lengths=2), "chunk": ChunkConfig(critic_horizon=9)},
            r"agent\.prefix_lengths=2 must divide chunk\.execute_steps=5",
        ),
        (
            {
                "agent": AcfqlConfig(prefix_critic=True, critic=CriticConfig(loss="squared", tail="policy")),
                "chunk": ChunkConfig(critic_horizon=9),
            },
            r"agent\.critic\.tail=policy fills chunk\.critic_horizon=9 actions from the policy's 5",
        ),
        (
            {"agent": BcConfig(), "reward": RewardConfig(intervention_penalty=0.1)},
            r"reward\.intervention_penalty=0\.1 would change nothing: bc learns from no reward\. Set it to 0, or",
        ),
        (
            {
                "agent": BcConfig(),
                "replay": ReplayConfig(windows="adjacent", terminal_windows="drop", demo_fraction=1),
            },
            r"bc_on=demo\+interventions imitates what people do online, .*draws demonstrations alone: set replay\.wind",
        ),
        (
            {
                "agent": AcrlpdConfig(image_keys=("top",), encoder=EncoderConfig(trained_by="critic")),
                "learner": LearnerConfig(offline_steps=100, critic_warmup_steps=50),
            },
            r"critic_warmup_steps=50 trains the encoder by the critic's loss .*offline_steps=100 has .*warmup_steps=0",
        ),
        ({"actor": ActorConfig(delay_ticks=5)}, r"actor\.delay_ticks=5 must be below chunk\.execute_steps=5"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(values, message):
    defaults = {"name": "x", "robot": FakeAlohaConfig(), "discount": 0.99}
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig(**{**defaults, **values})


@pytest.mark.parametrize("loss", ["bounded", "hl_gauss"])
@pytest.mark.parametrize(
    ("reward", "low", "high"),
    [
        (RewardConfig(offset=-1.0, failure_reward=-100.0), -100.0, 0.0),
        (RewardConfig(offset=-0.1, failure_reward=-30.0), -30.0, 0.9),
        (RewardConfig(scale=2.0, failure_reward=-1.0), -1.0, 2.0),
        (RewardConfig(offset=0.5), 0.0, 50.0),
    ],
)
def test_a_critic_with_a_range_needs_one_that_holds_every_return(loss, reward, low, high):
    def build(low, high):
        agent = AcfqlConfig(critic=CriticConfig(loss=loss, value_low=low, value_high=high))
        return ExperimentConfig(name="x", robot=FakeAlohaConfig(), agent=agent, reward=reward, discount=0.99)

    said = rf"loss={loss} needs .* allow {low:g} to {high:g}: set agent\.critic\.value_low to {low:g} or less and "
    for narrow in ((low + 0.01, high), (low, high - 0.01)):
        with pytest.raises(ConfigError, match=said + rf"agent\.critic\.value_high to {high:g} or more"):
            build(*narrow)
    assert build(low, high).agent.critic.value_low == low  # what the message says is enough
    # Nothing the settings can pay leaves the range.
    g = 0.99
    for k in (0, 1, 7, 500):
        waited = reward.offset * (1 - g**k) / (1 - g)
        for end in (reward.scale + reward.offset, reward.failure_reward):
            assert low - 1e-6 <= waited + g**k * end <= high + 1e-6, (k, end)


def test_negative_rewards_of_a_robots_own_need_a_range_that_was_chosen_for_them():
    robot = OgbenchConfig(reward="dense")
    with pytest.raises(ConfigError, match=r"own rewards may be negative: set agent\.critic\.value_low to the least"):
        ExperimentConfig(name="x", robot=robot)
    agent = AcfqlConfig(critic=CriticConfig(loss="bounded", value_low=-200.0))
    assert ExperimentConfig(name="x", robot=robot, agent=agent).agent.critic.value_low == -200


def test_a_floor_needs_windows_that_belong_to_an_episode():
    agent = AcfqlConfig(critic=CriticConfig(loss="squared", target_floor="mc"))
    adjacent = ReplayConfig(windows="adjacent", terminal_windows="drop")
    with pytest.raises(ConfigError, match=r"target_floor=mc needs .*: set replay\.windows=episode, or"):
        ExperimentConfig(name="x", robot=FakeAlohaConfig(), agent=agent, replay=adjacent)


def test_a_step_cost_is_allowed_where_failing_early_does_not_pay():
    reward = RewardConfig(offset=-0.1, failure_reward=-10.0)
    config = ExperimentConfig(name="x", robot=FakeAlohaConfig(), agent=SQUARED, reward=reward, discount=0.99)
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


def test_only_a_gym_robot_that_says_so_is_real():
    assert not FakeAlohaConfig().real
    assert not GymConfig(make=print).real
    assert GymConfig(make=print, is_real=True).real


@pytest.mark.parametrize("cls", [AcfqlConfig, FakeAlohaConfig, ExperimentConfig], ids=lambda c: c.__name__)
def test_configurations_are_frozen(cls):
    config = cls(name="x", robot=FakeAlohaConfig()) if cls is ExperimentConfig else cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)
