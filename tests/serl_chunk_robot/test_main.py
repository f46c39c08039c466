"""The command of the robot's distribution, on its own and as a subcommand."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from unittest.mock import patch

import numpy as np
import pytest
import robot_served
import zmq
from robot_limits import HOME, J
from robot_served import HERE, served, until, wait
from robot_world import Way

import serl_chunk_robot
from serl_chunk import main as whole
from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.commands import requests
from serl_chunk_robot.commands.diagnosis import Finding
from serl_chunk_robot.drivers.base import SUPPORTED
from serl_chunk_robot.drivers.fake import FakeArms
from serl_chunk_robot.main import main
from serl_chunk_robot.server.admission import Admission, read_allowed


def test_the_version_is_printed(capsys):
    version = f"serl_chunk_robot {serl_chunk_robot.__version__}\n"
    for run in (lambda: main(["--version"]), lambda: whole.main(["robot", "--version"])):
        with pytest.raises(SystemExit, match="0"):
            run()
        assert capsys.readouterr().out == version
    command = [sys.executable, "-m", "serl_chunk_robot", "--version"]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, version)


@pytest.mark.parametrize(
    ("statuses", "says", "status"),
    [
        (["ok", "warning"], "0 failed", 0),
        (["ok", "FAIL"], "1 failed", 1),
        (["-", "ok", "-"], "0 failed, 2 not tried", 1),
    ],
)
def test_a_check_that_did_not_try_all_of_it_does_not_succeed(robot, tmp_path, capsys, statuses, says, status):
    (tmp_path / "robot.toml").write_text('name = "cell_3"\ndriver = "fake"\n')
    findings = [Finding(str(k), each, "as it is") for k, each in enumerate(statuses)]
    with patch("serl_chunk_robot.commands.check.RobotCheck.run", return_value=findings):
        assert run(robot, "check", str(tmp_path / "robot.toml")) == status
    assert f"check: {says}; " in capsys.readouterr().out
    (text,), (values,) = tmp_path.glob("check_*.txt"), tmp_path.glob("check_*.json")
    assert text.read_text().startswith(f"Check of cell_3: {says}\n")
    assert json.loads(values.read_text())["ok"] is (status == 0)


@pytest.mark.parametrize("program", ["serl-chunk-robot", "serl-chunk robot"])
def test_help_and_errors_name_the_program(program, capsys):
    run = main if program == "serl-chunk-robot" else lambda arguments: whole.main(["robot", *arguments])
    assert run([]) == 0
    assert f"usage: {program} " in capsys.readouterr().out
    assert run(["--fast"]) == 2
    out, err = capsys.readouterr()
    assert (out, one_sentence(err).startswith(f"{program}: "), "--fast" in err) == ("", True, True)


@pytest.fixture
def robot():
    with served() as robot:
        yield robot


def run(robot, command, *more):
    """Run a command for a served robot, in the state that it is in; returns its exit status."""
    if command in requests.MOVING and not requests.at_terminal():
        more = (*more, "--generation", str(robot.server.loop.machine.generation))
    return main([command, "--robot", f"{HERE}:{robot.port}", *more])


def one_sentence(text):
    """Return an error's only line."""
    assert len(text.splitlines()) == 1, text
    return text


class Wait(Way):
    """A motion that stands until the operator lets it go on."""

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

    def refused(motor: str) -> str:
        assert run(robot, "reboot", motor) == 1
        return one_sentence(capsys.readouterr().err)

    assert "reboot: the robot is in HOLD" in refused("left/gripper")
    operator.request("stop")
    assert run(robot, "reboot", "left/gripper") == 0
    assert "STOPPED: stopped by operator" in one_sentence(capsys.readouterr().out)
    assert run(robot, "reboot", "left/elbow", "--arm-is-supported") == 0
    assert robot.arms.rebooted == ["left/gripper", "left/elbow" + SUPPORTED]
    assert "answers no one" in refused("right/gripper")
    robot.arms.set = lambda *arguments: FakeArms.set(robot.arms, *arguments)
    assert "no motors to reboot (aloha_ros1 and aloha_ros2 have)" in refused("left/gripper")
    assert robot.arms._on.all()


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
    assert run(robot, "status") == 0
    assert "(m)" not in capsys.readouterr().out
    robot.server._greeting["spec"]["targets"] = "poses"
    assert run(robot, "status") == 0
    assert "set_point  x y z (m) and orientation (rad) of each arm: " in capsys.readouterr().out
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
    robot.server._motions = lambda *_: robot_served.Way(HOME + 0.5 * (np.arange(J) == 0), lasts=not away)
    operator = robot.ready()

    def meanwhile():
        wait(lambda: robot.server.loop.machine.state == "MOVE")
        time.sleep(0.05)
        happens(robot)

    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        assert run(robot, "end") == 1
    finally:
        thread.join(10)
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
    for more in (["--add", "desk"], ["--revoke", "desk"]):
        assert main(["keys", str(tmp_path), *more]) == 2
        assert "has no server's keys" in one_sentence(capsys.readouterr().err)
    assert not [path for path in tmp_path.rglob("*")]
    assert main(["keys", str(folder)]) == 0
    assert 'keys = "' in capsys.readouterr().out
    for path, mode in ((folder, 0o700), (folder / "allowed", 0o700), (folder / "server.json", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert main(["keys", str(folder), "--add", "desk", "--operator"]) == 0
    assert "--keys desk.json" in capsys.readouterr().out
    assert main(["keys", str(folder), "--add", "actor", "--out", str(tmp_path / "stick.json")]) == 0
    for name in ("desk.json", "stick.json", "keys/allowed/desk.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    context = zmq.Context()
    admission = Admission(context, folder)
    try:
        desk, actor = (Keys.of_file(tmp_path / name) for name in ("desk.json", "stick.json"))
        assert {desk.server, actor.server} == {admission.public}
        assert admission.keys[desk.pair.public] == ("desk", "operator")
        assert admission.keys[actor.pair.public] == ("actor", "any")
        assert main(["keys", str(folder), "--revoke", "desk"]) == 0
        wait(lambda: desk.pair.public not in admission.keys)
        assert not admission._failed
    finally:
        admission.close()
        context.destroy(linger=0)
    with served(keys=folder) as robot:
        assert run(robot, "status", "--keys", str(tmp_path / "stick.json")) == 0
        assert run(robot, "clear", "--keys", str(tmp_path / "stick.json")) == 1
        with pytest.raises(RobotError, match="does it admit this key"):
            RobotClient(f"{HERE}:{robot.port}", name="desk", keys=desk, answer=0.5).hello()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "server.json exists already"), (["--add", "gone"], "gone.json exists already"),
        (["--add", "new", "--out", "{tmp}/desk.json"], "desk.json exists already"),
        (["--add", "new", "--out", "{tmp}/none/new.json"], "new.json cannot be written"),
        (["--add", "../desk"], "'../desk': use 1..64 letters"), (["--revoke", "des"], "It has: desk, gone"),
        (["--add", "new", "--revoke", "desk"], "not allowed with"), (["--operator"], "--operator: goes with --add"),
        (["--out", "file"], "--out: goes with --add"),
    ],
)  # fmt: skip
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
