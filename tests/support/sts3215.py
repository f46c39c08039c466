"""Simulated Feetech STS3215 motors behind a pseudo terminal, for LeRobot's own buses.

`run` starts this file as a program with the interpreter that SERL_CHUNK_LEROBOT_PYTHON names. It drives the motors with
the driver `lerobot`, or reads them with the device `lerobot` as a leader, and prints JSON of what happened.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import pty
import subprocess
import sys
import threading
import time
import tty
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator

PYTHON = os.environ.get("SERL_CHUNK_LEROBOT_PYTHON")
PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 1, 2, 3, 0x82, 0x83
MODEL, MIN, MAX, TORQUE, GOAL, TORQUE_LIMIT, PRESENT = 3, 9, 11, 40, 42, 48, 56  # addresses
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOW, HIGH = 1024, 3072
AT = [2048 + 50 * motor for motor in range(1, 7)]  # encoder steps, as the motors begin
LAG = 0.02  # s
LATE = 0.1  # s


class Motors:
    """Motors 1 to 6 of an SO arm. `writes`: addresses that were written, by motor."""

    def __init__(self) -> None:
        self.memory = {motor: bytearray(256) for motor in range(1, 7)}
        for motor in self.memory:
            for address, value in ((MODEL, 777), (MIN, LOW), (MAX, HIGH), (PRESENT, AT[motor - 1])):
                self.put(motor, address, value)
            self.memory[motor][0:2] = b"\x03\x0a"  # firmware
        self.writes: list[tuple[int, int]] = []
        self.silent = False
        self.late = 0  # packets whose answer comes after LeRobot has given up
        self.since = time.monotonic()
        self.terminal, user = pty.openpty()
        tty.setraw(user)
        self.port = os.ttyname(user)
        threading.Thread(target=self.run, daemon=True).start()

    def get(self, motor: int, address: int) -> int:
        return int.from_bytes(self.memory[motor][address : address + 2], "little")

    def put(self, motor: int, address: int, value: int) -> None:
        self.memory[motor][address : address + 2] = value.to_bytes(2, "little")

    def torque(self) -> list[int]:
        return [self.memory[motor][TORQUE] for motor in self.memory]

    def run(self) -> None:
        got = b""
        while True:
            got += os.read(self.terminal, 4096)
            while len(got) >= 4 and len(got) >= 4 + got[3]:
                packet, got = got[: 4 + got[3]], got[4 + got[3] :]
                assert packet[:2] == b"\xff\xff"
                if self.late:
                    self.late -= 1
                    time.sleep(LATE)
                if not self.silent:
                    self.answer(packet[2], packet[4], packet[5:-1])

    def answer(self, motor: int, instruction: int, data: bytes) -> None:
        self.move()
        if instruction == PING:
            self.send(motor, b"")
        elif instruction == READ:
            self.send(motor, self.memory[motor][data[0] : data[0] + data[1]])
        elif instruction == WRITE:
            self.write(motor, data[0], data[1:])
            self.send(motor, b"")
        elif instruction == SYNC_READ:
            for each in data[2:]:
                self.send(each, self.memory[each][data[0] : data[0] + data[1]])
        elif instruction == SYNC_WRITE:
            for k in range(2, len(data), data[1] + 1):
                self.write(data[k], data[0], data[k + 1 : k + 1 + data[1]])

    def write(self, motor: int, address: int, values: bytes) -> None:
        self.memory[motor][address : address + len(values)] = values
        self.writes.append((motor, address))

    def move(self) -> None:
        now = time.monotonic()
        share = min((now - self.since) / LAG, 1.0)
        self.since = now
        for motor in self.memory:
            if self.memory[motor][TORQUE]:
                at = self.get(motor, PRESENT)
                self.put(motor, PRESENT, at + round(share * (self.get(motor, GOAL) - at)))

    def send(self, motor: int, data: bytes) -> None:
        packet = bytes([motor, len(data) + 2, 0]) + bytes(data)
        os.write(self.terminal, b"\xff\xff" + packet + bytes([~sum(packet) & 0xFF]))


def run(program: str, folder: Path) -> dict[str, Any]:
    """Return the JSON that the program printed last; skip the test without that interpreter."""
    import pytest

    import serl_chunk_robot

    package = Path(serl_chunk_robot.__file__).resolve().parents[1]
    # What the interpreter has of its own stays first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(package)])}
    if not PYTHON or subprocess.run([PYTHON, "-c", "import lerobot.motors.feetech, scservo_sdk"],
                                    env=environment, capture_output=True, check=False).returncode:  # fmt: skip
        pytest.skip("SERL_CHUNK_LEROBOT_PYTHON names no interpreter that has lerobot[feetech]")
    done = subprocess.run([PYTHON, __file__, program, str(folder)], env=environment, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def wait(until) -> None:  # type: ignore[no-untyped-def]
    ends = time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.005)


def signatures(names: dict[type, tuple[str, ...]]) -> dict[str, list[str]]:
    return {
        f"{kind.__name__}.{name}": list(inspect.signature(getattr(kind, name)).parameters)
        for kind, each in names.items()
        for name in each
    }


def calibrate(folder: str) -> None:
    calibration = {
        name: {"id": k + 1, "drive_mode": 0, "homing_offset": 0, "range_min": LOW, "range_max": HIGH}
        for k, name in enumerate(JOINTS)
    }
    (Path(folder) / "cell.json").write_text(json.dumps(calibration))


def rounds(read) -> int:  # type: ignore[no-untyped-def]
    stamps, until = set(), time.monotonic() + 1.0
    while time.monotonic() < until:
        stamps.add(read().stamp)
        time.sleep(0.001)
    return len(stamps)


def follower(folder: str) -> None:
    """Drive simulated motors. `folder`: for the calibration."""
    from lerobot.motors.feetech import FeetechMotorsBus
    from lerobot.robots.so_follower import SOFollower

    from serl_chunk_robot.drivers.base import DriverError
    from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms

    motors = Motors()
    params = {"port": motors.port, "id": "cell", "calibration_dir": folder}

    def driver() -> LeRobotArms:
        return LeRobotArms(type="so101_follower", params=params, low=-1.6, high=1.6, velocity=4.0)

    of_bus = ("connect", "disconnect", "disable_torque", "enable_torque", "sync_read", "sync_write")
    of_arm = ("configure", "get_observation", "send_action")
    found: dict[str, object] = {"signatures": signatures({FeetechMotorsBus: of_bus, SOFollower: of_arm})}
    try:
        driver().connect(time.monotonic)
    except DriverError as e:
        found["uncalibrated"] = str(e)
    calibrate(folder)
    arm = driver()
    arm.connect(time.monotonic)
    found["connected"] = {"torque": arm.read().torque, "q": arm.read().q.tolist(), "writes": len(motors.writes)}
    arm.clear_faults()
    wait(lambda: arm.read().torque)
    time.sleep(0.2)
    found["cleared"] = {"torque": motors.torque(), "q": arm.read().q.tolist()}
    target = arm.read().q + 0.1
    arm.command(target, 0.02)
    wait(lambda: abs(arm.read().q - target).max() < 0.01)
    found["moved"] = {"q": arm.read().q.tolist(), "target": target.tolist()}
    found["rounds"] = rounds(arm.read)
    still, moved, fast = arm.read().q, 0.0, 0.0
    for _ in range(20):
        motors.late = 1
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            reading = arm.read()
            moved, fast = max(moved, abs(reading.q - still).max()), max(fast, abs(reading.dq).max())
            time.sleep(0.002)
    found["late"] = {"moved": moved, "speed": fast, "torque": arm.read().torque}
    wait(lambda: not arm.read().faults)
    motors.silent = True
    wait(lambda: bool(arm.read().faults))
    found["fault"] = arm.read().faults[0]
    motors.silent = False
    wait(lambda: not arm.read().faults)
    arm.close()
    found["closed"] = motors.torque()
    motors.writes.clear()
    arm = driver()
    arm.connect(time.monotonic)
    found["again"] = {"torque": arm.read().torque, "writes": len(motors.writes)}
    arm.set("torque", False)
    wait(lambda: not arm.read().torque)
    found["off"] = motors.torque()
    arm.close()
    print(json.dumps(found))


def in_rad(steps: list[int]) -> list[float]:
    """Joints, rad, and a gripper's share, of encoder steps."""
    joints = [(at - (LOW + HIGH) / 2) * math.tau / 4095 for at in steps[:5]]
    return [*joints, (steps[5] - LOW) / (HIGH - LOW)]


