"""What goes wrong before or beside a run: one sentence that says what to do, the right exit status, no hang."""

import shutil
import signal

import h5py
import numpy as np
import pytest
from commands import Command
from processes import PATIENCE, SMALL, sentence

pytestmark = pytest.mark.timeout(3 * PATIENCE)
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130


def test_an_unknown_experiment_names_the_nearest(processes):
    said = sentence(processes.start("--exp_name", "fake_alhoa", "--learner", kind=Command).ends(WRONG_USAGE))
    assert "--exp_name: unknown experiment 'fake_alhoa' (did you mean 'fake_aloha'?). Valid: " in said
    assert "aloha_transfer_cube" in said


def test_an_evaluation_needs_its_number_of_episodes(processes):
    said = sentence(processes.actor("--eval_checkpoint_step", "20", kind=Command).ends(WRONG_USAGE))
    assert "--eval_n_trajs" in said


def test_a_host_that_does_not_exist(processes):
    said = sentence(processes.actor("--ip", "no-such-host.invalid", kind=Command).ends(WRONG_USAGE))
    assert "--ip: no such host: 'no-such-host.invalid'" in said


def test_a_network_bind_needs_keys(processes, tmp_path):
    (tmp_path / "keys").write_text("a file where a folder has to be")
    keys = ("--keys", str(tmp_path / "keys"))
    learner = processes.learner(tmp_path / "run", "--bind", "0.0.0.0", *keys, kind=Command)
    said = sentence(learner.ends(WRONG_USAGE))
    assert f"--bind=0.0.0.0 needs keys: the key folder {tmp_path / 'keys'} cannot be used" in said
    assert "--insecure" in said


def test_both_processes_end_where_the_demonstrations_are_missing(processes, tmp_path):
    processes.demos = tmp_path / "empty"
    processes.demos.mkdir()
    output = processes.both(tmp_path / "run").ends(WRONG_USAGE)
    assert "learner | serl-chunk: " in output
    assert str(processes.demos) in output
    assert "has no *.hdf5 file" in output
    assert "the learner ended with status 2: stopping the other process" in output
    assert "Traceback" not in output


def test_a_waiting_actor_can_be_interrupted(processes):
    actor = processes.actor()
    actor.says(f"no learner answers at 127.0.0.1:{processes.port}; waiting")
    actor.signal(signal.SIGTERM)
    assert sentence(actor.ends(INTERRUPTED)) == "serl-chunk: interrupted"


def test_a_demonstration_of_another_robot_names_both_dimensions(processes, tmp_path):
    processes.demos = tmp_path / "other" / "episode_0.hdf5"
    processes.demos.parent.mkdir()
    with h5py.File(processes.demos, "w") as file:  # ALOHA's layout, of a seven-joint arm
        file.attrs["sim"] = True
        file["action"] = np.zeros((20, 7), np.float32)
        file["observations/qpos"] = np.zeros((20, 7), np.float32)
        file["observations/qvel"] = np.zeros((20, 7), np.float32)
    said = sentence(processes.learner(tmp_path / "run", kind=Command).ends(FAILED))
    assert str(processes.demos) in said
    assert "fake_aloha has 14 actions" in said
    assert "/action has 7" in said


def test_an_empty_demonstration_path_is_refused(processes, tmp_path):
    run = ("--checkpoint_path", str(tmp_path / "run"), "--demo_path", "")
    command = processes.start(*processes.flags(), "--learner", "--debug", *run, kind=Command)
    said = sentence(command.ends(WRONG_USAGE))
    assert "--demo_path: a path is empty. " in said


def test_a_truncated_demonstration_is_named(processes, tmp_path):
    folder = shutil.copytree(processes.demos, tmp_path / "demos")
    damaged = folder / "episode_2.hdf5"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    processes.demos = folder
    said = sentence(processes.learner(tmp_path / "run", kind=Command).ends(FAILED))
    assert f"{damaged}: the file is truncated, damaged or not HDF5" in said
    assert "record it again" in said


def test_the_settings_are_those_of_the_package():
    """A renamed field would make every test above pass for the wrong reason: an unknown setting is status 2 too."""
    from serl_chunk.cli.process import load

    load("fake_aloha", [(name, str(value)) for name, value in SMALL.items()])
