"""The training actor's start: what the welcome tells it, what is refused, and what a failed start closes."""

from __future__ import annotations

import dataclasses
import signal
import threading
import types
from unittest.mock import Mock

import pytest
from actor_helpers import LineEnv, make_config
from classifier_sets import save_random
from errors import naming
from operator_desk import Pedal
from ports import free_port

from serl_chunk import signals
from serl_chunk.actor import service
from serl_chunk.actor.link import preprocess_of
from serl_chunk.actor.policy import PolicyError
from serl_chunk.actor.service import ActorService, ActorSummary
from serl_chunk.cli import actor, console, evaluation
from serl_chunk.cli.console import console_of
from serl_chunk.cli.evaluation import EvaluationOptions
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.learner import run_learner
from serl_chunk.cli.process import load
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.operator import DeviceConfig, OperatorConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.robots import AlohaConfig
from serl_chunk.console.bindings import ActorState
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.service import welcome_of
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.folder import open_run
from serl_chunk.transport.storage.spool import SpoolFolders
from serl_chunk.transport.wire.handshake import PROTOCOL, RefusedError, Welcome, compare_protocol
from serl_chunk.transport.wire.records import BEGIN, Item, encode_record
from serl_chunk.types import Begin, CameraSpec, ConfigError, DataError, PolicyOrigin, SerlChunkError, Snapshot
from serl_chunk.version import version_info

ADDRESS = LearnerAddress("127.0.0.1", 1, "a")


def link_of(welcome: Welcome) -> Mock:
    """Of a learner that gets no requests."""
    link = Mock(stats=lambda: {"inherited": 0.0}, wait_until=lambda condition, timeout: condition())
    link.connect.return_value = welcome
    link.fetch_checkpoint.return_value = (Snapshot(40, {}, origin=PolicyOrigin("another", "its own")), {})
    return welcomes(link, welcome)


def welcomes(link: Mock, welcome: Welcome) -> Mock:
    """Put a welcome in the place of the last."""
    link.configure_mock(welcome=welcome, run=welcome.run)
    return link


@pytest.fixture(scope="module")
def config():
    config = load("fake_aloha", [("actor.intervention", "none")])
    return dataclasses.replace(config, agent=BcConfig(flow=FlowConfig(hidden=(8,))))


@pytest.fixture(scope="module")
def normaliser(config):
    return fit_normaliser(spec_of(config), config.normaliser, config.chunk.carried, [])


def welcome(normaliser: Normaliser, run: str = "run", *, episodes: int = 3, env_steps: int = 90, human_ticks: int = 27):
    learner = types.SimpleNamespace(
        preprocess=Preprocess(normaliser), episodes=episodes, env_steps=env_steps, human_ticks=human_ticks
    )
    return Welcome(*welcome_of(learner), run)


def start(monkeypatch, tmp_path, config, link, run) -> int:
    def session(self, *arguments, **named):
        return run(self, *arguments, **named)
        yield  # one without an episode

    monkeypatch.setattr(actor, "open_link", lambda *_, **__: link)
    monkeypatch.setattr(ActorService, "session", session)
    monkeypatch.setattr(actor, "stop_on_signals", lambda *_: None)
    return actor.run_training_actor(config, ADDRESS, str(tmp_path))


@pytest.mark.parametrize("run", ["second", "first"])
def test_another_runs_welcome_begins_everything_anew(tmp_path, monkeypatch, caplog, config, normaliser, run):
    """Or the same run's, with another normaliser."""
    caplog.set_level("INFO", "serl_chunk.actor")
    other = dataclasses.replace(normaliser, scale=2 * normaliser.scale)
    link = link_of(welcome(normaliser, "first"))
    sessions = []

    def session(self, preprocess, begun, *, replaced):
        sessions.append((preprocess.digest(), begun))
        assert replaced() is None
        if len(sessions) == 2:
            return ActorSummary(delivered=True)
        welcomes(link, welcome(other, run, episodes=1, env_steps=40, human_ticks=5))
        return ActorSummary(reason=replaced(), episodes=8, steps=99, replaced=True)

    assert start(monkeypatch, tmp_path, config, link, session) == 0
    assert [begun[:4] for _, begun in sessions] == [("first", 3, 90, 27), (run, 1, 40, 5)]
    assert [digest for digest, _ in sessions] == [normaliser.digest(), other.digest()]
    assert len({begun.episode_prefix for _, begun in sessions}) == 2
    assert [made.args for made in link.act_for.mock_calls] == [("first",), (run,)]
    said = "\n".join(caplog.messages)
    assert "first" in said
    assert (run if run == "second" else other.digest()) in said
    assert "8 episodes, 99 steps" in said


