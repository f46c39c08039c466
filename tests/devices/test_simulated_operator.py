"""The simulated operator of the benchmarks: what it may see and when, and that its hands come where they are to be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_hid
import numpy as np
import pytest

from serl_chunk_robot.devices.spacemouse import SpaceMouse

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from support.simulated_operator import DELAY, DRIFT, OPEN, RATE, REACTION, Aim, Belief, Pose, SimulatedOperator
from support.virtual_mice import MouseReports

TRANSLATION = 0.3  # m/s
STEP = 1 / RATE


class PointArms:
    """Arms whose first three joints are the place of the tip."""

    joints = np.array([range(6), range(7, 13)])

    def tip(self, arm: int, pose: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        frame = np.eye(4)
        frame[:3, 3] = pose[7 * arm : 7 * arm + 3]
        return frame, np.eye(6)


class Follow:
    """Both hands bring their tips to the cube, once it is off the table; a button is pressed meanwhile."""

    def begin(self, belief: Belief) -> None: ...

    def decide(self, belief: Belief) -> tuple[Aim, Aim] | None:
        aim = Aim(Pose(belief.cube[:3], np.eye(3)), OPEN)
        return (aim, aim) if belief.cube[2] > 0 else None


def run(
    cube: Callable, seconds: float, *, follows: float = 1.0, drift: float = 0.0, ready: Callable = lambda now: True
):
    """Move tips as the hands do, `follows` times as fast. `ready`: whether the robot is seen to follow, of the time.

    Returns times [T], deflections [T, 2, 6], tips [T, 2, 3], and whether a button is pressed [T, 2].
    """
    operator = SimulatedOperator(PointArms(), Follow(), translation=TRANSLATION, rotation=1.0, drift=drift, seed=3)
    joints, times = np.zeros(14), np.arange(0, seconds, STEP)
    deflections, tips, buttons = [], [], []
    for now in times:
        operator.see(now, joints, np.concatenate([cube(now), np.zeros(4)]), ready(now))
        hands = operator.hands(now)
        for k, hand in enumerate(hands):
            joints[7 * k : 7 * k + 3] += follows * TRANSLATION * STEP * hand.deflection[:3]
        deflections.append([hand.deflection for hand in hands])
        tips.append([joints[:3].copy(), joints[7:10].copy()])
        buttons.append([any(hand.buttons) for hand in hands])
    return times, np.array(deflections), np.array(tips), np.array(buttons)


def test_what_it_sees_reaches_its_hands_after_delay_and_reaction_and_only_while_the_robot_follows():
    times, deflections, _, buttons = run(lambda now: np.array([0.1, 0.0, 0.2 if now >= 1.0 else 0.0]), 2.0)
    moving = np.abs(deflections).max(axis=(1, 2)) > 0
    assert moving.any()
    assert 1.0 + DELAY + REACTION - 1e-6 <= times[np.argmax(moving)] <= 1.0 + DELAY + REACTION + 2 * STEP
    assert (buttons.any(axis=1) == moving).all()
    times, deflections, _, _ = run(lambda now: np.full(3, 0.2), 3.0, ready=lambda now: 1.0 <= now < 2.0)
    moving = times[np.abs(deflections).max(axis=(1, 2)) > 0]
    assert moving.min() >= 1.0 + DELAY + REACTION - 1e-6
    assert 2.0 + REACTION < moving.max() <= 2.0 + DELAY + REACTION + STEP


@pytest.mark.parametrize(("follows", "drift", "bound"), [(0.8, 0.0, 0.008), (1.2, 0.0, 0.008), (1.0, DRIFT, 0.03)])
def test_it_converges_on_a_target_that_moves_and_stands_in_spite_of_the_delay(
    follows: float, drift: float, bound: float
):
    def cube(now: float) -> np.ndarray:
        angle = 0.5 * min(now, 4.0)  # 5 cm/s, then it stands
        return np.array([0.1 * np.cos(angle), 0.1 * np.sin(angle), 0.1])

    times, _, tips, _ = run(cube, 6.5, follows=follows, drift=drift)
    apart = np.linalg.norm(tips - np.array([cube(now) for now in times])[:, None], axis=2)
    assert apart[(times > 2) & (times < 4)].max() < 0.06
    assert apart[times > 6].max() < bound


def test_the_product_reads_what_a_hand_did(tmp_path: Path):
    deflection = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6])
    with fake_hid.installed(tmp_path) as hid:
        mouse, reports = hid.mouse(), MouseReports()
        device = SpaceMouse(mouse.path)
        mouse.push(*(report for _ in range(2) for report in reports.tick(deflection, (False, True))))
        ends = time.monotonic() + 5
        while not device.read().buttons[1] and time.monotonic() < ends:
            time.sleep(0.005)
        time.sleep(0.02)
        sample = device.read()
        device.close()
    assert sample.twist == pytest.approx(deflection, abs=0.5 / 350 + 1e-9)
    assert sample.buttons == (False, True)
