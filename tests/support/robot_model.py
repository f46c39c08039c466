"""What a robot server may command when, and which state follows: a model written apart from the product.

It is from the description of the server: states are those of the documents, numbers are written out.
"""

from __future__ import annotations

import itertools

import numpy as np
from robot_world import DT, MECHANISM, SPEC, World

from serl_chunk_robot.drivers.base import Reading

CLOSE = 1 + 1e-6


class Samples:
    """Which readings are believed."""

    def __init__(self, low: np.ndarray = MECHANISM[0], high: np.ndarray = MECHANISM[1]) -> None:
        self.low, self.high = low, high
        self.q: np.ndarray | None = None  # of the newest that was believed
        self.stamp = self.at = 0.0
        self.doubts = 0
        self.last: Reading | None = None
        self.since, self.aim = 0.0, np.zeros(1)

    def judge(self, r: Reading, now: float, target: np.ndarray | None) -> bool:
        aim = r.q if target is None else target
        same = self.last is not None and all(
            np.array_equal(getattr(r, n), getattr(self.last, n)) for n in ("q", "dq", "effort")
        )
        self.last = r
        bad = False
        if not same:
            self.since, self.aim = now, np.array(aim)
        elif now - self.since >= 0.1 and np.abs(aim - self.aim).max() > 0.02:
            bad = True
        if not ((r.q >= self.low) & (r.q <= self.high)).all() or not now - 0.1 <= r.stamp <= now + 0.1:
            bad = True
        elif self.q is not None:
            gap = min(max(r.stamp - self.stamp, now - self.at, 0.0), 0.1)
            bad |= bool((np.abs(r.q - self.q) > 1.5 * np.array(SPEC.velocity) * gap + 1e-9).any())
        if bad:
            self.doubts += 1
            return False
        self.doubts, self.q, self.stamp, self.at = 0, r.q, r.stamp, now
        return True


