"""Checkpoints by time: one at a time, rarely enough, and a resume and `latest` find it where it is the newest."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from agent_tools import same
from checkpoint_tools import NORMALISER, flip_a_byte, restore, save, saved_run, state_of
from errors import naming
from metric_logs import Clock

from serl_chunk.runs.checkpoints import CheckpointError, CheckpointStore, TimedCheckpoints
from serl_chunk.runs.evaluations import resolve_step, wanted_policy


def write(timed: TimedCheckpoints, step: int, updates: int | None = None) -> None:
    """One of `state_of(step)`, complete on return."""
    meta = {"n": step, "updates": step if updates is None else updates}
    timed.save(step, state_of(step), {"policy/kernel": NORMALISER["state_mean"] + step}, NORMALISER, meta)
    timed.wait()


def folders(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints_timed").iterdir())


def test_it_is_due_after_the_period_and_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    clock = Clock()
    timed = TimedCheckpoints(tmp_path, period=60.0, share=0.05, now=clock)

    def due_after(seconds: float) -> bool:
        clock.now += seconds
        return timed.due

    assert [due_after(s) for s in (0.0, 59.9, 0.1)] == [False, False, True]
    timed.postpone()  # another checkpoint was written just now
    assert [due_after(s) for s in (0.0, 60.0)] == [False, True]
    write(timed, 1)  # which takes no time on this clock
    assert due_after(60.0)
    whole = ocp.Checkpointer.save

    def slow(*args, **kwargs):
        clock.now += 9.0
        return whole(*args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", slow)
    write(timed, 2)
    assert [due_after(s) for s in (170.0, 1.0)] == [False, True]  # 9 s are a twentieth of 180 s


def test_each_replaces_the_one_before_and_those_of_the_period_stay(tmp_path, caplog):
    run = saved_run(tmp_path / "run", [3, 7])
    timed = TimedCheckpoints(run)
    half = run / "checkpoints_timed" / "1.orbax-checkpoint-tmp"  # of a killed learner
    half.mkdir(parents=True)
    for step in (8, 9):
        write(timed, step)
    assert folders(run) == ["2"]
    assert CheckpointStore(run).steps() == [3, 7]
    caplog.clear()
    restored = restore(run)
    assert (restored.step, restored.meta["n"], caplog.messages) == (9, 9, [])
    assert same(restored.state, state_of(9))
    write(TimedCheckpoints(run), 10)  # of the process that goes on
    assert folders(run) == ["3"]
    store = CheckpointStore(run)
    assert save(store, 11)
    store.close()
    assert restore(run).step == 11


def test_two_of_one_step_differ_in_the_updates_made(tmp_path):
    """Those of pretraining and of a critic's warm-up are all of step 0."""
    timed = TimedCheckpoints(tmp_path)
    write(timed, 0, updates=40)
    assert restore(tmp_path).meta["updates"] == 40
    store = CheckpointStore(tmp_path)
    store.save(0, state_of(0), NORMALISER, NORMALISER, {"updates": 60})
    store.close()
    assert restore(tmp_path).meta["updates"] == 60
    write(timed, 0, updates=80)
    assert restore(tmp_path).meta["updates"] == 80


@pytest.mark.parametrize("item", ["state", "meta"])
def test_a_damaged_one_falls_back_to_that_of_the_period(tmp_path, item, caplog):
    caplog.set_level("INFO", "serl_chunk")
    run = saved_run(tmp_path / "run", [7])
    write(TimedCheckpoints(run), 9)
    flip_a_byte(run / "checkpoints_timed" / "1", item)
    restored = restore(run)
    assert restored.step == 7
    assert f"checkpoint 1 in {run / 'checkpoints_timed'}" in caplog.messages[0]
    assert caplog.messages[1] == f"moved to {run / 'checkpoints_damaged'}: checkpoints timed_1"
    assert folders(run) == []
    assert restore(run).step == 7


def test_one_that_does_not_verify_leaves_the_one_before(tmp_path, monkeypatch, caplog):
    timed = TimedCheckpoints(tmp_path)
    write(timed, 1)
    whole = ocp.Checkpointer.save

    def damaging(self, path, *args, **kwargs):
        whole(self, path, *args, **kwargs)
        flip_a_byte(path, "state")

    monkeypatch.setattr(ocp.Checkpointer, "save", damaging)
    write(timed, 2)
    assert timed.failed_saves == 1
    assert "the timed checkpoint of step 2 could not be written" in caplog.messages[0]
    assert folders(tmp_path) == ["1"]
    assert restore(tmp_path).step == 1


def test_latest_is_the_newest_of_both_kinds(tmp_path):
    run = saved_run(tmp_path / "run", [3, 7])
    write(TimedCheckpoints(run), 9)
    store = CheckpointStore(run)
    assert (resolve_step(run, store, "latest"), store.newest()) == (9, 9)
    assert wanted_policy(run, store, "latest").params["policy/kernel"][0] == 9
    assert wanted_policy(run, store, "7").step == 7
    assert [p.step for p in store.policies()] == [9, 7, 3]
    with pytest.raises(CheckpointError, match=naming(9, "3, 7")):  # it may be gone in a minute
        wanted_policy(run, store, "9")


def test_latest_copes_with_a_timed_one_that_is_replaced_meanwhile(tmp_path, monkeypatch):
    timed = TimedCheckpoints(tmp_path)
    write(timed, 1)
    store, whole, asked = CheckpointStore(tmp_path), CheckpointStore.restore_policy, []

    def late(self, step):
        asked.append(step)
        if len(asked) == 1:
            write(timed, 2)
        return whole(self, step)

    monkeypatch.setattr(CheckpointStore, "restore_policy", late)
    assert wanted_policy(tmp_path, store, "latest").step == 2
    assert asked == [1, 2]
    flip_a_byte(tmp_path / "checkpoints_timed" / "2", "policy")
    with pytest.raises(CheckpointError, match=naming("checkpoint 2")):
        wanted_policy(tmp_path, store, "latest")


def test_the_copy_is_of_the_moment_of_saving(tmp_path):
    timed, state = TimedCheckpoints(tmp_path), state_of(5)
    timed.save(5, state, NORMALISER, NORMALISER, {"n": 5, "updates": 5})
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as the next update does
    timed.wait()
    assert same(restore(tmp_path).state, state_of(5))
