"""Each driver with the robot's side of it, as the conformance suite needs them."""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import lerobot_stand_in
import numpy as np
import pytest
import rclpy_stand_in
import ros1
import trossen_stand_in
from franka_http import START, FrankaServer
from xs_arm import finger

from serl_chunk_robot.control.loop import Refused, RobotLoop
from serl_chunk_robot.drivers import aloha_arms
from serl_chunk_robot.drivers.aloha_ros1 import aloha_ros1
from serl_chunk_robot.drivers.aloha_ros2 import aloha_ros2
from serl_chunk_robot.drivers.base import Driver, Reading
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.drivers.franka_http import FrankaHttp
from serl_chunk_robot.drivers.lerobot_robot import LeRobotArms
from serl_chunk_robot.drivers.sample import UdpArm
from serl_chunk_robot.drivers.trossen import OPEN, TrossenArms
from serl_chunk_robot.geometry.rotations import euler_of_matrix, matrix_of_quat, unwrapped
from serl_chunk_robot.robot_file.profiles import built_in
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured

DT = 0.02  # s, of a pass
UNITS = np.array([np.pi / 180] * 5 + [0.01])  # of LeRobot, in rad and openings
WITHIN = 10.0  # s, of what takes time
POSE = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5])  # of the sample driver's arm


class Rig:
    """A driver that is not connected, and its robot. `parts`: what the robot has, in place of the defaults below."""

    joint = 1  # one that may move by 0.05 from where it is
    silence: Callable[[], object] | None = None  # the robot sends no state any more, for 0.3 s at least
    fault: Callable[[], str] | None = None  # the robot has a fault from now on; a part of its text
    each_arrives = True  # False: of set points in quick succession, only the newest does
    beyond: tuple[int, float, str] | None = None  # a joint, where its limits do not let it go, and what is said then
    torque_off = True  # False: it loses its torque by a switch of its own alone

    def __init__(self, driver: Driver, **parts: Any) -> None:
        self.driver = driver
        vars(self).update(parts)

    def connect(self) -> None:
        self.driver.connect(time.monotonic)

    def ready(self) -> None:
        self.connect()
        self.driver.clear_faults()
        self.read(lambda reading: reading.torque and not reading.faults)

    def pump(self) -> None:
        """Let the robot do what waits for it."""

    def repair(self) -> None:
        """What ends a fault, apart from a clear."""

    def commands(self) -> list[np.ndarray]:
        """All set points that reached the robot, in the driver's unit, where its rig records them."""
        return []

    def has_torque(self) -> bool:
        return self.driver.read().torque

    def read(self, when: Callable[[Reading], bool] = lambda reading: True) -> Reading:
        until = time.monotonic() + WITHIN
        while True:
            self.pump()
            reading = self.driver.read()
            if when(reading):
                return reading
            assert time.monotonic() < until, reading
            time.sleep(0.002)


def sets(of: Any, text: str = "", **values: Any) -> Callable[[], str]:
    return lambda: vars(of).update(values) or text


