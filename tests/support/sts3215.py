"""Simulated Feetech STS3215 motors behind a pseudo terminal, for LeRobot's own buses.

`run` starts this file as a program with the interpreter that SERL_CHUNK_LEROBOT_PYTHON names. It drives the motors with
the driver `lerobot`, or reads them with the device `lerobot` as a leader; an assertion that fails ends it.
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

import numpy as np

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


def run(program: str, folder: Path, stand_in: Any) -> None:
    """Run a program, and compare signatures of LeRobot with a module's; skip the test without that interpreter."""
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
    for name, parameters in json.loads(done.stdout.splitlines()[-1]).items():
        kind, _, method = name.replace("FeetechMotorsBus", "MotorsBus").partition(".")
        assert list(inspect.signature(getattr(getattr(stand_in, kind), method)).parameters) == parameters, name


def wait(until) -> None:  # type: ignore[no-untyped-def]
    ends = time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.005)


def signatures(names: dict[type, tuple[str, ...]]) -> str:
    found = {
        f"{kind.__name__}.{name}": list(inspect.signature(getattr(kind, name)).parameters)
        for kind, each in names.items()
        for name in each
    }
    return json.dumps(found)


def refused(make: Any, command: str) -> None:
    """That what is not calibrated is refused with LeRobot's command."""
    said = ""
    try:
        make()
    except Exception as e:
        said = str(e)
    assert f"lerobot-calibrate {command}" in said, said


def near(values: Any, others: Any, by: float) -> None:
    assert abs(np.asarray(values) - others).max() <= by, (values, others)


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

    from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms

    motors = Motors()
    params = {"port": motors.port, "id": "cell", "calibration_dir": folder}

    def driver() -> LeRobotArms:
        return LeRobotArms(type="so101_follower", params=params, low=-1.6, high=1.6, velocity=4.0)

    refused(lambda: driver().connect(time.monotonic), "--robot.type=so101_follower --robot.port=")
    calibrate(folder)
    arm = driver()
    arm.connect(time.monotonic)
    connected = arm.read().q
    assert not arm.read().torque
    assert not motors.writes
    arm.clear_faults()
    wait(lambda: arm.read().torque)
    time.sleep(0.2)
    assert motors.torque() == [1] * 6
    near(arm.read().q, connected, 0.005)
    target = arm.read().q + 0.1
    arm.command(target, 0.02)
    wait(lambda: abs(arm.read().q - target).max() < 0.01)
    assert rounds(arm.read) > 30, "rounds on the bus within a second"
    still = arm.read().q
    for _ in range(20):
        motors.late = 1
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            reading = arm.read()
            near(reading.q, still, 0.0)  # an answer is not read as that of another request
            near(reading.dq, 0.0, 0.0)
            time.sleep(0.002)
    assert arm.read().torque
    wait(lambda: not arm.read().faults)
    motors.silent = True
    wait(lambda: bool(arm.read().faults))
    assert "no status packet" in arm.read().faults[0]
    motors.silent = False
    wait(lambda: not arm.read().faults)
    arm.close()
    assert motors.torque() == [1] * 6
    motors.writes.clear()
    arm = driver()
    arm.connect(time.monotonic)
    assert arm.read().torque
    assert not motors.writes, "connecting to arms that hold themselves writes nothing"
    arm.set("torque", False)
    wait(lambda: not arm.read().torque)
    assert motors.torque() == [0] * 6
    arm.close()
    of_bus = ("connect", "disconnect", "disable_torque", "enable_torque", "sync_read", "sync_write")
    print(signatures({FeetechMotorsBus: of_bus, SOFollower: ("configure", "get_observation", "send_action")}))


def in_rad(steps: list[int]) -> list[float]:
    """Joints, rad, and a gripper's share, of encoder steps."""
    joints = [(at - (LOW + HIGH) / 2) * math.tau / 4095 for at in steps[:5]]
    return [*joints, (steps[5] - LOW) / (HIGH - LOW)]


def driven(motors: Motors, leader: LeRobotTeleoperator) -> None:
    """Drive the leader to its end, and with motors that fall silent."""
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
    near(leader.read().joints, goal, 0.01)
    assert [motors.get(motor, TORQUE_LIMIT) for motor in motors.memory] == [500] * 6
    leader.drive.end(1, "the actor ended it")
    wait(lambda: leader.read().drive.phase == "there")
    assert motors.torque() == [0] * 6
    drive(2, start, "moves")
    motors.silent = True
    wait(lambda: leader.read().drive.phase == "failed" and not leader.read().alive)
    motors.silent = False
    wait(lambda: leader.read().alive)
    assert motors.torque() == [0] * 6


def leader(folder: str) -> None:
    """Read simulated motors, and drive them. `folder`: for the calibration."""
    from lerobot.teleoperators.bi_so_leader import BiSOLeader
    from lerobot.teleoperators.koch_leader import KochLeader
    from lerobot.teleoperators.so_leader import SOLeader

    from serl_chunk_robot.devices.lerobot_teleoperator import LeRobotTeleoperator

    motors = Motors()

    def device(**params: object) -> LeRobotTeleoperator:
        given = {"port": motors.port, "id": "cell", "calibration_dir": folder, **params}
        return LeRobotTeleoperator(type="so101_leader", params=given)

    for motor, steps in enumerate(AT, 1):  # they hold themselves
        motors.put(motor, GOAL, steps)
        motors.memory[motor][TORQUE] = 1
    refused(device, "--teleop.type=so101_leader --teleop.port=")
    assert motors.torque() == [1] * 6, "a mixed-up port loses no torque"
    assert not motors.writes
    calibrate(folder)
    made = device()
    near(made.read().joints, in_rad(AT), 1e-3)
    made.close()
    made = device(use_degrees=True)
    near(made.read().joints, in_rad(AT), 1e-3)
    target = [2000, 2100, 1900, 2200, 2300, 1500]
    for motor, steps in enumerate(target, 1):
        motors.put(motor, PRESENT, steps)
    wait(lambda: abs(made.read().joints - in_rad(target)).max() < 1e-3)
    moved = made.read().joints
    assert rounds(made.read) > 25, "readings within a second"
    motors.silent = True
    wait(lambda: not made.read().alive)
    near(made.read().joints, moved, 0.0)
    time.sleep(1.0)  # it is opened again meanwhile, without an answer
    motors.silent = False
    wait(lambda: made.read().alive)
    near(made.read().joints, moved, 1e-9)
    driven(motors, made)
    made.close()
    assert motors.torque() == [0] * 6
    both = ("configure", "get_action")
    print(signatures({SOLeader: both, KochLeader: both, BiSOLeader: both[1:]}))


if __name__ == "__main__":
    {"follower": follower, "leader": leader}[sys.argv[1]](sys.argv[2])
