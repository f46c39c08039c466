"""The command line: one sentence and status 2 for a mistake, status 1 for a failure, and each flag to its command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.commands import COMMANDS
from serl_chunk.cli.evaluation import EvaluationOptions
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import OF_BOTH_SIDES, OF_THE_LEARNER, load, print_config, spec_of
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.presets import PRESETS
from serl_chunk.learner.building import RunOptions
from serl_chunk.main import main
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.types import ConfigError, DataError
from serl_chunk.version import version_info

RUN = ["--exp_name", "fake_aloha"]
EVALUATE = ["--eval_checkpoint_step", "5", "--eval_n_trajs", "2"]


OGBENCH = """
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
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
                 "cli.actor.run_training_actor", "cli.doctor.doctor.run_doctor",
                 "cli.record.run_record", "cli.evaluation.run_evaluation"):  # fmt: skip
        name = path.rpartition(".")[2]
        monkeypatch.setattr(f"serl_chunk.{path}", lambda *a, name=name, **k: calls.append((name, a, k)) or 0)
    return calls


def test_both_processes_of_one_command_share_its_flags(called):
    shared = [*RUN, "--launched_with_learner", "--demo_path", "d", "--checkpoint_path", "r", "--actor_id", "left"]
    assert main([*shared, "--learner"]) == 0
    assert main([*shared, "--actor"]) == 0
    assert [name for name, *_ in called] == ["run_learner", "run_training_actor"]


def test_checkpoint_0_is_evaluated_where_episodes_are_asked_for(called):
    flags = ["--actor", "--eval_checkpoint_step", "0"]
    assert main([*RUN, *flags, "--eval_n_trajs", "3", "--checkpoint_path", "r"]) == 0
    assert main([*RUN, *flags]) == 0  # HIL-SERL's default
    [(first, (_, options, source), _), (second, *_)] = called
    assert (first, options.steps, options.n, source) == ("run_evaluation", ("0",), 3, Path("r"))
    assert second == "run_training_actor"
    assert main([*RUN, *flags, "--eval_n_trajs", "0"]) == 0
    assert called[2][0] == "run_training_actor"


def test_flags_reach_the_learner(called):
    flags = ["--learner", "--bind", "0.0.0.0", "--insecure", "--port", "7000", "--demo_path", "a", "--demo_path", "b",
             "--checkpoint_path", "run", "--debug", "--seed", "3", "--config.agent.lr=0.5",
             "--demo_color", "bgr", "--demo_success", "--demo_format", "episodes"]  # fmt: skip
    assert main([*RUN, *flags]) == 0
    [(name, (config, (demos, run, demo_options, wandb)), keywords)] = called
    assert (name, demos, run, config.seed, config.agent.lr) == ("run_learner", ["a", "b"], "run", 3, 0.5)
    assert (demo_options.options.color, demo_options.options.success, demo_options.format) == ("bgr", True, "episodes")
    assert keywords == {"bind": "0.0.0.0", "port": 7000, "insecure": True, "keys": None}
    assert not wandb
    assert main([*RUN, "--learner"]) == 0
    assert called[1][1] == (load("fake_aloha", []), RunOptions([], wandb=True))
    assert called[1][2] == {"bind": "127.0.0.1", "port": 5588, "insecure": False, "keys": None}


def test_flags_reach_the_actor(called):
    assert main([*RUN, "--actor"]) == 0
    assert main([*RUN, "--actor", "--ip", "gpu", "--port", "7000", "--actor_id", "left"]) == 0
    assert [(n, a[1:]) for n, a, _ in called] == [
        ("run_training_actor", (LearnerAddress("127.0.0.1", 5588), None)),
        ("run_training_actor", (LearnerAddress("gpu", 7000, "left"), None)),
    ]


def test_keys_reach_every_command_of_the_network(called):
    evaluation = [*RUN, "--actor", *EVALUATE, "--ip", "gpu"]
    for arguments in ([*RUN, "--learner"], [*RUN, "--actor"], evaluation):
        assert main([*arguments, "--keys", "k"]) == 0
        assert main([*arguments, "--insecure"]) == 0
    learner, rest = called[:2], [next(x for x in a if isinstance(x, LearnerAddress)) for _, a, _ in called[2:]]
    assert [(k["keys"], k["insecure"]) for _, _, k in learner] == [("k", False), (None, True)]
    assert [(a.keys, a.insecure) for a in rest] == [("k", False), (None, True)] * 2


