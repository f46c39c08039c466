"""Every key in every state of an evaluation: which outcomes it leaves, and what the robot was requested."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from actor_helpers import HumanOnTicks, NoisyAgent, make_config, make_policy
from operator_script import Desk, Press, Waiting

from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.evaluation.results import INTERVENTION
from serl_chunk.evaluation.rollouts import FAILED, UNJUDGED, Entry, EvaluationOperator, evaluate_in_turns
from serl_chunk.types import EVAL_SEED_BASE

USUAL = {
    ActorState.STOPPED: Press(Action.CLEAR),
    ActorState.HOLD: (Press(Action.FAILURE), Press(Action.GO)),
    ActorState.WAITING: Press(Action.GO),
}  # the policy acts, and what it left without an outcome is a failure
BEFORE = {  # state -> the keys that lead there
    "POLICY": [],
    "HOLD": [Press(Action.HOLD)],
    "ASKED": [],
    "RESET": [Press(Action.SUCCESS)],
    "STOPPED": [Press(Action.STOP)],
    "WAITING": [],
}


class Evaluation:
    def __init__(self, script, *, env=None, n=2, entries=1, config=None, **more) -> None:
        self.env = env or Waiting(length=40)
        self.env.starts_repeat = True
        ended: list[bool] = []
        operator = EvaluationOperator(wait=lambda seconds: None)
        options = {k: more.pop(k) for k in ("ready", "usual") if k in more}
        self.desk = Desk(script, amend=operator.amend, end=lambda: ended.append(True), **{"usual": USUAL, **options})
        operator.operator = self.desk.operator
        self.results = evaluate_in_turns(
            self.env, [Entry(make_policy(NoisyAgent(8))) for _ in range(entries)], config or make_config(), n=n,
            operator=operator, stop=lambda: "interrupted" if ended else None, **more,
        )  # fmt: skip
        self.result = self.results[0]

    @property
    def outcomes(self) -> list[tuple[int, str, str]]:
        return [(e.seed - EVAL_SEED_BASE, e.outcome.value, e.ended_by) for e in self.result.summaries]

    @property
    def starts(self) -> list[int]:
        return [seed - EVAL_SEED_BASE for seed in self.env.seeds]


class Left(NamedTuple):
    """What an evaluation of two starts leaves after a key, and then what an operator usually does."""

    outcomes: Sequence[tuple[int, str, int]]  # start, outcome, ticks
    starts: Sequence[int]  # of all resets
    sent: Sequence[str] = ()  # to the robot's server
    interrupted: bool = False


S, F = "success", "failure"
SECOND = (1, F, 40)
USUALLY = Left([(0, F, 40), SECOND], [0, 1])
AGAIN = Left([(0, F, 40), SECOND], [0, 0, 1])
CLEARED = ("stop", "clear", "go")
NOTHING = Left([], [0], ("stop",), interrupted=True)
TABLE: dict[str, tuple[Left, dict[Action, Left]]] = {  # state -> what keys without an effect leave, and the others
    "POLICY": (USUALLY, {
        Action.HOLD: Left([(0, F, 8), SECOND], [0, 1]),
        Action.STOP: Left([(0, F, 3), SECOND], [0, 1], CLEARED),
        Action.SUCCESS: Left([(0, S, 4), SECOND], [0, 1]),
        Action.FAILURE: Left([(0, F, 4), SECOND], [0, 1]),
        Action.DISCARD: AGAIN,
        Action.QUIT: Left([(0, F, 40)], [0], interrupted=True),
        Action.END: NOTHING,
    }),
    "HOLD": (Left([(0, F, 12), SECOND], [0, 1]), {
        Action.STOP: Left([(0, F, 7), SECOND], [0, 1], CLEARED),
        Action.SUCCESS: Left([(0, S, 8), SECOND], [0, 1]),
        Action.FAILURE: Left([(0, F, 8), SECOND], [0, 1]),
        Action.DISCARD: AGAIN,
        Action.RESET: AGAIN,
        Action.RESET_NEW: AGAIN,
        Action.QUIT: Left([(0, F, 12)], [0], interrupted=True),
        Action.END: NOTHING,
    }),
    "ASKED": (USUALLY, {  # for a label, after the time limit
        Action.STOP: USUALLY._replace(sent=CLEARED),
        Action.SUCCESS: Left([(0, S, 40), SECOND], [0, 1]),
        Action.FAILURE: USUALLY,
        Action.DISCARD: AGAIN,
        Action.RESET: AGAIN,
        Action.RESET_NEW: AGAIN,
        Action.QUIT: Left([(0, F, 40)], [0], interrupted=True),
        Action.END: NOTHING,
    }),
    "RESET": (Left([(0, S, 4), SECOND], [0, 1]), {  # of the second episode
        Action.STOP: Left([(0, S, 4), SECOND], [0, 1], CLEARED),
        Action.DISCARD: Left([SECOND, (0, F, 40)], [0, 1, 0]),
        Action.UNDO: Left([SECOND, (0, F, 40)], [0, 1, 0]),
        Action.QUIT: Left([(0, S, 4)], [0], interrupted=True),
        Action.END: Left([(0, S, 4)], [0], ("stop",), interrupted=True),
    }),
    "STOPPED": (Left([(0, F, 3), SECOND], [0, 1], CLEARED), {
        Action.STOP: Left([(0, F, 3), SECOND], [0, 1], ("stop", *CLEARED)),
        Action.DISCARD: AGAIN._replace(sent=CLEARED),
        Action.QUIT: Left([(0, F, 3)], [0], CLEARED[:2], interrupted=True),
        Action.END: NOTHING._replace(sent=("stop", "stop")),
    }),
    "WAITING": (USUALLY, {  # for the scene
        Action.STOP: USUALLY._replace(sent=CLEARED),
        Action.QUIT: Left([], [], interrupted=True),
        Action.END: Left([], [], ("stop",), interrupted=True),
    }),
}  # fmt: skip


@pytest.mark.parametrize("action", Action)
@pytest.mark.parametrize("state", TABLE)
def test_every_key_in_every_state(state, action):
    others, table = TABLE[state]
    words = (ActorState.HOLD,) if state == "ASKED" else (ActorState(state),)
    done = Evaluation([*BEFORE[state], Press(action, words)], ready="first" if state == "WAITING" else "")
    assert done.desk.console.script == []
    expected, data = table.get(action, others), done.result.to_json()
    outcomes = [(e["seed"] - EVAL_SEED_BASE, e["outcome"], e["length"]) for e in data["episodes"]]
    left = Left(outcomes, done.starts, done.desk.sent, bool(data.get("interrupted")))
    assert left == expected
    assert {e["ended_by"] for e in data["episodes"]} <= {"operator"}
    assert len(data.get("repeated", [])) == len(done.starts) - len(set(done.starts))


class Noting(Waiting):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.told: list[str] = []
        self.stops: list[str | None] = []  # at each reset

    def reset(self, *, seed=None, options=None):
        self.stops.append(self.stop())
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.told.append("step")
        return super().step(action)

    def rest(self):
        self.told.append("rest")

    def idle(self):
        self.told.append("idle")


HELD = (ActorState.HOLD,)
RESETTING = (ActorState.RESET,)


def test_while_a_label_is_waited_for_the_robot_is_not_commanded_and_the_view_says_why():
    done = Evaluation([Press(Action.SUCCESS, HELD, after=50)], env=Noting(length=40), n=1)
    assert done.env.told.count("step") == 40
    assert done.env.told.count("idle") > 50
    assert UNJUDGED in done.desk.console.states[-1].obstacles
    assert done.desk.words() == [ActorState.RESET, ActorState.POLICY, ActorState.HOLD]


def test_a_robot_is_released_as_soon_as_a_label_ends_the_episode():
    """A robot server's watchdog stops a robot that gets no commands and was not released."""
    done = Evaluation([Press(Action.SUCCESS)], env=Noting(length=40), n=1)
    assert done.env.told[-1] == "rest"


