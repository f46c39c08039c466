"""Learning results: the files of `benchmarks/results`, what they must hold, and how a benchmark writes one."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from serl_chunk.types import DataError
from serl_chunk.version import version_info

FOLDER = Path(__file__).resolve().parents[1] / "results"
COMMIT = re.compile(r"[0-9a-f]{7,40}(-dirty)?")
UNKNOWN = "unknown"  # written where the package does not run from a git checkout; refused in FOLDER
STARTS = ("validation", "reported")
# Read when a command starts: the checkout may have moved on by the time that its results are written.
_CODE = version_info().commit or UNKNOWN
# What changes between runs of one command and says nothing about its results.
_OUTPUTS = ("--json", "--plot", "--out", "--port", "--published_python")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Episodes of one evaluation, without interventions.

    Args:
        updates: critic updates of the policy that acted; of a clone, those of imitation.
        starts: "validation" (a checkpoint may be chosen by them) or "reported" (chosen by nothing).
        wall: seconds of training so far, evaluations left out.
        best: whether the checkpoint was chosen on validation starts.
    """

    updates: int
    successes: int
    episodes: int
    starts: str = "reported"
    env_steps: int | None = None
    human_ticks: int | None = None
    wall: float | None = None
    best: bool = False
    note: str = ""

    @property
    def rate(self) -> float:
        """Share of successes, 0..1."""
        return self.successes / self.episodes


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: its configuration, its checkpoints in the order of evaluation, and further figures.

    Args:
        settings: differences from the packaged experiment.
        commit: of this run, where it is not the file's.
    """

    name: str
    seed: int
    experiment: str
    settings: Sequence[str]
    checkpoints: Sequence[Checkpoint]
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    commit: str = ""

    def at(self, which: int | Literal["first", "last", "best"], starts: str = "reported") -> Checkpoint | None:
        """Return a checkpoint by its updates or by its role; None where there is none on such starts."""
        points = [c for c in self.checkpoints if c.starts == starts]
        if which == "best":
            points = [c for c in points if c.best]
        elif isinstance(which, int):
            points = [c for c in points if c.updates == which]
        return (points[0] if which == "first" else points[-1]) if points else None


@dataclasses.dataclass(frozen=True)
class Results:
    """The runs of one command.

    Args:
        commit: that ran them; of transcribed results the one that first had the figures.
        transcribed: copied from an earlier table or from figures in another form.
        published: commit of the published code, where that was a contestant.
        details: figures of the command that no table shows as a checkpoint.
    """

    command: str
    commit: str
    transcribed: bool
    runs: Sequence[Run]
    note: str = ""
    published: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(path: Path) -> Results:
    """Read and check a results file. Raises DataError, which names the field."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise DataError(f"{path}: no such results file (there are: {names}). Run its benchmark with --json.") from None
    except json.JSONDecodeError as e:
        raise DataError(f"{path}: no JSON ({e}). Write it with a benchmark's --json.") from None
    return parse(value, str(path))


def parse(value: Any, where: str) -> Results:
    """Check a results file's content and return it. Raises DataError, which names the field."""
    fields = _fields(value, where, Results, optional=("note", "published", "details"))
    _is(fields["command"], str, f"{where}: command", "the command that ran, from benchmarks/ on")
    _is_commit(fields["commit"], f"{where}: commit")
    _is(fields["transcribed"], bool, f"{where}: transcribed", "true or false")
    if "published" in fields:
        _is_commit(fields["published"], f"{where}: published")
    _is(fields["runs"], list, f"{where}: runs", "a list of runs")
    if not fields["runs"] and not fields.get("details"):
        raise DataError(f"{where}: runs: [], expected at least one run. Run the benchmark with --json.")
    runs = [_run(run, f"{where}: runs[{i}]") for i, run in enumerate(fields["runs"])]
    return Results(**{**fields, "runs": runs})


def _run(value: Any, where: str) -> Run:
    fields = _fields(value, where, Run, optional=("figures", "commit"))
    for name in ("name", "experiment"):
        _is(fields[name], str, f"{where}.{name}", "a string")
    _is(fields["seed"], int, f"{where}.seed", "a whole number")
    _is(fields["settings"], list, f"{where}.settings", "a list of strings, empty for the experiment as packaged")
    _is(fields["checkpoints"], list, f"{where}.checkpoints", "a list of evaluations")
    if not fields["checkpoints"]:
        raise DataError(f"{where}.checkpoints: [], expected at least one evaluation. Leave out a run without any.")
    if "commit" in fields:
        _is_commit(fields["commit"], f"{where}.commit")
    checkpoints = [_checkpoint(c, f"{where}.checkpoints[{i}]") for i, c in enumerate(fields["checkpoints"])]
    return Run(**{**fields, "checkpoints": checkpoints})


