"""The report of a run, made from its folder: `report.html` with its plots, `report.png` and `report.json`.

Also a page that compares several runs: final numbers side by side, curves over each other, settings that differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serl_chunk.io import atomic_write, format_duration, format_spread, os_reason, plural
from serl_chunk.runs.episodes import DEMOS
from serl_chunk.runs.evaluations import better_arm
from serl_chunk.runs.folder import read_json
from serl_chunk.runs.metrics import DEMONSTRATION_RECEIVED, Row, RunMetrics, read_metrics, succeeded_alone
from serl_chunk.runs.report import panels as panels
from serl_chunk.runs.report import tables
from serl_chunk.runs.report.panels import WINDOW, Draw
from serl_chunk.types import ConfigError, DataError
from serl_chunk.viz.page import Html, element, facts, figure, note, page, section, table
from serl_chunk.viz.plots import add_legend, downsample, draw_or_say_why, new_figure, panels_svg, percent_axis, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STARTS = {True: "held-out", False: "ignore the seed", None: "not compared"}  # of an evaluation's `starts_repeat`
LAST = 5  # checkpoints whose spread is shown
_OF_HUMANS = (
    " A success without intervention is the policy's own; its share is of all episodes, including those that a human "
    "saved. Evaluations, which have no interventions, decide."
)
_EVALUATION_COLUMNS = (
    "checkpoint", "policy", "episodes", "success", "95 % interval", "starts", "mean time", "mean length", "after",
    "arms",
)  # fmt: skip

_DASHES = ("-", "--", "-.", ":")
_LOSS, LOSS = "critic/critic_loss", "Critic loss"
_ROLLING = f"Mean of the last {panels.WINDOW} episodes."
_ROLLING_OR_EACH = f"{_ROLLING} Of iterations on groups: all sampled episodes of each."


def build_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html`, `.png` and `.json` into the run folder, replacing older ones whole; return the first's path.

    Raises DataError if `run_dir` is not a run folder (it has no `metrics.jsonl`), ConfigError for a bad `config.json`.
    """
    run = Path(run_dir)
    metrics, config = read_metrics(run), tables.read_settings(run)
    report, limits = run / "report.html", panels.value_range(config)
    title = f"{config.get('name') or run.resolve().parent.name}: {run.resolve().name}"
    head, iterates = headline(metrics, config), panels.iterates(metrics, config)
    hz, noted = tables.control_hz(config), run / DEMOS
    demos = read_json(noted)["episodes"] if hz is not None and noted.exists() else []
    window = _window(metrics, config)
    spent = None if hz is None else tables.robot_time(metrics, hz, [e["steps"] for e in demos if "steps" in e], window)
    helped = [] if hz is None else tables.stretches(metrics, hz)
    resumed = (
        f"This run was resumed from a checkpoint: {metrics.superseded:,} rows that a previous process wrote after "
        "that checkpoint are left out; the time they took is not."
    )
    damaged = f"{plural(metrics.bad_lines, 'line')} of metrics.jsonl skipped: damaged."
    known = {"headline": dict(head), "robot_time": spent and spent._asdict(),
             "human_time": [part._asdict() for part in helped]}  # fmt: skip
    atomic_write(run / "report.json", json.dumps(known, indent=1).encode())
    heading = f"{title}\n{head[0][0]}: {head[0][1]}\n{head[1][1]}"
    atomic_write(run / "report.png", _summary(metrics, heading, limits, iterates=iterates))
    content = [
        facts(
            [
                *head,
                *_robot_time_facts(spent, window, streak=not iterates),
                *([("A human's minute", bought)] if (bought := tables.gain(helped)) else []),
            ],
            large=2,
        ),
        *(note(text) for count, text in ((metrics.superseded, resumed), (metrics.bad_lines, damaged)) if count),
        *_figures(metrics, limits, tables.human_time_table(helped), iterates=iterates),
        tables.checks_section(run),
        section("Evaluations", *map(note, _spreads(metrics)), _evaluations(metrics, run), key="evaluations"),
        tables.episodes_section(run, metrics, config),
        section("Origin", table(("", "last process"), tables.origin(config)), key="origin"),
        tables.settings_section(config),
        section("Events", _events(metrics, iterates=iterates), key="events"),
    ]
    atomic_write(report, page(title, *content))
    return report


