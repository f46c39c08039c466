"""What a control loop executes and plans, for viewers of it: written by its thread without waiting, read by any other.

A tick costs the writer a few attribute assignments. Nothing is copied: an array that is put here is never written to
again, as records are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from serl_chunk.types import IMAGE_PREFIX, STATE, Begin, End, Source, Step

Row = TypeVar("Row")
TICKS = 2048  # that are kept
DECISIONS = 256
EPISODES = 100
_RECENT = 1.0  # seconds; a step that is stamped within them has the stamp of this machine's clock


class Tick(NamedTuple):
    """An executed tick."""

    episode: int  # counts from 1 on
    tick: int
    state: np.ndarray  # float32[S], before the action
    action: np.ndarray  # float32[A], the command that the driver accepted
    source: Source
    decision_tick: int  # of the executed chunk, -1 for none
    human_dims: np.ndarray | None  # bool[A]


class Planned(NamedTuple):
    """A decision whose chunk was taken into the plan."""

    episode: int
    tick: int  # of its observation; row i of `actions` belongs to tick + i
    actions: np.ndarray  # float32[H, A], robot units
    record: Mapping[str, np.ndarray]  # as recorded: `q`, `values` and `q_spread` where the agent has them


class EndedEpisode(NamedTuple):
    """An episode that has ended."""

    number: int  # counts from 1 on, as in `Tick`
    outcome: str  # as corrected last
    by: str  # what ended it
    ticks: int
    human_ticks: int
    discarded: bool = False


class Frame(NamedTuple):
    """The newest frame of a camera."""

    image: np.ndarray  # uint8[H, W, 3]
    serial: int  # differs from that of every other frame of the camera
    moment: float  # monotonic seconds of the first tick that saw it
    number: int | None  # the robot's


class Ring(Generic[Row]):
    """The newest rows of one writing thread. Readers on other threads take no lock and miss at most the oldest."""

    def __init__(self, size: int) -> None:
        self._slots: list[tuple[int, Row] | None] = [None] * size
        self.count = 0  # rows so far; the newest one has this number less 1

    def put(self, row: Row) -> None:
        self._slots[self.count % len(self._slots)] = self.count, row
        self.count += 1  # after the slot, so that a reader finds every row that is counted

    def since(self, first: int, most: int | None = None) -> list[tuple[int, Row]]:
        """Return rows from number `first` on with their numbers, the oldest first, `most` of them at most."""
        count, out = self.count, []
        for n in range(max(first, count - len(self._slots)), count):
            slot = self._slots[n % len(self._slots)]
            if slot is not None and slot[0] == n:  # else it was overwritten meanwhile
                out.append(slot)
            if len(out) == most:
                break
        return out


class LiveFeed:
    """Ticks, decisions and camera frames of a running control loop."""

    def __init__(self) -> None:
        self.episode, self.episode_id, self.inside = 0, "", False  # `inside`: it is under way
        self.episodes: tuple[EndedEpisode, ...] = ()  # the newest ones; a new tuple for each change
        self._human = 0  # ticks of the episode under way
        self.ticks, self.plans = Ring[Tick](TICKS), Ring[Planned](DECISIONS)
        self.frames: dict[str, Frame] = {}  # camera -> frame; a new dictionary for each change

    def begin(self, begin: Begin) -> None:
        self.episode_id = begin.episode_id
        self.episode += 1
        self.inside, self._human = True, 0

    def ended(self, end: End) -> None:
        """Note an episode's end. One without a tick leaves no row."""
        self.inside = False
        if end.length > 0:
            row = EndedEpisode(self.episode, end.outcome.value, end.outcome_by, end.length, self._human)
            self.episodes = (*self.episodes[1 - EPISODES :], row)

    def correct(self, label: str) -> None:
        """Note what the operator decided on the last episode, of `EpisodeLabels.label`."""
        if self.episodes:
            row = self.episodes[-1]
            outcome = row.outcome if label in ("", "discarded", "kept") else label
            if (new := row._replace(outcome=outcome, discarded=label == "discarded")) != row:
                self.episodes = (*self.episodes[:-1], new)

    def decided(self, tick: int, actions: np.ndarray, record: Mapping[str, np.ndarray]) -> None:
        """Note a chunk float32[H, A] that was taken into the plan."""
        self.plans.put(Planned(self.episode, tick, actions, record))

    def step(self, step: Step, frame_numbers: Mapping[str, int]) -> None:
        now = time.monotonic()
        self._human += step.source is Source.HUMAN
        self.ticks.put(
            Tick(
                self.episode, step.tick, step.observation[STATE], step.action, step.source, step.decision_tick,
                step.human_dims,
            )
        )  # fmt: skip
        # Of a simulated clock's step the stamp says nothing about the age of its frames.
        self._take(step, frame_numbers, step.stamp if 0 <= now - step.stamp < _RECENT else now)

    def _take(self, step: Step, numbers: Mapping[str, int], moment: float) -> None:
        new: dict[str, Frame] = {}
        for key, image in step.observation.items():
            if key.startswith(IMAGE_PREFIX):
                camera = key[len(IMAGE_PREFIX) :]
                number, before = numbers.get(camera), self.frames.get(camera)
                if before is not None and (before.image is image or (number is not None and number == before.number)):
                    continue
                new[camera] = Frame(image, 1 if before is None else before.serial + 1, moment, number)
        if new:
            self.frames = {**self.frames, **new}
