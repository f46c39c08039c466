"""When a controller counts as silent."""

from __future__ import annotations

import pytest

from serl_chunk_robot.safety.watchdog import Watchdog

TICK = 0.02
ARMED, NINE = ("armed", 0.0), [("rejected",)] * 9
Step = tuple[object, ...]  # a method and its moment, or a moment, a state and the event that is due then
LIVES: dict[str, list[Step]] = {
    "a lapse is due when arming is no longer valid": [ARMED, (0.08, "RUN", ""), (0.0801, "RUN", "lapse")],
    "and when the last command is": [ARMED, ("commanded", 0.07), (0.15, "RUN", ""), (0.1501, "RUN", "lapse")],
    "rejections before a command or arming do not count": [
        ARMED, *NINE, (0.05, "RUN", ""), ("commanded", 0.05), *NINE, (0.05, "RUN", ""), ("armed", 0.05), *NINE,
        (0.06, "RUN", "")],
    "rejections renew nothing": [ARMED, *NINE, (0.0801, "RUN", "lapse")],
    "ten in a row stop": [ARMED, *NINE, ("rejected",), (0.01, "RUN", "rejected"), (5.0, "STOPPED", "")],
    "three lapses within a minute latch, and are counted anew": [
        *(step for start, event in ((0.0, "lapse"), (20.0, "lapse"), (40.0, "lapses"), (41.0, "lapse"))
          for step in (("armed", start), (start + 0.1, "RUN", event)))],
    "over a longer time they do not": [
        *(step for start in (0.0, 31.0, 62.0, 93.0) for step in (("armed", start), (start + 0.1, "RUN", "lapse")))],
    "a second without a command latches in HOLD too": [
        ARMED, (0.09, "RUN", "lapse"), (0.2, "BRAKE", ""), (1.0, "HOLD", ""), (1.001, "HOLD", "silence"),
        (2.0, "HOLD", "")],
    "a late pass after a second is no lapse": [ARMED, (1.5, "RUN", "silence")],
    "arming again in the same episode goes on": [
        ARMED, (0.09, "RUN", "lapse"), ("armed", 0.9), ("commanded", 0.95), (1.02, "RUN", ""), (1.04, "RUN", "lapse")],
    "nothing is expected before arming": [(100.0, "HOLD", "")],
    "nothing is expected after release": [
        ARMED, ("released",), *((9.0, state, "") for state in ("RUN", "BRAKE", "HOLD", "STOPPED", "MOVE"))],
    # After a lapse the actor gives the episode up and resets: the standing robot waits as long as it takes.
    "a reset ends what was expected": [ARMED, (0.09, "RUN", "lapse"), (0.5, "MOVE", ""), (5.0, "HOLD", "")],
    "a stop ends what was expected": [ARMED, (0.09, "RUN", "lapse"), (0.5, "STOPPED", ""), (5.0, "HOLD", "")],
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_what_is_due_when(life: str):
    dog = Watchdog(TICK)
    for first, *more in LIVES[life]:
        if isinstance(first, str):
            getattr(dog, first)(*more)
        else:
            state, event = more
            assert dog.event(first, state) == event, (first, state)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tick", "validity"), [(0.02, 0.08), (0.1, 0.15), (1 / 15, 0.1)])
def test_a_command_is_valid_for_a_tick_and_a_half_but_no_less_than_80_ms(tick: float, validity: float):
    assert Watchdog(tick).validity == pytest.approx(validity)
