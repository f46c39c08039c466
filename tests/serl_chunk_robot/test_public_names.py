"""The package's names, and the scripts in its README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from robot_served import HERE, served

import serl_chunk_robot
from serl_chunk_robot import Camera, Driver, DriverSpec, InputDevice, Reading, RobotClient, open_robot
from serl_chunk_robot.errors import ConfigError

README = Path(serl_chunk_robot.__file__).resolve().parents[1] / "README.md"
SCRIPTS = {
    text.split("import ")[1].split()[0]: text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
}


def test_names_are_imported_on_first_use():
    code = (
        "import sys, serl_chunk_robot; print('numpy' in sys.modules, serl_chunk_robot.Reading, dir(serl_chunk_robot))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.startswith("False <class")
    assert "open_robot" in done.stdout
    assert all((Camera, Driver, DriverSpec, InputDevice, Reading, RobotClient))
    with pytest.raises(AttributeError, match="no attribute 'Robot'"):
        _ = serl_chunk_robot.Robot


def test_the_script_of_the_readme_reads_a_served_robot(capsys):
    with served() as robot:
        exec(SCRIPTS["RobotClient"].replace("127.0.0.1:5600", f"{HERE}:{robot.port}"), {})
    assert " STOPPED [" in capsys.readouterr().out


def test_the_script_of_the_readme_opens_the_robot_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "robot.toml").write_text('name = "cell"\ndriver = "fake"\n')
    exec(SCRIPTS["open_robot"], {})
    assert capsys.readouterr().out.startswith("fake arms [")
    with open_robot("robot.toml") as arms, pytest.raises(ConfigError, match="served already"), open_robot("robot.toml"):
        assert arms.read().torque
