"""Steps of which a human commanded a part of the action: what is held of them, and what is imitated."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import Checker, config, feed, make
from coded_replay import RNG, build, coded, read_held
from errors import naming

from serl_chunk.replay.episode import StoredEpisode
from serl_chunk.replay.replay import DEMO_SESSION
from serl_chunk.replay.step_storage import StepStorage
from serl_chunk.types import Amend, Begin, DataError, Outcome, RobotSpec, Source, Step, StepBlock

RULES = ("all", "demo", "demo+interventions", "+successes", "interventions")
RESTRICTING = RULES[2:]  # by which the policy's part of an online episode may not be imitated


def helped(number=0, shared=None, end="limit", **kw):
    """An episode of 12 ticks; a human acted on ticks 4 to 7, on some of them in a part of the action alone."""
    episode = coded(number, 12, end, shared={5: (1, 0), 6: (0, 1)} if shared is None else shared, **kw)
    episode.source[4:8] = Source.HUMAN
    return episode


@pytest.mark.parametrize("bc_on", RULES)
def test_each_number_is_imitated_by_who_commanded_it(bc_on):
    rng = np.random.default_rng(7)
    cfg = config(5, 5, demo_fraction="uniform")
    demos = [make(rng, 1000 + i, demonstration=True, session=DEMO_SESSION, shared=True, gaps=True) for i in range(20)]
    episodes = [make(rng, i, session=f"s{i % 3}", shared=True, gaps=True) for i in range(40)]
    replay = build(cfg, image_keys=("b",), bc_on=bc_on)
    replay.add_demo(*(e.episode() for e in demos))
    feed(replay, episodes, rng)
    checker, seen = Checker(demos + episodes, cfg, image_keys=("b",), bc_on=bc_on), set()
    for _ in range(4):
        batch = replay.sample(rng, 4_000)
        assert (batch.bc_dims is None) == (bc_on not in RESTRICTING)
        if batch.bc_dims is not None:
            assert batch.bc_dims.dtype == np.float32
            assert batch.bc_dims.shape == (4_000, 5, 2)
            assert 0 < (batch.bc_dims == 0).mean() < 0.5
        seen |= checker.check(batch)
    assert seen == checker.windows()


def test_without_one_batches_have_no_such_array():
    replay = build(config(), bc_on="interventions")
    feed(replay, [helped(0, shared={}), helped(1, shared={5: (1, 1)})], RNG(0))  # all of the action is no part
    assert replay.sample(RNG(0), 8).bc_dims is None
    feed(replay, [helped(2)], RNG(0))
    batch = replay.sample(RNG(0), 8, 3)
    assert batch.bc_dims.shape == (3, 8, 6, 2)
    assert replay._partitions.storage.human_parts.nbytes == 2 * 42_000


def test_a_wrapped_store_that_uses_rows_again_and_episodes_kept_for_their_interventions():
    rng = np.random.default_rng(3)
    cfg = config(capacity=300, human_capacity=200, demo_fraction="uniform")
    episodes = [make(rng, i, shared=i % 2 == 0) for i in range(60)]
    replay = build(cfg, image_keys=(), bc_on="demo+interventions")
    checker = Checker(episodes, cfg, image_keys=(), bc_on="demo+interventions")
    for episode in episodes:
        feed(replay, [episode], rng)
        if replay.ready.windows:
            checker.check(replay.sample(rng, 500))
    held = {key[1] for key in replay.episodes()}
    assert replay.stats()["replay/kept_for_interventions"] > 0
    assert 0 < len(held) < 40
    for e in episodes:
        if e.episode_id in held and any(dims != (1, 1) for dims in e.shared.values()):
            rows = read_held(replay, "s", e.episode_id).steps.sparse["human_dims"]
            got = dict(zip(rows.index.tolist(), map(tuple, rows.values.tolist()), strict=True))
            assert got == {t: dims for t, dims in e.shared.items() if dims != (1, 1)}


def test_a_correction_of_the_outcome_changes_what_is_imitated_of_the_policys_part():
    cfg = config(demo_fraction="uniform")
    replay = build(cfg, image_keys=(), bc_on="+successes")
    feed(replay, [helped()], RNG(0))
    Checker([helped()], cfg, image_keys=(), bc_on="+successes").check(batch := replay.sample(RNG(0), 500))
    assert not batch.bc_dims.all()
    replay.insert("s", Amend("e0", Outcome.SUCCESS, terminated=True))
    Checker([helped(end="success")], cfg, image_keys=(), bc_on="+successes").check(batch := replay.sample(RNG(0), 500))
    assert batch.bc_dims.all()
    assert batch.bc_weight[:, 0].any()


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


@pytest.mark.parametrize("width", [7, 8, 14, 64, 70])
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


def test_they_count_as_human_ticks():
    replay = build(config(capacity=100, human_capacity=50))
    feed(replay, [helped(0, shared={t: (1, 0) for t in range(4, 8)})], RNG(0))
    (stats,) = replay.finished
    assert (stats.human_ticks, stats.segments) == (4, 1)
    batch = replay.sample(RNG(0), 200, half="demo")  # windows that start on a human's step
    tick = batch.observations["state"][:, 1] * 0.5 - 4
    assert set(tick) == {4, 5, 6, 7}
