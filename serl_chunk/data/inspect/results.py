"""Results of an inspection of episodes, as plain values, and what is found in one episode alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.data.validate import cameras_of, content_id
from serl_chunk.io import format_duration, plural
from serl_chunk.types import STATE, DataError, Episode, Outcome, RobotSpec, Source, SparseRows

Severity = Literal["fault", "remark"]
DEPARTURE = "departure"  # kind of the remark on what another program's reader would not read as ours does


class Issue(NamedTuple):
    """One thing that is wrong (a fault) or worth knowing (a remark)."""

    severity: Severity
    kind: str  # the same for findings of one sort
    text: str  # begins with the episode where there is one
    episode: str | None = None  # its key in the source
    tick: int | None = None


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return smallest, middle and largest of some numbers, None of no numbers."""
    if not values:
        return None
    return {"low": float(min(values)), "median": float(np.median(values)), "high": float(max(values))}


class Dimension(NamedTuple):
    """One value of the state or of an action, over all steps."""

    low: float
    high: float
    mean: float
    std: float
    distinct: int | None  # how many different values it takes; None for many
    at_low: float  # share of the steps that have the lowest value exactly
    at_high: float

    @property
    def constant(self) -> bool:
        """Whether the value never moves, up to the rounding of a float32."""
        return self.high - self.low <= 1e-6 * max(abs(self.low), abs(self.high))


class CameraStats(NamedTuple):
    """One camera of one episode. A *pair* is two consecutive frames, both decoded and compared."""

    height: int
    width: int
    frames: int
    decoded: int = 0
    pairs: int = 0
    identical: int = 0  # pairs whose frames are equal in every pixel
    moved: int = 0  # pairs between whose frames the state moved
    frozen: int = 0  # of those: identical
    blank: int = 0  # decoded frames that are of one colour


class EpisodeInfo(NamedTuple):
    """One episode."""

    key: str
    length: int  # steps
    task: str
    outcome: Outcome
    terminated: bool
    reward: float  # sum over the steps, as the end corrects it
    rewarded: int  # steps with a reward other than 0
    sources: tuple[int, ...]  # steps of each types.Source
    segments: int  # runs of HUMAN steps, of any length
    seconds: float | None  # by its stamps, from the first step to the last; None without stamps
    period: float | None  # median seconds between two steps
    cameras: dict[str, CameraStats]
    digest: str  # of states and actions

    def to_json(self) -> dict[str, Any]:
        cameras = {name: c._asdict() for name, c in self.cameras.items()}
        sources = {source.name: self.sources[source] for source in Source}
        return self._asdict() | {"outcome": str(self.outcome), "cameras": cameras, "sources": sources}


@dataclasses.dataclass(frozen=True)
class InspectionReport:
    """Result of an inspection."""

    path: str
    format: str
    available: int  # episodes in the source
    looked_at: int  # of these; `episodes` lacks those that could not be read
    declared_hz: float | None
    spec: RobotSpec | None
    episodes: tuple[EpisodeInfo, ...]
    state: tuple[Dimension, ...]
    action: tuple[Dimension, ...]
    changes: np.ndarray | None  # float64[4, A]: quantiles 0.5, 0.9, 0.99 and 1 of |a[t + 1] - a[t]|; None without any
    notes: tuple[str, ...]  # of the source
    findings: tuple[Issue, ...]

    @property
    def faults(self) -> list[Issue]:
        return [f for f in self.findings if f.severity == "fault"]

    @property
    def remarks(self) -> list[Issue]:
        return [f for f in self.findings if f.severity == "remark"]

    @property
    def steps(self) -> int:
        return sum(e.length for e in self.episodes)

    @property
    def measured_hz(self) -> float | None:
        periods = [e.period for e in self.episodes if e.period]
        return float(1 / np.median(periods)) if periods else None

    @property
    def shares(self) -> dict[str, float]:
        total = np.sum([e.sources for e in self.episodes], axis=0) if self.episodes else np.zeros(len(Source))
        return {source.name: float(total[source] / self.steps) for source in Source if total[source]}

    def count(self, outcome: Outcome) -> int:
        return sum(e.outcome is outcome for e in self.episodes)

    def tasks(self) -> dict[str, int]:
        return dict(Counter(e.task for e in self.episodes).most_common())

    def cameras(self) -> dict[str, list[CameraStats]]:
        names = sorted({name for e in self.episodes for name in e.cameras})
        return {name: [e.cameras[name] for e in self.episodes if name in e.cameras] for name in names}

    def to_json(self) -> dict[str, Any]:
        changes = None if self.changes is None else self.changes.tolist()
        return {
            "path": self.path,
            "format": self.format,
            "ok": not self.faults,
            "episodes_available": self.available,
            "episodes_looked_at": self.looked_at,
            "episodes_read": len(self.episodes),
            "steps": self.steps,
            "lengths": spread([e.length for e in self.episodes]),
            "declared_hz": self.declared_hz,
            "measured_hz": self.measured_hz,
            "state": [d._asdict() for d in self.state],
            "action": [d._asdict() for d in self.action],
            "action_changes": changes and dict(zip(("q50", "q90", "q99", "max"), changes, strict=True)),
            "tasks": self.tasks(),
            "outcomes": {str(o): self.count(o) for o in Outcome},
            "rewards": spread([e.reward for e in self.episodes]),
            "sources": self.shares,
            "notes": list(self.notes),
            "findings": [f._asdict() for f in self.findings],
            "episodes": [e.to_json() for e in self.episodes],
        }


