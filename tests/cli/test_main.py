"""The command line: one sentence and status 2 for a mistake, status 1 for a failure, and each flag to its command."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from coded_episodes import SPEC
from coded_replay import coded
from errors import naming

from serl_chunk.cli.evaluation import EvaluationOptions
from serl_chunk.cli.keys import LearnerAddress
from serl_chunk.cli.process import print_config
from serl_chunk.config.loader import load_experiment
from serl_chunk.data.demos import load_demos
from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.source import ReadOptions
from serl_chunk.learner.building import RunOptions
from serl_chunk.learner.offline_data import DemoOptions
from serl_chunk.logs import logging_to_stdout
from serl_chunk.main import main
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.robots.registry import make_env, robot_spec
from serl_chunk.runs.checkpoints import read_item
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.runs.status_line import StatusLine
from serl_chunk.types import ConfigError, DataError
from serl_chunk_robot import output
from serl_chunk_robot.output import background_output

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
ALL_OF_EVALUATION = [
    "--save_video",
    "3",
    "--eval_stochastic",
    "--eval_validation",
    "--eval_arm",
    "both",
    "--n_envs",
    "9",
]
# flags -> the command that they start, its arguments but for the configuration, and some of its keywords
CALLS: list[tuple[list[str], str, tuple[Any, ...], dict[str, Any]]] = [
    (["--learner"], "run_learner", (RunOptions([], wandb=True),),
     {"bind": "127.0.0.1", "port": 5588, "insecure": False, "keys": None}),
    (["--learner", "--bind", "0.0.0.0", "--insecure", "--port", "7000", "--demo_path", "a", "--demo_path", "b",
      "--debug", "--checkpoint_path", "run", "--demo_color", "bgr", "--demo_success", "--demo_format", "episodes"],
     "run_learner", (RunOptions(["a", "b"], "run", 
      DemoOptions(ReadOptions(color="bgr", success=True, solved="keep"), "episodes")),),
     {"bind": "0.0.0.0", "port": 7000, "insecure": True, "keys": None}),
    ([*SHARED, "--actor", "--n_envs", "4"], "run_training_actor", (dataclasses.replace(HERE, actor_id="left"), None),
     {"viewer": None, "n_envs": 4}),
    (["--actor"], "run_training_actor", (HERE, None), {}),
    (["--actor", "--ip", "gpu", "--port", "7000", "--actor_id", "left", "--keys", "k", "--spool_path", "s"],
     "run_training_actor", (LearnerAddress("gpu", 7000, "left", "k"), "s"), {}),
    (LATEST, "run_training_actor", (HERE, None), {}),  # HIL-SERL's default
    ([*LATEST, "--eval_n_trajs", "3", "--checkpoint_path", "r"], "run_evaluation",
     (EvaluationOptions(("0",), 3), Path("r")), {}),
    ([*BEST, "--ip", "gpu", *ALL_OF_EVALUATION], "run_evaluation",
     (EvaluationOptions(("best",), 7, 3, True, True, ("one", "best"), 9), GPU), {"viewer": None}),
    ([*BEST, "--ip", "gpu", "--keys", "k"], "run_evaluation",
     (EvaluationOptions(("best",), 7), dataclasses.replace(GPU, keys="k")), {}),
    ([*OFFLINE, "--learner", "--debug", "--eval_interval", "9", "--n_envs", "4"], "run_offline",
     (RunOptions(["d"], "r", n_envs=4),), {"threaded": True}),
    ([*OFFLINE, "--local"], "run_offline", (RunOptions(["d"], "r", wandb=True),), {"threaded": False}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "arguments", "keywords"), CALLS)
def test_flags_reach_their_command(called, flags, name, arguments, keywords):
    assert main([*RUN, *flags, "--seed", "3", "--config.agent.lr=0.5"]) == 0
    [(found, (config, *rest), options)] = called
    assert (found, tuple(rest), config.seed, config.agent.lr) == (name, arguments, 3, 0.5)
    assert {key: options[key] for key in keywords} == keywords


def test_a_task_that_undoes_another_has_its_learner_and_the_same_overrides(called):
    flags = ["--actor", "--actor_id", "cell", "--undone_by", "fake_aloha_images@gpu:7000", "--config.agent.lr=0.5"]
    assert main([*RUN, *flags]) == 0
    [(_, (config, address, _), options)] = called
    other = options["undone_by"]
    assert (other.config.name, other.config.agent.lr, config.agent.lr) == ("fake_aloha_images", 0.5, 0.5)
    assert (address, other.address) == tuple(LearnerAddress(ip, port, "cell") for ip, port in (
        ("127.0.0.1", 5588), ("gpu", 7000),
    ))  # fmt: skip


def test_both_flags_start_two_processes_with_what_was_given(called):
    assert main([*RUN, "--learner", "--actor", "--pin_cores", "--seed", "3", "--config.agent.lr", "0.5"]) == 0
    shared = [*RUN, "--seed", "3", "--config.agent.lr", "0.5"]
    keywords = {"pin": True, "ip": "127.0.0.1", "actors": []}
    assert called == [("run_both", ([*shared, "--launched_with_learner"],), keywords)]
    # The actor beside its learner connects to where that listens.
    for bind, ip in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "10.0.0.5")):
        assert main([*RUN, "--learner", "--actor", "--bind", bind, "--insecure"]) == 0
        assert called[-1][2] == {"pin": False, "ip": ip, "actors": []}
    for flags, actors in (([], ["actor-1", "actor-2"]), (["--actor_id", "cell"], ["cell-1", "cell-2"])):
        assert main([*RUN, "--learner", "--actor", "--actors", "2", "--viewer", "0", *flags]) == 0
        assert called[-1][2]["actors"] == actors


def test_presets_come_before_the_overrides_and_on_both_sides(called, tmp_path, caplog):
    flags = ["--preset", "qc", "--compat", "qc", "--config.agent.actor_num_samples=4", "--horizon_length", "3"]
    for side in ("--learner", "--actor"):
        assert main([*RUN, side, *flags]) == 0
    learner, actor = (arguments[0] for _, arguments, _ in called)
    assert (learner, learner.preset, learner.compat, learner.replay.windows) == (actor, "qc", "qc", "qc")
    assert (learner.agent.kind, learner.agent.candidates, learner.chunk.horizon) == ("published_qc", 4, 3)
    with caplog.at_level("INFO"):
        print_config(learner, spec_of(learner))
    assert "preset qc, conventions of the published code qc" in caplog.messages
    run = open_run(learner, spec_of(learner), str(tmp_path))
    run.write_config()
    run.lock.close()
    saved = read_config(tmp_path)
    assert (saved["preset"], saved["compat"]) == ("qc", "qc")


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ConfigError("must be above 0, got 0", parameter="agent.lr"), 2, ("--config.agent.lr", 0)),
        (ConfigError("no such file", parameter="demo_path"), 2, ("--demo_path", "no such file")),
        (DataError("episode_0.hdf5: it is damaged"), 1, ("episode_0.hdf5",)),
        (OSError(28, "No space left on device", "runs/x"), 1, ("runs/x", "No space left on device", "Free space")),
        (TimeoutError(), 1, ("TimeoutError",)),
        (AssertionError(), 1, ("JAX_PLATFORMS", "not installed", "cpu", "pip install 'jax[cuda12]'")),
        (KeyboardInterrupt(), 130, ("interrupted",)),
    ],
    ids=repr,
)
def test_an_error_is_one_line_with_a_status(monkeypatch, capsys, error, status, named):
    if isinstance(error, AssertionError):  # as where JAX_PLATFORMS=cuda, without the plugin
        monkeypatch.setattr("jax.devices", Mock(side_effect=AssertionError))
        with pytest.raises(AssertionError):  # not taken for damage
            read_item(Path("0"), "policy")
    monkeypatch.setattr("serl_chunk.cli.local.run_local", Mock(side_effect=error))
    assert main([*RUN, "--local", "--utd_ratio", "0.5"]) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("serl-chunk: ")) == ("", 1, True)
    assert re.search(naming(*named), err)


@pytest.mark.parametrize("line", ["presets", "data inspect T", "data stats --help"])
def test_output_that_is_read_in_part_or_not_at_all_ends_a_command_quietly(monkeypatch, capfd, tmp_path, line):
    write_episode(tmp_path / "episode_0.hdf5", coded(0, 4).episode(), SPEC)
    words = line.replace("T", str(tmp_path)).split()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(words) == 128 + signal.SIGPIPE
    monkeypatch.setattr(sys, "stdout", None)  # closed by the shell
    with contextlib.suppress(SystemExit):
        assert main(words) == 0
    sys.stdout.close()
    assert capfd.readouterr() == ("", "")


def test_a_new_experiment_runs_as_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["new", "rig.py"]) == 0
    assert "serl-chunk record --exp_name ./rig.py" in capsys.readouterr().out
    config = load_experiment("./rig.py")
    assert (config.name, config.robot.task) == ("rig", "move the gripper over the target")
    spec = robot_spec(config.robot)
    assert [camera.name for camera in spec.cameras] == ["top"]
    env = make_env(config.robot)
    first = [env.reset(seed=3)[0]["state"] for _ in range(2)]
    np.testing.assert_array_equal(*first)
    assert main(["record", "--exp_name", "./rig.py", "--n_demos", "2", "--out", "demos"]) == 0
    demos = load_demos(["demos"], spec)
    assert [e.end.terminated for e in demos.episodes] == [True, True]
    written = Path("rig.py").read_bytes()
    assert main(["new", "rig.py"]) == 2
    assert Path("rig.py").read_bytes() == written


def test_settings_are_shown_with_unit_meaning_and_mark(capsys):
    assert main(["config", "fake_aloha", "--config.agent.lr=0.001"]) == 0
    text = capsys.readouterr().out
    for line in (r"\* agent\.lr +0\.001 +learning rate", r"  transport\.timeout_s +5\.0 s +\w"):
        assert re.search(f"^{line}", text, re.MULTILINE)
    assert main(["config", "fake_aloha", "agent.critic"]) == 0
    assert {line[2:15] for line in capsys.readouterr().out.splitlines()[1:]} == {"agent.critic."}


PATIENCE = 60.0  # seconds


@pytest.fixture
def to_descriptor(monkeypatch):
    def point(descriptor: int) -> None:
        for name in ("stdout", "stderr"):
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            monkeypatch.setattr(sys, name, stream)

    return point


def prints(lines: int) -> bool:
    thread = threading.Thread(target=lambda: print_all(lines), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def print_all(lines: int) -> None:
    with logging_to_stdout(), StatusLine(clock=iter(range(0, 1_000_000, 100)).__next__) as status:
        for i in range(lines):
            print(f"line {i} " + "x" * 90, flush=True)
            status.update("train", {"step": i})


def test_a_pipe_without_a_reader_stops_no_thread_and_drops_are_counted(to_descriptor, monkeypatch):
    monkeypatch.setattr(output, "FLUSH_SECONDS", 0.2)
    reader, writer = os.pipe()
    to_descriptor(writer)
    with background_output() as thread:
        assert prints(4_000), "a line was waited for"
        found, printed = os.read(reader, 1 << 20), 8_000
        while b"were dropped" not in found:  # it goes on once it is read
            print("once more", flush=True)
            printed += 1
            found += os.read(reader, 1 << 20)
    os.close(writer)
    found += b"".join(iter(lambda: os.read(reader, 1 << 20), b""))
    os.close(reader)
    assert found.startswith(b"line 0 x")
    notes = re.findall(rb"WARNING: (\d+) lines of output were dropped", found)
    assert thread.dropped == sum(map(int, notes)) > 1_000
    assert found.count(b"\n") - len(notes) + thread.dropped == printed  # each line is there or counted


@pytest.mark.parametrize("gone", ["EIO", "EPIPE"])
def test_a_terminal_that_is_gone_raises_nothing(to_descriptor, gone):
    ours, theirs = pty.openpty() if gone == "EIO" else os.pipe()
    to_descriptor(theirs)
    with background_output() as thread:
        print("seen", flush=True)
        assert b"seen" in os.read(ours, 100)
        os.close(ours)
        with pytest.raises(OSError) as raised:  # noqa: PT011 (its number is looked at)
            os.write(theirs, b"x")
        assert errno.errorcode[raised.value.errno] == gone
        print_all(500)
        print("more", file=sys.stderr, flush=True)
    assert thread.dropped == 0  # what cannot be written is not kept
    os.close(theirs)


def test_lines_arrive_whole_in_order_and_before_the_end():
    """In a process of its own, which leaves by an exit in the block, with a library that prints behind it."""
    code = """
import atexit, sys, threading
from serl_chunk_robot.output import background_output
kept = []
atexit.register(lambda: kept[0].write("behind\\n"))
with background_output():
    kept.append(sys.stderr)
    def work(k):
        for i in range(300):
            print(k, end=" ")
            print("line", i, "\\u2713", file=sys.stdout)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print("to the other", file=sys.stderr, flush=True)
    print("unfinished", end="")
    sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    lines = done.stdout.decode().splitlines()
    for k in range(4):
        own = [line for line in lines if line.startswith(f"{k} ")]
        assert own == [rf"{k} line {i} \u2713" for i in range(300)]
    assert lines[1200:] == ["to the other", "unfinishedbehind"]


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_process_prints_without_the_thread(to_descriptor):
    """As a driver's: neither the thread nor what holds its lock is there."""
    reader, writer = os.pipe()
    to_descriptor(writer)
    with background_output() as thread, thread._changed:
        child = os.fork()
        if not child:
            print("of the child", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 100) == b"of the child\n"
    os.close(reader)
    os.close(writer)
