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
from serl_chunk.learner.building import RunOptions
from serl_chunk.main import main
from serl_chunk.runs.folder import CONFIG, FORMAT, write_json
from serl_chunk.types import ConfigError, DataError
from serl_chunk.version import version_info

RUN = ["--exp_name", "fake_aloha"]
EVALUATE = ["--eval_checkpoint_step", "5", "--eval_n_trajs", "2"]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 2) -> str:
    """What a refused command line says: one line, on standard error alone."""
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("serl-chunk: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.removeprefix("serl-chunk: ").strip()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict[str, Any]]]:
    """(command, arguments, keywords) of what would have been run."""
    calls: list[tuple[str, tuple, dict[str, Any]]] = []

    def replace(path: str) -> None:
        monkeypatch.setattr(path, lambda *a, **k: calls.append((path.rpartition(".")[2], a, k)) or 0)

    for path in ("cli.local.run_local", "fleet.local.run_both", "cli.learner.run_learner",
                 "cli.evaluation.run_evaluation", "cli.actor.run_training_actor", "cli.record.run_record"):  # fmt: skip
        replace(f"serl_chunk.{path}")
    return calls


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--learner"], ("--exp_name", "fake_aloha", ".py")),
        (
            ["train"],
            ("train", "record", "report", "keys", "doctor", "data", "presets", "--help"),
        ),
        (RUN, ("--learner", "--actor", "--local")),
        ([*RUN, "--lerner"], ("--lerner", "--learner", "serl-chunk --help_all")),
        ([*RUN, "--learn"], ("--learn", "--learner")),  # no abbreviations
        ([*RUN, "--learner", "extra"], ("extra", "--config.FIELD=VALUE")),
        ([*RUN, "--learner", "--seed", "x"], ("--seed", "int", "x", "serl-chunk --help")),
        ([*RUN, "--learner", "--port"], ("--port", "serl-chunk --help")),
        ([*RUN, "--learner", "--config.agent.ler=1"], ("--config.agent.ler", "'lr'")),
        ([*RUN, "--learner", "--config.agent.lr"], ("--config.agent.lr", "--config.agent.lr=VALUE")),
        ([*RUN, "--learner", "--config.agent.lr=0"], ("agent.lr", 0.0)),
        (["--exp_name", "fake_aloa", "--learner"], ("fake_aloa", "'fake_aloha'")),
        (["--exp_name", "no.py", "--learner"], ("--exp_name", "no.py", "fake_aloha")),
        (
            [*RUN, "--actor", "--eval_checkpoint_step", "5", "--eval_n_trajs", "-3"],
            ("--eval_n_trajs", -3, 1),
        ),
        ([*RUN, "--actor", "--demo_paths", "x"], ("--demo_paths", "--demo_path")),
        ([*RUN, "--actor", "--set", "agent.lr=1"], ("--set", "--config.FIELD=VALUE")),
        (
            [*RUN, "--actor", "--eval_checkpoint_step", "5"],
            ("--eval_checkpoint_step N", "--eval_n_trajs K", "latest", "best"),
        ),
        ([*RUN, "--actor", "--eval_n_trajs", "5"], ("--eval_checkpoint_step N", "--eval_n_trajs K", "latest", "best")),
        ([*RUN, "--local", "--learner"], ("--local", "--learner", "--actor")),
        ([*RUN, "--learner", "--actor", *EVALUATE], ("evaluation", "--actor", "--learner", "--local")),
        ([*RUN, "--learner", *EVALUATE], ("evaluation", "--actor", "--learner", "--local")),
        ([*RUN, "--local", *EVALUATE], ("evaluation", "--actor", "--learner", "--local")),
        ([*RUN, "--actor", "--save_video"], ("--save_video", "--eval_checkpoint_step N", "--eval_n_trajs K")),
        ([*RUN, "--actor", "--eval_stochastic"], ("--eval_stochastic", "--eval_checkpoint_step N", "--eval_n_trajs K")),
        (
            [*RUN, "--actor", *EVALUATE, "--eval_arm", "both", "--config.agent.candidates", "1"],
            ("--eval_arm", "both", "agent.candidates", 1),
        ),
        ([*RUN, "--learner", "--pin_cores"], ("--pin_cores", "--learner", "--actor")),
        ([*RUN, "--learner", "--ip", "gpu"], ("--ip", "--learner")),
        ([*RUN, "--learner", "--keys", "k", "--insecure"], ("--insecure", "--keys")),
        ([*RUN, "--local", "--keys", "k"], ("--local", "--keys")),
        ([*RUN, "--local", "--insecure"], ("--local", "--insecure")),
        (
            [*RUN, "--actor", *EVALUATE, "--checkpoint_path", "r", "--keys", "k"],
            ("--keys", "--ip", "--checkpoint_path"),
        ),
        (["keys"], ("init|add|join|list|revoke", "serl-chunk keys --help")),
        (["keys", "remove"], ("remove", "init", "add", "serl-chunk keys --help")),
        (["keys", "add"], ("NAME", "serl-chunk keys add --help")),
        (["keys", "join"], ("LINE", "serl-chunk keys join --help")),
        (["keys", "add", "left", "--port", "65535"], ("--port", 65535, "1..65533")),
        (["record", *RUN], ("--out", "serl-chunk record --help")),
        (["record", *RUN, "--out", "x", "--n_demo", "3"], ("--n_demo", "--n_demos")),
        (["record", "--out", "x"], ("--exp_name", "fake_aloha", ".py")),
        (["report"], ("run", "serl-chunk report --help")),
        (["report", "a", "b", "--films", "1"], ("--films",)),
    ],
    ids=lambda v: " ".join(v) or "nothing" if isinstance(v, list) else "",
)
def test_a_mistake_is_one_sentence_and_status_2(capsys, called, arguments, named):
    assert re.search(naming(*named), refused(capsys, arguments))
    assert called == []


