"""How clones on the fake ALOHA task act while they explore, by the scale of the noise they start from.

Each clone is trained from the same ten scripted demonstrations for as long as the demo's recipe imitates, and explores
on the validation starts; `agent.flow.noise_alone` was chosen by the figures.

    python benchmarks/clone_noise.py --seeds 1,2,3 --json clone_noise.json
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from support.results import Checkpoint, Run, write

from serl_chunk.actor.evaluate import VALIDATION_SEED_BASE, evaluate
from serl_chunk.actor.policy import ChunkPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.demos import RunOptions
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.agents import BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.types import Snapshot

replace = dataclasses.replace
N_DEMOS = 10
SCALES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
# A clone alone: the offline phase ends at once, and nothing is recorded.
CLONE = [("learner.online_steps", "0"), ("actor.intervention", "none"), ("agent.flow.noise_low", "0")]


def success(config: ExperimentConfig, run: Path, scale: float, n: int) -> int:
    """Return the successes of a run's clone in `n` episodes on validation starts, exploring from noise of `scale`."""
    config = replace(config, agent=replace(config.agent, flow=replace(config.agent.flow, noise_alone=scale)))
    env, stored = make_env(config.robot), CheckpointStore(run).restore_policy(0)
    spec = env.robot_spec
    preprocess = Preprocess.restored(config, spec, stored.meta, stored.normaliser)
    policy = ChunkPolicy(make_agent(config, spec), preprocess, spec, seed=1)
    policy.swap(Snapshot(0, stored.params))
    return evaluate(env, policy, config, n=n, seed_base=VALIDATION_SEED_BASE, deterministic=False).successes


def main() -> None:
    """Train a clone per seed, evaluate it with each scale, print one line each, write JSON."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", default="1", help="comma-separated")
    p.add_argument("--scales", default=",".join(map(str, SCALES)), help="comma-separated, 0 to 1")
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per clone and scale")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_clone_noise"))
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    args = p.parse_args()
    config = apply_overrides(replace(load_experiment("fake_aloha"), agent=BcConfig()), CLONE)
    args.out.mkdir(parents=True, exist_ok=True)
    demos = args.out / "demos"
    run_record(config, N_DEMOS, str(demos), policy="scripted", noise=None, cameras=())
    runs = []
    for seed in map(int, args.seeds.split(",")):
        run = args.out / f"clone_{seed}"
        train_local(replace(config, seed=seed), RunOptions([str(demos)], str(run)))
        for scale in map(float, args.scales.split(",")):
            count = success(config, run, scale, args.episodes)
            print(f"seed {seed} scale {scale:g}: {count} of {args.episodes}", flush=True)
            point = Checkpoint(config.learner.pretrain_steps, count, args.episodes, "validation", best=True)
            changes = ["agent=bc", f"agent.flow.noise_alone={scale:g}"]
            runs.append(Run(f"scale {scale:g}", seed, config.name, changes, [point]))
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
