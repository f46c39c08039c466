"""`serl-chunk data convert`: episodes of any format into HDF5 files or a LeRobot data set."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.cli.data.options import (
    MAX_WORKERS,
    TARGETS,
    add_reading,
    add_writing,
    keys_of,
    open_any,
    options_of,
    parse_episodes,
    shown_progress,
)
from serl_chunk.data.convert.convert import ConversionError, Progress, Report, convert
from serl_chunk.data.convert.manifest import NAME as MANIFEST
from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.source import Json, ReadOptions, Sink, Source
from serl_chunk.types import ConfigError, DataError

_EVERY = 5.0  # seconds between lines where there is no terminal
_REASONS = 20  # skipped episodes whose reasons are printed; the manifest has them all


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    p = commands.add_parser(
        "convert",
        help="into HDF5 files, or a LeRobot data set",
        description="Write the episodes at PATH as a data set. An episode is in it whole or not at all; --resume "
        "continues after an interruption at any moment. Exit status 0 where every episode was converted, also where "
        "bad ones were left out as --skip-bad asks; 1 where one was bad without it.",
        allow_abbrev=False,
    )
    add_reading(p)
    p.add_argument("--to", required=True, choices=TARGETS, help="format to write; lerobot is v3.0, v2.1 is openpi's")
    add_writing(p)
    p.add_argument("--episodes", metavar="0,3,7-12", help="only these, by their place in PATH (default: all)")
    p.add_argument("--max_samples", type=int, metavar="N", help="stop with the episode that brings the steps to N")
    p.add_argument(
        "--tolerance_s", type=float, metavar="S",
        help="an episode is bad where a step's time stamp is not where the rate has it, within S seconds; LeRobot's "
        "own time is the number of the step (default: only where time goes back; `data inspect` names gaps)",
    )  # fmt: skip
    p.set_defaults(run=run_convert)


def run_convert(flags: argparse.Namespace) -> int:
    """Convert, and return the exit status. Raises ConfigError, DataError."""
    check_target(flags)
    options = options_of(flags)
    source = open_any(flags.path, options, flags.from_format)
    keys = keys_of(source, parse_episodes(flags.episodes))
    return write_data_set(flags, options, source, keys, max_samples=flags.max_samples, tolerance_s=flags.tolerance_s)


def write_data_set(
    flags: argparse.Namespace,
    options: ReadOptions,
    source: Source,
    keys: Sequence[str],
    notes: Sequence[str] = (),
    *,
    max_samples: int | None = None,
    tolerance_s: float | None = None,
) -> int:
    """Convert the episodes `keys` of `source` with the flags of `add_writing`, and return the exit status."""
    folder = Path(flags.out).expanduser()
    if options.spec is None:
        options = dataclasses.replace(options, spec=getattr(source, "spec", None))
    joints: tuple[int, ...] | None = None
    if flags.to == "hdf5" and options.spec is None and isinstance(source, EpisodeFiles):
        joints = source.joints()
    tolerance_s = None if tolerance_s is None or math.isinf(tolerance_s) else tolerance_s
    sink, target = _sink(flags, folder, options, joints, tolerance_s)
    notes = [*source.notes(), *notes]
    if flags.to == "hdf5" and options.spec is None and joints is None:
        notes.append("the robot is not known: /observations/qpos is the whole state; --exp_name keeps its joints alone")
    for note in notes:
        print(f"note: {note}", flush=True)
    workers = flags.workers if flags.workers is not None else min(_cores(), MAX_WORKERS)
    try:
        with shown_progress(f"converting to {folder}", sys.stdout) as show:
            report = convert(
                source,
                keys,
                sink,
                folder,
                workers=workers,
                resume=flags.resume,
                skip_bad=flags.skip_bad,
                progress=_Display(show).update,
                settings={"reading": _plain(options), "target": target},
                max_samples=max_samples,
                tolerance_s=tolerance_s if flags.to == "hdf5" else None,
            )
    except ConversionError as error:
        remedy = "--resume --skip-bad" if error.bad_episode else "--resume"
        raise DataError(f"{error} (here: the same command with {remedy})") from error
    except KeyboardInterrupt:
        print(f"serl-chunk: interrupted; the same command with --resume continues in {folder}", file=sys.stderr)
        return 130
    _print(report, folder)
    if flags.push_to_hub:
        _push(folder, flags.repo_id, flags.to)
    return 1 if report.skipped and not flags.skip_bad else 0


def check_target(flags: argparse.Namespace) -> None:
    """Raise ConfigError where flags of `add_writing` exclude each other, or the library for an upload is missing."""
    if flags.to == "hdf5":
        for name in ("mode", "image_codec", "repo_id", "push_to_hub"):
            if getattr(flags, name):
                raise ConfigError(f"--{name} is for LeRobot data sets. Remove it, or --to hdf5")
    elif flags.compress:
        raise ConfigError("--compress is for HDF5. Remove it, or choose an --image_codec")
    if flags.mode == "video" and flags.image_codec:
        raise ConfigError("--image_codec is for --mode image. Remove it, or --mode video")
    if flags.push_to_hub and not flags.repo_id:
        raise ConfigError("--push_to_hub needs --repo_id USER/NAME")
    if flags.push_to_hub:
        _hub()


def _sink(
    flags: argparse.Namespace,
    folder: Path,
    options: ReadOptions,
    joints: tuple[int, ...] | None,
    tolerance_s: float | None,
) -> tuple[Sink, Json]:
    """Return the target, and its settings that the data set depends on."""
    if flags.to == "hdf5":
        from serl_chunk.data.formats.hdf5_writer import Hdf5Sink

        sink = Hdf5Sink(folder, options.spec, flags.compress, joints)
        return sink, {"to": flags.to, "compress": flags.compress}
    from serl_chunk.data.lerobot.writer import LeRobotSink

    target: Json = {
        "version": "v2.1" if flags.to == "lerobot-v2.1" else "v3.0",
        "mode": flags.mode or "image",
        "image_codec": flags.image_codec or "png",
        "tolerance_s": tolerance_s,  # its own time is the number of the row; a robot's clock never is exactly that
    }
    return LeRobotSink(folder, task=options.task, **target), {"to": flags.to, **target}


def _plain(options: ReadOptions) -> Json:
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return values | {"spec": None if options.spec is None else f"{options.spec.name} {options.spec.digest()}"}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(report: Report, folder: Path) -> None:
    before = f" ({report.already} episodes were there before)" if report.already else ""
    made = f"{report.episodes} episodes, {report.steps} steps, {report.frames} frames{before}"
    print(f"{folder}: {made}; {report.seconds:.1f} s", flush=True)
    if report.skipped:
        print(f"{len(report.skipped)} bad episodes left out:")
        for each in report.skipped[:_REASONS]:
            print(f"  {each.job.number}: {each.reason}")
        if len(report.skipped) > _REASONS:
            print(f"  ... and {len(report.skipped) - _REASONS} more, all of them in {folder / MANIFEST}")


def _hub() -> Any:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("--push_to_hub needs huggingface_hub. Run pip install huggingface_hub, or upload it yourself")
    return importlib.import_module("huggingface_hub")


def _push(folder: Path, repo_id: str, target: str) -> None:
    """Upload the data set, with the tag by which lerobot finds the version of its format."""
    api = _hub().HfApi()
    api.create_repo(repo_id, repo_type="dataset", exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=repo_id, repo_type="dataset", ignore_patterns=[MANIFEST, ".*"])
    tag = "v2.1" if target == "lerobot-v2.1" else "v3.0"
    api.create_tag(repo_id, tag=tag, repo_type="dataset", exist_ok=True)
    print(f"uploaded to {repo_id}, tag {tag}", flush=True)


class _Display:
    """Progress: a bar in a terminal, else a line every few seconds."""

    def __init__(self, show: Callable[..., None]) -> None:
        self._show = show
        self._last = time.monotonic()
        self._before: int | None = None  # episodes done when this process began

    def update(self, now: Progress) -> None:
        if self._before is None:
            self._before = now.done
        seconds = max(now.seconds, 1e-9)
        rate = f"{now.frames / seconds:.0f} frames/s, {now.nbytes / seconds / 1e6:.0f} MB/s decoded"
        if now.skipped:
            rate += f", {now.skipped} bad"
        self._show(now.done, now.total, rate)
        if not sys.stdout.isatty() and time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            done = now.done - self._before
            left = f", {(now.total - now.done) * now.seconds / done:.0f} s left" if done else ""
            print(f"{now.done} of {now.total} episodes, {rate}{left}", flush=True)
