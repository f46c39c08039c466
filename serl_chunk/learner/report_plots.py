"""The plots of a report, as SVG for the page and one PNG; the only module that imports matplotlib.

Figures are built without pyplot: no global state, no display, safe beside a training thread. Colours are Okabe and
Ito's, which colour-blind readers tell apart and which keep a contrast of 3:1 on white and on near-black; what colour
says, a marker or a line style says too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from serl_chunk.learner.calibration import binned, decisions
from serl_chunk.learner.run_metrics import Row, RunMetrics

WINDOW = 20  # episodes in a rolling mean
CALIBRATION_EPISODES = 100  # newest episodes whose values are compared with their returns
MAX_POINTS = 1_200  # of one curve; keeps the page of a week-long run small

BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_INK = "#010203"  # stands for the page's text colour, which follows the reader's light or dark scheme
_PNG_INK = "#1b1f24"
_STYLE = "<style>:root{color:#1b1f24}@media(prefers-color-scheme:dark){:root{color:#e6e8eb}}</style>"

UPDATES = ("step", "critic updates")
AXES = (("env_steps", "environment steps"), ("human_ticks", "human ticks"), ("wall", "wall time (min)"))

NEVER = {"human_ticks": "no person acted in this run", "env_steps": "no online steps in this run"}

Draw = Callable[[Axes, RunMetrics], bool]


def draw_figure(metrics: RunMetrics, panels: Sequence[Draw]) -> str | None:
    """`panels` side by side, three a row (four in two rows), as SVG text; None where no panel has data."""
    columns = 2 if len(panels) == 4 else 3
    rows = math.ceil(len(panels) / columns)
    if not rows:
        return None
    with _style(_INK):
        figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        drawn = []
        for ax, draw in zip(axes, panels, strict=False):
            drawn.append(draw(ax, metrics))
            if not drawn[-1] and not ax.texts:
                _say_empty(ax, "nothing recorded yet")
        for ax in axes[len(panels) :]:
            ax.remove()
        return _svg(figure) if any(drawn) else None


def save_summary(metrics: RunMetrics, headline: str, path: Path, *, limits: tuple[float, float] | None = None) -> None:
    """Four panels as a PNG (1400x1000): success, intervention share, Q against return, losses; text where empty.

    `limits`: the range of a bounded critic.
    """
    losses = loss_keys(metrics)
    panels: list[tuple[str, Draw]] = [
        ("Success rate", over(draw_success, AXES[0] if moved(metrics, "env_steps") else UPDATES)),
        ("Intervention share", over(draw_intervention, AXES[0])),
        ("Q against realised return", calibration_panel(limits)),
        (losses[0] if losses else "Losses", loss_panel(losses[0]) if losses else (lambda ax, metrics: False)),
    ]
    with _style(_PNG_INK):
        figure = Figure(figsize=(14, 10), dpi=100, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.suptitle(headline, fontsize=13)
        for ax, (title, draw) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            drawn = draw(ax, metrics)
            ax.set_title(f"{title} ({ax.get_title()})" if ax.get_title() else title)
            if not drawn and not ax.texts:
                _say_empty(ax, "nothing recorded yet")
        figure.savefig(path, format="png")


def draw_success(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Rolling success of all episodes and of those without take-over, and evaluations with their intervals."""
    judged = [row for row in metrics["episode"] if row.get("succeed") is not None]
    alone = [row for row in judged if not row.get("intervention_count")]
    evaluations = [row for row in metrics["eval"] if row.get("success_rate") is not None]
    for rows, label, colour, style in (
        (judged, "all episodes", BLUE, "--"),
        (alone, "without take-over", VERMILLION, "-"),
    ):
        if rows:
            ax.plot(*_thin(_x(rows, x_key), _rolling([r["succeed"] for r in rows])), style, color=colour, label=label)
    for mode, marker in (("mean", "D"), ("sampled", "o")):
        if rows := sorted((r for r in evaluations if r.get("mode") == mode), key=lambda r: r["step"]):
            rate = np.array([row["success_rate"] for row in rows], float)
            bounds = np.array([[row.get("low"), row.get("high")] for row in rows], float).T
            spread = np.nan_to_num(np.abs(bounds - rate))
            # An evaluation may have been made long after its checkpoint was written.
            x = _x([row | {"wall": metrics.trained_wall(row)} for row in rows], x_key)
            line = "-" if sum(row.get("by") is not None for row in rows) > 1 else ""  # a learner's are a curve
            ax.errorbar(
                x, rate, spread, fmt=marker + line, lw=1, color=GREEN, capsize=3, ms=5, label=f"evaluation ({mode})"
            )
    _shade_warmup(ax, metrics, x_key)
    _percent(ax, "success")
    return bool(judged or evaluations)


