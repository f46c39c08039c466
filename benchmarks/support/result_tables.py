"""Markdown tables made of results files: columns say what a cell shows, rows of which run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.types import DataError
from support.results import FOLDER, Checkpoint, Results, Run, read

At = int | Literal["first", "last", "best"]


class Count(NamedTuple):
    """Successes among measured episodes."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        """Share of successes, 0..1."""
        return self.successes / self.episodes


def pooled(counts: Sequence[Count | Checkpoint]) -> Count:
    """Return all of them together."""
    return Count(sum(c.successes for c in counts), sum(c.episodes for c in counts))


def difference_interval(a: Count, b: Count) -> tuple[float, float]:
    """Return the 95 % interval of rate(a) - rate(b), independent samples (Newcombe 1998, method 10)."""
    (low_a, high_a), (low_b, high_b) = wilson_interval(*a), wilson_interval(*b)
    down = math.hypot(a.rate - low_a, high_b - b.rate)
    up = math.hypot(high_a - a.rate, b.rate - low_b)
    return max(-1.0, a.rate - b.rate - down), min(1.0, a.rate - b.rate + up)


@dataclasses.dataclass(frozen=True)
class Where:
    """Which evaluations a cell shows; a field that a column leaves out is the row's, then the table's.

    Args:
        file: name of a results file, without `.json`.
        seeds: in the order shown; empty for all in the file's order.
        at: checkpoints, by updates or role.
        starts: of these evaluations.
        base: the run that a difference is from.
        also: pairs of updates: behind the evaluation at the first, in brackets the one at the second.
    """

    file: str = ""
    run: str = ""
    seeds: tuple[int, ...] = ()
    at: tuple[At, ...] = ()
    starts: str = ""
    base: str = ""
    also: tuple[tuple[int, int], ...] = ()

    def under(self, other: Where) -> Where:
        """Return `other` with what is set here."""
        mine = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name)}
        # 0 is a valid number of updates and lies within a tuple, which is not empty.
        return dataclasses.replace(other, **mine)


class Book:
    """The results files that tables read, each once."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._read: dict[str, Results] = {}

    def file(self, name: str) -> Results:
        """Return a results file by its name without `.json`."""
        if name not in self._read:
            self._read[name] = read(self._folder / f"{name}.json")
        return self._read[name]

    def runs(self, where: Where, name: str = "") -> list[Run]:
        """Return the runs of a cell (or those of another name), seed by seed. Raises DataError."""
        runs = [run for run in self.file(where.file).runs if run.name == (name or where.run)]
        if len(experiments := {run.experiment for run in runs}) > 1:
            raise DataError(
                f"{where.file}: runs: {runs[0].name!r} is of several experiments ({', '.join(sorted(experiments))}). "
                "Write a file for each."
            )
        if not where.seeds:
            return runs
        return [run for seed in where.seeds for run in runs if run.seed == seed]

    def points(self, where: Where, name: str = "") -> list[Checkpoint]:
        """Return the evaluations of a cell (or those of another run's), seed by seed."""
        found = [
            run.at(at, where.starts or "reported") for run in self.runs(where, name) for at in where.at or ("last",)
        ]
        return [point for point in found if point is not None]


Cell = Callable[[Book, Where], str]


class Column(NamedTuple):
    """A heading, and what its cells show."""

    heading: str
    cell: Cell
    where: Where = Where()


class Row(NamedTuple):
    """A label, and the run that it is about. `cell` replaces what all columns show."""

    label: str
    where: Where = Where()
    cell: Cell | None = None


class Table(NamedTuple):
    """A table of a document, between the markers `<!-- results: NAME -->` and `<!-- end of results -->`."""

    document: str
    heading: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    where: Where = Where()

    def markdown(self, book: Book) -> str:
        """Return the table. Raises DataError for a row of which no file has a run."""
        lines = [_line(self.heading, *(column.heading for column in self.columns))]
        lines.append("|" + "---|" * (1 + len(self.columns)))
        for row in self.rows:
            cells = []
            for column in self.columns:
                where = column.where.under(row.where).under(self.where)
                cells.append((row.cell or column.cell)(book, where))
            if not any(cells):
                raise DataError(
                    f"{self.document}: row {row.label!r} finds no run {row.where.run or self.where.run!r}. Correct the "
                    "row, or add the run to its results file."
                )
            lines.append(_line(row.label, *cells))
        return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return "|" + "|".join(f" {text} " if text else " " for text in cells) + "|"


MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


def render(text: str, document: str, tables: dict[str, Table], book: Book) -> str:
    """Return a document's text with its marked tables made anew. Raises DataError for a marker without a table."""
    named = [match[2] for match in MARKED.finditer(text)]
    mine = [name for name, table in tables.items() if table.document == document]
    for name in named:
        if name not in mine:
            raise DataError(f"{document}: results: {name}: no such table (there are: {', '.join(mine)}). Add it.")
    for name in mine:
        if named.count(name) != 1:
            raise DataError(
                f"{document}: the table {name} is marked {named.count(name)} times, expected once. Put it between "
                f"<!-- results: {name} --> and <!-- end of results -->."
            )
    # A blank line on both sides, without which Markdown takes the table for part of the comment.
    return MARKED.sub(lambda m: f"{m[1]}\n{tables[m[2]].markdown(book)}\n{m[4]}", text)


def thousands(number: float) -> str:
    """Show 12345 as `12,345`."""
    return f"{round(number):,}"


def percent(book: Book, where: Where) -> str:
    """Show each success as `28 % (20 .. 37)`, with Wilson's interval."""
    return ", ".join(_percent(point, " (", " .. ", ")") for point in book.points(where))


