"""Where control passes between a policy and a human, and where a device is lost: how the arms move."""

from __future__ import annotations

import numpy as np
import pytest
from human_desk import Clock, Mouse
from robot_limits import HIGH, HOME, LOW, J, viperx
from robot_world import DT, TICK, World

from serl_chunk.devices.arm_control import LEADER_ACCELERATION, JointArm, LeaderArm
from serl_chunk.devices.human import HumanIntervention, Thresholds
from serl_chunk.devices.teleoperation import TwistFollower, TwistLimits
from serl_chunk.types import STATE
from serl_chunk_robot.devices.base import Sample

ARMS = viperx()
JOINTS = np.setdiff1d(np.arange(J), [6, 13])
STOPS = 0.15  # rad from a joint's end, in which an arm can stop
PASSES = (4, 5, 3, 4)  # of a server, between two commands of an actor whose clock is another one


class Desk:
    """Two mice with an arm each, and the loop of an actor: `tick` commands one, after the `accepted` one before it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.mice = [Mouse(name, self.clock) for name in ("left", "right")]
        arms = []
        for arm, mouse in enumerate(self.mice):
            follower = TwistFollower(ARMS, arm, LOW, HIGH, TICK, TwistLimits())
            arms.append((mouse, JointArm(follower, None, follower.joints, TICK)))
        self.human = HumanIntervention(arms, Thresholds(hold=0.1), now=lambda: self.clock.now)
        self.human.reset(0)
        self.accepted, self.measured = HOME.copy(), HOME.copy()
        self.by_human = np.zeros(J, bool)

    def tick(self, policy: np.ndarray) -> np.ndarray:
        """Return the command of a tick, float64[J], where the policy commands `policy`."""
        self.clock.now += TICK
        human = self.human.poll(0, {STATE: self.measured}, True, self.accepted)
        self.by_human = np.zeros(J, bool) if human is None else np.ones(J, bool) if human.dims is None else human.dims
        return policy if human is None else np.where(self.by_human, human.action.astype(np.float64), policy)


class ServedDesk(Desk):
    """One whose commands a robot server's gate follows. `late`: passes between a state and the command after it."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.late = late
        self.world = World().armed()
        self.status = self.world.run()
        self.sent = self.accepted

    def tick(self, policy: np.ndarray) -> np.ndarray:
        world, status = self.world, self.status
        if world.number:  # as robots.served has it
            follows = status.factor == 1 and not status.reason and status.number == world.number
            self.accepted = self.sent if follows else np.array(status.set_point)
        self.measured = world.arms.q
        self.sent = super().tick(policy)
        for _ in range(self.late):
            world.run()
        assert world.send(self.sent) == ""
        self.status = world.run(PASSES[world.number % len(PASSES)] - self.late)
        return self.sent


class Script:
    """A policy that walks and jumps, and hands that come and go; of a seed."""

    def __init__(self, seed: int, fastest: float, jumps: float) -> None:
        self.rng, self.fastest, self.jumps = np.random.default_rng(seed), fastest, jumps
        self.velocity, self.target = np.zeros(J), HOME.copy()

    def policy(self, accepted: np.ndarray) -> np.ndarray:
        if self.rng.random() < 0.1:
            self.velocity[JOINTS] = self.rng.uniform(-self.fastest, self.fastest, len(JOINTS))
            self.target = accepted + self.jumps * np.isin(np.arange(J), JOINTS) * self.rng.uniform(-1, 1, J)
        low, high = np.maximum(HOME - 0.5, LOW + STOPS), np.minimum(HOME + 0.5, HIGH - STOPS)
        self.target = np.clip(self.target + self.velocity * TICK, low, high)
        return self.target

    def move(self, mice: list[Mouse]) -> None:
        for mouse in mice:
            if self.rng.random() < 0.15:
                mouse.push = 0.0 if mouse.push else float(self.rng.uniform(-1, 1))


