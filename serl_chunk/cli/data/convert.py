"""`serl-chunk data convert`, `merge`, `export` and their like: episodes of any format, written anew or renamed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.cli.data import options as data_flags
from serl_chunk.data.convert.convert import ConversionError, Progress, convert
from serl_chunk.data.convert.manifest import NAME as MANIFEST
from serl_chunk.data.demos import without_copies
from serl_chunk.data.encoder_weights import read_resnet10, write_weights
from serl_chunk.data.formats.episodes import EpisodeFiles
from serl_chunk.data.formats.hdf5 import rename_task, task_of
from serl_chunk.data.lerobot.reader import LeRobotSource
from serl_chunk.data.source import Json, ReadOptions, Sink, Source
from serl_chunk.io import os_faults
from serl_chunk.runs.episodes import RunDemos, RunSource, is_run
from serl_chunk.types import ConfigError, DataError, Outcome
from serl_chunk.types import Source as Acted

ONLY = ("success", "interventions")
_HEAD = 3  # lines of a manifest among which the list of its episodes is
_EVERY = 5.0  # seconds between lines where there is no terminal
_REASONS = 20  # skipped episodes whose reasons are printed; the manifest has them all


def convert_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `convert`."""
    p.description = (
        "Write the episodes at PATH as a data set. An episode is in it whole or not at all; --resume continues after "
        "an interruption at any moment. Exit status 1 where one was bad, without --skip-bad."
    )
    data_flags.add_reading(p)
    p.add_argument("--to", required=True, choices=data_flags.TARGETS, help="to write; lerobot is v3.0, v2.1 openpi's")
    data_flags.add_writing(p)
    p.add_argument("--episodes", metavar="0,3,7-12", help="only these, by their place in PATH (default: all)")
    p.add_argument("--max_samples", type=int, metavar="N", help="stop with the episode that brings the steps to N")


def repair_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `repair`."""
    p.description = (
        "Write the whole episodes of a damaged LeRobot data set, or of a folder of HDF5 files, as a new data set of "
        "the same format, and list what is left out and why. PATH is not changed. Of a LeRobot data set, the episodes "
        "before the first place at which rows and tables disagree are kept."
    )
    data_flags.add_reading(p)
    data_flags.add_writing(p)
    p.set_defaults(skip_bad=True, max_samples=None)


def merge_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `merge`."""
    p.description = (
        "Write the episodes of several paths, of any format, as one folder of HDF5 files in the order of the paths. "
        "Every content is in it once; of copies the first with a task's text. No path is changed."
    )
    data_flags.add_reading(p)
    data_flags.add_writing(p)
    p.set_defaults(to="hdf5", max_samples=None)


def rename_task_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `rename-task`."""
    p.description = (
        "Give the episodes of the task OLD the text NEW, in their HDF5 files, each replaced whole. A run that read "
        "such a file names it as changed."
    )
    p.add_argument("path", metavar="PATH", help="an HDF5 file, or a folder of them")
    p.add_argument("old", metavar="OLD", help="the whole text; '' for episodes without one")
    p.add_argument("new", metavar="NEW", help="the text that replaces it")


def export_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `export`."""
    p.description = (
        "Write the episodes in a run's journal as a data set; its learner may be at work. --resume continues after an "
        "interruption at any moment, with the episodes that were there when it began."
    )
    p.add_argument("path", metavar="RUN", help="a run folder")
    p.add_argument("--format", dest="to", required=True, choices=data_flags.TARGETS, help="to write; lerobot is v3.0")
    store = "what its actors recorded, or the demonstrations it was started with (default: online)"
    p.add_argument("--store", choices=("online", "demo"), default="online", help=store)
    p.add_argument("--only", choices=ONLY, help="successful episodes, or those in which a human acted (default: all)")
    p.add_argument("--cameras", metavar="A,B", help="whose frames are exported: names, all, or none (default: all)")
    p.add_argument("--task", default="", help="text of the task where the run recorded none")
    data_flags.add_writing(p)
    p.set_defaults(max_samples=None, tolerance_s=None)


