"""Files made to harm their reader, and failures of the machine, which are no fault of a file."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from errors import naming

from serl_chunk.data.convert.workers import ConversionSpec, EpisodeJob, RefusedEpisode, WorkerFault, stage
from serl_chunk.data.formats import d4rl, episodes, hdf5, hdf5_io, hil_serl, ogbench, robomimic
from serl_chunk.data.formats.hdf5 import open_episode
from serl_chunk.data.formats.hdf5_io import MachineError, NoMemoryError, checked, member, opened, raise_machine_fault
from serl_chunk.data.source import ReadOptions
from serl_chunk.main import main
from serl_chunk.types import DataError

N = 6
RGB = ReadOptions(color="rgb", hz=10.0)
Edit = Callable[[h5py.File], Any]


def aloha(path: Path, edit: Edit | None = None) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["/observations/qpos"], file["/action"] = rng.normal(size=(N, 2)), rng.normal(size=(N, 2))
        file["/observations/images/top"] = rng.integers(0, 256, (N, 4, 4, 3), dtype=np.uint8)
        if edit is not None:
            edit(file)
    return path


def d4rl_file(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = rng.normal(size=(N, 3)), rng.normal(size=(N, 2))
        file["rewards"], file["terminals"], file["timeouts"] = np.zeros(N), np.zeros(N), np.eye(N)[-1]
    return path


def robomimic_file(path: Path, env: str = "{}") -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = env
        file["data/demo_0/actions"], file["data/demo_0/rewards"] = rng.normal(size=(N, 2)), np.zeros(N)
        for group in ("obs", "next_obs"):
            file[f"data/demo_0/{group}/object"] = rng.normal(size=(N, 3))
            file[f"data/demo_0/{group}/top_image"] = rng.integers(0, 256, (N, 4, 4, 3), dtype=np.uint8)
    return path


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


ELSEWHERE = [external_link, soft_link_to_an_external_one, external_storage, virtual]
HARMS = [*ELSEWHERE, huge]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files that hostile ones name."""
    (tmp_path / "secret.bin").write_bytes(b"secret-bytes")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["stolen"] = np.ones((N, 2), np.uint8)
    return tmp_path


def named(harm: Callable[..., None], name: str) -> str:
    if harm is huge:
        return naming("a.hdf5", name, 4294967296, 0)
    if harm in (external_link, soft_link_to_an_external_one):
        return naming("a.hdf5", "other.h5")
    return naming("a.hdf5", name, "files")


def replaced(path: Path, name: str, harm: Callable[[h5py.File, str], None]) -> Path:
    with h5py.File(path, "r+") as file:
        del file[name]
        harm(file, name)
    return path


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["action", "observations/qpos", "observations/images/top", "chunk_starts"])
def test_an_episode_reads_nothing_but_itself(folder: Path, name: str, harm: Callable[..., None]) -> None:
    path = aloha(folder / "a.hdf5", lambda file: file.__setitem__("chunk_starts", [0, 2]))
    with pytest.raises(DataError, match=named(harm, name)):
        open_episode(replaced(path, name, harm), RGB)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "terminals", "timeouts"])
def test_d4rl_reads_nothing_but_its_file(folder: Path, name: str, harm: Callable[..., None]) -> None:
    path = replaced(d4rl_file(folder / "a.hdf5"), name, harm)
    assert d4rl.FORMAT.matches(path)
    with pytest.raises(DataError, match=named(harm, name)):
        d4rl.D4rlSource(path, RGB)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["actions", "rewards", "obs/object", "obs/top_image", "next_obs/object"])
def test_robomimic_reads_nothing_but_its_file(folder: Path, name: str, harm: Callable[..., None]) -> None:
    path = replaced(robomimic_file(folder / "a.hdf5"), f"data/demo_0/{name}", harm)
    with pytest.raises(DataError, match=named(harm, name)):
        robomimic.RobomimicSource(path, RGB).read("demo_0")


@pytest.mark.parametrize("name", ["data", "data/demo_0", "data/demo_0/obs"])
def test_no_group_of_another_file_is_read(folder: Path, name: str) -> None:
    path = replaced(robomimic_file(folder / "a.hdf5"), name, external_link)
    assert robomimic.FORMAT.matches(path)
    with pytest.raises(DataError, match=naming("a.hdf5", Path(name).name, "other.h5")):
        robomimic.RobomimicSource(path, RGB)


