"""The transformation between the robot's units and model space: an immutable value with a digest."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from serl_chunk.config.experiment import UNBOUNDED, NormaliserConfig
from serl_chunk.data.normalise.chunk_statistics import NormStats, joints_of, mask_of, read_norm_stats
from serl_chunk.data.normalise.robot_units import UNITS, units_fault
from serl_chunk.types import STATE, ConfigError, DataError, Episode, RobotSpec

logger = logging.getLogger(__name__)

STATE_FLOOR = 0.01  # least deviation of a state dimension
ACTION_FLOOR = 0.02  # least scale of an action dimension: one that never moves must not explode
_ROUNDING = 1e-5  # of float32: an action at a limit is encoded as 1 or a little more
_EPSILON = 1e-6  # openpi's, added to every deviation and range
_MOVE = 1.0  # m or rad, a move of a number of the state that statistics must stand
_HUGE = 1000  # an encoded number from which on statistics are of a constant dimension


@dataclasses.dataclass(frozen=True, eq=False)  # compared by `digest`; arrays have no single truth value
class Normaliser:
    """Affine maps for states and chunks, behind those of `robot`; its arrays cannot be written.

    state: `(s - state_mean) / state_std`. Chunk: at offset i, dimension j,
    `(a[i, j] - base_j - centre[i, j]) / scale[i, j]`, where base_j is the joint measured at the window's first
    observation (`state[joint[j]]`) or 0 where `joint[j] < 0` (grippers, and every dimension in absolute modes).
    s, a and base are in the units of `robot` (`robot_units.UNITS`).
    Raises DataError where the shapes do not fit together, and for an unknown robot.
    """

    _ARRAYS: ClassVar[tuple[str, ...]] = ("state_mean", "state_std", "centre", "scale", "joint")
    _divide: ClassVar[Any] = staticmethod(np.divide)

    mode: str
    state_mean: np.ndarray  # float32[S]
    state_std: np.ndarray  # float32[S]
    centre: np.ndarray  # float32[H, A], robot units
    scale: np.ndarray  # float32[H, A], robot units
    joint: np.ndarray  # int32[A]
    robot: str = "none"

    def __post_init__(self) -> None:
        for name in self._ARRAYS:
            value = np.array(getattr(self, name), np.int32 if name == "joint" else np.float32)
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        s, h, a = self.state_mean.size, len(np.atleast_1d(self.centre)), self.joint.size
        shapes = ((s,), (s,), (h, a), (h, a), (a,))
        got = tuple(value.shape for value in self.to_arrays().values())
        if got != shapes or h < 1:
            raise DataError(
                f"normaliser: {', '.join(self._ARRAYS)} must have shapes [S], [S], [H, A], [H, A], [A]: {got}"
            )
        if (self.joint >= s).any():
            raise DataError(f"normaliser: joint points past a state of {s} values")
        if self.robot not in UNITS:
            raise DataError(
                f"normaliser: unknown units of robot {self.robot!r} (expected {', '.join(UNITS)}). Install the same "
                "version of serl-chunk on both machines"
            )

    def traced(self, arrays: Mapping[str, Any], divide: Callable[[Any, Any], Any]) -> Normaliser:
        """Return it for compiled functions: with arrays of `to_arrays` as their arguments, and their division."""
        other = copy.copy(self)
        vars(other).update(arrays, _divide=divide)
        return other

    @property
    def bounded(self) -> bool:
        """Whether model space is [-1, 1] in every number of an action."""
        return self.mode not in UNBOUNDED

    @property
    def horizon(self) -> int:
        return len(self.centre)

    def observe(self, state: np.ndarray) -> np.ndarray:
        """Convert states float32[..., S] to model space."""
        return self._divide(UNITS[self.robot].state(state) - self.state_mean, self.state_std).astype(np.float32)

    def encode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Convert a chunk float32[..., H', A] (H' <= H) to model space, given the raw state float32[..., S]."""
        h = self._offsets(chunk)
        action = UNITS[self.robot].action(chunk)
        return self._divide(action - self._base(state) - self.centre[:h], self.scale[:h]).astype(np.float32)

    def decode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        h = self._offsets(chunk)
        action = chunk * self.scale[:h] + self.centre[:h] + self._base(state)
        return UNITS[self.robot].command(action).astype(np.float32)

    def count_outside(self, state: np.ndarray, action: np.ndarray, lost_ticks: np.ndarray) -> tuple[int, int]:
        """Count the numbers of an episode's chunks, from every step on, that lie outside of model space, and all.

        None are counted where model space has no bounds.

        Args:
            state: float32[T, S], robot units.
            action: float32[T, A], robot units.
            lost_ticks: int[T], above 0 on the steps after a gap, which no chunk crosses.
        """
        if not self.bounded:
            return 0, 0
        outside = total = 0
        for i, offset in enumerate(_offsets(action, self._base(state)[:, 0], lost_ticks, self.horizon)):
            outside += int((np.abs((offset - self.centre[i]) / self.scale[i]) > 1 + _ROUNDING).sum())
            total += offset.size
        return outside, total

    def shifts(self, moved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what a move of the state adds in model space to the state and to the encoding of an unchanged chunk.

        Of a normaliser in the robot's own units. `moved`: float32[..., S], robot units. Returns float32[..., S] and
        float32[..., H, A].
        """
        return (moved / self.state_std).astype(np.float32), (-self._base(moved) / self.scale).astype(np.float32)

    def _offsets(self, chunk: np.ndarray) -> int:
        h = chunk.shape[-2]
        if h > self.horizon:  # numpy would repeat the statistics of horizon 1 silently
            raise DataError(f"chunk of {h} actions, the normaliser's statistics are for at most {self.horizon}")
        return h

    def _base(self, state: np.ndarray) -> np.ndarray:
        relative, state = self.joint >= 0, UNITS[self.robot].state(state)
        xp = state.__array_namespace__()  # NumPy, or JAX within a compiled function
        return xp.where(relative, state[..., np.maximum(self.joint, 0)], np.float32(0))[..., None, :]

    def digest(self) -> str:
        """Return sixteen hex digits that change when any number does."""
        h = hashlib.sha256((self.mode if self.robot == "none" else f"{self.mode} {self.robot}").encode())
        for value in self.to_arrays().values():
            h.update(np.ascontiguousarray(value).tobytes())
        return h.hexdigest()[:16]

    def fields(self) -> dict[str, str]:
        """Return the plain values that stand next to the arrays, in a welcome and in a checkpoint's meta."""
        robot = {} if self.robot == "none" else {"normaliser_robot": self.robot}
        return {"normaliser_mode": self.mode, "normaliser_digest": self.digest(), **robot}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return flat arrays for the handshake and for checkpoints; `restored` inverts it."""
        return {n: getattr(self, n) for n in self._ARRAYS}

    @classmethod
    def restored(cls, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Normaliser:
        """Return the inverse of `fields` and `to_arrays`; other fields are ignored. Raises DataError."""
        if set(arrays) != set(cls._ARRAYS):
            raise DataError(
                f"normaliser: expected the arrays {', '.join(cls._ARRAYS)}, got {', '.join(sorted(arrays))}"
            )
        return cls(str(fields["normaliser_mode"]), **arrays, robot=str(fields.get("normaliser_robot", "none")))


def fit_normaliser(spec: RobotSpec, config: NormaliserConfig, horizon: int, episodes: Sequence[Episode]) -> Normaliser:
    """Fit to demonstrations `episodes` of that robot, to `config.norm_stats`, or, with neither, to the specification.

    Without demonstrations states pass unchanged, `absolute_range` is the same, and `relative` has a scale of 5 % of the
    range per tick, at most the whole range. Raises ConfigError for `absolute_demo` without demonstrations or for
    `norm_stats` that do not fit, and DataError for statistics of another size.
    """
    if config.actions == "openpi":
        return _as_openpi(config, spec, horizon)
    s, a = spec.state_dim, spec.action_dim
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    states = [e.steps.observation[STATE] for e in episodes]
    mean, std = np.zeros(s, np.float32), np.ones(s, np.float32)
    if config.state and config.norm_stats:
        of_state = _vector(config, "state", s, spec)
        mean, std = of_state.mean, np.maximum(of_state.std, STATE_FLOOR)
    elif config.state and states:
        stacked = np.concatenate(states)
        # float32 sums over 10^5 rows lose three digits
        mean = stacked.mean(0, dtype=np.float64)
        std = np.maximum(stacked.std(0, dtype=np.float64), STATE_FLOOR)
    joint = np.full(a, -1, np.int32)
    if config.actions == "relative":
        joint = np.array(spec.joint_of_action, np.int32)
        joint[list(spec.grippers)] = -1
    if config.actions == "absolute_demo" and not episodes:
        raise ConfigError(
            "absolute_demo needs demonstrations. Give demo_path, or use absolute_range or relative",
            parameter="normaliser.actions",
        )
    if config.actions == "norm_stats":
        joint, centre, scale = _between_quantiles(config, spec, horizon)
    elif config.actions == "absolute_range" or not episodes:
        half = np.maximum((high - low) / 2, 1e-6)
        centre, scale = np.tile((low + high) / 2, (horizon, 1)), np.tile(half, (horizon, 1))
        moving = joint >= 0
        centre[:, moving] = 0
        growth = np.minimum(0.1 * np.arange(1, horizon + 1), 2.0)[:, None]  # of half the range; no offset exceeds 2
        scale[:, moving] = (half * growth)[:, moving]
    else:
        centre, scale = _demonstrated_range(states, episodes, joint, horizon, config)
    return Normaliser(config.actions, mean, std, centre, scale, joint)


def _as_openpi(config: NormaliserConfig, spec: RobotSpec, horizon: int) -> Normaliser:
    """Return openpi's transforms by the statistics of `config.norm_stats`."""
    if fault := units_fault(config.robot, spec.state_dim, spec.action_dim, spec.grippers):
        raise ConfigError(f"{fault}. Set it to none", parameter="normaliser.robot")
    try:
        masked = joints_of(mask_of(config.delta_mask), spec)
    except ConfigError as error:
        raise ConfigError(error.message, parameter="normaliser.delta_mask") from error
    joint = np.full(spec.action_dim, -1, np.int32)
    joint[: len(masked)] = masked
    if note := read_norm_stats(config.norm_stats)[1]:  # openpi's own files do not record it
        of = np.array(note.get("state_of_action", []), np.int32)
        noted = np.full_like(joint, -1)
        noted[: min(len(of), len(joint))] = of[: len(joint)]
        if (noted != joint).any():
            raise ConfigError(
                f"{config.norm_stats} is of actions less the state's values {noted.tolist()}, "
                f"{config.delta_mask or 'none'} gives {joint.tolist()} (-1: no difference). Set it as the file has it, "
                "or write the file again with `serl-chunk data stats`",
                parameter="normaliser.delta_mask",
            )
        if (joint >= 0).any() and note.get("horizon") != horizon:
            raise _other_horizon(config.norm_stats, note, horizon)
    mean, std = np.zeros(spec.state_dim), np.ones(spec.state_dim)
    if config.state:
        mean, std = _openpi_scale(config, _vector(config, "state", spec.state_dim, spec))
    centre, scale = _openpi_scale(config, _vector(config, "actions", spec.action_dim, spec))
    units = UNITS[config.robot]
    _warn_of_constant(config, "state", mean, std, units.state(np.zeros(spec.state_dim)), mean + _MOVE)
    limits = (units.action(np.array(limit)) for limit in (spec.action_low, spec.action_high))
    _warn_of_constant(config, "actions", centre, scale, *limits)
    centres, scales = (np.tile(each, (horizon, 1)) for each in (centre, scale))
    return Normaliser(config.actions, mean, std, centres, scales, joint, config.robot)


def _openpi_scale(config: NormaliserConfig, stats: NormStats) -> tuple[np.ndarray, np.ndarray]:
    """Return centre and scale float64[D]: those of a z-score, or of q01 .. q99 as -1 .. 1."""
    if config.scaling == "z_score":
        return stats.mean, stats.std + _EPSILON
    if stats.q01 is None or stats.q99 is None:
        raise ConfigError(
            f"{config.norm_stats} has no quantiles. Set it to z_score, or give a file that has q01 and q99",
            parameter="normaliser.scaling",
        )
    half = (stats.q99 - stats.q01 + _EPSILON) / 2
    return stats.q01 + half, half


def _warn_of_constant(
    config: NormaliserConfig, name: str, centre: np.ndarray, scale: np.ndarray, *values: np.ndarray
) -> None:
    """Warn of dimensions in which one of `values`, each float[D] in the model's units, is encoded as a huge number."""
    encoded = (np.stack(values) - centre) / scale
    largest = encoded[np.abs(encoded).argmax(0), np.arange(len(centre))]
    if (huge := np.flatnonzero(np.abs(largest) > _HUGE)).size:
        width = "std" if config.scaling == "z_score" else "q99 - q01"
        listed = ", ".join(f"{name}[{j}] reaches {largest[j]:,.0f} when encoded" for j in huge)
        logger.warning(
            f"{config.norm_stats}: {width} near 0: {listed}. Widen it in the file, or write the file again from "
            "demonstrations that move these dimensions (`serl-chunk data stats`)"
        )


def _other_horizon(path: str, note: dict[str, Any], horizon: int) -> ConfigError:
    return ConfigError(
        f"{path}: its differences are of chunks of {note.get('horizon')} actions (expected {horizon}: chunk.horizon, "
        f"or chunk.critic_horizon where that is more). Write it again with `serl-chunk data stats`, horizon={horizon}"
    )


def _vector(config: NormaliserConfig, name: str, size: int, spec: RobotSpec) -> NormStats:
    """Return the statistics of `size` numbers. Of openpi's files, which may be padded, those of the first ones.

    Raises DataError for too few or too many, ConfigError for those of other units.
    """
    vectors, note = read_norm_stats(config.norm_stats)
    units, robot = note.get("robot"), config.robot if config.actions == "openpi" else "none"
    if units is not None and units != robot:
        raise ConfigError(
            f"{config.norm_stats} is of states and actions in the units {units!r}, got {robot!r}. Set it as the file "
            "has it (with normaliser.actions=openpi), or write the file again with `serl-chunk data stats`",
            parameter="normaliser.robot",
        )
    found = vectors.get(name)
    if found is not None and config.actions == "openpi" and len(found.mean) > size:
        q01, q99 = (None if q is None else q[:size] for q in (found.q01, found.q99))
        found = NormStats(found.mean[:size], found.std[:size], q01, q99)
    if found is None or len(found.mean) != size:
        what = "none" if found is None else f"{len(found.mean)} dimensions"
        raise DataError(f"{config.norm_stats}: robot {spec.name} has {size} values of {name}, the file {what}")
    return found


def _between_quantiles(
    config: NormaliserConfig, spec: RobotSpec, horizon: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return joint [A], centre, scale [H, A] that map q01 and q99 of the file onto -1 and 1 (as pi0.5 does)."""
    path, stats = config.norm_stats, _vector(config, "actions", spec.action_dim, spec)
    note = read_norm_stats(path)[1]
    if stats.q01 is None or stats.q99 is None or note.get("actions") not in ("absolute", "delta"):
        raise ConfigError(
            f"{path}: normaliser.actions=norm_stats needs quantiles, and whether actions are differences. Write the "
            "file with `serl-chunk data stats`"
        )
    joint = np.full(spec.action_dim, -1, np.int32)
    if note["actions"] == "delta":
        of = np.array(note.get("state_of_action", []), np.int32)
        fits = of.ndim == 1 and len(of) <= len(joint) and of.max(initial=-1) < spec.state_dim
        if not fits or note.get("horizon") != horizon:
            raise _other_horizon(path, note, horizon)
        joint[: len(of)] = of
    half = np.maximum((stats.q99 - stats.q01) / 2, ACTION_FLOOR)
    return joint, np.tile((stats.q01 + stats.q99) / 2, (horizon, 1)), np.tile(half, (horizon, 1))


def _offsets(action: np.ndarray, base: np.ndarray, lost_ticks: np.ndarray, horizon: int) -> Iterator[np.ndarray]:
    """Yield for each i below the horizon a[t + i] - base[t], [N, A], of the steps t that no gap parts from t + i."""
    stretch = np.cumsum(lost_ticks > 0)
    for i in range(min(horizon, len(action))):
        starts = len(action) - i
        yield (action[i:] - base[:starts])[stretch[i:] == stretch[:starts]]


def _demonstrated_range(
    states: list[np.ndarray], episodes: Sequence[Episode], joint: np.ndarray, horizon: int, config: NormaliserConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return centre and scale [H, A] that map the extremes of demonstrated offsets onto +-`config.demo_range`."""
    a = len(joint)
    low, high = np.full((horizon, a), np.inf), np.full((horizon, a), -np.inf)
    for st, e in zip(states, episodes, strict=True):
        base = np.where(joint >= 0, st[:, np.maximum(joint, 0)], 0)
        for i, offset in enumerate(_offsets(e.steps.action, base, e.steps.lost_ticks, horizon)):
            if len(offset):
                low[i], high[i] = np.minimum(low[i], offset.min(0)), np.maximum(high[i], offset.max(0))
    unseen = ~np.isfinite(low[:, 0])  # offsets longer than every demonstration take the longest seen one's range
    if unseen.any():
        last = int(np.flatnonzero(~unseen)[-1])
        low[unseen], high[unseen] = low[last], high[last]
    absolute = joint < 0  # their statistics do not depend on the offset
    low[:, absolute], high[:, absolute] = low[:, absolute].min(0), high[:, absolute].max(0)
    return (low + high) / 2, np.maximum((high - low) / 2, ACTION_FLOOR) / config.demo_range
