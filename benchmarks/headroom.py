"""What a finished run's critic makes of candidates for each decision: success of a constant policy by what it offers.

The policy is that of one checkpoint of a run of acfql, the first by default (the clone), and the critic that of
another, the last. Each kind of candidates acts from the same starts: samples of the policy, and its chunk with random
steps of each deviation in `--edits`. The setting that a run should have is the best of these.

    python benchmarks/headroom.py runs/demo --json headroom.json
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from support.cli_args import add_settings, make_parser, settings, write_figures
from support.learning import Trained

from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.folder import read_config
from serl_chunk.types import VALIDATION_SEED_BASE, Snapshot

AT_ONCE = 16


def mixed(trained: Trained, of_policy: int, of_critic: int) -> LocalPolicy:
    """Return what acts by the policy of one checkpoint and the critic of another."""
    policy, _ = trained.policy(of_critic)
    own, other = (trained.store.restore_policy(step).params for step in (of_critic, of_policy))
    params = {k: v for k, v in own.items() if not k.startswith("policy/")}
    params |= {k: v for k, v in other.items() if k.startswith("policy/")}
    policy.swap(Snapshot(of_critic + 1, params))
    return policy


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("run", type=Path, help="folder of a run of acfql")
    p.add_argument("--policy", type=int, help="checkpoint whose policy acts (default: the first)")
    p.add_argument("--critic", type=int, help="checkpoint whose critic chooses (default: the last)")
    p.add_argument("--edits", default="0.02,0.05,0.1,0.2", help="deviations of the random steps, comma-separated")
    p.add_argument("--candidates", type=int, default=16)
    p.add_argument("--episodes", type=int, default=60)
    add_settings(p, "of the run's experiment")
    args = p.parse_args()
    recorded = read_config(args.run)
    given = settings(p, args.set)
    config = configured(load_experiment(recorded["name"]), given, preset=recorded["preset"] or None)
    if not isinstance(config.agent, AcfqlConfig):
        p.error(f"{args.run}: its agent is {config.agent.kind}; the candidates are those of acfql")
    kinds: dict[str, dict[str, Any]] = {
        "one sample": {"candidates": 1, "edit_scale": 0.0},
        "samples": {"edit_scale": 0.0},
    }
    kinds |= {f"edits of {text}": {"edit_scale": float(text)} for text in args.edits.split(",")}
    found = {}
    for name, changes in kinds.items():
        agent = dataclasses.replace(config.agent, **{"candidates": args.candidates, "improve_by": "none", **changes})
        trained = Trained(dataclasses.replace(config, agent=agent), args.run)
        of_policy = trained.steps[0] if args.policy is None else args.policy
        policy = mixed(trained, of_policy, trained.steps[-1] if args.critic is None else args.critic)
        envs = [make_env(config.robot) for _ in range(AT_ONCE)]
        result = evaluate(
            envs[0], policy, trained.config, n=args.episodes, seed_base=VALIDATION_SEED_BASE, others=envs[1:]
        )
        low, high = wilson_interval(result.successes, args.episodes)
        found[name] = result.successes / args.episodes
        print(f"{name}: {100 * found[name]:.0f} % ({100 * low:.0f} .. {100 * high:.0f})", flush=True)
        for env in envs:
            env.close()
    write_figures(args, found)


if __name__ == "__main__":
    main()