def percent_square(book: Book, where: Where) -> str:
    """Show each success as `28 % [20, 37]`, with Wilson's interval."""
    return ", ".join(_percent(point, " [", ", ", "]") for point in book.points(where))


def _percent(point: Checkpoint, opening: str, between: str, closing: str) -> str:
    low, high = wilson_interval(point.successes, point.episodes)
    return f"{100 * point.rate:.0f} %{opening}{100 * low:.0f}{between}{100 * high:.0f}{closing}"


def plain_percent(book: Book, where: Where) -> str:
    """Show successes as `26, 29 %`."""
    rates = ", ".join(f"{100 * point.rate:.0f}" for point in book.points(where))
    return rates and f"{rates} %"


def bare(usual: int) -> Cell:
    """Show successes in % as `60, 60; 52`, a semicolon between seeds; name a number of episodes other than `usual`."""

    def cell(book: Book, where: Where) -> str:
        texts: dict[int, list[str]] = {}
        for run in book.runs(where):
            for point in (run.at(at, where.starts or "reported") for at in where.at):
                if point is None:
                    continue
                text = f"{100 * point.rate:.0f}" + ("" if point.episodes == usual else f" ({point.episodes} episodes)")
                for updates in (second for first, second in where.also if first == point.updates):
                    if (other := run.at(updates)) is not None:
                        text += f" ({100 * other.rate:.0f} at {thousands(updates)})"
                texts.setdefault(run.seed, []).append(text)
        return "; ".join(", ".join(of_seed) for of_seed in texts.values())

    return cell


def arms(book: Book, where: Where) -> str:
    """Show the successes in % of all arms of a checkpoint as `84; 91, 93; 90`, a comma between seeds."""
    at = where.at[0]
    return ", ".join(
        "; ".join(f"{100 * point.rate:.0f}" for point in points)
        for points in ([p for p in run.checkpoints if p.updates == at] for run in book.runs(where))
        if points
    )


def interval(book: Book, where: Where) -> str:
    """Show the success of all seeds together as `0.78 [0.69, 0.85]`."""
    if not (points := book.points(where)):
        return ""
    count = pooled(points)
    low, high = wilson_interval(*count)
    return f"{count.rate:.2f} [{low:.2f}, {high:.2f}]"


def rates(book: Book, where: Where) -> str:
    """Show the success of each seed as `0.78, 0.84, 0.69`."""
    return ", ".join(f"{point.rate:.2f}" for point in book.points(where))


def difference(book: Book, where: Where) -> str:
    """Show all seeds' success minus that of the run `base` on the same seeds, as `difference_text`."""
    points = book.points(where)
    if not points or where.run == where.base:
        return ""
    seeds = tuple(run.seed for run in book.runs(where))
    others = book.points(dataclasses.replace(where, seeds=seeds), where.base)
    ours, base = pooled(points), pooled(others)
    return difference_text(ours, base)


def difference_text(ours: Count, base: Count) -> str:
    """Show a difference as `-0.14 [-0.26, -0.01] *`, with a star where the interval excludes 0."""
    low, high = difference_interval(ours, base)
    star = " *" if low > 0 or high < 0 else ""
    return f"{ours.rate - base.rate:+.2f} [{low:+.2f}, {high:+.2f}]{star}"


def field(name: Literal["env_steps", "human_ticks", "updates"]) -> Cell:
    """Show a count of each evaluation as `4,073, 4,375`, or one number where all are equal."""

    def cell(book: Book, where: Where) -> str:
        values = [value for point in book.points(where) if (value := getattr(point, name)) is not None]
        return ", ".join(map(thousands, values[:1] if len(set(values)) == 1 else values))

    return cell


def wall(unit: float) -> Cell:
    """Show the training time of an evaluation, in `unit` seconds."""
    return lambda book, where: ", ".join(
        f"{point.wall / unit:.0f}" for point in book.points(where) if point.wall is not None
    )


def figures(*names: str) -> Cell:
    """Show figures of a run as `225, 72`."""
    return lambda book, where: ", ".join(
        thousands(run.figures[name]) for run in book.runs(where) for name in names if name in run.figures
    )


def share(name: str) -> Cell:
    """Show a share among a run's figures with the interval `NAME_low`, `NAME_high`, as `3 % [0, 10]`."""
    return lambda book, where: ", ".join(
        f"{100 * f[name]:.0f} % [{100 * f[name + '_low']:.0f}, {100 * f[name + '_high']:.0f}]"
        for f in (run.figures for run in book.runs(where))
        if name in f
    )


def separate(book: Book, where: Where) -> str:
    """Show whether the last interval is above the first one: `separate` or `touch`."""
    pairs = [(run.at("first"), run.at("last")) for run in book.runs(where)]
    return ", ".join(
        "separate"
        if wilson_interval(b.successes, b.episodes).low > wilson_interval(a.successes, a.episodes).high
        else "touch"
        for a, b in pairs
        if a is not None and b is not None
    )


def listed(cell: Cell) -> Cell:
    """Show what `cell` shows of each checkpoint as `a, b and c`."""

    def joined(book: Book, where: Where) -> str:
        texts = [cell(book, dataclasses.replace(where, at=(at,))) for at in where.at]
        return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)

    return joined


def operator_ticks(book: Book, where: Where) -> str:
    """Show the operator's ticks: those of its demonstrations and of its interventions up to an evaluation."""
    return ", ".join(
        thousands(run.figures["demonstrated_ticks"] + (point.human_ticks or 0))
        for run in book.runs(where)
        for point in (run.at(at) for at in where.at or ("last",))
        if point is not None
    )
