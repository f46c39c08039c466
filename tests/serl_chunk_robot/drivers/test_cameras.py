"""Processes of cameras: started anew where they end, and gone with their server."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from robot_served import HERE, free_port, wait
from robot_served import served as served_robot

from serl_chunk_robot.client.client import RobotClient
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.streams import camera_children

CAMERAS = """
import os, time
from pathlib import Path
from serl_chunk_robot.drivers.fake_camera import FakeCamera

class Faulty(FakeCamera):
    def __init__(self, fault=""):
        super().__init__(12, 16, 60.0)
        self.fault = fault

    def open(self, clock):
        super().open(clock)
        if self.fault == "open":
            raise OSError("no such device")

    def read(self):
        if self.fault == "exit":
            os._exit(3)
        return super().read()
"""


def robot_file(folder: Path, *options: str) -> Path:
    (folder / "faulty.py").write_text(CAMERAS)
    tables = "".join(f'[[camera]]\nname = "c{k}"\n{each}\n' for k, each in enumerate(options))
    path = folder / "robot.toml"
    path.write_text(f'name = "cell_{free_port()}"\ndriver = "fake"\nport = {free_port(2 + len(options))}\n{tables}')
    return path


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # what ended, and no one waited for, is gone as well
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_one_that_ends_is_started_anew_with_its_reason_and_they_end_with_the_context(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="serl_chunk_robot")
    good, fails = 'driver = "fake"\nheight = 12\nwidth = 16', 'driver = "faulty.py:Faulty"\nfault = "{}"'
    file = load(robot_file(tmp_path, good, fails.format("open"), fails.format("exit")))
    with Processes(camera_children(file.cameras, HERE, None, "run")) as cameras:
        killed = cameras._processes[0].process.pid
        wait(lambda: caplog.text.count("restarts_in=") >= 2)
        os.kill(killed, signal.SIGSEGV)
        wait(lambda: "name=c0 reason=SIGSEGV restarts_in=1s" in caplog.text)
        wait(lambda: cameras._processes[0].process is not None)
        again = cameras.pids()
        assert killed not in again
    assert "name=c1 reason=OSError: no such device restarts_in=1s" in caplog.text
    assert "name=c2 reason=exit status 3 restarts_in=1s" in caplog.text
    assert all(len(record.getMessage().splitlines()) == 1 for record in caplog.records)
    assert not any(alive(pid) for pid in [killed, *again])
    assert cameras.pids() == []


def test_views_of_one_device_come_from_one_process_at_the_same_moments(tmp_path):
    device = 'driver = "fake"\nheight = 12\nwidth = 16\nrate = 60'
    path = robot_file(tmp_path, device, 'of = "c0"\ncrop = [4, 2, 8, 10]\nrotate = 90', 'of = "c0"\nresize = [6, 8]')
    file = load(path)
    listed = [(c.name, c.spec.height, c.spec.width, c.port) for c in file.cameras]
    processes = Processes(camera_children(file.cameras, HERE, None, "run"))
    with served_robot(port=file.port, cameras=listed) as robot, processes as cameras:
        assert len(cameras.pids()) == 1
        client = robot.client()
        names = [name for name, *_ in client.cameras()]
        assert names == ["c0", "c1", "c2"]

        def look() -> bool:
            pictures = [client.newest_picture(name) for name in names]
            return None not in pictures and len({p.number for p in pictures}) == 1

        wait(look)
        whole, cut, small = (client._pictures[name] for name in names)
    assert whole.moment == cut.moment == small.moment
    assert np.array_equal(cut.image, np.rot90(whole.image[2:12, 4:12], -1))
    means = whole.image.reshape(6, 2, 8, 2, 3).mean(axis=(1, 3))
    assert np.abs(small.image - means).max() <= 0.5


SERVE = "import sys; from serl_chunk_robot.main import main; sys.exit(main(['serve', sys.argv[1]]))"


def served(path: Path, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)], env={**os.environ, "XDG_STATE_HOME": str(folder)},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def pids_of(server: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_of_a_camera_outlives_its_server(tmp_path, number):
    options = ('driver = "fake"\nheight = 12\nwidth = 16',) * 2
    path = robot_file(tmp_path, *options)
    server = served(path, tmp_path)
    try:
        with RobotClient(f"{HERE}:{load(path).port}", name="a", answer=20.0) as client:
            assert [name for name, *_ in client.cameras()] == ["c0", "c1"]
            wait(lambda: client.newest_picture("c1") is not None, 30)
        pids = pids_of(server.pid)
        assert len(pids) == 3  # the front's too
        server.send_signal(number)
        server.wait(20)
        wait(lambda: not any(alive(pid) for pid in pids), 5)
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_camera_whose_library_hangs_is_ended_and_started_anew(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="serl_chunk_robot")
    path = robot_file(tmp_path, 'driver = "faulty.py:Hangs"')
    code = "\nclass Hangs(Faulty):\n    def read(self):\n        time.sleep(1000)\n"
    (tmp_path / "faulty.py").write_text(CAMERAS + code)
    with Processes(camera_children(load(path).cameras, HERE, None, "run")):
        wait(lambda: "name=c0 reason=read does not return" in caplog.text, 20)