def driven(motors: Motors, leader: LeRobotTeleoperator) -> dict[str, object]:
    """Drive the leader to its end, and with motors that fall silent."""
    import numpy as np

    from serl_chunk_robot.devices import leader_motion as of_drive
    from serl_chunk_robot.devices.leader_motion import Permission
    from serl_chunk_robot.safety.motion import Limits, Rates

    of_drive.VALID = 0.5  # s: machines that run tests may stand still for longer than robot PCs may
    still = np.zeros(6)
    rate = np.full(6, 0.47)  # of first_day
    limits = Limits(np.full(6, -1.5), np.full(6, 1.5), Rates(rate, rate / 0.08, rate / 0.0008), still, still, still)

    def drive(number: int, goal: np.ndarray, until: str) -> None:
        def done() -> bool:
            leader.drive.permit(Permission(number, time.monotonic(), goal, limits))
            return leader.read().drive.number == number and leader.read().drive.phase == until

        wait(done)
        wait(lambda: all(motors.torque()))

    start = leader.read().joints
    goal = np.clip(start + np.array([0.5, -0.3, 0.4, -0.5, 0.2, 0.3]), -1.2, 0.9)
    drive(1, goal, "keeps")
    found: dict[str, object] = {"kept": motors.torque(), "goal": goal.tolist(), "at": leader.read().joints.tolist()}
    found["limit"] = [motors.get(motor, TORQUE_LIMIT) for motor in motors.memory]
    leader.drive.end(1, "the actor ended it")
    wait(lambda: leader.read().drive.phase == "there")
    found["there"] = motors.torque()
    drive(2, start, "moves")
    motors.silent = True
    wait(lambda: leader.read().drive.phase == "failed" and not leader.read().alive)
    motors.silent = False
    wait(lambda: leader.read().alive)
    found["back"] = motors.torque()
    return found


