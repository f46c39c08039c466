"""`serl-chunk data inspect` and `serl-chunk data check`: the content of episodes, and its faults."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from serl_chunk.cli.data.options import add_reading, open_any, options_of, shown_progress
from serl_chunk.data.inspect.results import InspectionReport, Issue, summary_lines
from serl_chunk.data.source import Source
from serl_chunk.io import format_bytes, os_reason, plural
from serl_chunk.types import ConfigError

SHOWN = 5  # findings of one kind on the screen; --json has all


def add_parsers(commands: Any) -> None:
    """Add this module's commands."""
    inspect = commands.add_parser(
        "inspect",
        help="what is in these episodes, on one screen; exit status 1 where something is wrong",
        description="One screen about episodes of any format: lengths, rates, dimensions, cameras, rewards, who acted, "
        "gaps in time, constant and clipped dimensions, frozen cameras, jumps. Exit status 1 on broken data.",
        allow_abbrev=False,
    )
    inspect.set_defaults(run=run_inspect)
    check = commands.add_parser(
        "check",
        help="the same for machines: a line for each fault, exit status 1 where there is one",
        description="One line for each fault, and a last line that sums up. Exit status 1 where there is a fault.",
        allow_abbrev=False,
    )
    check.set_defaults(run=run_check)
    for p in (inspect, check):
        add_reading(p)
        p.add_argument("--max_episodes", type=int, metavar="N", help="look at the first N episodes only")
        p.add_argument("--all_frames", action="store_true", help="decode every image, not a few of each episode")
        p.add_argument("--horizon", type=int, metavar="H", help="name episodes shorter than H (default: --exp_name's)")
        p.add_argument("--json", metavar="FILE", help="also write everything there")
        p.add_argument("--strict", action="store_true", help="remarks are faults too")
    inspect.add_argument("--plot", metavar="DIR|FILE", help="write a page of trajectories and images: inspection.html")
    inspect.add_argument("--seed", type=int, default=0, help="of the episodes on that page that are drawn at random")


def run_inspect(flags: argparse.Namespace) -> int:
    """Print the screen, and return 1 where there is a fault."""
    page = _page_path(flags.plot)
    source, findings = _inspect(flags)
    show(findings)
    if page is not None:
        from serl_chunk.data.inspect.html import write_page

        with shown_progress("drawing") as progress:
            write_page(page, source, findings, seed=flags.seed, progress=progress)
        print(f"{page}: {format_bytes(page.stat().st_size)}, open it in a browser")
    return _status(findings, flags.strict)


def run_check(flags: argparse.Namespace) -> int:
    """Print faults and a summary, a line each, and return 1 where there is a fault."""
    _, findings = _inspect(flags)
    bad = findings.findings if flags.strict else findings.faults
    for finding in bad:
        print(f"{finding.kind}: {finding.text}")
    status = _status(findings, flags.strict)
    others = "" if flags.strict else f", {plural(len(findings.remarks), 'remark')}"
    print(
        f"{findings.path}: {'BAD' if status else 'good'}: {plural(len(bad), 'fault')}{others} in "
        f"{plural(findings.looked_at, 'episode')}, {plural(findings.steps, 'step')}"
        + ("" if flags.all_frames else "; of images, a few frames of each (--all_frames decodes them all)")
    )
    return status


def show(findings: InspectionReport) -> None:
    """Print the screen: a table of facts, then the findings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
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
        from serl_chunk.cli.doctor.checks import require_free

        require_free("json", flags.json)
    options = options_of(flags)
    source = open_any(flags.path, options, flags.from_format)
    with shown_progress("reading") as progress:
        findings = inspect(
            source,
            spec=options.spec,
            horizon=horizon_of(flags),
            max_episodes=flags.max_episodes,
            all_frames=flags.all_frames,
            progress=progress,
        )
    if flags.json is not None:
        Path(flags.json).write_text(json.dumps(findings.to_json(), indent=2) + "\n")
    return source, findings


def horizon_of(flags: argparse.Namespace) -> int | None:
    """Return `--horizon`, else the actions of a training window of `--exp_name`, else None."""
    if flags.horizon is not None or flags.exp_name is None:
        return flags.horizon
    from serl_chunk.cli.process import load

    return load(flags.exp_name, []).chunk.carried


def _page_path(plot: str | None) -> Path | None:
    """Return the page's file, whose folder exists; raises ConfigError before anything is read."""
    if plot is None:
        return None
    path = Path(plot).expanduser()
    path = path if path.suffix == ".html" else path / "inspection.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{plot}: {os_reason(error)}", parameter="plot") from error
    return path


def _status(findings: InspectionReport, strict: bool) -> int:
    return 1 if findings.faults or (strict and findings.remarks) else 0


def _order(finding: Issue) -> tuple[bool, str]:
    return finding.severity != "fault", finding.kind
