"""What critics promised beside what was realised, of several runs side by side: one panel a run, and its bias.

A point is a decision of an online episode: the value of the chosen chunk, and the discounted return from there to the
task's termination. Truncated episodes are left out, for the critic bootstraps where they end. Squares are tenths of the
decisions by value, with 95 % intervals over episodes (serl_chunk/runs/report/panels.py). For the losses of the critic,
from runs that ablations.py made:

    python benchmarks/calibration.py bounded=runs/ablations/fake_aloha/default/rl_helper_0 \\
        squared=runs/ablations/fake_aloha/squared/rl_helper_0 --plot calibration.png
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support.cli_args import make_parser, write_figures

from serl_chunk.runs.metrics import read_metrics
from serl_chunk.runs.report.panels import binned, calibration_panel, decisions, value_range


def figures(run: Path) -> dict[str, float]:
    """Of the decisions without intervention in the second half of a run: their number, bias, and error of the tenths.

    The bias is mean value less mean return; the error is the mean over the tenths of |value - return|.
    """
    rows = [row for row in read_metrics(run)["episode"] if "q" in row]
    alone = [row for row in rows[len(rows) // 2 :] if not row["intervention_count"]]
    found = decisions(alone)
    if not len(found.value):
        return {"decisions": 0, "bias": math.nan, "error": math.nan}
    error = np.mean([abs(b.value - b.realised) for b in binned(found)])
    return {"decisions": len(found.value), "bias": found.bias, "error": float(error)}


def plot(runs: dict[str, Path], path: Path) -> None:
    """One panel a run, side by side."""
    figure = Figure(figsize=(4.6 * len(runs), 4.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axis, (name, run) in zip(figure.subplots(1, len(runs), squeeze=False).flat, runs.items(), strict=True):
        calibration_panel(value_range(json.loads((run / "config.json").read_text())))(axis, read_metrics(run))
        if (legend := axis.get_legend()) is not None:
            legend.remove()
        bias = figures(run)["bias"]
        axis.set_title(f"{name} (bias {bias:+.2f} in the second half of the run)", fontsize=9)
    handles = {label: h for axis in figure.axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.savefig(path)


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="NAME=RUN", help="a run folder, and what to call it")
    p.add_argument("--plot", type=Path, help="write the panels here (PNG)")
    args = p.parse_args()
    if bad := [text for text in args.runs if "=" not in text]:
        p.error(f"{bad[0]}: expected NAME=RUN")
    runs = {name: Path(folder) for name, _, folder in (text.partition("=") for text in args.runs)}
    if missing := [run for run in runs.values() if not (run / "config.json").is_file()]:
        p.error(f"{missing[0]} is no run folder: it has no config.json")
    out = {name: figures(run) for name, run in runs.items()}
    for name, f in out.items():
        print(f"{name:24} {f['decisions']:7,} decisions  bias {f['bias']:+.3f}  error of the tenths {f['error']:.3f}")
    if args.plot:
        plot(runs, args.plot)
    write_figures(args, out)


if __name__ == "__main__":
    main()