def draw_return(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Undiscounted return of every episode, and its rolling mean."""
    rows = [row for row in metrics["episode"] if row.get("episode/r") is not None]
    if rows:
        x, returns = _x(rows, x_key), [row["episode/r"] for row in rows]
        ax.plot(*_thin(x, np.array(returns, float)), ".", color=PURPLE, ms=3, alpha=0.6, label="episode")
        ax.plot(*_thin(x, _rolling(returns)), color=BLUE, label=f"mean of {WINDOW}")
    _shade_warmup(ax, metrics, x_key)
    ax.set_ylabel("return")
    return bool(rows)


def draw_intervention(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Share of steps on which a person had the robot, idle ones included, and of episodes with a take-over."""
    rows = [row for row in metrics["episode"] if row.get("episode/l")]
    if rows:
        x = _x(rows, x_key)
        steps = _rolling([row.get("intervention_steps") or 0 for row in rows])
        share = steps / _rolling([row["episode/l"] for row in rows])
        touched = _rolling([bool(row.get("intervention_count")) for row in rows])
        ax.plot(*_thin(x, touched), "--", color=BLUE, label="of episodes")
        ax.plot(*_thin(x, share), color=VERMILLION, label="of steps")
    _shade_warmup(ax, metrics, x_key)
    _percent(ax, "share with a person acting")
    return bool(rows)


def calibration_panel(limits: tuple[float, float] | None) -> Draw:
    """Realised discounted return over the critic's value, one point a decision; `limits` are a bounded critic's.

    Bins of decisions without take-over (of all where every episode had one) have their mean and its 95 % interval. On
    the line of equality the critic is calibrated.
    """

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        rows = [row for row in metrics["episode"] if row.get("q")][-CALIBRATION_EPISODES:]
        alone = decisions(row for row in rows if not row.get("intervention_count"))
        helped = decisions(row for row in rows if row.get("intervention_count"))
        if not len(alone.value) and not len(helped.value):
            return False
        for d, label, marker, colour in ((helped, "with take-over", "x", VERMILLION), (alone, "without", ".", BLUE)):
            if len(d.value):
                ax.plot(*_thin(d.value, d.realised), marker, color=colour, ms=4, alpha=0.3, label=label)
        ends = np.concatenate([*alone[:2], *helped[:2], limits or ()])
        span = [ends.min(), ends.max()]
        ax.plot(span, span, "--", color=_ink(), lw=1, label="equal: calibrated")
        if limits is not None:
            for end, name in zip(limits, ("range of the critic", ""), strict=True):
                ax.axvline(end, color=_ink(), ls=":", lw=1, label=name)
                ax.axhline(end, color=_ink(), ls=":", lw=1)
        best = alone if len(alone.value) else helped
        bins = np.array(binned(best))
        ax.errorbar(
            bins[:, 0], bins[:, 1], bins[:, 2], fmt="s-", color=GREEN, ms=5, lw=1.6, capsize=3, zorder=3,
            label="mean of a tenth, 95 %",
        )  # fmt: skip
        for text, x, y, place in (("critic too low", 0.1, 0.92, "top"), ("critic too high", 0.94, 0.09, "bottom")):
            side = "left" if x < 0.5 else "right"
            ax.text(x, y, text, transform=ax.transAxes, ha=side, va=place, fontsize=8, style="italic", alpha=0.7)
        who = "without take-over" if len(alone.value) else "with take-over"
        ax.set_title(f"Q - return, {who}: {best.bias:+.3g}", fontsize=9)
        ax.set_xlabel("critic's value Q at the decision")
        ax.set_ylabel("realised discounted return")
        _legend(ax)
        return True

    return draw


def draw_q_trend(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean value and mean realised return of each episode, rolling, over environment steps."""
    told = [(row, d) for row in metrics["episode"] if row.get("q") and len((d := decisions([row])).value)]
    if told:
        means = np.array([(d.value.mean(), d.realised.mean()) for _, d in told])
        x = _x([row for row, _ in told], "env_steps")
        ax.plot(*_thin(x, _rolling(means[:, 0])), color=BLUE, label="Q")
        ax.plot(*_thin(x, _rolling(means[:, 1])), "--", color=VERMILLION, label="realised return")
        _legend(ax)
    ax.set_xlabel("environment steps")
    ax.set_ylabel("mean over an episode")
    return bool(told)


def draw_q_train(ax: Axes, metrics: RunMetrics) -> bool:
    """Values and targets in training batches over critic updates."""
    keys = {"critic/predicted_qs": "predicted", "critic/target_qs": "target"}
    return _lines(ax, metrics, keys, "value in training batches")


def draw_rates(ax: Axes, metrics: RunMetrics) -> bool:
    """Updates and environment steps per second."""
    keys = {"rates/updates_per_s": "critic updates", "rates/env_steps_per_s": "environment steps"}
    return _lines(ax, metrics, keys, "per second", floor=0)


def draw_waits(ax: Axes, metrics: RunMetrics) -> bool:
    """Share of each logged period in which the learner, and the actors, waited for the other side."""
    rows = metrics["train"]
    period = np.diff([0.0, *(row["wall"] for row in rows)])
    period[period <= 0] = math.nan
    drawn = False
    for key, label, colour, style in (
        ("wait/learner_s", "learner waits for actors", BLUE, "-"),
        ("wait/actor_s", "actors wait for learner", VERMILLION, "--"),
    ):
        waited = np.array([row.get(key) for row in rows], float)
        if np.isfinite(waited).any():
            ax.plot(*_thin(_x(rows, "wall"), waited / period), style, color=colour, label=label)
            drawn = True
    if drawn:
        _legend(ax)
    _percent(ax, "share of time waiting")
    ax.set_xlabel("wall time (min)")
    return drawn


def draw_timers(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean milliseconds of each timed part."""
    keys = sorted({key for row in metrics["train"] for key in row if key.startswith("timer/")})[:4]
    return _lines(ax, metrics, {key: key.removeprefix("timer/") for key in keys}, "mean time (ms)", 1e3, floor=0)


def draw_replay(ax: Axes, metrics: RunMetrics) -> bool:
    """Windows in each replay store."""
    return _lines(ax, metrics, {"replay/online": "online", "replay/demo": "demo"}, "windows in replay", floor=0)


def loss_keys(metrics: RunMetrics) -> list[str]:
    """Up to six losses that occur in train rows, the critic's and the actor's first."""
    keys = {key for row in metrics["train"] for key, value in row.items() if "loss" in key and value is not None}
    return sorted(keys, key=lambda key: (key != "critic/critic_loss", key != "actor/actor_loss", key))[:6]


def loss_panel(key: str) -> Draw:
    """A panel of one loss over wall time, logarithmic where every value is positive."""

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        drawn = _lines(ax, metrics, {key: key}, key, legend=False)
        if drawn and all(row[key] > 0 for row in metrics["train"] if row.get(key) is not None):
            ax.set_yscale("log")
        return drawn

    return draw


def over(draw: Callable[[Axes, RunMetrics, str], bool], axis: tuple[str, str]) -> Draw:
    """`draw` over `UPDATES` or one of `AXES`, with its label; says so where that axis never moved."""
    key, label = axis

    def panel(ax: Axes, metrics: RunMetrics) -> bool:
        ax.set_xlabel(label)
        if key in NEVER and not moved(metrics, key):
            _say_empty(ax, NEVER[key])
            return False
        drawn = draw(ax, metrics, key)
        if drawn and key in ("step", "env_steps"):  # not in every column
            _legend(ax)
        return drawn

    return panel


def moved(metrics: RunMetrics, key: str) -> bool:
    """Whether a counter of the rows is above 0 anywhere."""
    return any(row[key] for rows in metrics.values() for row in rows)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(_INK, "currentColor").replace(">", f">{_STYLE}", 1)


@contextmanager
def _style(ink: str) -> Iterator[None]:
    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color")
    parameters: Any = dict.fromkeys(inked, ink) | {
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


def _ink() -> str:
    return str(mpl.rcParams["text.color"])


def _x(rows: Sequence[Row], key: str) -> np.ndarray:
    x = np.array([row[key] for row in rows], float)
    return x / 60 if key == "wall" else x


def _rolling(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Mean of the last `WINDOW` values at each place, of fewer at the start; NaN where it would be of under five."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    stop = np.arange(1, len(total))
    start = np.maximum(stop - WINDOW, 0)
    means = (total[stop] - total[start]) / (stop - start)
    means[: min(4, len(means) - 1)] = math.nan  # a mean of one or two episodes only looks like a result
    return means


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` of the points, evenly, the first and the last among them."""
    if len(x) <= MAX_POINTS:
        return x, y
    at = np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)
    return x[at], y[at]


def _lines(
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
            ax.plot(*_thin(_x(rows, "wall"), y), style, color=colour, label=label)
            drawn = True
    if drawn and legend:
        _legend(ax)
    if floor is not None:
        ax.set_ylim(bottom=floor)
    ax.set_xlabel("wall time (min)")
    ax.set_ylabel(ylabel)
    return drawn


def _shade_warmup(ax: Axes, metrics: RunMetrics, x_key: str) -> None:
    if rows := [row for row in metrics["episode"] if row.get("phase") == "warmup"]:
        ax.axvspan(0, _x(rows, x_key).max(), color=_ink(), alpha=0.08, lw=0, label="warm-up")


def _percent(ax: Axes, ylabel: str) -> None:
    ax.set_ylabel(ylabel)
    ax.set_ylim(-0.03, 1.03)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(6))


def _legend(ax: Axes) -> None:
    legend = ax.legend(loc="best")
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # a faint dot among thousands is clear, alone in a legend it is not
            handle.set_alpha(1.0)
            handle.set_markersize(max(6.0, handle.get_markersize()))


def _say_empty(ax: Axes, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, style="italic")
