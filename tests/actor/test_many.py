"""Episodes of many robots in one process: the same as one by one, whole, and no more steps than are allowed."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, LineOfTasks, ListSink, NoisyAgent, identity, make_config, make_policy
from fake_link import FakeLink
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.actor import service
from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.link import RunProgress
from serl_chunk.actor.many import ManyEpisodes, RecordsInTurn
from serl_chunk.actor.policy import LocalPolicy
from serl_chunk.actor.service import ActorService
from serl_chunk.agents.registry import make_agent
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, LearnerConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.normalise.normaliser import Normaliser
from serl_chunk.data.preprocess import Preprocess
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.types import Begin, ConfigError, End, Snapshot, Source, Step

LENGTH = 12  # ticks of an episode of the line robot
LINE = dataclasses.replace(SPEC, max_episode_steps=LENGTH)


def of_episodes(records):
    """The records of each episode; they must be whole and one after the other."""
    episodes = {}
    for record in records:
        if isinstance(record, Begin):
            assert record.episode_id not in episodes
            steps = episodes[record.episode_id] = []
        elif isinstance(record, Step):
            assert record.tick == len(steps)
            steps.append(record)
        else:
            assert (record.episode_id, record.length) == ([*episodes][-1], len(steps))
            steps.append(record)
    assert all(isinstance(steps[-1], End) for steps in episodes.values())
    return episodes


@pytest.fixture(scope="module")
def arms():
    """A random flow policy of the simulated arms."""
    config = ExperimentConfig(
        name="arms", robot=FakeAlohaConfig(max_episode_steps=12), chunk=ChunkConfig(horizon=5),
        agent=BcConfig(flow=FlowConfig(hidden=(16,), steps=2), hidden=(16,)),
    )  # fmt: skip
    spec = robot_spec(config.robot)
    agent, middle = make_agent(config, spec), np.zeros((5, 14), np.float32)
    normaliser = Normaliser(
        "absolute_range", np.zeros(spec.state_dim, np.float32), np.ones(spec.state_dim, np.float32), middle, middle + 1,
        np.full(14, -1, np.int32),
    )  # fmt: skip
    preprocess = Preprocess.of(config, spec, normaliser)
    params = agent.flatten_params(agent.published(agent.new_state(jax.random.key(0)), {}))

    def runner(sink):
        policy = LocalPolicy(agent, preprocess, spec)
        policy.swap(Snapshot(1, params))
        return EpisodeRunner(make_env(config.robot), policy, sink, config=config), policy

    return runner


def many_of(arms, n, sink):
    records = RecordsInTurn(sink)
    runners = [arms(records.of_robot()) for _ in range(n)]
    return ManyEpisodes([runner for runner, _ in runners], runners[0][1])


def play(many, starts):
    starts = [*starts]
    while starts or many.open:
        while starts and many.free:
            many.begin(**starts.pop(0))
        many.advance()


def comparable(episodes):
    """What a ticket's episode is made of, bit for bit; stamps and ages are of a process."""

    def of(record):
        if isinstance(record, End):
            return record.outcome, record.final_observation["state"].tobytes()
        decision = {name: value.tobytes() for name, value in (record.decision or {}).items()}
        return record.observation["state"].tobytes(), record.action.tobytes(), record.decision_tick, decision

    return {name: [of(record) for record in records] for name, records in episodes.items()}


def test_a_ticket_gives_the_same_episode_in_any_order_and_number_of_environments(arms):
    starts = [
        {"seed": 0, "init_state": f"seed-{i}", "ticket": f"0.{i}.0.0", "decision_seed": 10**9 + i, "episode_id": str(i),
         "explore": True}
        for i in range(9)
    ]  # fmt: skip
    alone = ListSink()
    runner, _ = arms(alone)
    for start in starts:
        runner.run_episode(**start)
    expected = comparable(of_episodes(alone.records))
    assert len({repr(steps) for steps in expected.values()}) == 9
    begins = [r for r in alone.records if isinstance(r, Begin)]
    assert [(b.init_state, b.ticket) for b in begins] == [(f"seed-{i}", f"0.{i}.0.0") for i in range(9)]
    for n, order in ((1, starts), (3, reversed(starts)), (8, starts)):
        sink = ListSink()
        play(many_of(arms, n, sink), order)
        assert comparable(of_episodes(sink.records)) == expected


def test_the_committed_actions_of_many_are_those_of_one():
    config, sink = make_config(horizon=4, actor=ActorConfig(delay_ticks=2)), ListSink()
    policy, records = make_policy(NoisyAgent(4)), RecordsInTurn(sink)
    runners = [EpisodeRunner(LineEnv(length=LENGTH), policy, records.of_robot(), config=config) for _ in range(3)]
    starts = [{"seed": i, "decision_seed": i, "episode_id": str(i), "explore": True} for i in range(3)]
    play(ManyEpisodes(runners, policy), starts)
    alone = ListSink()
    runner = EpisodeRunner(LineEnv(length=LENGTH), policy, alone, config=config)
    for start in starts:
        runner.run_episode(**start)
    assert comparable(of_episodes(sink.records)) == comparable(of_episodes(alone.records))


