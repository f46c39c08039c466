"""Robots in other processes: a tick's result is there at its end, a fault ends an episode, ticks may be lost."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from actor_helpers import (
    DT,
    HumanOnTicks,
    LineEnv,
    ListSink,
    NoisyAgent,
    SimClock,
    SimInference,
    make_config,
    make_policy,
)

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.evaluation.results import summary_line
from serl_chunk.evaluation.rollouts import FAULT_REPEATS, evaluate
from serl_chunk.types import Source


class Served(LineEnv):
    """Moves at the end of the tick, when its result is asked for. `lost`: info of ticks; `unseen`: ticks whose
    observation has an old picture."""

    answers_late = True

    def __init__(self, *, lost=None, fault_at=None, unseen=(), **more):
        super().__init__(**more)
        self.lost, self.fault_at, self.unseen = lost or {}, fault_at, unseen
        self.calls = []

    def send(self, command):
        self.calls.append(("send", self.tick, 0.0 if self.clock is None else self.clock.now()))
        self.sent = command.copy()

    def receive(self):
        self.calls.append(("receive", self.tick, 0.0 if self.clock is None else self.clock.now()))
        tick = self.tick
        raw, reward, terminated, truncated, info = self.step(self.sent)
        if tick in self.lost:
            info["lost_ticks"] = self.lost[tick]
        if tick + 1 in self.unseen:
            info["unseen"] = "camera 'front': no new picture for 0.3 s"
        if tick == self.fault_at:
            truncated, info["fault"] = True, "stopped by the operator"
        return raw, reward, terminated, truncated, info


def run(env, config, clock=None, latencies=(), random_steps=0, **more):
    sink, policy = ListSink(), make_policy(NoisyAgent(8))
    inference = None if clock is None else SimInference(policy, clock, latencies)
    runner = EpisodeRunner(env, policy, sink, config=config, clock=clock, inference=inference, **more)
    try:
        return runner.run_episode(3, explore=True, random_steps=random_steps), sink
    finally:
        runner.close()


REALTIME = make_config(actor=ActorConfig(clock="realtime"))


def test_in_real_time_a_result_is_received_when_the_next_tick_begins():
    clock = SimClock()
    env = Served(length=12, clock=clock)
    summary, sink = run(env, REALTIME, clock, itertools.repeat(0.03))
    assert [c[:2] for c in env.calls] == [(name, t) for t in range(12) for name in ("send", "receive")]
    began = [s.stamp for s in sink.steps]
    assert np.diff(began) == pytest.approx(np.full(11, DT))
    assert [moment for _, _, moment in env.calls[1::2]] == pytest.approx([b + DT for b in began])
    assert [s.tick for s in sink.steps] == list(range(12))
    assert (summary.steps, summary.gaps, sink.last_end.length, sink.last_end.outcome_by) == (12, 0, 12, "environment")


@pytest.mark.parametrize(("lost", "restarted"), [({}, []), ({5: 4, 6: 1}, [6, 7])])
def test_ticks_that_the_robot_did_not_follow_are_a_gap_drop_the_plan_and_let_a_human_begin_anew(lost, restarted):
    class Human(HumanOnTicks):
        def restart(self):
            found.append(self.asked[-1][0] + 1)  # the tick that follows

    found: list[int] = []
    summary, sink = run(Served(length=20, lost=lost), make_config(), intervention=Human(frozenset(range(7, 12))))
    assert (found, summary.gaps) == (restarted, len(lost))
    assert [s.lost_ticks for s in sink.steps] == [lost.get(tick - 1, 0) for tick in range(20)]
    assert (sink.steps[5].decision_tick, sink.steps[6].decision_tick) == (0, 6 if lost else 0), "decided anew"


@pytest.mark.parametrize(("clock", "random_steps"), [(False, 0), (True, 0), (False, 20)])
def test_nothing_is_decided_on_an_old_picture(clock, random_steps):
    clock = SimClock() if clock else None
    env = Served(length=20, unseen=range(5, 9), clock=clock)
    latencies = itertools.repeat(0.005)
    _, sink = run(env, REALTIME if clock else make_config(), clock, latencies, random_steps)
    acting = {Source.RANDOM} if random_steps else {Source.POLICY}
    assert {s.source for s in sink.steps if s.tick not in env.unseen} == acting
    assert {s.source for s in sink.steps if s.tick in env.unseen} == {Source.HOLD}
    assert [s.lost_ticks for s in sink.steps] == [int(t in env.unseen) for t in range(20)]
    if not random_steps:
        assert (sink.steps[4].decision_tick, sink.steps[9].decision_tick) == (0, 9), "decided anew"
        assert not any(s.decision for s in sink.steps if s.tick in env.unseen)


def test_a_human_acts_also_while_a_picture_is_old():
    env = Served(length=12, unseen=range(5, 9))
    _, sink = run(env, make_config(), intervention=HumanOnTicks(frozenset((6, 7))))
    assert [s.tick for s in sink.steps if s.source is Source.HUMAN] == [6, 7]
    assert [s.lost_ticks for s in sink.steps] == [int(t in env.unseen) for t in range(12)]


def test_a_gap_at_the_end_leaves_no_last_observation_and_a_fault_its_reason(caplog):
    watched, env = [], Served(length=6, lost={5: 2})
    env.watch = watched.append
    assert run(env, make_config(), cameras=("wrist",))[1].last_end.final_observation is None
    assert watched == [("wrist",)]
    summary, sink = run(Served(length=20, fault_at=4), make_config())
    end = sink.last_end
    assert (end.length, end.terminated, end.truncated, end.outcome_by) == (5, False, True, "fault")
    assert summary.fault == "stopped by the operator"
    assert "stopped by the operator" in caplog.text


class Unlucky(Served):
    """Faults in the first `faults` episodes of seed 1 above the base."""

    def __init__(self, faults):
        super().__init__(length=15)
        self.left, self.starts_repeat = faults, True

    def reset(self, *, seed=None, options=None):
        unlucky = seed % 10 == 1 and self.left > 0
        self.left -= unlucky
        self.fault_at, self.success_at = (4, None) if unlucky else (None, 9)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(("faults", "repeated", "successes"), [(2, 2, 3), (9, 2, 2)])
def test_an_evaluation_repeats_what_a_fault_ended_at_most_twice(faults, repeated, successes):
    env = Unlucky(faults)
    result = evaluate(env, make_policy(NoisyAgent(8)), make_config(), n=3)
    assert (FAULT_REPEATS, result.episodes, result.successes, len(result.repeated)) == (2, 3, successes, repeated)
    assert len(env.seeds) == 3 + repeated
    data = json.loads(json.dumps(result.to_json()))
    listed = [e["fault"] for e in data["episodes"] + data.get("repeated", []) if "fault" in e]
    assert listed == ["stopped by the operator"] * min(faults, 3)
    assert ("faults=" in summary_line(result, "r")) == bool(faults)
