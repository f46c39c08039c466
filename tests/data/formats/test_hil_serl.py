"""HIL-SERL's pickles: episodes out of flat lists of transitions."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.data.formats.hil_serl import FORMAT, HilSerlSource
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import CameraSpec, ConfigError, DataError, Outcome, RobotSpec, Source

Row = dict[str, Any]
A = 4


def frame(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, 6, 8, 3), dtype=np.uint8)


def observe(i: int) -> dict[str, np.ndarray]:
    state = np.random.default_rng(i).normal(size=(1, 5)).astype(np.float32)
    return {"state": state, "wrist_1": frame(1000 + i), "side": frame(5000 + i)}


def episode(n: int, seed: int = 0, *, success: bool = True, infos: bool = True, ended: bool = True) -> list[Row]:
    """n transitions of one episode, as record_demos.py or (without infos) train_rlpd.py store them."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        done = ended and i == n - 1
        row = {
            "observations": observe(100 * seed + i),
            "actions": rng.normal(size=A),  # float64, as from a SpaceMouse
            "next_observations": observe(100 * seed + i + 1),
            "rewards": int(done and success),
            "masks": 1.0 - done,
            "dones": np.bool_(done),
        }
        if infos:
            row["infos"] = {"succeed": bool(done and success), "left": False, "intervene_action": row["actions"]}
        rows.append(row)
    return rows


Dump = Callable[..., Path]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    def write(rows: Any, name: str = "demo_data/usb_2_demos_2026.pkl", protocol: int = 4) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(rows, protocol=protocol))
        return path

    return write


def read_all(path: Path, **options: Any) -> list[Any]:
    source = HilSerlSource(path, ReadOptions(**options))
    return list(map(source.read, source.keys()))


@pytest.mark.parametrize("protocol", range(6))
def test_a_demonstration_comes_back_with_its_last_observation(dump: Dump, protocol: int) -> None:
    rows = episode(5, 1) + episode(3, 2)
    path = dump(rows, protocol=protocol)
    source = FORMAT.open(path, ReadOptions(hz=10.0, task="plug"))
    assert source.format == "hil_serl"
    assert source.keys() == ["usb_2_demos_2026.pkl:0", "usb_2_demos_2026.pkl:5"]
    first, second = map(source.read, source.keys())
    assert (first.steps.n, second.steps.n) == (5, 3)
    for t in range(5):
        got = first.steps.observation_at(t)
        assert np.array_equal(got["state"], rows[t]["observations"]["state"][0])
        assert np.array_equal(got["images/wrist_1"], rows[t]["observations"]["wrist_1"][0])
        assert np.array_equal(got["images/side"], rows[t]["observations"]["side"][0])
    assert np.array_equal(first.steps.action, np.stack([r["actions"] for r in rows[:5]]).astype(np.float32))
    assert first.steps.reward.tolist() == [0, 0, 0, 0, 1]
    assert np.allclose(first.steps.stamp, np.arange(5) / 10)
    assert (first.steps.source == Source.HUMAN).all()
    final = first.end.final_observation
    assert np.array_equal(final["state"], rows[4]["next_observations"]["state"][0])
    assert np.array_equal(final["images/side"], rows[4]["next_observations"]["side"][0])
    assert (first.end.terminated, first.end.truncated, first.end.outcome) == (True, False, Outcome.SUCCESS)
    assert first.begin.task == "plug"
    assert len({first.begin.episode_id, second.begin.episode_id}) == 2
    assert source.hz == 10


def test_vectors_without_a_leading_axis(dump: Dump) -> None:
    rows = episode(3)
    for row in rows:
        for key in ("observations", "next_observations"):
            row[key] = {k: v[0] for k, v in row[key].items()}
    (got,) = read_all(dump(rows))
    assert got.steps.observation["state"].shape == (3, 5)
    assert np.array_equal(np.asarray(got.steps.sparse["images/side"].values)[1], rows[1]["observations"]["side"])


