"""A first day without hardware: a robot's file, check, demonstrations through the server, learning, kills, export.

Of the simulated task, and of ALOHA's driver with a real ROS 1 master and simulated arms as its node.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
import ros1
from robot_day import ROOT, Day

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# The experiment that is shipped, with networks and pictures that two cores learn from in minutes.
TASK = """
import dataclasses

from serl_chunk import load_experiment, AcfqlConfig, CriticConfig, EncoderConfig, FlowConfig, LearnerConfig


def experiment():
    shipped = load_experiment("aloha")
    return dataclasses.replace(
        shipped,
        name="first_day",
        robot=dataclasses.replace(shipped.robot, image_size=16, max_episode_steps=150),
        agent=AcfqlConfig(
            image_keys=("cam_high",), encoder=EncoderConfig(features=(4, 8), latent=8, shift=0),
            critic=CriticConfig(hidden=(128, 128), ensemble=2), flow=FlowConfig(hidden=(128, 128)), candidates=4,
        ),
        learner=LearnerConfig(
            batch_size=64, utd_ratio=0.2, max_steps=500, pretrain_steps=3_000, warmup_episodes=4,
            steps_per_update=25, checkpoint_period=100, log_period=50,
        ),
        discount=0.99,
    )
"""
DEMOS, TRIALS = 10, 10


def robot_file(port: int) -> str:
    """The file that is shipped, with simulated cameras, starts that differ, and resets that take less time."""
    text = (ROOT / "experiments/robots/aloha_ros1.toml").read_text()
    text = text.replace('start = "first_day"', f'port = {port}\nstart = "exploring"', 1)
    text = re.sub(r'driver = "v4l2"\ndevice = .*\nwidth = 640\nheight = 480\nfps = 30\nresize = .*',
                  'driver = "fake"\nwidth = 64\nheight = 48\nrate = 30\nresize = [16, 16]', text)  # fmt: skip
    text = text.replace("gripper = 1.0\n", "gripper = 1.0\nspeed = 1.0\n")
    # A set point that a late pass leads further moves these arms at once: they have no mass.
    text = text.replace("[profile.exploring]", "[profile.exploring]\noverspeed = 30.0")
    starts = [0.3, 0.2, *[0.0] * 5] * 2
    return text.replace("# random = 0.05 ", f"speed = 1.0\nrandom = {starts} # ")


def first_hours(day: Day, folder: Path, file: str, driver: str, demos: int, *more: str) -> None:
    day.robot("new", "fresh.toml", *(("--driver", driver) if driver else ()))
    assert (f'"{driver}"' if driver else "driver") in (folder / "fresh.toml").read_text()
    day.file.write_text(file)
    with day.stage("serve"):
        day.serve()
    with day.stage("robot check"):
        assert "0 failed" in day.robot("check", "robot.toml")
        [report] = folder.glob("check_*.json")
        assert json.loads(report.read_text())["ok"]
    with day.stage(f"record {demos} demonstrations"):
        print(day.record(demos, *more).strip().splitlines()[-1])
    with day.stage("robot dry"):
        assert "evaluating" in day.robot("dry", "demos", "--file", "robot.toml")


@pytest.mark.skipif(bool(ros1.missing()), reason=ros1.missing())
def test_a_first_day_of_alohas_driver_goes_on_after_each_kill(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    with contextlib.ExitStack() as stack:
        ros = ros1.Ros()
        stack.callback(ros.end)
        day = stack.enter_context(contextlib.closing(Day(tmp_path, "task.py", serving=ros.environment)))
        ros.need_arms()
        first_hours(day, tmp_path, robot_file(day.port), "aloha_ros1", DEMOS)
        assert "gripper_closed" in (tmp_path / "fresh.toml").read_text()
        processes = {"learner": day.learner(), "actor": day.actor()}

        def restart(name: str) -> None:
            processes[name].kill()
            processes[name] = getattr(day, name)()

        kills = {
            "nothing": lambda: None, "server": lambda: (day.kill_server(), day.serve()),
            "arms": lambda: (ros.kill_arms(), ros.need_arms()), "camera": day.kill_camera,
            "actor": lambda: restart("actor"), "learner": lambda: restart("learner"),
        }  # fmt: skip
        for name, kill in kills.items():
            with day.stage(f"{name} killed, goes on"):
                kill()
                day.goes_on()
        with day.stage("to the end of training"):
            day.ends(processes["learner"])
            day.ends(processes["actor"])
        with day.stage(f"{TRIALS} evaluations"):
            success = day.evaluate(TRIALS)
            print(f"{day.episodes()} online episodes, success of the last policy {success:.0%}")
        info = json.loads((day.export() / "meta/info.json").read_text())
        assert info["total_episodes"] >= day.episodes()
        assert success >= 0.3  # a robot that stands never succeeds: its grippers are open
