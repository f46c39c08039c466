"""The scheduler in simulated time: its groups are those of the outcomes, whatever happens to actors and learner."""

from __future__ import annotations

import random
import re

import hypothesis.strategies as st
import pytest
from errors import naming
from hypothesis import given, settings
from properties import examples

from serl_chunk.config.groups import GroupConfig
from serl_chunk.learner.groups.scheduler import ATTEMPTS, GroupScheduler, Result
from serl_chunk.learner.groups.starts import Memory, make_starts
from serl_chunk.types import ConfigError, Grant, Ticket

TASKS = ("push", "lift")
NO_SAMPLE = Result(None, 0.0, sample=False, why="a human acted")
SUCCESS, FAILURE = Result(True, 1.0, sample=True), Result(False, 0.0, sample=True)


def small(**changes) -> GroupConfig:
    return GroupConfig(**{"size": 2, "groups": 3, "max_groups": 12, "max_seconds": 1000.0, **changes})


def begun(config: GroupConfig, memory: Memory | None = None, *, iteration: int = 0, seed: int = 7) -> GroupScheduler:
    scheduler = GroupScheduler(config, make_starts(config, TASKS, seed), TASKS, seed, memory)
    scheduler.begin(iteration, 5)
    return scheduler


def alternating(ticket: Ticket) -> Result:
    """Every group is mixed."""
    return SUCCESS if ticket.slot % 2 else FAILURE


def collect(scheduler: GroupScheduler, result_of=alternating, *, capacity: int = 1) -> list[Ticket]:
    """Run each ticket at once, until the iteration has ended; the tickets in order."""
    run: list[Ticket] = []
    while (grant := scheduler.request("a", 5, (), capacity, len(run))).tickets:
        run.append(grant.tickets[-1])
        scheduler.settle(run[-1].id, result_of(run[-1]))
    assert scheduler.ended
    return run


class World:
    """Actors that lose messages, die, and are late, and a learner that is restarted, all by chance."""

    def __init__(self, config: GroupConfig, seed: int, trouble: float, solved: float) -> None:
        self.config, self.rng, self.trouble, self.solved = config, random.Random(seed), trouble, solved
        self.scheduler, self.version, self.now = begun(config), 5, 0.0
        self.memory = self.scheduler.memory
        self.held: dict[str, dict[str, Ticket]] = {f"actor {i}": {} for i in range(3)}
        self.capacity = {session: self.rng.randint(1, 6) for session in self.held}
        self.journal: list[tuple[str, Result]] = []
        self.settled: dict[tuple[int, int], str] = {}

    def result_of(self, ticket: Ticket) -> Result:
        """The same of every attempt: all have one seed."""
        return SUCCESS if random.Random(ticket.seed).random() < self.solved else FAILURE

    def chance(self) -> bool:
        return self.rng.random() < self.trouble

    def request(self, session: str) -> None:
        grant = self.scheduler.request(
            session, self.version, tuple(self.held[session]), self.capacity[session], self.now
        )
        assert {(t.group, t.slot) for t in grant.tickets}.isdisjoint(self.settled)
        if not self.chance():  # else the answer is lost
            self.held[session] = {t.id: t for t in grant.tickets}
            assert len(grant.tickets) <= self.capacity[session]

    def finish(self, session: str, ticket: Ticket) -> None:
        del self.held[session][ticket.id]
        self.journal.append((ticket.id, NO_SAMPLE if self.chance() else self.result_of(ticket)))
        if self.scheduler.settle(*self.journal[-1]):
            assert (ticket.group, ticket.slot) not in self.settled
            self.settled[ticket.group, ticket.slot] = ticket.id

    def restart(self) -> None:
        """Of the learner: what it knows is its checkpoint and its journal; its policy is published anew."""
        before, given_up = self.scheduler.groups, self.scheduler.counters["given_up"]
        self.scheduler = GroupScheduler(self.config, make_starts(self.config, TASKS, 7), TASKS, 7, self.memory)
        self.version += 1
        self.scheduler.begin(0, self.version, since=5)
        for ticket, result in self.journal:
            self.scheduler.settle(ticket, result)
        assert given_up or self.scheduler.groups == before  # a journal has no lost attempts

    def run(self) -> None:
        while not self.scheduler.ended:
            self.now += self.rng.choice((0.1, 1.0, 3.0))
            session = self.rng.choice(list(self.held))
            self.request(session)
            if self.held[session] and self.rng.random() < 0.7:
                self.finish(session, self.rng.choice(list(self.held[session].values())))
            if self.chance():
                self.held[session].clear()  # it died
                if self.rng.random() < 0.5:
                    self.scheduler.lost(session)
            if self.chance() and self.chance():
                self.restart()
            self.scheduler.tick(self.now)
            assert self.now < 2 * self.config.max_seconds * (self.version - 4)


