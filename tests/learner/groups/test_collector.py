"""Episodes with tickets: which are samples, what their rows are, and that nothing of them is lost or counted twice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from errors import naming
from streamed_demos import HORIZON, SPEC, demo_rows, make_router

from serl_chunk.config.groups import GroupConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.learner.groups import collector
from serl_chunk.learner.groups.collector import Collector, result_of, rollout_of
from serl_chunk.learner.groups.scheduler import GroupScheduler
from serl_chunk.learner.groups.starts import Starts
from serl_chunk.learner.intake import Entry
from serl_chunk.types import Amend, Begin, DataError, End, Episode, Outcome, Source, Step, StepBlock

EXECUTED, LENGTH = 2, 5  # of chunks of HORIZON 3
ACTOR = "a/s"
SHAPE = (HORIZON, 1)
NORMALISER = Normaliser("absolute_range", np.ones(3), np.full(3, 2), np.zeros(SHAPE), np.ones(SHAPE), np.array([-1]))
PREPROCESS = Preprocess(NORMALISER)
SEEING = Preprocess(NORMALISER, SPEC.cameras)


def episode(
    ticket: str = "0.0.0.0", *, success: bool = True, source: Source = Source.POLICY, name: str = "", version: int = 5
) -> Episode:
    """Decisions on every second tick; `source` acts on the third."""

    def step(tick: int) -> Step:
        decided = tick % EXECUTED == 0
        observation = {"state": np.array([1, tick, 0], np.float32), "images/top": np.full((16, 16, 3), tick, np.uint8)}
        recorded = {"chunk": np.full((HORIZON, 1), tick, np.float32), "z": np.float32(tick)} if decided else None
        by = source if tick == 3 else Source.POLICY
        decision = -1 if by is not Source.POLICY else tick - tick % EXECUTED
        reward = float(success and tick == LENGTH - 1)
        return Step(tick, observation, np.zeros(1, np.float32), reward, by, decision, version, 0.02 * tick, recorded)

    name = name or f"e{ticket}"
    final = {"state": np.array([1, LENGTH, 0], np.float32), "images/top": np.zeros((16, 16, 3), np.uint8)}
    outcome = Outcome.SUCCESS if success else Outcome.UNKNOWN
    return Episode(
        Begin(name, "push", ticket=ticket),
        StepBlock.from_steps(name, [step(tick) for tick in range(LENGTH)]),
        End(name, LENGTH, final, success, not success, outcome),
    )


def changed(e: Episode, steps: dict | None = None, **end) -> Episode:
    return Episode(e.begin, dataclasses.replace(e.steps, **steps or {}), e.end._replace(**end))


@pytest.mark.parametrize(("success", "end", "expected"), [
    (True, {}, (True, 1.0)),
    (False, {}, (False, 0.0)),  # a time limit
    (False, {"reward": 0.25}, (False, 0.25)),
    (False, {"outcome": Outcome.SUCCESS, "outcome_by": "operator", "reward": -1.0}, (True, 1.0)),
    (True, {"reward": 7.0}, (True, 1.0)),
    (False, {"outcome": Outcome.FAILURE, "outcome_by": "operator", "terminated": True, "final_observation": None},
     (False, 0.0)),
])  # fmt: skip
def test_a_sample_has_a_success_and_a_reward_within_0_and_1(success, end, expected):
    result = result_of(changed(episode(success=success), **end), range(4, 6))
    assert (result.success, result.reward, result.sample, result.why) == (*expected, True, "")


FIVE = np.full(LENGTH, 5)


@pytest.mark.parametrize(("given", "why"), [
    (episode(source=Source.HUMAN), "human"), (episode(source=Source.HOLD), "held"),
    (episode(source=Source.RANDOM), "random"),
    (changed(episode(), {"lost_ticks": np.arange(LENGTH)}), "gap"),
    (changed(episode(success=False), final_observation=None), "gap"),
    *[(changed(episode(success=False), outcome_by=by), by) for by in ("fault", "crash", "operator", "learner")],
    (changed(episode(), {"policy_version": FIVE + 1}), "version 6"),
    (changed(episode(), {"policy_version": FIVE - (np.arange(LENGTH) > 3)}), "version 4, 5"),
])  # fmt: skip
def test_what_is_no_sample_says_why(given, why):
    result = result_of(given, range(4, 6))
    assert not result.sample
    assert why in result.why


@pytest.mark.parametrize("preprocess", [PREPROCESS, SEEING])
def test_a_row_is_a_decision_as_the_agent_read_it_with_the_ticks_that_were_executed(preprocess):
    e = episode()
    rollout = rollout_of(ACTOR, e, result_of(e, range(6)), preprocess, HORIZON)
    assert rollout[:3] + rollout.versions == ("0.0.0.0", ACTOR, "e0.0.0.0", 5)
    one = preprocess.observe(e.steps.observation_at(2), "push")
    assert set(rollout.observations) == set(one)
    assert all((rollout.observations[name][1] == value).all() for name, value in one.items())
    assert rollout.record["chunk"].shape == (3, HORIZON, 1)
    assert rollout.record["z"].tolist() == [0, 2, 4]
    assert rollout.executed.dtype == np.float32
    assert rollout.executed.tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0]]  # the episode ended


def without(e: Episode, *names: str) -> Episode:
    return changed(e, {"sparse": {k: v for k, v in e.steps.sparse.items() if k not in names}})


def fewer(e: Episode, name: str) -> Episode:
    rows = e.steps.sparse[name]
    kept = rows._replace(index=rows.index[1:], values=rows.values[1:])
    return changed(e, {"sparse": {**e.steps.sparse, name: kept}})


@pytest.mark.parametrize(("given", "named"), [
    (without(episode(), "decision/chunk", "decision/z"), ("e0.0.0.0", "no decision")),
    *[(changed(episode(), {"decision_tick": np.array(decided)}), ("e0.0.0.0", "tick 4", decided[-1], HORIZON))
      for decided in ([0, 0, 2, 2, 3], [0, 0, 0, 2, 0])],
    (fewer(episode(), "decision/z"), ("e0.0.0.0", "'z'")), (fewer(episode(), "images/top"), ("tick 0", "'top'")),
])  # fmt: skip
def test_a_record_that_makes_no_rows_is_refused(given, named):
    with pytest.raises(DataError, match=naming(*named)):
        rollout_of(ACTOR, given, result_of(given, range(6)), SEEING, HORIZON)


# -- on the router -------------------------------------------------------------------------------------------


def collecting(*, since: int | None = None, keeps_successes: bool = False, **changes):
    """A replay with its router and a collector that has begun iteration 0."""
    config = GroupConfig(**{"size": 2, "groups": 2, "max_groups": 4, "baseline": "mean", **changes})
    replay, router = make_router()
    scheduler = GroupScheduler(config, Starts(7), ("push",), 7)
    router.groups = Collector(scheduler, PREPROCESS, HORIZON, keeps_successes=keeps_successes, clock=lambda: 0.0)
    assert router.groups.poll() is None
    router.groups.begin(0, 5 if since is None else 6, since=since)
    return replay, router


def records(e: Episode) -> list:
    return [e.begin, e.steps.slice(0, 2), e.steps.slice(2, LENGTH), e.end]


def insert(router, *given, session: str = ACTOR) -> None:
    for record in given:
        router.insert(session, record)


SLOTS = [episode(f"0.{group}.{slot}.0", success=slot == 0) for group in (0, 1) for slot in (0, 1)]


def test_they_are_counted_like_others_and_leave_the_replay():
    replay, router = collecting()
    for e in SLOTS[:3]:
        insert(router, *records(e))
    assert router.groups.poll() is None
    insert(router, *records(SLOTS[3]), *records(episode("")))
    collected = router.groups.poll()
    assert [[r.ticket for r in of_group] for of_group in collected.rollouts] == [
        ["0.0.0.0", "0.0.1.0"], ["0.1.0.0", "0.1.1.0"]
    ]  # fmt: skip
    assert [[r.result.reward for r in of_group] for of_group in collected.rollouts] == [[1, 0]] * 2
    assert collected.reason == "it has group.groups=2"
    assert collected.counters["success"] == 0.5
    taken = router.take()
    assert (taken.env_steps, [e.success for e in taken.episodes]) == (5 * LENGTH, [True, False, True, False, True])
    assert replay.episodes() == [(ACTOR, "e")]
    router.groups.begin(1, 6)
    assert router.groups.poll() is None


def test_successes_of_all_iterations_stay_once_each_where_they_are_cloned():
    given = [episode("7.0.0.0"), *SLOTS, episode("0.0.0.1"), episode("0.2.0.0", source=Source.HOLD)]
    journal = [record for e in given for record in records(e)]
    replay, router = collecting(keeps_successes=True)
    insert(router, *journal)
    assert replay.episodes() == [(ACTOR, name) for name in ("e7.0.0.0", "e0.0.0.0", "e0.1.0.0")]
    again, router = collecting(keeps_successes=True, since=5)
    router.refill((number, ACTOR, record) for number, record in enumerate(journal))
    assert again.episodes() == replay.episodes()


def test_one_with_a_human_part_goes_to_the_replay_and_its_slot_is_run_again():
    replay, router = collecting()
    ticket = router.groups.tickets("s", 5, (), 1).tickets[0]
    insert(router, *records(episode(source=Source.HUMAN)))
    assert demo_rows(replay)[2] == 1
    assert router.groups.tickets("s", 5, (), 1).tickets == (ticket._replace(attempt=1),)
    insert(router, Amend("e0.0.0.0", Outcome.FAILURE, "operator"))
    assert len(router.take().episodes) == 1


@pytest.mark.parametrize("ends", ["begin", "gone"])
def test_one_whose_end_never_comes_is_run_again(ends):
    replay, router = collecting()
    ticket = router.groups.tickets("s", 5, (), 1).tickets[0]
    insert(router, *records(SLOTS[0])[:2])
    router.insert_all([Entry(ACTOR, None, gone=False)])  # it may come back
    assert router.groups.tickets("s", 5, (), 1).tickets == (ticket,)
    if ends == "begin":
        insert(router, *records(episode("0.0.1.0")))
    else:
        router.insert_all([Entry(ACTOR, None, gone=True)])
        router.groups.lost("s")
        insert(router, *records(SLOTS[0])[2:])  # of nothing that is open
    assert replay.episodes() == []
    assert router.groups.tickets("s", 5, (), 1).tickets == (ticket._replace(attempt=1),)


def test_a_second_end_of_a_slot_is_dropped_and_so_is_an_earlier_iterations():
    _, router = collecting()
    insert(router, *records(SLOTS[0]), *records(episode("0.0.0.1", success=False)))
    insert(router, *records(episode("7.0.0.0")))
    insert(router, *(record for e in SLOTS[1:] for record in records(e)))
    collected = router.groups.poll()
    assert [r.result.success for r in collected.rollouts[0]] == [True, False]
    assert collected.counters["dropped"] == 2


def test_what_came_before_its_iteration_settles_nothing_of_it(monkeypatch):
    """A process before a restart published its policy: the iteration begins here while the episode is judged."""
    _, router = collecting()

    def judged(e, versions):
        router.groups.scheduler.begin(1, 6)
        return result_of(e, versions)

    monkeypatch.setattr(collector, "result_of", judged)
    insert(router, *records(episode("1.0.0.0")))
    assert "1.0.0.0" in [ticket.id for ticket in router.groups.tickets("s", 6, (), 9).tickets]


def test_an_operators_label_and_discard_count_while_the_iteration_collects():
    _, router = collecting()
    insert(router, *(record for e in SLOTS[:3] for record in records(e)))
    insert(router, Amend("e0.0.0.0", Outcome.FAILURE, "operator"), Amend("e0.1.0.0", reward=0.5))
    insert(router, Amend("e0.0.1.0", discard=True))
    tickets = router.groups.tickets("s", 5, (), 9).tickets
    assert {t.id for t in tickets if t.group < 2} == {"0.0.1.1", "0.1.1.0"}
    again = episode("0.0.1.1")
    insert(router, *records(SLOTS[3]), *records(again))
    insert(router, Amend("e0.0.0.0", Outcome.SUCCESS, "operator"))  # too late
    results = [r.result for of_group in router.groups.poll().rollouts for r in of_group]
    assert [(r.success, r.reward) for r in results] == [(False, 0.0), (True, 1.0), (True, 1.0), (False, 0.0)]


def same(a, b) -> bool:
    """Whether two collected iterations hold the same rollouts."""
    return str(a.rollouts) == str(b.rollouts) and a.groups == b.groups


@pytest.mark.parametrize("at", [5, 6, 12, 15])
def test_the_journal_rebuilds_the_iteration_after_a_restart(at):
    """Whatever part of it the checkpoint's counters cover; the policy was published anew since."""
    rows = [record for e in SLOTS for record in records(e)]
    _, alone = collecting()
    insert(alone, *rows)
    replay, router = collecting(since=5)
    router.resume(LENGTH, 5)
    journal = [*records(episode("7.0.0.0")), *rows[:at]]  # with one of another iteration
    router.refill((number - 4, ACTOR, record) for number, record in enumerate(journal))
    assert router.groups.figures()["dropped"] == 0
    held = router.groups.tickets("s", 6, (), 9).tickets
    assert {(t.group, t.slot) for t in held}.isdisjoint({divmod(i, 2) for i in range(at // 4)})
    insert(router, *rows[at:])
    assert same(router.groups.poll(), alone.groups.poll())
    assert router.env_steps == 4 * LENGTH
    assert replay.episodes() == []
