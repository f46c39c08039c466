"""Keys: who gets in, who does not, and what each side is told. Real sockets on loopback, with CURVE."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from errors import naming
from flaky_proxy import flaky
from key_tools import HERE, invited, joined, tell
from ports import free_port
from transport_tools import CONFIG, CONTRACT, Inbox, RawActor, eventually, linked, send_episode, serving

from serl_chunk.transport.security import client
from serl_chunk.transport.security.client import UnencryptedPeerError, enroll, mechanism_at
from serl_chunk.transport.security.keys import THIS_MACHINE, ClientKeys, JoinToken
from serl_chunk.transport.security.server import VALID_SECONDS, Authenticator, ServerKeys
from serl_chunk.transport.server.sessions import RefuseError
from serl_chunk.transport.wire import handshake
from serl_chunk.transport.wire.handshake import RefusedError, UnreachableError
from serl_chunk.types import ConfigError
from serl_chunk_robot.wire import codec
from serl_chunk_robot.wire.curve import Pair, fingerprint, to_bytes, use_keys


def test_on_loopback_the_learner_decides_whether_keys_are_used(learner, tmp_path, port):
    keys = joined(learner, tmp_path / "robot")
    with linked(port, connect=False, keys=keys) as link:
        with serving(port):  # no keys
            assert mechanism_at(HERE, port) == "NULL"
            link.connect(timeout=10)
            send_episode(link, "a", 5)
            assert link.flush(10)
            with linked(port, keys=invited(learner, tmp_path / "other", "right"), actor_id="b") as other:
                assert other.stats()["connected"]  # that is to join
        with serving(port, keys=learner):  # and after its restart it asks for them
            assert mechanism_at(HERE, port) == "CURVE"
            send_episode(link, "b", 5)
            assert link.flush(20)


def refusal(port: int, keys: ClientKeys | None) -> str:
    """What an actor is stopped with."""
    with linked(port, connect=False, keys=keys) as link, pytest.raises(RefusedError) as refused:
        link.connect(timeout=20)
    assert link.error is None or str(link.error) == str(refused.value)
    return str(refused.value)


def test_the_wrong_cases_have_a_sentence_each(learner, tmp_path, port):
    good = joined(learner, tmp_path / "robot")
    unknown = dataclasses.replace(good, pair=Pair.new())
    other = dataclasses.replace(good, server=Pair.new().public)
    with serving(port, keys=learner) as server:
        said = [refusal(port, keys) for keys in (unknown, other, None)]
        stats = server.stats()
        with linked(port, keys=good) as link:  # and the learner goes on
            send_episode(link, "a", 3)
            assert link.flush(10)
    assert re.match(naming(f"{HERE}:{port}", "left", fingerprint(unknown.pair.public), "revoked"), said[0])
    assert "minutes" not in said[0]  # of a line: this machine has joined
    assert re.match(naming(f"{HERE}:{port}", fingerprint(other.server), other.file, "ip"), said[1])
    assert re.match(naming(f"{HERE}:{port}", "keys", "insecure"), said[2])
    assert all("serl-chunk keys add NAME" in s for s in said)
    assert stats["keys_refused"] >= 1
    assert stats["handshakes_failed"] >= 2
    assert stats["sessions"] == stats["records"] == 0


def test_a_learner_without_keys_elsewhere_is_not_believed(learner, tmp_path, port, monkeypatch):
    keys = joined(learner, tmp_path / "robot")
    monkeypatch.setattr(client, "is_loopback", lambda host: False)
    with serving(port):
        assert re.match(naming(f"{HERE}:{port}", keys.file, "insecure"), refusal(port, keys))
        ticket = invited(learner, tmp_path / "other", "right")
        with pytest.raises(UnencryptedPeerError, match=naming(f"{HERE}:{port}", ticket.file, "insecure")):
            enroll(ticket, CONFIG, HERE, port, 5.0)


def test_an_actor_that_was_connected_waits_for_the_right_learner(learner, tmp_path, port):
    """Another learner at the port for a while, or a tunnel that hangs up, must not end a robot's session."""
    keys, inbox = joined(learner, tmp_path / "robot"), Inbox()
    stranger, _ = ServerKeys.ensure(tmp_path / "stranger")
    with linked(port, connect=False, keys=keys) as link:
        with flaky(port, free_port()):  # whose other end is not there
            assert mechanism_at(HERE, port) is None
            with pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", 1)):
                link.connect(timeout=1.0)
            assert link.error is None
        with serving(port, keys=learner):
            link.connect(timeout=20)
        with serving(port, keys=stranger) as server:
            send_episode(link, "a", 5)
            eventually(lambda: server.stats()["handshakes_failed"] >= 3)
            assert link.error is None
        with serving(port, keys=learner, on_record=inbox):
            assert link.flush(20)
    assert inbox.episodes() == {"a": [0.0, 1.0, 2.0, 3.0, 4.0]}


