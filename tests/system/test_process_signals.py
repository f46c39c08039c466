"""A closed terminal, and Ctrl-C at any moment: what has to be saved is saved, and nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from commands import Command
from counting_robot import CLOSED, LENGTH
from lab import Lab
from processes import PATIENCE, Cluster, Process, checkpoints, cluster
from system_accounts import journal_rows
from terminals import TerminalProcess

from serl_chunk.runs.checkpoints import CheckpointStore
from serl_chunk.types import End

pytestmark = pytest.mark.timeout(4 * PATIENCE)
HANGUP = 128 + signal.SIGHUP


def closed_robot(lab: Lab, process: Process) -> bool:
    file = lab.log.parent / (lab.log.name + CLOSED)
    return file.exists() and str(process.pid) in file.read_text().split()


@pytest.mark.slow
def test_a_closed_terminal_ends_an_actor_and_a_learner_as_sigterm_does(lab):
    """The kernel sends SIGHUP, and whatever they print from then on fails."""
    learner, actor = lab.learner(kind=TerminalProcess), lab.actor(kind=TerminalProcess)
    lab.trains(learner)
    actor.until(lambda: LENGTH // 4 < lab.executed() % LENGTH < LENGTH // 2, "no episode is under way")
    actor.hang_up()
    actor.ends(HANGUP)
    assert closed_robot(lab, actor)
    learner.hang_up()
    learner.ends(HANGUP)
    account = lab.settled()
    assert (account.steps, account.cut, account.died) == (account.executed, {}, 0)
    ends = [row.record for row in journal_rows(lab.run) if isinstance(row.record, End)]
    assert ends[-1].outcome_by == "operator"
    newest = checkpoints(lab.run)[-1]
    assert CheckpointStore(lab.run).restore_policy(newest).meta["env_steps"] == account.executed
    assert newest >= 20


@pytest.mark.slow
def test_a_closed_terminal_ends_one_process_of_both_loops_and_an_evaluation(lab):
    lockstep = "--config.actor.clock=lockstep"
    process = lab.local("--local", "--debug", lockstep, kind=TerminalProcess)
    lab.trains(process)
    process.hang_up()
    process.ends(HANGUP)
    assert closed_robot(lab, process)
    assert checkpoints(lab.run)[-1] >= 20
    evaluation = ("--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "100000", lockstep)
    process = lab.local(*evaluation, kind=TerminalProcess)
    lab.goes_on(LENGTH, process)
    process.hang_up()
    process.ends(HANGUP)
    assert closed_robot(lab, process)


SOON = 2.0  # seconds within which a start is promised to end
LOADED = 10.0  # what a machine that runs other tests may take
# Before the first line of this package Python answers: to a shell, 130 as well, but 1 while it imports `site`.
UNBORN = (-signal.SIGINT, 1)


def holds(process: Process, text: str) -> bool:
    """Whether a process has loaded a library, or has a file open, whose path has `text`."""
    proc = Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError):
        return text in (proc / "maps").read_text() or any(text in os.readlink(fd) for fd in (proc / "fd").iterdir())
    return False


def instants(processes: Cluster, tmp_path: Path):
    """Moments of a learner's start: what to wait for, and the seconds from then on."""
    many = tmp_path / "many"
    return {
        "exec": (lambda learner: True, 0.0),
        "imports": (lambda learner: holds(learner, "jaxlib"), 0.0),
        "data": (lambda learner: holds(learner, str(many)), 0.3),
        "networks": (lambda learner: "demonstrations: " in learner.output, 0.5),
        "compilation": (lambda learner: "listening on" in learner.output, 0.5),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("instant", [
    "exec", "imports", *(pytest.param(at, marks=pytest.mark.slow) for at in ("data", "networks", "compilation")),
])  # fmt: skip
def test_ctrl_c_ends_a_start_and_leaves_nothing_behind(tmp_path, demos, environment, instant):
    many, run = tmp_path / "many", tmp_path / "run"
    many.mkdir()
    episode = next(demos.glob("*.hdf5"))
    for i in range(1000 if instant == "data" else 1):
        os.link(episode, many / f"episode_{i}.hdf5")
    # Compiled anew and for speed, as on a user's first start: that takes longer than what is promised.
    slowly = {k: v for k, v in environment.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    with cluster(tmp_path / "logs", many, slowly) as processes:
        condition, seconds = instants(processes, tmp_path)[instant]
        deep = {"agent__flow__hidden": (64,) * 10, "agent__critic__hidden": (64,) * 10}
        learner = processes.learner(run, **deep, learner__pretrain_steps=0, learner__critic_pretrain_steps=20)
        learner.until(lambda: condition(learner), f"the instant {instant!r} did not come")
        time.sleep(seconds)
        assert learner.running
        learner.signal(signal.SIGINT)
        began = time.monotonic()
        status = learner.wait()
        took = time.monotonic() - began
        print(f"{instant}: ended {took:.2f} s after Ctrl-C with status {status}")
        assert status == 130 or (status in UNBORN and instant in ("exec", "imports"))
        assert took < LOADED, f"promised: {SOON} s"
        with pytest.raises(ProcessLookupError):
            os.killpg(learner.pid, 0)  # it led a session of its own
        for port in range(processes.port, processes.port + 3):
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(("127.0.0.1", port))
    if instant != "compilation":  # until then nothing was begun
        assert not run.exists()
        return
    with (run / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert checkpoints(run) == []


@pytest.mark.slow
def test_ctrl_c_during_pretraining_leaves_a_checkpoint_that_a_resume_goes_on_from(processes, tmp_path):
    run = tmp_path / "run"
    endless = {"learner__pretrain_steps": 1_000_000}
    learner = processes.learner(run, **endless)
    metrics = run / "metrics.jsonl"
    learner.until(lambda: metrics.exists() and '"kind":"train"' in metrics.read_text(), "no update was logged")
    learner.signal(signal.SIGINT)
    assert "writing the last checkpoint" in learner.ends()
    [saved] = CheckpointStore(run).policies()
    assert saved.meta["trainer"]["phase"] == "pretrain"
    assert saved.meta["trainer"]["phase_updates"] > 0
    learner = processes.learner(run, **endless)
    learner.says(f"pretrain after update {saved.meta['trainer']['phase_updates']}")
    learner.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, HANGUP)])
def test_an_interrupted_recording_tells_what_it_kept(processes, tmp_path, number, status):
    out = tmp_path / "recorded"
    arguments = ["record", "--exp_name", "fake_aloha", "--out", str(out), "--n_demos"]
    processes.start(*arguments, "2", kind=Command).ends()
    process = processes.start(*arguments, "100000")
    process.until(lambda: len(list(out.glob("episode_*.hdf5"))) >= 4, "nothing was recorded")
    process.signal(number)
    output = process.ends(status)
    kept = len(list(out.glob("*.hdf5")))
    assert f"{out} holds {kept} of 100000 demonstrations, {kept - 2} of them new" in output
    assert "Run the same command again" in output
    assert f"already holds {kept} demonstrations" in processes.start(*arguments, str(kept), kind=Command).ends()
