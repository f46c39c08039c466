"""The tanh-squashed Gaussian chunk policy that acrlpd and bc share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.encoded import EncodedPolicy
from serl_chunk.agents.losses import imitation_mean
from serl_chunk.agents.spec import AgentSpec
from serl_chunk.agents.state import Observation, Params
from serl_chunk.config.agents import AcrlpdConfig, BcConfig
from serl_chunk.models.distributions import EDGE, TanhNormal
from serl_chunk.models.mlp import Mlp
from serl_chunk.types import ChunkBatch

_LOG_STD_MAX = 2.0


class GaussianPolicy(EncodedPolicy):
    """TanhNormal over flat chunks. Parameters: {"encoder", "net"}; the net's outputs are means, then log sigmas."""

    def __init__(self, config: AcrlpdConfig | BcConfig, spec: AgentSpec) -> None:
        super().__init__(config)
        self.config, self.spec = config, spec
        layer_norm, self.log_std_min, self.bc_clip = True, -10.0, EDGE
        if isinstance(config, AcrlpdConfig):
            layer_norm, self.log_std_min, self.bc_clip = config.policy_layer_norm, config.log_std_min, config.bc_clip
        self.net: Any = Mlp(
            config.hidden,
            2 * spec.horizon * spec.action_dim,
            norm="before" if layer_norm else "none",
            kernel_init=config.kernel_init,
            # Published code has one layer for means and one for log sigmas, which matters for xavier's fan-out.
            out_blocks=1 if config.kernel_init == "lecun_normal" else 2,
        )

    def init(self, key: jax.Array, observation: Observation) -> Params:
        k_encoder, k_net = jax.random.split(key)
        return self.init_from(k_encoder, k_net, observation)

    def init_from(self, k_encoder: jax.Array, k_net: jax.Array, observation: Observation) -> Params:
        encoder, features = self.init_encoder(k_encoder, observation)
        return encoder | {"net": self.net.init(k_net, features)["params"]}

    def distribution(self, params: Params, observation: Observation) -> TanhNormal:
        """The TanhNormal over flat chunks float32[..., H*A]."""
        outputs = self.net.apply({"params": params["net"]}, self.features(params, observation))
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return TanhNormal(mean, jnp.clip(log_std, self.log_std_min, _LOG_STD_MAX))

    def chunks(self, flat: jax.Array) -> jax.Array:
        """float32[..., H*A] as float32[..., H, A]."""
        return flat.reshape(*flat.shape[:-1], self.spec.horizon, self.spec.action_dim)

    def imitation(self, dist: TanhNormal, batch: ChunkBatch, bc: jax.Array) -> jax.Array:
        """Mean over the steps that `bc` float32[B, H] marks of -log pi(a | o) per dimension."""
        flat = batch.actions.reshape(batch.actions.shape[0], -1)
        return -imitation_mean(self.chunks(dist.log_prob(flat, self.bc_clip)), bc, self.config.bc_mean)
