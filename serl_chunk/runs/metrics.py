"""The rows of a run's `metrics.jsonl`: their writer, which mirrors them to Weights & Biases, and their reader.

One JSON object a line, in five kinds, each with `wall` (seconds of running time over all processes of the run), `step`
(critic updates, or iterations on groups), `env_steps` and `human_ticks`:

- `train`: losses, values, rates, waits, timers and replay counts, under HIL-SERL's names where they mean the same;
- `episode`: one finished episode (`EPISODE_FIELDS`), and per decision `q` and `g` (`MetricsLog.episode`). `succeed` is
  0, 1 or null; `success_without_intervention` is a share of the last 20 judged episodes, helped ones included;
  `seam_acceleration` is the largest change of speed of a commanded joint where control passes between policy and human,
  and `acceleration` that of all other ticks, rad/s^2 (null: none); `other_share` is the share of decisions in which
  another candidate than the first acted, `q_first` and `q_best` their mean values (null: one candidate); `start`, of
  two tasks in turns (`actor.turns`), is reset, other or again, and `since_reset` the robot's ticks, of both tasks, from
  the last reset of the scene to its beginning;
- `correction`: a later label of the `episode` of that name, or its undoing or discard. `read_metrics` applies it;
- `eval`: one evaluation of one checkpoint; its counters are the checkpoint's; `arm` is that of `--eval_arm`;
- `event`: a text about the run. `read_metrics` leaves out what a resume undid; nothing is rewritten.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serl_chunk.types import Amend, DataError, Outcome

logger = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id.txt"
METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "episode", "correction", "eval", "event")
EPISODE_FIELDS = (
    "actor_id", "ret", "length", "succeed", "intervention_steps", "intervention_count", "phase",
    "success_without_intervention", "number", "seam_acceleration", "acceleration", "episode", "last_reward",
    "other_share", "q_first", "q_best", "start", "since_reset",
)  # fmt: skip
EVALUATION_FIELDS = (
    "success_rate", "n", "low", "high", "mode", "mean_time_s", "mean_length", "checkpoint", "mean_return",
    "seconds", "by", "starts_repeat", "arm",
)  # fmt: skip
DEMONSTRATION_RECEIVED = "demonstration received"  # how the event of each that `record --ip` sent begins
_ROW_NAMES = {"ret": "episode/r", "length": "episode/l"}  # argument -> name in the row, where they differ
_RESUMED = re.compile(r"resumed at step (\d+)")


class WandbMirror:
    """The wandb run of one run folder; it never raises.

    wandb fails in many unrelated ways (its own errors, sockets, a dead service process, no disk, not installed): a
    failure is one warning, and the mirror stays off.

    Args:
        run_dir: holds wandb's files and the id under which a restart continues the same wandb run.
        settings: arguments of `wandb.init`: project, name and config.
        offline: keep wandb's files for a later `wandb sync`; WANDB_MODE overrides it.
        on_failure: called with the warning that is logged when the mirror goes off.
    """

    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], *, offline: bool, on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._run: Any = None
        self._run = self._try("start", lambda: _start_wandb(run_dir, settings, offline))

    def log(self, numbers: Mapping[str, float]) -> None:
        """Show one row of numbers; does nothing where the mirror is off."""
        if self._run is not None:
            self._try("log", lambda: self._run.log(dict(numbers)))

    def finish(self) -> None:
        """End the wandb run; may be called twice."""
        if self._run is not None:
            self._try("finish", lambda: self._run.finish())
        self._run = None

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # see above: there is no list of what wandb raises
            self._run, reason = None, f"{type(error).__name__}: {error}"
            text = f"wandb: {what} failed ({reason}). It is off from here on, metrics.jsonl goes on"
            logger.warning(text)
            self._on_failure(text)


def _start_wandb(run_dir: Path, settings: Mapping[str, Any], offline: bool) -> Any:
    try:
        import wandb  # takes a second to import, and is not needed where the mirror is off
    except ImportError as error:
        raise ImportError("wandb is not installed: pip install wandb, or pass --debug to train without it") from error

    id_file = run_dir / WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    mode: Any = os.environ.get("WANDB_MODE") or ("offline" if offline or not _wandb_usable() else "online")
    quiet = wandb.Settings(console="off", silent=True, init_timeout=30)  # the terminal belongs to the status line
    name = id_file.read_text().strip()
    run = wandb.init(**settings, id=name, resume="allow", dir=str(run_dir), mode=mode, settings=quiet)
    # After a resume `step` may go back, which wandb's own step counter would refuse.
    run.define_metric("*", step_metric="step")
    if mode == "offline":
        reason = "without a key or a network, or by choice"
        logger.info(f"wandb is offline ({reason}). Upload the run later with wandb sync {Path(run.dir).parent}")
    return run


def _wandb_usable() -> bool:
    """Return whether wandb's server answers and there is a key; else wandb would wait, or prompt on the terminal."""
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


