"""What goes wrong rarely and must not cost anything: lost acknowledgements, other runs, refused records, bad disks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil

import pytest
from errors import naming
from ports import free_port
from transport_tools import (
    CONFIG,
    LIMITS,
    Inbox,
    RawActor,
    end,
    eventually,
    linked,
    send_episode,
    serving,
    spools,
    step,
)

from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire.handshake import REFUSED, RefusedError
from serl_chunk.transport.wire.records import LOST
from serl_chunk.types import Begin, DataError, StepBlock
from serl_chunk_robot.wire import codec


@contextlib.contextmanager
def opened(folder, **options):
    with contextlib.closing(RecordStore(folder, LIMITS, **{"min_steps": 10**6, **options})) as store:
        yield store


def test_a_learner_that_lost_what_it_had_acknowledged_gets_it_again(tmp_path):
    """A power cut took the end of its journal; the actor went on."""
    port, journal = free_port(), tmp_path / "journal"
    with linked(port, connect=False, spools=spools(tmp_path / "spool")) as link:
        for life in range(2):
            with opened(journal) as store:
                list(store.replay())
                with serving(port, store=store) as server:
                    server.resume()
                    link.connect(10) if life == 0 else eventually(lambda: link.stats()["connected"] == 1)
                    if life == 0:
                        send_episode(link, "e0", 5)
                        assert link.flush(10)
                        store.journal.sync()
                        shutil.copytree(journal, tmp_path / "then")
                    send_episode(link, f"e{life + 1}", 5)
                    assert link.flush(10)
                    assert server.stats()["gaps"] <= 1
            if life == 0:
                shutil.rmtree(journal)
                (tmp_path / "then").rename(journal)
    assert kept(journal) == {"e0": 5, "e1": 5, "e2": 5}


def test_nothing_is_dropped_while_a_journal_is_read_back(tmp_path):
    port, names = free_port(), []
    with opened(tmp_path, segment_bytes=4000) as store, serving(port, store=store), linked(port) as link:
        for e in range(20):
            send_episode(link, f"e{e}", 10)
        assert link.flush(10)
    with opened(tmp_path, segment_bytes=4000, min_steps=20) as store, serving(port, store=store) as server:
        for row in store.replay():
            if isinstance(row.record, Begin):
                names.append(row.record.episode_id)
                server._receiver.maintain(1e12)  # as the server's thread does meanwhile
        assert names == [f"e{e}" for e in range(20)]
        server.resume()
        eventually(lambda: store.journal.first > 0)


def test_what_a_learner_cannot_take_costs_its_episode_alone(tmp_path, port, inbox):

    def picky(info, record):
        if isinstance(record, StepBlock) and record.episode_id == "bad" and record.first_tick + record.n > 3:
            raise DataError("the reward of tick 3 is not finite")
        inbox(info, record)

    make = spools(tmp_path / "spool")
    with opened(tmp_path / "journal") as store, serving(port, on_record=picky, store=store) as server:
        with linked(port, spools=make) as link:
            for name in ("good", "bad", "later"):
                send_episode(link, name, 6)
            with pytest.raises(RefusedError, match=naming("reward", 3)):
                link.flush(10)
            assert link.can_begin() == (False, "the reward of tick 3 is not finite")
        with linked(port, spools=make) as link:
            assert link.flush(10)
            send_episode(link, "latest", 6)
            assert link.flush(10)
        assert server.stats()["rejected"] == 1
        got = {name: len(values) for name, values in inbox.episodes().items()}
        assert (got["good"], got["later"], got["latest"]) == (6, 6, 6)
        assert got["bad"] <= 3


def test_an_episode_belongs_to_the_run_that_its_actor_acts_for(tmp_path):
    """The control thread begins one for the run before while another run's learner is being let in."""
    inboxes, port = {name: Inbox() for name in ("one", "two")}, free_port()
    make = spools(tmp_path / "spool")
    with linked(port, connect=False, spools=make) as link:
        with serving(port, on_record=inboxes["one"], run_id="one"):
            link.act_for(link.connect(10).run)
            send_episode(link, "first", 3)
            assert link.flush(10)
        with serving(port, on_record=inboxes["two"], run_id="two"):
            assert link.wait_until(lambda: link.welcome is not None and link.welcome.run == link.run == "two", 10)
            send_episode(link, "late", 4)
            link.act_for("two")
            send_episode(link, "second", 5)
            assert link.wait_until(lambda: "second" in inboxes["two"].episodes(), 10)
            assert link.flush(10)
            assert link.stats()["abandoned"] == 0
        assert link.error is None
    assert inboxes["two"].episodes() == {"second": [0, 1, 2, 3, 4]}
    assert inboxes["one"].episodes() == {"first": [0, 1, 2]}
    with serving(port, on_record=inboxes["one"], run_id="one"), linked(port, spools=make) as link:
        assert link.flush(10)
    assert inboxes["one"].episodes()["late"] == [0, 1, 2, 3]


