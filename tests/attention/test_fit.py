"""What of an episode counts, how the threshold is chosen, and the figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.attention.alarm import Alarm
from serl_chunk.attention.fit import Figures, Trace, fit, judge, largest_fall, trace_of
from serl_chunk.types import Begin, ConfigError, End, Episode, Outcome, Source, Step, StepBlock

HZ = 10.0
S, F, U = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


def episode(q: dict[int, float], outcome=U, by="environment", *, length=8, human=(), terminated=False) -> Episode:
    """Decisions with values q at their ticks."""
    steps = []
    for t in range(length):
        source = Source.HUMAN if t in human else Source.POLICY
        decision = {"q": np.float32(q[t])} if t in q else None
        steps.append(Step(t, {"state": np.zeros(1)}, np.zeros(1), 0.0, source, -1, 0, 0.0, decision))
    end = End("e", length, None, terminated, not terminated, outcome, by)
    return Episode(Begin("e"), StepBlock.from_steps("e", steps), end)


def trace(values, *, failed: bool, end: int | None = None) -> Trace:
    ticks = np.arange(len(values)) * 2
    return Trace("e", ticks, np.array(values, np.float64), end or 2 * len(values), failed, False, 1 / HZ)


Q = {0: 0.5, 4: 0.75}


@pytest.mark.parametrize(
    ("recorded", "failed"),
    [
        (episode(Q, S, terminated=True), False),
        (episode(Q, F, "operator", terminated=True), True),
        (episode(Q), True),  # out of time
        (episode(Q, by="operator"), None),  # a stop
        (episode(Q, by="learner"), None),
        (episode(Q, by="fault"), None),
        (episode({}, S, terminated=True), None),
    ],
)
def test_an_episode_failed_unless_it_succeeded_in_its_time(recorded, failed):
    found = trace_of("key", recorded, HZ)
    if failed is None:
        assert found is None
    else:
        assert (found.failed, found.by_human, found.end, found.period) == (failed, False, 8, 1 / HZ)
        assert (found.ticks.tolist(), found.q.tolist()) == ([0, 4], [0.5, 0.75])


@pytest.mark.parametrize(("outcome", "by"), [(S, "environment"), (F, "operator"), (U, "operator")])
def test_an_intervention_is_a_failure_whatever_came_of_it(outcome, by):
    found = trace_of("key", episode(Q, outcome, by, human={4, 5}), HZ)
    assert (found.failed, found.by_human, found.end, found.q.tolist()) == (True, True, 4, [0.5])
    assert trace_of("key", episode(Q, outcome, by, human={0}), HZ) is None, "the policy decided nothing before it"


values = st.lists(st.integers(0, 16).map(lambda n: n / 16), min_size=1, max_size=6)


@given(
    st.lists(values, min_size=1, max_size=12), st.lists(values, min_size=1, max_size=6), st.sampled_from([0, 0.1, 0.5])
)
def test_the_threshold_is_the_smallest_with_so_few_false_alarms(successes, failures, share):
    traces = [trace(q, failed=False) for q in successes] + [trace(q, failed=True) for q in failures]
    if len({q for each in (*successes, *failures) for q in each}) == 1:
        with pytest.raises(ConfigError, match=naming("Q", "critic")):
            fit(traces, (), share)
        return
    alarm = fit(traces, (), share)
    falls = np.array([largest_fall(alarm, t) for t in traces if not t.failed])
    assert (falls > alarm.fall).mean() <= share < (falls >= alarm.fall).mean()
    judged = judge(alarm, traces)
    assert [j.lead is not None for j in judged] == [j.fall > alarm.fall for j in judged]
    assert alarm.fitted == Figures.of(judged).to_json()


def test_an_alarm_leads_the_end_by_the_ticks_after_its_decision():
    alarm = Alarm(0.5, 0.0, 1.0, 0.0)
    (found,) = judge(alarm, [trace([0.8, 0.6, 0.1, 0.9, 0.1], failed=True, end=12)])
    assert found.lead == pytest.approx((12 - 4) / HZ), "the first alarm"
    assert found.fall == pytest.approx(8 / 9)


def test_the_figures_of_episodes():
    alarm = Alarm(0.5, 0.0, 1.0, 0.0)
    fallen, risen = [0.8, 0.1], [0.1, 0.8]
    traces = [trace(fallen, failed=True)] * 3 + [trace(risen, failed=True)] + [trace(fallen, failed=False)]
    traces += [trace(risen, failed=False)._replace(by_human=False)] * 4
    found = Figures.of(judge(alarm, traces))
    assert (found.true_alarms, found.missed, found.false_alarms, found.quiet) == (3, 1, 1, 4)
    assert (found.precision, found.recall, found.false_alarm_rate) == (0.75, 0.75, 0.2)
    assert found.to_json()["lead_seconds_p10_p50_p90"] == [0.2] * 3
    nothing = Figures.of([])
    assert (nothing.precision, nothing.recall, nothing.to_json()["lead_seconds_p10_p50_p90"]) == (None, None, None)


@pytest.mark.parametrize("failed", [True, False])
def test_one_kind_of_episode_teaches_no_threshold(failed):
    with pytest.raises(ConfigError, match=naming(2, 2 if failed else 0, "episodes")):
        fit([trace([0.1, 0.9], failed=failed)] * 2, (), 0.05)


def test_a_single_value_far_outside_does_not_stretch_the_range():
    traces = [trace([0.2, 0.8] * 100, failed=False), trace([0.8, 1e6], failed=True)]
    alarm = fit(traces, (), 0.0)
    assert math.isclose(alarm.high, 0.8)
