"""Leaders that are driven to their arms: what is requested, on a simulated clock, and with a server and a process."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from driven_leader import SPEC, LedRobot
from errors import naming
from hosted_device import HostedDevice
from robot_served import HERE, free_port, served, wait

from serl_chunk.config.experiment import ActorConfig, ExperimentConfig
from serl_chunk.config.operator import DeviceConfig
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.devices import leader_requests
from serl_chunk.devices.human import HumanIntervention
from serl_chunk.devices.leader_requests import AGAIN_S, KEEPS_S, LeaderDrives
from serl_chunk.devices.operator import make_human
from serl_chunk.devices.robot_hosted import open_hosted
from serl_chunk.robots.base import RobotEnv
from serl_chunk.robots.registry import make_env
from serl_chunk.robots.served.robot import ServedRobot
from serl_chunk.types import ConfigError
from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.devices.base import DriveStatus, Sample
from serl_chunk_robot.server.leader_permissions import RENEWED


class Leader:
    def __init__(self) -> None:
        self.drive: DriveStatus | None = DriveStatus()
        self.alive = True

    def read(self) -> Sample:
        return Sample(None, np.zeros(7), (), 0.0, self.alive, self.drive)


class Desk:
    def __init__(self) -> None:
        self.now, self.refuses, self.requests = 0.0, "", []
        self.leaders = {"left": Leader(), "right": Leader()}
        both = {"left": (self.leaders["left"], 0), "right": (self.leaders["right"], 7)}
        self.drives = LeaderDrives(self._request, both, lambda: self.now)

    def _request(self, number, first):
        if self.refuses:
            raise RobotError(self.refuses)
        self.requests.append((self.now, number, dict(first)))

    def phase(self, left, right, why="", number=None):
        number = self.requests[-1][1] if number is None else number
        for name, phase in (("left", left), ("right", right)):
            self.leaders[name].drive = DriveStatus(number, phase, why)

    def poll(self, seconds=0.01):
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            going = self.drives.poll()
        return going

    def ended(self):
        return self.requests[-1][2] == {}


@pytest.fixture
def desk():
    desk = Desk()
    desk.drives.begin()
    assert desk.poll()
    return desk


def test_a_drive_is_requested_again_and_again_and_ended_once_hands_had_time_to_take_all_leaders(desk, caplog):
    assert desk.requests[0][2] == {"left": 0, "right": 7}
    desk.phase("waits", "there")
    assert desk.poll(0.5)
    desk.phase("keeps", "moves")
    assert desk.poll(3.0)
    assert caplog.text.count("\a") == caplog.text.count("Take your hands off them\a") == 1
    times = np.array([at for at, _, _ in desk.requests])
    assert np.diff(times).max() < 1.5 * AGAIN_S < RENEWED
    assert desk.drives.remarks()[0][1] == "keep your hands off it"
    desk.phase("keeps", "keeps")
    assert desk.poll(KEEPS_S - 0.1)
    assert "take hold" in desk.drives.remarks()[0][1]
    assert "Take hold of them" in caplog.text
    assert not desk.ended()
    assert desk.poll(0.2)
    assert desk.ended()
    desk.phase("there", "there")
    assert not desk.poll()
    assert desk.drives.failed == ""


def test_leaders_at_their_arms_are_there_at_once_and_what_an_earlier_drive_came_to_does_not_count(desk, caplog):
    desk.phase("there", "there")
    assert not desk.poll()
    assert (desk.drives.failed, "\a" in caplog.text) == ("", False)
    desk.drives.begin()
    assert desk.poll()
    desk.phase("failed", "failed", number=desk.requests[0][1])
    assert desk.poll()
    assert desk.requests[-1][1] > desk.requests[0][1]


FAULTS = {
    "failed": (lambda desk: desk.phase("moves", "failed", "a hand holds it"), "right: a hand holds it"),
    "lost": (lambda desk: setattr(desk.leaders["right"], "alive", False), "right is lost"),
    "refused": (lambda desk: setattr(desk, "refuses", "drive: the robot is in STOPPED"), "STOPPED"),
    "long": (lambda desk: None, "within 1 s"),
    "cannot": (lambda desk: setattr(desk.leaders["right"], "drive", None), "right is lost"),
}


@pytest.mark.parametrize(("do", "word"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_one_leader_ends_the_drive_of_all(desk, do, word, monkeypatch):
    monkeypatch.setattr(leader_requests, "LONGEST_S", 1.0)
    desk.phase("moves", "moves")
    assert desk.poll()
    do(desk)
    assert not desk.poll(1.1)
    assert word in desk.drives.failed
    assert desk.ended() or desk.refuses
    count = len(desk.requests)
    assert not desk.poll(1.0)
    assert len(desk.requests) == count


def test_leaders_that_do_not_report_their_release_are_a_fault_and_a_cancelled_drive_ends_without_a_server(desk):
    desk.phase("keeps", "keeps")
    assert desk.poll(KEEPS_S + 0.5)
    assert not desk.poll(1.0)
    assert "no end" in desk.drives.failed
    desk.drives.begin()
    desk.drives.cancel()
    assert desk.ended()
    desk.refuses = "no answer"
    desk.drives.cancel()


def human_of(stack: contextlib.ExitStack, config: FakeAlohaConfig, env: RobotEnv) -> HumanIntervention:
    actor = ActorConfig(intervention="leader")
    human = make_human(ExperimentConfig("x", config, actor=actor, device=DeviceConfig(align="drive")), env)
    stack.callback(human.close)
    return human


def test_an_actor_drives_the_leader_of_a_served_robot_and_a_stop_takes_its_torque(tmp_path, monkeypatch):
    monkeypatch.setattr("serl_chunk_robot.devices.polling.SILENT", 1.0)  # of readings at the actor
    with contextlib.ExitStack() as stack:
        cell = LedRobot(stack, tmp_path)
        config = FakeAlohaConfig(server=f"{HERE}:{cell.robot.port}")
        env = stack.enter_context(contextlib.closing(ServedRobot(config, SPEC)))
        env.reset(seed=1)
        human = human_of(stack, config, env)

        def poll() -> bool:
            time.sleep(0.01)
            env.idle()
            return human.drives.poll()

        def torque() -> bool:
            assert poll(), human.drives.failed
            return cell.torque()

        human.drives.begin()
        wait(torque)
        assert human.hands().grippers == ()
        cell.operator.request("stop")
        wait(lambda: not cell.torque(), 1.0)
        wait(lambda: not poll())
        assert human.drives.failed
        cell.operator.request("clear")
        env.reset(seed=1)
        for _ in range(5):  # on a busy machine a reading may be late, and the leader lost
            human.drives.begin()
            wait(lambda: not poll(), 30.0)
            if not human.drives.failed:
                break
        assert human.drives.failed == ""
        assert not cell.torque()
        leader = open_hosted(config, env.robot_spec, (), joints=True)[0][1]
        stack.callback(leader.close)
        q = env.seen().q
        np.testing.assert_allclose(leader.read().joints, q[7:], atol=0.05)


@pytest.mark.parametrize("driven", [True, False])
def test_leaders_that_cannot_be_driven_and_robots_without_a_server_are_refused(driven: bool):
    port, drive = free_port(3), DriveStatus() if driven else None
    config = FakeAlohaConfig(server=f"{HERE}:{port}")
    with served(port=port, devices=(("right", port + 2, 1),)) as robot, contextlib.ExitStack() as stack:
        sample = Sample(None, np.zeros(7), (), 0.0, True, drive)
        stack.enter_context(HostedDevice(robot.server.run_id, "right", port + 2, sample))
        env = make_env(FakeAlohaConfig()) if driven else ServedRobot(config, SPEC)
        stack.enter_context(contextlib.closing(env))
        with pytest.raises(ConfigError, match=naming("device.align", "right at", "Feetech", "near")):
            human_of(stack, config, env)