@pytest.mark.parametrize("third", ["one", "three"])
def test_three_runs_within_one_episode(tmp_path, third):
    inboxes, port, make = {name: Inbox() for name in ("one", "two", "three")}, free_port(), spools(tmp_path / "spool")
    with opened(tmp_path / "one") as journal:
        store = {"one": journal}
        with linked(port, connect=False, spools=make) as link:
            for i, run in enumerate(("one", "two", third)):
                with serving(port, on_record=inboxes[run], run_id=run, store=store.get(run)) as server:
                    if i == 2:
                        server.resume()
                    link.connect(10) if i == 0 else eventually(lambda n=i: link.stats()["connections"] == n + 1)
                    if i == 0:
                        link.begin(Begin("e"))
                    link.step(step(i, i))
                    if i == 0 or third == run == "one":
                        assert link.flush(10)
                    if i == 2:
                        link.step(step(3, 3))
                        link.end(end("e", 4))
                        send_episode(link, "next", 2)
                        assert link.flush(10)
            assert link.error is None
        assert inboxes["two"].records == []
        if third == "three":
            assert inboxes["three"].episodes() == {"next": [0, 1]}
            with serving(port, on_record=inboxes["one"], run_id="one", store=journal) as server:
                server.resume()
                with linked(port, spools=make) as link:
                    assert link.flush(10)
        last = {"next": [0, 1]} if third == "one" else {}
        assert inboxes["one"].episodes() == {"e": [0, 1, 2, 3], **last}


def test_losses_beyond_all_bounds_are_refused(port):
    with serving(port) as server:
        actor = RawActor(port)
        for first in (0, 5):
            fields = {"first": first, "span": 5, "steps": 2**62 - 1}
            actor.data.send_multipart([actor.token, *codec.encode(LOST, fields)])
        assert actor.receive(actor.control).kind == REFUSED
        eventually(lambda: server.stats()["malformed"] == 1)


def test_a_spool_that_gives_nothing_back_for_a_while_is_asked_again(tmp_path, monkeypatch, caplog):
    port, broken, at, inbox = free_port(), [True], Spool.at, Inbox()

    def sometimes(self, seq):
        if broken:
            raise JournalError("the spool cannot be read: Too many open files")
        return at(self, seq)

    monkeypatch.setattr(Spool, "at", sometimes)
    with serving(port, on_record=inbox), linked(port, spools=spools(tmp_path)) as link:
        send_episode(link, "e", 5)
        assert not link.flush(0.5)
        broken.clear()
        assert link.flush(10)
        assert link.error is None
    assert inbox.episodes() == {"e": list(range(5))}
    assert sum("Too many open files" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_is_acknowledged_before_it_is_on_disk_and_all_is_once_the_disk_works(tmp_path, monkeypatch, lost):
    """`lost`: the system dropped what it could not write, and an fsync that succeeds proves nothing."""
    config = dataclasses.replace(CONFIG, durability="power")
    port, fsync, broken = free_port(), os.fsync, []

    def failing(fd):
        if broken:
            raise OSError(5, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with (
        opened(tmp_path, sync_interval=0.05) as store,
        serving(port, config=config, store=store) as server,
        linked(port, config=config) as link,
    ):
        send_episode(link, "e", 5)
        assert link.flush(10)
        broken.append(True)
        send_episode(link, "f", 5)
        eventually(lambda: "Input/output error" in server.stalled)
        assert not link.flush(0.3)
        if lost:
            newest = max(tmp_path.glob("*.journal"))
            os.truncate(newest, newest.stat().st_size - 10)
        broken.clear()
        if lost:
            eventually(lambda: "start the learner again" in server.stalled)
            assert not link.flush(0.5)
        else:
            assert link.flush(10)
            send_episode(link, "g", 5)
            assert link.flush(10)
            assert server.stalled == ""
    assert lost or kept(tmp_path) == {"e": 5, "f": 5, "g": 5}


def test_sessions_that_actors_have_ended_are_not_remembered_for_ever(tmp_path, port):
    """Each process of an actor is a session, and a journal's table has a row of every session it remembers."""
    with opened(tmp_path / "journal") as store, serving(port, store=store):
        for i in range(3):
            with linked(port, spools=spools(tmp_path / "spool")) as link:
                send_episode(link, f"e{i}", 5)
                assert link.flush(10)
            eventually(lambda: store.states == {})
    assert kept(tmp_path / "journal") == {"e0": 5, "e1": 5, "e2": 5}
    with opened(tmp_path / "journal") as store:
        list(store.replay())
        assert store.states == {}


def kept(folder):
    """What a journal holds: {episode: steps}, each in order, and once."""
    inbox = Inbox()
    with opened(folder) as store:
        for row in store.replay():
            if row.record is not None and row.delivered:
                inbox(row, row.record)
    return {name: len(values) for name, values in inbox.episodes().items()}