def headline(metrics: RunMetrics, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the most important values as (name, value): success of the policy alone and in evaluation come first."""
    last = metrics.last() or {"wall": 0.0, "step": 0, "env_steps": 0, "human_ticks": 0}
    episodes = metrics["episode"]
    judged = [row for row in panels.judged_episodes(metrics) if row.get("phase") != "warmup"][-WINDOW:]
    warmup = sum(row.get("phase") == "warmup" for row in episodes)
    streamed = sum(str(row.get("text")).startswith(DEMONSTRATION_RECEIVED) for row in metrics["event"])
    if iterates := panels.iterates(metrics, config):
        success, more = _last_iteration(metrics)
    else:
        success = f"Success without intervention, last {WINDOW} episodes", _share([*map(succeeded_alone, judged)])
        more = f"Success with or without intervention, last {WINDOW}", _share([r["succeed"] for r in judged])
    return [
        success,
        ("Evaluation", _evaluation_sentence(metrics["eval"])),
        more,
        ("Duration", format_duration(last["wall"])),
        ("Iterations" if iterates else "Critic updates", f"{last['step']:,}"),
        ("Environment steps", f"{last['env_steps']:,}"),
        *([("Human ticks", _human(last, tables.control_hz(config)))] if last["human_ticks"] or not iterates else []),
        ("Episodes", f"{len(episodes):,}" + (f" ({warmup:,} of them warm-up)" if warmup else "")),
        *([("Demonstrations received", f"{streamed:,}")] if streamed else []),
    ]


def _last_iteration(metrics: RunMetrics) -> tuple[tuple[str, str], tuple[str, str]]:
    rows = panels.sampled(metrics)
    success = groups = "none yet"
    if rows:
        first, last = rows[0], rows[-1]
        count, mixed, solved = (f"{last[f'group/{name}']:.0f}" for name in ("groups", "mixed", "solved"))
        success, groups = _percent(last["group/success"]), f"{count}: {mixed} mixed, {solved} solved"
        if last is not first:
            success += f"; first iteration: {_percent(first['group/success'])}"
    return ("Success of sampled episodes, last iteration", success), ("Groups, last iteration", groups)


def _window(metrics: RunMetrics, config: Mapping[str, Any]) -> int:
    # Of many episodes at once the short ones end first, which are successes mostly: a whole iteration's are counted.
    rows, size = panels.sampled(metrics), (config.get("group") or {}).get("size", 0)
    return int(rows[-1]["group/groups"] * size) if rows and size else WINDOW


def _robot_time_facts(spent: tables.RobotTime | None, window: int, *, streak: bool) -> list[tuple[str, str]]:
    if spent is None or not spent.robot_minutes:
        return []
    rate, alone, shown = spent.successes_per_10_min, spent.success_s, spent.demonstration_s
    against = f"; the demonstrations' {shown:.1f} s" if shown is not None else ""
    return [
        ("Robot time", f"{spent.robot_minutes:.1f} min of motion, {spent.human_seconds:.0f} s of them a human's"),
        (f"Successes per 10 min, last {window} episodes", "unknown" if rate is None else f"{rate:.1f}"),
        *([("Successes in a row, without intervention", f"{spent.longest_streak:,} at most")] if streak else []),
        ("Median time of a success", f"{_measured(alone, 's')}{against}"),
        *([] if spent.resets is None else [("Robot time without a reset of the scene", _unreset(spent))]),
    ]


def _unreset(spent: tables.RobotTime) -> str:
    longest = f"{spent.longest_unreset_minutes:.1f} min at a time at most, with the other task's"
    return (
        f"{spent.unreset_minutes:.1f} of {spent.robot_minutes:.1f} min; {longest}; {plural(spent.resets or 0, 'reset')}"
    )


def _figures(
    metrics: RunMetrics, limits: tuple[float, float] | None, human_time: Html, *, iterates: bool
) -> list[Html]:
    axes = [a for a in panels.AXES if a[0] not in panels.NEVER or panels.has_changed(metrics, a[0])]  # the run advanced
    n, rolling = len(metrics["episode"]), f"the mean of the last {WINDOW} episodes"
    no_episode = "No episode has finished in this run yet."
    no_training = "No training step has been logged in this run yet."
    losses, intervened = panels.loss_keys(metrics), panels.has_changed(metrics, "human_ticks")
    no_human = "No human has acted in this run." if n else no_episode

    def over(draw: Callable[..., bool], *first: tuple[str, str]) -> list[Draw]:
        return [panels.panel_over(draw, axis) for axis in (*first, *axes)]

    def built(key: str, title: str, drawn: Sequence[Draw], missing: str, caption: str, *more: Html) -> Html:
        svg = panels_svg([panels.of(metrics, draw) for draw in drawn])
        return section(title, figure(svg, f"{title}: {caption}", caption) if svg else note(missing), *more, key=key)

    intervention = built(
        "intervention", "Intervention share", over(panels.draw_intervention) if intervened else [], no_human,
        f"Share of human steps, idle ones included, and of episodes with an intervention; {rolling}. Both should "
        "fall as the policy learns.", human_time,
    )  # fmt: skip
    loss = built(
        "losses", "Losses", [panels.loss_panel(key) for key in losses], no_training,
        f"{', '.join(losses)}; on a logarithmic scale where every value is positive and the largest ten times the "
        "smallest.",
    )  # fmt: skip
    if iterates:
        no_iteration = "No iteration has ended in this run yet."
        return [
            built(
                "success", "Success rate", over(panels.draw_iterations, panels.ITERATIONS), no_iteration,
                "Share of an iteration's sampled episodes that succeeded, at its end and under the policy of its "
                "beginning, and evaluations with their 95 % intervals. Evaluations decide: their starts are held out.",
            ),
            built(
                "groups", "Groups", panels.group_panels(metrics), no_iteration,
                "Of each iteration: shares of groups that are mixed, whose outcomes differ, and that all their "
                "episodes solved; how far its gradient steps moved the policy (approximate KL, clip fraction), or "
                "FlowIPO's weights w; seconds of each stage, and environment steps per second of both.",
            ),
            *([intervention] if intervened else []),
            loss,
        ]  # fmt: skip
    return [
        built(
            "success", "Success rate", over(panels.draw_success, panels.UPDATES), no_episode,
            f"Success rate of {n} episodes as {rolling}, and evaluations with their 95 % intervals. Grey: before "
            f"training on online steps.{_OF_HUMANS if intervened else ''}",
        ),
        built(
            "return", "Return", over(panels.draw_return), no_episode,
            f"Undiscounted return of {n} episodes: the sum of an episode's rewards, and {rolling}.",
        ),
        intervention,
        built(
            "q-return", "Q against realised return",
            [panels.calibration_panel(limits), panels.draw_q_trend, panels.draw_q_train],
            "No value of the critic with a known return has been recorded in this run yet.",
            f"Left: the critic's value at decisions of the last {panels.CALIBRATION_EPISODES} episodes that terminated "
            "and the discounted return from there; at a truncation no return is known. The critic is calibrated where "
            "the squares' 95 % intervals, of a tenth of "
            "the decisions each, reach the dashed line; states below it proved worse than their value. Intervals count "
            "episodes, not decisions. Where a human intervened, the return is not the policy's own, and the squares "
            "leave it out as long as there are others. Right: means of an episode; values and targets in batches.",
        ),
        loss,
        built(
            "rates", "Rates and waits",
            [panels.draw_rates, panels.draw_waits, panels.draw_timers, panels.draw_replay], no_training,
            "Updates and environment steps per second, shares of waiting, mean times, and windows in the replay. A "
            "learner that waits for actors needs more of them or a higher utd_ratio; actors that wait need a faster "
            "learner or a lower one.",
        ),
    ]  # fmt: skip


def _summary(metrics: RunMetrics, headline: str, limits: tuple[float, float] | None, *, iterates: bool) -> bytes:
    losses = panels.loss_keys(metrics)
    axis = panels.AXES[0] if panels.has_changed(metrics, "env_steps") else panels.UPDATES
    success: Callable[..., bool] = panels.draw_success
    more: list[tuple[str, Draw]] = [
        ("Intervention share", panels.panel_over(panels.draw_intervention, panels.AXES[0])),
        ("Q against realised return", panels.calibration_panel(limits)),
    ]
    if iterates:
        success, more = panels.draw_iterations, [("Groups", panels.draw_group_shares), ("Change", panels.draw_change)]
    drawn: list[tuple[str, Draw]] = [
        ("Success rate", panels.panel_over(success, axis)),
        *more,
        (losses[0], panels.loss_panel(losses[0])) if losses else ("Losses", lambda ax, metrics: False),
    ]
    with new_figure(14, 10, dpi=100) as picture:
        picture.suptitle(headline, fontsize=13)
        for ax, (title, draw) in zip(picture.subplots(2, 2).flat, drawn, strict=True):
            draw_or_say_why(ax, panels.of(metrics, draw))
            ax.set_title(f"{title} ({ax.get_title()})" if ax.get_title() else title)
        return to_png(picture)


def _evaluation_sentence(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.get("success_rate") is not None]
    if not known:
        return "not evaluated yet"
    row = max(enumerate(known), key=lambda r: (r[1].get("mode") == "mean", not r[1].get("arm"), r[0]))[1]
    same = (r for r in known if _policy(r) == _policy(row) and r["step"] < row["step"])
    first = min(same, key=lambda r: r["step"], default=None)
    before = f"; checkpoint {first.get('checkpoint')}: {_percent(first['success_rate'])}" if first else ""
    return (
        f"{_percent(row['success_rate'])} success in {row.get('n')} episodes (95 % Wilson interval {_interval(row)}), "
        f"{_policy(row)} policy of checkpoint {row.get('checkpoint')}{before}"
    )


def _policy(row: Row) -> str:
    return " ".join(filter(None, (row.get("mode"), row.get("arm"))))


def _spreads(metrics: RunMetrics) -> list[str]:
    rates: dict[str, dict[int, float]] = {}
    for row in panels.evaluations(metrics):
        rates.setdefault(_policy(row), {})[row["step"]] = row["success_rate"]
    return [
        f"{policy} policy, its last checkpoints: {format_spread(list(of.values())[-LAST:])}"
        for policy, of in rates.items()
        if len(of) > 2
    ]


def _evaluations(metrics: RunMetrics, run: Path) -> Html:
    rows = [
        (
            row.get("checkpoint"), _policy(row), row.get("n"), _percent(row.get("success_rate")), _interval(row),
            STARTS.get(row.get("starts_repeat"), "unknown"),
            _measured(row.get("mean_time_s"), "s"), _measured(row.get("mean_length"), "steps"),
            f"{row['env_steps']:,} steps, {format_duration(metrics.trained_wall(row))}",
            better_arm(run, row["step"]),
        )
        for row in metrics["eval"]
    ]  # fmt: skip
    return table(_EVALUATION_COLUMNS, rows, "No evaluation has been made of this run yet.")


def _events(metrics: RunMetrics, *, iterates: bool) -> Html:
    rows = [(format_duration(r["wall"]), f"{r['step']:,}", str(r.get("text", ""))) for r in metrics["event"]]
    _, counted = panels.ITERATIONS if iterates else panels.UPDATES
    return table(("time", counted, "event"), rows, "Nothing out of the ordinary was recorded.")


def _human(last: Row, hz: float | None) -> str:
    ticks, steps = last["human_ticks"], last["env_steps"]
    details = [format_duration(ticks / hz)] if hz else []
    if steps:
        details.append(f"{_percent(ticks / steps)} of environment steps")
    return f"{ticks:,}" + (f" ({', '.join(details)})" if details else "")


def _share(good: Sequence[Any]) -> str:
    total, n = sum(good), len(good)
    return f"{total} of {n} ({_percent(total / n)})" if n else "none yet"


def _interval(row: Row) -> str:
    low, high = row.get("low"), row.get("high")
    return "unknown" if low is None or high is None else f"{_percent(low)} to {_percent(high)}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _measured(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.1f} {unit}"


Rows = Callable[[RunMetrics], list[Row]]
Curve = Callable[[RunMetrics, str], tuple[np.ndarray, np.ndarray]]  # of a run over a counter: x, y


def build_comparison(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """Write one HTML page that compares two runs or more, replacing an older one whole, and return its path.

    By default it is `report_vs_<names of the others>.html` in the first run. Raises ConfigError for a run that is given
    twice or a damaged `config.json`, DataError for a folder that is no run or a page that cannot be written.
    """
    runs = [Path(run) for run in run_dirs]
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError(f"must be different folders, got {', '.join(map(str, runs))}", parameter="run_dirs")
    names = _names(runs)
    metrics, configs = [read_metrics(run) for run in runs], [tables.read_settings(run) for run in runs]
    heads = [headline(m, c) for m, c in zip(metrics, configs, strict=True)]
    differ = table(("setting", *names), differing_settings(configs), "All settings are the same.")
    content = [
        element("p", "Each run has its colour and line style in all plots."),
        section("Final numbers", _side_by_side(names, heads), key="numbers"),
        *(_curves(names, metrics, *plotted) for plotted in PLOTS),
        section("Settings that differ", differ, key="configuration"),
        section("Origin", _side_by_side(names, map(tables.origin, configs)), key="origin"),
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
        dict(tables.flatten({k: v for k, v in c.items() if k not in ("serl_chunk", "process", "run_id")}))
        for c in configs
    ]
    paths = dict.fromkeys(path for each in flat for path in each)
    rows = [(path, *(each.get(path, "absent") for each in flat)) for path in paths]
    return [row for row in rows if len(set(row[1:])) > 1]


def _side_by_side(names: Sequence[str], runs: Iterable[list[tuple[str, str]]]) -> Html:
    values = [*map(dict, runs)]
    rows = dict.fromkeys(name for of in values for name in of)
    return table(("", *names), [(name, *(of.get(name, "") for of in values)) for name in rows])


def _names(runs: Sequence[Path]) -> list[str]:
    parts = [run.resolve().parts for run in runs]
    depth = next(d for d in range(1, max(map(len, parts)) + 1) if len({p[-d:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


def _curve(rows: Rows, value: str | Callable[[Row], float], *, rolling: bool = True) -> Curve:
    def curve(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
        if rolling and panels.iterations(metrics):  # whose episodes end in the order of their lengths
            return np.empty(0), np.empty(0)
        chosen = rows(metrics)
        y = np.array([row[value] if isinstance(value, str) else value(row) for row in chosen], float)
        return panels.x_values(chosen, key), panels.rolling_mean(y) if rolling else y

    return curve


def _evaluated(metrics: RunMetrics) -> list[Row]:
    rows = panels.evaluations(metrics)
    return [row for row in rows if row.get("mode") == "mean"] or rows


_of_iterations = _curve(panels.sampled, "group/success", rolling=False)
_of_episodes = _curve(panels.judged_episodes, succeeded_alone)


def _success(metrics: RunMetrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    return (_of_iterations if panels.iterations(metrics) else _of_episodes)(metrics, key)


PLOTS: tuple[tuple[str, str, str, Curve, bool], ...] = (  # title, y axis, caption, curve, whether it is a share
    ("Success without intervention", "success", _ROLLING_OR_EACH, _success, True),
    (
        "Evaluations", "success", "Each at its checkpoint; intervals are in the runs' own reports.",
        _curve(_evaluated, "success_rate", rolling=False), True,
    ),
    ("Return", "return", _ROLLING, _curve(panels.with_return, "episode/r"), False),
    (
        "Intervention share", "share of an episode's steps", _ROLLING,
        _curve(panels.with_steps, lambda row: (row.get("intervention_steps") or 0) / row["episode/l"]), True,
    ),
    (
        LOSS, _LOSS, "As logged.",
        _curve(lambda metrics: [r for r in metrics["train"] if r.get(_LOSS) is not None], _LOSS, rolling=False), False,
    ),
)  # fmt: skip


def axes_of(runs: Sequence[RunMetrics]) -> list[tuple[str, str]]:
    """Return the counters over which runs are compared, with their labels: those that advanced, and wall time."""
    kinds = {panels.ITERATIONS if panels.iterations(metrics) else panels.UPDATES for metrics in runs}
    axes = [*(kinds if len(kinds) == 1 else ()), panels.AXES[0], panels.AXES[2]]  # an iteration is no update
    return [axis for axis in axes if axis[0] == "wall" or any(panels.has_changed(run, axis[0]) for run in runs)]


def _curves(
    names: Sequence[str], runs: Sequence[RunMetrics], title: str, ylabel: str, caption: str, curve: Curve, share: bool
) -> Html:
    def lines(key: str) -> list[Line]:
        return [Line(name, *curve(metrics, key)) for name, metrics in zip(names, runs, strict=True)]

    return over_axes(runs, lines, title, ylabel, f"of {' and '.join(names)}", caption, share=share)


class Line(NamedTuple):
    """A named curve, each float64[N], with the band around it, if there is one."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def over_axes(
    runs: Sequence[RunMetrics], lines: Callable[[str], list[Line]], title: str, ylabel: str, whose: str, caption: str,
    *, share: bool,
) -> Html:  # fmt: skip
    """Build a section with curves over each counter that advanced in any of the runs; empty without a point.

    Args:
        lines: returns the curves over a counter.
        whose: they are, for the figure's text.
        share: they are shares.
    """

    def panel(key: str, label: str) -> Callable[[Axes], bool]:
        def draw(ax: Axes) -> bool:
            shown = lines(key)
            for i, line in enumerate(shown):
                colour = panels.STYLES[i % len(panels.STYLES)][0]
                style = _DASHES[(i + i // len(_DASHES)) % len(_DASHES)]
                dot = "o" if len(line.x) <= 50 else None
                ax.plot(*downsample(line.x, line.y), style, color=colour, marker=dot, ms=3, label=line.name)
                if line.low is not None and line.high is not None:
                    ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, lw=0)
            if share:
                percent_axis(ax, ylabel)
            ax.set_ylabel(ylabel)
            ax.set_xlabel(label)
            add_legend(ax)
            return any(len(line.x) for line in shown)

        return draw

    kinds = {panels.ITERATIONS if panels.iterations(metrics) else panels.UPDATES for metrics in runs}
    axes = [*(kinds if len(kinds) == 1 else ()), panels.AXES[0], panels.AXES[2]]  # an iteration is no update
    moved = [axis for axis in axes if axis[0] == "wall" or any(panels.has_changed(run, axis[0]) for run in runs)]
    svg = panels_svg([panel(*axis) for axis in moved])
    alt = f"Line charts of {title.lower()} {whose}."
    return section(title, figure(svg, alt, caption), key=title.split()[0]) if svg else Html()
