"""Checkpoints: every leaf comes back; damage is noticed; those by time; what `latest`, `best` and numbers mean."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from agent_tools import same
from checkpoint_tools import NORMALISER, flip_a_byte, restore, save, saved_run, state_of
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as numbers
from metric_logs import Clock

from serl_chunk.cli.evaluation import _differences, _recorded
from serl_chunk.cli.process import load
from serl_chunk.config.overrides import to_dict
from serl_chunk.runs import checkpoints
from serl_chunk.runs.checkpoints import (
    CheckpointError,
    CheckpointStore,
    LearnerCheckpoints,
    Saves,
    TimedCheckpoints,
    begin_write,
)
from serl_chunk.runs.evaluations import VALIDATION, better_arm, expand, resolve_step, wanted_policy
from serl_chunk.runs.evaluations import save as record


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A run with checkpoints 3 and 7: copy it."""
    return saved_run(tmp_path_factory.mktemp("two") / "run", [3, 7])


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    """A copy of `two` to spoil."""
    return Path(shutil.copytree(two, tmp_path / "run"))


def test_every_leaf_comes_back(two, tmp_path, caplog):
    restored = restore(two)
    assert restored.step == 7
    assert same(restored.state, state_of(7))
    np.testing.assert_array_equal(jax.random.normal(restored.state["rng"]), jax.random.normal(jax.random.key(7)))
    assert restored.meta["n"] == restored.meta["step"] == 7
    assert restored.normaliser.keys() == NORMALISER.keys()
    for name, value in NORMALISER.items():
        assert restored.normaliser[name].dtype == value.dtype
        np.testing.assert_array_equal(restored.normaliser[name], value)
    assert caplog.messages == []
    meta = {"rng": {"state": 2**127 + 1}, "nan": float("inf"), "none": None, "pair": (1, 2), "by_step": {9: 2}}
    store = CheckpointStore(tmp_path)
    store.save(1, state_of(1), NORMALISER, NORMALISER, meta)
    store.close()
    back = restore(tmp_path).meta
    assert {k: back[k] for k in meta} == meta | {"pair": [1, 2], "by_step": {"9": 2}}


def truncate(step: Path, item: str) -> None:
    for file in (step / item).rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(step: Path, item: str) -> None:
    shutil.rmtree(step / item)


def edit(old: str, new: str) -> Callable[[Path, str], None]:
    """Change the text of meta so that it stays valid JSON."""

    def damage(step: Path, item: str) -> None:
        text = (step / item / "metadata").read_text()
        assert old in text
        (step / item / "metadata").write_text(text.replace(old, new, 1))

    return damage


DAMAGE = [(flip_a_byte, "state"), (truncate, "state"), (remove, "state"), (flip_a_byte, "normaliser"),
          (remove, "meta"), (truncate, "meta"), (edit('"n": 7', '"n": 6'), "meta"),
          (edit('"crc32":', '"crc33":'), "meta"), (edit('"checksums":', '"checksum_":'), "meta")]  # fmt: skip


