"""The server's own motions: a reset in steps, parking, and a jog of one joint.

They are checked against the profile before anything moves, and are smooth: the speed of a step is a share of the
profile's limits. Their goals pass the gate as commands do.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from serl_chunk_robot.control.own_motion import Resistance, Yielding
from serl_chunk_robot.drivers.base import Reading
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.geometry.kinematics import Arms, along, lifted, polynomial, pose_frame, reach
from serl_chunk_robot.safety.motion import Limits, SetPoint

SPEED = 0.3  # of the profile's velocity, acceleration and jerk
STANDS = 1.0  # s between the beep and the first motion
GRID, MARGIN = 400, 1.05  # parts of a curved way that its speed is measured over, and what that leaves out
PATIENCE = 5.0  # s after which a step that the gate keeps from its goal is given up
REACHED = 1e-6  # rad
SWINGS, FASTEST, LONGEST_SWING = 8, 0.6, 60.0  # of a swing: how many, Hz at most, s at most
# After a simulated task's scene was put in place: s in which it is measured at least and, where joints are not there
# yet, as fingers that held something, at most; rad, or of an opening, of a joint that is.
SETTLES, SETTLES_WITHIN, SETTLED = 0.1, 1.0, 0.02


class Step(NamedTuple):
    """One step of a reset: `set` first, then the way, then the wait. Arrays are float64[J]."""

    joints: np.ndarray  # where the joints go; nan: they stay
    add: np.ndarray  # what is added to that
    random: np.ndarray  # at most so much is drawn, uniformly and with either sign, and added
    gripper: Union[str, float] = ""  # "open" (the upper limit), "close", "keep", a value; "": as `joints` says
    grippers: Tuple[int, ...] = ()  # which `gripper` is for
    set: Mapping[str, Any] = {}  # name -> value of the driver's `set`
    every: int = 1  # only in episodes whose number this divides; 0: in none
    wait: bool = False  # for the operator, at the end
    speed: float = SPEED
    tips: Tuple[int, ...] = ()  # arms of the kinematics that `lift` and `pose` are for
    lift: float = 0.0  # m: their tips go straight up
    pose: Optional[np.ndarray] = None  # float64[6], of the tip: x, y, z (m), roll, pitch, yaw (rad)
    least: Optional[np.ndarray] = None  # what is below this goes up to it
    stands: float = 0.0  # s, at the end
    relieve: bool = False  # the tips' set points go to where the tips are measured: they press on nothing any more
    new_object: bool = False  # also in a reset for a new object

    @classmethod
    def to(cls, pose: Union[Sequence[float], np.ndarray]) -> Step:
        """Return the step that leads all joints to a pose, float64[J]."""
        return cls(np.array(pose, np.float64), np.zeros(len(pose)), np.zeros(len(pose)))

    def due(self, episode: int, new_object: bool) -> bool:
        """Whether the step is taken in the reset of an episode."""
        return (new_object and self.new_object) or (self.every > 0 and episode % self.every == 0)

    def way(self, name: str, place: np.ndarray, limits: Limits, arms: Optional[Arms]) -> np.ndarray:
        """The places that the step leads through, but for what is drawn, float64[K, J], with `place` as the first.

        Raises ConfigError: no joints within the limits bring a tip there.
        """
        way = np.stack([place, self.goal(place, limits)])
        low, high = np.minimum(limits.low, place), np.maximum(limits.high, place)
        for tip in self.tips:
            assert arms is not None
            if self.pose is not None:
                found = reach(arms, tip, way[1], pose_frame(self.pose), low, high, turned=True)
                what = f"reach {self.pose.tolist()}"
                nodes = None if found is None else np.stack([place, found])
            else:
                nodes, what = lifted(arms, tip, place, self.lift, low, high), f"go {self.lift:g} m straight up"
            if nodes is None:
                raise ConfigError(
                    f"the tip of arm {tip} cannot {what} from where it is within the profile's limits", parameter=name
                )
            if len(way) != len(nodes):
                way = np.linspace(way[0], way[1], len(nodes))
            way[:, arms.joints[tip]] = nodes[:, arms.joints[tip]]
        return way

    def goal(self, place: np.ndarray, limits: Limits) -> np.ndarray:
        """Where joints and grippers go from `place`, but for what is drawn, float64[J]."""
        goal = np.where(np.isnan(self.joints), place, self.joints) + self.add
        if self.least is not None:
            goal = np.maximum(goal, self.least)
        for joint in self.grippers if self.gripper != "" else ():
            named = {"open": limits.high[joint], "close": limits.low[joint], "keep": place[joint]}
            goal[joint] = named[self.gripper] if isinstance(self.gripper, str) else self.gripper
        return goal


class MinimumJerkMove:
    """A way of minimal jerk, from rest to rest, as long as the slowest joint needs for its share of the rates.

    `nodes`: evenly spaced places, float64[K, J], the first of which is where the robot stands, within rounding.
    """

    def __init__(self, start: np.ndarray, nodes: np.ndarray, limits: Limits, share: float, began: float) -> None:
        self.end, self._began = nodes[-1], began
        # Of a curve through a limit, rounding would be beyond it.
        self._low, self._high = np.minimum(limits.low, nodes.min(axis=0)), np.maximum(limits.high, nodes.max(axis=0))
        self._way = polynomial(nodes + np.linspace(1, 0, len(nodes))[:, None] * (start - nodes[0]))
        way, (v, a, j) = np.abs(self.end - start), (share * rate for rate in limits.rates)
        needs = [1.875 * way / v, np.sqrt(5.774 * way / a), np.cbrt(60 * way / j)]
        if len(nodes) > 2:
            path = along(self._way, _minimal_jerk(np.linspace(0, 1, GRID + 1)))
            peaks = [MARGIN * GRID**n * np.abs(np.diff(path, n, axis=0)).max(axis=0) for n in (1, 2, 3)]
            needs = [peaks[0] / v, np.sqrt(peaks[1] / a), np.cbrt(peaks[2] / j)]
        self.seconds = float(np.max(needs))
        self.until = began + self.seconds

    def at(self, now: float) -> np.ndarray:
        if now >= self.until:
            return self.end
        share = _minimal_jerk(np.array([max(now - self._began, 0.0) / self.seconds]))
        return np.minimum(np.maximum(along(self._way, share)[0], self._low), self._high)


class StepSequence(Yielding):
    """Steps one after the other: a `own_motion.Motion`. All calls come from the loop's thread.

    Args:
        start: set point of the robot, which stands, float64[J].
        steps: with the name that each has in an error.
        limits: of the profile.
        effort, grippers, beep, stands: see Yielding.
        set: the driver's.
        arms: their kinematics, for steps that lift a tip, or bring it to a pose.

    Raises ConfigError: a goal, or what may be drawn around it, is outside the limits, or a tip cannot get there.
    """

    def __init__(
        self, start: np.ndarray, steps: Sequence[Tuple[str, Step]], limits: Limits, *,
        effort: Optional[np.ndarray] = None, beep: Callable[[], None] = lambda: None, stands: float = STANDS,
        set: Callable[[str, Any], None] = lambda name, value: None, rng: Optional[np.random.Generator] = None,
        arms: Optional[Arms] = None, grippers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(limits, effort, grippers, beep, stands)
        self.draws: Dict[str, np.ndarray] = {}  # step's name -> what was drawn, float64[J]
        self._set = set
        self._todo: List[Tuple[Step, np.ndarray]] = []
        self._glide: Optional[MinimumJerkMove] = None
        self._there: Optional[float] = None  # since when the robot is at a step's end
        self._proceed = False
        relaxes = np.full(len(start), np.inf) if limits.grip is None else limits.grip.effort
        self._waited_for = np.isinf(relaxes)  # a gripper that may relax need not get to its goal
        place = np.array(start, np.float64)
        for name, step in steps:
            way = step.way(name, place, limits, arms)
            _check(name, way[-1], step.random, place, limits)
            if step.random.any():
                assert rng is not None
                self.draws[name] = rng.uniform(-step.random, step.random)
                way = way + np.linspace(0, 1, len(way))[:, None] * self.draws[name]
            self._todo.append((step, way))
            place = way[-1]

    def proceed(self) -> bool:
        """End a wait for the operator. False: the motion does not wait."""
        self._proceed = self.waiting
        return self.waiting

    def advance(self, at: SetPoint, reading: Reading, since: float, now: float) -> Optional[np.ndarray]:
        """Return the next goal. Raises Resistance where the gate keeps the robot from one, and what `set` raises."""
        while self._todo:
            step, way = self._todo[0]
            if self._glide is None:
                for name, value in step.set.items():
                    self._set(name, value)
                if step.relieve:
                    way = np.stack([at.position, np.clip(reading.q, self._limits.low, self._limits.high)])
                    way[1, list(step.grippers)] = at.position[list(step.grippers)]
                    self._todo[0] = step, way
                self._glide = MinimumJerkMove(at.position, way, self._limits, step.speed, now)
            if not self._arrived(self._glide, at, now):
                return self._glide.at(now)
            self._there = now if self._there is None else self._there
            self.waiting = step.wait and not self._proceed
            if self.waiting or now - self._there < step.stands:
                return way[-1]
            self._todo.pop(0)
            self._glide, self._there, self._proceed = None, None, False
        return None

    def _arrived(self, glide: MinimumJerkMove, at: SetPoint, now: float) -> bool:
        apart = np.where(self._waited_for, np.abs(at.position - glide.end), 0.0)
        if now < glide.until or not (at.stands and apart.max() < REACHED):
            if now > glide.until + PATIENCE:
                joint = int(np.argmax(apart))
                raise Resistance(f"joint {joint} is kept {apart[joint]:.3f} from its goal by the profile's limits")
            return False
        return True


class Reset(StepSequence):
    """The steps of a robot's file that are due in an episode.

    Args:
        episode: its number, from 0.
        new_object: whether the operator wants the steps for a new object too.
        rng: of what is drawn; the same one with the same steps draws the same.
        scene: called once the steps are done, before the robot is in HOLD: it puts a simulated task's objects in place.
        more: see StepSequence.
    """

    def __init__(
        self, start: np.ndarray, steps: Sequence[Step], limits: Limits, *, episode: int, rng: np.random.Generator,
        new_object: bool = False, scene: Optional[Callable[[], None]] = None, **more: Any,
    ) -> None:  # fmt: skip
        due = [(f"reset.step[{k}]", step) for k, step in enumerate(steps) if step.due(episode, new_object)]
        super().__init__(start, due, limits, rng=rng, **more)
        self._scene = scene
        self._placed = float("-inf")

    def advance(self, at: SetPoint, reading: Reading, since: float, now: float) -> Optional[np.ndarray]:
        goal = super().advance(at, reading, since, now)
        if goal is None and self._scene is not None:
            scene, self._scene, self._placed = self._scene, None, now
            scene()
        if goal is not None or now - self._placed > SETTLES_WITHIN:
            return goal
        settled = now - self._placed >= SETTLES and np.abs(reading.q - at.position).max() < SETTLED
        return None if settled else at.position


def park(start: np.ndarray, pose: np.ndarray, limits: Limits, **more: Any) -> StepSequence:
    """Return the way to the pose, float64[J], in which the robot may lose its torque; see StepSequence."""
    return StepSequence(start, [("park", Step.to(pose))], limits, **more)


def jog(start: np.ndarray, joint: int, angle: float, limits: Limits, **more: Any) -> StepSequence:
    """Return the way of one joint by an angle (rad, or a gripper's own unit), at once; see StepSequence.

    Raises ConfigError for no such joint.
    """
    way = _jogged(len(start), joint, angle)
    step = Step(np.full(len(start), np.nan), way, np.zeros(len(start)))
    return StepSequence(start, [("angle", step)], limits, **{"stands": 0.0, **more})


class Oscillation(Yielding):
    """One joint to and fro around where it stands, at once, so that delays can be measured: a `own_motion.Motion`.

    Args:
        start: set point of the robot, which stands, float64[J].
        angle: amplitude, rad, or a gripper's own unit.
        effort, grippers: see Yielding.

    Raises ConfigError: no such joint, a place outside the limits, or limits under which it would take LONGEST_SWING.
    """

    def __init__(
        self, start: np.ndarray, joint: int, angle: float, limits: Limits, *, effort: Optional[np.ndarray] = None,
        beep: Callable[[], None] = lambda: None, stands: float = STANDS, grippers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(limits, effort, grippers, beep, stands)
        size = abs(angle)
        self._way, self._start = np.abs(_jogged(len(start), joint, angle)), np.array(start, np.float64)
        if not size:
            raise ConfigError("0, expected a number above or below it", parameter="angle")
        _check("angle", self._start, self._way, self._start, limits)
        v, a, j = (SPEED * float(rate[joint]) / size for rate in limits.rates)
        self._period = 1 / min(FASTEST, v / (2 * np.pi), a**0.5 / (2 * np.pi), j ** (1 / 3) / (2 * np.pi))
        self._seconds = SWINGS * self._period
        if self._seconds > LONGEST_SWING:
            raise ConfigError(f"{angle:g} takes {self._seconds:.0f} s within the profile, expected {LONGEST_SWING:g} s "
                              "at most. Choose a smaller one, or another profile", parameter="angle")  # fmt: skip

    def advance(self, at: SetPoint, reading: Reading, since: float, now: float) -> Optional[np.ndarray]:
        if since >= self._seconds:
            return None
        ramp = np.clip(np.array([since, self._seconds - since]) / (0.5 * self._period), 0.0, 1.0)  # from rest to rest
        share = float(np.prod(_minimal_jerk(ramp)))
        return self._start + self._way * (share * np.sin(2 * np.pi * since / self._period))  # type: ignore[no-any-return]


def _jogged(size: int, joint: int, angle: float) -> np.ndarray:
    if not 0 <= joint < size:
        raise ConfigError(f"{joint}, expected a joint from 0 to {size - 1}", parameter="joint")
    if not np.isfinite(angle):
        raise ConfigError(f"{angle}, expected a finite number", parameter="angle")
    return np.where(np.arange(size) == joint, angle, 0.0)


def _minimal_jerk(time: np.ndarray) -> np.ndarray:
    return time**3 * (10 - 15 * time + 6 * time * time)


def _check(name: str, goal: np.ndarray, random: np.ndarray, place: np.ndarray, limits: Limits) -> None:
    """Refuse a goal outside the limits; a joint that stays may be outside, as the gate lets it."""
    outside = (goal - random < limits.low) | (goal + random > limits.high)
    outside &= (goal != place) | (random > 0)
    if outside.any():
        joint = int(np.argmax(outside))
        drawn = f" +- {random[joint]:g}" if random[joint] else ""
        raise ConfigError(f"joint {joint} would go to {goal[joint]:.4g}{drawn}, expected a place within the profile's "
                          f"{limits.low[joint]:.4g} to {limits.high[joint]:.4g}", parameter=name)  # fmt: skip
