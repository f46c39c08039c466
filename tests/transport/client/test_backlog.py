"""What an actor says about records that the learner does not have yet."""

from __future__ import annotations

import dataclasses
import re

import pytest
from errors import naming
from ports import free_port
from transport_tools import CONFIG, Inbox, eventually, linked, send_episode, serving

from serl_chunk.transport.client.link import backlog_line
from serl_chunk.types import Begin, DataError

MIB = 1 << 20
QUIET = {"kept": 5 * MIB, "limit": 1000 * MIB, "episode": 100 * MIB, "away": 0.0, "stalled": ""}


@pytest.mark.parametrize(("changes", "begun", "words"), [
    ({"kept": 100 * MIB}, True, ""), ({"kept": 101 * MIB}, True, "spool 101 MiB"),  # a whole episode behind
    ({"kept": 17 * MIB, "episode": MIB, "limit": 100 * MIB}, True, "spool 17 MiB"),
    ({"away": 12.4, "kept": 34 * MIB}, True, "learner away for 12 s, spool 34 MiB"),
    ({"stalled": "its disk is full"}, True, "the learner takes nothing now: its disk is full, spool 5.0 MiB"),
    ({"stalled": "its disk is full", "away": 0.5}, True, ""),  # what it said before it went
    ({"kept": 901 * MIB}, False, "spool 901 MiB, holding until there is room"),
    ({"kept": 1229 * MIB, "limit": 1300 * MIB}, True, "spool 1.2 GiB, holding after this episode"),
])  # fmt: skip
def test_the_line(changes, begun, words):
    assert backlog_line(**QUIET | changes, begun=begun) == words


def test_a_link_says_how_long_the_learner_is_away_and_what_is_kept(monkeypatch):
    inbox, late, port = Inbox(), Inbox(), free_port()
    monkeypatch.setattr("serl_chunk.transport.client.link.AWAY", 0.2)
    config = dataclasses.replace(CONFIG, spool_bytes=28_000)
    with linked(port, connect=False, config=config, largest_episode_bytes=12_000) as link:
        with serving(port, config=config, on_record=inbox):
            link.connect(10)
            send_episode(link, "e", 5)
            assert link.flush(10)
            assert link.backlog(begun=True) == ""
            assert link.stats()["away_s"] == 0
        eventually(lambda: link.stats()["away_s"] > 0.2)
        send_episode(link, "f", 20)
        line = link.backlog(begun=True)
        assert re.match(r"learner away for \d+ s, spool .* KiB, holding after this episode\Z", line), line
        assert link.can_begin()[0]  # this one fits
        send_episode(link, "g", 80)
        assert link.backlog(begun=False).endswith("holding until there is room")
        may, why = link.can_begin()
        assert (may, "transport.spool_bytes=28000" in why) == (False, True)
        with serving(port, config=config, on_record=late):
            assert link.flush(10)
            assert link.backlog(begun=True) == ""
            assert link.can_begin() == (True, "")
        assert late.episodes()["g"] == [*range(80)]


def test_a_link_without_spools_takes_no_records_and_writes_no_files(tmp_path, monkeypatch, port):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.rglob("*"))
    with serving(port) as server, linked(port, spools=None) as link:
        (session,) = server.sessions()
        with pytest.raises(DataError, match=naming("spools", "episode", "e")):
            link.begin(Begin("e"))
        assert link.can_begin() == (True, "")
        assert link.flush(1)
        assert session.live
        assert {p for p in tmp_path.rglob("*") if p.is_file()} == {p for p in before if p.is_file()}
    eventually(lambda: not list(tmp_path.rglob("*.journal")))
