"""Damaged files of every format: each is refused with its path, the place and the value at fault."""

from __future__ import annotations

import functools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import SAMPLES, amended, image_file, jpeg_rows, notes_of, read_all
from errors import naming

pytest.importorskip("pyarrow")

import pyarrow as pa
from lerobot_sets import DATA, EPISODES, INFO, SIDE, TOP, VIDEO, amend, at, column, feature, info, kept_type, without

from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import read_episode, write_episode
from serl_chunk.data.labels import FILE as LABELS
from serl_chunk.data.labels import write_label
from serl_chunk.data.normalise.chunk_statistics import read_norm_stats
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import DataError, Episode

CHUNKED = {f"observations/images/{camera}": lambda v: v[:2] for camera in ("top", "wrist")}


def first(n: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values[:n]


def nan(*at: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[at] = np.nan
        return values

    return change


def cut_anew() -> Callable[[pa.Table], pa.Table]:
    """Lists that are as long together as they should be."""
    lists = [[0.0] * {2: 2, 3: 4}.get(i, 3) for i in range(ROWS)]
    return column("action", pa.array(lists, pa.list_(pa.float32())))


def pandas(about: bytes | None) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.replace_schema_metadata(about and {"pandas": about})


def entry(name: str, **values: Any) -> Callable[[pa.Table], pa.Table]:
    return kept_type(name, 1, lambda there: [{**(there or [DECISION])[0], **values}])


def partial(**values: Any) -> Callable[[pa.Table], pa.Table]:
    return kept_type("human_dims", 1, lambda there: there | values)


def statistics(mean: str, std: str) -> str:
    return f'{{"norm_stats": {{"a": {{"mean": {mean}, "std": {std}}}}}}}'


def labels(label: str, **values: Any) -> str:
    return json.dumps({"format": 1, "labels": {"episode_0.hdf5": {"label": label, **values}}})


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
ROWS = 41  # of LeRobot's episodes of 9, 7, 12, 5 and 8
TASKS, JSONL, THIRD = "meta/tasks.parquet", "meta/episodes.jsonl", "data/chunk-000/episode_000002.parquet"
DECISION = {"name": "x", "dtype": "<f4", "shape": [1], "ticks": [0], "data": b"\0\0\0\0"}
Spoilt = tuple[str, dict[str, Any] | str, tuple[Any, ...]]
SPOILT: list[Spoilt] = [
    ("d4rl", {"actions": None}, ("actions", "infos, metadata, observations, rewards, terminals, timeouts")),
    ("d4rl", {"observations": first(5)}, ("observations", 5, "actions", 6)),
    ("d4rl", {"next_observations": np.zeros((6, 2))}, ("next_observations", "[6, 2]", "observations", "[6, 3]")),
    ("d4rl", dict.fromkeys(("observations", "actions", "rewards", "terminals", "timeouts"), first(0)), ("steps",)),
    ("d4rl", {"timeouts": None}, ("timeouts", "next_observations", "max_episode_steps")),  # nobody knows the ends
    ("d4rl", {"rewards": nan(4)}, ("rewards", 4)),
    ("fields", {"data": None}, ("array",)),
    ("fields", {"data@env_args": "{"}, ("env_args", "/data", "JSON")),
    ("fields", {"data/demo_1/obs": None}, ("demo_1", "obs", "actions, dones, next_obs, rewards")),
    ("fields", {"data/demo_0/obs": None, "data/demo_0/obs/ee_pos": np.zeros((4, 3))},
     ("obs", "robot0_eef_pos", "ee_pos")),
    ("fields", {"data/demo_1/actions": first(2)}, ("demo_1", "actions", 2, "num_samples", 3)),
    ("fields", {"data/demo_1/next_obs/object": first(2)}, ("/data/demo_1/next_obs/object", 2, "actions", 3)),
    ("fields", {"data/demo_1/next_obs/object": lambda v: v[:, :9]}, ("demo_1", "state", 19, "(18,)")),
    ("fields", {"data/demo_1/obs/agentview_image": lambda v: v.astype(float)},
     ("/data/demo_1/obs/agentview_image", "float64[3, 6, 8, 3]")),
    ("fields", {"data/demo_1/next_obs/agentview_image": None}, ("demo_1", "agentview_image", "eye_in_hand_image")),
    ("hil_serl", {"": np.zeros(3)}, ("float64[3]", "HIL-SERL", "docs/data.md")),
    ("hil_serl", {"": []}, ("empty", "HIL-SERL")),
    ("hil_serl", {"": {"actions": np.zeros((9, 2))}}, ("dict", "HIL-SERL", "docs/data.md")),
    ("hil_serl", {"": [[{"actions": np.zeros(2)}] * 3] * 2}, ("2 lists", "trajectories", "docs/data.md")),
    ("hil_serl", {"": [{"observations": np.zeros((9, 3)), "actions": np.zeros((9, 2)), "rewards": np.zeros(9)}] * 4},
     ("4 whole trajectories", "observations, actions, rewards", "docs/data.md")),
    ("hil_serl", {"": [{"actions": [np.zeros(2)] * 9}]}, ("1 whole trajectories", "docs/data.md")),
    ("hil_serl", {"1/actions": None}, (1, "actions", "observations")),
    ("hil_serl", {"1": 3}, (1, "int", "dict")),
    ("hil_serl", {"1/observations/state": np.zeros((2, 5), "f4")},
     ("transitions[1].observations.state", "[2, 5]", "[5]")),
    ("hil_serl", {"1/observations/state": np.zeros(4, "f4")},
     ("transitions[1].observations.state", "[4]", "[5] as before")),
    ("hil_serl", {"1/observations/state": np.full((1, 5), np.nan)}, ("transitions[1].observations.state",)),
    ("hil_serl", {"1/rewards": np.nan}, ("transitions[1].rewards", "float")),
    ("hil_serl", {"1/infos/succeed": "yes"}, ("transitions[1].infos.succeed", "str")),
    ("hil_serl", {"1/next_observations/side": np.zeros((1, 6, 8, 3), "f4")},
     ("transitions[1].next_observations.side", "float32")),
    ("hil_serl", {"1/observations/state": np.array(["a"])}, ("transitions[1].observations.state", "numpy.dtype U1")),
    ("hil_serl", {"1/observations": np.str_("a")}, ("transitions[1].observations", "numpy.dtype U1")),
    ("hil_serl", {"1/infos/succeed": lambda _: os.getcwd}, ("transitions[1].infos.succeed", "posix.getcwd")),
    ("hil_serl", {"1": datetime(2026, 1, 1)}, ("transitions[1]", "datetime.datetime")),
    ("hil_serl", {"": lambda _: os.getcwd}, ("posix.getcwd",)),
    ("ogbench", {"actions": None}, ("actions", "observations", "terminals", "qpos")),
    ("ogbench", {"observations": nan(6, 1)}, ("observations", "row 6")),
    ("ogbench", {"observations": np.array([None] * 8)}, ("observations", "pickle")),
    ("ogbench", {"rewards": np.zeros(8, np.float32)}, ("rewards", "masks", "env")),
    ("ogbench", dict.fromkeys(("observations", "actions", "terminals", "qpos"), first(1)), (1, "trajectory")),
    ("ogbench", {"terminals": np.ones(8, bool)}, ("trajectory", "step")),
    ("episodes", {"@hz": [50.0, 50.0]}, ("hz",)),
    ("episodes", {"observations/images": 5}, ("/observations/images",)),
    ("episodes", {"action": "x"}, ()),
    ("episodes", {"observations": None, "weights": np.zeros(3)}, ("/observations/qpos",)),
    ("episodes", {"action": first(4)}, ("/observations/qpos", "(6, 2)", "/action", "(4, 2)")),
    ("episodes", {"observations/qpos": np.full((6, 2), 1e300)}, ("state", 0)),
    ("episodes", {"observations/images/top": lambda v: jpeg_rows([v[0], v[1][:8], *v[2:]])},
     ("/observations/images/top", 1, "8x24", "16x24")),
    ("episodes", {"observations/images/top": lambda v: jpeg_rows(v)[:, :99]}, ("/observations/images/top", 0, "JPEG")),
    ("episodes", CHUNKED | {"image_indices": [0, 6]}, ("/image_indices", "0..5", "int64[2]", "[0, 6]")),
    ("episodes", {"chunk_starts": [4, 2]}, ("/chunk_starts", "0..5", 6, "[4, 2]")),
    ("ours", {"action": None}, ("/action",)),
    ("ours", {"rl/reward": first(4)}, ("reward", 4, "/action", 5)),
    ("ours", {"rl/final_observation/state": nan(2)}, ("state", 5, "(5,)")),
    ("ours", {"action": lambda v: np.tile(v, 2)}, ("arm3", 3, "/action", 6)),
    ("ours", {"rl/image_index/top": lambda v: v[::-1]}, ("images/top", "0..4")),
    ("ours", {"observations/images/top": lambda v: v[:, :2]}, ("top", "arm3", "4x6", "2x6")),
    ("ours", {"rl/human_dims": lambda v: v[:, :2]}, ("human_dims", "uint8[2, 2]", "uint8[2, 3]")),
    ("ours", {"rl/source": lambda v: 0 * v}, ("human_dims", "tick 1", "HUMAN")),
    ("ours", {"rl@schema": 2}, ("/rl", "schema", 2, 1)),
    ("ours", {"rl@outcome": "fine"}, ("outcome", "fine", "success", "failure", "unknown")),
    ("ours", {"@hz": 10.0}, (10, 50)),
    ("lerobot ours", {DATA: without("next.reward")}, ("/data", "next.reward", "meta/info.json")),
    ("lerobot ours", {DATA: lambda t: t.take([*range(11), 12, 11, *range(13, ROWS)])},
     (1, 3, "frame_index", 2, 3, "file-000.parquet")),
    ("lerobot foreign", {EPISODES: column("length", [7, 9, 12, 5, 8])}, (1, "step 0", "episode_index", 0)),
    ("lerobot ours", {EPISODES: column("episode_index", [0, 1, 1, 3, 4])}, (EPISODES, "episode 1")),
    ("lerobot ours", {DATA: column("timestamp", at(13, 0.05))}, (1, 4, "0.060000", "0.050000")),
    ("lerobot ours", {DATA: column("timestamp", lambda rows: [-t for t in rows])}, (0, 1, "-0.020000")),
    ("lerobot video", {DATA: column("timestamp", at(7, lambda v: v + 0.011))},
     (1, 1, "timestamp", "0.031000", "0.020000", 0.01, "tolerance_s")),
    ("lerobot video", {VIDEO: POINTER}, ("file-000.mp4", "git lfs pull")),
    ("lerobot ours", {DATA: POINTER}, ("file-000.parquet", "git lfs pull")),
    ("lerobot v2.1", {THIRD: POINTER}, ("episode_000002.parquet", "git lfs pull")),
    *((name, POINTER, ("git lfs pull",)) for name in ("episodes", "hil_serl", "ogbench", "fields", "d4rl")),
    ("lerobot ours", {DATA: column("action", at(2, [0.0, np.nan, 0.0]))}, (0, 2, "action")),
    ("lerobot ours", {DATA: column("next.reward", at(3, None))}, (0, 3, "next.reward")),
    ("lerobot ours", {DATA: cut_anew()}, (0, "action", "file-000.parquet", 3, "row 0", 2, "row 2")),
    ("lerobot ours", {DATA: column("action", [{"x": 0.0}] * ROWS)},
     (0, "action", "file-000.parquet", "struct<x: double>")),
    ("lerobot ours", {EPISODES: column("length", ["nine"] * 5)}, ("file-000.parquet", "length", "string")),
    ("lerobot ours", {DATA: lambda t: t.slice(0, 30)}, ("/data", 30, 1, 41, "data repair")),
    ("lerobot foreign", {EPISODES: column("dataset_from_index", [0, 9, 15, 28, 33]), DATA: without("episode_index")},
     (EPISODES, 2, 15, 16)),
    ("lerobot ours", {DATA: column("task_index", [7] * ROWS)}, (0, "task_index", 7, "0, 1")),
    ("lerobot ours", {DATA: -200}, (DATA, "Parquet")),
    ("lerobot ours", {INFO: info(codebase_version="v1.6")}, ("info.json", "codebase_version", "v1.6", "v3.0", "v2.1")),
    ("lerobot ours", {INFO: info(features=None)}, ("info.json", "features", "JSON")),
    ("lerobot ours", {INFO: info(total_episodes=9)}, ("info.json", "total_episodes", 9, 5, "data repair")),
    ("lerobot ours", {INFO: info(data_path="data/{nonsense}.parquet")}, ("info.json", "data_path", "nonsense")),
    # Whoever removes episodes numbers the others anew: what lies beside them would be another episode's.
    ("lerobot ours", {DATA: column("action", [[0.0] * 3] * ROWS)}, (0, SIDE, "changed")),
    ("lerobot ours", {SIDE: lambda t: t.take([1, 0, 2, 3, 4])}, (0, SIDE, 1)),
    ("lerobot ours", {SIDE: entry("image_ticks", ticks=[2, 99])}, (1, SIDE, "top", 99, 7)),
    ("lerobot ours", {SIDE: entry("decisions", dtype="O")}, (1, SIDE, "decision/x", "object")),
    ("lerobot shared", {SIDE: partial(ticks=[2])}, (1, "human_dims", 2)),
    ("lerobot v2.1", {"meta/tasks.jsonl": '{"task_index": 1, "task": "a"}'}, (0, "task_index", 0, 1)),
    ("lerobot v2.1", {JSONL: '{"episode_index": 1, "length": 4}'}, ("info.json", "total_episodes", 5, 1)),
    ("lerobot v2.1", {JSONL: '{"episode_index": 1, "length": 0}'}, ("episodes.jsonl", "line 1", 1, 0)),
    ("lerobot v2.1", {THIRD: None}, (2, "episode_000002.parquet")),
    ("lerobot v2.1", {THIRD: lambda t: t.slice(0, 5)}, ("episode_000002.parquet", 5, "meta/episodes.jsonl", 12)),
    ("lerobot video", {VIDEO: None}, (0, "file-000.mp4", "cameras")),
    ("lerobot bare", {INFO: feature(TOP, shape=[8, 8, 3])}, ("16x24", "meta/info.json", "8x8")),
    ("lerobot video", {EPISODES: without("videos/observation.images.top/from_timestamp")},
     ("videos/observation.images.top/from_timestamp",)),
    ("norm_stats", {"": '{"norm_stats": {"state": 3}}'}, ("state", "mean", "std", "q01", "q99")),
    ("norm_stats", {"": statistics("[NaN]", "[1]")}, ("a", "mean", "list")),
    ("norm_stats", {"": statistics("[0, 1]", "[1]")}, ("a", "mean", 2, "std", 1)),
    ("norm_stats", {"": statistics("[0]", "[-1]")}, ("a", "std", 0)),
    ("norm_stats", {"": statistics("[0]", '[1], "q01": [2], "q99": [1]')}, ("q99", "q01", 0)),
    ("labels", {"": "{"}, ("damaged",)),
    ("labels", {"": '{"format": 2, "labels": {}}'}, (2,)),
    ("labels", {"": labels("good")}, ("good",)),
]  # fmt: skip


@pytest.fixture
def spoilt(tmp_path, spec, make_episode, lerobot_copy) -> Callable[[str, dict[str, Any]], tuple[Path, list[Callable]]]:
    """`spoilt(format, changes)`: what lies at a path, changed, and all that read it."""

    def make(format: str, changes: dict[str, Any]) -> tuple[Path, list[Callable[[], Any]]]:
        format, _, kind = format.partition(" ")
        options: dict[str, Any] = {"color": "rgb"}
        if format == "lerobot":
            path = lerobot_copy(kind)
            for name, change in changes.items():
                amend(path, name, change, **({"row_group_size": 16} if name == SIDE else {}))
        elif format in ("norm_stats", "labels"):
            path = tmp_path / {"norm_stats": "norm_stats.json", "labels": LABELS}[format]
            path.write_text(changes[""])
            if format == "norm_stats":
                return path, [lambda: read_norm_stats(path)]
            file = tmp_path / "episode_0.hdf5"
            write_episode(file, make_episode(spec, 5), spec)
            write = lambda: write_label(tmp_path, file.name, "failure", read_episode(file))  # noqa: E731
            return path, [lambda: load_demos([tmp_path], spec), write]  # it is not overwritten either
        elif format == "ours":
            path = tmp_path / "x.hdf5"
            write_episode(path, make_episode(spec, 5, shared=(1, 4)), spec)
            format, options = "episodes", options | {"spec": spec, "hz": spec.control_hz}
            amended(path, changes)
        elif changes == POINTER:
            path = SAMPLES[format](tmp_path)
            path.write_text(POINTER)
            return path, [lambda: open_episodes(path, ReadOptions(color="rgb")).read(path.name)]  # by its name alone
        else:
            path = amended(SAMPLES[format](tmp_path), changes)
            if format == "episodes":
                open_episodes(path, ReadOptions(**options), format).notes()  # damage is left to reading
        return path, [lambda: [decode_images(e) for e in read_all(path, format, **options)]]

    return make


@pytest.mark.parametrize(("format", "changes", "named"), SPOILT)
def test_what_is_wrong_in_a_file_is_named(spoilt, format, changes, named):
    path, readers = spoilt(format, changes)
    for read in readers:
        with pytest.raises(DataError, match=naming(path, *named)) as caught:
            read()
        assert str(caught.value).startswith(str(path)) or format == "labels"
    assert format != "labels" or path.read_text() == changes[""]


def of_time(*seconds: float) -> Callable[[pa.Table], pa.Table]:
    """These seconds later, on the first rows."""
    return column("timestamp", lambda rows: [t + s for t, s in zip(rows, (*seconds, *[0.0] * ROWS), strict=False)])


def more(name: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.append_column(name, pa.array((values * ROWS)[: table.num_rows]))


def plain_tasks(table: pa.Table) -> pa.Table:
    return table.rename_columns(["task_index", "task"]).replace_schema_metadata(None)


def ordered(rows: list[Any]) -> list[Any]:
    return [OrderedDict(row, observations=OrderedDict(row["observations"])) for row in rows]


def turned(table: pa.Table) -> pa.Table:
    return table.take([1, 0]).replace_schema_metadata(table.schema.metadata)


DEPTH = "observation.images.depth"
DEEP = image_file(np.full((16, 24), 5000, np.uint16), "PNG", "I;16")
READ = [  # changes, the note, what lerobot would do
    ("lerobot foreign", {TASKS: plain_tasks}, "the tasks' texts are its column task", "numbers for texts"),
    ("lerobot foreign", {TASKS: None}, "task sets one", ""),
    ("lerobot foreign", {TASKS: turned}, "", "task_index is [1, 0]"),
    ("lerobot foreign", {DATA: of_time(0.0, 0.004, -0.003)}, "up to 4 ms off 50 steps a second", "expects 0.02"),
    ("lerobot bare", {DATA: of_time(0.0, 0.004, -0.003)}, "(episode 0, step 1)", "expects 0.02"),
    ("lerobot foreign", {DATA: column("timestamp", [0.0] * ROWS)}, "5 episodes have time stamps that", "expects 0.02"),
    ("lerobot foreign", {DATA: column("timestamp", lambda rows: [int(1e9 * t) for t in rows])}, "time stamps that",
     "expects 0.02"),
    ("lerobot foreign", {DATA: column("timestamp", pa.array([1.7e9 + i / 50 for i in range(ROWS)], pa.float32()))},
     "time stamps that", "timestamp is 1.7e+09"),
    ("lerobot foreign", {DATA: more("instruction", ["fold"])}, "instruction is not read", "refuse"),
    ("lerobot foreign", {DATA: more("complementary_info.source", ["human"])}, "complementary_info.source is not read",
     "refuse"),
    ("lerobot v2.1", {THIRD.replace("2.", "0."): more("instruction", [[1, 2]])}, "instruction is not read", "refuse"),
    ("lerobot foreign", {INFO: feature("observation.velocity", dtype="float32")}, "", "lerobot would read None"),
    ("lerobot foreign", {INFO: feature("action", shape="nine")}, "", ""),
    ("lerobot foreign", {EPISODES: lambda t: t.take([0, 2, 1, 3, 4])}, "", "row i for episode i"),
    ("lerobot foreign", {EPISODES: column("dataset_from_index", [0, 9, 15, 28, 33])}, "", "begins at row 15"),
    ("lerobot foreign", {DATA: column("index", list(range(5, 5 + ROWS)))}, "", "index is 5, lerobot expects 0"),
    ("lerobot foreign", {DATA: more(DEPTH, [{"bytes": DEEP, "path": None}]),
                         INFO: feature(DEPTH, dtype="image", shape=[16, 24, 1])}, f"{DEPTH} is not read", ""),
    ("lerobot bare", {INFO: feature(DEPTH, dtype="video", shape=[16, 24, 3], info={"video.is_depth_map": True})},
     f"{DEPTH} is not read", ""),
    ("lerobot v2.1", {INFO: info(codebase_version="v2.0")}, "", ""),
    ("episodes", {"observations/images/depth": np.zeros((6, 4, 4), "u2")},
     "observations/images/depth is not read: it is no image in colour", ""),
    ("episodes", {"observations/images/touch": np.zeros((6, 4, 4, 1), "u1")}, "observations/images/touch", ""),
    ("fields", {f"data/demo_{i}/{obs}/deep_image": np.zeros((n, 4, 4, 1), "u2")
                   for i, n in ((0, 4), (1, 3)) for obs in ("obs", "next_obs")}, "deep_image", ""),
    ("hil_serl", dict.fromkeys(("1/infos/left", "2/infos/left"), lambda _: os.getcwd), "infos.left (posix.getcwd)", ""),
    ("hil_serl", {"0/infos/robot": np.str_("usb")}, "infos.robot (numpy.dtype U3)", ""),
    ("hil_serl", {"1/infos/at": datetime(2026, 1, 1)}, "infos.at (datetime.datetime)", ""),
    ("hil_serl", {"1/infos": {3: 4, "intervene_action": 0}}, "infos.key that is no text", ""),
    ("hil_serl", {"": ordered}, "", ""),
]  # fmt: skip


@functools.cache
def read_once(path: Path) -> tuple[list[Episode], str]:
    return [decode_images(e) for e in read_all(path, color="rgb")], notes_of(path, color="rgb")


@pytest.mark.parametrize(("format", "changes", "noted", "departed"), READ)
def test_what_is_not_used_spoils_nothing_and_is_noted_once(spoilt, lerobot_variants, format, changes, noted, departed):
    kind, options = format.partition(" ")[2], {"color": "rgb"}
    whole = lerobot_variants[kind] if kind else spoilt(format, {})[0]
    before, notes = read_once(whole)
    path, _ = spoilt(format, changes)
    source = open_episodes(path, ReadOptions(**options))
    for wanted, found in zip(before, map(decode_images, map(source.read, source.keys())), strict=True):
        assert found.steps.action.tobytes() == wanted.steps.action.tobytes()
        assert found.steps.observation["state"].tobytes() == wanted.steps.observation["state"].tobytes()
        assert (found.end.outcome, found.steps.source.tolist()) == (wanted.end.outcome, wanted.steps.source.tolist())
        assert found.steps.sparse.keys() == wanted.steps.sparse.keys()
        assert all((found.steps.sparse[k].values == rows.values).all() for k, rows in wanted.steps.sparse.items())
        assert found.begin.task == (wanted.begin.task if "task sets" not in noted else "")
    new = [note for note in source.notes() if note not in notes.split("\n")]
    assert len(new) == bool(noted), new
    assert noted in "".join(new)
    departures = getattr(source, "departures", list)()
    assert len(departures) == bool(departed), departures
    assert departed in "".join(departures)
