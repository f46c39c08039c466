"""Returns beyond a bounded critic's range are logged, once."""

from __future__ import annotations

import numpy as np
import pytest

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.learner.training_stats import ValueRange
from serl_chunk.types import Begin, End, Episode, Outcome, Source, Step, StepBlock


def config(agent: AgentConfig) -> ExperimentConfig:
    return ExperimentConfig("x", FakeAlohaConfig(), agent=agent, discount=0.5)


def test_an_online_episode_beyond_the_range_is_logged_once(caplog):
    watch = ValueRange(config(AcfqlConfig()))
    watch.check("episode e0", 0.0, 1.0)
    watch.check("episode e1", -1e-9, 1 + 1e-9)
    assert caplog.messages == []
    watch.check("episode e2", -0.02, 1.0)
    watch.check("episode e3", 0.0, 10.0)
    [line] = caplog.messages
    assert "episode e2 has returns of -0.02 to 1, outside of 0 to 1, which rewards of 0, and 1 at a success" in line
    assert "reward.scale" in line


@pytest.mark.parametrize(("agent", "warned"), [(AcfqlConfig(), True), (AcrlpdConfig(), False)])
def test_a_demonstration_of_several_stages(agent, warned, caplog):
    """A classifier of several stages gives more than one reward."""
    steps = [
        Step(t, {"state": np.zeros(2, np.float32)}, np.zeros(2, np.float32), reward, Source.HUMAN, -1, -1, 0.0)
        for t, reward in enumerate((0.0, 1.0, 0.5, 1.0))  # returns 0.75, 1.5, 1, 1 with a discount of 0.5
    ]
    block = StepBlock.from_steps("d", steps)
    episode = Episode(Begin("d"), block, End("d", 4, None, True, False, Outcome.SUCCESS, reward=None))
    ValueRange(config(agent)).demonstrations([episode, episode])
    assert len(caplog.messages) == warned
    assert not warned or f"demonstration {episode.begin.episode_id} has returns of 0 to 1.5" in caplog.messages[0]