@pytest.mark.parametrize(("limit", "sessions"), [(0, 2), (8, 1)])
def test_the_limit_of_episodes_holds_over_both_runs(tmp_path, monkeypatch, config, normaliser, limit, sessions):
    config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, max_episodes=limit))
    link, done = link_of(welcome(normaliser, "first")), []

    def run(self, *_, **__):
        done.append(self.episodes)
        self.episodes += 8
        welcomes(link, welcome(normaliser, "second"))
        return ActorSummary(reason="another run", replaced=len(done) == 1)

    start(monkeypatch, tmp_path, config, link, run)
    assert done == [0, 8][:sessions]


def test_a_normaliser_that_is_not_the_one_its_welcome_names_is_refused(config, normaliser):
    sent = welcome(normaliser)
    sent.fields["normaliser_digest"] = "another"
    with pytest.raises(DataError, match=naming("normaliser", "another", normaliser.digest())):
        preprocess_of(sent, config, spec_of(config))


def test_an_evaluation_decodes_no_checkpoint_with_another_ones_normaliser(monkeypatch, config, normaliser):
    monkeypatch.setattr(evaluation, "open_link", lambda *_, **__: link_of(welcome(normaliser)))
    with pytest.raises(PolicyError, match=naming("normaliser", "its own", normaliser.digest(), 40)):
        evaluation.run_evaluation(config, EvaluationOptions(("latest",), 1), ADDRESS)


REAL = dataclasses.replace(make_config().robot, is_real=True)


def operated(**settings):
    return {"robot": REAL, "operator": OperatorConfig(**settings)}


@pytest.mark.parametrize(("changes", "named"), [
    (operated(keys=("success=space",)), ("operator.keys", "space")),
    (operated(gestures=("success=pedal_left",)), ("operator.gestures", "pedal_left")),
    (operated(attention="none.json", pedal="foot"), ("operator.attention", "none.json")),
    (operated(attention="none.json"), ("operator.attention", "terminal")),
    (operated(approve=2), ("operator.approve", "2", "--viewer")),
    (operated(pedal="foot"), ("operator.pedal",)),
    ({"actor": ActorConfig(intervention="leader"), "device": DeviceConfig(align="drive")},
     ("device.align", "operator", "terminal")),
    ({"robot": AlohaConfig(server="pc"), "actor": ActorConfig(gate="canary")},
     ("actor.gate", "canary", "outcome.classifier", "--viewer")),
    ({"outcome": OutcomeConfig(classifier="none")}, ("outcome.classifier", "none")),
    ({"outcome": OutcomeConfig(classifier="of_another")}, ("outcome.classifier", "camera 'side'")),
])  # fmt: skip
def test_what_cannot_act_is_refused_before_a_learner_is_called(tmp_path, monkeypatch, config, changes, named):
    monkeypatch.chdir(tmp_path)
    save_random(tmp_path / "of_another", CameraSpec("side", 32, 32))
    monkeypatch.setattr(service, "make_env", lambda *_, **__: LineEnv())
    monkeypatch.setattr(actor, "open_link", lambda *_, **__: pytest.fail("a learner was called"))
    monkeypatch.setattr(actor, "stop_on_signals", lambda *_: None)
    with pytest.raises(SerlChunkError) as error:
        actor.run_training_actor(dataclasses.replace(config, **changes), ADDRESS, str(tmp_path))
    assert error.value.parameter == named[0]
    assert all(part in str(error.value) for part in named)


CONFIG = load("fake_aloha", [])


