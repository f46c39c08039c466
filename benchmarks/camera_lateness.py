"""Lateness of a robot server's loop while four cameras of 640 x 480 pixels stream at 30 Hz, and while none does.

    python benchmarks/camera_lateness.py [--rounds 6] [--seconds 10] [--keys] [--json FILE]

One server of simulated arms at 200 Hz keeps running, with real-time priority where the system permits it; a client
drives it at 50 Hz and reads every picture. In each round the camera processes are off for `--seconds` and on for as
long, in turns the one or the other first. Lateness is the server's own: seconds after a pass's deadline, p50 and p99
over the last 1000 passes of a phase. Their medians over the rounds are printed, and `rise`, that of the rounds'
differences between on and off (ms, with the least and the largest). At most 0.5 ms (p50) and 5 ms (p99) are wanted:
`within` says whether that holds. `age` is that of the newest picture when the client reads it, from the moment at which
it was drawn. Figures of a machine that does something else are worth nothing. `--keys`: all sockets are encrypted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.cli_args import make_parser, write_figures
from support.robot_moments import make_keys, press_on

from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.robot_file.config import HAIR, load, load_driver
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.server import front
from serl_chunk_robot.server.admission import Address
from serl_chunk_robot.server.door import Door
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.serve import Motions, prioritise
from serl_chunk_robot.server.server import RobotServer
from serl_chunk_robot.server.streams import camera_children
from serl_chunk_robot.wire.link import Link, make_pair

HERE = "127.0.0.1"
CAMERAS, TICK = 4, 0.02
ALLOWED = {"p50": 0.5, "p99": 5.0}  # ms by which four cameras may make the loop later
WINDOW = 6.0  # s: the server reports its last 1000 passes once a second


def serve(path: Path) -> None:
    """Serve the robot of a file; lines "on" and "off" of standard input start and end its cameras."""
    file = load(path)
    robot = load_driver(file)
    spec = robot.spec()
    robot.connect(time.monotonic)
    gate = Gate(file.profiles[file.start].limits, 1.0 / spec.rate)
    low, high, velocity = (np.array(x) for x in (spec.low, spec.high, spec.velocity))
    own, theirs = make_pair()
    door = Door(Link(own))
    server = RobotServer(
        robot, gate, measured=Measured(low - HAIR, high + HAIR, velocity), profiles=file.profiles, profile=file.start,
        motions=Motions(file, robot), door=door,
        cameras=[(c.name, c.spec.height, c.spec.width, c.port) for c in file.cameras],
    )  # fmt: skip

    def switch() -> None:
        for line in sys.stdin:
            if line == "on\n":
                cameras = Processes(camera_children(file.cameras, file.host, file.keys, server.run_id))
                cameras.__enter__()
            else:
                cameras.__exit__()
        server.end("the benchmark")

    threading.Thread(target=switch, daemon=True).start()
    address = Address(file.host, file.port, file.keys)
    child = front.child(address, theirs, gate.dt, "", {}, door.front_ended)
    with contextlib.closing(theirs), Processes([child]):
        if why := door.wait_for_front(60.0):
            raise RuntimeError(why)
        prioritise()
        server.run()


class Driver:
    """Drives the robot at 50 Hz on small circles of its joints, and reads every picture."""

    def __init__(self, port: int, keys: dict[str, Keys]) -> None:
        address = f"{HERE}:{port}"
        self._operator = RobotClient(address, name="operator", role="operator", keys=keys.get("operator"), answer=20.0)
        self._actor = RobotClient(address, name="actor", role="controller", keys=keys.get("actor"), answer=20.0)
        self._actor.next_state(60.0)  # the server starts
        self.stops = 0
        self._home: np.ndarray | None = None

    def run(self, seconds: float, cameras: bool) -> dict[str, Any]:
        """Drive for some seconds; returns the loop's lateness at their end and the pictures' ages, seconds."""
        ages: list[float] = []
        numbers: dict[str, int] = {}
        count, began = 0, time.monotonic()
        for tick in range(round(seconds / TICK)):
            time.sleep(max(0.0, began + tick * TICK - time.monotonic()))
            state = self._actor.newest_state() or self._actor.next_state()
            if state["state"] != "RUN":
                self._arm()
                continue
            self._actor.send_command(self._home + 0.05 * np.sin(2 * np.pi * 0.5 * time.monotonic()))
            for k in range(CAMERAS if cameras else 0):
                picture = self._actor.newest_picture(f"c{k}")
                if picture is not None and picture.number != numbers.get(f"c{k}"):
                    numbers[f"c{k}"] = picture.number
                    ages.append(self._actor.server_time() - picture.moment)
                    count += 1
        return {"late": self._actor.newest_state()["late"], "ages": ages, "rate": count / seconds / CAMERAS}

    def close(self) -> None:
        self._actor.close()
        self._operator.close()

    def _arm(self) -> None:
        self.stops += 1
        press_on(self._operator, self._actor.next_state())
        try:
            self._actor.request("lease")
            press_on(self._operator, self._actor.next_state())
            self._actor.request("arm", generation=self._actor.next_state()["generation"])
            self._home = self._actor.next_state()["set_point"].copy()
        except RobotError as e:
            print(e, file=sys.stderr)
            time.sleep(0.2)


def measure(rounds: int, seconds: float, port: int, keyed: bool) -> dict[str, Any]:
    """Alternate between no camera and four in one server."""
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys(Path(folder) / "keys") if keyed else {}
        path = Path(folder) / "robot.toml"
        tables = "".join(f'[[camera]]\nname = "c{k}"\ndriver = "fake"\n' for k in range(CAMERAS))
        top = f'name = "benchmark"\ndriver = "fake"\nstart = "evaluating"\nport = {port}\n'
        path.write_text(top + ('keys = "keys"\n' if keyed else "") + tables)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(path)], stdin=subprocess.PIPE, text=True, env=os.environ
        )
        driver = Driver(port, keys)
        phases: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        try:
            for k in range(rounds):
                for phase in ("off", "on") if k % 2 == 0 else ("on", "off"):
                    if phase == "on":
                        print("on", file=server.stdin, flush=True)
                    phases[phase].append(driver.run(seconds, phase == "on"))
                    if phase == "on":
                        print("off", file=server.stdin, flush=True)
                        driver.run(3.0, cameras=False)  # the processes end
        finally:
            driver.close()
            server.stdin.close()
            server.wait(20)
    figures: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "keys": keyed, "arms": driver.stops}
    late = {
        (phase, quantile): 1e3 * np.array([run["late"][quantile] for run in runs])
        for phase, runs in phases.items()
        for quantile in ("p50", "p99", "max")
    }
    for (phase, quantile), values in late.items():
        figures[f"{phase}_late_ms_{quantile}"] = _spread(values)
    for quantile in ALLOWED:
        figures[f"rise_ms_{quantile}"] = _spread(late["on", quantile] - late["off", quantile])
    figures["within"] = all(figures[f"rise_ms_{q}"]["median"] <= most for q, most in ALLOWED.items())
    ages = 1e3 * np.concatenate([run["ages"] for run in phases["on"]])
    figures["age_ms_p50"], figures["age_ms_p99"] = map(float, np.percentile(ages, (50, 99)))
    figures["pictures_per_s_and_camera"] = float(np.median([run["rate"] for run in phases["on"]]))
    return figures


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(values)), "least": float(values.min()), "largest": float(values.max())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help=f"of a phase, {WINDOW:g} at least")
    parser.add_argument("--port", type=int, default=6800, help="the first of six that are free")
    parser.add_argument("--keys", action="store_true", help="encrypt all sockets")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    if args.seconds < WINDOW:
        parser.error(f"--seconds: {args.seconds:g} is too short, expected {WINDOW:g} at least")
    figures = measure(args.rounds, args.seconds, args.port, args.keys)
    for name, value in figures.items():
        if isinstance(value, dict):
            value = "{median:.3f} ({least:.3f} to {largest:.3f})".format(**value)
        print(f"{name:28s} {value}")
    write_figures(args, figures)


if __name__ == "__main__":
    main()
