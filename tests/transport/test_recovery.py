"""What goes wrong rarely and must not cost anything: lost acknowledgements, other runs, refused records, bad disks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import shutil

import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from transport_tools import (
    CONFIG,
    LIMITS,
    Inbox,
    RawActor,
    block,
    end,
    eventually,
    linked,
    send_episode,
    serving,
    spools,
    step,
)

from serl_chunk.transport.client import outbox
from serl_chunk.transport.client.flow import LEAST_BYTES, Flow
from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.transport.wire import handshake, records
from serl_chunk.transport.wire.handshake import REFUSED, RefusedError
from serl_chunk.transport.wire.records import LOST
from serl_chunk.types import Begin, ConfigError, DataError, SerlChunkError, StepBlock
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
        server.trim()
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


def steps(link, first, last):
    for tick in range(first, last):
        link.step(step(tick, tick))


def test_duplicates_are_trimmed_and_gaps_refused(port, inbox):
    with serving(port, on_record=inbox) as server:
        actor = RawActor(port)

        def told(record, first):
            return actor.record(records.encode_record(record, first)).header["next"]

        assert told(Begin("e"), 0) == 1
        assert told(block("e", 0, 4), 1) == 5
        assert told(block("e", 0, 4), 1) == 5  # all known
        assert told(block("e", 2, 4), 3) == 7  # half known
        gap = actor.record(records.encode_record(block("e", 8, 2), 9))
        assert (gap.kind, gap.header["next"], gap.header["gap"]) == (handshake.ACK, 7, True)
        actor.receive(actor.data)  # the acknowledgement that follows every turn
        assert told(block("e", 6, 2), 7) == 9
        assert told(end("e", 8), 9) == 10
        assert inbox.episodes() == {"e": list(range(8))}
        stats = server.stats()
        assert (stats["duplicates"], stats["gaps"]) == (6, 1)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_message_is_sent_again(monkeypatch, lost):
    """The data connection swallows one, and the learner reports the gap; the first one has no successor."""
    inbox, port, send, sent = Inbox(), free_port(), outbox.try_send, []

    def swallow(s, frames):
        sent.append(frames)
        return True if len(sent) == lost else send(s, frames)

    monkeypatch.setattr(outbox, "try_send", swallow)
    with serving(port, on_record=inbox) as server, linked(port) as link:
        link.begin(Begin("first"))
        if lost == 1:
            assert link.flush(10)
            assert len(inbox.records) == 1
        steps(link, 0, 20)
        link.end(end("first", 20))
        for e in range(4):
            send_episode(link, f"e{e}", 20)
        assert link.flush(10)
        assert inbox.episodes() == {name: list(range(20)) for name in ("first", "e0", "e1", "e2", "e3")}
        assert server.stats()["gaps"] >= (lost > 1)
        assert link.stats()["retransmitted"] >= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_learner_stops_it_visibly(port):
    def broken(info, record):
        raise ZeroDivisionError("oops")

    told = pytest.raises(SerlChunkError, match=naming("ZeroDivisionError", "oops"))
    with told, serving(port, on_record=broken) as server, linked(port) as link:
        link.begin(Begin("e"))
        with contextlib.suppress(SerlChunkError):
            eventually(lambda: server.check())  # true never, over once it raises
        assert link.flush(0.05) is False


def test_an_actor_leaves_an_older_learner_of_its_run(port, inbox):
    with linked(port, connect=False) as link:
        for term in (2, 1, 3):
            with serving(port, on_record=inbox, term=term):
                if term > 1:
                    link.connect(10)
                    eventually(lambda: link.away == 0)
                    assert link.flush(10)
                else:
                    eventually(lambda: "older learner of run run" in link.waiting)
                    assert link.away > 0
                    assert inbox.records == []
            if term == 2:
                eventually(lambda: link.away > 0)
                send_episode(link, "e", 3)
    assert list(inbox.episodes()) == ["e"]


@pytest.mark.parametrize(("allowance", "woken"), [(None, [0, 4, 5]), (2, [0, 2, 3, 4, 5]), (9, [0, 4, 5])])
def test_a_simulators_steps_wait_for_one_another_and_for_no_allowance(monkeypatch, allowance, woken):
    """The network thread hears of the fifth record; but at once of what an allowance ends with: else both wait."""
    with linked(free_port(), connect=False, block_steps=5) as link:
        link.allowance, heard = allowance, []
        with monkeypatch.context() as listening:
            listening.setattr(link._out.waker, "wake", lambda: heard.append(link.steps_recorded))
            link.begin(Begin("e"))
            for tick in range(5):
                link.step(step(tick))
    assert heard == woken


def test_records_out_of_order_are_refused_at_the_hand_over():
    with linked(free_port(), connect=False) as link:
        with pytest.raises(DataError, match=naming(0, "Begin")):
            link.step(step(0))
        link.begin(Begin("e"))
        with pytest.raises(DataError, match=naming("f", "e", "End")):
            link.begin(Begin("f"))
        with pytest.raises(DataError, match=naming("f", "e")):
            link.end(end("f", 0))


def test_a_link_says_how_long_the_learner_is_away_and_what_is_kept(monkeypatch):
    inbox, late, port = Inbox(), Inbox(), free_port()
    monkeypatch.setattr("serl_chunk.transport.client.link.AWAY", 0.2)
    config = dataclasses.replace(CONFIG, spool_bytes=28_000)
    with linked(port, connect=False, config=config, largest_episode_bytes=12_000) as link:
        with serving(port, config=config, on_record=inbox):
            link.connect(10)
            send_episode(link, "e", 5)
            assert link.flush(10)
            assert link.backlog(begun=True) == ""
            assert link.stats()["away_s"] == 0
        eventually(lambda: link.stats()["away_s"] > 0.2)
        send_episode(link, "f", 20)
        line = link.backlog(begun=True)
        assert re.match(r"learner away for \d+ s, spool .* KiB, holding after this episode\Z", line), line
        assert link.can_begin()[0]  # this one fits
        send_episode(link, "g", 80)
        assert link.backlog(begun=False).endswith("holding until there is room")
        may, why = link.can_begin()
        assert (may, "transport.spool_bytes=28000" in why) == (False, True)
        with serving(port, config=config, on_record=late):
            assert link.flush(10)
            assert link.backlog(begun=True) == ""
            assert link.can_begin() == (True, "")
        assert late.episodes()["g"] == [*range(80)]


def test_a_link_without_spools_takes_no_records_and_writes_no_files(tmp_path, monkeypatch, port):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.rglob("*"))
    with serving(port) as server, linked(port, spools=None) as link:
        (session,) = server.sessions()
        with pytest.raises(DataError, match=naming("spools", "episode", "e")):
            link.begin(Begin("e"))
        assert link.can_begin() == (True, "")
        assert link.flush(1)
        assert session.live
        assert {p for p in tmp_path.rglob("*") if p.is_file()} == {p for p in before if p.is_file()}
    eventually(lambda: not list(tmp_path.rglob("*.journal")))


TIMEOUT = 5.0
MOST, LARGEST = 32 << 20, 1 << 20


class Line:
    """A link of `rate` bytes per second and a round trip, which carries what a flow lets it."""

    def __init__(self, rate: float, round_trip: float = 0.01) -> None:
        self.rate, self.round_trip = rate, round_trip
        self.now = self.free_at = 0.0
        self.flow = Flow(most=MOST, largest=LARGEST, timeout_s=TIMEOUT, clock=lambda: self.now)
        self.longest = 0.0  # that the line took for what had been handed over
        self._queue: collections.deque = collections.deque()

    def carry(self, nbytes: int) -> None:
        """Send `nbytes` as the flow cuts them, and wait for them."""
        while nbytes or self._queue:
            while nbytes:
                piece = self.flow.cut(nbytes)
                if not self.flow.has_room(piece):
                    break
                self.free_at = max(self.now, self.free_at) + piece / self.rate
                self._queue.append((self.free_at + self.round_trip, self.flow.send(piece)))
                self.longest = max(self.longest, self.free_at - self.now)
                nbytes -= piece
            at, sent = self._queue.popleft()
            self.now = max(self.now, at)
            self.flow.arrive(sent)


@given(st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(1e3, 1e9), st.booleans()), max_size=20))
def test_whatever_a_link_does_a_message_may_always_be_sent(events):
    line = Line(1e6)
    for nbytes, rate, broken in events:
        line.rate = rate
        line.carry(nbytes)
        assert line.flow.in_flight == 0
        assert LEAST_BYTES <= line.flow.message_bytes <= LARGEST
        assert line.flow.has_room(1 << 30)  # nothing is on its way
        if broken:
            line.flow.slow_down()
            line.flow.restart()
            assert line.flow.message_bytes == LEAST_BYTES


def test_a_learner_that_moved_is_found_by_its_address_file(tmp_path, inbox):
    """Another process of the run, elsewhere: it gets what the first lacks, and what is no address changes nothing."""
    moved, file, first, second = Inbox(), tmp_path / "address", free_port(), free_port()
    for text in ("", "gpu", "gpu:x", "gpu:0", ":5588", "gpu box:5588", "tcp://gpu:5588"):
        file.write_text(text)
        assert handshake.read_address(file) is None
    for path, mode in ((file, 0o646), (tmp_path, 0o777)):
        sound = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod go-w {path}"):  # another user could name a learner of theirs
            handshake.read_address(file)
        path.chmod(sound)
    with linked(first, connect=False, address_file=file) as link:
        with serving(first, on_record=inbox):
            link.connect(timeout=10)
            send_episode(link, "e1", 4)
            assert link.flush(10)
        send_episode(link, "e2", 5)
        file.unlink()
        handshake.write_address(file, "127.0.0.1", second)
        with serving(second, on_record=moved):
            assert link.flush(10)
        assert link.waiting == f"no learner answers at 127.0.0.1:{second}"
    assert [len(i.episodes()[name]) for i, name in ((inbox, "e1"), (moved, "e2"))] == [4, 5]
