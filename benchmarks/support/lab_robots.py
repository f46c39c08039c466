"""The robots of the rehearsal (`lab.py`): their files, tasks, hands, and what their servers need."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import ros1
from robot_day import ROOT

from support.lab_arms import lab_arms
from support.lab_experiment import CAMERA, IMAGE_SIZE, SO101_REACH, TASKS, LabTask
from support.lab_leader import LeaderHands
from support.lab_mice import MouseHands
from support.lab_motors import FOLDER

HERE = Path(__file__).resolve().parent
ROS, FAKE, LEROBOT = "aloha_ros1", "fake", "lerobot"
FASTER = 30.0  # overspeed: a set point that a late pass leads further moves simulated arms at once, without mass


class LabRobot(NamedTuple):
    """A robot.

    Attributes:
        name: of its task (`lab_experiment.TASKS`).
        file: returns its file up to the cameras, which begins with keys of the top level.
        hands: of its operator.
        begin: starts what its server needs, within a context. Called with that, the folder of the rehearsal and the
            folder of devices; returns additions to the server's environment.
    """

    name: str
    file: Callable[[], str]
    hands: type[MouseHands | LeaderHands]
    begin: Callable[[contextlib.ExitStack, Path, Path], Mapping[str, str]]

    @property
    def task(self) -> LabTask:
        return TASKS[self.name]

    def write(self, path: Path, host: str, port: int) -> None:
        """Write its file for a port, with a drawn camera."""
        camera = (
            "[[camera]]", f'name = "{CAMERA}"', f'driver = "{HERE / "lab_camera.py"}:LabCamera"',
            f'view = "{self.name}"', f'server = "{host}:{port}"', f"size = {IMAGE_SIZE}", "rate = 20", "",
        )  # fmt: skip
        path.write_text(f"port = {port}\n{self.file()}\n" + "\n".join(camera))


def _shipped(name: str) -> str:
    """Return a file of a robot without its cameras, which begins under another profile than `first_day`."""
    text = (ROOT / "experiments/robots" / f"{name}.toml").read_text().replace('start = "first_day"', "", 1)
    return 'start = "exploring"\n' + text[: text.index("[[camera]]")]


def _aloha() -> str:
    """Return the file that is shipped, with starts that differ, and resets that take less time."""
    text = _shipped("aloha_ros1").replace("gripper = 1.0\n", "gripper = 1.0\nspeed = 1.0\n")
    text = text.replace("[profile.exploring]", f"[profile.exploring]\noverspeed = {FASTER}")
    starts = [0.3, 0.2, *[0.0] * 5] * 2
    return text.replace("# random = 0.05 ", f"speed = 1.0\nrandom = {starts} # ")


def _fake_aloha() -> str:
    name = f"{HERE / 'lab_arms.py'}:{lab_arms.__name__}"
    return re.sub(r"\[driver\]\n(?s:.*?)\n\n", f'[driver]\nname = "{name}"\n\n', _aloha(), count=1)


def _so101() -> str:
    """Return the file that is shipped, with its leader, limits as they are taught, and resets to starts that differ."""
    text = _shipped("so101")
    leader = text.index("# [[device]]")
    text = text[:leader] + text[leader:].replace("\n# ", "\n").removeprefix("# ")
    text = text.replace("low = -3.2", f"low = -{SO101_REACH}").replace("high = 3.2", f"high = {SO101_REACH}")
    return text + "\n".join((
        "[profile.exploring]", "velocity = [2.0, 2.0, 2.0, 2.0, 2.0, 4.0]", f"overspeed = {FASTER}",
        "[[reset.step]]", "joints = [0.0, -1.1, 0.6, 0.6, 0.0, 1.0]", "speed = 1.0",
        "random = [0.3, 0.2, 0.0, 0.0, 0.0, 0.0]", "",
    ))  # fmt: skip


def _nothing(within: contextlib.ExitStack, out: Path, devices: Path) -> Mapping[str, str]:
    return {}


def _ros(within: contextlib.ExitStack, out: Path, devices: Path) -> Mapping[str, str]:
    assert not ros1.missing(), ros1.missing()
    ros = ros1.Ros(within.enter_context((out / "arms.log").open("wb")))
    within.callback(ros.end)
    ros.need_arms()
    return ros.environment


def _lerobot(within: contextlib.ExitStack, out: Path, devices: Path) -> Mapping[str, str]:
    paths = os.pathsep.join((str(HERE / "lab_lerobot"), os.environ["PYTHONPATH"]))
    return {"PYTHONPATH": paths, FOLDER: str(devices)}


ROBOTS = {
    ROS: LabRobot("aloha", _aloha, MouseHands, _ros),
    FAKE: LabRobot("aloha", _fake_aloha, MouseHands, _nothing),
    LEROBOT: LabRobot("so101", _so101, LeaderHands, _lerobot),
}
