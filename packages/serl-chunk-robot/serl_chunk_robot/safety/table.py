"""What moves and stops the robot, and why: one table of states and events, which the server obeys and the docs show.

STOPPED   latched; nothing is commanded but the standing set point. After every start, and until an operator clears it.
HELD      torque on, standing: an operator held or cleared it. No controller moves it before an operator's `go`.
HOLD      torque on, standing, and an operator has agreed that the controller moves it.
RUN       a controller streams commands.
MOVE      the server moves the robot itself: a reset, parking, a jog.
BRAKE     the set point decelerates under the profile's jerk limit and then stands: in HOLD, HELD, or STOPPED (latched).

A *controller* holds the one lease. An *operator* is a role of a key; no program has it. *Any* admitted client may
stop. *Server* events are its own: the watchdog, the checks of measured state, the driver's faults.
"""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple, Tuple

STOPPED, HELD, HOLD, RUN, MOVE, BRAKE = STATES = ("STOPPED", "HELD", "HOLD", "RUN", "MOVE", "BRAKE")
ANY, CONTROLLER, OPERATOR, SERVER = ROLES = ("any", "controller", "operator", "server")
STANDING = (HELD, HOLD)  # with torque, and not latched


class Row(NamedTuple):
    """One transition. `then`: where BRAKE or MOVE ends once the set point stands; empty: where it was to end before.

    `word` is what consoles and records say of it; an empty one keeps what was said. Rows that `drop` raise the
    generation: every command, request and motion of an older one is dropped.
    """

    state: str
    event: str
    who: str
    next: str
    word: str
    then: str = ""
    drops: bool = True


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
# Motions that an operator requests. They end in HELD: the go was given for another pose of the robot.
OWN_MOTIONS: Dict[str, str] = {"park": "parking for {by}", "jog": "jogged by {by}", "end": "parking for {by}, who ends"}


def _rows() -> Iterator[Row]:
    yield Row(STOPPED, "clear", OPERATOR, HELD, "cleared by {by}")
    yield Row(HELD, "go", OPERATOR, HOLD, "{by} lets {detail} move it")
    yield Row(HOLD, "arm", CONTROLLER, RUN, "armed by {by}")
    yield Row(HOLD, "reset", CONTROLLER, MOVE, "resetting for {by}", HOLD)
    for state in STANDING:
        for event, word in OWN_MOTIONS.items():
            yield Row(state, event, OPERATOR, MOVE, word, HELD)
        yield Row(state, "torque_off", OPERATOR, STOPPED, "torque off by {by}")
        yield Row(state, "hold", OPERATOR, HELD, "held by {by}")
        yield Row(state, "release", CONTROLLER, state, "", drops=False)  # else an actor could keep a go from counting
    yield Row(STOPPED, "hold", OPERATOR, STOPPED, "")
    yield Row(HOLD, "lost", SERVER, HELD, "held by the server: the controller is gone")
    yield Row(HOLD, "expired", SERVER, HELD, "held by the server: nothing moved it for {detail} after go")
    yield Row(RUN, "release", CONTROLLER, BRAKE, "released by {by}", HOLD)
    yield Row(RUN, "lapse", SERVER, BRAKE, "no valid command in time", HOLD)
    for state, then in ((RUN, HOLD), (MOVE, "")):
        yield Row(state, "moved", SERVER, BRAKE, "the controller came back by another connection", then)
    yield Row(MOVE, "done", SERVER, HOLD, "the motion is done", drops=False)  # or HELD, as the row that began it says
    yield Row(MOVE, "effort", SERVER, BRAKE, "the motion met resistance: {detail}")
    for state in (RUN, MOVE, BRAKE):
        yield Row(state, "hold", OPERATOR, BRAKE, "held by {by}", HELD)
        yield Row(state, "lost", SERVER, BRAKE, "held by the server: the controller is gone", HELD)
    yield Row(BRAKE, "release", CONTROLLER, BRAKE, "")
    yield Row(BRAKE, "standing", SERVER, HOLD, "", drops=False)  # or HELD or STOPPED, as the row that braked says
    for event, (who, word) in STOPS.items():
        for state in STATES:
            moving = state in (RUN, MOVE, BRAKE)
            yield Row(state, event, who, BRAKE if moving else STOPPED, word, STOPPED if moving else "")
    for event, word in RUN_STOPS.items():
        # A lapse has braked to HOLD by the time that it is known to be the third, or a long one.
        for state in (RUN, BRAKE, HOLD):
            moving = state != HOLD
            yield Row(state, event, SERVER, BRAKE if moving else STOPPED, word, STOPPED if moving else "")


TABLE: Tuple[Row, ...] = tuple(_rows())
BY_EVENT: Dict[Tuple[str, str], Row] = {(row.state, row.event): row for row in TABLE}
EVENTS: Tuple[str, ...] = tuple(dict.fromkeys(row.event for row in TABLE))


class Transition(NamedTuple):
    """What an event did. `row` is None where the table has none for it: then `word` says why it was refused."""

    row: object  # Row or None
    word: str


class Machine:
    """The state of one robot: the table, and the generation of what was requested. Events come from one thread.

    `needs_go`: False: HELD is HOLD, so that a clear alone lets a controller move the robot. For simulated robots.
    """

    def __init__(self, needs_go: bool = True) -> None:
        self.state, self.then = STOPPED, ""  # then: where BRAKE or MOVE ends
        self.generation = 0
        self.word = "started; an operator clears it"  # why the state is what it is
        self.held_by = ""  # who entered HELD last, or enters it once the robot stands
        self.needs_go = needs_go

    @property
    def moving(self) -> bool:
        return self.state in (RUN, MOVE, BRAKE)

    @property
    def standing(self) -> bool:
        return self.state in STANDING

    def apply(self, event: str, role: str = SERVER, *, by: str = "the server", detail: str = "") -> Transition:
        """Apply an event of a client with `role`. The state changes only where the table says so."""
        row = BY_EVENT.get((self.state, event))
        if row is None:
            return Transition(None, f"{event} is not possible in {self.state} ({self.word})")
        if not (row.who in (ANY, role) or (row.who == CONTROLLER and role == OPERATOR)):
            return Transition(None, f"{event} is for the {row.who}; {by} is {role}")
        word = row.word.format(by=by, detail=detail) or self.word
        state, then = row.next, row.then or (self.then if row.next == BRAKE else "")
        if event in ("standing", "done"):
            state, then = self.then or HOLD, ""
        elif self.state == BRAKE and (self.then == STOPPED or (event == "lost" and self.then == HELD)):
            word, then = self.word, self.then  # what latched or held first stays the reason
        elif state == self.state == STOPPED:
            word = self.word
        elif HELD in (state, then) and event != "release":
            self.held_by = by
        self.state, self.then, self.word = self._mapped(state), self._mapped(then), word
        self.generation += row.drops
        return Transition(row, word)

    def _mapped(self, state: str) -> str:
        return HOLD if state == HELD and not self.needs_go else state

    def fail(self, word: str) -> None:
        """Latch because the server itself failed. No event follows."""
        self.state, self.then, self.word = STOPPED, "", word
        self.generation += 1
