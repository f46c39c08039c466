"""Bad links and dying processes, in one process: nothing is lost, nothing comes twice, no sender waits."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from flaky_proxy import flaky
from ports import free_port
from transport_tools import CONFIG, LIMITS, Inbox, end, eventually, linked, send_episode, serving, spools, step

from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Begin

pytestmark = pytest.mark.system


def test_a_link_that_breaks_again_and_again(tmp_path):
    inbox, near, far = Inbox(), free_port(), free_port()
    with (
        contextlib.closing(RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)) as store,
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


@pytest.mark.parametrize("at", ["learner", "actor"])
def test_a_full_disk_stops_acknowledgements_or_the_next_episode_and_nothing_else(tmp_path, monkeypatch, at):
    """What the actor's disk does not take is kept in memory."""
    inbox, port, full = Inbox(), free_port(), []
    writer = RecordStore if at == "learner" else Spool
    append = writer.append

    def perhaps(self, *args, **kwargs):
        if full:
            raise JournalError("cannot write: No space left on device")
        return append(self, *args, **kwargs)

    monkeypatch.setattr(writer, "append", perhaps)
    monkeypatch.setattr(RecordStore, "has_room", property(lambda self: not full))
    with (
        contextlib.closing(RecordStore(tmp_path / "journal", LIMITS, min_steps=10**6)) as store,
        serving(port, on_record=inbox, store=store) as server,
        linked(port, spools=spools(tmp_path / "spool")) as link,
    ):
        send_episode(link, "before", 5)
        assert link.flush(10)
        full.append(True)
        send_episode(link, "during", 50)
        if at == "learner":
            eventually(lambda: "No space left" in server.stalled)
            assert not link.flush(3 * CONFIG.timeout_s)  # longer than silence: it is not taken for a dead learner
        else:
            eventually(lambda: not link.can_begin()[0])
            assert "No space left on device" in link.can_begin()[1]
        full.clear()
        assert link.flush(10)
        assert link.can_begin() == (True, "")
        assert link.stats()["connections"] == 1
        assert inbox.episodes() == {"before": list(range(5)), "during": list(range(50))}


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
