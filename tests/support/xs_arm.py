"""An ALOHA arm as Interbotix's node has it: joint states, commands and services, without ROS."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np

JOINTS = ["waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate"]
POSE = [0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.6]  # the gripper's motor is the last, rad
LOWER = [-math.pi, -1.8500490, -1.7627825, -math.pi, -1.8675023, -math.pi]
UPPER = [math.pi, 1.2566370, 1.6057029, math.pi, 2.2340214, math.pi]
FASTER = 0.5  # of its way to the target that a motor makes in a step


def finger(angle: float) -> float:
    """Where a finger is at an angle of the gripper's motor, m."""
    return 0.022 * math.sin(angle) + math.sqrt(0.036**2 - (0.022 * math.cos(angle)) ** 2)


class XsArm:
    """One arm. Tests set its attributes; `steps` of motion are at 100 Hz."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.q, self.target, self.upper, self.stamp = list(POSE), list(POSE), list(UPPER), time.time()
        self.group, self.single, self.calls = [], [], []  # commands in their order; services that change something
        self.torque, self.errors, self.velocity_profile = [True] * 7, [0] * 7, [0] * 7
        self.alerts = True  # reads of a motor with an error fail, as its answers have the bit of an alert
        self.mode = {"arm": "position", "gripper": "current_based_position"}
        self.silent = self.pi = self.hangs = self.frozen_stamp = self.simulated = False

    def state(self) -> tuple[dict[str, list], float]:
        """Move; return what the node publishes, the fields and the stamp (s), and no fields of a silent arm."""
        fields = self.step()
        self.stamp = self.stamp if self.frozen_stamp else time.time()
        return {} if self.silent else fields, self.stamp

    def step(self) -> dict[str, list]:
        """Move and return the fields of a joint state, all joints and both fingers."""
        with self.lock:
            before = np.array(self.q)
            go = np.where(self.torque, FASTER * (np.array(self.target) - before), 0.0)
            self.q = (before + go).tolist()
            # -pi is what the node publishes of motors that did not answer.
            position = [-math.pi] * 9 if self.pi else [*self.q, finger(self.q[6]), -finger(self.q[6])]
            velocity = [*(100 * go).tolist(), 0.0, 0.0]
            effort = [*(1000 * go).tolist(), 0.0, 0.0]
        names = [*JOINTS, "gripper", "left_finger", "right_finger"]
        return {"name": names, "position": position, "velocity": velocity, "effort": effort}

    def command(self, name: str, value: Any) -> None:
        with self.lock:
            if name == "arm":
                self.group.append(list(value))
                self.target[:6] = self.group[-1]
            else:
                assert name == "gripper"
                self.single.append(float(value))
                self.target[6] = self.single[-1]

    def serve(self, service: str, request: Any) -> dict[str, Any]:
        if service == "get_robot_info":
            names, low, high = (JOINTS, LOWER, self.upper) if request.name == "arm" else (["gripper"], [0.021], [0.057])
            return {"mode": self.mode[request.name], "profile_type": "velocity", "joint_names": names,
                    "joint_lower_limits": low, "joint_upper_limits": high}  # fmt: skip
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
