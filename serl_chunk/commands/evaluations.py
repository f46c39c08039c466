"""Where evaluations of a run are kept, and what `latest` and `best` mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serl_chunk.agents.checkpoints import CheckpointError, CheckpointStore
from serl_chunk.commands.setup import write_json

FOLDER = "evaluations"
VALIDATION = "validation"  # purposes: this one, "evaluation", and "learner" (learner.eval_interval)


def save(run: Path, step: int, purpose: str, results: list[dict[str, Any]]) -> Path:
    """Write `<run>/evaluations/<purpose>_<step>.json`; returns its path."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{purpose}_{step}.json"
    write_json(path, {"checkpoint": step, "purpose": purpose, "results": results})
    return path


def resolve_step(run: Path, store: CheckpointStore, wanted: str) -> int:
    """`latest`, `best` or a number as an existing checkpoint; raises CheckpointError listing those that exist.

    `best` is the highest success rate among validation evaluations (`--eval_validation`), whose start states
    are not those of reported figures.
    """
    steps = store.steps()
    listing = ", ".join(map(str, steps)) or "none"
    if wanted == "latest":
        if not steps:
            raise CheckpointError(f"{run} has no checkpoint yet")
        return steps[-1]
    if wanted == "best":
        rates = {}
        for file in (run / FOLDER).glob(f"{VALIDATION}_*.json"):
            try:
                data = json.loads(file.read_text())
                if data["checkpoint"] in steps:
                    rates[data["checkpoint"]] = max(r["success_rate"] for r in data["results"])
            except (OSError, ValueError, LookupError, TypeError) as e:
                raise CheckpointError(
                    f"{file} is damaged ({type(e).__name__}: {e}): remove it and evaluate that checkpoint again"
                ) from e
        if not rates:
            raise CheckpointError(
                f"no checkpoint of {run} has been validated, so none is known to be best: evaluate some with "
                f"--eval_validation first. Checkpoints: {listing}"
            )
        return max(rates, key=lambda s: (rates[s], s))
    if not (wanted.isascii() and wanted.isdigit()) or int(wanted) not in steps:
        raise CheckpointError(f"{run} has no checkpoint {wanted!r}; it has: {listing} (or latest, best)")
    return int(wanted)