@pytest.mark.parametrize(("damage", "item"), DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_loudly(run, damage: Callable[[Path, str], None], item, caplog):
    damage(run / "checkpoints" / "7", item)
    restored = restore(run)
    assert restored.step == 3
    assert same(restored.state, state_of(3))
    assert "checkpoint 7 in" in caplog.text
    assert CheckpointStore(run).steps() == [3]
    assert len([*(run / "checkpoints_damaged").iterdir()]) == 1
    store = CheckpointStore(run)  # and the step can be reached and saved again
    assert save(store, 7)
    store.close()
    assert restore(run).step == 7


def test_no_changed_bit_of_meta_is_believed(run):
    """Whichever byte is hit, what is read is refused or is what was written."""
    file = run / "checkpoints" / "7" / "meta" / "metadata"
    whole, written = file.read_bytes(), CheckpointStore(run).restore_policy(7).meta
    for at in np.random.default_rng(0).choice(len(whole), 40, replace=False):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with contextlib.suppress(CheckpointError):
            assert CheckpointStore(run).restore_policy(7).meta == written


def test_each_array_of_a_state_is_placed_from_the_host(run):
    """On several devices no device has all of a state."""
    placed = []
    CheckpointStore(run).restore_state(jax.eval_shape(lambda: state_of(0)), place=placed.append)
    assert sorted(type(array).__name__ for array in placed) == ["PRNGKeyArray", "ndarray", "ndarray", "ndarray"]


def test_a_killed_learners_half_checkpoint_does_not_stay(run):
    half = run / "checkpoints" / "9.orbax-checkpoint-tmp"
    shutil.copytree(run / "checkpoints" / "7", half)
    store = CheckpointStore(run)
    assert store.steps() == [3, 7]
    assert save(store, 11)
    store.close()
    assert sorted(p.name for p in half.parent.iterdir()) == ["11", "3", "7"]


def test_if_all_are_damaged_the_run_does_not_start_afresh(run):
    for step in (3, 7):
        truncate(run / "checkpoints" / str(step), "state")
    for _ in range(2):  # also when the command is simply repeated: nothing was moved away
        with pytest.raises(CheckpointError, match=naming("[3, 7]", run / "checkpoints", "checkpoint_path")):
            restore(run)
    assert CheckpointStore(run).steps() == [3, 7]


@pytest.mark.parametrize(
    ("net", "more", "named"),
    [
        ({"bias": jnp.zeros(8, jnp.int32)}, {}, ("['net']['bias']", "float32(8,)", "int32(8,)")),
        ({}, {"more": jnp.zeros(2)}, ("['more']", "float32(2,)")),
        ({"bias": None}, {}, ("['net']['bias']",)),
    ],
    ids=["type", "missing", "unknown"],
)
def test_a_checkpoint_of_another_network_is_a_mistake_not_damage(two, net, more, named):
    template = {**state_of(0), "net": {k: v for k, v in (state_of(0)["net"] | net).items() if v is not None}, **more}
    with pytest.raises(CheckpointError, match=naming("checkpoints", 7, "config.json", *named)):
        CheckpointStore(two).restore_state(jax.eval_shape(lambda: template))
    assert CheckpointStore(two).steps() == [3, 7]


def test_a_missing_or_truncated_policy_names_those_that_can_be_read(run, tmp_path):
    assert CheckpointStore(run).restore_policy(3).params["policy/kernel"].tolist() == [3.0] * 4
    for folder, step, there in ((run, 5, "3, 7"), (tmp_path, 0, "none")):
        with pytest.raises(CheckpointError, match=naming(folder / "checkpoints", step, there)):
            CheckpointStore(folder).restore_policy(step)
    truncate(run / "checkpoints" / "7", "policy")
    with pytest.raises(CheckpointError, match=naming("eval_checkpoint_step", "checkpoint 7", "read: 3", "Choose 3")):
        CheckpointStore(run).restore_policy(7)


def test_a_failed_write_is_said_counted_and_tried_again(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path)
    assert save(store, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.AsyncCheckpointer, "save", full)
        assert not save(store, 2)
    assert store.failed_saves == 1
    assert "No space left on device" in caplog.messages[0]
    assert save(store, 3)
    assert save(store, 4)
    store.close()
    assert (CheckpointStore(tmp_path).steps()[:1], restore(tmp_path).step) == ([1], 4)


def test_the_same_step_twice_is_one_checkpoint_and_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert all(save(store, step) for step in (1, 2, 2, 3, 4))
    store.close()
    assert CheckpointStore(tmp_path).steps() == [3, 4]


def test_kept_checkpoints_take_so_many_bytes_at_most_but_the_newest_stays(tmp_path):
    store = CheckpointStore(tmp_path)
    assert save(store, 1)
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoints").rglob("*") if file.is_file())
    for bytes_, exported, kept in ((2.5 * size, 0, [2, 3]), (2.5 * size, size, [3]), (1, 0, [3])):
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "exports").mkdir(exist_ok=True)
        (tmp_path / "exports" / "params").write_bytes(bytes(exported))
        store = CheckpointStore(tmp_path, most_bytes=int(bytes_))
        assert all(save(store, step) for step in (1, 2, 3))
        assert store.steps() == kept


def test_a_policy_that_is_the_states_is_written_once_and_read_without_the_rest(tmp_path, monkeypatch):
    state, read = state_of(3), []
    store = CheckpointStore(tmp_path)
    store.save(3, state, {"policy": state["net"], "critic": {"bias": 2 * state["net"]["bias"]}}, NORMALISER, {"n": 3})
    assert store.wait()
    whole = checkpoints.read_item

    def noted(path, item, *only):
        flat, meta = whole(path, item, *only)
        read.append((item, len(flat)))
        return flat, meta

    monkeypatch.setattr(checkpoints, "read_item", noted)
    params = store.restore_policy(3).params
    assert read == [("policy", 1), ("state", 2), ("normaliser", 2)]
    assert params.keys() == {"policy/kernel", "policy/bias", "critic/bias"}
    for name, expected in (("kernel", state["net"]["kernel"]), ("bias", state["net"]["bias"])):
        np.testing.assert_array_equal(params[f"policy/{name}"], expected)
    flip_a_byte(tmp_path / "checkpoints" / "3", "state")
    with pytest.raises(CheckpointError, match=naming("checkpoint 3")):
        store.restore_policy(3)


