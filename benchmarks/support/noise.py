"""Episodes of noise, for measurements of time: it costs the same as data."""

from __future__ import annotations

import numpy as np

from serl_chunk.types import Begin, End, Episode, Outcome, RobotSpec, SparseRows, StepBlock


def noise_episode(
    name: str, spec: RobotSpec, length: int, rng: np.random.Generator, *, horizon: int = 5, image_every: int = 0
) -> Episode:
    """Draw a successful episode, decided every `horizon` ticks; cameras are read each `image_every` ones, 0: never."""
    ticks = np.arange(0, length + 1, image_every) if image_every else np.empty(0, int)
    inside = ticks < length
    frames = {
        f"images/{c.name}": rng.integers(0, 256, (len(ticks), c.height, c.width, 3), np.uint8)
        for c in (spec.cameras if image_every else ())
    }
    steps = StepBlock(
        episode_id=name,
        first_tick=0,
        observation={"state": rng.normal(size=(length, spec.state_dim)).astype(np.float32)},
        action=rng.uniform(spec.action_low, spec.action_high, (length, spec.action_dim)).astype(np.float32),
        reward=np.zeros(length, np.float32),
        source=np.zeros(length, np.uint8),
        decision_tick=np.arange(length, dtype=np.int32) // horizon * horizon,
        policy_version=np.zeros(length, np.int64),
        policy_age=np.zeros(length, np.float32),
        stamp=np.arange(length) / spec.control_hz,
        lost_ticks=np.zeros(length, np.int32),
        sparse={key: SparseRows(ticks[inside].astype(np.int32), v[inside]) for key, v in frames.items()},
    )
    final = {"state": np.zeros(spec.state_dim, np.float32)} | {key: v[-1] for key, v in frames.items()}
    return Episode(Begin(name), steps, End(name, length, final, True, False, Outcome.SUCCESS, reward=1.0))
