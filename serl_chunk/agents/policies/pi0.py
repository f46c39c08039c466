"""pi0 as a chunk policy: openpi's model behind the interface of the others.

Inside, t = 1 is noise and chunks have the model's D numbers. Outside, t = 1 is the data and chunks have the robot's A;
noise has the model's D, because what fills up an action steers the rest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from serl_chunk.agents.compilation import Place
from serl_chunk.agents.perception import Perception
from serl_chunk.agents.policies.base import Record, observation_key
from serl_chunk.agents.policies.flow import SampledFlow
from serl_chunk.agents.spec import POLICY_FEATURES, FeatureSpec
from serl_chunk.agents.state import Committed, Context, Noise, Observation, Params, key_of
from serl_chunk.agents.vision import ObservationEmbedder
from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.agents.policy import TrainDelay
from serl_chunk.models.pi0 import augment, tree, weights
from serl_chunk.models.pi0.masks import IMAGE_MASK_PREFIX
from serl_chunk.models.pi0.pi0 import ROW_AXES, Pi0
from serl_chunk.models.sums import Sum
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, ChunkBatch, ConfigError

_NAME = "pi0"  # in an agent's policy, and in its base


class Pi0Policy(SampledFlow):
    """The parameters are the trained leaves of the model's tree; the others are the base's."""

    source_setting = "agent.pi0.weights"

    def __init__(self, config: Pi0Config, perception: Perception, train_delay: TrainDelay = "none") -> None:
        self.config, self.perception, self.steps = config, perception, config.steps
        self.train_delay, self.with_base = train_delay, self
        self.source = config.weights if config.trainable != "full" else ""
        spec = self.spec = perception.spec
        self.noise_shape = (spec.horizon, config.action_dim)
        if (config.state_dims or 0) > spec.state_dim:
            raise ConfigError(
                f"the robot's state has {spec.state_dim} numbers, got {config.state_dims}. Set that or fewer, or none",
                parameter="agent.pi0.state_dims",
            )
        # pi0.5's state is in its prompt.
        state_dim = 0 if config.pi05 else config.state_dims or spec.state_dim
        for what, size in (("actions", spec.action_dim), ("state", state_dim)):
            if size > config.action_dim:
                raise ConfigError(
                    f"the robot's {what} have {size} numbers, the model {config.action_dim}. Set "
                    f"agent.pi0.action_dim={size} for a model that begins with random numbers, or leave numbers out",
                    parameter="agent.pi0.action_dim",
                )
        self.model = Pi0(config)
        constant = config.trainable not in ("full", "lora")
        self.context_axes: Any = Context(0, ROW_AXES) if constant else None  # type: ignore[arg-type]
        # Whose features never change: those of a LoRA that is trained are left out.
        self.imported = Pi0(tree.without_lora(config)) if config.trainable == "lora" else self.model
        # Our cameras -> the model's.
        self.slots = dict(zip(perception.config.image_keys, config.cameras, strict=False))

    # -- parameters ------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> Params:
        """Fresh trained leaves."""
        return {_NAME: self._fresh(key, trained=True)}

    def _fresh(self, key: jax.Array, *, trained: bool) -> Params:
        leaves = tree.leaves(self.config).items()
        chosen = {path: leaf for path, leaf in leaves if tree.trains(self.config, path) == trained}
        return tree.nested({path: tree.initial_leaf(leaf, key) for path, leaf in chosen.items()})

    def base(self, key: jax.Array, place: Place = jnp.array) -> Params:
        """The leaves that are not trained."""
        if not self.source:
            return self.random(key)
        paths = [path for path in tree.leaves(self.config) if not tree.trains(self.config, path)]
        return {_NAME: tree.nested(weights.read(self.source, self.config, paths, place))}

    def random(self, key: jax.Array) -> Params:
        others = self._fresh(key, trained=False)
        return {_NAME: others} if others else {}

    def pretrained(self, policy: Params, place: Place = jnp.array) -> Params:
        if not self.config.weights:
            return policy
        fresh = tree.flat(policy[_NAME])
        read = weights.read(self.config.weights, self.config, fresh, place, missing_lora=True)
        return {_NAME: tree.nested(fresh | read)}

    def network(self, policy: Params, base: Params) -> Params:
        """The whole tree of the model's parameters."""
        return tree.nested(tree.flat(base.get(_NAME, {})) | tree.flat(policy.get(_NAME, {})))

    def augmented(self, key: jax.Array, base: Params, batch: ChunkBatch) -> ChunkBatch:
        """`batch` with images changed at random, each sample's alike, where the setting says so."""
        observation = batch.observations
        if not self.config.augment or not self.slots:
            return batch
        images = {slot: observation[IMAGE_PREFIX + name] for name, slot in self.slots.items()}
        changed = augment.augmented(images, augment.draws(key_of(key, "augment"), observation[STATE].shape[0]))
        shown = {IMAGE_PREFIX + name: changed[slot] for name, slot in self.slots.items()}
        return batch._replace(observations={**observation, **shown})

    # -- the policy ------------------------------------------------------------------------------------------

    def context(self, policy: Params, base: Params, observation: Observation, critic: Params | None = None) -> Context:
        """An observation as the model's first expert shows it."""
        prefix = self.model.encode(self.network(policy, base), self._seen(observation))
        return Context(prefix.features, prefix)

    def _seen(self, observation: Observation) -> dict[str, jax.Array]:
        seen = {STATE: observation[STATE][..., : self.config.state_dims]}
        if self.config.pi05:  # the state is in the prompt
            seen[STATE] = jnp.zeros_like(observation[STATE][..., :0])
        seen |= self.images(observation)
        return seen | {name: observation[name] for name in (PROMPT, PROMPT_MASK) if name in observation}

    # -- what a critic sees ----------------------------------------------------------------------------------

    def described(self, context: Context, base: Params, observation: Observation) -> Observation:
        """With the prefix's features: of the imported leaves, which no update changes."""
        if not self.perception.segments:
            return observation
        features = self.features(base, observation) if self.config.trainable == "lora" else self._cut(context.features)
        return {**observation, POLICY_FEATURES: features}

    def features(self, base: Params, observation: Observation) -> jax.Array:
        """The features float16[..., n, W] that no image is augmented for."""
        return self._cut(self.imported.encode(base[_NAME], self._seen(observation)).features)

    def _cut(self, features: jax.Array) -> jax.Array:
        shape = *features.shape[:-1], self.perception.segments, self.perception.segment_width
        return jax.lax.stop_gradient(features).astype(jnp.float16).reshape(shape)

    def embedder(self, base: Params) -> ObservationEmbedder | None:
        if not self.perception.segments:
            return None

        def embed(base: Params, entries: Observation) -> jax.Array:
            state = entries.get(STATE, jnp.zeros((len(next(iter(entries.values()))), 0), jnp.float32))
            return self.features(base, {STATE: state, **entries})

        perception = self.perception
        reads = [IMAGE_PREFIX + name for name in self.slots]
        reads += [PROMPT, PROMPT_MASK] if perception.config.language.reads else []
        reads += [STATE] if self.config.reads_bins else []  # its bins are in the prompt
        feature = FeatureSpec((perception.segments, perception.segment_width), tuple(reads))
        return ObservationEmbedder({POLICY_FEATURES: feature}, embed, base)

    # -- samples and losses ----------------------------------------------------------------------------------

    def images(self, observation: Observation) -> dict[str, jax.Array]:
        """Images by the model's names."""
        return {IMAGE_PREFIX + slot: observation[IMAGE_PREFIX + name] for name, slot in self.slots.items()}

    def draws(self, key: jax.Array, size: int) -> Noise:
        """ "x0" float32[B, *K, H, D], standard normal, "t" float32[B, *K], more often near the noise (openpi's Beta).

        K draws share an observation's prefix (`flow_draws`); for one there is no such axis. "delay" as a flow has it.
        """
        lead = (size,) if self.config.flow_draws == 1 else (size, self.config.flow_draws)
        noisy = jax.random.beta(key_of(key, "t"), 1.5, 1.0, lead) * 0.999 + 0.001
        draws = {"x0": jax.random.normal(key_of(key, "x0"), (*lead, *self.noise_shape)), "t": 1.0 - noisy}
        return draws | self.drawn_delay(key, size)

    def velocity(self, params: Params, context: Context, x: jax.Array, t: jax.Array, given: jax.Array) -> jax.Array:
        return -self.model.velocity(params, context.cache, x, 1.0 - t, given if self.sees_given else None)

    def advance(self, params: Params, context: Context, x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """By Euler's method."""
        v = -self.model.velocity(params, context.cache, x, 1.0 - step.astype(jnp.float32) / self.steps)
        return x + v / self.steps, v

    def recorded_chunk(self, record: Record) -> jax.Array:
        return record["sample"][..., : self.spec.action_dim]

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """Conditional flow matching of the robot's own numbers."""
        noise, t = draws["x0"], 1.0 - draws["t"]
        if t.ndim == 1:
            noise, t = noise[:, None], t[:, None]
        return self.model.flow_loss(params, context.cache, chunks, weight, given if self.sees_given else None, noise, t)

    def sample(self, params: Params, context: Context, noise: Noise, committed: Committed | None = None) -> jax.Array:
        fixed, missing = None, self.config.action_dim - self.spec.action_dim
        if committed is not None:
            actions = committed.actions
            fixed = jnp.pad(actions, [*[(0, 0)] * (actions.ndim - 1), (0, missing)]), committed.mask
        chunks = self.model.sample(params, context.cache, noise, fixed, self.steps, clean=self.sees_given)
        return chunks[..., : self.spec.action_dim]

    def candidate_noise(
        self, key: jax.Array, observation: Observation, count: int, *, explore: bool, alone: jax.Array | bool = False
    ) -> jax.Array:
        """Standard normal, float32[N, H, D]; not exploring, a function of the observation's state."""
        key = key if explore else observation_key(observation)
        return jax.random.normal(key, (count, self.spec.horizon, self.config.action_dim))


class PublishedPi0Policy(Pi0Policy):
    """pi0 in openpi's conventions (`--compat openpi`), to repeat its training and to compare with it.

    Cameras that a robot lacks are black and masked, which changes no velocity but by rounding. Every number of every
    step counts in the loss, which therefore differs.
    """

    def images(self, observation: Observation) -> dict[str, jax.Array]:
        """Images by the model's names, with a black one and a mask for each camera that the robot lacks."""
        lead, out = observation[STATE].shape[:-1], super().images(observation)
        for camera in self.config.cameras[len(self.slots) :]:
            out[IMAGE_PREFIX + camera] = jnp.zeros((*lead, *self.config.image_size, 3), jnp.uint8)
            out[IMAGE_MASK_PREFIX + camera] = jnp.zeros(lead, bool)
        return out

    def loss(
        self, params: Params, context: Context, chunks: jax.Array, weight: jax.Array, given: jax.Array, draws: Noise
    ) -> Sum:
        """Flow matching of all D numbers of the model, the zeros behind a robot's A too, in all steps of a window.

        That is, in those beyond an episode's end as well, where its last action is repeated. Windows without any
        weight are left out.
        """
        missing = self.config.action_dim - chunks.shape[-1]
        whole = jnp.pad(chunks, ((0, 0), (0, 0), (0, missing)))
        imitated = jnp.max(weight.reshape(len(weight), -1), axis=-1, keepdims=True) > 0
        every = jnp.broadcast_to(imitated, chunks.shape[:2]).astype(jnp.float32)
        return super().loss(params, context, whole, every, given, draws)
