"""The network between learner and actors, and what both keep on disk of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.fields import Group, setting


@dataclasses.dataclass(frozen=True)
class TransportConfig(Group, path="transport."):
    """Limits of the network side."""

    max_message_bytes: int = setting(64 << 20, "largest message", unit="bytes", above=0, below=2**32)
    max_sessions: int = setting(256, "sessions of actors at one time", above=0)
    spool_bytes: int = setting(
        2 << 30, "unacknowledged data that an actor keeps; when full, no new episode starts", unit="bytes", above=0
    )
    journal: bool = setting(True, "the learner writes every record to its run folder before it acknowledges")
    journal_bytes: int = setting(0, "size of the journal; 0: all that a full replay needs", unit="bytes", least=0)
    journal_days: float = setting(0.0, "age at which they are dropped; 0: never", unit="days", least=0)
    durability: Literal["process", "power"] = setting("process", "what acknowledged records survive the loss of")
    jpeg_quality: int = setting(0, "JPEG quality of images on the link, lossy; 0: raw", least=0, most=100)
    snapshot_dtype: Literal["exact", "bfloat16"] = setting("exact", "bfloat16: half the bytes, rounded for acting")
    timeout_s: float = setting(
        5.0, "silence after which a side counts as gone; more while a slow link is busy", unit="s", above=0
    )

    @property
    def heartbeat(self) -> float:
        """Seconds between signs of life, and between fsyncs: several within `timeout_s`."""
        return min(1.0, self.timeout_s / 5)
