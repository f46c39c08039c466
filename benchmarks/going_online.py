"""What becomes of a clone when online learning begins: success of N = 1 and of the best of N at every checkpoint.

Demonstrations are scripted and drawn anew for each seed; the experiment's human helps in training, nobody in
evaluations, which are paired: both arms of every checkpoint act from the same starts. Training episodes are counted in
disjoint windows, beside the clone under the exploration of training. A finished run is not run again, an interrupted
one goes on:

    python benchmarks/going_online.py --task fake_aloha --demos 10 --seeds 11,12,13 --json going_online.json
    python benchmarks/going_online.py --task fake_aloha --demos 60 --seeds 11,12 --last 1000 --name 60_demos
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.cli_args import add_settings, differing, keep_plan, settings
from support.results import Checkpoint, Run, add, read

from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.rollouts import Entry, evaluate, evaluate_in_turns
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics, succeeded_alone
from serl_chunk.types import BEST, ONE, Snapshot
from serl_chunk.viz import plots

# Noise of the scripted demonstrator: of the robot's own, or rad.
TASKS = {"fake_aloha": None, "fake_aloha_images": None, "aloha_transfer_cube": 0.01, "aloha_insertion": 0.01}
STARTS = 700_000  # of evaluations here; nothing was tuned on them
WINDOW = 40  # training episodes


class Trained:
    """One run, and its checkpoints as policies."""

    def __init__(self, config: ExperimentConfig, run: Path) -> None:
        self.config, self.run, self.store = config, run, CheckpointStore(run)
        self.env = make_env(config.robot)
        self.agent = make_agent(config, self.env.robot_spec)

    def policy(self, step: int) -> tuple[ChunkPolicy, dict[str, Any]]:
        """The policy of a checkpoint, and what is noted with it."""
        stored = self.store.restore_policy(step)
        preprocess = Preprocess.restored(self.config, self.env.robot_spec, stored.meta, stored.normaliser)
        policy = ChunkPolicy(self.agent, preprocess, self.env.robot_spec, seed=1)
        policy.swap(Snapshot(step, stored.params))
        return policy, stored.meta

    def arms(self, step: int, episodes: int) -> list[Checkpoint]:
        """Both arms of a checkpoint from the same starts, in the order ONE, BEST; kept in a file of the run."""
        file = self.run / f"benchmark_{step}.json"
        if not file.exists():
            policy, meta = self.policy(step)
            entries = [Entry(policy, arm=arm) for arm in (ONE, BEST)]
            found = evaluate_in_turns(self.env, entries, self.config, n=episodes, seed_base=STARTS)
            noted = {name: meta[name] for name in ("env_steps", "human_ticks")}
            successes = [round(result.success_rate * episodes) for result in found]
            file.write_text(json.dumps({"successes": successes, **noted}))
        noted = json.loads(file.read_text())
        successes = noted.pop("successes")
        return [Checkpoint(step, n, episodes, note=arm, **noted) for n, arm in zip(successes, (ONE, BEST), strict=True)]

    def explored(self, episodes: int) -> int:
        """Successes of the clone, checkpoint 0, under the exploration of training."""
        file = self.run / "benchmark_explored.json"
        if not file.exists():
            policy, _ = self.policy(0)
            result = evaluate(self.env, policy, self.config, n=episodes, seed_base=STARTS, deterministic=False)
            file.write_text(json.dumps(round(result.success_rate * episodes)))
        return int(json.loads(file.read_text()))

    def windows(self) -> list[int]:
        """Successes without help in each disjoint window of training episodes after the warm-up."""
        rows = [row for row in read_metrics(self.run)["episode"] if row.get("phase") != "warmup"]
        counts = [sum(map(succeeded_alone, rows[i : i + WINDOW])) for i in range(0, len(rows), WINDOW)]
        return counts[: len(rows) // WINDOW]


def experiment(args: argparse.Namespace) -> ExperimentConfig:
    """The task's own recipe, with a checkpoint every `--every` updates to `--last`."""
    base = load_experiment(args.task)
    most = args.last // args.every + 2
    loop = dataclasses.replace(base.learner, max_steps=args.last, checkpoint_period=args.every, keep_checkpoints=most)
    return dataclasses.replace(base, learner=loop)


