"""What an actor keeps for a learner that has not taken it yet, in words for a status line."""

from __future__ import annotations

from typing import NamedTuple

from serl_chunk.transport.stats import in_words

AWAY = 1.0  # seconds without a learner worth mentioning
MUCH = 16 << 20  # bytes worth mentioning though the learner is there: less is simply on its way


class Backlog(NamedTuple):
    """Sizes in bytes, a time in seconds."""

    kept: int  # not acknowledged
    limit: int  # that is kept at most; where an episode might exceed it, none begins
    episode: int  # the largest one may take
    away: float  # since the connection was lost; 0 while there is one
    stalled: str  # why the learner takes nothing, though it is there

    def line(self, *, begun: bool) -> str:
        """For example `learner away for 12 s, spool 34 MiB`; empty where the learner keeps up.

        `begun`: an episode is under way, and counted at its largest.
        """
        parts = []
        if self.away >= AWAY:
            parts.append(f"learner away for {self.away:.0f} s")
        elif self.stalled and not self.away:
            parts.append(f"the learner takes nothing now: {self.stalled}")
        holding = self.kept + (2 if begun else 1) * self.episode > self.limit
        if parts or holding or self.kept > max(self.episode, MUCH):
            parts.append(f"spool {in_words(self.kept)}")
        if holding:
            parts.append("holding after this episode" if begun else "holding until there is room")
        return ", ".join(parts)