class SampleRig(Rig):
    """An arm that speaks JSON over UDP. It is at each target at once, and sends its state when it is pumped."""

    def __init__(self, stack: ExitStack) -> None:
        self.socket = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        super().__init__(
            UdpArm(port=self.port),
            silence=sets(self, silent=True),
            fault=sets(self, "gearbox", faults=["the gearbox is hot"]),
        )
        self.q, self.mode, self.faults, self.heard, self.torque = POSE.copy(), "position", [], 0, True
        self.silent, self.messages, self.peer = False, [], None

    def connect(self) -> None:
        answering = threading.Thread(target=lambda: self.take() and self.send())
        answering.start()
        super().connect()
        answering.join(5)

    def take(self, seconds: float = 5.0) -> dict:
        self.socket.settimeout(seconds)
        datagram, self.peer = self.socket.recvfrom(65536)
        message = json.loads(datagram)
        self.messages.append(message)
        if "target" in message and not self.faults:
            self.q = np.array(message["target"])
        self.heard = message.get("number", self.heard)
        if message.get("stop", 0) > 0:
            self.faults = ["stopped by its own means"]
        if "clear" in message:
            self.faults, self.torque = [], True
        if message.get("set") == "torque":
            self.torque = message["value"]
        return message

    def send(self, datagram: bytes = b"") -> None:
        state = {"mode": self.mode, "q": self.q.tolist(), "dq": [0.0] * 7, "effort": [0.1] * 7, "faults": self.faults,
                 "torque": self.torque, "heard": self.heard}  # fmt: skip
        self.socket.sendto(datagram or json.dumps(state).encode(), self.peer)

    def pump(self) -> None:
        with suppress(BlockingIOError):
            while self.take(0.0):
                pass
        if not self.silent:
            self.send()

    def has_torque(self) -> bool:
        return self.torque

    def commands(self) -> list[np.ndarray]:
        return [np.array(message["target"]) for message in self.messages if "target" in message]


class AlohaRig(Rig):
    """Simulated arms of Interbotix's nodes. `get` and `put`: attributes of an `XsArm`; `vanish`: their nodes are gone.

    `graph` is that of ROS 2.
    """

    beyond = 9, 1.9, r"right: 1\.900 is beyond the limits of elbow"

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
        n, opening = min(len(each) for arm in got for each in arm), self.driver._gripper.opening
        return [np.concatenate([[*group[k], opening(finger(single[k]))] for group, single in got]) for k in range(n)]


def ros1_arms(stack: ExitStack) -> AlohaRig:
    if ros1.missing():
        pytest.skip(ros1.missing())
    ros = ros1.ros()
    ros.need_arms()
    stack.enter_context(patch.object(aloha_arms, "POLL", 0.1))
    return AlohaRig(aloha_ros1(), get=ros.get, put=ros.put, vanish=ros.kill_arms)


def ros2_arms(stack: ExitStack) -> AlohaRig:
    graph = stack.enter_context(rclpy_stand_in.installed())
    stack.enter_context(patch.object(aloha_arms, "POLL", 0.1))
    arms = list(graph.arms.values())
    get, put = (lambda k, name: getattr(arms[k], name)), (lambda k, name, value: setattr(arms[k], name, value))
    return AlohaRig(aloha_ros2(), graph=graph, get=get, put=put, vanish=sets(graph, gone=True))


def trossen(stack: ExitStack) -> Rig:
    addresses = ["10.0.0.4", "10.0.0.5"]
    controllers = list(stack.enter_context(trossen_stand_in.installed(*addresses)).values())

    def commands() -> list[np.ndarray]:
        """Without those of the switch to the mode position, which repeat the measured pose."""
        rows = [[row for row, seconds in c.commands if seconds > 0] for c in controllers]
        return [np.concatenate(both) / np.where(np.arange(14) % 7 == 6, OPEN, 1) for both in zip(*rows, strict=True)]

    return Rig(
        TrossenArms(addresses=addresses),
        controllers=controllers,
        commands=commands,
        beyond=(9, 2.5, r"10\.0\.0\.5: 2\.500 is beyond the limits of joint 2"),
        silence=sets(controllers[1], silent=True),
        has_torque=lambda: all(c.modes == [trossen_stand_in.Mode.position] * 7 for c in controllers),
        fault=sets(controllers[1], "Joint overheated", error="Joint overheated\nsee the manual"),
    )


def franka_http(stack: ExitStack) -> Rig:
    server = stack.enter_context(FrankaServer())
    start = server.arm.pose.copy()

    def commands() -> list[np.ndarray]:
        """Without those of a clearing, which repeat the measured pose."""
        poses = [np.array(body["arr"]) for path, body in list(server.requests) if path == "pose"]
        return [
            np.array([*pose[:3], *unwrapped(euler_of_matrix(matrix_of_quat(pose[3:])), START[3:]), 0.5])
            for pose in poses
            if not np.array_equal(pose, start)
        ]

    return Rig(FrankaHttp([server.url]), commands=commands, silence=sets(server, hangs={"getstate"}),
               fault=sets(server, "getstate: HTTP 500", errs={"getstate"}), repair=sets(server, errs=set()),
               each_arrives=False, torque_off=False)  # fmt: skip


