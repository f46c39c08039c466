"""What a run measured: `metrics.jsonl` in the run folder, mirrored to Weights & Biases.

One JSON object a line, in four kinds, each with `wall` (seconds of running time since the run began, continued
over restarts), `step` (critic updates), `env_steps` and `human_ticks`:

- `train`: losses, values, rates, waits, timers and replay counts, under HIL-SERL's names where they mean the same;
- `episode`: one finished episode: `actor_id`, `episode/r`, `episode/l`, `succeed` (0 or 1, null where nobody knows),
  `intervention_steps`, `intervention_count`, `phase`, and per decision `q` (the critic's value of the chunk that was
  chosen) beside `g` (the discounted return realised from there);
- `eval`: one evaluation of one checkpoint;
- `event`: a sentence about the run.

Nothing is rewritten. A run resumed from the checkpoint of step k says so in an event, and `read_metrics` then leaves
out what the lost life wrote after that checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import re
import secrets
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from serl_chunk.types import DataError

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id.txt"
KINDS = ("train", "episode", "eval", "event")

Row = dict[str, Any]

_RESUMED = re.compile(r"resumed at step (\d+)")
_log = logging.getLogger(__name__)


class Counters(NamedTuple):
    """Where a run stands."""

    step: int  # critic updates
    env_steps: int  # steps received from actors
    human_ticks: int  # of them, steps on which a person's action was executed


class RunMetrics(dict[str, list[Row]]):
    """Rows by kind, in file order; the kinds in `KINDS` are always there.

    `bad_lines` counts lines that are no row, `superseded` the rows left out because a resume undid them.
    """

    bad_lines: int = 0
    superseded: int = 0

    def last(self) -> Row | None:
        """The row with the greatest running time, of any kind, or None in an empty run."""
        return max((row for rows in self.values() for row in rows), key=lambda row: row["wall"], default=None)


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl` and mirrors their numbers to wandb. Safe to call from several threads.

    Each row is one `write` to an unbuffered file: it outlives a kill of this process. A torn last line, as a power
    cut leaves it, is removed on opening and reported. Rows that a full disk refuses are counted and reported by the
    next row that succeeds: metrics never stop a training run, and never vanish silently.

    Args:
        run_dir: the run folder; created if absent, continued if not.
        wandb_project: None switches the mirror off (`--debug`).
        wandb_name: display name of the run in wandb.
        config: the experiment as a plain dictionary, for wandb.
        offline: keep wandb's files in `run_dir/wandb` for a later `wandb sync`. Chosen by itself where there is no
            API key or no network; the environment variable WANDB_MODE wins over both.
        clock: monotonic seconds; injected by tests.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        wandb_project: str | None,
        wandb_name: str,
        config: Mapping[str, Any],
        offline: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        path = self._run_dir / METRICS_FILE
        last, torn_bytes = _repair(path)
        self._counters = Counters(last["step"], last["env_steps"], last["human_ticks"]) if last else Counters(0, 0, 0)
        self._wall_before = last["wall"] if last else 0.0
        self._clock, self._start = clock, clock()
        self._lock = threading.RLock()
        self._nonfinite_told: set[str] = set()
        self._mid_line = False  # a short write left the start of a line behind
        self._lost_rows = 0
        self._wandb: Any = None
        self._file = path.open("ab", buffering=0)
        if torn_bytes:
            self.event(f"removed a torn last line of {torn_bytes} bytes from {METRICS_FILE}")
        if wandb_project is not None:
            self._guard_wandb(
                "start", lambda: _start_wandb(self._run_dir, wandb_project, wandb_name, dict(config), offline)
            )

    def wall(self) -> float:
        """Seconds this run has been running, all its lives together; time between them does not count."""
        return self._wall_before + self._clock() - self._start

    def train(self, counters: Counters, values: Mapping[str, Any]) -> None:
        """A period of training, since the previous train row.

        `values` holds the agent's metrics (`critic/critic_loss`, `critic/predicted_qs`, `actor/actor_loss`, ...),
        `rates/updates_per_s`, `rates/env_steps_per_s`, `wait/learner_s` and `wait/actor_s` (seconds waited *within
        this period*), `timer/<what>` (mean seconds per call), `replay/online`, `replay/demo` (windows) and
        `replay/excluded_share` (0..1). Scalars of Python, numpy or JAX.
        """
        self._write("train", counters, values)

    def episode(
        self,
        counters: Counters,
        *,
        actor_id: str,
        ret: float,
        length: int,
        succeed: bool | None,
        intervention_steps: int,
        intervention_count: int,
        phase: Literal["warmup", "train"],
        q: Sequence[float] = (),
        g: Sequence[float] = (),
    ) -> None:
        """A finished episode: its return, its length in steps, and per decision Q beside the realised return.

        Raises DataError where `q` and `g` differ in length.
        """
        if len(q) != len(g):
            raise DataError(f"an episode needs one realised return g per value q, got {len(q)} q and {len(g)} g")
        fields = {
            "actor_id": actor_id,
            "episode/r": ret,
            "episode/l": length,
            "succeed": None if succeed is None else int(succeed),
            "intervention_steps": intervention_steps,
            "intervention_count": intervention_count,
            "phase": phase,
            "q": list(q),
            "g": list(g),
        }
        self._write("episode", counters, fields, mirror_as="environment/")

    def evaluation(
        self,
        counters: Counters,
        *,
        success_rate: float,
        n: int,
        low: float,
        high: float,
        mode: Literal["mean", "sampled"],
        mean_time_s: float,
        mean_length: float,
        checkpoint: int,
    ) -> None:
        """An evaluation of `checkpoint` over `n` episodes; `low` and `high` bound the rate (95 % Wilson interval)."""
        fields = {
            "success_rate": success_rate,
            "n": n,
            "low": low,
            "high": high,
            "mode": mode,
            "mean_time_s": mean_time_s,
            "mean_length": mean_length,
            "checkpoint": checkpoint,
        }
        self._write("eval", counters, fields, mirror_as=f"eval/{mode}/")

    def event(self, text: str, counters: Counters | None = None) -> None:
        """A sentence about the run; `counters` default to those of the previous row."""
        self._write("event", counters or self._counters, {"text": text})

    def resumed(self, counters: Counters) -> None:
        """Training continues from the checkpoint of `counters.step`, with `counters` as they now stand.

        What the previous life wrote after that point stays in the file; `read_metrics` leaves it out.
        """
        self.event(f"resumed at step {counters.step}", counters)

    def close(self) -> None:
        """End the wandb run and close the file; further rows raise ValueError."""
        with self._lock:
            if self._wandb is not None:
                self._guard_wandb("finish", lambda: self._wandb.finish())
            self._wandb = None
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, kind: str, counters: Counters, fields: Mapping[str, Any], mirror_as: str = "") -> None:
        with self._lock:
            head = {"kind": kind, "wall": round(self.wall(), 3), **counters._asdict()}
            if clash := head.keys() & fields.keys():
                raise DataError(f"metrics may not be called {', '.join(sorted(clash))}: every row has those already")
            self._counters = counters
            nonfinite: list[str] = []
            row = {key: _plain(key, value, nonfinite) for key, value in {**head, **fields}.items()}
            self._append(row)
            for key in nonfinite:
                if key not in self._nonfinite_told:
                    self._nonfinite_told.add(key)
                    self.event(f"warning: {key} is not finite at step {counters.step}; such values are written as null")
            if self._wandb is not None and kind != "event":
                numbers = {mirror_as + key: row[key] for key in fields if isinstance(row[key], int | float)}
                numbers |= {key: value for key, value in head.items() if key != "kind"}
                self._guard_wandb("log", lambda: self._wandb.log(numbers))

    def _append(self, row: Row) -> None:
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if self._mid_line:  # end the torn line first, so that it costs one bad line and not two
            line = b"\n" + line
        try:
            written = self._file.write(line)
            reason = "the disk took a part of a row"
        except OSError as error:
            written, reason = 0, str(error)
        if written == len(line):
            self._mid_line = False
            lost, self._lost_rows = self._lost_rows, 0
            if lost:
                self.event(f"warning: {lost} metric rows before this one were lost: the file could not be written")
            return
        self._mid_line = self._mid_line or written > 0
        self._lost_rows += 1
        if self._lost_rows == 1:
            _log.warning("cannot write %s (%s): training goes on, its metrics are lost", self._file.name, reason)

    def _guard_wandb(self, what: str, call: Callable[[], Any]) -> None:
        # wandb fails in many unrelated ways (its own errors, sockets, a dead service process, no disk, not
        # installed). The mirror is a convenience, metrics.jsonl the record: whatever happens, it is said once and
        # the mirror stays off.
        try:
            result = call()
        except Exception as error:
            self._wandb = None
            text = (
                f"wandb is off from here on, {METRICS_FILE} goes on: {what} failed with {type(error).__name__}: {error}"
            )
            _log.warning(text)
            self.event(f"warning: {text}")
        else:
            if what == "start":
                self._wandb = result


def read_metrics(run_dir: str | os.PathLike[str], *, superseded: bool = False) -> RunMetrics:
    """The rows of a run by kind; works while the run is being written.

    A resume from the checkpoint of step k supersedes what earlier lines say about later moments: train and eval rows
    with `step > k`, and episodes with more `env_steps` than the resumed run counted (episodes that were acknowledged
    after the checkpoint and brought back from the journal are part of that count, and stay). Events stay always.

    Args:
        run_dir: a run folder.
        superseded: keep superseded rows.

    Raises:
        DataError: the folder has no `metrics.jsonl`.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(
            f"{path} does not exist, so {run_dir} is not a run folder. A run folder is what --checkpoint_path named "
            f"for the learner, else runs/<exp_name>/<time>; it holds config.json, checkpoints/ and {METRICS_FILE}."
        )
    metrics = RunMetrics({kind: [] for kind in KINDS})
    rows: list[Row] = []
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            metrics.bad_lines += 1
            continue
        if not superseded and row["kind"] == "event" and (match := _RESUMED.match(str(row.get("text")))):
            kept = [r for r in rows if not _is_superseded(r, int(match[1]), row["env_steps"])]
            metrics.superseded += len(rows) - len(kept)
            rows = kept
        rows.append(row)
    for row in rows:
        metrics.setdefault(row["kind"], []).append(row)
    return metrics


