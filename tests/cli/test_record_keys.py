"""Every key in every state of a recording: which episodes it leaves, and what the robot was requested."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from actor_helpers import HumanOnTicks, make_config
from full_disk import full_disk
from operator_script import ACTING, USUAL, Desk, Press, Waiting

from serl_chunk.cli import record
from serl_chunk.cli.record import run_record
from serl_chunk.console.bindings import Action, ActorState
from serl_chunk.data.formats import hdf5_writer
from serl_chunk.data.formats.hdf5 import read_episode
from serl_chunk.operator.operator import Operator
from serl_chunk.recording import recording
from serl_chunk.recording import recording as full_disk_module
from serl_chunk.types import DataError, Outcome

POLLING = full_disk_module.polling
BEFORE = {  # state -> the keys that lead there
    "ACTING": [],
    "HOLD": [Press(Action.HOLD)],
    "RESET": [Press(Action.SUCCESS)],
    "STOPPED": [Press(Action.STOP)],
    "WAITING": [],
}


class Lab:
    def __init__(self, folder, monkeypatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.env = Waiting(length=400)

    def record(self, script, n=2, *, keep="successes", policy="human", out=True, **options) -> int:
        desks: list[Desk] = []
        self._patch.setattr(record, "make_env", lambda robot: self.env)
        self._patch.setattr(record, "spec_of", lambda config: self.env.robot_spec)
        self._patch.setattr(record, "open_human", lambda *a: HumanOnTicks(frozenset(range(1000))))
        self._patch.setattr(record, "console_of", Desk.opening(script, desks, **options))
        try:
            folder = str(self.folder) if out else None
            return run_record(make_config(), n, folder, policy=policy, noise=None, cameras=(), keep=keep)
        except KeyboardInterrupt:
            return 130
        finally:
            self.desk = desks[0] if desks else None

    def kept(self) -> list[tuple[int, int]]:
        found = [read_episode(file) for file in sorted(self.folder.glob("*.hdf5"))]
        return [(int(e.begin.init_state.removeprefix("seed-")), e.steps.n) for e in found]

    def aside(self) -> list[str]:
        return sorted(file.name for file in self.folder.glob("*.undone*"))


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """One whose disk is so fast that no key comes while it writes."""
    for module in (recording, full_disk_module):
        monkeypatch.setattr(module, "polling", lambda work, operator, what, idle: work())
    return Lab(tmp_path / "d", monkeypatch)


class Left(NamedTuple):
    """What a recording of two demonstrations leaves after a key, and then what an operator usually does."""

    kept: list[tuple[int, int]]  # start, ticks
    seeds: list[int]  # of all resets
    sent: Sequence[str] = ()  # to the robot's server
    aside: int = 0
    status: int = 0


UNTOUCHED, OTHERS, CLEARED = [(0, 12), (1, 8)], [(1, 8), (2, 8)], ("stop", "clear", "go")
TABLE: dict[str, dict[Action, Left]] = {  # state -> what a key with an effect leaves
    "ACTING": {
        Action.HOLD: Left([(0, 117), (1, 8)], [0, 1]),
        Action.STOP: Left(OTHERS, [0, 1, 2], CLEARED),
        Action.SUCCESS: Left([(0, 4), (1, 8)], [0, 1]),
        Action.FAILURE: Left(OTHERS, [0, 1, 2]),
        Action.DISCARD: Left(OTHERS, [0, 1, 2]),
        Action.QUIT: Left([(0, 12)], [0], ("park",)),
        Action.END: Left([], [0], ("stop",), status=130),
    },
    "HOLD": {
        Action.GO: Left([(0, 117), (1, 8)], [0, 1]),
        Action.STOP: Left(OTHERS, [0, 1, 2], CLEARED),
        Action.SUCCESS: Left([(0, 8), (1, 8)], [0, 1]),
        Action.FAILURE: Left(OTHERS, [0, 1, 2]),
        Action.DISCARD: Left(OTHERS, [0, 1, 2]),
        Action.RESET: Left([(0, 8), (1, 8)], [0, 0, 1]),
        Action.RESET_NEW: Left([(0, 8), (1, 8)], [0, 0, 1]),
        Action.QUIT: Left([(0, 121)], [0], ("park",)),
        Action.END: Left([], [0], ("stop",), status=130),
    },
    "RESET": {  # of the second episode
        Action.STOP: Left([(0, 4), (1, 8)], [0, 1], CLEARED),
        Action.DISCARD: Left(OTHERS, [0, 1, 2], aside=1),
        Action.UNDO: Left(OTHERS, [0, 1, 2], aside=1),
        Action.QUIT: Left([(0, 4)], [0], ("park",)),
        Action.END: Left([(0, 4)], [0], ("stop",), status=130),
    },
    "STOPPED": {
        Action.STOP: Left(OTHERS, [0, 1, 2], ("stop", *CLEARED)),
        Action.QUIT: Left([], [0], ("stop",)),
        Action.END: Left([], [0], ("stop", "stop"), status=130),
    },
    "WAITING": {  # for the scene
        Action.STOP: Left([(0, 8), (1, 8)], [0, 1], CLEARED),
        Action.QUIT: Left([], [], ("park",)),
        Action.END: Left([], [], ("stop",), status=130),
    },
}


@pytest.mark.parametrize(("state", "action"), [(s, a) for s, table in TABLE.items() for a in table])
def test_each_key_with_an_effect(lab, state, action):
    words = ACTING if state == "ACTING" else (ActorState(state),)
    status = lab.record([*BEFORE[state], Press(action, words)], ready="first" if state == "WAITING" else "")
    assert lab.desk.console.script == []
    assert Left(lab.kept(), lab.env.seeds, lab.desk.sent, len(lab.aside()), status) == TABLE[state][action]


class Commanded(Waiting):
    """Waiting, with the commands that it got."""

    def __init__(self) -> None:
        super().__init__(length=400)
        self.commands: list[list[float]] = []

    def step(self, action):
        self.commands.append(action.tolist())
        return super().step(action)


ENDING = {**USUAL, ActorState.HUMAN: [*[Press(Action.SUCCESS, after=7)] * 3, Press(Action.QUIT)]}


@pytest.mark.parametrize(("state", "action"), [(s, a) for s, table in TABLE.items() for a in table])
def test_teleoperation_follows_each_key_as_a_recording_does_and_keeps_nothing(lab, state, action, caplog):
    caplog.set_level("INFO", "serl_chunk")
    done = []
    for out, n in ((True, 99), (False, math.inf)):
        lab.env = Commanded()
        words = ACTING if state == "ACTING" else (ActorState(state),)
        script = [*BEFORE[state], Press(action, words)]
        status = lab.record(script, n, out=out, usual=ENDING, ready="first" if state == "WAITING" else "")
        assert lab.desk.console.script == []
        done.append((status, lab.env.seeds, lab.desk.sent, lab.desk.words(), lab.env.commands))
        if out:
            shutil.rmtree(lab.folder)
    recorded, driven = done
    assert driven == recorded
    assert not lab.folder.exists()
    assert "driven, nothing recorded" in caplog.text


HOLD, RESET = (ActorState.HOLD,), (ActorState.RESET,)
DISCARDED = [Press(Action.SUCCESS), Press(Action.DISCARD, RESET)]
ASIDE = "episode_0.hdf5.undone"


@pytest.mark.parametrize(
    ("script", "sent", "kept", "aside"),
    [
        ([Press(Action.HOLD), Press(Action.PARK, HOLD), Press(Action.YES, HOLD)], ("park",), OTHERS, []),
        ([*DISCARDED, Press(Action.UNDO)], (), [(0, 4), (1, 12)], []),  # undone in the next episode
        ([*DISCARDED, Press(Action.QUIT, RESET)], ("park",), [], [ASIDE]),  # final where the recording ends too
    ],
    ids=["parking is confirmed", "undone", "final"],
)
def test_several_keys_together(lab, script, sent, kept, aside):
    lab.record(script)
    assert (lab.desk.sent, lab.kept(), lab.aside()) == (sent, kept, aside)


def test_failures_are_kept_where_all_are_and_are_no_demonstrations(lab, caplog):
    caplog.set_level("INFO", "serl_chunk")
    assert lab.record([Press(Action.FAILURE)], keep="all") == 0
    outcomes = [read_episode(file).end.outcome for file in sorted(lab.folder.glob("*.hdf5"))]
    assert outcomes == [Outcome.FAILURE, Outcome.SUCCESS, Outcome.SUCCESS]
    assert "2 demonstrations recorded in 3 episodes, 8 ticks on average, human 100 %, 1 failure kept" in caplog.text
    assert lab.record([], 2, keep="all") == 0
    assert "already holds 2 demonstrations" in caplog.text


def test_a_demonstration_is_on_the_disk_once_it_has_ended_and_a_discard_is_final_after_the_next(lab):
    """So that a killed process loses none, and has discarded what was discarded."""
    seen: list[list[str]] = []  # the folder at each tick

    class Seen(Waiting):
        def step(self, action):
            seen.append(sorted(file.name for file in lab.folder.iterdir()))
            return super().step(action)

    lab.env = Seen(length=400)
    lab.record(DISCARDED)
    states = [list(each) for k, each in enumerate(seen) if k == 0 or each != seen[k - 1]]
    assert states == [[], [ASIDE], [ASIDE, "episode_1.hdf5"]]
    assert lab.kept() == OTHERS


def test_a_label_can_be_undone_once_and_nothing_is_overwritten(lab, caplog):
    caplog.set_level("INFO", "serl_chunk")
    lab.folder.mkdir()
    (lab.folder / ASIDE).write_text("an earlier one")
    lab.record([Press(Action.SUCCESS), Press(Action.UNDO, RESET), Press(Action.UNDO, RESET)])
    assert (lab.aside(), lab.kept()) == ([ASIDE, f"{ASIDE}1"], OTHERS)
    assert (lab.folder / ASIDE).read_text() == "an earlier one"
    assert f"episode_0.hdf5 is now {ASIDE}1" in caplog.text


def test_a_full_disk_delays_a_recording_which_ctrl_c_gives_up(lab, monkeypatch, caplog):
    disk = full_disk(monkeypatch, hdf5_writer, "write_episode", full=2)
    assert lab.record([]) == 0
    assert lab.kept() == [(0, 8), (1, 8)]
    assert caplog.text.count("No space left on device") == 1
    reasons = [why.what for state in lab.desk.console.states for why in state.obstacles]
    assert any("episode_0.hdf5" in what and "No space left on device" in what for what in reasons)
    disk.full = 1_000
    waits = (ActorState.WAITING,)
    with pytest.raises(DataError, match="No space left on device"):
        lab.record([Press(Action.SUCCESS), Press(Action.STOP, waits), Press(Action.END, (ActorState.STOPPED,))], n=3)
    assert lab.desk.sent == ("stop", "stop")  # the keys work meanwhile
    assert lab.kept() == [(0, 8), (1, 8)]


@pytest.mark.parametrize("slow", ["write", "check"])
@pytest.mark.parametrize("action", [Action.STOP, Action.END, Action.UNDO])
def test_keys_act_while_a_demonstration_is_written_and_checked(lab, monkeypatch, slow, action):
    for each in (recording, full_disk_module):
        monkeypatch.setattr(each, "polling", POLLING)
    module, name = (hdf5_writer.EpisodeWriter, "flush") if slow == "write" else (recording, "inspect")
    works, taken, waited = getattr(module, name), [], []
    acts = Operator._act

    def act(self, key, now, *shown, **how):
        acts(self, key, now, *shown, **how)
        taken.append(key)

    def waits(*args, **more):
        ends = time.monotonic() + 10
        while not waited and action not in taken and time.monotonic() < ends:
            time.sleep(0.002)
        waited.append(action in taken)
        return works(*args, **more)

    monkeypatch.setattr(Operator, "_act", act)
    monkeypatch.setattr(module, name, waits)
    status = lab.record([Press(Action.SUCCESS), Press(action, (ActorState.WAITING,), after=2)], n=2)
    assert waited[0]
    assert (status, "stop" in lab.desk.sent) == (130 if action is Action.END else 0, action is not Action.UNDO)
    assert len(lab.aside()) == (action is Action.UNDO)
    assert len(lab.kept()) == (1 if action is Action.END else 2)
