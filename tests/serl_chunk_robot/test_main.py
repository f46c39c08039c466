"""The command of the robot's distribution, on its own and as a subcommand."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
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
from serl_chunk_robot.admission import Admission, read_allowed
from serl_chunk_robot.client import Keys, RobotClient, RobotError
from serl_chunk_robot.driver import SUPPORTED
from serl_chunk_robot.drivers.fake import FakeArms
from serl_chunk_robot.main import main


def test_the_version_is_printed(capsys):
    for run in (lambda: main(["--version"]), lambda: whole.main(["robot", "--version"])):
        with pytest.raises(SystemExit) as done:
            run()
        assert done.value.code == 0
        assert capsys.readouterr().out == f"serl_chunk_robot {serl_chunk_robot.__version__}\n"


@pytest.mark.parametrize(
    ("run", "program"),
    [(main, "serl-chunk-robot"), (lambda arguments: whole.main(["robot", *arguments]), "serl-chunk robot")],
    ids=["alone", "subcommand"],
)
def test_help_and_errors_name_the_program(run, program, capsys):
    assert run([]) == 0
    assert f"usage: {program} " in capsys.readouterr().out
    assert run(["--fast"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{program}: ")
    assert "--fast" in err
    assert len(err.splitlines()) == 1


@pytest.fixture
def robot():
    with served() as robot:
        yield robot


def run(robot, command, *more):
    """Run a command for a served robot; returns its exit status."""
    return main([command, "--robot", f"{HERE}:{robot.port}", *more])


def one_sentence(text):
    """Return an error's only line."""
    assert len(text.splitlines()) == 1, text
    return text


def test_status_gives_the_units_of_poses(robot, capsys):
    robot.ready()
    assert run(robot, "status") == 0
    assert "(m)" not in capsys.readouterr().out
    robot.server._spec = robot.server._spec._replace(targets="poses")
    assert run(robot, "status") == 0
    assert "set_point  x y z (m) and orientation (rad) of each arm: " in capsys.readouterr().out


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
    assert run(robot, "reboot", "left/gripper") == 1
    assert "reboot: not in HOLD" in one_sentence(capsys.readouterr().err)
    operator.request("stop")
    assert run(robot, "reboot", "left/gripper") == 0
    assert "STOPPED: stopped by operator" in one_sentence(capsys.readouterr().out)
    assert run(robot, "reboot", "left/elbow", "--arm-is-supported") == 0
    assert robot.arms.rebooted == ["left/gripper", "left/elbow" + SUPPORTED]
    assert run(robot, "reboot", "right/gripper") == 1
    assert "answers no one" in one_sentence(capsys.readouterr().err)
    robot.arms.set = lambda *arguments: FakeArms.set(robot.arms, *arguments)
    assert run(robot, "reboot", "left/gripper") == 1
    assert "no motors to reboot (aloha_ros1 and aloha_ros2 have)" in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()


def test_the_day_ends_with_the_robot_parked_and_without_torque(robot, capsys):
    there = HOME + 0.1 * (np.arange(J) == 0)
    robot.server._motions = lambda *_: Way(there)
    robot.ready()
    assert run(robot, "end") == 0
    assert "torque off" in capsys.readouterr().out
    np.testing.assert_allclose(robot.arms.sent[-1], there, atol=1e-6)
    assert not robot.arms._on.any()


def test_a_day_does_not_end_where_the_robot_does_not_stand(robot, capsys):
    operator = robot.ready()
    operator.request("stop")
    assert run(robot, "end") == 1
    assert "STOPPED" in one_sentence(capsys.readouterr().err)
    operator.request("clear")
    operator.request("jog", lasts=True)
    assert run(robot, "end") == 1
    assert "MOVE" in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()


@pytest.mark.parametrize(
    ("happens", "named", "state"),
    [
        (lambda robot: robot.operator().request("stop"), "stopped by", "STOPPED"),
        (lambda robot: robot.operator().request("hold"), "held by", "HOLD"),
        (lambda robot: setattr(robot.arms, "fault", "a motor is hot"), "a motor is hot", "STOPPED"),
        (lambda robot: os.kill(os.getpid(), signal.SIGINT), "Ctrl-C", "HOLD"),
        (lambda robot: robot.server.end("SIGTERM"), "SIGTERM", None),
        (lambda robot: patch("serl_chunk_robot.front.try_send", return_value=True).start(), "no state of", None),
    ],
    ids=["stop", "hold", "fault", "ctrl-c", "server ended", "no connection"],
)
def test_what_comes_between_leaves_torque_on(robot, capsys, happens, named, state):
    robot.server._motions = lambda *_: robot_served.Way(HOME + 0.5 * (np.arange(J) == 0), lasts=True)
    operator = robot.ready()
    asked = []

    def meanwhile():
        wait(lambda: robot.server.loop.machine.state == "MOVE")
        time.sleep(0.05)
        asked.append(happens(robot))

    thread = threading.Thread(target=meanwhile)
    thread.start()
    with patch.object(RobotClient, "request", autospec=True, side_effect=RobotClient.request) as requests:
        try:
            assert run(robot, "end") == 1
        finally:
            thread.join(10)
            patch.stopall()
    assert "torque_off" not in [call.args[1] for call in requests.mock_calls]
    error = one_sentence(capsys.readouterr().err)
    assert named in error
    assert "left torque on" in error
    assert robot.arms._on.all()
    if state is not None:
        until(operator, state)


def test_a_process_that_stood_still_does_not_switch_torque_off(robot, capsys):
    robot.server._motions = lambda *_: Way(HOME + 0.1 * (np.arange(J) == 0))
    robot.ready()
    clock = iter([0.0, *[100.0] * 10])
    with patch("serl_chunk_robot.main.time") as time_there:
        time_there.monotonic = lambda: next(clock)
        assert run(robot, "end") == 1
    assert "no state was read for 100 s" in one_sentence(capsys.readouterr().err)
    assert robot.arms._on.all()


def test_keys_are_made_and_admit_who_has_them(tmp_path, capsys):
    folder = tmp_path / "keys"
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
        ([], "server.json exists already"),
        (["--add", "desk"], "desk.json exists already"),
        (["--add", "gone"], "gone.json exists already"),
        (["--add", "new", "--out", "{tmp}/desk.json"], "desk.json exists already"),
        (["--add", "new", "--out", "{tmp}/none/new.json"], "new.json cannot be written"),
        (["--add", "../desk"], "../desk: use 1..64 letters"),
        (["--add", "new", "--revoke", "desk"], "not allowed with"),
        (["--revoke", "des"], "It has: desk, gone"),
        (["--operator"], "--operator: goes with --add"),
        (["--out", "file"], "--out: goes with --add"),
    ],
)
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


def test_a_folder_without_a_servers_keys_admits_no_one(tmp_path, capsys):
    for more in (["--add", "desk"], ["--revoke", "desk"]):
        assert main(["keys", str(tmp_path), *more]) == 2
        assert "has no server's keys" in one_sentence(capsys.readouterr().err)
    assert not [path for path in tmp_path.rglob("*")]
