"""Demonstrations by a script and by hand: what is kept and reported, and how a recording goes on."""

from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest
from actor_helpers import SPEC, HumanOnTicks, LineEnv, make_config
from errors import naming
from policy_servers import HORIZON, StatePolicy, server_of

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.cli import evaluation, record
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.process import load
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.inspect.inspect import inspect as real_inspect
from serl_chunk.data.inspect.results import Issue
from serl_chunk.devices.recorded import save_interventions
from serl_chunk.main import main
from serl_chunk.recording import recording
from serl_chunk.recording.recording import Demonstration, RecordingTotals
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.serving import client
from serl_chunk.types import Amend, ConfigError, DataError, Outcome, Source
from serl_chunk_robot.devices.base import DeviceError

CONFIG = load("fake_aloha", [])


def record_until(n: int, folder, **changes) -> int:
    return run_record(CONFIG, n, str(folder), **{"policy": "scripted", "noise": None, "cameras": (), **changes})


def test_a_folder_is_complete_and_one_of_another_robot_is_not_added_to(tmp_path):
    assert record_until(1, tmp_path) == 0
    assert record_until(1, tmp_path) == 0
    with pytest.raises(ConfigError, match=naming("fake_aloha", "episode_0.hdf5", "fake_single_arm", "--out")):
        run_record(load("fake_single_arm", []), 1, str(tmp_path), policy="scripted", noise=None, cameras=())
    assert len(demos(tmp_path)) == 1


def test_what_cannot_go_on_is_named(tmp_path, monkeypatch):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "episode_0.hdf5").write_bytes(b"x")
    with pytest.raises(DataError, match=naming("episode_0.hdf5", "HDF5")):
        record_until(2, tmp_path / "damaged")
    monkeypatch.setattr(EpisodeRunner, "run_episode", lambda self, seed, **_: EpisodeSummary(seed=seed))
    with pytest.raises(ConfigError, match=naming("expert", 21)):  # which never succeeds
        record_until(1, tmp_path)
    monkeypatch.setattr(record, "make_expert", lambda env: object())
    with pytest.raises(ConfigError, match=naming("fake_aloha", "--noise")):  # which has none
        record_until(1, tmp_path, noise=0.1)


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


IDLE = 4  # ticks before the first motion


def demos(folder):
    files = sorted(folder.glob("*.hdf5"), key=lambda f: int(f.stem.removeprefix("episode_")))
    return [read_episode(f) for f in files]


def recording_of_expert(path, attempts: int, *, still: int, clumsy: int) -> str:
    """Save what an expert does from the start states 0, 1, ... after IDLE ticks; in one attempt it does not move, in
    another one only for three ticks."""
    env = make_env(load("fake_single_arm", []).robot)
    expert = make_expert(env)
    rows = []
    for episode in range(attempts):
        env.reset(seed=episode)
        expert.reset(episode)
        for _ in range(IDLE):
            env.step(np.zeros(7, np.float32))
        done, tick = episode == still, IDLE
        while not done:
            rows.append((episode, tick, expert.act()))
            _, _, terminated, truncated, _ = env.step(rows[-1][2])
            tick += 1
            done = terminated or truncated or (episode == clumsy and tick == IDLE + 3)
    env.close()
    episodes, ticks, actions = zip(*rows, strict=True)
    save_interventions(path, episode=episodes, tick=ticks, action=actions, idle=np.zeros(len(rows), bool))
    return str(path)


def human_run(config, n: int, folder, **changes) -> int:
    return run_record(config, n, str(folder), **{"policy": "human", "noise": None, "cameras": (), **changes})


def test_successes_are_kept_from_the_first_motion_on_and_a_second_run_goes_on(tmp_path, caplog):
    caplog.set_level("INFO", "serl_chunk")
    file = recording_of_expert(tmp_path / "hand.npz", 6, still=1, clumsy=2)
    config = load("fake_single_arm", [("actor.intervention", file)])
    assert human_run(config, 2, tmp_path / "d", cameras=("side",)) == 0
    first = caplog.text
    assert human_run(config, 4, tmp_path / "d", cameras=("side",)) == 0
    episodes = demos(tmp_path / "d")
    assert [e.begin.init_state for e in episodes] == ["seed-0", "seed-3", "seed-4", "seed-5"]
    for e in episodes:
        assert e.end.outcome is Outcome.SUCCESS
        assert e.end.terminated
        assert (set(e.steps.source), len(e.steps.sparse["images/side"].index)) == ({Source.HUMAN}, e.steps.n)
        assert e.end.final_observation is not None
    ticks = [e.steps.n for e in episodes]
    line = f"demonstration 1 of 2: {ticks[0]} ticks, {ticks[0] / 10:.1f} s, human 100 %, success by environment"
    assert line in first
    assert "the human did not move the robot in 80 ticks" in first
    assert re.search(r"not kept: 80 ticks, 8.0 s, human 4 %, no success, ended by the time limit", first)
    mean = (ticks[0] + ticks[1]) / 2
    assert f"2 demonstrations recorded in 4 episodes, {mean:.0f} ticks on average, human 100 %, with" in first
    assert "2 demonstrations recorded in 2 episodes" in caplog.text
    assert main(["data", "check", str(tmp_path / "d"), "--exp_name", "fake_single_arm"]) == 0


@pytest.fixture
def line(monkeypatch, tmp_path):
    def run(number: int, *, env=None, moves=range(2, 30), **actor) -> int:
        env = env or LineEnv(length=10, success_at=4)
        config = make_config()
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, **actor))
        monkeypatch.setattr(record, "make_env", lambda robot: env)
        monkeypatch.setattr(record, "spec_of", lambda config: env.robot_spec)
        monkeypatch.setattr(record, "open_human", lambda *a: HumanOnTicks(frozenset(moves)))
        return human_run(config, number, tmp_path / "d")

    return run


