"""Links that need longer for one message than `timeout_s`: everything arrives, once, and little is sent twice."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from flaky_proxy import flaky
from key_tools import joined
from ports import free_port
from transport_tools import eventually, linked, serving, spools

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
def throttled(tmp_path, *, learner=None, **served):
    """(server, link, proxy) with a proxy between them; encrypted where there are keys of a `learner`."""
    near, far = free_port(), free_port()
    keys = {"keys": joined(learner, tmp_path / "robot")} if learner else {}
    with (
        serving(far, keys=learner, **served) as server,
        flaky(near, far, shared=True, buffer=BUFFER) as proxy,
        linked(near, spools=spools(tmp_path / "spool"), **keys) as link,
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


def test_a_record_and_a_snapshot_that_take_longer_than_the_time_out_arrive_once(tmp_path, learner):
    """480 kB and 300 kB at 400 kB/s with a time-out of 0.6 s; heartbeats share the line."""
    nbytes, steps = 480_000, 3
    params = {f"w{i}": np.random.default_rng(i).normal(size=75_000).astype(np.float32) for i in range(4)}
    arrived = Arrived(nbytes)
    with throttled(tmp_path, learner=learner, on_record=arrived) as (server, link, proxy):
        proxy.rate = 4e5
        send(link, "e", steps, nbytes)
        assert link.flush(20)
        assert (arrived.ticks, arrived.ended) == ({"e": list(range(steps))}, {"e": steps})
        assert server.stats()["duplicates"] == 0
        assert proxy.forwarded < 1.5 * steps * nbytes
        server.publish(Snapshot(1, params), {})
        assert link.wait_until(lambda: link.latest() is not None, 20)
        for path, value in params.items():
            np.testing.assert_array_equal(link.latest().params[path], value)
        assert link.stats()["snapshot_bytes"] == 1_200_000
        assert server.stats()["snapshot_bytes"] < 1_300_000
        assert link.stats()["connections"] == 1


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
