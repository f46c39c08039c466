"""`robot check`: moves each joint by 2 degrees and back, provokes each stop, and reports what is wrong and what to do.

Every motion is the server's jog, or a stream of commands under the profile first_day: the gate has the last word.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.commands import diagnosis
from serl_chunk_robot.commands.diagnosis import FAIL, OK, SKIPPED, Finding, Joints, Trace, judge_rest, remedy_of
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import HAIR, RobotFile, checked, load_driver
from serl_chunk_robot.robot_file.profiles import CAUTIOUS
from serl_chunk_robot.safety.table import HELD, HOLD, STANDING, STOPPED

ANGLE = float(np.radians(2))
TRAVEL = 0.3  # of a gripper's range
OPEN = 0.95
REST = 0.2  # s at rest that are averaged
WATCHED = 1.0  # s at rest that the rates are measured over
PATIENCE = 60.0  # s for a motion; and for an operator to clear the robot
STREAM = 0.4  # s of commands before a stop is provoked
WITHIN = 2.5  # s for a stop
TRIES = 10  # commands that are rejected


class _EndedError(Exception):
    """The robot stopped, or does what it was not asked for: the check ends."""


class Stop(NamedTuple):
    """A stop to provoke. `leads_to`: the state; an operator clears the robot and says go before the next one."""

    name: str
    word: str  # a part of the server's
    leads_to: str
    provoke: Callable[[RobotCheck, RobotClient], object]

    def is_in(self, state: Dict[str, Any]) -> bool:
        return state["state"] == self.leads_to and self.word in state["word"]


class RobotCheck:
    """One run of the check on a served robot that was cleared.

    Args:
        operator: client with the operator's role.
        controller: makes another client, with the controller's.
        file: of the served robot.
        show: prints a line.
    """

    def __init__(
        self, operator: RobotClient, controller: Callable[[], RobotClient], file: RobotFile,
        show: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.operator, self._controller, self._file, self._show = operator, controller, file, show
        self.findings: List[Finding] = []
        self._seen: List[Dict[str, Any]] = []  # states since the check began
        self._spec: Dict[str, Any] = {}

    def run(self) -> List[Finding]:
        """Run every part that the robot's state allows. Raises RobotError where no server answers."""
        hello, before = self.operator.hello(), CAUTIOUS  # profile before the check
        self._spec = hello["spec"]
        self._joints = Joints.of(self._spec)
        try:
            self._check_file(hello)
            self._check_state()
            before = self._seen[-1]["profile"]
            if before != CAUTIOUS:
                self._request("profile", name=CAUTIOUS)
                self._show(f"profile {CAUTIOUS}, until the end of the check; it was {before}")
            for joint in range(len(self._joints.low)):
                (self._check_gripper if joint in self._joints.grippers else self._check_joint)(joint)
            self._add(diagnosis.judge_effort(self._seen))
            if any(f.status == FAIL for f in self.findings if f.name.startswith(("joint", "gripper"))):
                self._add(Finding("stops", SKIPPED, "not tried: joints do not answer as they are commanded"))
            else:
                for stop in STOPS:
                    self._check_stop(stop)
        except _EndedError:
            pass
        finally:
            if before != CAUTIOUS:
                try:
                    self._request("profile", name=before)
                except RobotError as e:
                    self._show(f"the profile stays {CAUTIOUS}: {e}")
        return self.findings

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._show(str(finding))

    def _end(self, name: str, said: str, remedy: str) -> _EndedError:
        self._add(Finding(name, FAIL, said, remedy))
        return _EndedError()

    # Before anything moves.

    def _check_file(self, hello: Dict[str, Any]) -> None:
        served, ours = hello["profiles"], {name: p.digest for name, p in self._file.profiles.items()}
        differing = sorted(name for name in {*served, *ours} if served.get(name) != ours.get(name))
        if hello["robot"] and differing:
            raise self._end("file", f"the server has other limits than {self._file.path} ({', '.join(differing)})",
                            "Start the server again, with this file.")  # fmt: skip
        try:
            checked(self._file, load_driver(self._file).spec())
        except ConfigError as e:
            raise self._end("file", str(e), "Correct the robot's file, and start the server again.") from e
        self._add(Finding("file", OK, f"the server has the limits of {self._file.path}"))

    def _check_state(self) -> None:
        states = self._watch(WATCHED)
        last = states[-1]
        if last["state"] not in STANDING:
            raise self._stopped(last)
        rest = Trace.of(states)
        self._add(Finding("robot", OK, f"{last['state']}: {last['word']}"))
        standing = judge_rest(rest, self._joints)
        self._add(standing)
        for finding in diagnosis.judge_times(states, self._file.rate or self._spec["rate"], self._spec["tick"]):
            self._add(finding)
        self._check_limits(rest.q[-1])
        if standing.status == FAIL:
            raise _EndedError

    def _check_limits(self, q: np.ndarray) -> None:
        """Whether each profile has the robot inside, with room for the joints to move."""
        for name, profile in self._file.profiles.items():
            low, high = profile.limits.low, profile.limits.high
            outside = np.maximum(low - q, q - high)
            worst = int(np.argmax(outside))
            where = f"joint {self._joints.name(worst)} is at {q[worst]:.3f}, and may be from {low[worst]:g} to "
            if outside[worst] > HAIR:
                self._add(Finding(f"limits {name}", FAIL, f"{where}{high[worst]:g}",
                                  "Widen low and high of this profile, or move the arm inside by hand."))  # fmt: skip
                continue
            narrow = [int(j) for j in np.flatnonzero(high - low < 2 * ANGLE) if j not in self._joints.grippers]
            if narrow:
                self._add(Finding(f"limits {name}", FAIL, f"joints {narrow} have less than 4 degrees between low and "
                                  "high", "Widen low and high: `robot teach` measures them."))  # fmt: skip
        if not any(f.name.startswith("limits") for f in self.findings):
            self._add(Finding("limits", OK, f"the robot is inside those of {', '.join(self._file.profiles)}"))

    def _stopped(self, state: Dict[str, Any]) -> _EndedError:
        """The end of a check whose robot stands in another state than it is to."""
        causes = "; ".join(state["causes"].values())
        said = f"{state['state']}: {state['word']}" + (f"; now {causes}" if causes else "")
        remedy = remedy_of(causes or state["word"])
        if state["set_point"] is not None and state["q"] is not None:
            apart = judge_rest(Trace.of([state]), self._joints)
            if apart.status == FAIL:
                said, remedy = f"{said}; {apart.said}", apart.remedy
        return self._end("robot", said, remedy)

    # Motions.

    def _request(self, op: str, **arguments: Any) -> Dict[str, Any]:
        """Send what lets something move, of the state that is read now. Raises RobotError."""
        return self.operator.request(op, generation=self._next()["generation"], **arguments)

    def _watch(self, seconds: float) -> List[Dict[str, Any]]:
        """States of so many seconds of the server's clock."""
        states = [self._next()]
        while states[-1]["moment"] - states[0]["moment"] < seconds:
            states.append(self._next())
        return states

    def _next(self) -> Dict[str, Any]:
        state = self.operator.next_state()
        if state["set_point"] is not None and state["q"] is not None:
            self._seen.append(state)
        return state

    def _jog(self, joint: int, angle: float) -> List[Dict[str, Any]]:
        """Move one joint and wait until it stands; returns the states of the way. Raises _EndedError."""
        try:
            motion = self._request("jog", joint=joint, angle=float(angle))["motion"]
        except RobotError as e:
            raise self._end(f"joint {joint}", str(e), "Move the arm away from its limits, or widen them.") from e
        states = [self._next()]
        while states[-1]["state"] == "MOVE" and states[-1]["moment"] - states[0]["moment"] < PATIENCE:
            states.append(self._next())
        if states[-1]["done"] != motion:
            raise self._stopped(states[-1])
        return states

    def _answer(self, joint: int, angle: float) -> Finding:
        """Jog a joint, and judge how it answered. It stays there."""
        before = Trace.of(self._watch(REST))
        moving = self._jog(joint, angle)
        settling, after = self._watch(REST), self._watch(REST)
        return diagnosis.judge_answer(joint, before, Trace.of([*moving, *settling]), Trace.of(after), self._joints)

    def _check_joint(self, joint: int) -> None:
        self._show(f"moving joint {self._joints.name(joint)} by 2 degrees and back")
        angle = self._angle(joint, self._seen[-1]["set_point"])
        there = self._answer(joint, angle)
        back = self._answer(joint, -angle)
        self._add(back if there.status == OK else there)

    def _angle(self, joint: int, at: np.ndarray) -> float:
        return ANGLE if at[joint] + ANGLE < self._file.profiles[CAUTIOUS].limits.high[joint] else -ANGLE

    def _check_gripper(self, joint: int) -> None:
        self._show(f"closing gripper {self._joints.name(joint)} by a part, opening it, and leading it back")
        limits = self._file.profiles[CAUTIOUS].limits
        low, span = limits.low[joint], limits.high[joint] - limits.low[joint]
        began = self._seen[-1]["set_point"][joint]
        start = low + (OPEN - TRAVEL) * span
        if abs(start - began) > 1e-6:
            self._jog(joint, start - began)
            self._watch(REST)
        opened = self._answer(joint, TRAVEL * span)
        at = self._seen[-1]["q"][joint]
        if opened.status == OK and abs(at - (low + OPEN * span)) > 0.15 * span:
            said = f"commanded to {low + OPEN * span:.3f} (open), and measured at {at:.3f}"
            remedy = "Correct the gripper's zero and scale in the driver: open is the upper limit."
            opened = opened._replace(status=FAIL, said=said, remedy=remedy)
        self._jog(joint, began - self._seen[-1]["set_point"][joint])
        self._add(opened)

    # Stops.

    def _check_stop(self, stop: Stop) -> None:
        """Provoke a stop from a slow motion, and compare state and word with the table's."""
        if not self._waits_for("clear", STANDING, stop.name):
            return
        controller = self._controller()
        try:
            controller.request("lease")
            if not self._waits_for("go", (HOLD,), stop.name, controller):
                return
            self._show(f"provoking: {stop.name}")
            start = self._next()["set_point"]
            controller.request("arm", generation=self._next()["generation"])
            self._stream(controller, start)
            stop.provoke(self, controller)
            before = state = self._next()
            while not stop.is_in(state) and state["moment"] - before["moment"] < WITHIN:
                state = self._next()
        except RobotError as e:
            raise self._end(stop.name, str(e), remedy_of(str(e))) from e
        finally:
            controller.close()
        seconds = float(state["moment"] - before["moment"])
        travel = float(np.abs(state["set_point"] - before["set_point"]).max())
        if not stop.is_in(state):
            raise self._end(stop.name, f"{state['state']}: {state['word']}; expected {stop.leads_to}: {stop.word}",
                            remedy_of(state["word"]))  # fmt: skip
        said = f"{stop.leads_to} after {1e3 * seconds:.0f} ms and {travel:.4f} of way: {state['word']}"
        self._add(Finding(stop.name, OK, said, "", {"seconds": seconds, "travel": travel}))
        moved = start - state["set_point"]
        if stop.leads_to != STOPPED:
            for joint in np.flatnonzero(np.abs(moved) > 1e-6).tolist():
                self._jog(joint, moved[joint])

    def _stream(self, controller: RobotClient, start: np.ndarray) -> None:
        """Command the first joint slowly towards 2 degrees from `start`. Raises RobotError where the robot stops."""
        state = controller.next_state()
        began, angle = state["moment"], self._angle(0, start)
        while state["moment"] - began < STREAM:
            share = min((state["moment"] - began) / (2 * STREAM), 1.0)
            controller.send_command(start + angle * share * (np.arange(len(start)) == 0))
            sent = state["moment"]
            while state["moment"] - sent < 0.9 * self._spec["tick"]:
                state = controller.next_state()
            if state["state"] != "RUN":
                raise RobotError(f"{state['state']}: {state['word']}")

    def _waits_for(
        self, command: str, states: Sequence[str], name: str, controller: Optional[RobotClient] = None
    ) -> bool:
        """Wait until an operator has brought the robot into one of these states; returns whether it is.

        A go is a person's: this program waits for it, and keeps the lease of `controller` that it is for.
        """
        first = state = self._next()
        if state["state"] not in states:
            self._show(f"to try {name!r}, look at the cell and run `serl-chunk robot {command}` within {PATIENCE:g} s")
        while state["state"] not in states:
            if state["moment"] - first["moment"] >= PATIENCE:
                self._add(Finding(name, SKIPPED, f"not tried: no operator's {command} came"))
                return False
            state = self._next()
            if controller is not None and state["pass"] % 50 == 0:
                controller.request("ping")
        return True

    def reject(self, controller: RobotClient) -> None:
        """Send commands that are out of order."""
        target = self._next()["set_point"]
        for _ in range(TRIES):
            try:
                controller.request("command", target=target, number=0, generation=controller.generation)
            except RobotError:
                continue


