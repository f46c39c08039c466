"""The training actor against a learner that exists only as an object."""

from __future__ import annotations

import dataclasses
import logging
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from actor_helpers import SPEC, HumanOnTicks, LineEnv, NoisyAgent, identity, make_config
from errors import naming
from fake_link import FakeLink

from serl_chunk.actor import service
from serl_chunk.actor.link import RunProgress
from serl_chunk.actor.service import ActorService, ActorSummary, training_seed
from serl_chunk.config.experiment import ActorConfig, LearnerConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.devices.recorded import ReplayedIntervention, save_interventions
from serl_chunk.types import (
    EVAL_SEED_BASE,
    TRAINING_SEED_BASE,
    VALIDATION_SEED_BASE,
    Begin,
    ConfigError,
    DataError,
    End,
    Source,
    Step,
)

FROM_THE_START = RunProgress()


def config_of(*, max_episodes=3, random_steps=0, **actor):
    config = make_config(actor=ActorConfig(max_episodes=max_episodes, **actor))
    return dataclasses.replace(config, learner=LearnerConfig(random_steps=random_steps))


def run(link, env=None, config=None, *, begun=FROM_THE_START, replaced=None, **kwargs):
    """A session; returns its summary and the robot."""
    env = env or LineEnv(length=12)
    options = {} if replaced is None else {"replaced": replaced}
    with ActorService(config or config_of(), env=env, agent=NoisyAgent(8), link=link, **kwargs) as actor:
        return actor.run(identity(8), begun, **options), env


@pytest.fixture
def said(caplog):
    """What is logged from now on, as a function."""
    caplog.set_level(logging.INFO, "serl_chunk.actor")
    return lambda: caplog.messages


def test_episodes_are_recorded_and_delivered(said):
    link = FakeLink()
    summary, env = run(link, report_every=2)
    kinds = [type(r) for r in link.records]
    assert kinds == ([Begin] + [Step] * 12 + [End]) * 3
    assert [r.episode_id for r in link.records if isinstance(r, Begin)] == [f"actor-{i:06d}" for i in range(3)]
    assert (summary.episodes, summary.steps, summary.delivered, summary.reason) == (3, 36, True, "3 episodes done")
    assert len(link.flushed) == 1
    assert env.seeds == [training_seed(42, "actor", i) for i in range(3)]
    assert len(said()) == 1
    assert said()[0].startswith("episode 2: success 0 % of the last 2")
    # Snapshots are swapped at decisions: every episode begins with the newest.
    assert [s.policy_version for s in link.steps if s.tick == 0] == [1, 2, 3]
    assert all(100 * s.policy_version <= s.policy_age < 100 * s.policy_version + 60 for s in link.steps)


def test_training_seeds_differ_are_never_held_out_and_go_on_in_a_later_session():
    seeds = {training_seed(s, a, e) for s in range(3) for a in ("left", "right") for e in range(200)}
    assert len(seeds) == 1200
    assert min(seeds) >= TRAINING_SEED_BASE > VALIDATION_SEED_BASE > EVAL_SEED_BASE
    link = FakeLink()
    _, env = run(link, config=config_of(max_episodes=1), begun=RunProgress(episodes=7, episode_prefix="robot-b1"))
    assert (env.seeds, link.records[0].episode_id) == ([training_seed(42, "actor", 7)], "robot-b1-000007")


@pytest.mark.parametrize(("before", "left"), [(1, 3), (99, 0)])
def test_human_ticks_are_limited_over_the_sessions_of_a_run(before, left):
    human, config = HumanOnTicks(frozenset({3, 4, 5})), config_of(max_human_ticks=4)
    summary, _ = run(FakeLink(), config=config, intervention=human, begun=RunProgress(human_ticks=before))
    assert summary.human_ticks == left


@pytest.mark.parametrize(("first", "acted"), [(0, [0, 2]), (1, [2])])
def test_a_later_session_goes_on_in_recorded_interventions(tmp_path, first, acted):
    command = np.full((2, 2), 0.5, np.float32)
    columns = {"episode": np.array([0, 2]), "tick": np.array([3, 4]), "action": command, "idle": np.zeros(2, bool)}
    save_interventions(tmp_path / "human.npz", **columns)
    episodes = []
    human = ReplayedIntervention(tmp_path / "human.npz", SPEC)
    run(FakeLink(), intervention=human, begun=RunProgress(episodes=first), on_episode=episodes.append)
    assert [first + i for i, e in enumerate(episodes) if e.human_ticks] == acted


@pytest.mark.parametrize(("before", "random"), [(8, 7), (100, 0)])
def test_random_steps_are_those_of_the_run_and_not_of_every_session(before, random):
    link = FakeLink()
    run(link, config=config_of(max_episodes=3, random_steps=15), begun=RunProgress(env_steps=before))
    assert sum(step.source is Source.RANDOM for step in link.steps) == random


@pytest.mark.parametrize(("late", "line"), [
    ("snapshot_after", "waiting for the learner's first policy"), ("room_after", "the spool is full"),
])  # fmt: skip
def test_a_policy_and_room_for_records_are_waited_for(said, late, line):
    summary, _ = run(FakeLink(**{late: 4}))
    assert said()[0].startswith(line)
    assert summary.episodes == 3


