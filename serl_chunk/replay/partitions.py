"""The partitions: their quotas of the storage, the order in which episodes leave, and the windows that are sampled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.config.agents.base import BcOn
from serl_chunk.config.experiment import ExperimentConfig, RewardConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.episode import EpisodeStats, Key, StoredEpisode, returns_to_go, summarise
from serl_chunk.replay.features import Embedder
from serl_chunk.replay.frame_storage import final_rows
from serl_chunk.replay.memory import STORES, kept_observations
from serl_chunk.replay.step_storage import StepStorage, TaskTable
from serl_chunk.replay.windows import (
    IndexSet,
    QCWindowSampler,
    StratifiedSampler,
    eligible_starts,
    imitation_weights,
)
from serl_chunk.types import (
    DECISION_PREFIX,
    Amend,
    Begin,
    ConfigError,
    DataError,
    End,
    Episode,
    Outcome,
    Record,
    RobotSpec,
    Source,
    StepBlock,
)

Windows = IndexSet | StratifiedSampler | QCWindowSampler  # that a half of a batch is drawn from


@dataclasses.dataclass
class Partition:
    """A quota of the storage and the episodes that use it, oldest first."""

    name: str
    max_rows: int
    # int64[C + F], as `StepStorage.space_for`: frames of each camera, and observations whose features are kept by rows.
    max_frames: np.ndarray
    frames: np.ndarray
    rows: int = 0
    episodes: dict[Key, StoredEpisode] = dataclasses.field(default_factory=dict)
    # `StoredEpisode.followed` of the oldest ones, all closed, and how many those are.
    _settled: tuple[np.ndarray, int] = (np.empty(0, np.int64), 0)

    def fits(self, rows: int, frames: np.ndarray) -> bool:
        return self.rows + rows <= self.max_rows and bool((self.frames + frames <= self.max_frames).all())

    def put(self, episode: StoredEpisode) -> None:
        self.episodes[episode.key] = episode
        self.grow(len(episode.rows), episode.frame_counts)

    def pop(self, episode: StoredEpisode) -> None:
        del self.episodes[episode.key]
        self.unsettle()
        self.grow(-len(episode.rows), -episode.frame_counts)

    def grow(self, rows: int, frames: np.ndarray) -> None:
        self.rows += rows
        self.frames += frames

    def followed(self) -> list[np.ndarray]:
        """Rows of the steps whose next observation is known, oldest episode first, one array after the other."""
        settled, n = self._settled
        rest = list(itertools.islice(self.episodes.values(), n, None))
        closed = list(itertools.takewhile(lambda e: e.end is not None, rest))
        if closed:
            self._settled = np.concatenate([settled, *(e.followed for e in closed)]), n + len(closed)
        return [self._settled[0], *(e.followed for e in rest[len(closed) :])]

    def unsettle(self) -> None:
        """Note that a closed episode left, was corrected, or opened again."""
        self._settled = np.empty(0, np.int64), 0


class Partitions:
    """The partitions `online`, `demo` and `human`, over one storage; for one thread at a time.

    Demonstrations stay. Online episodes leave whole, oldest first; those with interventions move to the human
    partition, without being copied, and leave that one the same way.

    The views are sets of windows within episodes: `view_online` and `view_demo` of the halves, `view_all` their union.
    The halves of a batch draw from `windows_online` and `windows_demo`, a batch without halves from `windows_all`:
    the views, or the neighbouring steps of `online` and `demo` (`replay.windows=qc`).
    """

    def __init__(
        self, spec: RobotSpec, config: ExperimentConfig, preprocess: Preprocess, bc_on: BcOn, count: Counter[str],
        embed: Embedder | None = None,
    ) -> None:  # fmt: skip
        self._config, self._bc_on, self._count = config, bc_on, count
        r = config.replay
        self._exclude_ticks = round(r.exclude_before_takeover * spec.control_hz)
        rows = r.capacity + r.demo_capacity + r.human_capacity
        cameras, prompts = preprocess.cameras, preprocess.prompts
        tasks = None if prompts is None else TaskTable(prompts, config.robot.task)
        self.storage = StepStorage(
            spec, cameras, rows=rows, frames=STORES * r.image_capacity, max_image_age=r.max_image_age,
            cache_bytes=r.frame_cache_bytes, deferred=r.demo_capacity, embed=embed, observations=kept_observations(r),
            tasks=tasks,
        )  # fmt: skip
        none = self.storage.space_for(0, {}, demonstration=False)
        most = np.full_like(none, r.image_capacity)
        of_demos = most.copy()
        of_demos[len(cameras) :] = r.demo_capacity  # frames in files do not count, their features do
        self.online = Partition("online", r.capacity, most, none.copy())
        self.demo = Partition("demo", r.demo_capacity, of_demos, none.copy())
        self.human = Partition("human", r.human_capacity, most, none.copy())
        self.view_online, self.view_demo, self.view_all = (IndexSet(rows) for _ in range(3))
        # Of demonstrations: windows of successful ones, and of all others; kept only where they are balanced.
        self._balanced = [] if r.positive_fraction is None else [IndexSet(rows), IndexSet(rows)]
        # Of the views demo, online and all, the windows of which something is imitated, where batches hold these alone.
        self.imitated = [IndexSet(rows) for _ in range(3)] if config.agent.imitated_batches else []
        self.windows_online: Windows = self.view_online
        self.windows_demo: Windows = self.view_demo
        self.windows_all: Windows = self.view_all
        if r.positive_fraction is not None:
            self.windows_demo = StratifiedSampler(self.view_demo, self._balanced, r.positive_fraction)
        if r.windows == "qc":
            length = max(config.chunk.carried, config.chunk.returned)
            self.windows_online, self.windows_demo, self.windows_all = (
                QCWindowSampler(partitions, length)
                for partitions in ([self.online], [self.demo], [self.demo, self.online])
            )

    @property
    def all(self) -> tuple[Partition, Partition, Partition]:
        return self.online, self.demo, self.human

    def find(self, key: Key) -> StoredEpisode | None:
        return next((s.episodes[key] for s in self.all if key in s.episodes), None)

    def of(self, episode: StoredEpisode) -> Partition:
        return next(s for s in self.all if s.episodes.get(episode.key) is episode)

    def make_room(self, partition: Partition, writer: StoredEpisode, rows: int, frames: np.ndarray) -> bool:
        """Evict from `partition` until `rows` and `frames` fit; False if `writer` itself had to be dropped for it."""
        while not partition.fits(rows, frames):
            others = [e for e in partition.episodes.values() if e is not writer]
            # Open episodes are still being written: they go only if there is nothing else.
            victim = next((e for e in others if e.end is not None), others[0] if others else writer)
            if victim.end is None:
                self._count["dropped_open_episodes"] += 1
            elif partition is self.online and victim.human and self._move_to_human(victim):
                self._count["kept_for_interventions"] += 1
                continue
            self._count["evicted_episodes"] += 1
            self.remove(victim)
            if victim is writer:
                return False
        return True

    def _move_to_human(self, episode: StoredEpisode) -> bool:
        """Move an online episode where only its intervened starts stay sampled; False where it does not fit."""
        frames = episode.frame_counts
        if len(episode.rows) > self.human.max_rows or bool((frames > self.human.max_frames).any()):
            return False
        self.make_room(self.human, episode, len(episode.rows), frames)
        steps = episode.rows[: episode.length]
        others = steps[self.storage.steps.source[steps] != Source.HUMAN]
        for view in (self.view_online, *self.imitated[1:2]):
            view.discard(steps)
        for view in (self.view_all, *self.imitated[2:]):
            view.discard(others)
        self.online.pop(episode)
        self.human.put(episode)
        return True

    def remove(self, *episodes: StoredEpisode) -> None:
        if episodes:  # views of thousands of short ones change at once
            self._hide(np.concatenate([e.rows for e in episodes]))
        for episode in episodes:
            self.of(episode).pop(episode)
            self.storage.release(episode)

    def relabel(self, episode: StoredEpisode, first: int = 0) -> None:
        """Set effective rewards and imitation weights of the steps from tick `first` on."""
        steps, parts, reward = self.storage.steps, self.storage.human_parts, self._config.reward
        rows = episode.rows[first : episode.length]
        source = steps.source[rows]
        failed = episode.terminated and episode.outcome == Outcome.FAILURE
        steps.effective[rows] = effective_rewards(steps.reward[rows], reward, failed=failed)
        steps.is_demo[rows] = episode.demonstration | (source == Source.HUMAN)
        weigh = functools.partial(
            imitation_weights, source, bc_on=self._bc_on, demonstration=episode.demonstration, outcome=episode.outcome,
            exclude_ticks=self._exclude_ticks, own_weight=self._config.agent.own_weight,
        )  # fmt: skip
        steps.bc_weight[rows] = weigh()
        if parts.dims is not None:
            of_policy = weigh(shared=parts.dims[rows].any(1))
            parts.imitate_alone(rows, of_policy < steps.bc_weight[rows])

    def index(self, episode: StoredEpisode) -> None:
        """Add the windows that have become complete since the last call."""
        returned = self._config.chunk.returned
        ticks, excluded = eligible_starts(
            self.storage.frames.recent[episode.rows], first=episode.indexed, last=episode.last,
            terminated=episode.terminated, returned=returned,
            keep_terminal=self._config.replay.terminal_windows == "keep", gaps=episode.gaps,
        )  # fmt: skip
        episode.indexed = max(episode.indexed, episode.last - returned + 1)
        episode.eligible += len(ticks)
        episode.excluded += excluded
        rows = episode.rows[ticks]
        intervened = rows[self.storage.steps.source[rows] == Source.HUMAN]
        evicted = episode.key in self.human.episodes
        self.view_demo.add(rows if episode.demonstration else intervened)
        self.view_all.add(intervened if evicted else rows)
        if not episode.demonstration and not evicted:
            self.view_online.add(rows)
        if self._balanced and episode.demonstration and episode.end is not None:
            windows = episode.rows[self.view_demo.contains(episode.rows)]
            self._balanced[episode.outcome != Outcome.SUCCESS].add(windows)
        if self.imitated:
            self._note_imitated(episode)

    def unindex(self, episode: StoredEpisode) -> None:
        self._hide(episode.rows)
        self.of(episode).unsettle()
        episode.indexed = episode.eligible = episode.excluded = 0

    def _hide(self, rows: np.ndarray) -> None:
        for view in (self.view_online, self.view_demo, self.view_all, *self._balanced, *self.imitated):
            view.discard(rows)

    def _note_imitated(self, episode: StoredEpisode) -> None:
        """Add an episode's windows of which something is imitated; weights only fall where they are hidden first."""
        rows, horizon = episode.rows[: episode.length], self._config.chunk.horizon
        sums = np.concatenate([[0], np.cumsum(self.storage.steps.bc_weight[rows] > 0)])
        ends = np.minimum(np.arange(len(rows)) + horizon, len(rows))
        something = sums[ends] > sums[:-1]
        for imitated, view in zip(self.imitated, (self.view_demo, self.view_online, self.view_all), strict=True):
            imitated.add(rows[something & view.contains(rows)])

    def check_demos(self, episodes: Sequence[Episode], *, files: bool = True) -> None:
        """Raise DataError unless `episodes` are of this robot, different and, unless `files`, have decoded images."""
        storage, seen = self.storage, set[str]()
        for begin, steps, end in episodes:
            storage.check(steps)
            if storage.tasks is not None:
                storage.tasks.check(begin)
            if end.final_observation is not None:
                storage.check_final(begin.episode_id, end.final_observation)
            if not files and storage.frames.deferred_in(steps, end.final_observation):
                raise DataError(
                    f"episode {begin.episode_id}: its images are still in their files, and episodes of data sets leave "
                    "again. Train on the state alone (agent.image_keys), or give the data as demonstrations (demo_path)"
                )
            if begin.episode_id in seen:
                raise DataError(f"episode {begin.episode_id} is given twice")
            seen.add(begin.episode_id)

    def check_room(self, episodes: Sequence[Episode], *, leaving: Sequence[StoredEpisode]) -> None:
        """Raise ConfigError naming the capacity to set unless demonstrations fit once those of `leaving` have left."""
        storage, partition = self.storage, self.demo
        rows = partition.rows - sum(len(e.rows) for e in leaving) + sum(e.steps.n + 1 for e in episodes)
        frames = partition.frames - sum((e.frame_counts for e in leaving), np.zeros_like(partition.frames))
        for _, steps, end in episodes:
            frames += storage.space_for(steps.n, steps.sparse, demonstration=True)
            frames += storage.space_for(1, final_rows(end.final_observation), demonstration=True)
        frames = frames[: len(storage.cameras)]  # no more features than rows
        if rows > partition.max_rows or (frames > self._config.replay.image_capacity).any():
            raise ConfigError(
                f"the demonstrations need {rows} rows (their steps, and one final observation per episode) and "
                f"{max(frames.tolist(), default=0)} frames per camera; replay.demo_capacity is {partition.max_rows}, "
                f"replay.image_capacity {self._config.replay.image_capacity}. Raise the one that is too small"
            )

    def check_balance(self) -> None:
        """Raise DataError where `replay.positive_fraction` has no successful demonstration to draw, or no other."""
        if not self._balanced or all(map(len, self._balanced)):
            return
        outcomes = Counter(e.outcome for e in self.demo.episodes.values())
        found = ", ".join(f"{outcomes[o]} {o}" for o in Outcome if outcomes[o]) or "none"
        lacks = "a successful" if not len(self._balanced[0]) else "an unsuccessful"
        raise DataError(
            f"{self._config.replay.positive_fraction} balances windows of successful demonstrations and of others, and "
            f"there is no window of {lacks} one (outcomes of the demonstrations: {found}). Give both, "
            "set how they ended (demo_success, demo_failure, demo_scores), or leave the setting out",
            parameter="replay.positive_fraction",
        )

    def stats(self) -> dict[str, float]:
        """Sizes of partitions and views, and the share of windows without a recent image."""
        episodes = [e for s in self.all for e in s.episodes.values()]
        eligible, excluded = sum(e.eligible for e in episodes), sum(e.excluded for e in episodes)
        storage, views = self.storage, (3 + len(self._balanced) + len(self.imitated)) * self.view_all.nbytes
        caches = storage.frames.deferred
        decoded = sum(c.held_bytes for c in caches)
        per_row = (storage.nbytes - storage.image_nbytes + views) / storage.row_slots.capacity
        out: dict[str, float] = {f"{s.name}_rows": s.rows for s in self.all}
        out |= {f"{s.name}_episodes": len(s.episodes) for s in self.all}
        out |= {f"{s.name}_frames": int(s.frames[: len(storage.cameras)].sum()) for s in self.all}
        tables = storage.features.tables
        features = sum(t.held_bytes for t in tables)
        if tables:
            known, computed = (sum(getattr(t, name) for t in tables) for name in ("known", "computed"))
            out |= {"features_held": known, "feature_bytes": features, "features_computed": computed}
            out["feature_seconds"] = sum(t.seconds for t in tables)
        if storage.tasks is not None:
            out["tasks"] = len(storage.tasks)
        return out | {
            "online_windows": len(self.windows_online),
            "demo_windows": len(self.windows_demo),
            "windows": len(self.windows_all),
            "excluded_share": excluded / max(1, eligible + excluded),
            "deferred_frames": sum(map(len, caches)),
            "frame_cache_bytes": decoded,
            "frame_cache_misses": sum(c.decoded for c in caches) / max(1, sum(c.asked for c in caches)),
            "bytes": storage.frames.held_bytes + decoded + features + int(per_row * storage.row_slots.used),
            "reserved_bytes": storage.nbytes + views,
        }


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
        episode.candidates += candidate_values(block)
        if not episode.demonstration:  # which is whole at once: its end says all of it
            self._partitions.relabel(episode, first)
            self._partitions.index(episode)
            storage.note(episode.rows[max(0, first - 1) :])  # the step before leads to the first one now
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
        storage.links.close(episode, storage.steps.lost_ticks)
        self._partitions.relabel(episode)
        self._partitions.index(episode)
        storage.note(episode.rows)

    def _reopen(self, episode: StoredEpisode) -> None:
        """Undo a provisional close: the actor came back."""
        if episode.provisional:
            self._partitions.unindex(episode)
            self._partitions.of(episode).grow(-1, -self._partitions.storage.reopen(episode))
            episode.end, episode.provisional = None, False
            self._partitions.index(episode)
            self._partitions.storage.note(episode.rows[-1:])


