"""Each driver with the robot's side of it, as the conformance suite needs them."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import rclpy_stand_in
import ros1
import trossen_stand_in
import udp_arm
from franka_http import START, FrankaServer
from xs_arm import XsArm

from serl_chunk_robot.control.loop import Refused, RobotLoop
from serl_chunk_robot.drivers import aloha_arms
from serl_chunk_robot.drivers.aloha_arms import AlohaArms, Gripper
from serl_chunk_robot.drivers.aloha_ros1 import aloha_ros1
from serl_chunk_robot.drivers.aloha_ros2 import aloha_ros2
from serl_chunk_robot.drivers.base import Driver, Reading
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.drivers.franka_http import FrankaHttp
from serl_chunk_robot.drivers.sample import UdpArm
from serl_chunk_robot.drivers.trossen import OPEN, TrossenArms
from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_quat, unwrapped
from serl_chunk_robot.robot_file.profiles import built_in
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured

DT = 0.02  # s, of a pass
WITHIN = 10.0  # s, of what takes time


class Rig:
    """A driver that is not connected, and its robot. What a robot does not have, its rig leaves as None."""

    driver: Driver
    joint = 1  # one that may move by 0.05 from where it is
    silence: Callable[[], None] | None = None  # the robot sends no state any more, for 0.3 s at least
    fault: Callable[[], str] | None = None  # the robot has a fault from now on; a part of its text
    vanish: Callable[[], None] | None = None  # the robot takes no commands any more
    commands: Callable[[], list[np.ndarray]] | None = None  # all set points that reached it, in the driver's unit
    each_arrives = True  # False: of set points in quick succession, only the newest does
    beyond: tuple[int, float, str] | None = None  # a joint, where its limits do not let it go, and what is said then
    torque_off = True  # False: it loses its torque by a switch of its own alone

    def connect(self) -> None:
        self.driver.connect(time.monotonic)

    def ready(self) -> None:
        """Connect, and let it take set points."""
        self.connect()
        self.driver.clear_faults()
        self.read(lambda reading: reading.torque and not reading.faults)

    def pump(self) -> None:
        """Let the robot do what waits for it."""

    def has_torque(self) -> bool:
        """Whether all joints of the robot itself have torque."""
        return self.driver.read().torque

    def read(self, when: Callable[[Reading], bool] = lambda reading: True) -> Reading:
        """Read until a reading is there that `when` is for."""
        until = time.monotonic() + WITHIN
        while True:
            self.pump()
            reading = self.driver.read()
            if when(reading):
                return reading
            assert time.monotonic() < until, reading
            time.sleep(0.002)


class FakeRig(Rig):
    """Drivers whose robot is in their process."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver


class SampleRig(Rig):
    def __init__(self, arm: udp_arm.StandIn) -> None:
        self.arm, self.driver, self.silent = arm, UdpArm(port=arm.port), False
        arm.socket.setblocking(False)

    def connect(self) -> None:
        answering = threading.Thread(target=self._answer)
        answering.start()
        super().connect()
        answering.join(5)

    def _answer(self) -> None:
        self.arm.socket.settimeout(5)
        self.arm.take()
        self.arm.send()
        self.arm.socket.setblocking(False)

    def pump(self) -> None:
        try:
            while True:
                message = self.arm.take()
                if message.get("set") == "torque":
                    self.arm.torque = message["value"]
        except BlockingIOError:
            pass
        if not self.silent:
            self.arm.send()

    def has_torque(self) -> bool:
        return self.arm.torque

    def silence(self) -> None:
        self.silent = True

    def fault(self) -> str:
        self.arm.faults = ["the gearbox is hot"]
        return "gearbox"

    def commands(self) -> list[np.ndarray]:
        return [np.array(message["target"]) for message in self.arm.messages if "target" in message]


