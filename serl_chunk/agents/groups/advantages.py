"""Advantages of episodes and weights of their decisions, for a whole iteration; and the baselines that a run learns.

A learned baseline has a tree of numbers in `AgentState.critic`. It is used on an iteration's outcomes, then fitted to
them: `used` returns the tree and its optimiser's state afterwards, and the advantages float32[E].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serl_chunk.agents.groups.rows import Episodes
from serl_chunk.agents.optimiser import adam, descend
from serl_chunk.agents.state import Params
from serl_chunk.config.agents.base import Optimiser
from serl_chunk.models.mlp import Mlp

Used = tuple[Params, Any, np.ndarray]
_MEMORY = 0.5  # weight that the mean's earlier outcomes keep from one iteration to the next
_FIT_STEPS, _FIT_RATE = 100, 1e-3  # gradient steps of an iteration


def leave_one_out(episodes: Episodes) -> np.ndarray:
    """R_i less the mean of the other K - 1 of its group, float32[E] (RLOO, Kool 2019; RIPT-VLA). K is 2 or more."""
    _, group, size = np.unique(episodes.group, return_inverse=True, return_counts=True)
    total = np.bincount(group, episodes.reward)[group]
    others = (total - episodes.reward) / (size[group] - 1)
    return (episodes.reward - others).astype(np.float32)


def decision_weights(episodes: Episodes, weigh: str) -> np.ndarray:
    """float32[n]: 1, or with `weigh` "episode" 1 / n_i of an episode's n_i decisions."""
    each = np.ones(len(episodes.reward)) if weigh == "decision" else 1 / episodes.decisions
    return each[episodes.of_rows].astype(np.float32)


class RunningMean:
    """The mean of earlier iterations' outcomes; in the first one that of its own."""

    def init(self, key: jax.Array, features: jax.Array) -> tuple[Params, Any]:
        return {"total": jnp.zeros(()), "weight": jnp.zeros(())}, {}

    def used(self, critic: Params, opt: Any, features: np.ndarray, reward: np.ndarray) -> Used:
        total, weight = float(critic["total"]), float(critic["weight"])
        mean = total / weight if weight else reward.mean()
        after = {"total": _MEMORY * total + reward.sum(), "weight": _MEMORY * weight + len(reward)}
        return jax.tree.map(jnp.float32, after), opt, (reward - mean).astype(np.float32)


class FirstValue:
    """A small net that predicts an episode's outcome from the features of its first observation."""

    def __init__(self) -> None:
        self._net: Any = Mlp((64, 64), 1, "before")
        self._optimiser = adam(Optimiser(_FIT_RATE, _FIT_RATE))
        self._predict = jax.jit(self._values)
        self._fit = jax.jit(self._fitted)

    def init(self, key: jax.Array, features: jax.Array) -> tuple[Params, Any]:
        params = self._net.init(key, features)["params"]
        return params, self._optimiser.init(params)

    def used(self, critic: Params, opt: Any, features: np.ndarray, reward: np.ndarray) -> Used:
        """Features float32[E', F] of the E episodes, E' at least E: rows after them count for nothing."""
        value = np.asarray(self._predict(critic, features))[: len(reward)]
        padding = 0, len(features) - len(reward)
        filled, weight = (np.pad(of.astype(np.float32), padding) for of in (reward, np.ones(len(reward))))
        after, opt = self._fit(critic, opt, features, filled, weight)
        return after, opt, reward - value

    def _values(self, params: Params, features: jax.Array) -> jax.Array:
        return self._net.apply({"params": params}, features)[..., 0]

    def _fitted(
        self, params: Params, opt: Any, features: jax.Array, reward: jax.Array, weight: jax.Array
    ) -> tuple[Params, Any]:
        def loss(p: Params) -> jax.Array:
            return jnp.sum(weight * (self._values(p, features) - reward) ** 2) / jnp.sum(weight)

        def step(carry: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], None]:
            return descend(self._optimiser, jax.grad(loss)(carry[0]), carry[1], carry[0]), None

        return jax.lax.scan(step, (params, opt), length=_FIT_STEPS)[0]


BASELINES: dict[str, type[RunningMean] | type[FirstValue]] = {"mean": RunningMean, "value": FirstValue}
