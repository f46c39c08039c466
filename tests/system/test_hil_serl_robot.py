"""A robot as HIL-SERL's users have it, end to end: 7-D actions at 10 Hz, two cameras, interventions inside the Env."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from coded_replay import read_held
from gymnasium import spaces

from serl_chunk.cli.local import train_local
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, NormaliserConfig, ReplayConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.learner.building import RunOptions
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import Source

LIMIT = 12  # ticks
HUMAN_STEPS = (4, 7)  # on these steps of every second episode a human acts
SIDE = 32  # pixels; the layout of HIL-SERL's observations, not their size, is what is tested
HUMAN_ACTION = np.linspace(-0.6, 0.6, 7, dtype=np.float32)


class Insertion(gymnasium.Env):
    """Observations with a leading time axis, as SERLObsWrapper and ChunkingWrapper(1) give them."""

    def __init__(self) -> None:
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        frame = spaces.Box(0, 255, (1, SIDE, SIDE, 3), np.uint8)
        state = spaces.Box(-np.inf, np.inf, (1, 19), np.float32)
        self.observation_space = spaces.Dict({"state": state, "wrist_1": frame, "wrist_2": frame})
        self.episode = 0

    def _observation(self):
        state = np.full((1, 19), self.t, np.float32)
        frame = np.full((1, SIDE, SIDE, 3), 10 * self.episode % 200 + self.t, np.uint8)
        return {"state": state, "wrist_1": frame, "wrist_2": 255 - frame}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._observation(), {"succeed": False}

    def step(self, action):
        intervened = self.episode % 2 == 0
        info = {"succeed": intervened and self.t == LIMIT - 3}
        if intervened and HUMAN_STEPS[0] <= self.t < HUMAN_STEPS[1]:
            info["intervene_action"] = HUMAN_ACTION
        self.t += 1
        return self._observation(), int(info["succeed"]), info["succeed"] or self.t >= LIMIT, False, info


class InLeRobotsDialect(gymnasium.Wrapper):
    """The same, reported as gym-hil does: a flag on every tick, and success by the operator's key alone."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        human = info.pop("intervene_action", None)
        taught = {"is_intervention": human is not None, "teleop_action": action if human is None else human}
        if info.pop("succeed"):
            taught["next.success"] = True
        return observation, reward, terminated, truncated, taught


def experiment(make) -> ExperimentConfig:
    return ExperimentConfig(
        name="insertion",
        robot=GymConfig(make=lambda fake_env: make(), robot_name="franka", max_episode_steps=LIMIT),
        agent=AcfqlConfig(
            image_keys=("wrist_1", "wrist_2"), critic=CriticConfig(hidden=(16,), ensemble=2), candidates=4,
            flow=FlowConfig(hidden=(16,), steps=2), encoder=EncoderConfig(features=(4, 8), latent=8, shift=2),
        ),
        chunk=ChunkConfig(horizon=3),
        normaliser=NormaliserConfig(actions="absolute_range"),
        replay=ReplayConfig(capacity=2_000, demo_capacity=10, human_capacity=100, image_capacity=2_000),
        learner=LearnerConfig(
            batch_size=16, utd_ratio=0.5, max_steps=12, training_starts=30, warmup_episodes=4, steps_per_update=4,
            log_period=4, checkpoint_period=0,
        ),
        discount=0.9,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [Insertion, lambda: InLeRobotsDialect(Insertion())], ids=["hil_serl", "lerobot"])
def test_a_hil_serl_robot_trains_from_images_and_interventions(tmp_path, dialect):
    learner, summary = train_local(experiment(dialect), RunOptions([], str(tmp_path / "run")))
    assert learner.updates == 12
    metrics = read_metrics(tmp_path / "run")
    episodes = metrics["episode"]
    figures = [(e["intervention_steps"], e["intervention_count"], e["succeed"], e["episode/l"]) for e in episodes[:-1]]
    assert figures.count((3, 1, 1, LIMIT - 2)) >= 2
    # The end of training cuts the last one short; their time limit counts as truncation, not as failure.
    assert set(figures) == {(3, 1, 1, LIMIT - 2), (0, 0, 0, LIMIT)}
    losses = [row["critic/critic_loss"] for row in metrics["train"] if "critic/critic_loss" in row]
    assert losses
    assert np.isfinite(losses).all()

    human_ticks = 0
    for episode in (read_held(learner.replay, *key) for key in learner.replay.episodes()):
        human = episode.steps.source == Source.HUMAN
        human_ticks += int(human.sum())
        np.testing.assert_array_equal(episode.steps.action[human], np.tile(HUMAN_ACTION, (human.sum(), 1)))
    assert human_ticks >= 6
    assert summary.human_ticks >= human_ticks
    batch = learner.replay.sample(np.random.default_rng(0), 64)
    assert batch.observations["images/wrist_1"].shape == (64, SIDE, SIDE, 3)
    np.testing.assert_array_equal(batch.observations["images/wrist_2"], 255 - batch.observations["images/wrist_1"])
    np.testing.assert_array_equal(  # a window's pixels are of its own moment
        batch.observations["images/wrist_1"][:, 0, 0, 0] % 10, batch.observations["state"][:, 0] % 10
    )
