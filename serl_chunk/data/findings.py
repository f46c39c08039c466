"""What an inspection of episodes finds: plain values, for a screen, a page, JSON or an exit status."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.types import Outcome, RobotSpec, Source

Severity = Literal["fault", "remark"]


class Finding(NamedTuple):
    """One thing that is wrong (a fault) or worth knowing (a remark)."""

    severity: Severity
    kind: str  # a word that findings of one sort share
    text: str  # a sentence that begins with the episode where there is one
    episode: str | None = None  # its key in the source
    tick: int | None = None


class Spread(NamedTuple):
    """Smallest, middle and largest of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no numbers."""
        if not len(values):
            return None
        return cls(float(np.min(values)), float(np.median(values)), float(np.max(values)))


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
        """Never moves, up to the rounding of a float32."""
        return self.high - self.low <= 1e-6 * max(abs(self.low), abs(self.high))


class CameraFacts(NamedTuple):
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


class EpisodeFacts(NamedTuple):
    """One episode."""

    key: str
    length: int  # steps
    task: str
    outcome: Outcome
    terminated: bool
    reward: float  # sum over the steps, as the end corrects it
    rewarded: int  # steps with a reward other than 0
    sources: tuple[int, ...]  # steps of each types.Source
    segments: int  # runs of HUMAN steps, however long
    seconds: float | None  # by its stamps, from the first step to the last; None without stamps
    period: float | None  # median seconds between two steps
    cameras: dict[str, CameraFacts]
    digest: str  # of states and actions

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        cameras = {name: c._asdict() for name, c in self.cameras.items()}
        sources = {source.name: self.sources[source] for source in Source}
        return self._asdict() | {"outcome": str(self.outcome), "cameras": cameras, "sources": sources}


@dataclasses.dataclass(frozen=True)
class Findings:
    """An inspection's result."""

    path: str
    format: str
    available: int  # episodes in the source
    looked_at: int  # of these; `episodes` lacks those that could not be read
    declared_hz: float | None
    spec: RobotSpec | None
    episodes: tuple[EpisodeFacts, ...]
    state: tuple[Dimension, ...]
    action: tuple[Dimension, ...]
    changes: np.ndarray | None  # float64[4, A]: quantiles 0.5, 0.9, 0.99 and 1 of |a[t + 1] - a[t]|; None without any
    notes: tuple[str, ...]  # what the source says about itself
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        """What makes the data unfit."""
        return [f for f in self.findings if f.severity == "fault"]

    @property
    def remarks(self) -> list[Finding]:
        """What is worth knowing."""
        return [f for f in self.findings if f.severity == "remark"]

    @property
    def steps(self) -> int:
        """In all episodes that were read."""
        return sum(e.length for e in self.episodes)

    @property
    def lengths(self) -> Spread | None:
        """Steps of an episode."""
        return Spread.of([e.length for e in self.episodes])

    @property
    def rewards(self) -> Spread | None:
        """Sum of an episode's rewards."""
        return Spread.of([e.reward for e in self.episodes])

    @property
    def measured_hz(self) -> float | None:
        """Rate by the stamps: of the median episode."""
        periods = [e.period for e in self.episodes if e.period]
        return float(1 / np.median(periods)) if periods else None

    @property
    def shares(self) -> dict[str, float]:
        """Share of the steps that each source supplied; those that supplied none are left out."""
        total = np.sum([e.sources for e in self.episodes], axis=0) if self.episodes else np.zeros(len(Source))
        return {source.name: float(total[source] / self.steps) for source in Source if total[source]}

    def count(self, outcome: Outcome) -> int:
        """Episodes with that outcome."""
        return sum(e.outcome is outcome for e in self.episodes)

    def tasks(self) -> dict[str, int]:
        """Task text -> episodes, the most frequent first."""
        return dict(Counter(e.task for e in self.episodes).most_common())

    def cameras(self) -> dict[str, list[CameraFacts]]:
        """Camera -> what each episode that has it says of it."""
        names = sorted({name for e in self.episodes for name in e.cameras})
        return {name: [e.cameras[name] for e in self.episodes if name in e.cameras] for name in names}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""

        def spread(value: Spread | None) -> dict[str, float] | None:
            return None if value is None else value._asdict()

        return {
            "path": self.path,
            "format": self.format,
            "ok": not self.faults,
            "episodes_available": self.available,
            "episodes_looked_at": self.looked_at,
            "episodes_read": len(self.episodes),
            "steps": self.steps,
            "lengths": spread(self.lengths),
            "declared_hz": self.declared_hz,
            "measured_hz": self.measured_hz,
            "state": [d._asdict() for d in self.state],
            "action": [d._asdict() for d in self.action],
            "action_changes": None
            if self.changes is None
            else dict(zip(("q50", "q90", "q99", "max"), self.changes.tolist(), strict=True)),
            "tasks": self.tasks(),
            "outcomes": {str(o): self.count(o) for o in Outcome},
            "rewards": spread(self.rewards),
            "sources": self.shares,
            "notes": list(self.notes),
            "findings": [f._asdict() for f in self.findings],
            "episodes": [e.to_json() for e in self.episodes],
        }
