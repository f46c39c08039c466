"""Two tasks that undo each other: whose turn it is, their actors on one robot, and what cannot be such tasks."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from actor_helpers import LineOfTasks, NoisyAgent, identity, make_config
from errors import naming
from fake_link import FakeLink
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor.service import ActorService
from serl_chunk.actor.stats import EpisodeSummary
from serl_chunk.actor.turns import Turns, check_robot, check_tasks, take_turns
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.outcomes.judge import OPERATOR
from serl_chunk.robots.base import AS_IS
from serl_chunk.robots.registry import make_env, make_expert
from serl_chunk.types import Begin, ConfigError, End, Outcome

WON, LOST, STOPPED = (Outcome.SUCCESS, "environment"), (Outcome.UNKNOWN, "environment"), (Outcome.UNKNOWN, OPERATOR)
ENDS = st.tuples(st.sampled_from([WON, LOST, STOPPED, (Outcome.FAILURE, OPERATOR)]), st.integers(0, 40))


@given(st.integers(1, 4), st.lists(ENDS, max_size=30))
def test_a_success_gives_the_robot_away_and_a_reset_ends_a_row_of_failures(attempts, ends):
    turns, since, failed, resets = Turns(attempts), 0, 0, 0
    assert (turns.side, turns.start) == (0, "reset")
    for (outcome, by), steps in ends:
        side, start, options = turns.side, turns.start, turns.begin()
        since = 0 if start == "reset" else since
        assert options["conditions"] == {"start": start, "since_reset": since}
        assert ("init_state" in options) == (start != "reset")
        turns.ended(EpisodeSummary(seed=0, steps=steps, outcome=outcome, ended_by=by))
        if steps == 0:  # it never began
            assert (turns.side, turns.start) == (side, start)
            continue
        resets, since = resets + (start == "reset"), since + steps
        won = outcome is Outcome.SUCCESS
        failed = 0 if won else failed + 1
        assert turns.side == (1 - side if won else side)
        again = "reset" if failed == attempts or (outcome, by) == STOPPED else "again"
        assert turns.start == ("other" if won else again)
        failed = 0 if turns.start == "reset" else failed
        assert (turns.resets, turns.ticks) == (resets, since)


class Undoing(LineOfTasks):
    """Two tasks whose `fails` first episodes fail."""

    init_states = (AS_IS,)

    def __init__(self, fails=0):
        super().__init__(length=12)
        self.fails, self.begun, self.closed = fails, [], 0

    def reset(self, *, seed=None, options=None):
        self.begun.append((options["task"], options.get("init_state", "")))
        self.success_at = 5 if len(self.begun) > self.fails else None
        return super().reset(seed=seed, options=options)

    def close(self):
        self.closed += 1


def config_of(task, **actor):
    config = make_config(actor=ActorConfig(**actor))
    return dataclasses.replace(config, name=task, robot=dataclasses.replace(config.robot, task=task))


def run(env, links, *, attempts=3, **actor):
    one = ActorService(config_of("push", **actor), env=env, agent=NoisyAgent(8), link=links[0])
    other = ActorService(
        config_of("lift", **actor), agent=NoisyAgent(8), link=links[1], stop=one.stop, shares=one
    )  # fmt: skip
    with one, other:
        sides = [one, other]
        check_robot(sides)
        return take_turns(sides, [side.session(identity(8)) for side in sides], Turns(attempts))


def test_each_learner_gets_its_task_and_the_end_of_one_session_ends_the_other():
    env, links = Undoing(fails=4), [FakeLink(), FakeLink()]
    one, other = run(env, links, max_episodes=6)
    push, lift = ("push", ""), ("lift", AS_IS)
    again = ("push", AS_IS)
    assert env.begun == [push, again, again, push, again, lift, again]
    assert (one.reason, other.reason) == ("6 episodes done", "the other task's session ended: 6 episodes done")
    assert (one.delivered, other.delivered, env.closed) == (True, True, 1)
    begun = [
        [json.loads(r.conditions) | {"task": r.task} for r in link.records if isinstance(r, Begin)] for link in links
    ]
    assert [len(each) for each in begun] == [6, 1]
    assert begun[1] == [{"start": "other", "since_reset": 18, "task": "lift"}]
    assert [(b["start"], b["since_reset"]) for b in begun[0]] == [
        ("reset", 0), ("again", 12), ("again", 24), ("reset", 0), ("again", 12), ("other", 24),
    ]  # fmt: skip
    assert [r.outcome for r in links[1].records if isinstance(r, End)] == [Outcome.SUCCESS]


def test_a_learner_that_is_done_ends_both_at_its_turn_and_an_error_stops_the_robot():
    env, links = Undoing(), [FakeLink(), FakeLink()]
    links[1].finished = "training is complete"
    one, other = run(env, links)
    assert (other.reason, one.episodes, env.begun) == ("training is complete", 1, [("push", "")])
    env = Undoing()
    env.crash_at = 3
    with pytest.raises(RuntimeError, match="the motor is gone"):
        run(env, [FakeLink(), FakeLink()])
    assert env.closed == 1


def test_the_packaged_tasks_undo_each_other_from_wherever_the_other_ended():
    config = load_experiment("fake_pick_return:pick")
    env, expert = make_env(config.robot), None
    for episode in range(12):
        scene = None if episode == 0 else np.append(env.env.block[:2], env.env.yaw)
        options = {"task": env.tasks[episode % 2]} | ({"init_state": AS_IS} if episode else {})
        env.reset(seed=episode, options=options)
        if scene is not None:
            np.testing.assert_array_equal(np.append(env.env.block[:2], env.env.yaw), scene)
        expert = expert or make_expert(env)
        expert.reset(episode)
        ended = False
        while not ended:
            *_, terminated, truncated, info = env.step(expert.act())
            ended = terminated or truncated
        assert info["success"], f"episode {episode} of {env.task}"


def changed(config, **groups):
    for group, values in groups.items():
        of = getattr(config, group)
        config = dataclasses.replace(config, **{group: dataclasses.replace(of, **values)})
    return config


@pytest.mark.parametrize(("change", "named"), [
    ({"actor": {"clock": "realtime"}}, ("actor.clock", "lockstep", "realtime")),
    ({"actor": {"intervention": "scripted"}}, ("actor.intervention", "scripted")),
    ({"robot": {"max_episode_steps": 9}}, ("robot", "fake_pick", "fake_return")),
    ({"robot": {"task": "put the block into bin A"}}, ("undone_by", "put the block into bin A")),
    ({}, ("undone_by", "fake_pick")),
])  # fmt: skip
def test_experiments_that_cannot_share_a_robot_are_refused(change, named):
    pick, back = (load_experiment(f"fake_pick_return:{task}") for task in ("pick", "return"))
    other = changed(back, **change) if change else dataclasses.replace(back, name=pick.name)
    check_tasks(pick, back)
    with pytest.raises(ConfigError) as error:
        check_tasks(pick, other)
    text = f"{error.value.parameter} {error.value}"
    assert all(each in text for each in named)


@pytest.mark.parametrize(("lacks", "named"), [("init_states", AS_IS), ("tasks", "lift")])
def test_a_robot_that_cannot_begin_where_the_other_task_ended_is_refused(lacks, named):
    env = Undoing()
    setattr(env, lacks, ())
    with pytest.raises(ConfigError, match=naming(named, "line")):
        run(env, [FakeLink(), FakeLink()])
