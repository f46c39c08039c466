"""`serl-chunk data export`: episodes of a run, from its journal, also while the run goes on."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from serl_chunk.cli.data.convert import check_target, write_data_set
from serl_chunk.cli.data.options import TARGETS, add_writing, parse_cameras
from serl_chunk.data.convert.manifest import NAME
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.demos import RunDemos
from serl_chunk.runs.episodes import RunSource, is_run
from serl_chunk.types import ConfigError, Outcome
from serl_chunk.types import Source as Acted

ONLY = ("success", "interventions")
_HEAD = 3  # lines of a manifest among which the list of its episodes is


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    p = commands.add_parser(
        "export",
        help="a run's episodes, also while it goes on",
        description="Write the episodes that a run has recorded, as its journal has them, as a data set. Nothing of "
        "the run is changed, and its learner may be at work: what is recorded later is for another export. --resume "
        "continues after an interruption at any moment, with the episodes that were there when it began.",
        allow_abbrev=False,
    )
    p.add_argument("path", metavar="RUN", help="a run folder")
    p.add_argument("--format", dest="to", required=True, choices=TARGETS, help="to write; lerobot is v3.0")
    p.add_argument(
        "--store", choices=("online", "demo"), default="online",
        help="what its actors recorded, or the demonstrations it was started with (default: online)",
    )  # fmt: skip
    p.add_argument("--only", choices=ONLY, help="successful episodes, or those in which a human acted (default: all)")
    p.add_argument("--cameras", metavar="A,B", help="whose frames are exported: names, all, or none (default: all)")
    p.add_argument("--task", default="", help="text of the task where the run recorded none")
    add_writing(p)
    p.set_defaults(run=run_export)


def run_export(flags: argparse.Namespace) -> int:
    """Export, and return the exit status. Raises ConfigError, DataError."""
    run = Path(flags.path).expanduser()
    if not is_run(run):
        raise ConfigError(f"{run} is not a run folder. `serl-chunk data convert` reads files and data sets")
    check_target(flags)
    options = ReadOptions(cameras=parse_cameras(flags.cameras), task=flags.task)
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
    return write_data_set(flags, options, source, keys, notes)


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
        with (folder / NAME).open() as file:
            for line in itertools.islice(file, _HEAD):
                if (entry := json.loads(line))["kind"] == "keys":
                    return [str(key) for key in entry["keys"]]
    except (OSError, ValueError, LookupError, TypeError):  # the conversion itself raises what is wrong there
        pass
    return None
