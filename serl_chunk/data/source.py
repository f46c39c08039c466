"""Protocols of formats: a source that episodes are read from, and a sink that they are written to."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from serl_chunk.types import ConfigError, DataError, Episode, RobotSpec, SparseRows

T = TypeVar("T")
Tables = tuple[tuple[str, str], ...]
"""The path that a table of `data.fields` belongs to, "" for all, and the table."""


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Facts that files do not record, and the part of them to read. Each format reads the fields it needs.

    Of data that go on after successes (OGBench), `solved` "drop"s the steps that begin in a solved state, or "keep"s
    them, which helps a critic and no clone (see `formats.ogbench.cut_at_successes`).
    """

    spec: RobotSpec | None = None  # the robot they must belong to; None takes the files' own dimensions
    cameras: tuple[str, ...] | None = None  # whose frames are read; None for all, () for none
    color: str | None = None  # "rgb" or "bgr", the order of stored channels
    hz: float | None = None  # rate of the steps
    task: str = ""  # text of the task
    success: bool | None = None  # outcome of episodes whose files record none; None leaves it unknown
    scores: tuple[tuple[str, float], ...] = ()  # folder name -> reward of its episodes (score_5 -> 1, score_1 -> 0)
    reward_every_step: bool = False  # as in ACRLPD: a value is then the time left, not the chance of success
    env: str = ""  # task whose rewards are computed from stored states (OGBench)
    env_if_judged: bool = False  # `env` is a default: files with labels but without the states to judge keep theirs
    env_reward: Literal["sparse", "dense"] = "sparse"  # 1 at success and 0 elsewhere, or 1 minus the parts to be done
    solved: Literal["drop", "keep"] = "drop"
    tolerance_s: float | None = None  # by which a step's time stamp may be off its frame in a video; None: half a frame
    skip_bad: bool = False  # leave damaged parts out, and note them
    labels: bool = True  # the outcomes and discards in `labels.json` apply (see `data.labels`)
    fields: Tables = ()  # which arrays are the state, the action and the cameras (see `data.fields`)
    prefix: str = dataclasses.field(
        default="", compare=False
    )  # of the flags that set these options, for messages: "" or "demo_"
    proportion: float = 1.0  # of the episodes, from the first on; of the steps where these are known (OGBench, D4RL)

    def __post_init__(self) -> None:
        if self.hz is not None and not 0 < self.hz < math.inf:
            raise ConfigError(f"must be above 0, got {self.hz:g}", parameter="hz")
        if self.tolerance_s is not None and not self.tolerance_s > 0:
            raise ConfigError(f"must be above 0 seconds, got {self.tolerance_s}", parameter="tolerance_s")
        if not 0 < self.proportion <= 1:
            raise ConfigError(f"must lie in (0, 1], got {self.proportion:g}", parameter="proportion")

    def flag(self, name: str) -> str:
        """Return the flag that sets option `name`, for messages."""
        return f"--{self.prefix}{name}"

    def rate(self, recorded: float | None = None, where: object = "") -> float | None:
        """Return the steps a second: the file's (DataError where `hz` differs), `hz`, or the robot's."""
        if not recorded:
            return self.hz or (self.spec.control_hz if self.spec else None)
        if self.hz is not None and not math.isclose(recorded, self.hz, rel_tol=1e-6):
            raise DataError(f"{where}: recorded at {recorded:g} Hz, not at hz={self.hz:g}. Leave hz out")
        return recorded


class Source(Protocol):
    """Episodes of one format at one path, listed and read one by one.

    A plain value: worker processes get copies, so it keeps no file open between calls.
    """

    format: str  # name of a Format
    path: Path
    hz: float | None  # rate of the steps, None where it is unknown

    def keys(self) -> list[str]:
        """List the episodes in their order: unique names, the same in every run. Raises DataError."""

    def read(self, key: str) -> Episode:
        """Read one episode, checked (`validate.check_episode`); its images may be `Frames`.

        Raises DataError starting with the file, with the episode, the step and a remedy.
        """

    def notes(self) -> list[str]:
        """List facts about the data that its episodes do not hold: guesses made, parts not recovered."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that can be read."""

    name: str
    matches: Callable[[Path], bool]  # whether a path looks like it; cheap, raises OSError alone
    open: Callable[[Path, ReadOptions], Source]  # raises DataError


def decode_images(episode: Episode) -> Episode:
    """Return `episode` with every image decoded: uint8 arrays in place of Frames."""
    begin, steps, end = episode
    sparse = {k: SparseRows(rows.index, np.asarray(rows.values)) for k, rows in steps.sparse.items()}
    if end.final_observation is not None:
        end = end._replace(final_observation={k: np.asarray(v) for k, v in end.final_observation.items()})
    return Episode(begin, dataclasses.replace(steps, sparse=sparse), end)


def natural_sort_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which `demo_2` comes before `demo_10`."""
    parts = re.findall(r"\d+|\D+", text, flags=re.ASCII)
    return [(0, int(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def sorted_files(paths: Iterable[Path]) -> list[Path]:
    """Sort paths of one folder by name, `demo_2` before `demo_10`."""
    return sorted(paths, key=lambda p: natural_sort_key(p.name))


def take_fraction(keys: list[T], proportion: float, lengths: Sequence[int] | None = None) -> list[T]:
    """Return the first `proportion` of the episodes, whole ones, at least one.

    With the `lengths` of all of them, as many as come nearest to that share of the steps: published shares are of a
    data set's rows, and where solved steps are kept many of OGBench's episodes have one.
    """
    if lengths is None:
        return keys[: max(1, round(proportion * len(keys)))]
    steps = np.cumsum(lengths)
    return keys[: 1 + int(np.argmin(np.abs(steps - proportion * steps[-1])))]


Json = dict[str, Any]  # plain values that survive JSON unchanged


class Sink(Protocol):
    """A data set being written to a folder. A plain value: worker processes get copies.

    An episode is *staged* by a worker process, all of it or nothing, then *placed* by the main process in the order of
    the source. So episodes are encoded in parallel, numbered in order although some are left out, and an interruption
    at any moment costs the episodes that were being staged. `data.convert` drives it.
    """

    def layout(self, sample: Episode, hz: float | None) -> Json:
        """Return what all episodes have in common, from one of them: dimensions, cameras and their sizes, rate.

        Decided once, kept in the manifest, and passed to every other method, also after an interruption.
        Raises DataError with the parameter to set where this format cannot hold such episodes (LeRobot needs a rate).
        """

    def stage(self, layout: Json, number: int, episode: Episode) -> Json:
        """In a worker: write episode `number` of the source aside; returns what `place` and `finish` need of it.

        Replaces the remains of an earlier attempt. Raises DataError where the episode does not fit the layout.
        """

    def placed(self, layout: Json, staged: list[Json]) -> int:
        """After an interruption: count how many of `staged` (in order) are in the data set; removes the rest."""

    def place(self, layout: Json, staged: list[Json]) -> None:
        """Put the last of the `staged` episodes into the data set, where those before it are already."""

    def finish(self, layout: Json, staged: list[Json]) -> None:
        """Write the description of the whole data set; remove what was staged. May be called again."""
