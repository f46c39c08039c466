"""The command line: one sentence and status 2 for a mistake, status 1 for a failure, and each flag to its command."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.evaluation import EvaluationOptions
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import print_config
from serl_chunk.data.source import ReadOptions
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import DemoOptions
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.types import ConfigError, DataError
from serl_chunk.version import version_info

RUN = ["--exp_name", "fake_aloha"]


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


LATEST = ["--actor", "--eval_checkpoint_step", "0"]
BEST = ["--actor", "--eval_checkpoint_step", "best", "--eval_n_trajs", "7"]
SHARED = ["--launched_with_learner", "--demo_path", "d", "--checkpoint_path", "r", "--actor_id", "left"]
OFFLINE = ["--offline_steps", "9", "--online_steps", "0", "--demo_path", "d", "--checkpoint_path", "r"]
GPU = LearnerAddress("gpu", 5588)
HERE = LearnerAddress("127.0.0.1", 5588)
ALL_OF_EVALUATION = ["--save_video", "--eval_stochastic", "--eval_validation", "--eval_arm", "both"]
# flags -> the command that they start, its arguments but for the configuration, and some of its keywords
CALLS: list[tuple[list[str], str, tuple[Any, ...], dict[str, Any]]] = [
    (["--learner"], "run_learner", (RunOptions([], wandb=True),),
     {"bind": "127.0.0.1", "port": 5588, "insecure": False, "keys": None}),
    (["--learner", "--bind", "0.0.0.0", "--insecure", "--port", "7000", "--demo_path", "a", "--demo_path", "b",
      "--debug", "--checkpoint_path", "run", "--demo_color", "bgr", "--demo_success", "--demo_format", "episodes"],
     "run_learner", (RunOptions(["a", "b"], "run", 
      DemoOptions(ReadOptions(color="bgr", success=True, solved="keep"), "episodes")),),
     {"bind": "0.0.0.0", "port": 7000, "insecure": True, "keys": None}),
    ([*SHARED, "--actor"], "run_training_actor", (dataclasses.replace(HERE, actor_id="left"), None), {"viewer": None}),
    (["--actor"], "run_training_actor", (HERE, None), {}),
    (["--actor", "--ip", "gpu", "--port", "7000", "--actor_id", "left", "--keys", "k", "--spool_path", "s"],
     "run_training_actor", (LearnerAddress("gpu", 7000, "left", "k"), "s"), {}),
    (LATEST, "run_training_actor", (HERE, None), {}),  # HIL-SERL's default
    ([*LATEST, "--eval_n_trajs", "3", "--checkpoint_path", "r"], "run_evaluation",
     (EvaluationOptions(("0",), 3), Path("r")), {}),
    ([*BEST, "--ip", "gpu", *ALL_OF_EVALUATION], "run_evaluation",
     (EvaluationOptions(("best",), 7, *[True] * 3, ("one", "best")), GPU), {"viewer": None}),
    ([*BEST, "--ip", "gpu", "--keys", "k"], "run_evaluation",
     (EvaluationOptions(("best",), 7), dataclasses.replace(GPU, keys="k")), {}),
    ([*OFFLINE, "--learner", "--debug"], "run_offline", (RunOptions(["d"], "r"),), {"threaded": True}),
    ([*OFFLINE, "--local"], "run_offline", (RunOptions(["d"], "r", wandb=True),), {"threaded": False}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "arguments", "keywords"), CALLS)
def test_flags_reach_their_command(called, flags, name, arguments, keywords):
    assert main([*RUN, *flags, "--seed", "3", "--config.agent.lr=0.5"]) == 0
    [(found, (config, *rest), options)] = called
    assert (found, tuple(rest), config.seed, config.agent.lr) == (name, arguments, 3, 0.5)
    assert {key: options[key] for key in keywords} == keywords


def test_both_flags_start_two_processes_with_what_was_given(called):
    assert main([*RUN, "--learner", "--actor", "--pin_cores", "--seed", "3", "--config.agent.lr", "0.5"]) == 0
    shared = [*RUN, "--seed", "3", "--config.agent.lr", "0.5"]
    assert called == [("run_both", ([*shared, "--launched_with_learner"],), {"pin": True, "ip": "127.0.0.1"})]
    # The actor beside its learner connects to where that listens.
    for bind, ip in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "10.0.0.5")):
        assert main([*RUN, "--learner", "--actor", "--bind", bind, "--insecure"]) == 0
        assert called[-1][2] == {"pin": False, "ip": ip}


def test_flags_reach_the_recorder(called):
    assert main(["record", *RUN, "--n_demos", "3", "--out", "d", "--noise", "0.1", "--cameras", "all"]) == 0
    [(_, (config, count, out), keywords)] = called
    assert (config.name, count, out) == ("fake_aloha", 3, "d")
    assert len(keywords.pop("cameras")) == 3
    assert keywords == {"policy": "scripted", "noise": 0.1, "keep": "successes", "viewer": None}


def test_presets_come_before_the_overrides_and_on_both_sides(called, tmp_path, caplog):
    flags = ["--preset", "qc", "--compat", "qc", "--config.agent.actor_num_samples=4", "--horizon_length", "3"]
    for side in ("--learner", "--actor"):
        assert main([*RUN, side, *flags]) == 0
    learner, actor = (arguments[0] for _, arguments, _ in called)
    assert learner == actor
    assert (learner.preset, learner.compat, learner.replay.windows) == ("qc", "qc", "qc")
    assert (learner.agent.kind, learner.agent.candidates, learner.chunk.horizon) == ("published_qc", 4, 3)
    with caplog.at_level("INFO"):
        print_config(learner, spec_of(learner))
    assert "preset qc, conventions of the published code qc" in caplog.messages
    run = open_run(learner, spec_of(learner), str(tmp_path))
    run.write_config()
    run.lock.close()
    saved = read_config(tmp_path)
    assert (saved["preset"], saved["compat"]) == ("qc", "qc")


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version_info().text


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ConfigError("must be above 0, got 0", parameter="agent.lr"), 2, ("--config.agent.lr", 0)),
        (ConfigError("no such file", parameter="demo_path"), 2, ("--demo_path", "no such file")),
        (DataError("episode_0.hdf5: it is damaged"), 1, ("episode_0.hdf5",)),
        (OSError(28, "No space left on device", "runs/x"), 1, ("runs/x", "No space left on device", "Free space")),
        (TimeoutError(), 1, ("TimeoutError",)),
        (KeyboardInterrupt(), 130, ("interrupted",)),
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
