"""`serl-chunk report` and `rollback`: the report of runs, and the way back to an earlier policy version."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from serl_chunk.config.fields import require
from serl_chunk.logs import quiet_libraries
from serl_chunk.runs.sweep import SWEEP
from serl_chunk.types import ConfigError

PAGE_BYTES = 20_000_000  # of the viewer's page next to a report


def report_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `report`."""
    p.description = "Write report.html and report.png of a run, one page that compares several, or that of a sweep."
    p.add_argument("run", nargs="+", help="a run folder, or a sweep's; several runs are compared")
    p.add_argument("--out", metavar="FILE", help="of a comparison (default: report_vs_<others>.html in the first run)")
    p.add_argument(
        "--episodes", type=int, default=0, metavar="N",
        help="also write N training episodes, the newest and some from the first on, as a page of the viewer",
    )  # fmt: skip
    p.add_argument("--films", type=int, default=0, metavar="N", help="also film the newest N training episodes")


def report_command(flags: argparse.Namespace) -> int:
    """Write the page and print its path. Raises SerlChunkError."""
    sweep = len(flags.run) == 1 and (Path(flags.run[0]) / SWEEP).exists()
    if len(flags.run) > 1 or sweep:
        for name in ("films", "episodes"):
            require(not getattr(flags, name), name, "is for the report of one run. Remove it, or give one run")
        if sweep:
            from serl_chunk.runs.report.sweep import build_sweep_report

            require(
                flags.out is None, "out", "is for a comparison of runs; a sweep's report is in its folder. Remove it"
            )
            print(build_sweep_report(Path(flags.run[0])))
            return 0
        from serl_chunk.runs.report.report import build_comparison

        print(build_comparison(flags.run, flags.out))
        return 0
    if flags.out is not None or min(flags.films, flags.episodes) < 0:
        raise ConfigError("--out is for a comparison of runs, and --films and --episodes are 0 or more")
    if flags.episodes:
        write_episodes(Path(flags.run[0]), flags.episodes)
    if flags.films:
        from serl_chunk.runs.report.tables import film_training_episodes

        film_training_episodes(Path(flags.run[0]), flags.films)
    from serl_chunk.runs.report.report import build_report

    print(build_report(flags.run[0]))
    return 0


def write_episodes(run: Path, n: int) -> None:
    """Write the viewer's page of `n` training episodes: half of them the newest, the others from the first one on.

    Raises ConfigError (no journal) and DataError (no `metrics.jsonl`, or the page cannot be written).
    """
    from serl_chunk.io import atomic_write
    from serl_chunk.runs.episodes import RunSource
    from serl_chunk.runs.report.tables import EPISODES_IN_PAGE, EPISODES_PAGE, recorded_episodes
    from serl_chunk.viewer.export import write_page

    source = RunSource(run)
    found = recorded_episodes(run, source)  # the newest first
    newest, older = found[: n - n // 2], found[n - n // 2 :]
    spread = np.unique(np.linspace(0, len(older) - 1, min(n // 2, len(older))).round().astype(int))
    place = {key: i for i, key in enumerate(source.keys())}
    chosen = [(place[key], number) for key, number in (*newest, *(older[i] for i in spread))]
    page = run / EPISODES_PAGE
    page.unlink(missing_ok=True)
    print(write_page(page, source, [at for at, _ in chosen], PAGE_BYTES))
    entries = [{"number": number, "file": f"{EPISODES_PAGE}#{at}"} for at, number in chosen]
    atomic_write(run / EPISODES_IN_PAGE, json.dumps(entries))


def rollback_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `rollback`."""
    p.description = (
        "Let a run go on from an earlier policy version, after its learner was stopped. The checkpoints after it are "
        "moved aside, all recorded episodes stay, and the next snapshots have new versions."
    )
    p.add_argument("run", metavar="RUN", help="the run folder")
    p.add_argument("--to", type=int, metavar="VERSION", help="a policy version with a checkpoint (default: list them)")


def rollback_command(flags: argparse.Namespace) -> int:
    """Roll the run back, or print the versions that it can go back to; raises as `runs.checkpoints.roll_back`."""
    quiet_libraries()
    from serl_chunk.runs.checkpoints import kept_versions, roll_back

    run, version = Path(flags.run).expanduser(), flags.to
    if version is None:
        for kept, entry in kept_versions(run).items():
            print(f"policy version {kept}: checkpoint {entry.label}")
        return 0
    print(f"{run}: {roll_back(run, version)}")
    print(
        f"Start the learner with --checkpoint_path {run}: it publishes these parameters under a new version. "
        "Restart an actor with actor.gate=canary: otherwise that version earns the robot like any other."
    )
    return 0
