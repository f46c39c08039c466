"""`serl-chunk-robot serve` as a process: signals, the lock, a killed server, and the commands."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ports import free_port as port_of_learner
from robot_moments import STOOD_STILL, VALIDITY, Cell, Moment
from robot_process import FILES, RobotProcess
from robot_served import HERE, drive, free_port, until, wait

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


DRIVER = '''
import ctypes, os, time
from serl_chunk_robot.drivers.fake import viperx_arms

def with_the_lock(seconds):
    """Stand still with the interpreter's lock, which no signal interrupts."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time() + seconds), 0))

HANGS = {"lock": with_the_lock, "sleep": time.sleep}

def arms(folder, kind):
    made = viperx_arms()
    read, spec, flag = made.read, made.spec(), os.path.join(folder, "hangs")
    made.spec = lambda: spec._replace(stop_outside="outside:stop")
    def reads():
        if os.path.exists(flag):
            seconds = float(open(flag).read())
            os.unlink(flag)
            HANGS[kind](seconds)
        return read()
    made.read = reads
    return made
'''
OUTSIDE = """
def stop(options, reason):
    with open(options["folder"] + "/stopped", "a") as file:
        file.write(reason)
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("kind", ["lock", "sleep"])
def test_a_driver_that_hangs_is_noticed_and_the_server_can_be_ended(tmp_path, kind):
    flag = tmp_path / "hangs"
    (tmp_path / "slow.py").write_text(DRIVER)
    (tmp_path / "outside.py").write_text(OUTSIDE)
    driver = f'[driver]\nname = "slow.py:arms"\nfolder = "{tmp_path}"\nkind = "{kind}"\n'
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # The loop takes no gap of these tests for one of the machine: what it does after one is shown elsewhere.
    robot = RobotProcess(
        tmp_path,
        f'name = "cell"\nstart = "evaluating"\n{driver}',
        gap=30.0,
        environment={**os.environ, "PYTHONPATH": path},
    )

    def hang(seconds: float) -> None:
        (tmp_path / "new").write_text(str(seconds))
        (tmp_path / "new").rename(flag)

    with contextlib.closing(robot):
        robot.begin()
        with robot.client("desk", "operator") as desk, robot.client("left", "controller") as actor:
            wait(lambda: desk.hello()["ok"] and bool(desk.next_state(60)["answered"]), 60)
            desk.request("clear")
            actor.hello()
            desk.request("go")
            actor.request("arm")
            drive(actor, 10, 0.002)
            at = desk.next_state()["generation"]
            hang(3.0)
            state = until(desk, "STALLED")
            assert state["stalled"] > 0
            assert "stood still" in state["word"]
            assert "emergency stop" in state["word"]
            with pytest.raises(RobotError, match=r"THE ROBOT DID NOT CONFIRM the stop.*emergency stop"):
                desk.request("stop")
            with pytest.raises(RobotError, match="arm: the server's loop has stood still"):
                actor.request("arm", generation=at)
            wait(lambda: (tmp_path / "stopped").exists())
            state = until(desk, "STOPPED")
            assert state["word"] == "stopped by desk", "what was requested meanwhile is obeyed"
            assert state["generation"] > at
            assert "stalled" not in state
            assert actor.request("ping")["state"] == "STOPPED"
            children = Path(f"/proc/{robot.process.pid}/task/{robot.process.pid}/children").read_text().split()
            hang(60.0)
            until(desk, "STALLED")
            assert robot.end(signal.SIGTERM)[0] == -signal.SIGKILL
            assert children
            wait(lambda: all(ended(int(pid)) for pid in children))


THIRD = "three lapses within a minute"
MOMENTS = ("stop", "kill", "stop", "kill")


@pytest.mark.slow
def test_a_robot_whose_actor_dies_or_stands_still_brakes_and_stays(tmp_path: Path):
    """Times are not judged: `benchmarks/robot_stops.py` measures them on a quiet machine."""
    done: list[Moment] = []
    port = free_port()
    with closing(Cell(tmp_path, (port, port_of_learner()), 3 * len(MOMENTS), os.environ)) as robot:
        robot.start()
        robot.learn()
        robot.act()
        for waits, how in enumerate(MOMENTS):
            done.append(robot.moment(how, 0.5 + 0.3 * waits))
            with RobotClient(f"{HERE}:{port}", name="watcher", answer=20.0) as watcher:
                assert watcher.next_state()["state"] == "STOPPED"
            if how == "kill" and len(done) < len(MOMENTS):
                robot.act()
        moments, _ = robot.set_points()
    assert len(moments) > 1000
    undisturbed = [m for m in done if STOOD_STILL not in m.word + m.end]
    assert undisturbed, "the machine let the loop run"
    for moment in undisturbed:
        # Each moment lapses: the third one within a minute latches at once, the others after a second.
        words = moment.word, moment.end
        assert words in (("no valid command in time", "no command for a second"), (THIRD, THIRD)), moment
        assert moment.braking < VALIDITY + 0.2, moment
    for moment in done:
        assert moment.speed > 0.05, moment
        assert moment.within, moment
        assert not moment.moved_after, moment
