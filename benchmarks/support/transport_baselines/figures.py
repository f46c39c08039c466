"""Figures by name, and the table that is made of them."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterator, Mapping

MS, MB = 1e3, 1e-6
LOADS = {"cameras": "three cameras", "state": "state only"}
LABELS = {"live": "live", "catchup": "catch-up"}
TEAMS = ("ours", "keys", "bare", "agentlace")
FLOORS = ("bare_file", "bare_curve", "bare_file_curve")
# Of processor time, both ends together: bare sockets, what a row costs at least that is on disk before it is sent, and
# both with keys.
CPU_RATIOS = (
    ("ours", "bare"), ("ours", "bare_file"), ("ours", "agentlace"), ("keys", "bare_curve"), ("keys", "bare_file_curve"),
)  # fmt: skip
TIMED = {"ours": "ours", "keys": "ours with keys", "agentlace": "agentlace"}
Cell = str | float | None


class Figures:
    """Every measured value under a plain name, in SI units; `_s` seconds, `_bytes` bytes."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, name: str, value: float) -> None:
        self._values[name].append(float(value))

    def add_all(self, prefix: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add(f"{prefix}_{name}", value)

    def medians(self) -> dict[str, float]:
        """The median of each; the largest of what is a maximum."""
        return {
            name: max(v) if name.endswith(("_max_s", "_missing", "_again")) else statistics.median(v)
            for name, v in self._values.items()
        }

    def table(self) -> str:
        """All of it, beside what each should reach."""
        m = self.medians()
        parts = [_ratios(m), _rates(m), _costs(m)]
        if "sequential_disk_bytes_per_s" in m:  # else rates alone
            parts += [_journal(m), _parameters(m), _timing(m), _recovery(m)]
        return "\n".join(itertools.chain.from_iterable(parts))


def _section(title: str, *columns: str) -> str:
    return f"\n{title:40s}" + "".join(f"{c:>15s}" for c in columns)


def _line(what: str, *cells: Cell) -> str:
    shown = [c if isinstance(c, str) else "-" if c is None else _number(c) for c in cells]
    return f"{what:40s}" + "".join(f"{c:>15s}" for c in shown)


def _cases(*counts: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield (title, load, label, actors) of each measured rate."""
    for load, label, actors in itertools.product(LOADS, LABELS, counts):
        yield f"{LOADS[load]}, {LABELS[label]}, {actors} actor{'s' if actors > 1 else ''}", load, label, actors


def _ratios(m: dict[str, float]) -> Iterator[str]:
    yield _section("processor time, of both ends", *(f"{a}/{b}".replace("bare_", "b_") for a, b in CPU_RATIOS))
    for title, load, label, actors in _cases(1, 4):
        yield _line(title, *(m.get(f"{load}_{label}_{actors}_{a}_cpu_of_{b}") for a, b in CPU_RATIOS))


def _rates(m: dict[str, float]) -> Iterator[str]:
    columns = ("ours", "with keys", "bare", "ours/bare", "agentlace", "ours/agentl.", "target", "")
    yield _section("steps per second", *columns)
    for title, load, label, actors in _cases(1, 4):
        of = {team: m.get(f"{load}_{label}_{actors}_{team}_steps_per_s") for team in TEAMS}
        ours, bare, peer = m[f"{load}_{label}_{actors}_ours_steps_per_s"], of["bare"] or 0.0, of["agentlace"]
        half = 0.5 * bare if peer is None else min(3 * peer, 0.5 * bare)
        target = peer if load == "state" else half
        ratio = None if peer is None else ours / peer
        yield _line(title, ours, of["keys"], bare, ours / bare, peer, ratio, target, _met(ours, target))


def _costs(m: dict[str, float]) -> Iterator[str]:
    yield _section("bytes per step", *TEAMS, "steps/message")
    for title, load, label, actors in _cases(1):
        prefix = f"{load}_{label}_{actors}"
        cells = [m.get(f"{prefix}_{team}_bytes_per_step") for team in TEAMS]
        yield _line(title, *cells, m.get(f"{prefix}_ours_steps_per_message"))
    for side in ("actor", "learner"):
        teams = (*TEAMS, *FLOORS)
        yield _section(f"CPU of the {side}, us per step", *teams)
        for title, load, label, actors in _cases(1, 4):
            yield _line(title, *(m.get(f"{load}_{label}_{actors}_{team}_{side}_cpu_us_per_step") for team in teams))


def _journal(m: dict[str, float]) -> Iterator[str]:
    columns = ("steps/s", "of none", "MB/s", "plain MB/s", "share", "target", "")
    yield _section("journal, three cameras, one actor", *columns)
    for label, title in LABELS.items():
        none = m[f"journal_none_{label}_steps_per_s"]
        yield _line(f"{title}, none", none, 1.0)
        for where in ("tmpfs", "disk"):
            rate, written = (m[f"journal_{where}_{label}_{name}"] for name in ("steps_per_s", "written_bytes_per_s"))
            plain, target = m[f"sequential_{where}_bytes_per_s"], 0.7 if where == "disk" else None
            cells = (rate, rate / none, MB * written, MB * plain, written / plain, target)
            yield _line(f"{title}, {where}", *cells, _met(written / plain, target))
            rate = m[f"journal_and_spool_{where}_{label}_steps_per_s"]
            yield _line(f"{title}, {where}, actor's spool too", rate, rate / none)


def _parameters(m: dict[str, float]) -> Iterator[str]:
    columns = ("ours", "with keys", "bare", "agentlace", "ours/agentl.", "target", "")
    for name, title in (("arrival", "published until applied, ms"), ("call", "the call that publishes, ms")):
        yield _section(title, *columns)
        for mb in (mb for mb in (1, 10, 100) if f"publish_{mb}mb_ours_{name}_s" in m):
            of = {team: MS * m[key] for team in TEAMS if (key := f"publish_{mb}mb_{team}_{name}_s") in m}
            ours, peer = of["ours"], of.get("agentlace")
            target = 2.0 if name == "call" else 2 / 3 * peer if mb == 10 and peer is not None else None
            ratio = None if peer is None else ours / peer
            yield _line(f"{mb} MB", *map(of.get, TEAMS), ratio, target, _met(ours, target, less=True))


def _timing(m: dict[str, float]) -> Iterator[str]:
    yield _section("50 Hz, three cameras; ms", "p50", "p99", "max", "target p99", "")
    rows: list[tuple[str, str, float | None]] = []
    for team, name in TIMED.items():
        for case, what in (("quiet", "no parameters"), ("parameters", "50 MB/s")):
            for kind, title, target in (("late", "late", 2.0), ("hand_over", "hand-over", 0.1)):
                bar = None if team == "agentlace" else target
                rows.append((f"{name}, {what}, {title}", f"loop_{case}_{team}_{kind}", bar))
    rows.append(("the whole actor, 50 MB/s, late", "whole_actor_late", 2.0))
    rows += [(f"{name}, hand-over until acknowledged", f"round_trip_{team}", None) for team, name in TIMED.items()]
    for what, prefix, bar in rows:
        if f"{prefix}_p99_s" in m:
            values = [MS * m[f"{prefix}_{p}_s"] for p in ("p50", "p99", "max")]
            yield _line(what, *values, bar, _met(values[1], bar, less=True))


def _recovery(m: dict[str, float]) -> Iterator[str]:
    columns = ("seconds", "missing", "twice", "actor grew MB", "at most MB", "learner MB")
    yield _section("backlog after the learner's restart", *columns)
    counts = ("s", "missing", "delivered_again")
    sizes = ("actor_bytes_while_away", "actor_peak_bytes", "learner_peak_bytes")
    spools = {"memory_ours": "ours, in memory", "disk_ours": "ours, on disk", "memory_agentlace": "agentlace"}
    for key, what in spools.items():
        prefix = f"recovery_{key}"
        if f"{prefix}_s" in m:
            yield _line(what, *(m[f"{prefix}_{n}"] for n in counts), *(MB * m[f"{prefix}_{n}"] for n in sizes))


def _met(value: float, target: float | None, *, less: bool = False) -> str:
    if target is None:
        return ""
    return "met" if (value <= target if less else value >= target) else "missed"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
