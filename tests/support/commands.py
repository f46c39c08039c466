"""`serl-chunk ARGUMENTS` within the process of the tests, for tests to which a process of its own adds only time."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO
from unittest import mock

from processes import Process

from serl_chunk.main import main

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command(Process):
    """A command that has ended when it is made. It answers no signals."""

    def _start(self, file: IO[bytes], environment: Mapping[str, str], cwd: Path | None) -> None:  # type: ignore[override]
        assert self.command[:3] == [sys.executable, "-m", "serl_chunk"], "a prefix needs a process"
        with (
            contextlib.nullcontext() if cwd is None else contextlib.chdir(cwd),
            mock.patch.dict(os.environ, environment),
            io.TextIOWrapper(file, write_through=True) as printed,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _own_signals(),
        ):
            self._status = main(self.command[3:])

    @property
    def running(self) -> bool:
        return False

    def wait(self) -> int:
        return self._status

    def close(self) -> None: ...


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
