"""Learning results: the files of `benchmarks/results`, what they must hold, and how a benchmark writes one."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from serl_chunk.types import DataError
from serl_chunk.version import version_info

FOLDER = Path(__file__).resolve().parents[1] / "results"
UNKNOWN = "unknown"  # written where the package does not run from a git checkout; refused in FOLDER
COMMIT = re.compile(rf"[0-9a-f]{{7,40}}(-dirty)?|{UNKNOWN}")
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

    def __post_init__(self) -> None:
        if not 0 <= self.successes <= self.episodes > 0:
            raise ValueError(f"successes: {self.successes} of {self.episodes}, expected 0 to episodes, at least one")
        if self.starts not in ("validation", "reported"):
            raise ValueError(f"starts: {self.starts!r}, expected validation or reported")

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

    def __post_init__(self) -> None:
        if not COMMIT.fullmatch(self.commit):
            raise ValueError(f"commit: {self.commit!r}, expected 7 to 40 hex digits of the one that ran")
        if not (self.runs or self.details):
            raise ValueError("runs: [], expected at least one. Run the benchmark with --json")


_ITEMS: dict[str, type] = {"runs": Run, "checkpoints": Checkpoint}  # of these fields


def read(path: Path) -> Results:
    """Read and check a results file. Raises DataError, which names the field."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise DataError(f"{path}: no such results file (there are: {names}). Run its benchmark with --json.") from None
    except json.JSONDecodeError as e:
        raise DataError(f"{path}: no JSON ({e}). Write it with a benchmark's --json.") from None
    return parse(value, f"{path}: ")


def parse(value: Any, where: str, kind: type = Results) -> Any:
    """Check what a results file holds and return it as `kind`. Raises DataError with `where` and the field."""
    made = dict(value)
    for name in _ITEMS.keys() & value.keys():
        made[name] = [parse(item, f"{where}{name}[{i}].", _ITEMS[name]) for i, item in enumerate(value[name])]
    try:
        return kind(**made)
    except (TypeError, ValueError) as e:  # a field that is missing or not known; or one that its class refuses
        raise DataError(f"{where}{e}. Correct it.") from None


def to_json(item: Any) -> dict[str, Any]:
    """Return what `parse` reads, without fields at their defaults."""
    out = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if field.name in _ITEMS:
            value = [to_json(one) for one in value]
        required = field.default is field.default_factory is dataclasses.MISSING
        if required or not (value is None or value is False or value in ("", {})):
            out[field.name] = value
    return out


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


def write(
    path: Path,
    runs: Iterable[Run],
    *,
    published: str = "",
    details: Mapping[str, Any] | None = None,
    join: bool = False,
) -> Results:
    """Write the results of this process's command, with the commit it runs from, and return the file's content.

    Args:
        join: write next to what the file has. A run of the same name and seed is replaced, other runs keep their
            commit, and transcribed ones keep the file's `transcribed` and `note`.
    """
    made = Results(command_line(), _CODE, False, list(runs), published=published, details=details or {})
    if join and path.exists():
        there, renewed = read(path), {(run.name, run.seed) for run in made.runs}
        others = [run for run in there.runs if (run.name, run.seed) not in renewed]
        kept = [(run, run.commit or there.commit) for run in others]
        made = dataclasses.replace(
            made,
            runs=[*(dataclasses.replace(r, commit="" if c == _CODE else c) for r, c in kept), *made.runs],
            transcribed=there.transcribed and bool(others),
            note=there.note if others else "",
            details={**there.details, **made.details},
        )
    text = dumps(made)
    parse(json.loads(text), f"{path}: ")
    path.write_text(text)
    return made
