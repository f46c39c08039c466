"""Every leaf comes back; damage is noticed, said and moved aside; a failed write does not end a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from agent_tools import fresh, same
from checkpoint_tools import NORMALISER, flip_a_byte, restore, save, saved_run, state_of
from errors import naming

from serl_chunk.runs.checkpoints import CheckpointError, CheckpointStore, host_leaves


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A run with checkpoints 3 and 7: copy it."""
    return saved_run(tmp_path_factory.mktemp("two") / "run", [3, 7])


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    """A copy of `two` to spoil."""
    return Path(shutil.copytree(two, tmp_path / "run"))


def test_every_leaf_comes_back(two, caplog):
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


def test_an_agents_state_comes_back_and_trains_on_alike(tmp_path):
    agent, state = fresh("acfql")
    store = CheckpointStore(tmp_path)
    assert store.save(1, state, agent.flatten_params(agent.policy_params(state)), NORMALISER, {})
    store.close()
    restored = CheckpointStore(tmp_path).restore_state(jax.eval_shape(lambda: state))
    assert same(restored.state, state)
    policy = CheckpointStore(tmp_path).restore_policy(1)
    assert same(agent.load_params(policy.params), agent.load_params(agent.flatten_params(agent.policy_params(state))))


def test_nothing_saved_is_nothing_to_restore(tmp_path):
    assert restore(tmp_path) is None
    assert CheckpointStore(tmp_path).steps() == []


def test_the_saved_copy_is_of_the_moment_of_saving():
    leaves = host_leaves({"a": (original := np.ones(3, np.float32))})
    original[:] = 9
    np.testing.assert_array_equal(leaves["['a']"], np.ones(3))


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


DAMAGE = [(flip_a_byte, "state"), (truncate, "state"), (remove, "state"), (truncate, "normaliser"),
          (flip_a_byte, "normaliser"), (remove, "meta"), (truncate, "meta"), (flip_a_byte, "meta"),
          (edit('"n": 7', '"n": 6'), "meta"), (edit('"n":', '"m":'), "meta"), (edit('"crc32":', '"crc33":'), "meta"),
          (edit('"crc32": ', '"crc32": 1'), "meta"), (edit('"checksums":', '"checksum_":'), "meta")]  # fmt: skip


@pytest.mark.parametrize(("damage", "item"), DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_loudly(run, damage: Callable[[Path, str], None], item, caplog):
    caplog.set_level("INFO", "serl_chunk")
    damage(run / "checkpoints" / "7", item)
    restored = restore(run)
    assert restored.step == 3
    assert same(restored.state, state_of(3))
    assert len(caplog.messages) == 2
    assert caplog.messages[1] == f"moved to {run / 'checkpoints_damaged'}: checkpoints 7"
    assert "checkpoint 7 in" in caplog.messages[0]
    assert "Falling back to the checkpoint before it" in caplog.messages[0]
    assert CheckpointStore(run).steps() == [3]
    assert [p.name.split("_")[0] for p in (run / "checkpoints_damaged").iterdir()] == ["7"]
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


def test_meta_of_every_json_kind_comes_back(tmp_path):
    meta = {"rng": {"state": 2**127 + 1}, "x": 0.1, "nan": float("inf"), "none": None, "pair": (1, 2), "text": "5 €",
            "by_step": {10: 1, 9: 2}}  # fmt: skip
    store = CheckpointStore(tmp_path)
    assert store.save(1, state_of(1), NORMALISER, NORMALISER, meta)
    store.close()
    back = restore(tmp_path).meta
    assert {k: back[k] for k in meta} == meta | {"pair": [1, 2], "by_step": {"10": 1, "9": 2}}


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
        ({"bias": jnp.zeros(9)}, {}, ("['net']['bias']", "float32(8,)", "float32(9,)")),
        ({"bias": jnp.zeros(8, jnp.int32)}, {}, ("['net']['bias']", "float32(8,)", "int32(8,)")),
        ({}, {"more": jnp.zeros(2)}, ("['more']", "float32(2,)")),
        ({"bias": None}, {}, ("['net']['bias']",)),
    ],
    ids=["shape", "type", "missing", "unknown"],
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
    truncate(run / "checkpoints" / "3", "policy")
    with pytest.raises(CheckpointError, match=naming("eval_checkpoint_step", "checkpoint 7", "backup")):
        CheckpointStore(run).restore_policy(7)


def test_a_failed_write_is_said_counted_and_tried_again(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path)
    assert save(store, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        assert not store.save(2, state_of(2), {}, NORMALISER, {})
    assert store.failed_saves == 1
    for part in ("checkpoint 2 could not be written", "No space left on device", "Training goes on"):
        assert part in caplog.messages[0]
    assert save(store, 3)
    monkeypatch.setattr(store._manager, "wait_until_finished", full)  # where orbax raises it, in the background
    assert not store.wait()
    assert store.failed_saves == 2
    assert "checkpoint 3 could not be written" in caplog.messages[1]
    assert save(store, 4)
    store.close()
    assert (CheckpointStore(tmp_path).steps()[:1], restore(tmp_path).step) == ([1], 4)


def test_the_same_step_twice_is_one_checkpoint_and_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert all(save(store, step) for step in (1, 2, 2, 3, 4))
    store.close()
    assert CheckpointStore(tmp_path).steps() == [3, 4]
