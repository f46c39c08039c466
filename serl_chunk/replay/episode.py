"""Episodes as the replay holds them: a partition's state, returns, and the figures of a finished episode."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from serl_chunk.types import Begin, End, Outcome, RobotSpec, Source

Key = tuple[str, str]  # (session, episode id)


class EpisodeStats(NamedTuple):
    """Figures of one finished online episode."""

    session: str
    episode_id: str
    length: int  # steps, T
    episode_return: float  # sum of the rewards as recorded
    # (recorded value q, discounted effective rewards that followed); None in an episode that no termination ended.
    decisions: tuple[tuple[float, float | None], ...]
    success: bool | None  # None where the actor died in it: unknown
    human_ticks: int  # of the human's segments, idle ones included
    segments: int
    returns: tuple[float, float] = (0.0, 0.0)  # the least and the greatest discounted one from any of its steps
    accelerations: tuple[float | None, float | None] = None, None  # at seams and elsewhere, see `seams`
    last_reward: float = 0.0  # which a correction replaces
    # Of decisions among several candidates: the share in which another than the first acted, and the means of the value
    # of the first and of the best; None without one.
    candidates: tuple[float, float, float] | None = None
    conditions: str = ""  # see `types.Begin`


@dataclasses.dataclass
class StoredEpisode:
    """Bookkeeping of one episode: where its rows and frames lie, and the content of its records.

    `rows[t]` is the storage row of step t; after the end, `rows[length]` is the row of the final observation.
    """

    key: Key
    begin: Begin
    demonstration: bool
    cameras: int
    tables: int = 0  # of features by rows, F
    task: int = 0  # number of its text, see `tasks.TaskTable`
    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    length: int = 0  # steps
    end: End | None = None  # None while open
    provisional: bool = False  # closed by the learner because the actor is silent; it may still come back
    abandoned: bool = False  # closed by the learner because what follows is lost: not to be judged by its last step
    human: bool = False  # some step was executed by a human
    gaps: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))  # ticks of steps after one
    frames: list[list[np.ndarray]] = dataclasses.field(init=False)  # per camera, slots in arrays
    places: list[list[np.ndarray]] = dataclasses.field(init=False)  # per table, those of its observations
    latest_frame: np.ndarray = dataclasses.field(init=False)  # [C] slot or -1
    latest_frame_tick: np.ndarray = dataclasses.field(init=False)  # [C] last given
    recorded_tick: np.ndarray = dataclasses.field(init=False)  # [C] of it, or -1
    decisions: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (tick, q)
    # Of each decision among candidates: whether another than the first acted, the value of the first, of the best.
    candidates: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    indexed: int = 0  # starts before this tick have been considered
    eligible: int = 0  # windows in the views
    excluded: int = 0  # windows that lack a recent image

    def __post_init__(self) -> None:
        self.frames = [[] for _ in range(self.cameras)]
        self.places = [[] for _ in range(self.tables)]
        self.latest_frame = np.full(self.cameras, -1, np.int64)
        self.latest_frame_tick = np.zeros(self.cameras, np.int64)
        self.recorded_tick = np.full(self.cameras, -1, np.int64)

    @property
    def frame_counts(self) -> np.ndarray:
        """What it takes, as `StepStorage.space_for` counts it."""
        return np.array([sum(map(len, parts)) for parts in (*self.frames, *self.places)], np.int64)

    @property
    def outcome(self) -> Outcome:
        """UNKNOWN while the episode is open."""
        return Outcome.UNKNOWN if self.end is None else self.end.outcome

    @property
    def terminated(self) -> bool:
        return self.end is not None and self.end.terminated

    @property
    def last(self) -> int:
        """Index into `rows` of the last observation a window may end on.

        Open: the newest step. Truncated without a final observation (the actor died): the last step, which then starts
        and extends no window.
        """
        if self.end is None or (self.end.final_observation is None and not self.end.terminated):
            return self.length - 1
        return self.length

    @property
    def followed(self) -> np.ndarray:
        """Rows of the steps whose observation one tick later is known, int64[K]: not those at a gap."""
        rows = self.rows[: max(0, self.last)]
        if not len(self.gaps):
            return rows
        beside = np.concatenate([self.gaps - 1, self.gaps])
        return np.delete(rows, beside[(beside >= 0) & (beside < len(rows))])


def human_segments(source: np.ndarray, decision_tick: np.ndarray | None = None) -> np.ndarray:
    """Return the runs of ticks on which a human had the robot: int64[K, 2], first and past-last tick.

    A segment starts on a HUMAN tick and goes on through HUMAN and HOLD ticks: a human who holds still is in control.
    Given `decision_tick` int32[T], it ends where the policy decided again: from there on the robot waits for the chunk.
    """
    n, human = len(source), source == Source.HUMAN
    # The last tick at or before each tick that was not HOLD decides whose the HOLD is.
    decided = np.maximum.accumulate(np.where(source != Source.HOLD, np.arange(n), -1))
    owned = np.concatenate([[False], (decided >= 0) & human[np.maximum(decided, 0)], [False]])
    segments = np.flatnonzero(owned[1:] != owned[:-1]).reshape(-1, 2)
    if decision_tick is None:
        return segments
    for segment in segments:
        begin, follows = segment
        if follows < n and source[follows] == Source.POLICY and decision_tick[follows] >= 0:  # else unknown
            last = begin + np.flatnonzero(human[begin:follows])[-1]
            segment[1] = np.clip(decision_tick[follows], last + 1, follows)
    return segments


def returns_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return sum_{i >= t} gamma^(i - t) r_i of rewards float32[T] for each t, then 0: float64[T + 1]."""
    to_go = np.zeros(len(rewards) + 1)
    total = 0.0
    for t, reward in zip(range(len(rewards) - 1, -1, -1), reversed(rewards.tolist()), strict=True):
        total = reward + discount * total
        to_go[t] = total
    return to_go


