"""Drivers of robots and cameras, real and simulated, and a sample to copy."""

from __future__ import annotations

from typing import Dict

BUILT_IN: Dict[str, str] = {
    "fake": "serl_chunk_robot.drivers.fake:viperx_arms",
    "fake_aloha": "serl_chunk.robots.fake.driver:FakeAlohaDriver",
    "aloha_sim": "serl_chunk.robots.aloha_sim.driver:AlohaSimDriver",
    "franka_http": "serl_chunk_robot.drivers.franka_http:FrankaHttp",
    "aloha_ros1": "serl_chunk_robot.drivers.aloha_ros1:aloha_ros1",
    "aloha_ros2": "serl_chunk_robot.drivers.aloha_ros2:aloha_ros2",
    "lerobot": "serl_chunk_robot.drivers.lerobot_robot:LeRobotArms",
    "trossen": "serl_chunk_robot.drivers.trossen:TrossenArms",
}
"""What a robot's file may name -> the module and what makes the driver from options."""

CAMERAS: Dict[str, str] = {
    "fake": "serl_chunk_robot.drivers.fake_camera:FakeCamera",
    "v4l2": "serl_chunk_robot.drivers.v4l2_camera:V4L2Camera",
    "realsense": "serl_chunk_robot.drivers.realsense_camera:RealSenseCamera",
    "fake_aloha": "serl_chunk.robots.drawn_camera:FakeAlohaCamera",
    "aloha_sim": "serl_chunk.robots.drawn_camera:AlohaSimCamera",
}
"""The same of its tables [[camera]]."""
