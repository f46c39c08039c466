"""Statistics and the maps between the robot's units and model space."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from unittest.mock import patch

import numpy as np
import pytest
from errors import naming
from held_source import written_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.data.normalise import normaliser
from serl_chunk.data.normalise.normaliser import Normaliser, fit_normaliser
from serl_chunk.types import ConfigError, DataError, Episode

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


def test_numbers_outside_of_model_space_are_counted_over_all_chunks(spec, demos):
    fitted = fit_normaliser(spec, NormaliserConfig(actions="relative", demo_range=1.0), HORIZON, demos)
    narrow = dataclasses.replace(fitted, scale=fitted.scale / 2)
    for demo in demos:
        steps = demo.steps
        columns = steps.observation["state"], steps.action, steps.lost_ticks
        chunks = [narrow.encode(*window) for window in _windows(demo, HORIZON)]
        numbers = sum(chunk.size for chunk in chunks)
        assert fitted.count_outside(*columns) == (0, numbers)  # the extremes are 1, and rounding does not count
        assert narrow.count_outside(*columns) == (sum(int((abs(c) > 1 + 1e-5).sum()) for c in chunks), numbers)
        lost = np.arange(steps.n) == 2  # a gap before the third step: no chunk crosses it
        parts = [narrow.count_outside(*(column[part] for column in columns)) for part in (slice(2), slice(2, None))]
        assert narrow.count_outside(*columns[:2], lost) == tuple(map(sum, zip(*parts, strict=True)))


def test_no_difference_across_a_gap_is_demonstrated(spec, make_episode):
    first, second = (make_episode(spec, n, seed=n, image_ticks={}) for n in (5, 7))
    joined = [np.concatenate([a, b]) for a, b in [
        (first.steps.observation["state"], second.steps.observation["state"] + 99),
        (first.steps.action, second.steps.action + 99),
    ]]  # fmt: skip
    lost = np.where(np.arange(12) == 5, 150, 0).astype(np.int32)
    whole = make_episode(spec, 12, image_ticks={})
    steps = dataclasses.replace(whole.steps, observation={"state": joined[0]}, action=joined[1], lost_ticks=lost)
    apart = fit_normaliser(spec, NormaliserConfig(actions="relative"), HORIZON, [whole._replace(steps=steps)])
    beyond = [j >= 0 and d not in spec.grippers for d, j in enumerate(spec.joint_of_action)]
    assert any(beyond)
    assert np.abs(apart.encode(joined[0][5:6], joined[1][None, 5:9])[..., beyond]).max() <= 1
    assert apart.scale[:, beyond].max() < 20  # 99 lies between the two halves


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
    norm = fit_normaliser(spec, NormaliserConfig(actions="relative"), HORIZON, demos)
    np.testing.assert_array_equal(norm.joint, [2, 0, -1])  # the gripper stays absolute
    state, chunk = demos[0].steps.observation["state"][0], demos[0].steps.action[:HORIZON]
    shift = np.array([0.5, 9.0, -0.25, 7.0, 8.0], np.float32)
    moved = chunk + np.array([-0.25, 0.5, 0.0], np.float32)
    np.testing.assert_allclose(norm.encode(state + shift, moved), norm.encode(state, chunk), atol=1e-5)


def test_relative_without_demonstrations_means_stay_near(spec):
    norm = fit_normaliser(spec, NormaliserConfig(actions="relative"), 50, [])
    state = np.array([0.3, 0.5, -0.4, 9, 9], np.float32)
    stay = norm.decode(state, np.zeros((50, 3), np.float32))
    np.testing.assert_allclose(stay[:, :2], np.tile([-0.4, 0.3], (50, 1)), atol=1e-6)
    np.testing.assert_allclose(stay[:, 2], 0.5)  # gripper: the middle of its range
    # 5 % of the ranges (4 and 4) per tick, never more than a whole range
    np.testing.assert_allclose(norm.scale[:, 0], np.minimum(0.2 * np.arange(1, 51), 4.0), rtol=1e-6)
    np.testing.assert_allclose(norm.scale[:, 2], 0.5)


def test_absolute_range_maps_the_limits_to_one(spec, demos):
    norm = fit_normaliser(spec, NormaliserConfig(actions="absolute_range"), HORIZON, demos)
    limits = np.array([spec.action_low, spec.action_high], np.float32)
    coded = norm.encode(np.zeros(5, np.float32), limits)
    np.testing.assert_allclose(coded, [[-1] * 3, [1] * 3], atol=1e-6)


def test_states_have_mean_0_and_deviation_1_or_the_floor(spec, demos, monkeypatch):
    monkeypatch.setattr(normaliser, "STATE_FLOOR", 0.5)
    norm = fit_normaliser(spec, NormaliserConfig(), HORIZON, demos)
    coded = norm.observe(np.concatenate([e.steps.observation["state"] for e in demos]))
    np.testing.assert_allclose(coded.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(coded.std(0), 1, atol=1e-4)
    for e in demos:
        constant = e.steps.observation["state"].copy()
        constant[:, 3] = 2.0
        e = e._replace(steps=dataclasses.replace(e.steps, observation={"state": constant}))
        assert fit_normaliser(spec, NormaliserConfig(), HORIZON, [e]).state_std[3] == np.float32(0.5)
    plain = fit_normaliser(spec, NormaliserConfig(state=False), HORIZON, demos)
    np.testing.assert_array_equal(plain.observe(coded), coded)


def test_statistics_of_many_steps_keep_their_digits(joints_spec, make_episode):
    """A joint that rests at 1000.1 for 2^17 ticks: float32 sums would be off by whole units."""
    small = make_episode(joints_spec, 2, image_ticks={})
    n = 2**17
    state = np.full((n, 2), 1000.1, np.float32)
    columns = {"action": np.zeros((n, 2), np.float32), "lost_ticks": np.zeros(n, np.int32)}
    steps = dataclasses.replace(small.steps, observation={"state": state}, **columns)
    norm = fit_normaliser(joints_spec, NormaliserConfig(), 1, [small._replace(steps=steps)])
    np.testing.assert_allclose(norm.state_mean, state[0], rtol=1e-6)
    np.testing.assert_array_equal(norm.state_std, np.float32(0.01))


def test_offsets_beyond_every_demonstration_take_the_longest_seen_range(spec, demos):
    norm = fit_normaliser(spec, NormaliserConfig(actions="relative"), 20, demos)
    assert norm.horizon == 20
    np.testing.assert_array_equal(norm.scale[12:], np.tile(norm.scale[11], (8, 1)))
    np.testing.assert_array_equal(norm.centre[12:], np.tile(norm.centre[11], (8, 1)))
    assert (norm.scale > 0).all()


@pytest.mark.parametrize("name", ["state_mean", "state_std", "centre", "scale", "joint"])
def test_the_digest_changes_with_any_number(spec, demos, name):
    norm = fit_normaliser(spec, NormaliserConfig(), HORIZON, demos)
    arrays = {k: v.copy() for k, v in norm.to_arrays().items()}
    assert Normaliser.from_arrays(norm.mode, arrays).digest() == norm.digest()
    assert Normaliser.from_arrays("absolute_demo", arrays).digest() != norm.digest()
    arrays[name].flat[-1] -= 1
    assert Normaliser.from_arrays(norm.mode, arrays).digest() != norm.digest()


def test_it_cannot_be_changed(spec, demos):
    norm = fit_normaliser(spec, NormaliserConfig(), HORIZON, demos)
    with pytest.raises(ValueError, match=naming("read-only")):
        norm.scale[0] = 1
    arrays = {k: v.copy() for k, v in norm.to_arrays().items()}
    copied = Normaliser.from_arrays(norm.mode, arrays)
    arrays["scale"][:] = 7  # the caller's array is the caller's
    assert copied.digest() == norm.digest()
    joint = arrays.pop("joint")
    for other, named in (
        ({"scale": arrays["scale"][:2], "joint": joint}, ("scale", "[H, A]", "(2, 3)")),
        ({"joint": np.array([0, 1, 5])}, ("joint", 5)),
        ({}, ("joint", "centre, scale, state_mean, state_std")),
    ):
        with pytest.raises(DataError, match=naming(*named)):
            Normaliser.from_arrays("relative", arrays | other)


@pytest.mark.parametrize("horizon", [1, 3])
def test_a_longer_chunk_than_the_statistics_is_refused(spec, horizon):
    norm = fit_normaliser(spec, NormaliserConfig(), horizon, [])
    chunk, state = np.zeros((5, 3), np.float32), np.zeros(5, np.float32)
    for apply in (norm.encode, norm.decode):
        with pytest.raises(DataError, match=naming(5, horizon)):
            apply(state, chunk)


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
        (DataError, ("none.json", os.strerror(errno.ENOENT)), "none.json", {}),
    ):  # fmt: skip
        with pytest.raises(error, match=naming(*named)):
            fit(file, **how)
