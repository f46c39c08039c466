"""A robot behind a server, as the control loop sees it: real sockets, simulated arms."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import threading
import time

import numpy as np
import pytest
import robot_served
from actor_helpers import make_config
from driven_leader import SPEC
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J
from robot_served import HERE, until, wait
from robot_world import TICK

from serl_chunk.actor.episode import EpisodeRunner
from serl_chunk.config.experiment import ActorConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.evaluation.results import EvalResult
from serl_chunk.robots.served.robot import HELD_S, ServedRobot
from serl_chunk.types import STATE, ConfigError
from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.drivers.base import Event
from serl_chunk_robot.main import main

JOINTS = np.array([i not in GRIPPERS for i in range(J)])


STAY = HOME.astype(np.float32)


def config_of(robot, **more):
    return FakeAlohaConfig(server=f"{HERE}:{robot.port}", **more)


@pytest.fixture
def served():
    with robot_served.served() as robot:
        yield robot


@pytest.fixture
def operator(served):
    return served.operator()


@pytest.fixture
def make(served):
    made = []

    def make(name="actor", **changes):
        made.append(ServedRobot(config_of(served), dataclasses.replace(SPEC, **changes), name=name))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def ready(operator, make):
    """Makes an environment of a robot that is cleared; `ready()` begins an episode and its first tick."""

    def ready(ticks=1, **changes):
        clear(operator)
        env = make(**changes)
        env.reset(seed=1)
        for _ in range(ticks):
            env.step(STAY)
        return env

    return ready


def clear(operator):
    for _ in range(50):
        try:
            return operator.request("clear")
        except RobotError:
            time.sleep(0.02)
    raise AssertionError("the robot is not cleared")


def test_targets_are_followed_and_the_set_point_is_what_was_executed(served, operator, make):
    clear(operator)
    env = make()
    observation, info = env.reset(seed=1)
    assert observation[STATE].dtype == np.float32
    np.testing.assert_allclose(observation[STATE], HOME, atol=1e-4)
    assert info["draws"]
    target, executed = HOME.copy(), []
    for way in (1, -1) * 4:
        for _ in range(25):
            target = target + way * 0.008 * JOINTS
            observation, reward, terminated, truncated, info = env.step(target.astype(np.float32))
            executed.append(info.get("executed_action", target))
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert "fault" not in info
        if (near := np.abs(executed[-1] - target).max()) < 0.02:
            break  # else the machine was busy, and the targets came late: again
    assert near < 0.02
    assert np.abs(np.diff(executed, axis=0)).max() < 3.2 * 3 * TICK
    np.testing.assert_allclose(observation[STATE], executed[-1], atol=0.06)
    for _ in range(100):  # a target that came late on a busy machine is caught up with
        info = env.step(target.astype(np.float32))[4]
        if "executed_action" not in info:
            break
    assert "executed_action" not in info, "the robot follows"
    for _ in range(5):
        info = env.step((target - 1.0 * JOINTS).astype(np.float32))[4]
    assert np.abs(info["executed_action"] - target).max() < 0.5
    assert info["gate"]
    env.close()
    assert until(operator, "HOLD")["controller"] == ""


def test_a_target_beyond_a_limit_is_recorded_as_it_was_cut(served, ready):
    env = ready(0)
    limits, at = served.server._gate.limits, env.seen().target
    edge = at[0] + 0.05
    served.server.loop.limit(limits._replace(high=np.where(np.arange(J) == 0, edge, limits.high)))
    for k in range(1, 21):
        *_, info = env.step((at + 0.005 * k * (np.arange(J) == 0)).astype(np.float32))
    assert (info["gate"], info["executed_action"][0]) == ("limit", pytest.approx(edge, abs=1e-6))


def test_what_an_episode_was_moved_under_is_recorded(served, tmp_path):
    operator = served.ready()
    config = dataclasses.replace(make_config(actor=ActorConfig(clock="realtime")), robot=config_of(served))
    spec = dataclasses.replace(SPEC, max_episode_steps=4)
    env = ServedRobot(config.robot, spec)
    with EpisodeWriter(tmp_path, spec) as writer:
        runner = EpisodeRunner(env, None, writer, config=config)
        summaries = [runner.run_episode(1)]
        until(operator, "HOLD")
        operator.request("profile", name="slow")
        summaries.append(runner.run_episode(2))
        runner.close()
    env.close()
    begins = [read_episode(path, spec).begin for path in writer.written]
    wanted = [
        {"profile": name, "digest": digest, "draws": {"step 0": HOME.tolist()}}
        for name, digest in (("fast", "3.2"), ("slow", "0.5"))
    ]
    for found, expected in zip(map(json.loads, [b.conditions for b in begins]), wanted, strict=True):
        np.testing.assert_allclose(found["draws"].pop("step 0"), expected["draws"].pop("step 0"), atol=1e-5)
        assert found == expected
    result = EvalResult(mode="mean", seed_base=0, policy_version=0, tick_seconds=spec.dt, summaries=summaries)
    reported = [episode["conditions"] for episode in json.loads(json.dumps(result.to_json()))["episodes"]]
    assert reported == [json.loads(begin.conditions) for begin in begins]


@pytest.fixture
def guarded():
    """A served robot whose controller needs an operator's go."""
    with robot_served.served(needs_go=True) as robot:
        yield robot


