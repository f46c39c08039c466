"""What a learner is given to begin with: too short, too old, not imitated, or gone after a restart."""

from __future__ import annotations

import dataclasses

import pytest
from errors import naming
from learner_tools import learner_of, let_go, quick_agents
from point_robot import experiment, record_demos

from serl_chunk.agents.acfql import Acfql
from serl_chunk.cli.learner import make_learner, train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.config.experiment import ChunkConfig, NormaliserConfig
from serl_chunk.data.demos import load_demos
from serl_chunk.data.frames import observation_at
from serl_chunk.learner import demo_options as demos_command
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import InitialData, OfflineData
from serl_chunk.learner.schedule import Phase
from serl_chunk.replay.memory import available_bytes
from serl_chunk.replay.replay import Ready
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.folder import open_run
from serl_chunk.types import ConfigError, Outcome

pytestmark = pytest.mark.compiles

OFFLINE = {"pretrain_steps": 0, "offline_steps": 40, "online_steps": 0, "checkpoint_period": 20}

quick = pytest.fixture(autouse=True)(quick_agents)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


def cut_to(patch: pytest.MonkeyPatch, steps: int, outcome: Outcome = Outcome.UNKNOWN) -> None:
    """Demonstrations are the first so many steps of themselves: truncated there, or failed."""

    def cut(*args, **kwargs):
        loaded = load_demos(*args, **kwargs)
        failed = outcome is Outcome.FAILURE
        for i, (begin, block, end) in enumerate(loaded.episodes):
            end = end._replace(
                length=steps, final_observation=observation_at(block, steps), terminated=failed, truncated=not failed,
                outcome=outcome, reward=None,
            )  # fmt: skip
            loaded.episodes[i] = loaded.episodes[i]._replace(begin=begin, steps=block.slice(0, steps), end=end)
        return loaded

    patch.setattr(demos_command, "load_demos", cut)


def test_offline_training_without_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=naming("learner.offline_steps", "demo_path", "dataset_dir")):
        train_offline(experiment(**OFFLINE), RunOptions([], str(tmp_path)))
    with pytest.raises(ConfigError, match=naming("learner.online_steps", 0, "learner.offline_steps")):
        experiment(pretrain_steps=0, online_steps=0)
    with pytest.raises(ConfigError, match=naming("learner.online_steps", 20, "learner.training_starts")):
        experiment(online_steps=20)


@pytest.mark.parametrize(
    "phase", [{"offline_steps": 40, "online_steps": 0}, {"pretrain_steps": 40}, {"critic_pretrain_steps": 40}]
)
@pytest.mark.parametrize(("windows", "needed"), [("episode", 5), ("qc", 40)])  # of one episode, or of all
def test_data_shorter_than_a_window_are_refused_at_once(demos, tmp_path, monkeypatch, phase, windows, needed):
    cut_to(monkeypatch, 3)
    config = experiment(**{"pretrain_steps": 0} | phase)
    replay = dataclasses.replace(config.replay, windows=windows, terminal_windows="drop")
    config = dataclasses.replace(config, chunk=ChunkConfig(needed), replay=replay)
    with pytest.raises(ConfigError, match=naming(needed, 36, 12, "chunk.horizon", "learner.pretrain_steps")):
        learner_of(config, demos, tmp_path)


@pytest.mark.parametrize(
    ("learner", "outcome"),
    [
        ({"pretrain_steps": 0}, Outcome.UNKNOWN),
        ({"pretrain_steps": 0, "offline_steps": 40}, Outcome.FAILURE),
    ],  # a failure ends a window
)
def test_short_data_that_no_phase_trains_on_or_that_end_are_not_refused(demos, tmp_path, monkeypatch, learner, outcome):
    cut_to(monkeypatch, 3, outcome)
    learner = learner_of(dataclasses.replace(experiment(**learner), chunk=ChunkConfig(5)), demos, tmp_path)
    assert bool(learner.replay.ready.demo) is (outcome is Outcome.FAILURE)
    let_go(learner)


