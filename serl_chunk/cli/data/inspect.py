"""`serl-chunk data inspect`, `data check` and `data stats`: the content of episodes, its faults and statistics."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path

from serl_chunk.cli.data.options import add_reading, open_any, options_of, shown_progress
from serl_chunk.cli.doctor.checks import require_free
from serl_chunk.cli.process import load
from serl_chunk.config.fields import require
from serl_chunk.data.inspect.results import DEPARTURE, InspectionReport, Issue, summary_lines
from serl_chunk.data.normalise import chunk_statistics
from serl_chunk.data.normalise.robot_units import UNITS
from serl_chunk.data.source import Source
from serl_chunk.io import plural
from serl_chunk.types import ConfigError

DRAWN = 10  # episodes with findings on the page of --plot
SHOWN = 5  # findings of one kind on the screen; --json has all


def inspect_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `inspect`."""
    p.description = (
        "One screen about episodes of any format: lengths, rates, dimensions, cameras, rewards, who acted, gaps in "
        "time, constant and clipped dimensions, frozen cameras, jumps. Exit status 1 on broken data."
    )
    _add_looking(p)
    plot = "write the page of `serl-chunk view --out`: first, shortest, longest, and those with findings"
    p.add_argument("--plot", metavar="FILE", help=plot)


def check_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `check`."""
    p.description = (
        "One line for each fault and each departure from the conventions of LeRobot's data sets, and a last line that "
        "sums up. Exit status 1 where there is a fault."
    )
    _add_looking(p)


def _add_looking(p: argparse.ArgumentParser) -> None:
    add_reading(p)
    p.add_argument("--max_episodes", type=int, metavar="N", help="look at the first N episodes only")
    p.add_argument("--all_frames", action="store_true", help="decode every image, not a few of each episode")
    p.add_argument("--horizon", type=int, metavar="H", help="name episodes shorter than H (default: --exp_name's)")
    p.add_argument("--json", metavar="FILE", help="also write everything there")
    p.add_argument("--strict", action="store_true", help="remarks are faults too")


def stats_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `stats`."""
    p.description = "Mean, std and the exact quantiles 0.01 and 0.99 of states and action chunks, in openpi's layout."
    add_reading(p)
    p.add_argument("--out", metavar="FILE|DIR", help="a .json file, or the folder of norm_stats.json (default: none)")
    actions = "as recorded, or minus the state at the chunk's start (default: absolute)"
    p.add_argument("--actions", choices=("absolute", "delta"), default="absolute", help=actions)
    mask = "delta: N dimensions are differences, M are not, ...; ALOHA: 6,-1,6,-1 (default: --exp_name's joints)"
    p.add_argument("--mask", metavar="N,-M,...", help=mask)
    horizon = "actions of a chunk, the last one repeated at an episode's end (default: --exp_name's, or 1 for absolute)"
    p.add_argument("--horizon", type=int, metavar="H", help=horizon)
    robot = "convert to the units of openpi's models for that robot (default: %(default)s), see normaliser.robot"
    p.add_argument("--robot", choices=tuple(UNITS), default="none", help=robot)
    p.add_argument("--max_samples", type=int, metavar="N", help="of N steps drawn at random (default: all)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of that draw (default: 0)")
    floor = "least std, so that a dimension that never moves does not explode (default: %(default)s)"
    p.add_argument("--std_floor", type=float, default=chunk_statistics.STD_FLOOR, metavar="X", help=floor)


def inspect_command(flags: argparse.Namespace) -> int:
    """Print the screen, and return 1 where there is a fault."""
    from serl_chunk.viewer.export import PAGE_BYTES, check_absent, write_page

    if flags.plot is not None:
        check_absent(Path(flags.plot).expanduser(), "plot")
    source, findings = _inspect(flags)
    _show(findings)
    if flags.plot is not None and findings.episodes:
        with shown_progress("drawing") as progress:
            print(write_page(Path(flags.plot).expanduser(), source, _drawn(findings), PAGE_BYTES, progress))
    return _status(findings, flags.strict)


def check_command(flags: argparse.Namespace) -> int:
    """Print faults and a summary, a line each, and return 1 where there is a fault."""
    _, findings = _inspect(flags)
    bad = findings.findings if flags.strict else findings.faults
    for finding in findings.findings:
        if finding in bad or finding.kind == DEPARTURE:
            print(f"{finding.kind}: {finding.text}")
    status = _status(findings, flags.strict)
    others = "" if flags.strict else f", {plural(len(findings.remarks), 'remark')}"
    print(
        f"{findings.path}: {'BAD' if status else 'good'}: {plural(len(bad), 'fault')}{others} in "
        f"{plural(findings.looked_at, 'episode')}, {plural(findings.steps, 'step')}"
        + ("" if flags.all_frames else "; of images, a few frames of each (--all_frames decodes them all)")
    )
    return status


def _show(findings: InspectionReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for `main`, which ends all commands alike

    console = Screen(highlight=False)
    console.print(Text(f"{findings.path}: {findings.format}", style="bold"), soft_wrap=True)
    rows = summary_lines(findings)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(Text(name), Text(text))
        console.print(table)
    else:  # in a file or a pipe a line is a line
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"{name:{width}}  {text}")
    for note in findings.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for kind, group in itertools.groupby(sorted(findings.findings, key=_order), key=_order):
        some: list[Issue] = list(group)
        style = "bold red" if some[0].severity == "fault" else "yellow"
        for finding in some[:SHOWN]:
            line = Text.assemble((f"{finding.severity} ({finding.kind})", style), f": {finding.text}")
            console.print(line, soft_wrap=True)
        if len(some) > SHOWN:
            console.print(Text(f"... and {len(some) - SHOWN} more of this kind ({kind[1]}); --json FILE has all"))
    faults, remarks = plural(len(findings.faults), "fault"), plural(len(findings.remarks), "remark")
    console.print(Text(f"{faults}, {remarks}", style="bold red" if findings.faults else "bold green"))


