"""Handshakes: refusals name fields and values."""

from __future__ import annotations

import pytest
from errors import naming
from ports import free_port
from transport_tools import CONTRACT, linked, serving

from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import Hello, RefusedError
from serl_chunk.types import Begin, ConfigError, SerlChunkError
from serl_chunk_robot.wire import codec


def test_another_protocol_is_refused_whatever_else_it_says(monkeypatch, caplog):
    """The actor is stopped with a sentence, which is raised where a caller waits for it and not logged."""
    port, encode = free_port(), Hello.encode
    monkeypatch.setattr(Hello, "encode", lambda self: encode(self._replace(protocol=99, actor_id="")))
    with serving(port), linked(port, connect=False) as link:
        with pytest.raises(RefusedError, match=naming(handshake.PROTOCOL, 99)):
            link.connect(timeout=10)
        assert link.can_begin()[0] is False
        link.begin(Begin("e"))
        with pytest.raises(RefusedError):
            link.flush(10)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_what_a_peer_says_is_escaped_for_a_terminal(port):
    def refuse():
        raise ConfigError("no\x1b[2Jway")

    with serving(port, welcome=refuse), pytest.raises(SerlChunkError) as error, linked(port, connect=False) as link:
        link.connect(timeout=1.0, on_waiting=print)
    assert "\x1b" not in str(error.value)
    assert codec.shown("no\x1b[2Jway, größer") == "no\\x1b[2Jway, größer"


SAME = ";".join(f"policy/layer_{i}/kernel(4, 4)" for i in range(20))


@pytest.mark.parametrize(
    ("mine", "theirs", "said", "unsaid"),
    [
        (CONTRACT, dict(CONTRACT), (), "learner"),
        (
            {"a": "1", "b": "2", "c": "x" * 200}, {"a": "1", "b": "3", "d": "4"},
            ("b is '2' at the learner and '3' at the actor", "d is absent at the learner and '4' at the actor"), "a is",
        ),
        (  # of shapes the first that differs is shown
            {"network": f"{SAME};state/kernel(19, 4);{SAME}"}, {"network": f"{SAME};state/kernel(20, 4);{SAME}"},
            ("network is 'state/kernel(19, 4)' at the learner and 'state/kernel(20, 4)' at the actor",), "policy",
        ),
        ({"network": "a(1)", "horizon": "5"}, {"network": "a(2)", "horizon": "7"}, ("horizon",), "network"),
        (  # the flags of the learner's settings
            {"horizon": "5", "agent.lr": "1", "robot": "a"}, {"horizon": "7", "agent.lr": "2"},
            (
                "chunk.horizon is '5' at the learner and '7' at the actor",
                "--config.chunk.horizon=5 --config.agent.lr=1.", "robot is 'a' at the learner and absent at the actor",
            ), "fake_env",
        ),
    ],
)  # fmt: skip
def test_compare_names_every_difference(mine, theirs, said, unsaid):
    sentence = handshake.compare(mine, theirs)
    assert [s for s in said if s not in sentence] == []
    assert unsaid not in sentence
    assert len(sentence) < 600
