"""`serl-chunk data export`: episodes of a run, from its journal, also while the run goes on."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serl_chunk.cli.data.convert import run_convert
from serl_chunk.cli.data.options import TARGETS, add_writing, options_of
from serl_chunk.data.convert.manifest import NAME
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.demos import RunDemos
from serl_chunk.runs.episodes import RunSource, is_run
from serl_chunk.types import ConfigError, Episode, Outcome
from serl_chunk.types import Source as Acted

ONLY = ("success", "interventions")
_HEAD = 3  # lines of a manifest among which the list of its episodes is


class SelectedEpisodes:
    """A `data.source.Source` of some of a run's episodes, with notes on the choice."""

    def __init__(self, source: RunSource | RunDemos, keys: list[str], notes: Sequence[str] = ()) -> None:
        self._source, self._keys, self._notes = source, keys, notes
        self.format: str = source.format
        self.path, self.hz, self.spec = source.path, source.hz, source.spec

    def keys(self) -> list[str]:
        return list(self._keys)

    def read(self, key: str) -> Episode:
        return self._source.read(key)

    def notes(self) -> list[str]:
        return [*self._source.notes(), *self._notes]


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
        "--store",
        choices=("online", "demo"),
        default="online",
        help="what its actors recorded, or the demonstrations it was started with (default: online)",
    )
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
    not_given = {
        "from_format": None, "exp_name": None, "color": None, "hz": None, "success": False, "failure": False,
        "scores": None, "reward_every_step": False, "env": "", "proportion": 1.0,
        "episodes": None, "max_samples": None, "tolerance_s": None,
    }  # fmt: skip
    full = argparse.Namespace(**(not_given | vars(flags)))
    full.path = selected_episodes(run, options_of(full), flags.store, flags.only, Path(flags.out), flags.resume)
    return run_convert(full)


def selected_episodes(
    run: Path, options: ReadOptions, store: str, only: str | None, out: Path, resume: bool
) -> SelectedEpisodes:
    """Return the episodes to export: of a resumed export, those that there were when it began. Raises ConfigError."""
    source: RunSource | RunDemos = RunSource(run, options) if store == "online" else RunDemos(run, options)
    keys, notes = source.keys(), []
    whole = len(keys)
    if only is not None:
        keys = [key for key in keys if _is(source, key, only)]
        notes.append(f"{len(keys)} of {whole} episodes are chosen by --only {only}")
    if not keys:
        filtered = f", none by --only {only}" if only else ""
        raise ConfigError(f"{run}: no episode to export ({whole} in store {store}{filtered})")
    if resume and (begun := keys_begun_with(out.expanduser())) is not None:
        if newer := len(set(keys) - set(begun)):
            notes.append(f"{newer} episodes ended after this export began: export them into another folder")
        keys = begun
    return SelectedEpisodes(source, keys, notes)


def _is(source: RunSource | RunDemos, key: str, only: str) -> bool:
    if isinstance(source, RunSource):
        about = source.about(key)
        outcome, human = about.outcome, about.human_steps
    else:
        episode = source.read(key)
        outcome, human = episode.end.outcome, int((episode.steps.source == Acted.HUMAN).sum())
    return outcome is Outcome.SUCCESS if only == "success" else human > 0


def keys_begun_with(folder: Path) -> list[str] | None:
    """Return the episodes with which the export in `folder` began, dropped ones included; None for no export."""
    try:
        with (folder / NAME).open() as file:
            for line in itertools.islice(file, _HEAD):
                if (entry := json.loads(line))["kind"] == "keys":
                    return [str(key) for key in entry["keys"]]
    except (OSError, ValueError, LookupError, TypeError):  # the conversion itself raises what is wrong there
        pass
    return None
