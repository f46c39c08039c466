"""`COMMAND 2>&1 | sleep 1000`: a pipe that takes nothing stops neither a control loop nor a robot's server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from processes import PATIENCE
from robot_served import HERE, free_port, wait

from serl_chunk_robot.client.client import RobotClient

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="/proc")]

NATIVE = """
import os, threading
def native(lines):
    for _ in range(lines):
        for descriptor in (1, 2):
            try:
                os.write(descriptor, b"a library's line, written below Python\\n")
            except BlockingIOError:
                pass
"""
LOOP = (
    NATIVE
    + """
import sys, time
from serl_chunk_robot.output import background_output
import serl_chunk_robot.output as output
output.FLUSH_SECONDS = 0.2
with background_output():
    native(100)
    for k in range(1000):
        print("a tick", k, file=sys.stderr, flush=True)
native(100)
open(sys.argv[1], "w").write("done")
raise RuntimeError("the traceback goes nowhere, and is not waited for")
"""
)
START = """
import os, signal, sys, time
from serl_chunk.signals import answer_signals
from serl_chunk_robot.output import background_output
with background_output():
    answer_signals()
    open(sys.argv[1], "w").write("ready")
    time.sleep(1000)  # as a compilation
"""
DRIVER = (
    NATIVE
    + """
from serl_chunk_robot.drivers.fake import viperx_arms

class Loud:
    def __init__(self):
        self._arms = viperx_arms()

    def __getattr__(self, name):
        return getattr(self._arms, name)

    def read(self):
        print("a driver's line")
        native(1)
        return self._arms.read()
"""
)


@pytest.fixture
def full() -> Iterator[int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    yield writer
    blocks = not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(reader)
    os.close(writer)
    assert blocks, "other programs that write to this pipe have to wait, as before"


@contextlib.contextmanager
def started(full: int, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=full, stderr=full, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_loop_whose_lines_and_librarys_lines_no_one_takes_goes_on_and_ends(full, tmp_path):
    with started(full, "-c", LOOP, str(tmp_path / "done")) as process:
        assert process.wait(PATIENCE) == 1
    assert (tmp_path / "done").read_text() == "done"


def test_an_interrupt_of_a_start_ends_it(full, tmp_path):
    with started(full, "-c", START, str(tmp_path / "ready")) as process:
        wait(lambda: (tmp_path / "ready").exists(), PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130


def test_a_robots_server_with_a_driver_that_prints_passes_at_its_rate_and_ends(full, tmp_path):
    (tmp_path / "loud.py").write_text(DRIVER)
    file, port = tmp_path / "robot.toml", free_port(3)
    file.write_text(f'name = "cell"\ndriver = "loud.py:Loud"\nport = {port}\n')
    serve = ["-c", "from serl_chunk_robot.main import main; raise SystemExit(main())", "serve", str(file)]
    with (
        started(full, *serve, XDG_STATE_HOME=str(tmp_path)) as process,
        RobotClient(f"{HERE}:{port}", name="test", role="any") as client,
    ):
        before, began = client.next_state(PATIENCE), time.monotonic()
        time.sleep(1.0)
        after = client.next_state()
        passes = after["pass"] - before["pass"]
        assert passes > 20 * (time.monotonic() - began), "of 200 a second, where the machine is free"
        assert (after["state"], after["word"]) == (before["state"], before["word"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