class AlohaRig(Rig):
    """Simulated arms of Interbotix's nodes. `get` and `put`: attributes of an `XsArm`."""

    beyond = 9, 1.9, r"right: 1\.900 is beyond the limits of elbow"

    def __init__(self, driver: AlohaArms, get: Callable[[int, str], Any], put: Callable[[int, str, Any], None]) -> None:
        self.driver, self.get, self.put = driver, get, put
        self.gripper: Gripper = driver._gripper

    def has_torque(self) -> bool:
        return all(all(self.get(arm, "torque")) for arm in (0, 1))

    def silence(self) -> None:
        self.put(1, "silent", True)

    def fault(self) -> str:
        self.put(1, "errors", [0, 0, 32, 0, 0, 0, 0])
        self.put(1, "torque", [True, True, False, True, True, True, True])
        return "right/elbow: it has an error"

    def repair(self) -> None:
        with pytest.raises(Exception, match="falls while elbow"):
            self.driver.set("reboot", self.driver._arms[1] + "/elbow")
        self.driver.set("reboot", self.driver._arms[1] + "/elbow: the arm is supported")

    def commands(self) -> list[np.ndarray]:
        got = [(self.get(arm, "group"), self.get(arm, "single")) for arm in (0, 1)]
        n = min(len(each) for arm in got for each in arm)
        return [np.concatenate([[*group[k], self._opening(single[k])] for group, single in got]) for k in range(n)]

    def _opening(self, angle: float) -> float:
        return self.gripper.opening(0.022 * np.sin(angle) + np.sqrt(0.036**2 - (0.022 * np.cos(angle)) ** 2))


class TrossenRig(Rig):
    beyond = 9, 2.5, r"10\.0\.0\.5: 2\.500 is beyond the limits of joint 2"

    def __init__(self, controllers: dict[str, trossen_stand_in.Controller]) -> None:
        self.controllers = list(controllers.values())
        self.driver = TrossenArms(addresses=list(controllers))

    def has_torque(self) -> bool:
        return all(c.modes == [trossen_stand_in.Mode.position] * 7 for c in self.controllers)

    def silence(self) -> None:
        self.controllers[1].silent = True

    def fault(self) -> str:
        self.controllers[1].error = "Joint overheated\nsee the manual"
        return "Joint overheated"

    def commands(self) -> list[np.ndarray]:
        """Without those of the switch to the mode position, which repeat the measured pose."""
        rows = [[row for row, seconds in c.commands if seconds > 0] for c in self.controllers]
        got = [np.concatenate(both) for both in zip(*rows, strict=True)]
        return [np.where(np.arange(14) % 7 == 6, each / OPEN, each) for each in got]


class AlohaSimRig(Rig):
    def __init__(self, port: int) -> None:
        from serl_chunk.robots.aloha_sim import driver

        self.port, self._inject = port, driver.inject
        self.driver = driver.AlohaSimDriver(port=port, ends=20.0)

    def silence(self) -> None:
        self._inject(self.port, dropped=80)

    def fault(self) -> str:
        self._inject(self.port, fault="a motor is hot")
        return "motor"


class FrankaRig(Rig):
    """An arm behind the stand-in of HIL-SERL's server."""

    each_arrives = torque_off = False

    def __init__(self, server: FrankaServer) -> None:
        self.server, self.driver = server, FrankaHttp([server.url])
        self.start = server.arm.pose.copy()

    def silence(self) -> None:
        self.server.hangs = {"getstate"}

    def fault(self) -> str:
        self.server.errs = {"getstate"}
        return "getstate: HTTP 500"

    def repair(self) -> None:
        self.server.errs = set()

    def commands(self) -> list[np.ndarray]:
        """Without those of a clearing, which repeat the measured pose."""
        poses = [np.array(body["arr"]) for path, body in list(self.server.requests) if path == "pose"]
        return [
            np.array([*pose[:3], *unwrapped(euler_of_matrix(matrix_of_quat(pose[3:])), START[3:]), 0.5])
            for pose in poses
            if not np.array_equal(pose, self.start)
        ]


class Served:
    """A connected driver under the loop, in real time."""

    def __init__(self, rig: Rig) -> None:
        spec = rig.driver.spec()
        self.rig, limits = rig, built_in(spec)["evaluating"]
        low, high = np.array(spec.low) - 0.05, np.array(spec.high) + 0.05
        measured = Measured(low, high, np.array(spec.velocity))
        gate = Gate(limits, DT)
        self.loop = RobotLoop(rig.driver, gate, measured=measured, tick=DT, clock=time.monotonic, needs_go=False)
        self.due = time.monotonic()

    def run(self, until: Callable[[], bool], within: float = 5.0) -> None:
        """Passes at 50 Hz."""
        ends = time.monotonic() + within
        while not until():
            assert time.monotonic() < ends, self.loop.machine
            self.due = max(self.due + DT, time.monotonic() - DT)
            time.sleep(max(self.due - time.monotonic(), 0.0))
            self.rig.pump()
            self.loop.run_pass(time.monotonic())

    def passes(self, n: int) -> None:
        left = iter(range(n))
        self.run(lambda: next(left, None) is None, within=60.0)

    def hold(self) -> None:
        self.passes(3)
        for _ in range(50):  # arms without torque need two, and a busy machine may need more
            try:
                self.loop.request("clear", "operator", "K", time.monotonic())
                return
            except Refused as e:
                reason = e
                self.passes(3)
        raise reason

    def arm(self) -> None:
        self.hold()
        self.loop.request("arm", "controller", "A", time.monotonic())


