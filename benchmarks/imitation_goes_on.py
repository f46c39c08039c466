"""What becomes of a clone that goes on imitating, without a critic, what a run records when it goes online.

For each seed a fresh run of the experiment records its warm-up and `--updates` updates' worth of steps. Then a clone of
the same demonstrations imitates demonstrations and these steps, half of each, one candidate from noise 0 being
evaluated on the way. What is finished is not run again:

    python benchmarks/imitation_goes_on.py --seeds 11,12,13,14,15 --json imitation.json
    python benchmarks/imitation_goes_on.py --set agent.bc_joint_noise=0 --name still --json imitation.json
    python benchmarks/imitation_goes_on.py --set agent.bc_on=demo+interventions --name dagger
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from going_online import STARTS
from support import learning
from support.cli_args import keep_plan
from support.learning import Trained, differing
from support.results import Run, write

from serl_chunk.cli import local
from serl_chunk.cli.learner import locked_run, make_learner, prepare
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.schedule import Phase

SPARE = 100  # updates of the recorded run beyond the clone's: its critic has warmed up before it counts steps
Records = list[Any]  # Begin, StepBlock, End and Amend, in the order in which the replay got them


def recorded(config: ExperimentConfig, demos: Path, run: Path) -> Records:
    """Train as the experiment does, and return what its actor recorded."""
    records: Records = []

    class Kept(local.LocalLink):
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
    p = learning.parser(__doc__, "benchmark_imitation_goes_on", of="of the clone", seeds="11", episodes=200)
    p.add_argument("--task", default="fake_aloha", choices=learning.NOISE)
    p.add_argument("--demos", type=int, default=10, help="demonstrations")
    p.add_argument("--updates", type=int, default=1_000, help="updates after the clone")
    p.add_argument("--every", type=int, default=500, help="updates between evaluations")
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    args = learning.arguments(p)
    base = learning.with_checkpoints(load_experiment(args.task), args.updates, args.every)
    clone = dataclasses.replace(base, agent=BcConfig(bc_on="+successes"))
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        teacher = apply_overrides(base, [("seed", str(seed)), ("learner.max_steps", str(args.updates + SPARE))])
        config = apply_overrides(clone, [("seed", str(seed)), *args.overrides])
        demos = args.out / f"{args.task}_demos_{args.demos}_{seed}"
        run = args.out / f"{args.task}_{args.name}_{args.demos}_{seed}"
        keep_plan(run.with_name(f"{run.name}.plan"), [args.episodes, *differing(config)], run)
        trained = Trained(config, run, {"reported": STARTS})
        if (trained.store.newest() or 0) < args.updates:
            learning.record(config, args.demos, demos, learning.NOISE[args.task])
            imitate(config, demos, run, recorded(teacher, demos, run.with_name(f"{run.name}_recorded")))
        points = [trained.evaluate(step, args.episodes) for step in range(0, args.updates + 1, args.every)]
        if args.json:
            name = f"{args.task} {args.name}, {args.demos} demonstrations"
            write(args.json, [Run(name, seed, args.task, args.set, points)], join=True)


if __name__ == "__main__":
    main()
