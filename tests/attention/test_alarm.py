"""The fall of Q, when it is an alarm, and its file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.attention.alarm import FORMAT, Alarm, FittedRun, Watch
from serl_chunk.types import ConfigError

ALARM = Alarm(0.5, 0.0, 1.0, 0.05, (FittedRun("runs/a", "0a"),), {"recall": 0.5})
VALUES = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("values", "fall"),
    [
        ([0.8], 0),
        ([0.2, 0.4, 0.8], 0),
        ([0.8, 0.2], 0.75),
        ([0.8, 0.2, 0.4], 0.5),  # from the highest, not from the one before
        ([0.4, -0.4], 2),
        ([0.05, 0.0], 0.5),  # a tenth of the range is the least scale
        ([-3, -4], 10),
    ],
)
def test_the_fall_is_a_share_of_what_was_reached(values, fall):
    watch = Watch(ALARM)
    assert [watch.fall(q) for q in values][-1] == pytest.approx(fall)


@given(VALUES, st.sampled_from([0.125, 1.0, 16.0]), st.integers(-50, 50))
def test_neither_scale_nor_offset_of_q_matters(values, scale, offset):
    one, other = Watch(Alarm(0.5, -8, 8, 0)), Watch(Alarm(0.5, scale * -8 + offset, scale * 8 + offset, 0))
    for q in values:
        assert other.fall(scale * q + offset) == pytest.approx(one.fall(q))


def test_an_alarm_is_raised_once_for_a_fall():
    watch = Watch(ALARM)
    texts = [watch.decided({"q": np.float32(q)}) for q in (0.6, 0.8, 0.5, 0.2, 0.15, 0.9, 0.3)]
    assert texts == ["", "", "", "Q fell from 0.8 to 0.2", "", "", "Q fell from 0.9 to 0.3"]


def test_the_threshold_itself_is_no_alarm():
    watch = Watch(ALARM)
    assert [watch.decided({"q": q}) for q in (0.5, 0.25)] == ["", ""]
    assert watch.decided({"q": 0.249})


def test_after_a_restart_the_values_before_do_not_count():
    watch = Watch(ALARM)
    watch.decided({"q": 0.8})
    watch.restart()
    assert watch.decided({"q": 0.1}) == ""


def test_a_decision_without_q_is_passed_over_and_of_several_values_the_best_counts():
    watch = Watch(ALARM)
    assert [watch.decided(r) for r in ({"q": np.array([0.1, 0.8])}, {}, {"q": np.array([0.7, 0.1])})] == [""] * 3
    assert watch.decided({"q": np.array([0.1, 0.2])}) == "Q fell from 0.8 to 0.2"


def test_a_file_gives_the_alarm_back(tmp_path):
    ALARM.save(tmp_path / "a.json")
    assert Alarm.read(tmp_path / "a.json") == ALARM


@pytest.mark.parametrize(
    ("change", "named"),
    [({"format": FORMAT + 1}, (FORMAT + 1, FORMAT)), ({"fall": None}, ("fit",)), ({"high": 0.0}, ("low", "high")),
     ({"low": float("nan")}, ("finite",)), ({"runs": [3]}, ("fit",)), ("[1]", ("fit",)), ("{", ("fit",)),
     (None, ("no such file",))],
)  # fmt: skip
def test_what_is_no_alarm_is_refused(tmp_path, change, named):
    file = tmp_path / "a.json"
    ALARM.save(file)
    if change is None:
        file.unlink()
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=naming(file, *named)) as caught:
        Alarm.read(file, "operator.attention")
    assert caught.value.parameter == "operator.attention"
