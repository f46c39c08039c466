"""Panels of a run's report: each draws one thing into one axes, and returns False where there is nothing to draw."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.experiment import RewardConfig, possible_returns
from serl_chunk.runs.metrics import Row, RunMetrics, succeeded_alone
from serl_chunk.types import BEST, ONE
from serl_chunk.viz import plots
from serl_chunk.viz.plots import BLUE, GREEN, PURPLE, SKY, VERMILLION, add_legend, downsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", RunMetrics], bool]

WINDOW = 20  # episodes in a rolling mean
CALIBRATION_EPISODES = 100  # newest episodes whose values are compared with their returns
BINS = 10  # of the calibration
LEAST_EPISODES = 5  # in a bin, for an interval
_NORMAL = 1.96  # deviations of a two-sided 95 % interval
UPDATES = ("step", "critic updates")
ITERATIONS = ("step", "iterations")
AXES = (("env_steps", "environment steps"), ("human_ticks", "human ticks"), ("wall", "wall time (min)"))
NEVER = {"human_ticks": "no human acted in this run", "env_steps": "no online steps in this run"}
REPLAY = {"replay/online_windows": "online", "replay/demo_windows": "demo"}  # of `Replay.stats`
WAITS = {"wait/learner_s": "learner waits for actors", "wait/actor_s": "actors wait for learner"}
# Of evaluations: mode, arm, marker and colour.
EVALUATED = (
    ("mean", None, "D", GREEN), ("sampled", None, "o", GREEN), ("mean", ONE, "v", PURPLE), ("mean", BEST, "^", SKY),
)  # fmt: skip
STYLES = ((BLUE, "-"), (VERMILLION, "--"), (GREEN, "-."), (PURPLE, ":"))


def of(metrics: RunMetrics, draw: Draw) -> Callable[[Axes], bool]:
    """Bind a panel to the run that it draws."""
    return lambda ax: draw(ax, metrics)


def x_values(rows: Sequence[Row], key: str) -> np.ndarray:
    """Return the rows' counter `key`, float64[N]; wall time in minutes."""
    x = np.array([row[key] for row in rows], float)
    return x / 60 if key == "wall" else x


def rolling_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the mean of the last `WINDOW` values at each place; NaN where it would be of under five."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    stop = np.arange(1, len(total))
    start = np.maximum(stop - WINDOW, 0)
    means = (total[stop] - total[start]) / (stop - start)
    means[: min(4, len(means) - 1)] = math.nan  # a mean of one or two episodes only looks like a result
    return means


def judged_episodes(metrics: RunMetrics) -> list[Row]:
    """Return the episodes whose outcome is known."""
    return [row for row in metrics["episode"] if row.get("succeed") is not None]


def with_return(metrics: RunMetrics) -> list[Row]:
    """Return the episodes with a return."""
    return [row for row in metrics["episode"] if row.get("episode/r") is not None]


def with_steps(metrics: RunMetrics) -> list[Row]:
    """Return the episodes with a step."""
    return [row for row in metrics["episode"] if row.get("episode/l")]


def evaluations(metrics: RunMetrics) -> list[Row]:
    """Return the evaluations with a rate, by their checkpoints' steps, `wall` being when these were written."""
    known = [row for row in metrics["eval"] if row.get("success_rate") is not None]
    return [row | {"wall": metrics.trained_wall(row)} for row in sorted(known, key=lambda row: row["step"])]


def iterations(metrics: RunMetrics) -> list[Row]:
    """Return the train rows of iterations on groups, one each; none in a run of another kind."""
    return [row for row in metrics["train"] if "group/groups" in row]


def sampled(metrics: RunMetrics) -> list[Row]:
    """Return the iterations that closed a group, whose sampled episodes have a success rate."""
    return [row for row in iterations(metrics) if row.get("group/success") is not None]


def iterates(metrics: RunMetrics, config: Mapping[str, Any]) -> bool:
    """Return whether a run trains in iterations on groups; `config` has it before the first one is logged."""
    return (config.get("agent") or {}).get("kind") == GroupAgentConfig.kind or bool(iterations(metrics))


