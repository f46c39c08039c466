"""A virtual SpaceMouse at the real actor of a served robot: whole processes, from raw reports to the journal.

Times are not judged: `benchmarks/device_latency.py` measures them on a quiet machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from mouse_cell import ARM, FULL, MouseCell
from ports import free_port as port_of_learner
from robot_process import MAIN
from robot_served import free_port, wait

from serl_chunk.robots.arms import aloha_arms
from serl_chunk.runs.episodes import RunSource
from serl_chunk.types import HUMAN_DIMS, Source, StepBlock

HOLDS = 1.0  # s that an arm stays the human's
QUICK = 0.2  # s: a pause within an intervention


@pytest.fixture(scope="module")
def cell(tmp_path_factory) -> Iterator[MouseCell]:
    settings = [f"--config.device.hold_s={HOLDS}"]
    folder, ports = tmp_path_factory.mktemp("cell"), (free_port(), port_of_learner())
    with closing(MouseCell(folder, ports, os.environ, settings, ("-c", MAIN.format(gap=1.0)))) as cell:
        cell.begin()
        yield cell


@pytest.fixture
def episode(cell: MouseCell) -> MouseCell:
    cell.hand("rest")
    cell.next_episode()
    cell.watch(1.0)
    return cell


def push(cell: MouseCell, seconds: float, y: int = -FULL) -> float:
    at = cell.hand("push", y=y)["at"]
    cell.watch(seconds)
    return at


def rest(cell: MouseCell, seconds: float) -> None:
    cell.hand("rest")
    cell.watch(seconds)


def ended(cell: MouseCell) -> StepBlock:
    before = set(RunSource(cell.run).keys())
    cell.next_episode()
    wait(lambda: set(RunSource(cell.run).keys()) > before, 20)
    source = RunSource(cell.run)
    [key] = set(source.keys()) - before
    return source.read(key).steps


def segments(steps: StepBlock) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], steps.source == Source.HUMAN, [0]]).astype(int)))
    return [(int(a), int(b) - 1) for a, b in edges.reshape(-1, 2)]


def set_points(cell: MouseCell, since: float, until: float = np.inf) -> np.ndarray:
    moments, points = cell.set_points()
    return points[(moments >= since) & (moments < until)]


@pytest.mark.slow
def test_a_deflection_moves_the_arms_tip_and_is_one_segment(episode: MouseCell):
    assert len(episode.opened()) == 1, "by pyspacemouse.open_by_path, once"
    at = push(episode, 0.5)  # away from the user: forward
    rest(episode, QUICK)
    push(episode, 0.5)
    points = set_points(episode, at)
    tips = [aloha_arms().tip(0, pose)[0][:3, 3] for pose in (points[0], points[-1])]
    rest(episode, 2 * HOLDS)
    push(episode, 0.5, FULL)
    rest(episode, 2 * HOLDS)
    way = tips[1] - tips[0]
    assert way[0] > 0.05, "m along x"
    assert np.abs(way[1:]).max() < 0.03
    steps = ended(episode)
    found = segments(steps)
    if not steps.lost_ticks.any():  # the machine stood still
        assert len(found) == 2, found
    dims = steps.sparse[HUMAN_DIMS]
    assert {tick for a, b in found for tick in range(a, b + 1)} == set(dims.index)
    assert (dims.values == (np.arange(14) < 7)).all(), "the other arm stays with the policy"


@pytest.mark.slow
def test_an_arm_whose_mouse_is_unplugged_brakes_and_stays_until_the_episode_ends(episode: MouseCell):
    push(episode, 0.4)
    at = episode.hand("unplug")["at"]
    episode.watch(1.2)
    braking = episode.braking(at)
    assert braking.speed > 0.1
    assert braking.stopped < 0.5
    episode.hand("plug")  # still deflected
    episode.watch(1.5)
    rest(episode, 1.0)
    push(episode, 0.5, FULL)
    stands = set_points(episode, at + 1.0)
    assert np.ptp(stands[:, ARM], axis=0).max() < 2e-3
    assert np.ptp(stands[:, 7:13], axis=0).max() > 2e-3, "the policy moves the other arm"
    episode.hand("rest")
    steps = ended(episode)
    after = steps.stamp > at + 0.1
    assert after.sum() > 100
    assert (steps.source[after] != Source.POLICY).all(), "the policy does not take over"
    episode.watch(1.0)
    push(episode, 0.5)  # in the next episode it counts again
    episode.hand("rest")
    assert segments(ended(episode))
