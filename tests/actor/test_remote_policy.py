"""A policy server as the policy of an actor: what it is sent, what is executed, and what happens without it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from actor_helpers import SPEC, LineEnv, ListSink, NoisyAgent, identity, make_config
from errors import naming
from fake_link import FakeLink
from flaky_proxy import FlakyProxy
from policy_servers import HORIZON, StatePolicy, server_of
from ports import free_port

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.actor.policy import PolicyAwayError, PolicyError, Request, blank_request
from serl_chunk.actor.remote_policy import remote_policy, sent_cameras
from serl_chunk.actor.service import ActorService
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.evaluation import rollouts
from serl_chunk.operator.operator import Operator
from serl_chunk.serving import client as client_module
from serl_chunk.serving.server import Answer
from serl_chunk.types import IMAGE_PREFIX, STATE, ConfigError, Source, Step

pytest.importorskip("websockets")


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_S", (0.05, 0.2))


def config_of(port, **actor):
    return make_config(horizon=HORIZON, actor=ActorConfig(policy=f"openpi://127.0.0.1:{port}", **actor))


@contextlib.contextmanager
def policy_of(policy, config=None, **options):
    with server_of(policy, **options) as server, remote_policy(config or config_of(server.port), SPEC) as remote:
        while not remote.available():
            time.sleep(0.02)
        yield remote


def seen(first=0.25):
    observation = blank_request(SPEC, ("front", "wrist"), explore=False).observation
    return {**observation, STATE: np.array([first, 0.5, 0], np.float32)}


def test_a_decision_is_the_servers_within_the_robots_limits_and_keeps_what_is_committed():
    server = StatePolicy()
    with policy_of(server, metadata=OWN) as policy:
        assert (policy.version, policy.image_keys) == (-1, ("front", "wrist"))
        decision = policy.decide(Request(seen(7.0), tick=4, epoch=2, task="pick it up"))
        assert (decision.version, decision.tick, decision.epoch, decision.steps) == (3, 4, 2, None)
        np.testing.assert_allclose(decision.actions, np.tile([1.0, 0.5], (HORIZON, 1)))
        assert decision.record.keys() == {"actions", "q"}
        assert (policy.version, decision.clipped) == (3, HORIZON)
        bright = seen() | {f"{IMAGE_PREFIX}front": np.full((8, 10, 3), 200, np.uint8)}
        decision = policy.decide(Request(bright, prefix=np.full((2, 2), -0.75, np.float32)))
    assert server.tasks[0] == "pick it up"
    np.testing.assert_allclose(decision.actions[:3], [[-0.75, -0.75], [-0.75, -0.75], [0.45, 0.7]], rtol=1e-5)


class Answering(StatePolicy):
    """Answers `actions`, whatever it sees."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions

    def answer(self, row):
        return Answer(self.actions, 0.0, {})


@pytest.mark.parametrize(("actions", "named"), [
    (np.zeros((50, 2)), ()),  # a longer chunk is cut
    (np.zeros((3, 2)), ("actions", 3, HORIZON)), (np.zeros((8, 7)), ("actions", 7)),
    (np.zeros(8), ("actions", "float32[8]")), (np.full((8, 2), np.nan), ("finite",)),
])  # fmt: skip
def test_replies_of_no_use_are_refused(actions, named):
    with policy_of(Answering(actions)) as policy:
        if not named:
            assert policy.decide(Request(seen())).actions.shape == (HORIZON, 2)
            return
        with pytest.raises(PolicyError, match=naming(*named)) as error:
            policy.decide(Request(seen()))
    assert not isinstance(error.value, PolicyAwayError)


OWN = {"robot": SPEC.name, "action_dim": 2, "state_dim": 3, "control_hz": float(SPEC.control_hz), "action_horizon": 8}


@pytest.mark.parametrize("changes", [
    {"robot": "another"}, {"state_dim": 14}, {"action_horizon": 7}, {"robot": True}, {"action_horizon": "8"},
])  # fmt: skip
def test_a_server_of_another_robot_is_refused_before_it_decides(changes):
    policy, [(name, value)] = StatePolicy(), changes.items()
    with (
        pytest.raises(PolicyError, match=naming(name, value)) as error,
        policy_of(policy, metadata=OWN | changes) as remote,
    ):
        remote.decide(Request(seen()))
    assert not isinstance(error.value, PolicyAwayError)
    assert not policy.batches


