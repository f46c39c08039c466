"""A first day with ALOHA's driver: a real ROS 1 master, simulated arms as its node, and each process killed once."""

from __future__ import annotations

import json
import re

import pytest
import ros1
from robot_day import ROOT, Day

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(bool(ros1.missing()), reason=ros1.missing())]  # fmt: skip
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
            image_keys=("cam_high",),
            encoder=EncoderConfig(features=(4, 8), latent=8, shift=0),
            critic=CriticConfig(hidden=(128, 128), ensemble=2),
            flow=FlowConfig(hidden=(128, 128)),
            candidates=4,
        ),
        learner=LearnerConfig(
            batch_size=64,
            utd_ratio=0.2,
            max_steps=500,
            pretrain_steps=3_000,
            warmup_episodes=4,
            critic_warmup_steps=50,
            steps_per_update=25,
            checkpoint_period=100,
            log_period=50,
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


def test_a_first_day_from_a_new_file_to_an_exported_data_set(tmp_path):
    ros = ros1.Ros()
    (tmp_path / "task.py").write_text(TASK)
    day = Day(tmp_path, "task.py", serving=ros.environment)
    try:
        with day.stage("arms"):
            ros.need_arms()
        with day.stage("robot new"):
            day.robot("new", "fresh.toml", "--driver", "aloha_ros1")
            assert '"aloha_ros1"' in (tmp_path / "fresh.toml").read_text()
            assert "gripper_closed" in (tmp_path / "fresh.toml").read_text()
        with day.stage("serve"):
            day.file.write_text(robot_file(day.port))
            day.serve()
        with day.stage("robot check"):
            assert "0 failed" in day.robot("check", "robot.toml")
            [report] = tmp_path.glob("check_*.json")
            assert json.loads(report.read_text())["ok"]
        with day.stage(f"record {DEMOS} demonstrations"):
            print(day.record(DEMOS).strip().splitlines()[-1])
        with day.stage("robot dry"):
            assert "evaluating" in day.robot("dry", "demos", "--file", "robot.toml")

        learner, actor = day.learner(), day.actor()
        with day.stage("learner and actor, first episodes"):
            day.goes_on()
        with day.stage("server killed, goes on"):
            day.kill_server()
            day.serve()
            day.goes_on()
        with day.stage("arms killed, goes on"):
            ros.kill_arms()
            ros.need_arms()
            day.goes_on()
        with day.stage("camera killed, goes on"):
            day.kill_camera()
            day.goes_on()
        with day.stage("actor killed, goes on"):
            actor.kill()
            actor = day.actor()
            day.goes_on()
        with day.stage("learner killed, goes on"):
            learner.kill()
            learner = day.learner()
            day.goes_on()
        with day.stage("to the end of training"):
            day.ends(learner)
            day.ends(actor)
        with day.stage(f"{TRIALS} evaluations"):
            success = day.evaluate(TRIALS)
            print(f"{day.episodes()} online episodes, success of the last policy {success:.0%}")
        with day.stage("export"):
            info = json.loads((day.export() / "meta/info.json").read_text())
            assert info["total_episodes"] >= day.episodes()
        assert success >= 0.3  # a robot that stands never succeeds: its grippers are open
    finally:
        day.close()
        ros.end()
