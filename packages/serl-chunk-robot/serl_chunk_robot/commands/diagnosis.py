"""What measurements of `check` mean: whether a joint answered as it was commanded, and what to do where it did not.

Nothing here moves a robot or reads a clock.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

OK, FAIL, WARNING, SKIPPED = "ok", "FAIL", "warning", "-"
DEGREES = 180 / np.pi
ANSWERS = 0.5, 1.5  # share of the commanded way that a joint under gravity makes, and friction leaves
DEAD = 0.2  # below this share it does not move
QUIET = 0.25  # of the commanded angle: what the other joints may move
OPENING = 0.05  # of its range: what another gripper may
LAGS = 0.1  # s behind the set point, for which profiles leave room
APART = 0.1  # rad between set point and joint at rest, or of a gripper's range
ALIKE = 0.05  # rad within which two poses are the same
REMEDIES = (  # a part of the server's word -> what to do
    ("publish", "End the other program that commands these arms, as a teleoperation script, and clear the robot."),
    ("mode", "Set the control mode of that joint's motor to position, as the driver's documentation describes."),
    (
        "faster than its limit",
        "Look at the unit (rad, not degrees), sign, order and zero of that joint in the driver: the arm went to a "
        "place other than the one that was commanded. Where the arm stood still, its measured velocity is wrong.",
    ),
    (
        "jumped",
        "Look at the unit (rad, not degrees), sign, order and zero of that joint in the driver. Where the arm stood "
        "still, look at its encoder's cable.",
    ),
    ("cannot reach", "Look at the unit (rad, not degrees) and zero of that joint, and at low and high in the driver."),
    ("ms old", "Look at the rate at which the arm sends its state, its cable and the load of this computer."),
    ("has repeated", "The driver gives the same sample again and again: look at how it reads the arm."),
    ("no torque", "Look at the arm's power and emergency stop, then clear the robot."),
    ("stood still", "Give the server real-time priority (its log has the line), and end other programs there."),
    ("resistance", "Look for what the arm met, or raise `effort` in the robot's file if nothing is there."),
    ("started", "Look at the cell, then run `robot clear`."),
    ("torque off", "Hold the arms where they may not fall, then run `robot clear`."),
)


class Finding(NamedTuple):
    """A line of the report. Each failure and warning has a remedy."""

    name: str
    status: str  # OK, FAIL, WARNING or SKIPPED
    said: str
    remedy: str = ""
    figures: Mapping[str, float] = {}  # s, rad or a gripper's own unit, shares

    def __str__(self) -> str:
        line = f"{self.status:8}{self.name:22}{self.said}"
        return line + "\n" + " " * 30 + "-> " + self.remedy if self.remedy else line


class Trace(NamedTuple):
    """What the server published during a motion: float64[N] and float64[N, J]."""

    moment: np.ndarray  # s, on the server's clock
    stamp: np.ndarray  # of the newest sample
    passes: np.ndarray
    set_point: np.ndarray
    q: np.ndarray
    dq: np.ndarray
    effort: np.ndarray

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> Trace:
        """Take states that hold a set point and a measurement."""
        known = [s for s in states if s["set_point"] is not None and s["q"] is not None]
        names = ("moment", "stamp", "pass", "set_point", "q", "dq", "effort")
        return cls(*(np.array([s[name] for s in known], np.float64) for name in names))

    def rest(self) -> Tuple[np.ndarray, np.ndarray]:
        """Mean set point and measured joints of the trace, float64[J] each."""
        return self.set_point.mean(axis=0), self.q.mean(axis=0)


class Joints(NamedTuple):
    """The robot's joints as the server describes them."""

    low: np.ndarray
    high: np.ndarray
    grippers: Tuple[int, ...]
    arms: Tuple[Tuple[int, int], ...]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Joints:
        low, high = np.array(spec["low"], np.float64), np.array(spec["high"], np.float64)
        arms = tuple((int(a), int(b)) for a, b in spec["arms"]) or ((0, len(low)),)
        return cls(low, high, tuple(int(j) for j in spec["grippers"]), arms)

    def name(self, joint: int) -> str:
        """Its number, arm and place in that arm."""
        arm = next((k for k, (first, end) in enumerate(self.arms) if first <= joint < end), 0)
        kind = "gripper" if joint in self.grippers else f"joint {joint - self.arms[arm][0]}"
        return f"{joint} ({kind} of arm {arm})" if len(self.arms) > 1 else f"{joint} ({kind})"

    def unit(self, joint: int) -> float:
        """What a distance of 1 rad compares with: 1, or a gripper's range."""
        return float(self.high[joint] - self.low[joint]) if joint in self.grippers else 1.0