def test_settings_name_the_cameras_that_are_sent_and_bad_ones_are_refused(tmp_path):
    assert sent_cameras(make_config(), SPEC) == ()
    assert sent_cameras(config_of(1), SPEC) == ("front", "wrist")
    config = config_of(1, policy_observation=("observation/image=images/wrist", "observation/state=state"))
    assert sent_cameras(config, SPEC) == ("wrist",)
    with pytest.raises(ConfigError, match=naming("actor.policy")):
        ActorConfig(policy="robot:8000")
    absent = config_of(1, policy_key=str(tmp_path / "absent"))
    for config, named in ((config_of(99999), ("actor.policy", 99999)), (absent, ("actor.policy_key",))):
        with pytest.raises(ConfigError, match=naming(*named)), remote_policy(config, SPEC):
            pass


def test_in_lockstep_a_lost_server_is_waited_for_within_an_episode():
    """The environment stands still, and no tick is lost."""
    policy, restarted = StatePolicy(), []
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server_of(policy))
        port = first.port

        def restart():
            first.close()
            time.sleep(0.5)
            restarted.append(stack.enter_context(server_of(StatePolicy(), port=port)))

        env, sink = LineEnv(length=24), ListSink()
        remote = stack.enter_context(remote_policy(config_of(port), SPEC))
        observe = lambda tick: (tick == 4 and threading.Thread(target=restart).start()) or time.sleep(0.03)  # noqa: E731
        summary = EpisodeRunner(env, remote, sink, config=config_of(port), observer=observe).run_episode(seed=1)
    assert restarted
    assert (summary.length, {s.source for s in sink.steps}) == (24, {Source.POLICY})


SERVED = """
import sys, time
import numpy as np
from policy_servers import HORIZON, StatePolicy, server_of
from serl_chunk.serving.server import Answer

class Ticks(StatePolicy):
    def answer(self, row):  # each action says for which tick it is
        ticks = (row["state"][2] + np.arange(HORIZON)) / 1000
        return Answer(np.stack([ticks, np.full(HORIZON, 0.5)], 1).astype(np.float32), 0.0, {})

with server_of(Ticks()) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["frozen", "half open"])
def test_a_server_that_stops_answering_lets_the_robot_hold_and_never_repeats_an_action(how, monkeypatch, caplog):
    """A process that is stopped, or a connection whose other end is gone; both accept what they are sent."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(client_module, "ANSWER_S", 2.0 if how == "half open" else 60.0)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        )  # fmt: skip
        stack.callback(server.kill)
        proxy = FlakyProxy(port := free_port(), int(server.stdout.readline()))
        stack.callback(proxy.close)
        frozen, resumed = [], []

        def observe(tick):
            if tick == 30:
                frozen.append(tick)
                server.send_signal(signal.SIGSTOP) if how == "frozen" else setattr(proxy, "rate", 1.0)
            if frozen and not resumed and "The robot holds" in caplog.text:
                resumed.append(tick)
                server.send_signal(signal.SIGCONT) if how == "frozen" else setattr(proxy, "rate", 0.0)

        sink, config = ListSink(), config_of(port, clock="realtime", inference="sync")
        remote = stack.enter_context(remote_policy(config, SPEC))
        runner = EpisodeRunner(LineEnv(length=250), remote, sink, config=config, observer=observe)
        stack.callback(runner.close)
        runner.run_episode(seed=1)
    steps: list[Step] = sink.steps
    assert resumed, caplog.text
    assert resumed[0] > 30 + HORIZON
    held = {s.tick for s in steps if s.source is Source.HOLD}
    assert set(range(30 + HORIZON + 1, resumed[0])) <= held
    assert Source.POLICY in {s.source for s in steps if s.tick > resumed[0]}
    for before, step in itertools.pairwise(steps):
        if step.source is Source.HOLD:
            np.testing.assert_array_equal(step.action, before.action)
        else:
            assert step.action[0] == pytest.approx(step.tick / 1000, abs=1e-6)
    assert "has not answered for 1 s (it may have stopped" in caplog.text
    assert "Look at that server, or start it again" in caplog.text
    assert ("answers again" if how == "frozen" else "connected again") in caplog.text


@pytest.mark.parametrize("clock", ["lockstep", "realtime"])
def test_a_stop_ends_the_wait_for_a_lost_server(clock):
    """Before the first episode as within one."""
    stop = threading.Event()
    with server_of(StatePolicy()) as server:
        config = config_of(server.port, clock=clock)
        link = FakeLink()
        with ActorService(config, env=LineEnv(length=10_000), agent=NoisyAgent(8), link=link, stop=stop) as actor:
            ended = []
            thread = threading.Thread(target=lambda: ended.append(actor.run(identity(HORIZON))))
            thread.start()
            while len(link.steps) < 20:
                time.sleep(0.01)
            server.close()
            time.sleep(0.3)
            stop.set()
            thread.join(10)
    assert ended[0].reason == "stopped by the operator"
    with ActorService(config, env=LineEnv(), agent=NoisyAgent(8), link=FakeLink(), stop=stop) as actor:
        assert actor.run(identity(HORIZON)).episodes == 0


