"""A policy server as a process: it follows a learner, and is killed and started again under that learner's actor."""

from __future__ import annotations

import re
import signal

import pytest
from ports import free_port
from processes import PATIENCE, actor_totals, settings

from serl_chunk.runs.metrics import read_metrics

pytest.importorskip("websockets")
pytestmark = pytest.mark.timeout(4 * PATIENCE)
ENDLESS = {"learner__max_steps": 1_000_000}


def test_a_server_that_follows_a_learner_is_killed_under_an_actor_and_comes_back(processes, tmp_path):
    run, port = tmp_path / "run", free_port()
    learner = processes.learner(run, **ENDLESS)

    def serve():
        process = processes.start(
            "serve", "--exp_name", "fake_aloha", "--ip", "127.0.0.1", "--learner_port", str(processes.port),
            "--port", str(port), "--max_batch", "1", *settings(**ENDLESS),
        )  # fmt: skip
        process.says(f"at ws://127.0.0.1:{port}")
        return process

    def episodes():
        return len(read_metrics(run)["episode"]) if (run / "metrics.jsonl").exists() else 0

    first = serve()
    actor = processes.actor(f"--config.actor.policy=openpi://127.0.0.1:{port}", **ENDLESS)
    learner.until(lambda: episodes() >= 3, "no episodes by the server's chunks")
    first.says("is served")  # a newer policy version
    first.kill()
    actor.says("is lost")
    before = episodes()
    second = serve()
    actor.says("connected again")
    learner.until(lambda: episodes() >= before + 3, "no episodes after the restart")
    learner.signal(signal.SIGTERM)
    learner.ends()
    _, steps = actor_totals(actor.ends())
    assert steps > 0
    second.signal(signal.SIGTERM)
    assert re.search(r"batches by number of clients: \{1: \d+", second.ends())
