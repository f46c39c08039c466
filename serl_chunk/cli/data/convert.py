"""`serl-chunk data convert`: episodes of any format into HDF5 files or a LeRobot data set."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from serl_chunk.cli.data.options import add_reading, keys_of, options_of, parse_episodes, source_of
from serl_chunk.data.convert.convert import Progress, Report, convert
from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.source import Json, ReadOptions, Sink
from serl_chunk.types import ConfigError

TARGETS = ("hdf5", "lerobot", "lerobot-v2.1")
_EVERY = 5.0  # seconds between lines where there is no terminal
_REASONS = 20  # skipped episodes whose reasons are printed; the manifest has them all
_FAR_FEWER_THAN_CORES = 16  # a worker holds a few hundred MB; more are for who asks


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
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the data set: new, empty, or with --resume")
    p.add_argument("--mode", choices=("image", "video"), help="lerobot: how frames are kept (default: image)")
    p.add_argument("--image_codec", choices=("png", "jpeg"), help="lerobot images: png (default) or jpeg")
    p.add_argument("--compress", action="store_true", help="hdf5: gzip the frames, lossless and slower")
    p.add_argument("--episodes", metavar="0,3,7-12", help="only these, by their place in PATH (default: all)")
    p.add_argument("--max_samples", type=int, metavar="N", help="stop with the episode that brings the steps to N")
    p.add_argument(
        "--tolerance_s",
        type=float,
        metavar="S",
        help="an episode is bad where a step's time stamp is not where the rate has it, within S seconds; LeRobot's "
        "own time is the number of the step (default: only where time goes back; `data inspect` names gaps)",
    )
    p.add_argument("--resume", action="store_true", help="continue the conversion in DIR, if there is one")
    p.add_argument(
        "--skip-bad",
        "--skip_bad",
        "--skip_problematic",
        "--skip-problematic-episodes",
        dest="skip_bad",
        action="store_true",
        help="leave bad episodes out and list them at the end; without it the first one ends the conversion",
    )
    p.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read and encode, one episode each at a time (default: the cores, at most "
        f"{_FAR_FEWER_THAN_CORES}; 0: this process alone). There are no writer threads beside them",
    )
    p.add_argument("--repo_id", metavar="USER/NAME", help="name of the data set on the Hugging Face hub")
    p.add_argument("--push_to_hub", action="store_true", help="upload it to --repo_id when it is complete")
    p.set_defaults(run=run_convert)


def run_convert(flags: argparse.Namespace) -> int:
    """Convert as the flags say; returns the exit status. Raises ConfigError, DataError."""
    _refuse_what_would_be_ignored(flags)
    if flags.push_to_hub:
        _hub()
    folder = Path(flags.out).expanduser()
    options = options_of(flags)
    source = source_of(flags)
    keys = keys_of(source, parse_episodes(flags.episodes))
    if options.spec is None:
        options = dataclasses.replace(options, spec=getattr(source, "spec", None))
    joints: tuple[int, ...] | None = None
    if flags.to == "hdf5" and options.spec is None and isinstance(source, EpisodeFiles):
        joints = source.joints()
    sink, target = _sink(flags, folder, options, joints)
    notes = source.notes()
    if flags.to == "hdf5" and options.spec is None and joints is None:
        notes.append("the robot is not known: /observations/qpos is the whole state; --exp_name keeps its joints alone")
    for note in notes:
        print(f"note: {note}", flush=True)
    workers = flags.workers if flags.workers is not None else min(_cores(), _FAR_FEWER_THAN_CORES)
    try:
        with _Display(str(folder), len(keys)) as display:
            report = convert(
                source,
                keys,
                sink,
                folder,
                workers=workers,
                resume=flags.resume,
                skip_bad=flags.skip_bad,
                progress=display.update,
                settings={"reading": _plain(options), "target": target},
                max_samples=flags.max_samples,
                tolerance_s=_finite(flags.tolerance_s) if flags.to == "hdf5" else None,
            )
    except KeyboardInterrupt:
        print(
            f"serl-chunk: interrupted; what was converted is kept: the same command with --resume goes on in {folder}",
            file=sys.stderr,
        )
        return 130
    _print(report, folder)
    if flags.push_to_hub:
        _push(folder, flags.repo_id, flags.to)
    return 1 if report.skipped and not flags.skip_bad else 0


def _refuse_what_would_be_ignored(flags: argparse.Namespace) -> None:
    if flags.to == "hdf5":
        for name in ("mode", "image_codec", "repo_id", "push_to_hub"):
            if getattr(flags, name):
                raise ConfigError(f"--{name} is for LeRobot data sets: leave it out with --to hdf5")
    elif flags.compress:
        raise ConfigError("--compress is for HDF5: leave it out, or choose an --image_codec")
    if flags.mode == "video" and flags.image_codec:
        raise ConfigError("--image_codec is for --mode image: leave it out with --mode video")
    if flags.push_to_hub and not flags.repo_id:
        raise ConfigError("--push_to_hub needs --repo_id USER/NAME")


def _sink(
    flags: argparse.Namespace, folder: Path, options: ReadOptions, joints: tuple[int, ...] | None
) -> tuple[Sink, Json]:
    """The target, and what of it the data set depends on."""
    if flags.to == "hdf5":
        from serl_chunk.data.formats.hdf5_writer import Hdf5Sink

        sink = Hdf5Sink(folder, options.spec, flags.compress, joints)
        return sink, {"to": flags.to, "compress": flags.compress}
    from serl_chunk.data.lerobot.writer import LeRobotSink

    target: Json = {
        "version": "v2.1" if flags.to == "lerobot-v2.1" else "v3.0",
        "mode": flags.mode or "image",
        "image_codec": flags.image_codec or "png",
        # Its own time is the number of the row; a robot's clock never is exactly that.
        "tolerance_s": _finite(flags.tolerance_s),
    }
    return LeRobotSink(folder, task=options.task, **target), {"to": flags.to, **target}


def _finite(tolerance_s: float | None) -> float | None:
    return None if tolerance_s is None or math.isinf(tolerance_s) else tolerance_s


def _plain(options: ReadOptions) -> Json:
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return values | {"spec": None if options.spec is None else f"{options.spec.name} {options.spec.digest()}"}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(report: Report, folder: Path) -> None:
    print(
        f"{folder}: {report.episodes} episodes, {report.steps} steps, {report.frames} frames"
        + (f" ({report.already} episodes were there before)" if report.already else "")
        + f"; {report.seconds:.1f} s",
        flush=True,
    )
    if report.skipped:
        print(f"{len(report.skipped)} bad episodes left out:")
        for each in report.skipped[:_REASONS]:
            print(f"  {each.job.number}: {each.reason}")
        if len(report.skipped) > _REASONS:
            print(f"  ... and {len(report.skipped) - _REASONS} more, all of them in {folder / 'conversion.jsonl'}")


def _hub() -> Any:
    """huggingface_hub; raises ConfigError where it is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            "--push_to_hub needs huggingface_hub, which is not installed: pip install huggingface_hub, or upload the "
            "folder yourself"
        )
    return importlib.import_module("huggingface_hub")


