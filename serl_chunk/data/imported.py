"""Episodes of other projects' data sets: what their files lack is filled in the same way for every format."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serl_chunk.data.checks import check_episode
from serl_chunk.data.source import ReadOptions
from serl_chunk.types import STATE, Begin, DataError, End, Episode, Observation, Outcome, Source, SparseRows, StepBlock


class Ending(NamedTuple):
    """How an imported episode ended: fields of `types.End`."""

    final_observation: Observation | None
    terminated: bool
    outcome: Outcome
    outcome_by: str = "import"
    reward: float | None = None


def imported_episode(
    where: str,
    name: str,
    state: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    ending: Ending,
    options: ReadOptions,
    *,
    source: np.ndarray | Source,
    hz: float | None,
    task: str = "",
    sparse: dict[str, SparseRows] | None = None,
) -> Episode:
    """T steps in columns as a checked episode; `state [T, S]`, `action [T, A]`, `reward [T]` become float32.

    Its id is `name` and twelve digits that depend on states and actions: names like demo_0 occur in every data set.
    Stamps count from 0 at `hz`, and are all 0 where nobody knows it. Raises DataError beginning with `where`.
    """
    n = len(action)
    state, action = np.ascontiguousarray(state, np.float32), np.ascontiguousarray(action, np.float32)
    episode_id = f"{name}-{hashlib.sha256(state.tobytes() + action.tobytes()).hexdigest()[:12]}"
    steps = StepBlock(
        episode_id=episode_id,
        first_tick=0,
        observation={STATE: state},
        action=action,
        reward=np.array(reward, np.float32),
        source=np.array(np.broadcast_to(source, n), np.uint8),
        decision_tick=np.full(n, -1, np.int32),
        policy_version=np.full(n, -1, np.int64),
        policy_age=np.full(n, -1, np.float32),
        stamp=np.arange(n, dtype=np.float64) / hz if hz else np.zeros(n),
        sparse=sparse or {},
    )
    final, terminated, outcome, outcome_by, end_reward = ending
    end = End(episode_id, n, final, terminated, not terminated, outcome, outcome_by, end_reward)
    episode = Episode(Begin(episode_id, task=task or options.task), steps, end)
    check_episode(where, episode, options.spec)
    return episode


def rate(options: ReadOptions, recorded: float | None = None, where: object = "") -> float | None:
    """Steps a second: what the file records, else what the caller says, else the robot's, else unknown.

    Raises DataError beginning with `where`: the file and the caller say different things.
    """
    if recorded:
        if options.hz is not None and not math.isclose(recorded, options.hz, rel_tol=1e-6):
            raise DataError(f"{where}: recorded at {recorded:g} Hz, not at {options.hz:g}; leave --hz out")
        return recorded
    return options.hz or (options.spec.control_hz if options.spec else None)


def position(keys: list[str], key: str, path: Path) -> int:
    """The index of `key` in `keys`; raises DataError."""
    try:
        return keys.index(key)
    except ValueError:
        raise DataError(
            f"{path}: there is no episode {key!r}; there are {len(keys)}, {keys[0]!r} to {keys[-1]!r}"
        ) from None


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which `demo_2` comes before `demo_10`."""
    parts = re.findall(r"\d+|\D+", text, flags=re.ASCII)
    return [(0, int(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]


def said(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
