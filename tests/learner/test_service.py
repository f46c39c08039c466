"""The learner's network: what actors meet before it is ready, and what is logged while none is there."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
import threading
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import viewed
from errors import naming
from point_robot import experiment
from ports import free_port
from streamed_demos import LENGTH, episode, make_router, parts

from serl_chunk.config.groups import GroupConfig
from serl_chunk.data.demos import short_digest
from serl_chunk.learner import service as service_module
from serl_chunk.learner.groups.collector import Collector
from serl_chunk.learner.groups.scheduler import GroupScheduler
from serl_chunk.learner.groups.starts import Starts
from serl_chunk.learner.intake import RecordRouter
from serl_chunk.learner.prometheus import MetricsPage
from serl_chunk.learner.service import LearnerService
from serl_chunk.robots.registry import robot_spec
from serl_chunk.runs.amend import request
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.folder import RUN_LOCK, open_run
from serl_chunk.runs.term import FencedError
from serl_chunk.transport.client.link import LearnerLink
from serl_chunk.transport.server.sessions import SessionInfo
from serl_chunk.transport.storage.record_store import RecordStore, SessionState
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import records
from serl_chunk.transport.wire.records import Item
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Outcome, SerlChunkError, Source, Step
from serl_chunk_robot.wire.codec import Limits


@contextlib.contextmanager
def serving(path, *, journal=True):
    config = experiment()
    config = dataclasses.replace(config, transport=dataclasses.replace(config.transport, journal=journal))
    run = SimpleNamespace(path=path, run_id="r")
    service = LearnerService(config, run, {}, bind="127.0.0.1", port=(port := free_port()))
    service.test_port = port
    with contextlib.closing(service):
        yield service


@pytest.fixture
def service(tmp_path):
    config = experiment()
    with (
        open_run(config, robot_spec(config.robot), str(tmp_path)).locked(),
        serving(tmp_path, journal=False) as service,
    ):
        service.server.start()
        yield service


def linked(service, name: str) -> contextlib.closing[LearnerLink]:
    link = LearnerLink(
        service._config.transport, host="127.0.0.1", port=service.test_port, actor_id=name, contract={},
        spools=lambda run: Spool(service._run.path / name, Limits(1 << 20, 64)),
    )  # fmt: skip
    link.connect(timeout=10)
    return contextlib.closing(link)


def learner_with(**parts) -> SimpleNamespace:
    """As much of a learner as a service asks."""
    replay = SimpleNamespace(estimated_disk_bytes=0)
    others = {"replay": replay, "refill": lambda r: len(list(r)), "stats": SimpleNamespace(busy="it evaluates")}
    return SimpleNamespace(idle=False, updates=0, **others | parts)


def ticked(service, ask) -> None:
    """Let the service tick while another thread asks."""
    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        service.tick()
        time.sleep(0.005)


def test_before_its_learner_is_there_it_is_not_ready(service):
    for called in (service.welcome, service.tick, service.status):
        with pytest.raises(ConfigError, match=naming("still reading")):
            called()


def test_a_recording_that_streams_is_no_actor(service):
    """It is welcome next to an actor of this robot, with what the learner has, and holds no steps of it."""
    replay, router = make_router()
    replay.add_demo(known := episode(0))
    router.demonstrations.hold([known])
    fields = {"normaliser_mode": "m", "normaliser_digest": "d"}
    normaliser = SimpleNamespace(fields=lambda: fields, to_arrays=lambda: {"mean": np.zeros(2, np.float32)})
    preprocess = SimpleNamespace(normaliser=normaliser)
    learner = learner_with(
        router=router, preprocess=preprocess, episodes=0, env_steps=0, human_ticks=0,
        status=lambda: {"env_steps": 0}, trainer=SimpleNamespace(steps_allowed=lambda: 8),
    )  # fmt: skip
    service.attach(learner)
    welcomes, allowances = [], []
    for name, demonstrations in (("left-demonstrations", True), ("left", False)):
        link = LearnerLink(
            service._config.transport, host="127.0.0.1", port=service.test_port, actor_id=name, contract={},
            demonstrations=demonstrations,
        )  # fmt: skip
        with contextlib.closing(link):
            welcomes.append(link.connect(timeout=10))
            allowances.append(link.allowance)
            assert link.busy == "it evaluates"
            assert service.status()["actors"] == (() if demonstrations else ("left",))
    assert allowances == [None, 8]
    assert [bytes(d) for d in welcomes[0].arrays["demonstrations"]] == [short_digest(known)]
    assert set(welcomes[1].arrays) == {"mean"}


def attach_collector(service, *, version=5) -> RecordRouter:
    """Attach a learner whose iteration 0 collects a group of two, with a policy that was version 5 at first."""
    replay, router = make_router()
    scheduler = GroupScheduler(GroupConfig(size=2, groups=1, max_groups=1, baseline="mean"), Starts(0), ("push",), 0)
    router.groups = Collector(scheduler, replay._preprocess, 1)
    router.groups.begin(0, version, since=5)
    learner = learner_with(
        router=router, preprocess=SimpleNamespace(normaliser=SimpleNamespace(fields=dict, to_arrays=dict)), episodes=0,
        env_steps=0, human_ticks=0, trainer=SimpleNamespace(steps_allowed=lambda: None), refill=router.refill,
    )  # fmt: skip
    service.attach(learner)
    return router


def run_slot(link, source: Source, version=5):
    """Request a ticket and run it, in one step; the ticket."""
    link.request_tickets([], 1)
    assert link.wait_until(lambda: link.grant is not None and link.grant.tickets, 5)
    [ticket] = link.grant.tickets
    zero = np.zeros(3, np.float32)
    link.begin(Begin(f"e{ticket.id}", "push", ticket=ticket.id))
    link.step(Step(0, {"state": zero}, zero[:1], 0.0, source, 0, version, 0.0, {"chunk": zero[:1, None]}))
    link.end(End(f"e{ticket.id}", 1, {"state": zero}, True, False, Outcome.SUCCESS))
    return ticket


def test_an_actor_gets_the_next_ticket_as_its_episode_ends(service):
    """And another actor the ones of an actor that leaves."""
    router = attach_collector(service)
    with linked(service, "right") as second:
        with linked(service, "left") as first:
            ticket = run_slot(first, Source.HOLD)
            again = ticket._replace(attempt=1)  # the robot was held
            assert first.wait_until(lambda: first.grant.tickets == (again,), 5)
            second.request_tickets([], 9)
            assert second.wait_until(lambda: second.grant is not None, 5)
            assert [t.slot for t in second.grant.tickets] == [1]
        assert second.wait_until(lambda: again._replace(attempt=2) in second.grant.tickets, 5)
        service._intake.drain()
        assert router.env_steps == 1


def test_a_restarted_learner_goes_on_within_its_iteration(tmp_path):
    """By its journal: the slot that is settled is not run again, and what was published anew is the same policy."""
    for version in (5, 6):
        with serving(tmp_path) as service:
            service.server.start()
            router = attach_collector(service, version=version)
            with linked(service, "left") as link:
                ticket = run_slot(link, Source.POLICY, version)
                assert (ticket.slot, ticket.version) == (version - 5, version)
                assert link.flush(10)
            service._intake.drain()
            [rollouts] = router.groups.poll().rollouts if version == 6 else [[]]
    assert [(r.ticket, r.versions, r.result.success) for r in rollouts] == [
        ("0.0.0.0", (5,), True), ("0.0.1.0", (6,), True)
    ]  # fmt: skip


def test_prometheus_reads_the_learner_and_its_actors(service):
    router = attach_collector(service)
    service._learner.status = lambda: {"env_steps": router.env_steps, "version": 5, "success": None, "stalled": ""}
    port = free_port()
    with (
        contextlib.closing(MetricsPage(str(port), service.figures, service.actor_states)),
        linked(service, "left") as link,
    ):
        run_slot(link, Source.POLICY)
        assert link.flush(10)
        service._intake.drain()
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    wanted = {"env_steps": 1, "transport_records": 3, "steps_not_inserted": 0, 'actor_connected{actor="left"}': 1,
              'actor_restarts{actor="left"}': 0, 'actor_unacknowledged_records{actor="left"}': 0,
              'actor_steps{actor="left"}': 1, 'actor_snapshot_age_seconds{actor="left"}': -1}  # fmt: skip
    assert {name: float(lines[f"serl_chunk_{name}"]) for name in wanted} == wanted
    assert float(lines['serl_chunk_actor_silent_seconds{actor="left"}']) < 30
    for where in ("0", "x", "1:2:x", "10.255.255.1:9000"):
        with pytest.raises(ConfigError, match="metrics_port"):
            MetricsPage(where, dict, list)


def test_a_learner_that_runs_applies_an_operators_label(tmp_path, monkeypatch):
    """Through the run folder, whose lock it holds: to its replay at once, and to its journal."""
    monkeypatch.setattr(service_module, "CHECK_PERIOD", 0.0)
    run, inserted, answers = tmp_path / "run", [], []
    viewed.run_folder(run)

    def insert_all(entries):
        inserted.extend(entry[:2] for entry in entries)
        return []

    router = SimpleNamespace(insert_all=insert_all, position=0, missing=None)
    with (run / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with serving(run) as service:
            service.server.start()
            service.attach(learner_with(router=router))
            with viewed.viewing(run) as browser:
                browser.rows()
                ticked(service, lambda: answers.append(browser.label(0, "failure")))
                assert answers[0].status == 200, answers[0]
                assert answers[0].json["row"]["label"] == "failure"
    [(session, amend)] = inserted
    assert session == "actor a/a"
    assert (amend.episode_id, amend.outcome, amend.outcome_by) == ("e0", Outcome.FAILURE, "operator")
    assert RunSource(run).about("a/e0").outcome is Outcome.FAILURE


def test_a_label_that_the_replay_refuses_does_not_end_the_session(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "CHECK_PERIOD", 0.0)

    def insert_all(entries):
        return [(entry, f"{entry.record.episode_id} is amended before its end") for entry in entries]

    def ask() -> None:
        with pytest.raises(DataError, match="e7"):
            request(tmp_path, "s", "actor", Amend("e7", Outcome.FAILURE, "operator"), 60)
        refused.append(True)

    refused: list[bool] = []
    with serving(tmp_path) as service:
        service.server.start()
        service.attach(learner_with(router=SimpleNamespace(insert_all=insert_all, position=0, missing=None)))
        ticked(service, ask)
        assert refused
        service.server.check()


def test_what_follows_a_power_cut_that_set_the_journal_back_is_counted(tmp_path):
    """The checkpoint counts entries that are gone: new ones are none of these, for any later process either."""

    @contextlib.contextmanager
    def process(saved=(0, 0)):
        replay, router = make_router()
        router.resume(*saved)
        with serving(tmp_path) as service:
            service.attach(learner_with(router=router, replay=replay, refill=router.refill))
            service._intake.drain()
            yield service, router

    def record(service, name):
        store, session = service._store, f"s{name}"
        state = SessionState(session, "actor", 1, 0, 0, 0, None)
        for part in (Begin(name), *parts(episode(0, name))[1:]):
            item = Item.of(part, state.expected)
            store.append(state, item, records.encode_record(part, item.first), delivered=True)
            service.on_record(SessionInfo(session, "actor", 1, "peer"), part)
            state = state.after(item, delivered=True)
        service._intake.drain()

    with process() as (service, router):
        record(service, "e0")
        service._store.journal.sync()
        shutil.copytree(tmp_path / "journal", tmp_path / "then")
        record(service, "e1")
        checkpoint = router.env_steps, router.take().position
    assert checkpoint[0] == 2 * LENGTH
    shutil.rmtree(tmp_path / "journal")
    (tmp_path / "then").rename(tmp_path / "journal")
    with process(checkpoint) as (service, router):
        record(service, "e2")
        assert router.env_steps == 3 * LENGTH
    with process(checkpoint) as (service, router):  # the one before was killed without a checkpoint of its own
        assert router.env_steps == 3 * LENGTH
        assert [service._steps_of(session) for session in ("se0", "se2", "none")] == [LENGTH, LENGTH, 0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_learner_that_was_taken_for_dead_takes_nothing_more(tmp_path, monkeypatch):
    """It stood still while another took the run over, on a disk whose lock says nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda *args: None)

    def learner() -> tuple:
        replay, router = make_router()
        return router, learner_with(
            router=router, replay=replay, refill=router.refill, episodes=0, env_steps=0, human_ticks=0,
            preprocess=SimpleNamespace(normaliser=SimpleNamespace(fields=dict, to_arrays=dict)),
            trainer=SimpleNamespace(steps_allowed=lambda: None),
        )  # fmt: skip

    def episode_by(link, name: str) -> bool:
        zero = np.zeros(3, np.float32)
        link.begin(Begin(name))
        link.step(Step(0, {"state": zero}, zero[:1], 0.0, Source.POLICY, 0, 0, 0.0))
        link.end(End(name, 1, {"state": zero}, True, False, Outcome.SUCCESS))
        return link.flush(2)

    with contextlib.ExitStack() as stack:
        old = stack.enter_context(serving(tmp_path))
        _, its = learner()
        old.server.start()
        old.attach(its)
        actor = stack.enter_context(linked(old, "actor"))
        assert episode_by(actor, "before")
        monkeypatch.setattr(type(old._store.journal), "close", lambda self, remove=False: None)  # it writes no goodbye
        monkeypatch.setattr("platform.node", lambda: "another machine")
        new = stack.enter_context(serving(tmp_path))
        router, its_successor = learner()
        new.server.start()
        new.attach(its_successor)
        assert (old.term, new.term) == (1, 2)
        old.server._receiver._fence_at = 0.0  # a second has passed
        assert not episode_by(actor, "after")
        with pytest.raises(SerlChunkError, match=r"FencedError: another learner .* has term 2, this one 1"):
            old.server.check()
        with pytest.raises(FencedError):
            its.router.fence()
        old._store.append(SessionState("zombie", "z", 1, 0, 0, 0, None), *zombies_record(), delivered=True)
        with linked(new, "actor") as moved:
            assert moved.flush(5)
            assert episode_by(moved, "later")
        new._intake.drain()
        assert sorted(e.episode_id for e in router.take().episodes) == ["after", "before", "later"]
    monkeypatch.undo()
    store = RecordStore(tmp_path / "journal" / "online", Limits(1 << 20, 64))
    with contextlib.closing(store):
        assert "zombie" not in {s.session for s in store.replay()}


def zombies_record() -> tuple:
    record = Begin("e")
    return Item.of(record, 0), records.encode_record(record, 0)
