"""How records of sessions become episodes of the replay: begun, continued, ended, given up and corrected."""

from __future__ import annotations

from collections import Counter

import numpy as np

from serl_chunk.replay.episode import EpisodeStats, Key, Partition, StoredEpisode, decision_values, summarise
from serl_chunk.replay.partitions import Partitions
from serl_chunk.types import Amend, Begin, DataError, End, Episode, Outcome, Source, StepBlock


class EpisodeBuilder:
    """Writes records into the stores. Its caller holds the replay's lock.

    Records of an episode that no store holds any more are counted in `count` and otherwise ignored. Raises DataError
    for steps that come twice or leave a gap, for an end that does not fit, and for arrays of another robot.
    """

    def __init__(self, stores: Partitions, discount: float, count: Counter[str]) -> None:
        self._stores, self._discount, self._count = stores, discount, count
        self._current: dict[str, StoredEpisode] = {}  # the episode each session is in; it may have been dropped

    def begin(self, session: str, begin: Begin, store: Partition) -> EpisodeStats | None:
        """A session's next episode goes into `store`; figures of the one before, where its end never came."""
        abandoned = self._held(session)
        finished = None if abandoned is None else self.end(session, _died(abandoned))  # its end will never come
        key: Key = (session, begin.episode_id)
        if self._stores.find(key) is not None:
            raise DataError(f"episode {begin.episode_id} of session {session!r} began twice")
        demonstration = store is self._stores.demo
        self._current[session] = StoredEpisode(key, begin, demonstration, len(self._stores.pool.cameras))
        store.put(self._current[session])
        return finished

    def demonstration(self, session: str, episode: Episode, returns: np.ndarray | None) -> None:
        """A whole demonstration whose arrays were checked, its realised returns float64[T] where they are known."""
        self.begin(session, episode.begin, self._stores.demo)
        self._current[session].returns = returns
        self.steps(session, episode.steps, checked=True)
        self.end(session, episode.end, checked=True)

    def steps(self, session: str, block: StepBlock, *, checked: bool = False) -> int:
        """Steps of the session's open episode; how many are stored."""
        episode = self._held(session, block.episode_id)
        if episode is None:
            return self._orphan(block)
        first = episode.length
        if block.first_tick != first:
            what = "came twice" if block.first_tick < first else "before them are missing"
            raise DataError(
                f"episode {block.episode_id} of session {session!r}: steps from tick {block.first_tick} on arrived, "
                f"expected tick {first}; steps {what}"
            )
        pool = self._stores.pool
        if not checked:
            pool.check(block)
        decisions = decision_values(block)
        self._reopen(episode)
        store, frames = self._stores.of(episode), pool.frames_in(block, demonstration=episode.demonstration)
        if not self._stores.make_room(store, episode, block.n, frames):
            return self._orphan(block)
        pool.append(episode, block)
        store.grow(block.n, frames)
        episode.human |= bool((block.source == Source.HUMAN).any())
        episode.decisions += decisions
        if not episode.demonstration:  # which is whole at once: its end says all of it
            self._stores.relabel(episode, first)
            self._stores.index(episode)
        return block.n

    def end(self, session: str, end: End, *, checked: bool = False) -> EpisodeStats | None:
        """The end of the session's open episode; its figures, where it is an online one that was kept."""
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
        pool, steps = self._stores.pool, episode.rows[: episode.length]
        columns = pool.source[steps], pool.decision_tick[steps], pool.reward[steps], pool.effective[steps]
        return summarise(episode, *columns, self._discount)

    def amend(self, session: str, amend: Amend) -> None:
        """A correction of a closed episode."""
        episode = self._stores.find((session, amend.episode_id))
        if episode is None:
            self._count["orphan_records"] += 1
        elif amend.discard:
            self._count["discarded_episodes"] += 1
            self._stores.remove(episode)
        elif episode.abandoned:  # what it was judged by is not here
            self._count["orphan_records"] += 1
        elif episode.end is None:
            raise DataError(f"episode {amend.episode_id} of session {session!r} is amended before its end")
        else:
            self._stores.unindex(episode)
            episode.end = amend.correct(episode.end)
            self._settle(episode, amend.reward)

    def give_up(self, session: str, *, gone: bool) -> EpisodeStats | None:
        """The open episode of a silent actor is closed as truncated, for good where `gone`; its figures then."""
        episode = self._held(session)
        if episode is not None and gone:
            finished = self.end(session, _died(episode))
            episode.abandoned = True
            return finished
        if episode is not None and episode.end is None and episode.length:
            self._close(episode, _died(episode))
            episode.provisional = episode.end is not None
        return None

    def _held(self, session: str, episode_id: str | None = None) -> StoredEpisode | None:
        """The episode `session` is in, unless a store dropped it or it is not the one called `episode_id`."""
        episode = self._current.get(session)
        if episode is None or self._stores.find(episode.key) is not episode:
            return None
        return episode if episode_id in (None, episode.key[1]) else None

    def _orphan(self, block: StepBlock) -> int:
        self._count["orphan_records"] += 1
        self._count["orphan_steps"] += block.n
        return 0

    def _close(self, episode: StoredEpisode, end: End, *, checked: bool = False) -> None:
        """Write the final row; leaves `episode.end` None if the episode was dropped instead."""
        stores, pool = self._stores, self._stores.pool
        if not episode.length:
            self._count["empty_episodes"] += 1
            stores.remove(episode)
            return
        if end.final_observation is not None and not checked:
            pool.check_final(end.episode_id, end.final_observation)
        store = stores.of(episode)
        frames = pool.final_frames(end.final_observation, demonstration=episode.demonstration)
        if not stores.make_room(store, episode, 1, frames):
            return
        pool.append_final(episode, end.final_observation)
        store.grow(1, frames)
        # The pool holds the observation now; of the record only its presence is needed later.
        episode.end = end if end.final_observation is None else end._replace(final_observation={})
        self._settle(episode, end.reward)

    def _settle(self, episode: StoredEpisode, reward: float | None) -> None:
        """Rewards, weights and windows as the end of `episode`, possibly amended, says."""
        pool = self._stores.pool
        if reward is not None:
            pool.reward[episode.rows[episode.length - 1]] = reward
        pool.close(episode)
        self._stores.relabel(episode)
        self._stores.index(episode)

    def _reopen(self, episode: StoredEpisode) -> None:
        """Undo a provisional close: the actor came back."""
        if episode.provisional:
            self._stores.unindex(episode)
            self._stores.pool.reopen(episode)
            self._stores.of(episode).rows -= 1
            episode.end, episode.provisional = None, False
            self._stores.index(episode)


def _died(episode: StoredEpisode) -> End:
    """The end of an episode whose actor died."""
    return End(episode.key[1], episode.length, None, False, True, Outcome.UNKNOWN, "learner")
