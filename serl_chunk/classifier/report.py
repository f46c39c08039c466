"""The figures of a classifier for a reader: lines, a table of misjudged episodes, and the ROC curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serl_chunk.classifier.metrics import Evaluation, auc, roc
from serl_chunk.io import atomic_write, os_faults
from serl_chunk.types import DataError
from serl_chunk.viz.plots import BLUE, VERMILLION, add_legend, new_figure, percent_axis, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 20  # rows of the table; the file has all


def summary_lines(found: Evaluation) -> list[str]:
    """Return the figures in words."""
    figures = found.to_json()
    areas = {name: figures[f"auc_by_{name}"] for name in ("episode", "frame")}
    shown = ", ".join(f"{'unknown' if area is None else f'{area:.4f}'} by {name}" for name, area in areas.items())
    failures, faults = figures["failures"], figures["faults"]
    lines = [f"AUC {shown}"]
    if not failures:
        lines[0] += " (no failed episode: successes against the frames before them)"
    lines.append(
        f"threshold {found.threshold:.4f}, frames in a row {found.frames}: of {figures['successes']} successful "
        f"episodes {faults['missed']} missed and {faults['early']} ended early; of {failures} failed ones "
        f"{faults['false_success']} ended as a success"
    )
    return lines


def fault_rows(found: Evaluation) -> list[tuple[str, str, str, str]]:
    """Return (episode, fault, highest threshold reached, tick of the end and of the true success) for each fault."""
    rows = []
    for fault, episodes in found.faults().items():
        for s in episodes:
            ended = s.ended_at(found.threshold)
            at = "not ended" if ended is None else f"ended on tick {ended}"
            truth = f", success on {s.first}" if s.success else ""
            reached = s.score if fault == "missed" else s.false_score
            rows.append((s.name, fault, f"{reached:.4f}", at + truth))
    return rows


def table_lines(found: Evaluation) -> list[str]:
    """Return the table of misjudged episodes, at most `SHOWN` of them; empty where there is none."""
    rows = fault_rows(found)
    if not rows:
        return []
    table = [("episode", "fault", "reached", ""), *rows[:SHOWN]]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in table]
    return lines + ([f"... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])


def roc_png(found: Evaluation) -> bytes:
    """Draw the curves by episode and by frame."""
    curves = (
        ("by episode", found.successes, found.failures, BLUE, "-"),
        ("by frame", found.positives, found.negatives, VERMILLION, "--"),
    )
    with new_figure(5.2, 4.2) as figure:
        ax: Axes = figure.add_subplot()
        for label, positives, negatives, colour, style in curves:
            if len(positives) and len(negatives):
                shown = f"{label}, area {auc(positives, negatives):.4f}"
                ax.plot(*roc(positives, negatives), style, color=colour, label=shown)
        if found.successes.size and found.failures.size:
            at = [np.mean(scores >= found.threshold) for scores in (found.failures, found.successes)]
            ax.plot(*at, "o", color=BLUE, label=f"threshold {found.threshold:.3f}")
        percent_axis(ax, "successes found")
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.set_xlim(-0.03, 1.03)
        ax.set_xlabel("failures taken for a success")
        if ax.lines:
            add_legend(ax, "lower right")
        return to_png(figure)


def write_report(folder: Path, name: str, found: Evaluation) -> list[Path]:
    """Write `name.json` and `name.png` into `folder`; returns them. Raises DataError."""
    rows = [dict(zip(("episode", "fault", "reached", "when"), row, strict=True)) for row in fault_rows(found)]
    files = [folder / f"{name}.json", folder / f"{name}.png"]
    with os_faults(DataError, f"{folder}: cannot write the report"):
        atomic_write(files[0], json.dumps(found.to_json() | {"misjudged": rows}, indent=1) + "\n")
        atomic_write(files[1], roc_png(found))
    return files
