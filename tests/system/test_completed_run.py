"""A completed run, and starts that come to none: no robot is called, and both processes end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading

import pytest
from commands import Command
from ports import free_port
from processes import LISTENING, PATIENCE, actor_totals, checkpoints, learner_totals, resumed_at, sentence
from transport_tools import linked, serving

from serl_chunk.cli import evaluation
from serl_chunk.runs.metrics import read_metrics
from serl_chunk.types import ConfigError

pytestmark = pytest.mark.timeout(3 * PATIENCE)
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130
LAST_LINE = re.compile(r"evaluation: success_rate=[01]\.\d\d n=(\d+) report=(.+)")
EVALUATE = ("--eval_checkpoint_step", "latest", "--eval_n_trajs")


def last_line(output: str) -> tuple[int, str]:
    """(n, report) of the line that tools read; no interventions, and nothing starved."""
    match = LAST_LINE.fullmatch(output.strip().splitlines()[-1])
    assert match, output
    return int(match[1]), match[2]


def test_a_run_is_evaluated_without_a_learner(processes, trained, tmp_path):
    run = trained.copy(tmp_path / "run")
    # Another number of candidates is the evaluation's own affair, and said; of what only trains nothing matters.
    changes = {"agent__candidates": 3, "agent__lr": 0.125, "learner__max_steps": 7}
    words = (*EVALUATE, "3", "--eval_stochastic", "--checkpoint_path", str(run))
    output = processes.actor(*words, kind=Command, **changes).ends()
    different = [line.partition("WARNING ")[2] for line in output.splitlines() if "with another setting" in line]
    assert different == ["evaluated with another setting than the run's (run -> here): agent.candidates: 2 -> 3"]
    assert last_line(output) == (3, str(run / "report.html"))
    assert "mean (version 40)" in output
    assert "sampled (version 40)" in output
    saved = json.loads((run / "evaluations" / "evaluation_40.json").read_text())
    assert saved["checkpoint"] == 40
    assert [(r["mode"], r["n"], len(r["episodes"])) for r in saved["results"]] == [("mean", 3, 3), ("sampled", 3, 3)]
    assert [e["seed"] for e in saved["results"][0]["episodes"]] == [1_000_000, 1_000_001, 1_000_002]  # held out
    rows = read_metrics(run)["eval"]
    assert [(row["mode"], row["n"], row["checkpoint"]) for row in rows] == [("mean", 3, 40), ("sampled", 3, 40)]


def test_a_checkpoint_is_fetched_from_a_learner(listening):
    output = listening.cluster.actor(*EVALUATE, "2", "--ip", "127.0.0.1", kind=Command, **LISTENING).ends()
    n, report = last_line(output)
    assert n == 2
    assert report.startswith("none")
    assert "mean (version 20)" in output  # its newest: the one after is damaged
    assert listening.learner.running


def test_a_run_leaves_its_files_and_counts_every_step(trained):
    run, output = trained
    [own] = [line for line in output.splitlines() if not line.startswith(("learner |", "actor |"))]
    assert "keys of this learner" in own  # the launcher made them: no line is to be pasted
    assert (run.parent / "keys" / "server.json").exists()
    assert re.search(r"(?m)^learner \| .*INFO .*listening on 0\.0\.0\.0", output)
    assert re.search(r"(?m)^actor \| .*actor ended", output)
    episodes, steps = actor_totals(output)
    assert learner_totals(output) == (40, steps)
    for name in ("config.json", "metrics.jsonl", "report.html", "report.png", "policy_checks/0.json"):
        assert (run / name).stat().st_size > 0, name
    assert checkpoints(run) == [0, 20, 40]
    rows = read_metrics(run)["episode"]
    assert len(rows) == episodes
    assert sum(row["episode/l"] for row in rows) == steps


def test_a_damaged_newest_checkpoint_falls_back_loudly(listening):
    output = listening.learner.output
    assert re.search(r"WARNING .*checkpoint.* 40\b.*Falling back", output.replace("\n", " "))
    assert "Falling back to the checkpoint before it" in output
    assert resumed_at(output)[0] == 20
    assert checkpoints(listening.run) == [0, 20]


def test_a_second_learner_takes_neither_port_nor_folder(listening):
    port = listening.cluster.learner(listening.cluster.folder / "second", kind=Command, **LISTENING)
    folder = listening.cluster.start(
        "--exp_name", "fake_aloha", "--port", str(free_port()), "--learner", "--debug",
        "--checkpoint_path", str(listening.run), kind=Command,
    )  # fmt: skip
    said = sentence(port.ends(WRONG_USAGE))
    assert f"port {listening.cluster.port} of 127.0.0.1 is in use" in said
    said = sentence(folder.ends(WRONG_USAGE))
    assert f"{listening.run} is in use by another learner" in said
    assert listening.learner.running


@contextlib.contextmanager
def robot_server():
    """Yield an actor's flag for a robot server that never answers, and whether it was called, as a function."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        def called() -> bool:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                return True
            return False

        yield f"--config.robot.server=127.0.0.1:{listener.getsockname()[1]}", called


def test_without_a_learner_no_robot_is_called_and_a_waiting_actor_can_be_interrupted(processes, monkeypatch):
    monkeypatch.setattr(evaluation, "CONNECT_TIMEOUT_EVAL", 0.3)
    with robot_server() as (flag, called):
        actor = processes.actor(flag, **LISTENING)
        words = (flag, *EVALUATE, "1", "--ip", "127.0.0.1")
        assert "no learner answers" in processes.actor(*words, kind=Command, **LISTENING).ends(FAILED)
        actor.says(f"no learner answers at 127.0.0.1:{processes.port}; waiting")
        assert not called()
    actor.signal(signal.SIGTERM)
    assert sentence(actor.ends(INTERRUPTED)) == "serl-chunk: interrupted"


def test_a_second_actor_of_one_name_calls_no_robot(listening, tmp_path):
    cluster = listening.cluster
    with robot_server() as (flag, called):
        named = lambda pc: ["--actor_id", "left", "--spool_path", str(tmp_path / pc)]  # noqa: E731
        first = cluster.actor(*named("one"), **LISTENING)
        listening.learner.says("actor left connected")
        here = cluster.actor(*named("one"), flag, kind=Command, **LISTENING)
        assert "is in use by another process" in here.ends(WRONG_USAGE)
        second = cluster.actor(*named("two"), flag, **LISTENING)
        second.says("another live session has the actor id 'left'")
        assert not called()
        first.kill()
        second.until(called, "it never called its robot once it was admitted")


def test_a_learner_that_is_not_ready_keeps_its_actors_waiting_and_lives():
    """Until it is, it knows neither allowances nor episodes to close: asking it would end the server's thread."""
    port, sentences, ready = free_port(), [], threading.Event()

    def not_before(value):
        if not ready.is_set():
            raise ConfigError("the learner is still reading")
        return value

    def waiting(sentence):
        sentences.append(sentence)
        ready.set()

    callbacks = {
        "welcome": lambda: not_before(({}, {})),
        "allowance": lambda session: not_before(17),
        "on_silent": lambda info, gone: not_before(None),
    }
    with serving(port, **callbacks) as server, linked(port, connect=False) as link:
        link.connect(timeout=PATIENCE, on_waiting=waiting)
        assert "still reading" in sentences[0]
        assert link.allowance == 17
        server.check()
