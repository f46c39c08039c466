"""The panels of a report: each draws one thing about a run into one axes, and says whether there was anything."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from serl_chunk.runs.calibration import binned, decisions
from serl_chunk.runs.metric_rows import RunMetrics, succeeded_alone
from serl_chunk.runs.report_style import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILLION,
    WINDOW,
    add_legend,
    downsample,
    draw_no_data,
    percent_axis,
    plot_train,
    rolling_mean,
    shade_warmup,
    text_colour,
    x_values,
)

CALIBRATION_EPISODES = 100  # newest episodes whose values are compared with their returns

UPDATES = ("step", "critic updates")
AXES = (("env_steps", "environment steps"), ("human_ticks", "human ticks"), ("wall", "wall time (min)"))

NEVER = {"human_ticks": "no human acted in this run", "env_steps": "no online steps in this run"}

REPLAY = {"replay/online_windows": "online", "replay/demo_windows": "demo"}  # of `Replay.stats`

Draw = Callable[[Axes, RunMetrics], bool]


def draw_success(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Rolling share of episodes that succeeded, and that did without intervention; evaluations with their intervals.

    Both shares are of all episodes: a curve of the unaided ones alone starts high while humans do the difficult ones.
    """
    judged = [row for row in metrics["episode"] if row.get("succeed") is not None]
    evaluations = [row for row in metrics["eval"] if row.get("success_rate") is not None]
    for succeeded, label, colour, style in (
        ([row["succeed"] for row in judged], "with or without intervention", BLUE, "--"),
        ([succeeded_alone(row) for row in judged], "without intervention", VERMILLION, "-"),
    ):
        if judged:
            x, shares = downsample(x_values(judged, x_key), rolling_mean(succeeded))
            ax.plot(x, shares, style, color=colour, label=label)
    for mode, marker in (("mean", "D"), ("sampled", "o")):
        if rows := sorted((r for r in evaluations if r.get("mode") == mode), key=lambda r: r["step"]):
            rate = np.array([row["success_rate"] for row in rows], float)
            bounds = np.array([[row.get("low"), row.get("high")] for row in rows], float).T
            spread = np.nan_to_num(np.abs(bounds - rate))
            # An evaluation may have been made long after its checkpoint was written.
            x = x_values([row | {"wall": metrics.trained_wall(row)} for row in rows], x_key)
            line = "-" if sum(row.get("by") is not None for row in rows) > 1 else ""  # a learner's are a curve
            ax.errorbar(
                x, rate, spread, fmt=marker + line, lw=1, color=GREEN, capsize=3, ms=5, label=f"evaluation ({mode})"
            )
    shade_warmup(ax, metrics, x_key)
    percent_axis(ax, "success")
    return bool(judged or evaluations)


