"""D4RL's HDF5 data sets: flat arrays of transitions in one file.

    /observations [N, S], /actions [N, A], /rewards [N], /terminals [N], mostly /timeouts [N], rarely /next_observations

An episode ends at `terminals` and `timeouts`. Where the file has no timeouts, it also ends where the next observation
is not the next row's (`next_observations`), or after the robot's longest episode (`ReadOptions.spec`).

Without `next_observations` the observation after the last action is not stored: a terminated episode's last observation
stands in for it, because no target looks past a termination; a truncated one has none. Rewards stay unchanged; where
all are 0 or 1, a termination with 1 is a success.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from serl_chunk.data.formats.hdf5_io import array, looks_like, member, numbers, opened
from serl_chunk.data.source import Format, ReadOptions, take_fraction
from serl_chunk.data.validate import Ending, check_columns, check_finite, check_key, imported_episode, make_steps
from serl_chunk.io import plural
from serl_chunk.types import STATE, ConfigError, DataError, Episode, Observation, Outcome, Source

_BLOCK = 100_000  # rows that are compared at a time
_NEEDED = {"observations": 2, "actions": 2, "rewards": 1, "terminals": 1}  # dimensions
_OPTIONAL = {"timeouts": 1, "next_observations": 2}


class _Span(NamedTuple):
    """Rows `start <= row < stop`, and what closed them: "terminal", "timeout", "break", "limit" or "last"."""

    start: int
    stop: int
    closed: str


class D4rlSource:
    """Episodes in one file, by the rows of their first steps; see the module. Only positions are kept in memory."""

    format = "d4rl"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        if options.success is not None:
            raise ConfigError(f"{path}: D4RL's data records rewards and terminations. Leave success and failure out")
        self.path, self._options = path, options
        self.hz = options.rate()
        self._after_goal = 0
        with opened(path) as file:
            there = {name: ndim for name, ndim in _OPTIONAL.items() if member(path, file, name) is not None}
            ndims = _NEEDED | there
            shapes = {name: numbers(path, file, name, ndim).shape for name, ndim in ndims.items()}
            n = check_columns(path, shapes, ndims, "actions")
            if n == 0:
                raise DataError(f"{path}: no steps")
            self._successors = "next_observations" in shapes
            if self._successors and shapes["next_observations"] != shapes["observations"]:
                both = f"{[*shapes['next_observations']]}, observations {[*shapes['observations']]}"
                raise DataError(f"{path}: next_observations {both}")
            terminal = file["terminals"][()].astype(bool)
            reward = array(path, file, "rewards")
            check_finite(path, "rewards", reward, "row", "Download the file again")
            self._by, closed = self._ends(file, terminal, n)
        self._sparse = bool(np.isin(reward, (0, 1)).all() and reward.max() == 1)
        # Dense rewards reach 1 on the way: no episode may be cut there.
        self.rewards_mark_success = bool(np.isin(reward, (0, 1)).all() or np.isin(reward, (-1, 0)).all())
        closed |= {int(i): "terminal" for i in np.flatnonzero(terminal)}
        closed.setdefault(n - 1, "last")
        spans: list[_Span] = []
        start, before = 0, ""
        for end in sorted(closed):
            if start == end and before == closed[end] == "terminal":
                self._after_goal += 1
            else:
                spans.append(_Span(start, end + 1, closed[end]))
            start, before = end + 1, closed[end]
        keys = take_fraction([str(s.start) for s in spans], options.proportion, [s.stop - s.start for s in spans])
        self._spans = dict(zip(keys, spans, strict=False))

    def keys(self) -> list[str]:
        return list(self._spans)

    def lengths(self) -> list[int]:
        return [s.stop - s.start for s in self._spans.values()]

    def read(self, key: str) -> Episode:
        check_key(self._spans, key, self.path)
        start, stop, closed = self._spans[key]
        with opened(self.path) as file:
            state, action, reward = (
                array(self.path, file, name, ndim=_NEEDED[name], at=slice(start, stop))
                for name in ("observations", "actions", "rewards")
            )
            final: Observation | None = None
            if self._successors:
                final = {STATE: array(self.path, file, "next_observations", ndim=2, at=stop - 1)}
            elif closed == "terminal":
                final = {STATE: state[-1].copy()}
        success = self._sparse and closed == "terminal" and reward[-1] == 1
        ending = Ending(final, closed == "terminal", Outcome.SUCCESS if success else Outcome.UNKNOWN)
        steps = make_steps("", state, action, self.hz, reward=reward, source=self._source())
        return imported_episode(f"{self.path}, row {start}", f"{self.path.stem}-{start}", steps, ending, self._options)

    def notes(self) -> list[str]:
        closed = Counter(span.closed for span in self._spans.values())
        truncated = plural(closed.total() - closed["terminal"], "truncated episode")
        shown = {
            f"episodes end by {self._by}": True,
            "the last episode has no end (the file stops in it); read as truncated": closed["last"],
            "the observations after the last actions are not stored: terminated episodes end in their last "
            f"observation, {truncated} in none": not self._successors,
            f"{plural(self._after_goal, 'step')} that are terminal like the step before them (the goal was reached, "
            "and the recording went on) are left out": self._after_goal,
            "rewards are not 0 and 1: no outcome is known, and a reward of 1 or more ends no episode": not self._sparse,
            f"every action is taken for a {self._source().name.lower()} one, by the file's name": True,
            "the file records no time: all stamps are 0; hz sets it": self.hz is None,
        }
        return [note for note, show in shown.items() if show]

    def _ends(self, file: h5py.File, terminal: np.ndarray, n: int) -> tuple[str, dict[int, str]]:
        """The fields that end episodes, and last row -> what closed it, without terminals."""
        if "timeouts" in file:
            return "`terminals` and `timeouts`", {int(i): "timeout" for i in np.flatnonzero(file["timeouts"][()])}
        if "next_observations" in file:
            breaks: dict[int, str] = {}
            for start in range(0, n - 1, _BLOCK):
                stop = min(start + _BLOCK, n - 1)
                after, following = file["next_observations"][start:stop], file["observations"][start + 1 : stop + 1]
                breaks |= {start + int(i): "break" for i in np.flatnonzero((after != following).any(axis=1))}
            return "`terminals`, and where the next row does not go on (there are no timeouts)", breaks
        spec = self._options.spec
        if spec is not None:
            limits, length = {}, 0
            for i in range(n):
                length = 0 if terminal[i] else length + 1
                if length == spec.max_episode_steps:
                    limits[i], length = "limit", 0
            return f"`terminals`, and after {spec.max_episode_steps} steps (there are no timeouts)", limits
        if not terminal[-1]:
            raise DataError(
                f"{self.path}: without timeouts and next_observations the ends by time limit are unknown. Add "
                "timeouts, or set exp_name to a robot, whose max_episode_steps is taken"
            )
        return "`terminals` alone (there are no timeouts: an episode that a time limit ended is not noticed)", {}

    def _source(self) -> Source:
        name = self.path.stem.lower()
        return Source.HUMAN if "human" in name else Source.RANDOM if "random" in name else Source.POLICY


def _matches(path: Path) -> bool:
    return looks_like(path, lambda file: all(isinstance(member(path, file, name), h5py.Dataset) for name in _NEEDED))


FORMAT = Format("d4rl", _matches, D4rlSource)
