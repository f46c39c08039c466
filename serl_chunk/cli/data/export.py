"""`serl-chunk data export`: the episodes of a run, out of its journal, also while the run goes on."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serl_chunk.cli.data.convert import TARGETS, run_convert
from serl_chunk.cli.data.options import options_of
from serl_chunk.data.convert.manifest import NAME
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.demos import RunDemos
from serl_chunk.runs.episodes import RunSource, is_run
from serl_chunk.types import ConfigError, Episode, Outcome
from serl_chunk.types import Source as Acted

ONLY = ("success", "interventions")
_HEAD = 3  # lines of a manifest among which the list of its episodes is


class SelectedEpisodes:
    """See `data.source.Source`: some of a run's episodes, and what is to be said of the choice."""

    def __init__(self, source: RunSource | RunDemos, keys: list[str], said: Sequence[str] = ()) -> None:
        self._source, self._keys, self._said = source, keys, said
        self.format: str = source.format
        self.path, self.hz, self.spec = source.path, source.hz, source.spec

    def keys(self) -> list[str]:
        """See Source."""
        return list(self._keys)

    def read(self, key: str) -> Episode:
        """See Source."""
        return self._source.read(key)

    def notes(self) -> list[str]:
        """See Source."""
        return [*self._source.notes(), *self._said]


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    p = commands.add_parser(
        "export",
        help="a run's episodes, also while it goes on",
        description="Write the episodes that a run has recorded, as its journal has them, as a data set. Nothing of "
        "the run is touched, and its learner may be at work: what is recorded later is for another export. --resume "
        "continues after an interruption at any moment, with the episodes that were there when it began.",
        allow_abbrev=False,
    )
    p.add_argument("path", metavar="RUN", help="a run folder")
    p.add_argument("--format", dest="to", required=True, choices=TARGETS, help="to write; lerobot is v3.0")
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the data set: new, empty, or with --resume")
    p.add_argument(
        "--store",
        choices=("online", "demo"),
        default="online",
        help="what its actors recorded, or the demonstrations it was started with (default: online)",
    )
    p.add_argument("--only", choices=ONLY, help="successful episodes, or those in which a human acted (default: all)")
    p.add_argument("--cameras", metavar="A,B", help="whose frames are exported: names, all, or none (default: all)")
    p.add_argument("--task", default="", help="text of the task where the run recorded none")
    p.add_argument("--mode", choices=("image", "video"), help="lerobot: how frames are kept (default: image)")
    p.add_argument("--image_codec", choices=("png", "jpeg"), help="lerobot images: png (default) or jpeg")
    p.add_argument("--compress", action="store_true", help="hdf5: gzip the frames, lossless and slower")
    p.add_argument("--resume", action="store_true", help="continue the export in DIR, if there is one")
    p.add_argument(
        "--skip-bad", "--skip_bad", dest="skip_bad", action="store_true",
        help="leave out what cannot be read, or was dropped by the learner meanwhile, and list it at the end",
    )  # fmt: skip
    p.add_argument("--workers", type=int, metavar="N", help="processes that read and encode (default: the cores)")
    p.add_argument("--repo_id", metavar="USER/NAME", help="name of the data set on the Hugging Face hub")
    p.add_argument("--push_to_hub", action="store_true", help="upload it to --repo_id when it is complete")
    p.set_defaults(run=run_export)


def run_export(flags: argparse.Namespace) -> int:
    """Export as the flags say; returns the exit status. Raises ConfigError, DataError."""
    run = Path(flags.path).expanduser()
    if not is_run(run):
        raise ConfigError(f"{run} is not a run folder; `serl-chunk data convert` reads files and data sets")
    what_files_do_not_say = {
        "from_format": None, "exp_name": None, "color": None, "hz": None, "success": False, "failure": False,
        "scores": None, "reward_every_step": False, "env": "", "proportion": 1.0,
        "episodes": None, "max_samples": None, "tolerance_s": None,
    }  # fmt: skip
    full = argparse.Namespace(**(what_files_do_not_say | vars(flags)))
    full.path = selected_episodes(run, options_of(full), flags.store, flags.only, Path(flags.out), flags.resume)
    return run_convert(full)


def selected_episodes(
    run: Path, options: ReadOptions, store: str, only: str | None, out: Path, resume: bool
) -> SelectedEpisodes:
    """The episodes to export: of a resumed export, those that there were when it began. Raises ConfigError."""
    source: RunSource | RunDemos = RunSource(run, options) if store == "online" else RunDemos(run, options)
    keys, said = source.keys(), []
    whole = len(keys)
    if only is not None:
        keys = [key for key in keys if _is(source, key, only)]
        said.append(f"{len(keys)} of {whole} episodes are chosen by --only {only}")
    if not keys:
        raise ConfigError(
            f"{run}: no episode to export ({whole} in store {store}" + (f", none by --only {only})" if only else ")")
        )
    if resume and (begun := restore_task(out.expanduser())) is not None:
        if newer := len(set(keys) - set(begun)):
            said.append(f"{newer} episodes ended after this export began: export them into another folder")
        keys = begun
    return SelectedEpisodes(source, keys, tuple(said))


def _is(source: RunSource | RunDemos, key: str, only: str) -> bool:
    if isinstance(source, RunSource):
        about = source.about(key)
        outcome, human = about.outcome, about.human_steps
    else:
        episode = source.read(key)
        outcome, human = episode.end.outcome, int((episode.steps.source == Acted.HUMAN).sum())
    return outcome is Outcome.SUCCESS if only == "success" else human > 0


def restore_task(folder: Path) -> list[str] | None:
    """The episodes that the export in `folder` began with, also those the run has dropped since; None for no export."""
    try:
        with (folder / NAME).open() as file:
            for line in itertools.islice(file, _HEAD):
                if (entry := json.loads(line))["kind"] == "keys":
                    return [str(key) for key in entry["keys"]]
    except (OSError, ValueError, LookupError, TypeError):  # the conversion itself says what is wrong there
        pass
    return None
