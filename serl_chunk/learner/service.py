"""The network side of a learner: its server, the journal behind it, and the steps that lockstep actors may record."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.demos import short_digest
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import Waiting, format_bytes
from serl_chunk.learner.assembly import EpisodeAssembler
from serl_chunk.learner.groups.collector import Collector
from serl_chunk.learner.schedule import StepShares
from serl_chunk.replay.episode import EpisodeStats
from serl_chunk.replay.partitions import Added
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.amend import AmendRequests
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.evaluations import wanted_policy
from serl_chunk.runs.folder import RunFolder
from serl_chunk.runs.status_line import StatusFields
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import ServerHandler, SessionInfo
from serl_chunk.transport.storage.record_store import RecordStore, check_retention
from serl_chunk.transport.wire.handshake import MAX_ARRAYS
from serl_chunk.types import (
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
    Episode,
    Grant,
    PolicyOrigin,
    Record,
    Snapshot,
    StepBlock,
)
from serl_chunk.version import version_info
from serl_chunk_robot.wire.codec import Limits

if TYPE_CHECKING:
    from serl_chunk.learner.learner import Learner

logger = logging.getLogger(__name__)

JOURNAL_PERIOD = 2.0  # seconds between lines about a journal that is being read
CHECK_PERIOD = 0.1  # seconds between looks at the server's health
PUSH_PERIOD = 0.01  # seconds between pushed allowances
LONELY_S = 10.0  # seconds without an actor after which a learner that waits for steps logs so
EPISODE_TIMEOUT = 30.0  # seconds of silence that close an actor's episode as truncated
FINISH_GRACE = 10.0  # seconds the actors have to deliver what is left after the end of training


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


class RecordRouter:
    """Routes records to the replay. One thread inserts; the thread that trains takes what was finished.

    Episodes with tickets go to `groups`. The replay checks and counts them like others, and drops them with their end,
    unless a human had a part.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.demonstrations = DemonstrationReceiver(replay)
        self.groups: Collector | None = None  # of episodes with tickets, where the trainer has iterations
        self._received: list[Episode] = []  # demonstrations
        self._changed = threading.Condition()
        self._finished: list[EpisodeStats] = []
        self._corrections: list[tuple[str, Amend]] = []
        self.position = 0  # journal entries that the counters cover
        self.env_steps = 0
        self._human_steps = 0  # of interventions, that the previous process held
        self.resumed_steps = 0  # online steps of previous processes, whose transitions are gone

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
        if isinstance(record, Begin) and record.demonstration != demonstrations:
            kind = "demonstrations" if demonstrations else "no demonstrations"
            raise DataError(
                f"episode {record.episode_id}: its session sends {kind}. Use the same version on both sides"
            )
        self._count(*self._insert(session, record, demonstrations), position, (session, record))

    def _insert(self, session: str, record: Record, demonstrations: bool) -> tuple[Added, Episode | None]:
        if demonstrations and not isinstance(record, Amend):  # not counted as online steps
            return Added(), self.demonstrations.insert(session, record)
        added = self._replay.insert(session, record)
        if self.groups is not None:
            self._leave(session, self.groups.insert(session, record))
        return added, None

    def _leave(self, session: str, episode_id: str) -> None:
        if episode_id:
            self._replay.insert(session, Amend(episode_id, discard=True))

    def close_session(self, session: str, *, gone: bool, position: int | None = None) -> None:
        """Note that an actor fell silent, or is permanently disconnected (`gone`)."""
        self._count(self._close_session(session, gone=gone), None, position)

    def _close_session(self, session: str, *, gone: bool) -> Added:
        if gone:
            self.demonstrations.close_session(session)
        added = self._replay.close_session(session, gone=gone)
        if gone and self.groups is not None:
            self._leave(session, self.groups.close_session(session))
        return added

    def _count(
        self, added: Added, demonstration: Episode | None, position: int | None,
        record: tuple[str, Record | None] = ("", None),
    ) -> None:  # fmt: skip
        with self._changed:
            if isinstance(record[1], Amend) and (record[1].discard or record[1].outcome is not None):
                self._corrections.append((record[0], record[1]))
            self.env_steps += added.steps
            if added.finished is not None:
                self._finished.append(added.finished)
            if demonstration is not None:
                self._received.append(demonstration)
            self.position = self.position if position is None else position
            self._changed.notify()

    def refill(self, records: Iterable[tuple[int, str, Record | None]]) -> int:
        """Put back what a previous process received: (journal entry, session, record), oldest first; returns the steps.

        No record: the session was closed there, perhaps within an episode. What the checkpoint's counters cover fills
        the replay and is not counted again. A record that does not fit (the experiment was changed) is left out.
        Entries that come next are to be numbered from `position` on: it may be beyond the journal's end.
        """
        counted, self.position = self.position, 0
        steps = refused = 0
        demonstrations: dict[str, bool] = {}
        for number, session, record in records:
            if number < counted:
                self.position = number + 1
            try:
                if record is None:
                    added = self._close_session(session, gone=True)
                else:
                    if isinstance(record, Begin):
                        demonstrations[session] = record.demonstration
                    # A demonstration was reported when it came.
                    added, _ = self._insert(session, record, demonstrations.get(session, False))
            except DataError as error:
                refused += 1
                if refused == 1:
                    logger.warning("the journal holds a record that does not fit: %s", error)
                continue
            steps += added.steps
            if number < counted:
                self.resumed_steps -= added.steps
            else:
                self._count(added, None, number + 1, (session, record))
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
            episodes, self._finished = self._finished, []
            demonstrations, self._received = self._received, []
            corrections, self._corrections = self._corrections, []
            return Received(self.env_steps, self.position, episodes, demonstrations, corrections)

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)


