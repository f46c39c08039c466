"""The network side of a learner: its server, the journal behind it, and the steps that lockstep actors may record."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.io import Waiting, format_bytes
from serl_chunk.learner.intake import ClosedError, Entry, Intake
from serl_chunk.learner.schedule import StepShares
from serl_chunk.runs.amend import AmendRequests
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.episodes import JOURNAL
from serl_chunk.runs.evaluations import wanted_policy
from serl_chunk.runs.folder import RunFolder
from serl_chunk.runs.status_line import StatusFields
from serl_chunk.runs.term import Term
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.server.record_channel import FENCE_S
from serl_chunk.transport.server.server import LearnerServer
from serl_chunk.transport.server.sessions import NO_ACTOR, ServerHandler, SessionInfo
from serl_chunk.transport.storage.record_store import RecordStore, check_retention
from serl_chunk.transport.wire.handshake import MAX_ARRAYS, ActorState
from serl_chunk.types import (
    ConfigError,
    DataError,
    End,
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


class LearnerService(ServerHandler):
    """Serves actors for a learner, which is attached when it has read its data and checkpoint.

    The journal lies in the folder of `run`; the other arguments are those of `LearnerServer`. Raises ConfigError where
    the address or the journal cannot be used.
    """

    def __init__(
        self, config: ExperimentConfig, run: RunFolder, contract: dict[str, str], *,
        bind: str, port: int, insecure: bool = False, keys: ServerKeys | None = None,
    ) -> None:  # fmt: skip
        self._config, self._run, self._opened = config, run, time.monotonic()
        self._learner: Learner | None = None
        self._intake: Intake | None = None
        # A robot in real time is never held: its actor reads no allowance, and needs no message about one.
        self._limited = config.actor.clock == "lockstep"
        self._shares = StepShares(self._steps_left, config.transport.timeout_s, steps_of=self._steps_of)
        self._term = Term(run.path)
        if (
            self._term.taken_over
        ):  # until the one before has looked, should it be alive: its newest records are there then
            time.sleep(FENCE_S + 0.2)
        self.term = self._term.number
        self._store = _open_store(config, run.path, self._term) if config.transport.journal else None
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
        """Let actors in, and put the journal back into the learner's replay behind them.

        Their records are written down and acknowledged meanwhile, and enter the replay after the old ones.
        """
        if self._store is not None:
            check_retention(self._config.transport.journal_bytes, learner.replay.estimated_disk_bytes)
            self._store.find_states()
            # A power cut may have taken entries that the checkpoint counts: what comes next is none of them.
            self._store.journal.skip_to(learner.router.position)
            self.server.resume()
        self._intake = Intake(
            learner.router, refill=partial(self._refill, learner), refuse=self.server.refuse,
            inserted=self._inserted_all,
        )  # fmt: skip
        self._learner, learner.router.fence = learner, self.fence
        logger.info(f"actors are admitted, {self._since_open}")

    @property
    def _since_open(self) -> str:
        return f"{time.monotonic() - self._opened:.1f} s after the sockets were opened"

    def _refill(self, learner: Learner, closed: Callable[[], bool]) -> Set[tuple[str, str]]:
        """Put the journal back, on the thread that inserts; returns the episodes of which something is damaged."""
        damaged: set[tuple[str, str]] = set()
        if self._store is not None:
            steps = learner.refill(self._stored(self._store, damaged, closed))
            damaged |= self._store.holes
            if steps or self._store.journal.next:
                logger.info(
                    f"journal: {steps:,} online steps put back from {format_bytes(self._store.journal.nbytes)}, "
                    f"{self._since_open}"
                )
            self.server.trim()
        return damaged

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
        self._inserting().check()
        self.fence()
        if not learner.router.refilling:
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

    def figures(self) -> dict[str, float]:
        """Return numbers of the learner by name; any thread."""
        learner = self._ready()
        shown = {name: float(value) for name, value in self.status().items() if isinstance(value, int | float)}
        of_records = {f"transport_{name}": value for name, value in self.server.stats().items()}
        mine = {"updates": learner.updates, "human_ticks": learner.human_ticks, "refilling": learner.router.refilling}
        return shown | of_records | mine | {"steps_not_inserted": self._inserting().steps}

    def actor_states(self) -> list[ActorState]:
        return self.server.actor_states()

    def finish(self, reason: str) -> None:
        """Send actors the reason why training is over; give them a while to deliver what is left."""
        self.server.finish(reason)
        end = time.monotonic() + FINISH_GRACE
        while self._actors() and time.monotonic() < end:
            self.server.check()
            time.sleep(0.05)
        if not self._ready().router.refilling:
            self._inserting().drain()

    def close(self) -> None:
        if self._intake is not None:
            self._intake.close()
        self.server.close()
        if self._store is not None:
            self._store.close()

    def _actors(self) -> tuple[str, ...]:
        return tuple(s.info.actor_id for s in self.server.sessions() if s.live and not s.info.demonstrations)

    def _ready(self) -> Learner:
        if self._learner is None:
            raise ConfigError("the learner is still reading its demonstrations and checkpoint")
        return self._learner

    def _inserting(self) -> Intake:
        self._ready()
        assert self._intake is not None
        return self._intake

    def welcome(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        learner = self._ready()
        if learner.router.refilling and learner.env_steps < self._config.learner.random_steps:
            raise ConfigError("the learner is still reading its journal")  # of which the actor would repeat some
        return welcome_of(learner)

    def digests(self) -> np.ndarray:
        if self._ready().router.refilling:  # it would not know all of them
            raise ConfigError("the learner is still reading its journal")
        return self._ready().router.demonstrations.digests

    def allowance(self, session: str) -> int | None:
        return self._shares.allowed(session)

    def tickets(self, session: str, version: int, held: Sequence[str], capacity: int) -> Grant | None:
        router = self._ready().router
        groups = None if router.refilling else router.groups
        return None if groups is None else groups.tickets(session, version, held, capacity)

    def busy(self) -> str:
        if self._learner is None:
            return ""
        return "it reads its journal" if self._learner.router.refilling else self._learner.stats.busy

    def _steps_left(self) -> int | None:
        if not self._limited:
            return None
        learner = self._ready()
        waiting = self._inserting().steps  # first: a turn may end between the two, and is then counted twice
        left = 0 if learner.router.refilling else learner.trainer.steps_allowed()
        return None if left is None else max(0, left - waiting)

    def _steps_of(self, session: str) -> int:
        return next((s.state.steps for s in self.server.sessions() if s.info.session == session), 0)

    def _position(self) -> int | None:
        return None if self._store is None else self._store.journal.next

    def fence(self) -> None:
        self._term.check()

    def backlog(self) -> str:
        return "" if self._intake is None else self._intake.backlog

    def on_record(self, info: SessionInfo, record: Record) -> None:
        intake, online = self._inserting(), not info.demonstrations
        entry = Entry(f"{info.actor_id}/{info.session}", record, self._position(), info.demonstrations, info.session)
        if not online or info.incarnation == NO_ACTOR:  # rare, and a person reads at once that it does not fit
            intake.drain()
            for _, why in self._ready().router.insert_all([entry]):
                raise DataError(why)
            return
        intake.put(entry)
        if isinstance(record, StepBlock):
            self._shares.delivered(info.session, record.n)

    def on_silent(self, info: SessionInfo, gone: bool) -> None:
        session = f"{info.actor_id}/{info.session}"
        self._inserting().put(Entry(session, None, self._position(), sender=info.session, gone=gone))
        self._shares.closed(info.session)

    def _inserted_all(self, entries: Sequence[Entry]) -> None:
        groups = self._ready().router.groups
        silent = {entry.sender for entry in entries if entry.record is None}
        if groups is not None and silent:
            for sender in silent - {s.info.session for s in self.server.sessions() if s.live}:
                groups.lost(sender)
        if any(isinstance(entry.record, End) for entry in entries):
            self.server.push_allowances()  # a slot is settled: another may be handed out

    def fetch(self, step: str) -> tuple[Snapshot, dict[str, Any]]:
        checkpoint = wanted_policy(self._run.path, CheckpointStore(self._run.path), step)
        origin = PolicyOrigin(normaliser=Normaliser.restored(checkpoint.meta, checkpoint.normaliser).digest())
        return Snapshot(checkpoint.step, checkpoint.params, origin=origin), {"step": checkpoint.step}

    def _stored(
        self, store: RecordStore, damaged: set[tuple[str, str]], closed: Callable[[], bool]
    ) -> Iterator[tuple[int, str, Record | None]]:
        """Yield the journal's records, with progress lines: tens of gigabytes take a while."""
        lines = Waiting(logger, JOURNAL_PERIOD, late=JOURNAL_PERIOD)
        for stored in store.replay():
            if closed():
                raise ClosedError("the learner ends")
            if stored.delivered:
                yield stored.number, f"{stored.actor_id}/{stored.session}", stored.record
            elif stored.record is not None:
                damaged.add((stored.session, stored.record.episode_id))
            lines.log(f"reading the journal: entry {stored.number:,} of {store.journal.next:,}")


