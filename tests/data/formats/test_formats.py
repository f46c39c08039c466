"""What holds for every format: it is recognised by its content, and a wrong or hostile file is named."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_sets import SAMPLES, amended, hdf5_file, npz_file, read_all
from errors import naming

from serl_chunk.data.convert.workers import ConversionSpec, EpisodeJob, WorkerFault, stage
from serl_chunk.data.formats import choose, formats, hdf5, hdf5_io, matching, ogbench
from serl_chunk.data.formats.hdf5 import open_episode
from serl_chunk.data.formats.hdf5_io import MachineError, NoMemoryError, checked, member, opened
from serl_chunk.data.paths import find, open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.main import main
from serl_chunk.types import ConfigError, DataError, RobotSpec


def robot(state: int, actions: int, *joints: int, name: str = "arm") -> RobotSpec:
    return RobotSpec(name, 10.0, state, (-9.0,) * actions, (9.0,) * actions, joints or (-1,) * actions, (), (), 100)


@pytest.mark.parametrize(("format", "options", "error", "named"), [
    ("d4rl", {"success": True}, ConfigError, ("success", "failure")),
    ("hil_serl", {"cameras": ("top",)}, DataError, ("top", "wrist_1", "side")),
    ("hil_serl", {"cameras": (), "spec": robot(5, 7)}, DataError, ("arm", 7, "/action", 4)),
    ("fields", {"cameras": ("top",)}, DataError, ("top", "agentview", "eye_in_hand")),
    ("fields", {"hz": 10.0}, DataError, ("x.hdf5", 20, 10, "hz")),
    ("ogbench", {"env_reward": "dense"}, DataError, ("x.npz", "dense", "env")),
    ("episodes", {"color": None}, DataError, ("x.hdf5", "color", "color", "cameras")),
    ("episodes", {"cameras": ("front",)}, DataError, ("x.hdf5", "/observations/images", "front", "top", "wrist")),
    ("episodes", {"reward_every_step": True}, DataError, ("x.hdf5", "success", "failure", "scores")),
    ("episodes", {"spec": robot(2, 7)}, DataError, ("arm", 7, "/action", 2)),
    ("episodes", {"spec": robot(7, 2, 0, 6)}, DataError, ("arm", 7, "ALOHA", 2)),
    ("episodes", {"spec": robot(7, 2)}, DataError, ("arm", 7, "/observations/qpos", 2)),
    ("episodes", {"proportion": 1.01}, ConfigError, ("proportion", 1.01, "(0, 1]")),
    ("episodes", {"hz": 0.0}, ConfigError, ("hz", 0)), ("hdf6", {}, ConfigError, ("hdf6", "episodes")),
])  # fmt: skip
def test_settings_that_do_not_fit_are_named(tmp_path, format, options, error, named):
    path = SAMPLES.get(format, SAMPLES["episodes"])(tmp_path)
    with pytest.raises(error, match=naming(*named)):
        read_all(path, format, **{"color": "rgb"} | options)


@pytest.mark.parametrize("format", SAMPLES)
def test_a_format_is_told_by_what_lies_there_and_a_copy_in_another_process_reads_for_itself(tmp_path, format):
    path = SAMPLES[format](tmp_path / "set" if format != "ogbench" else tmp_path)
    # Files of that suffix, unless they are known better.
    others = {name: ["episodes"] for name in ("d4rl", "fields")}
    assert [f.name for f in formats().values() if f.matches(path)] == [format, *others.get(format, [])]
    assert choose(path, None).name == format
    folder = {"d4rl": "episodes"}.get(format, format)
    assert getattr(matching(path.parent), "name", None) == folder
    assert find(path.parent) == [path.parent if format != "d4rl" else path]
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
        assert not (format in ("d4rl", "fields", "ogbench") and formats()[format].matches(path))


def gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(b"x"))


def raw(path: Path) -> None:
    hdf5_file(path, {"data@env_info": "{}", "data/demo_1/states": np.zeros((3, 9)), "data/demo_1/actions": np.zeros(3)})


def zipped(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "x")


TABLE = "docs/data.md"
# name -> its content, or what writes it; what the sentence names, and the way on
FOREIGN: dict[str, tuple[bytes | Callable[[Path], object], tuple[Any, ...]]] = {
    "demo.pkl.gz": (gzipped, ("gzip", "`gzip -dc {}/demo.pkl.gz > {}/demo.pkl`")),
    "demo.pkl": (gzipped, ("gzip", "`gzip -dc {}/demo.pkl > {}/demo.unpacked.pkl`")),
    "y.hdf5": (b"<!DOCTYPE html>", ("web page", "`resolve`")),
    "a b.pkl.bz2": (b"BZh91AY", ("bzip2", "`bzip2 -dc '{}/a b.pkl.bz2' > '{}/a b.pkl'`")),
    "x.xz": (b"\xfd7zXZ\0", ("`xz -dc",)),
    "x.zst": (b"\x28\xb5\x2f\xfd", ("`zstd -dc",)),
    "x.lz4": (b"\x04\x22\x4d\x18", ("`lz4 -dc",)),
    "x.tar": (bytes(257) + b"ustar", ("tar archive", "`tar -xf")),
    "x.mcap": (b"\x89MCAP0\r\n", ("MCAP", TABLE)),
    "x.bag": (b"#ROSBAG V2.0", ("ROS 1", TABLE)),
    "x.db3": (b"SQLite format 3\0", ("ROS 2", TABLE)),
    "x.npy": (b"\x93NUMPY", ("array of NumPy", TABLE)),
    "x.mat": (b"MATLAB 5.0", ("MATLAB", TABLE)),
    "x.csv": (b"a,b", ("table", TABLE)),
    "x.dat": (b"", ("empty",)),
    "set/data/x.parquet": (b"PAR1", ("Parquet", "LeRobot", "{}/set")),
    "x.parquet": (b"PAR1", ("Parquet", TABLE)),
    "set/x.mp4": (b"\0\0\0 ftypisom", ("video", "{}/set")),
    "x.png": (b"\x89PNG", ("image", TABLE)),
    "raw.hdf5": (raw, ("robosuite", "convert_robosuite --dataset {}/raw.hdf5", "dataset_states_to_obs")),
    "x.zarr.zip": (lambda path: zipped(path, "data/.zgroup"), ("zarr", TABLE)),
    "x.pt": (lambda path: zipped(path, "x/data.pkl"), ("PyTorch", TABLE)),
    "x.zip": (lambda path: zipped(path, "x.hdf5"), ("zip archive", "`unzip {}/x.zip`")),
    "x.npz": (lambda path: npz_file(path, {"state": np.zeros(3)}), ("state", "observations", TABLE)),
    "x.tfrecord-00000-of-00001": (b"x", ("TensorFlow", "openpi")),
    "replay.zarr/.zgroup": (b"{}", ("zarr store", TABLE)),
    "v3.zarr/zarr.json": (b"{}", ("zarr store", TABLE)),
    "rlds/1.0.0/features.json": (b"{}", ("RLDS", "convert_libero_data_to_lerobot.py")),
    "minari/data/0/part-0.arrow": (b"ARROW1", ("Minari", "data_format='hdf5'")),
    "calvin/ep_start_end_ids.npy": (b"\x93NUMPY", ("CALVIN", TABLE)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_of_another_program_is_named_with_a_way_on(tmp_path, name):
    content, named = FOREIGN[name]
    (tmp_path / "set" / "meta").mkdir(parents=True)
    (tmp_path / "set" / "meta" / "info.json").touch()
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    parts = Path(name).parts
    given = path if len(parts) == 1 or parts[0] == "set" else tmp_path / parts[0]
    named = tuple(part.replace("{}", str(tmp_path)) for part in named)
    for names in (given, tmp_path / f"{given.name[:-1]}?") if given.parent == tmp_path else (given,):
        with pytest.raises(ConfigError) as raised:
            open_episodes(names, ReadOptions())
        assert [part for part in (str(given), "not read", *named) if part not in str(raised.value)] == []


PACKED = ("gzip", "bzip2", "xz", "zstd", "lz4")


@pytest.mark.parametrize("tool", [each for each in PACKED if shutil.which(each)])
def test_what_is_packed_is_read_after_the_command_in_the_error(tmp_path, tool):
    path = SAMPLES["hil_serl"](tmp_path / "it's here")
    packed = path.with_name("packed.pkl")
    with packed.open("wb") as file:
        subprocess.run([tool, "-c", path], stdout=file, check=True)
    with pytest.raises(ConfigError) as raised:
        open_episodes(packed, ReadOptions())
    subprocess.run(re.findall("`(.*)`", str(raised.value))[0], shell=True, check=True)
    assert len(read_all(path)) == 2


def test_a_file_written_by_the_lines_of_the_document_is_read(tmp_path):
    page = Path("docs/data.md").read_text()
    lines = {}
    exec(page[page.index("## Other formats") :].split("```python\n")[1].split("```")[0], lines)
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    state, action = np.ones((5, 3)), np.zeros((5, 2))
    lines["write"](tmp_path / "episode_0.hdf5", state, action, {"top": frames}, 20)
    (episode,) = read_all(tmp_path, success=True)
    source = open_episodes(tmp_path, ReadOptions())
    assert (episode.steps.n, episode.end.outcome.value, source.hz) == (4, "success", 20)
    np.testing.assert_array_equal(np.asarray(episode.steps.sparse["images/top"].values), frames[:4])


def test_what_is_of_no_format(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.txt", "b.npz", ".episode_0.hdf5"):
        (other / name).write_text("hello")
    np.savez(other / "c.npz", x=np.zeros(3))
    assert [matching(other / name) for name in ("a.txt", "b.npz", "c.npz", "absent", "..")] == [None] * 5
    assert matching(other) is None
    for wrong, named in ((other / "absent", ("absent",)), (other, ("folder", "format", "fields"))):
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
    "fields": ("actions", "rewards", "obs/object", "obs/agentview_image", "next_obs/object"),
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
        *(("fields", name, external_link) for name in GROUPS),
    ],
)
def test_a_source_reads_nothing_but_its_file(tmp_path: Path, format: str, name: str, harm: Callable[..., None]) -> None:
    (tmp_path / "secret.bin").write_bytes(b"secret-bytes")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["stolen"] = np.ones((N, 2), np.uint8)
    path = SAMPLES[format](tmp_path)
    where = f"data/demo_0/{name}" if format == "fields" and name not in GROUPS else name
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


MACHINE = [
    OSError(errno.EIO, os.strerror(errno.EIO)),
    RuntimeError("Can't read data (file read failed: time = now, errno = 5, error message = 'Input/output error')"),
    MemoryError("too much"),
]


@pytest.mark.parametrize("error", MACHINE, ids=repr)
def test_a_failure_of_the_machine_is_no_bad_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    sources = [open_episodes(SAMPLES[name](tmp_path / name), RGB, name) for name in ("episodes", "fields")]
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