def test_an_end_without_success_is_no_termination_and_said(dump: Dump) -> None:
    path = dump(episode(3, 1, success=False) + episode(3, 2))
    lost, won = read_all(path)
    assert (lost.end.terminated, lost.end.truncated, lost.end.outcome) == (False, True, Outcome.UNKNOWN)
    assert won.end.terminated
    notes = HilSerlSource(path, ReadOptions()).notes()
    assert any("1 episode ended without success: failure and time-out are stored alike" in n for n in notes)
    failed = read_all(path, success=False)[0]
    assert (failed.end.terminated, failed.end.outcome) == (True, Outcome.FAILURE)
    with pytest.raises(ConfigError, match=naming("success", "failure")):
        read_all(path, success=True)


def test_a_mask_of_one_tells_a_time_limit(dump: Dump) -> None:
    rows = episode(3, success=False)
    rows[-1]["masks"] = 1.0
    path = dump(rows)
    (got,) = read_all(path, success=False)
    assert (got.end.truncated, got.end.outcome) == (True, Outcome.UNKNOWN)
    assert not any("stored alike" in n for n in HilSerlSource(path, ReadOptions()).notes())


def test_success_by_infos_alone_corrects_the_last_reward(dump: Dump) -> None:
    rows = episode(3)
    rows[-1]["rewards"] = 0
    path = dump(rows)
    (got,) = read_all(path)
    assert (got.end.outcome, got.end.reward) == (Outcome.SUCCESS, 1.0)
    assert any("1 episode succeeded by infos" in n for n in HilSerlSource(path, ReadOptions()).notes())


def test_a_break_without_a_done_and_a_missing_end_are_said(dump: Dump) -> None:
    path = dump(episode(4, 1, ended=False) + episode(3, 2) + episode(2, 3, ended=False))
    broken, whole, open_ = read_all(path)
    assert [e.steps.n for e in (broken, whole, open_)] == [4, 3, 2]
    assert broken.end.truncated
    assert np.array_equal(broken.end.final_observation["state"], observe(104)["state"][0])
    assert open_.end.truncated
    assert open_.end.final_observation is not None
    notes = "\n".join(HilSerlSource(path, ReadOptions()).notes())
    assert "1 episode broke off" in notes
    assert "the last episode has no end" in notes


def test_a_run_is_read_across_files_and_interventions_are_found(dump: Dump, tmp_path: Path) -> None:
    rows = episode(7, 1, infos=False) + episode(6, 2, infos=False, success=False)
    human = [2, 3, 9]
    for name, part in {"1000": rows[:5], "2000": rows[5:9], "10000": rows[9:]}.items():
        dump(part, f"run/buffer/transitions_{name}.pkl")
    dump([rows[i] for i in human[:2]], "run/demo_buffer/transitions_1000.pkl")
    dump([rows[i] for i in human[2:]], "run/demo_buffer/transitions_10000.pkl")
    for path in (tmp_path / "run", tmp_path / "run" / "buffer"):
        first, second = read_all(path)
        assert (first.steps.n, second.steps.n) == (7, 6)
        source = np.concatenate([first.steps.source, second.steps.source])
        assert np.flatnonzero(source == Source.HUMAN).tolist() == human
        assert set(source) == {Source.HUMAN, Source.POLICY}
        states = np.concatenate([first.steps.observation["state"], second.steps.observation["state"]])
        assert np.array_equal(states, np.concatenate([r["observations"]["state"] for r in rows]))
        frames = np.concatenate([np.asarray(e.steps.sparse["images/side"].values) for e in (first, second)])
        assert np.array_equal(frames, np.concatenate([r["observations"]["side"] for r in rows]))
    fragments = read_all(tmp_path / "run" / "demo_buffer")
    assert [e.steps.n for e in fragments] == [2, 1]
    assert all((e.steps.source == Source.HUMAN).all() for e in fragments)


def test_who_acted(dump: Dump) -> None:
    rows = episode(4)
    del rows[1]["infos"]["intervene_action"]
    del rows[2]["infos"]["intervene_action"]
    rows[1]["actions"] = np.zeros(A)
    (got,) = read_all(dump(rows))
    assert got.steps.source.tolist() == [Source.HUMAN, Source.HOLD, Source.POLICY, Source.HUMAN]
    plain = episode(3, infos=False)
    (policy,) = read_all(dump(plain, "run/buffer/transitions_1.pkl"))
    assert set(policy.steps.source) == {Source.POLICY}
    other = dump(plain, "mine/run.pkl")
    (unknown,) = read_all(other)
    assert set(unknown.steps.source) == {Source.HUMAN}
    notes = HilSerlSource(other, ReadOptions()).notes()
    assert "the source of actions is not recorded; 3 steps taken for a human's" in notes


