"""What stops the robot, and why: one table of states and events, which the server obeys and the documents show.

STOPPED   latched; nothing is commanded but the standing set point. After every start, and until an operator clears it.
HOLD      torque on, standing, for as long as it takes.
RUN       a controller streams commands.
MOVE      the server moves the robot itself: a reset, parking, a jog.
BRAKE     the set point decelerates under the profile's jerk limit and then stands: in HOLD, or in STOPPED (latched).

A *controller* holds the one lease. An *operator* is a role of a key; no program has it. *Any* admitted client may
stop. *Server* events are its own: the watchdog, the checks of measured state, the driver's faults.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Tuple

STOPPED, HOLD, RUN, MOVE, BRAKE = STATES = ("STOPPED", "HOLD", "RUN", "MOVE", "BRAKE")
ANY, CONTROLLER, OPERATOR, SERVER = ROLES = ("any", "controller", "operator", "server")


class Row(NamedTuple):
    """One transition. `then`: where BRAKE ends once the set point stands; empty elsewhere.

    `word` is what consoles and records say of it. Rows that `drop` raise the generation: every command and motion of
    an older one is dropped at the last line before the driver.
    """

    state: str
    event: str
    who: str
    next: str
    word: str
    then: str = ""
    drops: bool = False


# What latches: event -> (who, word). From a moving state through BRAKE, from a standing one at once.
STOPS: Dict[str, Tuple[str, str]] = {
    "stop": (ANY, "stopped by {by}"),
    "fault": (SERVER, "the driver reports a fault: {detail}"),
    "doubtful": (SERVER, "the measured state cannot be trusted: {detail}"),
    "overspeed": (SERVER, "a joint moves faster than its limit: {detail}"),
    "clock": (SERVER, "the loop stood still: {detail}"),
}
# What latches while a controller is expected to command, event -> word.
RUN_STOPS: Dict[str, str] = {
    "rejected": "ten commands in a row were rejected: {detail}",
    "lapses": "three lapses within a minute",
    "silence": "no command for a second",
}


def _rows() -> Iterator[Row]:
    yield Row(STOPPED, "clear", OPERATOR, HOLD, "cleared by {by}", drops=True)
    yield Row(HOLD, "arm", CONTROLLER, RUN, "armed by {by}")
    yield Row(HOLD, "reset", CONTROLLER, MOVE, "resetting for {by}")
    for event, word in (("park", "parking for {by}"), ("jog", "jogged by {by}"), ("scene", "moved by {by}")):
        yield Row(HOLD, event, OPERATOR, MOVE, word)
    yield Row(HOLD, "torque_off", OPERATOR, STOPPED, "torque off by {by}", drops=True)
    yield Row(RUN, "release", CONTROLLER, BRAKE, "released by {by}", HOLD)
    yield Row(RUN, "lapse", SERVER, BRAKE, "no valid command in time", HOLD, drops=True)
    yield Row(MOVE, "done", SERVER, HOLD, "the motion is done")
    yield Row(MOVE, "effort", SERVER, BRAKE, "the motion met resistance: {detail}", HOLD, drops=True)
    for state in (RUN, MOVE):
        yield Row(state, "hold", OPERATOR, BRAKE, "held by {by}", HOLD, drops=True)
        yield Row(state, "lost", SERVER, BRAKE, "the controller is gone", HOLD, drops=True)
    yield Row(BRAKE, "standing", SERVER, HOLD, "")  # or STOPPED, as the row that braked says
    for event, (who, word) in STOPS.items():
        for state in STATES:
            moving = state in (RUN, MOVE, BRAKE)
            yield Row(state, event, who, BRAKE if moving else STOPPED, word, STOPPED if moving else "", drops=True)
    for event, word in RUN_STOPS.items():
        # A lapse has braked to HOLD by the time that it is known to be the third, or a long one.
        for state in (RUN, BRAKE, HOLD):
            moving = state != HOLD
            yield Row(state, event, SERVER, BRAKE if moving else STOPPED, word, STOPPED if moving else "", drops=True)


TABLE: Tuple[Row, ...] = tuple(_rows())
BY_EVENT: Dict[Tuple[str, str], Row] = {(row.state, row.event): row for row in TABLE}
EVENTS: Tuple[str, ...] = tuple(dict.fromkeys(row.event for row in TABLE))


class Transition(NamedTuple):
    """What an event did. `row` is None where the table has none for it: then `word` says why it was refused."""

    row: object  # Row or None
    word: str


class Machine:
    """The state of one robot: the table, and the generation that stops raise. Events come from one thread."""

    def __init__(self) -> None:
        self.state, self.then = STOPPED, ""
        self.generation = 0
        self.word = "started; an operator clears it"  # why the state is what it is

    @property
    def moving(self) -> bool:
        return self.state in (RUN, MOVE, BRAKE)

    def apply(self, event: str, role: str = SERVER, *, by: str = "the server", detail: str = "") -> Transition:
        """Apply an event of a client with `role`. The state changes only where the table says so."""
        row = BY_EVENT.get((self.state, event))
        if row is None:
            return Transition(None, f"{event} is not possible in {self.state} ({self.word})")
        if not (row.who in (ANY, role) or (row.who == CONTROLLER and role == OPERATOR)):
            return Transition(None, f"{event} is for the {row.who}; {by} is {role}")
        word = row.word.format(by=by, detail=detail)
        if event == "standing":
            self.state, self.then = self.then or HOLD, ""
            return Transition(row, self.word)
        then = row.then
        if row.next == self.state == STOPPED or (row.next == BRAKE and self.then == STOPPED):
            word, then = self.word, self.then  # what latched first stays the reason
        self.state, self.then, self.word = row.next, then, word
        self.generation += row.drops
        return Transition(row, word)

    def fail(self, word: str) -> None:
        """Latch because the server itself failed. No event follows."""
        self.state, self.then, self.word = STOPPED, "", word
        self.generation += 1


def markdown() -> str:
    """The table for the documents."""
    lines: List[str] = ["| state | event | who | next | word | older commands |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        after = f"{row.next}, then {row.then}" if row.then else row.next
        if row.event == "standing":
            after = "HOLD or STOPPED, as the row that braked says"
        lines.append("| " + " | ".join((row.state, row.event, row.who, after, row.word or "-",
                                         "dropped" if row.drops else "kept")) + " |")  # fmt: skip
    return "\n".join(lines) + "\n"