def _inspect(flags: argparse.Namespace) -> tuple[Source, InspectionReport]:
    from serl_chunk.data.inspect.inspect import inspect

    for name in ("max_episodes", "horizon"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise ConfigError(f"must be at least 1, got {getattr(flags, name)}", parameter=name)
    if flags.json is not None:
        require_free("json", flags.json)
    options = options_of(flags)
    source = open_any(flags.path, options, flags.from_format)
    with shown_progress("reading") as progress:
        some = {"max_episodes": flags.max_episodes, "all_frames": flags.all_frames}
        findings = inspect(source, spec=options.spec, horizon=_horizon_of(flags), progress=progress, **some)
    if flags.json is not None:
        Path(flags.json).write_text(json.dumps(findings.to_json(), indent=2) + "\n")
    return source, findings


def _horizon_of(flags: argparse.Namespace) -> int | None:
    """Return `--horizon`, else the actions of a training window of `--exp_name`, else None."""
    if flags.horizon is not None or flags.exp_name is None:
        return flags.horizon
    return load(flags.exp_name, []).chunk.carried


def _drawn(findings: InspectionReport) -> list[int]:
    """Numbers of the episodes that are drawn: the first, the shortest, the longest, and those with findings."""
    lengths = [episode.length for episode in findings.episodes]
    named = {finding.episode for finding in findings.findings}
    some = [i for i, episode in enumerate(findings.episodes) if episode.key in named][:DRAWN]
    return sorted({0, lengths.index(min(lengths)), lengths.index(max(lengths)), *some})


def _status(findings: InspectionReport, strict: bool) -> int:
    return 1 if findings.faults or (strict and findings.remarks) else 0


def _order(finding: Issue) -> tuple[bool, str]:
    return finding.severity != "fault", finding.kind


def stats_command(flags: argparse.Namespace) -> int:
    """Print the table, write the file, and return 0."""
    options = dataclasses.replace(options_of(flags), cameras=())
    require(flags.seed >= 0, "seed", f"must be at least 0, got {flags.seed}")
    require(0 < flags.std_floor < math.inf, "std_floor", f"must be positive and finite, got {flags.std_floor:g}")
    mask = None if flags.mask is None else chunk_statistics.parse_mask(flags.mask)
    if mask is not None and flags.actions == "absolute":
        raise ConfigError("names the actions that are differences. Add --actions delta, or remove it", parameter="mask")
    horizon = _horizon_of(flags)
    if horizon is None and flags.actions == "delta":
        raise ConfigError("delta actions depend on the length of a chunk. Give --horizon (pi0: 50), or --exp_name")
    joints = chunk_statistics.joints_of(mask, options.spec) if flags.actions == "delta" else ()
    horizon = 1 if horizon is None else horizon
    what = chunk_statistics.StatsRequest(
        flags.actions, joints, horizon, flags.max_samples, flags.seed, flags.std_floor, flags.robot
    )
    with shown_progress("reading") as progress:
        computed = chunk_statistics.compute(open_any(flags.path, options, flags.from_format), what, progress)
    _show_stats(computed)
    if flags.out is not None:
        vectors = {name: m.stats for name, m in computed.vectors.items()}
        print(f"wrote {chunk_statistics.write_norm_stats(flags.out, vectors, computed.note())}")
    return 0


def _show_stats(computed: chunk_statistics.StatsResult) -> None:
    """Print the table, a row for each dimension, and which dimensions were changed."""
    what = computed.what
    of = f"all {computed.steps:,} steps"
    if computed.samples < computed.steps:
        of = f"{computed.samples:,} of {computed.steps:,} steps (seed {what.seed})"
    print(f"{of} of {computed.episodes:,} episodes; {what.actions} actions, chunks of {what.horizon}")
    print(" " * 12 + "".join(f"{name:>10}" for name in ("mean", "std", "q01", "q99", "min", "max")))
    for name, m in computed.vectors.items():
        assert m.stats.q01 is not None
        assert m.stats.q99 is not None
        columns = (m.stats.mean, m.stats.std, m.stats.q01, m.stats.q99, m.moments.low, m.moments.high)
        for d in range(len(m.stats.mean)):
            delta = name == "actions" and d < len(what.joints) and what.joints[d] >= 0
            notes = ["delta"] * delta + ["floored"] * (d in m.std_floored) + ["widened"] * (d in m.quantiles_widened)
            row = f"{f'{name} {d}':12}" + "".join(f"{c[d]:10.4g}" for c in columns)
            print(row + ("  " + " ".join(notes) if notes else ""))
    for name, m in computed.vectors.items():
        if m.std_floored:
            was = ", ".join(f"{d} ({m.moments.std[d]:.2g})" for d in m.std_floored)
            print(f"{name}: std raised to {what.std_floor:g} in dimension {was}")
        if m.quantiles_widened:
            listed = ", ".join(map(str, m.quantiles_widened))
            print(f"{name}: q01 and q99 almost equal, moved apart in dimension {listed}")