def test_cameras_and_colours(dump: Dump) -> None:
    rows = episode(2)
    for row in rows:
        for key in ("observations", "next_observations"):
            row[key]["left/wrist"] = row[key].pop("side")
            row[key]["force"] = np.zeros((1, 3))
    path = dump(rows)
    source = HilSerlSource(path, ReadOptions(cameras=("left_wrist",), color="bgr"))
    got = source.read(source.keys()[0])
    assert list(got.steps.sparse) == ["images/left_wrist"]
    assert np.array_equal(
        np.asarray(got.steps.sparse["images/left_wrist"].values)[1], rows[1]["observations"]["left/wrist"][0, ..., ::-1]
    )
    final = got.end.final_observation["images/left_wrist"]
    assert np.array_equal(final, rows[1]["next_observations"]["left/wrist"][0, ..., ::-1])
    notes = "\n".join(source.notes())
    assert "left/wrist is left_wrist" in notes
    assert "not read: force" in notes
    assert "colours" not in notes
    assert "colours: RGB" in "\n".join(HilSerlSource(path, ReadOptions()).notes())
    with pytest.raises(DataError, match=naming("top", "wrist_1", "left_wrist")):
        read_all(path, cameras=("top",))
    (blind,) = read_all(path, cameras=())
    assert blind.steps.sparse == {}


def test_the_robot_is_checked(dump: Dump) -> None:
    cameras = (CameraSpec("wrist_1", 6, 8), CameraSpec("side", 6, 8))
    spec = RobotSpec("franka", 10.0, 5, (-1.0,) * A, (1.0,) * A, (-1,) * A, (), cameras, 100)
    (got,) = read_all(dump(episode(3)), spec=spec)
    assert np.allclose(got.steps.stamp, np.arange(3) / 10)
    other = RobotSpec("franka7", 10.0, 5, (-1.0,) * 7, (1.0,) * 7, (-1,) * 7, (), cameras, 100)
    with pytest.raises(DataError, match=naming("franka7", 7, "/action", 4)):
        read_all(dump(episode(3)), spec=other)


def test_a_proportion_keeps_whole_episodes(dump: Dump) -> None:
    path = dump([row for i in range(6) for row in episode(3, i)])
    assert [e.steps.n for e in read_all(path, proportion=0.5)] == [3, 3, 3]
    with pytest.raises(ConfigError, match=naming("proportion", 0, "(0, 1]")):
        read_all(path, proportion=0.0)


def test_one_file_is_held_at_a_time_and_copies_hold_none(dump: Dump, tmp_path: Path) -> None:
    for i in range(3):
        dump(episode(2, i), f"demos/{i}.pkl")
    source = HilSerlSource(tmp_path / "demos", ReadOptions())
    keys = source.keys()
    source.read(keys[1])
    (held,) = [v for v in vars(source).values() if isinstance(v, tuple) and len(v) == 2 and v[0] == 1]
    assert held[1].rows
    data = pickle.dumps(source)
    assert len(data) < 5_000
    (tmp_path / "demos" / "0.pkl").unlink()  # the copy knows where episodes lie, and reads only its own
    copy = pickle.loads(data)
    assert np.array_equal(copy.read(keys[2]).steps.action, source.read(keys[2]).steps.action)
    with pytest.raises(DataError, match=naming("0.pkl", os.strerror(errno.ENOENT))):
        copy.read(keys[0])
    with pytest.raises(DataError, match=naming("x", 3, "0.pkl:0", "2.pkl:0")):
        source.read("x")


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
    rows = [
        {k: v for k, v in row.items()}
        for i, n in enumerate(lengths)
        for row in episode(n, i, infos=False, ended=ended[i])
    ]
    for row in rows:
        for key in ("observations", "next_observations"):
            row[key] = {"state": row[key]["state"]}
    for k, start in enumerate(range(0, len(rows), cut)):
        (folder / f"transitions_{k}.pkl").write_bytes(pickle.dumps(rows[start : start + cut]))
    got = read_all(folder)
    assert [e.steps.n for e in got] == lengths
    assert [e.end.terminated for e in got] == ended[: len(lengths)]
    assert len({e.begin.episode_id for e in got}) == len(got)


