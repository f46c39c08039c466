"""Figures in one style, as PNG or SVG bytes. The only module that imports matplotlib, on use.

Figures are built without pyplot: no global state, no display, safe next to a training thread. Colours are Okabe and
Ito's, which colour-blind readers tell apart; a marker or a line style repeats what a colour shows.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], bool]  # draws one panel; False: there was nothing to draw

BLUE, VERMILLION, GREEN, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
INK = "#1b1f24"
PAGE_INK = "#010203"  # replaced by the page's text colour, which follows the reader's light or dark scheme
MAX_POINTS = 1_200  # of one curve; keeps the page of a week-long run small
_SVG_STYLE = "<style>:root{color:#1b1f24}@media(prefers-color-scheme:dark){:root{color:#e6e8eb}}</style>"


@contextmanager
def new_figure(width: float, height: float, *, ink: str = INK, dpi: int = 110) -> Iterator[Figure]:
    """Yield a figure of `width` x `height` inches on white; `to_png` or `to_svg` belong into the block."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color")
    parameters: Any = dict.fromkeys(inked, ink) | {
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "grid.alpha": 0.2, "lines.linewidth": 1.5, "font.size": 9, "legend.frameon": False, "legend.fontsize": 8,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "report",  # the same run gives the same bytes
    }  # fmt: skip
    with mpl.rc_context(parameters):
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure


def to_png(figure: Figure) -> bytes:
    """Encode a figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})  # `savefig` would draw it twice
    return buffer.getvalue()


def to_svg(figure: Figure) -> bytes:
    """Encode a figure of ink `PAGE_INK` as a transparent SVG file that follows the reader's colour scheme."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    for patch in (figure.patch, *(ax.patch for ax in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})  # `savefig` would draw it twice
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(PAGE_INK, "currentColor").replace(">", f">{_SVG_STYLE}", 1).encode()


def panels_svg(panels: Sequence[Draw]) -> bytes | None:
    """Draw `panels`, at most three a row (four in two rows), as SVG; None where no panel has data."""
    columns = 2 if len(panels) == 4 else max(1, min(3, len(panels)))
    rows = math.ceil(len(panels) / columns)
    if not rows:
        return None
    with new_figure(11, 3.1 * rows, ink=PAGE_INK) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        drawn = [draw_or_say_why(ax, draw) for ax, draw in zip(axes, panels, strict=False)]
        for ax in axes[len(panels) :]:
            ax.remove()
        return to_svg(figure) if any(drawn) else None


def draw_or_say_why(ax: Axes, draw: Draw) -> bool:
    """Draw a panel; a panel without data gets a text instead."""
    drawn = draw(ax)
    if not drawn and not ax.texts:
        draw_no_data(ax, "nothing recorded yet")
    return drawn


def draw_no_data(ax: Axes, text: str) -> None:
    """Write `text` in the place of a panel."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, style="italic")


def text_colour() -> str:
    """Colour of text and axes in the figure that is being drawn."""
    import matplotlib as mpl

    return str(mpl.rcParams["text.color"])


def percent_axis(ax: Axes, ylabel: str) -> None:
    """Make the y axis that of a share."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    ax.set_ylabel(ylabel)
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(6))


def add_legend(ax: Axes, place: Any = "best") -> None:
    """Add a legend whose markers are seen, however faint the curves' are."""
    handles: list[Any] = ax.legend(loc=place).legend_handles
    for handle in handles:
        if hasattr(handle, "set_markersize"):  # a faint dot among thousands is clear, alone in a legend it is not
            handle.set_alpha(1.0)
            handle.set_markersize(max(6.0, handle.get_markersize()))


def downsample(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep at most `MAX_POINTS` of the points, evenly, the first and the last among them."""
    if len(x) <= MAX_POINTS:
        return x, y
    at = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    return x[at], y[at]
