"""Leaders that a server permits to be driven: real sockets and device processes, and every end of a drive."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from driven_leader import PATIENCE, LedRobot, robot_file
from robot_process import RobotProcess
from robot_served import drive, until, wait

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.devices.leader_motion import LeaderDrive
from serl_chunk_robot.server.leader_permissions import OF_LIMITS, RENEWED, Drives, take_permits
from serl_chunk_robot.wire import arrays


class Cell(LedRobot):
    """A robot with an actor. One device process serves all tests: it takes seconds to start."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        super().__init__(stack, folder)
        self.actor = self.robot.client()
        self._numbers = itertools.count(1)
        self.number = 0

    def renew(self) -> Cell:
        """Stand in HOLD, with the lease, and with a leader without torque that is away from its arm."""
        self.operator.request("stop")
        wait(self._clears)
        self.actor.request("lease")
        self.number = next(self._numbers)
        self.state.with_name("held").unlink(missing_ok=True)
        (away := self.state.with_name("away")).touch()
        wait(lambda: not away.exists() and self.status() is not None, 30)
        self.actor.request("lease")  # it ended if that took long
        return self

    def moves(self) -> Cell:
        """The leader moves with torque."""
        self.renew().goes("moves")
        wait(self.torque)
        return self

    def _clears(self) -> bool:
        with contextlib.suppress(RobotError):  # braking first, and after torque off the first one switches it on
            self.operator.request("clear")
        return self.operator.next_state()["state"] == "HOLD"

    def status(self):
        reading = self.actor.next_reading("right", 0.05)
        return None if reading is None else reading.drive

    def phase(self):
        status = self.status()
        return "" if status is None or status[0] != self.number else status[1]

    def request(self, **first: int):
        self.actor.request("drive", number=self.number, first=first or {"right": 7})

    def goes(self, *phases: str, seconds: float = 20.0) -> str:
        """Request the drive until it comes to a phase; another one where the server was late, as on a busy machine."""
        found = [""]

        def there() -> bool:
            self.request()
            found[0] = self.phase()
            if found[0] == "failed" and found[0] not in phases:
                self.number = next(self._numbers)
            return found[0] in phases

        wait(there, seconds)
        return found[0]

    def falls(self, seconds: float = 1.0) -> float:
        began = time.monotonic()
        wait(lambda: not self.torque(), seconds)
        return time.monotonic() - began

    def why(self) -> str:
        found = [""]

        def ended() -> bool:
            drive = self.status()  # one reading: the next state may be of no drive any more
            found[0] = drive[2] if drive else ""
            return bool(drive) and drive[0] == self.number and drive[1] in ("failed", "there")

        wait(ended)
        return found[0]


@pytest.fixture(scope="module")
def cell(tmp_path_factory) -> Iterator[Cell]:
    with contextlib.ExitStack() as stack:
        yield Cell(stack, tmp_path_factory.mktemp("leader"))


def test_a_leader_goes_to_the_joints_of_its_arm_and_loses_its_torque_there(cell):
    assert cell.renew().goes("waits") == "waits"
    assert not cell.torque()
    assert cell.goes("keeps") == "keeps"
    assert cell.torque()
    q = cell.actor.next_state()["q"]
    np.testing.assert_allclose(cell.actor.next_reading("right", 1.0).joints, q[7:], atol=0.04)
    first = cell.number
    cell.actor.request("drive", number=first, first={})
    assert cell.falls() < 0.5
    wait(lambda: cell.phase() == "there")
    with pytest.raises(RobotError, match="has ended"):
        cell.request()
    cell.number = next(cell._numbers)
    assert cell.goes("there") == "there"
    cell.number = first
    with pytest.raises(RobotError, match="has ended"):  # a request of an earlier drive, that came late
        cell.request()


def test_what_calms_or_moves_the_robot_takes_the_torque(cell):
    for op in ("stop", "hold", "release", "drop", "arm", "reset", "torque_off", "jog"):
        cell.moves()
        client = cell.operator if op in ("stop", "hold", "torque_off", "jog") else cell.actor
        with contextlib.suppress(RobotError):  # a hold of a robot that stands is refused, and ends the drive
            client.request(op, **({"by": 0.1} if op == "jog" else {}))
        cell.falls()
        assert op != "jog" or "jogged" in cell.why()
        wait(lambda: cell.phase() == "failed")
        wait(lambda: cell.actor.next_state()["state"] != "MOVE")
        with contextlib.suppress(RobotError):
            cell.request()
        time.sleep(0.1)
        assert (cell.torque(), cell.phase()) == (False, "failed"), f"the same drive does not begin again after {op}"


