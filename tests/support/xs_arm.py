"""An ALOHA arm as Interbotix's node has it: joint states, commands and services, without ROS."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

JOINTS = ["waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate"]
POSE = [0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.6]  # the gripper's motor is the last, rad
LOWER = [-math.pi, -1.8500490, -1.7627825, -math.pi, -1.8675023, -math.pi]
UPPER = [math.pi, 1.2566370, 1.6057029, math.pi, 2.2340214, math.pi]
FASTER = 0.5  # of its way to the target that a motor makes in a step


class XsArm:
    """One arm. Tests set its attributes; `steps` of motion are at 100 Hz."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Stand, with torque, in POSE."""
        self.q = list(POSE)
        self.target = list(POSE)
        self.group: list[list[float]] = []  # commands in the order they came
        self.single: list[float] = []
        self.calls: list[str] = []  # services that change something
        self.torque = [True] * 7
        self.errors = [0] * 7
        self.alerts = True  # reads of a motor with an error fail, as its answers have the bit of an alert
        self.velocity_profile = [0] * 7
        self.mode = {"arm": "position", "gripper": "current_based_position"}
        self.upper = list(UPPER)
        self.silent = self.pi = self.hangs = self.frozen_stamp = self.simulated = False

    def step(self) -> dict[str, list]:
        """Move and return the fields of a joint state, all joints and both fingers."""
        with self.lock:
            before = np.array(self.q)
            go = np.where(self.torque, FASTER * (np.array(self.target) - before), 0.0)
            self.q = (before + go).tolist()
            finger = 0.022 * math.sin(self.q[6]) + math.sqrt(0.036**2 - (0.022 * math.cos(self.q[6])) ** 2)
            position = [*self.q, finger, -finger]
            if self.pi:  # what the node publishes of motors that did not answer
                position = [-math.pi] * 9
            velocity = [*(100 * go).tolist(), 0.0, 0.0]
            effort = [*(1000 * go).tolist(), 0.0, 0.0]
        names = [*JOINTS, "gripper", "left_finger", "right_finger"]
        return {"name": names, "position": position, "velocity": velocity, "effort": effort}

    def command(self, name: str, value: Any) -> None:
        """Take a JointGroupCommand, or a JointSingleCommand."""
        with self.lock:
            if name == "arm":
                self.group.append(list(value))
                self.target[:6] = self.group[-1]
            else:
                assert name == "gripper"
                self.single.append(float(value))
                self.target[6] = self.single[-1]

    def serve(self, service: str, request: Any) -> dict[str, Any]:
        """Answer a service; fields of its response."""
        if service == "get_robot_info":
            arm = request.name == "arm"
            return {"mode": self.mode[request.name], "profile_type": "velocity",
                    "joint_names": JOINTS if arm else ["gripper"],
                    "joint_lower_limits": LOWER if arm else [0.021],
                    "joint_upper_limits": self.upper if arm else [0.057]}  # fmt: skip
        if service == "get_motor_registers":
            of = {"Torque_Enable": self.torque, "Hardware_Error_Status": self.errors,
                  "Profile_Velocity": self.velocity_profile, "Profile_Acceleration": [0] * 7}  # fmt: skip
            if self.simulated and "Profile" not in request.reg:
                return {"values": []}
            values = [int(n) for n in of[request.reg]]
            if request.cmd_type == "single":
                at = [*JOINTS, "gripper"].index(request.name)
                return {"values": [] if self.errors[at] and self.alerts else [values[at]]}
            ends = next((k for k, error in enumerate(self.errors) if error and self.alerts), len(values))
            return {"values": values[:ends]}
        with self.lock:
            self.calls.append(f"{service} {request.name} {request.enable}")
            if service == "torque_enable":
                self.torque = [request.enable and not error for error in self.errors]
                self.target = [q if on else t for q, t, on in zip(self.q, self.target, self.torque, strict=True)]
            else:
                motor = [*JOINTS, "gripper"].index(request.name)
                self.errors[motor], self.torque[motor] = 0, request.enable
                self.target[motor] = self.q[motor]
        return {}