def test_a_line_is_good_for_one_robot(learner, tmp_path, port):
    word = learner.invite("left", [HERE], port).encode()
    first, second = (ClientKeys.accept(tmp_path / n, JoinToken.decode(word)) for n in ("first", "second"))
    with serving(port, keys=learner):
        kept = enroll(first, CONFIG, HERE, port, 10.0)
        assert kept.ticket is None
        with pytest.raises(RefusedError, match=naming(f"{HERE}:{port}", "left", "minutes")):
            enroll(second, CONFIG, HERE, port, 10.0)
        assert re.match(naming(f"{HERE}:{port}", "left", "minutes"), refusal(port, second))
        assert enroll(first, CONFIG, HERE, port, 10.0).pair == first.pair  # its answer may have been lost: it is in
        assert enroll(kept, CONFIG, HERE, 1, 0.1) is kept  # nothing to do, no learner to ask
    assert [c.public for c in learner.clients() if c.name == "left"] == [first.pair.public]


def test_a_line_is_good_for_ten_minutes(learner, tmp_path, port, clock):
    keys = invited(learner, tmp_path / "robot", port=port)
    clock.now -= 3600  # a clock that was set back opens nothing
    assert learner.enrol(keys.ticket.public, keys.pair.public) is None
    clock.now += 3600
    with serving(port, keys=learner):
        clock.now += VALID_SECONDS + 1
        assert re.match(naming(f"{HERE}:{port}", "left", "minutes"), refusal(port, keys))
        assert [c.state(clock.now) for c in learner.clients() if c.name == "left"] == ["expired"]
        clock.now -= 2
        assert enroll(keys, CONFIG, HERE, port, 10.0).ticket is None


def test_no_machine_joins_with_the_key_of_another(learner, tmp_path):
    """Whose entry is revoked would otherwise be a matter of order."""
    old, first = (invited(learner, tmp_path / n) for n in ("old", "new"))
    assert learner.enrol(old.ticket.public, old.pair.public) is None  # the newer line has taken its place
    assert learner.enrol(first.ticket.public, first.pair.public) == "left"
    with pytest.raises(ConfigError, match=naming("left", "serl-chunk keys revoke left")):
        learner.invite("left", [], 1)
    second = invited(learner, tmp_path / "second", "a-name-before-the-other")
    for public in (first.pair.public, second.ticket.public):
        assert learner.enrol(second.ticket.public, public) is None
    learner.revoke("a-name-before-the-other")
    assert learner.role(first.pair.public)[1] == "connect"


def test_new_keys_of_a_learner_let_no_machine_in_that_knew_the_old_ones(learner, tmp_path, clock):
    keys = joined(learner, tmp_path / "robot")
    (learner.folder / "server.json").unlink()
    new, made = ServerKeys.ensure(learner.folder, clock)
    assert made
    assert new.pair != learner.pair
    assert [c.name for c in new.clients()] == [THIS_MACHINE]
    assert new.role(keys.pair.public)[1] == ""
    again = joined(new, tmp_path / "robot")  # under the same name
    assert ClientKeys.find(tmp_path / "robot", HERE) == again


def test_a_one_time_key_opens_nothing_but_joining(learner, tmp_path, port):
    keys = invited(learner, tmp_path / "robot", port=port)
    who = codec.encode(handshake.WHO, {"protocol": handshake.PROTOCOL})
    hello = handshake.Hello("s", 1, "raw", CONTRACT, "run", -1, 0, 0, 0, 0).encode()
    malformed = [codec.encode(handshake.ENROL, {"public": p}) for p in (b"", b"x" * 31, b"x" * 33, "text", None)]
    with serving(port, keys=learner) as server:
        # Malformed enrolments are dropped: what follows on the same connection is answered first.
        for frames in ([who], [hello], *([m, who] for m in malformed)):
            (answer,) = tell(port, keys, keys.ticket, *frames)
            assert answer.kind == handshake.REFUSED
            assert "for joining only" in answer.header["reason"]
        assert server.stats()["sessions"] == 0
        assert learner.role(keys.ticket.public)[1] == "join"  # and it is not used up by that
        # A key that has joined cannot write another one down.
        own = joined(learner, tmp_path / "other", "right")
        (answer,) = tell(port, own, own.pair, codec.encode(handshake.ENROL, {"public": to_bytes(Pair.new().public)}))
        assert answer.kind == handshake.REFUSED


