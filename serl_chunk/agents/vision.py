"""What an agent's networks look through: a backbone that is frozen for all of them, and where weights come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.config.agents import AgentConfig
from serl_chunk.config.encoders import resnet10_leaves
from serl_chunk.models.blocks import map_blocks
from serl_chunk.models.encoder import make_backbone
from serl_chunk.models.weights import read_weights
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, CameraSpec, ConfigError

Params = Any
State = TypeVar("State")  # an AgentState, which lies above this module

_ROWS = 32  # of a network of 512 numbers: what one image costs, for `map_blocks`
_TREES = ("policy", "policy_average", "critic", "target", "grasp")  # of a state, those that may hold backbones


class Vision:
    """The encoder's part that no loss trains. `frozen` says whether there is one.

    Raises ConfigError for cameras of different sizes that are to share weights which depend on the size.
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
        """Parameters of the frozen backbone, drawn at random. Only where there is one."""
        return self._backbone.init(key, jnp.zeros((1, 32, 32, 3), jnp.uint8))["params"]

    def zeros(self) -> Params:
        """Zeros in the shape of `init`."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.init, jax.random.key(0)))

    def seen(self, frozen: Params, observation: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """`observation` with `features/<camera>` float16[..., h, w, 512] in place of `images/<camera>`.

        Unchanged where no backbone is frozen. Features that are there already stay.
        """
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
        # On a CPU the activations of a whole batch would go to memory and back.
        return jax.lax.stop_gradient(map_blocks(features, (images,), rows=_ROWS))

    def pretrained(self, state: State) -> State:
        """`state` with the weights of `encoder.weights` in every backbone, unchanged where none are given.

        Raises ConfigError for a file that cannot be read or does not fit.
        """
        if not self._config.weights or not self._cameras:
            return state
        weights = read_weights(self._config.weights, resnet10_leaves())
        if self.frozen:
            return state.replace(frozen=unflatten_dict({k: jnp.array(v) for k, v in weights.items()}, sep="/"))  # type: ignore[attr-defined]

        def filled(tree: Params) -> Params:
            flat = flatten_dict(tree, keep_empty_nodes=True)
            for path in flat:
                if "backbone" in path:
                    # A copy each: updates donate the trees one by one.
                    flat[path] = jnp.array(weights["/".join(path[path.index("backbone") + 1 :])])
            return unflatten_dict(flat)

        return state.replace(**{name: filled(getattr(state, name)) for name in _TREES})  # type: ignore[attr-defined]
