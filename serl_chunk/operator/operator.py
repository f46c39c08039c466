"""What a human operator requests of an actor by keys, and what the console shows of it.

The control loop polls an operator on every tick, and wherever it waits; no poll waits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from serl_chunk.actor.interfaces import LoopOperator, RobotInProcess
from serl_chunk.attention.attention import Attention
from serl_chunk.console.bindings import EFFECTIVE, STOPS, Action, ActorState, RequestQueue, bind_keys, shown_inputs
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.operator.approval import Approval, ApprovedPlanner
from serl_chunk.operator.consent import Consent, robot_obstacles
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.operator.motion_permit import COUNTDOWN, Permit, confirm_scene, drive_leaders
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import AS_IS, InterventionSource, RobotEnv
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk.types import Amend, End, Observation, Outcome, ShownRobot
from serl_chunk_robot.client.client import UNCONFIRMED

logger = logging.getLogger(__name__)

SHOW_SECONDS = 0.1  # between two views of an unchanged state
POLL_SECONDS = 0.01  # between polls where the operator is waited for
QUESTION_SECONDS = 10.0  # for the answer to a question
PERIOD = 1.0  # seconds over which a rate is counted
TICKS = 250  # whose lateness is shown
WINDOW = 600.0  # seconds in which successes are counted ...
LEAST = 60.0  # ... of which so many are assumed at least, for the first success is no trend
ACTING = frozenset({ActorState.POLICY, ActorState.HUMAN, ActorState.LEARNER_LOST})  # ticks follow each other


class OperatorInputs:
    """Where requests come from: the keys of a console, other threads, a pedal, gestures."""

    def __init__(
        self, console: OperatorConsole, devices: OperatorDevices, bound: Mapping[str, Action], now: Callable[[], float],
        takes: Callable[[Action], bool],
    ) -> None:  # fmt: skip
        self.console, self.devices, self.queue = console, devices, RequestQueue(now)
        self._bound, self._takes = bound, takes

    def requested(self, shown: Callable[[], ShownRobot | None]) -> Iterator[tuple[Action, ShownRobot | None, bool]]:
        """Yield actions, the robot that was shown then, and whether a key at a terminal or page requests it.

        `shown`: the robot as a person at a pedal sees it, when the pedal's action is taken.
        """
        for inputs in (self.console, self.queue):
            yield from ((action, inputs.shown, True) for action in inputs.actions() if not self._takes(action))
        yield from ((action, shown(), False) for action in self.devices.actions() if not self._takes(action))

    def drop(self) -> None:
        """Forget what was requested: nothing moves by a key that was typed ahead."""
        for inputs in (self.console, self.queue, self.devices):
            inputs.empty()

    def named(self, action: Action) -> str:
        return shown_inputs(action, self._bound, 1) or action.value

    def question(self, now: float) -> str:
        return self.queue.question(now) or self.devices.question(now)


@dataclasses.dataclass
class _Stage:
    resets: bool = False  # the robot is being reset
    inside: bool = False  # it is under way, as it had a tick
    stopped: bool = False  # it is to end
    again: bool = False  # the reset is to be repeated
    new_object: bool = False  # with its steps for a new object


@dataclasses.dataclass
class _Scene:
    """Episodes whose scene the operator confirms: "first" of the session, "each", or "" for none."""

    ready: str
    waits: bool = False  # it is waited for
    confirmed: bool = False  # it was, in this session

    @property
    def confirms(self) -> bool:
        return self.ready == "each" or (self.ready == "first" and not self.confirmed)


@dataclasses.dataclass
class _Parking:
    asked_at: float | None = None  # when the question was put
    forbidden: bool = False  # it was held after "quit"

    def asks(self, now: float) -> bool:
        return self.asked_at is not None and now - self.asked_at < QUESTION_SECONDS


@dataclasses.dataclass
class _LastPoll:
    word: ActorState = ActorState.WAITING
    proposed: object = None
    shown_at: float = -1.0
    stopped: bool = False  # the robot
    lost: frozenset[str] = frozenset()  # devices


class SessionFigures:
    """Rate, lateness, human share, successes and pauses since the process's first tick."""

    def __init__(self) -> None:
        self._late: collections.deque[float] = collections.deque(maxlen=TICKS)
        self._successes: dict[str, float] = {}  # by episode, when
        self._rate: float | None = None
        self._counted, self._since = 0, 0.0  # ticks since then
        self._ticks = self._human = 0
        self._began: float | None = None
        self._paused: float | None = None

    def tick(self, now: float, *, by_human: bool, late: float | None) -> None:
        """Count a tick. `late`: seconds after its deadline; None where it has none."""
        if self._began is None:
            self._began = self._paused = now
        if not self._counted:
            self._since = now
        elif now - self._since >= PERIOD:
            self._rate, self._counted, self._since = self._counted / (now - self._since), 0, now
        self._counted += 1
        self._ticks += 1
        self._human += by_human
        if late is not None:
            self._late.append(late)

    def rest(self) -> None:
        self._counted = 0

    def pause(self, now: float) -> None:
        """Note that the robot waits for the operator, or holds for one."""
        self._paused = now

    def ended(self, end: End, now: float) -> None:
        if end.outcome is Outcome.SUCCESS:
            self._successes[end.episode_id] = now

    def corrected(self, amend: Amend) -> None:
        """Count an episode as it was corrected: no correction of an operator makes a success."""
        self._successes.pop(amend.episode_id, None)

    def fields(self, now: float) -> dict[str, Any]:
        if self._began is None or self._paused is None:
            return {}
        self._successes = {of: then for of, then in self._successes.items() if now - then <= WINDOW}
        late = sorted(self._late)
        span = min(max(now - self._began, LEAST), WINDOW)
        return {
            "rate": self._rate,
            "lateness_p50": 1e3 * late[len(late) // 2] if late else None,
            "lateness_p99": 1e3 * late[int(0.99 * (len(late) - 1))] if late else None,
            "human_share": self._human / self._ticks,
            "successes": len(self._successes) * WINDOW / span,
            "since_pause": (now - self._paused) / 60,
        }


class Operator(LoopOperator):
    """The operator of one robot.

    Each motion that the process begins is preceded by a countdown: a reset, the first tick after the scene was
    confirmed, going on after a hold, parking. A hold lasts until "go on". A stop is latched until a clear, after which
    the robot holds. One that is HELD by its server goes on by a key at the terminal or the page alone (`Consent`).

    Args:
        robot: of a robot server; None: the robot is in this process.
        amend: sends a correction of an episode.
        end: ends the process.
        now, pause, countdown: monotonic seconds, a wait for some, and how many precede a motion.
        inputs: key or gesture -> action, to be named in remedies.
        ready: episodes whose scene the operator confirms: "first", "each", or "" for none.
        takes: called with each action; True where it has another meaning, and is not the operator's.
    """

    def __init__(
        self, console: OperatorConsole, robot: ServedOperator | None, *, amend: Callable[[Amend], object],
        end: Callable[[], None], now: Callable[[], float], devices: OperatorDevices | None = None,
        inputs: Mapping[str, Action] | None = None, countdown: float = COUNTDOWN, ready: str = "",
        pause: Callable[[float], None] = time.sleep, attention: Attention | None = None,
        takes: Callable[[Action], bool] = lambda action: False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._robot, self._served = robot or RobotInProcess(), robot is not None
        self._end, self._now, self._pause = end, now, pause
        bound = bind_keys() if inputs is None else inputs
        self._inputs = OperatorInputs(console, devices or OperatorDevices(), bound, now, takes)
        self._attention, self._figures, self._amend = attention or Attention(), SessionFigures(), amend
        self.labels = EpisodeLabels(self._correct)
        self._permit = Permit(countdown)
        self._consent = Consent(self._robot, self._permit)
        self.approval = Approval(self._permit, self._is_stopped, self._inputs.named(Action.GO))
        self.quits = False  # after this episode
        self.view = ConsoleState(ActorState.WAITING)  # what was shown last; any thread may read it
        self._stage, self._scene, self._parking = _Stage(), _Scene(ready), _Parking()
        self._last = _LastPoll(proposed=self.approval.proposed)

    @property
    def planner(self) -> Callable[..., ApprovedPlanner]:
        return functools.partial(ApprovedPlanner, self.approval)

    @property
    def holding(self) -> bool:
        return self._permit.held or self._permit.counts or self._robot.held

    def attach(self, env: RobotEnv, intervention: InterventionSource | None) -> None:
        super().attach(env, intervention)
        env.may_move = self.may_move
        self._inputs.devices.watch(intervention)

    def request(self, action: Action, source: str, seen: float | None = None, robot: ShownRobot | None = None) -> None:
        """Request an action from any thread, as by a button of a page; the control loop takes it as it takes a key.

        What stops is also sent to the robot's server at once. Two actions need a second request, as their keys do
        (`bindings.Keys`); each `source` counts for itself. `seen`, `robot`: of its state (`RequestQueue.put`).
        """
        if action in (Action.STOP, Action.END):
            self._robot.request("stop")
        self._inputs.queue.put(action, source, self._now(), seen, robot)

    def poll(self, word: ActorState, *waits_for: Obstacle) -> None:
        """Take in keys, and show the state.

        Args:
            word: what the process does; a hold or a stop of the operator's goes before it.
            waits_for: why it does not go on.
        """
        now = self._now()
        self._inputs.devices.look()
        self._notice(now)
        self._enter(word, now, waits_for)
        for action, shown, by_key in self._inputs.requested(lambda: self.view.robot):
            if action in EFFECTIVE[self._last.word]:
                self._act(action, now, shown, by_key=by_key)
                if action in STOPS:  # it wins over what other inputs requested up to now
                    self._inputs.drop()
                self._enter(word, now, waits_for)
            else:
                logger.debug(f"key ignored: action={action} state={self._last.word}")
        if self._permit.counts and (why := self._obstacles()):
            logger.warning(f"cannot start: {why[0].what}. Remedy: {why[0].remedy}, then go on again")
            self._permit.hold()
        if self._permit.elapse(now) or self._permit.held:
            self._enter(word, now, waits_for)

    def tick(self, *, by_human: bool, late: float | None = None) -> bool:
        self._stage.resets, self._stage.inside = False, True
        self._figures.tick(self._now(), by_human=by_human, late=late)
        self.poll(ActorState.HUMAN if by_human else self.actor.without_human)
        self._attention.tick(by_human=by_human, holding=self.holding)
        return self.holding

    def decided(self, record: Mapping[str, Any]) -> None:
        """Look at the record of a decision that is to be executed, and hold where attention requests it."""
        if self._attention.decided(record):
            self._act(Action.HOLD, self._now())

    def waits(self, *obstacles: Obstacle) -> None:
        if not self._stage.inside:  # else for a chunk or updates
            super().waits()
        self.poll(self.actor.without_human if self._stage.inside and not obstacles else ActorState.WAITING, *obstacles)

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        self.actor.stop = others

        def stop() -> str | None:
            if self._stage.resets:
                self.poll(ActorState.RESET)
            left = self._stage.resets and self.quits and self._permit.held  # a held reset does not go on any more
            return OPERATOR if self._stage.stopped or left else others()

        return stop

    def outcome(self) -> Outcome | None:
        return self.labels.outcome

    def may_move(self) -> bool:
        """Poll where a reset is about to begin; returns whether it may, once for each countdown, which it begins."""
        if permitted := self._permitted():
            self._permit.granted = False  # a reset that ended early begins again after another countdown
        return permitted

    def _permitted(self) -> bool:
        self.poll(ActorState.RESET)
        permit = self._permit
        if not (permit.is_granted(self._now()) or self.holding or self._is_stopped() or self._obstacles()):
            permit.begin(self._now())
            self.poll(ActorState.RESET)
        return permit.granted

    def reset(self, env: RobotEnv, seed: int, options: Mapping[str, str]) -> Observation | None:
        """Begin an episode: reset the robot, and wait for the scene where it is to be confirmed.

        Returns the first observation. None: there is no episode, as a stop or the end of the session came before it.
        """
        self.labels.begin()
        self._attention.begin()
        self._permit.begin_episode()
        self._stage.stopped, self._stage.resets = False, True
        self._figures.rest()
        confirms = self._scene.confirms and options.get("init_state") != AS_IS
        if confirms and not env.observes_again and not self._prepared(env, confirms):
            return None
        while True:
            while not self._permitted():
                if self._over():
                    return None
                env.idle()
                self._pause(POLL_SECONDS)
            new_object: dict[str, Any] = {"new_object": True} if self._stage.new_object else {}
            raw = env.reset(seed=seed, options={**new_object, **options} or None)[0]
            self._permit.granted = self._stage.again = False
            if self._stage.stopped or self.quits:
                return None
            if self._stage.new_object and not new_object:  # requested in a hold of this reset
                continue
            self._stage.new_object = False
            if self._prepared(env, confirms and env.observes_again):
                return env.observe_again() if env.observes_again and (confirms or self._inputs.devices.drives) else raw
            if not self._stage.again:
                return None

    def episode_ended(self, end: End) -> None:
        """Send what was requested of the episode before this one, and keep what can still be undone of this one."""
        self._stage.inside = False
        self.approval.withdraw()
        self._figures.rest()
        if end.length > 0:  # else nothing is recorded of it
            self.labels.ended(end)
            self._figures.ended(end, self._now())
        if self.feed is not None:
            self.feed.ended(end)

    def _correct(self, amend: Amend) -> None:
        self._figures.corrected(amend)
        self._amend(amend)

    def send_pending(self) -> None:
        self.labels.forget()

    def park(self) -> None:
        """Park the robot after the countdown, and return once it stands. A hold or a stop cancels it.

        A robot that was held after "quit" stays where it is.
        """
        if not self._served or self._parking.forbidden:
            return
        self._inputs.devices.watch(None)  # a device that moved the robot may be closed
        self._begin_parking()
        while self._permit.counts or not self._robot.idle or self._robot.moving:
            self.poll(ActorState.WAITING)
            if self._is_stopped():
                logger.warning("not parked: the robot is stopped")
                return
            self._pause(POLL_SECONDS)

    def _prepared(self, env: RobotEnv, confirms: bool) -> bool:
        """Wait for the scene if it `confirms`, then for driven leaders. False: another reset, or no episode."""
        wait, self._scene.waits = functools.partial(self._waits, env), True
        confirmed = not confirms or confirm_scene(self._permit, wait, self._inputs.named(Action.GO))
        self._scene.confirmed |= confirms and confirmed
        self._scene.waits, ready = False, confirmed and drive_leaders(self._inputs.devices.drives, self._permit, wait)
        return ready

    def _waits(self, env: RobotEnv, *why: Obstacle) -> bool:
        """Poll, and wait a moment; returns whether this episode may still begin without another reset."""
        env.idle()
        self.poll(ActorState.WAITING, *why)
        self._pause(POLL_SECONDS)
        return not (self._stage.again or self._over())

    def _act(self, action: Action, now: float, shown: ShownRobot | None = None, *, by_key: bool = False) -> None:
        asks, self._parking.asked_at = self._parking.asks(now), None
        match action:
            case Action.HOLD:
                self._permit.hold()
                if not self._stage.inside:
                    self._consent.brake(now)
                    self._parking.forbidden = self.quits
            case Action.GO:
                self._consent.go(now, shown, by_key=by_key, scene=self._scene.waits, resume=self._inputs.devices.resume)
            case Action.STOP | Action.END:
                self._permit.stop()
                self._stage.stopped = True
                self._robot.request("stop")
                if action is Action.END:
                    self._end()
            case Action.CLEAR:
                self._permit.latched = False  # and held further on
                self._robot.request("clear", shown)
            case Action.SUCCESS | Action.FAILURE if self._stage.inside or self.labels.asked:
                self.labels.outcome = Outcome.SUCCESS if action is Action.SUCCESS else Outcome.FAILURE
            case Action.DISCARD if self._stage.inside:
                self.labels.discard()
                self._stage.stopped = True
            case Action.DISCARD:
                self.labels.discard_last()
            case Action.UNDO:
                self.labels.undo()
            case Action.RESET | Action.RESET_NEW:
                self._stage.new_object = action is Action.RESET_NEW
                self._stage.stopped = self._stage.inside  # its end leads to the next reset, which has its own countdown
                self.labels.repeats = self._stage.inside or self.labels.asked
                self._stage.again = self._scene.waits and self._env is not None and self._env.observes_again
                self._permit.release()
            case Action.PARK if not self._served:
                logger.warning("park: this robot is moved in this process, which knows no pose to park in")
            case Action.PARK:
                self._parking.asked_at = now
            case Action.YES if asks:
                # The next tick follows a reset.
                self._stage.stopped, self._stage.again = self._stage.inside, self._scene.waits
                self._begin_parking()
            case Action.QUIT:
                self.quits = True
                logger.info("ends after this episode")
                if self._stage.resets and not (self._robot.moving and not self._robot.waiting):
                    self._permit.hold()  # it stands: nothing moves before it is parked
                    self._consent.brake(now)

    def _begin_parking(self) -> None:
        self._permit.hold()
        # The end of an episode releases the robot meanwhile: what counts is what is shown when the countdown ends.
        self._permit.begin(self._now(), lambda: self._robot.request("park", self.view.robot), lasts=True)

    def _over(self) -> bool:
        return self._stage.stopped or self.quits or self.actor.stop() is not None

    def _is_stopped(self) -> bool:
        return self._permit.latched or self._robot.stopped

    def _notice(self, now: float) -> None:
        """Hold where the robot was stopped or held elsewhere, and where a device is lost while the robot may move."""
        stopped, lost = self._is_stopped(), frozenset(self._inputs.devices.lost)
        if self._consent.newly_held(inside=self._stage.inside) or (stopped and not self._last.stopped):
            self._permit.hold()
        moves = self._stage.inside or self._last.word is ActorState.RESET or not self._robot.idle
        for name in lost - self._last.lost if moves else ():
            logger.warning(f"device lost: name={name}. The robot holds")
            self._act(Action.HOLD, now)
        self._last.stopped, self._last.lost = stopped, lost
        self._consent.look(now)

    def _state(self, word: ActorState) -> ActorState:
        if self._is_stopped():
            return ActorState.STOPPED
        if self._robot.moving and not self._stage.inside:
            return ActorState.WAITING if self._robot.waiting else ActorState.RESET
        if self._permit.held or self._robot.held:
            return ActorState.HOLD
        if word is ActorState.RESET and self._obstacles():
            return ActorState.WAITING
        return ActorState.LEARNER_LOST if word is ActorState.POLICY and self.actor.learner_lost() else word

    def _obstacles(self) -> tuple[Obstacle, ...]:
        """Return why no motion may begin: a silent server, cameras and devices."""
        why = "silent" if self._robot.silent else f"STALLED ({self._robot.why})" if self._robot.stalled else ""
        gone = (Obstacle(f"the robot's server is {why}", "look at its log, and start it again"),) if why else ()
        of_robot = () if self._env is None else (Obstacle(*each) for each in self._env.hindrances())
        return (*gone, *of_robot, *self._inputs.devices.obstacles())

    def _listed(self, waits_for: tuple[Obstacle, ...]) -> tuple[Obstacle, ...]:
        shown = {"clear": self._inputs.named(Action.CLEAR), "go": self._inputs.named(Action.GO)}
        first = robot_obstacles(self._robot, self._is_stopped(), **shown)
        return (*first, *self._obstacles(), *waits_for, *self._inputs.devices.remarks())

    def _enter(self, word: ActorState, now: float, waits_for: tuple[Obstacle, ...]) -> None:
        word, proposed, last, before = self._state(word), self.approval.proposed, self._last, self.view.robot
        robot = self._robot.shown if self._served else None
        # It was stopped once more.
        again = word is ActorState.STOPPED and before is not None and before.generation != self._robot.shown.generation
        if changed := word is not last.word or proposed is not last.proposed or again:
            last.word, last.proposed = word, proposed
            self._inputs.drop()
        if word in (ActorState.WAITING, ActorState.HOLD, ActorState.STOPPED):
            self._figures.pause(now)
        if not changed and now - last.shown_at < SHOW_SECONDS:
            return
        last.shown_at = now
        if self.feed is not None:
            self.feed.correct(self.labels.label)
        question = f"park? {self._inputs.named(Action.YES)} confirms, any other key cancels"
        question = question if self._parking.asks(now) else ""
        begun, described = self._inputs.question(now), self.actor.describe()
        question = question or begun or self.approval.question or described.get("question", "")
        self.view = ConsoleState(
            word, self._permit.seconds(now),
            **{**self._figures.fields(now), **described,
               "cameras": tuple((self._env.camera_ages() if self._env else {}).items()),
               "obstacles": () if word in ACTING else self._listed(waits_for),
               "alarm": UNCONFIRMED if self._robot.unconfirmed else "", "robot": robot,
               "outcome": self.labels.shown, "notice": self._attention.notice,
               "question": question, "proposed": proposed},
        )  # fmt: skip
        self._inputs.console.show(self.view)