def welcome_of(learner: Learner) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what a new actor receives: the action transform, and how far the run is, so that it repeats nothing."""
    preprocess = learner.preprocess
    so_far = {"episodes": learner.episodes, "env_steps": learner.env_steps, "human_ticks": learner.human_ticks}
    return {**preprocess.normaliser.fields(), **so_far}, preprocess.normaliser.to_arrays()


def _open_store(config: ExperimentConfig, run: Path, term: Term) -> RecordStore:
    t, r, g = config.transport, config.replay, config.group
    # Of an iteration under way all episodes, from which a restart goes on.
    of_groups = g.max_groups * g.size * config.robot.max_episode_steps if config.agent.iterates else 0
    if config.agent.clones_successes:  # however many failures are between those that the replay holds
        of_groups = sys.maxsize
    store = RecordStore(
        run / JOURNAL, Limits(t.max_message_bytes, MAX_ARRAYS), min_steps=max(r.capacity + r.human_capacity, of_groups),
        max_bytes=t.journal_bytes, max_age=86400 * t.journal_days or None, sync_interval=t.heartbeat,
        writer=version_info().text, fence=term.check, taken_over=term.taken_over,
    )  # fmt: skip
    if any(store.journal.losses):
        logger.warning(f"journal {store.journal.folder}: {store.journal.losses}")
    return store
