"""HDF5, one file an episode: this project's own files, and those of ALOHA, ACT, mobile ALOHA and openpi.

A path is one such file or a folder of them. Folders in it whose names give the quality of their episodes (`score_5/`,
`score_1/`, or those in `ReadOptions.scores`) belong to it, with the reward of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py

from serl_chunk.data.formats.aloha import BASE_ACTIONS, IMAGES, cameras_in, recorded_hz
from serl_chunk.data.formats.hdf5 import joints_in, open_episode
from serl_chunk.data.formats.hdf5_io import ERRORS, looks_like, member, names
from serl_chunk.data.labels import Label, kept, label_notes, read_labels
from serl_chunk.data.source import Format, ReadOptions, natural_sort_key, sorted_files, take_fraction
from serl_chunk.types import DataError, Episode

SUFFIXES = (".hdf5", ".h5")  # in any case
SCORES = {"score_5": 1.0, "score_1": 0.0}  # the meaning that these two names have in published data
_SCORE = re.compile(r"score_?\d+", re.IGNORECASE)
_READ = {"action", "observations", "observations/qpos", "observations/images", "image_indices", "chunk_starts"}
_NOT_READ = {  # dataset -> reason
    "observations/qvel": "a state is made of joint positions",
    "observations/effort": "a state is made of joint positions",
    "compress_len": "the zeros behind a JPEG file give its length",
    "base_action": "the mobile base, read where the robot (exp_name) has these two actions more",
}


@dataclasses.dataclass
class EpisodeFiles:
    """A `data.source.Source`; a key is a file's path below `path`."""

    path: Path
    options: ReadOptions
    files: dict[str, Path]
    rewards: dict[str, float]  # of the episodes in a scored folder
    labels: Mapping[str, Label] = dataclasses.field(default_factory=dict)  # of its keys
    unread: tuple[str, ...] = ()  # folders with other files, in that of these
    hz: float | None = None
    parts: tuple[Path, ...] = ()  # what was opened together, where it is not `path` itself
    format: str = "episodes"

    def __post_init__(self) -> None:
        recorded, where = self._first(lambda key, file: (recorded_hz(self.path, file), self.files[key])) or (None, "")
        self.hz = self.options.rate(recorded, where)

    def keys(self) -> list[str]:
        return take_fraction(kept(list(self.files), self.labels, self._recorded), self.options.proportion)

    def read(self, key: str) -> Episode:
        episode, label = self._recorded(key), self.labels.get(key)
        return episode if label is None else label.applied(str(self.files[key]), episode)

    def _recorded(self, key: str) -> Episode:
        return open_episode(self.files[key], dataclasses.replace(self.options, hz=self.hz), self.rewards.get(key))

    def joints(self) -> tuple[int, ...] | None:
        """Return the state columns that are joints in the first file that can be read; None where it has none."""
        return self._first(lambda _, file: joints_in(file))

    def notes(self) -> list[str]:
        """See Source. Files are taken to be like the first one that can be read."""
        notes = label_notes(self.labels)
        if self.unread:
            notes.append(
                f"{self.path} has files of its own: those in its folders {', '.join(self.unread)} are not read "
                f"('{self.path}/**/*.hdf5' reads all)"
            )
        if self.rewards and not self.options.scores:
            folders = {Path(key).parts[0] for key in self.rewards}
            means = ", ".join(f"{name} = {SCORES[name]:g}" for name in sorted(folders))
            notes.append(f"rewards by folder: {means}; scores changes that")
        return notes + (self._first(self._notes_on) or [])

    def _first(self, get: Callable[[str, h5py.File], Any]) -> Any:
        """`get` (key, file) of the first file that can be read; reading the others names their fault."""
        for key, path in self.files.items():
            with contextlib.suppress(*ERRORS), h5py.File(path, "r") as file:
                return get(key, file)
        return None

    def _notes_on(self, key: str, file: h5py.File) -> list[str]:
        if member(key, file, "rl") is not None:
            kept = "; its episodes keep the rewards that they record" if self.rewards else ""
            return [f"{key} is of this project's own layout{kept}"] if kept else []
        notes = []
        if self.hz is None:
            notes.append("no file records its rate: time stamps are all 0; hz sets it")
        if self.options.success is None and key not in self.rewards:
            notes.append("files record no outcome: episodes are unfinished ones; success, failure or scores sets it")
        else:
            notes.append(
                "files lack the observation after the last action: episodes end one step earlier, with the last "
                "observation as the final one"
            )
        if "chunk_starts" not in names(file):
            actor = "a script's (attribute sim)" if file.attrs.get("sim", False) else "a human's"
            notes.append(f"the source of actions is not recorded: all steps are taken for {actor}")
        else:
            notes.append("chunk_starts: all steps are taken for the policy's; interventions are not recorded")
        cameras = {f"{IMAGES[1:]}/{camera}" for camera in member(key, file, IMAGES) or ()}
        shown = {f"{IMAGES[1:]}/{camera}" for camera in cameras_in(self.path, file, None)}
        read = _READ | shown
        spec = self.options.spec
        action = member(key, file, "action")
        if isinstance(action, h5py.Dataset) and spec is not None:
            read |= {"base_action"} if spec.action_dim == action.shape[-1] + BASE_ACTIONS else set()
        there: list[str] = []
        file.visititems(lambda name, item: there.append(name) if isinstance(item, h5py.Dataset) else None)
        unread = sorted(set(there) - read)
        reasons = dict.fromkeys(cameras - shown, "it is no image in colour") | _NOT_READ
        return notes + [f"{name} is not read" + (f": {reasons[name]}" if name in reasons else "") for name in unread]


