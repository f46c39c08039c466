"""The report of a sweep: of each setting, the interquartile mean of its runs and the interval of that mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.io import atomic_write, plural
from serl_chunk.runs.metrics import RunMetrics, read_metrics
from serl_chunk.runs.report.report import LOSS, PLOTS, Curve, Line, over_axes
from serl_chunk.runs.sweep import Sweep, has_finished, read_sweep
from serl_chunk.viz.page import Html, element, fold, note, page, section, table

TRIMMED = 0.25  # of the runs, at each end
CONFIDENCE, RESAMPLES = 0.95, 2000
POINTS = 100  # of a band
TOOK = ("updates", "environment steps", "wall time (s)")  # figures of what a run took
ALL = "as given"  # the setting of a sweep without a grid


class Spread(NamedTuple):
    """Interquartile mean of N runs with its interval, each float64[...]; without an interval (NaN) for one run."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def spread(values: np.ndarray) -> Spread:
    """Return the spread of float[N, ...] over its runs: `trim_mean`, and a percentile bootstrap of it."""
    from scipy.stats import bootstrap, trim_mean

    mean = np.asarray(trim_mean(values, TRIMMED, axis=0))
    if len(values) < 2 or not mean.size:
        return Spread(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    found = bootstrap(
        (values,), lambda x, axis: trim_mean(x, TRIMMED, axis=axis), axis=0, method="percentile", vectorized=True,
        confidence_level=CONFIDENCE, n_resamples=RESAMPLES, random_state=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return Spread(mean, np.asarray(found.low), np.asarray(found.high))


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, Spread]:
    """Return x and the spread of curves there, as far as all of them reach: of fewer runs it would jump."""
    known = [(x[ok], y[ok]) for x, y, ok in ((x, y, np.isfinite(y)) for x, y in curves)]
    if not known or not all(len(x) for x, _ in known):
        return np.empty(0), spread(np.empty((1, 0)))
    every = np.unique(np.concatenate([x for x, _ in known]))
    at = every[(every >= max(x[0] for x, _ in known)) & (every <= min(x[-1] for x, _ in known))]
    at = at[np.linspace(0, len(at) - 1, min(POINTS, len(at))).round().astype(int)]
    return at, spread(np.stack([np.interp(at, x, y) for x, y in known]))


def build_sweep_report(folder: Path) -> Path:
    """Write `report.html` and `report.json` into a sweep's folder, and return the first's path.

    Only finished runs are in its figures. Raises ConfigError for a damaged manifest.
    """
    sweep = read_sweep(folder)
    runs = {name: read_metrics(folder / name) for name in sweep.runs if has_finished(folder / name)}
    settings = {
        setting or ALL: {name: runs[name] for name in names if name in runs}
        for setting, names in sweep.settings.items()
    }
    unfinished = [name for name in sweep.runs if name not in runs]
    rows = {setting: _figures(list(of.values())) for setting, of in settings.items()}
    counts = {setting or ALL: len(names) for setting, names in sweep.settings.items()}
    known = {"settings": rows, "runs": {name: _last(metrics) for name, metrics in runs.items()}}
    atomic_write(folder / "report.json", json.dumps(known | {"unfinished": unfinished}, indent=1))
    content = [
        section("Settings", _settings(rows, counts, settings), note(_ABOUT), key="settings"),
        *(_bands(settings, *plotted) for plotted in PLOTS),
        section("Runs", _runs(folder, sweep, runs), _commands(sweep), key="runs"),
    ]
    if unfinished:
        text = f"{plural(len(unfinished), 'run')} not finished, and in no figure: {'; '.join(unfinished)}. "
        content.insert(0, element("p", text + "The command of the sweep goes on with them.", class_="fault"))
    path = folder / "report.html"
    atomic_write(path, page(f"Sweep {folder.resolve().name}", *content))
    return path


_ABOUT = (
    f"Interquartile means of finished runs (the mean without the upper and lower quarter of the seeds), with "
    f"{CONFIDENCE:.0%} intervals of a bootstrap over seeds: of five seeds they are wide. Each run's last value counts."
)


def _last(metrics: RunMetrics) -> dict[str, float]:
    """Return the last value of each curve of outcomes, and what the run took."""
    curves = {title: curve(metrics, "step")[1] for title, _, _, curve, _ in PLOTS if title != LOSS}
    known = {title: y[np.isfinite(y)] for title, y in curves.items()}
    last = metrics.last() or {"step": 0, "env_steps": 0, "wall": 0.0}
    took = zip(TOOK, (last["step"], last["env_steps"], last["wall"]), strict=True)
    return {**{title: float(y[-1]) for title, y in known.items() if len(y)}, **dict(took)}


def _figures(runs: Sequence[RunMetrics]) -> dict[str, list[float | None]]:
    """Return name -> (mean, low, high) of what all runs of a setting have."""
    lasts = [_last(metrics) for metrics in runs]
    names = [name for name in (lasts or [{}])[0] if all(name in last for last in lasts)]
    of = {name: spread(np.array([last[name] for last in lasts], float)) for name in names}
    return {name: [None if np.isnan(x) else float(x) for x in found] for name, found in of.items()}


_SHARES = {title for title, *_, share in PLOTS if share}


def _cell(name: str, figures: Sequence[float | None] | None) -> str:
    if figures is None:
        return ""
    show = "{:.1%}".format if name in _SHARES else "{:,.0f}".format if name in TOOK else "{:,.4g}".format
    mean, low, high = [None if x is None else show(x) for x in figures]
    return f"{mean}" if low == high else f"{mean} [{low}, {high}]"  # None, or all runs have it


def _settings(rows: Mapping[str, Any], counts: Mapping[str, int], settings: Mapping[str, Any]) -> Html:
    names = list(dict.fromkeys(name for figures in rows.values() for name in figures))
    cells = [
        (setting, f"{len(settings[setting])} of {counts[setting]}", *(_cell(n, figures.get(n)) for n in names))
        for setting, figures in rows.items()
    ]
    return table(("setting", "runs", *names), cells)


def _runs(folder: Path, sweep: Sweep, runs: Mapping[str, RunMetrics]) -> Html:
    lasts = {name: _last(metrics) for name, metrics in runs.items()}
    names = list(dict.fromkeys(name for last in lasts.values() for name in last))
    cells = []
    for name, run in sweep.runs.items():
        last = lasts.get(name, {})
        shown = [_cell(n, [last[n], None, None] if n in last else None) for n in names]
        own = element("a", name, href=f"{name}/report.html") if (folder / name / "report.html").exists() else name
        cells.append((own, run.seed, "finished" if name in runs else "not finished", *shown))
    return table(("run", "seed", "state", *names), cells)


def _commands(sweep: Sweep) -> Html:
    return fold("the command of each run", *(element("p", element("code", r.command)) for r in sweep.runs.values()))


def _bands(
    settings: Mapping[str, Mapping[str, RunMetrics]], title: str, ylabel: str, caption: str, curve: Curve, share: bool
) -> Html:
    def lines(key: str) -> list[Line]:
        found = {name: band([curve(metrics, key) for metrics in runs.values()]) for name, runs in settings.items()}
        return [Line(name, x, *of) for name, (x, of) in found.items()]

    runs = [metrics for of in settings.values() for metrics in of.values()]
    what = f"{caption} Interquartile means over seeds, with their {CONFIDENCE:.0%} intervals, as far as all runs reach."
    return over_axes(runs, lines, title, ylabel, "of each setting", what, share=share)
