"""Approval of the first chunks of each policy version: the robot holds, a chunk is shown, and that one is executed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from actor_helpers import LineEnv, ListSink, NoisyAgent, SimClock, SimInference, make_config, make_policy
from errors import naming
from live_desk import NAMES
from operator_script import Desk, Press

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.cli.process import load
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.fields import check_unused
from serl_chunk.console.bindings import Action, ActorState, bind_keys
from serl_chunk.console.view import ConsoleState, Proposed
from serl_chunk.live.viewers import RefusedError, Viewers
from serl_chunk.operator.approval import SETTLE_SECONDS
from serl_chunk.operator.motion_permit import COUNTDOWN
from serl_chunk.types import ConfigError, Outcome, Snapshot, Source

DT, HORIZON = 0.02, 8
SHOWN = round(SETTLE_SECONDS / DT) + 5  # polls of a hold after which a chunk is shown
USUAL = {ActorState.HOLD: Press(Action.GO, after=SHOWN)}


class Rig:
    """The line robot under a policy whose versions change before given ticks, and an operator who approves."""

    def __init__(self, script=(), *, number=1, mode="sync", length=500, swaps=None, usual=USUAL, costs=(), human=None):
        swaps = swaps or {}

        class Swapping(LineEnv):
            def step(env, action):
                if env.tick in swaps:
                    self.policy.swap(Snapshot(swaps[env.tick], {"bias": np.float32(0)}))
                return super().step(action)

        self.policy, clock = make_policy(NoisyAgent(HORIZON)), SimClock()
        self.desk = Desk(script, amend=lambda record: None, end=lambda: None, usual=usual)
        self.desk.operator.approval.number = number
        self.sink, self.env = ListSink(), Swapping(length=length, clock=clock, costs=costs, human=human)
        latencies = itertools.repeat(0.03 if mode == "async" else 0.005)
        self.runner = EpisodeRunner(
            self.env, self.policy, self.sink, config=make_config(actor=ActorConfig(clock="realtime", inference=mode)),
            clock=clock, inference=SimInference(self.policy, clock, latencies), operator=self.desk.operator,
        )  # fmt: skip

    def run(self, seed: int = 0) -> Rig:
        self.summary = self.runner.run_episode(seed, explore=True)
        return self

    @property
    def shown(self) -> list[tuple[int, int, np.ndarray]]:
        found = {}
        for state in self.desk.console.states:
            if state.proposed is not None:
                nth, version = re.findall(r"chunk (\d+) of \d+ of policy version (\d+)", state.question)[0]
                found[state.proposed.number] = int(nth), int(version), state.proposed.actions
        return list(found.values())

    @property
    def executed(self) -> list[tuple[int, int, list[list[float]]]]:
        steps = [s for s in self.sink.steps if s.source is Source.POLICY]
        groups = itertools.groupby(steps, key=lambda s: s.decision_tick)
        return [(t, own[0].policy_version, [s.action.tolist() for s in own]) for t, g in groups if (own := list(g))]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("number", [1, 3])
def test_each_version_has_so_many_chunks_approved_and_they_are_executed_as_shown(mode, number):
    rig = Rig(number=number, mode=mode, length=1200, swaps={600: 4}).run()
    assert [shown[:2] for shown in rig.shown] == [(n + 1, v) for v in (3, 4) for n in range(number)]
    for version in (3, 4):
        approved = [chunk for _, v, chunk in rig.shown if v == version]
        executed = [actions for _, v, actions in rig.executed if v == version]
        last = len(executed[number - 1])  # the chunk after it needs none, and may follow early
        assert last == HORIZON or (mode, last) == ("async", HORIZON - 1)
        for actions, chunk in zip(executed, approved, strict=False):
            assert actions == chunk[: len(actions)].tolist()
        assert all(len(actions) == HORIZON for actions in executed[: number - 1])
        assert len(executed) > number + 5
    holds = sum(s.source is Source.HOLD for s in rig.sink.steps)
    assert holds > 2 * number * (COUNTDOWN + SETTLE_SECONDS) / DT


def test_a_shown_chunk_is_planned_where_the_robot_stands_and_recorded_on_its_first_tick():
    rig = Rig(length=300).run()
    tick, _, actions = rig.executed[0]
    steps = rig.sink.steps
    assert steps[tick].decision["chunk"].tolist() == actions
    planned = round(float(steps[tick].decision["q"]))  # the agent's values are the ticks of its observations
    assert SETTLE_SECONDS / DT <= planned <= tick - COUNTDOWN / DT
    assert {s.source for s in steps[:tick]} == {Source.HOLD}
    assert sum(s.decision is not None for s in steps) == len(rig.executed)


@pytest.mark.parametrize(("action", "outcome"), [
    (Action.STOP, Outcome.UNKNOWN), (Action.DISCARD, Outcome.UNKNOWN), (Action.RESET, Outcome.UNKNOWN),
    (Action.SUCCESS, Outcome.SUCCESS), (Action.FAILURE, Outcome.FAILURE),
])  # fmt: skip
def test_what_ends_an_episode_ends_it_while_a_chunk_waits(action, outcome):
    rig = Rig([Press(action, (ActorState.HOLD,), after=SHOWN)]).run()
    assert (rig.sink.last_end.outcome, rig.sink.last_end.outcome_by) == (outcome, "operator")
    assert (len(rig.shown), rig.executed) == (1, [])
    assert rig.desk.operator.approval.proposed is None


def test_a_hold_ends_the_countdown_and_the_chunk_still_waits():
    script = [Press(Action.GO, (ActorState.HOLD,), after=SHOWN), Press(Action.HOLD, (ActorState.HOLD,), after=50)]
    rig = Rig(script, length=400).run()
    assert len(rig.shown) == 1
    tick, _, actions = rig.executed[0]
    assert tick > SHOWN + 50 + COUNTDOWN / DT
    assert actions == rig.shown[0][2].tolist()


def test_what_was_confirmed_before_a_chunk_is_shown_does_not_count_for_it():
    early = [Press(Action.GO, (ActorState.HOLD,), after=3)]
    rig = Rig(early, length=400, usual={}).run()
    assert (len(rig.shown), rig.executed) == (1, [])
    rig = Rig(early, length=400, usual={ActorState.HOLD: Press(Action.GO, after=100)}).run()
    assert rig.executed[0][2] == rig.shown[0][2].tolist()


def test_a_chunk_waits_for_its_approval_also_where_the_robot_is_not_held():
    rig = Rig(length=10, usual={}).run()
    planner = rig.runner._planner
    planner._waiting = waiting = object()
    assert planner.plan(0, rig.env.step, np.zeros(2)) is None
    assert planner._waiting is waiting


def test_a_version_that_comes_while_a_chunk_waits_is_shown_after_it():
    rig = Rig(length=600, swaps={SHOWN + 50: 4}).run()
    assert [shown[:2] for shown in rig.shown] == [(1, 3), (1, 4)]
    assert [version for _, version, _ in rig.executed[:2]] == [3, 4]
    assert [actions for _, _, actions in rig.executed[:2]] == [chunk.tolist() for _, _, chunk in rig.shown]


@pytest.mark.parametrize("more", [
    {"costs": [0.0] * 80 + [0.5]}, {"human": {80: np.array([0.5, 0.5], np.float32)}},
], ids=["a gap", "a human by the environment"])  # fmt: skip
def test_a_chunk_is_shown_anew_where_the_robot_may_have_moved(more):
    rig = Rig(length=500, **more).run()
    assert [shown[:2] for shown in rig.shown] == [(1, 3), (1, 3)]
    tick, _, actions = rig.executed[0]
    assert tick > 81 + (SETTLE_SECONDS + COUNTDOWN) / DT
    assert actions == rig.shown[1][2].tolist()
    states = rig.desk.console.states
    withdrawn = [s for before, s in itertools.pairwise(states) if before.proposed is not None and s.proposed is None]
    assert [(s.word, s.countdown) for s in withdrawn] == [(ActorState.HOLD, None), (ActorState.POLICY, None)]


def test_a_page_approves_only_the_chunk_that_it_shows():
    class Operator:
        view = ConsoleState(ActorState.HOLD, proposed=Proposed(7, np.zeros((8, 2), np.float32)))

        def __init__(self):
            self.requested = []

        def request(self, action, source, seen=None, robot=None):
            self.requested.append(action)

    operator = Operator()
    viewers = Viewers(operator, bind_keys(), clock=lambda: 0.0)
    for proposed in (None, 6):
        with pytest.raises(RefusedError, match="chunk to approve has changed"):
            viewers.press(NAMES[0], "enter", "HOLD", 0.0, proposed)
    viewers.press(NAMES[0], "space", "HOLD", 0.0, 6)
    viewers.press(NAMES[0], "enter", "HOLD", 0.0, 7)
    assert operator.requested == [Action.HOLD, Action.GO]


@pytest.mark.parametrize(
    "changes",
    [
        [("actor.clock", "lockstep"), ("robot.server", "127.0.0.1:9")],  # which waits for the policy anyway
        [("actor.clock", "realtime")],  # a simulator
    ],
)
def test_an_approval_needs_a_real_robot_in_real_time(changes):
    with pytest.raises(ConfigError, match=naming("operator.approve")):
        check_unused(load("fake_aloha", [*changes, ("operator.approve", "1")]), ["operator.approve"])
