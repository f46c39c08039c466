"""Key files and keys on sockets, as a robot server uses them. The learner's are tested in tests/transport/security."""

from __future__ import annotations

import json
import time

import pytest
import zmq
from errors import naming

from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.wire.curve import Pair, check_folder, key_of, read, require_keys, to_bytes, to_text, use_keys


def test_a_key_file_is_for_its_owner_alone(tmp_path):
    pair, file = Pair.new(), tmp_path / "server.json"
    assert Pair.of_secret(pair.secret) == pair
    assert to_text(to_bytes(pair.public)) == pair.public
    assert pair.secret not in repr(pair)
    file.write_text(json.dumps({"secret": pair.secret, "public": "short"}))
    file.chmod(0o600)
    assert key_of(file, read(file), "secret") == pair.secret
    with pytest.raises(ConfigError, match=naming(file, "'public'")):
        key_of(file, read(file), "public")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=naming(f"chmod 600 {file}")):
        read(file)
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=naming(f"chmod 700 {tmp_path}")):
        check_folder(tmp_path)


def admit(zap: zmq.Socket[bytes], keys: set[str]) -> None:
    """Answer the requests to the authenticator that are there, of ZeroMQ's RFC 27."""
    while zap.poll(0):
        *envelope, version, number, _, _, _, _, key = zap.recv_multipart()
        status = b"200" if to_text(key) in keys else b"400"
        zap.send_multipart([*envelope, version, number, status, b"", to_text(key).encode(), b""])


def arrives(server: Pair, believed: str, own: Pair, keys: set[str] | None) -> bool:
    """Whether a message of a peer with `own`, which takes the server for `believed`, arrives.

    Args:
        keys: those that the authenticator admits; None for no authenticator.
    """
    context = zmq.Context()
    try:
        zap, router, dealer = (context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.DEALER))
        if keys is not None:
            zap.bind("inproc://zeromq.zap.01")
        require_keys(router, server)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        use_keys(dealer, believed, own)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        end = time.monotonic() + (5.0 if keys and own.public in keys and believed == server.public else 0.4)
        while time.monotonic() < end:
            if keys is not None:
                admit(zap, keys)
            if router.poll(10):
                assert router.recv_multipart(copy=False)[-1].get("User-Id") == own.public
                return True
        return False
    finally:
        context.destroy(linger=0)


def test_only_admitted_keys_connect_and_only_to_the_server_they_trust():
    server, admitted, stranger = Pair.new(), Pair.new(), Pair.new()
    assert arrives(server, server.public, admitted, {admitted.public})
    assert not arrives(server, server.public, stranger, {admitted.public})
    assert not arrives(server, Pair.new().public, admitted, {admitted.public})
    assert not arrives(server, server.public, admitted, None)
