"""Files of a run's evaluations, the checkpoints `latest`, `best` and `last:N`, and which arm was better at one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from serl_chunk.runs.checkpoints import CheckpointError, CheckpointStore, PolicyCheckpoint
from serl_chunk.runs.folder import write_json

FOLDER = "evaluations"
CHECKS = "policy_checks"  # folder of open-loop checks, a file for each checkpoint
VALIDATION = "validation"  # purposes: this one, "evaluation", and "learner" (learner.eval_interval)


def save(
    run: Path, step: int, purpose: str, results: list[dict[str, Any]], differences: Sequence[str] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Write `<run>/evaluations/<purpose>_<step>.json`, a later one as `<purpose>_<step>_2.json`; returns its path.

    `differences`: the settings that were not the run's, a line for each. `more`: further fields.
    """
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    files = (run / FOLDER / f"{purpose}_{step}{'' if i == 1 else f'_{i}'}.json" for i in itertools.count(1))
    path = next(file for file in files if not file.exists())
    fields = {"differences": list(differences)} if differences else {}
    write_json(path, {"checkpoint": step, "purpose": purpose, "results": results, **fields, **more})
    return path


def save_check(run: Path, content: Mapping[str, Any]) -> Path:
    """Write `<run>/policy_checks/<step>.json`, in the place of an earlier one, and return its path."""
    (run / CHECKS).mkdir(parents=True, exist_ok=True)
    path = run / CHECKS / f"{content['checkpoint']}.json"
    write_json(path, content)
    return path


def resolve_step(run: Path, store: CheckpointStore, wanted: str) -> int:
    """Resolve `latest`, `best` or a number; raises CheckpointError with the existing checkpoints.

    `latest` may be a timed one; the others are periodic. `best` has the highest success rate among validations with the
    run's own settings and without `--eval_arm`, whose start states are not those of reported figures; that of most
    episodes counts, and one that was interrupted does not.
    """
    steps, newest = store.steps(), store.newest()
    listing = ", ".join(map(str, steps)) or "none"
    if wanted == "latest":
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet")
        return newest
    if wanted == "best":
        rates: dict[int, tuple[int, float]] = {}  # episodes and success
        for step, arm, n, rate in _validated(run):
            if step in steps and not arm:
                rates[step] = max((n, rate), rates.get(step, (0, 0.0)))
        if not rates:
            none = f"no checkpoint of {run} has been validated with the run's settings, so none is best"
            text = f"{none}. Evaluate some with --eval_validation first (checkpoints: {listing})"
            raise CheckpointError(text, parameter="eval_checkpoint_step")
        return max(rates, key=lambda s: (rates[s][1], s))
    if not (wanted.isascii() and wanted.isdigit()) or int(wanted) not in steps:
        raise CheckpointError(f"{run} has no checkpoint {wanted!r}; it has: {listing} (or latest, best)")
    return int(wanted)


def _validated(run: Path) -> Iterator[tuple[int, str, int, float]]:
    """Yield checkpoint, arm, episodes and success rate of whole validations with the run's settings.

    Raises CheckpointError for a damaged file.
    """
    for file in sorted((run / FOLDER).glob(f"{VALIDATION}_*.json")):
        try:
            data = json.loads(file.read_text())
            if not data.get("differences"):
                for r in data["results"]:
                    if not r.get("interrupted"):
                        yield int(data["checkpoint"]), r.get("arm") or "", int(r["n"]), float(r["success_rate"])
        except (OSError, ValueError, LookupError, TypeError) as e:
            fault = f"{file} is damaged ({type(e).__name__}: {e})"
            raise CheckpointError(f"{fault}. Remove it and evaluate that checkpoint again") from e


def better_arm(run: Path, step: int) -> str:
    """Say which arm had more successes on a checkpoint's validation starts; empty where not both were validated.

    A damaged file is named: it hinders no evaluation and no report.
    """
    most: dict[str, tuple[int, float]] = {}
    try:
        for of, arm, n, rate in _validated(run):
            if of == step and arm:
                most[arm] = max((n, rate), most.get(arm, (0, 0.0)))
    except CheckpointError as error:
        return f"which arm was better is unknown: {error}"
    if len(most) < 2:
        return ""
    (first, one), (second, other) = sorted(most.items(), key=lambda arm: -arm[1][1])
    return (
        f"{first} was {'as good as' if one[1] == other[1] else 'better than'} {second} on validation starts "
        f"({100 * one[1]:.0f} and {100 * other[1]:.0f} % of {min(one[0], other[0])})"
    )


def expand(run: Path, store: CheckpointStore, wanted: Sequence[str]) -> list[str]:
    """Replace each `last:N` by the newest N periodic checkpoints, oldest first; raises CheckpointError for a bad N."""
    steps: list[str] = []
    for each in wanted:
        name, colon, number = each.partition(":")
        if not colon or name != "last":
            steps.append(each)
        elif number.isascii() and number.isdigit() and 0 < int(number) <= len(store.steps()):
            steps += map(str, store.steps()[-int(number) :])
        else:
            there = f"{run} has {len(store.steps())} periodic checkpoints"
            raise CheckpointError(f"{each!r} must be last:N with N up to what there is: {there}")
    return steps


def wanted_policy(run: Path, store: CheckpointStore, wanted: str) -> PolicyCheckpoint:
    """Read the policy that `resolve_step` leads to; raises CheckpointError."""
    while True:
        step = resolve_step(run, store, wanted)
        try:
            return store.restore_policy(step)
        except CheckpointError:  # of a timed one that the next one replaced meanwhile, in a run that goes on
            if wanted != "latest" or resolve_step(run, store, wanted) == step:
                raise
