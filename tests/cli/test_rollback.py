"""Going back to an earlier policy version: what is moved, what a resume finds, and what is refused before that."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from checkpoint_tools import NORMALISER, flip_a_byte, restore, save, state_of
from errors import naming

from serl_chunk.main import main
from serl_chunk.runs.checkpoints import (
    UNDONE,
    CheckpointError,
    CheckpointStore,
    TimedCheckpoints,
    kept_versions,
    roll_back,
)
from serl_chunk.runs.folder import CONFIG, FORMAT, RUN_LOCK
from serl_chunk.runs.metrics import METRICS_FILE
from serl_chunk.types import ConfigError

VERSIONS = {0: 1, 40: 3, 80: 5, 120: 7}  # step -> version


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of four checkpoints and a timed one: copy it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    store = CheckpointStore(run)
    assert all(save(store, step, version=version) for step, version in VERSIONS.items())
    store.close()
    timed = TimedCheckpoints(run)
    timed.save(130, state_of(130), {"kernel": NORMALISER["joint"]}, NORMALISER, {"updates": 130, "version": 8})
    timed.wait()
    (run / CONFIG).write_text(json.dumps({"format": FORMAT, "name": "x"}))
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files(run: Path) -> set[str]:
    """All but the lock, which says nothing."""
    return {str(p.relative_to(run)) for p in run.rglob("*") if p.name != RUN_LOCK}


def test_versions_with_a_checkpoint_are_listed(run, capsys):
    assert {v: int(e.step) for v, e in kept_versions(run).items()} == {1: 0, 3: 40, 5: 80, 7: 120, 8: 130}
    assert main(["rollback", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "policy version 3: checkpoint 40"
    assert lines[-1].startswith("policy version 8: checkpoint timed_")
    assert not (run / UNDONE).exists()


def test_a_resume_goes_on_from_there_and_nothing_is_lost(run, capsys):
    before = len(list(run.rglob("metadata")))
    assert main(["rollback", str(run), "--to", "3"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("policy version 3", "checkpoint 40", "3 newer", UNDONE, "actor.gate=canary"))
    assert restore(run).step == 40
    assert CheckpointStore(run).steps() == [0, 40]
    assert len(list(run.rglob("metadata"))) == before
    assert sorted(p.name.rpartition("_")[0] for p in (run / UNDONE).iterdir()) == ["120", "80", "timed_1"]
    rows = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    assert "rollback: goes on from policy version 3" in rows[-1]["text"]


@pytest.mark.parametrize(("version", "named"), [
    (4, ("to", 4, "1 (checkpoint 0)", "3 (checkpoint 40)", "Give 3", "before")), (99, ("to", 99, "Give 8")),
    (-1, ("to", "-1", "Give 1")),
])  # fmt: skip
def test_a_version_that_is_gone_is_named_and_nothing_moves(run, version, named):
    before = files(run)
    with pytest.raises(CheckpointError) as refused:
        roll_back(run, version)
    assert refused.value.parameter == "to"
    assert all(str(each) in str(refused.value) for each in named[1:])
    assert files(run) == before


def test_a_damaged_checkpoint_is_not_gone_back_to(run):
    flip_a_byte(run / "checkpoints" / "40", "state")
    before = files(run)
    with pytest.raises(CheckpointError, match=naming("checkpoint 40", "damaged")):
        roll_back(run, 3)
    assert files(run) == before


def test_a_run_in_use_is_left_alone(run):
    before = files(run)
    with (run / RUN_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=naming(run, "in use", "Stop it")):
            roll_back(run, 3)
    assert files(run) == before
