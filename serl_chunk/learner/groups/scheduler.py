"""The groups of an iteration: which slots are handed out as tickets, what settled them, when enough is collected."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from serl_chunk.config.fields import require
from serl_chunk.config.groups import GroupConfig
from serl_chunk.learner.groups.starts import Memory, Starts
from serl_chunk.types import MAX_TICKET_TEXT, Grant, Ticket

ATTEMPTS = 8  # of a slot that gives no sample; after that its group is given up
_TICKET = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})")  # see `Ticket.id`


class Result(NamedTuple):
    """The result of one episode with a ticket."""

    success: bool | None  # None: unknown
    reward: float  # R, in [0, 1]
    sample: bool  # whole, and of the ticket's policy alone
    why: str = ""  # it is none


class ClosedGroup(NamedTuple):
    """A group whose K slots are settled."""

    number: int  # within the iteration
    task: str
    init_state: str
    tickets: tuple[str, ...]  # ids of those that settled the slots
    results: tuple[Result, ...]

    @property
    def mixed(self) -> bool:
        return len({r.reward for r in self.results}) > 1

    @property
    def successes(self) -> list[bool]:
        return [bool(r.success) for r in self.results]


@dataclasses.dataclass(eq=False)
class _Slot:
    group: _Group
    ticket: Ticket  # of the current attempt
    id: str = ""  # the ticket's
    session: str = ""  # that has it; empty: it is free
    until: float = 0.0  # when the lease runs out
    settled_by: str = ""  # id of a ticket
    result: Result | None = None

    def __post_init__(self) -> None:
        self.id = self.ticket.id

    @property
    def open(self) -> bool:
        return self.result is None and not self.group.given_up

    def try_as(self, attempt: int) -> None:
        self.ticket = self.ticket._replace(attempt=attempt)
        self.id = self.ticket.id


@dataclasses.dataclass(eq=False)
class _Group:
    number: int
    task: str
    init_state: str
    slots: list[_Slot] = dataclasses.field(default_factory=list)
    given_up: bool = False
    closed: ClosedGroup | None = None

    def close_if_settled(self) -> None:
        results = tuple(s.result for s in self.slots if s.result is not None)
        if len(results) == len(self.slots):
            ids = tuple(s.settled_by for s in self.slots)
            self.closed = ClosedGroup(self.number, self.task, self.init_state, ids, results)


class GroupScheduler:
    """Collects the groups of one iteration after another. Pure: times are passed in, and nothing else is read.

    **Groups** are numbered in the order in which they are drawn; group g of iteration i is a function of the run's
    seed, i, g and the memory when i began, and so is the seed of each slot. A restart therefore draws the same groups,
    and a journalled episode settles its slot again.

    **No preference for short episodes.** More groups are under way than are missing (`group.oversubscribe`), and those
    of short episodes, successes mostly, close first. An iteration therefore counts groups by number: group g counts
    once it and all groups before it are closed or given up, and what closed beyond the last one that is needed is
    dropped. Which groups an iteration has is thus a function of outcomes, not of time, unless `group.max_seconds` or
    `ATTEMPTS` cut it short.

    **An end** comes in every case: with `group.groups` usable groups, with `group.max_groups` tried, or
    `group.max_seconds` after the first ticket. An iteration without any actor does not begin to count.

    `usable`: whether a group can be trained on; by default a mixed one, or any with another baseline than the group's
    others. Raises ConfigError for a task that is too long for a message.
    """

    def __init__(
        self, config: GroupConfig, starts: Starts, tasks: Sequence[str], seed: int, memory: Memory | None = None,
        usable: Callable[[ClosedGroup], bool] | None = None,
    ) -> None:  # fmt: skip
        for task in tasks:
            require(
                len(task) <= MAX_TICKET_TEXT,
                "group.tasks",
                f"{task[:40]!r}... has {len(task)} characters, at most {MAX_TICKET_TEXT} are valid. Shorten it",
            )
        self._is_usable = usable or (lambda group: config.baseline != "loo" or group.mixed)
        self.memory = memory or Memory()  # as of the current iteration's begin
        self.iteration, self.version, self.since = -1, -1, -1
        self.ended = "no iteration has begun"  # why nothing is collected; empty: an iteration is under way
        self.counters: collections.Counter[str] = collections.Counter()  # of the iteration
        self._config, self._starts, self._tasks, self._seed = config, starts, tuple(tasks), seed
        self._lease = config.max_seconds / 2  # leaves time for another attempt
        self._groups: list[_Group] = []
        self._draws: dict[str, Iterator[str]] = {}  # by task
        self._counted = 0  # groups from the first on that are closed or given up
        self._deadline = math.inf
        self.groups: list[ClosedGroup] = []  # that count, in the order of their numbers

    # -- iterations ------------------------------------------------------------------------------------------

    def begin(self, iteration: int, version: int, *, since: int | None = None) -> None:
        """Begin to collect for an iteration, and first remember the groups of the one that ended.

        Args:
            version: of the snapshot that decides in the whole of every episode.
            since: the version with which the iteration began in a previous process, which published the same policy.
        """
        if self.iteration >= 0:
            starts = [((g.task, g.init_state), g.successes) for g in self.groups] if self._starts.remembered else []
            self.memory = self.memory.after(self.iteration, starts, barren=not self.usable)
        self.iteration, self.version, self.since = iteration, version, version if since is None else since
        self.ended, self._deadline, self._counted = "", math.inf, 0
        self._groups, self.groups, self.counters = [], [], collections.Counter()
        self._draws = {t: self._starts.draws(t, iteration, self.memory, self._config) for t in self._tasks}

    @property
    def usable(self) -> list[ClosedGroup]:
        """The groups to train on."""
        return [g for g in self.groups if self._is_usable(g)]

    @property
    def no_update(self) -> str:
        """Why an ended iteration has nothing to train on, and what to do; empty where it has something."""
        if self.usable or not self.ended:
            return ""
        if not self.groups:
            return (
                f"no group was closed ({self.ended}). Check the actors, or raise group.max_seconds="
                f"{self._config.max_seconds:g} or lower group.size"
            )
        episodes, successes = self._config.size * len(self.groups), sum(sum(g.successes) for g in self.groups)
        if successes == episodes:
            return (
                f"all {episodes} episodes succeeded: nothing is left to learn from these starts. Train on others "
                "(group.init_states, group.tasks), or stop here"
            )
        if successes == 0:
            return (
                f"none of {episodes} episodes succeeded: outcomes teach nothing before one does. Train longer on "
                "demonstrations or add some, explore more or less (group.sigma, group.noise), or begin from easier "
                "starts (group.init_states=demos)"
            )
        return (
            f"each of {len(self.groups)} starts either always succeeded or always failed. Explore more (group.sigma), "
            "raise group.size or group.max_groups, or set group.baseline=mean"
        )

    @property
    def over(self) -> str:
        """Why the run ends with the ended iteration; empty where it goes on."""
        barren = self.memory.barren + 1
        if not self.no_update or barren < self._config.patience:
            return ""
        return f"{barren} iterations in a row without an update (group.patience). The last one: {self.no_update}"

    def figures(self) -> dict[str, float]:
        """Return figures of the groups that count so far, for logs.

        `success`: share of their episodes, also of each task as `success/TASK`. `groups`, and how many of them are
        `solved` (by all their episodes) and `mixed`. `given_up` groups. Tickets `reissued`, and episodes `dropped`
        that came late. Starts that were `mastered` when the iteration began.
        """
        successes: dict[str, list[bool]] = {}
        for group in self.groups:
            for name in ("success", f"success/{group.task}"):
                successes.setdefault(name, []).extend(group.successes)
        counts = {
            "groups": len(self.groups),
            "mixed": sum(g.mixed for g in self.groups),
            "solved": sum(all(g.successes) for g in self.groups),
            **{name: self.counters[name] for name in ("given_up", "reissued", "dropped")},
            "mastered": len(self._starts.mastered(self.memory, self._config)),
        }
        shares = {name: sum(each) / len(each) for name, each in successes.items()}
        return {**shares, **{name: float(count) for name, count in counts.items()}}

    # -- tickets ---------------------------------------------------------------------------------------------

    def request(self, session: str, actor_version: int, held: Sequence[str], capacity: int, now: float) -> Grant:
        """Return the whole set of tickets that a session shall hold.

        What was handed out to it stays, whether it is in `held` or not: the message that did so may be lost.

        Args:
            actor_version: of the newest snapshot that its actor has. One that lacks the ticket's waits for it.
            held: ids of the tickets that it has; this process may not know of them, after a restart.
            capacity: tickets that it can hold in all. More are withdrawn only where they are not in `held`.
        """
        self.tick(now)
        if self.ended:
            return Grant((), f"iteration {self.iteration} is over: {self.ended}" if self.iteration >= 0 else self.ended)
        mine = [s for s in self._under_way() if s.session == session]
        if actor_version > self.version:
            self._free(mine)
            return Grant((), f"iteration {self.iteration} runs version {self.version}, this actor has {actor_version}")
        known, names = {slot.id for slot in mine}, set(held)
        for slot, attempt in filter(None, (self._find(ticket) for ticket in held if ticket not in known)):
            if not slot.session and attempt >= slot.ticket.attempt:
                slot.try_as(attempt)
                mine.append(self._hand_out(slot, session, now))
        mine.sort(key=lambda slot: slot.id not in names)
        kept = max(capacity, sum(slot.id in names for slot in mine))
        self._free(mine[kept:])
        del mine[kept:]
        while len(mine) < capacity and (free := self._next_free()) is not None:
            mine.append(self._hand_out(free, session, now))
        waits = capacity and not mine
        waiting = f"all episodes that iteration {self.iteration} lacks are under way" if waits else ""
        return Grant(tuple(slot.ticket for slot in mine), waiting)

    def settle(self, ticket: str, result: Result) -> bool:
        """Take the result of an episode that has ended, in the order of the journal.

        The first sample settles its slot, whichever attempt it is of: all have one seed. One that is no sample is run
        again. Returns False where the episode is none of the iteration's: no sample, late, or unknown.
        """
        if (found := self._find(ticket)) is None:
            self.counters["dropped"] += 1
            return False
        slot, attempt = found
        if result.sample:
            slot.session, slot.settled_by, slot.result = "", ticket, result
            slot.group.close_if_settled()
            self._count()
        elif attempt >= slot.ticket.attempt:  # else another attempt is under way already
            slot.try_as(attempt)
            self._again(slot)
        return result.sample

    def correct(self, ticket: str, result: Result) -> bool:
        """Replace the result of the slot that a ticket settled; one that is no sample any more is run again.

        Returns False where it is too late: the iteration has ended, or the slot was settled by another ticket.
        """
        slot = next((s for g in self._groups for s in g.slots if s.settled_by == ticket), None)
        if self.ended or slot is None:
            return False
        self._counted, self.groups = 0, []
        slot.result = slot.group.closed = None
        if result.sample:
            slot.result = result
            slot.group.close_if_settled()
        else:
            slot.settled_by = ""
            self._again(slot)
        self._count()
        return True

    def wants(self, ticket: str) -> bool:
        """Return whether a ticket is of a slot that is not settled yet."""
        return self._find(ticket) is not None

    def lost(self, session: str) -> None:
        """Note that a session is silent or gone: its slots are free again."""
        for slot in self._under_way():
            if slot.session == session:
                self._again(slot)

    def tick(self, now: float) -> None:
        """Take back what was held too long, and end an iteration that took too long."""
        if self.ended:
            return
        for slot in self._under_way():
            if slot.session and now >= slot.until:
                self._again(slot)
        if now >= self._deadline:
            self._end(f"group.max_seconds={self._config.max_seconds:g} have passed")

    # -- slots -----------------------------------------------------------------------------------------------

    def _under_way(self) -> list[_Slot]:
        """Slots that are not settled, of groups that are drawn and not given up; the earliest first."""
        return [slot for group in self._groups[self._counted :] for slot in group.slots if slot.open]

    def _find(self, ticket: str) -> tuple[_Slot, int] | None:
        """Return the slot of a ticket's id, and the attempt; None where the iteration wants none.

        Draws the groups up to it: a process before a restart had drawn them.
        """
        if self.ended or (match := _TICKET.fullmatch(ticket)) is None:
            return None
        iteration, group, slot, attempt = map(int, match.groups())
        c = self._config
        if iteration != self.iteration or group >= c.max_groups or slot >= c.size or attempt >= ATTEMPTS:
            return None
        while len(self._groups) <= group:
            self._draw()
        found = self._groups[group].slots[slot]
        return (found, attempt) if found.open else None

    def _draw(self) -> _Group:
        number = len(self._groups)
        task = self._tasks[(self.iteration + number) % len(self._tasks)]
        group = _Group(number, task, next(self._draws[task]))
        seeds = np.random.SeedSequence([self._seed, self.iteration, number]).generate_state(self._config.size) >> 1
        group.slots = [
            _Slot(group, Ticket(self.iteration, number, i, 0, task, group.init_state, self.version, seed, self._lease))
            for i, seed in enumerate(seeds.tolist())
        ]
        self._groups.append(group)
        return group

    def _next_free(self) -> _Slot | None:
        """Return the earliest slot that no session has, of a new group where so many may be under way."""
        free = next((slot for slot in self._under_way() if not slot.session), None)
        if free is not None or len(self._groups) >= self._config.max_groups:
            return free
        later = self._groups[self._counted :]
        usable = len(self.usable) + sum(g.closed is not None and self._is_usable(g.closed) for g in later)
        under_way = sum(g.closed is None and not g.given_up for g in later)
        most = math.ceil(self._config.oversubscribe * (self._config.groups - usable))
        return self._draw().slots[0] if under_way < most else None

    def _hand_out(self, slot: _Slot, session: str, now: float) -> _Slot:
        slot.session, slot.until = session, now + self._lease
        self._deadline = min(self._deadline, now + self._config.max_seconds)
        return slot

    def _free(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            slot.session = ""

    def _again(self, slot: _Slot) -> None:
        """Free a slot for its next attempt, which has the same seed; give its group up after too many."""
        if not slot.open:
            return
        slot.session = ""
        slot.try_as(slot.ticket.attempt + 1)
        self.counters["reissued"] += 1
        if slot.ticket.attempt >= ATTEMPTS:
            slot.group.given_up = True
            self.counters["given_up"] += 1
            self._count()

    def _count(self) -> None:
        """Count the groups that are closed, in order; end the iteration where they are enough."""
        c = self._config
        while not self.ended and self._counted < len(self._groups):
            group = self._groups[self._counted]
            if group.closed is not None:
                self.groups.append(group.closed)
            elif not group.given_up:
                return
            self._counted += 1
            if len(self.usable) >= c.groups:
                self._end(f"it has group.groups={c.groups}")
            elif self._counted == c.max_groups:
                self._end(f"group.max_groups={c.max_groups} were tried")

    def _end(self, reason: str) -> None:
        self.ended = reason
