"""Links that need longer for one message than `timeout_s`: everything arrives, once, and little is sent twice."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from flaky_proxy import flaky
from key_tools import invited
from ports import free_port
from transport_tools import CONFIG, LIMITS, Inbox, end, eventually, linked, send_episode, serving, spools, step

from serl_chunk.transport.storage.journal import JournalError
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Begin, End, Outcome, Snapshot, Source, Step, StepBlock

pytestmark = pytest.mark.system
BUFFER = 8192  # bytes of the proxy's kernel buffers: what it has taken is nearly what it has carried


def picture(tick: int, nbytes: int) -> np.ndarray:
    """uint8[nbytes / 48, 16, 3]: other pixels on every tick, none of them repeated in a regular way."""
    return np.random.default_rng(tick).integers(0, 256, (nbytes // 48, 16, 3), np.uint8)


def send(link, episode, steps, nbytes):
    link.begin(Begin(episode))
    for t in range(steps):
        observation = {"state": np.full(2, t, np.float32), "images/c": picture(t, nbytes)}
        link.step(Step(t, observation, np.zeros(2, np.float32), 0.0, Source.POLICY, t, 3, 0.02 * t, None))
    link.end(End(episode, steps, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))


class Arrived:
    """Ticks of each episode in order of arrival; every image is compared with what was sent."""

    def __init__(self, nbytes: int) -> None:
        self.ticks: dict[str, list[int]] = {}
        self.ended: dict[str, int] = {}
        self._nbytes = nbytes

    def __call__(self, info, record) -> None:
        if isinstance(record, Begin):
            self.ticks[record.episode_id] = []
        elif isinstance(record, StepBlock):
            for i in range(record.n):
                tick = record.first_tick + i
                np.testing.assert_array_equal(record.observation_at(i)["images/c"], picture(tick, self._nbytes))
                self.ticks[record.episode_id].append(tick)
        elif isinstance(record, End):
            self.ended[record.episode_id] = record.length


@contextlib.contextmanager
def throttled(tmp_path, **served):
    """(server, link, proxy) with a proxy between them."""
    near, far = free_port(), free_port()
    with (
        serving(far, **served) as server,
        flaky(near, far, shared=True, buffer=BUFFER) as proxy,
        linked(near, spools=spools(tmp_path / "spool")) as link,
    ):
        yield server, link, proxy


@pytest.mark.parametrize("away_s", [0.0, 1.5], ids=["broken", "away"])
def test_a_record_goes_on_where_the_connection_broke(tmp_path, away_s):
    """A record that no connection lives long enough for; `away` for longer than the learner waits."""
    nbytes, arrived = 300_000, Arrived(300_000)
    with throttled(tmp_path, on_record=arrived) as (server, link, proxy):
        proxy.rate = 3e5  # one second
        send(link, "e", 1, nbytes)
        breaks = 0

        def losses():
            return link.stats()["connections"] + server.stats()["gaps"]

        while not link.flush(0.4):
            assert breaks < 8
            noticed = losses()
            proxy.cut = bool(away_s)
            proxy.break_connections()
            if away_s:
                eventually(lambda: not server.stats()["sessions"])
                proxy.cut = False
            breaks += 1
            eventually(lambda before=noticed: losses() > before or link.flush(0))  # noticed, and it goes on
        assert breaks >= 2  # in the middle of the record
        assert (arrived.ticks, arrived.ended) == ({"e": [0]}, {"e": 1})
        assert server.stats()["duplicates"] == 0


def test_a_snapshot_goes_on_where_the_connection_broke_though_newer_ones_are_published(tmp_path):
    """The pull that began completes; its pieces come once, except those that were on their way."""
    nbytes, arrived = 200_000, Arrived(200_000)
    params = [{"w": np.random.default_rng(i).normal(size=75_000).astype(np.float32)} for i in range(20)]
    with throttled(tmp_path, on_record=arrived) as (server, link, proxy):
        send(link, "fast", 20, nbytes)  # a link that fills its buffers, and then carries a message in ten time-outs
        assert link.flush(10)
        proxy.rate = 3e5  # one second
        server.publish(Snapshot(0, params[0]), {})
        eventually(lambda: server.stats()["pieces"] > 0)
        for version in range(1, 20):
            if link.wait_until(lambda: link.latest() is not None, 0.4):
                break
            server.publish(Snapshot(version, params[version]), {})
            proxy.break_connections()
            eventually(lambda n=version: link.stats()["connections"] >= n + 1)
        assert link.latest().version == 0
        np.testing.assert_array_equal(link.latest().params["w"], params[0]["w"])
        assert version >= 3
        assert server.stats()["snapshot_bytes"] < 2 * 300_000
        proxy.rate = 1.5e5
        server.publish(Snapshot(20, params[1]), {})
        send(link, "slow", 2, nbytes)  # both directions at once
        assert link.flush(20)
        assert link.wait_until(lambda: link.latest().version > 0, 20)
        assert arrived.ticks == {"fast": list(range(20)), "slow": [0, 1]}
        assert server.stats()["duplicates"] == 0


def test_one_forwarded_port_of_another_number_with_keys(tmp_path, learner):
    """As of a rented machine behind NAT, 40 ms and 20 Mbit/s away: joining, records, a snapshot, a checkpoint."""
    near, far, arrived = free_port(), free_port(), Arrived(48_000)
    keys = invited(learner, tmp_path / "robot", port=far)
    snapshot = Snapshot(3, {"w": np.random.default_rng(0).normal(size=75_000).astype(np.float32)})
    with (
        serving(far, keys=learner, on_record=arrived, fetch=lambda step: (snapshot, {"step": step})) as server,
        flaky(near, far, shared=True) as proxy,
        linked(near, keys=keys, connect=False) as link,
    ):
        proxy.delay, proxy.rate = 0.02, 2.5e6
        link.connect(20)
        server.publish(snapshot, {})
        send(link, "e", 20, 48_000)
        assert link.flush(20)
        assert link.wait_until(lambda: link.latest() is not None, 20)
        assert link.fetch_checkpoint("latest", 20)[1] == {"step": "latest"}
        assert (arrived.ticks, arrived.ended) == ({"e": list(range(20))}, {"e": 20})
        assert link.stats()["connections"] == 1


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
