"""The network between learner and actors, and what both keep on disk of it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

from serl_chunk.config.fields import Group, require, setting

_bytes = partial(setting, unit="bytes", above=0)
_seconds = partial(setting, unit="s", above=0)


@dataclasses.dataclass(frozen=True)
class TransportConfig(Group, path="transport."):
    """Limits of the network side."""

    max_message_bytes: int = setting(64 << 20, "largest message", unit="bytes", above=0, below=2**32)
    max_arrays: int = setting(64, "arrays of one message; a journal entry holds no more", above=0, most=65000)
    max_sessions: int = setting(32, "sessions of actors at one time", above=0)
    max_malformed: int = setting(32, "malformed messages of a connection, and one a second", above=0)
    credit_bytes: int = _bytes(32 << 20, "unacknowledged data that an actor may have in flight")
    spool_bytes: int = _bytes(2 << 30, "unacknowledged data that an actor keeps; when full, no new episode starts")
    journal: bool = setting(True, "the learner writes every record to its run folder before it acknowledges")
    journal_bytes: int = setting(0, "size of the journal; 0: all that a full replay needs", unit="bytes", least=0)
    journal_days: float = setting(0.0, "age at which they are dropped; 0: never", unit="days", least=0)
    sync_interval: float = setting(1.0, "time between fsyncs; 0: after every message", unit="s", least=0)
    durability: Literal["process", "power"] = setting("process", "what acknowledged records survive the loss of")
    jpeg_quality: int = setting(0, "JPEG quality of images on the link, lossy; 0: raw", least=0, most=100)
    snapshot_dtype: Literal["exact", "bfloat16"] = setting("exact", "bfloat16: half the bytes, rounded for acting")
    piece_bytes: int = _bytes(1 << 20, "largest piece of a snapshot; smaller on a slow link")
    heartbeat: float = _seconds(1.0, "time between signs of life")
    timeout_s: float = _seconds(5.0, "silence after which a side counts as gone; more while a slow link is busy")

    def _check(self) -> None:
        # fmt: off
        require(self.timeout_s > 2 * self.heartbeat, "transport.timeout_s",
            f"must exceed two heartbeats (transport.heartbeat={self.heartbeat:g}), got {self.timeout_s:g}")
        require(self.durability == "process" or 2 * self.sync_interval < self.timeout_s, "transport.sync_interval",
            f"must be below half of timeout_s={self.timeout_s:g} with transport.durability=power, got "
            f"{self.sync_interval:g}: an actor without an acknowledgement for so long connects again")
        require(self.piece_bytes <= self.max_message_bytes, "transport.piece_bytes",
            f"must be at most transport.max_message_bytes={self.max_message_bytes}, got {self.piece_bytes}: no "
            "snapshot would arrive")
        require(self.credit_bytes <= self.spool_bytes, "transport.credit_bytes",
            f"must be at most transport.spool_bytes={self.spool_bytes}, got {self.credit_bytes}")
