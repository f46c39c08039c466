"""The driver of the learning benchmarks: demonstrations, a training that is resumed, checkpoints evaluated once.

A finished training is not repeated, nor is the evaluation of a checkpoint: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.local import train_local
from serl_chunk.cli.record import run_record
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.learner.building import RunOptions
from serl_chunk.robots.registry import make_env
from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import VALIDATION_SEED_BASE, Snapshot
from support.cli_args import add_settings, keep_plan, make_parser, settings
from support.results import Checkpoint

# Reported starts. Not the product's evaluation starts: the recipe was tuned while these were being looked at.
REPORT_SEED_BASE = 500_000
STARTS = {"validation": VALIDATION_SEED_BASE, "reported": REPORT_SEED_BASE}
# Noise of a task's scripted demonstrator: of the robot's own, or rad.
NOISE = {"fake_aloha": None, "fake_aloha_images": None, "aloha_transfer_cube": 0.01, "aloha_insertion": 0.01}


def parser(
    doc: str | None, out: str, *, of: str, seeds: str = "0", seed: int | None = None, episodes: int = 100
) -> argparse.ArgumentParser:
    """Return a parser of the options that all learning benchmarks have.

    Args:
        of: what `--set` is for.
        seed: default of `--seed`, which replaces `--seeds` where one command makes one run.
    """
    p = make_parser(doc)
    if seed is None:
        p.add_argument("--seeds", default=seeds, type=numbers, help="comma-separated")
    else:
        p.add_argument("--seed", default=seed, type=int)
    p.add_argument("--episodes", type=int, default=episodes, help="of each evaluation")
    p.add_argument("--out", type=Path, default=Path("runs") / out, help="folder of demonstrations and runs")
    add_settings(p, of)
    return p


def arguments(p: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; `overrides` are those of `--set`."""
    args = p.parse_args()
    args.overrides = settings(p, args.set)
    return args


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a text, separated by commas."""
    return [int(part) for part in text.split(",")]


class Trained:
    """A run and its checkpoints.

    Args:
        config: of the evaluations.
        starts: the first seed of the start states of each kind.
    """

    def __init__(self, config: ExperimentConfig, run: Path, starts: Mapping[str, int] = STARTS) -> None:
        self.config, self.run, self.starts = config, run, starts
        self.store = CheckpointStore(run)

    @functools.cached_property
    def env(self) -> Any:
        return make_env(self.config.robot)

    @functools.cached_property
    def _agent(self) -> Any:
        return make_agent(self.config, self.env.robot_spec)

    @functools.cached_property
    def _walls(self) -> list[tuple[int, float]]:
        return [(row["step"], row["wall"]) for row in read_metrics(self.run)["train"]]

    @property
    def steps(self) -> list[int]:
        """The checkpoints, in their order."""
        return self.store.steps()

    def policy(self, step: int) -> tuple[LocalPolicy, dict[str, Any]]:
        """Return the mean policy of a checkpoint, and what is noted with it."""
        stored = self.store.restore_policy(step)
        preprocess = Preprocess.restored(self.config, self.env.robot_spec, stored.meta, stored.normaliser)
        policy = LocalPolicy(self._agent, preprocess, self.env.robot_spec, seed=1)
        policy.swap(Snapshot(step, stored.params))
        return policy, stored.meta

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` found before, or finds now."""
        file = self.run / f"benchmark_{name}.json"
        if not file.exists():
            file.write_text(json.dumps(make()))
        return json.loads(file.read_text())

    def evaluate(self, step: int, episodes: int, starts: str = "reported", **more: Any) -> Checkpoint:
        """Evaluate a checkpoint's policy, print its success and return it; `more`: fields of `Checkpoint`."""

        def counts() -> dict[str, int]:
            policy, meta = self.policy(step)
            result = evaluate(self.env, policy, self.config, n=episodes, seed_base=self.starts[starts])
            return {"successes": result.successes, **{name: meta[name] for name in ("env_steps", "human_ticks")}}

        found = self.kept(f"{starts}_{step}_{episodes}", counts)
        wall = max((round(wall, 1) for at, wall in self._walls if at <= step), default=None)
        point = Checkpoint(**{"updates": step, "episodes": episodes, "starts": starts, "wall": wall, **found, **more})
        low, high = wilson_interval(point.successes, point.episodes)
        print(
            f"{self.run.name} step {point.updates}, {starts}: {point.rate:.2f} [{low:.2f}, {high:.2f}], "
            f"{point.env_steps} steps, {point.human_ticks} human ticks, {wall or 0:.0f} s",
            flush=True,
        )
        return point

    def curve(self, steps: Iterable[int], episodes: int) -> list[Checkpoint]:
        """Evaluate the last of `steps` on reported starts, those before on validation starts."""
        *before, last = steps
        return [*(self.evaluate(step, episodes, "validation") for step in before), self.evaluate(last, episodes)]


def record(config: ExperimentConfig, count: int, demos: Path, noise: float | None = None) -> Path:
    """Record scripted demonstrations up to `count`, with the policy's cameras; returns their folder."""
    run_record(config, count, str(demos), policy="scripted", noise=noise, cameras=config.agent.image_keys)
    return demos


def differing(config: ExperimentConfig, *, but: Sequence[str] = (), base: ExperimentConfig | None = None) -> list[str]:
    """One line for every field in which `config` is not `base`, the packaged experiment of its name where None.

    Args:
        but: fields of no account.
    """
    packaged = to_dict(base or load_experiment(config.name))
    lines = difference(json.loads(json.dumps(packaged)), json.loads(json.dumps(to_dict(config))))
    return [line for line in lines if line.partition(":")[0] not in but]


def train(
    config: ExperimentConfig, run: Path, demos: Sequence[Path], plan: Sequence[Any] = (), **compared: Any
) -> Trained:
    """Train or resume `run`; a finished one is not touched. Raises SystemExit where it was made another way or stopped.

    Args:
        plan: how else its results are made; the configuration need not be in it.
        compared: arguments of `differing`.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    keep_plan(run.with_name(f"{run.name}.plan"), [*plan, *differing(config, **compared)], run)
    trained, loop = Trained(config, run), config.learner
    last = loop.offline_steps if loop.online_steps == 0 else loop.max_steps
    if (trained.store.newest() or 0) < last:
        learner, _ = train_local(config, RunOptions([str(folder) for folder in demos], str(run)))
        if learner.updates < last:
            raise SystemExit(f"{run} was interrupted at step {learner.updates}; run the same command again")
    return trained


def product(*words: str, experiment: str, overrides: Sequence[str]) -> None:
    """Run one `serl-chunk` command; `overrides`: `field=value`. Raises SystemExit where it fails."""
    line = [sys.executable, "-m", "serl_chunk", *words, "--exp_name", experiment, *(f"--config.{t}" for t in overrides)]
    print("$", *line[2:], flush=True)
    if subprocess.run(line, check=False).returncode != 0:
        raise SystemExit(f"{' '.join(line[2:])} failed; run the same command again to go on")


def with_checkpoints(config: ExperimentConfig, last: int, every: int) -> ExperimentConfig:
    """Return `config` with `last` updates and a checkpoint after every `every` of them, all of which are kept."""
    kept = last // every + 2
    loop = dataclasses.replace(config.learner, max_steps=last, checkpoint_period=every, keep_checkpoints=kept)
    return dataclasses.replace(config, learner=loop)