def test_flags_reach_the_evaluation(called):
    base = [*RUN, "--actor", "--eval_checkpoint_step", "best", "--eval_n_trajs", "7"]
    assert main([*base, "--checkpoint_path", "run"]) == 0
    flags = ["--save_video", "--eval_stochastic", "--eval_validation", "--eval_arm", "both"]
    assert main([*base, "--ip", "gpu", *flags]) == 0
    plain, full = called
    assert plain[0] == "run_evaluation"
    assert plain[1][1:] == (EvaluationOptions(("best",), 7), Path("run"))
    assert full[1][1:] == (EvaluationOptions(("best",), 7, *[True] * 3, ("one", "best")), LearnerAddress("gpu", 5588))


def test_both_flags_start_two_processes_with_what_was_given(called):
    assert main([*RUN, "--learner", "--actor", "--pin_cores", "--seed", "3", "--config.agent.lr", "0.5"]) == 0
    shared = [*RUN, "--seed", "3", "--config.agent.lr", "0.5"]
    assert called == [("run_both", ([*shared, "--launched_with_learner"],), {"pin": True, "ip": "127.0.0.1"})]


@pytest.mark.parametrize(
    ("bind", "ip"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("localhost", "localhost"), ("10.0.0.5", "10.0.0.5")]
)
def test_an_actor_beside_its_learner_connects_to_where_it_listens(called, bind, ip):
    assert main([*RUN, "--learner", "--actor", "--bind", bind, "--insecure"]) == 0
    assert called[0][2] == {"pin": False, "ip": ip}


def test_flags_reach_the_recorder(called):
    flags = ["record", *RUN, "--n_demos", "3", "--out", "d", "--noise", "0.1", "--cameras", "all"]
    assert main(flags) == 0
    [(_, (config, count, out), keywords)] = called
    assert (config.name, count, out) == ("fake_aloha", 3, "d")
    assert len(keywords.pop("cameras")) == 3
    assert keywords == {"policy": "scripted", "noise": 0.1, "keep": "successes", "viewer": None}


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
def test_what_records_or_acts_takes_the_experiments_flags(called, mode):
    assert main([*mode, *RUN, "--task", "fold it=twice", "--preset", "rlpd"]) == 0
    [(_, arguments, _)] = called
    config = next(a for a in arguments if isinstance(a, ExperimentConfig))
    assert (config.robot.task, config.chunk.horizon) == ("fold it=twice", 1)


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


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("serl_chunk.cli.local.run_local", interrupt)
    assert main([*RUN, "--local"]) == 130
    assert capsys.readouterr().err == "serl-chunk: interrupted\n"


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["--help_all"]])
def test_the_help_is_short_unless_all_of_it_is_wanted(arguments, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    flags = set(re.findall(r"^  --(\w+)", text, re.MULTILINE))
    most_used = {"exp_name", "learner", "actor", "local", "demo_path", "checkpoint_path", "ip", "bind", "preset"}
    assert most_used | {"eval_checkpoint_step", "eval_n_trajs", "help_all", "version"} <= flags
    assert text.count("  serl-chunk ") >= 3  # examples
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)
    if arguments == ["--help_all"]:
        assert flags > most_used | {"save_video", "port", "keys", "insecure", "utd_ratio"}
    else:
        assert len(flags) <= 14
        assert len(text.splitlines()) < 56


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version_info().text


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ConfigError("must be above 0, got 0", parameter="agent.lr"), 2, ("--config.agent.lr", 0)),
        (ConfigError("must be above 0, got 0", parameter="learner.utd_ratio"), 2, ("--utd_ratio", 0)),
        (ConfigError("no such file", parameter="demo_path"), 2, ("--demo_path", "no such file")),
        (ConfigError("it is slow", parameter="somewhere.else"), 2, ("somewhere.else",)),
        (DataError("episode_0.hdf5: it is damaged"), 1, ("episode_0.hdf5",)),
        (OSError(28, "No space left on device", "runs/x"), 1, ("runs/x", "No space left on device", "Free space")),
        (PermissionError(13, "Permission denied", "runs/x"), 1, ("runs/x", "Permission denied", "permissions")),
        (TimeoutError(), 1, ("TimeoutError",)),
    ],
    ids=repr,
)
def test_an_error_is_one_line_with_a_status(monkeypatch, capsys, error, status, named):
    def fails(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr("serl_chunk.cli.local.run_local", fails)
    assert main([*RUN, "--local", "--utd_ratio", "0.5"]) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("serl-chunk: ")) == ("", 1, True)
    assert re.search(naming(*named), err)


def test_the_package_is_a_command_too():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "serl_chunk", "--exp_name", "nothing", "--learner"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("serl-chunk: --exp_name: unknown experiment 'nothing'")
