"""The published code as a contestant. Runs in any interpreter that has what a checkout of it imports."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np

from support.reference_agents.batches import (
    ACTION,
    BATCH,
    HIDDEN,
    HORIZON,
    LAYERS,
    STATE,
    random_batch,
    random_observations,
    returns,
)
from support.reference_agents.stopwatch import Contestant

BATCHES = 4
# preset -> (module, class, options): the recipes of the repository's README
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qc-rlpd": ("agents.acrlpd", "ACRLPDAgent", {"bc_alpha": 0.01}),
    "qc-fql": ("agents.acfql", "ACFQLAgent", {"alpha": 100.0}),
    "qc": ("agents.acfql", "ACFQLAgent", {"actor_type": "best-of-n", "actor_num_samples": 32}),
}
OPTIONS = {"flow.steps": "flow_steps", "target_candidates": "actor_num_samples"}  # our names and theirs


class PublishedContestant(Contestant):
    """One jitted update a call, as its training loop does."""

    def open(
        self,
        preset: str,
        hidden: int = HIDDEN,
        layers: int = LAYERS,
        batch: int = BATCH,
        changes: dict[str, Any] | None = None,
    ) -> None:
        """Build the agent, and compile. `changes` as for the others."""
        module, name, options = RECIPES[preset]
        options = options | {theirs: changes[ours] for ours, theirs in OPTIONS.items() if changes and ours in changes}
        code: Any = importlib.import_module(module)
        config = code.get_config()
        config.update({**options, "horizon_length": HORIZON, "batch_size": batch})
        for key in ("actor_hidden_dims", "value_hidden_dims"):
            config[key] = (hidden,) * layers
        example = np.zeros((STATE,), np.float32), np.zeros((ACTION,), np.float32)
        self.agent = getattr(code, name).create(0, *example, config)
        self.batches = [_chunks(i, batch) for i in range(BATCHES)]
        self.observations = random_observations(64)
        self.compile()

    def _update(self, i: int) -> int:
        self.agent, info = self.agent.update(self.batches[i % BATCHES])
        jax.block_until_ready((self.agent.network.params, info))
        return 1

    def _decide(self, i: int) -> None:
        np.asarray(self.agent.sample_actions(self.observations[i % 64], rng=jax.random.PRNGKey(i)))


def _chunks(seed: int, size: int) -> dict[str, np.ndarray]:
    """A batch in the layout of its sampler; of next observations only the last is looked at."""
    b = random_batch(seed, size)
    return {
        "observations": b["observations"],
        "actions": b["actions"],
        "rewards": returns(b["rewards"]),
        "masks": np.repeat(b["mask"][:, None], HORIZON, axis=1),
        "valid": b["valid"],
        "next_observations": np.repeat(b["next_observations"][:, None], HORIZON, axis=1),
    }
