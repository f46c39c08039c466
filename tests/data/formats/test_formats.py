"""What holds for every format: it is recognised by its content, and a wrong or hostile file is named."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import SAMPLES, amended, jpeg_rows, read_all
from errors import naming

from serl_chunk.data.convert.workers import ConversionSpec, EpisodeJob, RefusedEpisode, WorkerFault, stage
from serl_chunk.data.formats import choose, formats, hdf5, hdf5_io, matching, ogbench, open_episodes
from serl_chunk.data.formats.hdf5 import open_episode, write_episode
from serl_chunk.data.formats.hdf5_io import MachineError, NoMemoryError, checked, member, opened, raise_machine_fault
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.main import main
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
    ("robomimic", {"data/demo_1/obs": None}, ("demo_1", "obs", "actions, dones, next_obs, rewards")),
    ("robomimic", {"data/demo_0/obs": None, "data/demo_0/obs/ee_pos": np.zeros((4, 3))},
     ("obs", "robot0_eef_pos", "ee_pos")),
    ("robomimic", {"data/demo_1/actions": nan(2, 3)}, ("demo_1", "action", 2)),
    ("robomimic", {"data/demo_1/actions": np.zeros(3)}, ("demo_1", "actions", 2, "[3]")),
    ("robomimic", {"data/demo_1/actions": first(0)}, ("demo_1", "episodes")),
    ("robomimic", {"data/demo_1/actions": first(2)}, ("demo_1", "actions", 2, "num_samples", 3)),
    ("robomimic", {"data/demo_1/rewards": first(2)}, ("demo_1", "reward", 2, "/action", 3)),
    ("robomimic", {"data/demo_1/next_obs/object": first(2)}, ("/data/demo_1/next_obs/object", 2, "actions", 3)),
    ("robomimic", {"data/demo_1/next_obs/object": lambda v: v[:, :9]}, ("demo_1", "state", 19, "(18,)")),
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


N = 6
RGB = ReadOptions(color="rgb")


def external_link(file: h5py.File, name: str) -> None:
    file[name] = h5py.ExternalLink("other.h5", "/stolen")


def soft_link_to_an_external_one(file: h5py.File, name: str) -> None:
    file["hop"] = h5py.ExternalLink("other.h5", "/")
    file[name] = h5py.SoftLink("/hop/stolen")


def external_storage(file: h5py.File, name: str) -> None:
    file.create_dataset(name, (N, 2), "u1", external=[("secret.bin", 0, 2 * N)])


def virtual(file: h5py.File, name: str) -> None:
    layout = h5py.VirtualLayout((N, 2), "u1")
    layout[:] = h5py.VirtualSource("other.h5", "stolen", shape=(N, 2))
    file.create_virtual_dataset(name, layout)


def huge(file: h5py.File, name: str) -> None:
    file.create_dataset(name, (2**20, 1024), "f4", chunks=(1024, 1024), compression="gzip")


HARMS = [external_link, soft_link_to_an_external_one, external_storage, virtual, huge]
FILES = {
    "episodes": ("action", "observations/qpos", "observations/images/top", "chunk_starts"),
    "d4rl": ("observations", "actions", "rewards", "terminals", "timeouts"),
    "robomimic": ("actions", "rewards", "obs/object", "obs/agentview_image", "next_obs/object"),
}
GROUPS = ["data", "data/demo_0", "data/demo_0/obs"]


@pytest.mark.parametrize(
    ("format", "name", "harm"),
    [
        *(
            (f, name, harm)
            for f, names in FILES.items()
            for name in names
            for harm in (external_link, external_storage)
        ),
        *((f, names[0], harm) for f, names in FILES.items() for harm in HARMS[2:]),
        *(("robomimic", name, external_link) for name in GROUPS),
    ],
)
def test_a_source_reads_nothing_but_its_file(tmp_path: Path, format: str, name: str, harm: Callable[..., None]) -> None:
    (tmp_path / "secret.bin").write_bytes(b"secret-bytes")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["stolen"] = np.ones((N, 2), np.uint8)
    path = SAMPLES[format](tmp_path)
    where = f"data/demo_0/{name}" if format == "robomimic" and name not in GROUPS else name
    with h5py.File(path, "r+") as file:
        if where in file:
            del file[where]
        harm(file, where)
    assert formats()[format].matches(path)  # opening it names the reason
    last = Path(name).name if name in GROUPS else name
    links = harm in (external_link, soft_link_to_an_external_one)
    named = (last, 4294967296, 0) if harm is huge else ("other.h5",) if links else (last, "files")
    with pytest.raises(DataError, match=naming(path.name, *named)):
        read_all(path, format, color="rgb")


def test_what_an_external_link_names_is_not_even_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    path = SAMPLES["episodes"](tmp_path)
    for name in ("rl", "base_action", "chunk_starts", "image_indices"):
        amended(path, {name: h5py.ExternalLink("fifo", "/")})
        if name == "base_action":  # read for robots that have it alone
            open_episode(path, RGB)
        else:
            with pytest.raises(DataError, match=naming(path.name, name, "fifo")):
                open_episode(path, RGB)
        open_episodes(path, RGB, "episodes").notes()
        with h5py.File(path, "r+") as file:
            del file[name]


def test_links_in_a_circle_and_chunks_beyond_their_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"], file["b"] = h5py.SoftLink("/b"), h5py.SoftLink("/a")
        with pytest.raises(DataError, match=naming("here", "/a")):
            member("here", file, "a")
        for name, passes in (("packed", 1), ("bomb", 2)):  # packing what is packed leaves next to nothing
            made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            made.set_chunk((2**24,))
            for _ in range(passes):
                made.set_deflate(9)
            space = h5py.h5s.create_simple((1,), (h5py.h5s.UNLIMITED,))
            h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, made))[0] = 0
        file["same"] = h5py.SoftLink("/whole")
        file["whole"] = np.arange(3)
        assert member("here", file, "same") == file["whole"]
        assert member("here", file, "none/such") is None
    with h5py.File(tmp_path / "a.h5") as file:
        assert checked("here", file["packed"])[0] == 0  # 16 MB out of 16 kB, as gzip packs black frames
        with pytest.raises(DataError, match=naming("/bomb", 16777216)):
            checked("here", file["bomb"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("@hz", hz) for hz in (0.0, "50", [50.0, 50.0], h5py.Empty("f"))),
        *((name, value) for name in ("observations/images", "observations", "action") for value in (5, [0, 1, 2])),
        ("action", "x"),
    ],
)
def test_items_of_another_kind(tmp_path: Path, name: str, value: Any) -> None:
    path = amended(SAMPLES["episodes"](tmp_path), {name: value})
    source = open_episodes(path, RGB, "episodes")
    source.notes()
    named = {"@hz": ["hz"], "observations/images": ["/observations/images"]}.get(name, [])
    with pytest.raises(DataError, match=naming(path, *named)):
        source.read(path.name)


MACHINE = [OSError(n, os.strerror(n)) for n in (errno.EMFILE, errno.EIO, errno.ESTALE)] + [
    RuntimeError("Can't read data (file read failed: time = now, errno = 5, error message = 'Input/output error')"),
    MemoryError("too much"),
]


@pytest.mark.parametrize("error", MACHINE, ids=repr)
def test_a_failure_of_the_machine_is_no_bad_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    sources = [open_episodes(SAMPLES[name](tmp_path / name), RGB, name) for name in ("episodes", "robomimic")]
    npz_path, good = SAMPLES["ogbench"](tmp_path), sources[0].path
    frames = sources[0].read(good.name).steps.sparse["images/top"].values
    kind = NoMemoryError if isinstance(error, MemoryError) else MachineError
    monkeypatch.setattr(h5py, "File", fail)
    hdf5_io.close_files()
    for source, key in zip(sources, (good.name, "demo_0"), strict=True):
        result = stage(ConversionSpec(source, None, {}, None), EpisodeJob(0, key))  # type: ignore[arg-type]
        assert isinstance(result, WorkerFault)
        assert "mistake in this program" not in result.error
    with pytest.raises(kind, match=naming(good.name, "/observations/images/top", 0)):
        np.asarray(frames[0])
    with pytest.raises(kind), opened(good):
        pass
    assert main(["data", "inspect", str(good), "--from", "episodes", "--color", "rgb"]) == 1
    assert capsys.readouterr().err.startswith("serl-chunk: ")
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(kind):
        ogbench.load(npz_path, ("observations",))
    if kind is NoMemoryError:
        with pytest.raises(DataError, match=naming(good.name, error)):
            hdf5.read_episode(good)


def test_damage_is_a_bad_episode(tmp_path: Path) -> None:
    path = SAMPLES["episodes"](tmp_path)
    source = open_episodes(path, RGB, "episodes")
    path.write_bytes(path.read_bytes()[:900])
    assert isinstance(stage(ConversionSpec(source, None, {}, None), EpisodeJob(0, path.name)), RefusedEpisode)  # type: ignore[arg-type]
    for error in (OSError("file signature not found"), OSError(errno.EISDIR, "a folder"), KeyError("errno = 5")):
        raise_machine_fault(path, error)


def test_dense_rewards_tell_no_success(tmp_path):
    for format, changes, options, tell in (
        *(("d4rl", {"rewards": 2 * rewards}, {}, True) for rewards in ([0, 0, 1], [-1, -1, 0])),
        *(("d4rl", {"rewards": 2 * rewards}, {}, False) for rewards in ([0, 0.5, 1], [3, 1, 2])),
        ("episodes", {}, {"success": True}, True),
        ("episodes", {}, {"success": True, "reward_every_step": True}, False),
    ):
        path = amended(SAMPLES[format](tmp_path), changes)
        assert open_episodes(path, ReadOptions(color="rgb", **options), format).rewards_mark_success is tell
