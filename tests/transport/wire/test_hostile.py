"""Messages that no sound peer sends: each is a sound one with something changed, and is refused by what it names."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from errors import naming
from ports import free_port
from transport_tools import CONTRACT, LIMITS, end, linked, serving, shared, step

from serl_chunk.transport.client.snapshots import Pull
from serl_chunk.transport.server.control_channel import Published, answer_pull
from serl_chunk.transport.wire import handshake, records, snapshots
from serl_chunk.transport.wire.handshake import Hello, LearnerStatus, RefusedError
from serl_chunk.transport.wire.records import PART, decode_part, encode_part
from serl_chunk.transport.wire.snapshots import Manifest
from serl_chunk.transport.wire.tickets import TicketRequest, decode_grant, encode_grant
from serl_chunk.types import (
    STEP_COLUMNS,
    Amend,
    Begin,
    ConfigError,
    Grant,
    PolicyOrigin,
    SerlChunkError,
    Snapshot,
    StepBlock,
    Ticket,
)
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.codec import Limits, Message, WireError

LEAF = Published(Snapshot(0, {"a": np.zeros(3, np.float32)}), {})
DIGEST = LEAF.manifest.leaves[0].digest
TWO = StepBlock.from_steps("e", [step(5), shared(step(6))])
AGAIN = step(6)._replace(observation={"state": np.zeros(2, np.float32)}, repeats={"top": 5})


def a_record(record) -> Message:
    return codec.decode(records.encode_record(record, 0), LIMITS)


def _receive(message: Message) -> None:
    pull = Pull(LEAF.manifest, {})
    pull.request(1000)
    pull.receive(message)


TICKET = Ticket(0, 1, 2, 3, "push", "seed-4", 5, 6, 7.0)
MANIFEST = {"version": 1, "info": {}, "leaves": [["w", "float32", [3], b"0" * 16]], "narrowed": []}
PIECES = {"ranges": [[DIGEST, 0, 12]]}
SOUND = {
    "hello": codec.decode(Hello("s", 1, "a", CONTRACT, "run", -1, 0, 5, 0, 3).encode(), LIMITS),
    "status": codec.decode(LearnerStatus("run", "", "", "", "", None, "", 0, 32, -1, 0, -1).encode(), LIMITS),
    "begin": a_record(Begin("e")),
    "end": a_record(end("e", 8)),
    "amend": a_record(Amend("e")),
    "steps": a_record(StepBlock.from_steps("e", [step(t, t) for t in range(8)])),
    "two steps": a_record(TWO),
    "repeating": a_record(StepBlock.from_steps("e", [step(5), AGAIN])),
    "part": Message(PART, {"first": 3, "span": 24, "sizes": [110], "offset": 10}, {"data": np.zeros(100, np.uint8)}, 0),
    "manifest": Message("manifest", {**MANIFEST, **PolicyOrigin()._asdict()}, {}, 0),
    "pull": Message("pull", PIECES, {}, 0),
    "tickets": Message("tickets", TicketRequest(-1, ("0.0.0.0",), 3)._asdict() | {"held": ["0.0.0.0"]}, {}, 0),
    "grant": codec.decode(encode_grant(Grant((TICKET,), "")), LIMITS),
    "piece": Message("piece", PIECES, {"0": np.zeros(12, np.uint8)}, 0),
}
DECODERS = {
    "hello": Hello.decode,
    "status": LearnerStatus.decode,
    "part": functools.partial(decode_part, limits=LIMITS),
    "manifest": Manifest.decode,
    "pull": lambda message: answer_pull(message, [LEAF], 1000),
    "piece": _receive,
    "tickets": TicketRequest.decode,
    "grant": decode_grant,
}
GONE = ...  # in place of a value
F4, I4, U1 = np.float32, np.int32, np.uint8
STATE, TOP, HUMAN = "observation/state", "images/top", "values/human_dims"


def decode(base: str, changes: dict) -> object:
    """What a sound message is decoded to once `changes` are made: of arrays, and of fields of its header."""
    sound = SOUND[base]
    header, arrays = dict(sound.header), dict(sound.arrays)
    for name, value in changes.items():
        if name in STEP_COLUMNS and "columns" in arrays:  # they travel together
            table = arrays["columns"].copy()
            records.columns_in(table)[name][:] = value
            name, value = "columns", table
        to = arrays if name in arrays or isinstance(value, np.ndarray | np.generic) else header
        if value is GONE:
            del to[name]
        else:
            to[name] = value
    decoder = DECODERS.get(base, records.decode_record)
    return decoder(sound._replace(header=header, arrays=arrays))


@pytest.mark.parametrize("base", SOUND)
def test_without_a_change_it_is_taken(base):
    decode(base, {})


HOSTILE = [
    ("hello", {"session": "a\x1b[2J"}, "session", "'a\\x1b[2J'"),
    ("hello", {"actor_id": 3}, "actor_id"),
    ("hello", {"contract": {str(i): "" for i in range(300)}}, "contract"),
    ("hello", {"steps_before_first": 4}),
    ("hello", {"protocol": None}, "protocol"),
    ("status", {"free_bytes": 0.5}, "free_bytes"),
    ("steps", {"action": GONE}, "action"),
    ("steps", {"lost_ticks": -1}, "lost_ticks", "negative"),
    ("steps", {"columns": GONE}, "columns"),
    ("steps", {"columns": np.zeros((8, 4), U1)}, "columns", "uint8", 33, 4),
    ("steps", {"columns": np.zeros((7, 33), U1)}, "columns", 8, 7),
    ("steps", {"action": np.zeros((8, 2))}, "action", "float32", "float64"),
    ("steps", {"action": np.zeros((0, 2), F4)}, "steps"),
    ("steps", {"source": 5}, "source", "0..4", 5),
    ("steps", {"decision_tick": 1}, "decision_tick", -1),
    ("steps", {STATE: np.zeros((7, 2), F4)}, STATE, 8, "(7, 2)"),
    ("steps", {"observation/x": F4(1)}, "observation/x", 8, "()"),
    ("steps", {"other": np.zeros(8, F4)}, "other"),
    ("steps", {"index/images/top": GONE}, "['decision/chunk']", "['decision/chunk', 'images/top']"),
    ("steps", {"index/images/top": np.array([0, 3, 8], I4)}, "index/images/top", "0..7"),
    ("steps", {"index/images/top": np.array([0, 3, 6])}, "index/images/top", "int32", "int64"),
    ("steps", {"index/images/top": np.array([0, 3], I4)}, "values/images/top", 2, "(3, 12, 16, 3)"),
    ("steps", {"values/images/top": np.zeros((3, 4, 4, 3), F4)}, "values/images/top", "uint8", "float32"),
    ("steps", {"index/x": np.zeros(1, I4), "values/x": np.zeros(1)}, "x", "images/", "decision/"),
    *[("steps", {"first_tick": value}, "first_tick") for value in (-1, 2**31, 1.0)],
    ("two steps", {HUMAN: np.array([[1.0, 0.0]])}, HUMAN, "float64[1, 2]", "uint8[1, 2]"),
    ("two steps", {HUMAN: np.ones((2, 2), U1)}, HUMAN, 1, "(2, 2)"),
    ("two steps", {HUMAN: np.zeros((1, 2), U1)}, HUMAN, "[0, 0]", 6),
    ("two steps", {"index/human_dims": np.array([0], I4)}, HUMAN, 5, "HUMAN"),  # the policy's step
    (
        "two steps",
        {"index/human_dims/top": np.array([1], I4), "values/human_dims/top": np.ones((1, 2), U1)},
        "human_dims/top",
        "human_dims",
        "images/",
    ),
    ("repeating", {"values/repeat/top": np.array([6], I4)}, "values/repeat/top", "before the step's own"),
    ("repeating", {"index/repeat/top": np.array([0, 1], I4)}, "values/repeat/top", 2),
    *[("end", {"repeats": value}, "repeats") for value in (["top"], {"top": 8}, {"top": True})],
    ("begin", {"task": 3}, "task", "str", "int"),
    ("begin", {"a": np.zeros(1)}, "begin", "arrays"),
    ("end", {"outcome": "won"}, "outcome", "won", "success"),
    ("end", {"reward": float("nan")}, "reward", "nan"),
    ("end", {"reward": 1e300}, "reward", "float32", "1e+300"),
    ("end", {"final_observation": False}, "end", "arrays"),
    ("amend", {"discard": None}, "discard", "bool", "NoneType"),
    ("part", {"sizes": [10, -1]}, "sizes"),
    ("part", {"sizes": []}, -1),
    ("part", {"sizes": [1] * 66}, 64),
    ("part", {"sizes": [1 << 40]}, 1 << 40),
    ("part", {"offset": 11}, 11),
    ("part", {"span": 0}, "record"),
    ("part", {"data": GONE}, "uint8"),
    ("manifest", {"leaves": [["w", "float32", [1 << 35], b"0" * 16]]}, 4 << 35, snapshots.MAX_BYTES),
    *[("manifest", {"narrowed": narrowed}, "leaves", "bfloat16") for narrowed in ([1], ["x"])],
    ("pull", {"ranges": []}),
    ("pull", {"ranges": [[DIGEST, 0]]}),
    ("pull", {"ranges": [[DIGEST, 0, 13]]}),
    ("pull", {"ranges": [[DIGEST, 0, 12]] * 65}),
    ("pull", {"ranges": [[DIGEST, 0, 1000]] * 2}),
    ("tickets", {"version": -2}, "version", -2),
    ("tickets", {"held": "0.0.0.0"}, "held", "list", "str"),
    ("tickets", {"held": ["0"] * 257}, "held", 257, 256),
    *[("tickets", {"held": [value]}, "held") for value in ("x" * 65, "\x1b", 1)],
    *[("tickets", {"capacity": value}, "capacity") for value in (-1, 257, None)],
    ("grant", {"tickets": [[*TICKET]] * 257}, "tickets", 257, 256),
    ("grant", {"tickets": [[*TICKET][:-1]]}, "tickets", "init_state"),
    *[
        ("grant", {"tickets": [list(TICKET._replace(**{name: value}))]}, name)
        for name, value in (
            ("slot", -1),
            ("task", "x" * 501),
            ("init_state", "\n"),
            ("version", None),
            ("seed", 0.5),
            ("lease", 0.0),
            ("lease", float("inf")),
        )
    ],
    ("grant", {"waiting": None}, "waiting"),
    ("piece", {"0": GONE}),
    ("piece", {"0": np.zeros(11, U1)}),
]


@pytest.mark.parametrize(("base", "changes", "named"), [(b, c, n) for b, c, *n in HOSTILE])
def test_a_hostile_message_is_refused(base, changes, named):
    with pytest.raises(WireError, match=naming(*named) if named else None):
        decode(base, changes)


def test_a_kind_or_a_size_that_is_none_is_refused():
    with pytest.raises(WireError, match=naming("ping", "begin", "steps", "end", "amend")):
        records.decode_record(Message("ping", {"first": 0}, {}, 0))
    frames = records.encode_record(TWO, 3)
    total = codec.size_of(frames)
    with pytest.raises(WireError, match=naming(total, total - 1)):  # with its first part
        decode_part(codec.decode(encode_part(3, 2, frames, 0, 100), LIMITS), Limits(total - 1, 64))


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


@pytest.mark.parametrize(("mine", "theirs", "said", "unsaid"), [
    (CONTRACT, dict(CONTRACT), (), "learner"),
    (
        {"a": "1", "b": "2", "c": "x" * 200}, {"a": "1", "b": "3", "d": "4"},
        ("b is '2' at the learner and '3' at the actor", "d is absent at the learner and '4' at the actor"), "a is",
    ),
    (  # of shapes the first that differs is shown
        {"network": f"{SAME};state/kernel(19, 4);{SAME}"}, {"network": f"{SAME};state/kernel(20, 4);{SAME}"},
        ("network is 'state/kernel(19, 4)' at the learner and 'state/kernel(20, 4)' at the actor",), "policy",
    ),
    (  # the flags of the learner's settings
        {"horizon": "5", "agent.lr": "1", "robot": "a"}, {"horizon": "7", "agent.lr": "2"},
        (
            "chunk.horizon is '5' at the learner and '7' at the actor",
            "--config.chunk.horizon=5 --config.agent.lr=1.", "robot is 'a' at the learner and absent at the actor",
        ), "fake_env",
    ),
])  # fmt: skip
def test_compare_names_every_difference(mine, theirs, said, unsaid):
    sentence = handshake.compare(mine, theirs)
    assert [s for s in said if s not in sentence] == []
    assert unsaid not in sentence
    assert len(sentence) < 600