class LearnerService(ServerHandler):
    """Serves actors for a learner, which is attached when it has read its data and checkpoint.

    The journal lies in the folder of `run`; the other arguments are those of `LearnerServer`. Raises ConfigError where
    the address or the journal cannot be used.
    """

    def __init__(
        self, config: ExperimentConfig, run: RunFolder, contract: dict[str, str], *,
        bind: str, port: int, insecure: bool = False, keys: ServerKeys | None = None,
    ) -> None:  # fmt: skip
        self._config, self._run = config, run
        self._learner: Learner | None = None
        # A robot in real time is never held: its actor reads no allowance, and needs no message about one.
        self._limited = config.actor.clock == "lockstep"
        self._shares = StepShares(self._steps_left, config.transport.timeout_s, steps_of=self._steps_of)
        self._store = _open_store(config, run.path) if config.transport.journal else None
        with contextlib.ExitStack() as failed:
            if self._store is not None:
                failed.callback(self._store.close)
            self.server = LearnerServer(
                config.transport, self, bind=bind, port=port, contract=contract, insecure=insecure, keys=keys,
                run_id=run.run_id, store=self._store, episode_timeout=EPISODE_TIMEOUT,
            )  # fmt: skip
            failed.pop_all()
        self._requests = AmendRequests(run.path, self.server.correct)
        self._next_check = self._next_push = self._lonely_since = 0.0
        self._pushed = 0  # updates of which lockstep actors have the allowance
        self._no_actor = Waiting(logger, float("inf"))

    def attach(self, learner: Learner) -> None:
        """Put the journal back into the learner's replay, then let actors in."""
        if self._store is not None:
            check_retention(self._config.transport.journal_bytes, learner.replay.estimated_disk_bytes)
            steps = learner.refill(self._stored(self._store))
            # A power cut may have taken entries that the checkpoint counts: what comes next is none of them.
            self._store.journal.skip_to(learner.router.position)
            if self._store.journal.next:
                logger.info(f"journal: {steps:,} online steps put back from {format_bytes(self._store.journal.nbytes)}")
            self.server.resume()
        self._learner = learner

    def tick(self) -> bool:
        """Do what is due between pieces of work; returns whether to show the state. Raises what stopped the server."""
        now, learner = time.monotonic(), self._ready()
        if learner.updates != self._pushed and now >= self._next_push:
            # Lockstep actors wait for the updates that their steps allow: push soon, but not for each one.
            self._pushed, self._next_push = learner.updates, now + PUSH_PERIOD
            self.server.push_allowances()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_PERIOD
        self.server.check()
        self._requests.poll()
        if not learner.idle or self._actors():
            self._lonely_since = now
            self._no_actor.end()
        elif now - self._lonely_since > LONELY_S:
            self._no_actor.log(
                "training waits for steps, and no actor is connected",
                f"Start an actor of {self._config.name} with the address of this machine",
            )
        return True

    def status(self) -> StatusFields:
        fields = self._ready().status()
        if "env_steps" in fields:
            fields["actors"], fields["stalled"] = self._actors(), self.server.stalled
        return fields

    def finish(self, reason: str) -> None:
        """Send actors the reason why training is over; give them a while to deliver what is left."""
        self.server.finish(reason)
        end = time.monotonic() + FINISH_GRACE
        while self._actors() and time.monotonic() < end:
            self.server.check()
            time.sleep(0.05)

    def close(self) -> None:
        self.server.close()
        if self._store is not None:
            self._store.close()

    def _actors(self) -> tuple[str, ...]:
        return tuple(s.info.actor_id for s in self.server.sessions() if s.live and not s.info.demonstrations)

    def _ready(self) -> Learner:
        if self._learner is None:
            raise ConfigError("the learner is still reading its demonstrations and checkpoint")
        return self._learner

    def welcome(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return welcome_of(self._ready())

    def digests(self) -> np.ndarray:
        return self._ready().router.demonstrations.digests

    def allowance(self, session: str) -> int | None:
        return self._shares.allowed(session)

    def tickets(self, session: str, version: int, held: Sequence[str], capacity: int) -> Grant | None:
        groups = self._ready().router.groups
        return None if groups is None else groups.tickets(session, version, held, capacity)

    def busy(self) -> str:
        return "" if self._learner is None else self._learner.stats.busy

    def _steps_left(self) -> int | None:
        return self._ready().trainer.steps_allowed() if self._limited else None

    def _steps_of(self, session: str) -> int:
        return next((s.state.steps for s in self.server.sessions() if s.info.session == session), 0)

    def _position(self) -> int | None:
        return None if self._store is None else self._store.journal.next

    def on_record(self, info: SessionInfo, record: Record) -> None:
        session = f"{info.actor_id}/{info.session}"
        self._ready().router.insert(session, record, self._position(), demonstrations=info.demonstrations)
        if isinstance(record, StepBlock) and not info.demonstrations:
            self._shares.delivered(info.session, record.n)
        if isinstance(record, End):
            self.server.push_allowances()  # its slot is settled: another may be handed out

    def on_silent(self, info: SessionInfo, gone: bool) -> None:
        session = f"{info.actor_id}/{info.session}"
        self._ready().router.close_session(session, gone=gone, position=self._position())
        self._shares.closed(info.session)
        if (groups := self._ready().router.groups) is not None:
            groups.lost(info.session)

    def fetch(self, step: str) -> tuple[Snapshot, dict[str, Any]]:
        checkpoint = wanted_policy(self._run.path, CheckpointStore(self._run.path), step)
        origin = PolicyOrigin(normaliser=Normaliser.restored(checkpoint.meta, checkpoint.normaliser).digest())
        return Snapshot(checkpoint.step, checkpoint.params, origin=origin), {"step": checkpoint.step}

    def _stored(self, store: RecordStore) -> Iterator[tuple[int, str, Record | None]]:
        """The journal's records, with progress lines: tens of gigabytes take a while."""
        lines = Waiting(logger, JOURNAL_PERIOD, late=JOURNAL_PERIOD)
        for stored in store.replay():
            if stored.delivered:
                yield stored.number, f"{stored.actor_id}/{stored.session}", stored.record
            lines.log(f"reading the journal: entry {stored.number:,} of {store.journal.next:,}")


def welcome_of(learner: Learner) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what a new actor receives: the action transform, and how far the run is, so that it repeats nothing."""
    preprocess = learner.preprocess
    so_far = {"episodes": learner.episodes, "env_steps": learner.env_steps, "human_ticks": learner.human_ticks}
    return {**preprocess.normaliser.fields(), **so_far}, preprocess.normaliser.to_arrays()


def _open_store(config: ExperimentConfig, run: Path) -> RecordStore:
    t, r, g = config.transport, config.replay, config.group
    # Of an iteration under way all episodes, from which a restart goes on.
    of_groups = g.max_groups * g.size * config.robot.max_episode_steps if config.agent.iterates else 0
    if config.agent.clones_successes:  # however many failures are between those that the replay holds
        of_groups = sys.maxsize
    store = RecordStore(
        run / JOURNAL, Limits(t.max_message_bytes, MAX_ARRAYS), min_steps=max(r.capacity + r.human_capacity, of_groups),
        max_bytes=t.journal_bytes, max_age=86400 * t.journal_days or None, sync_interval=t.heartbeat,
        writer=version_info().text,
    )  # fmt: skip
    if any(store.journal.losses):
        logger.warning(f"journal {store.journal.folder}: {store.journal.losses}")
    return store
