"""Arrays that other projects named: read by a convention or a table, and compared with the robot."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import hdf5_file, image_file, jpeg_rows, read_all
from errors import naming

from serl_chunk.data.fields import parse_tables
from serl_chunk.data.formats import choose
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import ConfigError, DataError, Outcome, RobotSpec

N = 30
RNG = np.random.default_rng(0)
FRAMES = RNG.integers(0, 256, (N + 1, 16, 24, 3), dtype=np.uint8)
FILES = [image_file(frame) for frame in FRAMES[:N]]
BYTES = np.frombuffer(b"".join(FILES), np.uint8)


def values(*size: int) -> np.ndarray:
    return RNG.normal(size=size).astype(np.float32)


J, G, E, A = values(N, 9), values(N, 2), values(N, 3), values(N, 7)
ISAAC = {"actions": A, "@success": True, "@task": "fold the towel", "obs/joint_pos": J, "obs/eef_pos": E,
         "obs/gripper_pos": G, "obs/table_cam": FRAMES[:N]}  # fmt: skip
QUAT = values(N, 4)
LONG = values(N + 1, 5)


def of_type(dtype: Any) -> np.ndarray:
    """The files, padded or not, as elements of an HDF5 type."""
    if dtype == "uint8":
        return jpeg_rows(list(FRAMES[:N]), quality=75)
    out: np.ndarray = np.empty(N, dtype)
    out[:] = [np.frombuffer(f, np.uint8) for f in FILES] if dtype == ENCODED[3] else FILES
    return out


LONGEST = max(map(len, FILES)) + 9
ENCODED = ["uint8", f"S{LONGEST}", f"V{LONGEST}", h5py.vlen_dtype(np.uint8)]
TABLE = "state=joint_pos+gripper_pos,action=actions,camera.table=table_cam"
# What an episode's group holds, the table, the state, the camera and the outcome.
READ = {
    "a table": (ISAAC, TABLE, [J, G], "table", Outcome.SUCCESS),
    "columns": (ISAAC, "state=joint_pos[0:6]+gripper_pos[0]+eef_pos,action=actions", [J[:, :6], G[:, :1], E],
                "table_cam", Outcome.SUCCESS),
    "Isaac Lab": (ISAAC | {"obs/eef_quat": QUAT, "@success": False}, None, [E, QUAT, G], "table_cam", Outcome.FAILURE),
    "a policy's group": ({"obs/policy/joints": J, "action": A, "reward": np.eye(N, dtype="f4")[-1]},
                         "state=joints,action=action", [J], None, Outcome.SUCCESS),
    "ManiSkill": ({"obs": LONG, "actions": A, "success": np.arange(N) == N - 1}, None, [LONG[:N]], None,
                  Outcome.SUCCESS),
    "Minari": ({"observations": LONG, "actions": A, "rewards": 3 + J[:, 0], "terminations": np.arange(N) == N - 1},
               None, [LONG[:N]], None, Outcome.UNKNOWN),
    "frames of one more tick": ({"obs/state": LONG, "actions": A, "obs/front": FRAMES}, None, [LONG[:N]], "front",
                                Outcome.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("place", ["data/demo_{}", "run{}", ""])
def test_arrays_of_foreign_names_are_read(tmp_path, name, place):
    content, table, parts, camera, outcome = READ[name]
    groups = [place.format(i) for i in (10, 2)] if place else [""]
    keys = [
        ("{}/{}" if "@" not in key else "{}{}").format(group, key).strip("/") for group in groups for key in content
    ]
    path = hdf5_file(tmp_path / "x.hdf5", dict(zip(keys, [*content.values()] * len(groups), strict=True)))
    options = ReadOptions(fields=parse_tables([table] if table else []), hz=25.0)
    if not place and table is None:  # a file that is one episode is known by ALOHA's names alone
        with pytest.raises(DataError, match=naming("--fields", *content.keys() - {"@success", "@task"})):
            open_episodes(path, options).read("x.hdf5")
        return
    source = open_episodes(path, options)
    assert source.keys() == ([f"{place.format(i).rpartition('/')[2]}" for i in (2, 10)] if place else ["x.hdf5"])
    episode = source.read(source.keys()[0])
    steps, end = episode.steps, episode.end
    np.testing.assert_array_equal(steps.observation["state"], np.concatenate(parts, 1))
    np.testing.assert_array_equal(steps.action, A)
    assert (end.outcome, end.terminated) == (outcome, outcome is not Outcome.UNKNOWN or name == "Minari")
    assert list(steps.sparse) == ([f"images/{camera}"] if camera else [])
    for rows in steps.sparse.values():
        np.testing.assert_array_equal(np.asarray(rows.values), FRAMES[:N])
    if len(content.get("obs", content.get("obs/state", J))) > N:
        np.testing.assert_array_equal(end.final_observation["state"], LONG[N])
    assert len(source.notes()) > 2
    assert episode.begin.task == ("fold the towel" if "@task" in content else "")


@pytest.mark.parametrize("dtype", ENCODED, ids=str)
@pytest.mark.parametrize("aloha", [True, False])
def test_an_image_file_in_any_type_of_element_is_a_frame(tmp_path, dtype, aloha):
    names = ("observations/qpos", "action", "observations/images/cam_high") if aloha else ("q", "u", "head/rgb")
    path = tmp_path / "episode_0.hdf5"
    with h5py.File(path, "w") as file:
        file[names[0]], file[names[1]] = J, A
        file.create_dataset(names[2], data=of_type(dtype))
    table = () if aloha else (f"state={names[0]},action={names[1]}",)
    with pytest.raises(DataError, match=naming("color", "rgb", "bgr")):
        read_all(path, fields=parse_tables(table))
    (episode,) = read_all(path, fields=parse_tables(table), color="rgb")
    frames = episode.steps.sparse["images/cam_high" if aloha else "images/head"].values
    assert frames.encoded(3) == FILES[3]
    assert np.abs(frames[3].astype(int) - FRAMES[3]).mean() < 60


def test_unknown_names_are_listed_with_a_table_that_reads_them(tmp_path):
    path = hdf5_file(tmp_path / "x.hdf5", {f"data/demo_0/{key}".replace("/@", "@"): v for key, v in ISAAC.items()})
    with pytest.raises(DataError, match=naming("obs/joint_pos", "float32[30, 9]", "uint8[30, 16, 24, 3]")) as caught:
        open_episodes(path, ReadOptions(prefix="demo_"))
    *_, line = str(caught.value).splitlines()
    flag, table = line.split()
    assert (flag, table.partition(",")[0]) == ("--demo_fields", "state=obs/joint_pos+obs/gripper_pos")
    (episode,) = read_all(path, fields=parse_tables([table]))
    assert episode.steps.observation["state"].shape == (N, 11)
    with h5py.File(path, "r+") as file:  # a group that holds itself
        file["data/demo_0/obs/again"] = file["data/demo_0"]
    with pytest.raises(DataError, match=naming("obs/joint_pos")):
        open_episodes(path, ReadOptions())
    # Of the robot's size, and at once where many arrays are there of which none fit.
    many = {f"traj_0/obs/part_{i}": values(N, 7) for i in range(60)}
    for content, expected in ((ISAAC, "state=obs/eef_pos+obs/gripper_pos,"), (many, "state=obs/part_0+")):
        there = {f"traj_0/{key}".replace("/@", "@"): v for key, v in content.items() if "part" not in key}
        wide = hdf5_file(
            tmp_path / f"{len(content)}.hdf5", (many if content is many else there) | {"traj_0/actions": A}
        )
        with pytest.raises(DataError, match=re.escape(expected)):
            open_episodes(wide, ReadOptions(spec=ARM))


@pytest.mark.parametrize(("text", "named"), [
    ("state=joint_pos", ("action", "state=joint_pos")),
    ("state=a,action=b,actions_are=delta", ("actions_are", "delta", "absolute", "difference")),
    ("state=a,state=b,action=c", ("state", "twice")),
    ("state=a,action=b,colour=c", ("colour", "camera.NAME")),
    ("state=a[3:1],action=b", ("a[3:1]",)),
    ("state=,action=b", ("state=",)),
    ("no/such/file", ("--demo_fields", "no/such/file")),
    ("state=knee,action=actions", ("knee", "obs/joint_pos")),
    ("state=joint_pos[0:12],action=actions", ("joint_pos[0:12]", 9)),
    ("state=table_cam,action=actions", ("table_cam", "numbers")),
    ("flat", ("done", 9, N, "episode_0")),
    ("state=joint_pos,action=actions,camera.a=eef_pos", ("camera", "eef_pos")),
])  # fmt: skip
def test_wrong_tables_are_named(tmp_path, text, named):
    content = {f"data/demo_0/{key}".replace("/@", "@"): v for key, v in ISAAC.items()}
    if text == "flat":
        content, text = {"q": J, "u": A, "done": np.arange(N) % 10 == 9}, "state=q,action=u"
    path = hdf5_file(tmp_path / "x.hdf5", content)
    with pytest.raises((ConfigError, DataError), match=naming(*named)):
        read_all(path, fields=parse_tables([text], "demo_fields"))


def test_a_table_belongs_to_a_path_and_stands_in_a_file_too(tmp_path, monkeypatch):
    path = hdf5_file(tmp_path / "sets" / "x.hdf5", {"data/demo_0/obs/q": J, "data/demo_0/u": A})
    other = hdf5_file(tmp_path / "y.hdf5", {"traj_0/q": G, "traj_0/u": A})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables.txt").write_text("# mine\nsets::state=q[0:2],action=u\n\n*.hdf5::state=q,action=u\n")
    tables = parse_tables(["tables.txt"])
    monkeypatch.chdir("/")
    assert [read_all(p, fields=tables)[0].steps.observation["state"].shape[1] for p in (path, other)] == [2, 2]
    with pytest.raises(ConfigError, match=naming("fields", "d4rl")):
        choose(path, "d4rl", fields=tables)


# A robot of two joints, a gripper and two joints, as its command; its state is in this order.
ARM = RobotSpec("arm", 25.0, 5, (-2.0, -2.0, 0.0, -2.0, -2.0), (2.0, 2.0, 1.0, 2.0, 2.0), (0, 1, 2, 3, 4), (2,), (), 99)
T = np.linspace(0, 2, N)[:, None]
JOINTS = np.sin(T * [1.0, 1.3, 0.7, 1.9] + [0.4, 1.0, 2.0, 3.0]).astype(np.float32)
GRIP = (T > 1).astype(np.float32)
COMMAND = np.concatenate([JOINTS[:, :2], GRIP, JOINTS[:, 2:]], 1)
NEXT = np.concatenate([COMMAND[1:], COMMAND[-1:]])
STEP = np.concatenate([np.diff(JOINTS, axis=0), np.zeros((1, 4), np.float32)])
DIFFERENCE = np.concatenate([STEP[:, :2], NEXT[:, 2:3], STEP[:, 2:]], 1)
ORDER = "state=joints[0:2]+grip+joints[2:4],action=u"


@pytest.mark.parametrize(("table", "action", "named"), [
    (ORDER, NEXT, None),
    (ORDER, DIFFERENCE, ("differences", "actions_are=difference")),
    (f"{ORDER},actions_are=difference", DIFFERENCE, None),
    (ORDER, 1.6 * values(N, 5), ("actions_are=absolute",)),  # neither
    ("state=joints+grip,action=u", NEXT, ("grip", "gripper", 4, 2)),
    ("state=joints[1]+joints[0]+grip+joints[2:4],action=u", NEXT, ("u[0]", "joints[0]", "joints[1]")),
    ("state=joints[0:2]+joints[2]+joints[2:4],action=u", NEXT, ("joints[2]", "0..1")),
    (ORDER, NEXT * 180 / np.pi, ("actions_are=absolute",)),  # in degrees
    (f"{ORDER},actions_are=absolute", NEXT * 180 / np.pi, ("u[0]", "-2..2")),
    ("state=joints[0:2]+grip+joints[2],action=u", NEXT, ("state values", 5, 4)),
])  # fmt: skip
def test_an_order_that_is_not_the_robots_is_named(tmp_path, table, action, named):
    path = hdf5_file(tmp_path / "x.hdf5", {"joints": JOINTS, "grip": GRIP, "u": action})
    options = ReadOptions(fields=parse_tables([table]), spec=ARM, hz=25.0)
    read = lambda: open_episodes(path, options).read("x.hdf5")  # noqa: E731
    if named is None:
        np.testing.assert_allclose(read().steps.action, NEXT, atol=1e-6)
    else:
        with pytest.raises(DataError, match=naming(*named)):
            read()


def renamed(folder: Path, names: dict[str, str | list[str]]) -> None:
    """Rename features of a LeRobot data set; a list splits columns of a vector, `name[first:last]`."""
    import pyarrow.parquet as pq

    data, about = folder / "data/chunk-000/file-000.parquet", folder / "meta/info.json"
    table, info = pq.read_table(data), json.loads(about.read_text())
    for old, new in names.items():
        feature, column = info["features"].pop(old), table.column(old).to_pylist()
        table = table.drop_columns([old])
        for name in [new] if isinstance(new, str) else new:
            name, first, last = re.fullmatch(r"([^\[]*)(?:\[(\d):(\d)\])?", name).groups()
            part = column if first is None else [row[int(first) : int(last)] for row in column]
            shape = feature["shape"] if first is None else [int(last) - int(first)]
            info["features"][name] = feature | {"shape": shape}
            table = table.append_column(name, [part])
    pq.write_table(table, data)
    about.write_text(json.dumps(info))


def test_features_of_other_names_in_a_lerobot_data_set(lerobot_copy):
    path = lerobot_copy("foreign")
    wanted = read_all(path)
    images = {f"observation.images.{name}": new for name, new in (("top", "image"), ("wrist", "wrist_image"))}
    renamed(path, {"observation.state": "state", "action": "actions"} | images)
    found = read_all(path)  # openpi's names
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.steps.observation["state"], b.steps.observation["state"])
        np.testing.assert_array_equal(a.steps.action, b.steps.action)
        assert list(a.steps.sparse) == ["images/image", "images/wrist_image"]
    two = [f"observation.states.{name}.position" for name in ("joint", "effector")]
    renamed(path, {"state": [f"{two[1]}[3:4]", f"{two[0]}[0:3]"]})
    with pytest.raises(DataError, match=naming("meta/info.json", "--fields", *two)):
        read_all(path)
    tables = parse_tables([f"state={two[0]}+effector.position,action=actions,camera.front=image"])
    source = open_episodes(path, ReadOptions(fields=tables))
    episode = source.read(source.keys()[0])
    np.testing.assert_array_equal(episode.steps.observation["state"], wanted[0].steps.observation["state"])
    assert list(episode.steps.sparse) == ["images/front"]
    assert source.column_names()[0] == [*(f"{two[0]}[{i}]" for i in range(3)), two[1]]
    spec = dataclasses.replace(ARM, state_dim=4, joint_of_action=(-1,) * 3, action_low=(-9.0,) * 3,
                               action_high=(9.0,) * 3, grippers=(0,))  # fmt: skip
    assert read_all(path, fields=tables, spec=dataclasses.replace(spec, control_hz=50.0), cameras=())


def test_the_order_is_kept_in_what_is_written(tmp_path):
    from serl_chunk.main import main

    path = hdf5_file(tmp_path / "x.hdf5", {"joints": JOINTS, "grip": GRIP, "u": NEXT})
    flags = ["--fields", ORDER, "--hz", "25", "--workers", "0"]
    names = ["joints[0]", "joints[1]", "grip", "joints[2]", "joints[3]"]
    assert main(["data", "convert", str(path), "--to", "hdf5", "--out", str(tmp_path / "h"), *flags]) == 0
    with h5py.File(tmp_path / "h/episode_0.hdf5") as file:
        assert [text.decode() for text in file.attrs["state_names"]] == names
    pytest.importorskip("pyarrow")
    assert main(["data", "convert", str(path), "--to", "lerobot", "--out", str(tmp_path / "l"), *flags]) == 0
    features = json.loads((tmp_path / "l/meta/info.json").read_text())["features"]
    assert features["observation.state"]["names"] == names
