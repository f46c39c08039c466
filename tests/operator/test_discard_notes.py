"""A discard that is not final yet, where the actor is killed: what the screen showed is what the learner gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from ports import free_port
from transport_tools import LIMITS, Inbox, linked, serving

from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import Amend, End, Outcome

KILLED = """
import os, signal, sys, time
from pathlib import Path
from transport_tools import LIMITS, linked, send_episode
from serl_chunk.operator.labels import EpisodeLabels
from serl_chunk.transport.storage.spool import Spool
from serl_chunk.types import End, Outcome

folder, port, keys = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
context = linked(port, spools=lambda run: Spool(folder, LIMITS))
link = context.__enter__()
labels = EpisodeLabels(link.amend)
labels.notes = link
send_episode(link, "e0", 4)
labels.ended(End("e0", 4, None, True, False, Outcome.SUCCESS))
for key in keys:
    labels.discard_last() if key == "d" else labels.undo()
    while labels.shown not in ("discarded", "kept"):
        assert labels.shown.endswith("not on disk yet")
        time.sleep(0.001)
assert link.flush(10)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.system
@pytest.mark.parametrize(("keys", "discarded"), [("d", True), ("du", False), ("dud", True)])
def test_what_was_shown_when_the_actor_was_killed_holds(tmp_path, keys, discarded):
    inbox, port, folder = Inbox(), free_port(), tmp_path / "s"
    paths = os.pathsep.join(path for path in sys.path if path)
    with serving(port, on_record=inbox):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(port), keys], timeout=30, check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        assert killed.returncode == -signal.SIGKILL
        assert not [record for record in inbox.records if isinstance(record, Amend)], "it can be undone until then"
        for _ in range(2):  # the second actor finds nothing to do
            with linked(port, spools=lambda run: Spool(folder, LIMITS)) as link:
                assert link.flush(10)
    amends = [record for record in inbox.records if isinstance(record, Amend)]
    assert amends == [Amend("e0", discard=True)] * discarded
    assert not folder.exists()


class Notes:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.discard_noted = False

    def note_discard(self, episode_id: str) -> None:
        self.taken.append(episode_id)
        self.discard_noted = False


def test_the_screen_shows_a_discard_as_such_once_it_is_on_disk():
    labels, notes = EpisodeLabels([].append), Notes()
    labels.notes = notes
    labels.ended(End("a", 3, None, True, False, Outcome.SUCCESS))
    assert labels.shown == "success"
    for act, word in ((labels.discard_last, "discarded"), (labels.undo, "kept"), (labels.discard_last, "discarded")):
        act()
        assert labels.shown == f"{word}, not on disk yet"
        notes.discard_noted = True
        assert labels.shown == word
    labels.ended(End("b", 3, None, True, False, Outcome.FAILURE))
    assert (labels.shown, notes.taken) == ("failure", ["a", "", "a", ""])


def test_a_discard_within_an_episode_is_noted_at_its_end():
    amends: list[Amend] = []
    labels, notes = EpisodeLabels(amends.append), Notes()
    labels.notes = notes
    for name in ("a", "b"):
        labels.begin()
        labels.discard()
        labels.ended(End(name, 3, None, False, True, Outcome.UNKNOWN))
    assert (amends, notes.taken) == ([Amend("a", discard=True)], ["a", "", "b"])


def test_a_spool_whose_session_ended_with_a_note_is_kept_and_a_disk_that_takes_none_is_tried_again(tmp_path, caplog):
    """The learner has all of it, and the session ended by an error before the discard was final."""
    spool = Spool(tmp_path / "s", LIMITS)
    (tmp_path / "s" / "discard.json").mkdir()
    for _ in range(3):
        spool.note_discard("a")
    assert (spool.noted, caplog.text.count("discard.json cannot be written")) == ("", 1)
    (tmp_path / "s" / "discard.json").rmdir()
    spool.note_discard("a")
    session = spool.session
    spool.close()
    again = Spool(tmp_path / "s", LIMITS)
    assert (again.session, again.next, again.noted) == (session, 1, "")
    again.acknowledge(again.next)
    again.close()
    assert not (tmp_path / "s").exists()
