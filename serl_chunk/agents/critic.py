"""The chunk critic that agents share: an observation encoder, an ensemble of Q heads and, for some, a value head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.base import Metrics, Params
from serl_chunk.agents.losses import aggregate_heads, critic_values
from serl_chunk.agents.registry import AgentSpec
from serl_chunk.config.agents import AgentConfig
from serl_chunk.models.encoder import ObservationEncoder
from serl_chunk.models.mlp import CriticEnsemble, Mlp


def observation_encoder(config: AgentConfig) -> ObservationEncoder:
    """The encoder module that `config` describes; each of an agent's networks has parameters of its own."""
    return ObservationEncoder(config.image_keys, config.use_state, config.encoder.features, config.encoder.latent)


class ChunkCritic:
    """Q_k(o, chunk) for k < K, and V(o) where `with_value`. Parameters: {"encoder", "q"} and {"v"}."""

    def __init__(self, config: AgentConfig, spec: AgentSpec, *, with_value: bool) -> None:
        self.config = c = config.critic
        self.choose_by = config.choose_by
        self.spec = spec
        self.encoder: Any = observation_encoder(config)
        bias = c.initial_logit if c.loss == "bounded" else 0.0
        layers: dict[str, Any] = {
            "norm": c.layer_norm,
            "out_bias": bias,
            "activation": c.activation,
            "kernel_init": config.kernel_init,
        }
        self.q: Any = CriticEnsemble(c.hidden, c.ensemble, **layers)
        self.subset: Any = CriticEnsemble(c.hidden, c.target_subset, **layers)
        self.v: Any = Mlp(c.hidden, 1, **layers) if with_value else None

    def init(self, key: jax.Array, observation: Mapping[str, jax.Array]) -> Params:
        """Fresh parameters, for a batch of observations."""
        k_encoder, k_q, k_v = jax.random.split(key, 3)
        encoder = self.encoder.init(k_encoder, observation).get("params", {})
        features = self.encoder.apply({"params": encoder}, observation)
        chunk = jnp.zeros((*features.shape[:-1], self.spec.critic_steps * self.spec.action_dim), jnp.float32)
        params = {"encoder": encoder, "q": self.q.init(k_q, features, chunk)["params"]}
        if self.v is not None:
            params["v"] = self.v.init(k_v, features)["params"]
        return params

    def features(self, params: Params, observation: Mapping[str, jax.Array]) -> jax.Array:
        """Observation features float32[..., F]."""
        return self.encoder.apply({"params": params.get("encoder", {})}, observation)

    def outputs(self, params: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        """Raw outputs of the Q heads float32[K, ...] for flat chunks."""
        return self.q.apply({"params": params["q"]}, features, chunk)

    def values(self, params: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        """Q_k float32[K, ...]."""
        return critic_values(self.outputs(params, features, chunk), self.config.loss)

    def mean_value(self, params: Params, features: jax.Array, chunk: jax.Array) -> jax.Array:
        """The mean over heads: what policies climb, float32[...]."""
        return jnp.mean(self.values(params, features, chunk), axis=0)

    def candidate_values(self, params: Params, observation: Mapping[str, jax.Array], chunks: jax.Array) -> jax.Array:
        """What candidates are chosen by, float32[..., N], for flat chunks float32[..., N, Hc*A] of one observation.

        One call for all of them, the observation encoded once.
        """
        features = self.features(params, observation)
        features = jnp.broadcast_to(features[..., None, :], (*chunks.shape[:-1], features.shape[-1]))
        return aggregate_heads(self.values(params, features, chunks), self.choose_by)

    def value_output(self, params: Params, features: jax.Array) -> jax.Array:
        """Raw output of the value head float32[...]."""
        assert self.v is not None
        return self.v.apply({"params": params["v"]}, features)[..., 0]

    def head_draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """The random subset of target heads (REDQ) as draws: "heads" int32[subset], or nothing where all count."""
        if self.config.target_subset == self.config.ensemble:
            return {}
        return {"heads": jax.random.choice(key, self.config.ensemble, (self.config.target_subset,), replace=False)}

    def target_values(
        self, target: Params, draws: Mapping[str, jax.Array], features: jax.Array, chunk: jax.Array
    ) -> jax.Array:
        """Aggregate of the drawn target heads, float32[...]; the others are not evaluated."""
        if "heads" in draws:
            drawn = jax.tree.map(lambda p: p[draws["heads"]], target["q"])
            values = critic_values(self.subset.apply({"params": drawn}, features, chunk), self.config.loss)
        else:
            values = self.values(target, features, chunk)
        return aggregate_heads(values, self.config.target_aggregate)

    def metrics(self, loss: jax.Array, values: jax.Array, target: jax.Array, rewards: jax.Array) -> Metrics:
        """HIL-SERL's critic metrics, and the ensemble's spread."""
        return {
            "critic/critic_loss": loss,
            "critic/predicted_qs": jnp.mean(values),
            "critic/target_qs": jnp.mean(target),
            "critic/rewards": jnp.mean(jnp.sum(rewards, -1)),
            "critic/head_std": jnp.mean(jnp.std(values, axis=0)),
        }
