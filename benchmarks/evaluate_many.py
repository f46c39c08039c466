"""Time of an evaluation's episodes one at a time and many at once, on one core, and whether their outcomes agree.

    python benchmarks/evaluate_many.py runs/first [--episodes 100] [--n_envs 1,16,64] [--set agent.candidates=1]

The mean policy of a run's newest checkpoint acts from the start states of reported figures. `counted` is one episode
after the other whose decisions take their keys from a counter, as on a real robot: no row of a decision is padding.
Figures are seconds of processor time, of which the fastest round counts: they are of use on a busy machine as well.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from support.cli_args import add_settings, make_parser, settings, write_figures

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.recorder import NullSink
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.evaluation import checkpoints_of_run
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.evaluation.rollouts import EVAL_SEED_BASE, evaluate, policy_of
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.folder import read_config


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of a training run in a simulator")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--n_envs", default="1,16,64", metavar="N,...", help="simulators at once")
    parser.add_argument("--rounds", type=int, default=3, help="of each case, in turns")
    add_settings(parser, "of the run's experiment")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX starts its threads
    recorded = read_config(args.run)
    given = settings(parser, args.set)
    config = configured(load_experiment(recorded["name"]), given, preset=recorded["preset"] or None)
    sizes = [int(text) for text in args.n_envs.split(",")]
    with contextlib.ExitStack() as stack:
        envs = [make_env(config.robot, evaluating=True) for _ in range(max(sizes))]
        for env in envs:
            stack.callback(env.close)
        spec = envs[0].robot_spec
        agent = make_agent(config, spec)
        [checkpoint] = checkpoints_of_run(config, spec, agent, args.run, ["latest"])
        policy = policy_of(envs[0], agent, checkpoint.preprocess, checkpoint.snapshot, config)

        def counted(n: int) -> list[tuple[bool, int]]:
            runner = EpisodeRunner(envs[0], policy, NullSink(), config=config)
            with contextlib.closing(runner):
                summaries = [runner.run_episode(EVAL_SEED_BASE + i) for i in range(n)]
            return [(e.success, e.length) for e in summaries]

        def at_once(n: int, size: int) -> list[tuple[bool, int]]:
            result = evaluate(envs[0], policy, config, n=n, others=envs[1:size])
            return [(e.success, e.length) for e in result.summaries]

        cases = {"counted": counted, **{str(size): lambda n, size=size: at_once(n, size) for size in sizes}}
        for play in cases.values():
            play(2)  # compiles
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        outcomes = {}
        for _ in range(args.rounds):
            for name, play in cases.items():
                begin = time.process_time()
                outcomes[name] = play(args.episodes)
                seconds[name].append(time.process_time() - begin)
    fastest = {name: min(values) for name, values in seconds.items()}
    figures = {
        "set": args.set, "episodes": args.episodes, "steps": sum(length for _, length in outcomes["counted"]),
        "same_outcomes": all(outcomes[str(size)] == outcomes[str(sizes[0])] for size in sizes),
        "successes": {name: sum(success for success, _ in found) for name, found in outcomes.items()},
        "seconds": fastest, "times_faster": {name: fastest["counted"] / s for name, s in fastest.items()},
    }  # fmt: skip
    for name, s in fastest.items():
        steps = sum(length for _, length in outcomes[name])
        print(
            f"{name:8} {s:6.2f} s, {steps / s:7,.0f} steps/s, {fastest['counted'] / s:4.2f} times, "
            f"{figures['successes'][name]} successes of {args.episodes}"
        )
    print(f"the same outcomes at each number: {'yes' if figures['same_outcomes'] else 'NO'}")
    write_figures(args, figures)


if __name__ == "__main__":
    main()