@pytest.mark.parametrize(("allowed", "line"), [
    (0, "waiting for the learner: it compiles"), (None, "waiting for the learner's first policy; it compiles"),
])  # fmt: skip
def test_a_learner_that_compiles_is_waited_for_by_that_name(said, allowed, line):
    link = FakeLink(snapshot_after=4 if allowed is None else 0)
    link.busy, granted = "it compiles updates", iter([allowed] * 4)
    link.allowed_steps = lambda: next(granted, None)
    run(link)
    assert said()[0].startswith(line)


def test_the_allowance_is_waited_for_before_every_step():
    """An allowance may end within a chunk: an actor that finished the chunk would record more than allowed."""
    link = FakeLink()
    granted, over = [0], []

    def grant():
        over.append(len(link.steps) - granted[0])
        granted[0] += 3 if len(over) % 4 == 0 else 0  # the learner gets on a little
        return granted[0]

    link.allowed_steps = grant
    summary, _ = run(link)
    assert (summary.steps, max(over)) == (36, 0)


@pytest.mark.parametrize("other", [False, True])
def test_the_learner_or_one_of_another_run_ends_the_session_in_the_middle_of_an_episode(other):
    link, why = FakeLink(), "20000 updates done"

    def step(record):
        link.records.append(record)
        if len(link.steps) == 17 and not other:
            link.finished = why

    link.step = step
    replaced = (lambda: why if len(link.steps) == 17 else None) if other else None
    summary, env = run(link, config=config_of(max_episodes=0), replaced=replaced)
    assert (summary.reason, summary.replaced, summary.steps) == (why, other, 17)
    assert (link.last_end.length, link.last_end.truncated, link.last_end.outcome_by) == (5, True, "learner")
    assert env.tick == 5  # the robot is commanded no more
    assert (summary.delivered, len(link.flushed)) == (not other, not other)  # of another run: its learner is away


@pytest.mark.parametrize("waits_for", ["nothing", "a snapshot", "an allowance"])
def test_the_operator_stops_also_while_the_learner_is_waited_for(waits_for):
    link, stop = FakeLink(snapshot_after=10**9 if waits_for == "a snapshot" else 0), threading.Event()
    if waits_for == "an allowance":
        link.allowed_steps = lambda: 0 if link.looks["allowance"] <= 3 else stop.set() or 0
    else:
        stop.set()
    summary, env = run(link, stop=stop)
    assert (summary.reason, summary.steps, env.tick, link.records) == ("stopped by the operator", 0, 0, [])


def test_a_broken_link_and_random_steps_on_a_real_robot_are_refused():
    link = FakeLink()
    link.error = DataError("the learner refuses this robot")
    with pytest.raises(DataError, match="refuses this robot"):
        run(link)
    config = dataclasses.replace(config_of(random_steps=5), robot=GymConfig(make=lambda fake: None, is_real=True))
    with pytest.raises(ConfigError, match=naming("learner.random_steps", 5, 0)):
        run(FakeLink(), config=config)


def test_what_led_to_a_crash_is_delivered_once_the_robot_is_closed(said, monkeypatch):
    monkeypatch.setattr(service, "FLUSH_TIMEOUT", 7.0)
    link, env, order = FakeLink(), LineEnv(crash_at=5), []
    monkeypatch.setattr(env, "close", lambda: order.append("robot"))
    link.flush = lambda timeout: order.append(timeout)
    link.close = lambda: order.append("link")
    with pytest.raises(RuntimeError, match="the motor is gone"):
        run(link, env)
    assert (link.last_end.length, link.last_end.outcome_by, order) == (5, "crash", ["robot", 7.0, "link"])
    assert "the motor is gone" in said()[-1]


def test_records_that_were_not_delivered_are_reported(said):
    link = FakeLink()
    link.delivers = False
    summary, _ = run(link)
    assert not summary.delivered
    assert "did not acknowledge" in said()[-1]


def test_interventions_and_hooks_are_passed_on():
    link, decisions, episodes = FakeLink(), [], []
    human = HumanOnTicks(frozenset({3, 4}))
    summary, _ = run(link, intervention=human, before_decision=lambda: decisions.append(1), on_episode=episodes.append)
    assert (summary.human_ticks, summary.segments, [e.human_ticks for e in episodes]) == (6, 3, [2, 2, 2])
    assert len(decisions) == 6  # ticks 0 and 5 (the release) of each episode


@pytest.mark.parametrize("key", ["stop", "quit"])
def test_keys_count_while_the_learner_of_another_run_is_waited_for(monkeypatch, key):
    stop, keys = threading.Event(), Mock(quits=False)

    def waits(*obstacles):
        if keys.waits.call_count == 3:
            stop.set() if key == "stop" else keys.configure_mock(quits=True)

    keys.waits.side_effect = waits
    away = Mock(run="a", welcome=None, waiting="no learner answers", wait_until=lambda condition, seconds: condition())
    actor = ActorService(make_config(), env=LineEnv(), stop=stop)
    actor.operator = keys
    monkeypatch.setattr(service, "preprocess_of", lambda *_: None)
    monkeypatch.setattr(service, "RunProgress", Mock())

    def session(*_, **more):
        yield
        return ActorSummary(reason="replaced", replaced=True)

    monkeypatch.setattr(actor, "session", session)
    summary = actor.serve(away, Mock(run="a"))
    assert (summary.replaced, keys.waits.call_count, keys.park.call_count) == (True, 3, int(key == "quit"))
