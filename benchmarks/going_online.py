"""What becomes of a clone when online learning begins: success of N = 1 and of the best of N at every checkpoint.

Demonstrations are scripted and drawn anew for each seed; the experiment's human helps in training, nobody in
evaluations, which are paired: both arms of every checkpoint act from the same starts. Training episodes are counted in
disjoint windows, beside the clone under the exploration of training. A finished run is not run again, an interrupted
one goes on:

    python benchmarks/going_online.py --task fake_aloha --demos 10 --seeds 11,12,13 --json going_online.json
    python benchmarks/going_online.py --task fake_aloha --demos 60 --seeds 11,12 --last 1000 --name 60_demos
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import learning
from support.learning import Trained
from support.results import Checkpoint, Run, read, write

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.evaluation.rollouts import Entry, evaluate, evaluate_in_turns
from serl_chunk.runs.metrics import read_metrics, succeeded_alone
from serl_chunk.types import BEST, ONE
from serl_chunk.viz import plots

STARTS = 700_000  # of evaluations here; nothing was tuned on them
WINDOW = 40  # training episodes


def arms(trained: Trained, step: int, episodes: int) -> list[Checkpoint]:
    """Return both arms of a checkpoint from the same starts, in the order ONE, BEST."""

    def found() -> dict[str, Any]:
        policy, meta = trained.policy(step)
        entries = [Entry(policy, arm=arm) for arm in (ONE, BEST)]
        results = evaluate_in_turns(trained.env, entries, trained.config, n=episodes, seed_base=STARTS)
        noted = {name: meta[name] for name in ("env_steps", "human_ticks")}
        return {"successes": [result.successes for result in results], **noted}

    noted = trained.kept(str(step), found)
    successes = noted.pop("successes")
    return [Checkpoint(step, n, episodes, note=arm, **noted) for n, arm in zip(successes, (ONE, BEST), strict=True)]


def explored(trained: Trained, episodes: int) -> int:
    """Return successes of the clone, checkpoint 0, under the exploration of training."""

    def found() -> int:
        policy, _ = trained.policy(0)
        options = {"n": episodes, "seed_base": STARTS, "deterministic": False}
        return evaluate(trained.env, policy, trained.config, **options).successes

    return trained.kept("explored", found)


def windows(run: Path) -> list[int]:
    """Return successes without help in each disjoint window of training episodes after the warm-up."""
    rows = [row for row in read_metrics(run)["episode"] if row.get("phase") != "warmup"]
    counts = [sum(map(succeeded_alone, rows[i : i + WINDOW])) for i in range(0, len(rows), WINDOW)]
    return counts[: len(rows) // WINDOW]


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
    p = learning.parser(__doc__, "benchmark_going_online", of="of the run", seeds="11")
    p.add_argument("--task", default="fake_aloha", choices=learning.NOISE)
    p.add_argument("--demos", type=int, default=10, help="demonstrations")
    p.add_argument("--last", type=int, default=12_000, help="critic updates")
    p.add_argument("--every", type=int, default=500, help="updates between checkpoints")
    p.add_argument("--at", default="0,500,1000,1500,2000,2500,3000,3500,4000,6000,8000,10000,12000",
                   type=learning.numbers, help="checkpoints that are evaluated, those up to --last")  # fmt: skip
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    p.add_argument("--plot", type=Path, help="draw the runs of this name in --json's file, as PNG")
    args = learning.arguments(p)
    if args.plot and not args.json:
        p.error("--plot draws what is in the file of --json: give that")
    name = f"{args.task} {args.name}, {args.demos} demonstrations"
    base = learning.with_checkpoints(load_experiment(args.task), args.last, args.every)
    for seed in args.seeds:
        config = apply_overrides(base, [("seed", str(seed)), *args.overrides])
        demos = args.out / f"{args.task}_demos_{args.demos}_{seed}"
        learning.record(config, args.demos, demos, learning.NOISE[args.task])
        run = args.out / f"{args.task}_{args.name}_{args.demos}_{seed}"
        trained = learning.train(config, run, [demos], [args.episodes])
        points: list[Checkpoint] = []
        for step in (step for step in args.at if step <= args.last):
            one, best = arms(trained, step, args.episodes)
            points += [one, best]
            print(f"{run.name}: {step} updates, N = 1 {100 * one.rate:.0f} %, best of {config.agent.candidates} "
                  f"{100 * best.rate:.0f} %, {one.human_ticks} human ticks", flush=True)  # fmt: skip
        counts = windows(run)
        figures = {"explored": explored(trained, args.episodes), "window_least": min(counts, default=0)}
        figures |= {f"window_{i}": float(n) for i, n in enumerate(counts)}
        print(f"{run.name}: clone explored {figures['explored']}, windows of {WINDOW}: {counts}", flush=True)
        if args.json:
            write(args.json, [Run(name, seed, args.task, args.set, points, figures)], join=True)
    if args.plot:
        draw([run for run in read(args.json).runs if run.name == name], args.plot)


if __name__ == "__main__":
    main()