def test_an_actor_that_is_silent_or_loses_its_lease_takes_the_torque(cell):
    cell.moves()
    began = time.monotonic()
    cell.falls(3.0)
    assert RENEWED < PATIENCE - 0.1 < time.monotonic() - began < PATIENCE + 0.5
    assert "did not request it" in cell.why()
    cell.moves()
    again = cell.robot.client("left")  # another connection of this actor
    again.request("lease")
    cell.falls()
    with pytest.raises(RobotError, match="controls the robot"):
        cell.request()


def test_only_the_actor_of_a_robot_that_stands_in_hold_may_drive_leaders_that_are_there(cell):
    cell.renew()
    for first, named in (({"left": 0}, "no device 'left'"), ({"right": 14}, "0 to 13"), ({"right": "a"}, "0 to 13")):
        with pytest.raises(RobotError, match=named):
            cell.request(**first)
    with pytest.raises(RobotError, match="left controls the robot"):
        cell.robot.client("other", "any").request("drive", number=cell.number, first={"right": 7})
    cell.actor.request("arm")
    drive(cell.actor, 3)
    with pytest.raises(RobotError, match="stands in HOLD, and it is in RUN"):
        cell.request()
    cell.operator.request("stop")
    until(cell.actor, "STOPPED")
    with pytest.raises(RobotError, match="and it is in STOPPED"):
        cell.request()
    cell.actor.request("drop")
    with pytest.raises(RobotError, match="no actor holds the lease"):
        cell.request()


def test_a_hand_that_holds_the_leader_takes_the_torque(cell):
    cell.renew().state.with_name("held").touch()
    assert cell.goes("failed") == "failed"
    assert "a hand holds it" in cell.why()
    assert not cell.torque()


def test_a_leader_that_is_unplugged_in_motion_comes_back_without_torque(cell):
    cell.moves().state.unlink()
    cell.goes("failed")
    cell.state.write_text("1 0.3")  # it is plugged in, and has torque still
    cell.falls(3.0)
    for _ in range(20):
        with contextlib.suppress(RobotError):
            cell.request()
        assert not cell.torque()
        time.sleep(0.01)


def test_a_devices_process_that_ends_leaves_no_torque(cell):
    """One that is killed leaves it until the next one opens the leader."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(cell.moves().processes.pids()[0], number)
        cell.falls(0.9 if number == signal.SIGTERM else 10.0)  # the next one starts after 1 s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_killed_or_ends_takes_the_torque(tmp_path, number):
    text = re.sub(r"port = .*\n", "", robot_file(tmp_path).read_text())
    with contextlib.ExitStack() as stack:
        robot = stack.enter_context(contextlib.closing(RobotProcess(tmp_path, text)))
        robot.begin()
        actor = stack.enter_context(robot.client("left", "controller"))
        operator = stack.enter_context(robot.client("operator", "operator"))
        actor.hello()
        wait(lambda: actor.next_reading("right", 0.1) is not None, 30)
        operator.request("clear")
        operator.request("go")
        state = tmp_path / "state"

        def moves() -> bool:
            actor.request("drive", number=5, first={"right": 7})
            return state.read_text().startswith("1")

        wait(moves)
        began = time.monotonic()
        robot.process.send_signal(number)
        wait(lambda: not state.read_text().startswith("1"), 3.0)
        assert time.monotonic() - began < 1.0


def test_what_is_no_permission_is_logged_and_the_newer_ones_are_read(caplog):
    given = []
    taker = LeaderDrive("left", None, 2)  # type: ignore[arg-type]
    taker.permit = given.append  # type: ignore[method-assign]
    with contextlib.closing(Drives(["left"])) as drives:
        ours = drives._pairs["left"][0]
        good = {"number": 1, "moment": 2.0, "q": np.ones(3), **dict.fromkeys(OF_LIMITS, np.ones(3))}
        ours.send(arrays.pack({"number": 1}))
        ours.send(arrays.pack(good))
        take_permits(drives.descriptors()["left"], taker)
        assert [(each.number, each.joints.tolist()) for each in given] == [(1, [1.0, 1.0])]
        assert "cannot be read" in caplog.text
        for _ in range(1000):  # of a process that does not read
            drives._send("left", good)
