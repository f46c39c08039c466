"""What a learner is given to begin with: too short, too old, not imitated, or gone after a restart."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest
from errors import naming
from learner_tools import learner_of, let_go, until
from point_robot import experiment
from small_bases import FROZEN, use_small_backbones
from small_bases import experiment as small_experiment

from serl_chunk.agents.acfql import Acfql
from serl_chunk.cli.learner import train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ChunkConfig
from serl_chunk.config.robots import LiberoConfig
from serl_chunk.data.demos import load_demos
from serl_chunk.data.frames import observation_at
from serl_chunk.data.source import decode_images
from serl_chunk.learner import offline_data as demos_command
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.memory import available_bytes
from serl_chunk.replay.replay import Ready
from serl_chunk.robots.registry import robot_spec
from serl_chunk.types import Begin, ConfigError, Outcome

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick")]

FAILURE, UNKNOWN = Outcome.FAILURE, Outcome.UNKNOWN


@pytest.fixture
def cut_to(monkeypatch):
    """Demonstrations are the first so many steps of themselves: truncated there, or failed."""

    def set_length(steps: int, outcome: Outcome = UNKNOWN) -> None:
        failed = outcome is FAILURE

        def cut(*args, **kwargs):
            loaded = load_demos(*args, **kwargs)
            for i, (_, block, end) in enumerate(loaded.episodes):
                end = end._replace(
                    length=steps, final_observation=observation_at(block, steps), terminated=failed,
                    truncated=not failed, outcome=outcome, reward=None,
                )  # fmt: skip
                loaded.episodes[i] = loaded.episodes[i]._replace(steps=block.slice(0, steps), end=end)
            return loaded

        monkeypatch.setattr(demos_command, "load_demos", cut)

    return set_length


OFFLINE = {"pretrain_steps": 0, "offline_steps": 40, "online_steps": 0}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: train_offline(experiment(**OFFLINE), RunOptions([])),
            ("learner.offline_steps", "demo_path", "dataset_dir"),
        ),
        (lambda: experiment(pretrain_steps=0, online_steps=0), ("learner.online_steps", 0, "learner.offline_steps")),
        (lambda: experiment(online_steps=20), ("learner.online_steps", 20, "learner.training_starts")),
    ],
)
def test_training_without_data_or_steps_is_refused(make, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=naming(*named)):
        make()


@pytest.mark.parametrize(
    ("phase", "windows", "needed"),  # of one episode, or of all
    [({"offline_steps": 40, "online_steps": 0}, "episode", 5), ({"pretrain_steps": 40}, "qc", 40)],
)
def test_data_shorter_than_a_window_are_refused_at_once(demos, tmp_path, cut_to, phase, windows, needed):
    cut_to(3)
    config = experiment(**{"pretrain_steps": 0} | phase)
    replay = dataclasses.replace(config.replay, windows=windows, terminal_windows="drop")
    config = dataclasses.replace(config, chunk=ChunkConfig(needed), replay=replay)
    with pytest.raises(ConfigError, match=naming(needed, 36, 12, "chunk.horizon", "learner.pretrain_steps")):
        learner_of(config, demos, tmp_path)


def test_short_data_that_end_in_a_failure_are_not_refused(demos, tmp_path, cut_to):
    cut_to(3, FAILURE)  # which ends a window
    config = dataclasses.replace(experiment(pretrain_steps=0, offline_steps=40), chunk=ChunkConfig(5))
    learner = learner_of(config, demos, tmp_path)
    assert learner.replay.ready.demo
    let_go(learner)


@pytest.mark.parametrize(("outcome", "said"), [(FAILURE, "no success"), (None, "no failure")])
def test_a_critic_of_data_with_one_outcome_is_named(demos, tmp_path, cut_to, caplog, outcome, said):
    if outcome is not None:
        cut_to(3, outcome)  # which ends a window
    let_go(learner_of(experiment(pretrain_steps=0, offline_steps=40), demos, tmp_path))
    assert f"{said} among 12 demonstrations" in caplog.text


@pytest.mark.parametrize(("outcome", "bc_on", "named"), [
    (FAILURE, "+successes", ("agent.bc_on", "+successes")),
    (UNKNOWN, "interventions", ("agent.bc_on", "interventions", "agent.bc_on=demo")), (UNKNOWN, "demo", ()),
])  # fmt: skip
def test_pretraining_on_what_is_not_imitated_is_refused(demos, tmp_path, cut_to, outcome, bc_on, named):
    cut_to(3, outcome)

    def begin(steps: int) -> None:
        config = experiment(pretrain_steps=steps)
        agent = dataclasses.replace(config.agent, bc_on=bc_on)
        let_go(learner_of(dataclasses.replace(config, agent=agent), demos, tmp_path))

    if named:
        with pytest.raises(ConfigError, match=naming("learner.pretrain_steps", 12, *named)):
            begin(40)
    begin(0 if named else 40)


def test_a_run_that_is_past_its_data_goes_on_without_a_window_in_them(demos, tmp_path, cut_to):
    config = experiment(pretrain_steps=20, offline_steps=10, checkpoint_period=0)
    for phase in (Phase.WARMUP, Phase.OFFLINE):
        learner = learner_of(config, demos, tmp_path / phase)
        until(learner, phase)
        let_go(learner)
    cut_to(1)
    learner = learner_of(config, demos, tmp_path / Phase.WARMUP)
    assert (learner.trainer.phase, learner.replay.ready.demo) == (Phase.WARMUP, 0)
    let_go(learner)
    with pytest.raises(ConfigError, match=naming(2, 12, "chunk.horizon")):
        learner_of(config, demos, tmp_path / Phase.OFFLINE)


def test_demonstrations_whose_images_are_too_old_are_told_from_short_ones():
    class Blind:
        ready, window_steps = Ready(steps=0, online=0, demo=0, windows=0), 5
        add_demo = staticmethod(lambda *episodes: None)
        stats = staticmethod(lambda: {"replay/demo_rows": 102, "replay/demo_episodes": 2, "replay/excluded_share": 1.0})

    with pytest.raises(ConfigError, match=naming(5, 100, 2, "replay.max_image_age")):
        OfflineData(Blind(), InitialData(), seek=None, seen=lambda episodes: None).require_window()


@pytest.mark.skipif(available_bytes() is None, reason="this system does not tell its memory")
def test_a_replay_beyond_the_memory_is_refused_before_networks_are_built(tmp_path, monkeypatch):
    monkeypatch.setattr(Acfql, "init", None)
    config = experiment(pretrain_steps=0)
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, capacity=10**12))
    with pytest.raises(ConfigError, match=naming("replay.capacity", "MiB are available")):
        train_local(config, RunOptions([], str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_computes_features_again_with_its_own_weights(tmp_path, caplog, monkeypatch):
    use_small_backbones(monkeypatch)
    of = small_experiment(dataclasses.replace(FROZEN, cache_features=True))
    robot, replay = (
        dataclasses.replace(of.robot, max_episode_steps=110),
        dataclasses.replace(of.replay, image_capacity=600),
    )
    of = dataclasses.replace(of, robot=robot, replay=replay, learner=dataclasses.replace(of.learner, pretrain_steps=20))
    demos = str(tmp_path / "demos")
    run_record(of, 1, demos, policy="scripted", noise=None, cameras=("top",))
    (demo,) = load_demos([demos], robot_spec(of.robot), cameras=("top",)).episodes
    records = [(k, "actor/s", record) for k, record in enumerate(decode_images(demo))]
    first = learner_of(of, demos, tmp_path / "run")
    for number, session, record in records:
        first.router.insert(session, record, number + 1)
    expected = first.replay.sample(np.random.default_rng(1), 64)
    first.checkpoint()
    let_go(first)

    # Another seed would draw another backbone: what the checkpoint has counts.
    second = learner_of(dataclasses.replace(of, seed=6), demos, tmp_path / "run")
    assert second.refill(records) == demo.steps.n
    missing, pieces = second.replay.features_missing, 0
    assert missing == 2 * (len(demo.steps.sparse["images/top"].index) + 1)
    while second.replay.features_missing:
        assert second.work()
        assert second.trainer.phase is Phase.PRETRAIN  # that of the checkpoint
        pieces += 1
    assert pieces == -(-missing // 64)
    assert f"{missing} features of stored observations computed in " in caplog.text
    found = second.replay.sample(np.random.default_rng(1), 64)
    assert np.ptp(expected.observations["features/top"].astype(np.float32)) > 0.1
    for a, b in ((found.observations, expected.observations), (found.next_observations, expected.next_observations)):
        np.testing.assert_allclose(a["features/top"], b["features/top"], rtol=2e-3, atol=2e-3)
    assert second.replay.stats()["replay/features_computed"] == missing  # and a batch computed none
    let_go(second)


def test_an_agent_that_reads_language_is_warned_of_tasks_without_demonstrations_and_of_these_without_texts(caplog):
    robot = LiberoConfig(env_name="libero_goal")
    demos = [Mock(begin=Begin(str(i), text, "libero", "")) for i, text in enumerate((*robot.tasks[:8], robot.tasks[0]))]
    demos_command._log_texts(Mock(robot=robot), Mock(episodes=demos))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(repr(task) in warning for task in robot.tasks[8:])
    assert repr(robot.tasks[0]) not in warning
    caplog.clear()
    demos_command._log_texts(Mock(robot=robot), Mock(episodes=[Mock(begin=Begin("0", "", "libero", ""))]))
    assert "1 demonstration without a text" in caplog.text
