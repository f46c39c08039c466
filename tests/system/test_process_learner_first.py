"""An actor or evaluation that no learner admits never touches the robot, which may be moving for another one."""

from __future__ import annotations

import contextlib
import socket

import pytest
from processes import LISTENING, PATIENCE

REALTIME = {"actor__clock": "realtime"}
pytestmark = pytest.mark.timeout(3 * PATIENCE)


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


def test_without_a_learner_no_robot_is_called(processes):
    with robot_server() as (flag, called):
        actor = processes.actor(flag, **REALTIME)
        actor.says("no learner answers")
        evaluation = processes.actor(
            flag, "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--ip", "127.0.0.1"
        )
        evaluation.says("no learner answers")
        assert not called()


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
