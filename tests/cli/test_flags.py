"""Flags that stand for fields: the names of other projects, presets, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.process import OF_BOTH_SIDES, OF_THE_LEARNER, load, print_config, spec_of
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.presets import PRESETS
from serl_chunk.learner.building import RunOptions
from serl_chunk.main import main
from serl_chunk.runs.folder import open_run, read_config

RUN = ["--exp_name", "fake_aloha"]
OGBENCH = """
from serl_chunk import AcrlpdConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import OgbenchConfig

def experiment():
    agent = AcrlpdConfig()
    return ExperimentConfig(name="play", robot=OgbenchConfig(reward="dense"), agent=agent)
"""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict[str, Any]]]:
    """(command, arguments, keywords) of what would have been run."""
    calls: list[tuple[str, tuple, dict[str, Any]]] = []
    for path in ("cli.local.run_local", "fleet.local.run_both", "cli.learner.run_learner", "cli.learner.run_offline",
                 "cli.actor.run_training_actor", "cli.doctor.doctor.run_doctor", "cli.record.run_record"):  # fmt: skip
        name = path.rpartition(".")[2]
        monkeypatch.setattr(f"serl_chunk.{path}", lambda *a, name=name, **k: calls.append((name, a, k)) or 0)
    return calls


def field(config: ExperimentConfig, path: str) -> Any:
    value = to_dict(config)
    for part in path.split("."):
        value = value[part]
    return value


def test_each_alias_sets_its_field(called):
    values = {"utd_ratio": "0.5", "horizon_length": "4", "online_steps": "500", "env_name": None, "setup_mode": None}
    values["task"] = None  # a text, see below
    flags = {a.flag: (a.path, values.get(a.flag, "7")) for a in (*OF_BOTH_SIDES, *OF_THE_LEARNER)}
    given = [w for flag, (_, value) in flags.items() if value for w in (f"--{flag}", value)]
    assert main([*RUN, "--learner", "--dataset_dir", "d", *given]) == 0
    [(name, (config, options), _)] = called
    assert name == "run_learner"
    for path, value in flags.values():
        if value:
            assert field(config, path) == float(value)
    assert options.demo_options.dataset == "d"


@pytest.mark.parametrize("mode", [["--learner"], ["--actor"], ["record", "--out", "x"], ["doctor"]])
def test_the_text_of_the_task_is_a_flag_of_everything_that_records_or_acts(called, mode):
    command = [word for word in mode if not word.startswith("--")]
    flags = ["--out", "x"] if mode[0] == "record" else [] if command else mode
    assert main([*command[:1], *RUN, *flags, "--task", "fold it=twice"]) == 0
    name, arguments, _ = called[-1]
    config = next(a for a in arguments if isinstance(a, ExperimentConfig))
    assert config.robot.task == "fold it=twice", name


def test_the_environment_and_its_reward(called, tmp_path):
    (tmp_path / "play.py").write_text(OGBENCH)
    play = ["--exp_name", str(tmp_path / "play.py"), "--actor"]
    name = "cube-double-play-singletask-task2-v0"
    for flag, reward in [
        ("", "dense"),
        ("--sparse", "sparse"),
        ("--sparse=True", "sparse"),
        ("--sparse=false", "dense"),
    ]:
        assert main([*play, "--env_name", name, *([flag] if flag else [])]) == 0
        robot = called[-1][1][0].robot
        assert (robot.env_name, robot.reward) == (name, reward)


def test_presets_come_before_the_overrides_and_on_both_sides(called, tmp_path, caplog):
    flags = ["--preset", "qc", "--compat", "qc", "--config.agent.actor_num_samples=4", "--horizon_length", "3"]
    for side in ("--learner", "--actor"):
        assert main([*RUN, side, *flags]) == 0
    learner, actor = (arguments[0] for _, arguments, _ in called)
    assert learner == actor
    assert (learner.preset, learner.compat) == ("qc", "qc")
    assert (learner.agent.kind, learner.agent.candidates, learner.chunk.horizon) == ("published_qc", 4, 3)
    assert learner.replay.windows == "qc"
    with caplog.at_level("INFO"):
        print_config(learner, spec_of(learner))
    assert "preset qc, conventions of the published code qc" in caplog.messages
    run = open_run(learner, spec_of(learner), str(tmp_path))
    run.write_config()
    run.lock.close()
    saved = read_config(tmp_path)
    assert (saved["preset"], saved["compat"]) == ("qc", "qc")


def test_who_looks_at_the_experiment_takes_its_flags_too(called):
    flags = [*RUN, "--preset", "rlpd"]
    assert main(["doctor", *flags]) == 0
    assert main(["record", *flags, "--out", "d"]) == 0
    assert [arguments[0].chunk.horizon for _, arguments, _ in called] == [1, 1]


def test_offline_only_needs_no_network(called):
    offline = [*RUN, "--offline_steps", "9", "--online_steps", "0", "--demo_path", "d", "--checkpoint_path", "r"]
    assert main([*offline, "--learner", "--debug"]) == 0
    assert main([*offline, "--local"]) == 0
    assert [(n, a[1], k["threaded"]) for n, a, k in called] == [
        ("run_offline", RunOptions(["d"], "r"), True),
        ("run_offline", RunOptions(["d"], "r", wandb=True), False),
    ]


@pytest.mark.parametrize("command", [["presets"], [*RUN, "--preset", "help"]])
def test_the_presets_are_listed(command, capsys):
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(preset.description in line for line, preset in zip(lines, PRESETS.values(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--learner", "--offline_steps", "x"], ("--offline_steps", "x")),
        (["--learner", "--offline_steps", "-1"], ("--offline_steps", -1, 0)),
        (["--learner", "--env_name", "x"], ("--env_name", "FakeAlohaConfig", "max_episode_steps")),
        (["--learner", "--sparse"], ("--sparse", "FakeAlohaConfig", "reward")),
        (["--learner", "--sparse=perhaps"], ("--sparse", "perhaps", "true", "false")),
        (["--learner", "--preset", "qq"], ("--preset", "qq", "qc")),
        (["--actor", "--compat", "qq"], ("--compat", "qq", "qc")),
        (["--learner", "--config.preset=qc"], ("--config.preset", "--preset")),
        (["--learner", "--utd_ratio", "1", "--config.learner.utd_ratio=2"],
         ("--utd_ratio", "--config.learner.utd_ratio")),
        (["--learner", "--eval_episodes", "3"], ("--eval_episodes", "--eval_interval N")),
        (["--learner", "--video_episodes", "3"], ("--video_episodes", "--eval_n_trajs", "--save_video")),
        (["--learner", "--dataset_replace_interval", "3"], ("--dataset_replace_interval", "--dataset_dir DIR")),
        (["--learner", "--actor", "--online_steps", "0"], ("--online_steps", 0, "--actor")),
        (["--learner", "--bind", "0.0.0.0", "--online_steps", "0"], ("--online_steps", 0, "--bind", "--port")),
        (["--local", "--port", "5", "--online_steps", "0"], ("--port", "--local")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_status_2(capsys, called, arguments, named):
    assert main([*RUN, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(naming(*named), err)
    assert called == []


def test_a_folder_without_shards_is_named(capsys, tmp_path: Path):
    offline = [*RUN, "--learner", "--debug", "--offline_steps", "1", "--online_steps", "0"]
    assert main([*offline, "--checkpoint_path", str(tmp_path / "run"), "--dataset_dir", str(tmp_path)]) == 1
    assert re.search(naming(tmp_path, "*-val.npz"), capsys.readouterr().err)


def test_the_experiments_own_seed_and_fields_stay(called):
    assert main([*RUN, "--learner"]) == 0
    assert called[0][1][0] == load("fake_aloha", [])
