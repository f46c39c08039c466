"""When a controller counts as silent."""

from __future__ import annotations

import pytest

from serl_chunk_robot.safety.watchdog import Watchdog

TICK = 0.02


def armed(now: float = 0.0) -> Watchdog:
    dog = Watchdog(TICK)
    dog.armed(now)
    return dog


@pytest.mark.parametrize(("tick", "validity"), [(0.02, 0.08), (0.1, 0.15), (1 / 15, 0.1)])
def test_a_command_is_valid_for_a_tick_and_a_half_but_no_less_than_80_ms(tick: float, validity: float):
    assert Watchdog(tick).validity == pytest.approx(validity)


def test_a_lapse_is_due_when_the_last_command_is_no_longer_valid():
    dog = armed()
    assert dog.event(0.08, "RUN") == ""
    assert dog.event(0.0801, "RUN") == "lapse"
    dog = armed()
    dog.commanded(0.07)
    assert dog.event(0.15, "RUN") == ""
    assert dog.event(0.1501, "RUN") == "lapse"


def test_ten_rejections_in_a_row_since_the_last_command_or_arming_stop_and_renew_nothing():
    dog = armed()
    for renew in (dog.commanded, dog.armed):
        for _ in range(9):
            dog.rejected()
        assert dog.event(0.05, "RUN") == ""
        renew(0.05)
    for _ in range(9):
        dog.rejected()
    assert dog.event(0.1301, "RUN") == "lapse"
    dog.armed(0.2)
    for _ in range(10):
        dog.rejected()
    assert dog.event(0.21, "RUN") == "rejected"
    assert dog.event(5.0, "STOPPED") == ""


def test_three_lapses_within_a_minute_latch():
    dog = Watchdog(TICK)
    events = []
    for start in (0.0, 20.0, 40.0):
        dog.armed(start)
        events.append(dog.event(start + 0.1, "RUN"))
    assert events == ["lapse", "lapse", "lapses"]
    dog.armed(41.0)  # cleared: counted anew
    assert dog.event(41.1, "RUN") == "lapse"
    dog = Watchdog(TICK)
    for start in (0.0, 31.0, 62.0, 93.0):  # over a longer time
        dog.armed(start)
        assert dog.event(start + 0.1, "RUN") == "lapse"


def test_a_second_without_a_command_latches_in_hold_too():
    dog = armed()
    assert dog.event(0.09, "RUN") == "lapse"
    assert dog.event(0.2, "BRAKE") == ""
    assert dog.event(1.0, "HOLD") == ""
    assert dog.event(1.001, "HOLD") == "silence"
    assert dog.event(2.0, "HOLD") == ""
    assert armed().event(1.5, "RUN") == "silence", "a late pass after a second is no lapse"


def test_arming_again_in_the_same_episode_goes_on():
    dog = armed()
    assert dog.event(0.09, "RUN") == "lapse"
    dog.armed(0.9)
    dog.commanded(0.95)
    assert dog.event(1.02, "RUN") == ""
    assert dog.event(1.04, "RUN") == "lapse"


def test_nothing_is_expected_before_arming_and_after_release():
    dog = Watchdog(TICK)
    assert dog.event(100.0, "HOLD") == ""
    dog.armed(100.0)
    dog.released()
    assert [dog.event(200.0, state) for state in ("RUN", "BRAKE", "HOLD", "STOPPED", "MOVE")] == [""] * 5


@pytest.mark.parametrize("state", ["MOVE", "STOPPED"])
def test_a_reset_or_a_stop_ends_what_was_expected(state: str):
    """After a lapse the actor gives the episode up and resets: the standing robot waits as long as it takes."""
    dog = armed()
    assert dog.event(0.09, "RUN") == "lapse"
    assert dog.event(0.5, state) == ""
    assert dog.event(5.0, "HOLD") == ""
