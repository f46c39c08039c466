"""Inspection of all episodes of a source, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from serl_chunk.data.inspect import checks
from serl_chunk.data.inspect.checks import Jump
from serl_chunk.data.inspect.results import Dimension, EpisodeInfo, InspectionReport, Issue, episode_info
from serl_chunk.data.normalise.running_statistics import Moments, Statistics
from serl_chunk.data.source import Source
from serl_chunk.types import STATE, DataError, Episode, RobotSpec

MANY = 8  # more different values than this are not counted
_JUMPS = 5  # largest changes of each action dimension that are kept of an episode
_BACK = 0.1  # of a jump: as near as that to the value before it, an action is back


def inspect(
    source: Source,
    *,
    spec: RobotSpec | None = None,
    horizon: int | None = None,
    max_episodes: int | None = None,
    all_frames: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> InspectionReport:
    """Read the episodes of `source` (the first `max_episodes`) once, one at a time.

    Args:
        spec: the robot, where it is known; its limits, joints and grippers are compared with the data.
        horizon: report episodes shorter than a chunk of that many actions.
        all_frames: decode every image instead of a few of each episode.
        progress: called with (episodes done, episodes in all) after each one.

    Raises:
        DataError: the episodes cannot be listed. One that cannot be read is a fault among the findings.
    """
    keys = source.keys()
    wanted = keys if max_episodes is None else keys[:max_episodes]
    episodes: list[EpisodeInfo] = []
    found: list[Issue] = []
    if not keys:
        found.append(Issue("fault", "empty", f"{source.path}: there is no episode"))
    tally: Tally | None = None
    for done, key in enumerate(wanted, 1):
        try:
            episode = source.read(key)
        except DataError as error:
            found.append(Issue("fault", "unreadable", str(error), key))
        else:
            info, own = episode_info(key, episode, all_frames=all_frames)
            episodes.append(info)
            tally = tally or Tally(key, episode, spec)
            found += own + tally.add(key, episode)
        progress(done, len(wanted))
    findings = InspectionReport(
        path=str(source.path),
        format=source.format,
        available=len(keys),
        looked_at=len(wanted),
        declared_hz=source.hz,
        spec=spec,
        episodes=tuple(episodes),
        state=tally.state.dimensions() if tally else (),
        action=tally.action.dimensions() if tally else (),
        changes=tally.quantiles_of_changes() if tally else None,
        notes=tuple(source.notes()),
        findings=(),
    )
    found += [*checks.cameras(findings), *checks.time(findings), *checks.dimensions(findings)]
    if tally is not None:
        found += [*checks.jumps(findings, tally.jumps), *checks.followed(findings, tally.mean_distance())]
    found += [*checks.rewards(findings), *checks.episodes(findings, horizon)]
    found.sort(key=lambda f: f.severity != "fault")  # stable: faults first, else as found
    return dataclasses.replace(findings, findings=tuple(found))


class Column:
    """Moments, extremes with their frequency, and the different values, of rows float32[N, D]."""

    def __init__(self, dim: int) -> None:
        self.moments = Moments.empty(dim)
        self._at_low, self._at_high = np.zeros(dim, np.int64), np.zeros(dim, np.int64)
        self._values: list[set[float] | None] = [set() for _ in range(dim)]  # None for many

    def add(self, values: np.ndarray) -> None:
        new = Moments.of(values)
        self._at_low = _taken(self._at_low, self.moments.low, (values == new.low).sum(0), new.low)
        self._at_high = _taken(self._at_high, -self.moments.high, (values == new.high).sum(0), -new.high)
        self.moments = self.moments.merged(new)
        for d, known in enumerate(self._values):
            if known is not None:
                known.update(np.unique(values[:, d])[: MANY + 1].tolist())
                if len(known) > MANY:
                    self._values[d] = None

    def dimensions(self) -> tuple[Dimension, ...]:
        m = self.moments
        distinct = [None if known is None else len(known) for known in self._values]
        shares = (self._at_low / m.count).tolist(), (self._at_high / m.count).tolist()
        columns = m.low.tolist(), m.high.tolist(), m.mean.tolist(), m.std.tolist(), distinct, *shares
        return tuple(map(Dimension, *columns))


class Tally:
    """Statistics over all episodes, which must have the dimensions of the first one."""

    def __init__(self, first: str, episode: Episode, spec: RobotSpec | None) -> None:
        self._first, self._joints = first, None if spec is None else np.array(spec.joint_of_action)
        self._dims = episode.steps.observation[STATE].shape[1], episode.steps.action.shape[1]
        self.state, self.action = map(Column, self._dims)
        self.jumps: list[Jump] = []  # the largest changes of every episode
        self._changes = Statistics(self._dims[1], (0.5, 0.9, 0.99))
        self._distance = np.zeros(self._dims[1])  # sum over the steps

    def add(self, key: str, episode: Episode) -> list[Issue]:
        """Add an episode; one with other dimensions than the first is a fault, and left out."""
        state, action = episode.steps.observation[STATE], episode.steps.action
        if self._dims != (state.shape[1], action.shape[1]):
            text = (
                f"{key}: {state.shape[1]} state values and {action.shape[1]} actions, where episode {self._first} has "
                f"{self._dims[0]} and {self._dims[1]}; they are of different robots"
            )
            return [Issue("fault", "dimensions", text, key)]
        self.state.add(state)
        self.action.add(action)
        if self._joints is not None:
            self._distance += np.abs(action - state[:, np.maximum(self._joints, 0)]).sum(0, dtype=np.float64)
        change = np.abs(np.diff(action, axis=0))
        if len(change):
            self._changes.add(change)
            largest = np.argsort(change, axis=0)[-_JUMPS:]
            m = self.action.moments
            far = np.take_along_axis(change, largest, 0) > checks.JUMP_RANGE * (m.high - m.low)
            for k, d in np.argwhere(far):  # the range can only grow: what is no jump now never will be one
                t, size = int(largest[k, d]), float(change[largest[k, d], d])
                spike = t + 2 < len(action) and abs(float(action[t + 2, d] - action[t, d])) < _BACK * size
                self.jumps.append(Jump(key, t + 1, int(d), size, spike))
        return []

    def quantiles_of_changes(self) -> np.ndarray | None:
        if not self._changes.moments.count:
            return None
        return np.vstack([self._changes.quantile(), self._changes.moments.high])

    def mean_distance(self) -> np.ndarray | None:
        return None if self._joints is None else self._distance / self.state.moments.count


def _taken(count: np.ndarray, low: np.ndarray, more: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Count how often the lower of two minima occurs in both parts together."""
    return np.where(new < low, more, np.where(new == low, count + more, count))
