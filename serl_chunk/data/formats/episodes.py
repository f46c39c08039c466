"""HDF5, one file an episode: this project's own files, and those of ALOHA, ACT, mobile ALOHA and openpi.

A path is one such file, a folder of them, or a folder of folders whose names give the quality of their episodes
(`score_5/`, `score_1/`): `ReadOptions.scores` gives the reward of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py

from serl_chunk.data.formats.aloha import BASE_ACTIONS, IMAGES, recorded_hz
from serl_chunk.data.formats.hdf5 import joints_in, open_episode
from serl_chunk.data.formats.hdf5_io import ERRORS, member, names
from serl_chunk.data.labels import Label, kept, label_notes, read_labels
from serl_chunk.data.source import Format, ReadOptions, natural_sort_key, sorted_files, take_fraction
from serl_chunk.types import DataError, Episode

SUFFIXES = (".hdf5", ".h5")
SCORES = {"score_5": 1.0, "score_1": 0.0}  # the meaning that these two names have in published data
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
    hz: float | None = None
    format: str = "episodes"

    def __post_init__(self) -> None:
        recorded, where = self._first(lambda key, file: (recorded_hz(self.path, file), self.files[key])) or (None, "")
        self.hz = self.options.rate(recorded, where)

    @property
    def rewards_mark_success(self) -> bool:
        """A reward of 1 or more is a success, after which an episode may be cut."""
        return not self.options.reward_every_step

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
        read = _READ | {f"{IMAGES[1:]}/{camera}" for camera in member(key, file, IMAGES) or ()}
        spec = self.options.spec
        action = member(key, file, "action")
        if isinstance(action, h5py.Dataset) and spec is not None:
            read |= {"base_action"} if spec.action_dim == action.shape[-1] + BASE_ACTIONS else set()
        there: list[str] = []
        file.visititems(lambda name, item: there.append(name) if isinstance(item, h5py.Dataset) else None)
        unread = sorted(set(there) - read)
        return notes + [
            f"{name} is not read" + (f": {_NOT_READ[name]}" if name in _NOT_READ else "") for name in unread
        ]


def _matches(path: Path) -> bool:
    return path.suffix in SUFFIXES if path.is_file() else path.is_dir() and bool(_files(path) or _folders(path))


def _open(path: Path, options: ReadOptions) -> EpisodeFiles:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Pass an HDF5 file or a folder of episodes")
    files, rewards = ({path.name: path}, {}) if path.is_file() else _find(path, options)
    labels: dict[str, Label] = {}
    for key, file in files.items() if options.labels else ():
        if (label := read_labels(file.parent).get(file.name)) is not None:
            labels[key] = label
    return EpisodeFiles(path, options, files, rewards, labels)


def _find(path: Path, options: ReadOptions) -> tuple[dict[str, Path], dict[str, float]]:
    scores = dict(options.scores) or SCORES
    folders = {folder.name: folder for folder in _folders(path)}
    if absent := sorted(set(dict(options.scores)) - set(folders)):
        there = ", ".join(folders) or "none"
        raise DataError(
            f"{path} has no episodes in {', '.join(absent)}. Folders with episodes: {there}", parameter="scores"
        )
    if unknown := sorted(set(folders) - set(scores), key=natural_sort_key):
        raise DataError(
            f"the rewards of the episodes in {', '.join(unknown)} of {path} are unknown. Set it to "
            f"{','.join(f'{name}=REWARD' for name in unknown)} (and the others', if any), or read one folder alone",
            parameter="scores",
        )
    scored = {f"{name}/{file.name}": (file, scores[name]) for name, at in folders.items() for file in _files(at)}
    files = {file.name: file for file in _files(path)} | {key: file for key, (file, _) in scored.items()}
    if not files:
        raise DataError(f"{path}: no *.hdf5 file, and no folder with such files. Pass a folder of episodes")
    return files, {key: reward for key, (_, reward) in scored.items()}


def _files(folder: Path) -> list[Path]:
    # A link to nothing is an episode that is missing: reading it raises.
    there = (p for p in folder.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
    return sorted_files(p for p in there if p.is_file() or (p.is_symlink() and not p.exists()))


def _folders(path: Path) -> list[Path]:
    return sorted_files(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and _files(p))


FORMAT = Format("episodes", _matches, _open)
