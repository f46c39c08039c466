"""`actor.policy=openpi://HOST:PORT` at the command line: evaluations, recordings, and what is refused."""

from __future__ import annotations

import pytest
from actor_helpers import SPEC, LineEnv, make_config
from policy_servers import HORIZON, StatePolicy, server_of

from serl_chunk.cli import evaluation, record
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.data.formats.hdf5 import open_episode, read_episode
from serl_chunk.data.formats.hdf5_io import close_files
from serl_chunk.data.source import ReadOptions
from serl_chunk.serving import client
from serl_chunk.types import IMAGE_PREFIX, Source

pytest.importorskip("websockets")


@pytest.fixture
def policy():
    return StatePolicy()


@pytest.fixture
def config(policy):
    with server_of(policy) as server:
        yield make_config(horizon=HORIZON, actor=ActorConfig(policy=f"openpi://127.0.0.1:{server.port}"))


@pytest.fixture
def recorded(config, monkeypatch, tmp_path):
    def run(number=2, env=None, **options):
        env = env or LineEnv(length=12, success_at=9)
        monkeypatch.setattr(record, "make_env", lambda *a, **k: env)
        monkeypatch.setattr(record, "spec_of", lambda config: SPEC)
        named = {"policy": "server", "noise": None, "cameras": (), **options}
        assert run_record(config, number, str(tmp_path), **named) == 0
        return sorted(tmp_path.glob("episode_*.hdf5"))

    return run


def test_a_servers_successes_are_demonstrations_and_its_failures_can_be_kept(recorded):
    files = recorded()
    assert len(files) == 2
    for file in files:
        episode = read_episode(file, cameras=())
        assert set(episode.steps.source.tolist()) == {Source.POLICY}
        assert set(episode.steps.policy_version.tolist()) == {3}
        assert episode.steps.decision_tick.tolist() == [0] * 8 + [8] * 2
        seen = open_episode(file, ReadOptions())
        assert {f"{IMAGE_PREFIX}front", f"{IMAGE_PREFIX}wrist"} <= seen.steps.sparse.keys()
        close_files(file)

    class Turns(LineEnv):
        def reset(self, **options):
            self.success_at, self.failure_at = (9, None) if len(self.seeds) % 2 else (None, 6)
            return super().reset(**options)

    files = recorded(3, Turns(length=12), keep="all")
    assert [read_episode(f, cameras=()).end.outcome.value for f in files[2:]] == ["failure", "success"]


@pytest.fixture
def closed(monkeypatch):
    order, close = [], client.PolicyClient.close
    monkeypatch.setattr(client.PolicyClient, "close", lambda self: (order.append("client"), close(self)))

    class Closing(LineEnv):
        def close(self):
            order.append("robot")

    for module in (record, evaluation):
        monkeypatch.setattr(module, "make_env", lambda *a, **k: Closing(length=9, success_at=5))
    return order


@pytest.mark.parametrize("command", ["evaluation", "record"])
def test_the_robot_is_closed_before_the_network(command, config, closed, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "stop_on_signals", lambda stop, how: None)
    monkeypatch.setattr(record, "spec_of", lambda config: SPEC)
    monkeypatch.setattr(evaluation, "spec_of", lambda config: SPEC)
    if command == "evaluation":
        assert run_evaluation(config, EvaluationOptions((), 1), None) == 0
    else:
        assert run_record(config, 1, str(tmp_path), policy="server", noise=None, cameras=()) == 0
    assert closed == ["robot", "client"]
