"""Presets, published conventions and overrides as one experiment, validated once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.decoupled import DecoupledConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import NOT_OF_COMPAT, PRESETS, configured
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import RobotConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig("x", RobotConfig())
OF_FAILING = [name for name in PRESETS if not name.startswith(("bc", "hg-dagger", "hil-serl", "decoupled"))]


@pytest.mark.parametrize("discount", ["0.9", "0.97", "0.995", "0.9999"])
@pytest.mark.parametrize("preset", OF_FAILING)
def test_what_follows_from_the_discount_follows_from_the_one_given(preset: str, discount: str) -> None:
    for compat in (None,) if preset in NOT_OF_COMPAT else (None, "qc"):
        config = configured(BASE, [("discount", discount)], preset=preset, compat=compat)
        assert config.discount == float(discount)
        assert config.reward.failure_reward == -1.0 / (1 - config.discount)
    assert configured(BASE, preset=preset).reward.failure_reward == -1.0 / (1 - BASE.discount)
    alone = configured(dataclasses.replace(BASE, agent=config.agent), [("discount", discount)], compat="qc")
    assert alone.reward == config.reward


def test_the_result_alone_is_validated() -> None:
    late = dataclasses.replace(BASE, actor=ActorConfig(delay_ticks=2))
    with pytest.raises(ConfigError, match=naming("actor.delay_ticks", 2, "chunk.execute_steps", 1)):
        configured(late, preset="rlpd-qc")
    assert configured(late, [("actor.delay_ticks", "0")], preset="rlpd-qc").actor.delay_ticks == 0
    assert configured(late, [("chunk.horizon", "3")], preset="rlpd-qc").chunk.horizon == 3


def test_the_published_conventions_take_back_what_their_windows_cannot_do() -> None:
    balanced = dataclasses.replace(BASE, replay=ReplayConfig(positive_fraction=0.5))
    assert configured(balanced, compat="qc").replay.positive_fraction is None


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("reward.failure_reward", "-500", -500.0),
        ("agent.actor_num_samples", "3", 3),
        ("agent.tau", "0.5", 0.5),
        ("replay.windows", "episode", "episode"),
        ("normaliser.state", "true", True),
        ("learner.eval_mode", "mean", "mean"),
        ("chunk.return_steps", "7", 7),
    ],
)
def test_an_override_wins_over_preset_and_conventions(path: str, text: str, value: object) -> None:
    found: object = configured(BASE, [(path, text)], preset="qc", compat="qc")
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_bad_discount_is_refused_as_without_a_preset() -> None:
    for text in ("1", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match=naming("discount", float(text), "(0, 1)")):
            configured(BASE, [("discount", text)], preset="qc")
    with pytest.raises(ConfigError, match=naming("discount", "x")):
        configured(BASE, [("discount", "x")], preset="qc")
    with pytest.raises(ConfigError, match=naming("preset", "qc-fqk", "'qc-fql'")):
        configured(BASE, preset="qc-fqk")


def test_the_highest_failure_reward_that_is_named_is_accepted() -> None:
    """As it is printed: rounded to a few digits it could lie above the bound."""
    with pytest.raises(ConfigError, match=naming("reward.offset", -1.0, "reward.failure_reward")) as refused:
        configured(BASE, [("reward.offset", "-1"), ("discount", "0.97")])
    named = str(refused.value).split("offset/(1-discount)=")[1].split()[0]
    overrides = [("reward.offset", "-1"), ("discount", "0.97"), ("reward.failure_reward", named)]
    config = configured(BASE, overrides)
    assert config.reward.failure_reward == float(named)


WIDE = CriticConfig(hidden=(8, 9), ensemble=7, tau=0.5)
LEAST = SacCriticConfig(hidden=(8, 9), ensemble=7, target_aggregate="min", tau=0.5)
SHARED: dict[str, Any] = {"lr": 1e-4, "critic_lr": 2e-4}
LATE = FlowConfig(hidden=(6,), steps=3, train_delay="sampled")


@pytest.mark.parametrize(
    ("agent", "published"),
    [
        (
            AcfqlConfig(critic=WIDE, flow=LATE, candidates=9, policy_ema=0.9, **SHARED),
            {"actor_type": "best-of-n", "actor_num_samples": 9, "actor_hidden_dims": (6,), "flow_steps": 3,
             "q_agg": "mean"},
        ),
        (
            AcrlpdConfig(
                critic=LEAST, hidden=(6,), bc_alpha=0.3, candidates=4, target_entropy_per_dim=-2.0,
                init_temperature=0.1, **SHARED,
            ),
            {"agent_name": "acrlpd", "actor_hidden_dims": (6,), "bc_alpha": 0.3, "target_entropy_multiplier": 2.0,
             "q_agg": "min"},
        ),
    ],
    ids=["best-of-n", "gaussian"],
)  # fmt: skip
def test_the_published_agent_has_our_sizes_and_weights_and_conventions_of_its_own(
    agent: AgentConfig, published: dict[str, Any]
) -> None:
    warmed = dataclasses.replace(BASE, agent=agent, learner=LearnerConfig(critic_warmup_steps=500))
    config = configured(warmed, compat="qc")
    critic = {"num_qs": 7, "value_hidden_dims": (8, 9)}
    assert config.agent == PublishedQcConfig(lr=1e-4, **critic, **published)
    assert config.learner.critic_warmup_steps == 0
    assert configured(config, compat="qc").agent == config.agent


def test_the_published_clone_is_the_flow_of_one_candidate() -> None:
    clone = BcConfig(flow=LATE)
    assert configured(dataclasses.replace(BASE, agent=clone), compat="qc").agent == PublishedQcConfig(
        actor_type="best-of-n", actor_num_samples=1, value_hidden_dims=(6,), actor_hidden_dims=(6,),
        flow_steps=3,
    )  # fmt: skip
    gaussian = dataclasses.replace(BASE, agent=BcConfig(policy="gaussian"))
    with pytest.raises(ConfigError, match=naming("compat", "bc", "agent.policy=gaussian", "agent.policy=flow")):
        configured(gaussian, compat="qc")
    with pytest.raises(ConfigError, match=naming("compat", "bc-gaussian")):
        configured(BASE, preset="bc-gaussian", compat="qc")


@pytest.mark.parametrize(("preset", "compat"), [(None, "qc"), ("qc", None), ("qc", "qc"), ("bc", None)])
def test_what_needs_a_prefix_critic_goes_with_it(preset: str | None, compat: str | None) -> None:
    chunk, actor = ChunkConfig(5, critic_horizon=20), ActorConfig(adaptive_execution=True)
    agent = DecoupledConfig(prefix_lengths=5, replan_spread=0.1)
    config = configured(dataclasses.replace(BASE, agent=agent, chunk=chunk, actor=actor), preset=preset, compat=compat)
    assert not config.agent.prefix_critic
    assert not config.actor.adaptive_execution
    assert config.chunk.critic_steps == config.chunk.executed == config.chunk.horizon == 5


@pytest.mark.parametrize(("preset", "policy"), [("hg-dagger", "flow"), ("hg-dagger-gaussian", "gaussian")])
def test_hg_dagger_imitates_every_row_it_draws(preset: str, policy: str) -> None:
    config = configured(BASE, preset=preset)
    assert isinstance(config.agent, BcConfig)
    assert (config.agent.policy, config.agent.bc_on) == (policy, "demo+interventions")
    assert config.replay.demo_fraction == 1.0
    assert config.learner.pretrain_steps == 20_000  # as published
    own = dataclasses.replace(BASE, learner=LearnerConfig(pretrain_steps=300))
    assert configured(own, preset=preset).learner.pretrain_steps == 300
    assert configured(own, [("learner.pretrain_steps", "7")], preset=preset).learner.pretrain_steps == 7


def test_the_published_code_has_no_hg_dagger() -> None:
    message = naming("compat", "qc", "preset", "hg-dagger")
    with pytest.raises(ConfigError, match=message):
        configured(BASE, preset="hg-dagger", compat="qc")
    with pytest.raises(ConfigError, match=message):
        configured(configured(BASE, preset="hg-dagger"), compat="qc")


def test_rlpd_is_the_published_one_for_sparse_rewards() -> None:
    config = configured(BASE, preset="rlpd")
    agent, loop = config.agent, config.learner
    assert isinstance(agent, AcrlpdConfig)
    critic = agent.critic
    assert (critic.ensemble, critic.target_subset, critic.target_aggregate) == (10, 2, "min")
    assert critic.hidden == agent.hidden == (256, 256, 256)
    assert (critic.activation, config.value_range) == ("relu", None)
    assert (critic.tau, agent.lr, agent.init_temperature, agent.target_entropy_per_dim) == (0.005, 3e-4, 1.0, -0.5)
    assert (agent.backup_entropy, agent.log_prob, agent.bc_alpha, agent.candidates) == (False, "sum", 0.0, 1)
    assert (agent.policy_layer_norm, agent.log_std_min, agent.kernel_init) == (False, -20.0, "xavier_uniform")
    assert (loop.utd_ratio, loop.cta_ratio) == (20.0, 20)
    assert (config.chunk.horizon, config.replay.demo_fraction, config.discount) == (1, 0.5, BASE.discount)
    assert (config.reward.scale, config.reward.offset) == (1.0, -1.0)


def test_hil_serl_is_the_published_one() -> None:
    cameras = dataclasses.replace(BASE.agent, image_keys=("top",))
    config = configured(dataclasses.replace(BASE, agent=cameras), preset="hil-serl")
    agent, loop = config.agent, config.learner
    assert isinstance(agent, AcrlpdConfig)
    critic = agent.critic
    assert (critic.ensemble, critic.target_subset, critic.target_aggregate) == (2, 2, "min")
    assert critic.hidden == agent.hidden == (256, 256)
    assert critic.activation == "tanh"
    assert (agent.policy_activation, agent.policy_layer_norm) == ("tanh", True)
    assert (critic.tau, agent.lr, agent.init_temperature, agent.target_entropy_per_dim) == (0.005, 3e-4, 0.01, -0.5)
    assert (agent.backup_entropy, agent.log_prob, agent.bc_alpha, agent.candidates) == (False, "sum", 0.0, 1)
    assert math.exp(agent.log_std_min) == pytest.approx(1e-5)
    assert (loop.utd_ratio, loop.cta_ratio, agent.encoder.trained_by) == (None, 2, "critic")
    assert (config.chunk.horizon, config.replay.demo_fraction) == (1, 0.5)
    assert (config.reward.scale, config.reward.offset, config.reward.failure_reward) == (1.0, 0.0, 0.0)
    assert configured(BASE, preset="hil-serl").agent.encoder == BASE.agent.encoder


@pytest.mark.parametrize("preset", ["rlpd", "hil-serl"])
def test_published_online_agents_begin_with_the_first_step(preset: str) -> None:
    loop = configured(load_experiment("fake_aloha"), preset=preset).learner
    assert (loop.pretrain_steps, loop.warmup_episodes, loop.critic_warmup_steps) == (0, 0, 0)
    own = [("learner.pretrain_steps", "7"), ("learner.utd_ratio", "4")]
    loop = configured(load_experiment("fake_aloha"), own, preset=preset).learner
    assert (loop.pretrain_steps, loop.utd_ratio) == (7, 4.0)
    with pytest.raises(ConfigError, match=naming("compat", "qc", "preset", preset)):
        configured(BASE, preset=preset, compat="qc")


def test_published_conventions_leave_only_what_the_first_encoder_had() -> None:
    encoder = {"kind": "resnet10", "features": (4,), "latent": 5, "shift": 1, "trained_by": "critic"}
    encoder |= {"pooling": "mean", "share_cameras": False, "state_latent": 3, "frozen_backbone": True, "weights": "w"}
    agent = dataclasses.replace(BASE.agent, image_keys=("top",), encoder=EncoderConfig(**encoder))  # type: ignore[arg-type]
    found = configured(dataclasses.replace(BASE, agent=agent), compat="qc").agent.encoder
    assert found == EncoderConfig(features=(4,), latent=5, shift=1)
    encoder |= {"shift": 0, "cache_features": True}
    agent = dataclasses.replace(agent, encoder=EncoderConfig(**encoder))  # type: ignore[arg-type]
    found = configured(dataclasses.replace(BASE, agent=agent), compat="qc").agent.encoder
    assert found == EncoderConfig(features=(4,), latent=5, shift=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_an_algorithm_reads_the_language_that_the_experiment_reads(preset: str) -> None:
    language = LanguageConfig("bytes", 100)
    agent, robot = dataclasses.replace(BASE.agent, language=language), dataclasses.replace(BASE.robot, task="lift")
    assert configured(dataclasses.replace(BASE, agent=agent, robot=robot), preset=preset).agent.language == language


def test_decoupled_critics_keep_the_experiments_own_settings() -> None:
    agent = AcfqlConfig(critic=WIDE, flow=LATE, candidates=9)
    config = configured(
        dataclasses.replace(BASE, agent=agent, chunk=ChunkConfig(8, execute_steps=8)), preset="decoupled"
    )
    assert config.agent == DecoupledConfig(critic=WIDE, flow=LATE, candidates=9)
    assert (config.chunk.executed, config.chunk.critic_steps, config.reward) == (8, 16, BASE.reward)


def test_another_algorithm_than_a_decoupled_one_is_chosen_over_it() -> None:
    decoupled = configured(
        BASE,
        [
            ("chunk.critic_horizon", "20"), ("agent.prefix_lengths", "5"),
            ("agent.replan_spread", "0.1"), ("actor.adaptive_execution", "true"),
        ],
        preset="decoupled",
    )  # fmt: skip
    assert decoupled.actor.adaptive_execution
    for preset, compat in ((None, "qc"), ("qc", None), ("rlpd-qc", "qc"), ("hg-dagger", None)):
        config = configured(decoupled, preset=preset, compat=compat)
        assert not config.actor.adaptive_execution
        assert not config.agent.prefix_critic
        assert config.chunk.critic_steps == config.chunk.executed
    shorter = dataclasses.replace(BASE, chunk=ChunkConfig(6, 4))
    assert configured(shorter, compat="qc").chunk == shorter.chunk


@pytest.mark.parametrize(
    ("decoupled", "return_steps"),
    [
        (ChunkConfig(10, critic_horizon=20, execute_steps=5), None),
        (ChunkConfig(10, critic_horizon=7, execute_steps=5, return_steps=7), None),
        (ChunkConfig(10, critic_horizon=20, execute_steps=5, return_steps=25), 25),
    ],
    ids=["part_is_executed", "short_returns", "long_returns"],
)
def test_published_conventions_execute_the_chunks_of_a_decoupled_agent_to_the_end(
    decoupled: ChunkConfig, return_steps: int | None
) -> None:
    """Without the prefix critic no other is of the executed actions alone."""
    agent = DecoupledConfig()
    config = configured(dataclasses.replace(BASE, agent=agent, chunk=decoupled), compat="qc")
    assert config.chunk == ChunkConfig(10, return_steps=return_steps)


@pytest.mark.parametrize(("preset", "of_chunks"), [("fql-n", "qc-fql"), ("bfn-n", "qc")])
def test_a_preset_of_single_actions_with_longer_returns_has_no_chunks(preset: str, of_chunks: str) -> None:
    """Published scripts give the length of the returns as --horizon_length, which is the chunk's here."""
    message = naming("chunk.horizon", "preset", preset, of_chunks, "chunk.return_steps")
    for horizon in ("5", "10"):
        for compat in (None, "qc"):
            with pytest.raises(ConfigError, match=message):
                configured(BASE, [("chunk.horizon", horizon)], preset=preset, compat=compat)
    single = configured(BASE, [("chunk.horizon", "1"), ("chunk.return_steps", "7")], preset=preset)
    assert single.chunk == ChunkConfig(1, return_steps=7)
    with pytest.raises(ConfigError, match=message):
        configured(single, [("chunk.horizon", "5")])
    assert configured(single, [("chunk.horizon", "5")], preset="qc").chunk.horizon == 5