def test_no_view_names_the_version_that_runs():
    states = Evaluation([], entries=2).desk.console.states
    assert len(states) > 20
    assert {state.policy_version for state in states} == {None}


JUDGED = (0, S, "environment")
STOPPED_LABEL = [Press(Action.SUCCESS), Press(Action.STOP, after=-1)]
TAKEN_BACK = [Press(Action.SUCCESS), Press(Action.DISCARD, RESETTING)]
AGAIN_AND_AGAIN = [  # Backspace in its hold does it again; another one in the reset after that is too late for anything
    Press(Action.HOLD),
    Press(Action.DISCARD, HELD),
    Press(Action.DISCARD, (ActorState.RESET, ActorState.HOLD)),
    Press(Action.GO, HELD),
    Press(Action.SUCCESS),
]


@pytest.mark.parametrize(
    ("script", "success_at", "n", "outcomes"),
    [
        ([], 9, 2, [JUDGED, (1, S, "environment")]),  # waits for no label
        ([Press(Action.SUCCESS)], 3, 1, [(0, S, "operator")]),  # who goes before the environment
        ([Press(Action.FAILURE)], 3, 1, [(0, F, "operator")]),
        (STOPPED_LABEL, None, 1, [(0, F, "operator")]),  # a label in the tick of a stop does not count
        # what was taken back does not count where no episode follows
        ([*TAKEN_BACK[:1], Press(Action.UNDO, RESETTING), Press(Action.END, RESETTING, after=-1)], None, 3, []),
        ([*TAKEN_BACK, Press(Action.END, RESETTING, after=-1)], None, 3, []),
        ([*TAKEN_BACK, Press(Action.QUIT, RESETTING, after=-1)], None, 3, []),
        ([*TAKEN_BACK[:1], Press(Action.END, RESETTING)], None, 3, [(0, S, "operator")]),
        (AGAIN_AND_AGAIN, None, 1, [(0, S, "operator")]),
    ],
)
def test_whose_word_counts(script, success_at, n, outcomes):
    done = Evaluation(script, env=Waiting(length=40, success_at=success_at), n=n)
    assert done.outcomes == outcomes
    assert done.result.successes == sum(outcome == S for _, outcome, _ in outcomes)
    assert done.result.interrupted == (n == 3)
    if script is AGAIN_AND_AGAIN:
        assert done.starts == [0, 0]
    if JUDGED in outcomes:
        assert ActorState.HOLD not in done.desk.words()


