"""Features that say which frame they are of: the two pixels in which coded episodes have episode, tick and camera."""

import threading

import numpy as np
from coded_episodes import SPEC


class CodedEmbedder:
    """float16[N, 1, 2, 3]: the first and the last pixel, exactly. Counts how often each frame is looked at."""

    def __init__(self):
        self.looked: dict[bytes, int] = {}
        self.sizes: list[int] = []
        self.meanwhile = lambda: None  # called in the middle of a computation
        self._lock = threading.Lock()

    def shape(self, camera):
        return 1, 2, 3

    def __call__(self, images):
        assert images.dtype == np.uint8
        found = np.stack([images[:, 0, 0], images[:, -1, -1]], 1)[:, None]
        with self._lock:
            self.sizes.append(len(images))
            for one in found:
                self.looked[one.tobytes()] = self.looked.get(one.tobytes(), 0) + 1
        self.meanwhile()
        return found.astype(np.float16)


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
