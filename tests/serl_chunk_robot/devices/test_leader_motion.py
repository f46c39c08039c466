"""A leader that is driven to its arm, on a clock of the test's own: simulated motors, and all that ends a drive."""

from __future__ import annotations

import numpy as np
import pytest

from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.devices.leader_motion import LeaderDrive, Permission
from serl_chunk_robot.devices.neutral import NeutralFirst
from serl_chunk_robot.safety.motion import Limits, Rates

LOOK = 0.01  # s between two looks
# Of the product, written apart: s before torque, s of a permission, rad/s, rad that a hand holds it from its set point.
STANDS, VALID, FASTEST, HELD = 1.0, 0.1, 0.5, 0.15
ARM = np.array([0.6, -0.4, 0.2, 0.9])  # three joints and a gripper
STILL = np.zeros(4)
VELOCITY = np.array([0.4, 0.4, 2.0, 0.4])  # of the profile: the third one is faster than leaders may be


LIMITS = Limits(np.array([-1.5, -1.5, -1.5, 0.0]), np.array([1.5, 1.5, 1.5, 1.0]),
                Rates(VELOCITY, VELOCITY / 0.08, VELOCITY / 0.0008), STILL, STILL, STILL)  # fmt: skip


class Leader:
    """Motors that go to their set point at once, in a hand that may hold them, and a server that permits."""

    def __init__(self) -> None:
        self.joints, self.goal, self.torque = np.array([0.0, 0.0, 0.0, 0.1]), np.zeros(4), False
        self.blocked, self.unplugged = False, False
        self.calls: list[str] = []
        self.path: list[tuple[float, np.ndarray]] = []
        self.now, self.number, self.permits, self.arm = 100.0, 1, True, ARM.copy()
        self.stamp_age, self.look = 0.0, LOOK  # s
        self.drive = LeaderDrive("left", self, 4)

    def reach(self):
        return np.array([-1.2, -1.2, -1.2, 0.0]), np.array([1.2, 1.2, 1.2, 1.0])

    def hold(self, joints):
        self._call("hold")
        np.testing.assert_array_equal(joints, self.joints)
        self.torque, self.goal = True, joints.copy()

    def move(self, joints):
        self._call("move")
        assert self.torque
        self.goal = joints.copy()
        self.path.append((self.now, joints.copy()))

    def release(self):
        self._call("release")
        self.torque = False

    def _call(self, name):
        self.calls.append(name)
        if self.unplugged:
            raise OSError("device not configured")

    def run(self, seconds=LOOK, until=""):
        """Look at the leader for a time, or until a phase; returns the phase and whether it has torque."""
        for _ in range(max(round(seconds / self.look), 1)):
            self.now += self.look
            if self.torque and not self.blocked:
                self.joints = self.goal.copy()
            if self.permits:
                self.drive.permit(Permission(self.number, self.now, self.arm, LIMITS))
            self.drive.step(self.sample(), self.now)
            if self.phase == until:
                break
        return self.phase, self.torque

    def sample(self):
        return Sample(None, self.joints.copy(), (), self.now - self.stamp_age, True, self.drive.status)

    phase = property(lambda self: self.drive.status.phase)
    why = property(lambda self: self.drive.status.why)


FAILED, KEEPS, THERE = ("failed", False), ("keeps", True), ("there", False)


@pytest.fixture
def leader():
    return Leader()


@pytest.fixture
def moving(leader):
    assert leader.run(STANDS + 0.5) == ("moves", True)
    return leader


def test_it_beeps_waits_moves_to_its_arm_slowly_and_keeps_torque_until_it_is_ended(leader, caplog):
    assert leader.run(STANDS - 0.05) == ("waits", False)
    assert "\a" in caplog.text
    assert leader.calls == []
    assert leader.run(20, until="keeps") == KEEPS
    np.testing.assert_allclose(leader.joints, ARM, atol=1e-5)
    times, places = (np.array(x) for x in zip(*leader.path, strict=True))
    speed = np.abs(np.diff(places, axis=0)) / np.diff(times)[:, None]
    assert (speed.max(axis=0) <= np.minimum(VELOCITY, FASTEST) + 1e-9).all()
    assert speed[:, 0].max() > 0.5 * VELOCITY[0]
    leader.run(1.0)
    leader.drive.end(1, "the actor ended it")
    assert leader.run() == THERE
    count = len(leader.calls)
    assert leader.run(2.0) == THERE  # permissions of the same drive go on: nothing begins again
    assert len(leader.calls) == count


def test_late_looks_and_a_fast_profile_move_it_no_faster(moving):
    moving.look = 0.05
    moving.arm[2] = 1.0
    moving.run(20, until="keeps")
    steps = np.abs(np.diff([place for _, place in moving.path], axis=0))
    assert (steps.max(axis=0) <= np.minimum(VELOCITY, FASTEST) * 0.02 + 1e-9).all()


def test_without_permission_for_a_moment_its_torque_ends(moving):
    """The server or the actor was killed, or the network between them is gone."""
    moving.permits = False
    moving.run(VALID - 2 * LOOK)
    assert moving.torque
    assert moving.run(3 * LOOK) == FAILED
    assert "no permission" in moving.why
    moving.permits = True
    assert moving.run(2.0) == FAILED, "only another drive begins"
    moving.number = 2
    assert moving.run(20, until="keeps") == KEEPS


