"""When a learner evaluates, and what that leaves: rows, files, and training as it was."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from errors import naming
from learner_tools import by_kind, quick_agents
from point_robot import PointEnv, experiment, record_demos

from serl_chunk.cli.learner import make_learner, train_offline
from serl_chunk.cli.local import train_local
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import GymConfig
from serl_chunk.evaluation.by_learner import OwnEvaluation
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.learner import Learner
from serl_chunk.learner.schedule import Phase
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.checkpoints import host_leaves
from serl_chunk.runs.folder import open_run
from serl_chunk.runs.metrics import Counters, read_metrics
from serl_chunk.runs.report.report import build_report
from serl_chunk.types import EVAL_SEED_BASE, ConfigError, SerlChunkError, Snapshot

pytestmark = pytest.mark.compiles

EVALUATED = {"eval_interval": 20, "eval_episodes": 3}
OFFLINE = {"pretrain_steps": 0, "offline_steps": 50, "online_steps": 0, "checkpoint_period": 25}

quick = pytest.fixture(autouse=True)(quick_agents)


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    return record_demos(tmp_path_factory.mktemp("demos"), 12)


def evaluated(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run)["eval"]]


def built(config: ExperimentConfig, demos: str, run: Path) -> Learner:
    spec = robot_spec(config.robot)
    return make_learner(
        config, RunOptions([demos]), open_run(config, spec, str(run)), spec,
        publish=lambda snapshot, info: None, threaded=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_curve_of_a_run_from_offline_to_online(demos, tmp_path):
    config = experiment(offline_steps=50, max_steps=40, checkpoint_period=0, **EVALUATED)
    learner, _ = train_local(config, RunOptions([demos], str(tmp_path)))
    assert evaluated(tmp_path) == [20, 40, 50, 60, 80, 90]  # 50: the offline phase ends there; 90: training does
    rows = read_metrics(tmp_path)["eval"]
    for row in rows:
        assert (row["n"], row["mode"], row["by"], row["checkpoint"]) == (3, "mean", "learner", row["step"])
        assert row["low"] <= row["success_rate"] <= row["high"]
        assert row["mean_return"] == pytest.approx(row["success_rate"])  # the robot's reward is 1 at success
        assert 1 <= row["mean_length"] <= 10
        assert row["seconds"] > 0
    assert [row["env_steps"] for row in rows[:3]] == [0, 0, 0]
    assert rows[-1]["env_steps"] == learner.env_steps
    saved = json.loads((tmp_path / "evaluations" / "learner_60.json").read_text())
    assert (saved["checkpoint"], saved["purpose"]) == (60, "learner")
    assert [e["seed"] for e in saved["results"][0]["episodes"]] == [EVAL_SEED_BASE + i for i in range(3)]
    page = build_report(tmp_path).read_text()
    assert "policy of checkpoint 90" in page


def test_training_is_the_same_with_evaluations_and_without(demos, tmp_path, monkeypatch):
    reset = PointEnv.reset

    def careless(self, **kwargs):  # as simulators are that draw from the generators of their whole process
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        return reset(self, **kwargs)

    kept: list[bool] = []
    evaluate = OwnEvaluation.__call__

    def watched(self, learner, snapshot):
        before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PointEnv, "reset", careless)
            evaluate(self, learner, snapshot)
        kept.append((random.getstate(), np.random.get_state()[1].tolist()) == before)  # noqa: NPY002

    monkeypatch.setattr(OwnEvaluation, "__call__", watched)
    config = experiment(offline_steps=30, max_steps=30)
    plain, _ = train_local(config, RunOptions([demos], str(tmp_path / "plain")))
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, **EVALUATED))
    watched_run, _ = train_local(config, RunOptions([demos], str(tmp_path / "watched")))
    assert kept == [True] * 4
    left, right = host_leaves(plain.state), host_leaves(watched_run.state)
    for path in left:
        assert left[path].tobytes() == right[path].tobytes(), path
    with_them, without = by_kind(tmp_path / "watched"), by_kind(tmp_path / "plain")
    assert len(with_them.pop("eval")) == 4
    assert with_them == without


def test_the_time_of_evaluations_is_no_time_of_training(demos, tmp_path, monkeypatch):
    seconds, steps = 0.6, []

    def slow(self, learner, snapshot):
        steps.append(learner.updates)
        threading.Event().wait(seconds)

    monkeypatch.setattr(OwnEvaluation, "__call__", slow)
    config = experiment(**OFFLINE | EVALUATED)
    learner = built(config, demos, tmp_path)
    start = time.perf_counter()
    wall = learner.metrics.wall()
    while learner.trainer.phase is not Phase.DONE:
        learner.work()
    took, counted = time.perf_counter() - start, learner.metrics.wall() - wall
    learner.close()
    learner.metrics.close()
    assert steps == [20, 40, 50]
    assert took - counted >= 3 * seconds  # the run's clock stood still
    assert learner.stats.evaluation_seconds >= 3 * seconds
    rows = read_metrics(tmp_path)["train"]
    spent = sum(config.learner.log_period / row["rates/updates_per_s"] for row in rows)
    assert spent <= took - 2 * seconds  # two of them lie between rows


def test_an_evaluation_that_is_cut_short_is_made_up_for(demos, tmp_path, monkeypatch):
    stop, config = threading.Event(), experiment(**OFFLINE | EVALUATED)
    step = PointEnv.step

    def stopping(self, action):
        stop.set()
        return step(self, action)

    with monkeypatch.context() as patch:
        patch.setattr(PointEnv, "step", stopping)
        half = train_offline(config, RunOptions([demos], str(tmp_path), n_envs=2), stop=stop)
    assert half.updates == 20
    assert evaluated(tmp_path) == []
    train_offline(config, RunOptions([demos], str(tmp_path), n_envs=2))
    assert evaluated(tmp_path) == [20, 40, 50]
    train_offline(config, RunOptions([demos], str(tmp_path)))  # it is over: nothing is evaluated again
    assert evaluated(tmp_path) == [20, 40, 50]


def test_a_real_robot_is_not_moved_by_a_learner(demos, tmp_path):
    config = experiment(**OFFLINE | EVALUATED)
    real = dataclasses.replace(config, robot=dataclasses.replace(config.robot, is_real=True))
    with pytest.raises(ConfigError, match=naming("learner.eval_interval", 20, "--eval_checkpoint_step")):
        train_offline(real, RunOptions([demos], str(tmp_path / "real")))
    live = dataclasses.replace(config, actor=dataclasses.replace(config.actor, clock="realtime"))
    with pytest.raises(ConfigError, match=naming("learner.eval_interval", "--config.actor.clock", "lockstep")):
        train_offline(live, RunOptions([demos], str(tmp_path / "live")))
    with pytest.raises(ConfigError, match=naming("learner.video_episodes", 4, "learner.eval_episodes", 3)):
        experiment(video_episodes=4, **EVALUATED)


class Dark(gymnasium.Wrapper):
    """Cannot draw what its camera sees."""

    def __init__(self, fake_env: bool) -> None:
        super().__init__(PointEnv())
        images = gymnasium.spaces.Dict({"top": gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)})
        self.observation_space = gymnasium.spaces.Dict({"state": self.env.observation_space, "images": images})

    def reset(self, **kwargs):
        raise RuntimeError("no EGL here")


def test_what_filming_needs_is_looked_at_before_anything_is_trained(demos, tmp_path, monkeypatch):
    monkeypatch.setattr("serl_chunk.evaluation.by_learner.ffmpeg_program", lambda: "ffmpeg")
    blind = experiment(**OFFLINE | EVALUATED, video_episodes=2)
    dark = dataclasses.replace(blind, robot=GymConfig(make=Dark, robot_name="point", max_episode_steps=10))
    for config, named in ((blind, ("point", 0)), (dark, ("RuntimeError: no EGL here", "MUJOCO_GL"))):
        with pytest.raises(ConfigError, match=naming("learner.video_episodes", 2, *named)):
            train_offline(config, RunOptions([demos], str(tmp_path)))


def test_a_simulator_that_gives_up_costs_one_evaluation_and_no_training(tmp_path, monkeypatch, caplog):
    class Unstable(Exception):
        """As simulators have them: no SerlChunkError, no OSError."""

    def gives_up(*_: object, **__: object) -> None:
        (videos / "new.mp4").touch()
        raise Unstable("the arm left the world")

    videos = tmp_path / "videos" / "40_mean"
    videos.mkdir(parents=True)
    (videos / "old.mp4").touch()
    config = experiment(**OFFLINE | EVALUATED)
    own = OwnEvaluation(config, None, lambda: False)
    learner = SimpleNamespace(
        counters=lambda: Counters(40, 0, 0), metrics=SimpleNamespace(run_dir=tmp_path), preprocess=None
    )
    monkeypatch.setattr("serl_chunk.evaluation.rollouts.policy_of", gives_up)
    own(learner, Snapshot(40, {}))
    [line] = caplog.messages
    assert line.startswith("the evaluation at step 40 failed and is left out; training goes on ")
    assert f"(Unstable: the arm left the world, raised in {__file__}, line " in line
    assert ([p.name for p in videos.iterdir()], [*tmp_path.iterdir()]) == (["old.mp4"], [tmp_path / "videos"])

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("serl_chunk.evaluation.rollouts.policy_of", interrupted)
    with pytest.raises(KeyboardInterrupt):  # no failure of the simulator's
        own(learner, Snapshot(40, {}))
    own.close()


def test_an_evaluation_of_two_modes_leaves_both_or_nothing(tmp_path, monkeypatch):
    """By a row of one of them a resume would take it for complete."""
    rows, episodes = [], iter([3, 2, 3, 3])

    def evaluate(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(episodes=next(episodes), figures=dict, starts_repeat=False, to_json=dict)

    monkeypatch.setattr("serl_chunk.evaluation.rollouts.policy_of", lambda *_: None)
    monkeypatch.setattr("serl_chunk.evaluation.rollouts.evaluate", evaluate)
    metrics = SimpleNamespace(run_dir=tmp_path, evaluation=lambda counters, **fields: rows.append(fields))
    learner = SimpleNamespace(counters=lambda: Counters(5, 0, 0), metrics=metrics, preprocess=None)
    own = OwnEvaluation(configured(experiment(**EVALUATED), preset="ript-flow-sde"), None, lambda: True)
    for kept in (0, 2):
        own(learner, Snapshot(5, {}))
        assert len(rows) == kept
    own.close()


def test_what_else_goes_on_does_so_during_an_evaluation(demos, tmp_path):
    config = experiment(**OFFLINE | EVALUATED)
    seen: list[bool] = []
    learner = built(config, demos, tmp_path / "a")
    learner.run(threading.Event(), lambda: seen.append(learner.status()["evaluating"]))
    assert seen.count(True) > 3 * EVALUATED["eval_episodes"]  # within the episodes
    assert not learner.stats.evaluating
    learner.close()
    learner.metrics.close()

    def transport_stopped() -> None:
        if broken.stats.evaluating:
            raise SerlChunkError("the transport stopped")

    broken = built(config, demos, tmp_path / "b")
    with pytest.raises(SerlChunkError, match="the transport stopped"):  # no failure of the evaluation
        broken.run(threading.Event(), transport_stopped)
    broken.close()
    broken.metrics.close()
