"""pi0 and pi0.5: the prefix of an observation, velocities of noisy chunks behind it, samples, and the loss.

Time and noise are openpi's: t = 1 is noise, t = 0 the chunk. D is the model's `action_dim`. Of data, the numbers behind
a robot's own are 0; noise has all D.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.models.convolutions import map_blocks
from serl_chunk.models.pi0 import gemma, masks, siglip
from serl_chunk.models.pi0.masks import IMAGE_MASK_PREFIX
from serl_chunk.models.pi0.tree import Params
from serl_chunk.models.sums import Sum
from serl_chunk.types import IMAGE_PREFIX, PROMPT, PROMPT_MASK, STATE, ConfigError

_FASTEST, _SLOWEST = 4e-3, 4.0  # periods of the time's features

Observation = Mapping[str, jax.Array]


class Prefix(NamedTuple):
    """One observation, or a batch `...` of them, as the first expert shows it. L layers, S tokens."""

    keys: jax.Array  # [L, ..., S, K, h], rotated
    values: jax.Array  # [L, ..., S, K, h]
    mask: jax.Array  # bool[..., S]: which tokens are real
    positions: jax.Array  # int32[..., S]
    state: jax.Array  # float32[..., D]
    features: jax.Array  # float32[..., F]: what critics read


ROW_AXES = Prefix(1, 1, 0, 0, 0, 0)  # type: ignore[arg-type]  # of a batch


class Suffix(NamedTuple):
    """The second expert's input for N chunks of each of B observations."""

    tokens: jax.Array  # [B, N, T, W]
    opens: jax.Array  # bool[T]: the first token of each group, see `masks.attention_mask`
    cond: jax.Array | None  # [B, N, 1 or H, W], of adaptive norms