def test_an_actor_may_be_started_before_the_learner_it_is_to_join(learner, tmp_path, port):
    keys = invited(learner, tmp_path / "robot", port=port)
    heard: list[str] = []
    with linked(port, connect=False, keys=keys) as link:
        with pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", 0.3)):
            link.connect(timeout=0.3, on_waiting=heard.append)
        with serving(port, keys=learner):
            link.connect(timeout=10)
    assert ClientKeys.find(tmp_path / "robot", HERE).ticket is None


def test_a_revoked_key_is_cut_and_stays_out(learner, tmp_path, port, caplog):
    """A holder that ignores its refusal keeps its connection; nothing it says has an effect. It may join anew."""
    keys, others = joined(learner, tmp_path / "robot"), joined(learner, tmp_path / "other", "right")
    inbox = Inbox()
    with serving(port, keys=learner, on_record=inbox) as server:
        with linked(port, keys=others, actor_id="b") as other, linked(port, keys=keys) as link:
            stubborn = Stubborn(port, keys)
            # By another process, as the command does it.
            assert ServerKeys.open(learner.folder, learner._clock).revoke("left").public == keys.pair.public
            eventually(lambda: link.error is not None)
            assert re.match(naming("left", fingerprint(keys.pair.public), "revoked"), str(link.error))
            send_episode(other, "a", 5)
            assert other.flush(10)  # the others notice nothing
        eventually(lambda: not any(s.live for s in server.sessions()))
        before = server.stats()["stale"]
        stubborn.data.send_multipart([stubborn.token, *codec.encode("begin", {"first": 0})])
        eventually(lambda: server.stats()["stale"] > before)
        assert stubborn.greet().kind == handshake.REFUSED  # on the connection that it still has
        assert re.match(naming(f"{HERE}:{port}", "left", "revoked"), refusal(port, keys))
        with linked(port, keys=invited(learner, tmp_path / "robot", port=port)) as link:
            send_episode(link, "b", 4)
            assert link.flush(10)
    assert list(inbox.episodes()) == ["a", "b"]
    assert "revoked key of left" in caplog.text


class Stubborn(RawActor):
    """An actor by hand, with keys."""

    def __init__(self, port: int, keys: ClientKeys) -> None:
        self._keys = keys
        super().__init__(port)

    def _dealer(self, port: int) -> zmq.Socket[bytes]:
        s = self.context.socket(zmq.DEALER)
        s.linger, s.rcvtimeo = 0, 5000
        use_keys(s, self._keys.server, self._keys.pair)
        s.connect(f"tcp://{HERE}:{port}")
        return s

    def greet(self) -> codec.Message:
        """Say hello once more; the answer to it, or to an earlier message."""
        self.control.send_multipart(handshake.Hello("raw", 2, "raw", CONTRACT, "run", -1, 0, 9, 0, 9).encode())
        answer = self.receive(self.control)
        while answer.kind not in (handshake.REFUSED, handshake.WELCOME):
            answer = self.receive(self.control)
        return answer


def test_a_second_program_that_joins_at_the_same_time_is_let_in_too(learner, tmp_path, port, monkeypatch):
    """Both had connected with the line before either had used it; the second finds that its machine has joined."""
    keys = invited(learner, tmp_path / "robot", port=port)
    real = ServerKeys.enrol

    def after_another(self, ticket, public):
        assert real(self, ticket, public) == "left"
        return None  # what the one that came later is told

    monkeypatch.setattr(ServerKeys, "enrol", after_another)
    with serving(port, keys=learner), linked(port, keys=keys) as link:
        send_episode(link, "e", 3)
        assert link.flush(10)
    assert ClientKeys.all(tmp_path / "robot")[0].ticket is None


def test_strangers_do_not_silence_the_learners_complaints(learner, port, caplog):
    with caplog.at_level(logging.WARNING), serving(port, keys=learner) as server:
        for i in range(600):
            server._sockets.complain("control", f"10.0.{i // 250}.{i % 250}", "unknown key: of a stranger")
        assert sum("of a stranger" in r.message for r in caplog.records) <= 30
        assert len(server._sockets._complaints) <= 256
        server._sockets._lines.clear()  # a minute later
        server._sockets.complain("control", "10.1.1.1", "unknown key: of a robot")
        server._sockets.complain("control", "10.1.1.1", "unknown key: of a robot")
    assert sum("of a robot" in r.message for r in caplog.records) == 1


