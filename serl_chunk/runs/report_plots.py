"""The figures of a report: panels side by side, as SVG for the page, and one summary as PNG.

Figures are built without pyplot: no global state, no display, safe beside a training thread. What colour says, a marker
or a line style says too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from serl_chunk.runs.metric_rows import RunMetrics
from serl_chunk.runs.report_panels import (
    AXES,
    UPDATES,
    Draw,
    calibration_panel,
    draw_intervention,
    draw_success,
    has_changed,
    loss_keys,
    loss_panel,
    panel_over,
)
from serl_chunk.runs.report_style import INK, draw_no_data, figure_style

_PNG_INK = "#1b1f24"
_STYLE = "<style>:root{color:#1b1f24}@media(prefers-color-scheme:dark){:root{color:#e6e8eb}}</style>"


def draw_figure(metrics: RunMetrics, panels: Sequence[Draw]) -> str | None:
    """`panels` side by side, at most three a row (four in two rows), as SVG text; None where no panel has data."""
    columns = 2 if len(panels) == 4 else max(1, min(3, len(panels)))
    rows = math.ceil(len(panels) / columns)
    if not rows:
        return None
    with figure_style(INK):
        figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        drawn = []
        for ax, draw in zip(axes, panels, strict=False):
            drawn.append(draw(ax, metrics))
            if not drawn[-1] and not ax.texts:
                draw_no_data(ax, "nothing recorded yet")
        for ax in axes[len(panels) :]:
            ax.remove()
        return _svg(figure) if any(drawn) else None


def save_summary(metrics: RunMetrics, headline: str, path: Path, *, limits: tuple[float, float] | None = None) -> None:
    """Four panels as a PNG (1400x1000): success, intervention share, Q against return, losses; text where empty.

    `limits`: the range of a bounded critic.
    """
    losses = loss_keys(metrics)
    panels: list[tuple[str, Draw]] = [
        ("Success rate", panel_over(draw_success, AXES[0] if has_changed(metrics, "env_steps") else UPDATES)),
        ("Intervention share", panel_over(draw_intervention, AXES[0])),
        ("Q against realised return", calibration_panel(limits)),
        (losses[0] if losses else "Losses", loss_panel(losses[0]) if losses else (lambda ax, metrics: False)),
    ]
    with figure_style(_PNG_INK):
        figure = Figure(figsize=(14, 10), dpi=100, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.suptitle(headline, fontsize=13)
        for ax, (title, draw) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            drawn = draw(ax, metrics)
            ax.set_title(f"{title} ({ax.get_title()})" if ax.get_title() else title)
            if not drawn and not ax.texts:
                draw_no_data(ax, "nothing recorded yet")
        figure.savefig(path, format="png")


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(INK, "currentColor").replace(">", f">{_STYLE}", 1)
