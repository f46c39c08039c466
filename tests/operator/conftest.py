"""A pseudo terminal whose output is read, and an operator at it."""

from __future__ import annotations

import contextlib

import pytest
from operator_desk import Desk
from ptys import Pty


@pytest.fixture(scope="session")
def terminal():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        yield


@pytest.fixture
def pty(terminal):
    with contextlib.closing(Pty()) as pty:
        pty.look()
        yield pty


@pytest.fixture
def make_desk(pty):
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(contextlib.closing(Desk(pty, **more)))


@pytest.fixture
def desk(make_desk):
    return make_desk()
