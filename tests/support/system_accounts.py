"""Compares what a robot did with what its learner holds, step by step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.config.transport import TransportConfig
from serl_chunk.transport.storage.record_store import RecordStore
from serl_chunk.transport.wire.handshake import MAX_ARRAYS
from serl_chunk.types import Begin, End, Outcome, StepBlock
from serl_chunk_robot.wire.codec import Limits

LIMITS = Limits(TransportConfig().max_message_bytes, MAX_ARRAYS)
Key = tuple[int, int, int]  # life, episode, tick


class Account(NamedTuple):
    """What was counted."""

    steps: int  # in the store, each once
    executed: int  # by the robot
    cut: dict[tuple[int, int], int]  # (life, episode) -> steps missing at its end: the actor was killed there
    died: int  # episodes whose end an actor's successor wrote


def executed_steps(log: Path) -> dict[Key, tuple[float, ...]]:
    """Every step the robot made: (random number, actions...)."""
    out: dict[Key, tuple[float, ...]] = {}
    for line in log.read_text().splitlines():
        life, episode, tick, *rest = map(float.fromhex, line.split())
        key = (int(life), int(episode), int(tick))
        assert key not in out
        out[key] = tuple(rest)
    return out


def journal_store(run: Path) -> contextlib.closing[RecordStore]:
    return contextlib.closing(RecordStore(run / "journal" / "online", LIMITS))


def journal_rows(run: Path) -> list[Any]:
    """Every record in the journal with its session, those that were not delivered to the replay included."""
    with journal_store(run) as store:
        return list(store.replay())


def settle(run: Path, log: Path) -> Account:
    """Every step in the journal was executed and is there once, in order, unchanged; what is missing is a tail."""
    executed = executed_steps(log)
    stored: dict[Key, str] = {}
    ended: dict[str, End] = {}
    lengths: dict[str, int] = defaultdict(int)
    expected: dict[str, int] = {}
    with journal_store(run) as store:
        for row in store.replay():
            assert row.delivered, f"record {row.first} of {row.session} belongs to no open episode"
            assert row.first == expected.get(row.session, 0), "a sequence number is missing or came twice"
            record = row.record
            if record is None:  # the session's place alone
                continue
            expected[row.session] = row.first + (record.n if isinstance(record, StepBlock) else 1)
            if isinstance(record, Begin):
                assert record.episode_id not in lengths
                lengths[record.episode_id] = 0
            elif isinstance(record, End):
                assert record.episode_id not in ended
                assert record.length == lengths[record.episode_id]
                ended[record.episode_id] = record
            elif isinstance(record, StepBlock):
                assert record.episode_id not in ended
                assert record.first_tick == lengths[record.episode_id]
                lengths[record.episode_id] += record.n
                for state, action in zip(record.observation["state"], record.action, strict=True):
                    key = (int(state[0]), int(state[1]), int(state[2]))
                    assert key not in stored, f"step {key} is there twice"
                    stored[key] = record.episode_id
                    assert (float(state[3]), *map(float, np.asarray(action))) == executed[key]
        assert store.unreadable == 0
        assert store.journal.losses.damaged == 0
    cut: dict[tuple[int, int], int] = defaultdict(int)
    for life, episode, tick in executed.keys() - stored.keys():
        cut[life, episode] += 1
        assert (life, episode, tick + 1) not in stored, "a step is missing in the middle of an episode"
    died = sum(e.outcome == Outcome.UNKNOWN and e.outcome_by == "restart" for e in ended.values())
    return Account(len(stored), len(executed), dict(cut), died)