def summarise(
    episode: StoredEpisode, source: np.ndarray, decision_tick: np.ndarray, reward: np.ndarray, effective: np.ndarray,
    action: np.ndarray, spec: RobotSpec, discount: float,
) -> EpisodeStats:  # fmt: skip
    """Return the figures of a closed episode; source uint8[T], decision_tick int32[T], both rewards float32[T], action
    float32[T, A].
    """
    to_go = returns_to_go(effective, discount)
    segments = human_segments(source, decision_tick)
    before = episode.gaps[-1] if len(episode.gaps) else -1  # what was realised across a gap took longer than it counts
    session, episode_id = episode.key
    return EpisodeStats(
        session=session,
        episode_id=episode_id,
        length=episode.length,
        episode_return=float(reward.sum(dtype=np.float64)),
        # The critic bootstraps from a truncation: a return that ends there would show a bias that it does not have.
        decisions=tuple(
            (q, float(to_go[tick]) if episode.terminated else None) for tick, q in episode.decisions if tick > before
        ),
        success=None if episode.last < episode.length else episode.outcome == Outcome.SUCCESS,
        human_ticks=int((segments[:, 1] - segments[:, 0]).sum()),
        segments=len(segments),
        returns=(float(to_go.min()), float(to_go.max())),
        accelerations=accelerations(action, segments, episode.gaps, spec),
        last_reward=float(reward[-1]),
        candidates=_means(episode.candidates),
        conditions=episode.begin.conditions,
    )


def _means(rows: list[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not rows:
        return None
    other, first, best = np.mean(rows, axis=0).tolist()
    return other, first, best


def accelerations(
    action: np.ndarray, segments: np.ndarray, gaps: np.ndarray, spec: RobotSpec
) -> tuple[float | None, float | None]:
    """Return the largest change of speed between two ticks at seams and at all other ticks, rad/s^2; None without any.

    Joints that are commanded by absolute targets count, grippers do not. Three executed targets in a row have one. It
    is at a seam where they are of both, a policy and a human.

    Args:
        action: executed, float32[T, A].
        segments: ticks on which a human had the robot, int64[K, 2], first and past-last.
        gaps: ticks of steps after a gap, int64[G]: across one, nothing is known.
    """
    joints = [k for k, joint in enumerate(spec.joint_of_action) if joint >= 0 and k not in spec.grippers]
    if not joints or len(action) < 3:
        return None, None
    change = np.abs(np.diff(action[:, joints].astype(np.float64), n=2, axis=0)).max(axis=1) / spec.dt**2
    tick = np.arange(1, len(action) - 1)  # the middle one of each three
    seam, unknown = (np.isin(tick, begins) | np.isin(tick + 1, begins) for begins in (segments.ravel(), gaps))
    return _largest(change[seam & ~unknown]), _largest(change[~seam & ~unknown])


def _largest(values: np.ndarray) -> float | None:
    return float(values.max()) if len(values) else None