def _checkpoint(value: Any, where: str) -> Checkpoint:
    optional = ("starts", "env_steps", "human_ticks", "wall", "best", "note")
    fields = _fields(value, where, Checkpoint, optional=optional)
    for name in ("updates", "successes", "episodes", "env_steps", "human_ticks"):
        if name in fields:
            _is(fields[name], int, f"{where}.{name}", "a whole number")
            if fields[name] < 0:
                raise DataError(f"{where}.{name}: {fields[name]}, expected 0 or more. Correct the count.")
    if not 0 <= fields["successes"] <= fields["episodes"] or fields["episodes"] == 0:
        raise DataError(
            f"{where}.successes: {fields['successes']} of {fields['episodes']} episodes, expected 0 to episodes, of at "
            "least one. Correct the counts."
        )
    if fields.get("starts", STARTS[-1]) not in STARTS:
        raise DataError(f"{where}.starts: {fields['starts']!r}, expected {' or '.join(STARTS)}. Correct it.")
    return Checkpoint(**fields)


def _fields(value: Any, where: str, kind: type, optional: Collection[str]) -> dict[str, Any]:
    """Return `value` with all fields of `kind` but the optional ones, and no others. Raises DataError."""
    _is(value, dict, where, "an object")
    known = [f.name for f in dataclasses.fields(kind)]
    required = [name for name in known if name not in optional]
    for name in value:
        if name not in known:
            raise DataError(f"{where}.{name}: no field of a results file (valid: {', '.join(known)}). Remove it.")
    for name in required:
        if name not in value:
            raise DataError(f"{where}: {name} is missing (required: {', '.join(required)}). Add it.")
    return dict(value)


def _is(value: Any, kind: type, where: str, valid: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DataError(f"{where}: {value!r:.60}, expected {valid}. Correct it.")


def _is_commit(value: Any, where: str) -> None:
    if not (isinstance(value, str) and (COMMIT.fullmatch(value) or value == UNKNOWN)):
        raise DataError(f"{where}: {value!r}, expected 7 to 40 hex digits of a commit. Name the one that ran.")


def to_json(results: Results) -> dict[str, Any]:
    """Return what `parse` reads, without fields at their defaults."""

    def plain(item: Any, required: Sequence[str]) -> dict[str, Any]:
        out = {}
        for field in dataclasses.fields(item):
            value = getattr(item, field.name)
            if field.name in required or not (value is None or value is False or value == "" or value == {}):
                out[field.name] = value
        return out

    runs = []
    for run in results.runs:
        checkpoints = [plain(c, ("updates", "successes", "episodes", "starts")) for c in run.checkpoints]
        runs.append({**plain(run, ("name", "seed", "experiment", "settings")), "checkpoints": checkpoints})
    return {**plain(results, ("command", "commit", "transcribed")), "runs": runs}


def dumps(results: Results) -> str:
    """Return the text of a results file: one line for each checkpoint."""
    text = json.dumps(to_json(results), indent=1)
    # An innermost object or list is one line: files stay short, and a difference of two shows whole checkpoints.
    text = re.sub(r"([{\[])\n\s*([^{}\[\]]*?)\n\s*([}\]])", lambda m: m[1] + re.sub(r"\n\s*", " ", m[2]) + m[3], text)
    return text + "\n"


def command_line() -> str:
    """Return this process's command without output files, and with names in place of paths."""
    words, skip = [Path(sys.argv[0]).name], False
    for word in sys.argv[1:]:
        if skip or word.partition("=")[0] in _OUTPUTS:
            skip = not skip and "=" not in word
            continue
        words.append(Path(word).name if "/" in word and not word.startswith("--") else word)
    return shlex.join(words)


def write(path: Path, runs: Iterable[Run], *, published: str = "", details: Mapping[str, Any] | None = None) -> None:
    """Write the results of this process's command, with the commit it runs from."""
    results = Results(command_line(), _CODE, False, list(runs), published=published, details=details or {})
    parse(to_json(results), str(path))
    path.write_text(dumps(results))


def add(path: Path, run: Run | None, details: Mapping[str, Any] | None = None) -> Results:
    """Write one run or further details next to what a results file has, and return all.

    A run of the same name and seed is replaced. Other runs keep their commit, and transcribed ones keep the file's
    `transcribed` and `note`.
    """
    made = Results(command_line(), _CODE, False, [] if run is None else [run], details=details or {})
    if path.exists():
        there = read(path)
        others = [r for r in there.runs if run is None or (r.name, r.seed) != (run.name, run.seed)]
        kept = [(r, r.commit or there.commit) for r in others]
        made = dataclasses.replace(
            made,
            runs=[*(dataclasses.replace(r, commit="" if c == _CODE else c) for r, c in kept), *made.runs],
            transcribed=there.transcribed and bool(others),
            note=there.note if others else "",
            details={**there.details, **made.details},
        )
    parse(to_json(made), str(path))
    path.write_text(dumps(made))
    return made


def checkpoint(point: Mapping[str, Any], episodes: int, starts: str = "reported", **more: Any) -> Checkpoint:
    """Return one evaluation of a checkpoint (learn_fake_aloha.py's `evaluate_checkpoint`) in the common form."""
    fields = {name: point[name] for name in ("env_steps", "human_ticks", "wall") if name in point}
    updates = int(more.pop("updates", point["step"]))
    return Checkpoint(updates, round(point["success_rate"] * episodes), episodes, starts, **fields, **more)
