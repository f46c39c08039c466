"""Keys out of the bytes of a terminal: none out of anything that begins with Esc, however it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serl_chunk.console.keys import PASTE_SILENCE, SILENCE, Decoder

SPLIT = 0.04  # seconds between two bytes that a network has parted
PAUSE = 2 * SILENCE  # between what a human types
KEYS = {b" ": "space", b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace", b"\x03": "ctrl_c"}
KEYS |= {bytes([b]): chr(b).lower() for b in range(0x21, 0x7F)}


def terminfo() -> list[tuple[str, bytes]]:
    lines = (Path(__file__).parent / "xterm_sequences.txt").read_text().splitlines()
    rows = (line.split(" ", 1) for line in lines if not line.startswith("#"))
    return [(name, text.replace("\\E", "\x1b").replace("^G", "\x07").encode()) for name, text in rows]


PASTE, PASTE_END = b"\x1b[200~", b"\x1b[201~"
XTERM = terminfo()
OTHERS = [
    *(b"\x1b[M" + report for report in (b" s1", b"#cq", b" \xc4\x80s", b" \xc3\x85\xc3\x86", b"\x60\xc5s", b" \xe5s")),
    *(b"\x1b[" + report for report in (b"<0;10;1M", b"<35;1;1m", b"32;10;11M", b"tsf", b"Tsf10cq")),
    *(b"\x1b[" + key for key in (b"[A", b"[C", b"1;5A", b"27;5;115~", b"115;1:3u", b"3$", b"3^", b"I", b"O", b"a")),
    *(b"\x1bO" + key for key in (b"s", b"q", b"5P", b"M", b" ", b"a")),
    *(b"\x1b]" + reply for reply in (b"11;rgb:0000/0101/ffff\x07", b"52;c;c2YgcTEwIAo=\x1b\\", b"0;q f s\x1b\\")),
    *(b"\x1bP" + reply for reply in (b"1$r0;1;4 q\x1b\\", b"1+r6b73=1b4f41\x1b\\", b">|XTerm(370)\x1b\\")),
    *(b"\x1b" + string for string in (b"_Gi=31;OK\x1b\\", b"^secret\x1b\\", b"Xsfq\x1b\\")),
    *(b"\x1b" + bytes([key]) for key in [*range(0x20, 0x5B), *range(0x5C, 0x80), 0x0D, 0x09, 0x08]),  # Alt and a key
    *(b"\x1b" + "é€😀"[i].encode() for i in range(3)),
    *(b"\x1b\x1b" + key for key in (b"[A", b"OA", b"[3~")),  # Alt-arrows of rxvt
    b"\x1b?s",
    b"\x1b(0",
    *(PASTE + content + PASTE_END for content in (b"", b"sfq10cp \r\x7furg", b"c\r", b"\x1b[A\x1bOs\x1b[M", b"\x03")),
    *(PASTE + content.encode() + PASTE_END for content in ("säße", "\x1b]0;s", "\x1b")),
    *(control + rest for control in (b"\x9b", b"\xc2\x9b") for rest in (b"1;5A", b"3~", b"Mqs1")),
    *(control + b"s" for control in (b"\x8f", b"\xc2\x8f")),
    b"\x9d0;sq\x07",
]
SEQUENCES = [data for _, data in XTERM] + OTHERS


def decode(pieces: Iterable[tuple[float, bytes]], *, polls: bool = True) -> list[str]:
    """Keys of (gap before it in seconds, bytes); with `polls` the decoder is polled as `wait` requests."""
    decoder, now, keys = Decoder(), 100.0, []
    for gap, data in pieces:
        wait = decoder.wait(now)
        if polls and wait is not None and wait < gap:
            keys += decoder.poll(now + wait)
        now += gap
        keys += decoder.feed(data, now)
    if polls and (wait := decoder.wait(now)) is not None:
        keys += decoder.poll(now + wait)
    return keys


def cut(data: bytes, gaps: Sequence[float]) -> list[tuple[float, bytes]]:
    return [(gap, bytes([byte])) for gap, byte in zip((0.0, *gaps), data, strict=True)]


def pause_after(data: bytes) -> float:
    return PASTE_SILENCE if PASTE in data else PAUSE


@pytest.mark.parametrize("polls", [True, False])
def test_no_sequence_is_a_key_whole_or_in_pieces(polls):
    for data in SEQUENCES:
        whole = decode([(0.0, data)], polls=polls)
        assert whole == (["ctrl_c"] if data == b"\x1b\x03" else []), data
        for at in range(1, len(data)):
            assert decode([(0.0, data[:at]), (0.0, data[at:])], polls=polls) == [], (data, at)
            assert set(decode([(0.0, data[:at]), (SPLIT, data[at:])], polls=polls)) <= {"escape"}, (data, at)
        assert set(decode(cut(data, [SPLIT] * (len(data) - 1)), polls=polls)) <= {"escape"}, data
        assert decode(cut(data, [0.0] * (len(data) - 1)), polls=polls) == [], data


@given(st.data())
def test_no_sequence_is_a_key_in_any_pieces(data):
    sequences = data.draw(st.lists(st.sampled_from(SEQUENCES), min_size=1, max_size=4))
    stream = b"".join(sequences)
    # A sequence that is a prefix of others may go on with the next one's bytes, as long as those begin with Esc.
    gaps = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.001, 0.024, 0.026, SPLIT, 0.09]), min_size=len(stream) - 1, max_size=len(stream) - 1
        )
    )
    assert set(decode(cut(stream, gaps), polls=data.draw(st.booleans()))) <= {"escape"}


@given(st.data())
def test_keys_between_sequences_are_all_there(data):
    events = data.draw(st.lists(st.one_of(st.sampled_from(SEQUENCES), st.sampled_from(sorted(KEYS)))))
    pieces, gap = [], PAUSE
    for event in events:
        pieces.append((gap, event))
        gap = pause_after(event)
    assert decode(pieces) == [KEYS[e] for e in events if e in KEYS]


@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_leave_a_decoder_that_works(data, polls):
    decoder = Decoder()
    decoder.feed(data, 0.0)
    assert decoder.feed(b"x", PASTE_SILENCE)[-1:] == ["x"]


@given(st.binary().filter(lambda data: PASTE_END not in data), st.data())
def test_a_paste_is_dropped_whole(content, data):
    stream = PASTE + content + PASTE_END
    gaps = [data.draw(st.sampled_from([0.0, SPLIT])) for _ in stream[1:]]
    assert set(decode(cut(stream, gaps))) <= {"escape"}
    assert decode([(0.0, stream), (0.0, b"s")]) == ["s"]


UNFINISHED = (b"\x1b[", b"\x1b[1;5", b"\x1bO", b"\x1b]0;ti", b"\x1bP", b"\x1b[M ", b"\x1b(", b"\x1b[M", b"\x1b]0;title")
ENDED = set(UNFINISHED) - {b"\x1b(", b"\x1b[M "}
TIMED = [
    *(([(0.0, data)], [name]) for data, name in KEYS.items()),
    ([(0.0, b"X")], ["x"]),  # caps lock
    *(([(0.0, bytes([byte]))], []) for byte in (0x00, 0x09, 0x11, 0x13, 0x1A, 0x1C)),  # Ctrl-Q, -S, -Z, -\\ among them
    ([(0.0, b"\x1b"), (0.5, b"\x1b"), (0.033, b"\x1b")], ["escape"] * 3),
    ([(0.0, b"\x1b\x1b\x1b")], ["escape"]),
    ([(0.0, b"\x1b"), (SPLIT, b"s")], ["escape"]),
    ([(0.0, b"\x1b"), (PAUSE, b"s")], ["escape", "s"]),
    *(([(0.0, begun), (PAUSE, b"x")], ["x"]) for begun in UNFINISHED),
    *(([(0.0, begun), (0.0, b"\x03")], ["ctrl_c"]) for begun in ENDED),
    *(([(0.0, begun), (0.0, b"\x1b")], ["escape"]) for begun in ENDED),
    # A paste without end hides keys for its silence, but never Esc.
    ([(0.0, PASTE + b"s"), (0.5 * PASTE_SILENCE, b"x"), (PASTE_SILENCE, b"x")], ["x"]),
    ([(0.0, PASTE + b"s"), (SILENCE, b"\x1b")], ["escape"]),
]


@pytest.mark.parametrize(("pieces", "keys"), TIMED)
def test_each_key_has_a_name_and_what_was_begun_hides_none_for_long(pieces, keys):
    assert decode(pieces) == keys