CLONES = pytest.mark.parametrize("preset", ["bc", "bc-gaussian", "hg-dagger", "hg-dagger-gaussian"])


@CLONES
def test_a_clone_trains_the_encoder_that_was_the_critics(preset: str) -> None:
    encoder = EncoderConfig(latent=5, trained_by="critic")
    agent = dataclasses.replace(BASE.agent, image_keys=("top",), encoder=encoder)
    ours = dataclasses.replace(BASE, agent=agent)
    assert configured(ours, preset=preset).agent.encoder == EncoderConfig(latent=5, trained_by="each")
    with pytest.raises(ConfigError, match=naming("agent.encoder.trained_by", "critic", "each", "bc")):
        configured(ours, [("agent.encoder.trained_by", "critic")], preset=preset)


@pytest.mark.parametrize("preset", ["bc", "bc-gaussian"])
def test_a_clone_is_not_trained_by_the_updates_of_a_critic(preset: str) -> None:
    none = [("learner.online_steps", "0"), ("learner.pretrain_steps", "0")]
    with pytest.raises(
        ConfigError,
        match=naming("learner.online_steps", 0, "learner.critic_pretrain_steps", 5000, "learner.pretrain_steps"),
    ):
        configured(BASE, [*none, ("learner.critic_pretrain_steps", "5000")], preset=preset)
    for name in ("offline_steps", "pretrain_steps"):
        loop = configured(BASE, [*none, (f"learner.{name}", "10")], preset=preset).learner
        assert (getattr(loop, name), loop.online_steps) == (10, 0)
    assert configured(BASE, [*none, ("learner.critic_pretrain_steps", "9")], preset="qc").learner.online_steps == 0


def test_a_policy_batch_of_its_own_needs_a_step_of_its_own():
    own = [("learner.policy_batch_size", "32")]
    assert configured(BASE, own, preset="rlpd-qc").learner.policy_batch_size == 32
    with pytest.raises(
        ConfigError, match=naming("learner.policy_batch_size", 32, "published_qc", "none", "--compat qc")
    ):
        configured(BASE, own, preset="qc")
