"""Figures by name, and the table that is made of them."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping

MS, MB = 1e3, 1e-6


class Figures:
    """Every measured value under a plain name, in SI units; `_s` seconds, `_bytes` bytes."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """One repetition's value."""
        self._values[name].append(float(value))

    def add_all(self, prefix: str, values: Mapping[str, float]) -> None:
        """Several, as `prefix_name`."""
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
        return Table(self.medians()).text()


class Table:
    """Lays the medians out."""

    def __init__(self, medians: dict[str, float]) -> None:
        self._m = medians
        self._lines: list[str] = []

    def text(self) -> str:
        """The table."""
        self._rates()
        self._costs()
        self._journal()
        self._parameters()
        self._timing()
        self._recovery()
        return "\n".join(self._lines)

    def _get(self, name: str, factor: float = 1.0) -> float | None:
        value = self._m.get(name)
        return None if value is None else factor * value

    def _section(self, title: str, *columns: str) -> None:
        self._lines += ["", f"{title:40s}" + "".join(f"{c:>14s}" for c in columns)]

    def _line(self, what: str, *cells: str | float | None) -> None:
        shown = [c if isinstance(c, str) else "-" if c is None else _number(c) for c in cells]
        self._lines.append(f"{what:40s}" + "".join(f"{c:>14s}" for c in shown))

    def _rates(self) -> None:
        columns = ["ours", "with keys", "bare", "ours/bare", "agentlace", "ours/agentl.", "target", ""]
        self._section("steps per second", *columns)
        for load in ("cameras", "state"):
            for label in ("live", "catchup"):
                for actors in (1, 4):
                    prefix = f"{load}_{label}_{actors}"
                    ours, keys, bare, peer = (
                        self._get(f"{prefix}_{t}_steps_per_s") for t in ("ours", "keys", "bare", "agentlace")
                    )
                    assert ours is not None
                    assert bare is not None
                    if load == "state":
                        target = peer
                    else:
                        target = 0.5 * bare if peer is None else min(3 * peer, 0.5 * bare)
                    ratio = None if peer is None else ours / peer
                    cells = (ours, keys, bare, ours / bare, peer, ratio, target, _met(ours, target))
                    self._line(_name(load, label, actors), *cells)

    def _costs(self) -> None:
        names = ("ours", "keys", "bare", "agentlace")
        self._section("bytes per step", *names, "steps/message")
        for load in ("cameras", "state"):
            for label in ("live", "catchup"):
                cells = [self._get(f"{load}_{label}_1_{t}_bytes_per_step") for t in names]
                self._line(_name(load, label, 1), *cells, self._get(f"{load}_{label}_1_ours_steps_per_message"))
        for side in ("actor", "learner"):
            self._section(f"CPU of the {side}, us per step", *names)
            for load in ("cameras", "state"):
                for label in ("live", "catchup"):
                    for actors in (1, 4):
                        cells = [self._get(f"{load}_{label}_{actors}_{t}_{side}_cpu_us_per_step") for t in names]
                        self._line(_name(load, label, actors), *cells)

    def _journal(self) -> None:
        columns = ("steps/s", "of none", "MB/s", "plain MB/s", "share", "target", "")
        self._section("journal, three cameras, one actor", *columns)
        for label in ("live", "catchup"):
            none = self._m[f"journal_none_{label}_steps_per_s"]
            self._line(f"{_LABELS[label]}, none", none, 1.0)
            for where in ("tmpfs", "disk"):
                rate = self._m[f"journal_{where}_{label}_steps_per_s"]
                written = self._m[f"journal_{where}_{label}_written_bytes_per_s"]
                plain = self._m[f"sequential_{where}_bytes_per_s"]
                target = 0.7 if where == "disk" else None
                cells = (rate, rate / none, MB * written, MB * plain, written / plain, target)
                self._line(f"{_LABELS[label]}, {where}", *cells, _met(written / plain, target))
                rate = self._m[f"journal_and_spool_{where}_{label}_steps_per_s"]
                self._line(f"{_LABELS[label]}, {where}, actor's spool too", rate, rate / none)

    def _parameters(self) -> None:
        columns = ("ours", "with keys", "bare", "agentlace", "ours/agentl.", "target", "")
        self._section("published until applied, ms", *columns)
        sizes = [mb for mb in (1, 10, 100) if f"publish_{mb}mb_ours_arrival_s" in self._m]
        for mb in sizes:
            ours, keys, bare, peer = (
                self._get(f"publish_{mb}mb_{t}_arrival_s", MS) for t in ("ours", "keys", "bare", "agentlace")
            )
            assert ours is not None
            target = 2 / 3 * peer if mb == 10 and peer is not None else None
            ratio = None if peer is None else ours / peer
            self._line(f"{mb} MB", ours, keys, bare, peer, ratio, target, _met(ours, target, less=True))
        self._section("the call that publishes, ms", *columns)
        for mb in sizes:
            ours, keys, bare, peer = (
                self._get(f"publish_{mb}mb_{t}_call_s", MS) for t in ("ours", "keys", "bare", "agentlace")
            )
            assert ours is not None
            ratio = None if peer is None else ours / peer
            self._line(f"{mb} MB", ours, keys, bare, peer, ratio, 2.0, _met(ours, 2.0, less=True))

    def _timing(self) -> None:
        self._section("50 Hz, three cameras; ms", "p50", "p99", "max", "target p99", "")
        for team, name in (("ours", "ours"), ("keys", "ours with keys"), ("agentlace", "agentlace")):
            for case, what in (("quiet", "no parameters"), ("parameters", "50 MB/s")):
                for kind, title in (("late", "late"), ("hand_over", "hand-over")):
                    prefix = f"loop_{case}_{team}_{kind}"
                    target = {"late": 2.0, "hand_over": 0.1}[kind] if team != "agentlace" else None
                    self._percentiles(f"{name}, {what}, {title}", prefix, target)
        self._percentiles("the whole actor, 50 MB/s, late", "whole_actor_late", 2.0)
        for team, name in (("ours", "ours"), ("keys", "ours with keys"), ("agentlace", "agentlace")):
            self._percentiles(f"{name}, hand-over until acknowledged", f"round_trip_{team}", None)

    def _percentiles(self, what: str, prefix: str, target: float | None) -> None:
        values = [self._get(f"{prefix}_{p}_s", MS) for p in ("p50", "p99", "max")]
        if values[1] is not None:
            self._line(what, *values, target, _met(values[1], target, less=True))

    def _recovery(self) -> None:
        columns = ("seconds", "missing", "twice", "actor grew MB", "at most MB", "learner MB")
        self._section("backlog after the learner's restart", *columns)
        counts = ("s", "missing", "delivered_again")
        sizes = ("actor_bytes_while_away", "actor_peak_bytes", "learner_peak_bytes")
        spools = {"memory_ours": "ours, in memory", "disk_ours": "ours, on disk", "memory_agentlace": "agentlace"}
        for key, what in spools.items():
            prefix = f"recovery_{key}"
            if f"{prefix}_s" in self._m:
                shown = [self._m[f"{prefix}_{n}"] for n in counts]
                self._line(what, *shown, *(MB * self._m[f"{prefix}_{n}"] for n in sizes))


_LABELS = {"live": "live", "catchup": "catch-up"}


def _name(load: str, label: str, actors: int) -> str:
    what = {"cameras": "three cameras", "state": "state only"}[load]
    return f"{what}, {_LABELS[label]}, {actors} actor{'s' if actors > 1 else ''}"


def _met(value: float, target: float | None, *, less: bool = False) -> str:
    if target is None:
        return ""
    return "met" if (value <= target if less else value >= target) else "missed"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
