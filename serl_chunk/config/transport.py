"""The network between learner and actors, and what both keep on disk of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from serl_chunk.config.validation import require, require_choices


@dataclasses.dataclass(frozen=True)
class TransportConfig:
    """Limits of the network side."""

    max_message_bytes: int = 64 << 20
    max_arrays: int = 64
    max_sessions: int = 32
    max_malformed: int = 32  # malformed messages of one connection, and one a second; more are dropped unread
    credit_bytes: int = 32 << 20  # unacknowledged bytes an actor may have in flight
    spool_bytes: int = 2 << 30  # unacknowledged bytes an actor keeps; when full, no new episode starts
    journal: bool = True  # the learner writes every record to its run folder before it acknowledges
    journal_bytes: int = 0  # size at which the oldest segments are dropped; 0: what a full replay does not need
    journal_days: float = 0.0  # age at which they are dropped; 0 for never
    sync_interval: float = 1.0  # seconds between fsyncs of journal and spool; 0: after every message
    # What an acknowledged record survives: the death of the learner's process, or a power cut.
    durability: Literal["process", "power"] = "process"
    jpeg_quality: int = 0  # 1..100: images leave the robot as JPEG, lossy, for slow links; 0: raw
    snapshot_dtype: Literal["exact", "bfloat16"] = "exact"  # bfloat16: half the bytes, rounded for acting
    piece_bytes: int = 1 << 20  # largest size of a snapshot piece; on a slow link they are smaller
    heartbeat: float = 1.0  # seconds between signs of life
    timeout_s: float = 5.0  # seconds after which the other side counts as gone; more while a slow link is busy

    def __post_init__(self) -> None:
        zero = ("jpeg_quality", "journal_bytes", "journal_days", "sync_interval")  # mean something at 0
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = "positive" if field.name not in zero else "0 or more"
                require(
                    value > 0 or (value == 0 and field.name in zero),
                    f"transport.{field.name} must be {least}, got {value}",
                )
        require(self.jpeg_quality <= 100, f"transport.jpeg_quality must be 0..100, got {self.jpeg_quality}")
        require_choices(self, "transport.")
        require(self.timeout_s > 2 * self.heartbeat, "transport.timeout_s must exceed two heartbeats")
        require(
            self.durability == "process" or 2 * self.sync_interval < self.timeout_s,
            f"transport.durability=power acknowledges every sync_interval={self.sync_interval:g} s, and an actor that "
            f"hears of none for timeout_s={self.timeout_s:g} s connects anew: set sync_interval below timeout_s / 2",
        )
        require(self.max_arrays <= 65000, "transport.max_arrays must be at most 65000: a journal entry holds no more")
        require(
            self.piece_bytes <= self.max_message_bytes,
            f"transport.piece_bytes={self.piece_bytes} exceeds max_message_bytes={self.max_message_bytes}: no "
            "snapshot would ever arrive. Lower piece_bytes or raise max_message_bytes",
        )
        require(self.max_message_bytes < 2**32, "transport.max_message_bytes must be below 4 GiB")
        require(
            self.credit_bytes <= self.spool_bytes,
            f"transport.credit_bytes={self.credit_bytes} exceeds spool_bytes={self.spool_bytes}",
        )
