"""Records on their way into the replay: demonstrations, online episodes, those of groups; in turns, on a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from serl_chunk.data.demos import short_digest
from serl_chunk.learner.assembly import EpisodeAssembler
from serl_chunk.learner.groups.collector import Collector
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.partitions import Added
from serl_chunk.replay.replay import Replay
from serl_chunk.types import Amend, Begin, ConfigError, DataError, End, Episode, Record, SerlChunkError, StepBlock

logger = logging.getLogger(__name__)

TURN_S = 0.25  # seconds in which the steps of an episode may join before they are inserted
MAX_BACKLOG = 256 << 20  # bytes of records that wait for the replay; beyond it none is acknowledged
_REFILLED = 16 << 20  # bytes of the journal's records that are inserted at once


class DemonstrationReceiver:
    """Takes in the records of sessions of demonstrations.

    An episode enters the replay with its `End`: one whose recording died in it never does. One that the learner has,
    from `--demo_path` or an earlier stream, is left out. One thread inserts; any thread reads the digests.
    """

    def __init__(self, replay: Replay) -> None:
        self.received = self.duplicates = 0
        self._replay = replay
        self._assembler = EpisodeAssembler("demonstration")
        self._digests: dict[bytes, None] = {}
        self._lock = threading.Lock()  # of the digests

    def hold(self, episodes: Iterable[Episode]) -> None:
        """Note demonstrations that the replay has already."""
        digests = dict.fromkeys(map(short_digest, episodes))
        with self._lock:
            self._digests |= digests

    @property
    def digests(self) -> np.ndarray:
        """Of all demonstrations that the learner has or had, uint8[N, 8]."""
        with self._lock:
            held = b"".join(self._digests)
        return np.frombuffer(held, np.uint8).reshape(-1, 8)

    def insert(self, session: str, record: Record) -> Episode | None:
        """Insert the next record; return the demonstration that became complete with it and is in the replay.

        One of an episode that did not begin here is left out. Raises DataError where records are missing, and where
        the episode does not fit the robot or the replay.
        """
        assert not isinstance(record, Amend)
        if (episode := self._assembler.insert(session, record)) is None:
            return None
        digest = short_digest(episode)
        if digest in self._digests:
            self.duplicates += 1
            return None
        try:
            self._replay.add_demo(episode, session=session)
        except ConfigError as error:
            raise DataError(f"demonstration {episode.begin.episode_id}: {error}") from error
        with self._lock:
            self._digests[digest] = None
        self.received += 1
        return episode

    def close_session(self, session: str) -> None:
        """Drop the open demonstration of a session that does not come back."""
        self._assembler.close(session)


class Received(NamedTuple):
    """Counters at one moment, and the episodes that they cover."""

    env_steps: int  # online steps, those of previous processes included
    position: int  # journal entries that this and all episodes taken so far cover
    episodes: list[EpisodeStats]  # finished since the last call, oldest first
    demonstrations: list[Episode]  # streamed ones that came since the last call
    corrections: list[tuple[str, Amend]]  # of sessions' online episodes, since the last call


class Entry(NamedTuple):
    """A record on its way into the replay."""

    session: str
    record: Record | None  # None: the session is silent
    position: int | None = None  # entries of the journal, its own included
    demonstrations: bool = False  # the session sends these alone
    sender: str = ""  # the session's own name
    gone: bool = True  # without a record: permanently


class _Turn:
    """What was inserted, until it is counted."""

    def __init__(self) -> None:
        self.steps = 0
        self.finished: list[EpisodeStats] = []
        self.demonstrations: list[Episode] = []
        self.corrections: list[tuple[str, Amend]] = []
        self.misfits: list[tuple[Entry, str]] = []  # and why


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield entries, those of each session in their order, and consecutive steps of an online episode together."""
    held: dict[str, list[Entry]] = {}
    for entry in entries:
        run, record = held.get(entry.session), entry.record
        joins = isinstance(record, StepBlock) and not entry.demonstrations and _is_decoded(record)
        if run is not None and joins and _follows(run[-1].record, record):
            run.append(entry)
            continue
        if run is not None:
            yield held.pop(entry.session)
        if joins:
            held[entry.session] = [entry]
        else:
            yield [entry]
    yield from held.values()


