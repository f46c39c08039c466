"""A segment gives back what was put in, whatever is cut from it or flipped in it, and says what it could not."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from pathlib import Path

import pytest
from errors import naming
from hypothesis import example, given, settings
from hypothesis import strategies as st
from properties import examples

from serl_chunk.transport.storage import segment
from serl_chunk.transport.storage.journal import pack
from serl_chunk.transport.storage.segment import HEADER_BYTES, MARKER, Damage, Found
from serl_chunk.types import DataError

SALT = 0x0123456789ABCDEF
ENTRIES = [[b"first", b""], [], [b"\0" * 20], [MARKER * 3, b"x"], [b"last", bytes(range(30))]]
frames = st.binary(max_size=30) | st.sampled_from([MARKER, MARKER + bytes(24), b"\0" * 5000])
entries = st.lists(st.lists(frames, max_size=4), max_size=8)


def written(path: Path, contents, salt=SALT, first=0) -> list[int]:
    """Write a segment; returns the offset of each entry, and the file's size."""
    offsets = [HEADER_BYTES]
    with path.open("wb") as file:
        file.write(segment.header(salt))
        for number, entry in enumerate(contents, first):
            buffers, size = pack(number, entry, salt)
            file.writelines(buffers)
            offsets.append(offsets[-1] + size)
    return offsets


def content(found: Found) -> list[bytes]:
    return [bytes(f) for f in found.frames]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.journal"


@given(entries, st.integers(0, 2**64 - 1))
@example([[b""] * segment.MAX_FRAMES, [b"y" * 3_000_000, b"z"]], 2**64 - 1)
@settings(max_examples=examples(50), deadline=None)
def test_what_goes_in_comes_out(contents, salt):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        offsets = written(path, contents, salt, first=7)
        found = list(segment.scan(path))
        assert [(f.number, content(f)) for f in found] == list(enumerate(contents, 7))
        assert [f.offset for f in found] == offsets[:-1]
        assert path.stat().st_size == offsets[-1]
        assert all(m.readonly for f in found for m in f.frames)


@pytest.mark.parametrize("salt", [SALT + 1, 0])
def test_entries_inside_of_frames_are_none(path, salt):
    """Neither where the entry around them is damaged nor where it is torn; only the file's salt makes an entry."""
    forged = b"".join(pack(1, [b"forged"], salt)[0])
    offsets = written(path, [[b"a"], [b"-" * 9, forged, forged], [b"c"]])
    data = bytearray(path.read_bytes())
    data[offsets[1] + 9] ^= 4
    path.write_bytes(data)
    found = list(segment.scan(path))
    assert [f.number for f in found if isinstance(f, Found)] == [0, 2]
    path.write_bytes(data[: offsets[2] - 1])
    assert [type(f) for f in segment.scan(path)] == [Found, Damage]


@given(st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_random_bytes_never_become_entries(seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        written(path, ENTRIES)
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 30)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at:at] = rng.randbytes(rng.randrange(40))
                case 2:
                    del data[at : at + rng.randrange(40)]
                case 3:
                    data[at:at] = MARKER
            data = data or bytearray(b"\0")
        path.write_bytes(data)
        try:
            found = list(segment.scan(path))
        except DataError:  # of one copy of the header nothing is left, of the other the format is changed
            assert not data.startswith(segment.MAGIC)
            return
        for f in found:
            if isinstance(f, Found):
                assert content(f) == ENTRIES[f.number]
        # Entries and damage cover the file, without overlap.
        at = 0 if not found or found[0].offset == 0 else HEADER_BYTES
        for f in found:
            assert f.offset == at
            at += f.size
        assert at == len(data) or (not found and len(data) == HEADER_BYTES)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_sector_that_cannot_be_read_costs_the_entries_in_it(path, monkeypatch, bad):
    offsets = written(path, [[bytes([i]) * 3000] for i in range(1, 9)])
    real = os.pread

    def failing(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", lambda *args: failing() if args[2] // 4096 == bad else real(*args))
    monkeypatch.setattr(Path, "read_bytes", failing)
    found = list(segment.scan(path))
    hit = {i for i in range(8) if offsets[i] < 4096 * (bad + 1) and offsets[i + 1] > 4096 * bad}
    assert len(hit) <= 3
    assert bool(hit) == (bad > 0)  # the first sector holds nothing but a copy of the salt
    assert [f.number for f in found if isinstance(f, Found)] == [i for i in range(8) if i not in hit]
    assert any(isinstance(f, Damage) for f in found)
    monkeypatch.undo()
    with pytest.raises(DataError, match=naming(path.with_name("gone"), os.strerror(errno.ENOENT))):
        list(segment.scan(path.with_name("gone")))


def test_damage_says_which_numbers_it_may_have_had(path):
    offsets = written(path, ENTRIES)
    data = bytearray(path.read_bytes())
    for entry, to in ((1, 2), (2, 3)):  # the markers of one entry and of two: nothing says where these end
        data[offsets[entry]] ^= 1
        path.write_bytes(data)
        (damage,) = [f for f in segment.scan(path) if isinstance(f, Damage)]
        assert damage == Damage(offsets[1], offsets[to] - offsets[1], False, (1, to))
