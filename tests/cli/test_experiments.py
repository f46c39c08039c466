"""`serl-chunk experiments`, `config` and `new`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from serl_chunk.config.loader import load_experiment
from serl_chunk.data.demos import load_demos
from serl_chunk.main import main
from serl_chunk.robots.registry import make_env, robot_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_settings_are_shown_with_unit_meaning_and_mark(capsys):
    text = printed(capsys, "config", "fake_aloha", "--config.agent.lr=0.001")
    assert re.search(r"^\* agent\.lr +0\.001 +learning rate", text, re.MULTILINE)
    assert re.search(r"^  transport\.timeout_s +5\.0 s +\w", text, re.MULTILINE)
    assert re.search(r"^  chunk\.execute_steps +none +\w", text, re.MULTILINE)
    group = printed(capsys, "config", "fake_aloha", "agent.critic").splitlines()[1:]
    assert group
    assert all(line[2:].startswith("agent.critic.") for line in group)


def test_a_new_experiment_runs_as_it_is(capsys, folder):
    text = printed(capsys, "new", "rig.py")
    assert "serl-chunk record --exp_name ./rig.py" in text
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
    written = (folder / "rig.py").read_bytes()
    assert main(["new", "rig.py"]) == 2
    assert (folder / "rig.py").read_bytes() == written
