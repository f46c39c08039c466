"""Statistics of states and action chunks, for normalising them: mean, std, q01 and q99.

A sample is a step: its state, and the chunk of `horizon` actions from it on. Behind an episode's last step the last
action is repeated, and counts, as in openpi's loader. `delta` actions are differences from the state of the *chunk's
first* step on the masked dimensions. Both may be in the units of a model's training (`robot_units`). Quantiles are
exact (openpi's are edges of 5,000-bin histograms).

A dimension that (almost) never moves has a spread near 0, and would turn the least movement into a huge number. There
`std` is raised to a floor. Where q01 and q99 are less than twice the floor apart, they are replaced by the extremes, or
where those are as close, by their middle plus and minus the floor. The changed dimensions are listed with the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from serl_chunk.data.normalise.robot_units import UNITS, units_fault
from serl_chunk.data.normalise.running_statistics import Moments, Statistics
from serl_chunk.data.source import Source
from serl_chunk.io import atomic_write, os_reason
from serl_chunk.types import STATE, ConfigError, DataError, Episode, RobotSpec

FILE = "norm_stats.json"
Progress = Callable[[int, int], None]


class NormStats(NamedTuple):
    """Statistics of one vector, float64[D]; quantiles are None in files of openpi's that have none."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None
    q99: np.ndarray | None


def write_norm_stats(out: Path | str, vectors: Mapping[str, NormStats], note: Mapping[str, Any]) -> Path:
    """Write `out`, a .json file, or `norm_stats.json` in a folder `out`, whole or not at all, and return the file.

    openpi's layout: {"norm_stats": {"state": {"mean": [...], ...}, "actions": {...}}, "serl_chunk": note}; openpi
    ignores the note. Missing folders are made. Raises DataError where it cannot be written.
    """
    path = Path(out)
    path = path if path.suffix == ".json" else path / FILE
    plain = {name: stats._asdict() for name, stats in vectors.items()}
    content = {"norm_stats": plain, "serl_chunk": dict(note)}
    text = json.dumps(content, indent=2, allow_nan=False, default=np.ndarray.tolist) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text, durable=True)
    except OSError as error:
        raise DataError(f"{path}: cannot write the statistics: {os_reason(error)}") from error
    return path


def read_norm_stats(path: Path | str) -> tuple[dict[str, NormStats], dict[str, Any]]:
    """Read the vectors and the note in a file of `write_norm_stats` or openpi, or in `norm_stats.json` in a folder.

    The note (`StatsResult.note`) is empty in a file of openpi's. Raises DataError, naming the vector and field, where
    it is not JSON of that layout: finite numbers, lists of one length, no negative std, no q99 below its q01.
    """
    path = Path(path).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as statistics: {error}") from error
    vectors, note = (content.get(k) if isinstance(content, dict) else None for k in ("norm_stats", "serl_chunk"))
    if not isinstance(vectors, dict) or not vectors:
        raise DataError(
            f'{path}: no statistics (expected a JSON object "norm_stats": {{"state": ..., "actions": ...}})'
        )
    found = {name: _stats(f"{path}: {name}", fields) for name, fields in vectors.items()}
    return found, note if isinstance(note, dict) else {}


def _stats(where: str, fields: Any) -> NormStats:
    if not isinstance(fields, dict):
        raise DataError(f"{where} must be an object with mean, std, q01 and q99")
    found: dict[str, np.ndarray | None] = {}
    for name in NormStats._fields:
        value = fields.get(name)
        if value is None and name in ("q01", "q99"):
            found[name] = None
            continue
        try:
            numbers = np.array(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.array(np.nan)
        if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
            raise DataError(f"{where}: {name} must be a list of finite numbers")
        found[name] = numbers
    stats = NormStats(**found)  # type: ignore[arg-type]
    lengths = {k: len(v) for k, v in found.items() if v is not None}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where}: fields of different lengths: {lengths}")
    if (stats.std < 0).any():
        raise DataError(f"{where}: std is negative in dimension {int(np.argmax(stats.std < 0))}")
    if stats.q01 is not None and stats.q99 is not None and (stats.q99 < stats.q01).any():
        raise DataError(f"{where}: q99 is below q01 in dimension {int(np.argmax(stats.q99 < stats.q01))}")
    return stats


STD_FLOOR = 0.01  # in the data's units; what the normaliser of our own agents has for states
_BLOCK = 1 << 21  # numbers of chunks made at once


class ColumnStats(NamedTuple):
    """Statistics of one vector, as measured and as written."""

    moments: Moments
    stats: NormStats
    std_floored: list[int]  # dimensions whose std was raised to the floor
    quantiles_widened: list[int]  # dimensions whose q01 and q99 were replaced


