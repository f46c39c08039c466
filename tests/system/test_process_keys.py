"""Two machines as a user sets them up: a learner that others reach, one pasted line, and a machine that has none."""

import dataclasses
import re

import pytest
from commands import Command
from processes import PATIENCE, actor_totals, learner_totals

from serl_chunk.transport.security.client import mechanism_at
from serl_chunk.transport.security.keys import ClientKeys
from serl_chunk_robot.wire.curve import Pair

pytestmark = pytest.mark.timeout(3 * PATIENCE)
HERE = "127.0.0.1"
FAILED = 1
WRONG_USAGE = 2


def on(folder) -> tuple[str, ...]:
    """A machine of its own, as far as keys go."""
    return ("env", f"XDG_CONFIG_HOME={folder}")


@pytest.mark.slow
def test_one_pasted_line_lets_one_robot_in(processes, tmp_path):
    gpu, robot, stranger = (on(tmp_path / name) for name in ("gpu", "robot", "stranger"))
    learner = processes.start(
        *processes.flags(), "--learner", "--debug", "--demo_path", str(processes.demos), "--checkpoint_path",
        str(tmp_path / "run"), "--bind", "0.0.0.0", prefix=gpu,
    )  # fmt: skip
    learner.says("serl-chunk keys join '")
    learner.says("listening on 0.0.0.0")
    [line] = re.findall(r"serl-chunk keys join '(\S+)'", learner.output)

    # No machine without a key, or with one of its own.
    said = processes.actor("--ip", HERE, prefix=stranger).ends(FAILED)
    assert f"the learner at {HERE}:{processes.port} requires a key, and this machine has none" in said
    assert "Traceback" not in said

    said = processes.start("keys", "join", line, "--ip", HERE, prefix=robot).ends()
    assert "as 'robot'; key in " in said
    said = processes.start("keys", "join", line, "--ip", HERE, prefix=stranger).ends(FAILED)
    assert "its line was used by another machine or is older than ten minutes" in said
    known = ClientKeys.find(tmp_path / "robot" / "serl-chunk" / "keys", HERE)
    assert known is not None
    forged = dataclasses.replace(known, folder=tmp_path / "stranger" / "serl-chunk" / "keys", pair=Pair.new())
    forged.save()
    evaluation = ("--eval_checkpoint_step", "latest", "--eval_n_trajs", "1")
    said = processes.actor("--ip", HERE, *evaluation, prefix=stranger).ends(FAILED)
    assert f"the learner at {HERE}:{processes.port} refuses this machine's key 'robot'" in said

    # And the one that has pasted it trains.
    assert "robot" in processes.start("keys", "list", prefix=gpu).ends()
    _, steps = actor_totals(processes.actor("--ip", HERE, prefix=robot).ends())
    output = learner.ends()
    assert learner_totals(output) == (40, steps)
    assert "--insecure: any machine" not in output
    assert "unknown key" in output
    for text in (output, said):
        assert known.pair.secret not in text


@pytest.mark.slow
def test_on_loopback_an_actor_with_a_key_is_encrypted_and_has_its_name(processes, tmp_path, joined):
    short = {"learner__pretrain_steps": 0, "learner__max_steps": 10}
    learner = processes.learner(tmp_path / "run", "--keys", joined[0], **short)
    learner.says("listening on")
    assert mechanism_at(HERE, processes.port) == "CURVE"
    other = processes.actor("--keys", joined[1], "--actor_id", "right", kind=Command, **short).ends(WRONG_USAGE)
    assert "--actor_id=right: the learner knows this machine's key as 'left'" in other
    actor = processes.actor("--keys", joined[1], "--spool_path", str(tmp_path / "spool"), **short)
    _, steps = actor_totals(actor.ends())
    assert learner_totals(learner.ends()) == (10, steps)
    [segment] = (tmp_path / "run" / "journal" / "online").glob("*.journal")
    assert b"left-" in segment.read_bytes()  # its episodes' names begin with its own
