"""The report of a run: `report.html`, complete in itself, and `report.png`, both made from the run folder alone.

Works on a run that has just begun, is still going, or was killed: what is not there yet is said in a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.runs.calibration import value_range
from serl_chunk.runs.metric_rows import Row, RunMetrics, read_metrics, succeeded_alone
from serl_chunk.runs.report_page import Page, Table, figures, render
from serl_chunk.runs.report_plots import save_summary
from serl_chunk.types import DataError

STARTS = {True: "held-out", False: "ignore the seed", None: "not compared"}  # of an evaluation's `starts_repeat`
RECENT = 50  # episodes in the headline's training success


def build_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `report.png` into the run folder, replacing older ones whole.

    Returns:
        The path of `report.html`.

    Raises:
        DataError: `run_dir` is not a run folder (it has no `metrics.jsonl`), or its `config.json` is not JSON.
    """
    run = Path(run_dir)
    metrics = read_metrics(run)
    config = _read_config(run)
    name = str(config.get("name") or run.resolve().parent.name)
    page = Page(
        title=f"{name}: {run.resolve().name}",
        facts=headline(metrics, config),
        notes=_notes(metrics),
        figures=figures(metrics, value_range(config)),
        evaluations=_evaluations(metrics),
        configuration=(("setting", "value"), list(_flat(config))),
        events=_events(metrics["event"]),
    )
    image = run / "report.png.part"
    save_summary(metrics, f"{page.title}\n{page.facts[0][1]}", image, limits=value_range(config))
    os.replace(image, run / "report.png")
    part, report = run / "report.html.part", run / "report.html"
    part.write_text(render(page), encoding="utf-8")
    os.replace(part, report)
    return report


def headline(metrics: RunMetrics, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The most important values, as (name, value): evaluation, training success, time, steps, the human's share."""
    last = metrics.last() or {"wall": 0.0, "step": 0, "env_steps": 0, "human_ticks": 0}
    episodes = metrics["episode"]
    judged = [row for row in episodes if row.get("succeed") is not None and row.get("phase") != "warmup"][-RECENT:]
    warmup = sum(row.get("phase") == "warmup" for row in episodes)
    return [
        ("Evaluation", _evaluation_sentence(metrics["eval"])),
        (f"Training success, last {RECENT} episodes", _success(judged)),
        (f"Success without intervention, last {RECENT} episodes", _success(judged, alone=True)),
        ("Duration", _duration(last["wall"])),
        ("Critic updates", f"{last['step']:,}"),
        ("Environment steps", f"{last['env_steps']:,}"),
        ("Human ticks", _human(last, _control_hz(config))),
        ("Episodes", f"{len(episodes):,}" + (f" ({warmup:,} of them warm-up)" if warmup else "")),
    ]


def _evaluation_sentence(rows: Sequence[Row]) -> str:
    """The newest evaluation of the mean policy; of the sampled one where there is no other."""
    known = [row for row in rows if row.get("success_rate") is not None]
    if not known:
        return "not evaluated yet"
    row = ([r for r in known if r.get("mode") == "mean"] or known)[-1]
    return (
        f"{_percent(row['success_rate'])} success in {row.get('n')} episodes (95 % Wilson interval {_interval(row)}), "
        f"{row.get('mode')} policy of checkpoint {row.get('checkpoint')}"
    )


def _evaluations(metrics: RunMetrics) -> Table:
    columns = (
        "checkpoint",
        "policy",
        "episodes",
        "success",
        "95 % interval",
        "starts",
        "mean time",
        "mean length",
        "after",
    )
    return columns, [
        (
            str(row.get("checkpoint")),
            str(row.get("mode")),
            str(row.get("n")),
            _percent(row.get("success_rate")),
            _interval(row),
            STARTS.get(row.get("starts_repeat"), "unknown"),
            _number(row.get("mean_time_s"), "s"),
            _number(row.get("mean_length"), "steps"),
            f"{row['env_steps']:,} steps, {_duration(metrics.trained_wall(row))}",
        )
        for row in metrics["eval"]
    ]


def _events(rows: Sequence[Row]) -> Table:
    return ("time", "critic updates", "event"), [
        (_duration(row["wall"]), f"{row['step']:,}", str(row.get("text", ""))) for row in rows
    ]


def _notes(metrics: RunMetrics) -> list[str]:
    notes = []
    if metrics.superseded:
        notes.append(
            f"This run was resumed from a checkpoint: {metrics.superseded:,} rows that an earlier life wrote after "
            "that checkpoint are left out; the time they took is not."
        )
    if metrics.bad_lines:
        notes.append(f"{metrics.bad_lines:,} lines of metrics.jsonl could not be read and were skipped.")
    return notes


def _read_config(run: Path) -> dict[str, Any]:
    path = run / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); restore it or delete it, a report can do without it") from error
    if not isinstance(config, dict):
        raise DataError(
            f"{path} holds a {type(config).__name__}, not an object of settings; delete it to go without it"
        )
    return config


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings by dotted path, as the command line names them."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def _control_hz(config: Mapping[str, Any]) -> float | None:
    """Ticks per second: of the robot's specification where the run recorded it, else of its configuration."""
    for section in ("robot_spec", "robot"):
        hz = (config.get(section) or {}).get("control_hz")
        if hz:
            return float(hz)
    return None


def _human(last: Row, control_hz: float | None) -> str:
    ticks, steps = last["human_ticks"], last["env_steps"]
    details = [_duration(ticks / control_hz)] if control_hz else []
    if steps:
        details.append(f"{_percent(ticks / steps)} of environment steps")
    return f"{ticks:,}" + (f" ({', '.join(details)})" if details else "")


def _success(rows: Sequence[Row], *, alone: bool = False) -> str:
    """Successes among all `rows`; `alone`: those without intervention, among all of them too."""
    if not rows:
        return "none yet"
    good = sum(succeeded_alone(row) if alone else row["succeed"] for row in rows)
    return f"{good} of {len(rows)} ({_percent(good / len(rows))})"


def _interval(row: Row) -> str:
    low, high = row.get("low"), row.get("high")
    return "unknown" if low is None or high is None else f"{_percent(low)} to {_percent(high)}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.1f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
