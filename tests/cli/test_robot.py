"""`serl-chunk robot dry` and `replay`: recorded actions under a profile's limits, and on a served robot."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import time
from unittest.mock import patch

import numpy as np
import pytest
from actor_helpers import HumanOnTicks, NoisyAgent, make_config, make_policy
from robot_limits import GRIPPERS, HOME, LOW, J
from robot_limits import HIGH as MOST
from robot_served import HERE, served, until

from serl_chunk import main as whole
from serl_chunk.cli.robot.dry import Changed, Recorded, dry_run
from serl_chunk.cli.robot.replay import approach, await_go, compared, play
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.data.formats.hdf5_writer import EpisodeWriter
from serl_chunk.evaluation.rollouts import evaluate
from serl_chunk.recording.recording import Recording, RecordingTotals
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import RobotSpec
from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.control.motions import jog
from serl_chunk_robot.drivers.fake import HIGH
from serl_chunk_robot.robot_file.config import load, load_driver

TICK = 0.02
SPEC = RobotSpec("arms", 50.0, J, tuple(LOW), tuple(MOST), tuple(range(J)), GRIPPERS, (), 500, ((0, 7), (7, 14)))


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    path = tmp_path_factory.mktemp("robot") / "robot.toml"
    high = [0.15, *HIGH[1:7]] * 2
    text = 'name = "cell_3"\ndriver = "fake"\nrate = 50\n[profile.narrow]\nlike = "evaluating"\nhigh = '
    path.write_text(f"{text}{high}\n")
    return load(path)


def sine(joint=0, height=0.2, seconds=2.0, ticks=100, start=HOME):
    t = np.arange(ticks) * TICK
    actions = np.tile(start, (ticks, 1))
    actions[:, joint] += height * np.sin(np.pi * t / seconds) ** 2
    return Recorded("sine", actions, actions.copy())


def dried(robot, profile, episode, lag=0.02):
    done = Changed()
    dry_run(episode, robot, load_driver(robot).spec(), robot.profiles[profile].limits, lag, done)
    return done


@pytest.mark.parametrize(("profile", "episode", "reason", "joint"), [
    ("first_day", sine(3, height=0.5), "velocity", 3), ("narrow", sine(0, height=0.3), "limit", 0),
    ("evaluating", sine(9, height=1.5, seconds=0.4), "velocity", 9),
])  # fmt: skip
def test_what_is_changed_is_named_by_reason_and_joint(robot, profile, episode, reason, joint):
    done = dried(robot, profile, episode)
    assert 0.05 < done.share <= 1
    named = {key: n for key, n in done.reasons.items() if key[0] == reason}
    assert max(named, key=named.get) == (reason, joint)
    assert int(np.argmax(done.apart)) == joint
    assert any(f"joint {joint}" in line and reason in line for line in done.lines(profile))


def test_a_robot_that_lags_is_kept_near_its_set_point(robot):
    done = dried(robot, "evaluating", sine(1, height=0.8, seconds=1.0), lag=0.5)
    assert any(key == ("following", 1) for key in done.reasons)


def test_a_first_target_out_of_reach_stops_the_episode(robot):
    far = sine()
    far.joints[0, 2] -= 0.5
    done = dried(robot, "evaluating", far)
    assert (done.ticks, done.changed, list(done.stops)) == (100, 100, ["no valid command in time (first)"])


def test_dry_reads_demonstrations_and_needs_no_robot(tmp_path, capsys):
    demos, out, file = str(tmp_path / "demos"), tmp_path / "dry.json", "experiments/robots/fake_aloha.toml"
    assert whole.main(["record", "--exp_name=fake_aloha", "--n_demos=2", "--cameras=none", "--out", demos]) == 0
    assert whole.main(["robot", "dry", demos, "--file", file, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    values = json.loads(out.read_text())
    assert values["evaluating"]["changed"] == 0  # the task's own limits are wider than its expert
    assert values["first_day"]["share"] > 0.9
    assert f"of {values['first_day']['ticks']} ticks" in printed


class Person:
    def __init__(self, robot) -> None:
        self.operator, self.lines = robot.ready(), []

    def show(self, line: str) -> None:
        self.lines.append(line)
        if "serl-chunk robot go" in line:
            self.operator.request("go")


def test_an_episode_is_replayed_after_the_servers_own_motions_led_to_it():
    with served(needs_go=True) as robot:
        way = robot.server._motions

        def motions(event, arguments, start, limits):
            if event != "jog":
                return way(event, {}, start, limits)
            return jog(start, arguments.pop("joint"), arguments.pop("angle"), limits)

        robot.server._motions = motions
        robot.server._profiles = {**robot.server._profiles, "first_day": robot.server._profiles["slow"]}
        person = Person(robot)
        operator, controller, lines, sent = person.operator, robot.client(), person.lines, []
        robot.server._history.add = lambda op, **more: sent.append((op, more["by"]))
        episode = sine(2, height=0.1, seconds=0.6, ticks=30, start=HOME + 0.1 * (np.arange(J) == 1))
        approach(operator, controller, episode.actions[0], [], person.show)
        assert [line.split(" by")[0] for line in lines[2:]] == ["joint 1"]
        assert until(operator, "HELD")["held"]["by"] == "operator", "a jog ends so"
        await_go(controller, person.show)
        assert ["serl-chunk robot go" in line for line in lines] == [True, False, False, True]
        assert sent == [("go", "operator")] * 2, "of the person, who was waited for"
        assert operator.next_state()["profile"] == "fast"
        np.testing.assert_allclose(operator.next_state()["set_point"], episode.actions[0], atol=1e-4)
        played = play(controller, episode, TICK)
        figures = compared(episode, played, TICK)
        assert len(played.joints) == figures["ticks"] == 30
        assert max(figures["max"]) < 0.08
        assert 0.02 <= figures["behind"] <= 0.16  # arms lag by 0.02 s, and a state is of the last tick
        assert int(np.argmax(figures["rms"])) == 2
        assert until(operator, "HOLD")["word"] == "released by left"
        far = episode._replace(actions=episode.actions + 0.7 * (np.arange(J) == 5))
        with pytest.raises(RobotError, match=r"joint 5 is \+0.70 rad"):
            approach(operator, controller, far.actions[0], [], person.show)
        with pytest.raises(RobotError, match="first"):
            play(controller, far, TICK)
        operator.request("stop")
        with pytest.raises(RobotError, match="STOPPED"):
            approach(operator, controller, episode.actions[0], [], person.show)


def _piped(env, tmp_path, over):
    with patch.object(sys, "stdin", io.StringIO("\n" * 9)):
        assert whole.main(["robot", "go", "--robot", env._config.server]) == 2


def _served_robot(env, tmp_path, over):
    env.stop = over
    env.reset(seed=1)


def _evaluated(env, tmp_path, over):
    evaluate(env, make_policy(NoisyAgent(8)), dataclasses.replace(make_config(), robot=env._config), n=1, stop=over)


def _recorded(env, tmp_path, over):
    config = dataclasses.replace(make_config(), robot=env._config)
    with EpisodeWriter(tmp_path, SPEC) as writer:
        source, more = HumanOnTicks(frozenset()), {"config": config, "number": 1, "there": 0, "stop": over}
        Recording(env, None, source, writer, RecordingTotals(), cameras=(), **more).run(1)


def _replayed(env, tmp_path, over):
    env.close()
    with RobotClient(env._config.server, name="replay", role="controller") as controller:
        controller.newest_state = lambda: over() or RobotClient.newest_state(controller)
        await_go(controller, print)


@pytest.mark.parametrize("program", [_piped, _served_robot, _evaluated, _recorded, _replayed])
def test_only_a_person_lets_a_robot_go_on(program, tmp_path, monkeypatch):
    """What programs send to a robot that is HELD, for longer than a lease lasts in silence, until Ctrl-C."""
    sent, ends, exchange = [], time.monotonic() + 2.5, RobotClient._exchange

    def noted(client, op, arguments):
        sent.append(op)
        return exchange(client, op, arguments)

    def over():
        if time.monotonic() > ends:
            raise KeyboardInterrupt

    with served(needs_go=True) as robot:
        operator, config = robot.ready(), FakeAlohaConfig(server=f"{HERE}:{robot.port}")
        at = operator.next_state()["set_point"]
        with contextlib.closing(ServedRobot(config, SPEC)) as env, contextlib.suppress(KeyboardInterrupt):
            monkeypatch.setattr(RobotClient, "_exchange", noted)
            program(env, tmp_path, over)
        state = operator.next_state()
    assert bool(sent) == (program is not _piped), "all but the piped command reach the robot's server"
    assert not {"go", "clear", "take", "park", "proceed"} & set(sent)
    assert (state["state"], state["held"]["by"]) == ("HELD", "operator")
    assert np.array_equal(state["set_point"], at)
