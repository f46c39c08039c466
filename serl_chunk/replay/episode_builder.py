"""Builds the replay's episodes from records: begun, continued, ended, abandoned and corrected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.replay.episode import EpisodeStats, Key, Partition, StoredEpisode, decision_values, summarise
from serl_chunk.replay.frame_storage import final_rows
from serl_chunk.replay.partitions import Partitions
from serl_chunk.types import Amend, Begin, DataError, End, Episode, Outcome, Record, Source, StepBlock


class Added(NamedTuple):
    """Result of inserting a record."""

    steps: int = 0  # stored
    finished: EpisodeStats | None = None  # the online episode that ended with it


class EpisodeBuilder:
    """Writes records into the partitions. Its caller holds the replay's lock.

    Records of an episode that no partition holds any more are counted in `count` and otherwise ignored. Raises
    DataError for steps that come twice or leave a gap, for an end that does not fit, for arrays of another robot, and
    for a text that is too long for a prompt.
    """

    def __init__(self, partitions: Partitions, discount: float, count: Counter[str]) -> None:
        self._partitions, self._discount, self._count = partitions, discount, count
        self._current: dict[str, StoredEpisode] = {}  # the episode each session is in; it may have been dropped

    def insert(self, session: str, record: Record) -> Added:
        steps, finished = 0, None
        if isinstance(record, Begin):
            finished = self._begin(session, record, self._partitions.online)
        elif isinstance(record, StepBlock):
            steps = self._steps(session, record)
        elif isinstance(record, End):
            finished = self._end(session, record)
        else:
            self._amend(session, record)
        return self._counted(steps, finished)

    def _counted(self, steps: int, finished: EpisodeStats | None) -> Added:
        self._count["steps"] += steps
        self._count["episodes"] += finished is not None
        return Added(steps, finished)

    def _begin(self, session: str, begin: Begin, partition: Partition) -> EpisodeStats | None:
        """Open a session's next episode in `partition`; return the one before, where its end never came."""
        abandoned = self._held(session)
        finished = None if abandoned is None else self._end(session, _died(abandoned))  # its end will never come
        key: Key = (session, begin.episode_id)
        if self._partitions.find(key) is not None:
            raise DataError(f"episode {begin.episode_id} of session {session!r} began twice")
        demonstration, storage = partition is self._partitions.demo, self._partitions.storage
        task = 0 if storage.tasks is None else storage.tasks.number(begin)
        tables = len(storage.features.row_tables)
        self._current[session] = StoredEpisode(key, begin, demonstration, len(storage.cameras), tables, task)
        partition.put(self._current[session])
        return finished

    def demonstrations(self, session: str, episodes: Sequence[Episode]) -> None:
        """Add demonstrations whose arrays were checked."""
        for begin, steps, end in episodes:
            self._begin(session, begin, self._partitions.demo)
            self._steps(session, steps, checked=True)
            self._end(session, end, checked=True)

    def _steps(self, session: str, block: StepBlock, *, checked: bool = False) -> int:
        """Append steps to the session's open episode; return how many are stored."""
        episode = self._held(session, block.episode_id)
        if episode is None:
            return self._orphan(block)
        if block.first_tick != (first := episode.length):
            what = "came twice" if block.first_tick < first else "before them are missing"
            raise DataError(
                f"episode {block.episode_id} of session {session!r}: steps from tick {block.first_tick} on arrived, "
                f"expected tick {first}; steps {what}"
            )
        storage = self._partitions.storage
        if not checked:
            storage.check(block)
        decisions = decision_values(block)
        self._reopen(episode)
        partition = self._partitions.of(episode)
        frames = storage.space_for(block.n, block.sparse, demonstration=episode.demonstration)
        if not self._partitions.make_room(partition, episode, block.n, frames):
            return self._orphan(block)
        partition.grow(block.n, storage.append(episode, block))
        episode.human |= bool((block.source == Source.HUMAN).any())
        if block.lost_ticks.any():
            episode.gaps = np.concatenate([episode.gaps, first + np.flatnonzero(block.lost_ticks)])
        episode.decisions += decisions
        if not episode.demonstration:  # which is whole at once: its end says all of it
            self._partitions.relabel(episode, first)
            self._partitions.index(episode)
        return block.n

    def _end(self, session: str, end: End, *, checked: bool = False) -> EpisodeStats | None:
        """End the session's open episode; return its figures, where it is an online one that was kept."""
        episode = self._held(session, end.episode_id)
        if episode is None:
            self._count["orphan_records"] += 1
            return None
        if end.length != episode.length:
            raise DataError(
                f"episode {end.episode_id} of session {session!r} ended with {end.length} steps, "
                f"{episode.length} arrived"
            )
        self._reopen(episode)
        self._close(episode, end, checked=checked)
        del self._current[session]
        if episode.end is None or episode.demonstration:
            return None
        storage, rows = self._partitions.storage, episode.rows[: episode.length]
        steps = storage.steps
        columns = steps.source[rows], steps.decision_tick[rows], steps.reward[rows], steps.effective[rows]
        return summarise(episode, *columns, steps.action[rows], storage.spec, self._discount)

    def _amend(self, session: str, amend: Amend) -> None:
        episode = self._partitions.find((session, amend.episode_id))
        if episode is None:
            self._count["orphan_records"] += 1
        elif amend.discard:
            self._count["discarded_episodes"] += 1
            self._partitions.remove(episode)
        elif episode.abandoned:  # what it was judged by is not here
            self._count["orphan_records"] += 1
        elif episode.end is None:
            raise DataError(f"episode {amend.episode_id} of session {session!r} is amended before its end")
        else:
            self._partitions.unindex(episode)
            episode.end = amend.correct(episode.end)
            self._settle(episode, amend.reward)

    def close_session(self, session: str, *, gone: bool) -> Added:
        episode = self._held(session)
        if episode is not None and gone:
            finished = self._end(session, _died(episode))
            episode.abandoned = True
            return self._counted(0, finished)
        if episode is not None and episode.end is None and episode.length:
            self._close(episode, _died(episode))
            episode.provisional = episode.end is not None
        return Added()

    def _held(self, session: str, episode_id: str | None = None) -> StoredEpisode | None:
        """The episode `session` is in, unless a partition dropped it or it is not the one called `episode_id`."""
        episode = self._current.get(session)
        if episode is None or self._partitions.find(episode.key) is not episode:
            return None
        return episode if episode_id in (None, episode.key[1]) else None

    def _orphan(self, block: StepBlock) -> int:
        self._count["orphan_records"] += 1
        self._count["orphan_steps"] += block.n
        return 0

    def _close(self, episode: StoredEpisode, end: End, *, checked: bool = False) -> None:
        """Write the final row; leaves `episode.end` None if the episode was dropped instead."""
        partitions, storage = self._partitions, self._partitions.storage
        if not episode.length:
            self._count["empty_episodes"] += 1
            partitions.remove(episode)
            return
        if end.final_observation is not None and not checked:
            storage.check_final(end.episode_id, end.final_observation)
        partition = partitions.of(episode)
        frames = storage.space_for(1, final_rows(end.final_observation), demonstration=episode.demonstration)
        if not partitions.make_room(partition, episode, 1, frames):
            return
        partition.grow(1, storage.append_final(episode, end.final_observation, end.repeats))
        # The storage holds the observation now; of the record only its presence is needed later.
        episode.end = end if end.final_observation is None else end._replace(final_observation={}, repeats=None)
        self._settle(episode, end.reward)

    def _settle(self, episode: StoredEpisode, reward: float | None) -> None:
        storage = self._partitions.storage
        if reward is not None:
            storage.steps.reward[episode.rows[episode.length - 1]] = reward
        storage.close(episode)
        self._partitions.relabel(episode)
        self._partitions.index(episode)

    def _reopen(self, episode: StoredEpisode) -> None:
        """Undo a provisional close: the actor came back."""
        if episode.provisional:
            self._partitions.unindex(episode)
            self._partitions.of(episode).grow(-1, -self._partitions.storage.reopen(episode))
            episode.end, episode.provisional = None, False
            self._partitions.index(episode)


def _died(episode: StoredEpisode) -> End:
    return End(episode.key[1], episode.length, None, False, True, Outcome.UNKNOWN, "learner")
