"""Short ways to a replay of coded episodes."""

import numpy as np
from coded_episodes import SPEC, Coded, normaliser

from serl_chunk.replay.replay import Replay

RNG = np.random.default_rng


class CollectingReplay(Replay):
    """A replay that keeps the figures of the episodes that were finished, in `finished`."""

    def insert(self, session, record):
        return self._collect(super().insert(session, record))

    def close_session(self, session, *, gone=False):
        return self._collect(super().close_session(session, gone=gone))

    def _collect(self, added):
        self.__dict__.setdefault("finished", []).extend([] if added.finished is None else [added.finished])
        return added


def build(cfg, **kw):
    return CollectingReplay(SPEC, cfg, normaliser(cfg.chunk.carried), **kw)


def coded(number=0, length=12, end="limit", **kw):
    every = [set(range(length + 1)) for _ in SPEC.cameras]
    return Coded(number, length, end, np.zeros(length, np.uint8), every, **kw)


def windows(replay, checker, *, n=3_000, **kw):
    return checker.check(replay.sample(RNG(0), n), **kw)
