"""Moments and quantiles of streams, statistics of chunks, and the file they are kept in."""

from __future__ import annotations

import json
import resource
import tempfile

import numpy as np
import pytest
from errors import naming
from held_source import HeldSource
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from serl_chunk.data.normalise import running_statistics
from serl_chunk.data.normalise.chunk_statistics import (
    StatsRequest,
    chunks,
    compute,
    joints_of,
    parse_mask,
    read_norm_stats,
    write_norm_stats,
)
from serl_chunk.data.normalise.running_statistics import Moments, Statistics
from serl_chunk.types import Begin, ConfigError, DataError, End, Episode, Outcome, StepBlock

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 60), st.just(2)), elements=FLOATS)
COARSE = hnp.arrays(  # many equal values, both signs, zeros of both signs
    np.float32,
    st.tuples(st.integers(1, 60), st.just(2)),
    elements=st.sampled_from([-2.5, -1e-30, -0.0, 0.0, 1.0, 1.001]),
)


def episode_of(state: np.ndarray, action: np.ndarray, episode_id: str = "e") -> Episode:
    n = len(action)
    steps = StepBlock(
        episode_id, 0, {"state": state.astype(np.float32)}, action.astype(np.float32), np.zeros(n, np.float32),
        np.zeros(n, np.uint8), np.full(n, -1, np.int32), np.full(n, -1, np.int64), np.full(n, -1, np.float32),
        np.arange(n) / 50, np.zeros(n, np.int32),
    )  # fmt: skip
    return Episode(Begin(episode_id), steps, End(episode_id, n, None, False, True, Outcome.UNKNOWN))


def random_source(*lengths: int, dim: int = 3) -> HeldSource:
    rng = np.random.default_rng(0)
    return HeldSource(episode_of(rng.normal(size=(n, dim)), rng.normal(size=(n, dim)), f"e{n}") for n in lengths)


@settings(max_examples=examples(60), deadline=None)
@given(values=st.one_of(ROWS, COARSE), pieces=st.integers(1, 5), keep=st.sampled_from([0, 20, 10_000]))
def test_quantiles_are_numpys_held_or_in_a_file(values, pieces, keep):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_statistics, "KEEP", keep)
        statistics = Statistics(2, (0.01, 0.5, 0.99))
        for part in np.array_split(values, pieces):
            statistics.add(part)
            statistics.moments.count and statistics.quantile()  # may be read in between
    expected = np.quantile(values.astype(np.float64), (0.01, 0.5, 0.99), axis=0)
    scale = np.abs(values).max()
    np.testing.assert_allclose(statistics.quantile(), expected, rtol=1e-12, atol=1e-12 * scale)


