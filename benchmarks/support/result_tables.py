"""Markdown tables out of results files: the documents have headings and labels, a `Table` says what the cells show."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from serl_chunk.evaluation.results import wilson_interval
from serl_chunk.types import DataError
from support.results import FOLDER, Checkpoint, Run, read

MARKED = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


class Count(NamedTuple):
    """Successes among measured episodes."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        """Share of successes, 0..1."""
        return self.successes / self.episodes


def pooled(counts: Sequence[Count | Checkpoint]) -> Count:
    return Count(sum(c.successes for c in counts), sum(c.episodes for c in counts))


def difference_interval(a: Count, b: Count) -> tuple[float, float]:
    """Return the 95 % interval of rate(a) - rate(b), independent samples (Newcombe 1998, method 10)."""
    (low_a, high_a), (low_b, high_b) = wilson_interval(*a), wilson_interval(*b)
    down = math.hypot(a.rate - low_a, high_b - b.rate)
    up = math.hypot(high_a - a.rate, b.rate - low_b)
    return max(-1.0, a.rate - b.rate - down), min(1.0, a.rate - b.rate + up)


def difference_text(ours: Count, base: Count) -> str:
    """Show a difference as `-0.14 [-0.26, -0.01] *`, with a star where the interval excludes 0."""
    low, high = difference_interval(ours, base)
    star = " *" if low > 0 or high < 0 else ""
    return f"{ours.rate - base.rate:+.2f} [{low:+.2f}, {high:+.2f}]{star}"


@dataclasses.dataclass(frozen=True)
class Where:
    """Which evaluations a cell shows.

    Args:
        file: name of a results file, without `.json`.
        seeds: in the order shown; empty for all in the file's order.
        at: checkpoints, by updates or role.
        starts: of these evaluations.
        base: the run that a difference is from.
        cell: shown in place of the column's.
    """

    file: str = ""
    run: str = ""
    seeds: tuple[int, ...] = ()
    at: tuple[Any, ...] = ("last",)
    starts: str = "reported"
    base: str = "default"
    cell: Cell | None = None

    def runs(self) -> list[Run]:
        """Return the runs, seed by seed. Raises DataError where they are of several experiments."""
        runs = [run for run in results_of(FOLDER / f"{self.file}.json").runs if run.name == self.run]
        if len(experiments := {run.experiment for run in runs}) > 1:
            raise DataError(
                f"{self.file}: runs: {self.run!r} is of several experiments ({', '.join(sorted(experiments))}). "
                "Write a file for each."
            )
        return [run for seed in self.seeds for run in runs if run.seed == seed] if self.seeds else runs

    def found(self) -> list[tuple[Run, Checkpoint]]:
        """Return the evaluations, seed by seed, each with its run."""
        pairs = [(run, run.at(at, self.starts)) for run in self.runs() for at in self.at]
        return [(run, point) for run, point in pairs if point is not None]


results_of = functools.cache(read)  # each file is read once
Cell = Callable[[Where], str]
Part = Mapping[str, Any]  # fields of `Where`


class Table(NamedTuple):
    """What a marked table of a document shows, between `<!-- results: NAME -->` and `<!-- end of results -->`.

    Args:
        columns: cells behind the label, each with fields that go before the row's.
        rows: fields of each row in the document's order, or how a row's label gives them.
        where: fields that rows and columns leave out.
    """

    columns: Sequence[tuple[Cell, Part]]
    rows: Sequence[Part] | Callable[[str], Part]
    where: Part = MappingProxyType({})

    def markdown(self, name: str, text: str) -> str:
        """Return a document's table with the cells made anew. Raises DataError where it is of another shape."""
        heading, line, *rows = text.strip().splitlines()
        labels = [row.split("|")[1].strip() for row in rows]
        parts = [self.rows(label) for label in labels] if callable(self.rows) else self.rows
        there, described = (len(rows), heading.count("|") - 2), (len(parts), len(self.columns))
        if there != described:
            raise DataError(
                f"{name}: {there} rows and columns, expected {described} as in documented_tables.py. Correct one."
            )
        lines = [heading, line]
        for label, part in zip(labels, parts, strict=True):
            wheres = [(cell, Where(**{**self.where, **part, **own})) for cell, own in self.columns]
            cells = [(where.cell or cell)(where) for cell, where in wheres]
            if not any(cells):
                raise DataError(
                    f"{name}: row {label!r} finds no run {wheres[0][1].run!r}. Correct the row, or add the run to its "
                    "results file."
                )
            lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in (label, *cells)) + "|")
        return "\n".join(lines) + "\n"


