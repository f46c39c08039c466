"""OGBench's cube-single, task 1: Q-chunking's family on the same data, offline and then through real actors.

Every method is one run of the product (a learner and an actor on loopback) on the data set given. A run that was
interrupted goes on, one that is complete is not made again, and the plot is of what there is:

    python benchmarks/cube_single.py --data cube-single-play-v0.npz --out runs/cube_single --plot cube_single.png

The sizes are small enough for two cores: networks of 2 x 256, best of 8. Success is over `--episodes` held-out starts.
`--task` takes another of OGBench's tasks with its data, such as cube-double-play-singletask-task2-v0.

`--published DIR` trains the published code of a checkout as well, offline, at the same sizes and by its own evaluation.
Without it the plot of task 1 has the curves of `results/cube_single_published.json`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import published_code, results
from support.cli_args import add_settings, chosen, keep_plan, settings
from support.published_code import CONTESTANTS, SOURCE

from serl_chunk.runs.metrics import read_metrics

TASK = "cube-single-play-singletask-task1-v0"
SMALL = ("agent.value_hidden_dims=256,256", "agent.actor_hidden_dims=256,256", "agent.flow_steps=5")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")


class Method(NamedTuple):
    """What is changed of the experiment `ogbench`, and how its curve is drawn."""

    label: str
    preset: str | None
    settings: tuple[str, ...]
    color: str


METHODS = {
    "ours": Method("ours: the experiment as it is", None, (), "#d62728"),
    "qc": Method("QC, best of 8", "qc", (*SMALL, "agent.actor_num_samples=8"), "#1f77b4"),
    "qc-fql": Method("QC-FQL, alpha 300", "qc-fql", (*SMALL, "agent.alpha=300"), "#2ca02c"),
    "qc-rlpd": Method("QC-RLPD", "qc-rlpd", GAUSSIAN, "#9467bd"),
    "rlpd-qc": Method("RLPD of Q-chunking", "rlpd-qc", GAUSSIAN, "#8c564b"),
    "bc": Method("BC (flow)", "bc", ("agent.flow.hidden=256,256", "agent.flow.steps=5"), "#7f7f7f"),
}  # fmt: skip
POLICY_LATE = ("learner.cta_ratio=4",)
# What makes an update cheaper (benchmarks/updates.py --savings), asked for by name.
SAVINGS = {
    "qc-rlpd-critic-first": Method(
        "QC-RLPD, the policy once in 4", "qc-rlpd", (*GAUSSIAN, *POLICY_LATE), "#c5b0d5"
    ),
    "qc-rlpd-subset": Method(
        "QC-RLPD, 2 random heads in the target", "qc-rlpd", (*GAUSSIAN, "agent.critic.target_subset=2"), "#e377c2"
    ),
}  # fmt: skip
EVERY = METHODS | SAVINGS

RECORDED = results.FOLDER / "cube_single_published.json"  # the published code's runs on TASK


def command(method: Method, args: argparse.Namespace, seed: int, run: Path) -> list[str]:
    """The product's command line for one run."""
    out = [sys.executable, "-m", "serl_chunk", "--exp_name", "ogbench", "--learner", "--debug", "--seed", str(seed)]
    out += [
        "--demo_path",
        str(args.data),
        "--demo_env",
        args.task,
        "--env_name",
        args.task,
        "--checkpoint_path",
        str(run),
    ]
    out += ["--offline_steps", str(args.offline_steps), "--online_steps", str(args.online_steps)]
    out += ["--eval_interval", str(args.eval_interval), "--eval_episodes", str(args.episodes)]
    out += ["--preset", method.preset] if method.preset else []
    # The command starts both: an actor beside the learner, on loopback and in lockstep.
    out += ["--actor", "--port", str(args.port)] if args.online_steps else []
    fixed = [f"learner.max_steps={max(1, args.online_steps)}", f"learner.checkpoint_period={args.eval_interval}"]
    fixed += [f"learner.training_starts={min(1_000, args.online_steps // 2)}"]
    return out + [f"--config.{s}" for s in (*fixed, *method.settings, *args.set)]


def curve(run: Path) -> list[dict[str, Any]]:
    """A run's evaluations: `updates`, `env_steps`, `wall` (seconds, evaluations left out), `rate`, `low`, `high`."""
    return [
        {
            "updates": row["step"],
            "env_steps": row["env_steps"],
            "wall": row["wall"],
            "rate": row["success_rate"],
            "low": row["low"],
            "high": row["high"],
        }
        for row in sorted(read_metrics(run)["eval"], key=lambda row: row["step"])
    ]


def as_run(name: str, seed: int, points: Sequence[dict[str, Any]], args: argparse.Namespace) -> results.Run:
    """Return a run of the product in the common form."""
    method = EVERY[name]
    preset = [f"preset={method.preset}"] if method.preset else []
    checkpoints = [
        results.checkpoint(
            {**p, "step": p["updates"], "success_rate": p["rate"], "wall": round(p["wall"], 1)}, args.episodes
        )
        for p in points
    ]
    return results.Run(name, seed, "ogbench", [*preset, *method.settings, *args.set], checkpoints)


def published_run(name: str, seed: int, args: argparse.Namespace, commit: str) -> results.Run:
    """Train the published code, or read its run where that is complete."""
    file = args.out / f"{name}_seed{seed}.json"
    plan = [args.task, args.data.name, args.offline_steps, args.eval_interval, args.episodes, commit,
            CONTESTANTS[name].options]  # fmt: skip
    keep_plan(args.out / f"{name}_seed{seed}.plan", plan, file)
    if file.exists():
        return results.read(file).runs[0]
    print(f"{name}, seed {seed}: {args.published} ({commit})", flush=True)
    run = published_code.train(
        name,
        seed,
        args,
        lambda c: print(f"  {c.updates} updates {c.wall:.0f} s: {c.successes} of {c.episodes}", flush=True),
    )
    results.write(file, [run], published=commit)
    return run


