"""What becomes of a clone that goes on imitating, without a critic, what a run records when it goes online.

For each seed a fresh run of the experiment records its warm-up and `--updates` updates' worth of steps. Then a clone of
the same demonstrations imitates demonstrations and these steps, half of each, one candidate from noise 0 being
evaluated on the way. What is finished is not run again:

    python benchmarks/imitation_goes_on.py --seeds 11,12,13,14,15 --json imitation.json
    python benchmarks/imitation_goes_on.py --set agent.bc_joint_noise=0 --name still --json imitation.json
    python benchmarks/imitation_goes_on.py --set agent.bc_on=demo+interventions --name dagger
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from going_online import STARTS, TASKS
from learn_fake_aloha import evaluate_checkpoint
from support.cli_args import add_settings, differing, keep_plan, settings
from support.results import Checkpoint, Run, add

from serl_chunk.agents.registry import make_agent
from serl_chunk.cli import local
from serl_chunk.cli.learner import locked_run, make_learner, prepare
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore

SPARE = 100  # updates of the recorded run beyond the clone's: its critic has warmed up before it counts steps
Records = list[Any]  # Begin, StepBlock, End and Amend, in the order in which the replay got them


def recorded(config: ExperimentConfig, demos: Path, run: Path) -> Records:
    """Train as the experiment does, and return what its actor recorded."""
    records: Records = []

    class Kept(local.LocalLink):
        """Passes records on, and keeps them."""

        def insert(self, record: Any) -> None:
            records.append(record)
            super().insert(record)

    theirs, local.LocalLink = local.LocalLink, Kept  # type: ignore[misc]
    try:
        local.train_local(config, RunOptions([str(demos)], str(run)))
    finally:
        local.LocalLink = theirs  # type: ignore[misc]
    return records


def imitate(config: ExperimentConfig, demos: Path, run: Path, records: Records) -> None:
    """Clone the demonstrations, then go on with these and `records`; a checkpoint every `checkpoint_period` updates."""
    options = RunOptions([str(demos)], str(run))
    spec = prepare(config, options)
    with locked_run(config, spec, options.checkpoint_path) as (folder, _, stack):
        learner = make_learner(config, options, folder, spec, publish=lambda *_: None, threaded=False)
        stack.callback(learner.metrics.close)
        stack.callback(learner.close)
        while learner.trainer.phase is not Phase.WARMUP:
            learner.work()
        for record in records:
            learner.router.insert(local.SESSION, record)
            if learner.trainer.phase is Phase.WARMUP:  # updates are earned by the steps after it
                learner.work()
        while not learner.trainer.done:
            if not learner.work():
                raise SystemExit(f"{run}: the recorded steps are too few for {config.learner.max_steps} updates")


def main() -> None:
    """Record, imitate and evaluate for each seed, print a line for each, write JSON."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", default="fake_aloha", choices=TASKS)
    p.add_argument("--demos", type=int, default=10, help="demonstrations")
    p.add_argument("--seeds", default="11", help="comma-separated")
    p.add_argument("--updates", type=int, default=1_000, help="updates after the clone")
    p.add_argument("--every", type=int, default=500, help="updates between evaluations")
    p.add_argument("--episodes", type=int, default=200, help="evaluation episodes of each checkpoint")
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_imitation_goes_on"))
    p.add_argument("--json", type=Path, help="write the results (benchmarks/README.md) here, next to others'")
    add_settings(p, "of the clone")
    args = p.parse_args()
    base = load_experiment(args.task)
    loop = dataclasses.replace(
        base.learner, max_steps=args.updates, checkpoint_period=args.every,
        keep_checkpoints=args.updates // args.every + 1,
    )  # fmt: skip
    base = dataclasses.replace(base, learner=loop)
    clone = dataclasses.replace(base, agent=BcConfig(bc_on="+successes"))
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        more = dataclasses.replace(loop, max_steps=args.updates + SPARE)
        teacher = dataclasses.replace(base, learner=more, seed=seed)
        config = apply_overrides(clone, [("seed", str(seed)), *settings(p, args.set)])
        demos = args.out / f"{args.task}_demos_{args.demos}_{seed}"
        run = args.out / f"{args.task}_{args.name}_{args.demos}_{seed}"
        keep_plan(run.with_name(f"{run.name}.plan"), [args.episodes, *differing(config)], run)
        done = run / "benchmark.json"
        if not done.exists():
            cameras = config.agent.image_keys
            run_record(config, args.demos, str(demos), policy="scripted", noise=TASKS[args.task], cameras=cameras)
            imitate(config, demos, run, recorded(teacher, demos, run.with_name(f"{run.name}_recorded")))
            env, store, found = make_env(config.robot), CheckpointStore(run), []
            agent = make_agent(config, env.robot_spec)
            for step in range(0, args.updates + 1, args.every):
                point = evaluate_checkpoint(config, env, agent, store, step, args.episodes, STARTS)
                found.append((step, round(point["success_rate"] * args.episodes)))
            done.write_text(json.dumps(found))
        points = [Checkpoint(step, n, args.episodes) for step, n in json.loads(done.read_text())]
        rates = " ".join(f"{100 * c.rate:.0f}" for c in points)
        print(f"{run.name}: {rates} % at 0 to {args.updates} updates", flush=True)
        if args.json:
            add(
                args.json,
                Run(f"{args.task} {args.name}, {args.demos} demonstrations", seed, args.task, args.set, points),
            )


if __name__ == "__main__":
    main()
