"""Protocols of formats: a source that episodes are read from, and a sink that they are written to.

A source lists the episodes at a path and reads them one by one. It is a plain value: worker processes get copies, so it
keeps no file open between calls. Images come as `Frames`, which decode on access.

A sink's episode is *staged* by a worker process, all of it or nothing, then *placed* by the main process in the order
of the source. So episodes are encoded in parallel, numbered in order although some are left out, and an interruption at
any moment costs the episodes that were being staged. `data.convert` drives it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from serl_chunk.types import ConfigError, Episode, Observation, RobotSpec, SparseRows


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Facts that files do not record, and the part of them to read. Each format reads the fields it needs.

    Fields:
        spec: the robot they must belong to; None takes the files' own dimensions.
        cameras: whose frames are read; None for all, () for none.
        color: "rgb" or "bgr", the order of stored channels where the files do not record it.
        hz: rate of the steps where the files do not record it.
        task: text of the task where the files do not record it.
        success: outcome of episodes whose files record none; None leaves it unknown.
        scores: folder name -> reward of the episodes in it (score_5 -> 1, score_1 -> 0).
        reward_every_step: give that reward on every step instead of the last one (ACRLPD's data have it so; the value
            of a state then is the time left, not the chance of success).
        env: task of an environment whose rewards are computed from stored states (OGBench).
        env_if_judged: `env` is the robot's default: files with labels but without the states to judge keep theirs.
        env_reward: "sparse", 1 at its success and 0 elsewhere, or "dense", 1 minus the parts of it still to be done.
        solved: treatment of steps that begin in a solved state, where the data go on after successes (OGBench): "drop",
            or "keep" them, which helps a critic and no clone: those that stay in it as episodes of one step each, the
            one that leaves it as the first of what follows.
        proportion: share of the episodes, from the first on; where the steps of each are known (OGBench, D4RL), the
            episodes that come nearest to this share of the steps.
    """

    spec: RobotSpec | None = None
    cameras: tuple[str, ...] | None = None
    color: str | None = None
    hz: float | None = None
    task: str = ""
    success: bool | None = None
    scores: tuple[tuple[str, float], ...] = ()
    reward_every_step: bool = False
    env: str = ""
    env_if_judged: bool = False
    env_reward: Literal["sparse", "dense"] = "sparse"
    solved: Literal["drop", "keep"] = "drop"
    proportion: float = 1.0

    def __post_init__(self) -> None:
        if self.hz is not None and not 0 < self.hz < math.inf:
            raise ConfigError(f"must be above 0, got {self.hz:g}", parameter="hz")
        if not 0 < self.proportion <= 1:
            raise ConfigError(f"must lie in (0, 1], got {self.proportion:g}", parameter="proportion")


class Source(Protocol):
    """Episodes of one format at one path."""

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
    description: str  # one line for --help
    matches: Callable[[Path], bool]  # whether a path looks like it; cheap, never raises
    open: Callable[[Path, ReadOptions], Source]  # raises DataError


def decode_images(episode: Episode) -> Episode:
    """Return `episode` with every image decoded: uint8 arrays in place of Frames."""
    begin, steps, end = episode
    sparse = {k: SparseRows(rows.index, np.asarray(rows.values)) for k, rows in steps.sparse.items()}
    final: Observation | None = end.final_observation
    if final is not None:
        final = {k: np.asarray(v) for k, v in final.items()}
    return Episode(begin, dataclasses.replace(steps, sparse=sparse), end._replace(final_observation=final))


def take_fraction(keys: list[str], proportion: float, lengths: Sequence[int] | None = None) -> list[str]:
    """Return the first `proportion` of the episodes, whole ones, at least one.

    With the `lengths` of all of them, as many as come nearest to that share of the steps: published shares are of a
    data set's rows, and where solved steps are kept many of OGBench's episodes have one. Raises ConfigError.
    """
    if not 0 < proportion <= 1:
        of = "episodes" if lengths is None else "steps"
        raise ConfigError(f"a share of the {of} must lie in (0, 1], got {proportion:g}", parameter="proportion")
    if lengths is None:
        return keys[: max(1, round(proportion * len(keys)))]
    steps = np.cumsum(lengths)
    return keys[: 1 + int(np.argmin(np.abs(steps - proportion * steps[-1])))]


Json = dict[str, Any]  # plain values that survive JSON unchanged


class Sink(Protocol):
    """A data set being written to a folder. A plain value: worker processes get copies."""

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

    def place(self, layout: Json, index: int, staged: Json) -> None:
        """Put a staged episode into the data set as its number `index`; called in order, without holes."""

    def finish(self, layout: Json, staged: list[Json]) -> None:
        """Write the description of the whole data set; remove what was staged. May be called again."""