def _follows(last: Record | None, block: Record | None) -> bool:
    if not isinstance(last, StepBlock) or not isinstance(block, StepBlock):
        return False
    return block.episode_id == last.episode_id and block.first_tick == last.first_tick + last.n


def _is_decoded(block: StepBlock) -> bool:
    """Whether joining leaves its images as they are: it would decode JPEG ones, which the replay need not."""
    return all(isinstance(rows.values, np.ndarray) for rows in block.sparse.values())


class RecordRouter:
    """Routes records to the replay. One thread inserts; the thread that trains takes what was finished.

    Episodes with tickets go to `groups`. The replay checks and counts them like others, and drops them with their end,
    unless a human had a part.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.demonstrations = DemonstrationReceiver(replay)
        self.groups: Collector | None = None  # of episodes with tickets, where the trainer has iterations
        self._changed = threading.Condition()
        self._news = False  # something came since the last `take`
        self._finished: list[EpisodeStats] = []
        self._received: list[Episode] = []  # demonstrations
        self._corrections: list[tuple[str, Amend]] = []
        self.position = 0  # journal entries that the counters cover
        self.env_steps = 0
        self.refilling = False  # what is counted and held is not whole yet
        self._human_steps = 0  # of interventions, that the previous process held
        self.resumed_steps = 0  # online steps of previous processes, whose transitions are gone
        # Steps that the trainer waits for, 0 for an episode's end; None while it has work. `awaited` is called then.
        self.missing: int | None = None
        self.awaited: Callable[[], None] = lambda: None
        self.fence: Callable[[], None] = lambda: None  # raises FencedError where another learner has the run

    def resume(self, env_steps: int, position: int, human_steps: int = 0) -> None:
        """Count on from a previous process, whose records `refill` may put back.

        `human_steps`: of interventions that it held, also beyond the online partition.
        """
        self._human_steps = human_steps
        self.env_steps = self.resumed_steps = env_steps
        self.position = position

    @property
    def fresh_steps(self) -> int:
        """Online steps whose transitions came to this process, or were put back."""
        return self.env_steps - self.resumed_steps

    def insert(
        self, session: str, record: Record, position: int | None = None, *, demonstrations: bool = False
    ) -> None:
        """Route a record. Raises DataError where it misfits.

        `position`: entries of the journal, its own included; `demonstrations`: the session sends these alone.
        """
        for _, why in self.insert_all([Entry(session, record, position, demonstrations)]):
            raise DataError(why)

    def insert_all(self, entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Insert records, those of each session in their order, and count all at once.

        Steps of an episode that follow one another enter as one block, which costs a fifth of one by one. Returns the
        entries that misfit, and why: the others are in.
        """
        turn = self._insert_all(entries)
        self._count(turn, entries[-1].position if entries else None)
        return turn.misfits

    def _insert_all(self, entries: Iterable[Entry]) -> _Turn:
        turn = _Turn()
        for run in _runs(entries):
            if len(run) > 1:
                steps = turn.steps
                try:
                    joined = StepBlock.join([entry.record for entry in run if isinstance(entry.record, StepBlock)])
                    self._insert(run[0]._replace(record=joined), turn)
                    continue
                except DataError as error:
                    if turn.steps != steps:  # it is in the replay, and its group cannot take it
                        turn.misfits.append((run[-1], str(error)))
                        continue
            for entry in run:
                try:
                    self._insert(entry, turn)
                except DataError as error:
                    turn.misfits.append((entry, str(error)))
        return turn

    def _insert(self, entry: Entry, turn: _Turn) -> None:
        session, record = entry.session, entry.record
        if record is None:
            self._close_session(entry, turn)
            return
        if isinstance(record, Begin) and record.demonstration != entry.demonstrations:
            kind = "demonstrations" if entry.demonstrations else "no demonstrations"
            raise DataError(
                f"episode {record.episode_id}: its session sends {kind}. Use the same version on both sides"
            )
        if entry.demonstrations and not isinstance(record, Amend):  # not counted as online steps
            if (demonstration := self.demonstrations.insert(session, record)) is not None:
                turn.demonstrations.append(demonstration)
            return
        self._note(turn, self._replay.insert(session, record))
        if self.groups is not None:
            self._leave(session, self.groups.insert(session, record))
        if isinstance(record, Amend) and (record.discard or record.outcome is not None):
            turn.corrections.append((session, record))

    @staticmethod
    def _note(turn: _Turn, added: Added) -> None:
        turn.steps += added.steps
        if added.finished is not None:
            turn.finished.append(added.finished)

    def _leave(self, session: str, episode_id: str) -> None:
        if episode_id:
            self._replay.insert(session, Amend(episode_id, discard=True))

    def _close_session(self, entry: Entry, turn: _Turn) -> None:
        if entry.gone:
            self.demonstrations.close_session(entry.session)
        self._note(turn, self._replay.close_session(entry.session, gone=entry.gone))
        if entry.gone and self.groups is not None:
            self._leave(entry.session, self.groups.close_session(entry.session))

    def _count(self, turn: _Turn, position: int | None) -> None:
        with self._changed:
            self.env_steps += turn.steps
            self._finished += turn.finished
            self._received += turn.demonstrations
            self._corrections += turn.corrections
            self.position = self.position if position is None else position
            self._news = True
            self._changed.notify()

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put back what a previous process received: (journal entry, session, record), oldest first; returns the steps.

        No record: the session was closed there, perhaps within an episode. What the checkpoint's counters cover fills
        the replay and is not counted again. A record that does not fit (the experiment was changed) is left out.
        Entries that come next are to be numbered from `position` on: it may be beyond the journal's end.
        """
        counted, self.position = self.position, 0
        steps = refused = 0
        for entries in _refilled(records, counted):
            turn = self._insert_all(entries)
            turn.demonstrations = []  # these were reported when they came
            if turn.misfits and not refused:
                logger.warning("the journal holds a record that does not fit: %s", turn.misfits[0][1])
            refused += len(turn.misfits)
            steps += turn.steps
            position = entries[-1].position
            assert position is not None
            if position <= counted:
                self.resumed_steps -= turn.steps
                self.position = position
            else:
                self._count(turn, position)
        if self.groups is not None:
            self.groups.refilled()
        if refused:
            logger.warning("%d records of the journal were left out", refused)
        if (held := int(self._replay.stats()["replay/human_rows"])) < self._human_steps:
            logger.warning(
                f"{self._human_steps - held} of {self._human_steps} steps of old interventions could not be put back: "
                "the journal keeps the newest steps (transport.journal_bytes keeps more of them)"
            )
        if self.position < counted:
            logger.warning(
                f"the journal ends at entry {self.position}, the checkpoint covers {counted}: the records between are "
                "missing in the replay"
            )
            self.position = counted
        return steps

    def take(self) -> Received:
        """Return the counters and the episodes that were finished since the last call, all of one moment."""
        with self._changed:
            self._news = False
            episodes, self._finished = self._finished, []
            demonstrations, self._received = self._received, []
            corrections, self._corrections = self._corrections, []
            return Received(self.env_steps, self.position, episodes, demonstrations, corrections)

    def wait(self, seconds: float, missing: int = 0) -> None:
        """Wait until something came since the last `take`; `missing`: see there."""
        self.missing = missing
        self.awaited()
        with self._changed:
            self._changed.wait_for(lambda: self._news, seconds)
        self.missing = None


def _refilled(records: Iterable[tuple[int, str, Record | None]], counted: int) -> Iterator[list[Entry]]:
    """Yield the journal's records in pieces, none of them on both sides of entry `counted`."""
    piece, nbytes, covered, demonstrations = list[Entry](), 0, True, dict[str, bool]()
    for number, session, record in records:
        if piece and (nbytes > _REFILLED or covered != (number < counted)):
            yield piece
            piece, nbytes = [], 0
        covered = number < counted
        if isinstance(record, Begin):
            demonstrations[session] = record.demonstration
        piece.append(Entry(session, record, number + 1, demonstrations.get(session, False)))
        nbytes += record.nbytes if isinstance(record, StepBlock) else 0
    if piece:
        yield piece


