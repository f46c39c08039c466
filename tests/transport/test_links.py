"""Bad links and dying processes, in one process: nothing is lost, nothing comes twice, no sender waits."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from flaky_proxy import flaky
from ports import free_port
from transport_tools import CONFIG, LIMITS, Inbox, end, eventually, linked, send_episode, serving, step

from serl_chunk.transport.storage.journal import Journal, JournalError
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Begin, End, Outcome, StepBlock

pytestmark = pytest.mark.system

FRAME = np.zeros((120, 160, 3), np.uint8)


def spools(folder):
    return lambda run: Spool(folder / run, LIMITS)


def stored(store):
    """(session, first, record) of everything in a store, which is closed then."""
    rows = [(r.session, r.first, r.record) for r in store.replay()]
    assert store.unreadable == 0
    store.close()
    return rows


def test_a_link_that_breaks_again_and_again(tmp_path):
    inbox, near, far = Inbox(), free_port(), free_port()
    store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
    with (
        serving(far, on_record=inbox, store=store),
        flaky(near, far) as proxy,
        linked(near, spools=spools(tmp_path / "spool")) as link,
    ):
        for e in range(12):
            send_episode(link, f"e{e}", 60)
            eventually(lambda: proxy.connections == 3)
            proxy.break_connections()
        assert link.flush(30)
        assert inbox.episodes() == {f"e{e}": list(range(60)) for e in range(12)}
        assert proxy.broken == 36
    store.close()


def test_a_link_that_is_away_for_a_while_delays_no_caller(tmp_path):
    inbox, near, far = Inbox(), free_port(), free_port()
    with (
        serving(far, on_record=inbox),
        flaky(near, far) as proxy,
        linked(near, spools=spools(tmp_path / "spool")) as link,
    ):
        proxy.cut = True
        proxy.break_connections()
        took = []
        link.begin(Begin("e"))
        for tick in range(200):
            start = time.perf_counter()
            link.step(step(tick, tick))
            took.append(time.perf_counter() - start)
            time.sleep(0.005)
        link.end(end("e", 200))
        eventually(lambda: link.stats()["connected"] == 0)
        assert not link.flush(0.1)
        assert np.quantile(took, 0.95) < 0.05  # a second and more of no network, and no call that waited for it
        proxy.cut = False
        assert link.flush(30)
        assert inbox.episodes() == {"e": list(range(200))}


def test_a_slow_link_delivers_an_episode_that_is_larger_than_it_carries_in_the_time(tmp_path):
    """Six megabytes through two a second: heartbeats and acknowledgements go on, nothing is sent twice."""
    near, far, inbox = free_port(), free_port(), []
    config = dataclasses.replace(CONFIG, timeout_s=5.0)  # a message of a megabyte takes half a second
    with (
        serving(far, config=config, on_record=lambda info, record: inbox.append(record)) as server,
        flaky(near, far) as proxy,
        linked(near, config=config, spools=spools(tmp_path / "spool")) as link,
    ):
        proxy.rate = 2e6
        link.begin(Begin("e"))
        for tick in range(100):
            link.step(step(tick)._replace(observation={"state": np.full(2, tick, np.float32), "images/top": FRAME}))
        link.end(End("e", 100, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))
        assert link.flush(60)
        assert sum(r.n for r in inbox if isinstance(r, StepBlock)) == 100
        assert server.stats()["duplicates"] == 0
        assert link.stats()["retransmitted"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("quality", [0, 90], ids=["raw", "jpeg"])
def test_three_large_cameras_over_a_hundred_megabits(tmp_path, quality):
    """138 MB/s at 50 Hz through 12.5: raw frames wait, and leave after the episode; JPEG keeps up; none is lost."""
    near, far, held, seconds, hz = free_port(), free_port(), [], 4, 50
    y, x = np.mgrid[0:480, 0:640]
    scenes = [np.stack([(x + 9 * i) % 256, (y + 5 * i) % 256, (x + y) % 256], -1).astype(np.uint8) for i in range(4)]
    # No copies are kept of half a gigabyte of frames: what arrived is counted, and a frame now and then compared.
    steps, worst = [], [0.0]

    def arrived(info, record):
        if isinstance(record, StepBlock):
            steps.extend(range(record.first_tick, record.first_tick + record.n))
            rows = record.sparse["images/high"]
            off = np.abs(rows.values[0].astype(int) - scenes[(record.first_tick + int(rows.index[0])) % 4])
            worst[0] = max(worst[0], float(off.mean()))

    config = dataclasses.replace(CONFIG, timeout_s=10.0, jpeg_quality=quality)
    with (
        serving(far, config=config, on_record=arrived) as server,
        flaky(near, far) as proxy,
        linked(near, config=config, spools=spools(tmp_path / "spool")) as link,
    ):
        proxy.rate = 12.5e6
        link.begin(Begin("e"))
        begin = time.monotonic()
        late = []
        for tick in range(seconds * hz):
            time.sleep(max(0.0, begin + tick / hz - time.monotonic()))
            images = {f"images/{c}": scenes[tick % 4] for c in ("high", "left", "right")}
            start = time.perf_counter()
            link.step(step(tick)._replace(observation={"state": np.zeros(2, np.float32), **images}, decision=None))
            late.append(time.perf_counter() - start)
            held.append(link.stats()["unacked_bytes"])
        link.end(End("e", seconds * hz, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))
        assert link.flush(120)
        assert steps == list(range(seconds * hz))
        assert worst[0] == 0 if not quality else worst[0] < 8
        assert server.stats()["duplicates"] == 0
        assert link.stats()["retransmitted"] == 0
        if quality:
            assert max(held) < 20e6
        else:
            assert max(held) > 60e6  # what waits is in the statistics, and in the status line
    p99 = 1e6 * np.quantile(late, 0.99)
    print(f"quality {quality}: at most {max(held) / 1e6:.0f} MB waited; hand-over p99 {p99:.0f} us")


def test_a_successor_sends_what_a_dead_actor_recorded_and_ends_its_episode(tmp_path):
    inbox, port = Inbox(), free_port()
    store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
    with linked(port, connect=False, spools=spools(tmp_path)) as first:
        with serving(port, on_record=inbox, store=store):
            first.connect(10)
            send_episode(first, "e0", 10)
            assert first.flush(10)
        first.begin(Begin("e1"))
        for tick in range(7):
            first.step(step(tick, tick))
        eventually(lambda: first.stats()["queued"] == 0)  # recorded, and no learner there to have it
    server = serving(port, on_record=inbox, store=store)
    with server as server, linked(port, connect=False, spools=spools(tmp_path)) as second:
        server.resume()
        second.connect(10)
        assert second.flush(10)
        send_episode(second, "e2", 5)
        assert second.flush(10)
        assert inbox.episodes() == {"e0": list(range(10)), "e1": list(range(7)), "e2": list(range(5))}
        ends = [r for r in inbox.records if isinstance(r, End)]
        assert [(e.episode_id, e.length, e.outcome_by) for e in ends] == [
            ("e0", 10, "environment"), ("e1", 7, "restart"), ("e2", 5, "environment"),
        ]  # fmt: skip
        assert second.stats()["incarnation"] == 2
        assert second.stats()["inherited"] == 1 + 7 + 1  # a beginning, seven steps, an end
        assert second.steps_recorded == 22
        assert server.stats()["duplicates"] == 0
    store.close()
    assert not list(tmp_path.glob("run/*.journal"))  # all acknowledged: nothing is kept


def test_a_restarted_learner_knows_every_session_from_its_journal(tmp_path):
    port = free_port()
    with linked(port, connect=False, spools=spools(tmp_path / "spool")) as link:
        for life in range(4):
            store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
            known = len(list(store.replay()))
            with serving(port, store=store) as server:
                server.resume()
                link.connect(10) if life == 0 else eventually(lambda: link.stats()["connected"] == 1)
                link.begin(Begin(f"e{life}"))
                for tick in range(30):
                    link.step(step(tick, tick))
                link.end(end(f"e{life}", 30))
                assert link.flush(10)
                assert server.stats()["duplicates"] == server.stats()["lost"] == 0
                assert (server.sessions()[0].state.steps, known > 0) == (30 * (life + 1), life > 0)
            store.close()
    rows = stored(RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6))
    assert [first for _, first, _ in rows] == sorted({first for _, first, _ in rows})
    assert sum(r.n for _, _, r in rows if isinstance(r, StepBlock)) == 120


def test_a_full_disk_at_the_learner_stops_acknowledgements_and_nothing_else(tmp_path, monkeypatch):
    inbox, port = Inbox(), free_port()
    store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
    full = {"now": False}
    append = RecordStore.append

    def perhaps(self, *args, **kwargs):
        if full["now"]:
            raise JournalError("cannot write: No space left on device")
        return append(self, *args, **kwargs)

    monkeypatch.setattr(RecordStore, "append", perhaps)
    monkeypatch.setattr(RecordStore, "has_room", property(lambda self: not full["now"]))
    with serving(port, on_record=inbox, store=store) as server, linked(port, spools=spools(tmp_path / "spool")) as link:
        send_episode(link, "before", 5)
        assert link.flush(10)
        full["now"] = True
        send_episode(link, "during", 50)
        eventually(lambda: "No space left" in server.stalled)
        assert not link.flush(3 * CONFIG.timeout_s)  # longer than silence: it is not taken for a dead learner
        assert link.stats()["connections"] == 1
        full["now"] = False
        assert link.flush(10)
        assert inbox.episodes() == {"before": list(range(5)), "during": list(range(50))}
    store.close()


def test_a_full_disk_at_the_actor_keeps_records_in_memory(tmp_path, monkeypatch):
    inbox, port = Inbox(), free_port()
    full = {"now": True}
    append = Spool.append

    def perhaps(self, *args, **kwargs):
        if full["now"]:
            raise JournalError("cannot write: No space left on device")
        return append(self, *args, **kwargs)

    monkeypatch.setattr(Spool, "append", perhaps)
    with serving(port, on_record=inbox), linked(port, spools=spools(tmp_path)) as link:
        send_episode(link, "e", 50)
        eventually(lambda: not link.can_begin()[0])
        assert "No space left on device" in link.can_begin()[1]
        full["now"] = False
        assert link.flush(10)
        assert link.can_begin() == (True, "")
        assert inbox.episodes() == {"e": list(range(50))}


def test_acknowledged_after_the_fsync_where_power_may_fail(tmp_path, monkeypatch):
    port = free_port()
    config = dataclasses.replace(CONFIG, durability="power", sync_interval=0.1)
    store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
    synced = {"below": 0}  # journal entries that are on the disk
    monkeypatch.setattr(
        Journal, "synced", property(lambda self: synced["below"], lambda self, number: None), raising=False
    )
    with serving(port, config=config, store=store) as server, linked(port, config=config) as link:
        send_episode(link, "e", 5)
        eventually(lambda: server.stats()["steps"] == 5)
        assert not link.flush(3 * CONFIG.heartbeat)  # inserted, written, and not safe yet
        synced["below"] = store.journal.next
        assert link.flush(10)
    store.close()


def test_records_of_one_run_never_reach_another(tmp_path):
    one, two, port = Inbox(), Inbox(), free_port()
    store = RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)
    with linked(port, connect=False, spools=spools(tmp_path)) as link:
        with serving(port, on_record=one, run_id="one", store=store):
            link.connect(10)
            send_episode(link, "a", 3)
            assert link.flush(10)
        send_episode(link, "b", 4)  # the learner is away: kept for run one
        link.begin(Begin("c"))
        link.step(step(0, 0))
        eventually(lambda: link.stats()["queued"] == 0)
        with serving(port, on_record=two, run_id="two"):
            assert link.wait_until(lambda: link.stats()["connections"] == 2, 10)
            link.step(step(1, 1))  # the rest of an episode follows its beginning
            link.end(end("c", 2))
            send_episode(link, "d", 5)
            assert link.flush(10)
            assert two.episodes() == {"d": list(range(5))}
            assert link.stats()["abandoned"] == 0
            assert link.stats()["set_aside"] > 0
    with (
        serving(port, on_record=one, run_id="one", store=store) as server,
        linked(port, connect=False, spools=spools(tmp_path)) as link,
    ):
        server.resume()
        link.connect(10)
        assert link.flush(10)
        assert one.episodes() == {"a": [0, 1, 2], "b": [0, 1, 2, 3], "c": [0, 1]}
    store.close()
