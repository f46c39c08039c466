"""What a human operator requests of an actor by keys, and what the console shows of it.

The control loop polls an operator on every tick, and wherever it waits; no poll waits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from serl_chunk.actor.interfaces import ActorReports, Console, RobotRequests
from serl_chunk.attention.attention import Attention
from serl_chunk.console.bindings import EFFECTIVE, STOPS, Action, ActorState, bind_keys, shown_inputs
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.request_queue import RequestQueue
from serl_chunk.console.view import ConsoleState, Obstacle
from serl_chunk.operator.approval import Approval, ApprovedPlanner
from serl_chunk.operator.consent import Consent
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.operator.leader_alignment import confirm_scene, drive_leaders
from serl_chunk.operator.motion_permit import COUNTDOWN, Brake, Permit
from serl_chunk.operator.obstacles import motion_obstacles, robot_obstacles
from serl_chunk.operator.session_figures import SessionFigures
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import Amend, End, Observation, Outcome, ShownRobot

logger = logging.getLogger(__name__)

SHOW_SECONDS = 0.1  # between two views of an unchanged state
POLL_SECONDS = 0.01  # between polls where the operator is waited for
QUESTION_SECONDS = 10.0  # for the answer to a question
ACTING = frozenset({ActorState.POLICY, ActorState.HUMAN, ActorState.LEARNER_LOST})  # ticks follow each other


class OperatorInputs:
    """Where requests come from: the keys of a console, other threads, a pedal, gestures."""

    def __init__(
        self, console: Console, devices: OperatorDevices, bound: Mapping[str, Action], now: Callable[[], float]
    ) -> None:
        self.console, self.devices, self.queue, self._bound = console, devices, RequestQueue(now), bound

    def requested(self, shown: Callable[[], ShownRobot | None]) -> Iterator[tuple[Action, ShownRobot | None, bool]]:
        """Yield actions, the robot that was shown then, and whether a key at a terminal or page requests it.

        `shown`: the robot as a person at a pedal sees it, when the pedal's action is taken.
        """
        for inputs in (self.console, self.queue):
            for action in inputs.actions():
                yield action, inputs.shown, True
        yield from ((action, shown(), False) for action in self.devices.actions())

    def drop(self) -> None:
        """Forget what was requested: nothing moves by a key that was typed ahead."""
        for inputs in (self.console, self.queue, self.devices):
            inputs.empty()

    def named(self, action: Action) -> str:
        """The key or gesture of an action, for remedies."""
        return shown_inputs(action, self._bound, 1) or action.value

    def question(self, now: float) -> str:
        """What a first request of two waits for."""
        return self.queue.question(now) or self.devices.question(now)


@dataclasses.dataclass
class _Stage:
    """How far the episode is."""

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
    """Whether the robot is to be parked."""

    asked_at: float | None = None  # when the question was put
    forbidden: bool = False  # it was held after "quit"

    def asks(self, now: float) -> bool:
        return self.asked_at is not None and now - self.asked_at < QUESTION_SECONDS


@dataclasses.dataclass
class _LastPoll:
    """What the poll before saw, and showed."""

    word: ActorState = ActorState.WAITING
    proposed: object = None
    shown_at: float = -1.0
    stopped: bool = False  # the robot
    lost: frozenset[str] = frozenset()  # devices


class Operator:
    """The operator of one robot.

    Each motion that the process begins is preceded by a countdown: a reset, the first tick after the scene was
    confirmed, going on after a hold, parking. A hold lasts until "go on". A stop is latched until a clear, after which
    the robot holds. One that is HELD by its server goes on by a key at the terminal or the page alone (`Consent`).

    Args:
        console: keys and view.
        robot: of a robot server; None: the robot is in this process.
        amend: sends a correction of an episode.
        end: ends the process.
        now: monotonic seconds.
        devices: a pedal, and gestures.
        inputs: key or gesture -> action, to be named in remedies.
        countdown: seconds.
        ready: episodes whose scene the operator confirms: "first", "each", or "" for none.
        pause: waits for some seconds.
        attention: of the operator, to the policy's decisions.
    """

    def __init__(
        self, console: Console, robot: RobotRequests | None, *, amend: Callable[[Amend], object],
        end: Callable[[], None], now: Callable[[], float], devices: OperatorDevices | None = None,
        inputs: Mapping[str, Action] | None = None, countdown: float = COUNTDOWN, ready: str = "",
        pause: Callable[[float], None] = time.sleep, attention: Attention | None = None,
    ) -> None:  # fmt: skip
        self._robot, self._end, self._now, self._pause = robot, end, now, pause
        bound = bind_keys() if inputs is None else inputs
        self._inputs = OperatorInputs(console, devices or OperatorDevices(), bound, now)
        self._attention, self._figures, self.labels = attention or Attention(), SessionFigures(), EpisodeLabels(amend)
        self._consent, self._brake = Consent(robot, Permit(countdown)), Brake(robot)
        self.approval = Approval(self._permit, self._is_stopped, self._inputs.named(Action.GO))
        self.quits = False  # after this episode
        self.feed: LiveFeed | None = None  # of a page that shows the episodes
        self.actor = ActorReports()
        self.view = ConsoleState(ActorState.WAITING)  # what was shown last; any thread may read it
        self._env: RobotEnv | None = None
        self._stage, self._scene, self._parking = _Stage(), _Scene(ready), _Parking()
        self._last = _LastPoll(proposed=self.approval.proposed)

    @property
    def planner(self) -> Callable[..., ApprovedPlanner]:
        """Of a control loop in real time."""
        return functools.partial(ApprovedPlanner, self.approval)

    @property
    def _permit(self) -> Permit:
        return self._consent.permit

    @property
    def holding(self) -> bool:
        """Whether the robot is to hold, and devices command nothing."""
        return self._permit.held or self._permit.counts or self._consent.held

    def attach(self, env: RobotEnv, intervention: InterventionSource | None) -> None:
        """Let resets of a robot wait for the operator, and watch the devices that may move it."""
        self._env = env
        env.may_move = self.may_move
        self._inputs.devices.watch(intervention)

    def request(self, action: Action, source: str, seen: float | None = None, robot: ShownRobot | None = None) -> None:
        """Request an action from any thread, as by a button of a page; the control loop takes it as it takes a key.

        What stops is also sent to the robot's server at once. Two actions need a second request, as their keys do
        (`bindings.second_key`); each `source` counts for itself. `seen`, `robot`: of its state (`RequestQueue.put`).
        """
        if action in (Action.STOP, Action.END):
            self._consent.request("stop")
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
        """Poll within an episode; returns whether the robot is to hold, and devices command nothing.

        Args:
            late: seconds after the tick's deadline.
        """
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
        """Poll while the process waits for something else than the operator; in an episode, for a chunk or updates."""
        if self._env is not None and not self._stage.inside:
            self._env.idle()
        self.poll(self.actor.without_human if self._stage.inside and not obstacles else ActorState.WAITING, *obstacles)

    def stopping(self, others: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return a `stop` of the control loop: `others`, or this operator, who is polled while the robot is reset."""
        self.actor.stop = others

        def stop() -> str | None:
            if self._stage.resets:
                self.poll(ActorState.RESET)
            left = self._stage.resets and self.quits and self._permit.held  # a held reset does not go on any more
            return OPERATOR if self._stage.stopped or left else others()

        return stop

    def outcome(self) -> Outcome | None:
        """Return the label that ends the episode, or None."""
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

    def reset(self, env: RobotEnv, seed: int) -> Observation | None:
        """Begin an episode: reset the robot, and wait for the scene where it is to be confirmed.

        Returns:
            The first observation. None: there is no episode, as a stop or the end of the session came before it.
        """
        self.labels.begin()
        self._attention.begin()
        self._permit.begin_episode()
        self._stage.stopped, self._stage.resets = False, True
        self._figures.rest()
        confirms = self._scene.confirms
        if confirms and not env.observes_again and not self._prepared(env, confirms):
            return None
        while True:
            while not self._permitted():
                if self._over():
                    return None
                env.idle()
                self._pause(POLL_SECONDS)
            options = {"new_object": True} if self._stage.new_object else None
            raw = env.reset(seed=seed, options=options)[0]
            self._permit.granted = self._stage.again = False
            if self._stage.stopped or self.quits:
                return None
            if self._stage.new_object and options is None:  # requested in a hold of this reset
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

    def send_pending(self) -> None:
        """Send a discard that was not undone. What has ended cannot be corrected any more."""
        self.labels.forget()

    def park(self) -> None:
        """Park the robot after the countdown, and return once it stands. A hold or a stop cancels it.

        A robot that was held after "quit" stays where it is.
        """
        if (robot := self._robot) is None or self._parking.forbidden:
            return
        self._inputs.devices.watch(None)  # a device that moved the robot may be closed
        self._begin_parking()
        while self._permit.counts or not robot.idle or robot.moving:
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
                    self._brake.begin(now)
                    self._parking.forbidden = self.quits
            case Action.GO:
                self._consent.go(now, shown, by_key=by_key, scene=self._scene.waits, resume=self._inputs.devices.resume)
            case Action.STOP | Action.END:
                self._permit.stop()
                self._stage.stopped = True
                self._consent.request("stop")
                if action is Action.END:
                    self._end()
            case Action.CLEAR:
                self._permit.latched = False  # and held further on
                self._consent.request("clear", shown)
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
            case Action.PARK if self._robot is None:
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
                robot = self._robot
                if self._stage.resets and not (robot is not None and robot.moving and not robot.waiting):
                    self._permit.hold()  # it stands: nothing moves before it is parked
                    self._brake.begin(now)

    def _begin_parking(self) -> None:
        self._permit.hold()
        # The end of an episode releases the robot meanwhile: what counts is what is shown when the countdown ends.
        self._permit.begin(self._now(), lambda: self._consent.request("park", self.view.robot), lasts=True)

    def _over(self) -> bool:
        return self._stage.stopped or self.quits or self.actor.stop() is not None

    def _is_stopped(self) -> bool:
        return self._permit.latched or (self._robot is not None and self._robot.stopped)

    def _notice(self, now: float) -> None:
        """Hold where the robot was stopped or held elsewhere, and where a device is lost while the robot may move."""
        stopped, lost = self._is_stopped(), frozenset(self._inputs.devices.lost)
        if self._consent.newly_held(inside=self._stage.inside) or (stopped and not self._last.stopped):
            self._permit.hold()
        works = self._robot is not None and not self._robot.idle
        moves = self._stage.inside or self._last.word is ActorState.RESET or works
        for name in lost - self._last.lost if moves else ():
            logger.warning(f"device lost: name={name}. The robot holds")
            self._act(Action.HOLD, now)
        self._last.stopped, self._last.lost = stopped, lost
        self._brake.look(now)

    def _state(self, word: ActorState) -> ActorState:
        robot = self._robot
        if self._is_stopped():
            return ActorState.STOPPED
        if robot is not None and robot.moving and not self._stage.inside:
            return ActorState.WAITING if robot.waiting else ActorState.RESET
        if self._permit.held or self._consent.held:
            return ActorState.HOLD
        if word is ActorState.RESET and self._obstacles():
            return ActorState.WAITING
        return ActorState.LEARNER_LOST if word is ActorState.POLICY and self.actor.learner_lost() else word

    def _obstacles(self) -> tuple[Obstacle, ...]:
        """Return why no motion may begin."""
        return motion_obstacles(self._robot, self._env, self._inputs.devices)

    def _listed(self, waits_for: tuple[Obstacle, ...]) -> tuple[Obstacle, ...]:
        shown = {"clear": self._inputs.named(Action.CLEAR), "go": self._inputs.named(Action.GO)}
        first = robot_obstacles(self._robot, self._is_stopped(), **shown)
        return (*first, *self._obstacles(), *waits_for, *self._inputs.devices.remarks())

    def _enter(self, word: ActorState, now: float, waits_for: tuple[Obstacle, ...]) -> None:
        word, proposed, robot, last = self._state(word), self.approval.proposed, self._consent.shown, self._last
        again = word is ActorState.STOPPED and self._consent.differs(self.view.robot)  # it was stopped once more
        if changed := word is not last.word or proposed is not last.proposed or again:
            last.word, last.proposed = word, proposed
            self._inputs.drop()
        if word in (ActorState.WAITING, ActorState.HOLD, ActorState.STOPPED):
            self._figures.pause(now)
        if not changed and now - last.shown_at < SHOW_SECONDS:
            return
        last.shown_at = now
        question = f"park? {self._inputs.named(Action.YES)} confirms, any other key cancels"
        question = question if self._parking.asks(now) else ""
        begun = self._inputs.question(now)
        self.view = ConsoleState(
            word, self._permit.seconds(now),
            **{**self._figures.fields(now), **self.actor.describe(),
               "cameras": tuple((self._env.camera_ages() if self._env else {}).items()),
               "obstacles": () if word in ACTING else self._listed(waits_for),
               "alarm": self._consent.alarm, "robot": robot,
               "outcome": self.labels.shown, "notice": self._attention.notice,
               "question": question or begun or self.approval.question, "proposed": proposed},
        )  # fmt: skip
        self._inputs.console.show(self.view)