def test_a_server_that_refuses_ends_the_actor_with_its_reason_and_another_is_evaluated():
    with server_of(StatePolicy(dataclasses.replace(SPEC, state_dim=5))) as server:
        actor = ActorService(config_of(server.port), env=LineEnv(), agent=NoisyAgent(8), link=FakeLink())
        with actor, pytest.raises(PolicyError, match="state"):
            actor.run(identity(HORIZON))
    with policy_of(StatePolicy()) as policy:
        result = rollouts.evaluate(LineEnv(length=9, success_at=5), policy, config_of(1), n=3)
    assert (result.episodes, result.successes, result.policy_version) == (3, 3, 3)


class Keys:
    """A console whose keys come `after` so many polls that showed `word`."""

    shown = None

    def __init__(self, *pressed, word=ActorState.WAITING, after=5):
        self.pressed, self.word, self.after, self.states = list(pressed), word, after, []

    def actions(self):
        self.after -= self.states[-1].word is self.word
        pressed, self.pressed = ([], self.pressed) if self.after > 0 else (self.pressed, [])
        yield from pressed

    def empty(self): ...

    def show(self, state):
        self.states.append(state)


def run_until_ended(env, config, keys, sink=None):
    """Run an episode that only a key ends; without keys, a stop in a third of a second."""
    ended, operator = threading.Event(), None
    if keys is None:
        threading.Timer(0.3, ended.set).start()
    else:
        more = {"now": time.monotonic, "countdown": 0.0}
        operator = Operator(keys, None, amend=lambda record: None, end=ended.set, **more)
    over = lambda: "operator" if ended.is_set() else None  # noqa: E731
    with remote_policy(config, SPEC) as remote:
        runner = EpisodeRunner(env, remote, sink or ListSink(), config=config, operator=operator, stop=over)
        summaries = []
        thread = threading.Thread(target=lambda: summaries.append(runner.run_episode(1)), daemon=True)
        thread.start()
        thread.join(10)
        alive = thread.is_alive()
        ended.set()
        thread.join(10)
        runner.close()
    assert not alive
    return summaries[0]


class Idle(LineEnv):
    idled = 0

    def idle(self):
        self.idled += 1


@pytest.mark.parametrize("clock", ["lockstep", "realtime"])
@pytest.mark.parametrize("action", [Action.QUIT, Action.END, None])
def test_a_key_or_a_stop_ends_the_wait_for_a_server_before_an_episode_and_no_robot_is_reset(clock, action):
    env, sink, keys = Idle(), ListSink(), None if action is None else Keys(Action.STOP, action)
    summary = run_until_ended(env, config_of(9, clock=clock), keys, sink)
    assert (summary.length, env.seeds, sink.records) == (0, [], [])
    assert env.idled > 3
    if keys is not None:
        assert any("127.0.0.1:9" in o.what for s in keys.states for o in s.obstacles)
        assert keys.states[-1].word is ActorState.STOPPED


def test_a_key_ends_the_warm_up_with_a_server_that_does_not_answer():
    env = Idle()
    with server_of(StatePolicy(seconds=3.0)) as server:
        summary = run_until_ended(env, config_of(server.port, clock="realtime"), Keys(Action.END, after=3))
    assert (summary.length, env.seeds) == (0, [])


@pytest.mark.parametrize("lost", [True, False])
def test_a_key_ends_an_episode_that_waits_for_a_chunk(lost):
    policy, (word, after) = StatePolicy(), (ActorState.WAITING, 2) if lost else (ActorState.POLICY, 30)
    with server_of(policy) as server:

        class Losing(LineEnv):
            def step(self, action):
                if self.tick == 4:
                    server.close() if lost else setattr(policy, "seconds", 5.0)
                return super().step(action)

        env, keys = Losing(length=1000), Keys(Action.STOP, Action.END, word=word, after=after)
        summary = run_until_ended(env, config_of(server.port), keys)
    assert (summary.length, env.tick, summary.ended_by) == (8, 8, "operator")


def test_a_chunk_that_comes_after_a_hold_is_not_executed():
    policy, sink, keys = StatePolicy(), ListSink(), Keys(Action.HOLD, word=ActorState.POLICY, after=15)
    with server_of(policy) as server:

        class Slow(LineEnv):
            def step(self, action):
                policy.seconds = 0.6 if self.tick == 7 else 0.0
                return super().step(action)

        run_until_ended(Slow(length=20), config_of(server.port), keys, sink)
    assert [s.source for s in sink.steps] == [Source.POLICY] * 8 + [Source.HOLD] * 12
