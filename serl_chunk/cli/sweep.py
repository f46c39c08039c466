"""`serl-chunk sweep`: runs with several seeds and settings, each an ordinary command in a manifest."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import time
from pathlib import Path
from threading import Event

from serl_chunk.cli.fleet import add_engine, engine_options, open_engine
from serl_chunk.cli.process import load_flags
from serl_chunk.cli.training import check_flags, training_parser
from serl_chunk.config.fields import require
from serl_chunk.fleet.engines import Engine, Job
from serl_chunk.fleet.sweep import LocalJobs, Scheduler
from serl_chunk.io import folder_fault
from serl_chunk.logs import quiet_libraries
from serl_chunk.runs.folder import RUN_LOCK, lock_run
from serl_chunk.runs.sweep import Sweep, SweepRun, combinations, has_finished
from serl_chunk.signals import INTERRUPTED, exit_status, stop_on_signals
from serl_chunk.transport.wire.handshake import DEFAULT_PORT
from serl_chunk.types import ConfigError

LOCK = "sweep.lock"  # in a sweep's folder
ONE_ALONE = ("seed", "checkpoint_path", "spool_path", "dry_run", "coordinator", "process", "metrics_port", "viewer")
LOOK_S = 0.2  # between looks at the runs
SHOW_S = 30.0  # between lines of progress


def sweep_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `sweep`."""
    p.usage = "serl-chunk sweep --seeds 1-5 [--grid FIELD=A,B] --out DIR [--engine local|ray|slurm] [--jobs N] -- FLAGS"
    p.add_argument("--seeds", required=True, metavar="SEEDS", help="numbers and ranges, as 1-5 or 1,2,7-9")
    p.add_argument("--grid", action="append", default=[], metavar="FIELD=A,B",
                   help="values of a setting, as agent.lr=1e-4,3e-4; repeatable: all combinations")  # fmt: skip
    p.add_argument("--out", required=True, metavar="DIR", help="folder of the sweep, made or gone on with")
    p.add_argument("--jobs", type=int, metavar="N", help="runs at once at most (default: 1 with local, else all)")
    add_engine(p, default="local")


def _seeds(text: str) -> list[int]:
    parts = re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)
    ends = [[int(n) for n in part.split("-")] for part in text.split(",")] if parts else []
    seeds = list(dict.fromkeys(seed for end in ends for seed in range(end[0], end[-1] + 1)))
    require(bool(seeds), "seeds", f"got {text!r}, expected numbers and ranges, as 1-5 or 1,2,7-9")
    return seeds


def _grid(texts: list[str]) -> dict[str, list[str]]:
    grid: dict[str, list[str]] = {}
    for text in texts:
        field, _, values = text.partition("=")
        split = [value.strip() for value in re.split(r",(?![^(\[]*[)\]])", values)]  # not within brackets
        right = bool(field) and "" not in split and len(set(split)) == len(split)
        require(right, "grid", f"got {text!r}, expected FIELD=VALUE,VALUE with values that differ, none of them empty")
        require(field not in grid, "grid", f"{field} is given twice. Give all of its values at once")
        grid[field] = split
    return grid


