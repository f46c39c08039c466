"""`make lab`: the rehearsal of a day in a lab, with ROS where there is one, with an SO-101, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ros1
from robot_day import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STAGES = (
    "robot server", "robot check", "10 demonstrations", "6 near misses", "classifier", "learner and actor",
    "intervention", "stop and clear", "kill -9 of the actor", "resumed", "to the end of training",
    "evaluation of 20 trials", "pages of episodes", "export to LeRobot",
)  # fmt: skip


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/lab.py"), *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("driver", ["auto", "lerobot"])
def test_a_rehearsal_shows_each_stage_and_leaves_a_report(tmp_path, driver):
    done = run("--out", str(tmp_path / "lab"), "--driver", driver)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  ...")]  # what is under way
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[0] for line in lines] == [*STAGES, "lab"]
    assert all(re.search(r", \d+ s$", line) for line in lines[:-1])
    if driver == "auto":
        driver = "fake" if ros1.missing() else "aloha_ros1"
    assert re.search(rf"all stages passed in [\d.]+ minutes, driver {driver}, \S+/lab/report.html$", lines[-1])
    report = (tmp_path / "lab/report.html").read_text()
    assert all(f"<td>{name}</td>" in report for name in STAGES)
    assert "FAILED" not in report
    assert report.count("<img") == 4  # demonstration, near miss, ROC, the run's curves
    assert report.count("<video") == 2  # the first and the last trial
    assert (tmp_path / "lab" / re.search(r'href="(\S+report.html)"', report)[1]).exists()


def test_ctrl_c_ends_all_processes_and_leaves_a_report(tmp_path):
    words = [sys.executable, "-u", str(ROOT / "benchmarks/lab.py"), "--driver", "fake", "--out", str(tmp_path / "lab")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as rehearsal:
        assert rehearsal.stdout.readline().startswith("robot server: ")
        assert processes_of(tmp_path) - {rehearsal.pid}
        rehearsal.send_signal(signal.SIGINT)
        assert "robot check: FAILED" in rehearsal.stdout.read()
        assert rehearsal.wait(60) == 130
    ends = time.monotonic() + 30
    while processes_of(tmp_path) and time.monotonic() < ends:  # a server's front ends when it sees that it is alone
        time.sleep(0.1)
    assert processes_of(tmp_path) == set()
    assert (tmp_path / "lab/report.html").exists()


def processes_of(folder: Path) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.add(int(process.name))
    return found - {os.getpid()}