def judge_answer(joint: int, before: Trace, moving: Trace, after: Trace, joints: Joints) -> Finding:
    """Compare how a joint answered with what was commanded of it, and with what the other joints did."""
    name = f"joint {joint}" if joint not in joints.grippers else f"gripper {joint}"
    (from_set, from_q), (to_set, to_q) = before.rest(), after.rest()
    sent, moved = float(to_set[joint] - from_set[joint]), to_q - from_q
    share = float(moved[joint] / sent)
    figures = {"commanded": sent, "measured": float(moved[joint]), "share": share}
    quiet = np.array(
        [OPENING * joints.unit(j) if j in joints.grippers else QUIET * np.radians(2) for j in range(len(moved))]
    )
    too = [int(j) for j in np.argsort(-np.abs(moved) / quiet) if j != joint and abs(moved[j]) > quiet[j]]
    went = f"{moved[joint]:+.4f} measured for {sent:+.4f} commanded"
    if too:
        other, (arm, other_arm) = too[0], ([a <= j < b for a, b in joints.arms] for j in (joint, too[0]))
        verb = "moved instead" if abs(share) < DEAD else "moved too"
        remedy = "Correct the order of the joints in the driver, of either command or measurement."
        if arm != other_arm:
            remedy = "Swap the arms' ports, or their names in the driver: another arm is commanded than is measured."
        said = f"joint {joints.name(other)} {verb} ({moved[other]:+.4f}); {went}"
        return Finding(name, FAIL, said, remedy, figures)
    for factor, which in ((DEGREES, "reads"), (1 / DEGREES, "takes")):
        if abs(abs(share) / factor - 1) < 0.15 and abs(moved[joint]) > 1e-5:
            return Finding(name, FAIL, went, f"The driver {which} degrees: convert them to rad.", figures)
    if share < -DEAD:
        what = "It closes where it is to open: swap" if joint in joints.grippers else "It moves the other way: change"
        return Finding(name, FAIL, went, f"{what} the sign of this joint in the driver, of either command or "
                       "measurement, whichever is wrong on the arm.", figures)  # fmt: skip
    if share < DEAD:
        return Finding(name, FAIL, f"does not move: {went}", "Look at this motor's torque, its identifier and its "
                       "place in the command.", figures)  # fmt: skip
    if not ANSWERS[0] <= share <= ANSWERS[1]:
        scale = "the gripper's scale" if joint in joints.grippers else "the scale of this joint"
        return Finding(
            name, FAIL, went, f"Correct {scale} in the driver: command and measurement need one unit.", figures
        )
    return _judge_motion(Finding(name, OK, f"answers: {went}", "", figures), joint, moving)


def _judge_motion(found: Finding, joint: int, moving: Trace) -> Finding:
    """Judge velocity and lag of a joint that answered."""
    if len(moving.moment) < 5:
        return found
    way = float(moving.q[-1, joint] - moving.q[0, joint])
    widths, speeds = np.diff(moving.moment), moving.dq[:, joint]
    integral = float(np.sum(widths * (speeds[1:] + speeds[:-1]) / 2))
    lag = _lag(moving, joint)
    figures = {**found.figures, "lag": lag, "peak_velocity": float(np.abs(speeds).max()),
               "peak_effort": float(np.abs(moving.effort[:, joint]).max())}  # fmt: skip
    if not 0.5 <= integral / way <= 2.0:
        said = f"its velocity adds up to {integral:+.4f}, and it went {way:+.4f}"
        remedy = "Correct unit and sign of dq in the driver: a joint that is too fast is stopped by it."
        return found._replace(status=FAIL, said=said, figures=figures, remedy=remedy)
    if lag > LAGS:
        said = f"follows {1e3 * lag:.0f} ms behind its set point"
        remedy = "Look at queues and profiles between driver and motor: limits allow 100 ms."
        return found._replace(status=FAIL, said=said, figures=figures, remedy=remedy)
    return found._replace(said=f"{found.said}, {1e3 * lag:.0f} ms behind", figures=figures)


def _lag(moving: Trace, joint: int) -> float:
    """By how much the joint is behind its set point, s, up to 0.4."""
    lags = np.arange(0.0, 0.4, 0.002)
    sent = [np.interp(moving.moment - lag, moving.moment, moving.set_point[:, joint]) for lag in lags]
    errors = np.array(sent) - moving.q[:, joint]
    return float(lags[int(np.argmin(errors.std(axis=1)))])


