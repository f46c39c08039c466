"""LeRobot's own leader over simulated motors: a program that reads it with the device `lerobot`, and prints JSON."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time

from sts3215 import GOAL, JOINTS, PRESENT, TORQUE, Motors, wait

AT = [2048 + 50 * motor for motor in range(1, 7)]  # encoder steps, as the motors begin
LOW, HIGH = 1024, 3072


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
    leader.close()
    found["torque"] = motors.torque()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
