"""Images as JPEG, for links that are too slow for raw frames (`transport.jpeg_quality`).

Lossy: what the learner trains on differs a little from what the robot saw. Ten to seventeen times smaller at quality 95
on camera images, at a tenth of a millisecond per 128x128 frame.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from serl_chunk.transport.wire import WireError

MAX_PIXELS = 1 << 24  # of one image: a few bytes must not ask for gigabytes
MAX_DECODED_BYTES = 1 << 30  # of the images of one camera in one message


def encode(images: np.ndarray, quality: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[K, H, W, 3], RGB, as the JPEG files one after another, uint8[bytes], and their sizes int32[K]."""
    files = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        files.append(np.frombuffer(buffer.getbuffer(), np.uint8))
    sizes = np.array([len(f) for f in files], np.int32)
    return np.concatenate(files) if files else np.empty(0, np.uint8), sizes


def decode(data: np.ndarray, sizes: np.ndarray, name: str) -> np.ndarray:
    """The inverse of `encode`: uint8[K, H, W, 3]. Raises WireError, naming `name`, for anything else."""
    if data.dtype != np.uint8 or data.ndim != 1 or sizes.dtype != np.int32 or sizes.ndim != 1 or not len(sizes):
        raise WireError(f"{name}: JPEG images are uint8[bytes] with int32[images] sizes")
    if (sizes < 1).any() or int(sizes.sum(dtype=np.int64)) != len(data):
        raise WireError(f"{name}: the sizes of its JPEG images do not add up to {len(data)} bytes")
    out: np.ndarray | None = None
    offset = 0
    for i, size in enumerate(sizes.tolist()):
        frame = _one(data[offset : offset + size], name)
        offset += size
        if out is None:
            if len(sizes) * frame.nbytes > MAX_DECODED_BYTES:
                raise WireError(f"{name}: {len(sizes)} images of shape {frame.shape} are out of any bound")
            out = np.empty((len(sizes), *frame.shape), np.uint8)
        if frame.shape != out.shape[1:]:
            raise WireError(f"{name}: images of {out.shape[1:]} and of {frame.shape} in one array")
        out[i] = frame
    assert out is not None
    out.flags.writeable = False
    return out


def _one(data: np.ndarray, name: str) -> np.ndarray:
    try:
        image = Image.open(io.BytesIO(data.tobytes()), formats=["JPEG"])  # reads the head only
        if image.width * image.height > MAX_PIXELS:
            raise WireError(f"{name}: an image of {image.width}x{image.height}; the limit is {MAX_PIXELS} pixels")
        return np.asarray(image.convert("RGB"))
    except WireError:
        raise
    except Exception as e:  # Pillow raises OSError, ValueError, SyntaxError, struct.error and more for damaged files
        raise WireError(f"{name}: not a JPEG image ({type(e).__name__}: {e})") from e
