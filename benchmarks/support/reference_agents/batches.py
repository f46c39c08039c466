"""The published sizes, and random batches of them. Needs numpy only, in any interpreter."""

from __future__ import annotations

import numpy as np

STATE, ACTION, HORIZON = 28, 5, 5  # OGBench's cube, in chunks of five
BATCH, HIDDEN, LAYERS = 256, 512, 4
DISCOUNT = 0.99

Batch = dict[str, np.ndarray]


def random_batch(seed: int, size: int) -> Batch:
    """What an update is fed, float32: a twentieth of the windows ends in success, as many cross an end.

    observations [B, S], actions [B, H, A], rewards [B, H] (per step), valid [B, H], mask [B], next_observations [B, S].
    """
    rng = np.random.default_rng(seed)
    valid = np.ones((size, HORIZON), np.float32)
    valid[: size // 20, 2:] = 0
    mask = np.ones(size, np.float32)
    mask[size // 20 : size // 10] = 0
    return {
        "observations": rng.normal(size=(size, STATE)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (size, HORIZON, ACTION)).astype(np.float32),
        "rewards": -rng.integers(0, 2, (size, HORIZON)).astype(np.float32),
        "valid": valid,
        "mask": mask,
        "next_observations": rng.normal(size=(size, STATE)).astype(np.float32),
    }


def random_draws(seed: int, size: int, candidates: int) -> Batch:
    """An update's random numbers under the names of our agents' draws, float32: `t` is uniform, the rest normal."""
    rng = np.random.default_rng(seed)
    shapes = {"next": (size, candidates, HORIZON * ACTION)} | {
        k: (size, HORIZON * ACTION) for k in ("x0", "distill", "pi")
    }
    draws = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    return draws | {"t": rng.uniform(size=size).astype(np.float32)}


def random_observations(count: int) -> np.ndarray:
    """float32[count, S]."""
    return np.random.default_rng(1).normal(size=(count, STATE)).astype(np.float32)


def returns(rewards: np.ndarray) -> np.ndarray:
    """Discounted sums of the rewards up to each step, float32[B, H]: what the published sampler hands over."""
    return np.cumsum(rewards * DISCOUNT ** np.arange(HORIZON), axis=1).astype(np.float32)
