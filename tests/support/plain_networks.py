"""The networks of agents in numpy, for losses by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _normed(x: np.ndarray, leaf: Any) -> np.ndarray:
    centred, scale, bias = x - x.mean(-1, keepdims=True), np.asarray(leaf["scale"]), np.asarray(leaf["bias"])
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def mlp(params: Any, *inputs: Any, norm: str = "none", activation: Any = lambda x: np.maximum(x, 0)) -> np.ndarray:
    """Outputs [..., out] of joined inputs."""
    x, count = np.concatenate(inputs, axis=-1), sum(name.startswith("Dense") for name in params)
    for i in range(count):
        x = x @ np.asarray(params[f"Dense_{i}"]["kernel"]) + np.asarray(params[f"Dense_{i}"]["bias"])
        if i < count - 1:
            x = _normed(x, params[f"LayerNorm_{i}"]) if norm == "before" else x
            x = activation(x)
            x = _normed(x, params[f"LayerNorm_{i}"]) if norm == "after" else x
    return x


def heads(q: Any, *inputs: Any, **layers: Any) -> np.ndarray:
    """Raw outputs [K, ...] of an ensemble."""

    (stacked,) = q.values()
    count = len(stacked["Dense_0"]["bias"])
    each = (jax.tree.map(lambda leaf, k=k: np.asarray(leaf)[k], stacked) for k in range(count))
    return np.stack([mlp(head, *inputs, **{"norm": "before", **layers})[..., 0] for head in each])


def tanh_normal(net: Any, features: np.ndarray, norm: str = "before") -> tuple[np.ndarray, np.ndarray]:
    """Means and deviations of a Gaussian policy before the squashing."""
    mean, log_std = np.split(mlp(net, features, norm=norm), 2, axis=-1)
    return mean, np.exp(np.clip(log_std, -10, 2))


def log_density(mean: np.ndarray, std: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Of tanh(u) by number: change of variables from the normal density of u."""
    normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return normal - np.log1p(-(np.tanh(u.astype(np.float64)) ** 2))
