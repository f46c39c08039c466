"""A robot's server whose driver does not return: what its front publishes and answers, and what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from robot_served import HERE, Reading, drive, free_port, until, wait

from serl_chunk_robot.client.client import RobotError

# The loop takes no gap of these tests for one of the machine: what it does after one is shown elsewhere.
MAIN = """
from serl_chunk_robot import main
from serl_chunk_robot.control import loop
loop.GAP = 30.0
raise SystemExit(main.main())
"""
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
    port, flag = free_port(), tmp_path / "hangs"
    (tmp_path / "slow.py").write_text(DRIVER)
    (tmp_path / "outside.py").write_text(OUTSIDE)
    (tmp_path / "robot.toml").write_text(
        f'name = "cell"\nstart = "evaluating"\nport = {port}\n'
        f'[driver]\nname = "slow.py:arms"\nfolder = "{tmp_path}"\nkind = "{kind}"\n'
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": path}
    server = subprocess.Popen([sys.executable, "-c", MAIN, "serve", str(tmp_path / "robot.toml")], env=environment)

    def hang(seconds: float) -> None:
        (tmp_path / "new").write_text(str(seconds))
        (tmp_path / "new").rename(flag)

    try:
        with (
            Reading(f"{HERE}:{port}", name="desk", role="operator", answer=20.0) as desk,
            Reading(f"{HERE}:{port}", name="left", role="controller", answer=20.0) as actor,
        ):
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
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            hang(60.0)
            until(desk, "STALLED")
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == -signal.SIGKILL
            assert children
            wait(lambda: all(ended(int(pid)) for pid in children))
    finally:
        server.kill()
        server.wait()
