"""From a path to the episodes that are read: the one way of all commands.

A path is one of these; what exists under that very name comes first, `~` is the user's home:

    a file          itself, whatever its suffix
    a data set      itself: the folder of a LeRobot or Minari data set, of pickles or .npz files, of a run
    another folder  its HDF5 files, and those of its folders named by a score (`score_5`); where it has neither, the
                    data sets and HDF5 files of its other folders, one level down
    a pattern       all of these that it matches (`*`, `?`, `[0-9]`, `**`); other files are left out
    USER/NAME       the LeRobot data set of that repository on this machine (`local_copy`)
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.formats import VALID, NoEpisodesError, choose, episodes, foreign, formats, matching, open_one
from serl_chunk.data.lerobot.dataset_layout import INFO
from serl_chunk.data.source import Format, ReadOptions, Source, natural_sort_key, sorted_files, take_fraction
from serl_chunk.data.validate import check_key
from serl_chunk.types import DataError, Episode

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find(
    path: Path | str, format: str | None = None, more: Sequence[Format] = (), *, scored: bool = False
) -> list[Path]:
    """Return the files and data sets that `path` names, `episode_2` before `episode_10`; see the module.

    What is there and of no known format is returned too, for `choose` to name.

    Args:
        format: of all of them; None takes what they look like.
        scored: a folder's folders have scores, whatever their names (`ReadOptions.scores`).

    Raises NoEpisodesError where nothing is there.
    """
    text = str(path)
    if not text.strip():
        raise NoEpisodesError(f"a path is empty. {VALID}")
    path = Path(text).expanduser()
    if path.exists():
        return _parts(path, format, more, scored)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)), key=lambda p: natural_sort_key(str(p)))
    if not matches and (there := local_copy(text)) is not None:
        return [there]
    if not matches:
        what = "nothing matches this pattern" if glob.has_magic(text) else f"no such file or folder{_hint(text)}"
        raise NoEpisodesError(f"{text}: {what}. {VALID}")
    above = {parent for match in matches for parent in match.parents}
    found: list[Path] = []
    for match in matches:
        kind = matching(match, more)
        if match.is_file() or (kind is not None and kind is not episodes.FORMAT):
            parts = [match]
        else:  # a folder of files, or of folders: what the pattern itself matches below it, if that goes so deep
            parts = [] if match in above else _parts(match, format, more, scored)
        for part in parts:
            kind = kind if part == match else matching(part, more)
            fits = kind is not None and format in (None, kind.name)
            if (fits or (format and part.is_file())) and not any(parent in found for parent in part.parents):
                found.append(part)
    return found or matches


def _parts(
    path: Path, format: str | None, more: Sequence[Format], scored: bool = False, *, above: bool = True
) -> list[Path]:
    """What a file or folder stands for: itself where that is nothing that is known. `above`: its folders count too."""
    if path.is_file() or scored:
        return [path]
    kind = matching(path, more) if format is None else formats(more).get(format)
    if kind is not None and kind.matches(path):
        if kind is not episodes.FORMAT:
            return [path]
        if episodes.is_one(path):
            return _episodes_in(path, format, more)
    folders = sorted_files(p for p in path.iterdir() if above and p.is_dir() and not p.name.startswith("."))
    inner = [part for folder in folders for part in _parts(folder, format, more, above=False)]
    return inner or [path] * above


def _episodes_in(folder: Path, format: str | None, more: Sequence[Format]) -> list[Path]:
    """A folder of files with one episode each, or the files in it where some are data sets, or no HDF5 at all."""
    others = [] if format else [file for file in episodes.files_in(folder) if not episodes.holds_one(file)]
    apart = any(
        matching(file, more) is not episodes.FORMAT or foreign.described(file, of_format=True) for file in others
    )
    return episodes.files_in(folder) if apart else [folder]


def open_episodes(
    path: Path | str, options: ReadOptions, format: str | None = None, more: Sequence[Format] = ()
) -> Source:
    """Open all that `path` names (`find`) as one source, of the format that each part looks like, or of `format`.

    Raises ConfigError, DataError.
    """
    return open_paths(find(path, format, more, scored=bool(options.scores)), options, format, more)


def open_paths(
    paths: Sequence[Path], options: ReadOptions, format: str | None = None, more: Sequence[Format] = ()
) -> Source:
    """Open files and data sets, which `find` found, as one source. Raises ConfigError, DataError."""
    if len(paths) == 1:
        return open_one(paths[0], options, format, more)
    chosen = [choose(path, format, more, fields=options.fields) for path in paths]
    if all(kind is episodes.FORMAT for kind in chosen):
        return episodes.open_together(paths, options)
    whole = dataclasses.replace(options, proportion=1.0)
    parts = [kind.open(path, whole) for kind, path in zip(chosen, paths, strict=True)]
    return JoinedSource(parts, options.proportion)


class JoinedSource:
    """The episodes of all parts, in their order; a key is a part's path below the common folder, `/` and its own key.

    Raises DataError where the parts have different rates: their steps are of different durations.
    """

    format = "several"

    def __init__(self, parts: Sequence[Source], proportion: float) -> None:
        self._parts, self._proportion = parts, proportion
        self.parts = [part.path for part in parts]
        self.path = episodes.folder_above(self.parts)
        self.hz = parts[0].hz
        for part in parts:
            if part.hz != self.hz:
                rates = ["of unknown rate" if hz is None else f"{hz:g} Hz" for hz in (part.hz, self.hz)]
                raise DataError(f"{part.path}: {rates[0]}, {parts[0].path} {rates[1]}. Read them one by one")

    @functools.cached_property
    def _places(self) -> dict[str, tuple[Source, str]]:
        names = [os.path.relpath(part.path, self.path) for part in self._parts]
        pairs = zip(names, self._parts, strict=True)
        return {f"{name}/{key}": (part, key) for name, part in pairs for key in part.keys()}

    def keys(self) -> list[str]:
        each = [part.lengths() if hasattr(part, "lengths") else None for part in self._parts]
        lengths = None if None in each else [n for of_part in each for n in of_part or ()]
        return take_fraction(list(self._places), self._proportion, lengths)

    def read(self, key: str) -> Episode:
        check_key(self._places, key, self.path)
        part, own = self._places[key]
        return part.read(own)

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for part in self._parts for note in part.notes()))


def _lerobot_home() -> Path:
    """LeRobot's folder: `HF_LEROBOT_HOME`, else `lerobot` in that of the hub's library (`HF_HOME`)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    of_hub = Path(os.environ.get("HF_HOME") or cache)
    return Path(os.environ.get("HF_LEROBOT_HOME") or of_hub / "lerobot").expanduser()


def local_copy(repository: str) -> Path | None:
    """Return the folder of the data set `USER/NAME`, the newest snapshot where there are several; None without any.

    Recorded data sets lie in `USER/NAME`. What newer versions of LeRobot download lies in snapshots in `hub`.
    """
    if not _REPOSITORY.fullmatch(repository):
        return None
    home = _lerobot_home()
    downloaded = home / "hub" / f"datasets--{repository.replace('/', '--')}" / "snapshots"
    cached = sorted(downloaded.glob("*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return next((p for p in (home / repository, *cached) if (p / INFO).is_file()), None)


def _hint(text: str) -> str:
    """Where a repository was looked for and how to download it, to follow "no such folder"; "" for a path."""
    if not _REPOSITORY.fullmatch(text):
        return ""
    folder = _lerobot_home() / text
    return f", nor {folder} (`hf download {text} --repo-type dataset --local-dir {folder}` gets a data set of the hub)"
