"""Whether a fall of Q or the disagreement of the critic's heads foretells a failure, on runs of the fake ALOHA task.

Four runs are trained from ten scripted demonstrations, each by a learner and an actor, with and without the scripted
human. Every episode that an actor recorded counts, from the first ones to the last. The alarm is fitted on two runs
(`serl-chunk attention fit`) and tested on the others. Two more signals get a threshold for the same share of false
alarms on the same two runs: the standard deviation of the heads' values of the executed chunk, also as a share of Q
above its lowest values, and a timer. A finished run is not run again:

    python benchmarks/attention.py --json attention.json --png attention.png
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.cli_args import keep_plan, make_parser, write_figures
from support.learning import product, record
from support.ports import free_port

from serl_chunk.attention.alarm import Alarm, FittedRun, Watch
from serl_chunk.attention.fit import Figures, Judged, Trace, fit, judge, trace_of
from serl_chunk.classifier.metrics import auc, roc
from serl_chunk.config.loader import load_experiment
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import RunSource
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.viz.plots import BLUE, GREEN, PURPLE, VERMILLION, add_legend, new_figure, percent_axis, to_png

UPDATES = 6000
ALONE = "actor.intervention=none"
RUNS = {  # name -> seed, settings
    "alone_1": (1, (ALONE,)),
    "human_2": (2, ()),
    "alone_3": (3, (ALONE, "learner.pretrain_steps=3000")),  # a policy that fails more often
    "human_4": (4, ()),
}
FITTED = ("alone_1", "human_2")
TESTED = ("alone_3", "human_4")


class Recorded(NamedTuple):
    """An episode's trace, and the deviation of the heads at its decisions, float64[N]."""

    trace: Trace
    deviation: np.ndarray


Signal = Callable[[Alarm, Recorded], np.ndarray]  # its value at each decision: float64[N]


def fall(alarm: Alarm, one: Recorded) -> np.ndarray:
    watch = Watch(alarm)
    return np.array([watch.fall(q) for q in one.trace.q.tolist()])


def deviation(alarm: Alarm, one: Recorded) -> np.ndarray:
    return one.deviation


def relative_deviation(alarm: Alarm, one: Recorded) -> np.ndarray:
    """The same as a share of Q."""
    return one.deviation / np.maximum(one.trace.q - alarm.low, (alarm.high - alarm.low) / 10)


def timer(alarm: Alarm, one: Recorded) -> np.ndarray:
    """Seconds since the episode's beginning."""
    return one.trace.ticks * one.trace.period


SIGNALS: dict[str, tuple[Signal, str, str]] = {
    "fall": (fall, "fall of Q", BLUE),
    "deviation": (deviation, "deviation of the heads", VERMILLION),
    "relative_deviation": (relative_deviation, "deviation / Q", PURPLE),
    "timer": (timer, "timer", GREEN),
}


def train(name: str, out: Path) -> Path:
    """Train one run unless that was done, and return its folder."""
    seed, settings = RUNS[name]
    run = out / name
    keep_plan(out / f"{name}.plan", [UPDATES, seed, *settings], run)
    if run.exists() and any(row["step"] >= UPDATES for row in read_metrics(run)["train"]):
        return run
    print(f"training {name}", flush=True)
    product(
        "--learner", "--actor", "--debug", "--seed", str(seed), "--port", str(free_port()),
        "--demo_path", str(out / "demos"), "--checkpoint_path", str(run), "--log_level", "warning",
        experiment="fake_aloha", overrides=[f"learner.max_steps={UPDATES}", *settings],
    )  # fmt: skip
    return run


def recorded(run: Path) -> list[Recorded]:
    source = RunSource(run, ReadOptions(cameras=()))
    out = []
    for key in source.keys():
        episode = source.read(key)
        trace = trace_of(key, episode, source.spec.control_hz)
        if trace is not None:
            rows = episode.steps.sparse["decision/q_std"]
            values = np.asarray(rows.values, np.float64)[: len(trace.ticks)]
            assert np.array_equal(rows.index[: len(trace.ticks)], trace.ticks)
            out.append(Recorded(trace, values))
    return out