@dataclasses.dataclass(frozen=True)
class StatsRequest:
    """The samples of statistics, and their treatment."""

    actions: Literal["absolute", "delta"] = "absolute"  # as recorded, or minus the state at the chunk's start
    joints: tuple[int, ...] = ()  # for `delta`: the state index that is subtracted from each action, -1 for none
    horizon: int = 1  # H, actions of a chunk
    max_samples: int | None = None  # a random subset of so many steps, drawn without repetition; None for all
    seed: int = 0  # of that subset
    std_floor: float = STD_FLOOR  # see the module's text
    robot: str = "none"  # whose units states and actions are converted to, of `UNITS`

    def __post_init__(self) -> None:
        for name, value in (("horizon", self.horizon), ("max_samples", self.max_samples)):
            if value is not None and value < 1:
                raise ConfigError(f"must be at least 1, got {value}", parameter=name)
        if not self.std_floor > 0:
            raise ConfigError(f"must be positive, got {self.std_floor}", parameter="std_floor")
        if (self.actions == "delta") != any(j >= 0 for j in self.joints):
            text = "delta actions need a mask with at least one dimension, absolute ones have none"
            raise ConfigError(text, parameter="mask")


class StatsResult(NamedTuple):
    """Statistics of a source."""

    vectors: dict[str, ColumnStats]  # "state" and "actions"
    what: StatsRequest
    episodes: int
    steps: int  # in all episodes
    samples: int  # that were used

    def note(self) -> dict[str, Any]:
        """Return what stands under the file's key `serl_chunk`."""
        what = self.what
        return {
            "actions": what.actions,
            "mask": [j >= 0 for j in what.joints],
            "state_of_action": list(what.joints),
            "horizon": what.horizon,
            "robot": what.robot,
            "after_the_end": "last action repeated",
            "episodes": self.episodes,
            "steps": self.steps,
            "samples": self.samples,
            "seed": what.seed if self.samples < self.steps else None,
            "std_floor": what.std_floor,
            "std_floored": {name: m.std_floored for name, m in self.vectors.items()},
            "std_measured": {name: m.moments.std.tolist() for name, m in self.vectors.items()},
            "quantiles_widened": {name: m.quantiles_widened for name, m in self.vectors.items()},
        }


def parse_mask(text: str) -> tuple[bool, ...]:
    """Parse openpi's `6,-1,6,-1`: six dimensions that are differences, one that is not, ...; raises ConfigError."""
    runs: list[int] = []
    for part in text.split(","):
        n = int(part) if re.fullmatch(r"\s*[-+]?\d+\s*", part) else 0
        if not n:
            raise ConfigError(
                f"{part.strip()!r} is no run length. Write 6,-1,6,-1 for six dimensions that are differences, one that "
                "is not, six that are, one that is not",
                parameter="mask",
            )
        runs.append(n)
    return mask_of(runs)


def mask_of(runs: Iterable[int]) -> tuple[bool, ...]:
    """Return the mask of openpi's run lengths: (2, -1) is (True, True, False)."""
    return tuple(n > 0 for n in runs for _ in range(abs(n)))


def joints_of(mask: tuple[bool, ...] | None, spec: RobotSpec | None) -> tuple[int, ...]:
    """Return the state index subtracted from each action dimension, -1 for none.

    It is that of the robot's specification, on the dimensions of `mask`, by default all but grippers. Without a
    specification action j is a difference from state j. Raises ConfigError where neither is known, or they do not fit.
    """
    if spec is None:
        if mask is None:
            text = "is needed for delta actions. Give one (ALOHA: 6,-1,6,-1), or an experiment for its robot's joints"
            raise ConfigError(text, parameter="mask")
        return tuple(j if on else -1 for j, on in enumerate(mask))
    if mask is None:
        return tuple(-1 if j in spec.grippers else joint for j, joint in enumerate(spec.joint_of_action))
    if len(mask) > spec.action_dim:
        text = f"has {len(mask)} dimensions, robot {spec.name} has {spec.action_dim} actions"
        raise ConfigError(text, parameter="mask")
    joints = tuple(spec.joint_of_action[j] if on else -1 for j, on in enumerate(mask))
    for j, on in enumerate(mask):
        if on and joints[j] < 0:
            text = f"no state value of robot {spec.name} measures what action {j} commands"
            raise ConfigError(text, parameter="mask")
    return joints


