"""Scripted demonstrations: successes only, every start state once, also where a recording goes on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming

from serl_chunk.cli import record
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.robots import GymConfig
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.main import main
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import ConfigError, DataError, End, Outcome, Step

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


def test_a_recording_that_goes_on_repeats_no_start_state(tmp_path, unreliable, capsys):
    assert record_until(3, tmp_path) == 0
    assert record_until(5, tmp_path) == 0
    episodes = demos(tmp_path)
    assert [e.begin.init_state for e in episodes] == ["seed-0", "seed-2", "seed-3", "seed-5", "seed-6"]
    assert len({e.steps.action.tobytes() for e in episodes}) == 5
    assert all(e.end.outcome is Outcome.SUCCESS and e.end.terminated for e in episodes)
    assert record_until(5, tmp_path) == 0  # complete: nothing is recorded
    out = capsys.readouterr().out
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
    monkeypatch.setattr(record, "record_episode", lambda *_: (False, 1))
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
    """A clock on which only waiting and `cost` seconds per look take time."""

    def __init__(self, cost: float = 0.0) -> None:
        self.time, self.cost, self.waits = 50.0, cost, 0

    def now(self) -> float:
        self.time += self.cost
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.waits += 1
        self.time = max(self.time, moment)


@pytest.mark.parametrize("is_real", [True, False])
def test_a_real_robot_is_recorded_at_its_rate_and_a_simulator_at_once(is_real):
    env = make_env(CONFIG.robot)  # whose steps take no time, as of an environment that does not sleep
    robot = GymConfig(make=lambda fake_env: None, is_real=is_real)
    records: list = []

    class Sink:
        begin = step = end = staticmethod(records.append)

    clock = Seconds(cost=1e-3)
    config = dataclasses.replace(CONFIG, robot=robot)
    success, length = record.record_episode(env, make_expert(env), Sink, config, 0, (), clock)
    stamps = np.array([r.stamp for r in records if isinstance(r, Step)])
    assert success
    assert isinstance(records[-1], End)
    assert len(stamps) == length
    if is_real:
        assert clock.waits == length
        np.testing.assert_allclose(stamps - 50.0, 2e-3 + np.arange(length) * env.robot_spec.dt, atol=1e-9)
    else:
        assert clock.waits == 0
        np.testing.assert_allclose(stamps, np.arange(length) * env.robot_spec.dt)
    env.close()