CONFIGS = st.builds(
    small, size=st.integers(2, 4), groups=st.integers(1, 4), max_groups=st.integers(4, 9),
    max_seconds=st.sampled_from((60.0, 1e4)), oversubscribe=st.sampled_from((1.0, 1.25, 3.0)),
    baseline=st.sampled_from(("loo", "mean")), init_states=st.sampled_from(("seeds", "seeds:2")),
)  # fmt: skip


@settings(max_examples=examples(100))
@given(CONFIGS, st.integers(0, 2**32), st.sampled_from((0.0, 0.1, 0.5)), st.sampled_from((0.0, 0.2, 0.6, 1.0)))
def test_an_iteration_ends_and_its_groups_are_those_of_the_outcomes(config, seed, trouble, solved):
    """With lost messages, deaths, late episodes and restarts as without: each slot settled once, by its own seed."""
    world = World(config, seed, trouble, solved)
    world.run()
    alone = begun(config)
    collect(alone, world.result_of)
    results = {(g.number, g.init_state): g.results for g in alone.groups}
    groups = world.scheduler.groups
    assert [g.number for g in groups] == sorted({g.number for g in groups})
    if not world.scheduler.counters["given_up"]:
        assert {(g.number, g.init_state): g.results for g in groups}.items() <= results.items()
        if "max_seconds" not in world.scheduler.ended:
            assert (len(groups), world.scheduler.ended) == (len(alone.groups), alone.ended)
    assert bool(world.scheduler.no_update) == (not world.scheduler.usable)


def test_a_group_is_a_function_of_seed_iteration_number_and_memory():
    memory = Memory().after(0, [(("push", "seed-3000000"), [True, True])], barren=False)
    tickets = [[(t.init_state, t.seed) for t in collect(begun(small(), memory, iteration=i))] for i in (1, 1, 2)]
    assert tickets[0] == tickets[1]
    assert set(tickets[0]).isdisjoint(tickets[2])
    assert len(set(tickets[0])) == 6
    assert len({start for start, _ in tickets[0]}) == 3


def test_tasks_come_in_turn_and_tickets_say_all_of_a_slot():
    scheduler = begun(small())
    run = collect(scheduler)
    assert [(t.iteration, t.group, t.slot, t.attempt, t.version, t.lease) for t in run[:3]] == [
        (0, 0, 0, 0, 5, 500.0), (0, 0, 1, 0, 5, 500.0), (0, 1, 0, 0, 5, 500.0)
    ]  # fmt: skip
    assert [g.task for g in scheduler.groups] == ["push", "lift", "push"]
    assert scheduler.figures() == {
        "success": 0.5, "success/push": 0.5, "success/lift": 0.5, "groups": 3, "mixed": 3, "solved": 0, "mastered": 0,
        "given_up": 0, "reissued": 0, "dropped": 0,
    }  # fmt: skip
    assert scheduler.groups[0].tickets == ("0.0.0.0", "0.0.1.0")
    scheduler.begin(1, 6)
    assert scheduler.request("a", 6, (), 1, 0.0).tickets[0].task == "lift"  # as often as the others


def test_groups_that_close_early_are_not_preferred():
    """All of group 0 are slow: the iteration waits for it, and takes none that closed beyond the third."""
    scheduler = begun(small(oversubscribe=3.0))
    tickets = scheduler.request("a", 5, (), 18, 0.0).tickets
    assert len(tickets) == 18
    for ticket in tickets[2:]:
        assert scheduler.settle(ticket.id, alternating(ticket))
    assert (scheduler.ended, scheduler.groups) == ("", [])
    assert scheduler.request("b", 5, (), 1, 1.0) == Grant((), "all episodes that iteration 0 lacks are under way")
    for ticket in tickets[:2]:
        scheduler.settle(ticket.id, alternating(ticket))
    assert [g.number for g in scheduler.groups] == [0, 1, 2]
    assert "group.groups=3" in scheduler.ended
    assert scheduler.request("b", 5, (), 1, 2.0).tickets == ()