def _died(episode: StoredEpisode) -> End:
    return End(episode.key[1], episode.length, None, False, True, Outcome.UNKNOWN, "learner")


def decision_values(block: StepBlock) -> list[tuple[int, float]]:
    """Return (tick, value q of the executed chunk) of the decisions in `block` that recorded one; raises DataError."""
    q = block.sparse.get("decision/q")
    if q is None:
        return []
    if not q.values.size:
        raise DataError(
            f"episode {block.episode_id}: decision/q has shape {q.values.shape}, a decision needs a value or more"
        )
    # Where the values of several candidates are recorded, the best one was executed.
    best = np.asarray(q.values, np.float64).reshape(len(q.index), -1).max(1)
    return list(zip((block.first_tick + q.index).tolist(), best.tolist(), strict=True))


def candidate_values(block: StepBlock) -> list[tuple[float, float, float]]:
    """Return of each decision in `block` that recorded the values of several candidates: whether another than the first
    acted, 0 or 1, and the values of the first and the best.
    """
    values, q = block.sparse.get(f"{DECISION_PREFIX}values"), block.sparse.get(f"{DECISION_PREFIX}q")
    if values is None or q is None or values.values.ndim != 2 or values.values.shape[1] < 2:
        return []
    acted, rows = dict(decision_values(block)), np.asarray(values.values, np.float64)
    each = zip((block.first_tick + values.index).tolist(), rows, strict=True)
    return [(float(acted[t] != v[0]), float(v[0]), float(v.max())) for t, v in each if t in acted]


def effective_rewards(reward: np.ndarray, config: RewardConfig, *, failed: bool) -> np.ndarray:
    """Return the rewards that are trained on, float32[T]; `failed`: they end in a declared failure."""
    out = reward * config.scale + config.offset
    if failed:
        out[-1:] = config.failure_reward
    return out


def realised_returns(episode: Episode, config: RewardConfig, discount: float) -> np.ndarray:
    """Return a demonstration's discounted effective rewards from each step on, then 0: float64[T + 1]."""
    _, steps, end = episode
    reward = np.array(steps.reward, np.float32)
    if end.reward is not None:
        reward[-1:] = end.reward
    return returns_to_go(effective_rewards(reward, config, failed=end.outcome == Outcome.FAILURE), discount)
