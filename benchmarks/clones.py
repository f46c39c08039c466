"""How clones act, one candidate from noise 0, while they go on imitating: success every so many policy updates.

Demonstrations are scripted and drawn anew for each seed. A clone that is as good as its data stays where it is; one
that overfits, or a flow that fits the noise badly, swings. What is finished is not run again, and a run that was
interrupted goes on:

    python benchmarks/clones.py --task fake_aloha --demos 10 --seeds 1,2,3 --json clones.json
    python benchmarks/clones.py --task aloha_transfer_cube --demos 30 --set agent.bc_joint_noise=0.4 --name moved
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

from support import learning
from support.results import Run, write

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides

SHORT = {"fake_aloha": "fake", "aloha_transfer_cube": "cube", "aloha_insertion": "insertion"}


def main() -> None:
    p = learning.parser(__doc__, "benchmark_clones", of="of the clone", seeds="1")
    p.add_argument("--task", default="fake_aloha", choices=SHORT)
    p.add_argument("--demos", default="10", type=learning.numbers, help="numbers of demonstrations, comma-separated")
    p.add_argument("--recorded", type=Path, help="a folder of demonstrations, in place of scripted ones")
    p.add_argument("--first", type=int, default=8_000, help="policy updates of the first checkpoint that counts")
    p.add_argument("--last", type=int, default=8_000, help="policy updates of the last one")
    p.add_argument("--every", type=int, default=1_000, help="policy updates between checkpoints")
    p.add_argument("--starts", default="validation", choices=learning.STARTS, help="reported: for no choice")
    p.add_argument("--name", default="default", help="of these settings, in the results and in the folder")
    args = learning.arguments(p)
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
    for n in args.demos:
        for seed in args.seeds:
            config = apply_overrides(base, [("seed", str(seed)), *args.overrides])
            demos = args.recorded or args.out / f"{SHORT[args.task]}_demos_{n}_{seed}"
            if args.recorded is None:
                learning.record(config, n, demos, learning.NOISE[args.task])
            trained = learning.train(
                config,
                args.out / f"{SHORT[args.task]}_{args.name}_{n}_{seed}",
                [demos],
                but=["learner.offline_steps", "learner.keep_checkpoints"],
            )
            steps = range(args.first, args.last + 1, args.every)
            points = [trained.evaluate(step, args.episodes, args.starts) for step in steps]
            rates = [100 * c.rate for c in points]
            print(f"{args.task} {args.name}, {n} demonstrations, seed {seed}: mean {statistics.mean(rates):.0f} %, "
                  f"deviation {statistics.pstdev(rates):.1f}", flush=True)  # fmt: skip
            if args.json:
                name = f"{SHORT[args.task]} {args.name}, {n} demonstrations"
                write(args.json, [Run(name, seed, args.task, args.set, points)], join=True)


if __name__ == "__main__":
    main()
