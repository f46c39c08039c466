"""The rows of a run's `metrics.jsonl`, and their reader.

One JSON object a line, in four kinds, each with `wall` (seconds of running time since the run began, continued
over restarts), `step` (critic updates), `env_steps` and `human_ticks`:

- `train`: losses, values, rates, waits, timers and replay counts, under HIL-SERL's names where they mean the same;
- `episode`: one finished episode: `actor_id`, `episode/r`, `episode/l`, `succeed` (0 or 1, null where unknown),
  `intervention_steps`, `intervention_count`, `phase`, `success_without_intervention` (share of the last 20 judged
  episodes that succeeded without a human, helped ones in the denominator), `number` (of the run's episodes), and per
  decision `q` (the critic's value of the chosen chunk) and `g` (the discounted return realised from there);
- `eval`: one evaluation of one checkpoint; its counters are the checkpoint's;
- `event`: a text about the run.

Nothing is rewritten. An event records a resume from the checkpoint of step k; `read_metrics` then leaves out what the
previous process wrote after it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.types import DataError

METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "episode", "eval", "event")

Row = dict[str, Any]

_RESUMED = re.compile(r"resumed at step (\d+)")


class Counters(NamedTuple):
    """Counters of a run."""

    step: int  # critic updates
    env_steps: int  # steps received from actors
    human_ticks: int  # of them, ticks on which a human had the robot, idle ones included


class RunMetrics(dict[str, list[Row]]):
    """Rows by kind, in file order; the kinds in `KINDS` are always there.

    `bad_lines` counts lines that are no row, `superseded` the rows left out because a resume undid them.
    """

    bad_lines: int = 0
    superseded: int = 0

    def last(self) -> Row | None:
        """Return the row with the greatest running time, or None in an empty run.

        Evaluations do not count while there is anything else: they may be of any earlier checkpoint.
        """
        rows = [row for kind, of_kind in self.items() if kind != "eval" for row in of_kind] or self["eval"]
        return max(rows, key=lambda row: row["wall"], default=None)

    def trained_wall(self, evaluation: Row) -> float:
        """Return the running time in seconds at the evaluated checkpoint: of the last train row up to its step, or of
        the evaluation itself where there is none."""
        walls = (row["wall"] for row in self["train"] if row["step"] <= evaluation["step"])
        return max(walls, default=evaluation["wall"])


def read_metrics(run_dir: str | os.PathLike[str], *, superseded: bool = False) -> RunMetrics:
    """Read the rows of a run by kind, also while it is being written.

    A resume from the checkpoint of step k supersedes earlier train and eval rows with `step > k`, and episodes whose
    `number` is beyond what the checkpoint had counted (those of the journal are counted, and written, again).

    Args:
        run_dir: a run folder.
        superseded: keep superseded rows.

    Raises:
        DataError: the folder has no `metrics.jsonl`.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(
            f"{path} does not exist, so {run_dir} is not a run folder. A run folder is a learner's checkpoint_path or "
            f"runs/<exp_name>/<time>. It holds config.json, checkpoints/ and {METRICS_FILE}."
        )
    metrics = RunMetrics({kind: [] for kind in KINDS})
    rows: list[Row] = []
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        row = parse_row(line)
        if row is None:
            metrics.bad_lines += 1
            continue
        if not superseded and row["kind"] == "event" and (match := _RESUMED.match(str(row.get("text")))):
            kept = [r for r in rows if not _is_superseded(r, int(match[1]), row)]
            metrics.superseded += len(rows) - len(kept)
            rows = kept
        rows.append(row)
    for row in rows:
        metrics.setdefault(row["kind"], []).append(row)
    return metrics


def succeeded_alone(row: Row) -> bool:
    """Whether the episode of `row` succeeded without intervention: one in which a human helped never did."""
    return bool(row.get("succeed")) and not row.get("intervention_count")


def _is_superseded(row: Row, step: int, resumed: Row) -> bool:
    if row["kind"] == "event":
        return False
    if row["kind"] != "episode":
        return bool(row["step"] > step)
    number, episodes = row.get("number"), resumed.get("episodes")
    if number is None or episodes is None:  # runs of version 0.1
        return bool(row["env_steps"] > resumed["env_steps"])
    return bool(number > episodes)


def parse_row(line: bytes) -> Row | None:
    """Return a line as a row; None if it is not JSON, or without its kind and counters."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    needed = (row.get("wall"), *(row.get(name) for name in Counters._fields))
    return row if all(isinstance(value, int | float) for value in needed) else None
