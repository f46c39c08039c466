"""The launcher of a learner and its actors, and its relay of their lines, tried on small programs."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time

import pytest

from serl_chunk.fleet import engines, local
from serl_chunk.fleet.local import Relay, run_both
from serl_chunk.logs import Screen, logging_to_stdout

pytestmark = pytest.mark.system

CHILD = """
import os, pathlib, signal, sys, time
actor = "--actor" in sys.argv
me = "actor" if actor else "learner"
if "--actor_id" in sys.argv:
    me = sys.argv[-1]
def stopped(number, frame):
    print(me, "stops", flush=True)
    raise SystemExit({stopped})
def wait(*names):
    while not all(os.path.exists(name + ".ready") for name in names or ("learner", "actor")):
        time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_IGN if me == "{stubborn}" else stopped)
print(me, *sys.argv[1:], file=sys.stderr if actor else sys.stdout)
pathlib.Path(me + ".ready").touch()
{body}
"""
FOREVER = "time.sleep(60)"


@pytest.fixture(autouse=True)
def quickly(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "WATCH_PERIOD", 0.01)
    monkeypatch.chdir(tmp_path)  # where the children put their `.ready` files


def run(learner: str, actor: str, *arguments: str, stopped: int = 0, stubborn: str = "", actors=()) -> int:
    """Run both. `wait()` in a child: until both are ready for a signal. `stubborn`: the one that ignores SIGTERM."""
    body = f"if actor:\n    {actor}\nelse:\n    {learner}"
    code = CHILD.format(body=body, stopped=stopped, stubborn=stubborn)
    with logging_to_stdout():
        return run_both(arguments, pin=False, ip="1.2.3.4", actors=actors, program=(sys.executable, "-c", code))


def test_both_get_their_flags_and_their_lines_have_their_names(capfd):
    assert run("pass", "pass", "--seed", "3") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "actor | actor --seed 3 --actor --ip 1.2.3.4",  # from its standard error
        "learner | learner --seed 3 --learner",
    ]
    assert err == ""


@pytest.mark.parametrize(
    ("learner", "actor", "failed"), [("sys.exit(2)", FOREVER, "learner"), (FOREVER, "sys.exit(2)", "actor")]
)
def test_one_that_fails_ends_the_other_and_gives_the_status(capfd, learner, actor, failed):
    other = "actor" if failed == "learner" else "learner"
    body = (f"wait(); {learner}", actor) if failed == "learner" else (learner, f"wait(); {actor}")
    assert run(*body, stopped=130) == 2
    out = capfd.readouterr().out
    assert f"{failed} ended with status 2: stopping the rest\n" in out
    assert f"{other} | {other} stops\n" in out


def test_one_that_was_killed_is_told_by_its_signal(capfd):
    assert run("wait(); os.kill(os.getpid(), signal.SIGKILL)", FOREVER) == 128 + 9
    assert "learner was ended by SIGKILL: stopping the rest" in capfd.readouterr().out


@pytest.mark.parametrize(("stopped", "status"), [(0, 0), (130, 0), (1, 1)])
def test_an_actor_that_never_met_its_learner_is_ended_after_it(capfd, monkeypatch, stopped, status):
    """A completed run that is started again: the learner has nothing to do and is gone before the actor is there."""
    monkeypatch.setattr(local, "DONE_GRACE", 0.3)
    assert run("wait()", FOREVER, stopped=stopped) == status
    assert "learner is done and actor not: stopping the rest" in capfd.readouterr().out


def test_an_actor_that_delivers_after_its_learner_is_left_alone(capfd):
    assert run("pass", "time.sleep(0.5)") == 0
    assert "stop" not in capfd.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_no_process_is_called_a_failure(capfd, number, request, tmp_path):
    ignored = signal.getsignal(number)
    if ignored == signal.SIG_IGN:  # the tests run under nohup; a launcher under it would not listen
        request.addfinalizer(lambda: signal.signal(number, ignored))
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)

    def signal_when_both_are_ready():
        deadline = time.monotonic() + 30  # less than the children run: no signal comes to the next test
        while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        if time.monotonic() < deadline:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=signal_when_both_are_ready)
    thread.start()
    assert run(FOREVER, FOREVER, stopped=130) == 130
    thread.join()
    out = capfd.readouterr().out
    assert "learner | learner stops\n" in out
    assert "actor | actor stops\n" in out
    assert "stopping the rest" not in out
    assert signal.getsignal(number) == before


def test_a_signal_that_comes_before_the_children_starts_none(capfd, monkeypatch):
    monkeypatch.setattr(local, "core_sets", lambda *_: (os.kill(os.getpid(), signal.SIGTERM), None)[1:] * 2)
    assert run(FOREVER, FOREVER) == 130
    assert capfd.readouterr().out == ""


def test_one_that_ignores_the_signal_is_killed(capfd, monkeypatch):
    monkeypatch.setattr(engines, "STOP_GRACE", 0.5)
    start = time.monotonic()
    assert run("wait(); sys.exit(1)", FOREVER, stubborn="actor") == 1
    assert time.monotonic() - start < 30
    assert "actor did not end within 0.5 s: killing it" in capfd.readouterr().out


ACTORS = ("sim-1", "sim-2")
CRASHES = """wait("learner", "sim-1", "sim-2")
    if me == "sim-1":
        with open("runs", "a") as runs:
            runs.write("x")
        {crash}
    {body}"""  # of the actors; `runs` has a byte for each process of the first


def test_an_actor_of_several_is_restarted_where_it_crashes(capfd, monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF", 0.02)
    sim = CRASHES.format(
        crash="os.path.getsize('runs') > 2 or os.kill(os.getpid(), signal.SIGKILL)",
        body="pathlib.Path(me + '.done.ready').touch()",
    )
    learner = "wait('sim-1.done', 'sim-2.done')"
    assert run(learner, sim, "--seed", "3", actors=ACTORS) == 0
    lines = capfd.readouterr().out.splitlines()
    for name, processes in zip(ACTORS, (3, 1), strict=True):
        assert lines.count(f"{name} | {name} --seed 3 --actor --ip 1.2.3.4 --actor_id {name}") == processes
    warnings = [line.partition("WARNING ")[2].strip() for line in lines if "WARNING" in line]
    assert warnings == [f"sim-1 was ended by SIGKILL: restart {k} of 5 in {0.02 * k:g} s" for k in (1, 2)]


def test_a_run_that_ends_while_an_actor_awaits_its_restart_is_complete(monkeypatch):
    monkeypatch.setattr(engines, "BACK_OFF", 60)
    crash = "pathlib.Path('down.ready').touch(); sys.exit(1)"
    assert run("wait('down'); time.sleep(0.5)", CRASHES.format(crash=crash, body="wait('down')"), actors=ACTORS) == 0


@pytest.mark.parametrize(
    ("crash", "window", "status", "processes"),
    [
        ("sys.exit(1)", 600.0, 1, 6),
        ("sys.exit(2)", 600.0, 2, 1),  # wrong usage, which stays wrong
        ("sys.exit(1 if os.path.getsize('runs') < 7 else 2)", 0.0, 2, 7),  # they are far apart
    ],
)
def test_an_actor_that_crashes_again_and_again_ends_all(
    capfd, monkeypatch, tmp_path, crash, window, status, processes
):  # fmt: skip
    monkeypatch.setattr(engines, "BACK_OFF", 0.001)
    monkeypatch.setattr(engines, "WINDOW_SECONDS", window)
    assert run(FOREVER, CRASHES.format(crash=crash, body=FOREVER), actors=ACTORS) == status
    assert (tmp_path / "runs").stat().st_size == processes
    out = capfd.readouterr().out
    assert f"sim-1 ended with status {status}: stopping the rest" in out
    assert all(f"{name} | {name} stops" in out for name in ("learner", "sim-2"))


def test_each_actor_has_a_core(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert local.core_sets(False, 3) == [None] * 4
    assert local.core_sets(True) == [{0, 1, 2}, {5}]
    assert local.core_sets(True, 3) == [{0}, {1}, {2}, {5}]
    assert caplog.messages == []
    assert local.core_sets(True, 4) == [None] * 5
    assert caplog.messages == ["--pin_cores has no effect: it needs Linux and 5 cores that this process may use"]


def relayed(*chunks: bytes) -> str:
    """What comes out of a relay for one process that writes `chunks`, each seen by a read of its own."""
    out, relay = io.StringIO(), Relay(Screen())
    (for_reading, for_writing), pending, read = os.pipe(), iter(chunks), os.read

    def one_chunk(fd: int, n: int) -> bytes:
        return next(pending, b"") if fd == for_reading else read(fd, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serl_chunk.fleet.local.os.read", one_chunk)
        patch.setattr("sys.stdout", out)
        relay.follow("learner", os.fdopen(for_reading, "rb"))
        relay.close(10)
    os.close(for_writing)
    return out.getvalue()


def test_every_line_has_its_name_wherever_reads_cut_it():
    text = "one\n\ntwo \u2028 \u00e9\nthree".encode()
    whole = relayed(text)
    assert whole == "learner | one\nlearner |\nlearner | two \u2028 \u00e9\nlearner | three\n"
    assert relayed(*(text[i : i + 1] for i in range(len(text)))) == whole


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ((b"a\xff\nb\n",), ["a\ufffd", "b"]),  # bytes that are no text
        ((b"1 of 3\r2 of 3\rsaid\n3 of 3\r\n",), ["said", "3 of 3"]),
        ((b"1 of 3\r", b"said\n3 of 3\r", b"\n"), ["said", "3 of 3"]),
        ((b"3 of 3\r", b"said\n", b"\r\n"), ["said", "3 of 3"]),  # it stays by a bare line end after other lines
        ((b"1 of 3\r2 of 3\r",), ["2 of 3"]),  # the last state of a process that died
    ],
)
def test_a_log_holds_no_state_but_the_one_that_stays(chunks, lines):
    assert relayed(*chunks) == "".join(f"learner | {line}\n" for line in lines)
