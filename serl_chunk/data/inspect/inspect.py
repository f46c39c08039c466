"""Inspection of all episodes of a source, one after another, and what is found in all of them together."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.data.inspect.results import DEPARTURE, Dimension, EpisodeInfo, InspectionReport, Issue, episode_info
from serl_chunk.data.normalise.running_statistics import Moments, Statistics
from serl_chunk.data.source import Source
from serl_chunk.types import STATE, DataError, Episode, Outcome, RobotSpec

RATE = 0.05  # relative difference of two rates that is worth mentioning
CLIPPED = 0.05  # share of the steps at an extreme value
JUMP = 20.0  # times the median change of a dimension ...
JUMP_RANGE = 0.2  # ... that is this share of its range ...
JUMP_RARE = 2.0  # ... and this many times the change that one step in a hundred exceeds
APART = 0.5  # mean distance between command and joint, in ranges of the joint
FROZEN = 0.05  # share of the pairs with a moving state whose frames are equal
MANY = 8  # more different values than this are not counted
_JUMPS = 5  # largest changes of each action dimension that are kept of an episode
_BACK = 0.1  # of a jump: as near as that to the value before it, an action is back

_remark = functools.partial(Issue, "remark")


class Jump(NamedTuple):
    """A change of one action dimension from the tick before."""

    episode: str
    tick: int
    dimension: int
    size: float
    spike: bool  # the tick after it is back where it was


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

    Raises DataError: the episodes cannot be listed. One that cannot be read is a fault among the findings.
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
        changes=tally.changes() if tally else None,
        notes=tuple(source.notes()),
        findings=(),
    )
    found += [_remark(DEPARTURE, text) for text in getattr(source, "departures", list)()]
    found += [*_camera_issues(findings), *_rate_issues(findings), *_dimension_issues(findings)]
    if tally is not None:
        found += [*_jump_issues(findings, tally.jumps), *_mismatch_issues(findings, tally.mean_distance())]
    found += [*_reward_issues(findings), *_episode_issues(findings, horizon)]
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
            far = np.take_along_axis(change, largest, 0) > JUMP_RANGE * (m.high - m.low)
            for k, d in np.argwhere(far):  # the range can only grow: what is no jump now never will be one
                t, size = int(largest[k, d]), float(change[largest[k, d], d])
                spike = t + 2 < len(action) and abs(float(action[t + 2, d] - action[t, d])) < _BACK * size
                self.jumps.append(Jump(key, t + 1, int(d), size, spike))
        return []

    def changes(self) -> np.ndarray | None:
        m = self._changes.moments
        return np.vstack([self._changes.quantile(), m.high]) if m.count else None

    def mean_distance(self) -> np.ndarray | None:
        return None if self._joints is None else self._distance / self.state.moments.count


def _taken(count: np.ndarray, low: np.ndarray, more: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Count how often the lower of two minima occurs in both parts together."""
    return np.where(new < low, more, np.where(new == low, count + more, count))


# -- findings in episodes taken together; each function returns those of one subject --------------------------


def _camera_issues(data: InspectionReport) -> Iterator[Issue]:
    """Find sizes that differ, cameras that some episodes lack, frames that stand still or are of one colour."""
    for name, stats in data.cameras().items():
        usual = Counter((c.height, c.width) for c in stats).most_common(1)[0][0]
        having = [e for e in data.episodes if name in e.cameras]
        for e in data.episodes:
            if name not in e.cameras:
                has = ", ".join(e.cameras) or "none"
                text = f"{e.key}: no frames of camera {name}, which {len(stats)} other episodes have (it has: {has})"
                yield Issue("fault", "cameras", text, e.key)
            elif (size := e.cameras[name][:2]) != usual:
                text = f"{e.key}: camera {name} has {size[0]}x{size[1]} pixels, elsewhere {usual[0]}x{usual[1]}"
                yield Issue("fault", "cameras", text, e.key)
        moved, frozen = sum(c.moved for c in stats), sum(c.frozen for c in stats)
        if frozen > FROZEN * moved:
            worst = max(having, key=lambda e: e.cameras[name].frozen)
            text = (
                f"camera {name}: {frozen} of {moved} pairs of consecutive frames are identical although the state "
                f"moved, most of them in {worst.key}; does the camera run at the rate of the steps?"
            )
            yield _remark("duplicate frames", text, worst.key)
        if blank := sum(c.blank for c in stats):
            first = next(e for e in having if e.cameras[name].blank)
            decoded = sum(c.decoded for c in stats)
            text = f"camera {name}: {blank} of {decoded} frames are of one colour, the first in {first.key}"
            yield _remark("blank frames", text, first.key)


def _rate_issues(data: InspectionReport) -> Iterator[Issue]:
    """Find rates that differ from the declared one, or between episodes, and missing stamps."""
    measured, declared = data.measured_hz, data.declared_hz
    if data.episodes and all(e.period is None and e.length > 1 for e in data.episodes):
        text = "the episodes have no time stamps" + ("" if declared else ", and no rate is declared. Give hz")
        yield _remark("rate", text)
        return
    if measured and declared and abs(measured / declared - 1) > RATE:
        yield _remark("rate", f"the stamps are {measured:.4g} Hz, {declared:.4g} Hz is declared; which one is true?")
    for e in data.episodes:
        if measured and e.period and abs(1 / e.period / measured - 1) > RATE:
            text = f"{e.key}: {1 / e.period:.4g} Hz by its stamps, {measured:.4g} Hz in most episodes"
            yield _remark("rate", text, e.key)


