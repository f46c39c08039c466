"""What holds for every format: it is told by what lies there, and what is wrong with a file or a setting is named."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from data_sets import SAMPLES, amended, jpeg_rows, read_all
from errors import naming

from serl_chunk.data.formats import choose, formats, matching, open_episodes
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import ConfigError, DataError, RobotSpec

CHUNKED = {f"observations/images/{camera}": lambda v: v[:2] for camera in ("top", "wrist")}


def first(n: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values[:n]


def nan(*at: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[at] = np.nan
        return values

    return change


REFUSALS: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("d4rl", {"actions": None}, ("actions", "infos, metadata, observations, rewards, terminals, timeouts")),
    ("d4rl", {"observations": first(5)}, ("observations", 5, "actions", 6)),
    ("d4rl", {"observations": np.zeros((6, 8, 8, 3))}, ("observations", 2, "[6, 8, 8, 3]")),
    ("d4rl", {"next_observations": np.zeros((6, 2))}, ("next_observations", "[6, 2]", "observations", "[6, 3]")),
    ("d4rl", dict.fromkeys(("observations", "actions", "rewards", "terminals", "timeouts"), first(0)), ("steps",)),
    ("d4rl", {"rewards": nan(4)}, ("rewards", 4)),
    ("d4rl", {"observations": nan(4)}, (3, "state", 1)),
    ("robomimic", {"data": None}, ("data/demo_0", "robomimic")),
    ("robomimic", {"data@env_args": "{"}, ("env_args", "/data", "JSON")),
    ("robomimic", {"data@env_args": '{"env_kwargs": {"control_freq": Infinity}}'}, ("control_freq",)),
    ("robomimic", {"data@env_args": '{"env_kwargs": {"control_freq": 1%s}}' % (400 * "0")}, ("control_freq",)),
    ("robomimic", {"data/demo_0/obs": None}, ("demo_0", "obs", "actions, dones, next_obs, rewards")),
    ("robomimic", {"data/demo_1/obs": None}, ("demo_1", "obs", "actions, dones, next_obs, rewards")),
    ("robomimic", {"data/demo_0/obs": None, "data/demo_0/obs/ee_pos": np.zeros((4, 3))},
     ("obs", "robot0_eef_pos", "ee_pos")),
    ("robomimic", {"data/demo_1/actions": nan(2, 3)}, ("demo_1", "action", 2)),
    ("robomimic", {"data/demo_1/actions": np.zeros(3)}, ("demo_1", "actions", 2, "[3]")),
    ("robomimic", {"data/demo_1/actions": first(0)}, ("demo_1", "episodes")),
    ("robomimic", {"data/demo_1/actions": first(2)}, ("demo_1", "actions", 2, "num_samples", 3)),
    ("robomimic", {"data/demo_1/rewards": first(2)}, ("demo_1", "reward", 2, "/action", 3)),
    ("robomimic", {"data/demo_1/obs/object": None}, ("/data/demo_1/obs", "object")),
    ("robomimic", {"data/demo_1/next_obs/object": first(2)}, ("/data/demo_1/next_obs/object", 2, "actions", 3)),
    ("robomimic", {"data/demo_1/next_obs/object": lambda v: v[:, :9]}, ("demo_1", "state", 19, "(18,)")),
    ("robomimic", {"data/demo_1/obs/agentview_image": None}, ("/data/demo_1/obs/agentview_image",)),
    ("robomimic", {"data/demo_1/obs/agentview_image": lambda v: v.astype(float)},
     ("/data/demo_1/obs/agentview_image", "float64[3, 6, 8, 3]")),
    ("robomimic", {"data/demo_1/next_obs/agentview_image": None}, ("demo_1", "agentview_image", "eye_in_hand_image")),
    ("hil_serl", {"1/actions": None}, (1, "actions", "observations")),
    ("hil_serl", {"1": 3}, (1, "int", "dict")),
    ("hil_serl", {"1/observations": {"wrist_1": 0}}, (1, "observations", "dict", "state")),
    ("hil_serl", {"1/observations/state": np.zeros((2, 5), "f4")}, (1, "observations['state']", "[2, 5]", "[5]")),
    ("hil_serl", {"1/next_observations/state": [1.0] * 5}, (1, "next_observations['state']", "list", "[5]")),
    ("hil_serl", {"1/observations/state": np.full((1, 5), np.nan)}, (1, "observations['state']")),
    ("hil_serl", {"1/actions": np.full(4, 1e300)}, (1, "actions")),
    ("hil_serl", {"1/actions": np.zeros(3)}, (1, "actions", "float64[3]", "[4]")),
    ("hil_serl", {"1/rewards": "1"}, (1, "rewards", "str")),
    ("hil_serl", {"1/rewards": np.nan}, (1, "rewards", "float")),
    ("hil_serl", {"1/dones": np.zeros(2)}, (1, "dones", "float64[2]")),
    ("hil_serl", {"1/infos/succeed": "yes"}, (1, "infos['succeed']", "str")),
    ("hil_serl", {"1/next_observations/side": np.zeros((1, 6, 8, 3), "f4")},
     (1, "next_observations['side']", "float32")),
    ("hil_serl", {"1/observations/side": None}, (1, "observations['side']", "uint8[6, 8, 3]")),
    ("hil_serl", {"1/infos/left": lambda _: os.getcwd}, ("posix.getcwd",)),
    ("hil_serl", {"1/observations/state": np.array([None])}, ("objects",)),
    ("ogbench", {"actions": None}, ("actions", "observations", "terminals", "qpos")),
    ("ogbench", {"observations": nan(6, 1)}, ("observations", "row 6")),
    ("ogbench", {"observations": np.array([None] * 8)}, ("observations", "pickle")),
    ("ogbench", {"observations": np.zeros((8, 4), np.int64)}, ("observations", "int64")),
    ("ogbench", {"observations": np.zeros((8, 6, 6, 3), np.uint8)}, ("observations", "[8, 6, 6, 3]")),
    ("ogbench", {"actions": lambda v: v[:, 0]}, ("actions", 2, "[8]")),
    ("ogbench", {"next_observations": np.zeros((8, 4))}, ("next_observations",)),
    ("ogbench", {"valids": np.zeros(8)}, ("valids",)),
    ("ogbench", {"rewards": np.zeros(8, np.float32)}, ("rewards", "masks", "env")),
    ("ogbench", {"rewards": np.full(8, np.nan)}, ("rewards", "row 0")),
    ("ogbench", dict.fromkeys(("observations", "actions", "terminals", "qpos"), first(1)), (1, "trajectory")),
    ("ogbench", {"terminals": np.ones(8, bool)}, ("trajectory", "step")),
    ("episodes", {"observations": None, "weights": np.zeros(3)}, ("/observations/qpos",)),
    ("episodes", {"action": first(4)}, ("/observations/qpos", "(6, 2)", "/action", "(4, 2)")),
    ("episodes", {"observations/qpos": np.full((6, 2), 1e300)}, ("state", 0)),
    ("episodes", {"action": first(0), "observations/qpos": first(0)}, ("steps",)),
    ("episodes", {"action": np.zeros(6)}, ("/observations/qpos", "/action", "(6,)")),
    ("episodes", {"observations/images/top": np.zeros((6, 4, 4), "u1")},
     ("/observations/images/top", "uint8[6, 4, 4]")),
    ("episodes", {"observations/images/top": first(5)}, ("/observations/images/top", 5, "/action", 6)),
    ("episodes", {"observations/images/top": lambda v: jpeg_rows([v[0], v[1][:8], *v[2:]])},
     ("/observations/images/top", 1, "8x24", "16x24")),
    ("episodes", {"observations/images/top": lambda v: jpeg_rows(v)[:, :99]}, ("/observations/images/top", 0, "JPEG")),
    ("episodes", CHUNKED | {"image_indices": [0, 6]}, ("/image_indices", "0..5", "int64[2]", "[0, 6]")),
    ("episodes", CHUNKED | {"image_indices": [3, 1]}, ("/image_indices", "0..5", "[3, 1]")),
    ("episodes", CHUNKED | {"image_indices": [0.0, 1.0]}, ("/image_indices", "0..5", "float64[2]")),
    ("episodes", CHUNKED | {"image_indices": [0, 1, 2]}, ("/observations/images/top", 2, "/image_indices", 3)),
    ("episodes", {"chunk_starts": [4, 2]}, ("/chunk_starts", "0..5", 6, "[4, 2]")),
    ("episodes", {"chunk_starts": [[0, 2]]}, ("/chunk_starts", "int64[1, 2]")),
    ("ours", {"action": None}, ("/action",)),
    ("ours", {"rl/state": None}, ("arm3", "state", 5, 3)),
    ("ours", {"rl/image_index/top": None}, ("/rl/image_index/top",)),
    ("ours", {"rl/final_observation/state": None}, ("/rl/final_observation/state",)),
    ("ours", {"rl/reward": first(4)}, ("reward", 4, "/action", 5)),
    ("ours", {"rl/reward": lambda v: v[:, None]}, ("reward", 1, "(5, 1)")),
    ("ours", {"rl/source": "human"}, ("/rl/source", "object")),
    ("ours", {"action": nan(2)}, ("action", 2)),
    ("ours", {"rl/final_observation/state": nan(2)}, ("state", 5, "(5,)")),
    ("ours", {"action": lambda v: np.tile(v, 2)}, ("arm3", 3, "/action", 6)),
    ("ours", {"rl/image_index/top": lambda v: v[::-1]}, ("images/top", "0..4")),
    ("ours", {"rl/image_index/top": lambda v: v + 1}, ("images/top", "0..4")),
    ("ours", {"rl/image_index/top": first(4)}, ("images/top", 5, "(4,)")),
    ("ours", {"observations/images/top": lambda v: v[:, :2]}, ("top", "arm3", "4x6", "2x6")),
    ("ours", {"rl/human_dims": lambda v: v.astype(np.float32)}, ("human_dims", "float32[2, 3]", "uint8[2, 3]")),
    ("ours", {"rl/human_dims": lambda v: v[:, :2]}, ("human_dims", "uint8[2, 2]", "uint8[2, 3]")),
    ("ours", {"rl/human_dims": first(1)}, ("human_dims", 1, "(2,)")),
    ("ours", {"rl/human_dims": lambda v: v[0]}, ("/rl/human_dims", "[3]", 2)),
    ("ours", {"rl/human_dims": lambda v: v * 2}, ("human_dims", "[0, 2, 0]", "tick 1")),
    ("ours", {"rl/human_dims_index": lambda v: v + 2}, ("human_dims", "0..4")),
    ("ours", {"rl/source": lambda v: 0 * v}, ("human_dims", "tick 1", "HUMAN")),
    ("ours", {"rl/human_dims_index": None}, ("/rl/human_dims_index",)),
    ("ours", {"rl@schema": 2}, ("/rl", "schema", 2, 1)),
    ("ours", {"rl@schema": None}, ("/rl", "schema")),
    ("ours", {"rl@task": None}, ("/rl", "task")),
    ("ours", {"rl@outcome": "fine"}, ("outcome", "fine", "success", "failure", "unknown")),
    ("ours", {"@hz": 10.0}, (10, 50)),
]  # fmt: skip


@pytest.mark.parametrize(("format", "changes", "named"), REFUSALS)
def test_what_is_wrong_in_a_file_is_named(tmp_path, spec, make_episode, format, changes, named):
    if format == "ours":
        path = tmp_path / "x.hdf5"
        write_episode(path, make_episode(spec, 5, shared=(1, 4)), spec)
        format, options = "episodes", {"spec": spec, "hz": spec.control_hz}
    else:
        path, options = SAMPLES[format](tmp_path), {}
    amended(path, changes)
    with pytest.raises(DataError, match=naming(path, *named)) as caught:
        list(map(decode_images, read_all(path, format, **{"color": "rgb"} | options)))
    assert str(caught.value).startswith(str(path))


def robot(state: int, actions: int, *joints: int, name: str = "arm") -> RobotSpec:
    return RobotSpec(name, 10.0, state, (-9.0,) * actions, (9.0,) * actions, joints or (-1,) * actions, (), (), 100)


@pytest.mark.parametrize(
    ("format", "options", "error", "named"),
    [
        ("d4rl", {"success": True}, ConfigError, ("success", "failure")),
        ("hil_serl", {"success": True}, ConfigError, ("success", "failure")),
        ("hil_serl", {"cameras": ("top",)}, DataError, ("top", "wrist_1", "side")),
        ("hil_serl", {"cameras": (), "spec": robot(5, 7)}, DataError, ("arm", 7, "/action", 4)),
        ("robomimic", {"cameras": ("top",)}, DataError, ("top", "agentview", "eye_in_hand")),
        ("robomimic", {"hz": 10.0}, DataError, ("x.hdf5", 20, 10, "hz")),
        ("ogbench", {"env_reward": "dense"}, DataError, ("x.npz", "dense", "env")),
        ("episodes", {"color": None}, DataError, ("x.hdf5", "color", "color", "cameras")),
        ("episodes", {"cameras": ("front",)}, DataError, ("x.hdf5", "/observations/images", "front", "top", "wrist")),
        ("episodes", {"reward_every_step": True}, DataError, ("x.hdf5", "success", "failure", "scores")),
        ("episodes", {"spec": robot(2, 7)}, DataError, ("arm", 7, "/action", 2)),
        ("episodes", {"spec": robot(7, 2, 0, 6)}, DataError, ("arm", 7, "ALOHA", 2)),
        ("episodes", {"spec": robot(7, 2)}, DataError, ("arm", 7, "/observations/qpos", 2)),
        ("episodes", {"proportion": 0.0}, ConfigError, ("proportion", 0, "(0, 1]")),
        ("episodes", {"proportion": 1.01}, ConfigError, ("proportion", 1.01, "(0, 1]")),
        ("episodes", {"hz": 0.0}, ConfigError, ("hz", 0)),
        ("hdf6", {}, ConfigError, ("hdf6", "episodes")),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(tmp_path, format, options, error, named):
    path = SAMPLES.get(format, SAMPLES["episodes"])(tmp_path)
    with pytest.raises(error, match=naming(*named)):
        read_all(path, format, **{"color": "rgb"} | options)


@pytest.mark.parametrize("format", SAMPLES)
def test_a_format_is_told_by_what_lies_there_and_a_copy_in_another_process_reads_for_itself(tmp_path, format):
    path = SAMPLES[format](tmp_path / "set" if format != "ogbench" else tmp_path)
    others = {"d4rl": ["episodes"], "robomimic": ["episodes"]}  # files of that suffix, unless they are known better
    assert [f.name for f in formats().values() if f.matches(path)] == [format, *others.get(format, [])]
    assert choose(path, None).name == format
    folder = {"d4rl": "episodes", "robomimic": "episodes"}.get(format, format)
    assert getattr(matching(path.parent), "name", None) == folder
    source = open_episodes(path, ReadOptions(color="rgb"), format)
    *_, last = keys = source.keys()
    data = pickle.dumps(source)
    assert len(data) < 5_000
    np.testing.assert_array_equal(pickle.loads(data).read(last).steps.action, source.read(last).steps.action)
    assert (source.format, source.path) == (format, path)
    if format != "episodes":
        with pytest.raises(DataError, match=naming(path.name, "none", len(keys), keys[0], last)):
            source.read("none")
    whole = path.read_bytes()
    for n in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(DataError, match=naming(path, {"ogbench": "zip", "hil_serl": n}.get(format, "HDF5"))):
            read_all(path, format, color="rgb")
        assert not (format in ("d4rl", "robomimic", "ogbench") and formats()[format].matches(path))


def test_what_is_of_no_format(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.txt", "b.npz", ".episode_0.hdf5"):
        (other / name).write_text("hello")
    np.savez(other / "c.npz", x=np.zeros(3))
    assert [matching(other / name) for name in ("a.txt", "b.npz", "c.npz", "absent", "..")] == [None] * 5
    assert matching(other) is None
    for wrong, named in ((other / "absent", ("absent",)), (other, ("folder", "format", "robomimic"))):
        with pytest.raises(ConfigError, match=naming(wrong, *named)):
            choose(wrong, None)
