"""The record of a conversion, `conversion.jsonl` in its folder: its settings and how far it came.

One JSON object a line, appended and synced before the step that it announces:

    {"kind": "conversion", "settings": {...}}                                 once, first
    {"kind": "keys", "keys": [...]}                                           once: the episodes it began with
    {"kind": "layout", "layout": {...}}                                       once, of the sink, for all episodes
    {"kind": "placed", "number": n, "key": "...", "staged": {...}, "steps": ..., "frames": ..., "bytes": ...}
    {"kind": "skipped", "number": n, "key": "...", "reason": "..."}
    {"kind": "finished"}                                                      last

`number` counts the episodes of the source, all of them and in order. A `placed` line comes before the episode is in
the data set; the sink reports whether it arrived there.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from serl_chunk.config.overrides import difference
from serl_chunk.data.source import Json
from serl_chunk.io import os_reason
from serl_chunk.types import ConfigError, DataError

NAME = "conversion.jsonl"
_PATIENCE = 10.0  # seconds for the workers of a killed conversion to end


class Manifest:
    """The open manifest of `folder`, locked against other conversions as long as one process holds it.

    With `resume` what is there is continued, for which `settings` must be the same; a conversion without a placed or
    skipped episode starts anew. Raises ConfigError where the folder has other files, is another conversion's or may not
    be written, and DataError for a damaged manifest.
    """

    def __init__(self, folder: Path, settings: Json, *, resume: bool) -> None:
        self.path = folder / NAME
        self.entries: list[Json] = []
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: is a file. Give a folder for the data set")
        names = sorted(os.listdir(folder)) if folder.exists() else []
        if names and NAME not in names:
            raise ConfigError(f"{folder}: has other files ({', '.join(names[:3])}, ...). Give an empty or new folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A process with a copy of it holds the lock too.
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write a data set there: {os_reason(error)}") from error
        try:
            self._lock()
            self._load()
            settings = json.loads(json.dumps(settings))
            if not any(e["kind"] in ("placed", "skipped") for e in self.entries) and os.listdir(folder) == [NAME]:
                self._cut(0)  # after a forgotten flag the user just adds it
            elif self.entries and not resume:
                raise ConfigError(
                    f"{folder} holds an unfinished or finished conversion. Resume it, or choose another folder",
                    parameter="resume",
                )
            if not self.entries:
                self.append({"kind": "conversion", "settings": settings})
            if changes := difference(self.entries[0].get("settings", {}), settings):
                raise ConfigError(
                    f"{folder}: this conversion has other settings: {'; '.join(changes)}. Resume it with the same, or "
                    "convert into a new folder"
                )
        except BaseException:
            self.close()
            raise

    def of_kind(self, kind: str) -> list[Json]:
        return [e for e in self.entries if e["kind"] == kind]

    def append(self, entry: Json) -> None:
        """Add an entry; it is on disk when this returns. Raises OSError."""
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        rest = line
        while rest:
            rest = rest[os.write(self.descriptor, rest) :]
        os.fsync(self.descriptor)
        self.entries.append(json.loads(line))

    def keep_placed(self, n: int) -> None:
        """Remove the (n + 1)-th `placed` entry and everything after it."""
        at = [i for i, e in enumerate(self.entries) if e["kind"] == "placed"]
        if n < len(at):
            self._cut(at[n])

    def close(self) -> None:
        """Release this process's hold on the lock. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _lock(self) -> None:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ConfigError(
                        f"{self.path.parent}: another conversion writes to this folder. Wait for it"
                    ) from None
                time.sleep(0.05)
            except OSError:
                return  # a file system without locks

    def _load(self) -> None:
        data = self.path.read_bytes()
        end = 0
        lines = data.split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or a line cut off by a crash
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict) or "kind" not in entry:
                    raise ValueError("not an entry")
            except ValueError as error:
                if number == len(lines) - 1:
                    break  # a power cut may leave a line's end before its beginning
                raise DataError(f"{self.path}: line {number} is damaged ({error}). Convert into a new folder") from None
            end += len(line) + 1
            self.entries.append(entry)
        if end < len(data):
            os.ftruncate(self.descriptor, end)

    def _cut(self, n: int) -> None:
        os.ftruncate(self.descriptor, sum(map(len, self.path.read_bytes().splitlines(keepends=True)[:n])))
        os.fsync(self.descriptor)
        del self.entries[n:]