def _dimension_issues(data: InspectionReport) -> Iterator[Issue]:
    """Find values that never move, stay at an extreme, or leave the robot's limits."""
    switches: dict[str, set[int]] = {"state": set(), "action": set()}  # a closed gripper is meant to be at its extreme
    if data.spec is not None:
        switches["action"] = set(data.spec.grippers)
        switches["state"] = {data.spec.joint_of_action[j] for j in data.spec.grippers}
    for name, dims in (("state", data.state), ("action", data.action)):
        if still := [f"{j} (at {d.mean:.3g})" for j, d in enumerate(dims) if d.constant]:
            yield _remark("constant", f"{name}: constant in {_listed(still)}")
        clipped = []
        for j, d in enumerate(dims):
            share, value = max((d.at_low, d.low), (d.at_high, d.high))
            # A value with few different ones is a switch.
            if share > CLIPPED and not d.constant and d.distinct is None and j not in switches[name]:
                clipped.append(f"{j} ({value:.3g} on {share:.0%})")
        if clipped:
            yield _remark("clipped", f"{name}: at its extreme value on many steps in {_listed(clipped)}; clipped?")
    if data.spec is not None and len(data.action) == data.spec.action_dim:
        beyond = []
        for j, (d, low, high) in enumerate(zip(data.action, data.spec.action_low, data.spec.action_high, strict=True)):
            slack = 1e-5 * (high - low)  # what rounding to float32 does to a limit
            if d.low < low - slack or d.high > high + slack:
                beyond.append(f"{j} ({d.low:.5g}..{d.high:.5g}, limits {low:.5g}..{high:.5g})")
        if beyond:
            yield _remark("limits", f"action: beyond the limits of {data.spec.name} in {_listed(beyond)}")


def _jump_issues(data: InspectionReport, largest: Sequence[Jump]) -> Iterator[Issue]:
    """Find changes of an action far beyond its usual ones; `largest` are the candidates."""
    if data.changes is None:
        return
    grippers = data.spec.grippers if data.spec else ()
    usual, _, rare, _ = data.changes
    back = {(j.episode, j.tick + 1, j.dimension) for j in largest if j.spike}
    for jump in sorted(largest, key=lambda j: -j.size / max(_range(data.action[j.dimension]), 1e-12)):
        j, size = jump.dimension, jump.size
        d = data.action[j]
        switch = j in grippers or d.distinct is not None  # it does nothing but jump
        if (switch and not jump.spike) or jump[:3] in back:
            continue
        if size > JUMP_RANGE * _range(d) and size > JUMP * usual[j] and size > JUMP_RARE * rare[j]:
            what = f"jumps by {size:.3g}" + (" for one tick" if jump.spike else "")
            text = f"{jump.episode}: tick {jump.tick}: action {j} {what}, its usual change is {usual[j]:.2g}"
            yield _remark("jump", text, jump.episode, jump.tick)


def _mismatch_issues(data: InspectionReport, distance: np.ndarray | None) -> Iterator[Issue]:
    """Find commands that are far from the joints they command; `distance` float64[A] is their mean distance."""
    if data.spec is None or distance is None:
        return
    apart = [
        f"{j} (mean distance {distance[j]:.3g})"
        for j, joint in enumerate(data.spec.joint_of_action)
        if joint >= 0 and distance[j] > max(APART * _range(data.state[joint]), 0.05)
    ]
    if apart:
        text = f"action: far from the measured joint in {_listed(apart)}; are these differences, or in other units?"
        yield _remark("mismatch", text)


def _reward_issues(data: InspectionReport) -> Iterator[Issue]:
    """Find missing rewards, and rewards and outcomes that contradict each other."""
    if data.episodes and not any(e.rewarded for e in data.episodes):
        unknown = data.count(Outcome.UNKNOWN) == len(data.episodes)
        text = "no step has a reward" + (", and no episode an outcome. Give success or scores" if unknown else "")
        yield _remark("reward", text)
        return
    for e in data.episodes:
        if e.outcome is Outcome.SUCCESS and not e.rewarded:
            yield _remark("reward", f"{e.key}: a success without any reward", e.key)


def _episode_issues(data: InspectionReport, horizon: int | None) -> Iterator[Issue]:
    """Find episodes that are shorter than a chunk, and those that occur twice."""
    for e in data.episodes:
        if horizon is not None and e.length < horizon:
            yield _remark("short", f"{e.key}: {e.length} steps, fewer than the {horizon} of a chunk", e.key)
    first: dict[str, EpisodeInfo] = {}
    for e in data.episodes:
        other = first.setdefault(e.digest, e)
        if other is not e:
            yield _remark("duplicate episode", f"{e.key}: the same states and actions as {other.key}", e.key)


def _range(d: Dimension) -> float:
    return d.high - d.low


def _listed(parts: Sequence[str], at_most: int = 8) -> str:
    """`dimension 3 (...)`, or `12 dimensions: 0 (...), ... and 4 more`."""
    counted = "dimension" if len(parts) == 1 else f"{len(parts)} dimensions:"
    more = f" and {len(parts) - at_most} more" if len(parts) > at_most else ""
    return f"{counted} {', '.join(parts[:at_most])}{more}"
