"""Statistics, openpi's transforms among them, and the maps between the robot's units and model space."""

from __future__ import annotations

import dataclasses
import json
import resource
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from errors import naming
from held_source import HeldSource, written_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples

from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.data.normalise import normaliser, running_statistics
from serl_chunk.data.normalise.chunk_statistics import (
    NormStats,
    StatsRequest,
    chunks,
    compute,
    joints_of,
    parse_mask,
    read_norm_stats,
    write_norm_stats,
)
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.data.normalise.robot_units import UNITS, units_fault
from serl_chunk.data.normalise.running_statistics import Moments, Statistics
from serl_chunk.types import Begin, ConfigError, DataError, End, Episode, Outcome, RobotSpec, StepBlock

MODES = ("absolute_range", "absolute_demo", "relative")
HORIZON = 4


def _windows(episode: Episode, horizon: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(state at the start, chunk of the steps there are) of every window of an episode."""
    steps = episode.steps
    return [(steps.observation["state"][t], steps.action[t : t + horizon]) for t in range(steps.n)]


@pytest.fixture(scope="module")
def demos(spec, make_episode) -> list[Episode]:
    return [make_episode(spec, n, seed=n, image_ticks={}, final=False) for n in (7, 5, 12)]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), mode=st.sampled_from(MODES), with_demos=st.booleans())
def test_decode_is_the_inverse_of_encode(spec, demos, data, mode, with_demos):
    if mode == "absolute_demo" and not with_demos:
        return
    norm = fit_normaliser(spec, NormaliserConfig(actions=mode), HORIZON, demos if with_demos else [])
    batch = data.draw(st.sampled_from([(), (1,), (2, 3)]))
    h = data.draw(st.integers(1, HORIZON))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    state = rng.uniform(-3, 3, (*batch, spec.state_dim)).astype(np.float32)
    chunk = rng.uniform(-3, 3, (*batch, h, spec.action_dim)).astype(np.float32)
    coded = norm.encode(state, chunk)
    assert coded.shape == chunk.shape
    assert coded.dtype == norm.decode(state, coded).dtype == np.float32
    np.testing.assert_allclose(norm.decode(state, coded), chunk, atol=1e-5)
    np.testing.assert_allclose(norm.encode(state, norm.decode(state, chunk)), chunk, atol=2e-4)


@pytest.mark.parametrize("mode", ["absolute_demo", "relative"])
@settings(max_examples=examples(25), deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), horizon=st.integers(1, 6))
def test_extremes_of_demonstrations_map_to_the_chosen_bound(spec, make_episode, mode, lengths, horizon):
    episodes = [make_episode(spec, n, seed=n + k, image_ticks={}) for k, n in enumerate(lengths)]
    config = NormaliserConfig(actions=mode)
    with patch.object(normaliser, "ACTION_FLOOR", 1e-6):
        norm = fit_normaliser(spec, config, horizon, episodes)
    coded = np.full((sum(lengths), horizon, spec.action_dim), np.nan)
    rows = [norm.encode(s, c) for e in episodes for s, c in _windows(e, horizon)]
    for row, values in enumerate(rows):
        coded[row, : len(values)] = values
    assert np.nanmax(np.abs(coded)) <= 0.9 + 1e-3
    for j in range(spec.action_dim):
        relative = mode == "relative" and j not in spec.grippers
        for i in range(min(horizon, max(lengths))) if relative else [0]:
            values = coded[:, i, j][np.isfinite(coded[:, i, j])]
            if np.ptp(values) > 1e-2:  # a single value has no range: it maps to 0
                np.testing.assert_allclose([values.min(), values.max()], [-0.9, 0.9], atol=1e-3)
            else:
                np.testing.assert_allclose(values, 0, atol=0.2)


def test_relative_is_relative_to_the_measured_joint(spec, demos):
    norm = fit_normaliser(spec, NormaliserConfig(actions="relative"), 20, demos)
    np.testing.assert_array_equal(norm.joint, [2, 0, -1])  # the gripper stays absolute
    state, chunk = demos[0].steps.observation["state"][0], demos[0].steps.action[:HORIZON]
    shift = np.array([0.5, 9.0, -0.25, 7.0, 8.0], np.float32)
    moved = chunk + np.array([-0.25, 0.5, 0.0], np.float32)
    np.testing.assert_allclose(norm.encode(state + shift, moved), norm.encode(state, chunk), atol=1e-5)
    # Offsets beyond every demonstration take the longest range that was seen.
    np.testing.assert_array_equal(norm.scale[12:], np.tile(norm.scale[11], (8, 1)))


def test_without_demonstrations_relative_zeros_mean_stay_and_limits_are_one(spec):
    norm = fit_normaliser(spec, NormaliserConfig(actions="relative"), 50, [])
    stay = norm.decode(np.array([0.3, 0.5, -0.4, 9, 9], np.float32), np.zeros((50, 3), np.float32))
    np.testing.assert_allclose(stay, np.tile([-0.4, 0.3, 0.5], (50, 1)), atol=1e-6)  # gripper: the middle of its range
    # 5 % of the ranges (4 and 4) per tick, never more than a whole range
    np.testing.assert_allclose(norm.scale[:, 0], np.minimum(0.2 * np.arange(1, 51), 4.0), rtol=1e-6)
    np.testing.assert_allclose(norm.scale[:, 2], 0.5)
    norm = fit_normaliser(spec, NormaliserConfig(actions="absolute_range"), HORIZON, [])
    coded = norm.encode(np.zeros(5, np.float32), np.array([spec.action_low, spec.action_high], np.float32))
    np.testing.assert_allclose(coded, [[-1] * 3, [1] * 3], atol=1e-6)


def test_states_have_mean_0_and_deviation_1_or_the_floor(spec, demos, make_episode):
    many = 2**17  # at 1000.1 float32 sums would be off by whole units
    steps = make_episode(spec, 2, image_ticks={}).steps
    still = np.full((many, 5), 1000.1, np.float32)
    columns = {"action": np.zeros((many, 3), np.float32), "lost_ticks": np.zeros(many, np.int32)}
    resting = demos[0]._replace(steps=dataclasses.replace(steps, observation={"state": still}, **columns))
    norm = fit_normaliser(spec, NormaliserConfig(), 1, [resting])
    np.testing.assert_allclose(norm.state_mean, still[0], rtol=1e-6)
    np.testing.assert_array_equal(norm.state_std, np.float32(0.01))
    norm = fit_normaliser(spec, NormaliserConfig(), HORIZON, demos)
    coded = norm.observe(np.concatenate([e.steps.observation["state"] for e in demos]))
    np.testing.assert_allclose(coded.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(coded.std(0), 1, atol=1e-4)
    plain = fit_normaliser(spec, NormaliserConfig(state=False), HORIZON, demos)
    np.testing.assert_array_equal(plain.observe(coded), coded)


def test_its_numbers_are_its_own_and_make_its_digest(spec, demos):
    norm = fit_normaliser(spec, NormaliserConfig(), HORIZON, demos)
    with pytest.raises(ValueError, match=naming("read-only")):
        norm.scale[0] = 1
    arrays = {k: v.copy() for k, v in norm.to_arrays().items()}
    copied = Normaliser.restored({"normaliser_mode": norm.mode}, arrays)
    assert Normaliser.restored({"normaliser_mode": "absolute_demo"}, arrays).digest() != norm.digest()
    for values in arrays.values():
        values.flat[-1] -= 1  # the caller's array is the caller's
        assert copied.digest() == norm.digest() != Normaliser.restored({"normaliser_mode": norm.mode}, arrays).digest()
        values.flat[-1] += 1
    joint = arrays.pop("joint")
    chunk, state = np.zeros((5, 3), np.float32), np.zeros(5, np.float32)
    short = [fit_normaliser(spec, NormaliserConfig(), horizon, []) for horizon in (1, 3)]
    made = lambda **others: lambda: Normaliser.restored({"normaliser_mode": "relative"}, arrays | others)  # noqa: E731
    for call, named in (
        (made(scale=arrays["scale"][:2], joint=joint), ("scale", "[H, A]", "(2, 3)")),
        (made(joint=np.array([0, 1, 5])), ("joint", 5)),
        (made(), ("joint", "centre, scale, state_mean, state_std")),
        (lambda: short[0].encode(state, chunk), (5, 1)),
        (lambda: short[1].decode(state, chunk), (5, 3)),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            call()


@pytest.mark.parametrize("actions", ["absolute", "delta"])
def test_a_file_of_statistics_takes_the_place_of_demonstrations(spec, demos, tmp_path, actions):
    joints = (2, 0, -1) if actions == "delta" else ()
    path = written_statistics(tmp_path, demos, actions=actions, joints=joints, horizon=HORIZON)
    norm = fit_normaliser(spec, NormaliserConfig(actions="norm_stats", norm_stats=path), HORIZON, [])
    assert norm.joint.tolist() == ([2, 0, -1] if actions == "delta" else [-1, -1, -1])
    states = np.concatenate([e.steps.observation["state"] for e in demos])
    np.testing.assert_allclose(norm.state_mean, states.mean(0), rtol=1e-4, atol=1e-6)
    rows = []
    for e in demos:
        padded = np.concatenate([e.steps.action, np.repeat(e.steps.action[-1:], HORIZON, 0)])
        rows += [norm.encode(e.steps.observation["state"][t], padded[t : t + HORIZON]) for t in range(e.steps.n)]
    coded = np.stack(rows).reshape(-1, spec.action_dim)
    np.testing.assert_allclose(np.quantile(coded, [0.01, 0.99], axis=0), [[-1] * 3, [1] * 3], atol=0.02)
    # The state's come from the file in every mode.
    again = fit_normaliser(spec, NormaliserConfig(actions="absolute_range", norm_stats=path), HORIZON, demos[:1])
    np.testing.assert_array_equal(again.state_mean, norm.state_mean)


def test_settings_and_files_of_statistics_that_do_not_fit_are_refused(spec, demos, tmp_path):
    path = written_statistics(tmp_path / "a", demos, actions="delta", joints=(2, 0, -1), horizon=2)
    openpis = json.loads((tmp_path / "a" / "norm_stats.json").read_text())
    del openpis["serl_chunk"]
    (tmp_path / "o.json").write_text(json.dumps(openpis))
    del openpis["norm_stats"]["state"]["mean"][0]
    (tmp_path / "short.json").write_text(json.dumps(openpis))

    def fit(file, actions="norm_stats", **settings):
        norm_stats = str(tmp_path / file) if file else ""
        return fit_normaliser(spec, NormaliserConfig(actions, norm_stats=norm_stats, **settings), HORIZON, [])

    stats = "normaliser.norm_stats"
    for error, named, file, how in (
        (ConfigError, ("normaliser.actions", "absolute_demo", "demo_path"), None, {"actions": "absolute_demo"}),
        (ConfigError, ("normaliser.actions", stats, "serl-chunk data stats"), None, {}),
        (ConfigError, (stats, "normaliser.state", "normaliser.actions"), path,
         {"actions": "absolute_range", "state": False}),
        (ConfigError, ("norm_stats.json", 2, "chunk.horizon", 4, "horizon"), path, {}),
        (ConfigError, ("o.json", "normaliser.actions", "norm_stats", "serl-chunk data stats"), "o.json", {}),
        (DataError, ("short.json",), "short.json", {}),
    ):  # fmt: skip
        with pytest.raises(error, match=naming(*named)):
            fit(file, **how)


FOLDER = Path(__file__).parents[1] / "pi0_transforms"
ARRAYS = dict(np.load(FOLDER / "transforms.npz"))
DIM, CHUNK = 14, 10
ALOHA = RobotSpec(
    "aloha", 50.0, DIM, (-3.0,) * DIM, (3.0,) * DIM, tuple(range(DIM)), (6, 13), (), 100, ((0, 7), (7, 14))
)
JOINTS = tuple(-1 if j in ALOHA.grippers else j for j in range(DIM))
STATS = NormStats(*(ARRAYS[f"norm/{name}"] for name in ("mean", "std", "q01", "q99")))
UNSCALED = NormStats(np.zeros(DIM), np.ones(DIM) - 1e-6, None, None)
MASK = (6, -1, 6, -1)


def same(found, recorded, atol=1e-6):
    np.testing.assert_allclose(found, recorded, atol=atol, rtol=0)


def written(folder, stats=STATS):
    return str(write_norm_stats(folder, {"state": stats, "actions": stats}, {}))


def fitted(file, spec=ALOHA, **settings):
    return fit_normaliser(spec, NormaliserConfig("openpi", norm_stats=str(file), **settings), CHUNK, [])


def test_grippers_have_openpis_curves_and_joints_its_signs():
    x, aloha = ARRAYS["gripper/x"], UNITS["aloha"]
    rows, values = np.zeros((len(x), DIM)), np.arange(1.0, DIM + 1)
    rows[:, 6] = rows[:, 13] = x
    joints = np.delete(np.arange(DIM), (6, 13))
    for convert, name in zip(aloha, ("to_angular", "from_angular_inv", "from_angular"), strict=True):
        same(convert(rows)[:, [6, 13]], np.stack([ARRAYS[f"gripper/{name}"]] * 2, 1))
        same(convert(values)[joints], values[joints] * np.array([1, -1, -1, 1, 1, 1] * 2))
    same(values, np.arange(1.0, DIM + 1))  # the caller's
    assert all(convert(values) is values for convert in UNITS["none"])
    assert units_fault("aloha", DIM, DIM) == units_fault("aloha", DIM, DIM, (6, 13)) == ""
    for sizes in ((20, DIM, (6, 13)), (DIM, 7, (6,)), (DIM, DIM, ())):
        assert units_fault("none", *sizes) == ""
        assert all(str(size) in units_fault("aloha", *sizes) for size in sizes)


@pytest.mark.parametrize(("scaling", "number"), [("z_score", 0), ("quantiles", 1)])
def test_both_scalings_are_openpis(scaling, number):
    norm, x, none = fitted(FOLDER, scaling=scaling), ARRAYS["norm/x"], np.zeros(DIM)
    same(norm.encode(none, x), ARRAYS[f"norm/normalized_q{number}"])
    same(norm.observe(x), ARRAYS[f"norm/normalized_q{number}"])
    # openpi's model has 32 numbers, of which a robot takes the first.
    same(norm.decode(none, ARRAYS["norm/x32"][:, :DIM]), ARRAYS[f"norm/unnormalized_q{number}"][:, :DIM])
    same(fitted(FOLDER, scaling=scaling, state=False).observe(x), x.astype(np.float32), atol=0)


@pytest.mark.parametrize(
    ("scaling", "change", "named"),
    [  # of dimension 4, in the file
        ("z_score", {}, ()),
        ("quantiles", {}, ()),
        ("z_score", {"std": 0.0}, ("std near 0", "state[4]", "1,000,000", "actions[4]", "data stats")),
        ("z_score", {"std": 9e-4}, ("std near 0", "state[4]", "actions[4]")),
        ("quantiles", {"q01": 1.568643, "q99": 1.569622}, ("q99 - q01", "state[4]", "-3,202", "actions[4]")),
        ("z_score", {"q01": 1.568643, "q99": 1.569622}, ()),
    ],
)
def test_statistics_of_a_constant_dimension_are_warned_of(tmp_path, caplog, scaling, change, named):
    stats = {name: np.array(value) for name, value in STATS._asdict().items()}
    for name, value in change.items():
        stats[name][4] = value
    fitted(written(tmp_path, NormStats(**stats)), scaling=scaling)
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert all(text in logged for text in named)
    assert len(caplog.records) == (2 if named else 0)


@pytest.mark.parametrize(("robot", "number"), [("none", 0), ("aloha", 1)])
def test_an_aloha_with_and_without_the_models_units(tmp_path, robot, number):
    file, (state, actions) = written(tmp_path, UNSCALED), (ARRAYS[f"aloha/in/{name}"] for name in ("state", "actions"))
    recorded = {name.rpartition("/")[2]: value for name, value in ARRAYS.items() if f"/adapt{number}/" in name}
    plain, delta = fitted(file, robot=robot), fitted(file, robot=robot, delta_mask=MASK)
    same(plain.observe(state), recorded["state"])
    same(plain.encode(state, actions), recorded["actions"])
    same(delta.encode(state, actions), recorded["delta_actions"])
    same(plain.decode(state, recorded["absolute_actions"]), recorded["out_actions"])
    same(delta.decode(state, recorded["delta_actions"]), recorded["out_actions"])
    # As robots have it: float32, and rows of a batch.
    states, chunks = np.stack([state] * 3).astype(np.float32), np.stack([actions] * 3).astype(np.float32)
    same(delta.encode(states, chunks)[2], recorded["delta_actions"], atol=2e-6)
    same(delta.decode(states, delta.encode(states, chunks)), chunks, atol=2e-6)


def test_moments_of_our_statistics_are_openpis():
    """Its quantiles are edges of a histogram that depends on the order of batches; ours are exact."""
    statistics = Statistics(DIM)
    for part in ARRAYS["norm/data"]:
        statistics.add(part)
    same((statistics.moments.mean, statistics.moments.std), (STATS.mean, STATS.std))


def test_the_units_travel_with_the_normaliser_whose_space_has_no_bounds(tmp_path):
    file, state = written(tmp_path, UNSCALED), np.linspace(0, 1, DIM).astype(np.float32)
    plain, norm = fitted(file), fitted(file, robot="aloha")
    assert "normaliser_robot" not in plain.fields()
    assert norm.fields()["normaliser_robot"] == "aloha"
    again = Normaliser.restored(norm.fields(), norm.to_arrays())
    assert again.digest() == norm.digest() != plain.digest()
    np.testing.assert_array_equal(again.observe(state), norm.observe(state))
    with pytest.raises(DataError, match=naming("'koch'", "none, aloha")):
        Normaliser.restored(norm.fields() | {"normaliser_robot": "koch"}, norm.to_arrays())
    bounded = fit_normaliser(ALOHA, NormaliserConfig("absolute_range"), CHUNK, [])
    far, lost = np.full((20, DIM), 50.0, np.float32), np.zeros(20, np.int32)
    assert (norm.bounded, norm.count_outside(far, far, lost)) == (False, (0, 0))
    assert bounded.count_outside(far, far, lost)[0] > 0


@pytest.fixture(scope="module")
def aloha_demos(make_episode):
    return [make_episode(ALOHA, n, seed=n) for n in (12, 9)]


def test_what_does_not_fit_is_refused(tmp_path, aloha_demos):
    padded = NormStats(*(np.concatenate([values, np.zeros(32 - DIM)]) for values in STATS))
    assert fitted(written(tmp_path / "padded", padded)).digest() == fitted(FOLDER).digest()
    short = written(tmp_path / "short", NormStats(*(values[:7] for values in STATS)))
    file = written(tmp_path, UNSCALED)
    with_cube = dataclasses.replace(ALOHA, state_dim=20, name="with_cube")
    unmeasured = dataclasses.replace(ALOHA, joint_of_action=(-1,) * DIM)
    deltas = written_statistics(tmp_path / "d", aloha_demos, actions="delta", joints=JOINTS, horizon=3)
    plain = written_statistics(tmp_path / "p", aloha_demos, robot="aloha")
    narrow = [
        e._replace(steps=dataclasses.replace(e.steps, observation={"state": e.steps.observation["state"][:, :5]}))
        for e in aloha_demos
    ]
    for parameter, words, make in (
        ("normaliser.delta_mask", ("(6, 0)", "6,-1,6,-1"), lambda: fitted("x.json", delta_mask=(6, 0))),
        (None, ("aloha", 14, 7), lambda: fitted(short)),
        ("normaliser.scaling", ("z_score", "q01"), lambda: fitted(file, scaling="quantiles")),
        ("normaliser.robot", ("aloha", 14, 20), lambda: fitted(file, with_cube, robot="aloha")),
        ("normaliser.delta_mask", ("aloha", "action 0"), lambda: fitted(file, unmeasured, delta_mask=MASK)),
        # of other differences or units
        ("normaliser.delta_mask", ("none", "data stats"), lambda: fitted(deltas)),
        ("normaliser.delta_mask", ("6, -1, 6, -1",), lambda: fitted(plain, delta_mask=MASK, robot="aloha")),
        ("", (3, CHUNK, "chunk.horizon"), lambda: fitted(deltas, delta_mask=MASK)),
        ("normaliser.robot", ("'aloha'", "'none'", "data stats"), lambda: fitted(plain)),
        (
            "normaliser.robot",
            ("'aloha'",),  # of the state, in another mode
            lambda: fit_normaliser(ALOHA, NormaliserConfig("relative", norm_stats=plain), CHUNK, []),
        ),
        ("robot", ("aloha", 5), lambda: written_statistics(tmp_path, narrow, robot="aloha")),
    ):
        with pytest.raises(DataError if parameter is None else ConfigError, match=naming(*words)) as refused:
            make()
        assert not parameter or refused.value.parameter == parameter


def test_no_difference_across_a_gap_is_demonstrated(spec, make_episode):
    first, second = (make_episode(spec, n, seed=n, image_ticks={}).steps for n in (5, 7))
    state = np.concatenate([first.observation["state"], second.observation["state"] + 99])
    action = np.concatenate([first.action, second.action + 99])
    lost = np.where(np.arange(12) == 5, 150, 0).astype(np.int32)
    whole = make_episode(spec, 12, image_ticks={})
    steps = dataclasses.replace(whole.steps, observation={"state": state}, action=action, lost_ticks=lost)
    apart = fit_normaliser(spec, NormaliserConfig(actions="relative"), HORIZON, [whole._replace(steps=steps)])
    joints = [0, 1]
    assert np.abs(apart.encode(state[5:6], action[None, 5:9])[..., joints]).max() <= 1
    assert apart.scale[:, joints].max() < 20  # 99 lies between the two halves


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
    ):
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
    assert (computed.episodes, computed.steps, computed.samples, [*source.reads.values()]) == (3, 41, 41, [1] * 3)


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
