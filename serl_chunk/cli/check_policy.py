"""`serl-chunk check-policy`: a run's policy against demonstrations, before it moves anything."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.agents.registry import make_agent
from serl_chunk.cli.evaluation import checkpoints_of_run
from serl_chunk.cli.process import load, split_overrides
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.data.demos import load_demos
from serl_chunk.evaluation.open_loop import PolicyCheck, check_policy, demonstrations_of
from serl_chunk.logs import add_log_flags, quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.episodes import DEMOS, FORMAT, RunDemos
from serl_chunk.runs.evaluations import save_check
from serl_chunk.runs.folder import read_config, read_json
from serl_chunk.types import Episode, RobotSpec

logger = logging.getLogger(__name__)


def check_policy_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Compare the chunks that a run's policy decides on recorded observations with the actions that were recorded: "
        "the error of each number, grippers that never close, chunks that stand still, numbers at a limit. No robot is "
        "needed. The exit status is 1 where something is named. A learner does the same after its pretraining."
    )
    p.add_argument("run", metavar="RUN", help="the run folder")
    p.add_argument("--step", default="latest", metavar="N", help="the checkpoint: a step, latest (default) or best")
    p.add_argument(
        "--demo_path", action="append", default=[], metavar="PATH",
        help="demonstrations; of these, those that the run was not trained on, if there are any (default: the run's)",
    )  # fmt: skip
    p.add_argument("--exp_name", metavar="NAME", help="the run's experiment (default: as its last process was started)")
    add_log_flags(p)


def check_policy_command(flags: argparse.Namespace) -> int:
    """Print the comparison, and write it to the run; returns 1 where something is named. Raises SerlChunkError."""
    quiet_libraries()
    run = Path(flags.run).expanduser()
    config = config_of_run(run, flags.exp_name, split_overrides(flags.rest))
    spec = spec_of(config)
    given = _given(run, config, spec, flags.demo_path) if flags.demo_path else None
    episodes, held_out = given or (demonstrations_of(run, config), False)
    check = check_run(run, config, spec, episodes, step=flags.step, held_out=held_out)
    rich.console.Console().print(_table(check))
    print("\n".join(check.lines()))
    save_check(run, check.to_json())
    return int(bool(check.findings))


def check_run(
    run: Path, config: ExperimentConfig, spec: RobotSpec, episodes: Iterable[Episode], *, step: str, held_out: bool
) -> PolicyCheck:
    """Compare a checkpoint of a run with `episodes`. Raises SerlChunkError."""
    agent = make_agent(config, spec)
    [checkpoint] = checkpoints_of_run(config, spec, agent, run, [step])
    policy = LocalPolicy(agent, checkpoint.preprocess, spec, seed=config.seed + 1)
    policy.swap(checkpoint.snapshot)
    return check_policy(policy, config, spec, episodes, checkpoint=checkpoint.snapshot.version, held_out=held_out)


def config_of_run(run: Path, exp_name: str | None, overrides: list[tuple[str, str]]) -> ExperimentConfig:
    """Return the experiment of a run with the settings in its config.json, and `overrides`, which win.

    Raises ConfigError, also where the experiment is not found: it is a Python file, of which a run has the name alone.
    """
    saved = read_config(run)
    preset, compat = saved.get("preset") or None, saved.get("compat") or None
    name = exp_name or _started_with(saved) or saved.get("name")
    config = load(name, [], preset=preset, compat=compat)
    recorded = dict(_leaves(saved))
    own = [
        (path, _text(recorded[path]))
        for path, value in _leaves(json.loads(json.dumps(to_dict(config))))
        if path in recorded and recorded[path] != value and path not in ("name", "preset", "compat")
    ]
    given = {path for path, _ in overrides}
    return load(name, [*(each for each in own if each[0] not in given), *overrides], preset=preset, compat=compat)


def _started_with(saved: dict[str, Any]) -> str:
    words = shlex.split((saved.get("process") or {}).get("command", ""))
    following = (b for a, b in itertools.pairwise(words) if a == "--exp_name")
    joined = (word.partition("=")[2] for word in words if word.startswith("--exp_name="))
    return next(itertools.chain(following, joined), "")


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix[:-1], tree
        return
    for key, value in tree.items():
        if key != "kind":
            yield from _leaves(value, f"{prefix}{key}.")


def _text(value: Any) -> str:
    """Return a value of config.json as the command line gives it."""
    return ",".join(map(_text, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _given(run: Path, config: ExperimentConfig, spec: RobotSpec, paths: list[str]) -> tuple[list[Episode], bool]:
    """Return the demonstrations of `--demo_path` that the run was not trained on, else all, and which of both.

    They are read as the run's own were (`--demo_hz` and so on).
    """
    options = RunDemos(run).options if (run / DEMOS).exists() else None
    demos = load_demos(paths, spec, cameras=config.agent.image_keys, options=options, more=(FORMAT,))
    noted = read_json(run / DEMOS)["episodes"] if (run / DEMOS).exists() else []
    known = {each["digest"] for each in noted}
    new = [e for e, origin in zip(demos.episodes, demos.origins, strict=True) if origin.digest not in known]
    return (new, True) if new else (demos.episodes, False)


def _table(check: PolicyCheck) -> rich.table.Table:
    table = rich.table.Table(title="mean absolute error in the robot's units: of the policy, of ...")
    table.add_column("", no_wrap=True)
    for column in ("policy", "repeated command", "mean command", "at a limit"):
        table.add_column(column, justify="right")
    for d in check.dimensions:
        errors = (f"{value:.4g}" for value in (d.error, d.held_error, d.mean_error))
        table.add_row(d.name, *errors, f"{d.saturated:.1%}")
    return table
