"""Steps of which a human commanded a part of the action: what is held of them, and what is imitated."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import config, feed
from coded_replay import RNG, build, coded
from errors import naming

from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.step_storage import StepStorage
from serl_chunk.types import Begin, DataError, RobotSpec, Source, Step, StepBlock


def helped(number=0, shared=None, end="limit", **kw):
    """An episode of 12 ticks; a human acted on ticks 4 to 7, on some of them in a part of the action alone."""
    episode = coded(number, 12, end, shared={5: (1, 0), 6: (0, 1)} if shared is None else shared, **kw)
    episode.source[4:8] = Source.HUMAN
    return episode


def test_without_one_batches_have_no_such_array():
    replay = build(config(), bc_on="interventions")
    feed(replay, [helped(0, shared={}), helped(1, shared={5: (1, 1)})], RNG(0))  # all of the action is no part
    assert replay.sample(RNG(0), 8).bc_dims is None
    feed(replay, [helped(2)], RNG(0))
    batch = replay.sample(RNG(0), 8, 3)
    assert batch.bc_dims.shape == (3, 8, 6, 2)
    assert replay._partitions.storage.human_parts.nbytes == 2 * 42_000
    assert [(f.human_ticks, f.segments) for f in replay.finished] == [(4, 1)] * 3  # a part counts as a human's tick


def test_the_published_sampler_imitates_them_alike():
    cfg = config(3, 3, windows="qc", demo_fraction="uniform", terminal_windows="drop")
    some, everything = (build(cfg, bc_on=bc_on) for bc_on in ("interventions", "all"))
    for replay in (some, everything):
        feed(replay, [helped()], RNG(0))
    batch = some.sample(RNG(0), 500)
    tick = ((batch.observations["state"][:, 1] * 0.5 - 4)[:, None] + np.arange(3)).astype(int)
    numbers = batch.bc_weight[..., None] * batch.bc_dims
    wanted = helped().imitated("interventions", 3)
    np.testing.assert_array_equal(numbers, wanted[np.minimum(tick, 11)] * batch.valid[..., None])
    assert {tuple(n) for n in numbers.reshape(-1, 2).tolist()} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert everything.sample(RNG(0), 8).bc_dims is None


@pytest.mark.parametrize("width", [7, 8, 70])
def test_actions_of_any_width_have_room(width):
    spec = RobotSpec("wide", 50.0, 1, (-1.0,) * width, (1.0,) * width, (-1,) * width, (), (), 40)
    dims = RNG(width).random((4, width)) < 0.5
    dims[:, 0], dims[:, -1] = True, False
    zero = np.zeros(width, np.float32)
    steps = [Step(t, {"state": zero[:1]}, zero, 0.0, Source.HUMAN, -1, 0, t / 50, human_dims=dims[t]) for t in range(4)]
    storage = StepStorage(spec, (), rows=20, frames=0, max_image_age=0)
    episode = StoredEpisode(("s", "e"), Begin("e"), False, 0)
    block = StepBlock.from_steps("e", steps)
    storage.check(block)
    storage.append(episode, block)
    assert storage.human_parts.bc_dims(episode.rows[None]) is None
    storage.human_parts.imitate_alone(episode.rows, np.array([1, 1, 0, 1], np.bool_))
    dims[2] = True
    np.testing.assert_array_equal(storage.human_parts.bc_dims(episode.rows[None]), dims[None])


def test_what_is_no_part_of_an_action_is_refused():
    replay = build(config())
    replay.insert("s", Begin("e0"))
    steps = StepBlock.from_steps("e0", [helped().step(t) for t in range(12)])
    rows = steps.sparse["human_dims"]
    for bad, named in (
        (rows._replace(values=rows.values[:, :1]), ("e0", "human_dims", "uint8[2, 1]", "uint8[2, 2]")),
        (rows._replace(values=0 * rows.values), ("e0", "human_dims", "tick 5", "[0, 0]")),
        (rows._replace(index=rows.index - 4), ("e0", "human_dims", "tick 1", "HUMAN")),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            replay.insert("s", dataclasses.replace(steps, sparse={"human_dims": bad}))
    assert replay.insert("s", steps).steps == 12