GAP = 2.0  # a step that takes more than this many of its episode's median periods is a gap
MOVED = 0.01  # of its range in the episode: from here on a state value has moved between two frames
PAIRS = 8  # pairs of frames decoded of each camera and episode, unless all are


def episode_info(key: str, episode: Episode, *, all_frames: bool) -> tuple[EpisodeInfo, list[Issue]]:
    """Summarise a checked episode, with the findings that need no other episode; these begin with `key`.

    `PAIRS` pairs of frames of each camera, spread evenly, are decoded, or `all_frames`.
    """
    begin, steps, end = episode
    found: list[Issue] = []
    cameras = {name: _camera(key, episode, rows, all_frames, found) for name, rows in cameras_of(episode).items()}
    try:  # training needs the frames of the final observation
        for value in (end.final_observation or {}).values():
            np.asarray(value)
    except DataError as error:
        found.append(Issue("fault", "frames", str(error), key, end.length))
    seconds, period = _time(key, steps.stamp, found)
    reward = episode.rewards
    human = (steps.source == Source.HUMAN).astype(np.int8)
    info = EpisodeInfo(
        key=key,
        length=steps.n,
        task=begin.task,
        outcome=end.outcome,
        terminated=end.terminated,
        reward=float(reward.sum()),
        rewarded=int(np.count_nonzero(reward)),
        sources=tuple(int((steps.source == s).sum()) for s in Source),
        segments=int((np.diff(human, prepend=0) == 1).sum()),
        seconds=seconds,
        period=period,
        cameras=cameras,
        digest=content_id(steps.observation[STATE], steps.action, 16),
    )
    return info, found


def _time(key: str, stamp: np.ndarray, found: list[Issue]) -> tuple[float | None, float | None]:
    """Return duration and median period in seconds; an episode whose stamps are all equal has none."""
    if len(stamp) < 2 or (stamp == stamp[0]).all():
        return None, None
    between = np.diff(stamp)
    seconds, period = float(stamp[-1] - stamp[0]), float(np.median(between))
    back, gaps = np.flatnonzero(between <= 0), np.flatnonzero(between > GAP * period)
    if len(back):
        tick = int(back[0]) + 1
        text = (
            f"{key}: the time stamp of tick {tick} ({stamp[tick]:.6g} s) is not after that of the tick before "
            f"({stamp[tick - 1]:.6g} s){_more(len(back) - 1)}"
        )
        found.append(Issue("fault", "time", text, key, tick))
        return seconds, period if period > 0 else None
    if len(gaps):
        worst = int(gaps[np.argmax(between[gaps])])
        text = (
            f"{key}: tick {worst + 1} comes {between[worst]:.3g} s after the one before, "
            f"{between[worst] / period:.0f} periods{_more(len(gaps) - 1)}"
        )
        found.append(Issue("remark", "gap", text, key, worst + 1))
    return seconds, period


def _more(n: int) -> str:
    return f", and {plural(n, 'more such tick')}" if n else ""


