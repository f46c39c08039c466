"""Settings of improvement, smooth exploration and training with a delay: refused by name, off where they must be."""

from __future__ import annotations

import dataclasses
import math

import pytest
from errors import naming

from serl_chunk.config.agents import AcfqlConfig, AcrlpdConfig, AgentConfig, BcConfig, FlowConfig, ImproveConfig
from serl_chunk.config.critics import CriticConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.presets import PRESETS, configured
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.types import ConfigError

IMITATING = ImproveConfig(steps=2, imitate=1.0)
LATE = FlowConfig(train_delay="sampled", train_delay_max=3, noise_low=0.5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ImproveConfig(steps=-1), ("agent.improve.steps", -1, 0)),
        (lambda: ImproveConfig(top=0), ("agent.improve.top", 0, 1)),
        (lambda: ImproveConfig(candidates=0), ("agent.improve.candidates", 0, 1)),
        (lambda: ImproveConfig(rate=0.0), ("agent.improve.rate", 0.0)),
        (lambda: ImproveConfig(rate=math.inf), ("agent.improve.rate", "inf")),
        (lambda: ImproveConfig(radius=2.5), ("agent.improve.radius", 2.5, "(0, 2]")),
        (lambda: ImproveConfig(imitate=-1.0), ("agent.improve.imitate", -1.0, 0)),
        (lambda: ImproveConfig(steps=1, imitate=math.inf), ("agent.improve.imitate", "inf", 0)),
        (lambda: ImproveConfig(imitate=1.0), ("agent.improve.imitate", "agent.improve.steps")),
        (lambda: AcrlpdConfig(improve=IMITATING), ("agent.improve.imitate", 0, "acrlpd")),
        (
            lambda: AcfqlConfig(improve=IMITATING, actor_type="distill-ddpg"),
            ("agent.improve.imitate", "agent.actor_type", "best-of-n"),
        ),
        (lambda: AcrlpdConfig(target_candidates=0), ("agent.target_candidates", 0, 1)),
        (
            lambda: AcrlpdConfig(target_candidates=4, backup_entropy=True),
            ("agent.target_candidates", 4, "agent.backup_entropy"),
        ),
        (lambda: AgentConfig(exploration_knots=-1), ("agent.exploration_knots", -1, 0)),
        (lambda: BcConfig(exploration_knots=2), ("agent.exploration_knots", 2, "agent.flow.noise_low", 0)),
        (
            lambda: AcfqlConfig(exploration_knots=2, candidates=1),
            ("agent.exploration_knots", 2, "agent.flow.noise_low", 0),
        ),
        (lambda: FlowConfig(train_delay="some"), ("agent.flow.train_delay", "some", "none", "recorded", "sampled")),
        (lambda: FlowConfig(train_delay_max=0), ("agent.flow.train_delay_max", 0, 1)),
        (
            lambda: AcfqlConfig(flow=LATE, actor_type="distill-ddpg"),
            ("agent.flow.train_delay", "sampled", "agent.actor_type", "best-of-n"),
        ),
        (lambda: BcConfig(flow=LATE, policy="gaussian"), ("agent.flow.train_delay", "sampled", "agent.policy", "flow")),
    ],
)
def test_a_value_that_cannot_work_is_named(make, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        make()


def experiment(agent: AgentConfig, horizon: int = 5, delay: int = 0) -> ExperimentConfig:
    chunk, actor = ChunkConfig(horizon=horizon), ActorConfig(delay_ticks=delay)
    return ExperimentConfig(name="x", robot=FakeAlohaConfig(), discount=0.99, agent=agent, chunk=chunk, actor=actor)


def test_what_does_not_fit_the_chunk_or_the_actor_is_refused():
    knots = AcfqlConfig(exploration_knots=6)
    assert experiment(knots, 6).agent.exploration_knots == 6
    with pytest.raises(ConfigError, match=naming("agent.exploration_knots", 6, "chunk.horizon", 5)):
        experiment(knots)
    for agent in (AcfqlConfig(flow=LATE), BcConfig(flow=LATE)):
        assert experiment(agent, delay=3).actor.delay_ticks == 3
        with pytest.raises(ConfigError, match=naming("agent.flow.train_delay_max", "chunk.horizon", 3)):
            experiment(agent, 3)
        with pytest.raises(ConfigError, match=naming("actor.delay_ticks", 4, "agent.flow.train_delay_max", 3)):
            experiment(agent, delay=4)


EVERYTHING = {
    "exploration_knots": 3,
    "improve": ImproveConfig(steps=3),
    "target_candidates": 4,
    "flow": LATE,
}


def additions(agent: AgentConfig) -> dict[str, object]:
    """What of this page is switched on."""
    off = {"exploration_knots": 0, "improve": ImproveConfig(), "target_candidates": 1}
    found = {k: getattr(agent, k, v) for k, v in off.items() if getattr(agent, k, v) != v}
    if isinstance(agent, AcfqlConfig):
        found.pop("target_candidates", None)  # best-of-n's own
    flow = getattr(agent, "flow", FlowConfig())
    return found if flow.train_delay == "none" else found | {"train_delay": flow.train_delay}


@pytest.mark.parametrize("cls", [AcfqlConfig, AcrlpdConfig, BcConfig])
def test_published_conventions_switch_all_of_it_off(cls):
    assert not additions(cls())
    names = {f.name for f in dataclasses.fields(cls)}
    agent = cls(**{k: v for k, v in EVERYTHING.items() if k in names})
    assert additions(agent)
    assert not additions(configured(experiment(agent), compat="qc").agent)


def test_published_conventions_choose_and_bootstrap_as_published():
    """No warm-up of the critic, no best of N for Gaussians, no candidates kept back, all heads in the target."""
    config = experiment(AcrlpdConfig(critic=CriticConfig(ensemble=10, target_subset=2), candidates=16))
    config = configured(dataclasses.replace(config, learner=LearnerConfig(critic_warmup_steps=500)), compat="qc")
    assert (config.agent.candidates, config.agent.pretrain_candidates, config.agent.critic.target_subset) == (1, 1, 10)
    assert config.learner.critic_warmup_steps == 0
    flow = configured(experiment(AcfqlConfig(candidates=16, pretrain_candidates=1)), compat="qc").agent
    assert (flow.candidates, flow.pretrain_candidates) == (16, 16)


def test_presets_have_none_of_it():
    for preset in PRESETS:
        config = configured(experiment(AcfqlConfig(flow=LATE, exploration_knots=2)), preset=preset)
        assert not additions(config.agent)
