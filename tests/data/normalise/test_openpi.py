"""openpi's transforms, against recorded numbers of its code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from held_source import written_statistics

from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.data.normalise.chunk_statistics import NormStats, write_norm_stats
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.data.normalise.running_statistics import Statistics
from serl_chunk.types import ConfigError, DataError, RobotSpec

FOLDER = Path(__file__).parents[1] / "pi0_transforms"
ARRAYS = dict(np.load(FOLDER / "transforms.npz"))
DIM, HORIZON = 14, 10
ALOHA = RobotSpec(
    "aloha", 50.0, DIM, (-3.0,) * DIM, (3.0,) * DIM, tuple(range(DIM)), (6, 13), (), 100, ((0, 7), (7, 14))
)
STATS = NormStats(*(ARRAYS[f"norm/{name}"] for name in ("mean", "std", "q01", "q99")))
UNSCALED = NormStats(np.zeros(DIM), np.ones(DIM) - 1e-6, None, None)
MASK = (6, -1, 6, -1)
EXACT = {"atol": 1e-6, "rtol": 0}


def written(folder, stats=STATS, note=None):
    return str(write_norm_stats(folder, {"state": stats, "actions": stats}, note or {}))


def fitted(file, spec=ALOHA, **settings):
    return fit_normaliser(spec, NormaliserConfig("openpi", norm_stats=str(file), **settings), HORIZON, [])


@pytest.mark.parametrize(("scaling", "number"), [("z_score", 0), ("quantiles", 1)])
def test_both_scalings_are_openpis(scaling, number):
    norm = fitted(FOLDER, scaling=scaling)
    x, none = ARRAYS["norm/x"], np.zeros(DIM)
    np.testing.assert_allclose(norm.encode(none, x), ARRAYS[f"norm/normalized_q{number}"], **EXACT)
    np.testing.assert_allclose(norm.observe(x), ARRAYS[f"norm/normalized_q{number}"], **EXACT)
    # openpi's model has 32 numbers, of which a robot takes the first.
    back = norm.decode(none, ARRAYS["norm/x32"][:, :DIM])
    np.testing.assert_allclose(back, ARRAYS[f"norm/unnormalized_q{number}"][:, :DIM], **EXACT)
    unchanged = fitted(FOLDER, scaling=scaling, state=False)
    np.testing.assert_array_equal(unchanged.observe(x), x.astype(np.float32))


@pytest.mark.parametrize(("robot", "number"), [("none", 0), ("aloha", 1)])
def test_an_aloha_with_and_without_the_models_units(tmp_path, robot, number):
    file, given = written(tmp_path, UNSCALED), {name: ARRAYS[f"aloha/in/{name}"] for name in ("state", "actions")}
    recorded = {name.rpartition("/")[2]: value for name, value in ARRAYS.items() if f"/adapt{number}/" in name}
    plain, delta = fitted(file, robot=robot), fitted(file, robot=robot, delta_mask=MASK)
    state, actions = given["state"], given["actions"]
    np.testing.assert_allclose(plain.observe(state), recorded["state"], **EXACT)
    np.testing.assert_allclose(plain.encode(state, actions), recorded["actions"], **EXACT)
    np.testing.assert_allclose(delta.encode(state, actions), recorded["delta_actions"], **EXACT)
    np.testing.assert_allclose(plain.decode(state, recorded["absolute_actions"]), recorded["out_actions"], **EXACT)
    np.testing.assert_allclose(delta.decode(state, recorded["delta_actions"]), recorded["out_actions"], **EXACT)
    # As robots have it: float32, and rows of a batch.
    states, chunks = np.stack([state] * 3).astype(np.float32), np.stack([actions] * 3).astype(np.float32)
    np.testing.assert_allclose(delta.encode(states, chunks)[2], recorded["delta_actions"], atol=2e-6)
    np.testing.assert_allclose(delta.decode(states, delta.encode(states, chunks)), chunks, atol=2e-6)


def test_moments_of_our_statistics_are_openpis():
    """Its quantiles are edges of a histogram that depends on the order of batches; ours are exact."""
    statistics = Statistics(DIM)
    for part in ARRAYS["norm/data"]:
        statistics.add(part)
    np.testing.assert_allclose(statistics.moments.mean, STATS.mean, **EXACT)
    np.testing.assert_allclose(statistics.moments.std, STATS.std, **EXACT)


def test_the_state_in_the_models_units_is_what_deltas_are_from(tmp_path):
    """A joint of the other sign: what is commanded where it is measured is a difference of 0."""
    norm = fitted(written(tmp_path, UNSCALED), robot="aloha", delta_mask=MASK)
    state = np.linspace(-0.5, 0.8, DIM).astype(np.float32)
    coded = norm.encode(state, np.tile(state, (2, 1)))
    np.testing.assert_allclose(np.delete(coded, (6, 13), axis=1), 0, atol=1e-6)


def test_the_units_travel_with_the_normaliser(tmp_path):
    file = written(tmp_path, UNSCALED)
    plain, norm = fitted(file), fitted(file, robot="aloha")
    assert (plain.bounded, norm.bounded) == (False, False)
    assert "normaliser_robot" not in plain.fields()
    assert norm.fields()["normaliser_robot"] == "aloha"
    again = Normaliser.restored(norm.fields(), norm.to_arrays())
    assert again.digest() == norm.digest() != plain.digest()
    state = np.linspace(0, 1, DIM).astype(np.float32)
    np.testing.assert_array_equal(again.observe(state), norm.observe(state))
    with pytest.raises(DataError, match=naming("'koch'", "none, aloha")):
        Normaliser.restored(norm.fields() | {"normaliser_robot": "koch"}, norm.to_arrays())


def test_nothing_is_outside_of_a_space_without_bounds(tmp_path):
    norm, bounded = fitted(FOLDER), fit_normaliser(ALOHA, NormaliserConfig("absolute_range"), HORIZON, [])
    far, lost = np.full((20, DIM), 50.0, np.float32), np.zeros(20, np.int32)
    assert norm.count_outside(far, far, lost) == (0, 0)
    assert bounded.count_outside(far, far, lost)[0] > 0


def test_padded_files_are_cut_and_short_ones_refused(tmp_path):
    padded = NormStats(*(np.concatenate([values, np.zeros(32 - DIM)]) for values in STATS))
    assert fitted(written(tmp_path / "padded", padded)).digest() == fitted(FOLDER).digest()
    short = NormStats(*(values[:7] for values in STATS))
    with pytest.raises(DataError, match=naming("aloha", 14, 7)):
        fitted(written(tmp_path / "short", short))


def test_settings_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ConfigError, match=naming("normaliser.norm_stats", "openpi")):
        NormaliserConfig("openpi")
    with pytest.raises(ConfigError, match=naming("normaliser.delta_mask", "(6, 0)", "6,-1,6,-1")):
        NormaliserConfig("openpi", norm_stats="x.json", delta_mask=(6, 0))
    file = written(tmp_path, UNSCALED)
    single = dataclasses.replace(ALOHA, state_dim=20, name="with_cube")
    unmeasured = dataclasses.replace(ALOHA, joint_of_action=(-1,) * DIM)
    for parameter, words, make in (
        ("normaliser.scaling", ("z_score", "q01"), lambda: fitted(file, scaling="quantiles")),
        ("normaliser.robot", ("aloha", 14, 20), lambda: fitted(file, single, robot="aloha")),
        ("normaliser.delta_mask", (15, 14), lambda: fitted(file, delta_mask=(15,))),
        ("normaliser.delta_mask", ("aloha", "action 0"), lambda: fitted(file, unmeasured, delta_mask=MASK)),
    ):
        with pytest.raises(ConfigError, match=naming(*words)) as refused:
            make()
        assert refused.value.parameter == parameter


@pytest.fixture(scope="module")
def demos(make_episode):
    return [make_episode(ALOHA, n, seed=n) for n in (12, 9)]


@pytest.mark.parametrize("robot", ["none", "aloha"])
def test_our_own_statistics_are_of_what_the_transforms_see(tmp_path, demos, robot):
    """Coded with their own statistics, demonstrations have mean 0 and deviation 1."""
    joints = tuple(-1 if j in ALOHA.grippers else j for j in range(DIM))
    file = written_statistics(tmp_path, demos, actions="delta", joints=joints, horizon=HORIZON, robot=robot)
    norm = fitted(file, robot=robot, delta_mask=MASK)
    states = np.concatenate([e.steps.observation["state"] for e in demos])
    chunks = []
    for e in demos:
        padded = np.concatenate([e.steps.action, np.repeat(e.steps.action[-1:], HORIZON, 0)])
        chunks += [norm.encode(e.steps.observation["state"][t], padded[t : t + HORIZON]) for t in range(e.steps.n)]
    for coded in (norm.observe(states), np.concatenate(chunks)):
        np.testing.assert_allclose(coded.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(coded.std(0), 1, atol=1e-3)


def test_statistics_of_other_differences_or_units_are_refused(tmp_path, demos):
    joints = tuple(-1 if j in ALOHA.grippers else j for j in range(DIM))
    deltas = written_statistics(tmp_path / "d", demos, actions="delta", joints=joints, horizon=3)
    plain = written_statistics(tmp_path / "p", demos, robot="aloha")
    for parameter, words, make in (
        ("normaliser.delta_mask", ("none", "data stats"), lambda: fitted(deltas)),
        ("normaliser.delta_mask", ("6, -1, 6, -1",), lambda: fitted(plain, delta_mask=MASK, robot="aloha")),
        ("", (3, HORIZON, "chunk.horizon"), lambda: fitted(deltas, delta_mask=MASK)),
        ("normaliser.robot", ("'aloha'", "'none'", "data stats"), lambda: fitted(plain)),
    ):
        with pytest.raises(ConfigError, match=naming(*words)) as refused:
            make()
        assert refused.value.parameter == parameter or not parameter
    with pytest.raises(ConfigError, match=naming("normaliser.robot", "'aloha'")):  # of the state, in another mode
        fit_normaliser(ALOHA, NormaliserConfig("relative", norm_stats=plain), HORIZON, [])
    with pytest.raises(ConfigError, match=naming("robot", "aloha", 5)):
        written_statistics(tmp_path, [e._replace(steps=cut(e.steps)) for e in demos], robot="aloha")


def cut(steps):
    return dataclasses.replace(steps, observation={"state": steps.observation["state"][:, :5]})
