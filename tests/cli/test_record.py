"""Scripted demonstrations: successes only, every start state once, also where a recording goes on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from actor_helpers import HumanOnTicks, LineEnv, ListSink, make_config
from errors import naming

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.cli import record
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.main import main
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import ConfigError, DataError, Outcome, Source

CONFIG = load("fake_aloha", [])


class SometimesFails:
    """The scripted expert, except from every third start state, where it commands zeros."""

    def __init__(self, expert) -> None:
        self._expert = expert

    def reset(self, seed: int) -> None:
        self._seed = seed
        self._expert.reset(seed)

    def act(self):
        command = self._expert.act()
        return command * 0 if self._seed % 3 == 1 else command


@pytest.fixture
def unreliable(monkeypatch):
    real = record.make_expert
    monkeypatch.setattr(record, "make_expert", lambda env: SometimesFails(real(env)))


def demos(folder):
    files = sorted(folder.glob("*.hdf5"), key=lambda f: int(f.stem.removeprefix("episode_")))
    return [read_episode(f) for f in files]


def record_until(n: int, folder, **changes) -> int:
    return run_record(CONFIG, n, str(folder), **{"policy": "scripted", "noise": None, "cameras": (), **changes})


def test_a_recording_that_goes_on_repeats_no_start_state(tmp_path, unreliable, caplog):
    caplog.set_level("INFO", "serl_chunk")
    assert record_until(3, tmp_path) == 0
    assert record_until(5, tmp_path) == 0
    episodes = demos(tmp_path)
    assert [e.begin.init_state for e in episodes] == ["seed-0", "seed-2", "seed-3", "seed-5", "seed-6"]
    assert len({e.steps.action.tobytes() for e in episodes}) == 5
    assert all(e.end.outcome is Outcome.SUCCESS and e.end.terminated for e in episodes)
    assert record_until(5, tmp_path) == 0  # complete: nothing is recorded
    out = caplog.text
    assert "3 demonstrations recorded in 4 episodes" in out
    assert "2 demonstrations recorded in 3 episodes" in out
    assert "already holds 5 demonstrations" in out
    assert len(demos(tmp_path)) == 5


def test_a_folder_of_another_robot_is_not_added_to(tmp_path):
    assert record_until(1, tmp_path) == 0
    with pytest.raises(ConfigError, match=naming("fake_aloha", "episode_0.hdf5", "fake_single_arm", "--out")):
        run_record(load("fake_single_arm", []), 1, str(tmp_path), policy="scripted", noise=None, cameras=())
    assert len(demos(tmp_path)) == 1


def test_a_damaged_file_among_them_is_named(tmp_path):
    (tmp_path / "episode_0.hdf5").write_bytes(b"x")
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "HDF5")):
        record_until(2, tmp_path)


def test_an_expert_that_never_succeeds_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeRunner, "run_episode", lambda self, seed, **_: EpisodeSummary(seed=seed))
    with pytest.raises(ConfigError, match=naming("expert", 21)):
        record_until(1, tmp_path)


def test_noise_needs_an_expert_that_has_some(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "make_expert", lambda env: object())
    with pytest.raises(ConfigError, match=naming("fake_aloha", "--noise")):
        record_until(1, tmp_path, noise=0.1)


def test_the_cameras_that_the_agent_looks_at_are_recorded_unless_others_are_named(monkeypatch):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(record, "run_record", lambda *a, **kw: asked.append(kw["cameras"]) or 0)
    for flags in ([], ["--cameras", "top"], ["--cameras", "all"], ["--cameras", "none"], ["--cameras="]):
        assert main(["record", "--exp_name", "fake_aloha_images", "--out", "x", *flags]) == 0
    every = ("top", "left_wrist", "right_wrist")
    assert asked == [every, ("top",), every, (), ()]
    asked.clear()
    assert main(["record", "--exp_name", "fake_aloha", "--out", "x"]) == 0
    assert asked == [()]  # whose agent looks at none


def test_a_folder_without_frames_takes_none_with_them(tmp_path):
    assert record_until(1, tmp_path) == 0
    for n in (1, 2):  # complete or not
        with pytest.raises(ConfigError, match=naming("'top'", "episode_0.hdf5", "--out")):
            record_until(n, tmp_path, cameras=("top",))
    assert len(demos(tmp_path)) == 1
    filmed = tmp_path / "filmed"
    for n in (1, 2):
        assert record_until(n, filmed, cameras=("top",)) == 0
    assert [len(e.steps.sparse["images/top"].index) for e in demos(filmed)] == [e.steps.n for e in demos(filmed)]


class Seconds:
    """A clock on which only waiting takes time."""

    def __init__(self) -> None:
        self.time, self.waits = 50.0, 0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.waits += 1
        self.time = max(self.time, moment)


@pytest.mark.parametrize("is_real", [True, False])
def test_a_real_robot_is_recorded_at_its_rate_and_a_simulator_at_once(is_real):
    env = make_env(CONFIG.robot)  # whose steps take no time, as of an environment that does not sleep
    sink, clock = ListSink(), Seconds()
    config = dataclasses.replace(CONFIG, robot=GymConfig(make=lambda fake_env: None, is_real=is_real))
    runner = EpisodeRunner(env, make_expert(env), sink, config=config, clock=clock)
    summaries = [runner.run_episode(seed) for seed in range(2)]
    runner.close()
    assert all(s.success for s in summaries)
    assert {s.source for s in sink.steps} == {Source.SCRIPTED}
    stamps = np.array([s.stamp for s in sink.steps[: summaries[0].length]])
    start = 50.0 if is_real else 0.0
    np.testing.assert_allclose(stamps - start, np.arange(len(stamps)) * env.robot_spec.dt, atol=1e-9)
    assert clock.waits == (sum(s.length for s in summaries) if is_real else 0)
    if not is_real:
        assert sink.steps[summaries[0].length].stamp == 0.0  # each demonstration counts from 0
    env.close()


class Wild:
    """Commands far beyond the robot's limits."""

    def reset(self, seed: int) -> None:
        pass

    def act(self) -> np.ndarray:
        return np.array([7.0, -7.0])


def test_a_demonstrators_commands_stay_within_the_limits():
    sink = ListSink()
    summary = EpisodeRunner(LineEnv(length=5), Wild(), sink, config=make_config()).run_episode(3)
    assert {tuple(s.action) for s in sink.steps} == {(1.0, -1.0)}
    assert (summary.outcome, sink.last_end.truncated) == (Outcome.UNKNOWN, True)  # a time-out is no failure


def test_a_human_takes_over_from_a_demonstrator_or_from_nothing():
    """Without a policy the robot holds until the human acts: a recording by hand."""
    for demonstrator, source in ((Wild(), Source.SCRIPTED), (None, Source.HOLD)):
        sink, human = ListSink(), HumanOnTicks(frozenset({2, 3}), idle=frozenset({3}))
        runner = EpisodeRunner(LineEnv(length=6), demonstrator, sink, config=make_config(), intervention=human)
        summary = runner.run_episode(0)
        expected = [source, source, Source.HUMAN, Source.HOLD, source, source]
        assert [s.source for s in sink.steps] == expected
        assert {(s.decision_tick, s.policy_version, s.policy_age) for s in sink.steps} == {(-1, -1, -1.0)}
        assert (summary.human_ticks, summary.segments) == (2, 1)