def test_a_human_may_fail_as_often_as_it_takes(line):
    class Late(LineEnv):
        def reset(self, **options):
            self.success_at = 1 if len(self.seeds) == 40 else None
            return super().reset(**options)

    env = Late(length=3)
    assert line(1, env=env, moves=range(9), max_human_ticks=1) == 0  # which limits a run alone
    assert len(env.seeds) == 41


def test_a_file_that_is_bad_ends_the_recording_and_a_remark_does_not(line, tmp_path, monkeypatch, caplog):
    found = [Issue("remark", "jump", "tick 3 jumps")]

    def inspect(*a, **options):
        return dataclasses.replace(real_inspect(*a, **options), findings=tuple(found))

    monkeypatch.setattr(recording, "inspect", inspect)
    assert line(1) == 0
    assert "episode_0.hdf5: tick 3 jumps" in caplog.text
    found[:] = [Issue("fault", "frames", "episode_1.hdf5: torn")]
    with pytest.raises(DataError, match=naming("episode_1.hdf5", "torn", "disk")):
        line(2)


def test_the_robot_is_closed_before_the_device_and_also_where_that_cannot_be_opened(line, tmp_path, monkeypatch):
    closed = []
    env = LineEnv(length=3, success_at=1)
    env.close = lambda: closed.append("robot")
    monkeypatch.setattr(HumanOnTicks, "close", lambda self: closed.append("device"))
    assert line(1, env=env, moves=range(9)) == 0
    assert closed == ["robot", "device"]

    def missing(*_):
        raise DeviceError("no mouse")

    monkeypatch.setattr(record, "open_human", missing)
    closed.clear()
    with pytest.raises(DeviceError, match="no mouse"):
        human_run(make_config(), 2, tmp_path / "d")
    assert closed == ["robot"]


def test_a_file_that_cannot_be_renamed_does_not_end_the_control_loop(tmp_path, caplog):
    totals = RecordingTotals()
    totals.add("one", Demonstration(5, 5, 0, Outcome.SUCCESS, "operator"), [tmp_path / "episode_0.hdf5"])
    totals.amend(Amend("one", discard=True))
    assert totals.successes == []
    assert "episode_0.hdf5 cannot be renamed (No such file or directory)" in caplog.text


@pytest.mark.parametrize(("device", "ready"), [("none", "each"), ("spacemouse", "first")])
def test_a_robot_that_is_only_looked_at_waits_after_each_reset(monkeypatch, device, ready):
    calls = []
    monkeypatch.setattr(record, "run_record", lambda *a, **k: calls.append((a, k)) or 0)
    aloha = ["--exp_name", "aloha", "--config.robot.server=pc", f"--config.actor.intervention={device}"]
    assert main(["teleoperate", *aloha, "--viewer", "0"]) == 0
    [((config, number, out), how)] = calls
    assert (config.operator.ready, number, out) == (ready, float("inf"), None)
    assert how["cameras"] == tuple(c.name for c in record.spec_of(config).cameras)


@pytest.mark.parametrize("command", ["evaluation", "record"])
def test_the_robot_is_closed_before_the_network(command, monkeypatch, tmp_path):
    pytest.importorskip("websockets")
    order, close, env = [], client.PolicyClient.close, LineEnv(length=9, success_at=5)
    env.close = lambda: order.append("robot")
    monkeypatch.setattr(client.PolicyClient, "close", lambda self: (order.append("client"), close(self)))
    for module in (record, evaluation):
        monkeypatch.setattr(module, "make_env", lambda *a, **k: env)
        monkeypatch.setattr(module, "spec_of", lambda config: SPEC)
    monkeypatch.setattr(evaluation, "stop_on_signals", lambda stop, how: None)
    with server_of(StatePolicy()) as server:
        config = make_config(horizon=HORIZON, actor=ActorConfig(policy=f"openpi://127.0.0.1:{server.port}"))
        if command == "evaluation":
            assert run_evaluation(config, EvaluationOptions((), 1), None) == 0
        else:
            assert run_record(config, 1, str(tmp_path), policy="server", noise=None, cameras=()) == 0
    assert order == ["robot", "client"]


def test_many_robots_record_what_one_would(monkeypatch, tmp_path):
    pytest.importorskip("websockets")

    class Seeded(LineEnv):
        thread = 0

        def reset(self, *, seed, **options):
            self.thread = self.thread or threading.get_ident()
            assert self.thread == threading.get_ident()  # which renders a simulator's frames
            self.success_at = None if seed % 3 == 0 else 2 + seed % 5
            return super().reset(seed=seed, **options)

    monkeypatch.setattr(record, "make_env", lambda robot: Seeded(length=9))
    monkeypatch.setattr(record, "spec_of", lambda config: SPEC)
    policy, found = StatePolicy(seconds=0.002), []
    with server_of(policy) as server:
        config = make_config(horizon=HORIZON, actor=ActorConfig(policy=f"openpi://127.0.0.1:{server.port}"))
        for n_envs in (1, 3):
            args = {"policy": "server", "noise": None, "cameras": (), "n_envs": n_envs}
            assert run_record(config, 3, str(tmp_path / str(n_envs)), **args) == 0
            found.append(demos(tmp_path / str(n_envs)))
    assert max(policy.batches) > 1
    assert [e.begin for e in found[0]] == [e.begin for e in found[1]]
    for one, many in zip(*found, strict=True):
        for name, value in vars(one.steps).items():
            if name != "stamp":  # a robot counts its own ticks
                np.testing.assert_equal(getattr(many.steps, name), value)
