"""Faults that can be planted in the product, each with the tests that catch it.

They were written before the product refused them, by someone who had not seen its tests. To run any test with one:
`PYTHONPATH=tests/support/plant SERL_CHUNK_PLANT="go looks at the wrong stream" pytest ...`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serl_chunk.live.viewers import Viewers
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.commands import requests
from serl_chunk_robot.control.border import Border, checked
from serl_chunk_robot.control.loop import RobotLoop
from serl_chunk_robot.control.own_motion import OwnMotion, Yielding
from serl_chunk_robot.drivers.base import DriverError
from serl_chunk_robot.safety.table import Machine
from serl_chunk_robot.server import admission, front
from serl_chunk_robot.server.front import Front
from serl_chunk_robot.server.leases import Lease
from serl_chunk_robot.server.server import RobotServer
from serl_chunk_robot.wire import connection_guard

Plant = Callable[[pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """A fault, and the tests that catch it: FILE::TEST in `tests`, with a case where one of many is meant."""

    plant: Plant
    caught_by: tuple[str, ...]


def around(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Replace a method by `change(method, self, *arguments)`."""
    method = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, lambda self, *args, **more: change(method, self, *args, **more))

    return plant


def put(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def edited(owner: Any, name: str, *changes: tuple[str, str], **names: Any) -> Plant:
    """Replace parts of a function's text. `names`: what the new parts use and its module does not have."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(owner, name)
        text = textwrap.dedent(inspect.getsource(function))
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old!r} is not there once"
            text = text.replace(old, new)
        module, made = sys.modules[function.__module__], {}  # type: ignore[var-annotated]
        for each, value in names.items():
            patch.setattr(module, each, value, raising=False)
        exec(compile(f"from __future__ import annotations\n{text}", f"planted in {name}", "exec"), vars(module), made)
        patch.setattr(owner, name, made[name])

    return plant


def both(*plants: Plant) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant


def leads(condition: str, then: str) -> Plant:
    start = 'if event in ("standing", "done"):'
    return edited(Machine, "apply", (start, f'if {condition}:\n        then = "{then}"\n    {start}'))


class Unusable(Exception):
    """A reading that the border refuses."""


def read_unchecked(self: Border) -> Any:
    reading = self._guarded(self._driver.read)
    try:
        return checked(reading, self._spec)
    except DriverError as e:
        raise Unusable from e


def without_a_reading(method: Any, self: RobotLoop, *args: Any) -> None:
    try:
        method(self, *args)
    except Unusable:
        self._newest = None


def command_unguarded(self: Border, target: Any, dt: float) -> None:
    try:
        self._driver.command(target, dt)
    except Exception as e:
        raise DriverError(str(e)) from e


def one_time(folder: Path) -> tuple[list[tuple[int, ...]], float]:
    found = (folder / "allowed").stat()
    return [(found.st_mtime_ns,)], found.st_mtime


def any_reply(client: Any, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return client.request(op, **arguments)  # type: ignore[no-any-return]
    except RobotError as e:
        if op != "stop" or "no answer" in str(e):
            raise
        return {"state": "STOPPED"}


RUNS = 'self.motion.pressing and event not in ("standing", "effort")'
FORGETS = "self.motion.drop()"  # in RobotLoop._apply
DROPS = "self._motion = self.ends = None"  # in OwnMotion.drop
NOTES = "self._motion, self.ends, self._ended_at = motion, ends, None"  # in OwnMotion.begin
STOP = "stop = self.peers.stop(waiting) if request.stop"  # in Front._take
STANDS = "SetPoint.standing(self._at.position)"  # in RobotLoop.run_pass
CHECKS = "self.loop.check_generation("  # in RobotServer._check_generation
GOES = "self._client.request(op, **carries)"  # in ServedOperator._send
JOINTS = "~np.isin(np.arange(len(limits.low)), grippers)"  # in Yielding.__init__
LOADS = "np.stack([reading.effort / self._effort, apart])"  # in Yielding._loads
ROBOT = "serl_chunk_robot/"
CONSENT, FRONT, MAIN, SERVER, MOTIONS = (
    f"{ROBOT}{name}.py::test_"
    for name in ("server/test_consent", "server/test_front", "test_main", "server/test_server", "control/test_motions")
)
ENDS = f"{CONSENT}what_ends_a_go"
SHOWN = f"{CONSENT}what_lets_something_move_is_of_the_generation_that_was_shown"
PROCESS = f"{CONSENT}a_go_is_for_the_process_that_was_shown"
GAP = f"{ROBOT}control/test_loop.py::test_the_set_point_stands_where_it_is"
AT_ONCE = f"{FRONT}what_a_peer_sends_at_once_is_one_request_and_its_stop"
EVIL = f"{ROBOT}drivers/test_evil_driver.py::test_it_brakes"
BACK = f"{ROBOT}control/test_yielding.py::test_it_goes_back_along_its_way_until_it_is_relaxed"
KEYS = f"{SERVER}keys_admit_their_clients_and_make_operators"
ENDED = f"{MOTIONS}a_motion_that_was_ended_is_not_done_and_ends_no_day[hold-operator]"

FAULTS: dict[str, Fault] = {
    "a hold in BRAKE is forgotten when it stands": Fault(
        leads('(self.state, self.then, event) == (BRAKE, HOLD, "hold")', "HOLD"),
        (f"{ENDS}[hold in brake]",)),
    "a hold turns a braking towards STOPPED into HELD": Fault(
        edited(Machine, "apply", ("self.then == STOPPED or (", 'self.then == STOPPED and event != "hold" or (')),
        (f"{ENDS}[hold in a stop]",)),
    "a lease that ends while the robot stands leaves the consent": Fault(
        edited(RobotServer, "_lost", ("self._event(", 'self.loop.machine.state == "HOLD" or self._event(')),
        (PROCESS,)),
    "go compares the actor's name alone": Fault(
        edited(Lease, "check_shown", ("(name, process) != (self.holder, self.process)", "name != self.holder")),
        (PROCESS,)),
    "an operator's motion that met resistance ends in HOLD": Fault(
        leads('event == "effort"', "HOLD"), (f"{BACK}[jog-3.2-0.0-1]",)),
    "go looks at the wrong stream": Fault(
        edited(requests, "at_terminal", ("sys.stdin.isatty() and ", "")),
        (f"{MAIN}at_a_terminal_enter_lets_it_move_and_nothing_else_does",)),
    "the command line's clear carries the generation of the moment of Enter": Fault(
        edited(requests, "send_moving", ('=state["generation"]', '=generation or client.next_state()["generation"]')),
        (f"{MAIN}a_clear_is_of_the_state_that_was_printed",)),
    "proceed, profile, reboot and drive take any generation": Fault(
        edited(RobotServer, "_check_generation", (
            CHECKS, f'op in ("proceed", "profile", "reboot", "drive") or {CHECKS}')),
        tuple(f"{SHOWN}[older-{op}]" for op in ("proceed", "profile", "reboot", "drive"))),
    "a generation above the robot's is taken": Fault(
        edited(RobotLoop, "check_generation", ("generation != machine.", "generation < machine.")),
        (f"{SHOWN}[later-clear]",)),
    "the page's keys carry the generation of the actor's newest state": Fault(
        edited(Viewers, "press", ("seen, robot)", "seen, state.robot)")),
        ("live/test_live_server.py::test_a_page_requests_for_the_robot_that_the_browser_showed_at_the_press[go]",)),
    "a gap while it brakes goes on braking from the old velocity": Fault(
        edited(RobotLoop, "run_pass", (
            f"else {STANDS}", f'else {STANDS} if self.machine.state != "BRAKE" else self._at')),
        (f"{GAP}[BRAKE-gap-1.0]",)),
    "time within a pass is no gap": Fault(
        both(
            edited(RobotLoop, "_move", ("self._clock() - self._last_pass[1] > GAP", "False")),
            edited(RobotLoop, "run_pass", ("return self._status(", (
                "self._last_pass = now + self._clock() - moments[1], self._clock()\n    return self._status(")))),
        tuple(f"{GAP}[{state}-{call}-1.0]" for state in ("RUN", "MOVE") for call in ("read", "command"))),
    "a suspend is noticed only where the monotonic clock has a gap too": Fault(
        edited(RobotLoop, "run_pass", ("max(late, passed) > GAP", "min(late, passed) > GAP")),
        (f"{GAP}[RUN-suspend-60.0]",)),
    "the acceleration survives the gap": Fault(
        edited(RobotLoop, "run_pass", (
            STANDS, "SetPoint(self._at.position, 0 * self._at.velocity, self._at.acceleration)")),
        (f"{GAP}[BRAKE-gap-1.0]",)),
    "commands are not counted among a peer's requests": Fault(
        edited(Front, "_take", (STOP, f"if waiting.silent:\n        return self._send(waiting)\n    {STOP}")),
        (AT_ONCE,)),
    # The kernel's count of bytes weighs empty parts too, so that count goes as well.
    "empty parts weigh nothing": Fault(
        both(put(front, "MOST_PARTS", 10**9), put(connection_guard, "_received", lambda s: 0)),
        (f"{FRONT}a_message_of_too_many_parts_is_read_in_pieces",)),
    "only the folder's own change is a change of the keys": Fault(put(admission, "_look", one_time), (KEYS,)),
    "a stop behind a request of the same peer is dropped": Fault(
        edited(Front, "_take", (STOP, (
            f"peer = self.peers._peer(connection)\n    if peer.queue or peer.busy:\n        return\n    {STOP}"))),
        (AT_ONCE,)),
    "a reading that cannot be used counts as none": Fault(
        both(put(Border, "read", read_unchecked), around(RobotLoop, "_read", without_a_reading)),
        (f"{EVIL}[torque an arm]", f"{EVIL}[a joint less]")),
    "SystemExit is caught out of read, and not out of command": Fault(
        both(put(Border, "command", command_unguarded),
                        edited(RobotServer, "run", ("except BaseException", "except Exception"))),
        (f"{EVIL}[a command exits]",)),
    "a stop that was not confirmed is forgotten": Fault(
        edited(Front, "_take", (STOP, f"{STOP} and not self.loop.stalled")),
        ("system/test_process_robot.py::"
         "test_a_driver_that_hangs_is_noticed_and_the_server_can_be_ended[sleep]",)),
    "the console takes 'not confirmed' for a confirmation": Fault(
        edited(ServedOperator, "_send", (GOES, "any_reply(self._client, op, carries)"),
               any_reply=any_reply),
        ("robots/served/test_operator.py::"
         "test_what_the_robot_did_not_confirm_is_known_until_it_does[stop-not confirmed]",)),
    "every remembered place of the way is the same array": Fault(
        edited(Yielding, "_go_back", (
            "np.stack(self._trail)[::-1]", "np.stack([self._trail[-1]] * len(self._trail))")),
        (f"{BACK}[reset-3.2-0.0-1]",)),
    "the gripper goes back too": Fault(
        edited(Yielding, "__init__", (JOINTS, "np.ones(len(limits.low), bool)")),
        (f"{BACK}[reset-3.2-0.0-1]",)),
    "relaxed is judged with the sign": Fault(
        edited(Yielding, "_loads", (f"np.abs({LOADS})", LOADS)), (f"{BACK}[reset-3.2-0.5--1]",)),
    "a stop during letting go waits for its end": Fault(
        both(
            edited(RobotLoop, "_move", ("== MOVE:", "== MOVE or self.motion._motion is not None:")),
            edited(RobotLoop, "_apply", (FORGETS, f"if not ({RUNS}):\n            {FORGETS}")),
            edited(RobotLoop, "_goal_of_motion",
                   ('self._apply("effort"', 'self.motion.drop()\n        self._apply("effort"'),
                   ("if pressing:", "if pressing and self.machine.state == MOVE:"),
                   ("at.stands:", "at.stands and self.machine.state == MOVE:"))),
        (f"{ROBOT}control/test_yielding.py::test_a_person_ends_the_way_back",)),
    "a motion that was held counts as done": Fault(
        edited(RobotLoop, "_apply", (FORGETS, (
            "if (state, done.row.next) == (MOVE, BRAKE):\n            self.motion.done = self.motion.number\n"
            f"        {FORGETS}"))),
        (ENDED,)),
    "the pose before torque off is that of the set point": Fault(
        edited(OwnMotion, "apart", ("good.q - self.ends[1]", "0 * good.q")),
        (f"{MOTIONS}torque_goes_off_where_the_arms_are_measured_in_the_pose_alone[0.2]",)),
    "an end that was held stays pending": Fault(
        both(edited(OwnMotion, "drop", (DROPS, "self._motion = None")),
                    edited(OwnMotion, "begin", (NOTES, NOTES.replace("motion, ends,", "motion, ends or self.ends,")))),
        (ENDED,)),
    "Ctrl-C of end leaves the operation to the server": Fault(
        edited(requests, "_ended", ('state = client.request("hold")', "pass")),
        (f"{MAIN}what_comes_between_leaves_torque_on[ctrl-c]",)),
    "a doubtful sample is published and used by motions": Fault(
        edited(RobotLoop, "_read", ("if believed:", "self._reading = reading\n    if believed:")),
        (f"{MOTIONS}a_doubtful_sample_is_neither_published_nor_given_to_a_motion",)),
    "requests dated in the future are taken": Fault(
        edited(RobotServer, "_answer", ("not -OLD <= age <= OLD", "not age <= OLD")),
        (f"{SERVER}requests_of_another_time_do_not_move_the_robot[-60]",)),
    "an operator's key that is demoted while connected stays an operator": Fault(
        edited(RobotServer, "_answer", ("client.role == OPERATOR and most != OPERATOR", "False")),
        (KEYS,)),
}  # fmt: skip
