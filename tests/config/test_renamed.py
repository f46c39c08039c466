"""Former names of settings, modules and classes lead to the current ones."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
from errors import naming

from serl_chunk.cli.process import load, spec_of, split_overrides
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.renamed import CLASSES, MODULES, PRESETS_FORMAT, SETTINGS, VALUES, current_config
from serl_chunk.main import main
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.types import ConfigError

CONFIG = load("fake_aloha", [])
SPEC = spec_of(CONFIG)
FORMER = {  # as f1f5725 wrote them, with a value of each
    "agent.act_by": "online",
    "agent.gripper.plausible": "0.1",
    "normaliser.extreme": "0.8",
    "robot.helper.noise": "0.25",
    "transport.silence": "7.0",
    "transport.snapshots": "bfloat16",
    "replay.windows": "adjacent",
}


def value_at(config: ExperimentConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", [*SETTINGS.values(), *(path for path, _ in VALUES)])
def test_every_current_name_exists_and_no_former_one_does(path):
    value_at(CONFIG, path)
    for old in SETTINGS:
        with pytest.raises(AttributeError):
            value_at(CONFIG, old)


def test_modules_and_classes_exist_under_their_current_names():
    for old, new in MODULES.items():
        importlib.import_module(new)
        with pytest.raises(ImportError):
            importlib.import_module(old)
    from serl_chunk.config import robots

    assert all(hasattr(robots, new) and not hasattr(robots, old) for old, new in CLASSES.items())


def test_the_command_line_takes_former_names_and_gives_the_current_one(caplog):
    words = [f"--config.{path}={text}" for path, text in FORMER.items()]
    with caplog.at_level("INFO"):
        overrides = split_overrides([*words, "--config.seed=3"])
    assert dict(overrides) == {
        "agent.acting_critic": "online",
        "agent.gripper.mask_unreachable": "0.1",
        "normaliser.demo_range": "0.8",
        "robot.scripted_human.noise": "0.25",
        "transport.timeout_s": "7.0",
        "transport.snapshot_dtype": "bfloat16",
        "replay.windows": "qc",
        "seed": "3",
    }
    lines = caplog.messages
    assert len(lines) == len(FORMER)
    for (old, text), line in zip(FORMER.items(), lines, strict=True):
        assert f"--config.{old}={text}" in line
    assert "--config.transport.timeout_s=7.0" in lines[4]
    assert split_overrides(["--config.seed=3"]) == [("seed", "3")]
    assert len(caplog.messages) == len(FORMER)


def former(config: dict) -> dict:
    """The `config.json` that f1f5725 would have written."""
    old = json.loads(json.dumps(config))
    old["agent"]["act_by"] = old["agent"].pop("acting_critic")
    old["agent"]["gripper"]["plausible"] = old["agent"]["gripper"].pop("mask_unreachable")
    old["normaliser"]["extreme"] = old["normaliser"].pop("demo_range")
    old["robot"]["helper"] = old["robot"].pop("scripted_human")
    old["transport"]["silence"] = old["transport"].pop("timeout_s")
    old["transport"]["snapshots"] = old["transport"].pop("snapshot_dtype")
    return old


def test_a_config_file_with_former_names_is_read_under_the_current_ones():
    replay = dataclasses.replace(CONFIG.replay, windows="qc", terminal_windows="drop")
    now = json.loads(json.dumps(to_dict(dataclasses.replace(CONFIG, replay=replay))))
    old = former(now)
    old["replay"]["windows"] = "adjacent"
    read, lines = current_config(old)
    assert read == now
    assert len(lines) == len(SETTINGS) + len(VALUES)
    assert any("transport.silence" in line and "transport.timeout_s" in line for line in lines)
    assert current_config(now) == (now, [])


@pytest.mark.parametrize(
    ("number", "preset", "read"),
    [
        (None, "rlpd", "rlpd-qc"),
        (1, "rlpd", "rlpd-qc"),
        (2, "rlpd", "rlpd"),
        (1, "qc", "qc"),
        (1, "rlpd-qc", "rlpd-qc"),
    ],
)
def test_the_preset_rlpd_of_older_run_folders_is_read_as_rlpd_qc(number, preset, read):
    saved = {**json.loads(json.dumps(to_dict(CONFIG))), "preset": preset}
    saved |= {} if number is None else {"format": number}
    current, lines = current_config(saved)
    assert current == {**saved, "preset": read}
    assert lines == ([] if preset == read else [f"preset={preset} is now preset={read}"])


def test_a_run_with_the_preset_rlpd_of_before_resumes_as_rlpd_qc(tmp_path, caplog):
    caplog.set_level("INFO")
    config = load("fake_aloha", [], preset="rlpd-qc")
    run = open_run(config, SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    assert saved["format"] == PRESETS_FORMAT
    saved["agent"].pop("policy_activation")  # which that version did not have
    file.write_text(json.dumps(saved | {"preset": "rlpd", "format": 1}))
    open_run(config, SPEC, str(tmp_path)).lock.close()
    assert not [line for line in caplog.messages if "config changed" in line]
    assert any("preset=rlpd is now preset=rlpd-qc" in line for line in caplog.messages)


def test_a_run_with_the_preset_rlpd_of_now_stays_one(tmp_path):
    run = open_run(load("fake_aloha", [], preset="rlpd"), SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    assert read_config(tmp_path)["preset"] == "rlpd"


def test_a_run_folder_with_former_names_resumes_with_one_line_and_no_change(tmp_path, caplog):
    caplog.set_level("INFO")
    run = open_run(CONFIG, SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(former(json.loads(file.read_text()))))
    assert read_config(tmp_path)["transport"]["timeout_s"] == CONFIG.transport.timeout_s
    again = open_run(CONFIG, SPEC, str(tmp_path))
    again.write_config()
    again.lock.close()
    assert again.resumed
    lines = caplog.messages
    assert len(lines) == 1
    assert all(old in lines[0] and new in lines[0] for old, new in SETTINGS.items())
    open_run(CONFIG, SPEC, str(tmp_path)).lock.close()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("ticks", "hz", "seconds"), [(40, 50.0, 0.8), (40, 10.0, 4.0), (0, 50.0, 0.0)])
def test_ticks_before_an_intervention_are_read_as_seconds_at_the_runs_rate(ticks, hz, seconds):
    saved = {"replay": {"exclude_before_takeover": ticks}, "robot_spec": {"control_hz": hz}}
    read, lines = current_config(saved)
    assert read["replay"]["exclude_before_takeover"] == seconds
    assert lines == [f"replay.exclude_before_takeover={ticks} (ticks) is now {seconds:g} (s)"]
    assert current_config(read) == (read, [])
    assert saved["replay"]["exclude_before_takeover"] == ticks


@pytest.mark.parametrize(
    ("time", "dim", "lines"),
    [("cosine", 0, []), ("fourier", 16, ["agent.flow.time=fourier is now agent.flow.fourier_dim=16"])],
)
@pytest.mark.parametrize("preset", ["qc", "bc"])
def test_features_of_t_are_read_as_their_number(preset, time, dim, lines):
    now = json.loads(json.dumps(to_dict(load("fake_aloha", [("agent.flow.fourier_dim", str(dim))], preset=preset))))
    old = json.loads(json.dumps(now))
    old["agent"]["flow"] |= {"time": time, "fourier_dim": 16}
    assert current_config(old) == (now, lines)


def test_a_whole_number_of_seconds_is_not_taken_for_ticks(tmp_path):
    replay = dataclasses.replace(CONFIG.replay, exclude_before_takeover=3)
    run = open_run(dataclasses.replace(CONFIG, replay=replay), SPEC, str(tmp_path))
    run.write_config()
    run.lock.close()
    assert read_config(tmp_path)["replay"]["exclude_before_takeover"] == 3.0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "from serl_chunk.config.chunks import ChunkConfig",
            ("serl_chunk.config.chunks", "serl_chunk.config.experiment"),
        ),
        ("from serl_chunk.config.robots import HelperConfig", ("HelperConfig", "ScriptedHumanConfig")),
        (
            "from serl_chunk.config.experiment import NormaliserConfig\nNormaliserConfig(extreme=0.5)",
            ("normaliser.extreme", "normaliser.demo_range"),
        ),
    ],
)
def test_an_experiment_with_a_former_name_gets_the_current_one(tmp_path, text, names):
    file = tmp_path / "mine.py"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError, match=naming("mine.py", *names)):
        load_experiment(str(file))


def test_a_former_flag_leads_to_the_current_one(tmp_path, capsys):
    arguments = ["--exp_name", "fake_aloha", "--local", "--debug", "--checkpoint_path", str(tmp_path / "run")]
    assert main([*arguments, "--demo_solved", "drop", "--demo_path", str(tmp_path / "none")]) == 2
    shown = capsys.readouterr()
    assert "--demo_solved drop" in shown.out
    assert "--no-demo_keep_solved" in shown.out
