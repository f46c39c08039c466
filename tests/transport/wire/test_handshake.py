"""Handshakes: refusals name fields and values; a hello that is not one is refused."""

from __future__ import annotations

import pytest
from errors import naming
from ports import free_port
from transport_tools import CONTRACT, LIMITS, linked, serving

from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import Hello, RefusedError
from serl_chunk.types import Begin, ConfigError, SerlChunkError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import WireError

HELLO = Hello("s", 1, "a", CONTRACT, "", -1, 0, 5, 0, 3)


def test_compare_names_every_difference():
    assert handshake.compare(CONTRACT, dict(CONTRACT)) == ""
    sentence = handshake.compare({"a": "1", "b": "2", "c": "x" * 200}, {"a": "1", "b": "3", "d": "4"})
    assert "b is '2' at the learner and '3' at the actor" in sentence
    assert "d is absent at the learner and '4' at the actor" in sentence
    assert "a is" not in sentence
    assert len(sentence) < 500


def test_of_shapes_the_first_that_differs_is_shown():
    same = ";".join(f"policy/layer_{i}/kernel(4, 4)" for i in range(20))
    mine, theirs = ({"network": f"{same};state/kernel({n}, 4);{same}"} for n in (19, 20))
    sentence = handshake.compare(mine, theirs)
    assert "network is 'state/kernel(19, 4)' at the learner and 'state/kernel(20, 4)' at the actor" in sentence
    longer = handshake.compare({"network": same}, {"network": same + ";state/kernel(19, 4)"})
    assert "absent at the learner and 'state/kernel(19, 4)' at the actor" in longer
    assert "kernel" not in handshake.compare(mine | {"horizon": "5"}, theirs | {"horizon": "7"})


def test_the_flags_of_the_learners_settings_are_given():
    sentence = handshake.compare({"horizon": "5", "agent.lr": "1", "robot": "a"}, {"horizon": "7", "agent.lr": "2"})
    assert "chunk.horizon is '5' at the learner and '7' at the actor" in sentence
    assert "--config.chunk.horizon=5 --config.agent.lr=1." in sentence
    assert "robot is 'a' at the learner and absent at the actor" in sentence


def test_spaces_that_differ_are_blamed_on_the_environment_first():
    theirs = CONTRACT | {"state_dim": "20", "robot_specs": "b"}
    sentence = handshake.compare(CONTRACT | {"state_dim": "19", "robot_specs": "a"}, theirs)
    assert "Check the environment first: " in sentence
    assert "fake_env=True. Then: start both with the same experiment" in sentence
    rates = ({"control_hz": hz, "robot_specs": hz} for hz in ("10", "20"))
    assert "fake_env" not in handshake.compare(*rates)  # a setting of the configuration
    others = ({"experiment": name, "state_dim": str(len(name))} for name in ("a", "bb"))
    assert "fake_env" not in handshake.compare(*others)  # another experiment has another environment


def test_hello_round_trip():
    assert Hello.decode(codec.decode(HELLO.encode(), LIMITS)) == HELLO


@pytest.mark.parametrize(
    "change",
    [
        {"session": ""},
        {"session": "x" * 65},
        {"actor_id": 3},
        {"contract": {"a": 1}},
        {"contract": {str(i): "" for i in range(300)}},
        {"version": -2},
        {"first": 6},
        {"steps_before_first": 4},
        {"protocol": None},
    ],
)
def test_malformed_hello(change):
    with pytest.raises(WireError):
        Hello.decode(codec.decode(HELLO._replace(**change).encode(), LIMITS))


def test_a_refused_actor_is_told_the_field_and_both_values(caplog):
    port = free_port()
    with serving(port), linked(port, connect=False, contract={**CONTRACT, "horizon": "8"}) as link:
        with pytest.raises(RefusedError, match=naming("chunk.horizon", 5, 8, "--config.chunk.horizon=5")):
            link.connect(timeout=10)
        assert link.can_begin()[0] is False
        link.begin(Begin("e"))
        with pytest.raises(RefusedError):
            link.flush(10)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert errors == []  # the sentence was raised where a caller waited for it


def test_another_protocol_is_refused_whatever_else_it_says(monkeypatch):
    port = free_port()
    encode = Hello.encode
    monkeypatch.setattr(Hello, "encode", lambda self: encode(self._replace(protocol=99, actor_id="")))
    with (
        serving(port),
        linked(port, connect=False) as link,
        pytest.raises(RefusedError, match=naming(handshake.PROTOCOL, 99)),
    ):
        link.connect(timeout=10)


@pytest.mark.parametrize("field", ["session", "actor_id", "run"])
def test_names_with_control_characters_are_refused(field):
    message = codec.decode(HELLO._replace(run="run").encode(), LIMITS)
    with pytest.raises(WireError, match=naming(field, "'a\\x1b[2J'")):
        Hello.decode(message._replace(header={**message.header, field: "a\x1b[2J"}))


def test_a_contracts_names_are_printable():
    message = codec.decode(HELLO.encode(), LIMITS)
    with pytest.raises(WireError, match=naming("contract", "'a\\x07'")):
        Hello.decode(message._replace(header={**message.header, "contract": {"a\x07": "1"}}))


def test_what_a_peer_says_is_escaped_for_a_terminal():
    port = free_port()
    with serving(port, welcome=_refuse), pytest.raises(SerlChunkError) as error, linked(port, connect=False) as link:
        link.connect(timeout=1.0, on_waiting=print)
    assert "\x1b" not in str(error.value)
    assert "no\\x1b[2Jway" in codec.shown("no\x1b[2Jway")
    assert codec.shown("plain, größer") == "plain, größer"


def _refuse():
    raise ConfigError("no\x1b[2Jway")