def test_a_bad_robot_camera_or_demonstrator_is_refused(capsys, tmp_path):
    out = ["record", *RUN, "--out", str(tmp_path / "demos")]
    assert re.search(naming("--policy", "me", "scripted"), refused(capsys, [*out, "--policy", "me"]))
    assert re.search(naming("--n_demos", 0, 1), refused(capsys, [*out, "--n_demos", "0"]))
    assert re.search(naming("fake_aloha", "roof", "left_wrist"), refused(capsys, [*out, "--cameras", "roof"]))
    assert re.search(naming("--cameras", "top"), refused(capsys, [*out, "--cameras", "top,top"]))
    assert not (tmp_path / "demos").exists()


def test_a_camera_that_the_robot_has_not_is_named_before_any_data_are_read(capsys, tmp_path):
    run = [
        *RUN,
        "--local",
        "--debug",
        "--checkpoint_path",
        str(tmp_path / "run"),
        "--demo_path",
        str(tmp_path / "none"),
    ]
    assert re.search(naming("fake_aloha", "roof", "top"), refused(capsys, [*run, "--config.agent.image_keys=roof"]))


def test_local_training_that_cannot_start_says_why(capsys, tmp_path):
    (tmp_path / "demo.pkl").write_bytes(b"x")
    run = [*RUN, "--local", "--debug", "--checkpoint_path", str(tmp_path / "run"), "--demo_path"]
    for path, named, status in [("nowhere", "nowhere", 2), ("demo.pkl", "demo.pkl", 1), ("", "HDF5", 2)]:
        assert main([*run, str(tmp_path / path) if path else path]) == status
        assert re.search(naming(named), capsys.readouterr().err)


