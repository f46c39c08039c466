"""Episodes under the realtime clock, on a simulated one: joining by count, starving, lateness."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
from actor_helpers import (
    DT,
    SPEC,
    HumanOnTicks,
    LineEnv,
    ListSink,
    NoisyAgent,
    SimClock,
    SimInference,
    check_steps,
    chunk_starts,
    make_config,
    make_policy,
)
from errors import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.inference import while_polling
from serl_chunk.actor.planner import choose_inference
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.types import ConfigError, Source

MS = 1e-3
DIFFERENCES = dataclasses.replace(SPEC, joint_of_action=(-1, 1))  # the first is commanded by differences


class Rig:
    """A runner on a simulated clock."""

    def __init__(
        self, mode, latencies, *, horizon=8, oversleep=(), costs=(), length=30, intervention=None, spec=SPEC,
        asks=None, stop=lambda: None,
    ):  # fmt: skip
        self.human = intervention.ticks if intervention else frozenset()
        self.clock, self.sink, self.agent = SimClock(oversleep), ListSink(), NoisyAgent(horizon, asks=asks)
        self.policy = make_policy(self.agent)
        self.env = LineEnv(length=length, clock=self.clock, costs=costs, spec=spec)
        actor = ActorConfig(clock="realtime", inference=mode, adaptive_execution=asks is not None)
        self.runner = EpisodeRunner(
            self.env, self.policy, self.sink, config=make_config(horizon=horizon, actor=actor), clock=self.clock,
            inference=SimInference(self.policy, self.clock, latencies), intervention=intervention, stop=stop,
        )  # fmt: skip

    def run(self, seed=0):
        self.sink.records.clear()
        summary = self.runner.run_episode(seed, explore=True)
        check_steps(self.sink.steps, self.agent.horizon, self.human)
        return summary, self.sink.steps


def ticks_of(steps, source):
    return [s.tick for s in steps if s.source == source]


def test_sync_is_not_starved_by_an_environment_that_keeps_its_own_rate():
    """Its steps sleep for a whole tick, so that ticks begin up to a period late; inference is as fast as ever."""
    rig = Rig("sync", itertools.repeat(5 * MS), costs=[DT + 0.2 * MS] * 120, length=120)
    summary, steps = rig.run()
    assert [s.decision_tick for s in chunk_starts(steps)] == list(range(0, 120, 8))
    assert (summary.starved_ticks, summary.hold_ticks) == (0, 0)
    assert summary.lateness.max_ms > 10
    assert summary.lateness.missed_periods == 4  # 15 waits of 5 ms and 119 steps of 0.2 ms beyond their tick: 99 ms
    apart = np.diff([s.stamp for s in steps])  # true times: no tick is rushed, and only those of decisions wait
    np.testing.assert_allclose(apart, [DT + (5.2 if t % 8 == 0 else 0.2) * MS for t in range(119)], atol=1e-9)


@pytest.mark.parametrize("late", [0, 12 * MS])
def test_sync_waits_half_a_period_at_most_however_late_the_tick_begins(late):
    rig = Rig("sync", [5 * MS, 1e9], oversleep=[0] * 9 + [late], length=12)
    sent = []
    rig.env.costs = iter(lambda: sent.append(rig.clock.time) or 0.0, None)
    _, steps = rig.run()
    assert steps[8].stamp - steps[0].stamp == pytest.approx(8 * DT + late)
    assert ticks_of(steps, Source.HOLD) == [8, 9, 10, 11]
    np.testing.assert_allclose([at - s.stamp for at, s in zip(sent, steps, strict=True)][8:], [10 * MS, 0, 0, 0])


def test_holding_repeats_positions_and_stops_differences():
    rig = Rig("sync", [5 * MS, 15 * MS, 5 * MS, 5 * MS], spec=DIFFERENCES)
    rig.runner.run_episode(0, explore=True)
    steps = rig.sink.steps
    assert ticks_of(steps, Source.HOLD) == [8]
    assert steps[7].action[0] != 0
    np.testing.assert_array_equal(steps[8].action, [0.0, steps[7].action[1]])


@pytest.mark.parametrize(("asked", "apart"), [(None, 5), (7, 4), (1, 2)])
def test_async_asks_as_late_as_the_delay_allows_and_earlier_where_a_decision_wants_that(asked, apart):
    """Asked when 3 actions are left (delay 2, plus 1) of those it wants, and never before the chunk has come."""
    rig = Rig("async", itertools.repeat(25 * MS), length=60, asks=None if asked is None else lambda tick: asked)
    rig.run()
    _, steps = rig.run()
    starts = list(chunk_starts(steps))
    # The first had to wait for what was asked at the end of the last episode.
    assert np.diff([s.decision_tick for s in starts])[1:].tolist() == [apart] * (len(starts) - 2)
    assert {s.tick - s.decision_tick for s in starts[1:]} == {2}
    assert ticks_of(steps, Source.HOLD) == list(range(starts[0].tick))  # before the first chunk, and never again
    # The policy was told exactly what was executed between its observation and its chunk.
    for start in starts[1:]:
        executed = [steps[start.decision_tick + i].action for i in range(2)]
        np.testing.assert_array_equal(rig.agent.prefixes[start.decision_tick], executed)


@settings(max_examples=examples(20), deadline=None)
@given(
    mode=st.sampled_from(["sync", "async"]),
    horizon=st.integers(2, 8),
    latencies=st.lists(st.floats(0, 0.3), max_size=40),
    oversleep=st.lists(st.floats(0, 0.05), max_size=40),
    human=st.frozensets(st.integers(0, 40), max_size=12),
)
def test_random_latencies(mode, horizon, latencies, oversleep, human):
    source = HumanOnTicks(human, idle=frozenset(t for t in human if t % 3 == 0))
    rig = Rig(mode, latencies, horizon=horizon, oversleep=oversleep, length=40, intervention=source)
    for seed in range(2):
        summary, steps = rig.run(seed)
        humans = [t for t in range(40) if t in human]
        assert ticks_of(steps, Source.HUMAN) == [t for t in humans if t % 3]
        own_holds = [t for t in ticks_of(steps, Source.HOLD) if t not in human]
        assert summary.starved_ticks == len(own_holds)
        # A chunk is never used across an intervention, and chunks follow one another.
        for s in steps:
            if s.source == Source.POLICY:
                assert not human & set(range(s.decision_tick, s.tick + 1))
        starts = [s.decision_tick for s in chunk_starts(steps)]
        assert starts == sorted(set(starts))


@pytest.mark.parametrize(
    ("oversleep", "apart", "most", "missed"),
    [
        ([0, 3, 0, 8], [23, 17, 28, 12], 8, 0),  # lateness does not add up: each tick is late by its own oversleep only
        ([0, 0, 65], [20, 85, 15], 65, 3),  # a long stall moves the grid instead of rushing
    ],
)
def test_deadlines_are_absolute(oversleep, apart, most, missed):
    rig = Rig("async", itertools.repeat(5 * MS), oversleep=[MS * each for each in oversleep], costs=[4 * MS] * 30)
    summary, steps = rig.run()
    np.testing.assert_allclose(
        np.diff([s.stamp for s in steps])[: len(apart)], [MS * each for each in apart], atol=1e-9
    )
    assert (summary.lateness.max_ms, summary.lateness.missed_periods) == (pytest.approx(most), missed)
    assert summary.lateness.p50_ms == pytest.approx(0, abs=1e-6)
    assert rig.runner.lateness() == summary.lateness


def test_a_stall_drops_the_plan_and_is_a_gap(caplog):
    """The process stands still for 2 s between ticks 10 and 11: what it planned, and saw, is of a robot of before."""
    rig = Rig("async", itertools.repeat(5 * MS), oversleep=[0] * 11 + [2.0])
    summary, steps = rig.run()
    assert steps[11].stamp - steps[10].stamp == pytest.approx(DT + 2.0)
    assert ([(s.tick, s.lost_ticks) for s in steps if s.lost_ticks], steps[10].source) == ([(11, 100)], Source.POLICY)
    assert steps[11].source == Source.HOLD  # nothing is decided on what was seen before the stall
    np.testing.assert_array_equal(steps[11].action, steps[10].action)
    assert all(s.decision_tick > 11 for s in steps[12:] if s.source == Source.POLICY)
    assert sum(s.source == Source.POLICY for s in steps[12:]) > 10
    assert (summary.gaps, summary.lateness.missed_periods) == (1, 100)
    [warning] = caplog.messages
    assert "stalled in episode actor-000000 (gaps=1, longest 2.00 s)" in warning


@pytest.mark.parametrize(("hz", "late", "lost"), [(50, 0.079, 0), (50, 0.081, 4), (10, 0.19, 0), (10, 0.21, 2)])
def test_a_gap_is_longer_than_two_ticks_and_80_ms(hz, late, lost):
    spec = dataclasses.replace(SPEC, control_hz=hz)
    rig = Rig("async", itertools.repeat(5 * MS), oversleep=[0] * 5 + [late], spec=spec)
    _, steps = rig.run()
    assert [s.lost_ticks for s in steps] == [lost if s.tick == 5 else 0 for s in steps]


@pytest.mark.parametrize("human", [False, True])
def test_no_command_from_before_a_stall_is_executed_after_it(human):
    """The stall comes between the choice of an action and its command."""

    @dataclasses.dataclass
    class Stalls(HumanOnTicks):
        clock: object = None

        def poll(self, tick, observation, decision_tick, last):
            self.clock.time += 1.0 if tick == 11 else 0.0
            return super().poll(tick, observation, decision_tick, last)

    source = Stalls(frozenset({11} if human else {}))
    rig = Rig("async", itertools.repeat(5 * MS), intervention=source)
    source.clock = rig.clock
    summary, steps = rig.run()
    assert steps[11].source == Source.HOLD
    np.testing.assert_array_equal(steps[11].action, steps[10].action)
    assert ([s.lost_ticks > 0 for s in steps], summary.human_ticks) == ([s.tick == 12 for s in steps], human)


@pytest.mark.parametrize("ends", ["limit", "success", "stop"])
def test_what_is_seen_after_a_stall_is_no_successor_of_the_last_step(ends):
    stop = {"stop": lambda: "operator" if rig.env.tick >= 9 else None}.get(ends, lambda: None)
    during = [0.0] * 8 + [0.0 if ends == "stop" else 1.0]
    oversleep = [0] * 9 + [1.0 if ends == "stop" else 0.0]
    length = 9 if ends == "limit" else 30
    rig = Rig("async", itertools.repeat(5 * MS), costs=during, oversleep=oversleep, length=length, stop=stop)
    rig.env.success_at = 8 if ends == "success" else None
    rig.run()
    end = rig.sink.last_end
    assert (end.length, end.terminated) == (9, ends == "success")
    assert (end.final_observation is None) == (ends != "success")  # a termination is one, however late it is seen


@pytest.mark.parametrize(("wanted", "milliseconds", "execute", "expected"), [
    ("auto", [2] * 50, 8, "sync"), ("auto", [2] * 45 + [12] * 5, 8, "async"), ("sync", [30] * 50, 8, "sync"),
    ("async", [2] * 50, 8, "async"), ("sync", [9] * 50, 1, "sync"),
    ("auto", [100.0] * 50, 5, None), ("sync", [11.0] * 50, 1, None),  # single actions: within the tick
])  # fmt: skip
def test_choice_of_inference_and_what_is_slower_than_a_chunk_is_refused(wanted, milliseconds, execute, expected):
    slow = pytest.raises(ConfigError, match=naming(max(milliseconds), 20.0, execute, "chunk.execute_steps"))
    with contextlib.nullcontext() if expected else slow:
        assert choose_inference(wanted, [MS * each for each in milliseconds], DT, execute) == expected


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_robot_is_kept_while_inference_compiles(error):
    """Polls renew its lease, which ends in two seconds of silence."""
    polls, compiled = [], threading.Event()

    def poll():
        polls.append(threading.current_thread())
        if len(polls) == 3 and error is not None:
            raise error
        compiled.set() if len(polls) == 5 else None

    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        assert while_polling(lambda: compiled.wait(10), poll, end=compiled.set)
    assert set(polls) == {threading.current_thread()}
    assert compiled.is_set()


class Cyclic:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


class WastefulEnv(LineEnv):
    """Each step leaves more cycles than start a collection; the newest is watched."""

    def step(self, action):
        for _ in range(2 * gc.get_threshold()[0]):
            last = Cyclic()
        self.newest = weakref.ref(last)
        return super().step(action)


@pytest.fixture
def collections():
    """What is noted by tests, and every collection."""
    events: list[str] = []

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            events.append("collection")

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # the interpreter's: the suite's own is higher, which takes as much more garbage
    gc.callbacks.append(note)
    yield events
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def runner_of(env, *, intervention=None, agent=None, image_keys=()):
    """On the environment's clock, or on the machine's own, with a thread of its own for inference."""
    policy = make_policy(agent or NoisyAgent(8), image_keys=image_keys)
    inference = env.clock and SimInference(policy, env.clock, itertools.repeat(0.005))
    config = make_config(horizon=8, actor=ActorConfig(clock="realtime", inference="async"))
    return EpisodeRunner(
        env, policy, ListSink(), config=config, clock=env.clock, inference=inference, intervention=intervention
    )


def test_nothing_is_collected_within_an_episode_and_all_of_it_between_two(collections):
    env = WastefulEnv(length=30)
    runner = runner_of(env)
    before = gc.isenabled(), gc.get_freeze_count()
    reset, step = env.reset, env.step
    env.reset = lambda **kw: collections.append("reset") or reset(**kw)
    env.step = lambda action: collections.append("step") or step(action)
    try:
        for _ in range(3):
            runner.run_episode(0, explore=True)
            assert env.newest() is None  # collected before the next reset
        assert gc.get_freeze_count() > before[1]
    finally:
        runner.close()
    assert gc.isenabled() == before[0]
    assert before[1] or not gc.get_freeze_count()
    within = collections[collections.index("reset") :]
    apart = itertools.groupby(within, lambda event: event == "collection")
    assert [list(events) for collected, events in apart if not collected] == [["reset", *["step"] * 30]] * 3


def test_a_long_episode_collects_at_a_hold(collections):
    """Ten minutes and more, at one tick a second; a human keeps still on three ticks."""
    still = frozenset({500, 650, 660})
    env = LineEnv(length=700, clock=SimClock(), spec=dataclasses.replace(SPEC, control_hz=1.0))
    runner = runner_of(env, intervention=HumanOnTicks(still, idle=still))
    step = env.step
    env.step = lambda action: collections.append(f"step {env.tick}") or step(action)
    runner.run_episode(0, explore=True)
    runner.close()
    within = collections[collections.index("step 0") : collections.index("step 699")]
    at = within.index("collection")
    assert within.count("collection") == 1
    assert within[at - 1] in ("step 650", "step 651")  # the human's hold, or the tick without a plan behind it


def test_an_error_leaves_the_interpreter_as_it_was():
    runner = runner_of(LineEnv(length=30, crash_at=5, clock=SimClock()))
    with pytest.raises(RuntimeError, match="motor"):
        runner.run_episode(0, explore=True)
    runner.close()
    assert gc.isenabled()


def test_the_robot_is_reset_after_the_warm_up():
    """Between a reset and the first tick nothing commands a robot, and compiling takes seconds."""
    events: list[str] = []

    class Telling(NoisyAgent):
        def sample(self, params, observation, key, **kw):
            events.append("decision")
            shapes = {name: (value.dtype, value.shape) for name, value in observation.items()}
            assert shapes == {"state": (np.float32, (3,)), "images/wrist": (np.uint8, (6, 5, 3))}
            return super().sample(params, observation, key, **kw)

    env = LineEnv(length=10, clock=SimClock())
    reset, look = env.reset, env.read_images
    env.reset = lambda **kw: events.append("reset") or reset(**kw)
    env.read_images = lambda *a: events.append("look") or look(*a)
    runner = runner_of(env, agent=Telling(8), image_keys=("wrist",))
    for seed in range(2):
        runner.run_episode(seed, explore=True)
    first = events.index("reset")
    assert events[: first + 2] == ["decision"] * 53 + ["reset", "look"]
    assert "decision" in events[first:]
    assert events.count("reset") == 2
    runner.close()
