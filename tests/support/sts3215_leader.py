"""LeRobot's own leader over simulated motors: a program that reads it with the device `lerobot`, and prints JSON."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from sts3215 import GOAL, JOINTS, PRESENT, TORQUE, TORQUE_LIMIT, Motors, wait

AT = [2048 + 50 * motor for motor in range(1, 7)]  # encoder steps, as the motors begin
LOW, HIGH = 1024, 3072

if TYPE_CHECKING:
    from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator


def share(steps: int) -> float:
    return (steps - LOW) / (HIGH - LOW)


def rad(steps: int) -> float:
    return (steps - (LOW + HIGH) / 2) * math.tau / 4095


def signatures() -> dict[str, list[str]]:
    """Names of the parameters of what the device calls, of LeRobot itself."""
    from lerobot.teleoperators.bi_so_leader import BiSOLeader
    from lerobot.teleoperators.koch_leader import KochLeader
    from lerobot.teleoperators.so_leader import SOLeader

    names = {
        SOLeader: ("configure", "get_action"),
        KochLeader: ("configure", "get_action"),
        BiSOLeader: ("get_action",),
    }
    return {f"{kind.__name__}.{name}": list(inspect.signature(getattr(kind, name)).parameters)
            for kind, each in names.items() for name in each}  # fmt: skip


def driven(motors: Motors, leader: LeRobotTeleoperator) -> dict[str, object]:
    """Drive the leader to its end, into a hand, without a permission, and with motors that fall silent."""
    import numpy as np

    from serl_chunk_robot.devices import leader_motion as of_drive
    from serl_chunk_robot.devices.leader_motion import Permission
    from serl_chunk_robot.safety.motion import Limits, Rates

    of_drive.VALID = 0.5  # s: machines that run tests may stand still for longer than robot PCs may
    still = np.zeros(6)
    rate = np.full(6, 0.47)  # of first_day
    limits = Limits(np.full(6, -1.5), np.full(6, 1.5), Rates(rate, rate / 0.08, rate / 0.0008), still, still, still)
    path: list[tuple[float, list[int]]] = []

    def drive(number: int, goal: np.ndarray, until: tuple[str, ...], permits: bool = True) -> str:
        def done() -> bool:
            if permits:
                leader.drive.permit(Permission(number, time.monotonic(), goal, limits))
            path.append((time.monotonic(), [motors.get(motor, GOAL) for motor in motors.memory]))
            return leader.read().drive.number == number and leader.read().drive.phase in until

        wait(done)
        return str(leader.read().drive.why)

    start = leader.read().joints
    goal = np.clip(start + np.array([0.5, -0.3, 0.4, -0.5, 0.2, 0.3]), -1.2, 0.9)
    drive(1, goal, ("moves",))
    wait(lambda: all(motors.torque()))
    path.clear()
    drive(1, goal, ("keeps",))
    found: dict[str, object] = {"kept": motors.torque(), "goal": goal.tolist(), "at": leader.read().joints.tolist()}
    found["limit"] = [motors.get(motor, TORQUE_LIMIT) for motor in motors.memory]
    steps = np.array([goals[:5] for _, goals in path])  # a gripper's are not of rad
    times = np.array([at for at, _ in path])
    late = np.searchsorted(times, times + 0.2)
    pairs = [(k, n) for k, n in enumerate(late) if n < len(times)]
    found["speed"] = max(float(np.abs(steps[n] - steps[k]).max() * math.tau / 4095 / (times[n] - times[k]))
                         for k, n in pairs)  # fmt: skip
    leader.drive.end(1, "the actor ended it")
    wait(lambda: leader.read().drive.phase == "there")
    found["there"] = motors.torque()
    motors.held = True
    found["hand"] = drive(2, start, ("failed",))
    wait(lambda: not any(motors.torque()))
    motors.held = False
    drive(3, start, ("moves",))
    wait(lambda: all(motors.torque()))
    began = time.monotonic()
    found["alone"] = drive(3, start, ("failed",), permits=False)
    wait(lambda: not any(motors.torque()))
    found["seconds alone"] = time.monotonic() - began
    drive(4, start, ("moves",))
    wait(lambda: all(motors.torque()))
    motors.silent = True
    wait(lambda: leader.read().drive.phase == "failed" and not leader.read().alive)
    motors.silent = False
    wait(lambda: leader.read().alive)
    found["back"] = motors.torque()
    return found


def main(folder: str) -> None:
    """Read simulated motors. `folder`: for the calibration."""
    from serl_chunk_robot.devices.base import DeviceError
    from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator

    motors = Motors()

    def device(kind: str = "so101_leader", **params: object) -> LeRobotTeleoperator:
        given = {"port": motors.port, "id": "cell", "calibration_dir": folder, **params}
        return LeRobotTeleoperator(type=kind, params={k: v for k, v in given.items() if v is not None})

    def refused(kind: str = "so101_leader", **params: object) -> str:
        try:
            device(kind, **params)
        except DeviceError as e:
            return str(e)
        raise AssertionError("it was opened")

    found: dict[str, object] = {"signatures": signatures(), "expected": [*map(rad, AT[:5]), share(AT[5])]}
    for motor, steps in enumerate(AT, 1):  # they hold themselves
        motors.put(motor, GOAL, steps)
        motors.memory[motor][TORQUE] = 1
    found["uncalibrated"] = refused()
    found["refused"] = {"torque": motors.torque(), "writes": len(motors.writes)}
    found["unknown"], found["without_port"] = refused("so102_leader"), refused(port=None)
    calibration = {name: {"id": k + 1, "drive_mode": 0, "homing_offset": 0, "range_min": LOW, "range_max": HIGH}
                   for k, name in enumerate(JOINTS)}  # fmt: skip
    with open(os.path.join(folder, "cell.json"), "w", encoding="utf-8") as file:
        json.dump(calibration, file)
    for units, degrees in (("percent", False), ("degrees", True)):
        leader = device(use_degrees=degrees)
        found[units] = leader.read().joints.tolist()
        if not degrees:
            leader.close()
    target = [2000, 2100, 1900, 2200, 2300, 1500]
    for motor, steps in enumerate(target, 1):
        motors.put(motor, PRESENT, steps)
    found["target"] = [*map(rad, target[:5]), share(target[5])]
    wait(lambda: abs(leader.read().joints - found["target"]).max() < 1e-3)
    found["moved"] = leader.read().joints.tolist()
    stamps = set()
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        stamps.add(leader.read().stamp)
        time.sleep(0.001)
    found["rounds"] = len(stamps)
    motors.silent = True
    wait(lambda: not leader.read().alive)
    found["silent"] = {"alive": leader.read().alive, "joints": leader.read().joints.tolist()}
    time.sleep(1.0)  # it is opened again meanwhile, without an answer
    motors.silent = False
    wait(lambda: leader.read().alive)
    found["again"] = leader.read().joints.tolist()
    found["driven"] = driven(motors, leader)
    leader.close()
    found["torque"] = motors.torque()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
