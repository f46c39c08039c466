"""How a report draws: its colours and style, and what every panel does with its rows and axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from serl_chunk.runs.metric_rows import Row, RunMetrics

WINDOW = 20  # episodes in a rolling mean
MAX_POINTS = 1_200  # of one curve; keeps the page of a week-long run small

# Okabe and Ito's, which colour-blind readers tell apart and which keep a contrast of 3:1 on white and on near-black.
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
INK = "#010203"  # stands for the page's text colour, which follows the reader's light or dark scheme


@contextmanager
def figure_style(ink: str) -> Iterator[None]:
    """The style of every figure of a report, its text and axes in the colour `ink`."""
    coloured = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color")
    parameters: Any = dict.fromkeys(coloured, ink) | {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.2,
        "lines.linewidth": 1.6,
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "report",  # the same run gives the same bytes
    }
    with mpl.rc_context(parameters):
        yield


def text_colour() -> str:
    """The colour of text and axes in the figure that is being drawn."""
    return str(mpl.rcParams["text.color"])


def x_values(rows: Sequence[Row], key: str) -> np.ndarray:
    """The rows' counter `key`, float64[N]; wall time in minutes."""
    x = np.array([row[key] for row in rows], float)
    return x / 60 if key == "wall" else x


def rolling_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Mean of the last `WINDOW` values at each place, of fewer at the start; NaN where it would be of under five."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    stop = np.arange(1, len(total))
    start = np.maximum(stop - WINDOW, 0)
    means = (total[stop] - total[start]) / (stop - start)
    means[: min(4, len(means) - 1)] = math.nan  # a mean of one or two episodes only looks like a result
    return means


def downsample(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` of the points, evenly, the first and the last among them."""
    if len(x) <= MAX_POINTS:
        return x, y
    at = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    return x[at], y[at]


def plot_train(
    ax: Axes, metrics: RunMetrics, keys: dict[str, str], ylabel: str, scale: float = 1.0, *,
    floor: float | None = None, legend: bool = True,
) -> bool:  # fmt: skip
    """Curves of train metrics over wall time, null values as gaps."""
    styles = ((BLUE, "-"), (VERMILLION, "--"), (GREEN, "-."), (PURPLE, ":"))
    drawn = False
    for (key, label), (colour, style) in zip(keys.items(), styles, strict=False):
        rows = [row for row in metrics["train"] if key in row]
        if any(row[key] is not None for row in rows):
            y = np.array([row[key] for row in rows], float) * scale
            ax.plot(*downsample(x_values(rows, "wall"), y), style, color=colour, label=label)
            drawn = True
    if drawn and legend:
        add_legend(ax)
    if floor is not None:
        ax.set_ylim(bottom=floor)
    ax.set_xlabel("wall time (min)")
    ax.set_ylabel(ylabel)
    return drawn


def shade_warmup(ax: Axes, metrics: RunMetrics, x_key: str) -> None:
    """A grey ground up to the last episode of the warm-up: over all that comes before training on online steps."""
    if rows := [row for row in metrics["episode"] if row.get("phase") == "warmup"]:
        ax.axvspan(
            0, x_values(rows, x_key).max(), color=text_colour(), alpha=0.08, lw=0, label="before online training"
        )


def percent_axis(ax: Axes, ylabel: str) -> None:
    """The y axis of a share."""
    ax.set_ylabel(ylabel)
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(6))


def add_legend(ax: Axes, place: Literal["best", "upper left"] = "best") -> None:
    """A legend whose markers are seen, however faint the curves' are."""
    legend = ax.legend(loc=place)
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # a faint dot among thousands is clear, alone in a legend it is not
            handle.set_alpha(1.0)
            handle.set_markersize(max(6.0, handle.get_markersize()))


def draw_no_data(ax: Axes, text: str) -> None:
    """`text` in the place of a panel."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, style="italic")
