"""A learner's keys, a clock that a test moves, and ports."""

from __future__ import annotations

import pytest
import transport_tools
from key_tools import Clock
from ports import free_port

from serl_chunk.transport.client import snapshots
from serl_chunk.transport.security.server import ServerKeys


@pytest.fixture(autouse=True)
def raw_actors():
    """Close those of a test: libzmq would wait for them for ever once they are collected."""
    yield
    while transport_tools.RAW_ACTORS:
        transport_tools.RAW_ACTORS.pop().close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Snapshots of a few hundred kB come in several pieces."""
    monkeypatch.setattr(snapshots, "_PIECE_BYTES", 1 << 18)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def learner(tmp_path, clock):
    """The keys of a learner."""
    keys, new = ServerKeys.ensure(tmp_path / "learner", clock)
    assert new
    return keys


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def inbox():
    return transport_tools.Inbox()