def time_features(t: jax.Array, width: int) -> jax.Array:
    """Return sines, then cosines, of width / 2 frequencies each, of t float32[...]: float32[..., width]."""
    period = _FASTEST * (_SLOWEST / _FASTEST) ** jnp.linspace(0.0, 1.0, width // 2)
    # The fastest angle is 1571 t, so that another order of these products moves sines by 1e-4. Without the barrier a
    # compiler reorders them where t is one number.
    angle = t[..., None] * jax.lax.optimization_barrier(1.0 / period * 2 * jnp.pi)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def interpolate(noise: jax.Array, t: jax.Array, actions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return points x_t of the straight paths from `actions` to `noise`, float32[..., H, D], and their velocities."""
    t = t[..., None, None]
    return t * noise + (1 - t) * actions, noise - actions


@dataclasses.dataclass(frozen=True)
class Pi0:
    """Pure functions of parameters and data, for one configuration.

    `unroll`: writes layers and steps one after the other, so that a compiler counts each.
    """

    config: Pi0Config
    unroll: bool = False

    def encode(self, params: Params, observation: Observation) -> Prefix:
        """Read an observation.

        `observation`: `state` float32[..., up to D]; `images/<camera>` [..., H, W, 3], uint8 or float32 in [-1, 1], of
        those of the configuration's cameras that there are; `image_masks/<camera>` bool[...], absent where all images
        are real; `prompt` int32[..., P] and `prompt_mask` bool[..., P], or neither.
        """
        lead = observation[STATE].shape[:-1]
        rows = math.prod(lead)  # a state may have no numbers
        flat = {k: x.reshape(rows, *x.shape[len(lead) :]) for k, x in observation.items()}
        tokens, mask = self.prefix_tokens(params, flat)
        positions = masks.positions(mask)
        seen = masks.attention_mask(mask, jnp.zeros(mask.shape[-1], bool))
        read = gemma.read(self.config, params["PaliGemma"]["llm"], tokens, seen, positions, self.unroll)
        features = self._features(flat, read.entering, mask)
        stacked = (x.reshape(x.shape[0], *lead, *x.shape[2:]) for x in (read.keys, read.values))
        others = (x.reshape(*lead, *x.shape[1:]) for x in (mask, positions, self._state(flat[STATE]), features))
        return Prefix(*stacked, *others)

    def prefix_tokens(self, params: Params, observation: Observation) -> tuple[jax.Array, jax.Array]:
        """Return the tokens [B, S, D] of each camera and of the prompt, and which are real, bool[B, S]."""
        cameras, batch = self.cameras(observation), observation[STATE].shape[0]
        if not cameras and PROMPT not in observation:
            wanted = ", ".join(self.config.cameras)
            raise ConfigError(f"the observation has none of the cameras {wanted}, and no prompt. Give one of them.")
        tokens, real = [], []
        if cameras:  # all in one batch
            images = jnp.concatenate([self._image(observation, camera) for camera in cameras])
            made = siglip.stages(self.config, params["PaliGemma"]["img"], images, self.unroll).tokens
            tokens += jnp.split(made, len(cameras))
        for camera in cameras:
            given = observation.get(IMAGE_MASK_PREFIX + camera, jnp.ones(batch, bool))
            real.append(jnp.broadcast_to(given[:, None], (batch, self.config.camera_tokens)))
        if PROMPT in observation:
            tokens.append(gemma.embedded(params["PaliGemma"]["llm"], observation[PROMPT]).astype(self.config.dtype))
            real.append(observation[PROMPT_MASK])
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(real, axis=1)

    def cameras(self, observation: Observation) -> list[str]:
        """Return the cameras that an observation has, in the order of their tokens."""
        return [camera for camera in self.config.cameras if IMAGE_PREFIX + camera in observation]

    def _image(self, observation: Observation, camera: str) -> jax.Array:
        image, size = observation[IMAGE_PREFIX + camera], self.config.image_size
        if image.shape[1:3] != size:
            found = "x".join(map(str, image.shape[1:3]))
            raise ConfigError(
                f"{IMAGE_PREFIX}{camera} is {found} pixels, the model reads {size[0]}x{size[1]} (height, width). "
                "Letterbox frames to that size, or set agent.pi0.image_size",
                parameter="agent.pi0.image_size",
            )
        return image.astype(jnp.float32) / 255.0 * 2.0 - 1.0 if image.dtype == jnp.uint8 else image

    def _state(self, state: jax.Array) -> jax.Array:
        missing = self.config.action_dim - state.shape[-1]
        if missing < 0:
            raise ConfigError(
                f"the state has {state.shape[-1]} numbers, more than agent.pi0.action_dim={self.config.action_dim}. "
                "Raise it, or leave numbers out",
                parameter="agent.pi0.action_dim",
            )
        return jnp.pad(state.astype(jnp.float32), ((0, 0), (0, missing)))

    def _features(self, observation: Observation, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Return means of the residual stream before the last layer, each token divided by its root mean square.

        Of each camera over `feature_grid` x `feature_grid` fields, 0 where it is masked; of the prompt over its tokens.
        """
        c, batch = self.config, x.shape[0]
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * mask[..., None]
        (rows, columns), grid, parts = c.token_grid, c.feature_grid, []
        for i in range(len(self.cameras(observation))):
            own = x[:, i * c.camera_tokens : (i + 1) * c.camera_tokens]
            fields = own.reshape(batch, grid, rows // grid, grid, columns // grid, -1)
            parts.append(jnp.mean(fields, axis=(2, 4)).reshape(batch, -1))
        if PROMPT in observation:
            first = x.shape[1] - observation[PROMPT].shape[-1]
            count = jnp.sum(mask[:, first:], axis=-1, keepdims=True)
            parts.append(jnp.sum(x[:, first:], axis=1) / jnp.maximum(count, 1))
        return jnp.concatenate(parts, axis=-1)

    def velocity(
        self, params: Params, prefix: Prefix, x: jax.Array, t: jax.Array, given: jax.Array | None = None
    ) -> jax.Array:
        """Return d x / d t at noisy chunks: [..., *N, H, D].

        Args:
            x: float32[..., *N, H, D], any axes behind those of the prefix.
            t: float32[..., *N].
            given: bool or float32[..., *N, H]: where 1, the action in x is final, as if at t = 0. None: nowhere, as
                for a model that was not trained so.
        """
        lead = prefix.state.shape[:-1]
        rows, n = math.prod(lead), math.prod(x.shape[len(lead) : -2])
        when = t if given is None else jnp.where(given > 0, 0.0, t[..., None])
        flat = _flattened(prefix, len(lead))
        when = when.reshape(rows, n, *when.shape[x.ndim - 2 :])
        out = self.suffix_output(params, flat, self.suffix(params, flat.state, x.reshape(rows, n, *x.shape[-2:]), when))
        return linear(params["action_out_proj"], out[:, :, -x.shape[-2] :]).reshape(x.shape)

    def suffix(self, params: Params, state: jax.Array, x: jax.Array, t: jax.Array) -> Suffix:
        """Return the suffix of states [B, D] and chunks [B, N, H, D] at t float32[B, N], or [B, N, H] by action."""
        horizon, width = x.shape[-2], self.config.expert.width
        actions = linear(params["action_in_proj"], x)
        time = time_features(t if t.ndim == 3 else t[..., None], width)
        if self.config.pi05:
            cond = jax.nn.swish(linear(params["time_mlp_in"], time))
            cond = jax.nn.swish(linear(params["time_mlp_out"], cond))
            return Suffix(actions, masks.suffix_opens(horizon, state=False), cond)
        both = jnp.concatenate([actions, jnp.broadcast_to(time, (*x.shape[:-1], width))], axis=-1)
        hidden = jax.nn.swish(linear(params["action_time_mlp_in"], both))
        tokens = linear(params["action_time_mlp_out"], hidden)
        first = linear(params["state_proj"], state)[:, None, None, :]
        first = jnp.broadcast_to(first, (*tokens.shape[:2], 1, width))
        return Suffix(jnp.concatenate([first, tokens], axis=2), masks.suffix_opens(horizon, state=True), None)

    def suffix_output(self, params: Params, prefix: Prefix, suffix: Suffix) -> jax.Array:
        """Return the second expert's normalised output, [B, N, T, W], behind a prefix with one batch axis."""
        length = suffix.tokens.shape[2]
        own = masks.attention_mask(jnp.ones(length, bool), suffix.opens)
        positions = prefix.positions[:, -1:] + 1 + jnp.arange(length)
        source = gemma.Source(prefix.keys, prefix.values, prefix.mask[:, None, None, :])
        llm = params["PaliGemma"]["llm"]
        return gemma.continued(self.config, llm, suffix.tokens, own, source, positions, suffix.cond, self.unroll)

    def sample(
        self,
        params: Params,
        prefix: Prefix,
        noise: jax.Array,
        committed: tuple[jax.Array, jax.Array] | None = None,
        steps: int = 10,
        *,
        clean: bool = False,
    ) -> jax.Array:
        """Integrate noise float32[..., N, H, D] by Euler's method to chunks float32[..., N, H, D].

        On a CPU many chunks are integrated in blocks, whose activations stay in its cache.

        Args:
            committed: actions float32[..., H, D] and which of them are given, [..., H]; these come out as they are.
            clean: given actions are in x from the first step on, for a model that was trained so (training-time RTC,
                Black et al. 2025). Else they follow the straight path from their noise.
        """
        rate = -1.0 / steps
        if committed is not None:
            actions, mask = (jnp.asarray(c)[..., None, :, :] for c in (committed[0], committed[1][..., None]))

        def fixed(noise: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
            if committed is None:
                return x
            return jnp.where(mask > 0, actions if clean else t * noise + (1 - t) * actions, x)

        def integrated(noise: jax.Array) -> jax.Array:  # the axis of chunks is the first one here
            noise = jnp.moveaxis(noise, 0, -3)
            given = jnp.broadcast_to(mask[..., 0], noise.shape[:-1]) if committed is not None and clean else None

            def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
                x, t = carry
                x = fixed(noise, x, t)
                v = self.velocity(params, prefix, x, jnp.broadcast_to(t, x.shape[:-2]), given)
                return (x + rate * v, t + rate), None

            if self.config.remat:  # a gradient keeps the chunks between the steps alone
                step = jax.checkpoint(step, prevent_cse=False)
            # Added up in float32, as openpi does: 1 - i / n differs enough to move a sample by more than its tolerance.
            (x, _), _ = jax.lax.scan(step, (noise, jnp.float32(1.0)), length=steps, unroll=self.unroll)
            return jnp.moveaxis(fixed(noise, x, jnp.float32(0.0)), -3, 0)

        first = jnp.moveaxis(noise, -3, 0)
        rows = 2 * (noise.shape[-2] + 1) * math.prod(noise.shape[:-3])  # twice, for logits are larger than activations
        found = integrated(first) if self.unroll else map_blocks(integrated, (first,), rows=rows)
        return jnp.moveaxis(found, 0, -3)

    def flow_errors(
        self,
        params: Params,
        prefix: Prefix,
        actions: jax.Array,
        noise: jax.Array,
        t: jax.Array,
        given: jax.Array | None = None,
    ) -> jax.Array:
        """Return squared errors of velocities, float32[..., K, H, A]: K draws of noise and time for each observation.

        Args:
            actions: float32[..., H, A], A up to D; the others count as 0 in x_t, and are not compared.
            noise: float32[..., K, H, D].
            t: float32[..., K].
            given: [..., H]: where 1, x_t is the action itself.
        """
        size = actions.shape[-1]
        pad = [(0, 0)] * (actions.ndim - 1) + [(0, noise.shape[-1] - size)]
        whole = jnp.pad(actions, pad)[..., None, :, :]
        x, velocity = interpolate(noise, t, whole)
        if given is not None:
            given = jnp.broadcast_to(given[..., None, :], x.shape[:-1])
            x = jnp.where(given[..., None] > 0, whole, x)
        predicted = self.velocity(params, prefix, x, t, given)
        return jnp.square(predicted - velocity)[..., :size]

    def flow_loss(
        self,
        params: Params,
        prefix: Prefix,
        actions: jax.Array,
        weight: jax.Array,
        given: jax.Array | None,
        noise: jax.Array,
        t: jax.Array,
    ) -> Sum:
        """Return the weighted sum of `flow_errors` over all draws. `weight`: float32[..., H], or [..., H, A]."""
        errors = self.flow_errors(params, prefix, actions, noise, t, given)
        if weight.ndim < actions.ndim:
            weight = weight[..., None]
        if given is not None:
            weight = weight * (1.0 - given[..., None])
        weight = jnp.broadcast_to(weight, actions.shape)
        return Sum(jnp.sum(errors * weight[..., None, :, :]), jnp.sum(weight) * t.shape[-1])


def linear(leaf: Params, x: jax.Array) -> jax.Array:
    """Return x times a kernel, plus a bias, in the widest of their dtypes."""
    dtype = jnp.result_type(x, leaf["kernel"], leaf["bias"])
    return x.astype(dtype) @ leaf["kernel"].astype(dtype) + leaf["bias"].astype(dtype)


def _flattened(prefix: Prefix, axes: int) -> Prefix:
    """Return the prefix with its `axes` batch axes as one."""
    stacked = (x.reshape(x.shape[0], -1, *x.shape[1 + axes :]) for x in prefix[:2])
    return Prefix(*stacked, *(x.reshape(-1, *x.shape[axes:]) for x in prefix[2:]))
