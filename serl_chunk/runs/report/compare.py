"""Several runs on one page: final numbers side by side, curves over each other, settings that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serl_chunk.io import atomic_write, os_reason
from serl_chunk.runs.metrics import Row, RunMetrics, read_metrics, succeeded_alone
from serl_chunk.runs.report import panels as panels
from serl_chunk.runs.report.report import headline
from serl_chunk.runs.report.tables import flatten, origin, read_settings
from serl_chunk.types import ConfigError, DataError
from serl_chunk.viz.page import Html, element, figure, note, page, section, table
from serl_chunk.viz.plots import Draw, add_legend, downsample, panels_svg, percent_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Callable[[RunMetrics], list[Row]]
Curve = Callable[[RunMetrics, str], tuple[np.ndarray, np.ndarray]]  # of a run over a counter: x, y

_DASHES = ("-", "--", "-.", ":")


def build_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write one HTML page that compares two runs or more, replacing an older one whole, and return its path.

    By default it is `report_vs_<names of the others>.html` in the first run. Raises ConfigError for a run that is given
    twice or a damaged `config.json`, DataError for a folder that is no run or a page that cannot be written.
    """
    runs = [Path(run) for run in run_dirs]
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError(f"must be different folders, got {', '.join(map(str, runs))}", parameter="run_dirs")
    names = _names(runs)
    metrics, configs = [read_metrics(run) for run in runs], [read_settings(run) for run in runs]
    heads = [headline(m, c) for m, c in zip(metrics, configs, strict=True)]
    differ = table(("setting", *names), differing_settings(configs), "All settings are the same.")
    content = [
        element("p", "Each run has its colour and line style in all plots."),
        section("Final numbers", _side_by_side(names, heads), key="numbers"),
        *(_curves(names, metrics, *plotted) for plotted in _PLOTS),
        section("Settings that differ", differ, key="configuration"),
        section("Origin", _side_by_side(names, map(origin, configs)), key="origin"),
    ]
    path = Path(out) if out is not None else runs[0] / f"report_vs_{'_'.join(names[1:]).replace('/', '-')}.html"
    try:
        atomic_write(path, page(" vs ".join(names), *content))
    except OSError as error:
        raise DataError(f"{path}: cannot write the comparison: {os_reason(error)}") from error
    return path


def differing_settings(configs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each setting that is not the same in all runs: its path, then its value in each."""
    flat = [
        dict(flatten({k: v for k, v in c.items() if k not in ("serl_chunk", "process", "run_id")})) for c in configs
    ]
    paths = dict.fromkeys(path for each in flat for path in each)
    rows = [(path, *(each.get(path, "absent") for each in flat)) for path in paths]
    return [row for row in rows if len(set(row[1:])) > 1]


def _side_by_side(names: Sequence[str], runs: Iterable[list[tuple[str, str]]]) -> Html:
    rows = zip(*runs, strict=True)
    return table(("", *names), [(row[0][0], *(value for _, value in row)) for row in rows])


def _names(runs: Sequence[Path]) -> list[str]:
    parts = [run.resolve().parts for run in runs]
    depth = next(d for d in range(1, max(map(len, parts)) + 1) if len({p[-d:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


def _curve(rows: Rows, value: str | Callable[[Row], float], *, rolling: bool = True) -> Curve:
    def curve(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
        chosen = rows(metrics)
        y = np.array([row[value] if isinstance(value, str) else value(row) for row in chosen], float)
        return panels.x_values(chosen, key), panels.rolling_mean(y) if rolling else y

    return curve


def _evaluations(metrics: RunMetrics) -> list[Row]:
    rows = panels.evaluations(metrics)
    return [row for row in rows if row.get("mode") == "mean"] or rows


def _with_loss(metrics: RunMetrics) -> list[Row]:
    return [row for row in metrics["train"] if row.get("critic/critic_loss") is not None]


def _human_share(row: Row) -> float:
    return (row.get("intervention_steps") or 0) / row["episode/l"]


_ROLLING = f"Mean of the last {panels.WINDOW} episodes."
_PLOTS: tuple[tuple[str, str, str, Curve, bool], ...] = (  # title, y axis, caption, curve, whether it is a share
    ("Success without intervention", "success", _ROLLING, _curve(panels.judged_episodes, succeeded_alone), True),
    (
        "Evaluations", "success", "Each at its checkpoint; intervals are in the runs' own reports.",
        _curve(_evaluations, "success_rate", rolling=False), True,
    ),
    ("Return", "return", _ROLLING, _curve(panels.with_return, "episode/r"), False),
    ("Intervention share", "share of an episode's steps", _ROLLING, _curve(panels.with_steps, _human_share), True),
    ("Critic loss", "critic/critic_loss", "As logged.", _curve(_with_loss, "critic/critic_loss", rolling=False), False),
)  # fmt: skip


def _curves(
    names: Sequence[str], runs: Sequence[RunMetrics], title: str, ylabel: str, caption: str, curve: Curve, share: bool
) -> Html:
    def panel(key: str, label: str) -> Draw:
        def draw(ax: Axes) -> bool:
            drawn = False
            for i, (name, metrics) in enumerate(zip(names, runs, strict=True)):
                x, y = curve(metrics, key)
                colour = panels.STYLES[i % len(panels.STYLES)][0]
                style = _DASHES[(i + i // len(_DASHES)) % len(_DASHES)]
                dot = "o" if len(x) <= 50 else None
                ax.plot(*downsample(x, y), style, color=colour, marker=dot, ms=3, label=name)
                drawn = drawn or bool(len(x))
            if share:
                percent_axis(ax, ylabel)
            ax.set_ylabel(ylabel)
            ax.set_xlabel(label)
            add_legend(ax)
            return drawn

        return draw

    axes = [panels.UPDATES, panels.AXES[0], panels.AXES[2]]
    moved = [axis for axis in axes if axis[0] == "wall" or any(panels.has_changed(run, axis[0]) for run in runs)]
    svg = panels_svg([panel(*axis) for axis in moved])
    alt = f"Line charts of {title.lower()} of {' and '.join(names)}."
    return section(title, figure(svg, alt, caption) if svg else note("No run has recorded any."), key=title.split()[0])
