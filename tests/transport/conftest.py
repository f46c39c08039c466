"""A learner's keys, a clock that a test moves, and ports."""

from __future__ import annotations

import pytest
from key_tools import Clock

from serl_chunk.transport.security.keys import ServerKeys
from serl_chunk.transport.sockets import free_port


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
