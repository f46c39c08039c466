"""What keys do to an actor in each state, and what they leave in the records."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from actor_helpers import HumanOnTicks, LineEnv, ListSink, NoisyAgent, make_config, make_policy
from live_desk import Robot

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.attention.alarm import Alarm
from serl_chunk.attention.attention import Attention
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.console.view import ConsoleState
from serl_chunk.operator.motion_permit import COUNTDOWN
from serl_chunk.operator.operator import Operator
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.types import Amend, End, Outcome, Source

DT = 0.02


class Keys:
    """A console whose actions are given by `at`: the number of the poll, or the tick of an episode."""

    def __init__(self, pressed: dict[int, Action] | None, polled: Callable[[], None]) -> None:
        self.pressed, self.polls, self.emptied, self._polled = dict(pressed or {}), -1, 0, polled
        self.at: Callable[[], int] = lambda: self.polls
        self.words: list[ActorState] = []
        self.states: list[ConsoleState] = []
        self.notices: list[str] = []

    def actions(self):
        self.polls += 1
        self._polled()
        if (action := self.pressed.pop(self.at(), None)) is not None:
            yield action

    @property
    def shown(self):
        return self.states[-1].robot

    def empty(self) -> None:
        self.emptied += 1

    def show(self, state) -> None:
        self.states.append(state)
        if not self.words or self.words[-1] is not state.word:
            self.words.append(state.word)
        if not self.notices or self.notices[-1] != state.notice:
            self.notices.append(state.notice)


class Desk:
    def __init__(self, pressed: dict[int, Action] | None = None, *, served: bool = False, **more) -> None:
        self.keys, self.robot = Keys(pressed, lambda: self._pause(DT)), Robot() if served else None
        self.amends: list[Amend] = []
        self.ended = False
        self.time = 0.0
        self.operator = Operator(
            self.keys, self.robot, amend=self.amends.append, end=self._end, now=self._now, pause=self._pause, **more
        )

    def _end(self) -> None:
        self.ended = True

    def _now(self) -> float:
        return self.time

    def _pause(self, seconds: float) -> None:
        self.time += seconds


def episode(desk: Desk, env: LineEnv | None = None, **more):
    sink, env = ListSink(), env or LineEnv(length=200)
    desk.keys.at = lambda: env.tick if env.seeds else -1
    runner = EpisodeRunner(
        env, make_policy(NoisyAgent(8)), sink, config=make_config(), operator=desk.operator,
        **more,
    )  # fmt: skip
    return runner.run_episode(5), sink


@pytest.mark.parametrize(("key", "outcome"), [(Action.SUCCESS, Outcome.SUCCESS), (Action.FAILURE, Outcome.FAILURE)])
def test_a_label_ends_the_episode_on_its_tick_and_goes_before_the_environment(key, outcome):
    for env in (LineEnv(length=200), LineEnv(success_at=7)):
        _, sink = episode(Desk({7: key}), env)
        end = sink.last_end
        assert (end.length, end.terminated, end.outcome, end.outcome_by) == (8, True, outcome, OPERATOR)
        assert sink.steps[-1].reward == float(outcome is Outcome.SUCCESS)


def test_a_hold_lasts_until_go_on_and_its_countdown():
    desk = Desk({5: Action.HOLD, 6: Action.HOLD, 20: Action.GO})
    _, sink = episode(desk)
    sources = [s.source for s in sink.steps]
    held = [k for k, source in enumerate(sources) if source is Source.HOLD]
    assert held[0] == 5
    assert held == list(range(5, held[-1] + 1)), "one hold"
    assert 0 < (held[-1] - 20) * DT <= COUNTDOWN, "a countdown"
    actions = np.array([s.action for s in sink.steps])
    assert (actions[held] == actions[4]).all()
    assert desk.keys.words == [ActorState.RESET, ActorState.POLICY, ActorState.HOLD, ActorState.POLICY]


def test_in_a_hold_a_human_commands_nothing():
    desk = Desk({3: Action.HOLD})
    _, sink = episode(desk, LineEnv(length=30), intervention=HumanOnTicks(frozenset(range(10, 20))))
    assert {s.source for s in sink.steps[3:]} == {Source.HOLD}


def test_after_a_hold_devices_have_to_be_neutral_first():
    class Device(HumanOnTicks):
        restarts = 0

        def restart(self) -> None:
            self.restarts += 1

    device = Device(frozenset())
    _, sink = episode(Desk({3: Action.HOLD, 9: Action.GO}), LineEnv(length=200), intervention=device)
    assert device.restarts == sum(s.source is Source.HOLD for s in sink.steps) > 6


def ended(desk: Desk, name: str, pressed: Action | None = None, outcome: Outcome = Outcome.UNKNOWN) -> None:
    desk.operator.reset(LineEnv(), 0)
    press(desk, pressed)
    desk.operator.tick(by_human=False)
    desk.operator.episode_ended(End(name, 1, None, False, True, outcome))


def press(desk: Desk, action: Action | None) -> None:
    if action is not None:
        desk.keys.pressed[desk.keys.polls + 1] = action


@pytest.mark.parametrize("within", [True, False])
def test_a_discard_is_sent_when_the_next_episode_or_the_session_ends(within):
    desk = Desk()
    ended(desk, "a", Action.DISCARD)
    assert desk.amends == []
    ended(desk, "b", Action.DISCARD if within else None)
    if not within:
        press(desk, Action.DISCARD)
        desk.operator.waits()
    assert desk.amends == [Amend("a", discard=True)]
    desk.operator.send_pending()
    assert desk.amends == [Amend("a", discard=True), Amend("b", discard=True)]


def test_a_discard_can_be_undone():
    desk = Desk()
    ended(desk, "a", Action.DISCARD)
    press(desk, Action.UNDO)
    desk.operator.waits()
    ended(desk, "b")
    ended(desk, "c")
    assert desk.amends == []


def test_a_label_can_be_undone_and_once():
    desk = Desk()
    ended(desk, "a", Action.SUCCESS, Outcome.SUCCESS)
    for _ in range(2):
        press(desk, Action.UNDO)
        desk.operator.waits()
    assert desk.amends == [Amend("a", Outcome.UNKNOWN, OPERATOR, terminated=False, reward=0.0)]


def test_a_success_of_the_classifier_can_be_undone_and_once():
    desk = Desk()
    operator = desk.operator
    for by in ("classifier", "environment"):
        operator.labels.begin()
        operator.episode_ended(End(by, 9, None, True, False, Outcome.SUCCESS, by))
        for _ in range(2):
            press(desk, Action.UNDO)
            operator.waits()
    # The robot had not succeeded: the episode is cut there, and its frames are those of a failure.
    assert desk.amends == [Amend("classifier", Outcome.FAILURE, OPERATOR, terminated=False, reward=0.0)]


def test_quit_ends_after_the_episode():
    desk = Desk({0: Action.QUIT})
    _, sink = episode(desk, LineEnv(length=20))
    assert (desk.operator.quits, sink.last_end.length) == (True, 20)


def test_a_stop_of_another_thread_does_not_wait_for_the_loop():
    desk = Desk(served=True)
    desk.operator.request(Action.STOP, "page")
    assert desk.robot.requests == ["stop"]
    desk.operator.poll(ActorState.POLICY)
    assert desk.operator.view.word is ActorState.STOPPED


ALARM = Alarm(0.5, 0.0, 1.0, 0.05)
LOOK = "look: Q fell from 0.8 to 0.2"


class Values(NoisyAgent):
    """An agent of chunks of 8 steps whose Q at each tick is given."""

    def __init__(self, q) -> None:
        super().__init__(8)
        self.q = q

    def sample(self, params, observation, key, **more):
        chunk, record = super().sample(params, observation, key, **more)
        return chunk, {**record, "q": np.float32(self.q(int(record["q"])))}


def watched(q, pressed=None, *, holds: bool, length: int = 80, **more):
    desk, sink, env = Desk(pressed, attention=Attention(ALARM, holds=holds)), ListSink(), LineEnv(length=length)
    desk.keys.at = lambda: env.tick if env.seeds else -1
    runner = EpisodeRunner(env, make_policy(Values(q)), sink, config=make_config(), operator=desk.operator, **more)
    runner.run_episode(5)
    return desk, [s.source for s in sink.steps], runner


def falling(tick: int) -> float:
    return 0.8 if tick < 16 else 0.2


def test_where_asked_a_fall_of_q_holds_until_go_on():
    _, sources, _ = watched(falling, holds=True)
    assert sources == [Source.POLICY] * 17 + [Source.HOLD] * 63, "from the tick after the decision on"
    desk, sources, _ = watched(falling, {30: Action.GO}, holds=True, length=200)
    held = [t for t, source in enumerate(sources) if source is Source.HOLD]
    assert held == list(range(17, held[-1] + 1)), "the low value after it is no further fall"
    assert held[-1] > 30, "a countdown"
    assert desk.keys.notices == ["", LOOK, ""]


def test_a_fall_across_an_intervention_or_a_hold_is_none():
    desk, _, _ = watched(falling, holds=True, intervention=HumanOnTicks(frozenset(range(10, 20))))
    assert desk.keys.notices == [""]
    desk, _, _ = watched(falling, {10: Action.HOLD, 20: Action.GO}, holds=True, length=300)
    assert desk.keys.notices == [""]
