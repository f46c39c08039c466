"""What `latest`, `best` and a number mean, and what is said where there is no such checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from errors import naming

from serl_chunk.cli.evaluation import _differences, _recorded
from serl_chunk.cli.process import load
from serl_chunk.config.overrides import to_dict
from serl_chunk.runs.checkpoints import CheckpointError, CheckpointStore
from serl_chunk.runs.evaluations import VALIDATION, better_arm, expand, resolve_step, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose checkpoints exist by name."""
    for step in (0, 500, 1000):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").touch()
    return tmp_path


def resolve(run: Path, wanted: str) -> int:
    return resolve_step(run, CheckpointStore(run), wanted)


@pytest.mark.parametrize("wanted", ["7", "-1", "5e2", "newest"])
def test_what_is_not_there_lists_what_is(run, wanted):
    assert [resolve(run, name) for name in ("500", "0", "latest")] == [500, 0, 1000]
    with pytest.raises(CheckpointError, match=naming(run, f"'{wanted}'", "0, 500, 1000", "latest", "best")):
        resolve(run, wanted)
    with pytest.raises(CheckpointError, match=naming(run / "empty")):
        resolve(run / "empty", "latest")


def test_the_best_is_chosen_on_validation_alone(run):
    path = save(run, 1000, "evaluation", [{"success_rate": 1.0, "n": 9}])  # the reported figure must not choose
    saved = {"checkpoint": 1000, "purpose": "evaluation", "results": [{"success_rate": 1.0, "n": 9}]}
    assert (path, json.loads(path.read_text())) == (run / "evaluations" / "evaluation_1000.json", saved)
    with pytest.raises(CheckpointError, match=naming(run, "eval_checkpoint_step", "--eval_validation", "0, 500, 1000")):
        resolve(run, "best")
    save(run, 0, VALIDATION, [{"success_rate": 0.5, "n": 9}])
    save(run, 500, VALIDATION, [{"success_rate": rate, "n": 9} for rate in (0.4, 0.7)])  # mean and sampled policy
    assert resolve(run, "best") == 500
    save(run, 1000, VALIDATION, [{"success_rate": 0.7, "n": 9}])
    assert resolve(run, "best") == 1000  # of equals, the newest
    save(run, 2000, VALIDATION, [{"success_rate": 1.0, "n": 9}])  # its checkpoint is gone
    assert resolve(run, "best") == 1000


def test_what_a_run_was_trained_with_is_no_other_setting_of_its_evaluation(caplog):
    config = load("fake_aloha", [])
    saved = to_dict(config)
    saved["agent"] |= {"lr": 0.5, "bc_on": "demo", "candidates": 7}
    saved["actor"] |= {"intervention": "none", "delay_ticks": 1}
    saved["robot"] |= {"scripted_human": {**saved["robot"]["scripted_human"], "noise": 0.5}, "control_hz": 25}
    del saved["agent"]["policy_ema"]  # as of another kind of agent
    saved = json.loads(json.dumps(saved))
    recorded = _recorded(saved, config)
    assert {"agent.lr: 0.5 -> 0.0003", "agent.bc_on: demo -> +successes"} <= set(recorded)
    differences = _differences(saved, recorded, config)
    paths = {line.partition(": ")[0] for line in differences}
    assert paths == {"agent.candidates", "actor.delay_ticks", "robot.control_hz"}
    assert sum("another setting than the run's" in line for line in caplog.messages) == len(differences)


def test_a_checkpoint_says_which_arm_was_better_on_its_validation_starts(run):
    save(run, 500, VALIDATION, [{"success_rate": 0.97, "n": 100, "arm": "one"}])
    assert better_arm(run, 500) == ""
    save(run, 500, VALIDATION, [{"success_rate": 0.94, "n": 100, "arm": "best"}, {"success_rate": 0.5, "n": 100}])
    save(run, 500, VALIDATION, [{"success_rate": 1.0, "n": 3, "arm": "best", "interrupted": True}])
    save(run, 500, "evaluation", [{"success_rate": 1.0, "n": 200, "arm": "best"}])
    save(run, 1000, VALIDATION, [{"success_rate": 0.9, "n": 50, "arm": arm} for arm in ("best", "one")])
    assert better_arm(run, 500) == "one was better than best on validation starts (97 and 94 % of 100)"
    assert "as good as" in better_arm(run, 1000)
    assert resolve(run, "best") == 500  # by what the run acts by, not by an arm
    (run / "evaluations" / "validation_7.json").write_text("{")
    assert "validation_7.json is damaged" in better_arm(run, 500)


@pytest.mark.parametrize("wanted", ["last:0", "last:4", "last:two"])
def test_the_last_checkpoints(run, wanted):
    store = CheckpointStore(run)
    assert expand(run, store, ["0", "last:2", "best"]) == ["0", "500", "1000", "best"]
    with pytest.raises(CheckpointError, match=naming(run, wanted, "last:N", "3 periodic")):
        expand(run, store, [wanted])


def test_a_second_evaluation_erases_nothing_and_the_longer_one_counts(run):
    first = save(run, 500, VALIDATION, [{"success_rate": 0.6, "n": 100}])
    second = save(run, 500, VALIDATION, [{"success_rate": 1.0, "n": 1}])
    other = save(run, 1000, VALIDATION, [{"success_rate": 0.9, "n": 200}], ["agent.candidates: 16 -> 1"])
    save(run, 0, VALIDATION, [{"success_rate": 0.5, "n": 100}])
    assert [p.name for p in (first, second)] == ["validation_500.json", "validation_500_2.json"]
    assert json.loads(other.read_text())["differences"] == ["agent.candidates: 16 -> 1"]
    assert resolve(run, "best") == 500  # neither one episode nor other settings choose
