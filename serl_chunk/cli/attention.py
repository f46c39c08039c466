"""`serl-chunk attention fit` and `attention test`: an alarm on a fall of Q from recorded episodes, and its figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from serl_chunk.attention.alarm import Alarm, FittedRun
from serl_chunk.attention.fit import Figures, Trace, fit, judge, trace_of
from serl_chunk.cli.data.options import find_any, shown_progress
from serl_chunk.config.fields import require
from serl_chunk.data.source import ReadOptions
from serl_chunk.io import atomic_write, os_faults, plural
from serl_chunk.runs.episodes import FORMAT, RunSource
from serl_chunk.runs.folder import read_config
from serl_chunk.types import ConfigError, DataError

_COUNTS = (
    "Of an episode counts what the policy did before the first human tick, and an episode in which a human intervened "
    "is a failure. Episodes that were stopped are left out."
)


class ReadRun(RunSource):
    """A run without its frames, and the traces of its episodes."""

    def __init__(self, text: str) -> None:
        super().__init__(Path(text).expanduser(), ReadOptions(cameras=()))
        self.fitted = FittedRun(text, str(read_config(self.path).get("run_id", "")))

    def traces(self) -> list[Trace]:
        """Return what counts of its episodes; prints how many do not count."""
        keys = self.keys()
        hz = self.spec.control_hz
        found = []
        with shown_progress(f"reading {self.path}") as progress:
            for i, key in enumerate(keys):
                found.append(trace_of(key, self.read(key), hz))
                progress(i + 1, len(keys))
        traces = [trace for trace in found if trace is not None]
        failed, human = sum(trace.failed for trace in traces), sum(trace.by_human for trace in traces)
        print(
            f"{self.path}: {_successes(len(traces) - failed)}, {plural(failed, 'failure')} "
            f"({plural(human, 'intervention')})"
        )
        if left_out := len(found) - len(traces):
            print(f"  left out: {plural(left_out, 'episode')} without decisions, or whose outcome is unknown")
        return traces


def fit_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `fit`."""
    p.description = f"Chooses the fall of Q above which the alarm is raised. {_COUNTS}"
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder; its learner may be writing it")
    p.add_argument("--out", required=True, metavar="FILE", help="file to write, for operator.attention")
    wanted = "share of successful episodes that may have an alarm (default: %(default)s)"
    p.add_argument("--false_alarms", type=float, default=0.05, metavar="P", help=wanted)


def test_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of `test`."""
    p.description = f"An alarm is true in an episode that fails, and false in one that succeeds. {_COUNTS}"
    p.add_argument("file", metavar="FILE", help="of `serl-chunk attention fit`")
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folder; its learner may be writing it")
    p.add_argument("--fitted", action="store_true", help="also test on runs that it was fitted on")
    p.add_argument("--json", metavar="FILE", help="also write the figures there")


def fit_command(flags: argparse.Namespace) -> int:
    """Fit, write the file, print the figures, and return 0."""
    wanted = flags.false_alarms
    require(0 <= wanted < 1, "false_alarms", f"must lie in [0, 1), got {wanted:g}")
    runs = _opened(flags.runs)
    traces = [trace for run in runs for trace in run.traces()]
    alarm = fit(traces, [run.fitted for run in runs], wanted)
    file = Path(flags.out).expanduser()
    alarm.save(file)
    found = Figures.of(judge(alarm, traces))
    print(f"alarm at a fall of Q by {alarm.fall:.0%} of what it had reached above {alarm.low:.3g}")
    print("\n".join(figure_lines(found)))
    successes = found.quiet + found.false_alarms
    if 0 < wanted * successes < 1:
        print(f"note: {_successes(successes)} cannot show a share of {wanted:g} false alarms; expect more")
    print(f"wrote {file}; test it on other runs with `serl-chunk attention test {file} RUN`")
    print(f"use it with --config.operator.attention={file}")
    return 0


def test_command(flags: argparse.Namespace) -> int:
    """Print the figures of each run and of all, and return 0."""
    alarm = Alarm.read(flags.file)
    runs = _opened(flags.runs)
    known = {run.run_id for run in alarm.runs if run.run_id}
    if not flags.fitted and (same := [run.fitted.path for run in runs if run.fitted.run_id in known]):
        raise ConfigError(
            f"{same[0]}: the alarm was fitted on this run, whose figures say nothing about others. Leave it out, or "
            "add --fitted"
        )
    by_run = {run.fitted.path: judge(alarm, run.traces()) for run in runs}
    everything = [judged for of_run in by_run.values() for judged in of_run]
    if not everything:
        raise ConfigError("there is no episode to test on. Choose runs with recorded decisions")
    for path, of_run in by_run.items() if len(by_run) > 1 else ():
        print(f"{path}:")
        print("\n".join(figure_lines(Figures.of(of_run))))
    found = Figures.of(everything)
    print("all runs:" if len(by_run) > 1 else f"{flags.runs[0]}:")
    print("\n".join(figure_lines(found)))
    if flags.json:
        figures = {
            "alarm": dataclasses.asdict(alarm),
            "all": found.to_json(),
            "runs": {path: Figures.of(of_run).to_json() for path, of_run in by_run.items()},
        }
        file = Path(flags.json).expanduser()
        with os_faults(DataError, f"{file}: cannot be written", "Choose another --json"):
            atomic_write(file, json.dumps(figures, indent=1) + "\n")
    return 0


def figure_lines(found: Figures) -> list[str]:
    """Return the figures in words."""
    failed, successes = found.true_alarms + found.missed, found.false_alarms + found.quiet
    lines = [
        f"  recall {_shown(found.recall)}: an alarm in {found.true_alarms} of {plural(failed, 'failure')}",
        f"  precision {_shown(found.precision)}: "
        f"{found.true_alarms} of {plural(found.true_alarms + found.false_alarms, 'alarm')} true",
        f"  false alarms in {_shown(found.false_alarm_rate)} of {_successes(successes)}",
    ]
    if found.leads:
        low, middle, high = found.to_json()["lead_seconds_p10_p50_p90"]
        lines.append(f"  {middle:.1f} s before the end (10 to 90 %: {low:.1f} to {high:.1f} s)")
    return lines


def _opened(texts: Sequence[str]) -> list[ReadRun]:
    runs = [ReadRun(str(path)) for path in find_any(texts, FORMAT.name)]
    paths = [run.path.resolve() for run in runs]
    require(len(set(paths)) == len(paths), "runs", f"must name each run once, got {', '.join(texts)}")
    return runs


def _successes(count: int) -> str:
    return f"{count:,} success{'' if count == 1 else 'es'}"


def _shown(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
