"""Processor time of a robot server's gate in a pass of its loop, two arms of 14 joints at 200 Hz: seconds.

    python benchmarks/robot_gate.py [--passes 4000] [--json FILE]

Median and 99th percentile of `Gate.step`, milliseconds of this process, of four loads: `smooth`, a trajectory within
all limits; `low`, one whose points come within braking distance of the table; `jumps`, another goal every 20 ms;
`edge`, goals beyond the table. `*_workspace_*` keep a box and the arms' distance, `*_joints_*` do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serl_chunk_robot.kinematics import Arms, Chain, Link
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.limits import Limits, Workspace
from serl_chunk_robot.safety.motion import Rates, SetPoint

JOINTS, GRIPPERS, DT = 14, [6, 13], 0.005
HOME = np.tile([0, -0.96, 1.16, 0, -0.3, 0, 0.5], 2)
LINKS = [  # of a ViperX 300
    Link((0, 0, 0.079), (0, 0, 1)),
    Link((0, 0, 0.04805), (0, 1, 0)),
    Link((0.05955, 0, 0.3), (0, 1, 0)),
    Link((0.2, 0, 0), (1, 0, 0)),
    Link((0.1, 0, 0), (0, 1, 0)),
    Link((0.069744, 0, 0), (1, 0, 0)),
]
Goal = Callable[[int], np.ndarray]


def gate(workspace: bool) -> Gate:
    """A gate with the limits of `fake_aloha`, its grippers left free."""
    rates = Rates(*(np.full(JOINTS, x) for x in (3.2, 40.0, 4000.0)))
    for of_joints, of_gripper in zip(rates, (10.0, 1e4, 1e7), strict=True):
        of_joints[GRIPPERS] = of_gripper
    low, high = (np.tile([*x, y], 2) for x, y in (([-3.14, -1.85, -1.76, -3.14, -1.87, -3.14], 0), ([3.14] * 6, 1)))
    space = Workspace(np.array([-0.8, 0.0, 0.02]), np.array([0.8, 1.0, 0.9]), between_arms=0.05, radius=0.02)
    limits = Limits(low, high, rates, np.full(JOINTS, 0.3), np.full(JOINTS, 0.1), 1.5 * rates.velocity)
    chains = [Chain((x, 0.5, 0), yaw, LINKS, (0.15, 0, 0)) for x, yaw in ((-0.469, 0.0), (0.469, np.pi))]
    arms = Arms(chains, [range(6), range(7, 13)], JOINTS)
    return Gate(limits._replace(workspace=space if workspace else None), DT, arms)


def loads() -> dict[str, Goal]:
    """The goal of each pass."""
    rng = np.random.default_rng(0)
    jumps = HOME + rng.uniform(-0.5, 0.5, (1000, JOINTS))
    down = np.tile([0, 1.0, 0, 0, 0.6, 0, 0], 2)

    def wave(size: np.ndarray, hz: float) -> Goal:
        return lambda k: HOME + size * (1 - np.cos(2 * np.pi * hz * k * DT)) / 2

    return {
        "smooth": wave(np.full(JOINTS, 0.2), 0.5),
        "low": wave(0.6 * down, 0.5),
        "jumps": lambda k: jumps[k // 4 % len(jumps)],
        "edge": wave(down, 0.3),
    }


def measure(gate: Gate, goal: Goal, passes: int) -> dict[str, float]:
    """Milliseconds of a pass, and the share of passes that the gate slowed."""
    at, took, slowed = SetPoint.standing(HOME), np.empty(passes), 0
    for k in range(passes):
        target = goal(k)
        begin = time.process_time()
        passed = gate.step(at, target, at.position)
        took[k] = 1e3 * (time.process_time() - begin)
        at, slowed = passed.set_point, slowed + (passed.factor < 1)
    return {"ms_median": float(np.median(took)), "ms_p99": float(np.percentile(took, 99)), "slowed": slowed / passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=4000, help="of each load")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = {
        f"{load}_{'workspace' if workspace else 'joints'}_{name}": value
        for load, goal in loads().items()
        for workspace in (False, True)
        for name, value in measure(gate(workspace), goal, args.passes).items()
    }
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