def draw(runs: Sequence[Run], file: Path) -> None:
    """Draw runs of one name: success of both arms, human ticks, and success without help in training, as PNG."""
    with plots.new_figure(11, 3.2) as figure:
        success, ticks, training = figure.subplots(1, 3)
        for number, run in enumerate(runs):
            for arm, colour, label in ((ONE, plots.BLUE, "one candidate"), (BEST, plots.VERMILLION, "best of N")):
                points = [c for c in run.checkpoints if c.note == arm]
                x = [c.updates for c in points]
                success.plot(x, [c.rate for c in points], color=colour, alpha=0.7, label="" if number else label)
            ticks.plot(x, [c.human_ticks for c in points], color=plots.INK, alpha=0.7)
            counts = [
                n / WINDOW for name, n in run.figures.items() if name.startswith("window_") and name[7:].isdigit()
            ]
            training.plot([WINDOW * (i + 0.5) for i in range(len(counts))], counts, color=plots.GREEN, alpha=0.7)
            explored = run.figures["explored"] / run.checkpoints[0].episodes
            training.axhline(explored, color=plots.INK, ls=":", lw=1, label="" if number else "the clone, explored")
        for ax, label in ((success, "success without help"), (training, f"the same in training, {WINDOW} episodes")):
            plots.percent_axis(ax, label)
            plots.add_legend(ax, "lower right")
        for ax, label in ((success, "updates"), (ticks, "updates"), (training, "training episodes")):
            ax.set_xlabel(label)
        ticks.set_ylabel("human ticks")
        file.write_bytes(plots.to_png(figure))


def main() -> None:
    """Train, evaluate both arms of every checkpoint, print a line for each, write JSON and a plot."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", default="fake_aloha", choices=TASKS)
    p.add_argument("--demos", type=int, default=10, help="demonstrations")
    p.add_argument("--seeds", default="11", help="comma-separated")
    p.add_argument("--last", type=int, default=12_000, help="critic updates")
    p.add_argument("--every", type=int, default=500, help="updates between checkpoints")
    p.add_argument("--at", default="0,500,1000,1500,2000,2500,3000,3500,4000,6000,8000,10000,12000",
                   help="checkpoints that are evaluated, those up to --last")  # fmt: skip
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes of each arm and checkpoint")
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_going_online"))
    p.add_argument("--json", type=Path, help="write the results (benchmarks/README.md) here, next to others'")
    p.add_argument("--plot", type=Path, help="draw the runs of this name in --json's file, as PNG")
    add_settings(p, "of the run")
    args = p.parse_args()
    if args.plot and not args.json:
        p.error("--plot draws what is in the file of --json: give that")
    name = f"{args.task} {args.name}, {args.demos} demonstrations"
    at = [step for step in map(int, args.at.split(",")) if step <= args.last]
    for seed in map(int, args.seeds.split(",")):
        config = apply_overrides(experiment(args), [("seed", str(seed)), *settings(p, args.set)])
        demos = args.out / f"{args.task}_demos_{args.demos}_{seed}"
        run = args.out / f"{args.task}_{args.name}_{args.demos}_{seed}"
        args.out.mkdir(parents=True, exist_ok=True)
        keep_plan(run.with_name(f"{run.name}.plan"), [args.episodes, *differing(config)], run)
        cameras = config.agent.image_keys
        run_record(config, args.demos, str(demos), policy="scripted", noise=TASKS[args.task], cameras=cameras)
        train_local(config, RunOptions([str(demos)], str(run)))
        trained = Trained(config, run)
        points: list[Checkpoint] = []
        for step in at:
            one, best = trained.arms(step, args.episodes)
            points += [one, best]
            print(f"{run.name}: {step} updates, N = 1 {100 * one.rate:.0f} %, best of {config.agent.candidates} "
                  f"{100 * best.rate:.0f} %, {one.human_ticks} human ticks", flush=True)  # fmt: skip
        windows = trained.windows()
        figures = {"explored": trained.explored(args.episodes), "window_least": min(windows, default=0)}
        figures |= {f"window_{i}": float(n) for i, n in enumerate(windows)}
        print(f"{run.name}: clone explored {figures['explored']}, windows of {WINDOW}: {windows}", flush=True)
        if args.json:
            add(args.json, Run(name, seed, args.task, args.set, points, figures))

    if args.plot:
        draw([run for run in read(args.json).runs if run.name == name], args.plot)


if __name__ == "__main__":
    main()
