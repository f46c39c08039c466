"""A small pi0 and a convolutional policy clone the same demonstrations of the fake ALOHA task, from three cameras.

Both imitate 200 scripted demonstrations and see nothing else. The last checkpoint of each acts on 100 starts that no
other command uses, the others on validation starts. Resumable.

    python benchmarks/learn_fake_aloha_pi0.py --json fake_aloha_pi0.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learn_fake_aloha import REPORT_SEED_BASE, evaluate_checkpoint
from support.cli_args import Setting, add_settings, differing, keep_plan, settings
from support.results import Run, checkpoint, write

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
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import ConfigError

N_DEMOS = 200


def contestants(
    updates: dict[str, int], seed: int, changed: Sequence[Setting] = ()
) -> dict[str, tuple[ExperimentConfig, list[str]]]:
    """Return both experiments, of demonstrations alone, and what of each differs from the packaged one."""
    images = load_experiment("fake_aloha_images")
    of = images.agent
    conv = BcConfig(image_keys=of.image_keys, encoder=of.encoder, policy_updates=1)
    configs = {"conv": dataclasses.replace(images, agent=conv), "pi0": load_experiment("fake_aloha_pi0")}
    out = {}
    for name, config in configs.items():
        n = updates[name]
        changes = {
            "seed": seed, "learner.offline_steps": n, "learner.online_steps": 0, "learner.pretrain_steps": 0,
            "learner.eval_interval": 0, "learner.checkpoint_period": n // 4, "actor.intervention": "none",
        }  # fmt: skip
        if name == "pi0":
            changes["agent.pi0.lr_cosine"] = n
        overrides = [(path, str(value)) for path, value in changes.items()]
        overrides += changed if name == "pi0" else ()
        said = [] if name == "pi0" else ["agent=bc", "agent.policy_updates=1"]
        out[name] = apply_overrides(config, overrides), [*said, *map("=".join, overrides)]
    return out


def clone(config: ExperimentConfig, demos: Path, run: Path, n: int) -> list[dict[str, Any]]:
    """Train or resume `run`, evaluate its checkpoints; one that was evaluated is not evaluated again."""
    keep_plan(run.with_suffix(".plan"), [n, *differing(config)], run)
    learner, _ = train_local(config, RunOptions([str(demos)], str(run)))
    if learner.updates < config.learner.offline_steps:
        raise SystemExit(f"interrupted at step {learner.updates}; run the same command again")
    env, store = make_env(config.robot), CheckpointStore(run)
    agent = make_agent(config, env.robot_spec)
    walls = {row["step"]: row["wall"] for row in read_metrics(run)["train"]}
    curve = []
    for step in filter(None, store.steps()):
        last = step == store.steps()[-1]
        file = run / f"benchmark_{step}_{n}.json"
        if not file.exists():
            base = REPORT_SEED_BASE if last else VALIDATION_SEED_BASE
            file.write_text(json.dumps(evaluate_checkpoint(config, env, agent, store, step, n, base)))
        point = json.loads(file.read_text()) | {"starts": "reported" if last else "validation"}
        point["wall"] = max((w for s, w in walls.items() if s <= step), default=0.0)
        rate, low, high = (point[key] for key in ("success_rate", "low", "high"))
        print(f"step {step}: {rate:.2f} [{low:.2f}, {high:.2f}], {point['wall']:.0f} s", flush=True)
        curve.append(point)
    return curve


def main() -> None:
    """Record, train both (or resume), evaluate, print and write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--pi0_updates", type=int, default=12_000, help="of pi0, in batches of 32")
    p.add_argument("--conv_updates", type=int, default=6_000, help="of the convolutional policy, in batches of 64")
    p.add_argument("--episodes", type=int, default=100, help="evaluation episodes per checkpoint")
    p.add_argument("--out", type=Path, default=Path("runs/benchmark_fake_aloha_pi0"))
    p.add_argument("--json", type=Path, help="write the results here (benchmarks/README.md, Results)")
    add_settings(p, "of pi0")
    args = p.parse_args()
    try:
        configs = contestants({"pi0": args.pi0_updates, "conv": args.conv_updates}, args.seed, settings(p, args.set))
    except ConfigError as error:
        p.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    demos, (pi0, _) = args.out / "demos", configs["pi0"]
    run_record(pi0, N_DEMOS, str(demos), policy="scripted", noise=None, cameras=pi0.agent.image_keys)
    runs = []
    for name, (config, said) in configs.items():
        print(f"{name}:", flush=True)
        curve = clone(config, demos, args.out / f"{name}_{args.seed}", args.episodes)
        points = [checkpoint(point, args.episodes, point["starts"]) for point in curve]
        runs.append(Run(name, args.seed, config.name, said, points))
    if args.json:
        write(args.json, runs)


if __name__ == "__main__":
    main()
