"""The table of states and events, and the machine that follows it, against rules that were written apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk_robot.safety.table import BY_EVENT, EVENTS, ROLES, STATES, STOPS, TABLE, Machine

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
    """The table as the documents have it, a line for each event."""
    ends = {"standing": "HOLD, HELD or STOPPED, as the event that braked says",
            "done": "HOLD or HELD, as the event that moved it says"}  # fmt: skip
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
