"""Starts that do not come to a run: no robot is called, and both processes end."""

from __future__ import annotations

import contextlib
import re
import signal
import socket

import pytest
from processes import LISTENING, PATIENCE, sentence

pytestmark = pytest.mark.timeout(3 * PATIENCE)
REALTIME = {"actor__clock": "realtime"}
WRONG_USAGE, INTERRUPTED = 2, 130


def test_both_processes_end_where_the_demonstrations_are_missing(processes, tmp_path):
    processes.demos = tmp_path / "empty"
    processes.demos.mkdir()
    output = processes.both(tmp_path / "run").ends(WRONG_USAGE)
    assert re.search(rf"learner \| serl-chunk: .*{processes.demos}.*has no \*\.hdf5 file", output)
    assert "the learner ended with status 2: stopping the other process" in output
    assert "Traceback" not in output


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


def test_without_a_learner_no_robot_is_called_and_a_waiting_actor_can_be_interrupted(processes):
    with robot_server() as (flag, called):
        actor = processes.actor(flag, **REALTIME)
        actor.says(f"no learner answers at 127.0.0.1:{processes.port}; waiting")
        evaluation = processes.actor(
            flag, "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--ip", "127.0.0.1"
        )
        evaluation.says("no learner answers")
        assert not called()
    actor.signal(signal.SIGTERM)
    assert sentence(actor.ends(INTERRUPTED)) == "serl-chunk: interrupted"


def test_a_second_actor_of_one_name_calls_no_robot(processes, tmp_path):
    with robot_server() as (flag, called):
        learner = processes.learner(tmp_path / "run", **LISTENING, **REALTIME)
        learner.says("listening on")
        named = lambda pc: ["--actor_id", "left", "--spool_path", str(tmp_path / pc)]  # noqa: E731
        first = processes.actor(*named("one"), **LISTENING, **REALTIME)
        learner.says("actor left connected")
        second = processes.actor(*named("two"), flag, **LISTENING, **REALTIME)
        second.says("another live session has the actor id 'left'")
        assert not called()
        first.kill()
        second.until(called, "it never called its robot once it was admitted")