def test_so_many_episodes_are_under_way_for_each_that_is_missing():
    assert len(begun(small(oversubscribe=1.5)).request("a", 5, (), 99, 0.0).tickets) == 2 * 5  # ceil(1.5 * 3) groups


def test_what_is_held_stays_and_what_is_settled_elsewhere_is_withdrawn():
    scheduler = begun(small())
    first = scheduler.request("a", 5, (), 2, 0.0)
    assert scheduler.request("a", 5, (), 2, 1.0) == first  # its message may be lost
    ids = [t.id for t in first.tickets]
    assert scheduler.request("a", 5, ids, 1, 1.0) == first  # with less capacity it keeps what it holds ...
    assert scheduler.request("a", 5, ids[1:], 1, 1.0).tickets == first.tickets[1:]  # ... and loses what it does not
    assert scheduler.request("b", 5, (), 1, 1.0).tickets == first.tickets[:1]
    scheduler.lost("a")
    assert scheduler.request("b", 5, ids[:1], 2, 1.0).tickets[1] == first.tickets[1]._replace(attempt=1)
    assert not scheduler.request("a", 5, ids, 0, 1.0).tickets
    assert scheduler.settle(ids[1], SUCCESS)  # an earlier attempt ends first, and settles the slot
    assert [t.id for t in scheduler.request("b", 5, ids[:1], 1, 1.0).tickets] == ids[:1]
    assert not scheduler.settle("0.0.1.1", SUCCESS)
    assert scheduler.counters["dropped"] == 1


def test_an_actor_ahead_gives_back_and_one_behind_waits_with_its_ticket():
    scheduler = begun(small())
    [ticket] = scheduler.request("a", 4, (), 1, 0.0).tickets
    grant = scheduler.request("a", 6, (ticket.id,), 1, 0.0)
    assert (grant.tickets, "version 5" in grant.waiting) == ((), True)
    assert scheduler.request("b", 5, (), 1, 0.0).tickets == (ticket,)


def test_after_a_restart_an_actor_keeps_what_it_holds():
    scheduler = begun(small())
    [ticket] = scheduler.request("a", 5, ("0.4.1.2",), 1, 0.0).tickets  # groups up to 4 were drawn before
    assert (ticket.id, scheduler.request("b", 5, ("0.4.1.2",), 1, 0.0).tickets[0].id) == ("0.4.1.2", "0.0.0.0")


def test_an_old_attempt_without_a_sample_does_not_end_the_new_one():
    scheduler = begun(small())
    [ticket] = scheduler.request("a", 5, (), 1, 0.0).tickets
    scheduler.lost("a")
    again = scheduler.request("b", 5, (), 1, 0.0)
    assert not scheduler.settle(ticket.id, NO_SAMPLE)
    assert scheduler.request("b", 5, (), 1, 0.0) == again
    assert again.tickets == (ticket._replace(attempt=1),)


def test_a_lease_that_runs_out_is_given_to_another_with_the_same_seed():
    scheduler = begun(small())
    [ticket] = scheduler.request("a", 5, (), 1, 0.0).tickets
    assert ticket not in scheduler.request("b", 5, (), 1, 499.0).tickets
    assert scheduler.request("c", 5, (), 1, 500.0).tickets == (ticket._replace(attempt=1),)


def test_a_group_without_samples_is_given_up_and_another_is_drawn():
    scheduler = begun(small())
    run = collect(scheduler, lambda t: NO_SAMPLE if t.group == 1 else alternating(t))
    assert [t.attempt for t in run if t.group == 1] == list(range(ATTEMPTS))
    assert [g.number for g in scheduler.groups] == [0, 2, 3]
    assert (scheduler.counters["reissued"], scheduler.counters["given_up"]) == (ATTEMPTS, 1)
    scheduler = begun(small())
    assert len(collect(scheduler, lambda t: NO_SAMPLE)) == 12 * ATTEMPTS
    assert "no group was closed (group.max_groups=12" in scheduler.no_update