class RobotModel:
    """The robot as its documents describe it. Methods return what the product must answer."""

    def __init__(self, world: World) -> None:
        self.world, self.limits = world, world.limits
        self.state, self.latched, self.generation = "STOPPED", True, 0
        self.agreed = False  # an operator's go counts
        self.samples = Samples()
        self.path: list[np.ndarray] | None = None  # the last three set points that the driver took; None: unknown
        self.target: np.ndarray | None = None  # of the newest command that was taken since arming
        self.passes = 0  # since it was taken
        self.goal: np.ndarray | None = None  # of the last pass in RUN
        self.steps: list[np.ndarray] = []  # between the last targets
        self.number = -1
        self.expecting, self.valid_at, self.rejections = False, 0.0, 0
        self.lapses: list[float] = []
        self.motion: object = None
        self.causes: set[str] = set()
        self.asked: tuple[float, int] | None = None  # when a stop was reported, and its level: no answer yet
        self.answers = len(world.arms.stops)
        self.failing: float | None = None
        self.last_pass: tuple[float, float] | None = None  # and what the machine had slept
        self.passing: float | None = None  # the moment of the pass that is being checked
        self.reading: Reading | None = None
        self.braking = 0
        self.own = False

    # Events.

    def latch(self) -> None:
        self.generation += 1
        self.latched, self.expecting, self.target, self.motion = True, False, None, None
        self.agreed = False
        if self.asked is None:
            self.asked = (self.world.now if self.passing is None else self.passing, 0)
        self.state = "BRAKE" if self.state in ("RUN", "MOVE", "BRAKE") else "STOPPED"

    @property
    def standing(self) -> str:
        return "HOLD" if self.agreed else "HELD"

    def calm(self) -> bool:
        """Brake what moves; what latched stays latched."""
        self.generation += 1
        self.target = self.motion = None
        if self.state in ("RUN", "MOVE"):
            self.state, self.latched = "BRAKE", False
        elif self.state in ("HOLD", "HELD"):
            self.state = self.standing
        return True

    def request(self, event: str, role: str, motion: object = None) -> bool:
        """Whether the event is possible, and what it does."""
        state, operator = self.state, role == "operator"
        stands = state in ("HOLD", "HELD")
        if event == "stop":
            self.latch()
            return True
        if event == "clear":
            return operator and state == "STOPPED" and self.clears()
        if event == "go":
            if not operator or state != "HELD":
                return False
            self.state, self.agreed = "HOLD", True
            self.generation += 1
            return True
        if event in ("arm", "reset"):
            if state != "HOLD" or role not in ("controller", "operator") or (event == "arm" and self.samples.doubts):
                return False
            self.generation += 1
            if event == "arm":
                self.state, self.target, self.number = "RUN", None, -1
                self.goal, self.steps = None, []
                self.expecting, self.valid_at, self.rejections = True, self.world.now, 0
            else:
                self.state, self.motion = "MOVE", motion
            return True
        if event in ("jog", "park"):
            if not (operator and stands):
                return False
            self.generation += 1
            self.state, self.motion, self.agreed = "MOVE", motion, False
            return True
        if event == "release" and role in ("controller", "operator") and (stands or state in ("RUN", "BRAKE")):
            self.expecting = False
            self.generation -= stands
            return self.calm()
        if (event, role) == ("hold", "operator"):
            self.expecting = self.agreed = False
            return self.calm()
        if (event, role) == ("lost", "server") and state not in ("STOPPED", "HELD"):
            self.expecting = self.agreed = False
            return self.calm()
        if (event, role) == ("moved", "server") and state in ("RUN", "MOVE"):
            self.expecting = False
            return self.calm()
        if event == "torque_off" and operator and stands and not self.samples.doubts:
            self.latch()
            self.asked, self.path = None, None
            return True
        return False

    def reboot(self, role: str, motor: str) -> bool:
        """Whether a motor is rebooted. It stood nowhere meanwhile, and the next pass looks at it before any clear."""
        if role == "operator" and self.state == "HELD":
            self.latch()
        if role != "operator" or self.state != "STOPPED" or motor == "right/gripper":
            return False
        self.path = None
        self.causes.add("reboot")
        return True

    def clears(self) -> bool:
        r = self.reading
        if self.asked is not None:
            return False
        if r is not None and (r.faults or not r.torque):
            return False
        if r is None:
            return False
        if self.samples.doubts or self.samples.q is None:
            self.samples = Samples()
            return False
        if self.causes:
            return False
        self.state, self.latched, self.failing = "HELD", False, None
        self.generation += 1
        if self.path is None:
            self.path = [self.samples.q.copy()] * 3
        return True

    def command(self, target: np.ndarray, number: int, generation: int, age: float) -> str:
        """Why a command is not taken; empty where it is."""
        if self.state != "RUN" or self.path is None:
            return "state"
        why = ""
        if target.shape != self.limits.low.shape:
            why = "shape"
        elif not np.isfinite(target).all():
            why = "not_finite"
        elif generation != self.generation:
            why = "generation"
        elif number <= self.number:
            why = "order"
        elif abs(age) > 0.08:
            why = "age"
        elif self.target is None and (np.abs(target - self.path[-1]) > self.limits.first).any():
            why = "first"
        if why:
            self.rejections += 1
            return why
        self.number, self.valid_at, self.rejections, self.passes = number, self.world.now, 0, 0
        self.steps = [*self.steps, np.abs(target - (self.path[-1] if self.target is None else self.target))][-40:]
        self.target = target.copy()
        return ""

    # Passes.

    def run_pass(self) -> None:
        """Run one pass of the world, and check all of it."""
        world, arms = self.world, self.world.arms
        sent, attempts, stops = len(arms.sent), arms.attempts, len(arms.stops)
        failing = arms.command_errors > 0
        world.gate.seen, world.pursuit.seen, world.hung = None, None, ""
        now, slept = world.now, world.slept
        self.passing = now
        status = world.loop.run_pass(now)
        new, tried = arms.sent[sent:], arms.attempts - attempts
        lasted = world.hung == "read" and world.now - now > 0.1  # before the set point of this pass
        before, self.causes = self.causes, set()
        late, asleep = (0.0, 0.0) if self.last_pass is None else (now - self.last_pass[0], slept - self.last_pass[1])
        self.last_pass = now, slept
        stood = self.stands
        if late < 0 or late + asleep > 0.1:
            self.path = self.path and [self.path[-1]] * 3  # time that did not pass moves nothing
            self.cause("clock", before)
        self.judge(now, before)
        self.watch(now)
        assert self.path is not None or not tried, "nothing is commanded where the set point is unknown"
        state = self.state
        if self.path is not None and state != "STOPPED":
            done = state == "MOVE" and (self.motion is None or self.motion.done) and stood  # type: ignore[attr-defined]
            if done:
                self.state, self.motion = self.standing, None
            assert tried == 1, f"{tried} commands in {state}"
            assert len(new) == (not failing)
            self.check_goal(state, done, status.factor, status.reason, failing or lasted)
            if failing:
                self.failing = now if self.failing is None else self.failing
                self.cause("fault", before)
                if now - self.failing >= 0.1:
                    self.path = None
            else:
                self.failing = None
                if lasted:
                    assert np.array_equal(new[0], self.path[-1]), "time that did not pass moves nothing"
                    self.path = [self.path[-1]] * 3
                else:
                    self.check_path(new[0], state)
            self.passes += 1
        else:
            assert not tried, f"{tried} commands in {state}"
        self.braking = self.braking + 1 if self.state == "BRAKE" and not failing else 0
        assert self.braking < 80, "braking does not end"
        if self.state == "BRAKE" and self.stands:
            self.state = "STOPPED" if self.latched else self.standing
        self.check_stop(now, arms.stops[stops:])
        if self.state == "STOPPED" and self.own:
            self.path, self.own = None, False
        assert (status.state, status.generation) == (self.state, self.generation), status.word
        assert (status.set_point is None) == (self.path is None)
        assert self.path is None or np.array_equal(status.set_point, self.path[-1])
        assert status.answered == (self.asked is None)
        self.passing = None

    @property
    def stands(self) -> bool:
        p = self.path
        return p is None or (np.array_equal(p[0], p[1]) and np.array_equal(p[1], p[2]))

    def cause(self, name: str, before: set[str]) -> None:
        """A cause that lasts stops once, and again after it was cleared."""
        self.causes.add(name)
        if name not in before or not self.latched:
            self.latch()

    def judge(self, now: float, before: set[str]) -> None:
        r = self.reading = self.world.arms.last
        if r is None:
            self.cause("fault", before)
            return
        if self.samples.judge(r, now, None if self.path is None else self.path[-1]):
            if (np.abs(r.dq) > self.limits.overspeed).any():
                self.cause("overspeed", before)
        elif self.samples.doubts >= 2:
            self.cause("doubtful", before)
        if r.faults:
            self.cause("fault", before)
        if not r.torque:
            self.cause("fault", before)
            self.path = None

    def watch(self, now: float) -> None:
        self.expecting &= self.state in ("RUN", "BRAKE", "HOLD")
        if not self.expecting:
            return
        silent = now - self.valid_at
        if silent > 1.0 or (self.state == "RUN" and self.rejections >= 10):
            self.latch()
        elif self.state == "RUN" and silent > 0.08:
            self.lapses = [t for t in self.lapses if now - t < 60.0] + [now]
            if len(self.lapses) >= 3:
                self.lapses = []
                self.latch()
            else:
                self.calm()

    def check_goal(self, state: str, done: bool, factor: float, reason: str, failing: bool) -> None:
        """What the gate was given, and that it moved all joints together."""
        seen = self.world.gate.seen
        assert self.path is not None
        assert self.samples.q is not None
        if state in ("HOLD", "HELD") or done:
            assert seen is None or seen[1] is None
            return
        assert seen is not None
        at, place, measured, passed = seen
        goal = self.world.pursuit.seen
        assert (goal is None) == (place is None)
        assert np.array_equal(at.position, self.path[-1])
        assert np.array_equal(measured, self.samples.q), "only what was believed"
        if state == "BRAKE":
            assert goal is None, "braking has no goal"
        elif state == "RUN" and self.target is None:
            assert np.array_equal(goal, self.path[-1]), "an armed robot stands until its first command"
        elif state == "RUN":
            assert goal is not None
            if self.passes >= 5:
                assert np.array_equal(goal, self.target), "the newest command, and after its tick only that"
            assert self.target is not None
            began = self.path[-1] if self.goal is None else self.goal
            room = np.abs(began - self.target) + np.sum(self.steps, axis=0) + 1e-9
            assert (np.abs(goal - self.target) <= room).all(), "between the target before and this one"
            self.goal = goal
        elif goal is not None:
            assert np.array_equal(goal, self.motion.last)  # type: ignore[attr-defined]
        if goal is None or place is None:
            return
        low, high = np.minimum(self.limits.low, at.position), np.maximum(self.limits.high, at.position)
        if passed.factor < 1:
            brake = at.position + self.braked(at.velocity, at.acceleration) * DT
            mixed = brake + passed.factor * (np.clip(place, low, high) - brake)
            assert np.abs(passed.set_point.position - mixed).max() < 1e-9, "one factor for all joints of all arms"
        if factor == 1:
            assert np.array_equal(passed.set_point.position, np.clip(goal, low, high)), "a factor of 1 off its goal"
        else:
            assert reason or failing, "slowed for a reason"

    def braked(self, v: np.ndarray, a: np.ndarray) -> np.ndarray:
        """The velocity after a pass of braking, joint by joint."""
        _, most, jerk = self.limits.rates
        out = np.empty_like(v)
        for i, (speed, now, top, change) in enumerate(zip(v, a, most, jerk * DT, strict=True)):
            want = -np.sign(speed) * min(top, (change / DT * abs(speed)) ** 0.5, abs(speed) / DT)
            out[i] = speed + DT * (now + np.clip(want - now, -change, change))
        return out

    def check_path(self, new: np.ndarray, state: str) -> None:
        """That a set point is within every limit of the ones before."""
        assert self.path is not None
        p, of = [*self.path, new], self.limits
        assert np.isfinite(new).all()
        v = [(b - a) / DT for a, b in itertools.pairwise(p)]
        a = [(y - x) / DT for x, y in itertools.pairwise(v)]
        assert (np.abs(v[2]) <= of.rates.velocity * CLOSE).all(), "velocity"
        assert (np.abs(a[1]) <= of.rates.acceleration * CLOSE).all(), "acceleration"
        assert (np.abs(a[1] - a[0]) / DT <= of.rates.jerk * CLOSE + 1e-14 / DT**3).all(), "jerk"
        assert (new >= np.minimum(of.low, p[2]) - 1e-8).all(), "low"
        assert (new <= np.maximum(of.high, p[2]) + 1e-8).all(), "high"
        if state in ("HOLD", "HELD"):
            assert np.array_equal(new, p[2]), "a held robot stands where it was commanded"
        elif state == "BRAKE":
            assert np.abs(v[2] - self.braked(v[1], a[0])).max() < 1e-4, "braking as hard as allowed, and no harder"
        self.path = p[1:]

    def check_stop(self, now: float, told: list[tuple[float, str, int]]) -> None:
        """That the driver gets each stop, and the next level where it does not answer within 100 ms."""
        if self.asked is None:
            assert not told
            return
        since, level = self.asked
        if now - since >= 0.1:
            since, level = now, level + 1
            self.own = True
        assert [x[2] for x in told] == [level]
        self.asked = None if self.world.arms.answers else (since, level)
