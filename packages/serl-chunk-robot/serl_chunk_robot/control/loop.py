"""One pass of the control loop: read, judge, decide by the table, gate, command. It is given the time.

Nothing here opens a socket, and no clock is read but the one that is given: `RobotLoop.run_pass` is called by the
thread that keeps the deadlines, and by tests with moments of their own. All calls come from one thread.

Time that did not pass moves nothing: after a gap between two passes, a suspend, or a driver's call that lasted, the
arms stand where they were commanded last, whatever the speed was, and so does the set point.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np

from serl_chunk_robot.control.border import ANSWER, Border, DriverStop, brake_alone, text_of
from serl_chunk_robot.control.own_motion import Motion, OwnMotion, Resistance
from serl_chunk_robot.control.pursuit import Pursuit
from serl_chunk_robot.control.track import Commands
from serl_chunk_robot.drivers.base import Driver, DriverError, Event, Reading
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured, Sample
from serl_chunk_robot.safety.motion import GripLimits, Limits, SetPoint, braked
from serl_chunk_robot.safety.table import BRAKE, HELD, HOLD, MOVE, OPERATOR, RUN, SERVER, STOPPED, Machine, Transition
from serl_chunk_robot.safety.watchdog import Watchdog

logger = logging.getLogger(__name__)

GAP = 0.1  # s between two passes, or in one before its set point is sent: nothing is known of what was between
GO_LASTS = 600.0  # s in HOLD, after which an operator has to say go again
CALMS = ("stop", "hold", "release", "lost", "moved")  # are obeyed whatever generation they are of
CATCHING_UP = "catching_up"  # the reason of a pass that the gate left alone, and that led back onto the path
GIVE = 0.02  # of a gripper's range: how far below the measured place a relaxed one still aims
GRIP = "grip"  # the reason of a pass in which a gripper was relaxed


class Grip:
    """Grippers under the limits of a profile; without such limits it changes no goal.

    Seconds above the effort add up, and those below are taken off again, so that a short rest is no new beginning.
    """

    def __init__(self, limits: Limits) -> None:
        self._of = limits.grip or GripLimits(np.full(len(limits.low), np.inf))
        self._give = GIVE * (limits.high - limits.low)
        self.begin()

    def begin(self) -> None:
        """Forget what was measured: the robot was stopped, and its grippers may have been opened by hand."""
        self._pressed = np.zeros_like(self._give)  # s
        self._floor = np.full_like(self._give, -np.inf)  # the least goal of a relaxed gripper

    def measured(self, q: np.ndarray, effort: np.ndarray, dt: float) -> None:
        """Take a believed sample, float64[J] each, `dt` seconds after the last one."""
        hard = np.abs(effort) > self._of.effort
        self._pressed = np.maximum(self._pressed + np.where(hard, dt, -dt), 0.0)
        late = hard & (self._pressed > self._of.seconds) & np.isneginf(self._floor)
        self._floor = np.where(late, q - self._give, self._floor)

    def goal(self, goal: np.ndarray) -> Tuple[np.ndarray, bool]:
        """The goal, float64[J], with relaxed grippers in their places, and whether one was relaxed."""
        opens = goal >= self._floor
        if opens.all():
            self._floor[:] = -np.inf
            return goal, False
        self._floor[opens] = -np.inf
        return np.maximum(goal, self._floor), True


class Refused(Exception):
    """A request that is not possible now, in one sentence."""


class Status(NamedTuple):
    """What a pass found and did, for the thread that publishes it. Arrays are float64[J]."""

    moment: float
    state: str
    word: str
    generation: int
    set_point: Optional[np.ndarray]  # None: unknown
    reading: Optional[Reading]  # the newest that was believed
    number: int  # of the newest command that was taken
    factor: float  # 1 where the robot follows its command
    reason: str  # of the gate, GRIP or CATCHING_UP
    events: Tuple[Event, ...]
    answered: bool  # by the driver, every stop
    motion: int  # number of the newest motion
    done: int  # number of the newest motion that went as planned
    since: float  # when the state was entered
    held: Optional[Tuple[str, float]]  # in HELD: by whom, and since when


class RobotLoop:
    """One robot under the table.

    Args:
        driver: connected.
        tick: seconds of a control tick.
        clock: seconds that go on while the machine is suspended, which moments of passes may leave out.
        on_transition: called with each transition, for the log and the operator's console.
        needs_go: see Machine.
    """

    def __init__(
        self, driver: Driver, gate: Gate, *, measured: Measured, tick: float, clock: Callable[[], float],
        on_transition: Callable[[Transition], None] = lambda transition: None, needs_go: bool = True,
    ) -> None:  # fmt: skip
        self._driver, self._gate, self._measured = Border(driver), gate, measured
        self._on_transition, self._clock = on_transition, clock
        self.machine, self._watchdog = Machine(needs_go), Watchdog(tick)
        self._since = 0.0  # when the state was entered
        self._at: Optional[SetPoint] = None  # None: it is not known what the arms were commanded last
        self._commands = Commands(gate, self._watchdog, tick)
        self._pursuit, self._grip = Pursuit(gate.limits, gate.dt), Grip(gate.limits)
        self.motion = OwnMotion(measured, self._driver.grippers)
        self._last_pass: Optional[Tuple[float, float]] = None  # its moment, and that of the clock
        self._newest: Optional[Reading] = None  # of the last pass, believed or not
        self._reading: Optional[Reading] = None  # the newest that was believed
        self.causes: Dict[str, str] = {}  # events that the last pass found, and their details
        self._stopping = DriverStop(self._driver)
        self._unsent: Optional[float] = None  # since when the driver takes no set points

    @property
    def validity(self) -> float:
        """Seconds for which a command is valid."""
        return self._watchdog.validity

    @property
    def set_point(self) -> Optional[np.ndarray]:
        return None if self._at is None else self._at.position

    def limit(self, limits: Limits) -> None:
        """Move within other limits from now on. Raises Refused while the robot moves."""
        if self.machine.moving:
            raise Refused(f"profile: not while the robot moves ({self.machine.state})")
        self._gate.limits, self._pursuit, self._grip = limits, Pursuit(limits, self._gate.dt), Grip(limits)

    # Requests of clients.

    def request(
        self, event: str, role: str, by: str, now: float, *,
        motion: Optional[Motion] = None, generation: Optional[int] = None, ends: Optional[np.ndarray] = None,
        detail: str = "",
    ) -> Transition:  # fmt: skip
        """Apply an event that a client requests, or with the role "server" the server: "lost".

        Args:
            motion: of an event that moves the robot.
            generation: that the client knows; another one than now is refused, but for what calms. None: any.
            ends: the pose, float64[J], in which the robot may lose its torque, of the event "end": once it is measured
                there, torque goes off.

        Raises Refused: with the reason, where the event is not possible.
        """
        if event not in CALMS and generation is not None:
            self.check_generation(event, generation)
        state = self.machine.state
        if event == "clear" and (state, role) == (STOPPED, OPERATOR):
            self._check_clear()
        elif self.machine.standing and event in ("arm", "torque_off", "end") and self._measured.doubtful:
            raise Refused(f"{event}: the measured state cannot be trusted ({self._measured.reason})")
        elif state == HELD and event in ("arm", "reset"):
            raise Refused(f"{event}: {self.shown_hold(now)}")
        done = self._apply(event, role, by=by, now=now, detail=detail)
        if done.row is None:
            raise Refused(done.word)
        if event == "clear":  # the set point stays; where it is not known, it is the measured pose
            self._unsent = None
            self._grip.begin()
            if self._at is None and self._measured.good is not None:
                self._at = SetPoint.standing(self._measured.good.q)
        elif event == "arm":
            self._commands.begin(now)
        elif event in ("release", "hold", "lost", "moved"):
            self._watchdog.released()
        elif event == "torque_off":
            self._torque_off(now)
        elif self.machine.state == MOVE:
            self.motion.begin(motion, None if ends is None else (by, ends))
        return done

    def check_generation(self, event: str, generation: int) -> None:
        """Raise Refused where a request is of another generation than now: its client saw another robot."""
        machine = self.machine
        if generation != machine.generation:
            raise Refused(
                f"{event}: it is of generation {generation}, and the robot is in {machine.generation} now "
                f"({machine.state}: {machine.word}). Look at it, and request again."
            )

    def shown_hold(self, now: float) -> str:
        return (
            f"the robot is held by {self.machine.held_by} for {max(now - self._since, 0.0):.0f} s. Look at the "
            "cell; then run `serl-chunk robot go`, or press the console's or the page's key to go on"
        )

    def reboot(self, motor: str, role: str, by: str, now: float) -> None:
        """Let the driver reboot one motor of a stopped or held robot, which is STOPPED then. No other torque changes.

        The motor does not hold meanwhile. So nothing is known of the set point, and `clear` takes the measured pose.
        Raises Refused.
        """
        if role != OPERATOR:
            raise Refused(f"reboot is for the operator; {by} is {role}")
        if self.machine.state == HELD:
            self._apply("stop", OPERATOR, by=by, now=now)  # the motor does not hold meanwhile
        if self.machine.state != STOPPED:
            raise Refused(
                f"reboot: the robot is in {self.machine.state}, and a motor is rebooted in STOPPED. Run "
                "`serl-chunk robot stop` first."
            )
        try:
            self._driver.set("reboot", motor)
        except DriverError as e:
            text = str(e)
            if text.startswith("reboot: unknown"):
                text = "reboot: this robot's driver has no motors to reboot (aloha_ros1 and aloha_ros2 have)"
            raise Refused(text if text.startswith("reboot") else f"reboot: {text}") from e
        logger.info("reboot: motor=%s by=%s", motor, by)
        self._at = None
        self.causes["reboot"] = f"of {motor} began"  # no `clear` before a pass has read the driver again

    def command(self, command: Command, now: float) -> str:
        """Take a command, or return why not: a reason of the gate, or "state". A rejected one renews nothing."""
        if self.machine.state != RUN or self._at is None:
            self._gate.counts["state"] += 1
            return "state"
        return self._commands.take(command, self._at, now, self.machine.generation)

    def _check_clear(self) -> None:
        newest, measured = self._newest, self._measured
        if not self._stopping.answered:
            raise Refused("clear: the driver has not answered the stop yet")
        if newest is not None and (newest.faults or not newest.torque):
            try:
                self._driver.clear_faults()
            except DriverError as e:
                raise Refused(f"clear: the driver cannot clear its faults: {e}") from e
            what = "; ".join(newest.faults) or "an arm had no torque"
            raise Refused(f"clear: the driver reported {what}. Clear again once it does not.")
        if measured.doubtful or measured.good is None or newest is None:
            reason = measured.reason or "the last reading failed"
            if newest is not None:
                measured.forget()  # it stands: the next sample is judged by itself
            raise Refused(f"clear: the measured state cannot be trusted ({reason})")
        if self.causes:
            raise Refused("clear: {}".format("; ".join(map(" ".join, self.causes.items()))))

    def _torque_off(self, now: float) -> None:
        self._at = None
        self._stopping.forget()
        try:
            self._driver.set("torque", False)
        except DriverError as e:
            self._stop("fault", str(e), now, {})

    # Each pass.

    def run_pass(self, now: float) -> Status:
        moments = now, self._clock()
        if self._last_pass is None:
            self._since = now
        late, passed = (a - b for a, b in zip(moments, self._last_pass or moments))
        self._last_pass = moments
        before, self.causes = self.causes, {}
        if late < 0 or max(late, passed) > GAP:
            self._at = None if self._at is None else SetPoint.standing(self._at.position)
            slept = ", in which the machine was suspended" if passed - late > GAP else ""
            self._stop("clock", f"{1e3 * (max(late, passed) if late >= 0 else late):.0f} ms between two passes{slept}",
                       now, before)  # fmt: skip
        self._read(now, before)
        due = self._watchdog.event(now, self.machine.state)
        if due:
            self._apply(due, SERVER, now=now, detail=self._commands.rejection)
        if self.machine.needs_go and self.machine.state == HOLD and now - self._since > GO_LASTS:
            self._apply("expired", SERVER, now=now, detail=f"{GO_LASTS / 60:g} minutes")
        factor, reason = 0.0, ""
        if self._at is not None and self.machine.state != STOPPED:
            factor, reason = self._move(self._at, now, before)
        if self.machine.state == BRAKE and (self._at is None or self._at.stands):
            self._apply("standing", SERVER, now=now)
        self._stopping.report(now)
        if self.machine.state == STOPPED and self._stopping.used_own_means():
            self._at = None
        return self._status(now, factor, reason, () if self._newest is None else self._newest.events)

    def _status(self, now: float, factor: float, reason: str, events: Tuple[Event, ...]) -> Status:
        machine = self.machine
        held = (machine.held_by, self._since) if machine.state == HELD else None
        return Status(now, machine.state, machine.word, machine.generation, self.set_point, self._reading,
                      self._commands.number, factor, reason, events, self._stopping.answered, self.motion.number,
                      self.motion.done, self._since, held)  # fmt: skip

    def _read(self, now: float, before: Dict[str, str]) -> None:
        self._newest = None
        try:
            reading = self._driver.read()
            sample = Sample(reading.q, reading.dq, reading.effort, reading.stamp)
            believed = self._measured.judge(sample, now, reading.q if self._at is None else self._at.position)
            faults = "; ".join(reading.faults)
        except DriverError as e:
            self._stop("fault", str(e), now, before)
            return
        self._newest = reading
        if believed:
            self._reading = reading
            self._grip.measured(reading.q, reading.effort, self._gate.dt)
            fast = np.abs(reading.dq) > self._gate.limits.overspeed
            if fast.any():
                joint = int(np.argmax(fast))
                self._stop("overspeed", f"joint {joint} at {reading.dq[joint]:.2f}", now, before)
        elif self._measured.lost:
            self._stop("doubtful", self._measured.reason, now, before)
        if faults:
            self._stop("fault", faults, now, before)
        if not reading.torque:
            self._stop("fault", "an arm has no torque", now, before)
            self._at = None

    def _move(self, at: SetPoint, now: float, before: Dict[str, str]) -> Tuple[float, str]:
        """Advance the set point by one pass and command it; returns the factor and the reason of `Status`."""
        goal = None
        if self.machine.state == RUN:
            goal = self._commands.goal(at)
        elif self.machine.state == MOVE:
            goal = self._goal_of_motion(at, now, before)
        goal, relaxed = (None, False) if goal is None else self._grip.goal(goal)
        passed, factor, reason = at, 0.0, ""
        if not self.machine.standing:
            good = self._measured.good
            place, follows = (None, False) if goal is None else self._pursuit.place(at, goal)
            passed, factor, reason = self._gate.step(at, place, at.position if good is None else good.q)
            if goal is not None and factor == 1 and not follows:
                factor, reason = self._share(at, passed.position, goal), reason or CATCHING_UP
                self._gate.counts[CATCHING_UP] += reason == CATCHING_UP
            if relaxed:
                self._gate.counts[GRIP] += 1
                factor, reason = min(factor, 0.999), reason or GRIP
        assert self._last_pass is not None
        if self._clock() - self._last_pass[1] > GAP:  # so long, above all in a call of the driver
            passed, factor, reason = SetPoint.standing(at.position), 0.0, ""
        try:
            self._driver.command(passed.position.copy(), self._gate.dt)
        except DriverError as e:
            # The set point stays the last one that the driver took, until nothing is known of it.
            self._unsent = now if self._unsent is None else self._unsent
            self._stop("fault", str(e), now, before)
            if now - self._unsent >= ANSWER:
                self._at = None
            return 0.0, ""
        self._at, self._unsent = passed, None
        self._commands.passed()
        return factor, reason

    def _share(self, at: SetPoint, place: np.ndarray, goal: np.ndarray) -> float:
        """How far the set point goes from where braking leads towards its goal, below 1."""
        way = goal - (brake := braked(at, self._gate.limits.rates, self._gate.dt).position)
        return float(min(max(np.dot(place - brake, way) / max(np.dot(way, way), 1e-300), 0.0), 0.999))

    def _goal_of_motion(self, at: SetPoint, now: float, before: Dict[str, str]) -> Optional[np.ndarray]:
        try:
            goal = None if self._reading is None else self.motion.goal(at, self._reading, now)
        except Resistance as e:
            self._apply("effort", SERVER, now=now, detail=str(e))
            return None
        except BaseException as e:  # of the driver's methods that a motion calls
            self._stop("fault", "a motion failed: " + text_of(e), now, before)
            return None
        pressing = self.motion.pressing
        if pressing:
            self.machine.word = f"the motion met resistance: {pressing}; going back"
        if goal is None and at.stands:
            if not self.motion.parked(now):
                return at.position
            self._finish(now)
        return goal

    def _finish(self, now: float) -> None:
        """End a motion that went as planned; the last of a day with torque off, where the arms got to their pose."""
        ends, apart = self.motion.ends, self.motion.apart()
        self._apply("done", SERVER, now=now)
        self.motion.done = self.motion.number
        if ends is None:
            return
        if apart:
            self.machine.word = f"not ended: {apart}. Torque stays on"
            return
        self._apply("torque_off", OPERATOR, by=ends[0], now=now)
        self._torque_off(now)

    def fail(self, error: BaseException, pause: Callable[[], None]) -> Status:
        """Brake with nothing of the loop, because a pass raised `error`, and latch. No other pass may follow.

        `pause`: waits until the next set point is due.
        """
        machine, (now, began) = self.machine, self._last_pass or (0.0, self._clock())
        if self._at is not None and machine.state != STOPPED:
            self._at = brake_alone(
                self._driver, self._at, self._gate.limits.rates, self._gate.dt, began, GAP, self._clock, pause
            )
        machine.fail(f"the server failed: {text_of(error)}")
        logger.critical("%s: %s", machine.state, machine.word)
        with contextlib.suppress(DriverError):
            self._driver.stop(machine.word, int(self._at is None))
        return self._status(now, 0.0, "", ())

    # Transitions.

    def _apply(self, event: str, role: str, *, now: float, by: str = "the server", detail: str = "") -> Transition:
        state = self.machine.state
        done = self.machine.apply(event, role, by=by, detail=detail)
        if done.row is not None:
            if self.machine.state != state or event in ("hold", "clear"):
                self._since = now
            # The last line before the driver: nothing of another state or an older generation is left to command.
            self._commands.drop()
            self.motion.drop()
            self._pursuit.begin()
            stops = STOPPED in (self.machine.state, self.machine.then)
            if stops and event not in ("standing", "hold", "release", "lost"):
                self._watchdog.released()
                self._stopping.begin(now, done.word)
            self._on_transition(done)
        return done

    def _stop(self, event: str, detail: str, now: float, before: Dict[str, str]) -> None:
        self.causes[event] = detail
        if event not in before or STOPPED not in (self.machine.state, self.machine.then):
            self._apply(event, SERVER, now=now, detail=detail)
