"""Encoders of observations, and frozen backbones: the features that networks read, in an update and of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.agents.state import AgentState, Observation, Params
from serl_chunk.config.agents import AgentConfig
from serl_chunk.config.encoders import resnet10_leaves
from serl_chunk.models.convolutions import map_blocks
from serl_chunk.models.encoder import ObservationEncoder, make_backbone
from serl_chunk.models.resnet import read_weights
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, CameraSpec, ConfigError


class Encoded:
    """Base of critics and policies. Without an `own` encoder the critic's is put in (`Agent.with_encoder`)."""

    def __init__(self, config: AgentConfig, *, own: bool = True) -> None:
        self._own = own
        self.encoder: Any = ObservationEncoder(config.image_keys, config.use_state, config.encoder, config.language)

    def init_encoder(self, key: jax.Array, observation: Observation) -> tuple[Params, jax.Array]:
        """Fresh parameters, {"encoder"} or nothing, and the features float32[B, F] of a batch of observations."""
        encoder = {"encoder": self.encoder.init(key, observation).get("params", {})}
        return encoder if self._own else {}, self.features(encoder, observation)

    def features(self, params: Params, observation: Observation) -> jax.Array:
        return self.encoder.apply({"params": params.get("encoder", {})}, observation)


# Frames in one call: large blocks, then small ones, the last filled up, so that few frames cost no large batch, and
# nothing is compiled again whatever their number.
SIZES = (64, 8)


class FrameEmbedder:
    """uint8[N, H, W, 3] -> float16[N, h, w, C] on the host, for any N: the features that an update would compute.

    Compiles twice per size of image. Safe to call from any thread.
    """

    def __init__(self, vision: Vision, frozen: Params) -> None:
        self.shape = vision.feature_shape  # of a camera
        self._frozen = jax.tree.map(jnp.copy, frozen)  # updates donate theirs
        self._embed = jax.jit(vision.embed)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        large, small = SIZES
        whole = len(images) - len(images) % large
        parts = [self._embed(self._frozen, images[at : at + large]) for at in range(0, whole, large)]
        for at in range(whole, len(images), small):
            few = images[at : at + small]
            filled = np.concatenate([few, np.zeros((small - len(few), *few.shape[1:]), np.uint8)])
            parts.append(self._embed(self._frozen, filled))
        # Cut on the host: a slice on the device is compiled for every length.
        return np.concatenate([np.asarray(part) for part in parts])[: len(images)]


State = TypeVar("State", bound=AgentState)

_ROWS = 32  # of a network of 512 numbers: what one image costs, for `map_blocks`
_TREES = ("policy", "policy_average", "critic", "target", "grasp")  # of a state, those that may hold backbones


class Vision:
    """The part of the encoder that no loss trains; `frozen` is False where there is none.

    Raises:
        ConfigError: cameras of different sizes share weights that depend on the size.
    """

    def __init__(self, config: AgentConfig, cameras: Sequence[CameraSpec]) -> None:
        self._config, self._cameras = config.encoder, tuple(cameras)
        self.frozen = config.encoder.frozen_backbone and bool(cameras)
        self._backbone: Any = make_backbone("resnet10", ()) if self.frozen else None
        sizes = {(c.height, c.width) for c in cameras}
        if len(sizes) > 1 and config.encoder.share_cameras and config.encoder.pooling != "mean":
            shown = ", ".join(f"{c.name} {c.height}x{c.width}" for c in cameras)
            raise ConfigError(
                f"cameras of different sizes ({shown}) cannot share an encoder with agent.encoder.pooling="
                f"{config.encoder.pooling}: set agent.encoder.share_cameras=False, or agent.encoder.pooling=mean"
            )

    def init(self, key: jax.Array) -> Params:
        return self._backbone.init(key, jnp.zeros((1, 32, 32, 3), jnp.uint8))["params"]

    def feature_shape(self, camera: CameraSpec) -> tuple[int, int, int]:
        frozen = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        frame = jax.ShapeDtypeStruct((1, camera.height, camera.width, 3), jnp.uint8)
        height, width, channels = jax.eval_shape(self.embed, frozen, frame).shape[1:]
        return height, width, channels

    def encode_images(self, frozen: Params, observation: Observation) -> dict[str, jax.Array]:
        """`observation` with `features/<camera>` float16[..., h, w, 512] in place of `images/<camera>`, if frozen."""
        out = dict(observation)
        if not self.frozen:
            return out
        for camera in self._cameras:
            image = out.pop(IMAGE_PREFIX + camera.name, None)
            if image is not None:
                out[FEATURE_PREFIX + camera.name] = self.embed(frozen, image)
        return out

    def embed(self, frozen: Params, images: jax.Array) -> jax.Array:
        """The frozen backbone's features float16[..., h, w, 512] of images uint8[..., H, W, 3]."""

        def features(x: jax.Array) -> jax.Array:
            return self._backbone.apply({"params": frozen}, x).astype(jnp.float16)

        if images.ndim == 3:
            return features(images)
        return jax.lax.stop_gradient(map_blocks(features, (images,), rows=_ROWS))

    def pretrained(self, state: State) -> State:
        """`state` with the weights of `encoder.weights`, where given, in every backbone. Raises ConfigError."""
        if not self._config.weights or not self._cameras:
            return state
        weights = read_weights(self._config.weights, resnet10_leaves())
        if self.frozen:
            return state.replace(frozen=unflatten_dict({k: jnp.array(v) for k, v in weights.items()}, sep="/"))

        def filled(tree: Params) -> Params:
            flat = flatten_dict(tree, keep_empty_nodes=True)
            for path in flat:
                if "backbone" in path:
                    # one copy per tree, because updates donate each
                    flat[path] = jnp.array(weights["/".join(path[path.index("backbone") + 1 :])])
            return unflatten_dict(flat)

        return state.replace(**{name: filled(getattr(state, name)) for name in _TREES})