class ClosedError(SerlChunkError):
    """The learner ends before its journal is back."""


def _is_part_of(damaged: Set[tuple[str, str]], entry: Entry) -> bool:
    record = entry.record
    if record is None or (isinstance(record, Amend) and record.discard):  # which goes whatever else is there
        return False
    return (entry.sender, record.episode_id) in damaged


class Intake:
    """Takes entries from the thread that acknowledges them, and inserts them on its own, in turns.

    A turn waits for the steps of `TURN_S`, and for no more once the trainer waits for what is here. Before the first
    one the journal is put back: `refill` returns the (sender, episode)s of which something is damaged there; what
    follows of these is left out. It raises ClosedError once what it is given returns True. `refuse` is called with the
    sender of an entry that misfits and why, `inserted` with the entries of each turn.
    """

    def __init__(
        self, router: RecordRouter, *, refill: Callable[[Callable[[], bool]], Set[tuple[str, str]]],
        refuse: Callable[[str, str], None], inserted: Callable[[Sequence[Entry]], None],
    ) -> None:  # fmt: skip
        self.steps = 0  # online ones that are not counted by the router yet
        self._router, self._refill, self._refuse, self._inserted = router, refill, refuse, inserted
        self._changed = threading.Condition()
        self._entries: list[Entry] = []
        self._began = 0.0  # when the first of them came
        self._nbytes = self._ends = 0  # of them
        self._hurries = self._closed = self._ended = False
        self._inserting = router.refilling = True
        self._error: BaseException | None = None
        router.awaited = self._look
        self._thread = threading.Thread(target=self._run, name="serl-chunk-intake", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> str:
        """Why no more entries are to come now; empty where they may."""
        return f"{self._nbytes >> 20} MiB of records wait for the replay" if self._nbytes >= MAX_BACKLOG else ""

    def put(self, entry: Entry) -> None:
        """Take an entry over. Raises SerlChunkError once inserting has failed."""
        self.check()
        record = entry.record
        with self._changed:
            if not self._entries:
                self._began = time.monotonic()
            self._entries.append(entry)
            if isinstance(record, StepBlock):
                self.steps += record.n
                self._nbytes += record.nbytes
            self._ends += isinstance(record, End) or record is None
            if len(self._entries) == 1 or self._due:
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all that was put is inserted, at once; then the calling thread may insert, too."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._entries or self._inserting) or self._ended)
            self._hurries = False
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise SerlChunkError(f"inserting into the replay failed: {self._error!r}") from self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _due(self) -> bool:
        missing = self._router.missing
        awaited = missing is not None and (self.steps >= missing if missing else self._ends > 0)
        return awaited or self._hurries or self._closed or self._nbytes >= MAX_BACKLOG

    def _look(self) -> None:
        with self._changed:
            if self._entries and self._due:
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            damaged = self._refill(lambda: self._closed)
            self._router.refilling = False
            while self._turn(damaged):
                pass
        except ClosedError:
            pass
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _turn(self, damaged: Set[tuple[str, str]]) -> bool:
        with self._changed:
            self._inserting = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._entries or self._closed)
            self._changed.wait_for(lambda: self._due, max(0.0, self._began + TURN_S - time.monotonic()))
            entries, self._entries = self._entries, []
            self._ends = self._nbytes = 0
            self._inserting = bool(entries)
        if not entries:
            return False
        whole = [e for e in entries if not _is_part_of(damaged, e)]
        for entry, why in self._router.insert_all(whole):
            self._refuse(entry.sender, why)
        with self._changed:
            # Only now: what the trainer allows counts them already.
            self.steps -= sum(entry.record.n for entry in entries if isinstance(entry.record, StepBlock))
        self._inserted(entries)
        return True
