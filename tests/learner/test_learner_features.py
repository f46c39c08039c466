"""A learner with `agent.encoder.cache_features`: what is trained on, what is said, and what a resume has."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from learner_tools import by_kind, quick_agents

from serl_chunk.agents import vision
from serl_chunk.cli import learner as learner_command
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.critic import SacCriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig
from serl_chunk.config.learner import LearnerConfig
from serl_chunk.config.replay import ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.demos import load_demos
from serl_chunk.data.source import decode_images
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner, check_replay_memory
from serl_chunk.learner.schedule import Phase
from serl_chunk.models.encoder import Impala
from serl_chunk.replay.replay import BatchLoader
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.folder import open_run
from serl_chunk.types import Episode

pytestmark = pytest.mark.compiles

quick = pytest.fixture(autouse=True)(quick_agents)


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch):
    """A frozen backbone that compiles at once; its place and its treatment are ResNet-10's."""
    monkeypatch.setattr(vision, "make_backbone", lambda kind, features: Impala((2,), parent=None))


ENCODER = EncoderConfig(kind="resnet10", pooling="mean", latent=4, shift=0, frozen_backbone=True, cache_features=True)


def experiment(**learner) -> ExperimentConfig:
    settings = {
        "batch_size": 8, "utd_ratio": 0.5, "max_lag_steps": 20, "training_starts": 4, "max_steps": 12,
        "steps_per_update": 20, "checkpoint_period": 0, "log_period": 4,
    }  # fmt: skip
    return ExperimentConfig(
        name="seen",
        robot=FakeAlohaConfig(image_size=8, max_episode_steps=110),
        agent=AcrlpdConfig(
            image_keys=("top",),
            encoder=ENCODER,
            hidden=(8,),
            critic=SacCriticConfig(hidden=(8,), ensemble=2, target_subset=1),
            candidates=1,
        ),
        chunk=ChunkConfig(5),
        replay=ReplayConfig(capacity=2_000, demo_capacity=500, human_capacity=200, image_capacity=600),
        learner=LearnerConfig(**{**settings, **learner}),
        seed=5,
    )


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("demos")
    run_record(experiment(), 1, str(folder), policy="scripted", noise=None, cameras=("top",))
    return str(folder)


def episode_of(demos: str, config: ExperimentConfig) -> Episode:
    (demo,) = load_demos([demos], robot_spec(config.robot), cameras=("top",)).episodes
    return decode_images(demo)


@pytest.mark.slow
def test_a_run_trains_on_features_and_acts_on_pixels(demos, tmp_path, caplog, monkeypatch):
    drawn = []
    take = BatchLoader.next
    monkeypatch.setattr(BatchLoader, "next", lambda *args, **kw: drawn.append(take(*args, **kw)) or drawn[-1])
    config = experiment()
    learner, summary = train_local(config, RunOptions([demos], str(tmp_path)))
    assert (learner.trainer.phase, learner.updates) == (Phase.DONE, 12)
    assert summary.steps == learner.env_steps > 12
    assert drawn
    seen = {"state", "features/top"}
    for name, batch in (each for batches in drawn for each in batches.items()):
        assert set(batch.observations) == seen
        assert set(batch.next_observations) == (set() if name == "policy" else seen)
    frames = len(episode_of(demos, config).steps.sparse["images/top"].index) + 1
    said = caplog.text
    assert said.count(f"{frames} features of stored observations computed in") == 1
    assert said.index("stored observations computed") < said.index("warm-up")  # before anything is trained
    row = by_kind(tmp_path)["train"][-1]
    assert row["replay/features_held"] > frames
    assert learner.agent.update._cache_size() == 1


def build(config: ExperimentConfig, demos: str, run) -> Learner:
    spec = robot_spec(config.robot)
    return learner_command.make_learner(
        config, RunOptions([demos]), open_run(config, spec, str(run)), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip


def close(learner: Learner) -> None:
    learner.close()
    learner.metrics.close()


@pytest.mark.slow
def test_a_resumed_run_computes_them_again_with_its_own_weights(demos, tmp_path, caplog):
    config = experiment()
    online = episode_of(demos, config)
    records = [(k, "actor/s", record) for k, record in enumerate(online)]
    first = build(config, demos, tmp_path / "run")
    for number, session, record in records:
        first.router.insert(session, record, number + 1)
    expected = first.replay.sample(np.random.default_rng(1), 64)
    first.checkpoint()
    close(first)

    # Another seed would draw another backbone: what the checkpoint has counts.
    second = build(dataclasses.replace(config, seed=6), demos, tmp_path / "run")
    assert second.refill(records) == online.steps.n
    missing = second.replay.features_missing
    assert missing == 2 * (len(online.steps.sparse["images/top"].index) + 1)
    pieces = 0
    while second.replay.features_missing:
        assert second.work()
        assert second.trainer.phase is Phase.PRETRAIN  # that of the checkpoint
        pieces += 1
    assert pieces == -(-missing // 64)
    said = f"{missing} features of stored observations computed in "
    assert any(line.startswith(said) for line in caplog.messages)
    found = second.replay.sample(np.random.default_rng(1), 64)
    assert np.ptp(expected.observations["features/top"].astype(np.float32)) > 0.1
    for a, b in ((found.observations, expected.observations), (found.next_observations, expected.next_observations)):
        np.testing.assert_allclose(a["features/top"], b["features/top"], rtol=2e-3, atol=2e-3)
    assert second.replay.stats()["replay/features_computed"] == missing  # and a batch computed none
    close(second)


@pytest.mark.slow
def test_a_run_without_has_nothing_of_it(demos, tmp_path):
    config = experiment()
    encoder = dataclasses.replace(ENCODER, cache_features=False)
    plain = dataclasses.replace(config, agent=dataclasses.replace(config.agent, encoder=encoder))
    learners = [build(c, demos, tmp_path / name) for c, name in ((plain, "plain"), (config, "cached"))]
    batches = [learner.replay.sample(np.random.default_rng(1), 16) for learner in learners]
    assert set(batches[0].observations) == {"state", "images/top"}
    assert learners[0].replay.features_missing == 0
    assert learners[0].replay.estimated_bytes != learners[1].replay.estimated_bytes
    for c, learner in zip((plain, config), learners, strict=True):  # known before there are networks
        assert check_replay_memory(c, robot_spec(c.robot), learner.agent) == learner.replay.estimated_bytes
    inside = jax.jit(learners[0].agent.vision.embed)(learners[0].base, batches[0].observations["images/top"])
    np.testing.assert_allclose(batches[1].observations["features/top"], inside, rtol=2e-3, atol=2e-3)
    for learner in learners:
        close(learner)
