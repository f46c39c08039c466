"""Files of keys: who may connect, errors of damaged files, and the line for a robot PC."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from errors import naming
from key_tools import HERE, invited, joined
from transport_tools import eventually, linked, send_episode, serving

from serl_chunk.transport.security.keys import THIS_MACHINE, ClientKeys, JoinToken
from serl_chunk.transport.security.server import ServerKeys
from serl_chunk.transport.wire.handshake import UnreachableError
from serl_chunk.types import ConfigError

# Files.


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


# The line.


def test_a_line_says_what_was_put_in(learner):
    invitation = learner.invite("left-cell.2", ["10.0.0.5", "gpu", "fe80::1"], 7000)
    word = invitation.encode()
    assert JoinToken.decode(word) == invitation
    assert JoinToken.decode(f"  {word[:40]}\n{word[40:]} ") == invitation  # wrapped by a chat
    assert set(word) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")  # no shell minds


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


def test_keys_are_found_under_addresses_that_were_learnt_later(learner, tmp_path):
    keys = joined(learner, tmp_path / "robot")
    assert keys.at([HERE]) == keys
    other = joined(ServerKeys.ensure(tmp_path / "other")[0], tmp_path / "robot", "second")
    assert ClientKeys.find(tmp_path / "robot", "10.9.8.7").name == other.name  # the newest
    keys.at(["10.9.8.7"])
    assert ClientKeys.find(tmp_path / "robot", "10.9.8.7").name == keys.name
    assert ClientKeys.find(tmp_path / "robot", "a..b").name == other.name  # no name is like that
