"""Short ways to a replay of coded episodes."""

import numpy as np
from coded_episodes import SPEC, Coded, normaliser

from serl_chunk.replay.replay import Replay

RNG = np.random.default_rng


def build(cfg, **kw):
    return Replay(SPEC, cfg, normaliser(cfg.chunk.carried), **kw)


def coded(number=0, length=12, end="limit", **kw):
    every = [set(range(length + 1)) for _ in SPEC.cameras]
    return Coded(number, length, end, np.zeros(length, np.uint8), every, **kw)


def windows(replay, checker, *, n=3_000, **kw):
    return checker.check(replay.sample(RNG(0), n), **kw)
