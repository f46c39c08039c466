"""Parameters of recorded cases of pi0 without a checkpoint. NumPy alone: openpi's environment reads it, too."""

from __future__ import annotations

import math
import re
import zlib

import numpy as np

_SMALL = ("bias", "scale", "pos_embedding", "input_embedding")  # last names of parameters with numbers around 0.1


def rule_leaf(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers, float32, of a parameter of a case without a checkpoint."""
    drawn = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(shape)
    if path.rpartition("/")[2] in _SMALL:
        scale = 0.1
    elif re.search(r"attn_vec_einsum\w*/w$", path):
        scale = (shape[-3] * shape[-2]) ** -0.5
    elif path.endswith("embedding/kernel"):
        scale = math.prod(shape[:-1]) ** -0.5
    else:
        scale = shape[-2] ** -0.5
    return (scale * drawn).astype(np.float32)