def put(where: str, key: str | None, value: Any) -> Callable[[list[Row]], None]:
    def edit(rows: list[Row]) -> None:
        target = rows[1] if key is None else rows[1][where]
        target[where if key is None else key] = value

    return edit


def drop(*where: str) -> Callable[[list[Row]], None]:
    def edit(rows: list[Row]) -> None:
        target = rows[1]
        for key in where[:-1]:
            target = target[key]
        del target[where[-1]]

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda rows: [], ("empty", "HIL-SERL")),
        (lambda rows: {"a": 1}, ("dict", "HIL-SERL")),
        (lambda rows: [*rows, 3], (3, "int", "dict")),
        (drop("actions"), (1, "actions", "observations")),
        (put("observations", None, {"wrist_1": frame(0)}), (1, "observations", "dict", "state")),
        (put("observations", "state", np.zeros((1, 4), "f4")), (1, "observations['state']", "float32[1, 4]", "[5]")),
        (put("observations", "state", np.zeros((2, 5), "f4")), (1, "observations['state']", "[2, 5]", "[5]")),
        (put("next_observations", "state", [1.0] * 5), (1, "next_observations['state']", "list", "[5]")),
        (put("observations", "state", np.full((1, 5), np.nan)), (1, "observations['state']")),
        (put("actions", None, np.full(A, np.inf)), (1, "actions")),
        (put("actions", None, np.full(A, 1e300)), (1, "actions")),
        (put("actions", None, np.zeros(3)), (1, "actions", "float64[3]", "[4]")),
        (put("rewards", None, "1"), (1, "rewards", "str")),
        (put("rewards", None, np.nan), (1, "rewards", "float")),
        (put("dones", None, np.zeros(2)), (1, "dones", "float64[2]")),
        (put("infos", "succeed", "yes"), (1, "infos['succeed']", "str")),
        (put("observations", "side", np.zeros((1, 6, 9, 3), np.uint8)), (1, "observations['side']", "[1, 6, 9, 3]")),
        (put("next_observations", "side", np.zeros((1, 6, 8, 3), "f4")), (1, "next_observations['side']", "float32")),
        (drop("observations", "side"), (1, "observations['side']", "uint8[6, 8, 3]")),
        (put("infos", "x", os.getcwd), ("posix.getcwd",)),
        (put("observations", "state", np.array([None])), ("objects",)),
    ],
)  # fmt: skip
def test_bad_files(dump: Dump, edit: Callable[[list[Row]], Any], named: tuple[Any, ...]) -> None:
    rows = episode(3)
    other = edit(rows)
    path = dump(rows if other is None else other)
    with pytest.raises(DataError, match=naming(*named)) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))


def test_files_that_do_not_fit_together(dump: Dump, tmp_path: Path) -> None:
    dump(episode(2), "demos/a.pkl")
    rows = episode(2)
    for row in rows:
        row["actions"] = np.zeros(7)
    dump(rows, "demos/b.pkl")
    with pytest.raises(DataError, match=naming("b.pkl", 5, 7, 4)):
        read_all(tmp_path / "demos")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=naming(empty, ".pkl", "demo_data")):
        read_all(empty)


def test_what_it_looks_like(dump: Dump, tmp_path: Path) -> None:
    path = dump(episode(2))
    dump(episode(2), "run/buffer/transitions_1.pkl")
    assert FORMAT.matches(path)
    assert FORMAT.matches(path.parent)
    assert FORMAT.matches(tmp_path / "run")
    (tmp_path / "x.hdf5").write_bytes(b"")
    (tmp_path / "none").mkdir()
    for other in ("x.hdf5", "none", "missing"):
        assert not FORMAT.matches(tmp_path / other)
