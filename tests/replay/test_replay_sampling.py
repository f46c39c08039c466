"""Halves, shares and reproducibility of what is drawn; joint noise, and what a human did in part."""

import dataclasses

import numpy as np
import pytest
from coded_episodes import SPEC, config, feed, make, normaliser, preprocess
from coded_replay import RNG, build, coded
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.replay.replay import BatchLoader, Replay, Request
from serl_chunk.types import DataError, Source


@pytest.mark.parametrize("demonstration", [False, True])
def test_an_empty_half_gives_its_share_and_says_so(demonstration):
    replay = build(config(demo_fraction=0.5))
    with pytest.raises(DataError, match=naming(4, 0)):
        replay.sample(RNG(0), 8)
    assert replay.empty_half is None  # nothing was added yet
    if demonstration:
        replay.add_demo(coded(demonstration=True).episode())
    else:
        feed(replay, [coded()], RNG(0))
    assert replay.sample(RNG(0), 8).mask.shape == (8,)
    assert replay.empty_half == ("online" if demonstration else "demo")
    assert (replay.stats()["replay/demo_share"], replay.stats()["replay/empty_half"]) == (demonstration, 1)
    if demonstration:
        feed(replay, [coded(1)], RNG(0))
        assert replay.empty_half is None


def test_a_seed_reproduces_batches_and_they_never_change_afterwards():
    batches = []
    for wrapped in (False, True):
        replay = build(config(capacity=200, image_capacity=150), image_keys=("a",))
        replay.add_demo(coded(1000, demonstration=True).episode())
        feed(replay, [make(RNG(k), k, every_frame=True) for k in range(10)], RNG(0))
        batches.append(replay.sample(RNG(9), 32, updates=3))
        for k in range(20, 50 if wrapped else 20):  # several times round the ring
            feed(replay, [make(RNG(k), k, every_frame=True)], RNG(0))
            replay.sample(RNG(1), 64)
    for a, b in zip(*batches, strict=True):
        for x, y in zip(*(v.values() if isinstance(v, dict) else [v] for v in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_actions_outside_of_model_space_are_counted_where_episodes_come_in():
    replay, norm = build(config(4, 4)), normaliser(4)
    demo, online = coded(9, 12, demonstration=True), coded(1, 7)

    def outside(episode):
        """(numbers outside of [-1, 1], numbers) of every chunk of an episode's steps."""
        steps = episode.episode().steps
        chunks = [norm.encode(steps.observation["state"][t], steps.action[t : t + 4]) for t in range(steps.n)]
        return sum(int((np.abs(c) > 1).sum()) for c in chunks), sum(c.size for c in chunks)

    replay.add_demo(demo.episode())
    assert replay.outside_model_space == {"demo": outside(demo), "online": (0, 0)}
    feed(replay, [online], RNG(0))
    replay.insert("s", coded(2, 7).records(RNG(0))[0])  # of whole episodes alone
    assert replay.outside_model_space["online"] == outside(online)
    assert 0 < replay.outside_model_space["online"].outside < replay.outside_model_space["online"].numbers
    feed(replay, [dataclasses.replace(online, number=3, session="t")], RNG(0))
    assert replay.outside_model_space["online"].numbers == 2 * outside(online)[1]


def test_nothing_is_clipped_or_outside_where_model_space_has_no_bounds():
    cfg = config(4, 4)
    replay = Replay(SPEC, cfg, Preprocess(dataclasses.replace(normaliser(4), mode="openpi")))
    replay.add_demo(coded(9, 12, demonstration=True).episode())
    assert (np.abs(replay.sample(RNG(0), 100).actions) > 1).any()
    assert replay.stats()["replay/clipped_share"] == 0
    assert set(replay.outside_model_space.values()) == {(0, 0)}


@pytest.mark.parametrize(("fraction", "size", "expected"), [(0.25, 10, 3), (0.0, 64, 0), (1.0, 64, 64)])
def test_demo_fraction_is_exact_in_every_batch(fraction, size, expected):
    """A half that has no share is not missed."""
    replay = build(config(demo_fraction=fraction))
    if fraction:
        replay.add_demo(*(coded(1000 + k, demonstration=True).episode() for k in range(3)))
    if fraction < 1:
        feed(replay, [coded(k) for k in range(30)], RNG(0))
    assert replay.empty_half is None
    batch = replay.sample(RNG(0), size, updates=5)
    number = batch.observations["state"][..., 0] * 2 + 8
    np.testing.assert_array_equal((number >= 1000).sum(1), expected)
    assert replay.stats()["replay/demo_share"] == expected / size
    assert replay.stats()["replay/empty_half"] == 0


def noisy(noise: float, horizon: int = 6):
    cfg = config(horizon, 4, demo_fraction=0.0)
    return dataclasses.replace(cfg, agent=AcfqlConfig(bc_joint_noise=noise))


def test_shifts_are_those_of_moved_joints_under_the_same_targets():
    """Encoding the moved state and the unchanged targets gives the batch plus its shifts."""
    horizon, norm = 6, normaliser(6)
    replay = build(noisy(0.3, horizon))
    feed(replay, [coded(k) for k in range(10)], RNG(0))
    plain, batch = build(noisy(0.0, horizon)), replay.sample(RNG(0), 4000)
    feed(plain, [coded(k) for k in range(10)], RNG(0))
    same = plain.sample(RNG(0), 4000)
    assert (same.bc_state_shift, same.bc_action_shift) == (None, None)
    np.testing.assert_array_equal(same.actions, batch.actions)  # the windows that are drawn are the same
    assert batch.bc_state_shift.dtype == batch.bc_action_shift.dtype == np.float32
    moved = batch.bc_state_shift * norm.state_std
    np.testing.assert_array_equal(moved[:, [0, 2]], 0)  # only state[1] is a joint that an action is relative to
    reach = norm.scale[0, norm.joint == 1].max()
    assert moved[:, 1].std() == pytest.approx(0.3 * reach, rel=0.05)
    state = batch.observations["state"] * norm.state_std + norm.state_mean
    targets = norm.decode(state, batch.actions)
    np.testing.assert_allclose(
        norm.observe(state + moved), batch.observations["state"] + batch.bc_state_shift, rtol=1e-4
    )
    again = norm.encode(state + moved, targets)
    np.testing.assert_allclose(again, batch.actions + batch.bc_action_shift, rtol=1e-4, atol=1e-4)


def helped(number=0, shared=None, end="limit", **kw):
    """An episode of 12 ticks; a human acted on ticks 4 to 7, on some of them in a part of the action alone."""
    episode = coded(number, 12, end, shared={5: (1, 0), 6: (0, 1)} if shared is None else shared, **kw)
    episode.source[4:8] = Source.HUMAN
    return episode


def test_without_a_humans_part_batches_have_no_such_array():
    replay = build(config(), bc_on="interventions")
    feed(replay, [helped(0, shared={}), helped(1, shared={5: (1, 1)})], RNG(0))  # all of the action is no part
    assert replay.sample(RNG(0), 8).bc_dims is None
    feed(replay, [helped(2)], RNG(0))
    batch = replay.sample(RNG(0), 8, 3)
    assert batch.bc_dims.shape == (3, 8, 6, 2)
    assert replay._partitions.storage.human_parts.nbytes == 2 * 42_000
    assert [(f.human_ticks, f.segments) for f in replay.finished] == [(4, 1)] * 3  # a part counts as a human's tick


def test_the_published_sampler_imitates_a_humans_part_alike():
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


ONE = Request("critic", 1, 4)


@pytest.fixture
def replay():
    cfg = config()
    replay = Replay(SPEC, cfg, preprocess(cfg, ("a",)))
    feed(replay, [make(np.random.default_rng(k), k, every_frame=True) for k in range(10)], np.random.default_rng(0))
    return replay


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_are_the_same_with_and_without_the_thread(replay, prefetch):
    """And no two share memory."""
    reference, arrays = np.random.default_rng(7), []
    loader = BatchLoader(replay, np.random.default_rng(7), prefetch=prefetch)
    for _ in range(5):
        batch, expected = loader.next(Request("critic", 3, 8))["critic"], replay.sample(reference, 8, 3)
        assert batch.actions.shape == (3, 8, 6, 2)
        assert batch.observations["images/a"].shape == (3, 8, 2, 4, 3)
        assert batch.delay.shape == (3, 8)
        np.testing.assert_array_equal(batch.observations["state"], expected.observations["state"])
        both = (*batch.observations.values(), *batch.next_observations.values())
        arrays.append([*both, batch.actions, batch.rewards, batch.bc_weight])
    for i, first in enumerate(arrays):
        for second in arrays[i + 1 :]:
            assert not any(np.shares_memory(a, b) for a in first for b in second)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_caller_every_time(prefetch):
    empty = Replay(SPEC, config(), preprocess(config()))
    loader = BatchLoader(empty, np.random.default_rng(0), prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(DataError, match=naming(4, 0)):
            loader.next(ONE)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_other_requests_or_another_half_drop_what_was_prepared(prefetch):
    class Drawn:
        def sample(self, rng, batch_size, updates, *, half, next_observations):
            return updates, batch_size, half, next_observations

    loader = BatchLoader(Drawn(), np.random.default_rng(0), prefetch=prefetch)
    both = (Request("critic", 3, 4), Request("policy", 1, 8, next_observations=False))
    for requests, half in [((ONE,), None), (both, None), (both, "demo"), (both, None)]:
        wanted = {r.name: (r.updates, r.size, half, r.next_observations) for r in requests}
        assert loader.next(*requests, half=half) == loader.next(*requests, half=half) == wanted
    loader.close()


def test_a_batch_without_next_observations_has_all_else_and_reads_no_frame_of_them(replay):
    whole = replay.sample(np.random.default_rng(3), 16, 2)
    batch = replay.sample(np.random.default_rng(3), 16, 2, next_observations=False)
    assert batch.next_observations == {}
    for name, value in batch.observations.items():
        np.testing.assert_array_equal(value, whole.observations[name])
    for name in ("actions", "rewards", "mask", "discount_n", "bc_weight"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name))
