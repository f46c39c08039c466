"""openpi's transforms and its units of an ALOHA, against recorded numbers of its code."""

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
from serl_chunk.data.normalise.robot_units import UNITS, units_fault
from serl_chunk.data.normalise.running_statistics import Statistics
from serl_chunk.types import ConfigError, DataError, RobotSpec

FOLDER = Path(__file__).parents[1] / "pi0_transforms"
ARRAYS = dict(np.load(FOLDER / "transforms.npz"))
DIM, HORIZON = 14, 10
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
    return fit_normaliser(spec, NormaliserConfig("openpi", norm_stats=str(file), **settings), HORIZON, [])


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
    bounded = fit_normaliser(ALOHA, NormaliserConfig("absolute_range"), HORIZON, [])
    far, lost = np.full((20, DIM), 50.0, np.float32), np.zeros(20, np.int32)
    assert (norm.bounded, norm.count_outside(far, far, lost)) == (False, (0, 0))
    assert bounded.count_outside(far, far, lost)[0] > 0


@pytest.fixture(scope="module")
def demos(make_episode):
    return [make_episode(ALOHA, n, seed=n) for n in (12, 9)]


@pytest.mark.parametrize("robot", ["none", "aloha"])
def test_our_own_statistics_are_of_what_the_transforms_see(tmp_path, demos, robot):
    """Coded with their own statistics, demonstrations have mean 0 and deviation 1."""
    file = written_statistics(tmp_path, demos, actions="delta", joints=JOINTS, horizon=HORIZON, robot=robot)
    norm = fitted(file, robot=robot, delta_mask=MASK)
    chunks = []
    for e in demos:
        padded = np.concatenate([e.steps.action, np.repeat(e.steps.action[-1:], HORIZON, 0)])
        chunks += [norm.encode(e.steps.observation["state"][t], padded[t : t + HORIZON]) for t in range(e.steps.n)]
    states = np.concatenate([e.steps.observation["state"] for e in demos])
    for coded in (norm.observe(states), np.concatenate(chunks)):
        same(coded.mean(0), 0, atol=1e-4)
        same(coded.std(0), 1, atol=1e-3)


def test_what_does_not_fit_is_refused(tmp_path, demos):
    padded = NormStats(*(np.concatenate([values, np.zeros(32 - DIM)]) for values in STATS))
    assert fitted(written(tmp_path / "padded", padded)).digest() == fitted(FOLDER).digest()
    short = written(tmp_path / "short", NormStats(*(values[:7] for values in STATS)))
    file = written(tmp_path, UNSCALED)
    with_cube = dataclasses.replace(ALOHA, state_dim=20, name="with_cube")
    unmeasured = dataclasses.replace(ALOHA, joint_of_action=(-1,) * DIM)
    deltas = written_statistics(tmp_path / "d", demos, actions="delta", joints=JOINTS, horizon=3)
    plain = written_statistics(tmp_path / "p", demos, robot="aloha")
    narrow = [
        e._replace(steps=dataclasses.replace(e.steps, observation={"state": e.steps.observation["state"][:, :5]}))
        for e in demos
    ]
    for parameter, words, make in (
        ("normaliser.norm_stats", ("openpi",), lambda: NormaliserConfig("openpi")),
        ("normaliser.delta_mask", ("(6, 0)", "6,-1,6,-1"), lambda: fitted("x.json", delta_mask=(6, 0))),
        (None, ("aloha", 14, 7), lambda: fitted(short)),
        ("normaliser.scaling", ("z_score", "q01"), lambda: fitted(file, scaling="quantiles")),
        ("normaliser.robot", ("aloha", 14, 20), lambda: fitted(file, with_cube, robot="aloha")),
        ("normaliser.delta_mask", (15, 14), lambda: fitted(file, delta_mask=(15,))),
        ("normaliser.delta_mask", ("aloha", "action 0"), lambda: fitted(file, unmeasured, delta_mask=MASK)),
        # of other differences or units
        ("normaliser.delta_mask", ("none", "data stats"), lambda: fitted(deltas)),
        ("normaliser.delta_mask", ("6, -1, 6, -1",), lambda: fitted(plain, delta_mask=MASK, robot="aloha")),
        ("", (3, HORIZON, "chunk.horizon"), lambda: fitted(deltas, delta_mask=MASK)),
        ("normaliser.robot", ("'aloha'", "'none'", "data stats"), lambda: fitted(plain)),
        ("normaliser.robot", ("'aloha'",),  # of the state, in another mode
         lambda: fit_normaliser(ALOHA, NormaliserConfig("relative", norm_stats=plain), HORIZON, [])),
        ("robot", ("aloha", 5), lambda: written_statistics(tmp_path, narrow, robot="aloha")),
    ):  # fmt: skip
        with pytest.raises(DataError if parameter is None else ConfigError, match=naming(*words)) as refused:
            make()
        assert not parameter or refused.value.parameter == parameter
