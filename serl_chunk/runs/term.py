"""Which learner a run belongs to: a number that each learner raises, for disks where a lock holds on one node alone."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from serl_chunk.io import folder_fault
from serl_chunk.types import ConfigError, SerlChunkError

TERM = "term"  # folder in a run folder, with a file for the newest term, named by its number


class FencedError(SerlChunkError):
    """Another learner has taken the run over."""


class Term:
    """This process's term of a run, above all before it. Any thread may `check` it.

    `taken_over`: the one before was on another machine, where it may still be alive: a lock says nothing of it.
    """

    def __init__(self, run: Path) -> None:
        """Raises ConfigError where the folder cannot be written."""
        self._folder = run / TERM
        try:
            self._folder.mkdir(exist_ok=True)
            self.taken_over = any(platform.node() not in self._owner(number) for number in self._numbers())
            while True:
                self.number = max(self._numbers(), default=0) + 1
                try:
                    with self._file(self.number).open("x") as file:  # exclusive on a network disk, too
                        file.write(f"{platform.node()}, process {os.getpid()}")
                    break
                except FileExistsError:
                    continue
            for number in self._numbers():
                if number < self.number:
                    self._file(number).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(folder_fault(run, error), parameter="checkpoint_path") from error

    def _file(self, number: int) -> Path:
        return self._folder / str(number)

    def _owner(self, number: int) -> str:
        with contextlib.suppress(OSError):
            return self._file(number).read_text()
        return "of an unknown machine"

    def _numbers(self) -> list[int]:
        return [int(name) for name in os.listdir(self._folder) if name.isdigit()]

    def check(self) -> None:
        """Raise FencedError where another learner has the run. A disk that cannot be read now says nothing."""
        try:
            newest = max(self._numbers(), default=self.number)
        except OSError:
            return
        if newest != self.number:
            raise FencedError(
                f"another learner ({self._owner(newest)}) has taken over {self._folder.parent}: it has term {newest}, "
                f"this one {self.number}. This one ends, and neither writes nor acknowledges anything more"
            )
