"""What goes wrong before or beside a run: one sentence that says what to do, the right exit status, no hang."""

import re
import shutil
import signal

import h5py
import numpy as np
import pytest
from commands import Command
from processes import PATIENCE, SMALL, sentence, settings

from serl_chunk.cli.process import load

pytestmark = pytest.mark.timeout(3 * PATIENCE)
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130


def learns(demo_path: str, *more: str) -> list[str]:
    run = ("--checkpoint_path", "{tmp}/run", "--demo_path", demo_path)
    return ["--exp_name", "fake_aloha", *settings(), "--learner", "--debug", *run, *more]


@pytest.mark.parametrize(("arguments", "status", "named"), [
    (["--exp_name", "fake_alhoa", "--learner"], WRONG_USAGE,
     ["--exp_name: unknown experiment 'fake_alhoa' (did you mean 'fake_aloha'?). Valid: ", "aloha_transfer_cube"]),
    (["--exp_name", "fake_aloha", "--actor", "--eval_checkpoint_step", "20"], WRONG_USAGE, ["--eval_n_trajs"]),
    (["--exp_name", "fake_aloha", "--actor", "--ip", "no-such-host.invalid"], WRONG_USAGE,
     ["--ip: no such host: 'no-such-host.invalid'"]),
    (learns("{tmp}/demos", "--bind", "0.0.0.0", "--keys", "{tmp}/file"), WRONG_USAGE,
     ["--bind=0.0.0.0 needs keys: the key folder {tmp}/file cannot be used", "--insecure"]),
    (learns(""), WRONG_USAGE, ["--demo_path: a path is empty. "]),
    (learns("{tmp}/demos"), FAILED,
     ["{tmp}/demos/episode_2.hdf5: the file is truncated, damaged or not HDF5", "record it again"]),
    (learns("{tmp}/other.hdf5"), FAILED, ["{tmp}/other.hdf5", "fake_aloha has 14 actions", "/action has 7"]),
])  # fmt: skip
def test_one_sentence_says_what_to_do(processes, tmp_path, arguments, status, named):
    (tmp_path / "file").write_text("a file where a folder has to be")
    folder = shutil.copytree(processes.demos, tmp_path / "demos")
    damaged = folder / "episode_2.hdf5"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with h5py.File(tmp_path / "other.hdf5", "w") as file:  # ALOHA's layout, of a seven-joint arm
        file.attrs["sim"] = True
        for name in ("action", "observations/qpos", "observations/qvel"):
            file[name] = np.zeros((20, 7), np.float32)
    said = sentence(processes.start(*(word.format(tmp=tmp_path) for word in arguments), kind=Command).ends(status))
    assert [part for part in named if part.format(tmp=tmp_path) not in said] == []


def test_both_processes_end_where_the_demonstrations_are_missing(processes, tmp_path):
    processes.demos = tmp_path / "empty"
    processes.demos.mkdir()
    output = processes.both(tmp_path / "run").ends(WRONG_USAGE)
    assert re.search(rf"learner \| serl-chunk: .*{processes.demos}.*has no \*\.hdf5 file", output)
    assert "the learner ended with status 2: stopping the other process" in output
    assert "Traceback" not in output


def test_a_waiting_actor_can_be_interrupted(processes):
    actor = processes.actor()
    actor.says(f"no learner answers at 127.0.0.1:{processes.port}; waiting")
    actor.signal(signal.SIGTERM)
    assert sentence(actor.ends(INTERRUPTED)) == "serl-chunk: interrupted"


def test_the_settings_are_those_of_the_package():
    """A renamed field would make every test above pass for the wrong reason: an unknown setting is status 2 too."""
    load("fake_aloha", [(name, str(value)) for name, value in SMALL.items()])
