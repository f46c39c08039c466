"""Learning curves of runs in the common form, as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.viz import plots
from support.results import Checkpoint, Run

Value = Callable[[Run, Checkpoint], Any]


def colour(runs: Sequence[Run], name: str) -> str:
    """Return the colour of all runs of a name."""
    return f"C{list(dict.fromkeys(run.name for run in runs)).index(name)}"


def draw_success(ax: Any, runs: Sequence[Run], label: str, value: Value, starts: str = "reported") -> None:
    """Draw success with 95 % intervals over `value`: a line for each run, a colour for each name."""
    for run in runs:
        points = [c for c in run.checkpoints if c.starts == starts]
        x, y = [value(run, c) for c in points], [c.rate for c in points]
        low, high = zip(*(wilson_interval(c.successes, c.episodes) for c in points), strict=True)
        color, first = colour(runs, run.name), run is next(r for r in runs if r.name == run.name)
        ax.fill_between(x, low, high, color=color, alpha=0.1)
        ax.plot(x, y, marker=".", color=color, label=run.name if first else "")
    plots.percent_axis(ax, "success without interventions, 95 % interval")
    ax.set_xlabel(label)


def draw_curves(runs: Sequence[Run], path: Path, axes: Mapping[str, Value], starts: str = "reported") -> None:
    """Draw success over each axis, by its label."""
    with plots.new_figure(1 + 5 * len(axes), 4.5) as figure:
        for ax, (label, value) in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes.items(), strict=True):
            draw_success(ax, runs, label, value, starts)
        plots.add_legend(ax)
        path.write_bytes(plots.to_png(figure))
