"""What an agent sees: an encoder's contexts, and a frozen backbone's features."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.spec import GRIPPER, POLICY_FEATURES, AgentSpec, FeatureSpec
from serl_chunk.agents.state import Context, Observation, Params, key_of
from serl_chunk.agents.vision import ObservationEmbedder, Vision
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.models.encoder import ObservationEncoder, random_shift
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, ChunkBatch

_SEGMENT = 128  # numbers of a policy's feature in a critic, at most


class Perception:
    """The encoder of an agent, whose parameters each network has or shares."""

    def __init__(self, config: AgentConfig, spec: AgentSpec) -> None:
        self.config, self.spec = config, spec
        self.segments, self.segment_width = config.policy_segments
        by_pixels, language = config.seen_by_critic == "pixels", config.language
        self.encoder: Any = ObservationEncoder(
            config.image_keys if by_pixels else (), config.use_state, config.encoder,
            language if by_pixels and config.as_pi0 is None else LanguageConfig(),
            segments=min(_SEGMENT, self.segment_width // 2) if self.segments else 0,
        )  # fmt: skip
        self.vision = Vision(config, spec.cameras)

    @property
    def shares_encoder(self) -> bool:
        """Whether the policy reads the acting critic's encoder, which it does not train."""
        return self.config.encoder.trained_by == "critic"

    def init_encoder(self, key: jax.Array) -> tuple[Params, jax.Array]:
        """Fresh parameters of one encoder, and the features float32[1, F] of `seen_example`."""
        encoder = self.encoder.init(key, self.seen_example()).get("params", {})
        return encoder, self.encode(encoder, {}, self.seen_example()).features

    def encode(self, encoder: Params, base: Params, observation: Observation) -> Context:
        """Observations as one encoder shows them; features that they bring are taken as they are."""
        seen = self.vision.encode_images(base, observation)
        return Context(self.encoder.apply({"params": encoder}, seen))

    def policy_context(self, policy: Params, critic: Params, base: Params, observation: Observation) -> Context:
        """As a network of the policy sees it: by its own encoder, or as a constant by that of `critic`."""
        if self.shares_encoder:
            return jax.lax.stop_gradient(self.encode(critic.get("encoder", {}), base, observation))
        return self.encode(policy.get("encoder", {}), base, observation)

    def critic_context(self, critic: Params, base: Params, observation: Observation) -> Context:
        """As the critic sees it: followed by a discrete gripper's choice where there is one."""
        context = self.encode(critic.get("encoder", {}), base, observation)
        if not self.spec.gripper_inputs:
            return context
        return context._replace(features=jnp.concatenate([context.features, observation[GRIPPER]], axis=-1))

    def shifted(self, key: jax.Array, base: Params, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with both observations shifted at random, each by its own offsets (DrQ), and the base's features."""
        both, pixels = [batch.observations, batch.next_observations], self.config.encoder.shift
        if self.config.image_keys and pixels:
            keys = jax.random.split(key_of(key, "shift"))
            both = [random_shift(key, o, pixels) if o else o for key, o in zip(keys, both, strict=True)]
        now, later = (self.vision.encode_images(base, o) for o in both)
        return batch._replace(observations=now, next_observations=later)

    def seen_example(self) -> dict[str, jax.Array]:
        """A batch of one observation as networks read it, all zeros."""
        out: dict[str, jax.Array] = {STATE: jnp.zeros((1, self.spec.state_dim), jnp.float32)}
        if self.spec.gripper_inputs:
            out[GRIPPER] = jnp.zeros((1, self.spec.gripper_inputs), jnp.float32)
        for c in self.spec.cameras:
            if self.vision.frozen:
                out[FEATURE_PREFIX + c.name] = jnp.zeros((1, *self.vision.feature_shape(c)), jnp.float16)
            else:
                out[IMAGE_PREFIX + c.name] = jnp.zeros((1, c.height, c.width, 3), jnp.uint8)
        if self.segments:
            out[POLICY_FEATURES] = jnp.zeros((1, self.segments, self.segment_width), jnp.float16)
        if self.config.language.reads:
            out[PROMPT] = jnp.zeros((1, self.config.language.length), jnp.int32)
            out[PROMPT_MASK] = jnp.zeros((1, self.config.language.length), jnp.bool_)
        return out

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        """Computes features of stored observations for `encoder.cache_features`; None where it is off."""
        if not (self.config.encoder.cache_features and self.vision.frozen):
            return None
        embed = lambda base, entries: self.vision.embed(base, *entries.values())  # noqa: E731  of one camera
        shapes = {c.name: self.vision.feature_shape(c) for c in self.spec.cameras}
        features = {FEATURE_PREFIX + c: FeatureSpec(shape, (IMAGE_PREFIX + c,)) for c, shape in shapes.items()}
        return ObservationEmbedder(features, embed, base)