def highest(signal: Signal, alarm: Alarm, episodes: Sequence[Recorded], *, failed: bool) -> np.ndarray:
    """The highest value of a signal in each episode that failed, or in each of the others."""
    return np.array([signal(alarm, one).max() for one in episodes if one.trace.failed == failed])


def threshold(signal: Signal, alarm: Alarm, episodes: Sequence[Recorded]) -> float:
    """The threshold with the alarm's share of false alarms, as `fit` chooses it."""
    scores = np.sort(highest(signal, alarm, episodes, failed=False))[::-1]
    return float(scores[int(alarm.false_alarms * len(scores) + 1e-9)])


def judged(signal: Signal, alarm: Alarm, least: float, episodes: Sequence[Recorded]) -> list[Judged]:
    out = []
    for one in episodes:
        values, trace = signal(alarm, one), one.trace
        above = np.flatnonzero(values > least)
        lead = float((trace.end - trace.ticks[above[0]]) * trace.period) if len(above) else None
        out.append(Judged(trace, float(values.max()), lead))
    return out


def figures(alarm: Alarm, runs: dict[str, list[Recorded]]) -> dict[str, Any]:
    """The figures of each signal on the tested runs, each apart and together."""
    fitted = [one for name in FITTED for one in runs[name]]
    sets = {name: runs[name] for name in TESTED} | {"all": [one for name in TESTED for one in runs[name]]}
    out: dict[str, Any] = {}
    for key, (signal, _, _) in SIGNALS.items():
        least = threshold(signal, alarm, fitted)
        out[key] = {"threshold": least}
        for name, episodes in sets.items():
            areas = [highest(signal, alarm, episodes, failed=failed) for failed in (True, False)]
            found = Figures.of(judged(signal, alarm, least, episodes))
            out[key][name] = found.to_json() | {"auc": auc(*areas)}
    same = Figures.of(judge(alarm, [one.trace for one in sets["all"]])).to_json()
    assert all(out["fall"]["all"][name] == value for name, value in same.items()), "the product's alarm, and this one"
    return out


def plot(alarm: Alarm, runs: dict[str, list[Recorded]], found: dict[str, Any]) -> bytes:
    """Draw recall over false alarms by episode, a panel for each tested run, with the thresholds as dots."""
    with new_figure(9.0, 4.0) as figure:
        titles = ("without a human", "with the scripted human")
        for ax, name, title in zip(figure.subplots(1, 2), TESTED, titles, strict=True):
            for key, (signal, label, colour) in SIGNALS.items():
                scores = [highest(signal, alarm, runs[name], failed=failed) for failed in (True, False)]
                curve, of = roc(*scores), found[key][name]
                ax.plot(*curve, color=colour, label=label)
                ax.plot(of["false_alarm_rate"], of["recall"], "o", color=colour)
            percent_axis(ax, "failures with an alarm")
            ax.xaxis.set_major_formatter("{x:.0%}")
            ax.set_xlim(-0.03, 1.03)
            ax.set_xlabel("successes with an alarm")
            ax.set_title(title)
        add_legend(ax, "lower right")
        return to_png(figure)


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("runs/attention"), help="folder of the runs")
    p.add_argument("--false_alarms", type=float, default=0.05)
    p.add_argument("--png", type=Path)
    args = p.parse_args()
    record(load_experiment("fake_aloha"), 10, args.out / "demos")
    runs = {name: recorded(train(name, args.out)) for name in RUNS}
    traces = [one.trace for name in FITTED for one in runs[name]]
    alarm = fit(traces, [FittedRun(name, "") for name in FITTED], args.false_alarms)
    tested = figures(alarm, runs)
    out = {
        "alarm": {name: getattr(alarm, name) for name in ("fall", "low", "high", "false_alarms")},
        "fitted": {"runs": FITTED, **alarm.fitted},
        "tested": tested,
        "runs": {name: {"seed": seed, "settings": settings} for name, (seed, settings) in RUNS.items()},
        "updates": UPDATES,
    }
    print(json.dumps(out, indent=1))
    write_figures(args, out)
    if args.png:
        args.png.write_bytes(plot(alarm, runs, tested))


if __name__ == "__main__":
    main()