def encoder_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `encoder`."""
    p.description = (
        "Make the file that --config.agent.encoder.weights names (with --config.agent.encoder.kind=resnet10) of the "
        "pickle that HIL-SERL publishes, resnet10_params.pkl. Nothing in the pickle is run."
    )
    p.add_argument("path", metavar="FROM", help="resnet10_params.pkl")
    p.add_argument("out", metavar="TO", help="the file to write, .npz; must not exist")


def convert_command(flags: argparse.Namespace) -> int:
    """Convert, and return the exit status. Raises ConfigError, DataError."""
    _check_target(flags)
    options = data_flags.options_of(flags)
    source = data_flags.open_any(flags.path, options, flags.from_format)
    keys = data_flags.keys_of(source, flags.episodes)
    return _write_data_set(flags, options, source, keys)


def repair_command(flags: argparse.Namespace) -> int:
    """Convert what is whole into the format that it has, and return the exit status. Raises ConfigError, DataError."""
    options = data_flags.options_of(flags)
    source = data_flags.open_any(flags.path, options, flags.from_format)
    if isinstance(source, EpisodeFiles):
        flags.to = "hdf5"
    elif isinstance(source, LeRobotSource):
        flags.to = "lerobot-v2.1" if source.index.v2 else "lerobot"
        flags.mode = flags.mode or ("video" if source.index.videos else "image")
    else:
        raise ConfigError(
            f"{source.path}: is of format {source.format} (expected episodes or lerobot). `serl-chunk data convert "
            "--skip-bad` writes what is whole of the others"
        )
    _check_target(flags)
    return _write_data_set(flags, options, source, source.keys())


def merge_command(flags: argparse.Namespace) -> int:
    """Merge, and return the exit status. Raises ConfigError, DataError."""
    _check_target(flags)
    options = data_flags.options_of(flags)
    source = data_flags.open_any(flags.path, options, flags.from_format)
    whole = source.keys()
    keys = without_copies(source, whole, skip_bad=flags.skip_bad)
    copies = [f"{len(whole) - len(keys)} copies left out"] if len(keys) < len(whole) else []
    return _write_data_set(flags, options, source, keys, copies)


def rename_task_command(flags: argparse.Namespace) -> int:
    """Rename the task in files, and return the exit status. Raises ConfigError, DataError."""
    source = data_flags.open_any([flags.path], ReadOptions(labels=False), None)
    if not isinstance(source, EpisodeFiles):
        raise ConfigError(
            f"{source.path}: is of format {source.format} (expected episodes). `serl-chunk data convert --to hdf5` "
            "writes files whose task can be renamed"
        )
    tasks = {path: task_of(path) for path in source.files.values()}  # all of them before the first is replaced
    chosen = [path for path, task in tasks.items() if task == flags.old]
    if not chosen:
        found = ", ".join(repr(task) for task in sorted(set(tasks.values())))
        raise ConfigError(
            f"{source.path}: no episode of the task {flags.old!r} (there are: {found}). Give one of these"
        )
    with os_faults(DataError, f"{source.path}: cannot be written", "Make room, and repeat the command"):
        for path in chosen:
            rename_task(path, flags.new)
    print(f"{source.path}: {len(chosen)} of {len(tasks)} episodes are of the task {flags.new!r} now")
    return 0


def export_command(flags: argparse.Namespace) -> int:
    """Export, and return the exit status. Raises ConfigError, DataError."""
    run = Path(flags.path).expanduser()
    if not is_run(run):
        raise ConfigError(f"{run} is not a run folder. `serl-chunk data convert` reads files and data sets")
    _check_target(flags)
    options = ReadOptions(cameras=data_flags.parse_cameras(flags.cameras), task=flags.task)
    source = RunSource(run, options) if flags.store == "online" else RunDemos(run, options)
    keys, notes = source.keys(), []
    whole = len(keys)
    if flags.only is not None:
        keys = [key for key in keys if _is(source, key, flags.only)]
        notes.append(f"{len(keys)} of {whole} episodes are chosen by --only {flags.only}")
    if not keys:
        filtered = f", none by --only {flags.only}" if flags.only else ""
        raise ConfigError(f"{run}: no episode to export ({whole} in store {flags.store}{filtered})")
    if flags.resume and (begun := _keys_begun_with(Path(flags.out).expanduser())) is not None:
        if newer := len(set(keys) - set(begun)):
            notes.append(f"{newer} episodes ended after this export began: export them into another folder")
        keys = begun
    return _write_data_set(flags, options, source, keys, notes)


def _is(source: RunSource | RunDemos, key: str, only: str) -> bool:
    if isinstance(source, RunSource):
        about = source.about(key)
        outcome, human = about.outcome, about.human_steps
    else:
        episode = source.read(key)
        outcome, human = episode.end.outcome, int((episode.steps.source == Acted.HUMAN).sum())
    return outcome is Outcome.SUCCESS if only == "success" else human > 0


def _keys_begun_with(folder: Path) -> list[str] | None:
    """Return the episodes with which the export in `folder` began, dropped ones included; None for no export."""
    try:
        with (folder / MANIFEST).open() as file:
            entries = (json.loads(line) for line in itertools.islice(file, _HEAD))
            return next(([str(key) for key in e["keys"]] for e in entries if e["kind"] == "keys"), None)
    except (OSError, ValueError, LookupError, TypeError):  # the conversion itself raises what is wrong there
        return None


def _write_data_set(
    flags: argparse.Namespace, options: ReadOptions, source: Source, keys: Sequence[str], notes: Sequence[str] = ()
) -> int:
    folder = Path(flags.out).expanduser()
    if options.spec is None:
        options = dataclasses.replace(options, spec=getattr(source, "spec", None))
    joints: tuple[int, ...] | None = None
    if flags.to == "hdf5" and options.spec is None and isinstance(source, EpisodeFiles):
        joints = source.joints()
    tolerance_s = None if flags.tolerance_s is None or math.isinf(flags.tolerance_s) else flags.tolerance_s
    sink, target = _sink(flags, options, joints, tolerance_s)
    notes = [*source.notes(), *notes]
    if flags.to == "hdf5" and options.spec is None and joints is None:
        notes.append("the robot is not known: /observations/qpos is the whole state; --exp_name keeps its joints alone")
    for note in notes:
        print(f"note: {note}", flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = flags.workers if flags.workers is not None else min(cores, data_flags.MAX_WORKERS)
    reading = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    del reading["skip_bad"]  # a conversion may be resumed with it
    reading["tolerance_s"] = tolerance_s
    reading["spec"] = None if options.spec is None else f"{options.spec.name} {options.spec.digest()}"
    try:
        with data_flags.shown_progress(f"converting to {folder}", sys.stdout) as show:
            report = convert(
                source, keys, sink, folder, workers=workers, resume=flags.resume, skip_bad=flags.skip_bad,
                progress=_display(show), settings={"reading": reading, "target": target}, max_samples=flags.max_samples,
                tolerance_s=tolerance_s if flags.to == "hdf5" else None,
            )  # fmt: skip
    except ConversionError as error:
        remedy = "--resume --skip-bad" if error.bad_episode else "--resume"
        raise DataError(f"{error} (here: the same command with {remedy})") from error
    except KeyboardInterrupt:
        print(f"serl-chunk: interrupted; the same command with --resume continues in {folder}", file=sys.stderr)
        return 130
    before = f" ({report.already} episodes were there before)" if report.already else ""
    made = f"{report.episodes} episodes, {report.steps} steps, {report.frames} frames{before}"
    print(f"{folder}: {made}; {report.seconds:.1f} s", flush=True)
    if report.skipped:
        print(f"{len(report.skipped)} bad episodes left out:")
        for each in report.skipped[:_REASONS]:
            print(f"  {each.job.number}: {each.reason}")
        if len(report.skipped) > _REASONS:
            print(f"  ... and {len(report.skipped) - _REASONS} more, all of them in {folder / MANIFEST}")
    if flags.push_to_hub:
        _push(folder, flags.repo_id, flags.to)
    return 1 if report.skipped and not flags.skip_bad else 0


def _check_target(flags: argparse.Namespace) -> None:
    """Raise ConfigError where flags of `add_writing` exclude each other, or the library for an upload is missing."""
    if flags.to == "hdf5":
        for name in ("mode", "image_codec", "repo_id", "push_to_hub"):
            if getattr(flags, name):
                raise ConfigError(f"--{name} is for LeRobot data sets. Remove it, or --to hdf5")
    elif flags.compress:
        raise ConfigError("--compress is for HDF5. Remove it, or choose an --image_codec")
    if flags.mode == "video" and flags.image_codec:
        raise ConfigError("--image_codec is for --mode image. Remove it, or --mode video")
    if flags.push_to_hub:
        if not flags.repo_id:
            raise ConfigError("--push_to_hub needs --repo_id USER/NAME")
        _hub()


def _sink(
    flags: argparse.Namespace, options: ReadOptions, joints: tuple[int, ...] | None, tolerance_s: float | None
) -> tuple[Sink, Json]:
    """Return the target, and its settings that the data set depends on."""
    folder = Path(flags.out).expanduser()
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


def _display(show: Callable[..., None]) -> Callable[[Progress], None]:
    """Return a function that shows progress: with `show` in a terminal, else a line every few seconds."""
    printed, before = time.monotonic(), None

    def update(now: Progress) -> None:
        nonlocal printed, before
        before = now.done if before is None else before  # episodes done when this process began
        seconds = max(now.seconds, 1e-9)
        rate = f"{now.frames / seconds:.0f} frames/s, {now.nbytes / seconds / 1e6:.0f} MB/s decoded"
        rate += f", {now.skipped} bad" if now.skipped else ""
        show(now.done, now.total, rate)
        if not sys.stdout.isatty() and time.monotonic() - printed >= _EVERY:
            printed, done = time.monotonic(), now.done - before
            left = f", {(now.total - now.done) * now.seconds / done:.0f} s left" if done else ""
            print(f"{now.done} of {now.total} episodes, {rate}{left}", flush=True)

    return update


def encoder_command(flags: argparse.Namespace) -> int:
    """Write the file of weights; raises ConfigError and DataError."""
    source, out = Path(flags.path).expanduser(), Path(flags.out).expanduser()
    if out.suffix != ".npz":
        raise ConfigError(f"{out}: weights are written as .npz. Give a name that ends in .npz")
    if out.exists():
        raise ConfigError(f"{out} exists. Give another name, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder. Make it first")
    weights, left_out = read_resnet10(source)
    write_weights(out, weights)
    numbers = sum(w.size for w in weights.values())
    print(f"{out}: {len(weights)} arrays, {numbers / 1e6:.3f} million weights")
    if left_out:
        print(f"skipped parameters not present in the backbone: {', '.join(left_out)}")
    return 0
