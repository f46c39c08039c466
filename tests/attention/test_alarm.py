"""The fall of Q: when it is an alarm, which episodes count, how the threshold is chosen, and the figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.attention.alarm import FORMAT, Alarm, FittedRun, Watch
from serl_chunk.attention.fit import Figures, Trace, fit, judge, largest_fall, trace_of
from serl_chunk.types import Begin, ConfigError, End, Episode, Outcome, Source, Step, StepBlock

ALARM = Alarm(0.5, 0.0, 1.0, 0.05, (FittedRun("runs/a", "0a"),), {"recall": 0.5})
HZ = 10.0
S, F, U = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN


@given(
    st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12),
    st.sampled_from([0.125, 1.0, 16.0]),
    st.integers(-50, 50),
)
def test_neither_scale_nor_offset_of_q_matters(values, scale, offset):
    one, other = Watch(Alarm(0.5, -8, 8, 0)), Watch(Alarm(0.5, scale * -8 + offset, scale * 8 + offset, 0))
    for q in values:
        assert other.fall(scale * q + offset) == pytest.approx(one.fall(q))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (
            (0.6, 0.8, 0.5, 0.2, 0.15, 0.9, 0.3),
            ("", "", "", "Q fell from 0.8 to 0.2", "", "", "Q fell from 0.9 to 0.3"),
        ),  # once for a fall
        ((0.5, 0.25, 0.249), ("", "", "Q fell from 0.5 to 0.25")),  # the threshold itself is none
        # no Q is passed over, of several values the best counts
        (([0.1, 0.8], None, [0.7, 0.1], [0.1, 0.2]), ("", "", "", "Q fell from 0.8 to 0.2")),
    ],
)
def test_an_alarm_is_raised_once_for_a_fall(values, texts):
    watch = Watch(ALARM)
    assert tuple(watch.decided({} if q is None else {"q": np.float32(q)}) for q in values) == texts
    watch.restart()  # the values before do not count
    assert watch.decided({"q": 0.1}) == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [({"format": FORMAT + 1}, (FORMAT + 1, FORMAT)), ({"fall": None}, ("fit",)), ({"high": 0.0}, ("low", "high")),
     ({"low": float("nan")}, ("finite",)), ({"runs": [3]}, ("fit",)), ("[1]", ("fit",)), ("{", ("fit",)),
     (None, ("no such file",))],
)  # fmt: skip
def test_a_file_gives_the_alarm_back_and_what_is_none_is_refused(tmp_path, change, named):
    file = tmp_path / "a.json"
    ALARM.save(file)
    assert Alarm.read(file) == ALARM
    if change is None:
        file.unlink()
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=naming(file, *named)) as caught:
        Alarm.read(file, "operator.attention")
    assert caught.value.parameter == "operator.attention"


def episode(q: dict[int, float], outcome=U, by="environment", *, human=()) -> Episode:
    steps = []
    for t in range(8):
        source = Source.HUMAN if t in human else Source.POLICY
        decision = {"q": np.float32(q[t])} if t in q else None
        steps.append(Step(t, {"state": np.zeros(1)}, np.zeros(1), 0.0, source, -1, 0, 0.0, decision))
    end = End("e", 8, None, outcome is not U, outcome is U, outcome, by)
    return Episode(Begin("e"), StepBlock.from_steps("e", steps), end)


def trace(values, *, failed: bool, end: int | None = None) -> Trace:
    ticks = np.arange(len(values)) * 2
    return Trace("e", ticks, np.array(values, np.float64), end or 2 * len(values), failed, False, 1 / HZ)


Q = {0: 0.5, 4: 0.75}


@pytest.mark.parametrize(
    ("recorded", "failed"),
    [
        (episode(Q, S), False),
        (episode(Q, F, "operator"), True),
        (episode(Q), True),  # out of time
        *((episode(Q, by=by), None) for by in ("operator", "learner", "fault")),  # a stop
        (episode({}, S), None),
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


def test_the_figures_of_episodes_and_how_far_an_alarm_leads_their_ends():
    alarm, fallen, risen = Alarm(0.5, 0.0, 1.0, 0.0), [0.8, 0.1], [0.1, 0.8]
    (first,) = judge(alarm, [trace([0.8, 0.6, 0.1, 0.9, 0.1], failed=True, end=12)])
    assert (first.lead, first.fall) == (pytest.approx((12 - 4) / HZ), pytest.approx(8 / 9))  # of the first alarm
    traces = [trace(fallen, failed=True)] * 3 + [trace(risen, failed=True)] + [trace(fallen, failed=False)]
    found = Figures.of(judge(alarm, traces + [trace(risen, failed=False)] * 4))
    assert (found.true_alarms, found.missed, found.false_alarms, found.quiet) == (3, 1, 1, 4)
    assert (found.precision, found.recall, found.false_alarm_rate) == (0.75, 0.75, 0.2)
    assert found.to_json()["lead_seconds_p10_p50_p90"] == [0.2] * 3
    nothing = Figures.of([])
    assert (nothing.precision, nothing.recall, nothing.to_json()["lead_seconds_p10_p50_p90"]) == (None, None, None)


def test_one_kind_of_episode_teaches_no_threshold_and_one_value_does_not_stretch_the_range():
    for failed in (True, False):
        with pytest.raises(ConfigError, match=naming(2, 2 if failed else 0, "episodes")):
            fit([trace([0.1, 0.9], failed=failed)] * 2, (), 0.05)
    alarm = fit([trace([0.2, 0.8] * 100, failed=False), trace([0.8, 1e6], failed=True)], (), 0.0)
    assert math.isclose(alarm.high, 0.8)
