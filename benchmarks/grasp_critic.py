"""Discrete grippers beside continuous ones on the fake ALOHA task, resumable.

Both train by the demo's recipe from the same ten scripted demonstrations, with the same scripted human; only
`agent.gripper` differs. The pick and the hand-over succeed only where fingers close at the cube. A finished run is not
run again, an interrupted one is resumed:

    python benchmarks/grasp_critic.py --seeds 0,1,2 --json grasp_critic.json
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from learn_fake_aloha import N_DEMOS, as_run, run_variant
from support.cli_args import add_settings, chosen, keep_plan, settings
from support.results import Run, write

from serl_chunk.cli.record import run_record
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.evaluation.results import wilson_interval

EXPERIMENTS = {"continuous": "fake_aloha", "discrete": "fake_aloha_discrete_gripper"}


def pooled(results: list[dict[str, Any]], episodes: int) -> str:
    """Success of the last checkpoints of all seeds together, with its 95 % Wilson interval."""
    n = episodes * len(results)
    successes = round(sum(r["last"]["success_rate"] for r in results) * episodes)
    interval = wilson_interval(successes, n)
    return f"{successes / n:.2f} [{interval.low:.2f}, {interval.high:.2f}] of {n} episodes, {len(results)} seeds"


def main() -> None:
    """Run the chosen grippers and seeds; print one line each, and one line for all seeds of a gripper."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--grippers", default="continuous,discrete", help=f"of: {', '.join(EXPERIMENTS)}")
    p.add_argument("--seeds", default="0", help="comma-separated")
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per checkpoint")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_grasp_critic"))
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    add_settings(p, "for both grippers")
    args = p.parse_args()
    names, overrides = chosen(p, args.grippers, EXPERIMENTS, "gripper"), settings(p, args.set)
    demos, runs = args.out / "demos", list[Run]()
    args.out.mkdir(parents=True, exist_ok=True)
    keep_plan(args.out / "plan.json", [args.episodes, args.set], args.out)
    for name in names:
        config = apply_overrides(load_experiment(EXPERIMENTS[name]), overrides)
        learner = dataclasses.replace(config.learner, checkpoint_period=max(1, config.learner.max_steps // 6))
        config = dataclasses.replace(config, learner=learner)
        run_record(config, N_DEMOS, str(demos), policy="scripted", noise=None, cameras=())
        out = args.out / name
        out.mkdir(exist_ok=True)
        results = []
        for seed in map(int, args.seeds.split(",")):
            results.append(r := run_variant("rl_helper", seed, demos, out, args.episodes, config))
            b, last = r["best"], r["last"]
            print(
                f"{name:10s} seed {seed}: best checkpoint {b['success_rate']:.2f} [{b['low']:.2f}, {b['high']:.2f}], "
                f"last {last['success_rate']:.2f} [{last['low']:.2f}, {last['high']:.2f}], "
                f"{last['env_steps']} steps, {last['human_ticks']} human ticks, {r['wall']:.0f} s",
                flush=True,
            )
        print(f"{name:10s} last checkpoints: {pooled(results, args.episodes)}", flush=True)
        made = [as_run(r, args.episodes, EXPERIMENTS[name], args.set) for r in results]
        runs += [dataclasses.replace(run, name=name) for run in made]
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