def finished(points: Sequence[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Whether a run was evaluated at its end."""
    end = ("env_steps", args.online_steps) if args.online_steps else ("updates", args.offline_steps)
    return bool(points) and points[-1][end[0]] >= end[1]


def plot(curves: dict[str, list[dict[str, Any]]], published: Sequence[results.Run], args: argparse.Namespace) -> None:
    """Success with 95 % intervals over updates and over training time, into `args.plot`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for name, points in curves.items():
        method = EVERY[name.partition("/")[0]]
        for axis, key, unit in ((axes[0], "updates", 1000), (axes[1], "wall", 60)):
            x = [p[key] / unit for p in points]
            axis.fill_between(
                x, [p["low"] for p in points], [p["high"] for p in points], color=method.color, alpha=0.12
            )
            axis.plot(x, [p["rate"] for p in points], marker=".", color=method.color, label=method.label)
    for run in published:
        contestant = CONTESTANTS[run.name]
        for axis, key, unit in ((axes[0], "updates", 1000), (axes[1], "wall", 60)):
            x = [getattr(c, key) / unit for c in run.checkpoints]
            y = [c.rate for c in run.checkpoints]
            axis.plot(x, y, ":", marker="x", color=contestant.color, label=contestant.label)
    axes[0].axvline(args.offline_steps / 1000, color="black", linewidth=0.8)
    axes[0].text(args.offline_steps / 1000, 1.01, " online from here", fontsize=8)
    axes[0].set(
        xlabel="updates, thousands", ylabel=f"success, {args.episodes} held-out starts, 95 % interval", ylim=(0, 1.05)
    )
    axes[1].set(xlabel="training time, minutes (evaluations left out)")
    for axis in axes:
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[1].legend(unique.values(), unique.keys(), loc="lower right", fontsize=8)
    figure.suptitle(args.task, fontsize=9)
    figure.savefig(args.plot, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run what is missing, print a line for each evaluation, write the figures and the plot."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="OGBench's .npz of the task's ENV and DATA")
    p.add_argument("--task", default=TASK, help=f"ENV-DATA-singletask-taskN-v0; {TASK} by default")
    p.add_argument("--out", type=Path, default=Path("runs/cube_single"), help="folder of the runs")
    p.add_argument("--methods", help=f"of: {', '.join([*EVERY, *CONTESTANTS])}; by default {', '.join(METHODS)}, and "
                   "with --published those of the published code")  # fmt: skip
    p.add_argument("--seeds", default="0", help="separated by commas")
    p.add_argument("--offline_steps", type=int, default=30_000)
    p.add_argument("--online_steps", type=int, default=20_000)
    p.add_argument("--eval_interval", type=int, default=10_000)
    p.add_argument("--episodes", type=int, default=50)
    p.add_argument("--port", type=int, default=5688)
    add_settings(p, "for every method")
    p.add_argument("--published", type=Path, metavar="DIR", help=f"checkout of {SOURCE}, which trains as well")
    p.add_argument("--published_python", metavar="PATH", help="interpreter that has what that checkout imports")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    args = p.parse_args()
    everyone = [*METHODS, *(CONTESTANTS if args.published else ())]
    names = chosen(p, args.methods, [*EVERY, *CONTESTANTS], "method") if args.methods else everyone
    settings(p, args.set)
    published_code.check(p, names, args)
    commit = published_code.commit_of(args.published) if args.published else ""
    curves: dict[str, list[dict[str, Any]]] = {}
    runs: list[results.Run] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            if name in CONTESTANTS:
                runs.append(published_run(name, seed, args, commit))
                continue
            run = args.out / f"{name}_seed{seed}"
            done, method = run / "complete.json", EVERY[name]
            plan = [args.task, args.data.name, args.offline_steps, args.online_steps, args.eval_interval, args.episodes]
            keep_plan(args.out / f"{run.name}.plan", [*plan, method.preset, *method.settings, *args.set], run)
            if not done.exists():
                print(f"{name}, seed {seed}: {run}", flush=True)
                log = args.out / f"{name}_seed{seed}.log"
                environment = os.environ | {"PYTHONUNBUFFERED": "1"}
                with log.open("a") as file:
                    status = subprocess.run(
                        command(method, args, seed, run), stdout=file, stderr=file, env=environment, check=False
                    ).returncode
                if status:
                    raise SystemExit(f"{name}, seed {seed} ended with status {status}; see {log}")
                if not finished(curve(run), args):  # a run that is told to stop ends with status 0 as well
                    raise SystemExit(f"{name}, seed {seed} was stopped; run the same command again; see {log}")
                done.touch()
            curves[f"{name}/{seed}"] = curve(run)
            runs.append(as_run(name, seed, curves[f"{name}/{seed}"], args))
            for point in curves[f"{name}/{seed}"]:
                print(
                    f"  {name:8s} seed {seed}  {point['updates']:6d} updates {point['env_steps']:6d} online steps "
                    f"{point['wall']:6.0f} s  {point['rate']:.2f} [{point['low']:.2f}, {point['high']:.2f}]",
                    flush=True,
                )
    if args.json:
        results.write(args.json, runs, published=commit)
    if args.plot:
        published = [run for run in runs if run.name in CONTESTANTS]
        if not published and args.task == TASK:
            published = list(results.read(RECORDED).runs)
        plot(curves, published, args)


if __name__ == "__main__":
    main()
