"""TransferCube in MuJoCo: behaviour cloning of scripted demonstrations, and what learning adds to it.

Thirty HDF5 demonstrations with noise; checkpoint 0 is the clone, the last one has learned online, without
interventions. All are evaluated on the same 100 held-out start states:

    python benchmarks/learn_aloha_transfer_cube.py --json aloha_transfer_cube.json
"""

from __future__ import annotations

from pathlib import Path

from support import learning
from support.curves import draw_curves
from support.results import Run, write

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides

NAME, N_DEMOS = "aloha_transfer_cube", 30


def main() -> None:
    p = learning.parser(__doc__, "benchmark_aloha_transfer_cube", of="of the experiment", seeds="42")
    p.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    args = learning.arguments(p)
    runs = []
    for seed in args.seeds:
        config = apply_overrides(load_experiment(NAME), [("seed", str(seed)), *args.overrides])
        demos = learning.record(config, N_DEMOS, args.out / "demos", learning.NOISE[NAME])
        trained = learning.train(config, args.out / f"seed_{seed}", [demos])
        runs.append(Run(NAME, seed, NAME, args.set, [trained.evaluate(step, args.episodes) for step in trained.steps]))
        if args.json:
            write(args.json, runs[-1:], join=True)
    if args.plot:
        axes = {"environment steps": lambda _, c: c.env_steps, "wall time, minutes": lambda _, c: (c.wall or 0) / 60}
        draw_curves(runs, args.plot, axes)


if __name__ == "__main__":
    main()
