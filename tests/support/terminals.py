"""Whole processes on a terminal of their own, which can be closed while they run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from processes import Process

# The terminal becomes the controlling one: the kernel sends SIGHUP when it is closed, as to a shell's foreground.
_OWN_TERMINAL = "import fcntl, os, signal, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); "
_DEFAULT = "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # where the tests themselves run under nohup
_EXECUTE = "os.execv(sys.argv[1], sys.argv[1:])"


class TerminalProcess(Process):
    """A process whose output is a pseudo terminal; `output` is what came until it was closed."""

    typed = False

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def _start(self, file: IO[bytes], environment: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        self._master, slave = os.openpty()
        keyboard = slave if self.typed else subprocess.DEVNULL
        code = _OWN_TERMINAL + _DEFAULT + _EXECUTE
        try:
            popen = subprocess.Popen(
                [sys.executable, "-c", code, *self.command], stdin=keyboard, stdout=slave, stderr=slave,
                env=dict(environment), start_new_session=True, cwd=cwd,
            )  # fmt: skip
        finally:
            os.close(slave)
        self._closing, self._looking = threading.Event(), threading.Event()
        self._looking.set()
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()
        return popen

    def look_away(self) -> None:
        self._looking.clear()

    def look(self) -> None:
        self._looking.set()

    def hang_up(self) -> None:
        """Close the terminal, as a dropped connection does: SIGHUP, and EIO for whatever is printed from now on."""
        self._closing.set()
        self._copier.join()

    def close(self) -> None:
        super().close()
        self.hang_up()

    def _copy(self) -> None:
        os.set_blocking(self._master, False)
        with self._log.open("ab") as log:
            while not self._closing.wait(0.01):
                if not self._looking.is_set():
                    continue
                with contextlib.suppress(OSError):  # nothing there yet, or the process has closed its side
                    log.write(os.read(self._master, 1 << 16))
                    log.flush()
        os.close(self._master)


class OperatedProcess(TerminalProcess):
    """One whose terminal is a keyboard, too."""

    typed = True