def _is_superseded(row: Row, step: int, env_steps: int) -> bool:
    if row["kind"] == "event":
        return False
    return row["env_steps"] > env_steps if row["kind"] == "episode" else row["step"] > step


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    needed = (row.get("wall"), *(row.get(name) for name in Counters._fields))
    return row if all(isinstance(value, int | float) for value in needed) else None


def _repair(path: Path) -> tuple[Row | None, int]:
    """End the file with a whole line. Returns its last row, and how many bytes of a torn line were removed."""
    if not path.exists():
        return None, 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    torn = 0
    if end < len(data):
        if _parse(data[end:]) is None:
            torn = len(data) - end
            os.truncate(path, end)
        else:  # only the newline is missing
            with path.open("ab") as file:
                file.write(b"\n")
            end = len(data)
    rows = (_parse(line) for line in reversed(data[:end].splitlines()))
    return next((row for row in rows if row is not None), None), torn


def _plain(key: str, value: Any, nonfinite: list[str]) -> Any:
    """`value` as JSON has it; a number that is not finite becomes None and its key is added to `nonfinite`."""
    if hasattr(value, "tolist"):  # numpy and JAX, scalars and arrays
        value = value.tolist()
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite.append(key)
        return None
    if isinstance(value, list | tuple):
        return [_plain(key, item, nonfinite) for item in value]
    raise DataError(f"metric {key!r} is a {type(value).__name__}; a metric is a number, a text or a list of numbers")


