"""The classifier's network: an encoder for each camera, one hidden layer, and a logit for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import softmax

from serl_chunk.classifier.files import Description
from serl_chunk.config.agents.encoder import EncoderConfig, resnet10_leaves
from serl_chunk.models.encoder import ObservationEncoder
from serl_chunk.models.resnet import ResNet10, checked, read_weights
from serl_chunk.types import FEATURE_PREFIX, IMAGE_PREFIX, CameraSpec, ConfigError

HIDDEN = 256  # HIL-SERL's, as the dropout
DROPOUT = 0.1
SMALL = EncoderConfig(features=(16, 32, 32), latent=64, pooling="spatial", share_cameras=False)
"""The network for a CPU."""
HIL_SERL = EncoderConfig(kind="resnet10", pooling="spatial", latent=256, share_cameras=False, frozen_backbone=True)
"""One frozen ResNet-10 for all cameras, and a head for each."""

Images = Mapping[str, Any]  # camera -> [B, H, W, 3]: uint8, or float32 of the same range
Params = Any


class ClassifierNetwork(nn.Module):
    """Images of the cameras to logits float32[B, outputs]; with one output it is that of the success.

    Dense, dropout, LayerNorm and relu follow the encoders' features (HIL-SERL, Luo et al. 2024). A frozen backbone
    has parameters, and no gradient.
    """

    cameras: Sequence[str]
    encoder: EncoderConfig
    outputs: int

    @nn.compact
    def __call__(self, images: Images, train: bool = False) -> jax.Array:
        prefix, seen = IMAGE_PREFIX, dict(images)
        if self.encoder.frozen_backbone:
            backbone = ResNet10(name="backbone")
            seen = {name: jax.lax.stop_gradient(backbone(image)) for name, image in images.items()}
            prefix = FEATURE_PREFIX
        encoder = ObservationEncoder(tuple(self.cameras), False, self.encoder, name="encoder")
        x = encoder({prefix + name: value for name, value in seen.items()})
        x = nn.Dropout(DROPOUT, deterministic=not train)(nn.Dense(HIDDEN)(x))
        return nn.Dense(self.outputs)(nn.relu(nn.LayerNorm()(x)))


def network(cameras: Sequence[CameraSpec], encoder: EncoderConfig, classes: int) -> ClassifierNetwork:
    """Build the network of `classes` classes. Raises ConfigError: cameras of different sizes share sized weights."""
    sizes = {(c.height, c.width) for c in cameras}
    if len(sizes) > 1 and encoder.share_cameras and encoder.pooling != "mean":
        shown = ", ".join(f"{c.name} {c.height}x{c.width}" for c in cameras)
        raise ConfigError(
            f"cameras of different sizes ({shown}) cannot share an encoder. Train one for each, or --cameras"
        )
    return ClassifierNetwork(tuple(c.name for c in cameras), encoder, 1 if classes == 2 else classes)


def _blank(cameras: Sequence[CameraSpec]) -> dict[str, np.ndarray]:
    return {c.name: np.zeros((1, c.height, c.width, 3), np.uint8) for c in cameras}


def initial(net: ClassifierNetwork, cameras: Sequence[CameraSpec], seed: int, weights: str = "") -> Params:
    """Return fresh parameters, every backbone with the pretrained ones of the file `weights`. Raises ConfigError."""
    params = jax.jit(net.init)(jax.random.key(seed), _blank(cameras))["params"]
    if not weights:
        return params
    pretrained = read_weights(weights, resnet10_leaves())
    flat = flatten_dict(params)
    for path in flat:
        if "backbone" in path:
            flat[path] = jnp.array(pretrained["/".join(path[path.index("backbone") + 1 :])])
    return unflatten_dict(flat)


def flat_arrays(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters by path, float32 on the host."""
    return {name: np.asarray(value, np.float32) for name, value in flatten_dict(params, sep="/").items()}


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return float64[B, N] of logits [B, 1] of two classes, or [B, N] of more."""
    logits = np.asarray(logits, np.float64)
    if logits.shape[-1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=-1)
    return softmax(logits, axis=-1)


class Predictor:
    """A classifier with its parameters: images of B frames to probabilities float64[B, N].

    Compiles once for each B; `warm` compiles for one frame. Raises ConfigError: the parameters are not those of the
    description's network.
    """

    def __init__(self, description: Description, weights: Mapping[str, np.ndarray], where: str = "classifier") -> None:
        self._cameras = description.cameras
        net = network(description.cameras, description.encoder, len(description.classes))
        shapes = jax.eval_shape(net.init, jax.random.key(0), _blank(self._cameras))["params"]
        leaves = {name: leaf.shape for name, leaf in flatten_dict(shapes, sep="/").items()}
        flat = checked(weights, leaves, where)
        self._params = unflatten_dict({name: jnp.array(value) for name, value in flat.items()}, sep="/")
        self._logits = jax.jit(lambda params, images: net.apply({"params": params}, images))

    def warm(self) -> None:
        self(_blank(self._cameras))

    def __call__(self, images: Images) -> np.ndarray:
        return probabilities(np.asarray(self._logits(self._params, dict(images))))
