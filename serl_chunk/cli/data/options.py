"""Flags that several `serl-chunk data` commands share: which episodes are read, and what their files do not say."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.data.source import ReadOptions, Source
from serl_chunk.types import ConfigError, RobotSpec


def add_reading(p: argparse.ArgumentParser) -> None:
    """The flags that `source_of` reads."""
    p.add_argument("path", metavar="PATH", help="a file, a folder of episodes, a data set, or a run folder")
    p.add_argument("--from", dest="from_format", metavar="FORMAT", help="what PATH is (default: what it looks like)")
    p.add_argument("--exp_name", help="an experiment, for its robot: dimensions, cameras, rate")
    p.add_argument("--cameras", metavar="A,B", help="whose frames are read: names, all, or none (default: all)")
    p.add_argument("--color", choices=("rgb", "bgr"), help="order of stored channels where files do not record it")
    p.add_argument("--hz", type=float, help="steps a second where files do not record it")
    p.add_argument("--task", default="", help="text of the task where files do not record it")
    outcome = p.add_mutually_exclusive_group()
    outcome.add_argument("--success", action="store_true", help="episodes whose files record no outcome succeeded")
    outcome.add_argument("--failure", action="store_true", help="they failed")
    outcome.add_argument(
        "--scores", metavar="DIR=R,...", help="rewards of episodes by their folder, such as score_5=1,score_1=0"
    )
    p.add_argument(
        "--reward_every_step",
        action="store_true",
        help="give that reward on every step, not the last only: a value then is the time left, not the chance",
    )
    p.add_argument("--env", default="", help="OGBench task whose rewards are computed, cube-single-play-..-task1-v0")
    p.add_argument(
        "--proportion",
        type=float,
        default=1.0,
        metavar="P",
        help="read the first P of the episodes (of OGBench's and D4RL's data: of the steps, in whole episodes)",
    )


def options_of(flags: argparse.Namespace) -> ReadOptions:
    """What the flags of `add_reading` say; raises ConfigError."""
    if flags.hz is not None and not 0 < flags.hz < math.inf:
        raise ConfigError(f"--hz={flags.hz:g} must be above 0")
    if not 0 < flags.proportion <= 1:
        raise ConfigError(f"--proportion={flags.proportion:g} must lie in (0, 1]")
    cameras = None if flags.cameras in (None, "all") else tuple(c for c in flags.cameras.split(",") if c)
    success = True if flags.success else False if flags.failure else None
    return ReadOptions(
        spec=_spec(flags.exp_name),
        cameras=() if cameras == ("none",) else cameras,
        color=flags.color,
        hz=flags.hz,
        task=flags.task,
        success=success,
        scores=parse_scores(flags.scores),
        reward_every_step=flags.reward_every_step,
        env=flags.env,
        proportion=flags.proportion,
    )


def source_of(flags: argparse.Namespace) -> Source:
    """The source that the flags of `add_reading` name; raises ConfigError, DataError."""
    return open_any(flags.path, options_of(flags), flags.from_format)


def open_any(path: str | Source, options: ReadOptions, format: str | None) -> Source:
    """As `data.source.open_source`, and run folders too; a source that is open already is given back."""
    from serl_chunk.data.formats import open_source
    from serl_chunk.runs.episodes import FORMAT

    if not isinstance(path, str | Path):
        return path
    return open_source(path, options, format, (FORMAT,))


def parse_scores(text: str | None) -> tuple[tuple[str, float], ...]:
    """`score_5=1,score_1=0`; raises ConfigError."""
    out = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = part.partition("=")
        try:
            reward = float(value)
            if not math.isfinite(reward):
                raise ValueError
            out.append((name.strip(), reward))
        except ValueError:
            raise ConfigError(f"--scores: {part!r} is not FOLDER=REWARD, such as score_5=1") from None
    return tuple(out)


def _spec(exp_name: str | None) -> RobotSpec | None:
    if exp_name is None:
        return None
    from serl_chunk.cli.process import load, spec_of

    return spec_of(load(exp_name, []))


def keys_of(source: Source, chosen: Sequence[int] | None) -> list[str]:
    """The episodes to read: all, or those with the numbers given. Raises ConfigError for a number out of range."""
    keys = source.keys()
    if chosen is None:
        return keys
    wrong = [i for i in chosen if not 0 <= i < len(keys)]
    if wrong:
        raise ConfigError(f"--episodes: {source.path} has episodes 0..{len(keys) - 1}, not {wrong[-1]}")
    return [keys[i] for i in chosen]


def parse_episodes(text: str | None) -> list[int] | None:
    """`0,3,7-12`; None for all. Raises ConfigError."""
    if text is None:
        return None
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not part.isascii() or not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--episodes: {part!r} is no number or range; write 0,3,7-12")
        if dash and int(last) < int(first):
            raise ConfigError(f"--episodes: {part!r} goes back; write the lower number first")
        out += range(int(first), int(last) + 1) if dash else [int(first)]
    if len(set(out)) < len(out):
        raise ConfigError(f"--episodes={text} names an episode twice")
    return out
