"""A learner with `agent.encoder.cache_features`: what is trained on, what is said, and what a resume has."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from learner_tools import by_kind, learner_of, let_go
from small_bases import FROZEN, use_small_backbones

from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.critic import SacCriticConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, LearnerConfig, ReplayConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.demos import load_demos
from serl_chunk.data.source import decode_images
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import check_replay_memory
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.replay import BatchLoader
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import Episode

pytestmark = [pytest.mark.compiles, pytest.mark.slow, pytest.mark.usefixtures("quick")]

FEATURES = "features/top"
CONFIG = ExperimentConfig(
    name="seen",
    robot=FakeAlohaConfig(image_size=8, max_episode_steps=110),
    agent=AcrlpdConfig(
        image_keys=("top",), encoder=dataclasses.replace(FROZEN, cache_features=True), hidden=(8,), candidates=1,
        critic=SacCriticConfig(hidden=(8,), ensemble=2, target_subset=1),
    ),
    chunk=ChunkConfig(5),
    replay=ReplayConfig(capacity=2_000, demo_capacity=500, human_capacity=200, image_capacity=600),
    learner=LearnerConfig(
        batch_size=8, utd_ratio=0.5, max_lag_steps=20, training_starts=4, max_steps=12, steps_per_update=20,
        checkpoint_period=0, log_period=4,
    ),
    seed=5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch):
    use_small_backbones(monkeypatch)


@pytest.fixture(scope="module")
def camera_demos(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("demos")
    run_record(CONFIG, 1, str(folder), policy="scripted", noise=None, cameras=("top",))
    return str(folder)


@pytest.fixture
def episode(camera_demos) -> Episode:
    (demo,) = load_demos([camera_demos], robot_spec(CONFIG.robot), cameras=("top",)).episodes
    return decode_images(demo)


def test_a_run_trains_on_features_and_acts_on_pixels(camera_demos, episode, tmp_path, caplog, monkeypatch):
    drawn, take = [], BatchLoader.next
    monkeypatch.setattr(BatchLoader, "next", lambda *args, **kw: drawn.append(take(*args, **kw)) or drawn[-1])
    learner, summary = train_local(CONFIG, RunOptions([camera_demos], str(tmp_path)))
    assert (learner.trainer.phase, learner.updates) == (Phase.DONE, 12)
    assert summary.steps == learner.env_steps > 12
    assert drawn
    seen = {"state", FEATURES}
    for name, batch in (each for batches in drawn for each in batches.items()):
        assert set(batch.observations) == seen
        assert set(batch.next_observations) == (set() if name == "policy" else seen)
    frames, said = len(episode.steps.sparse["images/top"].index) + 1, caplog.text
    assert said.count(f"{frames} features of stored observations computed in") == 1
    assert said.index("stored observations computed") < said.index("warm-up")  # before anything is trained
    assert by_kind(tmp_path)["train"][-1]["replay/features_held"] > frames
    assert learner.agent.update._cache_size() == 1


def test_a_resumed_run_computes_them_again_with_its_own_weights(camera_demos, episode, tmp_path, caplog):
    records = [(k, "actor/s", record) for k, record in enumerate(episode)]
    first = learner_of(CONFIG, camera_demos, tmp_path)
    for number, session, record in records:
        first.router.insert(session, record, number + 1)
    expected = first.replay.sample(np.random.default_rng(1), 64)
    first.checkpoint()
    let_go(first)

    # Another seed would draw another backbone: what the checkpoint has counts.
    second = learner_of(dataclasses.replace(CONFIG, seed=6), camera_demos, tmp_path)
    assert second.refill(records) == episode.steps.n
    missing, pieces = second.replay.features_missing, 0
    assert missing == 2 * (len(episode.steps.sparse["images/top"].index) + 1)
    while second.replay.features_missing:
        assert second.work()
        assert second.trainer.phase is Phase.PRETRAIN  # that of the checkpoint
        pieces += 1
    assert pieces == -(-missing // 64)
    assert f"{missing} features of stored observations computed in " in caplog.text
    found = second.replay.sample(np.random.default_rng(1), 64)
    assert np.ptp(expected.observations[FEATURES].astype(np.float32)) > 0.1
    for a, b in ((found.observations, expected.observations), (found.next_observations, expected.next_observations)):
        np.testing.assert_allclose(a[FEATURES], b[FEATURES], rtol=2e-3, atol=2e-3)
    assert second.replay.stats()["replay/features_computed"] == missing  # and a batch computed none
    let_go(second)


def test_a_run_without_has_nothing_of_it(camera_demos, tmp_path):
    plain = dataclasses.replace(CONFIG, agent=dataclasses.replace(CONFIG.agent, encoder=FROZEN))
    learners = [learner_of(c, camera_demos, tmp_path / name) for c, name in ((plain, "plain"), (CONFIG, "cached"))]
    batches = [learner.replay.sample(np.random.default_rng(1), 16) for learner in learners]
    assert set(batches[0].observations) == {"state", "images/top"}
    assert learners[0].replay.features_missing == 0
    assert learners[0].replay.estimated_bytes != learners[1].replay.estimated_bytes
    for c, learner in zip((plain, CONFIG), learners, strict=True):  # known before there are networks
        assert check_replay_memory(c, robot_spec(c.robot), learner.agent) == learner.replay.estimated_bytes
    inside = jax.jit(learners[0].agent.perception.vision.embed)(learners[0].base, batches[0].observations["images/top"])
    np.testing.assert_allclose(batches[1].observations[FEATURES], inside, rtol=2e-3, atol=2e-3)
    for learner in learners:
        let_go(learner)