def test_what_an_external_link_names_is_not_even_opened(folder: Path) -> None:
    os.mkfifo(folder / "fifo")  # opening it would wait for ever
    path = aloha(folder / "a.hdf5")
    for name in ("rl", "base_action", "chunk_starts", "image_indices"):
        with h5py.File(path, "r+") as file:
            file[name] = h5py.ExternalLink("fifo", "/")
        options = ReadOptions(color="rgb")
        if name == "base_action":  # read for robots that have it alone
            open_episode(path, options)
        else:
            with pytest.raises(DataError, match=naming("a.hdf5", name, "fifo")):
                open_episode(path, options)
        episodes.FORMAT.open(path, options).notes()
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
        assert checked("here", file["packed"])[0] == 0  # 16 MB out of 16 kB, as gzip does it
        with pytest.raises(DataError, match=naming("/bomb", 16777216)):
            checked("here", file["bomb"])


def test_black_frames_that_gzip_packs_well_are_read(tmp_path: Path) -> None:
    def black(file: h5py.File) -> None:
        del file["observations/images/top"]
        file.create_dataset(
            "observations/images/top", data=np.zeros((N, 1000, 1000, 3), np.uint8), compression="gzip",
            chunks=(1, 1000, 1000, 3), compression_opts=9,
        )  # fmt: skip

    steps = open_episode(aloha(tmp_path / "a.hdf5", black), RGB).steps
    assert not np.asarray(steps.sparse["images/top"].values[N - 1]).any()


@pytest.mark.parametrize("hz", ["50", b"50", [50.0, 50.0], 1j, h5py.Empty("f")])
def test_a_rate_that_is_no_number(tmp_path: Path, hz: Any) -> None:
    path = aloha(tmp_path / "a.hdf5", lambda file: file.attrs.__setitem__("hz", hz))
    source = episodes.FORMAT.open(path, ReadOptions(color="rgb"))
    source.notes()
    with pytest.raises(DataError, match=naming("a.hdf5", "hz")):
        source.read("a.hdf5")


@pytest.mark.parametrize("value", [5, np.arange(3), "text"])
@pytest.mark.parametrize("name", ["observations/images", "observations", "action"])
def test_items_of_another_kind(tmp_path: Path, name: str, value: Any) -> None:
    path = aloha(tmp_path / "a.hdf5")
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = value
    source = episodes.FORMAT.open(path, ReadOptions(color="rgb"))
    source.notes()
    images = ["/observations/images"] if name.endswith("images") else []
    with pytest.raises(DataError, match=naming(path, *images)):
        source.read("a.hdf5")


def pickled(path: Path, rows: Any) -> Path:
    path.write_bytes(pickle.dumps(rows, protocol=4))
    return path


def transition(camera: Any = "top", **more: Any) -> dict[str, Any]:
    observation = {"state": np.zeros(2, np.float32), camera: np.zeros((4, 4, 3), np.uint8)}
    both = {"observations": observation, "next_observations": observation}
    return both | {"actions": np.ones(2), "rewards": 1, "dones": True} | more


def test_a_pickled_array_is_no_list(tmp_path: Path) -> None:
    for value, what in ((np.zeros(3), "ndarray"), ([], "empty"), ({}, "dict")):
        with pytest.raises(DataError, match=naming("a.pkl", what)):
            hil_serl.HilSerlSource(pickled(tmp_path / "a.pkl", value), RGB).keys()


@pytest.mark.parametrize("infos", [5, True, np.ones(3), [1], "grasp_penalty"])
def test_infos_that_are_no_dict_say_nothing(tmp_path: Path, infos: Any) -> None:
    source = hil_serl.HilSerlSource(pickled(tmp_path / "a.pkl", [transition(infos=infos)]), RGB)
    assert source.read(source.keys()[0]).steps.n == 1
    assert not any("grasp_penalty" in note for note in source.notes())


@pytest.mark.parametrize("key", [b"top", b"a/b"])
def test_names_of_cameras_are_texts(tmp_path: Path, key: Any) -> None:
    with pytest.raises(DataError, match=naming("a.pkl", repr(key))):
        hil_serl.HilSerlSource(pickled(tmp_path / "a.pkl", [transition(key)]), RGB).keys()
    row = transition()
    row["observations"][key] = np.zeros(3)
    source = hil_serl.HilSerlSource(pickled(tmp_path / "a.pkl", [row]), RGB)
    assert any(str(key) in note for note in source.notes())


def ogbench_file(path: Path, observations: np.ndarray | None = None) -> Path:
    state = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32) if observations is None else observations
    n = len(state)
    np.savez_compressed(path, observations=state, actions=np.zeros((n, 2), np.float32), terminals=np.arange(n) == n - 1)
    return path


def test_npz_arrays_are_those_whose_headers_were_read(tmp_path: Path) -> None:
    path = ogbench_file(tmp_path / "a.npz")
    first = ogbench.load(path, ("observations",))["observations"]
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("observations", b"not what the header says")
    assert np.array_equal(ogbench.load(path, ("observations",))["observations"], first)
    source = ogbench.OgbenchSource(path, RGB)
    assert source.read(source.keys()[0]).steps.n == N - 1


