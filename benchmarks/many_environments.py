"""Steps of the environment per second of processor time, by how many episodes run at once in one process.

    serl-chunk --exp_name fake_aloha --preset bc --learner --demo_path demos/fake_aloha --checkpoint_path runs/clone \\
        --offline_steps 4000 --online_steps 0
    taskset -c 0 python benchmarks/many_environments.py runs/clone --json many_environments.json

The sampled policy of the run's newest checkpoint acts. Ways take turns, and the medians of all turns are given: "one"
is the control loop that an actor of one environment has, the others run so many episodes at once. Every episode has a
decision seed, and ends the same in every way but "one", whose decisions are computed one by one.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.cli_args import make_parser, write_figures

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.many import ManyEpisodes, RecordsInTurn
from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import configured
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.folder import read_config
from serl_chunk.types import Begin, End, Snapshot, Step

SEEDS = 5_000_000  # of the start states, from here upwards


class Forgetful:
    """A RecordSink of a recording robot: it takes everything, and keeps nothing."""

    def begin(self, record: Begin) -> None: ...

    def step(self, record: Step) -> None: ...

    def end(self, record: End) -> None: ...


class Ways:
    """The ways to run the same episodes with the policy of a run."""

    def __init__(self, run: Path) -> None:
        recorded = read_config(run)
        config = configured(load_experiment(recorded["name"]), preset=recorded["preset"] or None)
        self._config = config = dataclasses.replace(config, actor=ActorConfig())
        checkpoint, spec = next(CheckpointStore(run).policies()), robot_spec(config.robot)
        preprocess = Preprocess.restored(config, spec, checkpoint.meta, checkpoint.normaliser)
        self._policy = LocalPolicy(make_agent(config, spec), preprocess, spec)
        self._policy.swap(Snapshot(checkpoint.step, checkpoint.params))

    def one(self) -> Callable[[int], dict[int, EpisodeSummary]]:
        """An actor of one environment."""
        runner = EpisodeRunner(make_env(self._config.robot), self._policy, Forgetful(), config=self._config)
        return lambda count: {i: runner.run_episode(SEEDS + i, explore=True) for i in range(count)}

    def many(self, n: int) -> Callable[[int], dict[int, EpisodeSummary]]:
        """`n` environments at once."""
        records = RecordsInTurn(Forgetful())
        runners = [
            EpisodeRunner(make_env(self._config.robot), self._policy, records.of_robot(), config=self._config)
            for _ in range(n)
        ]
        many = ManyEpisodes(runners, self._policy, records)

        def play(count: int) -> dict[int, EpisodeSummary]:
            summaries: dict[int, EpisodeSummary] = {}
            begun = 0
            while begun < count or many.open:
                while begun < count and many.free:
                    many.begin(SEEDS + begun, explore=True, decision_seed=begun, episode_id=str(begun))
                    begun += 1
                for ended in many.advance():
                    summaries[int(ended.state.id)] = ended.runner.summary(ended.state)
            return summaries

        return play


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of fake_aloha")
    parser.add_argument("--at_once", default="1,4,16,64", metavar="N,N", help="episodes at once (default: 1,4,16,64)")
    parser.add_argument("--episodes", type=int, default=128, help="of each turn (default: 128); of one and 1 a quarter")
    parser.add_argument("--turns", type=int, default=7, help="of each way (default: 7)")
    args = parser.parse_args()
    ways, numbers = Ways(args.run), [int(n) for n in args.at_once.split(",")]
    plays = {"one": ways.one(), **{str(n): ways.many(n) for n in numbers}}
    counts = {name: args.episodes // (4 if name in ("one", "1") else 1) for name in plays}
    rates: dict[str, list[float]] = {name: [] for name in plays}
    walls: dict[str, list[float]] = {name: [] for name in plays}
    outcomes: dict[str, Any] = {}
    for turn in range(args.turns + 1):  # the first one compiles
        for name, play in plays.items():
            began, wall = time.process_time(), time.perf_counter()
            summaries = play(counts[name])
            used, took = time.process_time() - began, time.perf_counter() - wall
            if turn:
                steps = sum(each.steps for each in summaries.values())
                rates[name].append(steps / used)
                walls[name].append(steps / took)
            outcomes[name] = {i: (each.outcome, each.steps, each.jerk) for i, each in summaries.items()}
    shared = range(min(counts.values()))
    same = all(outcomes[str(n)][i] == outcomes[str(numbers[0])][i] for n in numbers for i in shared)
    figures = {f"steps_per_cpu_s_{name}": float(np.median(values)) for name, values in rates.items()}
    figures |= {f"steps_per_s_{name}": float(np.median(values)) for name, values in walls.items()}
    largest = str(max(numbers))
    figures["times_one"] = figures[f"steps_per_cpu_s_{largest}"] / figures["steps_per_cpu_s_one"]
    successes = [outcome == "success" for outcome, *_ in outcomes[largest].values()]
    figures |= {"same_episodes": same, "success_rate": float(np.mean(successes))}
    print(json.dumps(figures, indent=1))
    write_figures(args, figures)
    assert same, "an episode depends on how many run at once"


if __name__ == "__main__":
    main()
