"""OGBench's cube-single, task 1: Q-chunking's family on the same data, offline and then through real actors.

Every method is one run of the product (a learner and an actor on loopback) on the data set given. A run that was
interrupted goes on, one that is complete is not made again, and the plot is of what there is:

    python benchmarks/cube_single.py --data cube-single-play-v0.npz --out runs/cube_single --plot cube_single.png

The sizes are small enough for two cores: networks of 2 x 256, best of 8. Success is over `--episodes` held-out starts.
`--task` takes another of OGBench's tasks with its data, such as cube-double-play-singletask-task2-v0.

`--published DIR` trains the published code of a checkout as well, offline, at the same sizes and by its own evaluation.
Without it the plot of task 1, from 30,000 offline updates on, has the curves of `results/cube_single_published.json`,
and a second panel over training time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support import published_code, results
from support.cli_args import add_settings, chosen, keep_plan, make_parser, settings
from support.curves import Value, draw_curves
from support.published_code import CONTESTANTS, SOURCE
from support.results import Checkpoint

from serl_chunk.runs.metrics import read_metrics

TASK = "cube-single-play-singletask-task1-v0"
SMALL = ("agent.value_hidden_dims=256,256", "agent.actor_hidden_dims=256,256", "agent.flow_steps=5")
GAUSSIAN = ("agent.critic.hidden=256,256", "agent.hidden=256,256")


class Method(NamedTuple):
    """What is changed of the experiment `ogbench`."""

    preset: str | None
    settings: tuple[str, ...]


METHODS = {
    "ours": Method(None, ()),
    "qc": Method("qc", (*SMALL, "agent.actor_num_samples=8")),
    "qc-fql": Method("qc-fql", (*SMALL, "agent.alpha=300")),
    "qc-rlpd": Method("qc-rlpd", GAUSSIAN),
    "rlpd-qc": Method("rlpd-qc", GAUSSIAN),
    "bc": Method("bc", ("agent.flow.hidden=256,256", "agent.flow.steps=5")),
}
# What makes an update cheaper (benchmarks/updates.py --savings), asked for by name.
SAVINGS = {
    "qc-rlpd-critic-first": Method("qc-rlpd", (*GAUSSIAN, "learner.cta_ratio=4")),  # the policy once in four
    "qc-rlpd-subset": Method("qc-rlpd", (*GAUSSIAN, "agent.critic.target_subset=2")),  # two random heads in the target
}
# Ours with returns of two and of five chunks, asked for by name; the policy's chunk stays.
LONGER = {f"n-step-{n}": Method(None, (f"chunk.return_steps={n}",)) for n in (10, 25)}
EVERY = METHODS | SAVINGS | LONGER

RECORDED = results.FOLDER / "cube_single_published.json"  # the published code's runs on TASK


def command(method: Method, args: argparse.Namespace, seed: int, run: Path) -> list[str]:
    out = [sys.executable, "-m", "serl_chunk", "--exp_name", "ogbench", "--learner", "--debug", "--seed", str(seed)]
    out += ["--demo_path", str(args.data), "--demo_env", args.task, "--env_name", args.task]
    out += ["--checkpoint_path", str(run)]
    out += ["--offline_steps", str(args.offline_steps), "--online_steps", str(args.online_steps)]
    out += ["--eval_interval", str(args.eval_interval), "--eval_episodes", str(args.episodes)]
    out += ["--preset", method.preset] if method.preset else []
    # The command starts both: an actor beside the learner, on loopback and in lockstep.
    out += ["--actor", "--port", str(args.port)] if args.online_steps else []
    fixed = [f"learner.max_steps={max(1, args.online_steps)}", f"learner.checkpoint_period={args.eval_interval}"]
    fixed += [f"learner.training_starts={min(1_000, args.online_steps // 2)}"]
    return out + [f"--config.{s}" for s in (*fixed, *method.settings, *args.set)]


def evaluations(run: Path, episodes: int) -> list[Checkpoint]:
    """Return a run's evaluations; `wall` leaves them out."""
    return [
        Checkpoint(
            row["step"],
            round(row["success_rate"] * episodes),
            episodes,
            env_steps=row["env_steps"],
            wall=round(row["wall"], 1),
        )
        for row in sorted(read_metrics(run)["eval"], key=lambda row: row["step"])
    ]


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


def finished(points: Sequence[Checkpoint], args: argparse.Namespace) -> bool:
    """Whether a run was evaluated at its end."""
    if not points:
        return False
    if args.online_steps:
        return (points[-1].env_steps or 0) >= args.online_steps
    return points[-1].updates >= args.offline_steps


def main() -> None:
    p = make_parser(__doc__)
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
    args = p.parse_args()
    everyone = [*METHODS, *(CONTESTANTS if args.published else ())]
    names = chosen(p, args.methods, [*EVERY, *CONTESTANTS], "method") if args.methods else everyone
    settings(p, args.set)
    published_code.check(p, names, args)
    commit = published_code.commit_of(args.published) if args.published else ""
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
                if not finished(evaluations(run, args.episodes), args):  # also one that is told to stop has status 0
                    raise SystemExit(f"{name}, seed {seed} was stopped; run the same command again; see {log}")
                done.touch()
            preset = [f"preset={method.preset}"] if method.preset else []
            points = evaluations(run, args.episodes)
            runs.append(results.Run(name, seed, "ogbench", [*preset, *method.settings, *args.set], points))
            for c in points:
                print(f"  {name:8s} seed {seed}  {c.updates:6d} updates {c.env_steps:6d} online steps {c.wall:6.0f} s  "
                      f"{c.rate:.2f}", flush=True)  # fmt: skip
    if args.json:
        results.write(args.json, runs, published=commit)
    if args.plot:
        axes: dict[str, Value] = {f"updates, online after {args.offline_steps:,}": lambda _, c: c.updates}
        if args.task == TASK and args.offline_steps >= 30_000:  # as long as the recorded curves
            runs += [] if any(run.name in CONTESTANTS for run in runs) else results.read(RECORDED).runs
            axes["training time, minutes (evaluations left out)"] = lambda _, c: c.wall / 60
        draw_curves(runs, args.plot, axes)


if __name__ == "__main__":
    main()
