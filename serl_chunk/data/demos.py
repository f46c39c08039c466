"""Demonstrations: paths, folders and patterns in, checked episodes out."""

from __future__ import annotations

import glob
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.hdf5 import read_episode
from serl_chunk.types import ConfigError, End, Episode, Outcome, RobotSpec, StepBlock

SUCCESS_REWARD = 1.0  # a step with at least this reward is a success (docs/architecture.md, section 3)


class DemoSet(NamedTuple):
    """Demonstrations as loaded: every content once, each ended at its first success."""

    episodes: list[Episode]
    files: list[Path]  # files[k] holds episodes[k]
    dropped_steps: int  # steps after a first success, in all episodes
    duplicates: int  # files left out because another one has the same content
    digest: str  # sixteen hex digits that depend on the files' contents only; "" without files


def load_demos(
    paths: Sequence[str | Path],
    spec: RobotSpec,
    *,
    cameras: Sequence[str] | None = None,
    success: bool | None = None,
    color: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DemoSet:
    """Load the demonstrations that `paths` name, in their order (`episode_2` before `episode_10`).

    Args:
        paths: HDF5 files, folders of `*.hdf5` (not their subfolders), or patterns (`~`, `*`, `?`, `**`).
        spec: the robot they must belong to.
        cameras, success, color: passed to `read_episode`.
        progress: called with (files done, files in all) after each file.

    Raises:
        ConfigError: a path is empty or matches no demonstration.
        DataError: a file is damaged or of another robot; names the file and the field.
    """
    found = find_demos(paths)
    episodes: list[Episode] = []
    files: list[Path] = []
    digests: set[str] = set()
    ids: set[str] = set()
    dropped = 0
    for done, path in enumerate(found, 1):
        digest = _content_digest(path)
        if digest not in digests:
            digests.add(digest)
            episode, after = end_at_first_success(
                read_episode(path, spec, cameras=cameras, success=success, color=color)
            )
            if episode.begin.episode_id in ids:  # stores tell episodes apart by id alone
                episode = _renamed(episode, f"{episode.begin.episode_id}-{digest[:12]}")
            ids.add(episode.begin.episode_id)
            dropped += after
            episodes.append(episode)
            files.append(path)
        if progress is not None:
            progress(done, len(found))
    digest = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16] if digests else ""
    return DemoSet(episodes, files, dropped, len(found) - len(files), digest)


def find_demos(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, as in `load_demos`; raises ConfigError where one names none."""
    if isinstance(paths, str | Path):
        paths = [paths]
    return [file for path in paths for file in _expand(str(path))]


def end_at_first_success(episode: Episode) -> tuple[Episode, int]:
    """`episode` terminated at its first success, and the number of steps after it that were dropped.

    A success is a step whose reward (the last one's as `End.reward` corrects it) is at least `SUCCESS_REWARD`. The
    observation after that step becomes the final one, with the frames that were recorded at that tick. Episodes without
    a success come back unchanged.
    """
    begin, steps, end = episode
    reward = steps.reward if end.reward is None else np.append(steps.reward[:-1], np.float32(end.reward))
    at = np.flatnonzero(reward >= SUCCESS_REWARD)
    if not len(at):
        return episode, 0
    first, n = int(at[0]), steps.n
    said_by = end.outcome_by if end.outcome is Outcome.SUCCESS else "reward"
    if first == n - 1:
        # No target looks past a termination, so that where the actor died right at the success the last observation
        # may stand in for the one nobody recorded; as an unfinished episode it would lose its only reward.
        final = end.final_observation or steps.observation_at(n - 1)
        end = end._replace(final_observation=final, terminated=True, truncated=False)
        return Episode(begin, steps, end._replace(outcome=Outcome.SUCCESS, outcome_by=said_by)), 0
    final = steps.observation_at(first + 1)
    kept = steps.slice(0, first + 1)
    return Episode(begin, kept, End(end.episode_id, kept.n, final, True, False, Outcome.SUCCESS, said_by)), n - kept.n


def _expand(text: str) -> list[Path]:
    valid = "give an HDF5 file, a folder of *.hdf5 files, or a pattern such as 'demos/*.hdf5'"
    if not text.strip():
        raise ConfigError(f"a demonstration path is empty; {valid}")
    path = Path(text).expanduser()
    if path.is_dir():
        files = sorted((p for p in path.glob("*.hdf5") if p.is_file()), key=_natural)
        if not files:
            suffixes = Counter(p.suffix or "no suffix" for p in path.iterdir() if p.is_file())
            holds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items())) or "no file"
            if any(_is_pickle(Path(f"x{suffix}")) for suffix in suffixes):
                raise _pickle_error(path)
            raise ConfigError(f"demonstration folder {text!r} has no *.hdf5 file (it has: {holds}); {valid}")
    elif path.exists():
        files = [path]
    else:
        matches = (Path(p) for p in glob.glob(str(path), recursive=True))
        files = sorted((p for p in matches if p.is_file()), key=_natural)
        if not files:
            raise ConfigError(f"no demonstration matches {text!r}; {valid}")
    for file in files:
        if _is_pickle(file):
            raise _pickle_error(file)
    return files


def _is_pickle(path: Path) -> bool:
    return path.suffix.lower() in (".pkl", ".pickle")


def _pickle_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: pickled demonstrations (HIL-SERL's .pkl) are not read, because unpickling runs whatever code the "
        "file holds. Only HDF5 episodes are read, and nothing converts pickles: record the demonstrations again with "
        "`serl-chunk record`, or write them with serl_chunk.data.hdf5.write_episode"
    )


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """A sort key under which `episode_2` comes before `episode_10`."""
    parts = re.findall(r"\d+|\D+", str(path), flags=re.ASCII)
    return [(0, int(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def _content_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the demonstration: {error}") from error


def _renamed(episode: Episode, episode_id: str) -> Episode:
    begin, steps, end = episode
    columns = {name: getattr(steps, name) for name in StepBlock.__dataclass_fields__}
    return Episode(
        begin._replace(episode_id=episode_id),
        StepBlock(**(columns | {"episode_id": episode_id})),
        end._replace(episode_id=episode_id),
    )
