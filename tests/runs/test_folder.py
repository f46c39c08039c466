"""Flags to configuration, the run folder and its lock, an actor's spools, and what both sides must share."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest
from counting_robot import experiment
from errors import naming

from serl_chunk.cli.process import load, print_config, split_overrides
from serl_chunk.config.overrides import to_dict
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.folder import FORMAT, open_run, read_config
from serl_chunk.transport.storage.journal import Journal
from serl_chunk.transport.storage.spool import SpoolFolders
from serl_chunk.types import ConfigError
from serl_chunk.version import version_info

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)


def test_overrides_are_split_at_the_sign_or_the_next_word():
    given = ["--config.seed=3", "--config.robot.task", "a=b c", "--config.robot.task=x=y"]
    assert split_overrides(given) == [("seed", "3"), ("robot.task", "a=b c"), ("robot.task", "x=y")]
    for words, named in (
        (["--config.seed=1", "--lerner"], ("--lerner", "--config.FIELD=VALUE", "serl-chunk --help_all")),
        (["--config.seed", "--config.discount=0.9"], ("--config.seed", "--config.seed=VALUE")),  # a flag is no value
    ):
        with pytest.raises(ConfigError, match=naming(*named)):
            split_overrides(words)


def test_a_new_folder_records_the_configuration_and_a_resumed_one_keeps_its_id_and_logs_what_changed(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    unnamed = open_run(CONFIG, SPEC, None)
    assert unnamed.path.parent == Path("runs") / "fake_aloha"
    unnamed.lock.close()
    first = open_run(CONFIG, SPEC, str(tmp_path))
    assert not first.resumed
    assert not (tmp_path / "config.json").exists()  # what a start that fails would leave behind
    first.write_config()
    saved = read_config(tmp_path)
    assert (saved["run_id"], saved["robot_spec"], saved["format"]) == (first.run_id, SPEC.to_json(), FORMAT)
    assert saved["serl_chunk"] == version_info()._asdict()
    first.lock.close()
    changed = dataclasses.replace(CONFIG, seed=CONFIG.seed + 1)
    open_run(changed, SPEC, str(tmp_path)).lock.close()  # a start that failed before it recorded anything
    assert read_config(tmp_path)["seed"] == CONFIG.seed
    caplog.clear()
    again = open_run(changed, SPEC, str(tmp_path))
    again.write_config()
    again.lock.close()
    assert (again.resumed, again.run_id) == (True, first.run_id)
    assert f"seed: {CONFIG.seed} -> {CONFIG.seed + 1}" in caplog.messages[0]
    assert read_config(tmp_path)["seed"] == CONFIG.seed + 1
    caplog.clear()
    open_run(changed, SPEC, str(tmp_path)).lock.close()
    assert caplog.messages == []


def test_one_learner_a_folder_and_one_experiment_a_run(tmp_path):
    run = open_run(CONFIG, SPEC, str(tmp_path))
    with pytest.raises(ConfigError, match=naming(tmp_path, "learner", "checkpoint_path")):
        open_run(CONFIG, SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    other = dataclasses.replace(CONFIG, name="other")
    with pytest.raises(ConfigError, match=naming(tmp_path, "fake_aloha", "other", "checkpoint_path")):
        open_run(other, SPEC, str(tmp_path))
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()  # a refusal does not keep the lock


def written(folder: Path, **changes: object) -> Path:
    """Write the config.json of a run with `changes` at its top level; None removes a field."""
    run = open_run(CONFIG, SPEC, str(folder))
    run.write_config()
    run.lock.close()
    file = folder / "config.json"
    saved = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))
    return file


def test_a_run_of_another_version_resumes_with_one_line(tmp_path, caplog):
    written(tmp_path, serl_chunk={"version": "0.0.9", "commit": "12ab"})
    caplog.set_level("INFO")
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()
    assert len(caplog.messages) == 1
    assert "serl_chunk 0.0.9 (commit 12ab)" in caplog.text


@pytest.mark.parametrize("number", [None, FORMAT - 1])
def test_a_run_of_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, number):
    file = written(tmp_path, format=number, serl_chunk={"version": "9.8", "commit": "12ab"})
    expected = naming(file, repr(number), f"expected {FORMAT}", "serl_chunk 9.8 (commit 12ab)", "start a new run")
    for read in (read_config, lambda path: open_run(CONFIG, SPEC, str(path))):
        with pytest.raises(ConfigError, match=expected):
            read(tmp_path)
    file.write_text('{"name": ')
    with pytest.raises(ConfigError, match=naming("config.json", "line 1 column 10")):
        read_config(tmp_path)


def test_a_run_with_an_unknown_field_is_refused(tmp_path):
    agent = json.loads(json.dumps(to_dict(CONFIG)))["agent"]
    unknown = written(tmp_path / "unknown", momentum=1, agent=agent | {"dreams": 3})
    with pytest.raises(ConfigError, match=naming(unknown, "agent.dreams", "momentum", "serl_chunk")):
        open_run(CONFIG, SPEC, str(tmp_path / "unknown"))
    other_agent = written(tmp_path / "other", agent={"kind": "another", "dreams": 3})  # `config` says what is used
    open_run(CONFIG, SPEC, str(other_agent.parent)).lock.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = open_run(CONFIG, SPEC, str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("serl_chunk.runs.folder.write_json", full)
        with pytest.raises(ConfigError, match=naming("checkpoint_path", tmp_path, "No space left on device")):
            run.write_config()
    run.lock.close()
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()


@pytest.mark.parametrize(
    ("settings", "preset", "warned"),
    [
        ((("actor.delay_ticks", "2"), ("agent.flow.train_delay", "sampled")), None, ""),
        ((("actor.delay_ticks", "2"),), None, "train_delay=sampled"),
        ((("actor.delay_ticks", "2"),), "rlpd-ac", "Only flows can be"),
    ],
)
def test_a_delay_that_the_policy_is_not_trained_for_is_a_warning(settings, preset, warned, caplog):
    print_config(load("fake_aloha", settings, preset=preset), SPEC)
    found = [line for line in caplog.messages if "actor.delay_ticks=2" in line]
    assert len(found) == bool(warned)
    assert all(warned in line and ("train_delay" in warned) == ("train_delay" in line) for line in found)


def test_what_other_runs_left_behind_is_counted_while_the_open_spool_is_trimmed(tmp_path, monkeypatch):
    spools = SpoolFolders(experiment(), "left", tmp_path)
    spool = spools.open("this")
    assert spools.folder == tmp_path / "counting_robot" / "left"
    other = Journal(spools.folder / "other")
    other.append([b"kept"])
    other.close()
    kept = other.nbytes
    (spools.folder / "other_damaged").mkdir()
    (spools.folder / "other_damaged" / "0.journal").write_bytes(b"damaged")
    (spools.folder / "gone").mkdir()
    (spools.folder / "gone" / "0.journal").write_bytes(b"going")
    (spools.folder / "this" / "0.journal").write_bytes(b"going")
    stat = Path.stat

    def vanished(path: Path, **options: bool):
        if path.name == "0.journal":
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanished)
    try:
        assert spools.left_behind() == [(spools.folder / "other", kept)]
    finally:
        spool.close()


def test_a_second_actor_of_that_name_is_refused_by_its_flag(tmp_path):
    spool = SpoolFolders(experiment(), "left", tmp_path).open("run")
    try:
        with pytest.raises(ConfigError, match=naming("actor_id", "left", tmp_path)):
            SpoolFolders(experiment(), "left", tmp_path).open("run")
    finally:
        spool.close()
