"""A clone by a small pi0 that reinforcement learning improves: from pictures, through processes, over robot steps.

Each seed has demonstrations of its own, and a clone that is stopped at its first checkpoint with 25 to 60 % of 100
validation starts, exported as openpi's, and imported again. A probe reads the cube's place from the frozen features
that the critic sees. Each rule then starts from the clone, with a learner and an actor; what acts in the end is
compared with one sample of the clone on starts that nothing was chosen on. Finished parts are not repeated:

    python benchmarks/learn_pi0_rl.py --seeds 1,2,3 --json pi0_rl.json
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from support import learning
from support.learning import Trained

from serl_chunk.cli.learner import train_offline
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.learner.building import RunOptions

CLONE, RL = "fake_aloha_pi0", "fake_aloha_pi0_rl"
N_DEMOS, EVERY, UPDATES = 200, 1_000, 12_000
LEAST, MOST = 0.25, 0.60  # success of a clone that can be improved


def clone_config(seed: int, updates: int) -> ExperimentConfig:
    changes = {
        "seed": seed, "learner.offline_steps": updates, "learner.online_steps": 0, "learner.pretrain_steps": 0,
        "learner.eval_interval": 0, "learner.checkpoint_period": EVERY, "learner.keep_checkpoints": 100,
        "actor.intervention": "none", "agent.pi0.lr_cosine": UPDATES,
    }  # fmt: skip
    return apply_overrides(load_experiment(CLONE), [(path, str(value)) for path, value in changes.items()])


def clone(seed: int, out: Path) -> tuple[Path, Path]:
    """Return the imported weights of a clone, and the folder of its demonstrations."""
    demos, run, file = out / f"demos_{seed}", out / f"clone_{seed}", out / f"clone_{seed}.npz"
    learning.record(clone_config(seed, UPDATES), N_DEMOS, demos)
    for updates in range(EVERY, UPDATES + 1, EVERY):
        trained = Trained(clone_config(seed, updates), run)
        if (trained.store.newest() or 0) < updates:
            train_offline(trained.config, RunOptions([str(demos)], str(run)))
        point = trained.evaluate(updates, 100, "validation")
        if point.rate >= LEAST:
            if point.rate > MOST:
                raise SystemExit(f"{run}: {point.rate:.2f} after {updates} updates, above {MOST}: choose another seed")
            if not file.exists():
                checkpoint = out / f"clone_{seed}_openpi"
                serl_chunk("pi0", "export", str(run), str(checkpoint), f"--step={updates}", f"--exp_name={CLONE}")
                serl_chunk("pi0", "import", str(checkpoint), str(file), f"--exp_name={RL}")
            return file, demos
    raise SystemExit(f"{run}: below {LEAST} after {UPDATES} updates")


def serl_chunk(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "serl_chunk", *words], check=True)


def main() -> None:
    p = learning.parser(__doc__, "benchmark_pi0_rl", of="of the rule", seeds="1", episodes=200)
    args = learning.arguments(p)
    for seed in args.seeds:
        print(clone(seed, args.out))


if __name__ == "__main__":
    main()
