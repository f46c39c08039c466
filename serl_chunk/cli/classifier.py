"""`serl-chunk classifier train` and `classifier test`: a success classifier from recorded episodes, and its figures."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serl_chunk.cli.data.options import READ, find_any, parse_cameras, shown_progress
from serl_chunk.cli.process import load
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.fields import require
from serl_chunk.data.paths import open_paths
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import plural
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError

if TYPE_CHECKING:
    from serl_chunk.classifier.dataset import Labelled

VALIDATED = 0.2  # share of the episodes that thresholds and figures are of


def train_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `train`."""
    p.description = (
        "Trains on whole episodes and holds every fifth back: for the early stop, the threshold and the figures. An "
        "episode without frame labels (frame_labels.json) is labelled by its outcome."
    )
    _add_reading(p)
    p.add_argument("--cameras", required=True, metavar="A,B", help="whose frames it looks at")
    p.add_argument("--out", required=True, metavar="FOLDER", help="folder to write, for outcome.classifier")
    p.add_argument("--exp_name", help="an experiment, for its encoder (agent.encoder) and weights")
    p.add_argument("--weights", metavar="FILE", help="HIL-SERL's frozen ResNet-10, from `serl-chunk data encoder`")
    wanted = "share of held-out episodes that may end as a false success (default: %(default)s)"
    p.add_argument("--false_positives", type=float, default=0.01, metavar="P", help=wanted)
    in_a_row = "number of frames in a row above the threshold that are a success (default: %(default)s)"
    p.add_argument("--frames", type=int, default=3, metavar="K", help=in_a_row)
    p.add_argument("--steps", type=int, default=2000, metavar="N", help="maximum number of updates (%(default)s)")
    p.add_argument("--batch_size", type=int, default=64, metavar="B", help="frames of an update (%(default)s)")
    p.add_argument("--seed", type=int, default=42, help="of parameters, batches and the split (%(default)s)")


def test_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `test`."""
    p.description = (
        "Prints AUC by episode and by frame and the episodes that are misjudged, and writes test.json and the ROC "
        "curves (test.png)."
    )
    p.add_argument("folder", metavar="FOLDER", help="of `serl-chunk classifier train`")
    _add_reading(p)
    p.add_argument("--out", metavar="DIR", help="folder of test.json and test.png (default: FOLDER)")


def _add_reading(p: argparse.ArgumentParser) -> None:
    p.add_argument("data", nargs="+", metavar="DATA", help=f"{READ}; or HIL-SERL's classifier_data")
    p.add_argument("--from", dest="from_format", metavar="FORMAT", help="what DATA is (default: what it looks like)")
    p.add_argument("--color", choices=("rgb", "bgr"), help="order of stored channels where files do not record it")
    condition = "an experiment: frames on which its outcome.condition does not hold are left out, as they are in use"
    p.add_argument("--condition", metavar="EXP", help=condition)
    outcome = p.add_mutually_exclusive_group()
    outcome.add_argument("--success", action="store_true", help="episodes whose files record no outcome succeeded")
    outcome.add_argument("--failure", action="store_true", help="they failed")
    last = "number of final frames of a success labelled as success (default: %(default)s)"
    p.add_argument("--positives", type=int, default=1, metavar="K", help=last)
    before = "number of frames before them without a label: an outcome may come late (default: %(default)s)"
    p.add_argument("--ignored", type=int, default=5, metavar="K", help=before)


def train_command(flags: argparse.Namespace) -> int:
    """Train, write the folder, print its figures, and return 0."""
    from serl_chunk.classifier import files, report
    from serl_chunk.classifier import train as training
    from serl_chunk.classifier.dataset import split

    require(flags.frames >= 1, "frames", f"must be at least 1, got {flags.frames}")
    wanted = flags.false_positives
    require(0 <= wanted < 1, "false_positives", f"must lie in [0, 1), got {wanted:g}")
    encoder, weights = _encoder_of(flags)
    options = training.TrainingOptions(steps=flags.steps, batch_size=flags.batch_size, seed=flags.seed)
    folder = Path(flags.out).expanduser()
    files.check_free(folder)
    cameras = parse_cameras(flags.cameras) or ()
    require(bool(cameras), "cameras", f"names no camera: {flags.cameras!r}. Give names, as --cameras top,wrist")
    data = _read(flags, cameras)
    train, held = split(data, VALIDATED, flags.seed)
    print(f"training on {_contents(train)}; held out {_contents(held)}")
    with shown_progress("training") as bar:

        def progress(done: int, total: int, note: str) -> None:
            bar(done, total, note)
            if not sys.stderr.isatty():  # the bar is not shown
                print(f"update {done} of {total}: {note}", flush=True)

        trained = training.train(
            train, held, cameras, encoder=encoder, weights=weights, options=options, progress=progress
        )
    print(f"held-out loss {trained.loss:.4f} after update {trained.step} of {trained.steps}")
    description = dataclasses.replace(trained.description, frames=flags.frames)
    found = training.judge(description, trained.weights, held, false_positives=wanted)
    description = dataclasses.replace(
        description, threshold=found.threshold, validation=found.to_json(), data=tuple(flags.data),
        positives=train.count(positive=True), negatives=train.count(positive=False),
    )  # fmt: skip
    files.save(folder, description, trained.weights)
    print("\n".join([*report.summary_lines(found), *report.table_lines(found)]))
    if 0 < wanted * len(found.episodes) < 1:
        few = f"{plural(len(found.episodes), 'held-out episode')} cannot show a share of {wanted:g} false successes"
        print(f"note: {few}; expect more, and test on others")
    print(f"wrote {folder} and {report.write_report(folder, 'validation', found)[1]}")
    print(f"use it with --config.outcome.classifier={folder}")
    return 0


def test_command(flags: argparse.Namespace) -> int:
    """Print and write the figures on other episodes, and return 0."""
    from serl_chunk.classifier import files, report
    from serl_chunk.classifier import train as training
    from serl_chunk.classifier.dataset import camera_specs

    folder = Path(flags.folder).expanduser()
    description, weights = files.read_classifier(folder)
    cameras = tuple(c.name for c in description.cameras)
    data = _read(flags, cameras)
    if data.classes != description.classes:
        theirs, ours = ", ".join(data.classes), ", ".join(description.classes)
        raise ConfigError(
            f"the data have the classes {theirs}, the classifier {ours}. Label the frames with its classes"
        )
    if (found_specs := camera_specs(data.episodes, cameras)) != description.cameras:
        sizes = [", ".join(f"{c.name} {c.height}x{c.width}" for c in of) for of in (found_specs, description.cameras)]
        raise ConfigError(
            f"{flags.data[0]}: frames are {sizes[0]}, the classifier looks at {sizes[1]}. Train another one"
        )
    found = training.judge(description, weights, data, threshold=description.threshold)
    print(f"tested on {_contents(data)}")
    print("\n".join([*report.summary_lines(found), *report.table_lines(found)]))
    out = folder if flags.out is None else Path(flags.out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    print("wrote " + ", ".join(map(str, report.write_report(out, "test", found))))
    return 0


def _encoder_of(flags: argparse.Namespace) -> tuple[EncoderConfig, str]:
    """Return the encoder's settings, and the file of its pretrained weights or an empty text."""
    from serl_chunk.classifier.model import HIL_SERL, SMALL

    if flags.weights is not None and flags.exp_name is not None:
        raise ConfigError("--exp_name has an encoder of its own. Give it, or --weights", parameter="weights")
    if flags.weights is not None:
        return HIL_SERL, flags.weights
    if flags.exp_name is None:
        return SMALL, ""
    encoder = load(flags.exp_name, []).agent.encoder
    plain: dict[str, Any] = {"state_latent": 0, "trained_by": "each", "cache_features": False, "weights": ""}
    if encoder.frozen_backbone and not encoder.weights:
        text = "freezes an encoder without pretrained weights. Set agent.encoder.weights in it, or give --weights"
        raise ConfigError(f"{flags.exp_name}: {text}", parameter="exp_name")
    return dataclasses.replace(encoder, **plain), encoder.weights


