"""Simulated Feetech STS3215 motors behind a pseudo terminal, for LeRobot's own bus; run as a program with LeRobot.

The program drives them with the driver `lerobot`, and prints JSON of what happened.
"""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
import time
import tty

PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 1, 2, 3, 0x82, 0x83
MODEL, MIN, MAX, TORQUE, GOAL, TORQUE_LIMIT, PRESENT = 3, 9, 11, 40, 42, 48, 56  # addresses
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LAG = 0.02  # s
LATE = 0.1  # s


class Motors:
    """Motors 1 to 6 of an SO arm. `writes`: addresses that were written, by motor."""

    def __init__(self) -> None:
        self.memory = {motor: bytearray(256) for motor in range(1, 7)}
        for motor in self.memory:
            self.put(motor, MODEL, 777)
            self.put(motor, MIN, 1024)
            self.put(motor, MAX, 3072)
            self.put(motor, PRESENT, 2048 + 50 * motor)
            self.memory[motor][0:2] = b"\x03\x0a"  # firmware
        self.writes: list[tuple[int, int]] = []
        self.silent = self.held = False  # held: by a hand
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
            if self.memory[motor][TORQUE] and not self.held:
                at = self.get(motor, PRESENT)
                self.put(motor, PRESENT, at + round(share * (self.get(motor, GOAL) - at)))

    def send(self, motor: int, data: bytes) -> None:
        packet = bytes([motor, len(data) + 2, 0]) + bytes(data)
        os.write(self.terminal, b"\xff\xff" + packet + bytes([~sum(packet) & 0xFF]))


def signatures() -> dict[str, list[str]]:
    """Names of the parameters of what the driver calls, of LeRobot itself."""
    import inspect

    from lerobot.motors.feetech import FeetechMotorsBus
    from lerobot.robots.so_follower import SOFollower

    names = {FeetechMotorsBus: ("connect", "disconnect", "disable_torque", "enable_torque", "sync_read", "sync_write"),
             SOFollower: ("configure", "get_observation", "send_action")}  # fmt: skip
    return {f"{kind.__name__}.{name}": list(inspect.signature(getattr(kind, name)).parameters)
            for kind, each in names.items() for name in each}  # fmt: skip


def main(folder: str) -> None:
    """Drive simulated motors. `folder`: for the calibration."""
    from serl_chunk_robot.drivers.base import DriverError
    from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms

    motors = Motors()
    params = {"port": motors.port, "id": "cell", "calibration_dir": folder}

    def driver() -> LeRobotArms:
        return LeRobotArms(type="so101_follower", params=params, low=-1.6, high=1.6, velocity=4.0)

    found: dict[str, object] = {"signatures": signatures()}
    try:
        driver().connect(time.monotonic)
    except DriverError as e:
        found["uncalibrated"] = str(e)
    calibration = {name: {"id": k + 1, "drive_mode": 0, "homing_offset": 0, "range_min": 1024, "range_max": 3072}
                   for k, name in enumerate(JOINTS)}  # fmt: skip
    with open(os.path.join(folder, "cell.json"), "w", encoding="utf-8") as file:
        json.dump(calibration, file)
    arm = driver()
    arm.connect(time.monotonic)
    found["connected"] = {"torque": arm.read().torque, "q": arm.read().q.tolist(), "writes": len(motors.writes)}
    arm.clear_faults()
    wait(lambda: arm.read().torque)
    time.sleep(0.2)
    found["cleared"] = {"torque": motors.torque(), "q": arm.read().q.tolist()}
    target = arm.read().q + 0.1
    began = time.monotonic()
    arm.command(target, 0.02)
    wait(lambda: abs(arm.read().q - target).max() < 0.01)
    found["moved"] = {"seconds": time.monotonic() - began, "q": arm.read().q.tolist(), "target": target.tolist()}
    stamps = []
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        stamps.append(arm.read().stamp)
        time.sleep(0.001)
    found["rounds"] = len({*stamps})
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


def wait(until) -> None:  # type: ignore[no-untyped-def]
    ends = time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1])
