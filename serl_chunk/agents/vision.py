"""Frozen backbones, an agent's base: the features that encoders read, in an update and of stored frames."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.agents.compilation import Compile, Place, compiled
from serl_chunk.agents.spec import FeatureSpec
from serl_chunk.agents.state import AgentState, Observation, Params
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.encoder import resnet10_leaves
from serl_chunk.models.convolutions import map_blocks
from serl_chunk.models.encoder import make_backbone
from serl_chunk.models.resnet import read_weights
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, CameraSpec, ConfigError

# Rows in one call: large blocks, then small ones, the last filled up, so that few rows cost no large batch, and
# nothing is compiled again whatever their number.
SIZES = (64, 8)


class ObservationEmbedder:
    """The features that an update would compute, on the host. Safe to call from any thread.

    Args:
        features: all of them, by name.
        embed: a feature float16[N, *shape] of the base and of the N rows of entries that it reads; compiled twice for
            each shape of these.
    """

    def __init__(
        self, features: Mapping[str, FeatureSpec], embed: Callable[[Params, Observation], jax.Array], base: Params
    ) -> None:
        self.features, self._base, self._function = features, base, embed
        self.compile()

    def compile(self, by: Compile = compiled) -> None:
        """Compile the function again, for other devices."""
        self._embed = by(self._function, batch=1)

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the features float16[N, *shape] of which all entries [N, ...] are in `inputs`, for any N."""
        return {
            name: self._of_rows({key: inputs[key] for key in spec.reads})
            for name, spec in self.features.items()
            if all(key in inputs for key in spec.reads)
        }

    def _of_rows(self, entries: Mapping[str, np.ndarray]) -> np.ndarray:
        large, small = SIZES
        rows = len(next(iter(entries.values())))
        whole = rows - rows % large
        blocks = [(at, large) for at in range(0, whole, large)] + [(at, small) for at in range(whole, rows, small)]
        parts = [
            self._embed(self._base, {k: np.resize(v[at : at + n], (n, *v.shape[1:])) for k, v in entries.items()})
            for at, n in blocks
        ]
        # Cut on the host: a slice on the device is compiled for every length.
        return np.concatenate([np.asarray(part) for part in parts])[:rows]


_ROWS = 32  # of a network of 512 numbers: what one image costs, for `map_blocks`
_TREES = ("policy", "policy_average", "critic", "target", "grasp")  # of a state, those that may hold backbones
_BACKBONE = "backbone"  # in the base


class Vision:
    """The part of the encoder that no loss trains, the base's "backbone"; `frozen` is False where there is none.

    Raises ConfigError: cameras of different sizes share weights that depend on the size.
    """

    source_setting = "agent.encoder.weights"

    def __init__(self, config: AgentConfig, cameras: Sequence[CameraSpec]) -> None:
        self._config, self._cameras = config.encoder, tuple(cameras)
        self.frozen = config.encoder.frozen_backbone and bool(cameras)
        self.source = config.encoder.weights if self.frozen else ""  # the file of the base; empty: it is random
        self._backbone: Any = make_backbone("resnet10", ()) if self.frozen else None
        sizes = {(c.height, c.width) for c in cameras}
        if len(sizes) > 1 and config.encoder.share_cameras and config.encoder.pooling != "mean":
            shown = ", ".join(f"{c.name} {c.height}x{c.width}" for c in cameras)
            raise ConfigError(
                f"cameras of different sizes ({shown}) cannot share an encoder with agent.encoder.pooling="
                f"{config.encoder.pooling}: set agent.encoder.frame_size, agent.encoder.share_cameras=False, or "
                "agent.encoder.pooling=mean"
            )

    def base(self, key: jax.Array, place: Place = jnp.array) -> Params:
        """The frozen backbone, by weights of `encoder.weights`.

        Raises ConfigError for a file that is absent or holds something else.
        """
        if not self.source:
            return self.random(key)
        weights = read_weights(self.source, resnet10_leaves())
        return {_BACKBONE: unflatten_dict({k: place(v) for k, v in weights.items()}, sep="/")}

    def random(self, key: jax.Array) -> Params:
        if not self.frozen:
            return {}
        return {_BACKBONE: self._backbone.init(key, jnp.zeros((1, 32, 32, 3), jnp.uint8))["params"]}

    def feature_shape(self, camera: CameraSpec) -> tuple[int, ...]:
        base = jax.eval_shape(lambda: self.random(jax.random.key(0)))
        frame = jax.ShapeDtypeStruct((1, camera.height, camera.width, 3), jnp.uint8)
        return jax.eval_shape(self.embed, base, frame).shape[1:]

    def encode_images(self, base: Params, observation: Observation) -> dict[str, jax.Array]:
        """`observation` with `features/<camera>` float16[..., h, w, 512] in place of `images/<camera>`, if frozen."""
        out = dict(observation)
        if not self.frozen:
            return out
        for camera in self._cameras:
            image = out.pop(IMAGE_PREFIX + camera.name, None)
            if image is not None:
                out[FEATURE_PREFIX + camera.name] = self.embed(base, image)
        return out

    def embed(self, base: Params, images: jax.Array) -> jax.Array:
        """The frozen backbone's features float16[..., h, w, 512] of images uint8[..., H, W, 3]."""

        def features(x: jax.Array) -> jax.Array:
            return self._backbone.apply({"params": base[_BACKBONE]}, x).astype(jnp.float16)

        if images.ndim == 3:
            return features(images)
        return jax.lax.stop_gradient(map_blocks(features, (images,), rows=_ROWS))

    def pretrained(self, state: AgentState, place: Place) -> AgentState:
        """`state` with the weights of `encoder.weights` in every backbone that is trained. Raises ConfigError."""
        return state.replace(**{name: self._imported(getattr(state, name), place) for name in _TREES})

    def _imported(self, tree: Params, place: Place) -> Params:
        if not self._config.weights or not self._cameras or self.frozen:
            return tree
        weights = read_weights(self._config.weights, resnet10_leaves())
        flat = flatten_dict(tree, keep_empty_nodes=True)
        for path in flat:
            if _BACKBONE in path:
                # one copy per tree, because updates donate each
                flat[path] = place(weights["/".join(path[path.index(_BACKBONE) + 1 :])])
        return unflatten_dict(flat)


def digest_of(tree: Params, readable: Callable[[Any], Any] = lambda leaf: leaf) -> str:
    """The first 16 digits of SHA-256 over the paths, shapes and numbers of a tree's leaves; empty for none.

    `readable` makes a leaf one that this process can read.
    """
    leaves = sorted(flatten_dict(tree, sep="/").items())
    if not leaves:
        return ""
    digest = hashlib.sha256()
    for path, leaf in leaves:
        array = np.ascontiguousarray(readable(leaf))
        digest.update(f"{path} {array.dtype} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)  # no copy: leaves may be large
    return digest.hexdigest()[:16]
