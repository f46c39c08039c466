"""A robot's server whose driver does not return: what its front publishes and answers, and what ends it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from robot_process import RobotProcess
from robot_served import drive, until, wait

from serl_chunk_robot.client.client import RobotError

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
