"""The pictures of an inspection's page, as PNG (plots) and JPEG (frames) files in memory.

Figures are built without pyplot: no global state, no display. Colours are Okabe and Ito's, which colour-blind readers
tell apart; what colour says, a line style says too. matplotlib is imported on use: reading data does not need it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.data.inspect.results import InspectionReport
from serl_chunk.types import STATE, Episode, RobotSpec, SparseRows
from serl_chunk.types import Source as Actor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
INK = "#1b1f24"
COLUMNS = 4
MAX_PANELS = 48
DENSE = 0.1  # share of steps with a reward from which on it is drawn as a curve
FRAMES = 8  # of each camera and episode on a strip
THUMBNAIL = 144  # pixels, width of a frame on a strip


class Panel(NamedTuple):
    """One small plot: a state value, an action value, or both over one another."""

    title: str
    state: int | None
    action: int | None


def draw_overview(findings: InspectionReport) -> bytes:
    """Lengths, rewards, and how much each action dimension changes from one step to the next, as PNG."""
    with _figure(3.0) as (figure, save):
        lengths, rewards, changes = figure.subplots(1, 3)
        _histogram(lengths, [e.length for e in findings.episodes], "steps of an episode", BLUE)
        _histogram(rewards, [e.reward for e in findings.episodes], "sum of an episode's rewards", GREEN)
        _changes(changes, findings.changes)
    return save()


def draw_trajectories(episode: Episode, spec: RobotSpec | None, marks: Sequence[int]) -> tuple[bytes, int]:
    """State and action of one episode over its ticks, as PNG, and how many values found no place.

    `marks`: ticks that a finding names.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    steps = episode.steps
    state, action, ticks = steps.observation[STATE], steps.action, np.arange(steps.n)
    panels = _panels(state.shape[1], action.shape[1], spec)
    shown = panels[:MAX_PANELS]
    rewarded = np.flatnonzero(steps.reward)
    dense = len(rewarded) > max(1, DENSE * steps.n)
    n = len(shown) + dense
    rows = math.ceil(n / COLUMNS)
    human = _runs(steps.source == Actor.HUMAN)
    with _figure(1.35 * rows + 0.75) as (figure, save):
        axes = list(figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).flat)
        for ax, panel in zip(axes, shown, strict=False):
            if panel.state is not None:
                ax.plot(ticks, state[:, panel.state], color=BLUE)
            if panel.action is not None:
                ax.plot(ticks, action[:, panel.action], "--", color=VERMILLION)
            ax.set_title(panel.title, fontsize=8, pad=4)
        if dense:
            axes[len(shown)].plot(ticks, steps.reward, color=GREEN)
            axes[len(shown)].set_title("reward", fontsize=8, pad=4)
        for i, ax in enumerate(axes):
            if i >= n:
                ax.remove()
                continue
            for first, past in human:
                ax.axvspan(first, past, color=PURPLE, alpha=0.2, lw=0)
            for tick in [] if dense else rewarded.tolist():
                ax.axvline(tick, color=GREEN, lw=1.2, ls=":")
            for tick in marks:
                ax.axvline(tick, color=INK, lw=1.0, ls="-.", zorder=0.5)  # beneath what it points at
            ax.margins(x=0.01)
            ax.tick_params(labelsize=7, length=2)
            ax.locator_params(nbins=4, min_n_ticks=2)
            _widen(ax)
            if i + COLUMNS >= n:  # nothing below it
                ax.tick_params(labelbottom=True)
                ax.set_xlabel("tick", fontsize=7, labelpad=1)
        handles: list[Any] = [
            Line2D([], [], color=BLUE, label="state"), Line2D([], [], color=VERMILLION, ls="--", label="action"),
        ]  # fmt: skip
        handles += [Patch(color=PURPLE, alpha=0.2, label="a human acts")] * bool(human)
        handles += [Line2D([], [], color=GREEN, ls=":", label="reward")] * bool(len(rewarded) and not dense)
        handles += [Line2D([], [], color=INK, ls="-.", label="see the findings")] * bool(marks)
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)
    return save(), len(panels) - len(shown)