@given(
    numbers(st.sampled_from([np.float32, np.uint8, np.int32, np.bool_, np.float16]), array_shapes(max_dims=3)),
    st.data(),
)
def test_a_checksum_is_one_on_host_and_device_and_notices_each_bit(x, data):
    device = jax.device_get(checkpoints.device_checksums({"x": jnp.asarray(x)}))["x"]
    assert checkpoints._checksum(x) == int(device)
    flipped, bit = bytearray(x.tobytes()), data.draw(st.integers(0, 8 * x.nbytes - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    other = np.frombuffer(bytes(flipped), x.dtype).reshape(x.shape)
    assert checkpoints._checksum(other) != checkpoints._checksum(x)


def test_no_timed_one_begins_while_another_is_written(tmp_path):
    written = threading.Event()

    def slow(*what):
        finish = begin_write(*what)
        return lambda: (written.wait(60), finish())

    store = LearnerCheckpoints(tmp_path, keep=2, saves=Saves(begin=slow))
    store.timed = TimedCheckpoints(tmp_path, period=0.0)
    store.save(1, state_of(1), {}, NORMALISER, {"updates": 1})
    store.unsaved = True
    assert not store.timed_due
    written.set()
    assert store.wait()
    assert store.timed_due


def test_a_slow_disk_has_a_day(tmp_path, monkeypatch):
    given, whole = [], ocp.AsyncCheckpointer.__init__

    def noted(self, *args, **kwargs):
        given.append(kwargs["timeout_secs"])
        whole(self, *args, **kwargs)

    monkeypatch.setattr(ocp.AsyncCheckpointer, "__init__", noted)
    assert save(CheckpointStore(tmp_path), 1)
    assert given == [24 * 3600]


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
    whole = ocp.AsyncCheckpointer.save

    def slow(*args, **kwargs):
        clock.now += 9.0
        return whole(*args, **kwargs)

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", slow)
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


def test_one_of_the_period_and_one_by_time_that_are_written_at_once_are_both_whole(tmp_path):
    """Orbax alone fails at one of the two about every other time."""
    store, timed = CheckpointStore(tmp_path), TimedCheckpoints(tmp_path)
    for step in range(4):
        for one in (store, timed):
            one.save(step, state_of(step), NORMALISER, NORMALISER, {"updates": step})
        assert (store.wait(), timed.wait()) == (True, True), step
    assert store.steps() == list(range(4))
    assert folders(tmp_path) == ["4"]


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
    run = saved_run(tmp_path / "run", [7])
    write(TimedCheckpoints(run), 9)
    flip_a_byte(run / "checkpoints_timed" / "1", item)
    restored = restore(run)
    assert restored.step == 7
    assert f"checkpoint 1 in {run / 'checkpoints_timed'}" in caplog.text
    assert folders(run) == []
    assert restore(run).step == 7


def test_one_that_does_not_verify_leaves_the_one_before(tmp_path):
    write(TimedCheckpoints(tmp_path), 1)

    def damaging(path, *what):
        finish = begin_write(path, *what)
        return lambda: (finish(), flip_a_byte(path, "state"))

    timed = TimedCheckpoints(tmp_path, saves=Saves(begin=damaging))
    write(timed, 2)
    assert timed.failed_saves == 1
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose checkpoints exist by name."""
    for step in (0, 500, 1000):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").touch()
    return tmp_path


def resolve(folder: Path, wanted: str) -> int:
    return resolve_step(folder, CheckpointStore(folder), wanted)


@pytest.mark.parametrize("wanted", ["7", "5e2"])
def test_what_is_not_there_lists_what_is(folder, wanted):
    assert [resolve(folder, name) for name in ("500", "0", "latest")] == [500, 0, 1000]
    with pytest.raises(CheckpointError, match=naming(folder, f"'{wanted}'", "0, 500, 1000", "latest", "best")):
        resolve(folder, wanted)
    with pytest.raises(CheckpointError, match=naming(folder / "empty")):
        resolve(folder / "empty", "latest")


def test_the_best_is_chosen_on_validation_alone(folder):
    path = record(folder, 1000, "evaluation", [{"success_rate": 1.0, "n": 9}])  # the reported figure must not choose
    saved = {"checkpoint": 1000, "purpose": "evaluation", "results": [{"success_rate": 1.0, "n": 9}]}
    assert (path, json.loads(path.read_text())) == (folder / "evaluations" / "evaluation_1000.json", saved)
    with pytest.raises(CheckpointError, match=naming(folder, "--eval_validation", "0, 500, 1000")):
        resolve(folder, "best")
    record(folder, 0, VALIDATION, [{"success_rate": 0.5, "n": 9}])
    record(folder, 500, VALIDATION, [{"success_rate": rate, "n": 9} for rate in (0.4, 0.7)])  # mean and sampled policy
    assert resolve(folder, "best") == 500
    record(folder, 1000, VALIDATION, [{"success_rate": 0.7, "n": 9}])
    assert resolve(folder, "best") == 1000  # of equals, the newest
    record(folder, 2000, VALIDATION, [{"success_rate": 1.0, "n": 9}])  # its checkpoint is gone
    assert resolve(folder, "best") == 1000


def test_what_a_run_was_trained_with_is_no_other_setting_of_its_evaluation():
    config = load("fake_aloha", [])
    saved = to_dict(config)
    saved["agent"] |= {"lr": 0.5, "bc_on": "demo", "candidates": 7}
    saved["actor"] |= {"intervention": "none", "delay_ticks": 1}
    saved["robot"] |= {"scripted_human": {**saved["robot"]["scripted_human"], "noise": 0.5}, "control_hz": 25}
    del saved["agent"]["policy_ema"]  # as of another kind of agent
    saved = json.loads(json.dumps(saved))
    recorded = _recorded(saved, config)
    differences = _differences(saved, recorded, config)
    paths = {line.partition(": ")[0] for line in differences}
    assert paths == {"agent.candidates", "actor.delay_ticks", "robot.control_hz"}


def test_a_checkpoint_says_which_arm_was_better_on_its_validation_starts(folder):
    record(folder, 500, VALIDATION, [{"success_rate": 0.97, "n": 100, "arm": "one"}])
    assert better_arm(folder, 500) == ""
    record(folder, 500, VALIDATION, [{"success_rate": 0.94, "n": 100, "arm": "best"}, {"success_rate": 0.5, "n": 100}])
    record(folder, 500, VALIDATION, [{"success_rate": 1.0, "n": 3, "arm": "best", "interrupted": True}])
    record(folder, 500, "evaluation", [{"success_rate": 1.0, "n": 200, "arm": "best"}])
    record(folder, 1000, VALIDATION, [{"success_rate": 0.9, "n": 50, "arm": arm} for arm in ("best", "one")])
    assert better_arm(folder, 500) == "one was better than best on validation starts (97 and 94 % of 100)"
    assert "as good as" in better_arm(folder, 1000)
    assert resolve(folder, "best") == 500  # by what the folder acts by, not by an arm
    (folder / "evaluations" / "validation_7.json").write_text("{")
    assert "validation_7.json is damaged" in better_arm(folder, 500)


@pytest.mark.parametrize("wanted", ["last:4", "last:two"])
def test_the_last_checkpoints(folder, wanted):
    store = CheckpointStore(folder)
    assert expand(folder, store, ["0", "last:2", "best"]) == ["0", "500", "1000", "best"]
    with pytest.raises(CheckpointError, match=naming(folder, wanted, "last:N", "3 periodic")):
        expand(folder, store, [wanted])


def test_a_second_evaluation_erases_nothing_and_the_longer_one_counts(folder):
    first = record(folder, 500, VALIDATION, [{"success_rate": 0.6, "n": 100}])
    second = record(folder, 500, VALIDATION, [{"success_rate": 1.0, "n": 1}])
    other = record(folder, 1000, VALIDATION, [{"success_rate": 0.9, "n": 200}], ["agent.candidates: 16 -> 1"])
    record(folder, 0, VALIDATION, [{"success_rate": 0.5, "n": 100}])
    assert [p.name for p in (first, second)] == ["validation_500.json", "validation_500_2.json"]
    assert json.loads(other.read_text())["differences"] == ["agent.candidates: 16 -> 1"]
    assert resolve(folder, "best") == 500  # neither one episode nor other settings choose
