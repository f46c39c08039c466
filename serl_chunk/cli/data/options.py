"""Flags that several `serl-chunk data` commands share: which episodes are read, and how a data set is written."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich import progress
from rich.console import Console

from serl_chunk.cli.process import load
from serl_chunk.config.fields import require
from serl_chunk.data.fields import parse_tables
from serl_chunk.data.paths import find, open_paths
from serl_chunk.data.source import ReadOptions, Source
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError

TARGETS = ("hdf5", "lerobot", "lerobot-v2.1")
FIELDS_HELP = (
    "arrays of foreign names, such as state=joint_pos+gripper_pos,action=actions,camera.wrist=wrist_cam; PATH::TABLE "
    "for one path, or a file of such lines; repeatable (docs/data.md)"
)
MAX_WORKERS = 16  # by default: a worker holds a few hundred MB
READ = "a file, a folder of files or of folders by day, a data set, a run, a pattern, or a LeRobot repository USER/NAME"


def add_reading(p: argparse.ArgumentParser) -> None:
    """Add the flags that `options_of` reads."""
    p.add_argument("path", metavar="PATH", nargs="+", help=READ)
    p.add_argument("--from", dest="from_format", metavar="FORMAT", help="what PATH is (default: what it looks like)")
    p.add_argument("--fields", metavar="TABLE", action="append", default=[], help=FIELDS_HELP)
    p.add_argument("--exp_name", help="an experiment, for its robot: dimensions, cameras, rate")
    p.add_argument("--cameras", metavar="A,B", help="whose frames are read: names, all, or none (default: all)")
    p.add_argument("--color", choices=("rgb", "bgr"), help="order of stored channels where files do not record it")
    p.add_argument("--hz", type=float, help="steps a second where files do not record it")
    tolerance = (
        "seconds by which a time stamp may be off its frame in a video (default: half a frame), and in `convert` off "
        "its place at the rate (default: time must not go back)"
    )
    p.add_argument("--tolerance_s", type=float, metavar="S", help=tolerance)
    p.add_argument("--task", default="", help="text of the task where files do not record it")
    outcome = p.add_mutually_exclusive_group()
    outcome.add_argument("--success", action="store_true", help="episodes whose files record no outcome succeeded")
    outcome.add_argument("--failure", action="store_true", help="they failed")
    outcome.add_argument("--scores", metavar="DIR=R,...", help="rewards by folder, such as score_5=1,score_1=0")
    p.add_argument("--reward_every_step", action="store_true", help="give that reward on every step, not the last only")
    p.add_argument("--env", default="", help="OGBench task whose rewards are computed, cube-single-play-..-task1-v0")
    proportion = "read the first P of the episodes (of OGBench's and D4RL's data: of the steps, in whole episodes)"
    p.add_argument("--proportion", type=float, default=1.0, metavar="P", help=proportion)


def add_writing(p: argparse.ArgumentParser) -> None:
    """Add the flags of the data set that is written, and of how."""
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the data set: new, empty, or with --resume")
    p.add_argument("--mode", choices=("image", "video"), help="lerobot: how frames are kept (default: image)")
    p.add_argument("--image_codec", choices=("png", "jpeg"), help="lerobot images: png (default) or jpeg")
    p.add_argument("--compress", action="store_true", help="hdf5: gzip the frames, lossless and slower")
    p.add_argument("--resume", action="store_true", help="continue what is in DIR, if anything is")
    p.add_argument(
        "--skip-bad", "--skip_bad", "--skip_problematic", "--skip-problematic-episodes", dest="skip_bad",
        action="store_true", help="leave bad episodes out and list them at the end; without it the first one ends it",
    )  # fmt: skip
    processes = f"processes that read and encode (default: the cores, at most {MAX_WORKERS}; 0: this one alone)"
    p.add_argument("--workers", type=int, metavar="N", help=processes)
    p.add_argument("--repo_id", metavar="USER/NAME", help="name of the data set on the Hugging Face hub")
    p.add_argument("--push_to_hub", action="store_true", help="upload it to --repo_id when it is complete")


def options_of(flags: argparse.Namespace) -> ReadOptions:
    """Return the options that the flags of `add_reading` set; raises ConfigError."""
    spec = None if flags.exp_name is None else spec_of(load(flags.exp_name, []))
    options = dataclasses.replace(recorded_facts(flags), spec=spec, cameras=parse_cameras(flags.cameras))
    return dataclasses.replace(options, task=flags.task, reward_every_step=flags.reward_every_step)


def recorded_facts(flags: argparse.Namespace, prefix: str = "") -> ReadOptions:
    """Return the options for which a learner has flags too, with `prefix` in their names; raises ConfigError."""
    given = {name.removeprefix(prefix): value for name, value in vars(flags).items() if name.startswith(prefix)}
    success = True if given["success"] else False if given["failure"] else None
    same = {name: given[name] for name in ("color", "hz", "env", "proportion", "tolerance_s")}
    same["skip_bad"] = given.get("skip_bad", False)
    fields = parse_tables(given["fields"], f"{prefix}fields")
    return ReadOptions(success=success, scores=parse_scores(given["scores"]), fields=fields, prefix=prefix, **same)


def parse_cameras(text: str | None) -> tuple[str, ...] | None:
    """Parse `top,wrist`, `none` or `all`; None for all."""
    if text in (None, "all"):
        return None
    return () if text == "none" else tuple(c for c in text.split(",") if c)


def open_any(paths: Sequence[str], options: ReadOptions, format: str | None) -> Source:
    """Open all that `paths` name as one source, run folders too."""
    found = find_any(paths, format, scored=bool(options.scores))
    return open_paths(found, options, format, (FORMAT,))


def find_any(paths: Sequence[str], format: str | None, *, scored: bool = False) -> list[Path]:
    """Find what `paths` name as `data.paths.find` does, run folders too."""
    return [part for path in paths for part in find(path, format, (FORMAT,), scored=scored)]


def parse_scores(text: str | None) -> tuple[tuple[str, float], ...]:
    """Parse `score_5=1,score_1=0`; raises ConfigError."""
    out = []
    for part in filter(str.strip, (text or "").split(",")):
        name, _, value = part.partition("=")
        with contextlib.suppress(ValueError):
            if math.isfinite(reward := float(value)):
                out.append((name.strip(), reward))
                continue
        raise ConfigError(f"{part!r} is not FOLDER=REWARD, such as score_5=1", parameter="scores")
    return tuple(out)


def keys_of(source: Source, text: str | None) -> list[str]:
    """Return the episodes to read: those with the numbers in `text` (`0,3,7-12`), or all. Raises ConfigError."""
    keys = source.keys()
    if text is None:
        return keys
    chosen = _parse_episodes(text)
    wrong = [i for i in chosen if not 0 <= i < len(keys)]
    if wrong:
        raise ConfigError(f"{source.path} has episodes 0..{len(keys) - 1}, not {wrong[-1]}", parameter="episodes")
    return [keys[i] for i in chosen]


def _parse_episodes(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not part.isascii() or not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{part!r} is no number or range. Write 0,3,7-12", parameter="episodes")
        require(not (dash and int(last) < int(first)), "episodes", f"{part!r} goes back. Write the lower number first")
        out += range(int(first), int(last) + 1) if dash else [int(first)]
    require(len(set(out)) >= len(out), "episodes", f"{text} names an episode twice")
    return out


@contextlib.contextmanager
def shown_progress(title: str, file: TextIO | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar if `file`, stderr by default, is a terminal; yield the function (done, total, note) that moves it."""
    file = file or sys.stderr
    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[note]}"), progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
    )  # fmt: skip
    options: dict[str, Any] = {"transient": True, "speed_estimate_period": 600, "disable": not file.isatty()}
    with progress.Progress(*columns, console=Console(file=file), **options) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