STOPS: Sequence[Stop] = (
    Stop("release", "released by", HOLD, lambda check, controller: controller.request("release")),
    Stop("hold", "held by", HELD, lambda check, controller: check.operator.request("hold")),
    Stop("controller gone", "the controller is gone", HELD, lambda check, controller: controller.close()),
    Stop("lapse", "no valid command in time", HOLD, lambda check, controller: None),
    Stop("stop", "stopped by", STOPPED, lambda check, controller: check.operator.request("stop")),
    Stop("silence", "no command for a second", STOPPED, lambda check, controller: None),
    Stop("rejected", "ten commands in a row", STOPPED, lambda check, controller: check.reject(controller)),
)


def outcome(findings: Sequence[Finding]) -> Tuple[str, bool]:
    """Return how many findings failed and were not tried, for people, and whether there is none of both."""
    failed, skipped = (sum(f.status == status for f in findings) for status in (FAIL, SKIPPED))
    return f"{failed} failed" + (f", {skipped} not tried" if skipped else ""), not failed and not skipped


def write_report(findings: Sequence[Finding], robot: str, folder: Path) -> Path:
    """Write check_TIME.json and check_TIME.txt; returns the text's path. Raises OSError."""
    path = folder / time.strftime("check_%Y-%m-%d_%H%M%S.txt")
    text, ok = outcome(findings)
    report = {"robot": robot, "ok": ok, "findings": [f._asdict() for f in findings]}
    path.write_text("\n".join([f"Check of {robot}: {text}", "", *map(str, findings)]) + "\n", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path