def _camera(key: str, episode: Episode, rows: SparseRows, all_frames: bool, found: list[Issue]) -> CameraStats:
    frames, (height, width) = len(rows.index), rows.values.shape[1:3]
    firsts = range(frames - 1)
    if not all_frames and frames - 1 > PAIRS:
        firsts = np.linspace(0, frames - 2, PAIRS).astype(int).tolist()
    state = episode.steps.observation[STATE]
    change = np.abs(np.diff(state[rows.index], axis=0))
    moving = (change > MOVED * (state.max(0) - state.min(0))).any(1)
    count: Counter[str] = Counter()
    image = np.empty(0)
    try:
        for i in sorted({0, *firsts, *(first + 1 for first in firsts)}):
            before, image = image, np.asarray(rows.values[i])
            count.update(decoded=1, blank=int((image == image[0, 0]).all()))
            if i - 1 in firsts:
                same, moves = np.array_equal(before, image), bool(moving[i - 1])
                count.update(pairs=1, identical=same, moved=moves, frozen=same and moves)
    except DataError as error:
        found.append(Issue("fault", "frames", str(error), key))
    return CameraStats(height, width, frames, **count)


def summary_lines(findings: InspectionReport) -> list[tuple[str, str]]:
    """Return name and text of each fact, in reading order."""
    if not findings.episodes:
        return [("episodes", f"none could be read, of {findings.looked_at}")]
    episodes = findings.episodes
    outcomes = ", ".join(f"{findings.count(o)} {o}" for o in Outcome if findings.count(o))
    terminated, rewarded = sum(e.terminated for e in episodes), sum(bool(e.rewarded) for e in episodes)
    shares = ", ".join(f"{name.lower()} {share:.1%}" for name, share in findings.shares.items())
    segments = sum(e.segments for e in episodes)
    measured = f"{findings.measured_hz:.4g} Hz by the time stamps" if findings.measured_hz else "no time stamps"
    declared = f"{findings.declared_hz:.4g} Hz declared" if findings.declared_hz else "none declared"
    text, unread = f"{len(episodes):,}", findings.looked_at - len(episodes)
    text += f", and {unread:,} that cannot be read" if unread else ""
    text += f" (the first of {findings.available:,})" if findings.looked_at < findings.available else ""
    seconds = sum(e.seconds or 0 for e in episodes)
    text += f", {format_duration(seconds)} in all" if seconds else ""
    tasks = findings.tasks()
    shown = [f"{task!r} ({n})" if task else f"no text ({n})" for task, n in list(tasks.items())[:4]]
    cameras = [(f"camera {name}", _pictures(findings, name, stats)) for name, stats in findings.cameras().items()]
    return [
        ("episodes", text),
        ("steps", f"{findings.steps:,}; an episode {_spread([e.length for e in episodes])}"),
        ("rate", f"{measured}, {declared}"),
        ("state", _dims(findings.state)),
        ("action", _dims(findings.action)),
        *(cameras or [("cameras", "none")]),
        ("tasks", ", ".join(shown) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")),
        ("outcomes", f"{outcomes}; {terminated} terminated, {len(episodes) - terminated} truncated"),
        ("rewards", f"sum of an episode {_spread([e.reward for e in episodes])}; {rewarded:,} with a reward"),
        ("who acted", shares + (f"; {plural(segments, 'intervention')}" if segments else "")),
    ]


def _pictures(findings: InspectionReport, name: str, stats: Sequence[CameraStats]) -> str:
    sizes = ", ".join(f"{w}x{h}" for h, w in sorted({(c.height, c.width) for c in stats}))
    per_step = sum(c.frames for c in stats) / sum(e.length for e in findings.episodes if name in e.cameras)
    pairs, same = sum(c.pairs for c in stats), sum(c.identical for c in stats)
    text = f"{sizes} pixels, " + ("a frame every step" if per_step == 1 else f"{per_step:.3g} frames a step")
    return text + (f"; {same} of {pairs} pairs of frames identical" if pairs else "")


def _dims(dims: tuple[Dimension, ...]) -> str:
    if not dims:
        return "none"
    low, high = min(d.low for d in dims), max(d.high for d in dims)
    switches = [j for j, d in enumerate(dims) if d.distinct is not None and not d.constant]
    few = f"; few different values in {', '.join(map(str, switches))}" if switches else ""
    return f"{plural(len(dims), 'value')} from {low:.4g} to {high:.4g}{few}"


def _spread(values: Sequence[float]) -> str:
    low, median, high = (f"{v:,.0f}" if v == int(v) else f"{v:.4g}" for v in (spread(values) or {}).values())
    return f"{low} to {high}, median {median}" if low != high else low