def changed(**fields):
    """Set attributes of the leader; joints of it and of its arm are added to where they are."""

    def change(leader):
        for name, value in fields.items():
            setattr(leader, name, getattr(leader, name) + value if name in ("joints", "arm") else value)

    return change


FIRST, LAST = np.array([0.2, 0, 0, 0]), np.array([0, 0, 0, 0.2])
ENDS = {  # what happens in motion, and why it fails then
    "a hand holds it": (changed(blocked=True), "a hand holds it"),
    "a hand pulls a joint": (changed(blocked=True, joints=FIRST), ""),
    "a hand pulls the gripper": (changed(blocked=True, joints=LAST), ""),
    "its arm moves": (changed(arm=0.03), "its arm moves"),
    "its arm is at NaN": (changed(arm=np.nan), ""),
    "its arm is at infinity": (changed(arm=np.where(FIRST > 0, np.inf, 0)), ""),
    "it is at NaN": (changed(blocked=True, joints=np.nan), ""),
    "it is at infinity": (changed(blocked=True, joints=np.where(FIRST > 0, np.inf, 0)), ""),
    "it is not read": (changed(stamp_age=VALID + 0.01), ""),
    "the server ends it": (lambda leader: leader.drive.end(1, "stopped by operator"), "stopped by operator"),
}


@pytest.mark.parametrize(("happens", "why"), ENDS.values(), ids=ENDS)
def test_what_ends_a_drive_takes_torque_and_nothing_is_commanded_any_more(moving, happens, why):
    happens(moving)
    count = moving.calls.count("move")
    assert moving.run(3.0 if why == "a hand holds it" else 2 * LOOK, until="failed") == FAILED
    assert why in moving.why
    if why == "a hand holds it":
        assert np.abs(moving.goal - moving.joints).max() < HELD + 0.03
    else:
        assert moving.calls.count("move") == count


def test_what_comes_before_it_has_torque_keeps_it_from_getting_any(leader, caplog):
    leader.drive.end(1, "stopped by operator")
    leader.run(3.0)
    assert (leader.phase, leader.calls) == ("off", []), "an end that comes before its drive lets none begin"
    for happens, why, seconds in (
        (lambda leader: leader.drive.end(1, "stopped by operator"), "stopped by operator", LOOK),
        (changed(joints=np.array([0, 0.1, 0, 0])), "a hand moves it", 3.0),
        (changed(arm=np.array([0.7, 0.4, -0.2, -0.4])), "joint 0", LOOK),  # the leader reaches 1.2
        (lambda leader: setattr(leader, "arm", np.zeros(3)), "its arm has 3 joints and grippers, the leader 4", LOOK),
    ):
        other = Leader()
        if "joint" not in why:
            other.run(0.5)
            caplog.clear()
        happens(other)
        assert other.run(seconds) == FAILED
        assert other.calls == []
        assert why in other.why
        assert "\a" not in caplog.text
    there = Leader()
    there.joints = ARM + 0.03
    assert there.run() == THERE
    assert there.calls == []
    assert "\a" not in caplog.text


def test_torque_ends_at_its_arm_where_a_hand_takes_it_or_nothing_ends_it(leader):
    leader.run(20, until="keeps")
    assert leader.run(10.1, until="there") == THERE
    taken = Leader()
    taken.run(20, until="keeps")
    changed(blocked=True, joints=FIRST)(taken)
    assert taken.run(2 * LOOK) == THERE


def test_one_reading_that_is_wrong_gets_no_set_point_and_is_no_hand(moving):
    for _ in range(10):
        at, count = moving.joints.copy(), moving.calls.count("move")
        moving.blocked, moving.joints[1] = True, 1.0
        moving.run(LOOK)
        assert moving.calls.count("move") == count
        moving.blocked, moving.joints = False, at
        assert moving.run(0.1) == ("moves", True)


@pytest.mark.parametrize("phase", ["moves", "keeps"])
def test_unplugged_it_is_a_loss_and_is_not_driven_once_it_is_back(leader, phase):
    leader.run(20, until=phase)
    leader.run(2 * LOOK)
    leader.unplugged = True
    if phase == "keeps":
        leader.drive.end(1, "the actor ended it")
    with pytest.raises(OSError, match="not configured"):
        leader.run(1.0)
    leader.drive.lost("device not configured")
    leader.unplugged, leader.torque = False, False  # opening it anew took its torque
    count = len(leader.calls)
    assert leader.run(3.0) == FAILED
    assert len(leader.calls) == count


def test_a_leader_that_stays_away_from_its_arm_loses_its_torque(moving):
    moving.blocked, ends = True, moving.now + 20
    while moving.phase == "moves" and moving.now < ends:
        moving.joints = moving.goal - [0.0, 0.07, 0.0, 0.0]
        moving.run()
    assert moving.run() == FAILED
    assert "stays 0.07 from its arm" in moving.why


def test_it_commands_nothing_while_it_is_driven_and_counts_once_it_is_neutral_without_torque(leader):
    first = NeutralFirst()

    def counts() -> bool:
        leader.run()
        return first.admit(leader.sample(), leader.now, ARM)

    while leader.phase != "keeps":
        assert not counts()
    assert not any(counts() for _ in range(100))
    leader.drive.end(1, "the actor ended it")
    began = leader.now
    while not counts():
        pass
    assert 0.29 < leader.now - began < 0.33
    leader.joints = ARM + 0.1  # and falls: it moved, and is not driven back
    assert leader.run(1.0) == THERE
