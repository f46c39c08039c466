"""The learner's side of the keys: libzmq asks here about every key (ZAP), and what a peer may say depends on its own.

One thread, the server's control thread: a handshake waits for it as a heartbeat does. libzmq names the key in every
message that comes over a connection ("User-Id"), and refuses every connection while no thread answers it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from serl_chunk.transport.security.keys import ServerKeys, add_line, fingerprint, to_text
from serl_chunk.transport.sockets import Counters
from serl_chunk.transport.wire import codec, handshake, message_types
from serl_chunk.transport.wire.codec import Frame, Message, WireError
from serl_chunk.types import ConfigError

log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's RFC 27
_DOMAIN = b"serl-chunk"
_WITHOUT_TOKEN = (message_types.WHO, handshake.HELLO, message_types.INSPECT, message_types.ECHO)
_TO_JOIN = "this key is for joining only: run `serl-chunk keys join` with the line that it came in"


class Authenticator:
    """Lets in who holds a key of `keys`. Make it before the first of the context's sockets is bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ServerKeys,
        counters: Counters,
        complain: Callable[[str, str, str], None],
        port: int,
    ) -> None:
        self._keys, self._counters, self._complain, self._port = keys, counters, complain, port
        self._failed = ""  # why the key folder could not be read last
        self.socket = context.socket(zmq.ROUTER)  # to poll for reading
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def secure(self, s: zmq.Socket[bytes]) -> None:
        """Make a socket demand a key; call it before the socket is bound."""
        s.curve_server = True
        s.curve_secretkey = self._keys.pair.secret.encode()
        s.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        s.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no peer is let in where no thread answers

    def serve(self) -> None:
        """Answer libzmq's questions."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _, _, _, request, _, address, _, mechanism, *credentials = frames
            public = to_text(credentials[0]) if mechanism == b"CURVE" and credentials else ""
            status = self._judge(public, address.decode(errors="replace"))
            user = public.encode() if status == b"200" else b""
            self.socket.send_multipart([*frames[:3], request, status, b"", user, b""])

    def _judge(self, public: str, address: str) -> bytes:
        """The status of a key: 200 welcome, 400 not, 500 unknown now."""
        try:
            client = self._keys.known(public)
            self._failed = ""
            if self._keys.may_connect(public) or self._keys.may_join(public):
                return b"200"
        except ConfigError as e:
            self._cannot(e)
            return b"500"
        self._counters["keys_refused"] += 1
        address = address.removeprefix("::ffff:")
        if client is None:
            line = add_line(self._keys.folder, self._port)
            what = f"unknown key: {fingerprint(public)}. If this is a robot of yours, run `{line}` here"
            self._complain("control", address, what)
        elif client.revoked:
            self._complain("control", address, f"revoked key of {client.name}: it is let in no more")
        else:
            line = add_line(self._keys.folder, self._port, client.name)
            self._complain("control", address, f"expired line of {client.name}: `{line}` prints another")
        return b"400"

    def _cannot(self, error: ConfigError) -> None:
        if str(error) != self._failed:
            self._failed = str(error)
            log.error("keys cannot be checked, so no new peer is let in: %s", error)

    def gone(self, public: str) -> bool:
        """Whether a key that was let in would not be now."""
        try:
            return not self._keys.may_connect(public)
        except ConfigError as e:
            self._cannot(e)
            return False  # it was right when it came; a folder that cannot be read says nothing about it

    def name_of(self, public: str) -> str:
        """What the key is called here."""
        try:
            client = self._keys.known(public)
        except ConfigError:
            client = None
        return "?" if client is None else client.name

    def revoked(self, public: str) -> str:
        """What the holder of a key that is gone is told."""
        return (
            f"the key {self.name_of(public)!r} ({fingerprint(public)}) of this machine was revoked. If that was a "
            "mistake, run `serl-chunk keys add NAME` on the learner's machine, and paste the line it prints here"
        )

    def answer(self, message: Message, public: str, peer: str) -> list[Frame] | None:
        """The answer to a control message that is about keys, or that this key may not send; None for all others.

        Raises WireError.
        """
        if message.kind == message_types.ENROL:
            return self._enrol(message, public, peer)
        if message.kind in _WITHOUT_TOKEN and self.gone(public):  # the rest needs what a hello is given
            return handshake.refusal(_TO_JOIN if self._is_ticket(public) else self.revoked(public))
        return None

    def _is_ticket(self, public: str) -> bool:
        try:
            return self._keys.may_join(public) is not None
        except ConfigError:
            return False

    def _enrol(self, message: Message, ticket: str, peer: str) -> list[Frame]:
        key = codec.field(message.header, "public", bytes)
        if len(key) != 32:
            raise WireError("a public key has 32 bytes")
        public = to_text(key)
        try:
            name = self._keys.enrol(ticket, public)
        except ConfigError as e:
            self._cannot(e)
            return handshake.refusal(f"the learner cannot write its key folder now: {e}", retry=True)
        if name is None:
            return handshake.refusal(
                "that line was used already, or is older than ten minutes: `serl-chunk keys add NAME` on the learner's "
                "machine prints another"
            )
        log.warning("%s joined from %s with the key %s", name, peer, fingerprint(public))
        return codec.encode(message_types.ENROLLED, {"name": name})


def user_of(frames: list[Any]) -> str:
    """The public key that a received message came with; empty where its socket demands none."""
    try:
        return str(frames[-1].get("User-Id")) if frames else ""
    except zmq.ZMQError:
        return ""
