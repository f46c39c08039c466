"""Links that need longer for one message than `timeout_s`: everything arrives, once, and little is sent twice."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from flaky_proxy import flaky
from key_tools import joined
from transport_tools import CONFIG, LIMITS, linked, serving

from serl_chunk.transport.sockets import free_port
from serl_chunk.transport.storage.disk_spool import DiskSpool
from serl_chunk.types import Begin, End, Outcome, Snapshot, Source, Step, StepBlock

pytestmark = pytest.mark.system

BUFFER = 8192  # bytes of the proxy's kernel buffers: what it has taken is nearly what it has carried
KEYS = pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "keys"])


def spools(folder):
    return lambda run: DiskSpool(folder / run, LIMITS)


def picture(tick: int, nbytes: int) -> np.ndarray:
    """uint8[nbytes / 48, 16, 3]: other pixels on every tick, none of them repeated in a regular way."""
    return np.random.default_rng(tick).integers(0, 256, (nbytes // 48, 16, 3), np.uint8)


def large_step(tick: int, nbytes: int, cameras: int = 1) -> Step:
    images = {f"images/c{i}": picture(10 * tick + i, nbytes // cameras) for i in range(cameras)}
    observation = {"state": np.full(2, tick, np.float32), **images}
    return Step(tick, observation, np.zeros(2, np.float32), 0.0, Source.POLICY, tick, 3, 0.02 * tick, None)


def send(link, episode, steps, nbytes, cameras=1):
    link.begin(Begin(episode))
    for tick in range(steps):
        link.step(large_step(tick, nbytes, cameras))
    link.end(End(episode, steps, {"state": np.zeros(2, np.float32)}, True, False, Outcome.SUCCESS))


class Arrived:
    """Ticks of each episode in order of arrival; every image is compared with what was sent."""

    def __init__(self, nbytes: int, cameras: int = 1) -> None:
        self.ticks: dict[str, list[int]] = {}
        self.ended: dict[str, int] = {}
        self._nbytes, self._cameras = nbytes, cameras

    def __call__(self, info, record) -> None:
        if isinstance(record, Begin):
            self.ticks[record.episode_id] = []
        elif isinstance(record, StepBlock):
            for i in range(record.n):
                tick, observation = record.first_tick + i, record.observation_at(i)
                for c in range(self._cameras):
                    expected = picture(10 * tick + c, self._nbytes // self._cameras)
                    np.testing.assert_array_equal(observation[f"images/c{c}"], expected)
                self.ticks[record.episode_id].append(tick)
        elif isinstance(record, End):
            self.ended[record.episode_id] = record.length


@contextlib.contextmanager
def throttled(tmp_path, *, encrypted=False, learner=None, config=CONFIG, shared=True, **served):
    """(server, link, proxy) with a proxy between them; `learner` makes keys where `encrypted`."""
    near, far = free_port(), free_port()
    keys = {"keys": joined(learner, tmp_path / "robot")} if encrypted else {}
    server_keys = {"keys": learner} if encrypted else {}
    with (
        serving(far, config=config, **server_keys, **served) as server,
        flaky(near, far, shared=shared, buffer=BUFFER) as proxy,
        linked(near, config=config, spools=spools(tmp_path / "spool"), **keys) as link,
    ):
        yield server, link, proxy


@KEYS
def test_a_record_that_takes_longer_than_the_time_out_arrives_once(tmp_path, learner, encrypted):
    """480 kB at 400 kB/s with a time-out of 0.6 s; heartbeats share the line."""
    nbytes, steps = 480_000, 3
    arrived = Arrived(nbytes)
    with throttled(tmp_path, encrypted=encrypted, learner=learner, on_record=arrived) as (server, link, proxy):
        proxy.rate = 4e5
        send(link, "e", steps, nbytes)
        assert link.flush(20)
        assert (arrived.ticks, arrived.ended) == ({"e": list(range(steps))}, {"e": steps})
        assert server.stats()["duplicates"] == 0
        assert proxy.forwarded < 1.5 * steps * nbytes


@KEYS
def test_a_snapshot_that_takes_longer_than_the_time_out_arrives_and_its_pieces_once(tmp_path, learner, encrypted):
    params = {f"w{i}": np.random.default_rng(i).normal(size=75_000).astype(np.float32) for i in range(4)}
    config = dataclasses.replace(CONFIG, piece_bytes=1 << 20)
    with throttled(tmp_path, encrypted=encrypted, learner=learner, config=config) as (server, link, proxy):
        proxy.rate = 4e5
        server.publish(Snapshot(1, params), {})
        assert link.wait_until(lambda: link.latest() is not None, 20)
        for path, value in params.items():
            np.testing.assert_array_equal(link.latest().params[path], value)
        assert link.stats()["snapshot_bytes"] == 1_200_000
        assert server.stats()["snapshot_bytes"] < 1_300_000
        assert link.stats()["connections"] == 1
