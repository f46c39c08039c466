"""The backbones: layouts, shapes, ResNet-10 against flax's own layers; and files of weights, whole or refused."""

from __future__ import annotations

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import naming
from flax.traverse_util import flatten_dict, unflatten_dict

from serl_chunk.config.agents.encoder import resnet10_leaves
from serl_chunk.models.encoder import Impala
from serl_chunk.models.resnet import ResNet10, read_weights
from serl_chunk.types import ConfigError

LEAVES = {"a/kernel": (2, 3), "b": (4,)}


def image(batch: int = 2, height: int = 40, width: int = 33) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, height, width, 3), dtype=np.uint8)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Small random kernels, and scales near 1."""
    rng = np.random.default_rng(seed)
    scale = {k: np.sqrt(2 / np.prod(s[:-1])) if "kernel" in k else 0.1 for k, s in resnet10_leaves().items()}
    return {
        k: (rng.normal(size=s) * scale[k] + ("scale" in k)).astype(np.float32) for k, s in resnet10_leaves().items()
    }


def reference(flat: dict[str, np.ndarray], images: np.ndarray) -> jax.Array:
    """HIL-SERL's resnetv1-10 up to its pooling, as its definition says, of flax's layers."""
    mean, std = (np.array(v, np.float32).reshape(1, 1, 1, 3) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    def conv(name: str, x: jax.Array, width: int, size: int, stride: int, padding: object = "SAME") -> jax.Array:
        layer = nn.Conv(width, (size, size), (stride, stride), padding=padding, use_bias=False)
        return layer.apply({"params": {"kernel": flat[f"{name}/kernel"]}}, x)

    def norm(name: str, x: jax.Array) -> jax.Array:
        params = {k: flat[f"{name}/{k}"] for k in ("scale", "bias")}
        return nn.GroupNorm(num_groups=4, epsilon=1e-5).apply({"params": params}, x)

    x = conv("conv_init", (images / np.float32(255) - mean) / std, 64, 7, 2, [(3, 3), (3, 3)])
    x = nn.max_pool(nn.relu(norm("norm_init", x)), (3, 3), strides=(2, 2), padding="SAME")
    for i, width in enumerate((64, 128, 256, 512)):
        name, stride = f"block_{i}", 1 if i == 0 else 2
        y = nn.relu(norm(f"{name}/norm_0", conv(f"{name}/conv_0", x, width, 3, stride)))
        y = norm(f"{name}/norm_1", conv(f"{name}/conv_1", y, width, 3, 1))
        if x.shape != y.shape:
            x = norm(f"{name}/norm_proj", conv(f"{name}/conv_proj", x, width, 1, stride))
        x = nn.relu(x + y)
    return x


@pytest.mark.slow
def test_resnet10_computes_what_hil_serls_does():
    flat, images = weights(), image()
    params = unflatten_dict({k: jnp.array(v) for k, v in flat.items()}, sep="/")
    ours, theirs = ResNet10().apply({"params": params}, images), reference(flat, images)
    assert (ours.shape, ours.dtype) == ((2, 2, 2, 512), jnp.float32)
    assert float(jnp.std(theirs)) > 0.1  # else equal zeros would pass
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-3)


def test_its_parameters_are_those_that_files_of_weights_have():
    shapes = jax.eval_shape(ResNet10().init, jax.random.key(0), image())["params"]
    assert {k: v.shape for k, v in flatten_dict(shapes, sep="/").items()} == resnet10_leaves()


def test_impala_halves_the_image_once_a_section():
    net, images = Impala((4, 6)), image(3, 13, 8)
    params = jax.jit(net.init)(jax.random.key(0), images)
    out, one = jax.jit(lambda params: (net.apply(params, images), net.apply(params, images[1])))(params)
    assert (out.shape, out.dtype) == ((3, 4, 2, 6), jnp.float32)
    assert float(out.min()) >= 0
    np.testing.assert_allclose(one, out[1], atol=1e-5)  # no batch axis needed
    kernels = [k for k in flatten_dict(params["params"], sep="/") if k.endswith("kernel")]
    assert len(kernels) == 2 * 5  # one convolution, then two residual blocks of two


def arrays(**changes):
    return {"a/kernel": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.float16)} | changes


def test_floats_of_any_width_come_as_float32(tmp_path):
    np.savez(tmp_path / "w.npz", **arrays())
    found = read_weights(str(tmp_path / "w.npz"), LEAVES)
    assert list(found) == list(LEAVES)
    assert {v.dtype for v in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["a/kernel"], np.arange(6).reshape(2, 3))


SETTING = "agent.encoder.weights", "w.npz"


@pytest.mark.parametrize(
    ("content", "named"),  # arrays of an archive, or a file's bytes
    [
        ({"b": np.ones(4)}, ("w.npz", "a/kernel", "(2, 3)")),
        (arrays(b=np.ones(4, int)), ("w.npz", "'b'", "int64(4,)", "(4,)")),
        (arrays(b=np.array([1, np.inf, 0, 0])), ("w.npz", "'b'")),
        (arrays(ghost=np.ones(1)), ("w.npz", "ghost")),
        (None, (*SETTING, "learner", "actor")),
        (b"hello", (*SETTING, "HIL-SERL", "archive")),
        ({"b": np.array([{}], dtype=object)}, (*SETTING, "HIL-SERL")),
        # A pickle under another name is to be converted, and not to be trusted.
        (pickle.dumps(arrays()), (*SETTING, "resnet10_params.pkl")),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_the_first_mismatch(tmp_path, content, named):
    file = tmp_path / "w.npz"
    if isinstance(content, dict):
        np.savez(file, **content)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        with file.open("wb") as opened:
            np.save(opened, content)
    with pytest.raises(ConfigError, match=naming(*named)) as error:
        read_weights(str(file), LEAVES)
    assert "unsafely" not in str(error.value)
