"""The transformation between the robot's units and model space: one immutable value with a digest."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.types import STATE, ConfigError, DataError, Episode, RobotSpec


@dataclasses.dataclass(frozen=True)
class Normaliser:
    """Affine maps for states and chunks.

    state: `(s - state_mean) / state_std`. Chunk: at offset i, dimension j,
    `(a[i, j] - base_j - centre[i, j]) / scale[i, j]`, where base_j is the joint measured at the window's first
    observation (`state[joint[j]]`) or 0 where `joint[j] < 0` (grippers, and every dimension in absolute modes).
    """

    mode: str
    state_mean: np.ndarray  # float32[S]
    state_std: np.ndarray  # float32[S]
    centre: np.ndarray  # float32[H, A], robot units
    scale: np.ndarray  # float32[H, A], robot units
    joint: np.ndarray  # int32[A]

    @property
    def horizon(self) -> int:
        """H, the chunk length these statistics are for."""
        return len(self.centre)

    def observe(self, state: np.ndarray) -> np.ndarray:
        """Robot-unit states float32[..., S] in model space."""
        return ((state - self.state_mean) / self.state_std).astype(np.float32)

    def encode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Chunk float32[..., H', A] in robot units (H' <= H) to model space, given the raw state float32[..., S]."""
        h = chunk.shape[-2]
        return ((chunk - self._base(state) - self.centre[:h]) / self.scale[:h]).astype(np.float32)

    def decode(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """The inverse of `encode`."""
        h = chunk.shape[-2]
        return (chunk * self.scale[:h] + self.centre[:h] + self._base(state)).astype(np.float32)

    def _base(self, state: np.ndarray) -> np.ndarray:
        relative = self.joint >= 0
        return np.where(relative, state[..., np.maximum(self.joint, 0)], np.float32(0))[..., None, :]

    def digest(self) -> str:
        """Sixteen hex digits that change when any number does."""
        h = hashlib.sha256(self.mode.encode())
        for value in self.to_arrays().values():
            h.update(np.ascontiguousarray(value).tobytes())
        return h.hexdigest()[:16]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays for the handshake and for checkpoints; `from_arrays` takes them back."""
        names = ("state_mean", "state_std", "centre", "scale", "joint")
        return {n: getattr(self, n) for n in names}

    @classmethod
    def from_arrays(cls, mode: str, arrays: Mapping[str, np.ndarray]) -> Normaliser:
        """The inverse of `to_arrays`."""
        return cls(mode, **{k: np.array(v) for k, v in arrays.items()})


def fit_normaliser(spec: RobotSpec, config: NormaliserConfig, horizon: int, episodes: Sequence[Episode]) -> Normaliser:
    """Statistics of demonstrations `episodes`, or of the specification where there are none.

    Without demonstrations states pass unchanged and `absolute_range` is the only action mode that is known;
    `relative` then falls back to a scale of 5 % of the range per tick. Raises ConfigError for `absolute_demo`
    without demonstrations, DataError for episodes of another size.
    """
    s, a = spec.state_dim, spec.action_dim
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    states = [e.steps.observation[STATE] for e in episodes]
    for e, st in zip(episodes, states, strict=True):
        if st.shape[1] != s or e.steps.action.shape[1] != a:
            raise DataError(
                f"episode {e.begin.episode_id}: state and action have {st.shape[1]} and {e.steps.action.shape[1]} "
                f"dimensions, robot {spec.name!r} has {s} and {a}"
            )
    mean, std = np.zeros(s, np.float32), np.ones(s, np.float32)
    if config.state and states:
        stacked = np.concatenate(states)
        mean, std = stacked.mean(0), np.maximum(stacked.std(0), config.state_std_floor)
    joint = np.full(a, -1, np.int32)
    if config.actions == "relative":
        joint = np.array(spec.joint_of_action, np.int32)
        joint[list(spec.grippers)] = -1
    if config.actions == "absolute_demo" and not episodes:
        raise ConfigError(
            "normaliser.actions=absolute_demo needs demonstrations: give --demo_path, or use absolute_range or relative"
        )
    if config.actions == "absolute_range" or not episodes:
        half = np.maximum((high - low) / 2, 1e-6)
        centre, scale = np.tile((low + high) / 2, (horizon, 1)), np.tile(half, (horizon, 1))
        moving = joint >= 0
        centre[:, moving] = 0
        scale[:, moving] = (0.1 * half * np.arange(1, horizon + 1)[:, None])[:, moving]
    else:
        centre, scale = _demonstrated_range(states, episodes, joint, horizon, config)
    f32 = np.float32
    return Normaliser(config.actions, mean.astype(f32), std.astype(f32), centre.astype(f32), scale.astype(f32), joint)


def _demonstrated_range(
    states: list[np.ndarray], episodes: Sequence[Episode], joint: np.ndarray, horizon: int, config: NormaliserConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Centre and scale [H, A] that map the extremes of the demonstrated offsets onto +-`config.extreme`."""
    a = len(joint)
    low, high = np.full((horizon, a), np.inf), np.full((horizon, a), -np.inf)
    for st, e in zip(states, episodes, strict=True):
        action = e.steps.action
        base = np.where(joint >= 0, st[:, np.maximum(joint, 0)], 0)
        for i in range(min(horizon, len(action))):
            offset = action[i:] - base[: len(action) - i]
            low[i], high[i] = np.minimum(low[i], offset.min(0)), np.maximum(high[i], offset.max(0))
    unseen = ~np.isfinite(low[:, 0])  # offsets longer than every demonstration take the longest seen one's range
    if unseen.any():
        last = int(np.flatnonzero(~unseen)[-1])
        low[unseen], high[unseen] = low[last], high[last]
    absolute = joint < 0  # their statistics do not depend on the offset
    low[:, absolute], high[:, absolute] = low[:, absolute].min(0), high[:, absolute].max(0)
    return (low + high) / 2, np.maximum((high - low) / 2, config.action_scale_floor) / config.extreme