def judge_rest(rest: Trace, joints: Joints) -> Finding:
    """Compare a standing robot with its set point."""
    set_point, q = rest.rest()
    units = np.array([joints.unit(j) for j in range(len(q))])
    apart = np.abs(q - set_point) / units
    worst = int(np.argmax(apart))
    figures = {"largest": float(abs(q[worst] - set_point[worst])), "joint": float(worst)}
    if apart[worst] <= APART:
        return Finding("standing", OK, f"at most {figures['largest']:.3f} from its set point", "", figures)
    said = f"joint {joints.name(worst)} is at {q[worst]:.3f}, and was commanded to {set_point[worst]:.3f}"
    return Finding("standing", FAIL, said, explain(set_point, q, joints), figures)


def explain(set_point: np.ndarray, q: np.ndarray, joints: Joints) -> str:
    """Name what makes a pose of another one: a sign, a unit, an order."""
    far = [j for j in range(len(q)) if abs(q[j] - set_point[j]) > APART * joints.unit(j)]
    found: Dict[str, List[str]] = {}
    for j in far:
        gripper, other = j in joints.grippers, [i for i in far if i != j and abs(q[j] - set_point[i]) < ALIKE]
        if gripper and abs(q[j] - (joints.low[j] + joints.high[j] - set_point[j])) < ALIKE * joints.unit(j):
            what = "opens where it is to close: change its sign in the driver"
        elif gripper:
            what = "needs another scale in the driver"
        elif abs(q[j] + set_point[j]) < ALIKE:
            what = "has the wrong sign in the driver"
        elif abs(q[j] * DEGREES - set_point[j]) < ALIKE or abs(q[j] - set_point[j] * DEGREES) < ALIKE * DEGREES:
            what = "is given in degrees by the driver, or taken so: convert it to rad"
        elif other:
            what = f"is at the place of joint {joints.name(other[0])}: correct the order of the joints, or of the arms"
        else:
            what = "is elsewhere: look at its zero and its scale in the driver"
        found.setdefault(what, []).append(joints.name(j))
    return "; ".join(f"joint {', '.join(which[:4])} {what}" for what, which in found.items()) or "Look at the driver."


def judge_times(states: Sequence[Mapping[str, Any]], rate: float, tick: float) -> List[Finding]:
    """Judge the loop's rate (`rate` Hz is expected), and how often and how late a sample comes, of a second at rest."""
    trace = Trace.of(states)
    seconds = float(trace.moment[-1] - trace.moment[0])
    passes = float(trace.passes[-1] - trace.passes[0]) / seconds
    late = {name: float(value) for name, value in states[-1]["late"].items()}
    out = [
        Finding("loop", OK, f"{passes:.0f} passes a second, late by {1e3 * late['p99']:.1f} ms (99 of 100)", "",
                {"passes_per_s": passes, **late})
    ]  # fmt: skip
    if passes < 0.8 * rate:
        slow = "End other programs on that computer, or lower `rate` in the file."
        out[0] = out[0]._replace(status=FAIL, remedy=slow)
    elif late["p99"] > 0.01:
        out[0] = out[0]._replace(status=WARNING, remedy="Give the server real-time priority (its log has the line).")
    fresh = len(np.unique(trace.stamp)) / seconds
    age = float(np.median(trace.moment - trace.stamp))
    figures = {"states_per_s": fresh, "age": age}
    state = Finding("state", OK, f"{fresh:.0f} samples a second, {1e3 * age:.1f} ms old", "", figures)
    if len(np.unique(trace.stamp)) < 0.6 * len(trace.stamp) and fresh < 1.5 / tick:
        state = state._replace(status=FAIL, remedy=f"An actor reads {1 / tick:.0f} states a second: raise the rate at "
                               "which the arm sends its state, such as that of its joint publisher.")  # fmt: skip
    elif age > 0.03:
        state = state._replace(status=FAIL, remedy="Look for a queue in front of the driver: take the newest sample.")
    return [*out, state]


def judge_effort(states: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether the driver measures effort at all."""
    effort = Trace.of(states).effort
    still = [int(j) for j in np.flatnonzero(effort.max(axis=0) == effort.min(axis=0))]
    if not still:
        largest = float(np.abs(effort).max())
        return Finding("effort", OK, f"measured of all joints, at most {largest:.2f}", "", {"largest": largest})
    remedy = "Limits of effort do not act on these joints. Let the driver give current or torque, if the arm has it."
    return Finding("effort", WARNING, f"never changes: joints {', '.join(map(str, still))}", remedy)


def remedy_of(word: str) -> str:
    """What to do about a robot that stopped with this word."""
    return next((remedy for part, remedy in REMEDIES if part in word), "Read the log of the robot's server.")