Row = dict[str, Any]


class Counters(NamedTuple):
    """Counters of a run."""

    step: int  # critic updates
    env_steps: int  # steps received from actors
    human_ticks: int  # of them, ticks on which a human had the robot, idle ones included


class RunMetrics(dict[str, list[Row]]):
    """Rows by kind, in file order; the kinds in `KINDS` are always there."""

    bad_lines: int = 0  # lines that are no row
    superseded: int = 0  # rows left out because a resume undid them

    def last(self) -> Row | None:
        """Return the row with the greatest running time, or None in an empty run."""
        # Evaluations may be of any earlier checkpoint.
        rows = [row for kind, of_kind in self.items() if kind != "eval" for row in of_kind] or self["eval"]
        return max(rows, key=lambda row: row["wall"], default=None)

    def trained_wall(self, evaluation: Row) -> float:
        """Return the running time in seconds at the evaluated checkpoint: of the last train row up to its step."""
        walls = (row["wall"] for row in self["train"] if row["step"] <= evaluation["step"])
        return max(walls, default=evaluation["wall"])


def read_metrics(run_dir: str | os.PathLike[str]) -> RunMetrics:
    """Read the rows of a run by kind, also while it is being written; raises DataError where it has none.

    A resume from the checkpoint of step k supersedes earlier train and eval rows with `step > k`, and episodes whose
    `number` is beyond what the checkpoint had counted (those of the journal are counted, and written, again). Episodes
    have the outcome and return to which they were corrected; no returns `g` are known of them any more.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        known = "such as a learner's checkpoint_path or runs/<exp_name>/<time>"
        raise DataError(f"{run_dir} is not a run folder: it has no {METRICS_FILE}. Give one, {known}.")
    metrics = RunMetrics({kind: [] for kind in KINDS})
    rows: list[Row] = []
    for line in filter(bytes.strip, path.read_bytes().splitlines()):
        if (row := parse_row(line)) is None:
            metrics.bad_lines += 1
            continue
        if row["kind"] == "event" and (match := _RESUMED.match(str(row.get("text")))):
            kept = [r for r in rows if not _is_superseded(r, int(match[1]), row)]
            metrics.superseded += len(rows) - len(kept)
            rows = kept
        rows.append(row)
    for row in rows:
        metrics.setdefault(row["kind"], []).append(row)
    named = {row["episode"]: row for row in metrics["episode"] if row.get("episode")}
    for correction in metrics["correction"]:
        if (corrected := named.get(correction["episode"])) is not None:
            _correct(corrected, correction)
    return metrics


def _correct(episode: Row, correction: Row) -> None:
    episode["succeed"] = correction["succeed"]
    if (reward := correction["reward"]) is not None:
        episode["episode/r"] += reward - episode["last_reward"]
        episode["last_reward"] = reward
    episode["g"] = [None] * len(episode["g"])


def succeeded_alone(row: Row) -> bool:
    """Return whether the episode of `row` succeeded without intervention."""
    return bool(row.get("succeed")) and not row.get("intervention_count")


def _is_superseded(row: Row, step: int, resumed: Row) -> bool:
    if row["kind"] != "episode":
        return row["kind"] in ("train", "eval") and bool(row["step"] > step)
    return bool(row["number"] > resumed["episodes"])


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


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl` and mirrors their numbers to wandb. Safe to call from several threads.

    Each row is one appending `write` to an unbuffered file: it outlives a kill of this process, and an evaluation may
    add its row while the learner writes. A torn last line and rows that a full disk refuses are reported later. The
    folder `run_dir` is created if absent. `wandb_project`: None switches the mirror off (`--debug`).
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, wandb_project: str | None, wandb_name: str,
        config: Mapping[str, Any], offline: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        last, rest = _read_end(path)
        self._counters = Counters(*(last[name] for name in Counters._fields))
        self._wall_before = last["wall"]
        self._clock, self._start = clock, clock()
        self._paused_at: float | None = None
        self._lock = threading.RLock()
        self._nonfinite_logged: set[str] = set()
        # The start of a line that a power cut left is not cut off: a running learner may be about to complete it.
        self._mid_line = bool(rest)
        self._lost_rows = 0
        self._mirror = None
        self._file = path.open("ab", buffering=0)
        if rest and parse_row(rest) is None:
            self._warn(f"the last line of {METRICS_FILE} was torn after {len(rest)} bytes: that row is lost")
        if wandb_project is not None:
            mirrored = {"project": wandb_project, "name": wandb_name, "config": dict(config)}
            self._mirror = WandbMirror(self.run_dir, mirrored, offline=offline, on_failure=self._warn)

    def wall(self) -> float:
        """Seconds that all processes of this run have been running, without `pause`."""
        now = self._clock() if self._paused_at is None else self._paused_at
        return self._wall_before + now - self._start

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the run's clock within the block, for what is no part of training. Not nested."""
        self._paused_at = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._start += self._clock() - self._paused_at
                self._paused_at = None

    def train(self, counters: Counters, values: Mapping[str, Any]) -> None:
        """Write a period of training; times are seconds, `wait/...` of this period, `timer/...` the mean of a call."""
        self._write("train", counters, values)

    def episode(
        self, counters: Counters, *, q: Sequence[float] = (), g: Sequence[float | None] = (), **fields: Any
    ) -> None:
        """Write a finished episode; `fields` are those of `EPISODE_FIELDS`, absent ones null.

        Per decision, `q` is the critic's value and `g` the realised return, None where unknown. Raises DataError if
        their lengths differ.
        """
        if len(q) != len(g):
            raise DataError(f"an episode needs one realised return g per value q, got {len(q)} q and {len(g)} g")
        row = _row(EPISODE_FIELDS, fields)
        row["succeed"] = None if row["succeed"] is None else int(row["succeed"])
        self._write("episode", counters, row | {"q": list(q), "g": list(g)}, mirror_as="environment/")

    def correction(self, session: str, amend: Amend, counters: Counters | None = None) -> None:
        """Write a correction of an episode of `session`; `counters` default to those of the previous row.

        A discarded episode counts as neither a success nor a failure.
        """
        succeed = None if amend.discard else int(amend.outcome is Outcome.SUCCESS)
        fields = {"episode": f"{session}/{amend.episode_id}", "succeed": succeed, "reward": amend.reward}
        self._write("correction", counters or self._counters, fields)

    def evaluation(self, counters: Counters, **fields: Any) -> None:
        """Write an evaluation of a checkpoint's policy; `fields` are those of `EVALUATION_FIELDS`, absent ones null."""
        named = "_".join(filter(None, (fields["mode"], fields.get("arm"))))
        self._write("eval", counters, _row(EVALUATION_FIELDS, fields), mirror_as=f"eval/{named}/")

    def event(self, text: str, counters: Counters | None = None) -> None:
        """Write a text about the run; `counters` default to those of the previous row."""
        self._write("event", counters or self._counters, {"text": text})

    def resumed(self, counters: Counters, episodes: int) -> None:
        """Write that training continues from the checkpoint of `counters.step`, with `episodes` of them counted."""
        self._write("event", counters, {"text": f"resumed at step {counters.step}", "episodes": episodes})

    def close(self) -> None:
        """End the wandb run and close the file; further rows raise ValueError."""
        with self._lock:
            if self._mirror is not None:
                self._mirror.finish()
            self._mirror = None
            self._file.close()

    def _warn(self, text: str) -> None:
        self.event(f"warning: {text}")

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
                if key not in self._nonfinite_logged:
                    self._nonfinite_logged.add(key)
                    self._warn(f"{key} is not finite at step {counters.step}; such values are written as null")
            if self._mirror is not None and kind not in ("event", "correction"):
                numbers = {mirror_as + key: row[key] for key in fields if isinstance(row[key], int | float)}
                self._mirror.log(numbers | {key: value for key, value in head.items() if key != "kind"})

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
                self._warn(f"{lost} metric rows before this one were lost: the file could not be written")
            return
        self._mid_line = self._mid_line or written > 0
        self._lost_rows += 1
        if self._lost_rows == 1:
            logger.warning("cannot write %s (%s): training goes on, its metrics are lost", self._file.name, reason)


def _row(names: Sequence[str], fields: Mapping[str, Any]) -> Row:
    if unknown := fields.keys() - set(names):
        raise TypeError(f"unknown fields of a metric row: {', '.join(sorted(unknown))}")
    return {_ROW_NAMES.get(name, name): fields.get(name) for name in names}


def _read_end(path: Path) -> tuple[Row, bytes]:
    """Return the last row of a file, of zeros without one, and the bytes after its last newline."""
    data = path.read_bytes() if path.exists() else b""
    rows = filter(None, map(parse_row, reversed(data.splitlines())))
    return next(rows, dict.fromkeys(("wall", *Counters._fields), 0)), data[data.rfind(b"\n") + 1 :]


def _plain(key: str, value: Any, nonfinite: list[str]) -> Any:
    """`value` as JSON has it; a number that is not finite becomes None and its key is added to `nonfinite`."""
    if hasattr(value, "tolist"):  # numpy and JAX, scalars and arrays
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(key)
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, item, nonfinite) for item in value]
    raise DataError(f"metric {key!r} is a {type(value).__name__}; a metric is a number, a text or a list of numbers")
