"""Features of coded episodes that say what they are of: a frame, or a whole observation."""

import threading
import zlib

import numpy as np
from coded_episodes import SPEC

from serl_chunk.agents.spec import FeatureSpec


class CodedEmbedder:
    """Of each camera float16[N, 1, 2, 3]: the first and the last pixel, in which episode, tick and camera are coded.

    Counts how often each frame is looked at.
    """

    def __init__(self):
        self.features = {f"features/{c.name}": FeatureSpec((1, 2, 3), (f"images/{c.name}",)) for c in SPEC.cameras}
        self.looked: dict[bytes, int] = {}
        self.sizes: list[int] = []
        self.meanwhile = lambda: None  # called in the middle of a computation
        self._lock = threading.Lock()

    def __call__(self, inputs):
        assert len(inputs) == 1  # a frame's features are computed without the other camera's
        return {f"features/{key.removeprefix('images/')}": self._of_frames(images) for key, images in inputs.items()}

    def _of_frames(self, images):
        assert images.dtype == np.uint8
        found = np.stack([images[:, 0, 0], images[:, -1, -1]], 1)[:, None]
        with self._lock:
            self.sizes.append(len(images))
            for one in found:
                self.looked[one.tobytes()] = self.looked.get(one.tobytes(), 0) + 1
        self.meanwhile()
        return found.astype(np.float16)


class MixingEmbedder:
    """float16[N, 2] and float16[N, 1]: hashes over all cameras, the prompt and, with `state`, the state.

    `looked`: how often each input was looked at.
    """

    def __init__(self, *, state):
        cameras = tuple(f"images/{c.name}" for c in SPEC.cameras)
        self.reads = ("state",) * state + (*cameras, "prompt", "prompt_mask")
        self.features = {"mixed": FeatureSpec((2,), self.reads), "more": FeatureSpec((1,), self.reads[::-1])}
        self.looked: dict[int, int] = {}
        self.meanwhile = lambda: None  # called in the middle of a computation

    def __call__(self, inputs):
        assert set(inputs) == set(self.reads)
        (n,) = {len(v) for v in inputs.values()}
        hashes = [self.hash_of({key: values[i] for key, values in inputs.items()}) for i in range(n)]
        for h in hashes:
            self.looked[h] = self.looked.get(h, 0) + 1
        self.meanwhile()
        return self.values_of(hashes)

    def hash_of(self, observation):
        """A number that every number of an observation changes."""
        return zlib.crc32(b"".join(np.ascontiguousarray(observation[key]).tobytes() for key in self.reads))

    @staticmethod
    def values_of(hashes):
        """Features of observations with these hashes; 33 bits of them, exactly."""
        digits = np.array([[h % 2048, h // 2048 % 2048, h // 2048**2] for h in hashes]).reshape(-1, 3)
        return {"mixed": digits[:, :2].astype(np.float16), "more": digits[:, 2:].astype(np.float16)}


def with_pixels(batch):
    """A batch whose features are images again, as a Checker of coded episodes reads them."""

    def images(observation):
        out = {"state": observation["state"]}
        for camera in SPEC.cameras:
            coded = observation.get(f"features/{camera.name}")
            assert f"images/{camera.name}" not in observation
            if coded is not None:
                assert (coded.dtype, coded.shape[1:]) == (np.float16, (1, 2, 3))
                shown = np.zeros((len(coded), camera.height, camera.width, 3), np.uint8)
                shown[:, 0, 0], shown[:, -1, -1] = coded[:, 0, 0], coded[:, 0, 1]
                out[f"images/{camera.name}"] = shown
        return out

    return batch._replace(observations=images(batch.observations), next_observations=images(batch.next_observations))
