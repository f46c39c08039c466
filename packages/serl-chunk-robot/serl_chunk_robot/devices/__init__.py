"""Input devices of an operator: SpaceMouse, gamepad, keyboard, foot pedal, GELLO, leader arms of ALOHA and LeRobot."""

from __future__ import annotations

from typing import Dict

HOSTED: Dict[str, str] = {
    "leader_ros1": "serl_chunk_robot.devices.leader:leaders_ros1",
    "leader_ros2": "serl_chunk_robot.devices.leader:leaders_ros2",
    "lerobot": "serl_chunk_robot.devices.lerobot_teleoperator:LeRobotTeleoperator",
    "gello": "serl_chunk_robot.devices.gello:Gello",
    "spacemouse": "serl_chunk_robot.devices.spacemouse:SpaceMouse",
    "gamepad": "serl_chunk_robot.devices.evdev_device:Gamepad",
    "keyboard": "serl_chunk_robot.devices.evdev_device:Keyboard",
    "pedal": "serl_chunk_robot.devices.evdev_device:FootPedal",
}
"""What a table [[device]] of a robot's file may name -> the module and what opens the device from options."""