def test_a_learner_that_cannot_start_lets_go_of_ports_and_folder(tmp_path, capsys):
    where = {"bind": "127.0.0.1", "port": free_port(), "insecure": False}
    two_arms = load("fake_aloha", [("agent.gripper.setup_mode", "single-arm-learned-gripper")])
    with pytest.raises(ConfigError, match=naming("agent.gripper.setup_mode", "single-arm-learned-gripper", 1, 2)):
        run_learner(two_arms, RunOptions([], str(tmp_path / "run")), **where)
    assert not (tmp_path / "run").exists()
    for _ in range(2):  # the second time it would find its own port or lock in use
        with pytest.raises(ConfigError, match=naming(tmp_path / "none", "no such file or folder")):
            run_learner(CONFIG, RunOptions([str(tmp_path / "none")], str(tmp_path / "run")), **where)
    open_run(CONFIG, spec_of(CONFIG), str(tmp_path / "run")).lock.close()
    capsys.readouterr()


PAGE = types.SimpleNamespace(begin=lambda *shown, **options: None)


@pytest.mark.parametrize(("page", "pedal", "gestures", "goes_on"), [
    (True, False, (), True), (False, True, (), True), (False, True, ("go=mouse_long",), False),
])  # fmt: skip
def test_a_closed_terminal_holds_where_a_page_or_a_pedal_can_go_on(monkeypatch, page, pedal, gestures, goes_on):
    ended, before = [], signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(signals, "_interrupt", lambda number, frame: ended.append(number))
    monkeypatch.setattr(console, "open_pedal", lambda path: Pedal())
    try:
        signals._install(signals._interrupt)
        operated = OperatorConfig(pedal="foot" if pedal else "", gestures=gestures)
        robot = dataclasses.replace(make_config().robot, is_real=True)
        config, shown = dataclasses.replace(make_config(), robot=robot, operator=operated), PAGE if page else None
        with console_of(config, "a", amend=lambda record: None, end=lambda: None, page=shown) as operator:
            signal.raise_signal(signal.SIGHUP)
            operator.poll(ActorState.POLICY)
            assert operator.holding == goes_on
        assert ended == ([] if goes_on else [signal.SIGHUP])
        signal.raise_signal(signal.SIGHUP)
        assert ended[-1:] == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def test_an_actor_that_is_refused_for_its_version_names_what_stays_here(tmp_path, monkeypatch, config, normaliser):
    spools = SpoolFolders(config, "a", tmp_path)
    spool = spools.open("run")
    spool.append(Item(BEGIN, 0, 1), encode_record(Begin("e"), 0))
    spool.close()
    link = link_of(welcome(normaliser))
    link.connect.side_effect = RefusedError(compare_protocol(PROTOCOL - 1))
    with pytest.raises(RefusedError, match=naming("protocol", version_info().version)) as refused:
        start(monkeypatch, tmp_path, config, link, None)
    [note] = refused.value.__notes__
    assert str(spools.folder / "run") in note
    assert f"serl_chunk {version_info().version} delivers it" in note


def test_an_actor_that_was_drained_before_its_robot_is_open_opens_none(monkeypatch, tmp_path, config, normaliser):
    link = link_of(welcome(normaliser))
    monkeypatch.setattr(actor, "drain_on_signal", lambda stop, drain, *_: drain.set())
    monkeypatch.setattr(actor, "ActorService", Mock(side_effect=AssertionError))
    assert start(monkeypatch, tmp_path, config, link, None) == 0
    link.flush.assert_called_once()


def test_a_drained_actor_waits_until_the_learner_has_all(monkeypatch, caplog, config):
    caplog.set_level("INFO", "serl_chunk.actor")
    monkeypatch.setattr(service, "FLUSH_TIMEOUT", 0.0)
    stop, drain, left = threading.Event(), threading.Event(), [False] * 3
    link = Mock(unacknowledged=7, flush=lambda timeout: not left or left.pop())
    before = signal.getsignal(signals.DRAIN)
    try:
        signals.drain_on_signal(stop, drain, "draining")
        assert service.deliver(link, drain) is False  # no signal came: at most FLUSH_TIMEOUT
        signal.raise_signal(signals.DRAIN)
        assert stop.is_set()
        assert service.deliver(link, drain) is True
    finally:
        signal.signal(signals.DRAIN, before)
    assert "draining: the learner lacks 7 records. SIGTERM leaves them here" in caplog.messages