def _read(flags: argparse.Namespace, cameras: tuple[str, ...]) -> Labelled:
    """Read all data, and print what the user should see of them."""
    from serl_chunk.classifier import dataset

    for name in ("positives", "ignored"):
        least = name == "positives"
        require(getattr(flags, name) >= least, name, f"must be at least {int(least)}, got {getattr(flags, name)}")
    labelling = dataset.Labelling(flags.positives, flags.ignored)
    success = True if flags.success else False if flags.failure else None
    options = ReadOptions(cameras=cameras, color=flags.color, success=success)
    condition = None if flags.condition is None else load(flags.condition, []).outcome.condition
    if flags.condition is not None and condition is None:
        raise ConfigError(f"experiment {flags.condition} has no outcome.condition. Remove it", parameter="condition")
    known: set[str] = set()
    sets = []
    with shown_progress("reading") as progress:
        found = find_any(flags.data, flags.from_format)
        pickles = {p for p in found if flags.from_format is None and dataset.is_classifier_data(p)}
        # Frame labels lie in a folder, or next to a file that is given alone.
        together = itertools.groupby(found, lambda p: (p in pickles, p.parent if p.is_file() else p))
        sets_of = [[*paths] for _, paths in together]
        for i, paths in enumerate(sets_of):
            if paths[0] in pickles:
                sets += [dataset.read_classifier_data(path, cameras, bgr=flags.color == "bgr") for path in paths]
            else:
                source = open_paths(paths, options, flags.from_format, (FORMAT,))
                sets.append(dataset.read_source(source, cameras, labelling, known, condition))
            progress(i + 1, len(sets_of))
    data = dataset.joined(sets)
    for note in data.notes:
        print(f"note: {note}")
    require(bool(data.episodes), "data", "there is no episode in it")
    return data


def _contents(data: Labelled) -> str:
    success, other = data.count(positive=True), data.count(positive=False)
    return f"{plural(len(data.episodes), 'episode')} ({plural(success, 'frame')} of success, {other:,} of none)"