def _start_wandb(run_dir: Path, project: str, name: str, config: dict[str, Any], offline: bool) -> Any:
    """A wandb run that continues the one whose id the run folder holds, if any."""
    try:
        import wandb  # takes a second to import, and is not needed where the mirror is off
    except ImportError as error:
        raise ImportError("wandb is not installed: pip install wandb, or pass --debug to train without it") from error

    id_file = run_dir / WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    mode: Any = os.environ.get("WANDB_MODE") or ("offline" if offline or not _wandb_usable() else "online")
    run = wandb.init(
        project=project,
        name=name,
        config=config,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(run_dir),
        mode=mode,
        # The terminal belongs to the status line.
        settings=wandb.Settings(console="off", silent=True, init_timeout=30),
    )
    # After a resume `step` may go back, which wandb's own step counter would refuse.
    run.define_metric("*", step_metric="step")
    return run


def _wandb_usable() -> bool:
    """Whether wandb's server answers and there is a key for it; otherwise wandb would wait, or ask on the terminal."""
    url = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host = url.hostname or ""
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")):
        try:
            if netrc.netrc(os.environ.get("NETRC")).authenticators(host) is None:
                return False
        except (OSError, netrc.NetrcParseError):
            return False
    if url.scheme in urllib.request.getproxies():
        return True  # only the proxy knows
    try:
        socket.create_connection((host, url.port or (443 if url.scheme == "https" else 80)), timeout=3).close()
    except OSError:
        return False
    return True
