"""Images as JPEG files in a message: their heads are checked on arrival, their pixels are decoded where they are used.

A few bytes can decode to gigabytes in half a minute.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from serl_chunk_robot.wire.codec import WireError

MAX_PIXELS = 1 << 24  # of one image
MAX_DECODED_BYTES = 1 << 28  # of the images of one camera in one message; senders put a few MiB in one


class JpegImages:
    """Images uint8[K, H, W, 3], RGB, each decoded anew on every access, of JPEG files whose heads were checked.

    An integer index gives the image uint8[H, W, 3], a slice or a mask the JpegImages of these; `np.asarray` decodes
    them all. All raise WireError for a file that is damaged behind its head. `shape`: [H, W, 3] of every image.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, files: Sequence[bytes], shape: tuple[int, int, int], name: str) -> None:
        self.files = list(files)
        self.shape = (len(self.files), *shape)
        self._name = name

    def __len__(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, int | np.integer):
            return self._decode(self.files[i])
        chosen = np.arange(len(self.files))[i]
        return JpegImages([self.files[k] for k in chosen.tolist()], self.shape[1:], self._name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the images are decoded: there is no array to share")
        out = np.empty(self.shape, np.uint8)
        for i, file in enumerate(self.files):
            out[i] = self._decode(file)
        return out if dtype is None else out.astype(dtype)

    def _decode(self, file: bytes) -> np.ndarray:
        try:
            image = np.asarray(Image.open(io.BytesIO(file), formats=["JPEG"]).convert("RGB"))
        except Exception as e:  # Pillow raises OSError, ValueError, SyntaxError, struct.error and more
            raise WireError(f"{self._name}: not a whole JPEG image ({type(e).__name__}: {e})") from e
        if image.shape != self.shape[1:]:
            raise WireError(f"{self._name}: an image of {image.shape} whose head has {self.shape[1:]}")
        return image


class JpegImage:
    """The only image of `images`, uint8[H, W, 3]. `np.asarray` decodes it, `image[None]` is `images` itself."""

    dtype = np.dtype(np.uint8)
    ndim = 3

    def __init__(self, images: JpegImages) -> None:
        self.images = images
        self.shape = images.shape[1:]

    def __getitem__(self, i: None) -> JpegImages:
        return self.images

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        image: np.ndarray = self.images.__array__(dtype, copy)[0]
        return image


def encode_jpeg(images: np.ndarray | JpegImages, quality: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8[K, H, W, 3], RGB, as joined JPEG files, uint8[bytes], and their sizes int32[K].

    `JpegImages` keep their files, whatever the quality.
    """
    files = images.files if isinstance(images, JpegImages) else [_encode(image, quality) for image in images]
    data = np.frombuffer(b"".join(files), np.uint8) if files else np.empty(0, np.uint8)
    return data, np.array([len(f) for f in files], np.int32)


def _encode(image: np.ndarray, quality: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def jpeg_images(data: np.ndarray, sizes: np.ndarray, name: str) -> JpegImages:
    """Return the images of files that `encode_jpeg` joined. Raises WireError, naming `name`, for anything else.

    Only the heads are read: all images have one size, which is within bounds, and no file is larger than such an image
    can need.
    """
    if data.dtype != np.uint8 or data.ndim != 1 or sizes.dtype != np.int32 or sizes.ndim != 1 or not len(sizes):
        raise WireError(f"{name}: JPEG images are uint8[bytes] with int32[images] sizes")
    if (sizes < 1).any() or int(sizes.sum(dtype=np.int64)) != len(data):
        raise WireError(f"{name}: the sizes of its JPEG images do not add up to {len(data)} bytes")
    stops = np.cumsum(sizes, dtype=np.int64).tolist()
    files = [data[stop - size : stop].tobytes() for size, stop in zip(sizes.tolist(), stops, strict=True)]
    shape = _shape_of(files[0], name)
    if len(sizes) * shape[0] * shape[1] * 3 > MAX_DECODED_BYTES:
        raise WireError(f"{name}: {len(sizes)} images of shape {shape} are out of any bound")
    for file in files[1:]:
        if (found := _shape_of(file, name)) != shape:
            raise WireError(f"{name}: images of {shape} and of {found} in one array")
    return JpegImages(files, shape, name)


def _shape_of(file: bytes, name: str) -> tuple[int, int, int]:
    try:
        with Image.open(io.BytesIO(file), formats=["JPEG"]) as image:
            width, height = image.size
    except Exception as e:  # Pillow raises OSError, ValueError, SyntaxError, struct.error and more for damaged files
        raise WireError(f"{name}: not a JPEG image ({type(e).__name__}: {e})") from e
    if width * height > MAX_PIXELS:
        raise WireError(f"{name}: an image of {width}x{height}; the limit is {MAX_PIXELS} pixels")
    most = 2 * height * width * 3 + (1 << 16)  # noise at the best quality takes less
    if len(file) > most:
        raise WireError(f"{name}: a JPEG image of {width}x{height} in {len(file)} bytes; the limit is {most}")
    return height, width, 3