def test_a_corrected_result_may_take_a_group_back():
    scheduler = begun(small())
    tickets = scheduler.request("a", 5, (), 6, 0.0).tickets
    for ticket in tickets[:4]:
        scheduler.settle(ticket.id, alternating(ticket))
    assert [g.number for g in scheduler.usable] == [0, 1]
    assert scheduler.correct(tickets[1].id, FAILURE)
    assert [(g.number, g.mixed) for g in scheduler.groups] == [(0, False), (1, True)]
    assert scheduler.correct(tickets[0].id, NO_SAMPLE)
    assert scheduler.groups == []
    assert not scheduler.correct(tickets[0].id, SUCCESS)
    assert scheduler.request("b", 5, (), 1, 0.0).tickets == (tickets[0]._replace(attempt=1),)
    scheduler.settle("0.0.0.1", SUCCESS)
    assert [(g.number, g.mixed) for g in scheduler.groups] == [(0, True), (1, True)]


@pytest.mark.parametrize("ticket", ["1.0.0.0", "0.12.0.0", "0.0.2.0", f"0.0.0.{ATTEMPTS}", "0.0.0", "", "0.0.0.0\n"])
def test_tickets_of_another_iteration_or_of_none_are_dropped(ticket):
    scheduler = begun(small())
    assert not scheduler.settle(ticket, SUCCESS)
    assert scheduler.request("a", 5, (ticket,), 1, 0.0).tickets[0].id == "0.0.0.0"


@pytest.mark.parametrize(("result_of", "named"), [
    (lambda t: SUCCESS, ("24 episodes succeeded", "group.init_states")),
    (lambda t: FAILURE, ("none of 24 episodes", "group.sigma", "demos")),
    (lambda t: SUCCESS if t.group % 2 else FAILURE, ("always succeeded or always failed", "group.size")),
])  # fmt: skip
def test_an_iteration_without_a_mixed_group_says_why_and_three_of_them_end_the_run(result_of, named):
    scheduler = begun(small())
    for iteration in range(3):
        assert scheduler.over == ""
        if iteration:
            scheduler.begin(iteration, 5)
        collect(scheduler, result_of)
        assert "group.max_groups=12" in scheduler.ended
    assert re.match(naming(*named), scheduler.no_update)
    assert scheduler.no_update in scheduler.over
    assert "3 iterations" in scheduler.over


def test_an_update_between_them_is_patience_again():
    scheduler = begun(small(patience=2))
    for iteration, result_of in enumerate((lambda t: FAILURE, alternating, lambda t: FAILURE)):
        if iteration:
            scheduler.begin(iteration, 5)
        collect(scheduler, result_of)
        assert (scheduler.over, bool(scheduler.usable)) == ("", iteration == 1)


def test_time_ends_an_iteration_from_its_first_ticket_on():
    scheduler = begun(small())
    scheduler.tick(1e9)
    assert scheduler.ended == ""  # no actor has come
    scheduler.request("a", 5, (), 1, 1e9)
    scheduler.tick(1e9 + 999)
    assert scheduler.ended == ""
    scheduler.tick(1e9 + 1000)
    assert "group.max_seconds=1000" in scheduler.ended
    assert "no group was closed" in scheduler.no_update


def test_with_another_baseline_every_group_counts_also_of_one_episode():
    scheduler = begun(small(size=1, baseline="mean"))
    collect(scheduler, lambda t: FAILURE)
    assert (len(scheduler.usable), scheduler.no_update) == (3, "")


def test_before_the_first_iteration_actors_wait():
    scheduler = GroupScheduler(small(), make_starts(small(), TASKS, 0), TASKS, 0)
    scheduler.tick(0.0)
    assert not scheduler.settle("-1.0.0.0", SUCCESS)
    assert scheduler.request("a", 5, ("0.0.0.0",), 1, 0.0) == Grant((), "no iteration has begun")


def test_a_task_that_fits_no_message_is_refused():
    with pytest.raises(ConfigError, match=naming("x" * 40, 501, 500)):
        GroupScheduler(small(), make_starts(small(), ("x" * 501,), 0), ("x" * 501,), 0)