@pytest.mark.parametrize(
    ("outcome", "bc_on", "named"),
    [
        (
            Outcome.FAILURE,
            "+successes",
            ("learner.pretrain_steps", 12, "agent.bc_on", "+successes"),
        ),
        (
            Outcome.UNKNOWN,
            "interventions",
            ("learner.pretrain_steps", 12, "agent.bc_on", "interventions", "agent.bc_on=demo"),
        ),
        (Outcome.UNKNOWN, "demo", None),
    ],
)
def test_pretraining_on_what_is_not_imitated_is_refused(demos, tmp_path, monkeypatch, outcome, bc_on, named):
    cut_to(monkeypatch, 3, outcome)
    config = experiment(pretrain_steps=40)
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, bc_on=bc_on))
    if named is None:
        let_go(learner_of(config, demos, tmp_path))
        return
    with pytest.raises(ConfigError, match=naming(*named)):
        learner_of(config, demos, tmp_path)
    learner = dataclasses.replace(config.learner, pretrain_steps=0)
    let_go(learner_of(dataclasses.replace(config, learner=learner), demos, tmp_path))


def test_a_run_that_is_past_its_data_goes_on_without_a_window_in_them(demos, tmp_path):
    config = experiment(pretrain_steps=20, offline_steps=10, checkpoint_period=0)
    past, within = str(tmp_path / "past"), str(tmp_path / "within")
    for run, until in ((past, Phase.WARMUP), (within, Phase.OFFLINE)):
        learner = learner_of(config, demos, run)
        while learner.trainer.phase is not until:
            learner.work()
        let_go(learner)
    with pytest.MonkeyPatch.context() as patch:
        cut_to(patch, 1)
        learner = learner_of(config, demos, past)
        assert (learner.trainer.phase, learner.replay.ready.demo) == (Phase.WARMUP, 0)
        let_go(learner)
        with pytest.raises(ConfigError, match=naming(2, 12, "chunk.horizon")):
            learner_of(config, demos, within)


def test_a_run_goes_on_with_its_own_normaliser_where_no_new_one_can_be_made(demos, tmp_path, caplog):
    config = experiment(pretrain_steps=20, offline_steps=10, checkpoint_period=0)
    config = dataclasses.replace(config, normaliser=NormaliserConfig(actions="absolute_demo"))
    run = str(tmp_path / "run")
    learner = learner_of(config, demos, run)
    while learner.trainer.phase is not Phase.WARMUP:
        learner.work()
    digest = learner.preprocess.digest()
    let_go(learner)
    spec = robot_spec(config.robot)
    alone = dataclasses.replace(config, learner=dataclasses.replace(config.learner, pretrain_steps=0, offline_steps=0))
    without = lambda config, run: make_learner(  # noqa: E731
        config, RunOptions([]), open_run(config, spec, run), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip
    learner = without(alone, run)
    assert learner.preprocess.digest() == digest
    said = "the run's own normaliser goes on; a new one could not be fitted: normaliser.actions: "
    assert said in caplog.text
    let_go(learner)
    with pytest.raises(ConfigError, match=naming("normaliser.actions", "absolute_demo", "demo_path")):  # a fresh one
        without(alone, str(tmp_path / "fresh"))


def test_demonstrations_whose_images_are_too_old_are_told_from_short_ones():
    class Blind:
        ready = Ready(steps=0, online=0, demo=0, windows=0)
        window_steps = 5

        def add_demo(self, *episodes):
            pass

        def stats(self):
            return {"replay/demo_rows": 102, "replay/demo_episodes": 2, "replay/excluded_share": 1.0}

    with pytest.raises(ConfigError, match=naming(5, 100, 2, "replay.max_image_age")):
        OfflineData(Blind(), InitialData(), seek=None, seen=lambda episodes: None).require_window()


@pytest.mark.skipif(available_bytes() is None, reason="this system does not tell its memory")
def test_a_replay_beyond_the_memory_is_refused_before_networks_are_built(tmp_path, monkeypatch):
    def build(self, key):
        raise AssertionError("networks are built")

    monkeypatch.setattr(Acfql, "init", build)
    config = experiment(pretrain_steps=0)
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, capacity=10**12))
    with pytest.raises(ConfigError, match=naming("replay.capacity", "MiB are available")):
        train_local(config, RunOptions([], str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
