"""The published Q-chunking code as a contestant of cube_single.py: a checkout that trains offline, by itself."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.results import UNKNOWN, Checkpoint, Run
from support.worker import Worker

SOURCE = "https://github.com/ColinQiyangLi/qc"
HORIZON, BATCH = 5, 256
CALL = 1_000  # updates of one call to the process, which has to answer in time
_SMALL: dict[str, Any] = {"actor_hidden_dims": [256, 256], "value_hidden_dims": [256, 256], "flow_steps": 5}


class Contestant(NamedTuple):
    """What is changed of a published agent's configuration."""

    agent: str
    options: dict[str, Any]


CONTESTANTS = {
    "published-qc": Contestant("acfql", {**_SMALL, "actor_type": "best-of-n", "actor_num_samples": 8}),
    "published-qc-fql": Contestant("acfql", {**_SMALL, "alpha": 300.0}),
}


def check(parser: argparse.ArgumentParser, names: list[str], args: argparse.Namespace) -> None:
    """End the program where the contestants among `names` and `--published` do not go together."""
    chosen = [name for name in names if name in CONTESTANTS]
    if args.published is None:
        if chosen:
            parser.error(f"--methods: {chosen[0]} needs --published DIR. Clone {SOURCE} and pass its folder.")
        if args.published_python:
            parser.error("--published_python has no effect without --published DIR. Remove it.")
        return
    if not (args.published / "agents" / "acfql.py").is_file():
        parser.error(
            f"--published: {args.published}: no checkout of the published code (agents/acfql.py is missing). Clone "
            f"{SOURCE} and pass its folder."
        )
    if args.offline_steps < 1:
        parser.error(f"--published: it trains offline, for --offline_steps={args.offline_steps}. Pass at least 1.")
    if not chosen:
        parser.error(
            f"--published has no effect on these --methods. Add one of {', '.join(CONTESTANTS)}, or remove it."
        )


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, with `-dirty` behind it where files were changed; "unknown" without git."""
    if not (checkout / ".git").exists():  # git would answer for a repository that the folder lies in
        return UNKNOWN
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip()


def train(name: str, seed: int, args: argparse.Namespace, report: Callable[[Checkpoint], None]) -> Run:
    """Train one contestant for `args.offline_steps` updates, with an evaluation every `args.eval_interval`.

    Args:
        report: called with each evaluation.
    """
    contestant = CONTESTANTS[name]
    worker = Worker(
        "support.reference_agents.published_training",
        "PublishedTraining",
        args.published_python or sys.executable,
        path=[str(args.published.resolve())],
    )
    points, done, wall = [], 0, 0.0
    try:
        worker(
            "open",
            agent=contestant.agent,
            options=contestant.options,
            data=str(args.data.resolve()),
            task=args.task,
            seed=seed,
            horizon=HORIZON,
            batch=BATCH,
        )
        while done < args.offline_steps:
            end = min(args.offline_steps, (done // args.eval_interval + 1) * args.eval_interval)
            while done < end:
                count = min(CALL, end - done)
                wall += worker("train", updates=count)
                done += count
            successes = worker("evaluate", episodes=args.episodes)
            points.append(Checkpoint(done, successes, args.episodes, wall=round(wall, 1)))
            report(points[-1])
    finally:
        worker.kill()
    settings = [f"{key}={','.join(map(str, v)) if isinstance(v, list) else v}" for key, v in contestant.options.items()]
    return Run(name, seed, "published", settings, points)