def draw_strip(rows: SparseRows) -> tuple[bytes, list[int]]:
    """Up to `FRAMES` frames of one camera at regular times side by side, as JPEG, and their ticks."""
    from PIL import Image

    chosen = np.unique(np.linspace(0, len(rows.index) - 1, FRAMES).round().astype(int))
    frames = [Image.fromarray(np.asarray(rows.values[int(i)])) for i in chosen]
    height = max(1, round(THUMBNAIL * frames[0].height / frames[0].width))
    strip = Image.new("RGB", (THUMBNAIL * FRAMES, height), "white")
    for k, frame in enumerate(frames):
        strip.paste(frame.resize((THUMBNAIL - 2, height), Image.Resampling.LANCZOS), (k * THUMBNAIL, 0))
    buffer = io.BytesIO()
    strip.save(buffer, "JPEG", quality=88)
    return buffer.getvalue(), [int(rows.index[i]) for i in chosen]


def _panels(s: int, a: int, spec: RobotSpec | None) -> list[Panel]:
    """Actions over the joints they command, then the state values that no action commands."""
    if spec is not None and spec.action_dim == a and spec.state_dim == s:
        joints = list(spec.joint_of_action)
    else:
        joints = list(range(a)) if s == a else [-1] * a
    panels = []
    for j, joint in enumerate(joints):
        if joint < 0:
            panels.append(Panel(f"action {j}", None, j))
        else:
            panels.append(Panel(f"state {joint}, action {j}" if joint != j else f"state and action {j}", joint, j))
    return panels + [Panel(f"state {i}", i, None) for i in range(s) if i not in joints]


def _histogram(ax: Axes, values: Sequence[float], label: str, colour: str) -> None:
    from matplotlib.ticker import MaxNLocator

    different = np.unique(values)
    if len(different) <= 12:  # a bar for each, not bins between them
        counts = [int(np.sum(np.asarray(values) == v)) for v in different]
        ax.bar(range(len(different)), counts, color=colour, width=0.7 if len(different) > 1 else 0.25)
        ax.set_xticks(range(len(different)), [f"{v:.4g}" for v in different], rotation=45 if len(different) > 6 else 0)
        ax.set_xlim(-0.6, len(different) - 0.4)
        ax.grid(visible=False, axis="x")
    else:
        ax.hist(values, bins=min(40, 2 * math.ceil(math.sqrt(len(values)))), color=colour)
    ax.set_xlabel(label)
    ax.set_ylabel("episodes")
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))


def _changes(ax: Axes, changes: np.ndarray | None) -> None:
    from matplotlib.ticker import MaxNLocator

    if changes is None or not (changes[3] > 0).any():
        ax.set_axis_off()
        text = "the actions never change" if changes is not None else "no two steps to compare"
        ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, style="italic")
        return
    at = np.arange(changes.shape[1])
    styles = (("median", "o", BLUE), ("90 %", "s", GREEN), ("99 %", "^", PURPLE), ("largest", "x", VERMILLION))
    for values, (label, marker, colour) in zip(changes, styles, strict=True):
        moving = values > 0  # a logarithm has no place for those that stand still
        ax.plot(at[moving], values[moving], marker, color=colour, ms=4, label=label)
    ax.set_yscale("log")
    ax.set_xlim(-0.6, len(at) - 0.4)
    ax.set_xlabel("action dimension")
    ax.set_ylabel("change from step to step")
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), columnspacing=0.8, handletextpad=0.2)


def _widen(ax: Axes) -> None:
    """A value that hardly moves is drawn as a line, not as its own rounding."""
    low, high = ax.get_ylim()
    least = 1e-3 * max(1.0, abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        ax.set_ylim(middle - least, middle + least)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, past the last) of each run of True."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@contextmanager
def _figure(height: float) -> Iterator[Any]:
    """A figure 11 inches wide and the function that gives its PNG file, in the house's style."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color")
    parameters: Any = dict.fromkeys(inked, INK) | {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.2,
        "lines.linewidth": 1.3,
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    buffer = io.BytesIO()
    with mpl.rc_context(parameters):
        figure = Figure(figsize=(11, height), dpi=110, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure, buffer.getvalue
        figure.savefig(buffer, format="png", metadata={"Software": None})