def changes(robot, seconds=0.6):
    """Whether a set point changes within some seconds, after the braking."""
    until(robot.client("eyes", "any"), "HELD")
    before = len(robot.arms.sent)
    time.sleep(seconds)
    return len({tuple(target) for target in robot.arms.sent[before:]}) > 1


class Session:
    """Episodes of a ServedRobot on a thread, whose ticks never stand still, and what its server got."""

    def __init__(self, env) -> None:
        self.over, self.env = threading.Event(), env
        self.env.stop = lambda: "the test" if self.over.is_set() else None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            self.env.reset(seed=1)
            for k in range(10_000):
                target = self.env.seen().target + 0.01 * JOINTS * (-1) ** (k // 40)
                if self.env.step(np.clip(target, LOW, HIGH).astype(np.float32))[3] or self.over.is_set():
                    break

    def end(self) -> None:
        self.over.set()
        self.thread.join(10)
        self.env.close()


@pytest.mark.parametrize(("at", "ops"), [("MOVE", ["hold"]), ("RUN", ["stop", "clear"])])
def test_nothing_moves_between_an_operators_hold_or_clear_and_a_go(guarded, monkeypatch, caplog, at, ops):
    lasts = [at == "MOVE"]
    motion = guarded.server._motions
    monkeypatch.setattr(
        guarded.server,
        "_motions",
        lambda event, arguments, start, limits: motion(event, {"lasts": lasts[0], "by": 0.4 * lasts[0]}, start, limits),
    )
    operator, session = guarded.ready(), Session(ServedRobot(config_of(guarded), SPEC, name="actor"))
    try:
        wait(lambda: operator.next_state()["controller"])
        assert not changes(guarded), "cleared, without a go"
        operator.request("go")
        until(operator, "RUN" if at == "HOLD" else at)
        for op in ops:
            operator.request(op)
            if op == "stop":
                until(operator, "STOPPED")
        lasts[0] = False
        assert not changes(guarded), f"{ops}, without a go"
        remedy = r"held by operator for \d+ s\)\. Look at the cell, then run: serl-chunk robot go"
        assert re.search(remedy, caplog.text)
        operator.request("go")
        until(operator, "RUN")
    finally:
        session.end()
    assert until(operator, "HELD")["held"]["by"] == "the server", "a session that ended is a controller that is gone"


class Stand:
    """A motion that stands for a while."""

    def __init__(self) -> None:
        self.left = 60

    def goal(self, at, reading, now):
        self.left -= 1
        return at.position if self.left > 0 else None


def test_a_reset_is_asked_for_once_and_waited_for_and_the_time_limit_leaves_the_robot_standing(
    served, operator, make, monkeypatch
):
    monkeypatch.setattr(served.server, "_motions", lambda event, arguments, start, limits: Stand())
    clear(operator)
    env = make(max_episode_steps=5)
    asked, request = [], env._client.request
    monkeypatch.setattr(env._client, "request", lambda op, **more: (asked.append(op), request(op, **more))[1])
    for waits in (0, 2, 0):  # ticks before a human's first motion
        asked.clear()
        env.reset(seed=1)
        assert asked.count("reset") == 1
        for _ in range(waits):
            env.step(STAY)
            env.restart_limit()
        steps = [env.step(STAY) for _ in range(5)]
        assert (asked.count("arm"), [step[2:4] for step in steps]) == (1, [(False, False)] * 4 + [(False, True)])
        assert "lost_ticks" not in steps[1][4]
        until(operator, "HOLD")


def test_a_success_that_the_robot_reports_ends_the_episode(served, ready, monkeypatch):
    env = ready()
    once, read = iter([(Event(reward=1.0, success=True),)]), served.arms.read
    monkeypatch.setattr(served.arms, "read", lambda: read()._replace(events=next(once, ())))
    steps = [env.step(STAY) for _ in range(3)]
    reported = [s for s in steps if s[4]["success"]]
    assert [(s[1], s[2], s[3]) for s in reported] == [(1.0, True, False)], "once, and not again"


def test_a_stop_is_a_fault_and_the_next_episode_waits_for_the_operator(operator, ready, caplog):
    env = ready()
    operator.request("stop")
    ends = next(step for step in iter(lambda: env.step(STAY), None) if step[3])
    assert not ends[2]
    assert "stopped by operator" in ends[4]["fault"]
    began = []
    thread = threading.Thread(target=lambda: began.append(env.reset(seed=2)))
    with caplog.at_level(logging.WARNING):
        thread.start()
        time.sleep(0.7)
    assert not began, "no episode begins until the robot may move"
    assert "stopped by operator" in caplog.text
    assert "serl-chunk robot clear" in caplog.text
    clear(operator)
    thread.join(10)
    assert began


def test_a_lapse_is_a_gap_after_which_the_robot_is_armed_again(operator, ready):
    env = ready()
    generation = operator.next_state()["generation"]
    time.sleep(0.7)  # a command is valid for 0.5 s here, and silence stops after one
    infos = [env.step(STAY)[4] for _ in range(10)]
    assert operator.next_state()["generation"] > generation
    assert any(i.get("lost_ticks") for i in infos[:3])
    assert not any("fault" in i for i in infos)
    assert not any(i.get("lost_ticks") for i in infos[-3:])
    until(operator, "RUN")


def test_a_robot_that_may_not_move_for_long_ends_the_episode(operator, ready):
    env = ready()
    began, fault = time.monotonic(), ""
    while not fault and time.monotonic() - began < 10:
        if operator.next_state()["state"] == "RUN":
            operator.request("hold")
        elif operator.next_state()["state"] == "HOLD":
            operator.request("jog", lasts=True)
        fault = env.step(STAY)[4].get("fault", "")
    assert fault
    assert time.monotonic() - began > HELD_S


@pytest.mark.slow
def test_a_server_that_ends_is_a_fault(served, ready):
    env = ready()
    served.close()
    faults = [env.step(STAY)[4].get("fault", "") for _ in range(3)]
    assert any("is serl-chunk-robot serve running" in f for f in faults)


@pytest.mark.slow
def test_a_lease_that_ended_while_nothing_was_asked_is_taken_again(served, operator, make):
    clear(operator)
    env = make()
    wait(lambda: operator.next_state()["controller"] == "")
    env.reset(seed=1)
    wait(lambda: operator.next_state()["controller"] == "")
    assert "fault" not in env.step(STAY)[4]
    assert operator.next_state()["controller"].startswith("actor")


def test_who_keeps_the_rate_and_a_state_of_before_the_arm_is_no_lapse(ready):
    env = ready()
    began = time.monotonic()
    for _ in range(10):
        env.send(STAY)
        env.receive()
    assert time.monotonic() - began >= 10 * TICK
    env.paced = True
    for _ in range(5):
        env.reset(seed=1)
        env.send(STAY)  # begins late: the result is asked for at once
        assert "lost_ticks" not in env.receive()[4]


@pytest.mark.parametrize(("change", "word"), [
    ({"control_hz": 10.0}, "seconds of a tick"), ({"state_dim": 20}, "numbers of a state"),
    ({"grippers": (6,)}, "grippers"), ({"arms": ((0, J),)}, "arms"),
    ({"joint_of_action": (1, 0, *range(2, J))}, "joints commanded by actions"),
    ({"action_high": tuple(HIGH + 3)}, "beyond the robot's joints"),
])  # fmt: skip
def test_a_robot_that_differs_is_refused_by_field(make, change, word):
    with pytest.raises(ConfigError, match=word) as raised:
        make(**change)
    assert raised.value.parameter == "robot.server"


def test_limits_that_were_rounded_to_float32_are_those_of_the_robot(served, make):
    """The action space of a gymnasium environment has them so."""
    spec = served.arms.spec()
    low, high = (tuple(np.array(side, np.float32).astype(float).tolist()) for side in (spec.low, spec.high))
    assert any(a < b for a, b in zip(low, spec.low, strict=True))
    make(action_low=low, action_high=high)
    make(arms=())  # one that does not tell its arms


@pytest.mark.parametrize("measured", [tuple(range(J)), (-1,) * J])
def test_actions_may_be_poses_of_which_the_state_is_told_or_not(served, make, ready, monkeypatch, measured):
    with pytest.raises(ConfigError, match="joints commanded by actions"):
        make(joint_of_action=(-1,) * J)  # of joints
    monkeypatch.setitem(served.server._greeting["spec"], "targets", "poses")
    assert "fault" not in ready(0, joint_of_action=measured).step(STAY)[4]


def test_a_server_with_keys_is_driven_by_who_has_one(tmp_path):
    folder = tmp_path / "keys"
    for more in ([], ["--add", "actor"]):
        assert main(["keys", str(folder), *more]) == 0
    with robot_served.served(keys=folder) as served:
        there = config_of(served)
        with pytest.raises(RobotError, match="no answer"):
            ServedRobot(there, SPEC)
        env = ServedRobot(dataclasses.replace(there, server_keys=str(tmp_path / "actor.json")), SPEC, name="left")
        wait(lambda: env._client.next_state()["controller"] == "left (key actor)")
        env.close()
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        ServedRobot(dataclasses.replace(there, server_keys=str(tmp_path / "none.json")), SPEC)


def test_leaders_are_driven_under_a_lease_that_is_taken_again_and_refusals_are_raised(served, make, operator):
    env = make()
    env.stop = lambda: "operator"  # a session that ends does not wait for the operator
    assert env.reset(seed=1)[0][STATE].shape == (J,)
    env.stop = lambda: None
    clear(operator)
    env.reset(seed=0)
    requests, request = [], env._client.request

    def noted(op, **arguments):
        requests.append((op, arguments))
        return request(op, **arguments)

    env._client.request = noted
    env._client.request("drop")
    for first in ({"left": 0}, {"left": 0}, {}):
        with pytest.raises(RobotError, match="no device 'left'") if first else contextlib.nullcontext():
            env.drive_leaders(5, first)
    assert [op for op, _ in requests] == ["drop", "lease", "drive", "drive", "drive"]
    assert requests[-1][1] == {"number": 5, "first": {}, "generation": env._state["generation"]}
