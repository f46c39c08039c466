"""What a command opened is closed again, whatever ends it: ports, locks, robots."""

from __future__ import annotations

import dataclasses
import signal

import pytest
from errors import naming
from ports import free_port

from serl_chunk.actor import service
from serl_chunk.cli import actor
from serl_chunk.cli import evaluation as evaluate_command
from serl_chunk.cli.actor import LearnerAddress, run_training_actor
from serl_chunk.cli.evaluation import EvaluationOptions, run_evaluation
from serl_chunk.cli.learner import run_learner
from serl_chunk.cli.local import train_local
from serl_chunk.cli.process import load
from serl_chunk.config.robots import GymConfig
from serl_chunk.learner.building import RunOptions
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.folder import open_run
from serl_chunk.transport.wire.handshake import RefusedError
from serl_chunk.types import ConfigError, DataError

CONFIG = load("fake_aloha", [])
ADDRESS = LearnerAddress("127.0.0.1", 1, "a")


@pytest.fixture(autouse=True)
def handlers():
    """Puts the handlers of the tests' own Ctrl-C back."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def closed(monkeypatch) -> list[str]:
    """Names of the robots and intervention sources that were closed."""
    names: list[str] = []

    class Human:
        def close(self) -> None:
            names.append("human")

    def open_env(config, **more):
        env = make_env(config, **more)
        monkeypatch.setattr(env, "close", lambda: names.append("robot"))
        return env

    monkeypatch.setattr(service, "make_env", open_env)
    monkeypatch.setattr(service, "make_intervention", lambda *_: Human())
    return names


class RefusedLink:
    """Its learner refuses this actor."""

    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def connect(self, *_: object, **__: object) -> None:
        raise RefusedError("another experiment")

    def close(self) -> None:
        self._closed.append("link")


def test_a_learner_that_cannot_start_lets_go_of_ports_and_folder(tmp_path, capsys):
    where = {"bind": "127.0.0.1", "port": free_port(), "insecure": False}
    two_arms = load("fake_aloha", [("agent.gripper.setup_mode", "single-arm-learned-gripper")])
    with pytest.raises(ConfigError, match=naming("agent.gripper.setup_mode", "single-arm-learned-gripper", 1, 2)):
        run_learner(two_arms, RunOptions([], str(tmp_path / "run")), **where)
    assert not (tmp_path / "run").exists()
    for _ in range(2):  # the second time it would find its own port or lock in use
        with pytest.raises(ConfigError, match=naming(tmp_path / "none", "HDF5")):
            run_learner(CONFIG, RunOptions([str(tmp_path / "none")], str(tmp_path / "run")), **where)
    open_run(CONFIG, spec_of(CONFIG), str(tmp_path / "run")).lock.close()
    capsys.readouterr()


def test_a_refused_actor_opens_no_robot(monkeypatch, closed):
    monkeypatch.setattr(actor, "open_link", lambda *_, **__: RefusedLink(closed))
    with pytest.raises(RefusedError, match="another experiment"):
        run_training_actor(CONFIG, ADDRESS)
    assert closed == ["link"]


def test_local_training_that_cannot_start_closes_its_robot_and_folder(tmp_path, closed, capsys):
    with pytest.raises(ConfigError, match=naming(tmp_path / "none", "HDF5")):
        train_local(CONFIG, RunOptions([str(tmp_path / "none")], str(tmp_path / "run")))
    assert closed == []  # nothing was opened yet
    assert not (tmp_path / "run").exists()
    (tmp_path / "damaged.hdf5").write_bytes(b"no HDF5 at all")
    with pytest.raises(DataError, match=naming("damaged.hdf5", "HDF5")):
        train_local(CONFIG, RunOptions([str(tmp_path / "damaged.hdf5")], str(tmp_path / "run")))
    assert closed == ["robot", "human"]
    open_run(CONFIG, spec_of(CONFIG), str(tmp_path / "run")).lock.close()
    capsys.readouterr()


def test_lockstep_on_a_real_robot_is_warned_of_once_at_every_start(tmp_path, monkeypatch, caplog):
    def unplugged(config, **more):
        raise ConfigError("unplugged")

    for module in (service, evaluate_command):
        monkeypatch.setattr(module, "make_env", unplugged)
    for module in (actor, evaluate_command):
        monkeypatch.setattr(module, "spec_of", lambda config: spec_of(CONFIG))
        monkeypatch.setattr(module, "open_link", lambda *_, **__: RefusedLink([]))
    monkeypatch.setattr(actor, "stop_on_signals", lambda *_: None)
    monkeypatch.setattr("serl_chunk.cli.learner.spec_of", lambda config: spec_of(CONFIG))
    real = dataclasses.replace(CONFIG, robot=GymConfig(make=lambda fake_env: None, is_real=True))
    timed = dataclasses.replace(real, actor=dataclasses.replace(real.actor, clock="realtime"))

    def warnings(start, config) -> int:
        caplog.clear()
        with pytest.raises((ConfigError, RefusedError), match=naming(tmp_path / "none", "HDF5") + "|another exp"):
            start(config)
        return sum("actor.clock=lockstep on a real robot" in line for line in caplog.messages)

    def train(config):
        run_training_actor(config, ADDRESS)

    def evaluate(config):
        run_evaluation(config, EvaluationOptions(("latest",), 1), ADDRESS)

    for start in (train, evaluate):
        assert [warnings(start, c) for c in (real, timed, CONFIG)] == [1, 0, 0]
    for config, expected in ((real, 1), (CONFIG, 0)):  # which refuses the other clock
        assert (
            warnings(lambda c: train_local(c, RunOptions([str(tmp_path / "none")], str(tmp_path / "run"))), config)
            == expected
        )
