"""The matrix products of one update and nothing else: what no implementation of the same equations can be faster than.

No activation, no normalisation, no loss, no optimiser, no averages. The passes are counted in `PASSES` from
plain/agents.py; every product has the shape that it has there, but rows beyond a batch (candidates) come in blocks.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plain.agents import DIM
from plain.batches import BATCH, HIDDEN, STATE
from plain.contestants import experiment_agent, plain_setting
from plain.stopwatch import Stopwatch, peak_megabytes

BLOCK = 512  # rows of candidates at a time: activations stay in the cache


class Passes(NamedTuple):
    """How often an update goes through networks of one kind; rows are those of a batch unless `wide`."""

    forward: int
    backward: int = 0  # to the weights, and to all layers' inputs but the first one's
    through: int = 0  # to the inputs alone: of a policy's loss through a critic
    wide: int = 0  # forward, for every candidate


def passes(preset: str, heads: int, steps: int) -> dict[str, Passes]:
    """Of the critic (every head counts), and of the policy's networks together."""
    if preset == "qc-rlpd":  # target and regression and the policy's Q; the policy there and in its own loss
        return {"critic": Passes(3 * heads, heads, heads), "policy": Passes(2, 1)}
    if preset == "qc-fql":  # imitation, the one-step policy twice, and the flow that it follows
        return {"critic": Passes(3 * heads, heads, heads), "policy": Passes(3 + steps, 2)}
    return {"critic": Passes(2 * heads, heads, wide=heads), "policy": Passes(1, 1, wide=steps)}


class ProductsContestant:
    """Takes the turns of an update."""

    def open(
        self, preset: str, hidden: int = HIDDEN, batch: int = BATCH, changes: dict[str, Any] | None = None
    ) -> None:
        """Make the matrices, and compile."""
        setting = plain_setting(preset, experiment_agent(preset, hidden, **(changes or {})))
        time = 0 if preset == "qc-rlpd" else 1
        widths = {
            "critic": (STATE + DIM, *setting.hidden, 1),
            "policy": (STATE + time * (DIM + 1), *setting.hidden, DIM),
        }
        rng = np.random.default_rng(0)
        rows = batch * setting.candidates
        block = min(BLOCK, rows)

        def matrix(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[-1]))

        self.weights = {k: [matrix(i, o) for i, o in itertools.pairwise(w)] for k, w in widths.items()}
        self.inputs = {k: matrix(batch, w[0]) for k, w in widths.items()}
        self.blocks = {k: matrix(rows // block, block, w[0]) for k, w in widths.items()}
        self.run = jax.jit(partial(_update, passes(preset, setting.heads, setting.steps)))

        def once(i: int) -> int:
            jax.block_until_ready(self.run(self.weights, self.inputs, self.blocks))
            return 1

        self.watch = Stopwatch(once, lambda i: None)

    def updates(self, seconds: float) -> dict[str, list[float]]:
        return self.watch.updates(seconds)

    def memory(self) -> float:
        return peak_megabytes()


def _update(count: dict[str, Passes], weights: Any, inputs: Any, blocks: Any) -> jax.Array:
    return sum((_network(weights[k], inputs[k], blocks[k], passed) for k, passed in count.items()), jnp.zeros(()))


def _network(weights: list[jax.Array], x: jax.Array, blocks: jax.Array, count: Passes) -> jax.Array:
    """A number that needs every product; each pass begins with what the last one gave, so that none is left out."""
    total = jnp.zeros(())
    for i in range(max(count.forward, count.backward, count.through)):
        layers = [x + total]
        if i < count.forward:
            for w in weights:
                layers.append(layers[-1] @ w)
            total = _little(layers[-1])
        else:
            layers += [jnp.broadcast_to(total, (len(x), w.shape[1])) for w in weights]
        for full in (f for f, n in ((True, count.backward), (False, count.through)) if i < n):
            error = layers[-1] + total
            for k in reversed(range(len(weights))):
                if full:
                    total += _little(layers[k].T @ error)
                if k or not full:
                    error = error @ weights[k].T
            total += _little(error)
    for _ in range(count.wide):

        def one(block: jax.Array) -> jax.Array:
            for w in weights:
                block = block @ w
            return _little(block)

        total += jax.lax.map(one, blocks + total).sum()
    return total


def _little(x: jax.Array) -> jax.Array:
    return 1e-6 * x.mean()