def _push(folder: Path, repo_id: str, target: str) -> None:
    """Upload the data set, with the tag by which lerobot finds the version of its format."""
    api = _hub().HfApi()
    api.create_repo(repo_id, repo_type="dataset", exist_ok=True)
    api.upload_folder(
        folder_path=str(folder), repo_id=repo_id, repo_type="dataset", ignore_patterns=["conversion.jsonl", ".*"]
    )
    tag = "v2.1" if target == "lerobot-v2.1" else "v3.0"
    api.create_tag(repo_id, tag=tag, repo_type="dataset", exist_ok=True)
    print(f"uploaded to {repo_id}, tag {tag}", flush=True)


class _Display:
    """Progress: a bar in a terminal, else a line every few seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._last = time.monotonic()
        self._first: Progress | None = None
        self._close: Callable[[], None] = lambda: None
        self._show: Callable[[Progress, str], None] = self._line

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            rate, count = TextColumn("{task.fields[rate]}"), MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count, rate, TimeRemainingColumn())
            bar = Bar(*columns, transient=True, speed_estimate_period=600)
            task = bar.add_task(f"converting to {self._what}", total=self._total, rate="")
            bar.start()
            self._close = bar.stop
            self._show = lambda now, rate: bar.update(task, completed=now.done, rate=rate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def update(self, now: Progress) -> None:
        """Show it."""
        self._first = self._first or now
        seconds = max(now.seconds, 1e-9)
        rate = f"{now.frames / seconds:.0f} frames/s, {now.nbytes / seconds / 1e6:.0f} MB/s decoded"
        if now.skipped:
            rate += f", {now.skipped} bad"
        self._show(now, rate)

    def _line(self, now: Progress, rate: str) -> None:
        if time.monotonic() - self._last < _EVERY:
            return
        self._last = time.monotonic()
        done = now.done - (self._first.done if self._first else 0)
        left = f", {(now.total - now.done) * now.seconds / done:.0f} s left" if done else ""
        print(f"{now.done} of {now.total} episodes, {rate}{left}", flush=True)
