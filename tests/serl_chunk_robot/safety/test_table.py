"""The table of states and events, against rules that were written apart; which samples are believed; silence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from robot_limits import HIGH, HOME, LOW, J
from robot_model import Samples
from robot_world import MECHANISM, SPEC

from serl_chunk_robot.safety.measured import Measured, Sample
from serl_chunk_robot.safety.table import BY_EVENT, EVENTS, ROLES, STATES, STOPS, TABLE, Machine
from serl_chunk_robot.safety.watchdog import Watchdog

# Written from the description of the server, not from the table.
# event -> who may; from which states; into which; whether commands of before are dropped
LATCHING = ("stop", "fault", "doubtful", "overspeed", "clock")
LATCHING_IN_RUN = ("rejected", "lapses", "silence")
BY_CONTROLLER, BY_OPERATOR, BY_SERVER = {"operator", "controller"}, {"operator"}, {"server"}
STANDS, ANYWHERE = ("HELD", "HOLD"), ("STOPPED", "HELD", "HOLD", "RUN", "MOVE", "BRAKE")
RULES: dict[str, tuple[set[str], dict[str, str], bool]] = {
    "clear": (BY_OPERATOR, {"STOPPED": "HELD"}, True),
    "go": (BY_OPERATOR, {"HELD": "HOLD"}, True),
    "torque_off": (BY_OPERATOR, dict.fromkeys(STANDS, "STOPPED"), True),
    **{event: (BY_OPERATOR, dict.fromkeys(STANDS, "MOVE"), True) for event in ("park", "jog", "end")},
    "arm": (BY_CONTROLLER, {"HOLD": "RUN"}, True),
    "reset": (BY_CONTROLLER, {"HOLD": "MOVE"}, True),
    "release": (BY_CONTROLLER, {"RUN": "BRAKE", "BRAKE": "BRAKE", "HOLD": "HOLD", "HELD": "HELD"}, True),
    "hold": (
        BY_OPERATOR,
        {s: "BRAKE" if s in ("RUN", "MOVE", "BRAKE") else "STOPPED" if s == "STOPPED" else "HELD" for s in ANYWHERE},
        True,
    ),
    "lapse": (BY_SERVER, {"RUN": "BRAKE"}, True),
    "moved": (BY_SERVER, {"RUN": "BRAKE", "MOVE": "BRAKE"}, True),
    "lost": (BY_SERVER, {"RUN": "BRAKE", "MOVE": "BRAKE", "BRAKE": "BRAKE", "HOLD": "HELD"}, True),
    "expired": (BY_SERVER, {"HOLD": "HELD"}, True),
    "effort": (BY_SERVER, {"MOVE": "BRAKE"}, True),
    "done": (BY_SERVER, {"MOVE": "HOLD"}, False),
}
for name in LATCHING:
    moves = {s: "BRAKE" if s in ("RUN", "MOVE", "BRAKE") else "STOPPED" for s in ANYWHERE}
    RULES[name] = (set(ROLES) if name == "stop" else {"server"}, moves, True)
for name in LATCHING_IN_RUN:
    RULES[name] = ({"server"}, {"HOLD": "STOPPED", "RUN": "BRAKE", "BRAKE": "BRAKE"}, True)


class Model:
    """The same machine, from RULES: whether it latches, and else whether an operator has agreed that it is moved."""

    def __init__(self) -> None:
        self.state, self.latches, self.generation = "STOPPED", True, 0
        self.agreed = False

    def apply(self, event: str, role: str) -> bool:
        if event == "standing":
            if self.state != "BRAKE" or role != "server":
                return False
            self.state = "STOPPED" if self.latches else "HOLD" if self.agreed else "HELD"
            return True
        who, moves, drops = RULES[event]
        if self.state not in moves or role not in who:
            return False
        stops = event in LATCHING or event in LATCHING_IN_RUN or event == "torque_off"
        self.latches = stops or (self.state in ("BRAKE", "STOPPED") and event != "clear" and self.latches)
        if stops or event in ("clear", "hold", "lost", "expired", "park", "jog", "end"):
            self.agreed = False
        elif event == "go":
            self.agreed = True
        stood, self.state = self.state in STANDS, moves[self.state]
        if event == "done" and not self.agreed:
            self.state = "HELD"
        self.generation += drops and not (stood and event == "release")
        return True


def test_every_state_and_event_has_at_most_one_row():
    assert max(Counter((row.state, row.event) for row in TABLE).values()) == 1
    assert len(BY_EVENT) == len(TABLE)
    assert {row.state for row in TABLE} | {row.next for row in TABLE} == set(STATES)
    assert {row.who for row in TABLE} <= set(ROLES)
    assert all(row.next in ("BRAKE", "MOVE") for row in TABLE if row.then)
    assert set(EVENTS) == set(RULES) | {"standing"}
    assert set(STOPS) == set(LATCHING)
    assert all(BY_EVENT[state, event].drops for state in STATES for event in STOPS), "stops are there in every state"


def test_only_an_operator_leaves_stopped():
    for event in EVENTS:
        for role in ROLES:
            machine = Machine()
            machine.apply(event, role)
            assert machine.state != "HOLD"
            assert (machine.state != "STOPPED") == (event == "clear" and role == "operator")


DAY = [("clear", "operator"), ("go", "operator"), ("arm", "controller"), ("hold", "operator"), ("fault", "server")]


@settings(max_examples=examples(200))
@given(
    begins=st.integers(0, len(DAY)),  # of a day: few examples leave STOPPED by chance
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(ROLES)), max_size=60),
)
def test_the_machine_follows_rules_that_were_written_apart(begins: int, events: list[tuple[str, str]]):
    machine, model = Machine(), Model()
    for event, role in DAY[:begins] + events:
        before, word = machine.generation, machine.word
        latched = model.latches
        answer = machine.apply(event, role, by="K", detail=event)
        done = model.apply(event, role)
        assert bool(answer.row) == done, (event, role, machine.state)
        assert (machine.state, machine.generation) == (model.state, model.generation)
        assert machine.moving == (machine.state in ("RUN", "MOVE", "BRAKE"))
        assert machine.generation >= before
        if not done:
            assert answer.word
            assert machine.word == word
        elif event not in ("done", "standing", "release"):
            assert machine.generation == before + 1
        if latched and model.latches:
            assert machine.word == word, "what latched first stays the reason"


def markdown() -> str:
    ends = {
        "standing": "HOLD, HELD or STOPPED, as the event that braked says",
        "done": "HOLD or HELD, as the event that moved it says",
    }
    lines = ["| event | who | valid in -> leads to | word |", "|---|---|---|---|"]
    for event in EVENTS:
        rows = [row for row in TABLE if row.event == event]
        ways: dict[str, list[str]] = {}
        for row in rows:
            then = row.then or ("as before" if row.next == "BRAKE" else "")
            next_ = ends.get(event, f"{row.next}, then {then}" if then else row.next)
            ways.setdefault(next_ + ("" if row.drops else " *"), []).append(row.state)
        cell = "; ".join(f"{', '.join(states)} -> {next_}" for next_, states in ways.items())
        word = next((row.word for row in rows if row.word), "-")
        lines.append(f"| {event} | {rows[0].who} | {cell} | {word} |")
    return "\n".join(lines) + "\n"


def test_the_document_shows_this_table():
    page = Path(__file__).resolve().parents[3] / "docs" / "robot_server.md"
    shown = page.read_text().partition("<!-- table -->\n")[2].partition("<!-- /table -->")[0]
    assert shown.strip() == markdown().strip()


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


V, DT = 3.2, 0.005
ZERO = np.zeros(J)


def sample(q: np.ndarray, stamp: float) -> Sample:
    """A reading whose efforts differ each time, as a real sensor's."""
    return Sample(np.array(q, np.float64), ZERO.copy(), np.full(J, stamp), stamp)