def test_a_learner_that_cannot_look_into_its_keys_is_not_called_absent(learner, tmp_path, port):
    keys = invited(learner, tmp_path / "robot", port=port)
    with serving(port, keys=learner):
        learner.folder.chmod(0o770)
        with pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", "keys")):
            enroll(keys, CONFIG, HERE, port, 1.0)
        learner.folder.chmod(0o700)
        assert enroll(keys, CONFIG, HERE, port, 5.0).ticket is None


def test_secrets_are_for_their_owner_alone(learner, tmp_path):
    old = os.umask(0)  # the most careless there is
    try:
        keys = invited(ServerKeys.ensure(tmp_path / "careless")[0], tmp_path / "robot")
    finally:
        os.umask(old)
    folders = [tmp_path / "careless", tmp_path / "robot"]
    files = [p for f in folders for p in f.rglob("*") if p.is_file()]
    assert {p.name for p in files} >= {"server.json", "left.json", f"{THIS_MACHINE}.json", keys.file.name}
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}
    below = [p for f in folders for p in [f, *f.rglob("*")] if p.is_dir()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in below} == {0o700}


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_what_others_can_read_is_refused_with_the_remedy(learner, tmp_path, mode):
    keys = joined(learner, tmp_path / "robot")
    allowed = learner.folder / "allowed"
    for path, sound, read in [
        (learner.folder / "server.json", 0o600, lambda: ServerKeys.open(learner.folder)),
        (allowed / "left.json", 0o600, lambda: ServerKeys.open(learner.folder)),
        (keys.file, 0o600, lambda: ClientKeys.find(tmp_path / "robot", HERE)),
        (learner.folder, 0o700, learner.clients),  # what others can write to
        (allowed, 0o700, learner.clients),
    ]:
        bad = mode if sound == 0o600 else 0o770
        path.chmod(bad)
        with pytest.raises(ConfigError, match=naming(f"{bad:04o}", f"chmod {sound:o} {path}")):
            read()
        path.chmod(sound)
        read()


def test_a_key_folder_that_spoils_while_the_learner_runs_lets_no_new_peer_in(learner, tmp_path, port, caplog):
    keys = joined(learner, tmp_path / "robot")
    spoilt = learner.folder / "allowed" / "stranger.json"
    with serving(port, keys=learner) as server, linked(port, keys=keys) as link:
        spoilt.write_text("{}")
        spoilt.chmod(0o600)
        eventually(lambda: "keys cannot be checked" in caplog.text)
        refused = pytest.raises(UnreachableError, match=naming(f"{HERE}:{port}", "keys"))
        with linked(port, connect=False, keys=keys, actor_id="b") as late, refused:
            late.connect(timeout=1.0)
        send_episode(link, "a", 3)
        assert link.flush(10)  # who was in stays in
        spoilt.unlink()
        with linked(port, keys=keys, actor_id="c") as later:
            assert later.stats()["connected"]
        server.check()


def test_a_plain_learner_on_loopback_says_nothing_about_where_it_moves(learner, tmp_path, port):
    """Keys that were given up there are used again: what answers elsewhere may be a stranger's."""
    exchange = client.KeyExchange(joined(learner, tmp_path / "robot"), HERE, port)
    with zmq.Context() as context, serving(port):
        exchange.connect(context, CONFIG, "control")
        eventually(lambda: exchange.trouble(known=False) is not None)
        exchange.close()
        with exchange.connect(context, CONFIG, "data") as plain:
            assert plain.mechanism == zmq.NULL
        exchange.move("10.1.1.1", port)
        with exchange.connect(context, CONFIG, "data") as secured:
            assert secured.mechanism == zmq.CURVE
        context.destroy(linger=0)


def test_a_fleets_pattern_and_other_names_exclude_each_other(learner, tmp_path):
    joined(learner, tmp_path / "robot", "sim-left")
    with pytest.raises(ConfigError, match=naming("'sim' and 'sim-left'")):
        learner.add_fleet("sim", "sim-*", [HERE], 1)
    learner.revoke("sim-left")
    learner.add_fleet("sim", "sim-*", [HERE], 1)
    for add in (lambda: learner.invite("sim-right", [HERE], 1), lambda: learner.add_fleet("sim-b", "b-*", [HERE], 1)):
        with pytest.raises(ConfigError, match=naming("'sim-", "and 'sim'")):
            add()
    learner.revoke("sim")
    learner.invite("sim-right", [HERE], 1)


def test_a_name_that_cannot_be_checked_is_not_admitted_now(learner, tmp_path):
    keys, context = learner.add_fleet("sim", "sim-*", [HERE], 1), zmq.Context()
    authenticator = Authenticator(context, learner, {}, lambda *_: None, 1)
    assert authenticator.misnamed(keys.pair.public, "sim-1") == ""
    learner.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(RefuseError, match="cannot read") as refused:
        authenticator.misnamed(keys.pair.public, "left")
    assert refused.value.retry
    context.destroy(linger=0)


