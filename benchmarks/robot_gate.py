"""Processor time of a robot server's gate in a pass of its loop, two arms of 14 joints at 200 Hz: seconds.

    python benchmarks/robot_gate.py [--passes 4000] [--json FILE]

Median and 99th percentile of `Gate.step`, milliseconds of this process, and the median of `Pursuit.place`, which gives
it the places, of four loads: `smooth`, a trajectory within all limits; `low`, one whose points come within braking
distance of the table; `jumps`, another goal every 20 ms; `edge`, goals beyond the table. `*_workspace_*` keep a box and
the arms' distance, `*_joints_*` do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from support.cli_args import make_parser, write_figures
from support.robot_limits import HOME, SPACE, J, limits, viperx

from serl_chunk_robot.control.pursuit import Pursuit
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.motion import SetPoint

DT = 0.005  # s
Goal = Callable[[int], np.ndarray]


def gate(workspace: bool) -> Gate:
    """A gate with the limits of the tests; with or without a workspace."""
    return Gate(limits(workspace=SPACE if workspace else None), DT, viperx())


def loads() -> dict[str, Goal]:
    rng = np.random.default_rng(0)
    jumps = HOME + rng.uniform(-0.5, 0.5, (1000, J))
    down = np.tile([0, 1.0, 0, 0, 0.6, 0, 0], 2)

    def wave(size: np.ndarray, hz: float) -> Goal:
        return lambda k: HOME + size * (1 - np.cos(2 * np.pi * hz * k * DT)) / 2

    return {
        "smooth": wave(np.full(J, 0.2), 0.5),
        "low": wave(0.6 * down, 0.5),
        "jumps": lambda k: jumps[k // 4 % len(jumps)],
        "edge": wave(down, 0.3),
    }


def measure(gate: Gate, goal: Goal, passes: int) -> dict[str, float]:
    """Milliseconds of a pass, and the share of passes that the gate slowed."""
    at, pursuit, slowed = SetPoint.standing(HOME), Pursuit(gate.limits, DT), 0
    took, pursued = np.empty(passes), np.empty(passes)
    for k in range(passes):
        target = goal(k)
        begin = time.process_time()
        place, _ = pursuit.place(at, target)
        between = time.process_time()
        passed = gate.step(at, place, at.position)
        pursued[k], took[k] = between - begin, time.process_time() - between
        at, slowed = passed.set_point, slowed + (passed.factor < 1)
    return {
        "median_ms": 1e3 * float(np.median(took)),
        "p99_ms": 1e3 * float(np.percentile(took, 99)),
        "pursuit_median_ms": 1e3 * float(np.median(pursued)),
        "slowed": slowed / passes,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--passes", type=int, default=4000, help="of each load")
    args = parser.parse_args()
    figures = {
        f"{load}_{'workspace' if workspace else 'joints'}_{name}": value
        for load, goal in loads().items()
        for workspace in (False, True)
        for name, value in measure(gate(workspace), goal, args.passes).items()
    }
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    write_figures(args, figures)


if __name__ == "__main__":
    main()
