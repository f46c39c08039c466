"""Jobs of a fleet, tried on small programs: restarts with back-off, requests, what is left behind, their files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fleet_programs import FOREVER, job
from transport_tools import eventually

from serl_chunk.fleet import engines
from serl_chunk.fleet.engines import DRAINED, LEARNER, JobFiles, JobStatus, Worker
from serl_chunk.fleet.local import LocalEngine

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF", 0.01)
    monkeypatch.setattr(engines, "POLL_S", 0.01)


@pytest.mark.parametrize(
    ("code", "state", "statuses"),
    [
        ("print('done')", "done", (0,)),
        ("import sys; print('wrong'); sys.exit(2)", "failed", (2,)),  # a restart would only repeat it
        ("import os; print('crash', flush=True); os.kill(os.getpid(), 9)", "failed", (137, 137, 137)),
    ],
)
def test_a_job_is_restarted_where_it_crashes_but_not_for_ever(code, state, statuses):
    worker = Worker(job(code, restarts=2))
    assert worker.wait(30)
    status = worker.status()
    assert (status.state, status.statuses, status.restarts) == (state, statuses, len(statuses) - 1)
    eventually(lambda: worker.status().lines[-1:] == (code.split("'")[1],))


def test_crashes_that_are_far_apart_do_not_count():
    assert engines.back_off([0.0, 1.0], 1, 2, 2.0) == (None, [0.0, 1.0])
    assert engines.back_off([0.0, 1.0], 1, 2, 600.5) == (0.02, [1.0, 600.5])


@pytest.mark.parametrize(("drain", "status"), [(False, 143), (True, 0)])
def test_a_job_that_is_stopped_or_drained_stays_so(drain, status):
    worker = Worker(job(FOREVER))
    eventually(lambda: worker.status().lines == ("ready",))
    worker.stop(drain)
    assert worker.wait(30)
    assert (worker.status().state, worker.status().statuses) == ("stopped", (status,))


def test_a_job_that_is_drained_as_it_starts_learns_of_it_later():
    worker = Worker(job(f"import time; print('starts', flush=True); time.sleep(0.5); {FOREVER}"))
    eventually(lambda: worker.status().lines == ("starts",))
    worker.stop(drain=True)
    assert worker.wait(30)
    assert (worker.status().state, worker.status().statuses) == ("stopped", (0,))


def test_one_that_ignores_it_is_killed_and_one_that_awaits_its_restart_is_not_started(monkeypatch):
    monkeypatch.setattr(engines, "STOP_GRACE", 0.1)
    stubborn = Worker(job(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"))
    eventually(lambda: stubborn.status().lines == ("ready",))
    stubborn.stop()
    assert stubborn.wait(30)
    assert stubborn.status().statuses == (137,)
    monkeypatch.setattr(engines, "BACK_OFF", 60.0)
    crashed = Worker(job("raise SystemExit(1)"))
    eventually(lambda: crashed.status().state == "restarting")
    crashed.stop()
    assert crashed.wait(30)
    assert (crashed.status().state, crashed.status().restarts) == ("stopped", 0)


PARENT = """
import os, sys, time
from serl_chunk.fleet.engines import Job, Worker
worker = Worker(Job("a", (), program=(sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")))
while not worker.status().lines:
    time.sleep(0.01)
print(worker.status().lines[0], flush=True)
os.kill(os.getpid(), 9)
"""  # noqa: E501


@pytest.mark.parametrize("parent", [
    PARENT, "import sys; from serl_chunk.fleet.local import run_both; run_both((), pin=False, ip='', "
    "program=(sys.executable, '-c', 'import os, time; os.kill(os.getppid(), 9); time.sleep(60)'))",
])  # fmt: skip
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_worker_or_launcher_that_is_killed_leaves_no_orphan(parent):
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    if done.stdout:
        child = Path(f"/proc/{int(done.stdout)}")
        eventually(lambda: not child.exists() or "Z" in (child / "stat").read_text().split()[2])


def test_the_files_of_jobs_name_one_without_a_sign_of_life(tmp_path):
    files = JobFiles(tmp_path / "fleet")
    files.begin(["sim-10", "sim-9"])
    files.write(JobStatus("sim-9", "running", "process 7", 1, (137,), ("a line",)))
    os.utime(files.folder / "sim-10.state", (0, 0))
    assert files.status() == [
        JobStatus("sim-9", "running", "process 7", 1, (137,), ("a line",)), JobStatus("sim-10", "waiting"),
    ]  # fmt: skip
    os.utime(files.folder / "sim-9.state", (0, 0))
    [lost, _] = files.status()
    assert (lost.state, lost.ended) == ("lost", False)  # a disk or clock may be wrong, and the process runs
    assert f"check {socket.gethostname()} (process 7); if it ended remove {tmp_path}" in lost.detail
    (files.folder / ".sim-9.state.part1.state").write_text("[")  # under way
    assert len(files.status()) == 2
    files.request(["sim-9"], drain=True)
    files.begin(["sim-9"])
    assert [files.requested("sim-9"), *files.status()] == ["", JobStatus("sim-9", "waiting")]


def test_a_request_that_cannot_be_read_is_no_other_one_and_a_job_that_is_over_is_not_started(tmp_path, monkeypatch):
    files, asked, ends = JobFiles(tmp_path), [], []
    monkeypatch.setattr(JobFiles, "requested", lambda *_: asked.append(1) or (DRAINED if len(asked) == 2 else ""))
    worker = Worker(job(f"import time; time.sleep(0.3); {FOREVER}"), note_end=ends.append)
    assert files.follow("sim-1", worker).statuses == (0,)  # it was drained, and not stopped
    assert ends == ["stopped"]
    again = Worker(job(FOREVER), over=lambda: "failed")
    assert again.wait(30)
    assert (again.status().state, again.status().statuses) == ("failed", ())


def test_jobs_that_never_began_are_no_longer_waiting(tmp_path, monkeypatch):
    wrong = job(FOREVER, "sim-2", program=("/nowhere",))
    monkeypatch.setattr("serl_chunk.fleet.engines.sys.platform", "another")
    with pytest.raises(OSError, match="nowhere"):
        LocalEngine(tmp_path).start([job(FOREVER), wrong, job(FOREVER, "sim-3")])
    assert [(s.name, s.state) for s in LocalEngine(tmp_path).status()] == [
        ("sim-1", "failed"), ("sim-2", "stopped"), ("sim-3", "stopped"),
    ]  # fmt: skip


def test_a_child_that_takes_its_time_to_end_is_not_called_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("serl_chunk.fleet.local.STATES_PERIOD", 0.01)
    monkeypatch.setattr("serl_chunk.fleet.engines.STALE_S", 0.5)
    engine, seen, over = LocalEngine(tmp_path), set(), threading.Event()

    def look() -> None:
        eventually(lambda: [s.lines for s in engine.status()] == [("ready",)], 60)
        engine.stop(["sim-1"], drain=False)
        while not over.wait(0.05):
            seen.update(s.state for s in engine.status())

    thread = threading.Thread(target=look)
    thread.start()
    slow = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), exit(0))); "
    engine.start([job(f"{slow}{FOREVER}")])
    over.set()
    thread.join()
    assert "lost" not in seen


@pytest.mark.parametrize("drain", [False, True])
def test_a_fleet_of_this_machine_is_stopped_by_another_process(tmp_path, monkeypatch, capfd, drain):
    """Its actors first: the learner is there until they have delivered."""
    monkeypatch.setattr("serl_chunk.fleet.local.STATES_PERIOD", 0.01)
    monkeypatch.setattr("serl_chunk.fleet.local.WATCH_PERIOD", 0.01)
    engine, other = LocalEngine(tmp_path), LocalEngine(tmp_path)
    actors, ended = ["sim-1", "sim-2"], []

    def stop() -> None:
        eventually(lambda: [s.lines for s in other.status()] == [("ready",)] * 3, 60)
        for names in (actors, [LEARNER]):
            other.stop(names, drain=drain and names is actors)
            eventually(lambda names=names: all(s.ended for s in other.status() if s.name in names), 30)
            ended.append([s.name for s in other.status() if s.ended])

    thread = threading.Thread(target=stop)
    thread.start()
    status = engine.start([job(FOREVER, LEARNER, restarts=0), *(job(FOREVER, name) for name in actors)])
    thread.join()
    assert ended[0] == actors
    assert status == 130  # these programs end by the learner's SIGTERM
    assert capfd.readouterr().out.count("| drained") == (2 if drain else 0)


def test_a_fleet_whose_learner_is_elsewhere_outlives_a_crash_of_all_its_actors(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("serl_chunk.fleet.local.WATCH_PERIOD", 0.2)
    code = f"import os, pathlib, sys; p = pathlib.Path({str(tmp_path)!r}, 'runs'); p.open('a').write('x'); "
    code += "sys.exit(p.stat().st_size < 2)"
    start = time.monotonic()
    assert LocalEngine(tmp_path / "fleet").start([job(code)]) == 0
    assert time.monotonic() - start < 30
    assert "restart 1 of 5" in caplog.text
    assert [(s.state, s.restarts) for s in LocalEngine(tmp_path / "fleet").status()] == [("done", 1)]