@pytest.mark.parametrize("label", [Action.FAILURE, Action.SUCCESS])
def test_an_intervention_ends_its_episode_as_a_failure_once_it_is_let_go(label):
    done = Evaluation([Press(label, HELD)], n=1, intervention=HumanOnTicks(frozenset({5, 6, 9})))
    [episode] = done.result.to_json()["episodes"]
    assert (episode["outcome"], episode["ended_by"], episode["length"]) == (F, INTERVENTION, 7)
    assert episode["human_ticks"] == 2
    assert FAILED in done.desk.console.states[-1].obstacles
    assert done.desk.words() == [ActorState.RESET, ActorState.POLICY, ActorState.HUMAN, ActorState.HOLD]


def test_an_intervention_in_a_successful_episode_is_a_failure_and_has_no_limit_of_ticks():
    acts = HumanOnTicks(frozenset(range(5, 30)))
    limited = dataclasses.replace(make_config(), actor=dataclasses.replace(make_config().actor, max_human_ticks=2))
    for success_at, ticks in ((6, None), (None, 25)):
        done = Evaluation([], env=Waiting(length=40, success_at=success_at), n=1, intervention=acts, config=limited)
        assert done.outcomes == [(0, F, INTERVENTION)]
        assert ticks in (None, done.result.human_ticks)


def test_an_intervention_may_be_discarded_and_the_next_episode_begins_without_one():
    class Once(HumanOnTicks):
        resets = 0

        def reset(self, seed):
            self.resets += 1
            if self.resets == 2:
                self.ticks = frozenset()

    done = Evaluation([Press(Action.DISCARD, HELD)], n=1, intervention=Once(frozenset({5})))
    assert done.outcomes == [(0, F, "operator")]
    assert [(e.outcome, e.ended_by) for e in done.result.repeated] == [(F, INTERVENTION)]


@pytest.mark.parametrize("operated", [True, False])
def test_the_reset_after_an_intervention_is_not_ended_by_it(operated):
    env, human = Noting(length=40), HumanOnTicks(frozenset({5}))
    env.starts_repeat = True
    if operated:
        Evaluation([], env=env, intervention=human)
    else:  # nothing waits
        entries = [Entry(make_policy(NoisyAgent(8)))]
        [result] = evaluate_in_turns(env, entries, make_config(), n=2, intervention=human)
        assert [(e.outcome, e.ended_by) for e in result.summaries] == [(F, INTERVENTION)] * 2
    assert env.stops == [None, None]
