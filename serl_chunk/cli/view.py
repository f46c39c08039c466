"""`serl-chunk view`: the episodes of a run, file or folder in a browser, or as one page, or for Foxglove."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path

from serl_chunk.cli.data.options import add_reading, keys_of, open_any, options_of, shown_progress
from serl_chunk.config.fields import require
from serl_chunk.data.source import ReadOptions, Source
from serl_chunk.runs.metrics import METRICS_FILE
from serl_chunk.types import ConfigError
from serl_chunk.viz.local_server import LocalServer


def view_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Look at the episodes of a run, file or folder in a browser of this machine: list and filter all of them, "
        "play cameras, curves, Q and interventions, and label them as success, failure or discarded. Of a run, "
        "also its curves, as they grow. The address holds a secret; other machines cannot connect."
    )
    add_reading(p)
    p.add_argument("--port", type=int, default=0, metavar="N", help="of this machine, 0 for a free one (default: 0)")
    p.add_argument("--out", metavar="FILE", help="write one page that needs no viewer, and end")
    p.add_argument("--size_mb", type=float, metavar="MB", help="largest size of that page (default: 50)")
    p.add_argument(
        "--mcap", metavar="FILE", help="write one episode for Foxglove, and end (pip install 'serl-chunk[viz]')"
    )
    p.add_argument("--episodes", metavar="N,M-K", help="numbers of the episodes that --out or --mcap write")


def view_command(flags: argparse.Namespace) -> int:
    """Serve the viewer until Ctrl-C, or write a file. Raises ConfigError and DataError."""
    if flags.out is not None and flags.mcap is not None:
        raise ConfigError("--out and --mcap write one file each. Give one of them")
    if flags.out is None and flags.size_mb is not None:
        raise ConfigError("is for --out. Remove it, or add --out FILE", parameter="size_mb")
    if flags.out is None and flags.mcap is None and flags.episodes is not None:
        raise ConfigError("is for --out and --mcap. The viewer lists all of them", parameter="episodes")
    options = dataclasses.replace(options_of(flags), labels=False)
    run = Path(flags.path[0]).expanduser()
    served = flags.out is None and flags.mcap is None and flags.from_format is None
    if served and len(flags.path) == 1 and (run / METRICS_FILE).is_file():
        return _serve_run(run, options, flags.port)
    source = open_any(flags.path, options, flags.from_format)
    if not source.keys():
        raise ConfigError(f"{source.path}: has no episode yet ({source.format})")
    if flags.mcap is not None:
        return _write_mcap(flags, source)
    if flags.out is not None:
        return _write_page(flags, source)
    return _serve(source, _listing(flags, options, source), flags.port)


def _listing(flags: argparse.Namespace, options: ReadOptions, source: Source) -> Source | None:
    """Return the source without cameras where that makes a list cheaper to gather."""
    if source.format not in ("episodes", "lerobot"):
        return None
    return open_any(flags.path, dataclasses.replace(options, cameras=()), flags.from_format)


def _serve_run(run: Path, options: ReadOptions, port: int) -> int:
    from serl_chunk.viewer.run_page import RunPage

    with contextlib.closing(RunPage(run, port, options=options)) as page:
        _until_interrupted(page, f"{page.url}\nwith run/ behind it: the run's curves")
    return 0


def _serve(source: Source, listing: Source | None, port: int) -> int:
    from serl_chunk.viewer.server import Viewer

    with contextlib.closing(Viewer(source, listing, port)) as viewer:
        viewer.pages.catalogue.start()
        _until_interrupted(viewer, viewer.url)
    return 0


def _until_interrupted(server: LocalServer, address: str) -> None:
    print(f"{address}\nopen this address on this machine; Ctrl-C ends the viewer", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("viewer ended")


def _write_page(flags: argparse.Namespace, source: Source) -> int:
    from serl_chunk.viewer.export import PAGE_BYTES, write_page

    size_mb = PAGE_BYTES / 1e6 if flags.size_mb is None else flags.size_mb
    require(0.1 <= size_mb <= 2000, "size_mb", f"must be 0.1..2000, got {size_mb:g}")
    numbers = [source.keys().index(key) for key in keys_of(source, flags.episodes)]
    with shown_progress("writing") as progress:
        written = write_page(Path(flags.out).expanduser(), source, numbers, int(size_mb * 1e6), progress)
    print(written)
    return 0


def _write_mcap(flags: argparse.Namespace, source: Source) -> int:
    from serl_chunk.viewer.foxglove import write_mcap

    keys = keys_of(source, flags.episodes)
    if len(keys) != 1:
        text = (
            f"--mcap writes one episode, and {source.path} has {len(keys)}"
            if flags.episodes is None
            else (f"names {len(keys)} episodes")
        )
        raise ConfigError(f"{text}. Give the number of one", parameter="episodes")
    print(write_mcap(Path(flags.mcap).expanduser(), source.read(keys[0]), source.hz))
    return 0
