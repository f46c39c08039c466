"""How soon a served robot follows a SpaceMouse, and brakes when it is unplugged: whole processes, in real time.

    python benchmarks/device_latency.py [--steps 200] [--unplugs 30] [--seed 0] [--json FILE]

The actor and the robot's server are the programs that users run; hidapi alone is replaced, below pyspacemouse. The
actor has real-time priority where the system permits it, as the server has.

**Steps.** The mouse of an arm that stands is deflected in full, at a random moment, by a report of its own (`plain`) or
by one behind 62 stale ones, which fill the kernel's queue (`full`), in turn. It goes on reporting 125 times a second.
Measured are, at the moment at which the server receives a command, the age of the newest report that it is made of, and
of that the way from the tick's look at the device. Of the first report of a deflection: the time to the tick that
reads it, which is up to 20 ms; to the changed command of the actor; to the server's receipt of the first command that
is made of it; and to the first set point at the server's driver that differs.
Criterion: the age is one tick at most (p99), of both kinds.

**Unplugs.** In mid-deflection the mouse is unplugged, each time in an episode of its own. Measured are the seconds to
the first slower set point, to the velocity 0, and until nothing moves, and how far the arm goes back meanwhile.
Criterion: velocity 0 within 100 ms (the largest).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from support.cli_args import make_parser, write_figures
from support.mouse_cell import FULL, Answer, Braking, MouseCell
from support.ports import free_port

TICK, BRAKES = 0.02, 0.1  # s
LOOK = 0.003  # s between two looks of a mouse's thread
STALE = 62  # reports before the one that counts: the kernel keeps 63
HELD, RESTS = 0.12, 0.3  # s of a deflection, and after it
KINDS = ("plain", "full")
SETTINGS = ("--config.device.hold_s=1000",)  # the arm stays the human's: no policy moves it between two steps


def steps(cell: MouseCell, count: int, rng: np.random.Generator) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    taken = False  # whether the arm is the human's
    k = 0
    while k < count:
        if not taken:
            cell.hand("push", y=FULL)
            cell.watch(HELD)
            cell.hand("rest")
        cell.watch(RESTS + float(rng.uniform(0, TICK)))
        kind = KINDS[k % 2]
        at = cell.hand("push", y=FULL * (-1 if k // 2 % 2 else 1), stale=STALE if kind == "full" else 0)["at"]
        cell.watch(HELD)
        cell.hand("rest")
        cell.watch(0.1)
        if taken := cell.state["state"] == "RUN":
            found[kind].append(cell.answer(at, HELD))
            k += 1
        else:
            again(cell)
    return found


def again(cell: MouseCell) -> None:
    """Clear a robot that a busy machine stopped: what was measured then does not count."""
    print(f"the robot does not run: {cell.state['word']}", file=sys.stderr)
    cell.running()
    cell.watch(1.0)


def unplugs(cell: MouseCell, count: int, rng: np.random.Generator) -> list[Braking]:
    found: list[Braking] = []
    while len(found) < count:
        k = len(found)
        cell.next_episode()
        cell.watch(0.9)  # connected again, and neutral
        cell.hand("push", y=FULL * (-1 if k % 2 else 1))
        cell.watch(0.4 + float(rng.uniform(0, TICK)))
        at = cell.hand("unplug")["at"]
        cell.watch(1.1)
        if cell.state["state"] == "RUN":
            found.append(cell.braking(at))
        cell.hand("rest")
        cell.hand("plug")
    return found


def figures(answers: dict[str, list[Answer]], brakings: list[Braking]) -> dict[str, Any]:
    """Summarize; times in ms."""
    made: dict[str, Any] = {"steps": {}}
    for kind, series in answers.items():
        tick, late, sent, driver, received = np.array([answer[:5] for answer in series]).T
        ages, ways = (np.concatenate([answer[k] for answer in series]) for k in (5, 6))
        made["steps"][kind] = {
            "n": len(series), "commands": len(ages), "report_age_at_server_ms": _ms(ages),
            "look_to_server_ms": _ms(ways), "to_tick_ms": _ms(tick), "to_command_ms": _ms(sent),
            "to_server_ms": _ms(received), "to_driver_ms": _ms(driver),
            "tick_to_driver_ms": _ms(driver - tick - TICK * (tick < LOOK)),
            "in_a_later_tick": int((late > 0).sum()),
        }  # fmt: skip
    speed, began, stopped, returned, settled = np.array(brakings).T
    made["unplugs"] = {
        "n": len(brakings), "speed": _range(speed), "to_slower_ms": _ms(began), "to_zero_ms": _ms(stopped),
        "to_still_ms": _ms(settled), "returned_mrad": {k: 1e3 * v for k, v in _range(returned).items()},
    }  # fmt: skip
    made["holds"] = bool(
        all(series["report_age_at_server_ms"]["p99"] <= 1e3 * TICK for series in made["steps"].values())
        and made["unplugs"]["to_slower_ms"]["max"] <= 1e3 * BRAKES  # it brakes by then
    )
    return made


def _ms(seconds: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(1e3 * seconds, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(1e3 * seconds.max())}


def _range(values: np.ndarray) -> dict[str, float]:
    return {"p50": float(np.median(values)), "max": float(values.max())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--unplugs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    with (
        tempfile.TemporaryDirectory(prefix="device_latency_") as folder,
        closing(MouseCell(Path(folder), (free_port(), free_port()), os.environ, SETTINGS)) as cell,
    ):
        cell.begin()
        permitted = cell.prefer()
        if not permitted:
            print("the actor has no real-time priority", file=sys.stderr)
        cell.watch(1.0)
        answers = steps(cell, args.steps, rng)
        brakings = unplugs(cell, args.unplugs, rng)
    made = {"realtime_priority": permitted, **figures(answers, brakings)}
    print(json.dumps(made, indent=2))
    rows = {kind: [a._asdict() for a in series] for kind, series in answers.items()}
    write_figures(args, {**made, "each": {**rows, "unplugs": [b._asdict() for b in brakings]}})


if __name__ == "__main__":
    main()
