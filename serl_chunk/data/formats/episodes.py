"""HDF5, one file an episode: this project's own files, and those of ALOHA, ACT, mobile ALOHA and openpi.

A path is one such file, a folder of them, or a folder of folders whose names say how well their episodes went
(`score_5/`, `score_1/`): `ReadOptions.scores` gives the reward of each.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import h5py

from serl_chunk.data.formats.aloha import IMAGES, recorded_hz
from serl_chunk.data.formats.hdf5 import joints_in, open_episode
from serl_chunk.data.formats.hdf5_io import ERRORS, member, names
from serl_chunk.data.source import Format, ReadOptions, take_fraction
from serl_chunk.data.validate import natural_sort_key
from serl_chunk.types import DataError, Episode

SUFFIXES = (".hdf5", ".h5")
SCORES = {"score_5": 1.0, "score_1": 0.0}  # what these two names have always meant to those who use them
_READ = {"action", "observations", "observations/qpos", "observations/images", "image_indices", "chunk_starts"}
_SAID = {  # of datasets that are left out: why
    "observations/qvel": "a state is made of joint positions",
    "observations/effort": "a state is made of joint positions",
    "compress_len": "the zeros behind a JPEG file tell its length",
    "base_action": "the mobile base; read where --exp_name names a robot that has these two actions more",
}


@dataclasses.dataclass
class EpisodeFiles:
    """See `data.source.Source`; a key is a file's path below `path`.

    `rewards_tell`: whether a reward of 1 or more is a success, after which an episode may be cut; a reward that is
    given on every step says nothing of the step.
    """

    path: Path
    options: ReadOptions
    files: dict[str, Path]
    rewards: dict[str, float]  # of the episodes in a scored folder
    hz: float | None
    format: str = "episodes"

    @property
    def rewards_tell(self) -> bool:
        """See the class."""
        return not self.options.reward_every_step

    def keys(self) -> list[str]:
        """See Source."""
        return take_fraction(list(self.files), self.options.proportion)

    def read(self, key: str) -> Episode:
        """See Source."""
        options = dataclasses.replace(self.options, hz=self.hz)
        return open_episode(self.files[key], options, self.rewards.get(key))

    def joints(self) -> tuple[int, ...] | None:
        """The state columns that are joints, by the first file that can be read; None where it does not say."""
        for path in self.files.values():
            try:
                with h5py.File(path, "r") as file:
                    return joints_in(file)
            except ERRORS:
                continue
        return None

    def notes(self) -> list[str]:
        """See Source. Files are taken to be like the first one that can be read."""
        notes = []
        if self.rewards and not self.options.scores:
            folders = {Path(key).parts[0] for key in self.rewards}
            means = ", ".join(f"{name} = {SCORES[name]:g}" for name in sorted(folders))
            notes.append(f"rewards by folder: {means}; --scores changes that")
        for key, path in self.files.items():
            try:
                with h5py.File(path, "r") as file:
                    return notes + self._notes_on(key, file)
            except ERRORS:
                continue  # reading that episode says what is wrong with it
        return notes

    def _notes_on(self, key: str, file: h5py.File) -> list[str]:
        if member(key, file, "rl") is not None:
            kept = "; its episodes keep the rewards that they record" if self.rewards else ""
            return [f"{key} is of this project's own layout{kept}"] if kept else []
        notes = []
        if self.hz is None:
            notes.append("no file records its rate: time stamps are all 0; --hz gives it")
        if self.options.success is None and key not in self.rewards:
            notes.append("files record no outcome: episodes are unfinished ones; --success, --failure or --scores say")
        else:
            notes.append(
                "files lack the observation after the last action: episodes end one step earlier, with the last "
                "observation as the final one"
            )
        if "chunk_starts" not in names(file):
            who = "a script's (attribute sim)" if file.attrs.get("sim", False) else "a human's"
            notes.append(f"nothing says who acted: all steps are taken for {who}")
        else:
            notes.append("chunk_starts: all steps are taken for the policy's; what a human did is not recorded")
        read = _READ | {f"{IMAGES[1:]}/{camera}" for camera in member(key, file, IMAGES) or ()}
        spec = self.options.spec
        action = member(key, file, "action")
        wide = isinstance(action, h5py.Dataset) and spec is not None and spec.action_dim == action.shape[-1] + 2
        if wide and "base_action" in names(file):
            read.add("base_action")
        for name in sorted(_names(file) - read):
            notes.append(f"{name} is not read" + (f": {_SAID[name]}" if name in _SAID else ""))
        return notes


def _names(file: h5py.File) -> set[str]:
    """Of all datasets."""
    names: list[str] = []

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)

    file.visititems(add)
    return set(names)


def matches(path: Path) -> bool:
    """See Format."""
    try:
        return path.suffix in SUFFIXES if path.is_file() else bool(_files(path) or _folders(path))
    except OSError:
        return False


def open_files(path: Path, options: ReadOptions) -> EpisodeFiles:
    """See Format."""
    if not path.exists():
        raise DataError(f"{path}: there is nothing; give an HDF5 file or a folder of episodes")
    files, rewards = ({path.name: path}, {}) if path.is_file() else _find(path, options)
    return EpisodeFiles(path, options, files, rewards, _rate(files, options))


def _find(path: Path, options: ReadOptions) -> tuple[dict[str, Path], dict[str, float]]:
    scores = dict(options.scores) or SCORES
    folders = {folder.name: folder for folder in _folders(path)}
    absent = sorted(set(dict(options.scores)) - set(folders))
    if absent:
        raise DataError(
            f"{path}: no folder {', '.join(absent)} with episodes, which --scores names; there are: "
            f"{', '.join(folders) or 'none'}"
        )
    unknown = sorted(set(folders) - set(scores), key=natural_sort_key)
    if unknown:
        raise DataError(
            f"{path}: the folders {', '.join(unknown)} have episodes, and nothing says what these are worth; pass "
            f"--scores {','.join(f'{name}=REWARD' for name in unknown)} (and the others', if any), or read one folder "
            "alone"
        )
    files = {file.name: file for file in _files(path)}
    rewards: dict[str, float] = {}
    for name, folder in folders.items():
        for file in _files(folder):
            files[f"{name}/{file.name}"] = file
            rewards[f"{name}/{file.name}"] = scores[name]
    if not files:
        raise DataError(f"{path}: no *.hdf5 file, and no folder with such files; give a folder of episodes")
    return files, rewards


def _rate(files: dict[str, Path], options: ReadOptions) -> float | None:
    """That of the first file which can be read, else of the options, else of the robot.

    Raises DataError where the options say another one than that file.
    """
    recorded = None
    said = options.hz
    for path in files.values():
        try:
            with h5py.File(path, "r") as file:
                recorded = recorded_hz(path, file)
                break
        except ERRORS:
            continue  # reading that episode says what is wrong with it
    if recorded is not None and said is not None and not math.isclose(recorded, said, rel_tol=1e-6):
        raise DataError(f"{path}: recorded at {recorded:g} steps a second, not at {said:g} (--hz): leave the flag out")
    return recorded or said or (options.spec.control_hz if options.spec else None)


def _files(folder: Path) -> list[Path]:
    # A link to nothing is an episode that is missing: reading it says so.
    there = (p for p in folder.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
    found = (p for p in there if p.is_file() or (p.is_symlink() and not p.exists()))
    return sorted(found, key=lambda p: natural_sort_key(p.name))


def _folders(path: Path) -> list[Path]:
    """Those below `path` that have episodes."""
    found = (p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and _files(p))
    return sorted(found, key=lambda p: natural_sort_key(p.name))


FORMAT = Format(
    "episodes", "HDF5, one file an episode: ours, ALOHA, ACT, mobile ALOHA; folders of them", matches, open_files
)