def test_a_temporary_folder_that_is_absent_or_fills_up_is_named_by_the_block_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(running_statistics, "KEEP", 0)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/absent")
        with pytest.raises(DataError, match=naming("/absent", "TMPDIR", "No such file or directory")):
            Statistics(1).add(np.ones((5, 1), np.float32))
    statistics, limits = Statistics(2), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # bytes of one file: a full disk
    try:
        for _ in range(51):
            statistics.add(np.ones((10, 2), np.float32))
        with pytest.raises(DataError, match=naming("TMPDIR", "File too large")):
            statistics.add(np.ones((10, 2), np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@settings(max_examples=examples(60), deadline=None)
@given(values=ROWS, cut=st.integers(0, 60), offset=st.sampled_from([0.0, 1e6]))
def test_moments_do_not_depend_on_the_blocks(values, cut, offset):
    values = values.astype(np.float64).clip(-1e3, 1e3) + offset
    whole = Moments.of(values)
    merged = Moments.of(values[cut:]).merged(Moments.of(values[:cut]))
    assert merged.count == whole.count == len(values)
    np.testing.assert_allclose(merged.mean, values.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(merged.std, values.std(0), rtol=1e-7, atol=1e-7)
    np.testing.assert_array_equal(merged.low, values.min(0))
    np.testing.assert_array_equal(merged.high, values.max(0))


def test_joints_come_from_the_robot_or_the_mask_and_what_cannot_be_counted_is_refused(spec):
    assert parse_mask("2,-1,1") == (True, True, False, True)
    assert joints_of(None, spec) == (2, 0, -1)  # the gripper stays absolute
    assert joints_of((True, False, True), spec) == (2, -1, 1)
    assert joints_of((True, False), None) == (0, -1)
    odd = HeldSource([*random_source(3).episodes.values(), *random_source(3, dim=2).episodes.values()])
    for call, error, named in (
        (lambda: joints_of((True,) * 4, spec), ConfigError, ("mask", 4, "arm3", 3)),
        (lambda: joints_of(None, None), ConfigError, ("delta", "mask", "experiment")),
        (lambda: Statistics(2).add(np.array([[0, 0], [np.inf, 0]], np.float32)), DataError, (1, "inf", 0)),
        (lambda: Statistics(2).add(np.zeros((3, 4), np.float32)), DataError, (2, "[3, 4]")),
        (lambda: Statistics(2).quantile(), DataError, ("step",)),
        (lambda: compute(HeldSource([]), StatsRequest()), DataError, ("memory",)),
        (lambda: compute(odd, StatsRequest()), DataError, ("memory", 1, 2, 3)),
        (lambda: StatsRequest(std_floor=0), ConfigError, ("std_floor", 0)),
        (lambda: StatsRequest("delta"), ConfigError, ("delta", "absolute", "mask")),
        *((lambda mask=mask: parse_mask(mask), ConfigError, ("mask", repr(mask), "6,-1,6,-1")) for mask in ("", "1.5")),
    ):  # fmt: skip
        with pytest.raises(error, match=naming(*named)):
            call()


def test_chunks_repeat_the_last_action_and_start_from_the_first_state():
    action = np.array([[1, 5], [2, 6], [3, 7]])
    episode = episode_of(np.array([[10, 0], [20, 0], [30, 0]]), action)
    absolute = chunks(episode, StatsRequest(horizon=3), np.array([0, 1, 2]))
    np.testing.assert_array_equal(absolute[:, :, 0], [[1, 2, 3], [2, 3, 3], [3, 3, 3]])
    delta = chunks(episode, StatsRequest("delta", joints=(0, -1), horizon=2), np.array([0, 2]))
    np.testing.assert_array_equal(delta, [[[-9, 5], [-8, 6]], [[-27, 7], [-27, 7]]])
    np.testing.assert_array_equal(episode.steps.action, action)  # what was read is not changed
    with pytest.raises(ConfigError, match=naming("mask", 3, 2)):
        chunks(episode, StatsRequest("delta", joints=(0, 1, 2)), np.array([0]))


@pytest.mark.parametrize(("keep", "actions"), [(10, "absolute"), (10**6, "delta")])
def test_statistics_are_those_of_all_windows(keep, actions, monkeypatch):
    monkeypatch.setattr(running_statistics, "KEEP", keep)
    source = random_source(7, 30, 4)
    joints = (2, -1, 0) if actions == "delta" else ()
    computed = compute(source, StatsRequest(actions, joints, horizon=5))  # type: ignore[arg-type]
    rows = []
    for e in source.episodes.values():
        for t in range(e.steps.n):
            for i in range(5):
                row = e.steps.action[min(t + i, e.steps.n - 1)].copy()
                if joints:
                    row[[0, 2]] -= e.steps.observation["state"][t][[2, 0]]
                rows.append(row)
    states = np.concatenate([e.steps.observation["state"] for e in source.episodes.values()])
    for name, values in (("state", states), ("actions", np.array(rows))):
        stats, values = computed.vectors[name].stats, values.astype(np.float64)
        np.testing.assert_allclose(stats.mean, values.mean(0), atol=1e-7)
        np.testing.assert_allclose(stats.std, values.std(0), rtol=1e-6)
        np.testing.assert_allclose([stats.q01, stats.q99], np.quantile(values, [0.01, 0.99], axis=0), rtol=1e-12)
    assert (computed.episodes, computed.steps, computed.samples) == (3, 41, 41)
    assert [*source.reads.values()] == [1] * 3


def test_a_subset_is_seeded_and_without_repetition():
    parts = [np.arange(n)[:, None] + 100 * k for k, n in enumerate((50, 80, 1))]
    source = HeldSource(episode_of(part // 100, part) for part in parts)
    first, again, other = (compute(source, StatsRequest(max_samples=40, seed=s)) for s in (3, 3, 4))
    a, b, c = (x.vectors["actions"].stats for x in (first, again, other))
    assert a.mean == b.mean != c.mean
    assert (first.samples, first.steps, first.note()["seed"]) == (40, 131, 3)
    # A subset of all steps but one holds each of the others once.
    most, rows = compute(source, StatsRequest(max_samples=130)), np.concatenate(parts)
    missing = rows.sum() - most.vectors["actions"].stats.mean[0] * 130
    assert min(abs(missing - v) for v in rows) < 1e-6
    # An episode without a drawn step is read once.
    source = random_source(*[1] * 30, dim=1)
    compute(source, StatsRequest(max_samples=3))
    assert sum(source.reads.values()) == 30 + 3


def test_still_dimensions_do_not_explode():
    rng = np.random.default_rng(0)
    state = rng.normal(size=(1000, 4))
    state[:, 1] = 0.7  # constant
    state[:, 2] = 0
    state[::500, 2] = 1  # hardly ever moves, but then far
    state[:, 3] = 3 + 1e-4 * rng.normal(size=1000)  # noise of a sensor
    computed = compute(HeldSource([episode_of(state, state)]), StatsRequest())
    measured = computed.vectors["state"]
    assert (measured.std_floored, measured.quantiles_widened) == ([1, 3], [1, 2, 3])
    moved, stats = state[:1] + 0.5, measured.stats  # half a radian from what was seen
    assert np.abs((moved - stats.mean) / (stats.std + 1e-6)).max() < 60
    assert np.abs((moved - stats.q01) / (stats.q99 - stats.q01 + 1e-6) * 2 - 1).max() < 60
    assert (stats.q01[2], stats.q99[2]) == (0, 1)


def test_the_file_has_openpis_layout_comes_back_and_survives_a_failed_write(tmp_path, monkeypatch):
    computed = compute(random_source(20, 30), StatsRequest("delta", (0, 1, -1), horizon=3))
    vectors = {name: m.stats for name, m in computed.vectors.items()}
    path = write_norm_stats(tmp_path / "assets" / "trossen", vectors, computed.note())
    assert [*tmp_path.rglob("*.json")] == [path] == [tmp_path / "assets" / "trossen" / "norm_stats.json"]
    content = json.loads(path.read_text())
    assert set(content["norm_stats"]) == {"state", "actions"}
    assert list(content["norm_stats"]["actions"]) == ["mean", "std", "q01", "q99"]
    assert (content["serl_chunk"]["mask"], content["serl_chunk"]["horizon"]) == ([True, True, False], 3)
    for where in (path, path.parent):
        for name, stats in read_norm_stats(where)[0].items():
            for a, b in zip(stats, vectors[name], strict=True):
                np.testing.assert_array_equal(a, b)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(DataError, match=naming("norm_stats.json", "No space left on device")):
            write_norm_stats(path, {"state": vectors["state"]}, {})
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["norm_stats.json"]  # no part is left
    path.write_text(json.dumps({"norm_stats": {"state": {"mean": [0.0], "std": [1.0], "q01": None, "q99": None}}}))
    assert read_norm_stats(path)[0]["state"].q99 is None
