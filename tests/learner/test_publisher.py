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

from serl_chunk.learner.publisher import SnapshotPublisher
from serl_chunk.types import DataError


class Flattener:
    """The one thing a publisher asks of an agent. `gate` holds it until a test lets it go on."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def flatten_params(self, params):
        self.entered.set()
        self.gate.wait()
        return {k: np.array(v) for k, v in params.items()}


def tree(number: float):
    return {"w": jnp.full(3, number)}


@pytest.fixture
def got() -> list:
    return []


def publisher(got, folder, *, threaded, agent=None):
    return SnapshotPublisher(agent or Flattener(), lambda s, info: got.append((s, info)), folder, threaded=threaded)


def test_in_one_process_the_hand_over_happens_in_the_call(tmp_path, got):
    p = publisher(got, tmp_path, threaded=False)
    assert [p.publish(tree(n), {"step": n}) for n in (1, 2)] == [1, 2]
    assert [(s.version, s.params["w"][0], info) for s, info in got] == [(1, 1, {"step": 1}), (2, 2, {"step": 2})]
    p.close()


def test_a_snapshot_survives_the_update_that_donates_its_source(tmp_path, got):
    agent = Flattener()
    p = publisher(got, tmp_path, threaded=True, agent=agent)
    agent.gate.clear()
    params = tree(1)
    p.publish(params, {})
    donated = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)(params)
    jax.block_until_ready(donated)
    assert params["w"].is_deleted()
    agent.gate.set()
    p.close()
    np.testing.assert_array_equal(got[0][0].params["w"], np.ones(3))


def test_only_the_newest_waits_and_closing_delivers_it(tmp_path, got):
    agent = Flattener()
    p = publisher(got, tmp_path, threaded=True, agent=agent)
    agent.gate.clear()
    p.publish(tree(1), {})
    agent.entered.wait()  # the thread has taken the first
    for n in (2, 3, 4):
        assert p.publish(tree(n), {}) == n  # no caller waits here
    agent.gate.set()
    p.close()
    assert [s.version for s, _ in got] == [1, 4]
    assert got[-1][0].params["w"][0] == 4


@pytest.mark.parametrize("threaded", [False, True])
def test_versions_never_go_back_after_a_restart(tmp_path, got, threaded):
    for life in range(3):
        p = publisher(got, tmp_path, threaded=threaded)
        assert p.version == 2 * life
        p.publish(tree(0), {})
        p.publish(tree(0), {})
        p.close()
    versions = [s.version for s, _ in got]
    assert versions == sorted(set(versions))
    assert versions[-1] == 6


def test_a_killed_publisher_has_already_noted_its_version(tmp_path, got):
    p = publisher(got, tmp_path, threaded=False)
    p.publish(tree(0), {})
    assert publisher(got, tmp_path, threaded=False).version == 1  # the first was never closed
    p.close()


def test_an_error_of_the_thread_is_raised_by_the_next_publication(tmp_path):
    def broken(snapshot, info):
        raise OSError("the socket is gone")

    p = SnapshotPublisher(Flattener(), broken, tmp_path, threaded=True)
    p.publish(tree(1), {})
    p._thread.shutdown()
    with pytest.raises(OSError, match="the socket is gone"):
        p.publish(tree(2), {})
    p.close()


def test_an_error_that_no_publication_follows_is_known_after_closing(tmp_path):
    def broken(snapshot, info):
        raise OSError("the socket is gone")

    p = SnapshotPublisher(Flattener(), broken, tmp_path, threaded=True)
    p.publish(tree(1), {})
    p.close()
    assert str(p.error) == "the socket is gone"


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_version_file_that_was_never_written_starts_at_zero(tmp_path, got, content):
    (tmp_path / "snapshot_version").write_text(content)
    assert publisher(got, tmp_path, threaded=False).version == 0


def test_a_version_file_that_holds_no_version_is_named(tmp_path, got):
    (tmp_path / "snapshot_version").write_text("12x")
    with pytest.raises(DataError, match=naming("snapshot_version", "b'12x'")):
        publisher(got, tmp_path, threaded=False)


@pytest.mark.parametrize("threaded", [True, False])
def test_a_full_disk_holds_snapshots_back_and_ends_nothing(tmp_path, got, monkeypatch, caplog, threaded):
    p, write, full = publisher(got, tmp_path, threaded=threaded), os.pwrite, [False]

    def pwrite(fd, data, at):
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert p.publish(tree(1), {}) == 1
    full[0] = True
    assert [p.publish(tree(n), {}) for n in (2, 3)] == [1, 1]
    full[0] = False
    assert p.publish(tree(4), {}) == 2
    p.close()
    assert p.failed_writes == 2
    assert [s.version for s, _ in got][-1] == 2
    assert [s.params["w"][0] for s, _ in got][-1] == 4
    assert (tmp_path / "snapshot_version").read_text() == "000000000002\n"
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "snapshot 2 is not published" in told[0]
    assert str(tmp_path / "snapshot_version") in told[0]
    assert "2 snapshots were not published" in told[1]


def test_a_version_is_on_disk_before_an_actor_sees_it(tmp_path, monkeypatch, caplog):
    """Actors ignore what is not newer than theirs: a power cut must not set it back."""
    file, synced, seen, broken = tmp_path / "snapshot_version", [0], [], [False]

    def fsync(fd):
        if broken[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(int(file.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    p = SnapshotPublisher(Flattener(), lambda s, info: seen.append((s.version, synced[-1])), tmp_path, threaded=True)
    for broken[0] in (False, True, False):
        p.publish(tree(1), {})
        p._thread.submit(lambda: None).result()
    p.close()
    assert [version for version, _ in seen] == [1, 3]
    assert all(version <= on_disk for version, on_disk in seen)
    assert "snapshot 2 is not published" in caplog.text