@pytest.mark.parametrize("seed", range(2))
def test_behind_a_gate_no_seam_exceeds_the_acceleration_of_any_tick(seed: int):
    desk, script = ServedDesk(), Script(seed, fastest=1.5, jumps=0.3)
    seams, before = [], desk.by_human
    desk.tick(HOME)
    for _ in range(150):
        script.move(desk.mice)
        desk.tick(script.policy(desk.accepted))
        seams += [(desk.by_human & ~before).any(), (before & ~desk.by_human).any()]
        before = desk.by_human
    assert sum(seams[::2]) > 3, "arms are taken over"
    assert sum(seams[1::2]) > 3, "they are handed back"
    moves = np.diff(desk.world.arms.sent, n=2, axis=0)[:, JOINTS]
    assert np.abs(moves).max() <= desk.world.limits.rates.acceleration[0] * DT**2 * (1 + 1e-6)
    assert (np.diff(desk.world.arms.sent, axis=0) != 0).any()


@pytest.mark.parametrize("seed", range(2))
def test_without_a_gate_taking_over_and_moving_obey_one_bound(seed: int):
    desk, script = Desk(), Script(seed, fastest=1.9, jumps=0.0)
    commands, human = [HOME, HOME], []
    for _ in range(300):
        script.move(desk.mice)
        desk.measured = desk.accepted
        desk.accepted = desk.tick(script.policy(desk.accepted))
        commands.append(desk.accepted)
        human.append(desk.by_human)
        script.target = desk.accepted.copy()
    moves = np.abs(np.diff(commands, n=2, axis=0))
    assert (np.diff(np.array(human), axis=0) != 0).sum() > 20
    bound = TwistLimits().acceleration * TICK**2
    assert moves[np.array(human)].max() <= bound * (1 + 1e-4)  # commands are float32
    assert moves[np.array(human)].max() > 0.9 * bound


@pytest.mark.parametrize(("push", "ticks", "late"), [(0.3, 22, 1), (0.5, 22, 0), (1.0, 30, 1)])
def test_an_arm_whose_device_is_lost_goes_forward_to_a_stop(push: float, ticks: int, late: int):
    desk = ServedDesk(late)
    for k in range(ticks):
        desk.mice[0].push = push if k > 16 else 0.0
        desk.tick(HOME)
    lost = len(desk.world.arms.sent)
    desk.mice[0].alive = False
    for _ in range(25):
        desk.tick(HOME)
    points = np.array(desk.world.arms.sent)[lost - 1 :, :6]
    first = points[1] - points[0]
    joint = int(np.abs(first).argmax())
    assert abs(first[joint]) > 0.15 * DT, "it moved"
    way = (points[:, joint] - points[0, joint]) * np.sign(first[joint])
    assert way.max() - way[-1] < 3e-3, "rad that it goes back"
    assert int(np.argmax(np.diff(way) <= 1e-3 * DT)) * DT <= 0.075


def test_an_arm_whose_leader_is_lost_goes_forward_to_a_stop():
    dims = np.arange(7)
    arm = LeaderArm(dims, dims, LOW[:7], HIGH[:7], TICK)
    accepted = HOME.copy()
    arm.begin(accepted, accepted)
    moves = []
    for k in range(20):
        joints = HOME[:7] + 0.6 * TICK * k * (dims == 1)
        sample = Sample(None, joints if k < 10 else None, (), 0.0, k < 10)
        target = arm.command(sample, accepted, HOME)
        moves.append(target[1] - accepted[1])
        accepted[:7] = target - 0.3 * (target - accepted[:7])  # the robot is late
    assert moves[9] > 0.6 * TICK
    assert (np.array(moves[10:]) >= 0).all()
    assert moves[9] - moves[10] < LEADER_ACCELERATION * TICK**2 + 1e-9
    assert np.abs(moves[16:]).max() < 1e-3
