"""The calls of a learner's server to the learner."""

from __future__ import annotations

from typing import Any

import numpy as np

from serl_chunk.transport.server.sessions import SessionInfo
from serl_chunk.types import Record, SerlChunkError, Snapshot


class ServerHandler:
    """Takes what a server receives, and supplies what it sends; this one stores nothing and has no limits.

    The data thread calls `on_record` and `on_silent`: where they are slow, acknowledgements wait and nothing else. The
    control thread calls `welcome` and `digests`, both call `allowance`, and `fetch` has a thread of its own. An
    unforeseen exception stops the server, but for one of `fetch`.
    """

    def welcome(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Plain values and arrays for a new actor. A SerlChunkError refuses it for now."""
        return {}, {}

    def digests(self) -> np.ndarray | None:
        """Of the demonstrations that are there, uint8[N, 8], for a session that sends more; None: none is taken."""
        return None

    def on_record(self, info: SessionInfo, record: Record) -> None:
        """Take one record, which is acknowledged on return; its arrays are read-only views.

        A `Begin` may follow an episode without an `End`: the actor died in it. DataError refuses the session.
        """

    def on_silent(self, info: SessionInfo, gone: bool) -> None:
        """A session left, or was silent for long. With `gone` its open episode is over, else it may go on."""

    def allowance(self, session: str) -> int | None:
        """Steps, as delivered to `on_record`, that `session` may have recorded in all; None for no limit.

        Called often. Each change is sent: return the same while that suffices.
        """
        return None

    def fetch(self, step: str) -> tuple[Snapshot, dict[str, Any]]:
        """The checkpoint named "latest", "best" or by its step; a SerlChunkError is sent in its place."""
        raise SerlChunkError("this learner does not hand out checkpoints")
