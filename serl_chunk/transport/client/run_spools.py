"""The spool that each record of an actor goes to, where the learner is of another run than before."""

from __future__ import annotations

import logging
from collections.abc import Callable

from serl_chunk.transport.client.sender import Sender
from serl_chunk.transport.sockets import Counters
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Begin, End, Record

log = logging.getLogger(__name__)

Spools = Callable[[str], Spool]  # opens the spool of a run, given its id


class RunSpools:
    """The spools of the learner's run, which the sender sends, and of the run before. For the network thread.

    An episode goes on in the spool that it began in. Without `spools` there are no files.
    """

    def __init__(self, spools: Spools | None, sender: Sender) -> None:
        self.inherited = 0  # records that the spool held when it was opened and that the learner lacked then
        self.counters = Counters(abandoned=0, set_aside=0)
        self._spools, self._sender = spools, sender
        # The spool of the previous run, for the rest of the episode that was open when another run appeared.
        self._former: Spool | None = None
        self._run = self._former_run = ""  # ids of the runs that the spools are of
        self._inherited_until = 0  # where the spool ended when it was opened, until a learner reports what it has of it
        self._skipping = False  # the rest of the open episode is dropped
        self._episode = ""  # open where packing has come to

    @property
    def absent(self) -> bool:
        return self._spools is None

    @property
    def current(self) -> Spool | None:  # of the learner's run; None before that is known
        return self._sender.spool

    def attach(self, run: str) -> bool:
        """Send the spool of `run`; return whether the spool before it became the former one.

        Then what was handed over until now is written, and `settle` is called.
        """
        if self._spools is None:
            return False
        old, old_run, self._run = self.current, self._run, run
        if self._former is not None and run == self._former_run:  # back at the run of the open episode
            self._sender.take(self._former)
            self._former = None
        else:
            spool = self._spools(run)
            self._inherited_until = spool.next
            self._sender.take(spool)
            if self._former is None and old is not None:
                self._former, self._former_run = old, old_run
                return True
        if old is not None:
            old.close()  # of a third run within one episode: it holds none of that episode
        return False

    def settle(self) -> None:
        """Part with the former spool where no episode is open in it."""
        if not self._episode:
            self._set_aside()

    def renew(self) -> None:
        """Replace the spool by an empty one: the learner has all that it holds, and more."""
        assert self.current is not None
        assert self._spools is not None
        self.current.acknowledge(self.current.next)
        self.current.close()
        self._skipping = bool(self._episode) and self._former is None
        self._sender.take(self._spools(self._run))

    def _set_aside(self) -> None:
        former, self._former = self._former, None
        if former is None:
            return
        if left := former.next - former.acked:
            self.counters["set_aside"] += left
            log.warning("%d records of another run stay in their spool, for that run", left)
        former.close()

    def begin_for(self, run: str) -> None:
        """Direct the next episode into the spool of `run`, also where the learner's run has changed since."""
        current = run in ("", self._run)
        if current or run != self._former_run:
            self._set_aside()
        self._skipping = False
        if not current and self._former is None:
            assert self._spools is not None
            self._former, self._former_run = self._spools(run), run

    def target(self) -> Spool | None:
        """Return the spool that the next record goes to; None where it is dropped."""
        spool = self._former or self.current
        assert spool is not None
        return None if self._skipping else spool

    def passed(self, record: Record, items: int) -> None:
        """Note that a record, of so many that were handed over, went to the `target`."""
        self.counters["abandoned"] += items if self._skipping else 0
        if isinstance(record, Begin):
            self._episode = record.episode_id
        elif isinstance(record, End):
            self._episode = ""

    def connected(self, spool: Spool) -> None:
        """Note that a learner has said what it has of the current spool."""
        self.inherited += max(0, self._inherited_until - spool.acked)
        self._inherited_until = 0

    def close(self) -> None:
        for spool in filter(None, (self._former, self.current)):
            spool.close()