def judge(low: np.ndarray = LOW, high: np.ndarray = HIGH) -> Measured:
    return Measured(low, high, np.full(J, V))


def begun() -> Measured:
    measured = judge()
    assert measured.judge(sample(HOME, 0.0), 0.0, HOME)
    return measured


@pytest.mark.parametrize("name", ["q", "dq", "effort"])
@pytest.mark.parametrize("values", [
    np.full(J, np.nan), np.full(J, np.inf), np.zeros(J - 1), np.zeros((1, J)), np.zeros(J, int), np.full(J, None),
])  # fmt: skip
def test_what_is_no_finite_vector_is_doubtful(name: str, values: np.ndarray):
    measured = begun()
    assert not measured.judge(sample(HOME, DT)._replace(**{name: values}), DT, HOME)
    assert name in measured.reason
    assert measured.good is not None
    assert measured.good.stamp == 0.0
    assert not begun().judge(Sample(HOME, ZERO, ZERO, np.nan), DT, HOME), "a stamp that is no number"
    for beyond in (LOW - 1e-3, HIGH + 1e-3):
        measured = begun()
        assert not measured.judge(sample(np.where(np.arange(J) == 8, beyond, HOME), DT), DT, HOME)
        assert "joint 8 reads" in measured.reason, "what the mechanism cannot reach"


