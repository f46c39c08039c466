"""Decodes the bytes of a raw terminal into names of keys, and drops everything that begins with Esc.

Arrows, function keys, Alt-keys, pastes, mouse reports and replies of the terminal start with the byte of the Esc key.
None of their bytes may count as a key, also where a network delivers them one at a time.
"""

from __future__ import annotations

import enum

ESCAPE_ALONE = 0.025  # seconds without a byte after which Esc was the key
SILENCE = 0.1  # seconds without a byte after which an unfinished sequence is given up
PASTE_SILENCE = 1.0  # the same of a paste, which a slow network may deliver with pauses
CTRL_C = "ctrl_c"
NAMED = {"space": b" ", "enter": b"\r\n", "backspace": b"\x7f\x08", "escape": b"\x1b"}
"""Names of keys that are no printable character; all others are named by it, in lower case."""

_ESC, _CANCEL, _INTERRUPT = 0x1B, (0x18, 0x1A), 0x03
_BY_BYTE = {byte: name for name, data in NAMED.items() for byte in data} | {_INTERRUPT: CTRL_C}
_CHARACTERS = {b"M": 3, b"t": 2, b"T": 6, b"[": 1}
"""Final byte of a CSI without parameters -> the characters that follow: mouse reports, keys of the Linux console."""


class _State(enum.Enum):
    GROUND = enum.auto()  # the next byte is a key
    ESCAPE = enum.auto()  # after Esc
    INTERMEDIATE = enum.auto()  # Esc and intermediate bytes (character sets): one final byte follows
    SINGLE = enum.auto()  # SS2, SS3, keypads: parameters, then one final byte
    CSI = enum.auto()  # Esc [: parameters, intermediate bytes, one final byte
    CHARACTERS = enum.auto()  # a number of characters follows
    STRING = enum.auto()  # DCS, OSC, SOS, PM, APC: up to ST or BEL


_AFTER_ESCAPE = {
    **dict.fromkeys(b"[", _State.CSI),
    **dict.fromkeys(b"NO?", _State.SINGLE),  # ? is the keypad of a VT52
    **dict.fromkeys(b"PX]^_", _State.STRING),
    **dict.fromkeys(range(0x20, 0x30), _State.INTERMEDIATE),
}


class Decoder:
    """Bytes to keys. Times are monotonic seconds, and must not decrease.

    A lone Esc is one after which `ESCAPE_ALONE` seconds bring no byte. Bytes that come later and go on with a sequence
    are dropped all the same, so that a sequence split by a network is a stop at worst.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._state, self._since = _State.GROUND, 0.0
        self._reported = False  # whether the Esc of state ESCAPE was a key already
        self._paste = False
        self._parameters = bytearray()
        self._left = 0  # of state CHARACTERS
        self._utf8 = 0  # bytes that the character begun in UTF-8 lacks
        self._c1 = False  # whether that character may be a control (U+0080 to U+009F)

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the keys of `data`, which arrived at `now`, after those of `poll`."""
        keys = self.poll(now)
        for byte in data:
            key = self._byte(byte)
            # What is pasted is no key, and neither is its Ctrl-C: a terminal may leave it in.
            if key is not None and not self._paste:
                keys.append(key)
        if data:
            self._since = now
        return keys

    def poll(self, now: float) -> list[str]:
        """Return `escape` where Esc turned out to be the key, and give up what was never finished."""
        keys = []
        silence = now - self._since
        if self._state is _State.ESCAPE and not self._reported and silence >= ESCAPE_ALONE:
            self._reported = True
            keys.append("escape")
        if self._state is not _State.GROUND and silence >= SILENCE:
            self._enter(_State.GROUND)
        if silence >= PASTE_SILENCE:
            self._paste = False
        return keys

    def wait(self, now: float) -> float | None:
        """Return the seconds until `poll` may return a key; None where only another byte can bring one."""
        if self._state is _State.ESCAPE and not self._reported:
            return max(0.0, self._since + ESCAPE_ALONE - now)
        return None

    def _byte(self, byte: int) -> str | None:
        if byte == _ESC:  # begins anew, wherever it comes
            self._enter(_State.ESCAPE)
            return None
        if byte == _INTERRUPT or byte in _CANCEL:
            self._enter(_State.GROUND)
            return _BY_BYTE.get(byte)
        if byte >= 0x80 and self._state is not _State.STRING:
            self._beyond_ascii(byte)
            return None
        if self._utf8 and self._state is _State.CHARACTERS:  # the byte before was a coordinate of its own
            self._character()
        self._utf8 = 0
        if self._state is _State.GROUND:
            return _BY_BYTE.get(byte) or (chr(byte).lower() if 0x20 < byte < 0x7F else None)
        self._continue(byte)
        return None

    def _enter(self, state: _State) -> None:
        self._state, self._reported, self._utf8 = state, False, 0
        self._parameters.clear()

    def _continue(self, byte: int) -> None:
        state = self._state
        if state is _State.ESCAPE:
            self._enter(_AFTER_ESCAPE.get(byte, _State.GROUND))  # most often Alt and a key
        elif state is _State.CHARACTERS:
            self._character()
        elif state is _State.STRING:
            if byte == 0x07:
                self._enter(_State.GROUND)
        elif byte < 0x20 or byte == 0x7F:
            pass  # a control within a sequence does not end it
        elif state is _State.INTERMEDIATE:
            if byte >= 0x30:
                self._enter(_State.GROUND)
        elif byte < 0x40:
            self._parameters.append(byte)
        elif state is _State.CSI:
            self._end_csi(byte)
        else:
            self._enter(_State.GROUND)

    def _end_csi(self, final: int) -> None:
        parameters = bytes(self._parameters)
        self._enter(_State.GROUND)
        if final == ord("~") and parameters in (b"200", b"201"):
            self._paste = parameters == b"200"
        elif not parameters and bytes([final]) in _CHARACTERS:
            self._state, self._left = _State.CHARACTERS, _CHARACTERS[bytes([final])]

    def _character(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._enter(_State.GROUND)

    def _beyond_ascii(self, byte: int) -> None:
        """A byte of a character in UTF-8, or a control of eight bits; neither is a key."""
        if self._utf8 and byte < 0xC0:
            self._utf8 -= 1
            control = self._c1 and byte < 0xA0
        else:
            self._utf8 = 0 if byte < 0xC2 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3 if byte < 0xF5 else 0
            self._c1 = byte == 0xC2
            control = byte < 0xA0
        if self._state is _State.CHARACTERS:  # coordinates of a mouse, in UTF-8 or as bytes
            if not self._utf8:
                self._character()
        elif control:  # begins anew, wherever it comes
            self._enter(_AFTER_ESCAPE.get(byte - 0x40, _State.GROUND))
        elif self._state is _State.ESCAPE:  # Alt and a character
            rest = self._utf8
            self._enter(_State.GROUND)
            self._utf8 = rest