def draw_iterations(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Draw the share of each iteration's sampled episodes that succeeded, and evaluations."""
    if rows := sampled(metrics):
        rates = np.array([row["group/success"] for row in rows], float)
        x, rates = downsample(x_values(rows, x_key), rates)
        ax.plot(x, rates, color=VERMILLION, marker=_dot(rows), label="sampled episodes")
    evaluated = _draw_evaluations(ax, metrics, x_key)
    plots.percent_axis(ax, "success")
    return bool(rows) or evaluated


def draw_success(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Draw the rolling shares of episodes that succeeded, with and without intervention, and evaluations."""
    # Both are shares of all episodes: one of unaided episodes starts high while humans do the difficult ones.
    judged = judged_episodes(metrics)
    for succeeded, label, colour, style in (
        ([row["succeed"] for row in judged], "with or without intervention", BLUE, "--"),
        ([succeeded_alone(row) for row in judged], "without intervention", VERMILLION, "-"),
    ):
        if judged:
            x, shares = downsample(x_values(judged, x_key), rolling_mean(succeeded))
            ax.plot(x, shares, style, color=colour, label=label)
    evaluated = _draw_evaluations(ax, metrics, x_key)
    _shade_warmup(ax, metrics, x_key)
    plots.percent_axis(ax, "success")
    return bool(judged) or evaluated


def _draw_evaluations(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    evaluated = evaluations(metrics)
    for mode, arm, marker, colour in EVALUATED:
        if rows := [row for row in evaluated if (row.get("mode"), row.get("arm")) == (mode, arm)]:
            rate = np.array([row["success_rate"] for row in rows], float)
            bounds = np.array([[row.get("low"), row.get("high")] for row in rows], float).T
            # A learner's are a curve, and those of arms, which are asked for at several checkpoints.
            line = "-" if sum(arm is not None or row.get("by") is not None for row in rows) > 1 else ""
            ax.errorbar(
                x_values(rows, x_key), rate, np.nan_to_num(np.abs(bounds - rate)), fmt=marker + line, lw=1,
                color=colour, capsize=3, ms=5, label=f"evaluation ({arm or mode})",
            )  # fmt: skip
    return bool(evaluated)


def draw_return(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Undiscounted return of every episode, and its rolling mean."""
    if rows := with_return(metrics):
        x, returns = x_values(rows, x_key), [row["episode/r"] for row in rows]
        ax.plot(*downsample(x, np.array(returns, float)), ".", color=PURPLE, ms=3, alpha=0.6, label="episode")
        ax.plot(*downsample(x, rolling_mean(returns)), color=BLUE, label=f"mean of {WINDOW}")
    _shade_warmup(ax, metrics, x_key)
    ax.set_ylabel("return")
    return bool(rows)


def draw_intervention(ax: Axes, metrics: RunMetrics, x_key: str) -> bool:
    """Share of steps on which a human had the robot, idle ones included, and of episodes with an intervention."""
    if rows := with_steps(metrics):
        x = x_values(rows, x_key)
        steps = rolling_mean([row.get("intervention_steps") or 0 for row in rows])
        share = steps / rolling_mean([row["episode/l"] for row in rows])
        touched = rolling_mean([bool(row.get("intervention_count")) for row in rows])
        ax.plot(*downsample(x, touched), "--", color=BLUE, label="of episodes")
        ax.plot(*downsample(x, share), color=VERMILLION, label="of steps")
    _shade_warmup(ax, metrics, x_key)
    plots.percent_axis(ax, "share with a human acting")
    return bool(rows)


class Decisions(NamedTuple):
    """N decisions with a recorded value."""

    value: np.ndarray  # float64[N], the critic's, of the chosen chunk
    realised: np.ndarray  # float64[N], discounted return from there to the task's termination
    episode: np.ndarray  # int64[N], which episode each belongs to

    @property
    def bias(self) -> float:
        return float(self.value.mean() - self.realised.mean())


class Bin(NamedTuple):
    """Decisions of about the same value."""

    value: float  # their mean value
    realised: float  # their mean realised return
    half: float  # of the 95 % interval of `realised`; NaN for fewer than LEAST_EPISODES episodes


def decisions(rows: Iterable[Row]) -> Decisions:
    """Return the decisions in episode rows whose value and return are both known: not those of truncated episodes."""
    valued = (zip(row.get("q") or (), row.get("g") or (), strict=False) for row in rows)
    pairs = ((i, pair) for i, row in enumerate(valued) for pair in row)
    found = [(*pair, i) for i, pair in pairs if None not in pair]
    table = np.array(found, float).reshape(-1, 3)
    return Decisions(table[:, 0], table[:, 1], table[:, 2].astype(np.int64))


def binned(d: Decisions, bins: int = BINS) -> list[Bin]:
    """Return `bins` equally large groups of decisions, ordered by value; fewer where there are fewer decisions.

    The interval is the normal one with the variance of a mean over clusters, sum_e (sum_{i in e} (g_i - m))^2 * E /
    ((E - 1) N^2), for E episodes and N decisions (Liang and Zeger 1986, for a mean).
    """
    out = []
    for group in np.array_split(np.argsort(d.value, kind="stable"), min(bins, len(d.value))):
        value, realised = d.value[group].mean(), d.realised[group].mean()
        residual = np.bincount(d.episode[group], d.realised[group] - realised)
        episodes = len(np.unique(d.episode[group]))
        half = np.nan
        if episodes >= LEAST_EPISODES:
            half = _NORMAL * np.sqrt((residual**2).sum() * episodes / (episodes - 1)) / len(group)
        out.append(Bin(float(value), float(realised), float(half)))
    return out


_BOUNDED = (AcfqlConfig.kind, DecoupledConfig.kind)


def value_range(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the range of the critic of a run's `config.json`; None where it is unbounded, or not recorded."""
    agent, outcome = config.get("agent") or {}, config.get("outcome") or {}
    if agent.get("kind") not in _BOUNDED or "reward" not in config:
        return None
    longest = max((chain.count(">") for chain in outcome.get("stages", ())), default=0)
    reward = RewardConfig(**config["reward"])
    return possible_returns(reward, config["discount"], outcome.get("stage_reward", 0.0) * longest)


def calibration_panel(limits: tuple[float, float] | None) -> Draw:
    """Return a panel of the realised discounted return over the critic's value (`limits`: its range).

    Bins of decisions without intervention (of all where every episode had one) have their mean and its 95 % interval.
    """

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        rows = [row for row in metrics["episode"] if len(decisions([row]).value)][-CALIBRATION_EPISODES:]
        alone = decisions(row for row in rows if not row.get("intervention_count"))
        intervened = decisions(row for row in rows if row.get("intervention_count"))
        if not len(alone.value) and not len(intervened.value):
            return False
        groups = ((intervened, "with intervention", "x", VERMILLION), (alone, "without", ".", BLUE))
        for d, label, marker, colour in groups:
            if len(d.value):
                ax.plot(*downsample(d.value, d.realised), marker, color=colour, ms=4, alpha=0.3, label=label)
        ends = np.concatenate([*alone[:2], *intervened[:2], limits or ()])
        span = [ends.min(), ends.max()]
        ax.plot(span, span, "--", color=plots.text_colour(), lw=1, label="equal: calibrated")
        for end, name in zip(limits or (), ("range of the critic", ""), strict=False):
            ax.axvline(end, color=plots.text_colour(), ls=":", lw=1, label=name)
            ax.axhline(end, color=plots.text_colour(), ls=":", lw=1)
        best = alone if len(alone.value) else intervened
        bins = np.array(binned(best))
        ax.errorbar(
            bins[:, 0], bins[:, 1], bins[:, 2], fmt="s-", color=GREEN, ms=5, lw=1.6, capsize=3, zorder=3,
            label="mean of a tenth, 95 %",
        )  # fmt: skip
        for text, x, y, place in (("critic too low", 0.04, 0.6, "top"), ("critic too high", 0.94, 0.09, "bottom")):
            side = "left" if x < 0.5 else "right"
            ax.text(x, y, text, transform=ax.transAxes, ha=side, va=place, fontsize=8, style="italic", alpha=0.7)
        which = "without intervention" if len(alone.value) else "with intervention"
        ax.set_title(f"Q - return, {which}: {best.bias:+.3g}", fontsize=9)
        ax.set_xlabel("critic's value Q at the decision")
        ax.set_ylabel("realised discounted return")
        add_legend(ax, "upper left")
        return True

    return draw


def draw_q_trend(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean value and mean realised return of each episode, rolling, over environment steps."""
    valued = [(row, d) for row in metrics["episode"] if row.get("q") and len((d := decisions([row])).value)]
    if valued:
        means = np.array([(d.value.mean(), d.realised.mean()) for _, d in valued])
        x = x_values([row for row, _ in valued], "env_steps")
        ax.plot(*downsample(x, rolling_mean(means[:, 0])), color=BLUE, label="Q")
        ax.plot(*downsample(x, rolling_mean(means[:, 1])), "--", color=VERMILLION, label="realised return")
        add_legend(ax)
    ax.set_xlabel("environment steps")
    ax.set_ylabel("mean over an episode")
    return bool(valued)


def train_panel(
    keys: Mapping[str, str], ylabel: str,
    *, scale: float = 1.0, floor: float | None = None, legend: bool = True, axis: tuple[str, str] = AXES[2],
) -> Draw:  # fmt: skip
    """Panel of train metrics, key -> label, over wall time or another axis, null values as gaps."""

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        recorded = [key for key in keys if any(row.get(key) is not None for row in metrics["train"])]
        for key, (colour, style) in zip(recorded, STYLES, strict=False):
            rows = [row for row in metrics["train"] if key in row]
            x, y = downsample(x_values(rows, axis[0]), np.array([row[key] for row in rows], float) * scale)
            ax.plot(x, y, style, color=colour, marker=_dot(rows), label=keys[key])
        if recorded and legend:
            add_legend(ax)
        if floor is not None:
            ax.set_ylim(bottom=floor)
        ax.set_xlabel(axis[1])
        ax.set_ylabel(ylabel)
        return bool(recorded)

    return draw


draw_q_train = train_panel(
    {"critic/predicted_qs": "predicted", "critic/target_qs": "target"}, "value in training batches"
)
draw_rates = train_panel(
    {"rates/updates_per_s": "updates", "rates/env_steps_per_s": "environment steps"}, "per second", floor=0
)
draw_replay = train_panel(REPLAY, "windows in replay", floor=0)


def wait_shares(metrics: RunMetrics) -> RunMetrics:
    """Return the train rows with `WAITS` as shares of each logged period."""
    seconds = np.diff([0.0, *(row["wall"] for row in metrics["train"])])
    shares = [
        row | {key: row[key] / s if s > 0 and row.get(key) is not None else None for key in WAITS}
        for row, s in zip(metrics["train"], seconds, strict=True)
    ]
    return RunMetrics({"train": shares})


def draw_waits(ax: Axes, metrics: RunMetrics) -> bool:
    """Share of each logged period in which the learner, and the actors, waited for the other side."""
    drawn = train_panel(WAITS, "")(ax, wait_shares(metrics))
    plots.percent_axis(ax, "share of time waiting")
    return drawn


def draw_timers(ax: Axes, metrics: RunMetrics) -> bool:
    """Mean milliseconds of each timed part."""
    keys = sorted({key for row in metrics["train"] for key in row if key.startswith("timer/")})[:4]
    labels = {key: key.removeprefix("timer/") for key in keys}
    return train_panel(labels, "mean time (ms)", scale=1e3, floor=0)(ax, metrics)


def _over_iterations(keys: Mapping[str, str], ylabel: str) -> Draw:
    return train_panel(keys, ylabel, floor=0, axis=ITERATIONS)


def draw_group_shares(ax: Axes, metrics: RunMetrics) -> bool:
    """Draw the shares of each iteration's groups that are mixed, and that all their episodes solved."""
    names = {f"group/{name}": name for name in ("mixed", "solved")}
    shares = [row | {key: row[key] / row["group/groups"] for key in names} for row in sampled(metrics)]
    drawn = _over_iterations(names, "")(ax, RunMetrics({"train": shares}))
    plots.percent_axis(ax, "share of groups")
    return drawn


_CHANGE = {"actor/approx_kl": "approximate KL", "actor/clip_fraction": "clip fraction"} | {
    f"actor/mean_weight{of}": f"w of {of[1:] or 'all'}" for of in ("", "_successes", "_failures")
}  # a rule has ratios or weights
_MEAN = "mean of an iteration"
_SECONDS = {"time/collect_s": "collecting", "time/train_s": "training"}
_RATE = {"rates/env_steps_per_s": "environment steps"}
_COUNTS = {f"group/{name}": name.replace("_", " ") for name in ("mastered", "reissued", "dropped", "given_up")}
_OF_TASK = "group/success/"
draw_change = _over_iterations(_CHANGE, _MEAN)


def group_panels(metrics: RunMetrics) -> list[Draw]:
    """Return panels of a run's iterations; what is 0 throughout is left out, and success per task if there is one."""
    rows = iterations(metrics)
    tasks = sorted({key for row in rows for key in row if key.startswith(_OF_TASK)})
    labels = {key: textwrap.shorten(key.removeprefix(_OF_TASK), 30) for key in tasks if len(tasks) > 1}
    more = (
        (_CHANGE, _MEAN), (labels, "success"), (_SECONDS, "seconds"), (_RATE, "per second"),
        (_COUNTS, "starts, tickets, episodes"),
    )  # fmt: skip
    found = [_over_iterations(keys, label) for keys, label in more if any(row.get(key) for row in rows for key in keys)]
    return [draw_group_shares, *found]


def loss_keys(metrics: RunMetrics) -> list[str]:
    """Return up to six losses and errors that occur in train rows, the critic's and the actor's first."""
    keys = {k for row in metrics["train"] for k, v in row.items() if ("loss" in k or "mse" in k) and v is not None}
    return sorted(keys, key=lambda key: (key != "critic/critic_loss", key != "actor/actor_loss", key))[:6]


def loss_panel(key: str) -> Draw:
    """Panel of one loss over wall time, logarithmic where all are positive and they span a decade."""

    def draw(ax: Axes, metrics: RunMetrics) -> bool:
        drawn = train_panel({key: key}, key, legend=False)(ax, metrics)
        values = [row[key] for row in metrics["train"] if row.get(key) is not None]
        if drawn and min(values) > 0 and max(values) >= 10 * min(values):
            ax.set_yscale("log")
        return drawn

    return draw


def panel_over(draw: Callable[[Axes, RunMetrics, str], bool], axis: tuple[str, str]) -> Draw:
    """Panel of `draw` over `UPDATES` or one of `AXES`, or a text where that axis never moved."""
    key, label = axis

    def panel(ax: Axes, metrics: RunMetrics) -> bool:
        ax.set_xlabel(label)
        if key in NEVER and not has_changed(metrics, key):
            plots.draw_no_data(ax, NEVER[key])
            return False
        drawn = draw(ax, metrics, key)
        if drawn and key in ("step", "env_steps"):  # not in every column
            add_legend(ax)
        return drawn

    return panel


def has_changed(metrics: RunMetrics, key: str) -> bool:
    """Return whether a counter of the rows is above 0 anywhere."""
    return any(row[key] for rows in metrics.values() for row in rows)


def _dot(rows: Sequence[Row]) -> str | None:
    return "." if len(rows) < 3 else None  # a line of one point is not seen


def _shade_warmup(ax: Axes, metrics: RunMetrics, x_key: str) -> None:
    if rows := [row for row in metrics["episode"] if row.get("phase") == "warmup"]:
        end = x_values(rows, x_key).max()
        ax.axvspan(0, end, color=plots.text_colour(), alpha=0.08, lw=0, label="before online training")