def test_an_evaluation_of_what_is_not_there(capsys, tmp_path):
    evaluate = [*RUN, "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "1", "--checkpoint_path"]
    assert re.search(naming(tmp_path, "config.json"), refused(capsys, [*evaluate, str(tmp_path)]))
    write_json(tmp_path / CONFIG, {"format": FORMAT, "name": "other"})
    assert re.search(naming(tmp_path, "other", "fake_aloha"), refused(capsys, [*evaluate, str(tmp_path)]))
    write_json(tmp_path / CONFIG, {"format": FORMAT, "name": "fake_aloha"})
    assert re.search(naming(tmp_path, "checkpoint"), refused(capsys, [*evaluate, str(tmp_path)], status=1))
    assert main(["report", str(tmp_path / "nowhere")]) != 0
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--actor --demo_path d", ("--demo_path", "--actor")),
        ("--actor --checkpoint_path r", ("--checkpoint_path", "--actor")),
        ("--actor --demo_success", ("--demo_success", "--actor")),
        ("--learner --actor_id left", ("--actor_id", "--learner")),
        ("--learner --spool_path s", ("--spool_path", "--learner")),
        ("--local --bind 0.0.0.0", ("--bind", "--local")),
        ("--local --ip gpu", ("--ip", "--local")),
        ("--actor --eval_checkpoint_step 1 --eval_n_trajs 1 --demo_path d", ("--demo_path", "evaluation")),
        ("--actor --eval_checkpoint_step 1 --eval_n_trajs 1 --checkpoint_path r --ip h", ("--checkpoint_path", "--ip")),
        ("--actor --eval_checkpoint_step 1", ("--eval_checkpoint_step N", "--eval_n_trajs K")),
        ("--actor --eval_n_trajs 1", ("--eval_checkpoint_step N", "--eval_n_trajs K")),
        ("--learner --seed -1", ("--seed", -1, 0, 2147483647)),
        ("--learner --demo_scores x", ("--demo_scores", "x", "FOLDER=REWARD")),
        ("--learner --config.actor.inference=async", ("--config.actor.inference", "async", "actor.clock", "realtime")),
    ],
)
def test_flags_and_fields_without_a_use_are_refused(capsys, called, arguments, named):
    assert re.search(naming(*named), refused(capsys, [*RUN, *arguments.split()]))
    assert called == []


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


def test_another_algorithm_than_the_runs_is_refused_before_its_parameters_are(capsys, tmp_path):
    write_json(tmp_path / CONFIG, {"format": FORMAT, "name": "fake_aloha", "preset": "qc", "compat": ""})
    evaluate = [*RUN, "--actor", "--eval_checkpoint_step", "0", "--eval_n_trajs", "1", "--checkpoint_path"]
    assert re.search(naming(tmp_path, "--preset", "qc"), refused(capsys, [*evaluate, str(tmp_path)]))
    other = refused(capsys, [*evaluate, str(tmp_path), "--preset", "qc", "--compat", "qc"])
    assert re.search(naming(tmp_path, "--compat", "none", "qc"), other)


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


def test_a_learner_listens_to_this_machine_unless_told_otherwise(called):
    assert main([*RUN, "--learner"]) == 0
    assert called[0][1][1] == RunOptions([], wandb=True)
    assert called[0][2] == {"bind": "127.0.0.1", "port": 5588, "insecure": False, "keys": None}


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


def test_zero_means_no_evaluation(called):
    assert main([*RUN, "--actor", "--eval_checkpoint_step", "0", "--eval_n_trajs", "0"]) == 0
    assert called[0][0] == "run_training_actor"


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


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("serl_chunk.cli.local.run_local", interrupt)
    assert main([*RUN, "--local"]) == 130
    assert capsys.readouterr().err == "serl-chunk: interrupted\n"


@pytest.mark.parametrize("command", [["record"], ["report"], ["keys"], ["keys", "join"], ["config"], ["new"]])
def test_help_names_the_flags(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    assert " ".join(["usage: serl-chunk", *command]) in capsys.readouterr().out


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
    assert re.search(naming(*named), refused(capsys, [*RUN, "--local", "--utd_ratio", "0.5"], status))


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