def test_npz_members_are_bounded_by_what_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    ogbench_file(path, np.zeros((200_000, 8), np.float32))  # deflate's best, 1:1000, is read
    assert ogbench.headers(path)["observations"].shape == (200_000, 8)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file, file.open("observations.npy", "w") as data:
        np.lib.format.write_array(data, np.zeros((2**21, 8), np.float32))
    with pytest.raises(DataError, match=naming("observations", 67108992)):
        ogbench.headers(path)


MACHINE = [OSError(n, os.strerror(n)) for n in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE)] + [
    PermissionError(errno.EACCES, "denied"),
    RuntimeError("Can't read data (file read failed: time = now, errno = 5, error message = 'Input/output error')"),
    MemoryError("too much"),
]


@pytest.mark.parametrize("error", MACHINE, ids=repr)
def test_a_failure_of_the_machine_is_no_bad_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    good, path = aloha(tmp_path / "a.hdf5"), robomimic_file(tmp_path / "b.hdf5")
    source, other = episodes.FORMAT.open(good, RGB), robomimic.RobomimicSource(path, RGB)
    frames = source.read("a.hdf5").steps.sparse["images/top"].values
    kind = NoMemoryError if isinstance(error, MemoryError) else MachineError
    monkeypatch.setattr(h5py, "File", fail)
    hdf5_io.close_files()
    for each, key in ((source, "a.hdf5"), (other, "demo_0")):
        result = stage(ConversionSpec(each, None, {}, None), EpisodeJob(0, key))  # type: ignore[arg-type]
        assert isinstance(result, WorkerFault)
        assert "mistake in this program" not in result.error
    with pytest.raises(kind, match=naming("a.hdf5", "/observations/images/top", 0)):
        np.asarray(frames[0])
    with pytest.raises(kind), opened(good):
        pass
    assert main(["data", "inspect", str(good), "--from", "episodes", "--color", "rgb"]) == 1
    assert capsys.readouterr().err.startswith("serl-chunk: ")
    npz_path = ogbench_file(tmp_path / "c.npz")
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(kind):
        ogbench.load(npz_path, ("observations",))
    if kind is NoMemoryError:
        with pytest.raises(DataError, match=naming("a.hdf5", error)):
            hdf5.read_episode(good)


def test_damage_is_a_bad_episode(tmp_path: Path) -> None:
    path = aloha(tmp_path / "a.hdf5")
    source = episodes.FORMAT.open(path, RGB)
    path.write_bytes(path.read_bytes()[:900])
    assert isinstance(stage(ConversionSpec(source, None, {}, None), EpisodeJob(0, "a.hdf5")), RefusedEpisode)  # type: ignore[arg-type]
    for error in (OSError("file signature not found"), OSError(errno.EISDIR, "a folder"), KeyError("errno = 5")):
        raise_machine_fault(path, error)


def test_a_rate_that_contradicts_the_files(tmp_path: Path) -> None:
    path = robomimic_file(tmp_path / "a.hdf5", '{"env_kwargs": {"control_freq": 20}}')
    for hz in (None, 20.0):
        assert robomimic.RobomimicSource(path, ReadOptions(hz=hz)).hz == 20
    with pytest.raises(DataError, match=naming("a.hdf5", 20, 10, "hz")):
        robomimic.RobomimicSource(path, RGB)
    assert RGB.rate() == 10


@pytest.mark.parametrize("hz", ["Infinity", "1" + 400 * "0"])
def test_a_recorded_rate_without_end(tmp_path: Path, hz: str) -> None:
    path = robomimic_file(tmp_path / "a.hdf5", f'{{"env_kwargs": {{"control_freq": {hz}}}}}')
    with pytest.raises(DataError, match=naming("a.hdf5", "control_freq")):
        robomimic.RobomimicSource(path, ReadOptions())


@pytest.mark.parametrize(
    ("rewards", "tell"),
    [([0, 0, 1], True), ([0, 0, 0], True), ([-1, -1, 0], True), ([0, 0.5, 1], False), ([3, 1, 2], False)],
)
def test_dense_rewards_tell_no_success(tmp_path: Path, rewards: list[float], tell: bool) -> None:
    path = d4rl_file(tmp_path / "a.hdf5")
    with h5py.File(path, "r+") as file:
        file["rewards"][:] = rewards * 2
    assert d4rl.D4rlSource(path, RGB).rewards_mark_success is tell


def test_rewards_on_every_step_tell_no_success(tmp_path: Path) -> None:
    path = aloha(tmp_path / "a.hdf5")
    for every in (False, True):
        source = episodes.FORMAT.open(path, ReadOptions(color="rgb", success=True, reward_every_step=every))
        assert source.rewards_mark_success is not every
