"""Networks that read an observation through an encoder of their own, or through the critic's."""

from __future__ import annotations

from typing import Any

import jax

from serl_chunk.agents.state import Observation, Params
from serl_chunk.config.agents import AgentConfig
from serl_chunk.models.encoder import ObservationEncoder


class Encoded:
    """Base of critics and policies. Without an `own` encoder the critic's is put in (`Agent.with_encoder`)."""

    def __init__(self, config: AgentConfig, *, own: bool = True) -> None:
        self._own = own
        self.encoder: Any = ObservationEncoder(config.image_keys, config.use_state, config.encoder)

    def init_encoder(self, key: jax.Array, observation: Observation) -> tuple[Params, jax.Array]:
        """Fresh parameters, {"encoder"} or nothing, and the features float32[B, F] of a batch of observations."""
        encoder = {"encoder": self.encoder.init(key, observation).get("params", {})}
        return encoder if self._own else {}, self.features(encoder, observation)

    def features(self, params: Params, observation: Observation) -> jax.Array:
        return self.encoder.apply({"params": params.get("encoder", {})}, observation)
