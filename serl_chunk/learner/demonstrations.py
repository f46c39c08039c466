"""Demonstrations that `record --ip` streams: collected, each content once, and put into the replay whole."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable

import numpy as np

from serl_chunk.data.demos import short_digest
from serl_chunk.data.frames import with_repeated_frames
from serl_chunk.replay.replay import Replay
from serl_chunk.runs.episodes import joined
from serl_chunk.types import Amend, Begin, ConfigError, DataError, Episode, Record, StepBlock
from serl_chunk_robot.wire.codec import WireError


@dataclasses.dataclass
class _Open:
    begin: Begin
    blocks: list[StepBlock] = dataclasses.field(default_factory=list)
    length: int = 0


class DemonstrationReceiver:
    """Takes the records of demonstrations out of the sessions' streams.

    An episode enters the replay with its `End`: one whose recording died in it never does. One that the learner has,
    from `--demo_path` or an earlier stream, is left out. One thread inserts; any thread reads the digests.
    """

    def __init__(self, replay: Replay) -> None:
        self.received = self.duplicates = 0
        self._replay = replay
        self._open: dict[str, _Open] = {}  # by session
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

    def takes(self, session: str, record: Record) -> bool:
        """Return whether `record` belongs to a demonstration that is not closed."""
        if isinstance(record, Begin):
            self._open.pop(session, None)  # its end will never come
            return record.demonstration
        opened = self._open.get(session)
        return opened is not None and not isinstance(record, Amend) and opened.begin.episode_id == record.episode_id

    def insert(self, session: str, record: Record) -> Episode | None:
        """Insert a record that `takes` accepted; return the demonstration that became complete and is in the replay.

        Raises DataError where records are missing, and where the episode does not fit the robot or the replay.
        """
        if isinstance(record, Begin):
            self._open[session] = _Open(record)
            return None
        opened = self._open[session]
        if isinstance(record, StepBlock):
            if record.first_tick != opened.length:
                raise DataError(
                    f"demonstration {record.episode_id}: steps from tick {record.first_tick} on arrived, expected tick "
                    f"{opened.length}"
                )
            opened.blocks.append(record)
            opened.length += record.n
            return None
        assert not isinstance(record, Amend)
        del self._open[session]
        if not opened.length or record.length != opened.length:
            raise DataError(
                f"demonstration {record.episode_id} ended with {record.length} steps, {opened.length} arrived"
            )
        try:  # decodes JPEG images
            final = record.final_observation
            end = record if final is None else record._replace(
                final_observation={name: np.asarray(value) for name, value in final.items()}
            )  # fmt: skip
            episode = Episode(opened.begin, *with_repeated_frames(joined(opened.blocks, {}), end))
        except WireError as error:
            raise DataError(f"demonstration {record.episode_id}: {error}") from error
        digest = short_digest(episode)
        if digest in self._digests:
            self.duplicates += 1
            return None
        try:
            self._replay.add_streamed_demo(session, episode)
        except ConfigError as error:
            raise DataError(f"demonstration {record.episode_id}: {error}") from error
        with self._lock:
            self._digests[digest] = None
        self.received += 1
        return episode

    def close_session(self, session: str) -> None:
        """Drop the open demonstration of a session that does not come back."""
        self._open.pop(session, None)
