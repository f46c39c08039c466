"""`serl-chunk-robot serve` as a process: signals, the lock, a killed server, and the commands."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import time
from typing import Any

import pytest
from robot_process import FILES, RobotProcess
from robot_served import HERE, drive, until, wait

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.wire import arrays


class Robot(RobotProcess):
    def ready(self, actor: RobotClient) -> None:
        with self.client("operator", "operator") as operator:

            def cleared() -> bool:
                with contextlib.suppress(RobotError):
                    operator.request("clear")
                return operator.next_state()["state"] == "HELD"

            wait(cleared, 60)
            actor.request("lease")
            operator.request("go")


@pytest.fixture
def robot(tmp_path):
    with contextlib.closing(Robot(tmp_path, 'name = "cell_3"\ndriver = "fake"\nstart = "evaluating"\n')) as robot:
        yield robot


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_lets_the_robot_stand_with_torque(robot, number):
    robot.begin()
    with robot.client("left", "controller") as actor:
        robot.ready(actor)
        actor.request("arm")
        drive(actor, 10, 0.002)
        status, err = robot.end(number)
    assert status == 0, err
    assert f"BRAKE: held by {number.name}" in err
    assert "Torque stays on" in err
    assert "Traceback" not in err


HANGS = """
import time
from serl_chunk_robot.drivers.fake import viperx_arms

def arms():
    made, reads = viperx_arms(), iter(range(1000))
    read = made.read
    made.read = lambda: read() if next(reads) < 400 else time.sleep(60)
    return made
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_server_whose_driver_hangs(robot):
    (robot.file.parent / "hangs.py").write_text(HANGS)
    robot.begin("--driver", "hangs.py:arms")
    time.sleep(3)
    robot.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert robot.process.poll() is None
    assert robot.end(signal.SIGTERM)[0] == -signal.SIGTERM


def test_a_second_server_is_refused_and_a_killed_one_leaves_no_lock(robot):
    robot.begin()
    second = robot.run("serve", str(robot.file))
    assert second.returncode == 2
    assert f"process {robot.process.pid}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    with robot.client("left", "controller") as actor:
        robot.ready(actor)
        actor.request("arm")
        run = actor.next_state()["run"]
        robot.end(signal.SIGKILL)
        robot.begin()
        wait(lambda: actor.next_state(30)["run"] != run)
        assert until(actor, "STOPPED")["controller"] == ""
        with pytest.raises(RobotError, match="STOPPED"):
            actor.request("arm")
    assert "STOPPED: started" in robot.run("status", "--robot", robot.address).stdout


def test_a_server_that_stood_still_has_stopped_its_robot(robot):
    robot.begin()
    with robot.client("left", "controller") as actor:
        robot.ready(actor)
        actor.request("arm")
        drive(actor, 5)
        at = actor.next_state()["set_point"]
        robot.process.send_signal(signal.SIGSTOP)
        for _ in range(75):
            actor.send_command(at + 0.02)
            time.sleep(0.02)
        robot.process.send_signal(signal.SIGCONT)
        state = until(actor, "STOPPED")
        assert "stood still" in state["word"]
        assert abs(state["set_point"] - at).max() < 1e-3


@pytest.mark.skipif(importlib.util.find_spec("gym_aloha") is None, reason="the [aloha-sim] extra is not installed")
def test_simulated_arms_keep_their_target_without_a_server_and_a_new_one_moves_nothing(robot):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((HERE, 0))
        arms = s.getsockname()[1]
    file = (FILES / "aloha_sim.toml").read_text().replace("port = 5610", f"port = {arms}\nends = 10.0")
    robot.file.write_text(f"port = {robot.port}\n{file}")
    robot.begin()
    with robot.client("left", "controller") as actor:
        robot.ready(actor)
        actor.request("arm")
        start = actor.next_state()["set_point"]
        drive(actor, 30, 0.004)
        robot.end(signal.SIGKILL)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(5)
            s.connect((HERE, arms))

            def arms_now() -> dict[str, Any]:
                s.send(arrays.pack({"op": "hello"}))
                return arrays.unpack(s.recv(65536), 65536)

            kept = arms_now()
            assert abs(kept["target"] - start).max() > 0.05, "away from home"
            wait(lambda: abs(arms_now()["dq"]).max() < 1e-4)  # they settle at it
            kept = arms_now()
            robot.begin()
            for _ in range(50):
                state = actor.next_state(10)
                assert state["state"] == "STOPPED"
                assert abs(state["q"] - kept["q"]).max() < 1e-3
