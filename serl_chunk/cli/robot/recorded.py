"""Recorded episodes of a robot's joint targets: which are read, and how they are checked."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from serl_chunk.cli.data.options import add_reading, keys_of
from serl_chunk.data.source import Source
from serl_chunk.types import STATE, ConfigError

SAME_RATE = 1e-3


class Recorded(NamedTuple):
    """An episode's targets and joints."""

    name: str
    actions: np.ndarray  # float64[T, J]
    joints: np.ndarray | None  # float64[T, J], measured before each action


def add_common(p: argparse.ArgumentParser) -> None:
    """Add the flags of the commands that read episodes."""
    add_reading(p)
    p.add_argument("--json", metavar="FILE", help="also write the figures there")


def recorded(source: Source, numbers: str | None, size: int, tick: float) -> Iterator[Recorded]:
    """Read episodes whose actions are targets of `size` joints, one for each `tick` s. Raises ConfigError."""
    if source.hz is not None and abs(source.hz * tick - 1) > SAME_RATE:
        raise ConfigError(f"{source.path}: recorded at {source.hz:g} steps a second, and the robot takes "
                          f"{1 / tick:g}. Only episodes of the robot's own rate can be played")  # fmt: skip
    keys = keys_of(source, numbers)
    if not keys:
        raise ConfigError(f"{source.path}: no episode that could be played ({source.format})")
    for key in keys:
        steps = source.read(key).steps
        actions, state = np.asarray(steps.action, np.float64), steps.observation.get(STATE)
        if actions.shape[1] != size:
            raise ConfigError(f"{source.path}: actions of {actions.shape[1]} numbers, and the robot has {size} joints")
        joints = None if state is None or state.shape[1] < size else np.asarray(state[:, :size], np.float64)
        yield Recorded(f"{source.path}, {key}", actions, joints)
