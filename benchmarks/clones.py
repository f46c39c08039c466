"""How clones act, one candidate from noise 0, while they go on imitating: success every so many policy updates.

Demonstrations are scripted and drawn anew for each seed. A clone that is as good as its data stays where it is; one
that overfits, or a flow that fits the noise badly, swings. What is finished is not run again, and a run that was
interrupted goes on:

    python benchmarks/clones.py --task fake_aloha --demos 10 --seeds 1,2,3 --json clones.json
    python benchmarks/clones.py --task aloha_transfer_cube --demos 30 --set agent.bc_joint_noise=0.4 --name moved
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from learn_fake_aloha import REPORT_SEED_BASE, evaluate_checkpoint
from support.cli_args import add_settings, differing, keep_plan, settings
from support.results import Checkpoint, Run, add

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.evaluation.rollouts import VALIDATION_SEED_BASE
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore

# Noise of the scripted demonstrator: of the robot's own, or rad.
TASKS = {"fake_aloha": None, "aloha_transfer_cube": 0.01, "aloha_insertion": 0.01}
STARTS = {"validation": VALIDATION_SEED_BASE, "reported": REPORT_SEED_BASE}
SHORT = {"fake_aloha": "fake", "aloha_transfer_cube": "cube", "aloha_insertion": "insertion"}


def clone(
    config: ExperimentConfig, demos: Path, run: Path, updates: list[int], episodes: int, starts: str
) -> list[Checkpoint]:
    """Train to the last of `updates`, or go on; each of them on `starts`, by one candidate from noise 0."""
    train_local(config, RunOptions([str(demos)], str(run)))
    env, store = make_env(config.robot), CheckpointStore(run)
    agent, points = make_agent(config, env.robot_spec), []
    for step in updates:
        file = run / f"benchmark_{starts}_{step}.json"
        if not file.exists():
            point = evaluate_checkpoint(config, env, agent, store, step, episodes, STARTS[starts])
            file.write_text(json.dumps(round(point["success_rate"] * episodes)))
        points.append(Checkpoint(step, json.loads(file.read_text()), episodes, starts))
    return points


def main() -> None:
    """Train a clone for each seed and number of demonstrations, print its successes, write JSON."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", default="fake_aloha", choices=TASKS)
    p.add_argument("--demos", default="10", help="numbers of demonstrations, comma-separated")
    p.add_argument("--seeds", default="1", help="comma-separated")
    p.add_argument("--first", type=int, default=8_000, help="policy updates of the first checkpoint that counts")
    p.add_argument("--last", type=int, default=8_000, help="policy updates of the last one")
    p.add_argument("--every", type=int, default=1_000, help="policy updates between checkpoints")
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per checkpoint")
    p.add_argument("--starts", default="validation", choices=STARTS, help="reported: those nothing is tuned on")
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_clones"))
    p.add_argument("--json", type=Path, help="write the results (benchmarks/README.md) here, next to others'")
    add_settings(p, "of the clone")
    args = p.parse_args()
    if (args.last - args.first) % args.every or args.first % args.every:
        p.error(f"--first {args.first} and --last {args.last} must be multiples of --every {args.every}")
    base = load_experiment(args.task)
    base = dataclasses.replace(
        base,
        agent=BcConfig(bc_on="demo", policy_updates=1),
        learner=dataclasses.replace(
            base.learner, pretrain_steps=0, critic_pretrain_steps=0, warmup_episodes=0,
            offline_steps=args.last, online_steps=0, checkpoint_period=args.every,
            keep_checkpoints=args.last // args.every + 1,
        ),
        actor=dataclasses.replace(base.actor, intervention="none"),
    )  # fmt: skip
    updates = list(range(args.first, args.last + 1, args.every))
    for n in map(int, args.demos.split(",")):
        for seed in map(int, args.seeds.split(",")):
            config = apply_overrides(base, [("seed", str(seed)), *settings(p, args.set)])
            demos = args.out / f"{SHORT[args.task]}_demos_{n}_{seed}"
            run = args.out / f"{SHORT[args.task]}_{args.name}_{n}_{seed}"
            args.out.mkdir(parents=True, exist_ok=True)
            keep_plan(
                run.with_name(f"{run.name}.plan"),
                [args.episodes, *differing(config, but=["learner.offline_steps", "learner.keep_checkpoints"])],
                run,
            )
            run_record(config, n, str(demos), policy="scripted", noise=TASKS[args.task], cameras=())
            points = clone(config, demos, run, updates, args.episodes, args.starts)
            rates = [100 * c.rate for c in points]
            texts = " ".join(f"{r:.0f}" for r in rates) + " %"
            if len(rates) > 1:
                texts += f", mean {statistics.mean(rates):.0f}, deviation {statistics.pstdev(rates):.1f}"
            print(f"{args.task} {args.name}, {n} demonstrations, seed {seed}: {texts}", flush=True)
            if args.json:
                add(
                    args.json,
                    Run(f"{SHORT[args.task]} {args.name}, {n} demonstrations", seed, args.task, args.set, points),
                )


if __name__ == "__main__":
    main()