def lerobot_arms(stack: ExitStack) -> Rig:
    """Simulated motors of two SO arms of LeRobot, and a driver in degrees."""
    ports = list(stack.enter_context(lerobot_stand_in.installed("/dev/left", "/dev/right")).values())
    params = {f"{side}_arm_config": {"port": f"/dev/{side}"} for side in ("left", "right")}
    driver = LeRobotArms(type="bi_so_follower", params={"id": "cell", **params}, low=-1.6, high=1.6, velocity=4.0)

    def check() -> None:
        assert not any("two threads" in port.calls for port in ports), "one thread alone has the bus"

    def fault() -> str:
        ports[1].torque[2] = 0
        return "right_elbow_flex"

    def commands() -> list[np.ndarray]:
        got = [[UNITS * np.array(list(goal.values())) for goal in port.goals] for port in ports]
        return [np.concatenate(both) for both in zip(*got, strict=False)]

    stack.callback(check)
    return Rig(
        driver,
        each_arrives=False,  # a set point that waits for the motors' bus is replaced by the next one
        beyond=(9, 1.7, r"wrist_flex: 1\.700 is beyond"),
        has_torque=lambda: all(all(p.torque) for p in ports),
        silence=sets(ports[1], broken="Failed to sync read. [TxRxResult] There is no status packet!"),
        fault=fault,
        commands=commands,
    )


def fake_aloha(_: ExitStack) -> Rig:
    from serl_chunk.robots.fake.driver import FakeAlohaDriver

    return Rig(FakeAlohaDriver())


@functools.cache
def udp_port() -> int:
    """A free port; one process of the simulated arms serves all tests."""
    if importlib.util.find_spec("gym_aloha") is None:
        pytest.skip("gym-aloha is not installed")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def aloha_sim(_: ExitStack) -> Rig:
    from serl_chunk.robots.aloha_sim import driver

    port, motor = udp_port(), "a motor is hot"
    return Rig(
        driver.AlohaSimDriver(port=port, ends=20.0),
        silence=lambda: driver.inject(port, dropped=80),
        fault=lambda: driver.inject(port, fault=motor) or motor,
    )


RIGS: dict[str, Callable[[ExitStack], Any]] = {
    "fake": lambda _: Rig(viperx_arms()), "sample": SampleRig, "fake_aloha": fake_aloha, "aloha_sim": aloha_sim,
    "aloha_ros1": ros1_arms, "aloha_ros2": ros2_arms, "trossen": trossen, "franka_http": franka_http,
    "lerobot": lerobot_arms,
}  # fmt: skip


def fixture(*params: Any) -> Any:

    @pytest.fixture(params=params)
    def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
        with ExitStack() as stack:
            rig = RIGS[request.param](stack)
            stack.callback(lambda: rig.driver.close())
            yield rig

    return rig


def loop_of(
    driver: Driver, tick: float = DT, clock: Callable[[], float] = time.monotonic, first: np.ndarray | None = None
) -> RobotLoop:
    """The loop of a driver that is connected. `first`: of the limits, where they are others than the profile's."""
    spec = driver.spec()
    limits = built_in(spec)["evaluating"]
    measured = Measured(np.array(spec.low) - 0.05, np.array(spec.high) + 0.05, np.array(spec.velocity))
    gate = Gate(limits if first is None else limits._replace(first=first), DT)
    return RobotLoop(driver, gate, measured=measured, tick=tick, clock=clock, needs_go=False)


class Served:
    def __init__(self, rig: Rig) -> None:
        self.rig, self.loop, self.due = rig, loop_of(rig.driver), time.monotonic()

    def run(self, until: Callable[[], bool], within: float = 5.0) -> None:
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