def test_a_saved_state_or_a_task_that_a_robot_lacks_is_refused_by_name(arms):
    with pytest.raises(ConfigError, match=r"fake_aloha.*'stored_7'.*seed-N"):
        arms(ListSink())[0].begin(0, init_state="stored_7")
    runner = EpisodeRunner(LineOfTasks(), make_policy(NoisyAgent(4)), ListSink(), config=make_config(horizon=4))
    with pytest.raises(ConfigError, match=r"line.*'juggle'.*'push', 'lift'.*actor and learner"):
        runner.begin(0, task="juggle")


def test_a_dropped_episode_leaves_no_record(arms):
    sink = ListSink()
    many = many_of(arms, 2, sink)
    dropped, kept = (many.begin(i, episode_id=str(i), decision_seed=i, explore=True) for i in range(2))
    many.advance()
    many.drop(dropped)
    play(many, [{"seed": 2, "episode_id": "2", "decision_seed": 2, "explore": True}])
    assert of_episodes(sink.records).keys() == {kept.state.id, "2"}


def test_several_robots_that_are_one_environment_are_refused_and_closed(monkeypatch):
    shared, closed = LineEnv(length=LENGTH), []
    shared.close = lambda: closed.append(True)
    monkeypatch.setattr(service, "make_env", lambda *_, **__: shared)
    with pytest.raises(ConfigError, match="3 environments"):
        ActorService(make_config(), n_envs=3)
    assert closed


class Counted(LineEnv):
    """Counts the steps of all of them."""

    steps = 0

    def step(self, action):
        Counted.steps += 1
        return super().step(action)


def run(link, n_envs=3, config=None, envs=Counted, agent=None, **kwargs):
    config = config or make_config(actor=ActorConfig(max_episodes=7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "POLL_SECONDS", 0)
        lengths = itertools.cycle((LENGTH, 5, 9))
        patch.setattr(service, "make_env", lambda *_, **__: envs(length=next(lengths), spec=LINE))
        with ActorService(config, agent=agent or NoisyAgent(8), link=link, n_envs=n_envs, **kwargs) as actor:
            return actor.run(identity(8), RunProgress())


@given(n=st.sampled_from([2, 5]), unit=st.integers(1, 20), more=st.integers(0, 60), slow=st.integers(1, 3))
def test_no_more_steps_than_allowed_however_few_and_every_episode_is_delivered_whole(n, unit, more, slow):
    """The learner updates every `unit` steps, and grants a share when half of the last one has come (StepShares)."""

    class Counting(FakeLink):
        steps_recorded = 0

        def step(self, record):
            super().step(record)
            self.steps_recorded += 1

    link, Counted.steps, looks = Counting(), 0, itertools.count()
    granted, lag = [unit + more], unit + more

    def grant():
        assert Counted.steps <= granted[0]
        left = lag - link.steps_recorded % unit
        if next(looks) % slow == 0 and granted[0] - link.steps_recorded <= left // 2:
            granted[0] = link.steps_recorded + left
        return granted[0]

    link.allowed_steps = grant
    learner = LearnerConfig(utd_ratio=1 / unit, max_lag_steps=lag)
    config = make_config(actor=ActorConfig(max_episodes=7))
    summary = run(link, n, dataclasses.replace(config, learner=learner))
    episodes = of_episodes(link.records)
    assert summary.episodes == len(episodes) == 7
    assert summary.steps == Counted.steps == sum(len(steps) - 1 for steps in episodes.values())


@pytest.mark.parametrize("error", ["", "step", "reset"])
def test_open_episodes_are_closed_and_delivered_at_a_stop_and_after_an_error(error):
    link, stop = FakeLink(), threading.Event()

    class Stopping(LineEnv):
        def step(self, action):
            if self.tick == 4 and not stop.is_set():
                if error != "reset":
                    stop.set()
                if error == "step":
                    raise RuntimeError("the motor is gone")
            return super().step(action)

        def reset(self, **options):
            if error == "reset" and self.seeds:
                raise RuntimeError("the motor is gone")
            return super().reset(**options)

    if error:
        with pytest.raises(RuntimeError, match="the motor is gone"):
            run(link, envs=Stopping, stop=stop)
    else:
        assert run(link, envs=Stopping, stop=stop).delivered
    ends = [steps[-1] for steps in of_episodes(link.records).values()]
    by = {(end.truncated, end.outcome_by) for end in ends} - {(True, "environment")}  # one ended before the reset
    assert by == {(True, "crash" if error else "operator")}
    assert link.flushed


@pytest.mark.parametrize(("whole", "gate"), [(False, "none"), (True, "canary")])
def test_with_a_gate_one_snapshot_decides_in_a_whole_episode(whole, gate):
    class Learning(FakeLink):
        version = 0

        def latest(self):
            self.version += 1
            return Snapshot(self.version // 3, {"bias": np.float32(0)})

    link = Learning()
    run(link, config=make_config(horizon=8, execute=3, actor=ActorConfig(max_episodes=7, gate=gate)))
    seen = [{s.policy_version for s in steps[:-1]} for steps in of_episodes(link.records).values()]
    assert all(len(versions) == 1 for versions in seen) == whole
    assert len(set.union(*seen)) > 1


def test_random_steps_are_those_of_the_run_at_any_number_of_environments():
    link = FakeLink()
    config = dataclasses.replace(
        make_config(actor=ActorConfig(max_episodes=12)), learner=LearnerConfig(random_steps=65)
    )
    run(link, config=config)
    assert 20 < sum(step.source is Source.RANDOM for step in link.steps) <= 65