def leader(folder: str) -> None:
    """Read simulated motors, and drive them. `folder`: for the calibration."""
    from lerobot.teleoperators.bi_so_leader import BiSOLeader
    from lerobot.teleoperators.koch_leader import KochLeader
    from lerobot.teleoperators.so_leader import SOLeader

    from serl_chunk_robot.devices.base import DeviceError
    from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator

    motors = Motors()

    def device(**params: object) -> LeRobotTeleoperator:
        given = {"port": motors.port, "id": "cell", "calibration_dir": folder, **params}
        return LeRobotTeleoperator(type="so101_leader", params=given)

    both = ("configure", "get_action")
    found: dict[str, object] = {"expected": in_rad(AT)}
    found["signatures"] = signatures({SOLeader: both, KochLeader: both, BiSOLeader: both[1:]})
    for motor, steps in enumerate(AT, 1):  # they hold themselves
        motors.put(motor, GOAL, steps)
        motors.memory[motor][TORQUE] = 1
    try:
        device()
    except DeviceError as e:
        found["uncalibrated"] = str(e)
    found["refused"] = {"torque": motors.torque(), "writes": len(motors.writes)}
    calibrate(folder)
    for units, degrees in (("percent", False), ("degrees", True)):
        made = device(use_degrees=degrees)
        found[units] = made.read().joints.tolist()
        if not degrees:
            made.close()
    target = [2000, 2100, 1900, 2200, 2300, 1500]
    for motor, steps in enumerate(target, 1):
        motors.put(motor, PRESENT, steps)
    found["target"] = in_rad(target)
    wait(lambda: abs(made.read().joints - found["target"]).max() < 1e-3)
    found["moved"] = made.read().joints.tolist()
    found["rounds"] = rounds(made.read)
    motors.silent = True
    wait(lambda: not made.read().alive)
    found["silent"] = {"alive": made.read().alive, "joints": made.read().joints.tolist()}
    time.sleep(1.0)  # it is opened again meanwhile, without an answer
    motors.silent = False
    wait(lambda: made.read().alive)
    found["again"] = made.read().joints.tolist()
    found["driven"] = driven(motors, made)
    made.close()
    found["torque"] = motors.torque()
    print(json.dumps(found))


if __name__ == "__main__":
    {"follower": follower, "leader": leader}[sys.argv[1]](sys.argv[2])
