"""Snapshots are copies, only the newest waits, versions never go back, and an error is not lost."""

from __future__ import annotations

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import naming

from serl_chunk.learner.learner import SnapshotPublisher
from serl_chunk.types import DataError


class Flattener:
    """The one thing a publisher asks of an agent. `gate` holds it until a test lets it go on."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def flatten_params(self, params):
        self.entered.set()
        self.gate.wait()
        return {k: np.array(v) for k, v in params.items()}


def tree(number: float):
    return {"w": jnp.full(3, number)}


@pytest.fixture
def got() -> list:
    return []


@pytest.fixture
def publisher(got, tmp_path):
    def begin(*, threaded: bool, agent=None, publish=lambda s, info: got.append((s, info))) -> SnapshotPublisher:
        return SnapshotPublisher(agent or Flattener(), publish, tmp_path, threaded=threaded)

    return begin


def broken(snapshot, info):
    raise OSError("the socket is gone")


def test_in_one_process_the_hand_over_happens_in_the_call_and_its_version_is_noted_before_a_kill(publisher, got):
    p = publisher(threaded=False)
    assert [p.publish(tree(n), {"step": n}) for n in (1, 2)] == [1, 2]
    assert [(s.version, s.params["w"][0], info) for s, info in got] == [(1, 1, {"step": 1}), (2, 2, {"step": 2})]
    assert publisher(threaded=False).version == 2  # the first was never closed
    p.close()


def test_a_snapshot_survives_the_update_that_donates_its_source(publisher, got):
    agent, params = Flattener(), tree(1)
    p = publisher(threaded=True, agent=agent)
    agent.gate.clear()
    p.publish(params, {})
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)(params))
    assert params["w"].is_deleted()
    agent.gate.set()
    p.close()
    np.testing.assert_array_equal(got[0][0].params["w"], np.ones(3))


def test_only_the_newest_waits_and_closing_delivers_it(publisher, got):
    agent = Flattener()
    p = publisher(threaded=True, agent=agent)
    agent.gate.clear()
    p.publish(tree(1), {})
    agent.entered.wait()  # the thread has taken the first
    assert [p.publish(tree(n), {}) for n in (2, 3, 4)] == [2, 3, 4]  # no caller waits here
    agent.gate.set()
    p.close()
    assert [(s.version, s.params["w"][0]) for s, _ in got] == [(1, 1), (4, 4)]


def test_an_error_of_the_thread_is_raised_by_the_next_publication_or_known_after_closing(publisher):
    p = publisher(threaded=True, publish=broken)
    p.publish(tree(1), {})
    p._thread.shutdown()
    with pytest.raises(OSError, match="the socket is gone"):
        p.publish(tree(2), {})
    p.close()
    p = publisher(threaded=True, publish=broken)
    p.publish(tree(1), {})
    p.close()
    assert str(p.error) == "the socket is gone"


def test_a_version_file_that_was_never_written_starts_at_zero_and_one_without_a_version_is_named(publisher, tmp_path):
    for content in ("", " \n"):
        (tmp_path / "snapshot_version").write_text(content)
        assert publisher(threaded=False).version == 0
    (tmp_path / "snapshot_version").write_text("12x")
    with pytest.raises(DataError, match=naming("snapshot_version", "b'12x'")):
        publisher(threaded=False)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_full_disk_holds_snapshots_back_and_ends_nothing(publisher, tmp_path, got, monkeypatch, caplog, threaded):
    p, write, full = publisher(threaded=threaded), os.pwrite, [False]

    def pwrite(fd, data, at):
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    versions = []
    for n, full[0] in ((1, False), (2, True), (3, True), (4, False)):
        versions.append(p.publish(tree(n), {}))
    p.close()
    assert (versions, p.failed_writes) == ([1, 1, 1, 2], 2)
    assert (got[-1][0].version, got[-1][0].params["w"][0]) == (2, 4)
    file = tmp_path / "snapshot_version"
    assert file.read_text() == "000000000002\n"
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "snapshot 2 is not published" in told[0]
    assert str(file) in told[0]
    assert "2 snapshots were not published" in told[1]


def test_a_version_is_on_disk_before_an_actor_sees_it(publisher, tmp_path, monkeypatch, caplog):
    """Actors ignore what is not newer than theirs: a power cut must not set it back."""
    file, synced, seen, fails = tmp_path / "snapshot_version", [0], [], [False]

    def fsync(fd):
        if fails[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(int(file.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    p = publisher(threaded=True, publish=lambda s, info: seen.append((s.version, synced[-1])))
    for fails[0] in (False, True, False):
        p.publish(tree(1), {})
        p._thread.submit(lambda: None).result()
    p.close()
    assert [version for version, _ in seen] == [1, 3]
    assert all(version <= on_disk for version, on_disk in seen)
    assert "snapshot 2 is not published" in caplog.text