@contextmanager
def sample() -> Iterator[Rig]:
    arm = udp_arm.StandIn()
    yield SampleRig(arm)
    arm.socket.close()


@contextmanager
def ros1_arms() -> Iterator[Rig]:
    if ros1.missing():
        pytest.skip(ros1.missing())
    ros = ros1.ros()
    ros.need_arms()
    rig = AlohaRig(aloha_ros1(), ros.get, ros.put)
    rig.vanish = ros.kill_arms
    with patch.object(aloha_arms, "POLL", 0.1):
        yield rig


@contextmanager
def ros2_arms() -> Iterator[Rig]:
    with rclpy_stand_in.installed() as graph, patch.object(aloha_arms, "POLL", 0.1):
        arms: list[XsArm] = list(graph.arms.values())
        get, put = (lambda k, name: getattr(arms[k], name)), (lambda k, name, value: setattr(arms[k], name, value))
        rig = AlohaRig(aloha_ros2(), get, put)
        rig.vanish = lambda: setattr(graph, "gone", True)
        yield rig


@contextmanager
def trossen() -> Iterator[Rig]:
    with trossen_stand_in.installed("10.0.0.4", "10.0.0.5") as controllers:
        yield TrossenRig(controllers)


@contextmanager
def fake() -> Iterator[Rig]:
    yield FakeRig(viperx_arms())


@contextmanager
def fake_aloha() -> Iterator[Rig]:
    from serl_chunk.robots.fake.driver import FakeAlohaDriver

    yield FakeRig(FakeAlohaDriver())


@contextmanager
def franka_http() -> Iterator[Rig]:
    with FrankaServer() as server:
        yield FrankaRig(server)


_port: list[int] = []


@contextmanager
def aloha_sim() -> Iterator[Rig]:
    if importlib.util.find_spec("gym_aloha") is None:
        pytest.skip("gym-aloha is not installed")
    _port[:] = _port or [_free_udp_port()]
    yield AlohaSimRig(_port[0])


def _free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


RIGS = {"fake": fake, "sample": sample, "fake_aloha": fake_aloha, "aloha_sim": aloha_sim, "aloha_ros1": ros1_arms,
        "aloha_ros2": ros2_arms, "trossen": trossen, "franka_http": franka_http}  # fmt: skip


class LeRobotRig(Rig):
    """Simulated motors of two SO arms of LeRobot, and a driver in degrees."""

    each_arrives = False  # a set point that waits for the motors' bus is replaced by the next one
    beyond = 9, 1.7, r"wrist_flex: 1\.700 is beyond"

    def __init__(self, ports: dict[str, Any]) -> None:
        from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms

        self.ports = list(ports.values())
        params = {f"{side}_arm_config": {"port": port} for side, port in zip(("left", "right"), ports, strict=True)}
        self.driver = LeRobotArms(
            type="bi_so_follower", params={"id": "cell", **params}, low=-1.6, high=1.6, velocity=4.0
        )

    def has_torque(self) -> bool:
        return all(all(port.registers["Torque_Enable"]) for port in self.ports)

    def silence(self) -> None:
        self.ports[1].broken = "Failed to sync read. [TxRxResult] There is no status packet!"

    def fault(self) -> str:
        self.ports[1].registers["Torque_Enable"][2] = 0
        return "right_elbow_flex"

    def commands(self) -> list[np.ndarray]:
        units = np.array([np.pi / 180] * 5 + [0.01])
        got = [[units * np.array(list(goal.values())) for goal in port.goals] for port in self.ports]
        return [np.concatenate(both) for both in zip(*got, strict=False)]


@contextmanager
def lerobot_arms() -> Iterator[Rig]:
    import lerobot_stand_in

    with lerobot_stand_in.installed("/dev/left", "/dev/right") as ports:
        rig = LeRobotRig(ports)
        yield rig
        rig.driver.close()
        assert not any("two threads" in port.calls for port in rig.ports), "one thread alone has the bus"


RIGS["lerobot"] = lerobot_arms
