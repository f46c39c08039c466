"""Short ways to a replay of coded episodes."""

import dataclasses

import numpy as np
from coded_episodes import SPEC, Coded, config, preprocess

from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.replay.replay import Replay
from serl_chunk.replay.step_storage import HELD_COLUMNS
from serl_chunk.types import HUMAN_DIMS, IMAGE_PREFIX, STATE, STEP_COLUMNS, DataError, Episode, SparseRows, StepBlock

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


def build(cfg, *, image_keys=(), bc_on="+successes", **kw):
    return CollectingReplay(SPEC, cfg, preprocess(cfg, image_keys), bc_on=bc_on, **kw)


def coded(number=0, length=12, end="limit", **kw):
    every = [set(range(length + 1)) for _ in SPEC.cameras]
    return Coded(number, length, end, np.zeros(length, np.uint8), every, **kw)


def windows(replay, checker, *, n=3_000, **kw):
    return checker.check(replay.sample(RNG(0), n), **kw)


def read_held(replay, session, episode_id):
    """Return a copy of a closed episode as the replay holds it: its cameras only, 0 in the columns it lacks."""
    held, storage = replay._partitions.find((session, episode_id)), replay._partitions.storage
    if held is None or held.end is None:
        raise DataError(f"the replay holds no closed episode {episode_id!r} of session {session!r}")
    steps, final = held.rows[: held.length], held.rows[held.length]
    sparse, last = {}, {STATE: storage.steps.state[final].copy()}
    for c, camera in enumerate(storage.cameras):
        key = IMAGE_PREFIX + camera.name
        taken = np.flatnonzero(storage.frames.age[steps, c] == 0)  # ticks on which this camera was read
        if len(taken):
            slots = storage.frames.frame[steps[taken], c]
            sparse[key] = SparseRows(taken.astype(np.int32), _decoded(storage, c, slots))
        if storage.frames.age[final, c] == 0:
            last[key] = _decoded(storage, c, storage.frames.frame[final : final + 1, c])[0]
    dims = storage.human_parts.dims
    if dims is not None and dims[steps].any():
        taken = np.flatnonzero(dims[steps].any(1))
        bits = np.unpackbits(dims[steps[taken]], axis=1, count=SPEC.action_dim)
        sparse[HUMAN_DIMS] = SparseRows(taken.astype(np.int32), bits)
    columns = {name: np.zeros(held.length, dtype) for name, dtype in STEP_COLUMNS.items()}
    columns |= {name: getattr(storage.steps, name)[steps] for name in ("action", *HELD_COLUMNS)}
    block = StepBlock(
        episode_id=episode_id, first_tick=0, observation={STATE: storage.steps.state[steps]}, sparse=sparse, **columns
    )
    known = held.end.final_observation is not None
    return Episode(held.begin, block, held.end._replace(final_observation=last if known else None))


def _decoded(storage, c, slots):
    images, load = storage.frames.at(c, slots)
    if load is not None:
        load()
    return images


def reading(length, task, **replay):
    """An experiment whose agent reads language, of so many tokens; `task`: the experiment's own text."""
    cfg = config(**{"demo_fraction": "uniform", **replay})
    agent = dataclasses.replace(cfg.agent, language=LanguageConfig("bytes", length))
    return dataclasses.replace(cfg, agent=agent, robot=dataclasses.replace(cfg.robot, task=task))