def holds_one(file: Path) -> bool:
    """Return whether a file is one episode, as far as the names in it tell; data sets hold several."""
    return looks_like(file, lambda opened: {"action", "observations"} <= names(opened))


def files_in(folder: Path) -> list[Path]:
    """Return the HDF5 files in a folder, `episode_2` before `episode_10`."""
    # A link to nothing is an episode that is missing: reading it raises.
    there = (p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted_files(p for p in there if p.is_file() or (p.is_symlink() and not p.exists()))


def is_one(folder: Path) -> bool:
    """Return whether a folder has files, of its own or in folders named by a score; else it is one of other folders."""
    return bool(files_in(folder) or any(_SCORE.fullmatch(inner.name) for inner in _folders(folder)))


def folder_above(paths: Sequence[Path]) -> Path:
    """Return the folder that holds all `paths`, absolute where one of them is."""
    mixed = any(path.is_absolute() for path in paths)
    return Path(os.path.commonpath([path.absolute() if mixed else path for path in paths]))


def open_together(paths: Sequence[Path], options: ReadOptions) -> EpisodeFiles:
    """Open files and folders of files as one source, whose keys begin below the folder that holds all of them."""
    above = folder_above([path.parent if path.is_file() else path for path in paths])
    files: dict[str, Path] = {}
    rewards: dict[str, float] = {}
    for path in paths:
        found, of_path = _find(path, options)
        place = os.path.relpath(path.parent if path.is_file() else path, above)
        files |= {os.path.normpath(f"{place}/{key}"): file for key, file in found.items()}
        rewards |= {os.path.normpath(f"{place}/{key}"): reward for key, reward in of_path.items()}
    source = _opened(above, options, files, rewards)
    source.parts = tuple(paths)
    return source


def _matches(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in SUFFIXES or h5py.is_hdf5(path)
    return path.is_dir() and bool(files_in(path) or _folders(path))


def _open(path: Path, options: ReadOptions) -> EpisodeFiles:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Pass an HDF5 file or a folder of episodes")
    source = _opened(path, options, *_find(path, options))
    if path.is_dir():
        read = {file.parent for file in source.files.values()}
        source.unread = tuple(folder.name for folder in _folders(path) if folder not in read)
    return source


def _opened(path: Path, options: ReadOptions, files: dict[str, Path], rewards: dict[str, float]) -> EpisodeFiles:
    labels: dict[str, Label] = {}
    for key, file in files.items() if options.labels else ():
        if (label := read_labels(file.parent).get(file.name)) is not None:
            labels[key] = label
    return EpisodeFiles(path, options, files, rewards, labels)


def _find(path: Path, options: ReadOptions) -> tuple[dict[str, Path], dict[str, float]]:
    """The files of a path by their keys, and the rewards of those in folders that have scores."""
    if path.is_file():
        return {path.name: path}, {}
    given = dict(options.scores)
    folders = {folder.name: folder for folder in _folders(path)}
    if not given and not any(map(_SCORE.fullmatch, folders)):
        folders = {}  # by day, say
    if absent := sorted(set(given) - set(folders)):
        there = ", ".join(folders) or "none"
        raise DataError(
            f"{path} has no episodes in {', '.join(absent)}. Folders with episodes: {there}", parameter="scores"
        )
    scores = given or SCORES
    if unknown := sorted(set(folders) - set(scores), key=natural_sort_key):
        raise DataError(
            f"the rewards of the episodes in {', '.join(unknown)} of {path} are unknown. Set it to "
            f"{','.join(f'{name}=REWARD' for name in unknown)} (and the others', if any), or read one folder alone",
            parameter="scores",
        )
    scored = {f"{name}/{file.name}": (file, scores[name]) for name, at in folders.items() for file in files_in(at)}
    files = {file.name: file for file in files_in(path)} | {key: file for key, (file, _) in scored.items()}
    if not files:
        raise DataError(f"{path}: no *.hdf5 file, and no folder with such files. Pass a folder of episodes")
    return files, {key: reward for key, (_, reward) in scored.items()}


def _folders(path: Path) -> list[Path]:
    return sorted_files(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and files_in(p))


FORMAT = Format("episodes", _matches, _open)