def plan_of(flags: argparse.Namespace) -> Sweep:
    """Return the runs of a sweep, whose flags and settings are checked. Raises ConfigError."""
    seeds, grid, folder = _seeds(flags.seeds), _grid(flags.grid), Path(flags.out).expanduser()
    parser, runs = training_parser(), dict[str, SweepRun]()
    for values in combinations(grid):
        setting = ", ".join(f"{field}={value}" for field, value in values.items())
        changes = [f"--config.{field}={value}" for field, value in values.items()]
        own, own.rest = parser.parse_known_args([*flags.words, *changes])
        for name in ONE_ALONE:
            given = getattr(own, name) != parser.get_default(name)
            require(not given, name, "is not for all runs of a sweep. Remove it behind the --.")
        config = load_flags(own)
        mode = check_flags(parser, own, config)
        alone = mode == "l" and config.learner.online_steps != 0
        require(mode in "lob" and not alone, "learner",
            "each run of a sweep is a whole training. Give --local, --learner --actor, or --learner "
            "--online_steps 0 behind the --.")  # fmt: skip
        for seed in seeds:
            name = re.sub(r"[^\w.=+,-]+", "_", ",".join([*setting.split(", "), f"seed={seed}"]).lstrip(","))
            require(name not in runs, "grid", f"two settings would have the folder {name!r}. Give other values")
            where = ["--seed", str(seed), "--checkpoint_path", str(folder / name)]
            if mode == "b":  # what runs on one machine would else share
                port = (DEFAULT_PORT if own.port is None else own.port) + len(runs)
                where += ["--port", str(port), "--spool_path", str(folder / "spool" / name)]
            command = shlex.join(["serl-chunk", *flags.words, *changes, *where])
            runs[name] = SweepRun(setting, seed, command)
    return Sweep(seeds, grid, list(flags.words), runs)


def _busy(run: Path) -> bool:
    """Return whether a learner holds a run's folder, as one that ends after its launcher was killed."""
    try:
        with (run / RUN_LOCK).open("r+") as lock:
            lock_run(run, lock)
    except FileNotFoundError:
        return False
    except ConfigError:
        return True
    return False


def sweep_command(flags: argparse.Namespace) -> int:
    """Run what is left of a sweep; returns 1 where runs failed. Raises ConfigError."""
    quiet_libraries()
    require(flags.jobs is None or flags.jobs >= 1, "jobs", f"must be at least 1 run, got {flags.jobs}")
    options = engine_options(flags)
    sweep, folder = plan_of(flags), Path(flags.out).expanduser()
    try:
        sweep.write(folder)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(folder_fault(folder, error), parameter="out") from error
    with lock:
        lock_run(folder, lock, " or await its end", parameter="out", holder="sweep")
        return _run(sweep, folder, flags, options)


def _run(sweep: Sweep, folder: Path, flags: argparse.Namespace, options: dict[str, object]) -> int:
    local, engine = LocalJobs(), flags.engine

    @functools.cache
    def opened(name: str, place: Path) -> Engine:
        return open_engine(engine, name, place, options)

    def engine_of(name: str) -> Engine:
        # A folder of Slurm's engine has the states of one submission.
        place = folder / "jobs" / name if engine == "slurm" else folder
        return local if engine == "local" else opened(str(folder.resolve()), place)

    jobs = [Job(name, run.arguments, str(Path.cwd())) for name, run in sweep.runs.items()]
    scheduler = Scheduler(
        jobs, engine_of, at_once=flags.jobs or (1 if engine == "local" else len(jobs)),
        finished=lambda name: has_finished(folder / name),
        busy=lambda name: _busy(folder / name), show=functools.partial(print, flush=True),
    )  # fmt: skip
    stop, shown_at = Event(), time.monotonic()
    stop_on_signals(stop, "its runs end with a checkpoint")
    print(f"sweep {folder}: {scheduler.progress()[0]}", flush=True)
    stopped = False
    while scheduler.step():
        if stop.is_set() and not stopped:
            stopped = True
            scheduler.stop()
        if time.monotonic() - shown_at > SHOW_S:
            shown_at = time.monotonic()
            print("\n".join(scheduler.progress()), flush=True)
        time.sleep(LOOK_S)
    print(f"sweep {folder}: {scheduler.progress()[0]}")
    if scheduler.failed:
        print(f"failed: {'; '.join(scheduler.failed)}")
    if scheduler.failed or scheduler.waiting:
        print("the same command goes on with what is left")
    print(f"its report: serl-chunk report {folder}")
    return exit_status(INTERRUPTED) if stop.is_set() else int(bool(scheduler.failed))
