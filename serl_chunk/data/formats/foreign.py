"""Files and folders of other programs that are not read: their names, by content, and one way on for each.

Of a file, its beginning and the names in it are looked at. A file with one episode each, in HDF5, is the way for
whatever has no converter.
"""

from __future__ import annotations

import contextlib
import shlex
import zipfile
from pathlib import Path

import h5py

from serl_chunk.data.formats.hdf5_io import ERRORS, member, names

WRITE = "Write each episode as an HDF5 file: docs/data.md, Other formats, has the lines"
_LEROBOT = "Pass the folder of its LeRobot data set"
_RLDS = "Adapt openpi's examples/libero/convert_libero_data_to_lerobot.py to its features, and pass what that writes"
_ROBOMIMIC = (
    "robomimic adds them: `python -m robomimic.scripts.conversion.convert_robosuite --dataset {path}`, then `python -m "
    "robomimic.scripts.dataset_states_to_obs --dataset {path} --output_name low_dim.hdf5 --done_mode 2`; pass "
    "low_dim.hdf5"
)
_UNPACK = "Unpack it with `{tool} -dc {path} > {unpacked}`, and pass that"
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (  # where in a file, what is there, what that is, the way on
    *((0, magic, f"packed by {tool}", _UNPACK.replace("{tool}", tool)) for magic, tool in _PACKED.items()),
    (257, b"ustar", "a tar archive", "Unpack it with `tar -xf {path}`, and pass what is in it"),
    (0, b"\x89MCAP0\r\n", "a log in MCAP", WRITE),
    (0, b"#ROSBAG V", "a bag of ROS 1", WRITE),
    (0, b"SQLite format 3\0", "an SQLite data base, such as a bag of ROS 2", WRITE),
    (0, b"\x93NUMPY", "a single array of NumPy", WRITE),
    (0, b"MATLAB 5.0", "a file of MATLAB before 7.3", WRITE),
    (0, b"PAR1", "a table in Parquet", _LEROBOT),
    (0, b"ARROW1", "a table in Arrow", _LEROBOT),
    (4, b"ftyp", "a video, without states and actions", _LEROBOT),
    (0, b"\x1a\x45\xdf\xa3", "a video, without states and actions", _LEROBOT),
    (8, b"AVI ", "a video, without states and actions", _LEROBOT),
    (0, b"\x89PNG", "an image", _LEROBOT),
    (0, b"\xff\xd8\xff", "an image", _LEROBOT),
    (
        0,
        b"<!doctype html",
        "a web page",
        "Download the file itself: of a Hugging Face page, `resolve` in place of `blob`",
    ),
)
_TABLES = {".csv": "a table in text", ".tsv": "a table in text", ".json": "JSON", ".jsonl": "JSON"}
_FOLDERS: tuple[tuple[tuple[str, ...], str, str], ...] = (  # any of these names in a folder, what it is, the way on
    ((".zgroup", ".zarray", "zarr.json"), "a zarr store, such as diffusion policy's replay buffer", WRITE),
    (("features.json", "*.tfrecord*"), "a TensorFlow data set (RLDS)", _RLDS),
    (("ep_start_end_ids.npy",), "a data set of CALVIN", WRITE),
    (("0/part-0.arrow", "data/0/part-0.arrow"), "a data set of Minari in Arrow", "Create it with data_format='hdf5'"),
)


def described(path: Path, *, of_format: bool = False) -> str:
    """Return what a file or folder is that is not read, and the way on, as a sentence; "" for anything else.

    `of_format`: its format is known, or given, so that a file of that kind with other content is left to its reader.
    """
    inner = sorted(path.iterdir()) if path.is_dir() and not of_format else []
    for part in (path, *inner):
        with contextlib.suppress(OSError, zipfile.BadZipFile):
            if (found := _kind(part, of_format or part is not path)) is not None:
                return f"{part}: {found[0]}, which is not read. {_filled(found[1], part)}"
    return ""


def _filled(way: str, path: Path) -> str:
    packed = path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".lz4")
    unpacked = path.with_suffix("") if packed else path.with_name(f"{path.stem}.unpacked{path.suffix}")
    named = {"path": path, "folder": path.parent, "unpacked": unpacked}
    if way == _LEROBOT:
        root = next((folder for folder in path.absolute().parents if (folder / "meta" / "info.json").is_file()), None)
        return WRITE if root is None else f"{way}: {root}"
    return way.format(**{name: shlex.quote(str(value)) for name, value in named.items()})


def _kind(path: Path, of_format: bool) -> tuple[str, str] | None:
    """What a file or folder is, and the way on. Raises OSError, BadZipFile."""
    if path.is_dir():
        rows = ((what, way) for marks, what, way in _FOLDERS if any(any(path.glob(mark)) for mark in marks))
        return next(rows, None)
    with path.open("rb") as file:
        start = file.read(512)
    for at, magic, what, way in _MAGIC:
        if start[at : at + len(magic)].lower() == magic.lower():
            return what, way
    if ".tfrecord" in path.name:
        return "records of TensorFlow", _RLDS
    if start.startswith(b"\x89HDF"):
        return _kind_of_hdf5(path)
    if start.startswith(b"PK"):
        return _kind_of_zip(path, of_format)
    if not of_format and path.suffix.lower() in _TABLES:
        return _TABLES[path.suffix.lower()], WRITE
    return ("an empty file", "Copy or download it again") if not start and not of_format else None


def _kind_of_hdf5(path: Path) -> tuple[str, str] | None:
    with contextlib.suppress(*ERRORS), h5py.File(path, "r") as file:
        data = member(path, file, "data")
        demos = sorted(data) if isinstance(data, h5py.Group) else []
        demo = member(path, data, demos[0]) if demos else None
        if isinstance(demo, h5py.Group) and "states" in names(demo) and "obs" not in names(demo):
            return "robosuite's record of simulator states, without observations", _ROBOMIMIC
    return None


def _kind_of_zip(path: Path, of_format: bool) -> tuple[str, str] | None:
    with zipfile.ZipFile(path) as file:
        there = file.namelist()
    ends = {name.rpartition("/")[2] for name in there}
    if ends & {".zgroup", ".zarray", "zarr.json"}:
        return "a zarr store in a zip archive, such as UMI's replay buffer", WRITE
    if "data.pkl" in ends:
        return "a file of PyTorch", WRITE
    if of_format:
        return None
    if not all(name.endswith(".npy") for name in there):
        return "a zip archive", "Unpack it with `unzip {path}`, and pass what is in it"
    arrays = ", ".join(name.removesuffix(".npy") for name in there) or "nothing"
    return f"an .npz file of {arrays} (OGBench's have observations, actions and terminals)", WRITE
