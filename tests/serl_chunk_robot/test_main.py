"""The command of the robot's distribution, on its own and as a subcommand."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest
import robot_served
from robot_limits import HOME, J
from robot_served import HERE, served, until, wait
from robot_world import TICK, Way

from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.commands import requests
from serl_chunk_robot.drivers.base import SUPPORTED
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.main import main
from serl_chunk_robot.server.admission import read_allowed


@pytest.fixture
def robot():
    with served(dt=TICK) as robot:
        yield robot


def run(robot, command, *more):
    if command in requests.MOVING and not requests.at_terminal():
        more = (*more, "--generation", str(robot.server.loop.machine.generation))
    return main([command, "--robot", f"{HERE}:{robot.port}", *more])


def one_sentence(text):
    assert len(text.splitlines()) == 1, text
    return text


def test_an_operators_commands(robot, capsys):
    watcher = robot.client("watcher", "any")
    wait(lambda: bool(watcher.next_state()["answered"]))
    jog = ("jog", "--joint", "0", "--angle", "0.1")
    for words, status in ((["clear"], 0), (["profile", "quick"], 1), (["profile", "slow"], 0), (["park"], 0), (jog, 0)):
        assert run(robot, *words) == status, capsys.readouterr().err
        watcher.request("ping")  # what follows is of a later pass
        until(watcher, "HOLD")
    assert run(robot, "status") == 0
    assert "slow (0.5)" in capsys.readouterr().out
    assert run(robot, "torque-off") == 0
    assert not robot.arms.read().torque
    assert run(robot, "clear") == 1  # the first one switches torque on
    wait(lambda: run(robot, "clear") == 0)
    assert (run(robot, "hold"), run(robot, "stop")) == (0, 0)
    assert until(watcher, "STOPPED")["word"].startswith("stopped by stop of ")


class Wait(Way):
    waiting = True

    def goal(self, at, reading, now):
        return self.to if self.waiting else None

    def proceed(self):
        self.waiting = False
        return True


def test_a_wait_for_the_operator_is_ended(robot, capsys):
    assert run(robot, "proceed") == 1
    assert "while a motion waits" in one_sentence(capsys.readouterr().err)
    robot.server._motions = lambda *_: Wait(HOME)
    operator = robot.ready()
    until(operator, "HOLD")
    operator.request("reset")
    assert run(robot, "proceed") == 0
    assert "resetting" in capsys.readouterr().out
    until(operator, "HOLD")


def test_a_motor_is_rebooted_by_its_name(robot, capsys):
    operator = robot.ready()
    assert run(robot, "reboot", "left/gripper") == 1
    assert "reboot: the robot is in HOLD" in one_sentence(capsys.readouterr().err)
    operator.request("stop")
    assert (run(robot, "reboot", "left/gripper"), run(robot, "reboot", "left/elbow", "--arm-is-supported")) == (0, 0)
    assert robot.arms.rebooted == ["left/gripper", "left/elbow" + SUPPORTED]


def test_the_day_ends_with_the_robot_parked_and_without_torque(robot, capsys):
    there = robot.server._park = HOME + 0.1 * (np.arange(J) == 0)
    robot.server._motions = lambda *_: Way(there)
    operator = robot.ready()
    operator.request("stop")
    assert run(robot, "end") == 1
    assert "STOPPED" in one_sentence(capsys.readouterr().err)
    operator.request("clear")
    motions, robot.server._motions = robot.server._motions, robot_served.way
    operator.request("jog", lasts=True)
    assert run(robot, "end") == 1
    assert "MOVE" in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()
    operator.request("hold")
    until(operator, "HOLD")
    robot.server._motions = motions
    assert run(robot, "end") == 0
    assert "torque off" in capsys.readouterr().out
    np.testing.assert_allclose(robot.arms.sent[-1], there, atol=1e-6)
    assert not robot.arms._on.any()


@pytest.mark.parametrize(
    ("happens", "named", "state"),
    [
        (lambda robot: robot.operator().request("stop"), "stopped by", "STOPPED"),
        (lambda robot: robot.operator().request("hold"), "held by", "HOLD"),
        (lambda robot: setattr(robot.arms, "fault", "a motor is hot"), "a motor is hot", "STOPPED"),
        (lambda robot: os.kill(os.getpid(), signal.SIGINT), "Ctrl-C", "HOLD"),
        (lambda robot: robot.server.end("SIGTERM"), "held by SIGTERM", None),
        (lambda robot: None, "joint 0 is measured 0.500 away from the pose", "HOLD"),
    ],
    ids=["stop", "hold", "fault", "ctrl-c", "server ended", "not there"],
)
def test_what_comes_between_leaves_torque_on(robot, capsys, happens, named, state):
    away = named.startswith("joint")
    robot.server._motions = lambda *_: Way(HOME + 0.5 * (np.arange(J) == 0), lasts=not away)
    operator = robot.ready()

    def meanwhile():
        wait(lambda: robot.server.loop.machine.state == "MOVE")
        time.sleep(0.05)
        happens(robot)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(meanwhile)
        assert run(robot, "end") == 1
        done.result()
    assert named in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()
    if state is not None:
        until(operator, state)


def test_the_end_of_another_motion_does_not_end_the_day(robot, capsys):
    """A reset of an actor that stands at its end, while the command that ends the day stood still."""
    robot.server._motions = lambda *_: Way(HOME + 0.1 * (np.arange(J) == 0))
    actor, operator = robot.client(), robot.ready()
    request = RobotClient.request

    def late(self, op, **arguments):
        reply = request(self, op, **arguments)
        if op == "end":
            operator.request("hold")
            until(operator, "HOLD")
            actor.request("lease")
            actor.request("reset")
            wait(lambda: robot.server.loop.machine.word == "the motion is done")
        return reply

    with patch.object(RobotClient, "request", late):
        assert run(robot, "end") == 1
    assert "not ended" in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()


@patch("serl_chunk_robot.server.leases.SILENCE", 60.0)  # of the actor, meanwhile
def test_at_a_terminal_enter_lets_it_move_and_nothing_else_does(robot, capsys, monkeypatch):
    robot.server.loop.machine.needs_go = True
    operator, actor = robot.operator(), robot.client()
    actor.hello()
    wait(lambda: bool(operator.next_state()["answered"]))
    for command in ("clear", "go"):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        state, generation = (getattr(robot.server.loop.machine, name) for name in ("state", "generation"))
        assert main([command, "--robot", f"{HERE}:{robot.port}"]) == 2  # pytest's input is no terminal
        assert ("terminal" in one_sentence(capsys.readouterr().err)) == (
            robot.server.loop.machine.generation == generation
        )
        monkeypatch.setattr(requests, "at_terminal", lambda: True)
        for typed, status in (("", 1), ("\n", 0)):
            assert robot.server.loop.machine.state == state
            monkeypatch.setattr("sys.stdin", io.StringIO(typed))
            assert run(robot, command) == status
        shown = capsys.readouterr().out
        assert f"{state}" in shown
        assert f"generation {generation}" in shown
        assert ("serl-chunk robot go" in shown) == (command == "clear")
        monkeypatch.undo()
    assert robot.server.loop.machine.state == "HOLD"
    assert main(["clear", "--robot", f"{HERE}:{robot.port}", "--generation", "0"]) == 1
    assert run(robot, "status", "--history") == 0
    printed = capsys.readouterr().out
    assert all(f"  {op}  " in printed for op in ("clear", "go   "))


def test_a_clear_is_of_the_state_that_was_printed(robot, capsys, monkeypatch):
    operator = robot.ready()
    operator.request("stop")
    until(operator, "STOPPED")
    monkeypatch.setattr(requests, "at_terminal", lambda: True)
    monkeypatch.setattr(requests, "ask_enter", lambda question: operator.request("stop"))  # before Enter is pressed
    assert run(robot, "clear") == 1
    assert "clear: it is of generation" in one_sentence(capsys.readouterr().err)
    assert operator.next_state()["state"] == "STOPPED"
    with patch.object(RobotClient, "_exchange", side_effect=RobotError("no answer")):
        for command in ("stop", "hold"):
            assert run(robot, command) == 1
            error = one_sentence(capsys.readouterr().err)
            assert "THE ROBOT DID NOT CONFIRM. Press the hardware emergency stop." in error


def test_keys_are_made_and_admit_who_has_them(tmp_path, capsys):
    folder = tmp_path / "keys"
    for more in ([], ["--add", "desk", "--operator"], ["--add", "actor", "--out", str(tmp_path / "stick.json")]):
        assert main(["keys", str(folder), *more]) == 0
    for path, mode in (
        (folder, 0o700),
        (folder / "allowed", 0o700),
        (folder / "server.json", 0o600),
        *((tmp_path / name, 0o600) for name in ("desk.json", "stick.json", "keys/allowed/desk.json")),
    ):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    desk, actor = (Keys.of_file(tmp_path / name) for name in ("desk.json", "stick.json"))
    assert read_allowed(folder) == {desk.pair.public: ("desk", "operator"), actor.pair.public: ("actor", "any")}
    assert desk.pair.secret not in repr(desk)
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=f"chmod 700 {folder}"):
        read_allowed(folder)
    folder.chmod(0o700)
    assert main(["keys", str(folder), "--revoke", "desk"]) == 0
    with served(keys=folder) as robot:
        assert run(robot, "status", "--keys", str(tmp_path / "stick.json")) == 0
        assert run(robot, "clear", "--keys", str(tmp_path / "stick.json")) == 1
        with pytest.raises(RobotError, match="does it admit this key"):
            RobotClient(f"{HERE}:{robot.port}", name="desk", keys=desk, answer=0.5).hello()


@pytest.mark.parametrize(("arguments", "named"), [
    ([], "server.json exists already"), (["--add", "gone"], "gone.json exists already"),
    (["--add", "new", "--out", "{tmp}/desk.json"], "desk.json exists already"),
    (["--add", "../desk"], "'../desk': use 1..64 letters"), (["--revoke", "des"], "It has: desk, gone"),
    (["--operator"], "--operator: goes with --add"),
])  # fmt: skip
def test_no_key_is_overwritten_and_a_wrong_one_is_named(tmp_path, capsys, arguments, named):
    folder = tmp_path / "keys"
    for more in ([], ["--add", "desk"], ["--add", "gone"], ["--revoke", "gone"]):
        assert main(["keys", str(folder), *more]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert json.loads(before[folder / "allowed" / "gone.json"])["revoked"] is True
    capsys.readouterr()
    assert main(["keys", str(folder), *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert named in re.sub(r"\s+", " ", one_sentence(capsys.readouterr().err))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [key.name for key in read_allowed(folder).values()] == ["desk"]