def chunks(episode: Episode, what: StatsRequest, ticks: np.ndarray) -> np.ndarray:
    """Return the action chunks float32[N, H, A] from steps `ticks` int[N] on; raises ConfigError for a wrong mask."""
    state, action = columns_of(episode, what)
    at = np.minimum(ticks[:, None] + np.arange(what.horizon), len(action) - 1)
    out = action[at]
    if what.actions == "delta":
        joints = np.array(what.joints)
        if len(joints) > action.shape[1] or joints.max() >= state.shape[1]:
            raise ConfigError(
                f"has {len(joints)} dimensions, up to state value {joints.max()}, but episodes have {action.shape[1]} "
                f"actions and {state.shape[1]} state values",
                parameter="mask",
            )
        masked = np.flatnonzero(joints >= 0)
        out[..., masked] -= state[ticks][:, None, joints[masked]]
    return out


def columns_of(episode: Episode, what: StatsRequest) -> tuple[np.ndarray, np.ndarray]:
    """Return states float[T, S] and actions float[T, A] of an episode, in the units of `what.robot`."""
    units = UNITS[what.robot]
    return units.state(episode.steps.observation[STATE]), units.action(episode.steps.action)


def compute(source: Source, what: StatsRequest, progress: Progress = lambda read, to_read: None) -> StatsResult:
    """Compute the statistics of all episodes of `source`, or of `what.max_samples` of their steps.

    Reads the episodes once, twice for a subset. `progress` is called with (episodes read, episodes to read) after each
    one; both grow with the passes.

    Raises:
        DataError: an episode cannot be read, has other dimensions than the first, or there is none.
        ConfigError: the mask, or the robot whose units are wanted, does not fit the episodes.
    """
    keys = source.keys()
    if not keys:
        raise DataError(f"{source.path}: there is no episode")
    everything = range(len(keys))
    lengths = np.zeros(len(keys), np.int64)  # of the episodes read so far
    dims, done, to_read = (0, 0), 0, 0

    def read(numbers: Sequence[int]) -> Iterator[tuple[int, Episode]]:
        nonlocal dims, done, to_read
        to_read += len(numbers)
        for i in numbers:
            episode = source.read(keys[i])
            found = episode.steps.observation[STATE].shape[1], episode.steps.action.shape[1]
            dims = dims if any(dims) else found
            if found != dims:
                raise DataError(
                    f"{source.path}: episode {keys[i]} has {found[0]} state values and {found[1]} actions (expected "
                    f"{dims[0]} and {dims[1]}). Compute statistics of one robot's episodes"
                )
            lengths[i], done = episode.steps.n, done + 1
            progress(done, to_read)
            yield i, episode

    ticks: list[np.ndarray] | None = None
    if what.max_samples is not None:
        for _ in read(everything):
            pass  # how long they are
        ticks = _drawn(what.max_samples, what.seed, lengths)
    statistics: list[Statistics] = []
    for i, episode in read([i for i in everything if ticks is None or len(ticks[i])]):
        if fault := units_fault(what.robot, *dims):
            raise ConfigError(f"{fault}. Set it to none", parameter="robot")
        state, action = columns_of(episode, what)
        statistics = statistics or [Statistics(values.shape[1]) for values in (state, action)]
        of = np.arange(len(action)) if ticks is None else ticks[i]
        size = max(1, _BLOCK // (what.horizon * action.shape[1]))
        for part in np.split(of, range(size, len(of), size)):
            statistics[0].add(state[part])
            statistics[1].add(np.concatenate(chunks(episode, what, part)))
    measured = [_measured(s.moments, s.quantile(), what.std_floor) for s in statistics]
    vectors = dict(zip(("state", "actions"), measured, strict=True))
    return StatsResult(vectors, what, len(everything), int(lengths.sum()), statistics[0].moments.count)


def _drawn(n: int, seed: int, lengths: np.ndarray) -> list[np.ndarray] | None:
    """Draw `n` steps; returns those of each episode in increasing order, None where there are no more than `n`."""
    ends = np.cumsum(lengths)
    if n >= ends[-1]:
        return None
    chosen = np.sort(np.random.default_rng(seed).choice(int(ends[-1]), n, replace=False))
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    return [part - start for part, start in zip(parts, ends - lengths, strict=True)]


def _measured(moments: Moments, quantiles: np.ndarray, floor: float) -> ColumnStats:
    std, (q01, q99) = moments.std, quantiles
    narrow = q99 - q01 < 2 * floor
    still = narrow & (moments.high - moments.low < 2 * floor)
    middle = (moments.low + moments.high) / 2
    q01 = np.where(still, middle - floor, np.where(narrow, moments.low, q01))
    q99 = np.where(still, middle + floor, np.where(narrow, moments.high, q99))
    return ColumnStats(
        moments,
        NormStats(moments.mean, np.maximum(std, floor), q01, q99),
        np.flatnonzero(std < floor).tolist(),
        np.flatnonzero(narrow).tolist(),
    )
