"""One checkpoint on the same starts twice: in this process in lockstep, and behind a robot server in real time.

    python benchmarks/served_policy.py runs/benchmark_aloha_transfer_cube/seed_42 --episodes 100 --json served.json

The run's experiment is read from its folder. Every episode is written down as it ends: a run that was killed goes on.
An episode that a fault of the robot ended is repeated, twice at most, as every evaluation does. The server's operator
clears the robot after a stop; stops are counted. Figures of real time are of use on a quiet machine only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.cli_args import add_settings, settings
from support.learning import REPORT_SEED_BASE
from support.served import ROBOTS, ServedRobotProcess

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.actor.recorder import NullSink
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.results import paired_difference
from serl_chunk.evaluation.rollouts import FAULT_REPEATS
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import read_config
from serl_chunk.types import Snapshot

WAYS = ("lockstep", "served")


@contextlib.contextmanager
def runner(config: ExperimentConfig, agent: Any, store: CheckpointStore, step: int) -> Iterator[EpisodeRunner]:
    """The mean policy of a checkpoint on the robot that `config` names."""
    checkpoint = store.restore_policy(step)
    with contextlib.closing(make_env(config.robot, evaluating=True)) as env:
        spec = env.robot_spec
        preprocess = Preprocess.restored(config, spec, checkpoint.meta, checkpoint.normaliser)
        policy = LocalPolicy(agent, preprocess, spec, seed=config.seed + 1)
        policy.swap(Snapshot(step, checkpoint.params))
        runner = EpisodeRunner(env, policy, NullSink(), config=config)
        try:
            yield runner
        finally:
            runner.close()


def run_episode(runner: EpisodeRunner, seed: int) -> dict[str, Any]:
    """Run an episode, again after faults; returns its figures."""
    faults = []
    for _ in range(1 + FAULT_REPEATS):
        summary: EpisodeSummary = runner.run_episode(seed)
        if not summary.fault:
            break
        faults.append(summary.fault)
    return {
        "success": summary.success, "length": summary.length, "gated_ticks": summary.gated_ticks,
        "starved_ticks": summary.starved_ticks, "gaps": summary.gaps, "faults": faults,
        "late_p99_ms": summary.lateness.p99_ms, "late_max_ms": summary.lateness.max_ms,
    }  # fmt: skip


def summary(done: dict[str, dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    pairs = {way: [done[way][str(seed)] for seed in seeds] for way in WAYS}
    first, second = (np.array([e["success"] for e in pairs[way]]) for way in WAYS)
    difference, low, high = paired_difference(first, second)
    out: dict[str, Any] = {"episodes": len(seeds), "difference": difference, "low": low, "high": high}
    for way, successes in (("lockstep", first), ("served", second)):
        episodes = pairs[way]
        steps = sum(e["length"] for e in episodes)
        out[way] = {
            "success_rate": float(successes.mean()),
            "mean_length": steps / len(episodes),
            "gated_share": sum(e["gated_ticks"] for e in episodes) / steps,
            "starved_ticks": sum(e["starved_ticks"] for e in episodes),
            "gaps": sum(e["gaps"] for e in episodes),
            "faults": [fault for e in episodes for fault in e["faults"]],
            "late_p99_ms_median": float(np.median([e["late_p99_ms"] for e in episodes])),
            "late_max_ms": max(e["late_max_ms"] for e in episodes),
        }
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path, help="folder of a training run")
    p.add_argument("--step", type=int, help="of the checkpoint; default: the last one")
    p.add_argument("--episodes", type=int, default=100)
    p.add_argument("--seed_base", type=int, default=REPORT_SEED_BASE, help="episode i starts from seed_base + i")
    p.add_argument("--robot", type=Path, help="the robot's file; default: the one of the experiment's robot")
    p.add_argument("--json", type=Path, help="figures and episodes; default: RUN/served_STEP.json")
    add_settings(p, "of both halves")
    args = p.parse_args()
    store = CheckpointStore(args.run)
    step = store.steps()[-1] if args.step is None else args.step
    config = apply_overrides(load_experiment(read_config(args.run)["name"]), settings(p, args.set))
    file = args.json or args.run / f"served_{step}.json"
    plan = {"run": str(args.run), "step": step, "set": args.set}
    saved = json.loads(file.read_text()) if file.exists() else {"plan": plan, "done": {way: {} for way in WAYS}}
    if saved["plan"] != plan:
        raise SystemExit(f"{file} is of {saved['plan']}, and now {plan} is asked for: give another --json")
    done, seeds = saved["done"], [args.seed_base + i for i in range(args.episodes)]

    def keep(way: str, runner: EpisodeRunner) -> None:
        for seed in seeds:
            if str(seed) not in done[way]:
                done[way][str(seed)] = result = run_episode(runner, seed)
                file.write_text(json.dumps(saved, indent=1))
                print(
                    f"{way} {seed}: success={result['success']} length={result['length']} faults={result['faults']}",
                    flush=True,
                )

    agent = make_agent(config, make_env(config.robot).robot_spec)
    alone = apply_overrides(config, [("actor.clock", "lockstep"), ("actor.intervention", "none")])
    with runner(alone, agent, store, step) as lockstep:
        keep("lockstep", lockstep)
    if len(done["served"]) < len(seeds) or not set(map(str, seeds)) <= set(done["served"]):
        driver = {"env_name": config.robot.env_name} if hasattr(config.robot, "env_name") else {}
        with ServedRobotProcess(args.robot or ROBOTS / f"{config.robot.kind}.toml", driver) as robot:
            server = [("actor.clock", "realtime"), ("actor.intervention", "none"), ("robot.server", robot.address)]
            with runner(apply_overrides(config, server), agent, store, step) as served:
                keep("served", served)
            saved.setdefault("server", []).append(robot.figures())
    saved["summary"] = figures = summary(done, seeds)
    file.write_text(json.dumps(saved, indent=1))
    for way in WAYS:
        row = figures[way]
        print(
            f"{way:9s} success {row['success_rate']:.2f}, {row['mean_length']:.0f} ticks, "
            f"gated {100 * row['gated_share']:.1f} %, late p99 {row['late_p99_ms_median']:.1f} ms, "
            f"faults {len(row['faults'])}"
        )
    print(
        f"served - lockstep: {100 * figures['difference']:+.1f} points "
        f"[{100 * figures['low']:+.1f}, {100 * figures['high']:+.1f}]"
    )


if __name__ == "__main__":
    main()