def render(text: str, tables: Mapping[str, Table]) -> str:
    """Return a document's text with its marked tables made anew. Raises DataError for a marker without a table."""

    def made(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise DataError(f"results: {match[2]}: no such table (there are: {', '.join(tables)}). Describe it.")
        # A blank line on both sides, without which Markdown takes the table for part of the comment.
        return f"{match[1]}\n{tables[match[2]].markdown(match[2], match[3])}\n{match[4]}"

    return MARKED.sub(made, text)


def thousands(number: float) -> str:
    """Show 12345 as `12,345`."""
    return f"{round(number):,}"


def each(show: Callable[[Run, Checkpoint], str]) -> Cell:
    """Show `show` of each evaluation, those that are not empty, separated by commas."""
    return lambda where: ", ".join(filter(None, (show(*pair) for pair in where.found())))


def _percent(_: Run, point: Checkpoint) -> str:
    low, high = wilson_interval(point.successes, point.episodes)
    return f"{100 * point.rate:.0f} % ({100 * low:.0f} .. {100 * high:.0f})"


percent = each(_percent)  # `28 % (20 .. 37)`, with Wilson's interval
operator_ticks = each(lambda run, point: thousands(run.figures["demonstrated_ticks"] + (point.human_ticks or 0)))


def plain_percent(where: Where) -> str:
    """Show successes as `26, 29 %`."""
    return ", ".join(f"{100 * point.rate:.0f}" for _, point in where.found()) + " %" * bool(where.found())


def steps_to(points: float) -> Cell:
    """Show the environment steps, in thousands, of the first evaluation so many points above a run's first."""

    def cell(where: Where) -> str:
        found = []
        for run in where.runs():
            first, *others = run.checkpoints
            found += [thousands(c.env_steps / 1e3) for c in others if 100 * (c.rate - first.rate) >= points][:1]
        return ", ".join(found)

    return cell


def deviation(where: Where) -> str:
    """Show the deviation of each seed's evaluations as `4.4, 2.8`, in points."""
    rates = ([100 * point.rate for run, point in where.found() if run.seed == seed.seed] for seed in where.runs())
    return ", ".join(f"{statistics.pstdev(of_seed):.1f}" for of_seed in rates if of_seed)


def bare(usual: int) -> Cell:
    """Show successes in % as `60, 60; 52`, a semicolon between seeds; name a number of episodes other than `usual`."""

    def cell(where: Where) -> str:
        texts: dict[int, list[str]] = {}
        for run, point in where.found():
            text = f"{100 * point.rate:.0f}" + ("" if point.episodes == usual else f" ({point.episodes} episodes)")
            texts.setdefault(run.seed, []).append(text)
        return "; ".join(", ".join(of_seed) for of_seed in texts.values())

    return cell


def arms(where: Where) -> str:
    """Show the successes in % of all arms of a checkpoint as `84; 91, 93; 90`, a comma between seeds."""
    found = ([p for p in run.checkpoints if p.updates in where.at] for run in where.runs())
    return ", ".join("; ".join(f"{100 * point.rate:.0f}" for point in points) for points in found if points)


def interval(where: Where) -> str:
    """Show the success of all seeds together as `0.78 [0.69, 0.85]`."""
    if not (found := where.found()):
        return ""
    count = pooled([point for _, point in found])
    low, high = wilson_interval(*count)
    return f"{count.rate:.2f} [{low:.2f}, {high:.2f}]"


def difference(where: Where) -> str:
    """Show all seeds' success minus that of the run `base` on the same seeds, as `difference_text`."""
    found = where.found()
    if not found or where.run == where.base:
        return ""
    others = dataclasses.replace(where, run=where.base, seeds=tuple(run.seed for run in where.runs())).found()
    ours, base = (pooled([point for _, point in pairs]) for pairs in (found, others))
    return difference_text(ours, base)


def field(name: str, unit: float = 1) -> Cell:
    """Show a count or time of each evaluation, in `unit`, as `4,073, 4,375`, or one number where all are equal."""

    def cell(where: Where) -> str:
        values = [value / unit for _, point in where.found() if (value := getattr(point, name)) is not None]
        return ", ".join(map(thousands, values[:1] if len(set(values)) == 1 else values))

    return cell


def figures(*names: str) -> Cell:
    """Show figures of a run as `225, 72`."""
    return lambda where: ", ".join(
        thousands(run.figures[name]) for run in where.runs() for name in names if name in run.figures
    )


def share(where: Where) -> str:
    """Show the human's share of the ticks with its interval, as `3 % (0 .. 10)`."""
    found = ([100 * run.figures[f"human_share{end}"] for end in ("", "_low", "_high")] for run in where.runs())
    return ", ".join(f"{mean:.0f} % ({low:.0f} .. {high:.0f})" for mean, low, high in found)