def draw_return(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Undiscounted return of every episode, and its rolling mean."""
    rows = [row for row in metrics["episode"] if row.get("episode/r") is not None]
    if rows:
        x, returns = x_values(rows, x_key), [row["episode/r"] for row in rows]
        ax.plot(*downsample(x, np.array(returns, float)), ".", color=PURPLE, ms=3, alpha=0.6, label="episode")
        ax.plot(*downsample(x, rolling_mean(returns)), color=BLUE, label=f"mean of {WINDOW}")
    shade_warmup(ax, metrics, x_key)
    ax.set_ylabel("return")
    return bool(rows)


def draw_intervention(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Share of steps on which a human had the robot, idle ones included, and of episodes with an intervention."""
    rows = [row for row in metrics["episode"] if row.get("episode/l")]
    if rows:
        x = x_values(rows, x_key)
        steps = rolling_mean([row.get("intervention_steps") or 0 for row in rows])
        share = steps / rolling_mean([row["episode/l"] for row in rows])
        touched = rolling_mean([bool(row.get("intervention_count")) for row in rows])
        ax.plot(*downsample(x, touched), "--", color=BLUE, label="of episodes")
        ax.plot(*downsample(x, share), color=VERMILLION, label="of steps")
    shade_warmup(ax, metrics, x_key)
    percent_axis(ax, "share with a human acting")
    return bool(rows)


def calibration_panel(limits: tuple[float, float] | None) -> Draw:
    """Realised discounted return over the critic's value, one point a decision; `limits` are a bounded critic's.

    Bins of decisions without intervention (of all where every episode had one) have their mean and its 95 % interval.
    On the line of equality the critic is calibrated.
    """

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        rows = [row for row in metrics["episode"] if row.get("q")][-CALIBRATION_EPISODES:]
        alone = decisions(row for row in rows if not row.get("intervention_count"))
        intervened = decisions(row for row in rows if row.get("intervention_count"))
        if not len(alone.value) and not len(intervened.value):
            return False
        for d, label, marker, colour in (
            (intervened, "with intervention", "x", VERMILLION),
            (alone, "without", ".", BLUE),
        ):
            if len(d.value):
                ax.plot(*downsample(d.value, d.realised), marker, color=colour, ms=4, alpha=0.3, label=label)
        ends = np.concatenate([*alone[:2], *intervened[:2], limits or ()])
        span = [ends.min(), ends.max()]
        ax.plot(span, span, "--", color=text_colour(), lw=1, label="equal: calibrated")
        if limits is not None:
            for end, name in zip(limits, ("range of the critic", ""), strict=True):
                ax.axvline(end, color=text_colour(), ls=":", lw=1, label=name)
                ax.axhline(end, color=text_colour(), ls=":", lw=1)
        best = alone if len(alone.value) else intervened
        bins = np.array(binned(best))
        ax.errorbar(
            bins[:, 0], bins[:, 1], bins[:, 2], fmt="s-", color=GREEN, ms=5, lw=1.6, capsize=3, zorder=3,
            label="mean of a tenth, 95 %",
        )  # fmt: skip
        for text, x, y, place in (("critic too low", 0.04, 0.6, "top"), ("critic too high", 0.94, 0.09, "bottom")):
            side = "left" if x < 0.5 else "right"
            ax.text(x, y, text, transform=ax.transAxes, ha=side, va=place, fontsize=8, style="italic", alpha=0.7)
        who = "without intervention" if len(alone.value) else "with intervention"
        ax.set_title(f"Q - return, {who}: {best.bias:+.3g}", fontsize=9)
        ax.set_xlabel("critic's value Q at the decision")
        ax.set_ylabel("realised discounted return")
        add_legend(ax, "upper left")
        return True

    return draw


def draw_q_trend(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean value and mean realised return of each episode, rolling, over environment steps."""
    told = [(row, d) for row in metrics["episode"] if row.get("q") and len((d := decisions([row])).value)]
    if told:
        means = np.array([(d.value.mean(), d.realised.mean()) for _, d in told])
        x = x_values([row for row, _ in told], "env_steps")
        ax.plot(*downsample(x, rolling_mean(means[:, 0])), color=BLUE, label="Q")
        ax.plot(*downsample(x, rolling_mean(means[:, 1])), "--", color=VERMILLION, label="realised return")
        add_legend(ax)
    ax.set_xlabel("environment steps")
    ax.set_ylabel("mean over an episode")
    return bool(told)


def draw_q_train(ax: Axes, metrics: RunMetrics) -> bool:
    """Values and targets in training batches over critic updates."""
    keys = {"critic/predicted_qs": "predicted", "critic/target_qs": "target"}
    return plot_train(ax, metrics, keys, "value in training batches")


def draw_rates(ax: Axes, metrics: RunMetrics) -> bool:
    """Updates and environment steps per second."""
    keys = {"rates/updates_per_s": "critic updates", "rates/env_steps_per_s": "environment steps"}
    return plot_train(ax, metrics, keys, "per second", floor=0)


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
            ax.plot(*downsample(x_values(rows, "wall"), waited / period), style, color=colour, label=label)
            drawn = True
    if drawn:
        add_legend(ax)
    percent_axis(ax, "share of time waiting")
    ax.set_xlabel("wall time (min)")
    return drawn


def draw_timers(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean milliseconds of each timed part."""
    keys = sorted({key for row in metrics["train"] for key in row if key.startswith("timer/")})[:4]
    return plot_train(ax, metrics, {key: key.removeprefix("timer/") for key in keys}, "mean time (ms)", 1e3, floor=0)


def draw_replay(ax: Axes, metrics: RunMetrics) -> bool:
    """Windows in each replay store."""
    return plot_train(ax, metrics, REPLAY, "windows in replay", floor=0)


def loss_keys(metrics: RunMetrics) -> list[str]:
    """Up to six losses that occur in train rows, the critic's and the actor's first."""
    keys = {key for row in metrics["train"] for key, value in row.items() if "loss" in key and value is not None}
    return sorted(keys, key=lambda key: (key != "critic/critic_loss", key != "actor/actor_loss", key))[:6]


def loss_panel(key: str) -> Draw:
    """A panel of one loss over wall time, logarithmic where all are positive and they span a decade."""

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        drawn = plot_train(ax, metrics, {key: key}, key, legend=False)
        values = [row[key] for row in metrics["train"] if row.get(key) is not None]
        if drawn and min(values) > 0 and max(values) >= 10 * min(values):
            ax.set_yscale("log")
        return drawn

    return draw


def panel_over(draw: Callable[[Axes, RunMetrics, str], bool], axis: tuple[str, str]) -> Draw:
    """`draw` over `UPDATES` or one of `AXES`, with its label; says so where that axis never moved."""
    key, label = axis

    def panel(ax: Axes, metrics: RunMetrics) -> bool:
        ax.set_xlabel(label)
        if key in NEVER and not has_changed(metrics, key):
            draw_no_data(ax, NEVER[key])
            return False
        drawn = draw(ax, metrics, key)
        if drawn and key in ("step", "env_steps"):  # not in every column
            add_legend(ax)
        return drawn

    return panel


def axes_of(metrics: RunMetrics) -> list[tuple[str, str]]:
    """Those of `AXES` along which anything happened in this run; wall time always."""
    return [axis for axis in AXES if axis[0] not in NEVER or has_changed(metrics, axis[0])]


def has_changed(metrics: RunMetrics, key: str) -> bool:
    """Whether a counter of the rows is above 0 anywhere."""
    return any(row[key] for rows in metrics.values() for row in rows)
