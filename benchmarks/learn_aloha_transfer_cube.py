"""TransferCube in MuJoCo: behaviour cloning of scripted demonstrations, and what learning adds to it.

Thirty HDF5 demonstrations with noise; checkpoint 0 is the clone, the last one has learned online, without
interventions. Both on the same 100 held-out start states. An evaluation that was made is not made again:

    python benchmarks/learn_aloha_transfer_cube.py --json aloha_transfer_cube.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from learn_fake_aloha import REPORT_SEED_BASE, evaluate_checkpoint
from support.cli_args import add_settings, settings
from support.results import Run, add, checkpoint

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics

N_DEMOS, NOISE = 30, 0.01  # radians, standard deviation


def plot(curve: list[dict[str, Any]], path: Path) -> None:
    """Success with its intervals over environment steps and wall time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    rates = [100 * p["success_rate"] for p in curve]
    for axis, key, unit, label in (
        (axes[0], "env_steps", 1000, "environment steps, thousands"),
        (axes[1], "wall", 60, "wall time, minutes"),
    ):
        x = [p[key] / unit for p in curve]
        axis.fill_between(x, [100 * p["low"] for p in curve], [100 * p["high"] for p in curve], alpha=0.2)
        axis.plot(x, rates, marker=".", label="learning online, no interventions")
        axis.axhline(rates[0], color="black", linestyle=":", label="the clone it starts from")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success, % of 100 held-out starts")
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Record, train (or resume), evaluate every checkpoint, print the curve and write it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per checkpoint")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_aloha_transfer_cube"))
    p.add_argument("--json", type=Path, help="write the results (benchmarks/README.md) here, next to other seeds'")
    p.add_argument("--plot", type=Path, help="write the curve here (PNG)")
    add_settings(p, "of the experiment")
    args = p.parse_args()
    overrides = [("seed", str(args.seed)), *settings(p, args.set)]
    config = apply_overrides(load_experiment("aloha_transfer_cube"), overrides)
    demos, run = args.out / "demos", args.out / f"seed_{args.seed}"
    run_record(config, N_DEMOS, str(demos), policy="scripted", noise=NOISE, cameras=())
    train_local(config, RunOptions([str(demos)], str(run)))
    env, store = make_env(config.robot), CheckpointStore(run)
    agent = make_agent(config, env.robot_spec)
    walls = {r["step"]: r["wall"] for r in read_metrics(run)["train"]}
    curve = []
    for step in store.steps():
        file = run / f"benchmark_{step}.json"
        if not file.exists():
            point = evaluate_checkpoint(config, env, agent, store, step, args.episodes, REPORT_SEED_BASE)
            file.write_text(json.dumps(point))
        point = json.loads(file.read_text())
        point["wall"] = max((w for s, w in walls.items() if s <= step), default=0.0)
        curve.append(point)
        print(
            f"step {step}: {point['success_rate']:.2f} [{point['low']:.2f}, {point['high']:.2f}], "
            f"{point['env_steps']} steps, {point['wall']:.0f} s",
            flush=True,
        )
    first, last = curve[0], curve[-1]
    apart = last["low"] > first["high"]
    print(f"intervals of the clone and of the last checkpoint {'separate' if apart else 'overlap'}")
    if args.json:
        points = [checkpoint(p, args.episodes) for p in curve]
        add(args.json, Run(config.name, args.seed, config.name, args.set, points))
    if args.plot:
        plot(curve, args.plot)


if __name__ == "__main__":
    main()
