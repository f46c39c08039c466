"""`labels.json`: an operator's verdicts on episodes at rest, in the folder of their files, which stay unchanged.

    {"format": 1, "labels": {"episode_3.hdf5": {"label": "failure", "by": "operator", "steps": 213, "content": "ab"}}}

A key is the name of an HDF5 file in the same folder, or `episode_<index>` of a LeRobot data set. A label is `success`,
`failure` or `discard`. `steps` and `content` recognise the episode that was labelled: a file that was recorded again
under the same name raises DataError. Both are absent for an episode that could not be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serl_chunk.data import validate
from serl_chunk.data.frames import FileVersion
from serl_chunk.io import atomic_write, os_faults, os_reason
from serl_chunk.types import STATE, SUCCESS_REWARD, Amend, DataError, End, Episode, Outcome, success_step

FILE = "labels.json"
FORMAT = 1
SUCCESS, FAILURE, DISCARD = LABELS = ("success", "failure", "discard")
OPERATOR = "operator"  # `outcome_by` of an episode that was labelled
_KNOWN_BY = 8  # steps: some readers leave out the last one, depending on their options
_REMEDY = "Correct or remove it; `serl-chunk view` writes it anew"


@dataclasses.dataclass(frozen=True)
class Label:
    """One entry of a `labels.json`."""

    file: Path
    key: str  # in that file
    label: str  # of LABELS
    by: str = OPERATOR
    steps: int = 0  # of the episode that was labelled; 0: it could not be read
    content: str = ""  # sixteen hex digits of its first steps; the same

    @property
    def discards(self) -> bool:
        return self.label == DISCARD

    def to_json(self) -> dict[str, Any]:
        known_by = {"steps": self.steps, "content": self.content} if self.content else {}
        return {"label": self.label, "by": self.by, **known_by}

    def check(self, where: str, episode: Episode) -> None:
        """Raise DataError, starting with `where`, unless `episode` is the one that was labelled."""
        if self.content and (_content(episode) != self.content or abs(episode.steps.n - self.steps) > 1):
            raise DataError(
                f"{where}: is not the episode that {self.file} labels as {self.key!r} ({self.steps} steps, "
                f"{self.content}, got {episode.steps.n}, {_content(episode)}). Label it anew, or remove that entry"
            )

    def applied(self, where: str, episode: Episode) -> Episode:
        """Return `episode` with this label's outcome, termination and last reward. Raises DataError as `check`.

        Of a failure no step keeps a reward that marks a success.
        """
        self.check(where, episode)
        if self.discards:
            return episode
        begin, steps, end = episode
        end = correction(self.label, end, float(steps.reward[-1]), by=self.by).correct(end)
        if self.label == FAILURE and success_step(steps.reward) is not None:
            reward = np.where(steps.reward >= SUCCESS_REWARD, np.float32(0), steps.reward)
            steps = dataclasses.replace(steps, reward=reward)
        return Episode(begin, steps, end)


def correction(label: str, end: End, last_reward: float, *, by: str = OPERATOR) -> Amend:
    """Return the correction that `label` is of an episode.

    A success terminates, with a last reward of at least `SUCCESS_REWARD`. A failure keeps the recorded termination; a
    last reward that marks a success becomes 0.

    Args:
        end: as recorded.
        last_reward: of the last step, as recorded with it.
    """
    if label == DISCARD:
        return Amend(end.episode_id, discard=True)
    reward = last_reward if end.reward is None else end.reward
    if label == SUCCESS:
        return Amend(end.episode_id, Outcome.SUCCESS, by, terminated=True, reward=max(reward, SUCCESS_REWARD))
    reward = 0.0 if reward >= SUCCESS_REWARD else reward
    return Amend(end.episode_id, Outcome.FAILURE, by, terminated=end.terminated, reward=reward)


def as_recorded(end: End, last_reward: float) -> Amend:
    """Return the correction that takes every label back. `end`, `last_reward`: as in `correction`."""
    reward = last_reward if end.reward is None else end.reward
    return Amend(end.episode_id, end.outcome, end.outcome_by, terminated=end.terminated, reward=reward)


def read_labels(folder: Path) -> Mapping[str, Label]:
    """Read the labels of the files in `folder`, by key; empty where it has none. Raises DataError where it is damaged.

    The mapping is shared between calls.
    """
    file = folder / FILE
    try:
        return _parsed(file, FileVersion.of(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({os_reason(error)}). Check its permissions") from error


@functools.lru_cache(maxsize=64)
def _parsed(file: Path, version: FileVersion) -> dict[str, Label]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file}: is damaged ({error}). {_REMEDY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("labels"), dict):
        raise DataError(f"{file}: is no object with labels. {_REMEDY}")
    if content.get("format") != FORMAT:
        raise DataError(f"{file}: format is {content.get('format')!r} (expected {FORMAT}). {_REMEDY}")
    return {key: _label(file, key, entry) for key, entry in content["labels"].items()}


def _label(file: Path, key: str, entry: Any) -> Label:
    where = f"{file}: the label of {key!r}"
    if not isinstance(entry, dict):
        raise DataError(f"{where} is {entry!r}, no object. {_REMEDY}")
    label, by, steps, content = (
        entry.get(n, d) for n, d in (("label", ""), ("by", OPERATOR), ("steps", 0), ("content", ""))
    )
    if label not in LABELS:
        raise DataError(f"{where} is {label!r}; valid: {', '.join(LABELS)}. {_REMEDY}")
    if type(steps) is not int or not isinstance(by, str) or not isinstance(content, str):
        raise DataError(f"{where} has by={by!r}, steps={steps!r}, content={content!r}. {_REMEDY}")
    return Label(file, key, label, by, steps, content)


def write_label(folder: Path, key: str, label: str | None, episode: Episode | None) -> None:
    """Set the label of `key` in the folder's `labels.json`, or remove it (None); whole or not at all.

    `episode`: the one that is labelled, as it was read; None where it cannot be read. Raises DataError where the file
    is damaged or cannot be written.
    """
    with os_faults(DataError, f"{folder / FILE}: cannot be written", "Check the folder"), _locked(folder):
        _parsed.cache_clear()  # two writes may have one time and one size
        found = dict(read_labels(folder))
        found.pop(key, None)
        if label is not None:
            known = (0, "") if episode is None else (episode.steps.n, _content(episode))
            found[key] = Label(folder / FILE, key, label, OPERATOR, *known)
        content = {"format": FORMAT, "labels": {k: each.to_json() for k, each in sorted(found.items())}}
        atomic_write(folder / FILE, json.dumps(content, indent=1) + "\n", durable=True)
        _parsed.cache_clear()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that write labels of the same folder; leaves no file."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _content(episode: Episode) -> str:
    steps = episode.steps
    return validate.content_id(steps.observation[STATE][:_KNOWN_BY], steps.action[:_KNOWN_BY], 16)


def kept(keys: Sequence[str], labels: Mapping[str, Label], read: Callable[[str], Episode]) -> list[str]:
    """Return `keys` without those that are discarded. `read` (key) -> the episode as recorded.

    Raises DataError where another episode has the place of a discarded one.
    """
    for key in keys:
        label = labels.get(key)
        if label is not None and label.discards and label.content:
            label.check(f"{label.file.parent}: {key}", read(key))
    return [key for key in keys if key not in labels or not labels[key].discards]


def label_notes(labels: Mapping[str, Label]) -> list[str]:
    """Return what a source does with the labels of its episodes, as notes."""
    discarded = sum(label.discards for label in labels.values())
    files = ", ".join(sorted({str(label.file) for label in labels.values()}))
    notes = [f"{len(labels) - discarded} outcomes are those of {files}"] if len(labels) > discarded else []
    return notes + ([f"{discarded} episodes are left out, as {files} discards them"] if discarded else [])