# Passes since the sample before, its age, its place as a share of what a joint may move, and where the robot is led.
SAMPLES = st.lists(st.tuples(
    st.sampled_from([1, 1, 1, 2, 19, 21]), st.sampled_from([0.0, 0.0, 0.0, 0.09, 0.11, -0.09, -0.11]),
    st.sampled_from(["moves", "moves", "moves", "freezes", "repeats", "-pi", "out"]),
    st.sampled_from([0.0, 0.5, 1.4, 1.6, 40.0]), st.sampled_from([0.0, 0.0, 0.015, 0.03]),
), max_size=60)  # fmt: skip


@given(SAMPLES, st.sampled_from([0.0, 10.0]))
def test_samples_are_believed_as_a_model_that_was_written_apart_says(samples, wide: float):
    """HIL-SERL's getstate repeats for ever without a stamp; Interbotix's node publishes -pi while reads fail."""
    low, high = MECHANISM[0] - wide, MECHANISM[1] + wide
    measured, model = Measured(low, high, np.array(SPEC.velocity)), Samples(low, high)
    now, target, last, good = 0.0, HOME.copy(), sample(HOME, 0.0), None
    for k, (passes, age, kind, share, led) in enumerate(samples):
        now, target = now + passes * DT, target + led
        q = (HOME if good is None else good.q) + share * V * DT * passes * (np.arange(J) == k % J)
        q = {"-pi": np.full(J, -np.pi), "out": HIGH + 20.0}.get(kind, q)
        fresh = sample(q, now - age)
        last = {"freezes": last._replace(stamp=now - age), "repeats": last}.get(kind, fresh)
        believed = model.judge(last, now, target)
        assert measured.judge(last, now, target) == believed, measured.reason
        good = last if believed else good
        assert measured.good is good or measured.good == good
        assert measured.lost == (model.doubts >= 2)


def test_a_stamp_that_stands_still_hides_no_jump_and_is_stale_in_the_end():
    measured = begun()
    assert not measured.judge(sample(HOME + 0.5, 0.0)._replace(effort=ZERO), DT, HOME)
    assert measured.judge(sample(HOME + 0.01, 0.0)._replace(effort=ZERO), DT, HOME), "one arm was read anew"
    for k in range(2, 30):
        believed = measured.judge(sample(HOME + 0.01 + 1e-4 * k, 0.0), k * DT, HOME)
        assert believed == (k * DT <= 0.1)


def test_it_begins_anew_after_forget():
    measured, elsewhere = begun(), HOME + 0.9 * (HIGH - HOME)
    for k in range(1, 400):
        assert not measured.judge(sample(elsewhere, k * DT), k * DT, HOME)
    assert measured.lost
    measured.forget()
    assert measured.good is None
    assert not measured.lost
    assert measured.judge(sample(elsewhere, 2.0), 2.0, HOME)
    assert measured.reason == ""


@given(seed=st.integers(0, 2**32 - 1))
def test_an_arm_that_follows_its_limits_is_always_believed(seed: int):
    rng = np.random.default_rng(seed)
    measured, q, now = judge(), HOME.copy(), 0.0
    for _ in range(200):
        q = np.clip(q + rng.uniform(-V, V, J) * DT, LOW, HIGH)
        now += DT
        assert measured.judge(sample(q, now - rng.uniform(0, 0.5 * DT)), now, q), measured.reason