@pytest.mark.parametrize(("content", "part"), [
    ("{", "JSON"), ('{"secret": "short"}', "secret"), ('{"secret": "' + "#" * 40 + '"}', "secret"),
])  # fmt: skip
def test_damaged_files_are_named(learner, content, part):
    file = learner.folder / "server.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=naming(file, part)):
        ServerKeys.open(learner.folder)


@pytest.mark.parametrize("revoked", ["true", "null", '"no"'])
def test_only_a_plain_no_means_not_revoked(learner, tmp_path, revoked):
    keys = joined(learner, tmp_path / "robot")
    assert learner.role(keys.pair.public)[1] == "connect"
    file = learner.folder / "allowed" / "left.json"
    file.write_text(file.read_text().replace('"revoked": false', f'"revoked": {revoked}'))
    assert learner.role(keys.pair.public)[1] == ""


def test_secrets_are_in_no_text_of_the_keys(learner, tmp_path, caplog, capsys, port):
    keys = invited(learner, tmp_path / "robot", port=port)
    invitation = learner.invite("right", [HERE], port)
    assert invitation.ticket not in repr(invitation)
    caplog.set_level(logging.DEBUG)
    with serving(port, keys=learner), linked(port, keys=keys):
        pass
    texts = " ".join([repr(keys), repr(learner), repr(learner.pair), caplog.text, *capsys.readouterr()])
    for secret in (learner.pair.secret, keys.pair.secret, keys.ticket.secret, invitation.ticket):
        assert secret not in texts


def test_keys_for_a_learner_are_found_by_where_it_was(tmp_path):
    robot = tmp_path / "robot"
    assert ClientKeys.find(robot, HERE) is None
    for i, host in enumerate(["10.9.8.7", "gpu-b", "10.9.8.6"]):
        keys, _ = ServerKeys.ensure(tmp_path / f"learner{i}")
        invitation = keys.invite(f"n{i}", [host], 5588)
        dataclasses.replace(ClientKeys.accept(robot, invitation), joined=float(i)).save()
    assert [ClientKeys.find(robot, h).name for h in ("10.9.8.7", "gpu-b", "10.9.8.6")] == ["n0", "n1", "n2"]
    assert ClientKeys.find(robot, "10.1.1.1").name == "n2"  # nothing is known of it: the newest


def test_a_line_that_is_not_whole_is_refused(learner):
    word = learner.invite("left", ["10.0.0.5"], 5588).encode()
    changed = [word[:i] + ("A" if word[i] != "A" else "B") + word[i + 1 :] for i in range(4, len(word) - 1)]
    for line in [*(word[:i] for i in range(4, len(word))), *changed]:
        with pytest.raises(ConfigError, match=naming("complete")):
            JoinToken.decode(line)
    for other in ("", "sc1", "xc1-abc", "ssh-ed25519 AAAA", "sc1-" + "A" * 5000):
        with pytest.raises(ConfigError, match=naming("serl-chunk keys add", "sc1-")):
            JoinToken.decode(other)


def test_two_processes_that_change_the_folder_lose_nothing(learner, tmp_path):
    """`keys add` while the learner enrols others: every name is there, each once."""
    ready = [invited(learner, tmp_path / f"robot{i}", f"n{i}") for i in range(8)]

    def work(i: int) -> None:
        keys = ServerKeys.open(learner.folder, learner._clock)
        assert keys.enrol(ready[i].ticket.public, ready[i].pair.public) == f"n{i}"
        keys.invite(f"m{i}", [], 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    states = {c.name: c.state(learner._clock()) for c in learner.clients()}
    assert states == {THIS_MACHINE: "joined"} | {
        f"{x}{i}": s for i in range(8) for x, s in (("n", "joined"), ("m", "invited"))
    }
    assert json.loads((learner.folder / "allowed" / "n0.json").read_text())["ticket"] is None


def test_a_folder_that_is_gone_revokes_no_key(learner, tmp_path, port):
    """An unmounted home, a renamed folder: nothing is known then, which is not the same as a no."""
    keys = joined(learner, tmp_path / "robot")
    with serving(port, keys=learner) as server, linked(port, keys=keys) as link:
        learner.folder.rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=naming(learner.folder, "gone")):
            learner.clients()
        time.sleep(1.2)  # twice the time between looks for revoked keys
        assert server.stats()["refused"] == 0
        (tmp_path / "elsewhere").rename(learner.folder)
        send_episode(link, "e", 3)
        assert link.flush(10)
