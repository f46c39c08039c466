"""Published sets in HDF5, D4RL's and robomimic's, and HIL-SERL's pickles: where episodes end, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import (
    KEYS,
    Row,
    amended,
    hdf5_file,
    hil_serl,
    minari,
    notes_of,
    pickled,
    read_all,
    robomimic,
    states_of,
    transitions,
)
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.demos import end_at_first_success
from serl_chunk.data.formats.hil_serl import FORMAT
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import CameraSpec, DataError, Outcome, RobotSpec, Source

ANT = RobotSpec("ant", 10.0, 3, (-1.0,) * 2, (1.0,) * 2, (-1,) * 2, (), (), max_episode_steps=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "low_dim.hdf5"


def test_terminals_and_timeouts_end_episodes(path: Path) -> None:
    content = transitions("..G.O.T..")
    goal, late, fell, last = read_all(hdf5_file(path, content), hz=50.0)
    assert (goal.end.terminated, goal.end.outcome, goal.steps.reward.tolist()) == (True, Outcome.SUCCESS, [0, 0, 1])
    assert (late.end.terminated, late.end.truncated, last.end.truncated) == (False, True, True)
    assert (fell.end.terminated, fell.end.outcome) == (True, Outcome.UNKNOWN)
    # The next row begins another episode: only where no target looks past the end does the last observation serve.
    assert goal.end.final_observation["state"].tolist() == [2, 2, 2]
    assert [each.end.final_observation is None for each in (late, fell, last)] == [True, False, True]
    assert np.array_equal(late.steps.action, content["actions"][3:5])
    assert np.allclose(goal.steps.stamp, [0, 0.02, 0.04])
    stored = read_all(hdf5_file(path, transitions("..G.O..", successors=True)))
    assert [e.end.final_observation["state"][0] for e in stored] == [2.5, 4.5, 7]
    rewards = np.array([0.5, 2, 3, 1], np.float32)  # dense ones tell no success
    (got,) = read_all(hdf5_file(path, transitions("...T") | {"rewards": rewards}))
    assert (got.end.terminated, got.end.outcome, got.steps.reward.tolist()) == (True, Outcome.UNKNOWN, rewards.tolist())
    for name, actor in (("pen-human", Source.HUMAN), ("hopper_random", Source.RANDOM), ("hopper", Source.POLICY)):
        (got,) = read_all(hdf5_file(path.with_name(f"{name}.hdf5"), transitions("..O")))
        assert set(got.steps.source) == {actor}  # told by the name


@pytest.mark.parametrize(("ends", "stored", "options", "rows", "terminated", "note"), [
    ("..G.O.T..", {}, {}, [[0, 1, 2], [3, 4], [5, 6], [7, 8]], [1, 0, 1, 0], "by `terminals` and `timeouts`"),
    ("..r..T.r....", {"timeouts": False, "successors": True}, {}, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10, 11]],
     [0, 1, 0, 0], "where the next row does not go on"),
    (".....T.......", {"timeouts": False}, {"spec": ANT}, [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]],
     [0, 1, 0, 0], "after 4 steps"),
    ("..T.T", {"timeouts": False}, {}, [[0, 1, 2], [3, 4]], [1, 1], "`terminals` alone"),
    ("..GGG..O.G", {}, {}, [[0, 1, 2], [5, 6, 7], [8, 9]], [1, 0, 1], "2 steps that are terminal like"),
])  # fmt: skip
def test_what_ends_episodes_is_said(path, monkeypatch, ends, stored, options, rows, terminated, note):
    hdf5_file(path, transitions(ends, **stored))
    for block in (100_000, 2, 3):
        monkeypatch.setattr("serl_chunk.data.formats.d4rl._BLOCK", block)
        episodes = read_all(path, **options)
        assert states_of(episodes) == rows
        assert [e.end.terminated for e in episodes] == terminated
    assert note in notes_of(path, **options)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.text("..TO", min_size=1, max_size=20), proportion=st.floats(0.1, 1))
def test_every_row_is_in_one_episode(tmp_path: Path, ends: str, proportion: float) -> None:
    path = hdf5_file(tmp_path / "x.hdf5", transitions(ends))
    episodes = states_of(read_all(path))
    dropped = sum(a == b == "T" for a, b in zip("." + ends, ends, strict=False))
    rows = [int(r) for rows in episodes for r in rows]
    assert (len(rows), rows) == (len(ends) - dropped, sorted(set(rows)))
    assert all(ends[int(r)] == "." for rows in episodes for r in rows[:-1])
    some = states_of(read_all(path, proportion=proportion))
    assert 1 <= len(some) <= len(episodes)
    assert some == episodes[: len(some)]


SUCCESS, FAILURE, UNKNOWN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


def test_demonstrations_of_robomimic_come_back(path: Path) -> None:
    source = open_episodes(robomimic(path), ReadOptions())
    assert source.hz == open_episodes(path, ReadOptions(hz=20.0)).hz == 20
    first, second = map(source.read, source.keys())
    with h5py.File(path) as file:
        demo = file["data/demo_0"]
        state, after = (
            np.concatenate([demo[f"{group}/{k}"][()] for k in KEYS], axis=1).astype(np.float32)
            for group in ("obs", "next_obs")
        )
        assert np.array_equal(first.steps.observation["state"], state)
        assert np.array_equal(first.end.final_observation["state"], after[-1])
        assert np.array_equal(first.steps.action, demo["actions"][()].astype(np.float32))
    assert first.steps.reward.tolist() == [0, 0, 0, 1]
    assert np.allclose(first.steps.stamp, np.arange(4) / 20)
    assert (set(first.steps.source), first.begin.task) == ({Source.HUMAN}, "NutAssemblySquare")
    assert (first.end.terminated, first.end.outcome) == (True, SUCCESS)
    assert (second.end.terminated, second.end.truncated, second.end.outcome) == (False, True, UNKNOWN)
    robomimic(path, ((0, 1),) * 12)  # in the order of their numbers
    assert open_episodes(path, ReadOptions()).keys() == [f"demo_{i}" for i in range(12)]
    assert open_episodes(path, ReadOptions(proportion=0.25)).keys() == ["demo_0", "demo_1", "demo_2"]
    generated = robomimic(path.parent / "mg" / "low_dim.hdf5")
    assert set(read_all(generated)[0].steps.source) == {Source.POLICY}


def test_the_state_has_an_order_of_its_own_and_is_said(path: Path) -> None:
    two = {"object": 41, "robot1_gripper_qpos": 2, "robot0_eef_pos": 3, "robot1_eef_pos": 3, "robot0_eef_quat": 4}
    (first, _), notes = read_all(robomimic(path, keys=two)), notes_of(path)
    order = ["robot0_eef_pos", "robot0_eef_quat", "robot1_eef_pos", "robot1_gripper_qpos", "object"]
    with h5py.File(path) as file:
        expected = np.concatenate([file[f"data/demo_0/obs/{k}"][0] for k in order]).astype(np.float32)
    assert np.array_equal(first.steps.observation["state"][0], expected)
    assert f"the state is {' + '.join(f'obs/{name}' for name in order)}, as in robomimic" in notes


def test_successes_are_where_rewards_are_1_and_an_outcome_may_be_said_of_the_others(path: Path) -> None:
    inside, last = read_all(robomimic(path, ((0, 1, 0), (0, 1, 1))))
    assert (inside.steps.n, inside.end.terminated, inside.end.outcome, last.end.terminated) == (3, False, UNKNOWN, True)
    assert [end_at_first_success(e)[0].steps.n for e in (inside, last)] == [2, 2]
    (shaped,) = read_all(robomimic(path, ((0.1, 0.5, 0.9),)))
    assert shaped.end.outcome is UNKNOWN
    assert np.allclose(shaped.steps.reward, [0.1, 0.5, 0.9])
    robomimic(path, ((0, 0, 1), (0, 0), (0, 1, 0)))
    won, lost = read_all(path, success=True), read_all(path, success=False)
    assert [e.end.outcome for e in won] == [SUCCESS, SUCCESS, UNKNOWN]
    assert (won[1].end.terminated, won[1].end.reward) == (True, 1.0)
    assert (lost[1].end.terminated, lost[1].end.outcome, lost[1].end.reward) == (True, FAILURE, None)


def test_without_next_obs_the_last_observation_is_missing_unless_it_ends_the_task(path: Path) -> None:
    amended(robomimic(path, images=True), {f"data/demo_{i}/next_obs": None for i in range(2)})
    won, cut = read_all(path)
    assert won.end.terminated
    assert np.array_equal(won.end.final_observation["state"], won.steps.observation["state"][-1])
    assert set(won.end.final_observation) == {"state", "images/agentview", "images/eye_in_hand"}
    assert cut.end.final_observation is None


Dump = Callable[..., Path]
BOTH = ("observations", "next_observations")


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    return lambda rows, name="demo_data/usb_2.pkl", protocol=4: pickled(tmp_path / name, rows, protocol)


def frames_of(episode: Any, camera: str) -> np.ndarray:
    return np.asarray(episode.steps.sparse[f"images/{camera}"].values)


@pytest.mark.parametrize(("protocol", "axes"), [(2, False), (5, True)])
def test_a_demonstration_comes_back_with_its_last_observation(dump: Dump, protocol: int, axes: bool) -> None:
    rows = hil_serl(5, 1) + hil_serl(3, 2)
    stored = [row | {key: {k: v if axes else v[0] for k, v in row[key].items()} for key in BOTH} for row in rows]
    source = FORMAT.open(dump(stored, protocol=protocol), ReadOptions(hz=10.0, task="plug"))
    assert (source.hz, source.keys()) == (10, ["usb_2.pkl:0", "usb_2.pkl:5"])
    first, second = map(source.read, source.keys())
    assert (first.steps.n, second.steps.n, first.begin.task) == (5, 3, "plug")
    final = first.end.final_observation
    for t, row in enumerate([*rows[:5], {"observations": rows[4]["next_observations"]}]):
        got = final if t == 5 else first.steps.observation_at(t)
        for name, key in (("state", "state"), ("images/wrist_1", "wrist_1"), ("images/side", "side")):
            assert np.array_equal(got[name], row["observations"][key][0])
    assert np.array_equal(first.steps.action, np.stack([r["actions"] for r in rows[:5]]).astype(np.float32))
    assert first.steps.reward.tolist() == [0, 0, 0, 0, 1]
    assert np.allclose(first.steps.stamp, np.arange(5) / 10)
    assert (first.end.terminated, first.end.truncated, first.end.outcome) == (True, False, Outcome.SUCCESS)
    assert len({first.begin.episode_id, second.begin.episode_id}) == 2


def with_last(rows: list[Row], **changed: Any) -> list[Row]:
    return [*rows[:-1], rows[-1] | changed]


@pytest.mark.parametrize(("rows", "options", "ends", "noted"), [
    (hil_serl(3, 1, success=False) + hil_serl(3, 2), {},
     [(False, Outcome.UNKNOWN, None), (True, Outcome.SUCCESS, None)],
     "failure and time-out are stored alike"),
    (hil_serl(3, 1, success=False), {"success": False}, [(True, Outcome.FAILURE, None)], ""),
    (with_last(hil_serl(3, success=False), masks=1.0), {"success": False},  # a time limit
     [(False, Outcome.UNKNOWN, None)], ""),
    (with_last(hil_serl(3), rewards=0), {}, [(True, Outcome.SUCCESS, 1.0)], "1 episode succeeded by infos"),
    (hil_serl(4, 1, ended=False) + hil_serl(3, 2) + hil_serl(2, 3, ended=False), {},
     [(False, Outcome.UNKNOWN, None), (True, Outcome.SUCCESS, None), (False, Outcome.UNKNOWN, None)],
     "1 episode broke off"),
])  # fmt: skip
def test_ends_are_what_is_recorded_and_what_is_guessed_is_said(dump, rows, options, ends, noted):
    path = dump(rows)
    found = read_all(path, **options)
    assert [(e.end.terminated, e.end.outcome, e.end.reward) for e in found] == ends
    assert all(e.end.truncated is not e.end.terminated for e in found)
    last = 0
    for episode in found:
        last += episode.steps.n
        assert np.array_equal(episode.end.final_observation["state"], rows[last - 1]["next_observations"]["state"][0])
    assert noted in notes_of(path, **options)


def test_a_run_is_read_across_files_and_interventions_are_found(dump: Dump, tmp_path: Path) -> None:
    rows = hil_serl(7, 1, infos=False) + hil_serl(6, 2, infos=False, success=False)
    human = [2, 3, 9]
    for name, part in {"1000": rows[:5], "2000": rows[5:9], "10000": rows[9:]}.items():
        dump(part, f"run/buffer/transitions_{name}.pkl")
    dump([rows[i] for i in human[:2]], "run/demo_buffer/transitions_1000.pkl")
    dump([rows[i] for i in human[2:]], "run/demo_buffer/transitions_10000.pkl")
    for path in (tmp_path / "run", tmp_path / "run" / "buffer"):
        assert FORMAT.matches(path)
        episodes = read_all(path)
        assert [e.steps.n for e in episodes] == [7, 6]
        source = np.concatenate([e.steps.source for e in episodes])
        assert np.flatnonzero(source == Source.HUMAN).tolist() == human
        assert set(source) == {Source.HUMAN, Source.POLICY}
        states = np.concatenate([e.steps.observation["state"] for e in episodes])
        assert np.array_equal(states, np.concatenate([r["observations"]["state"] for r in rows]))
        frames = np.concatenate([frames_of(e, "side") for e in episodes])
        assert np.array_equal(frames, np.concatenate([r["observations"]["side"] for r in rows]))
    fragments = read_all(tmp_path / "run" / "demo_buffer", "hil_serl")
    assert [(e.steps.n, set(e.steps.source)) for e in fragments] == [(2, {Source.HUMAN}), (1, {Source.HUMAN})]


def test_who_acted(dump: Dump) -> None:
    rows = hil_serl(4)
    del rows[1]["infos"]["intervene_action"]
    del rows[2]["infos"]["intervene_action"]
    rows[1]["actions"] = np.zeros(4)
    plain = hil_serl(3, infos=False)
    other = dump(plain, "mine/run.pkl")
    for path, actors in (
        (dump(rows), [Source.HUMAN, Source.HOLD, Source.POLICY, Source.HUMAN]),
        (dump(plain, "run/buffer/transitions_1.pkl"), [Source.POLICY] * 3),
        (other, [Source.HUMAN] * 3),
    ):
        assert read_all(path)[0].steps.source.tolist() == actors
    assert "the source of actions is not recorded; 3 steps taken for a human's" in notes_of(other)
    for infos in (5, "grasp_penalty"):  # no dict says nothing
        path = dump([row | {"infos": infos} for row in hil_serl(2)])
        assert read_all(path)[0].steps.n == 2
        assert "grasp_penalty" not in notes_of(path)


def test_cameras_colours_and_a_proportion_of_the_episodes(dump: Dump) -> None:
    rows = hil_serl(2)
    for row in rows:
        for key in BOTH:
            row[key]["left/wrist"] = row[key].pop("side")
            row[key]["force"] = np.zeros((1, 3))
    path, how = dump(rows), {"cameras": ("left_wrist",), "color": "bgr"}
    (got,), notes = read_all(path, **how), notes_of(path, **how)
    assert list(got.steps.sparse) == ["images/left_wrist"]
    assert np.array_equal(frames_of(got, "left_wrist")[1], rows[1]["observations"]["left/wrist"][0, ..., ::-1])
    final = got.end.final_observation["images/left_wrist"]
    assert np.array_equal(final, rows[1]["next_observations"]["left/wrist"][0, ..., ::-1])
    assert "left/wrist is left_wrist" in notes
    assert "not read: force" in notes
    cameras = (CameraSpec("wrist_1", 6, 8), CameraSpec("side", 6, 8))
    spec = RobotSpec("franka", 10.0, 5, (-1.0,) * 4, (1.0,) * 4, (-1,) * 4, (), cameras, 100)
    found = read_all(dump([row for i in range(6) for row in hil_serl(3, i)]), proportion=0.5, spec=spec)
    assert [e.steps.n for e in found] == [3, 3, 3]
    assert np.allclose(found[0].steps.stamp, np.arange(3) / 10)  # the robot's rate
    rows = hil_serl(2)
    for row in rows:
        row["observations"][b"a/b"] = row["next_observations"][b"a/b"] = row["observations"]["side"]
    assert "b'a/b'" in notes_of(dump(rows))


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    ended=st.lists(st.booleans(), min_size=5, max_size=5),
    cut=st.integers(1, 6),
)
def test_episodes_come_back_however_the_files_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ended: list[bool], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("buffer")
    rows = [row for i, n in enumerate(lengths) for row in hil_serl(n, i, infos=False, ended=ended[i])]
    rows = [row | {key: {"state": row[key]["state"]} for key in BOTH} for row in rows]
    for k, start in enumerate(range(0, len(rows), cut)):
        pickled(folder / f"transitions_{k}.pkl", rows[start : start + cut])
    got = read_all(folder, "hil_serl")
    assert ([e.steps.n for e in got], [e.end.terminated for e in got]) == (lengths, ended[: len(lengths)])
    assert len({e.begin.episode_id for e in got}) == len(got)


def test_files_that_do_not_fit_together(dump: Dump, tmp_path: Path) -> None:
    dump(hil_serl(2), "demos/a.pkl")
    dump([row | {"actions": np.zeros(7)} for row in hil_serl(2)], "demos/b.pkl")
    with pytest.raises(DataError, match=naming("b.pkl", 5, 7, 4)):
        read_all(tmp_path / "demos", "hil_serl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=naming(tmp_path / "empty", ".pkl", "demo_data")):
        read_all(tmp_path / "empty", "hil_serl")


@pytest.mark.parametrize(("more", "options", "outcome", "terminated", "rewards"), [
    ({}, {}, "success", True, [0, 0, 1]),
    ({"rewards": np.array([0.5, 2, 3])}, {}, "unknown", True, [0.5, 2, 3]),  # dense ones tell no success
    ({"rewards": np.zeros(3)}, {}, "unknown", True, [0, 0, 0]),
    ({"rewards": np.zeros(3)}, {"success": True}, "success", True, [0, 0, 1]),
    ({"rewards": np.zeros(3)}, {"success": False}, "failure", True, [0, 0, 0]),
    ({"rewards": -np.ones(3), "infos/is_success": np.eye(4)[3]}, {}, "success", True, [-1, -1, 1]),
    ({"infos/success": np.zeros(4), "terminations": np.zeros(3, bool)}, {"success": True}, "unknown", False, [0, 0, 1]),
    ({"rewards": np.array([0, 5.0, 2]), "infos/success": np.eye(3)[1]}, {}, "success", True, [0, 5, 2]),
])  # fmt: skip
def test_outcomes_of_minari(path, more, options, outcome, terminated, rewards):
    (episode,) = read_all(minari(path, (3,), **more), hz=20.0, **options)
    _, steps, end = episode
    assert (end.outcome.value, end.terminated, episode.rewards.tolist()) == (outcome, terminated, rewards)
    # In the order of the names, as gymnasium flattens: arm/joints, goal.
    assert steps.observation["state"].tolist() == [[t, t, t, 0, 0] for t in range(3)]
    assert end.final_observation["state"].tolist() == [3, 3, 3, 0, 0]
    assert sorted(steps.sparse) == ["images/top", "images/wrist"]
    top, wrist = (np.asarray(end.final_observation[f"images/{name}"]).astype(int) for name in ("top", "wrist"))
    assert 0 < np.abs(top - wrist).mean() < 60  # JPEG


def test_the_folder_of_a_minari_set_is_read_and_its_name_tells_who_acted(tmp_path):
    file = minari(tmp_path / "door" / "human-v2" / "data" / "main_data.hdf5")
    for path in (file, file.parent, file.parents[1], file.parents[2]):
        source = open_episodes(path, ReadOptions(cameras=("top",), proportion=0.5))
        assert (source.format, source.keys()) == ("fields", ["episode_0"])
        assert set(source.read("episode_0").steps.source) == {Source.HUMAN}
        assert any("the state is observations/arm/joints + observations/goal" in note for note in source.notes())
