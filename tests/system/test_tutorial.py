"""docs/tutorial.md on the simulated robot: its commands in their order, a scripted human in place of the SpaceMouse."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import time
from collections.abc import Iterator

import pytest
from processes import Process, settings
from robot_day import ROOT, Day
from robot_process import FILES, MAIN
from robot_served import HERE
from terminals import OperatedProcess

from serl_chunk.runs.metrics import read_metrics

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]
FEWER = {"--n_demos": "2", "--eval_n_trajs": "1", "--viewer": "0"}
KEYS = {"1 episode driven": b"qq", "press s or f": b"f", "press c and Enter": b"c"}  # text on the screen -> key
SMALL = settings(robot__max_episode_steps=500, learner__pretrain_steps=200, learner__training_starts=0)


class Server(Process):
    program = ("-c", MAIN.format(gap=2.0))


@pytest.fixture
def day(tmp_path) -> Iterator[Day]:
    with contextlib.closing(Day(tmp_path, "afternoon.py", clears=False)) as day:
        [file] = re.findall(r"```python\n(# afternoon\.py\n.*?)```", PAGE, re.DOTALL)
        (tmp_path / "afternoon.py").write_text(file)
        day.file.write_text(f"port = {day.port}\n{(FILES / 'fake_aloha.toml').read_text()}")
        yield day


def changed(day: Day, words: list[str]) -> list[str]:
    """Return a command with this day's ports, fewer episodes, small networks, and a scripted human."""
    if words[0] == "robot":
        return [*words, "--robot", f"{HERE}:{day.port}"]
    out = [FEWER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if "afternoon.py" in words:
        out += ["--config.actor.intervention=scripted", f"--config.robot.server={HERE}:{day.port}"]
        out += ["--port", str(day.learner_port)] * (words[0] != "teleoperate" and words[0] != "record")
        out += SMALL
    return out


def test_its_commands_lead_from_a_robot_to_a_report(day):
    learner = None
    for words in COMMANDS:
        if words[:2] == ["robot", "serve"]:
            assert (ROOT / words[2]).is_file()
            day.add(Server(["serve", str(day.file)], day.new_log(), day.environment, cwd=day.folder)).says("serving:")
        elif "--learner" in words:
            learner = day.start(*changed(day, words))
            learner.says("listening on")
        else:
            process = day.add(OperatedProcess(changed(day, words), day.new_log(), day.environment, cwd=day.folder))
            if words[0] == "view":
                process.says("http://")
                process.signal(signal.SIGINT)
            while process.running:  # Enter does nothing where no program asks for it
                shown = process.output[-3000:]
                key = next((key for text, key in KEYS.items() if text in shown), b"\r")
                process.type(key)
                time.sleep(0.5)
            process.ends()
    assert learner.ends()
    run = day.folder / "runs" / "afternoon"
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics["eval"]] == [0, 40]
    assert any(row["intervention_steps"] for row in metrics["episode"])
    assert (run / "report.html").is_file()
    assert len(list((day.folder / "demos" / "afternoon").glob("*.hdf5"))) == 2
