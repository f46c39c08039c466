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
from support.simulated_operator import (
    DELAY,
    DRIFT,
    OPEN,
    RATE,
    REACTION,
    Aim,
    Belief,
    Pose,
    SimulatedOperator,
)
from support.virtual_mice import MouseReports
from support.watching_operator import WatchingOperator

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


def test_it_lets_go_of_a_robot_that_does_not_follow():
    _, deflections, _, _ = run(lambda now: np.array([0.5, 0.0, 0.1]), 4.0, follows=0.0)
    off = (deflections == 0).all(axis=(1, 2))
    began = int(np.argmax(~off))
    pauses = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], off[began:], [0]]).astype(int))))[::2] * STEP
    assert pauses.size
    assert pauses.max() > 0.5, "longer than a device has to be neutral"


def belief(now: float, right: list[float], opening: float = 1.0) -> Belief:
    """The right hand at a place, m, and a cube on the table."""
    tips = Pose(np.array([-0.1, 0.5, 0.3]), np.eye(3)), Pose(np.array(right), np.eye(3))
    return Belief(now, tips, np.array([0.1, 0.5, 0.02, 1, 0, 0, 0]), tips, (1.0, opening))


def intervenes(way: Callable[[float], Belief], seconds: float) -> float | None:
    """Return when the operator intervenes."""
    operator = WatchingOperator()
    operator.begin(way(0.0))
    return next((now for now in np.arange(0, seconds, 0.02) if operator.decide(way(now)) is not None), None)


def test_it_leaves_a_policy_alone_that_comes_on_and_intervenes_where_one_stands_or_goes_away():
    def way(now: float) -> Belief:
        closes = np.clip(3.5 - now, 0, 1)  # the hand is there after 2 s; its fingers close after 2.5 s
        return belief(now, [0.1, 0.5, 0.02 + max(0.0, 0.2 - 0.1 * now)], float(closes))

    assert intervenes(way, 4.5) is None
    assert 4.9 < intervenes(way, 6.0) < 5.1, "1.5 s after the last progress"
    assert 1.4 < intervenes(lambda now: belief(now, [0.2, 0.5, 0.1]), 4.0) < 1.6
    away = intervenes(lambda now: belief(now, [0.15 + 0.2 * now, 0.5, 0.1]), 4.0)
    assert 0.4 < away < 1.0, "0.2 of the progress are 12 cm"


def test_a_mouse_reports_125_times_a_second_and_is_silent_when_it_is_let_go():
    reports, hand = MouseReports(), np.full(6, 0.3)
    held = [list(reports.tick(hand, (False, False))) for _ in range(int(RATE))]
    assert sum(map(len, held)) == 125
    left = [list(reports.tick(np.zeros(6), (False, False))) for _ in range(50)]
    assert [len(made) for made in left] == [1, 1] + [0] * 48
    assert {made[0] for made in left[:2]} == {fake_hid.translation(), fake_hid.rotation()}
    assert len(list(reports.tick(np.zeros(6), (True, False)))) == 1, "a button alone"
    assert not list(reports.tick(np.zeros(6), (True, False)))


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
