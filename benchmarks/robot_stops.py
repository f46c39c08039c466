"""How soon a served robot brakes after its actor was killed or stopped in motion: whole processes, in real time.

    python benchmarks/robot_stops.py [--moments 50] [--seed 0] [--json FILE]
    python benchmarks/robot_stops.py --attacks [--json FILE]

At random moments in motion, in turn, the actor gets SIGKILL, or SIGSTOP for 5 s and then SIGCONT. Seconds are from the
last command that the server took, which is known to a pass of its loop; the driver stamps set points. A moment at which
the machine kept the server's loop from running for more than 100 ms is counted apart and repeated. The lateness of the
server's loop without clients is measured before. Criteria, with a validity of 80 ms: braking within 95 ms (median) and
140 ms (largest); no joint travels further than v x validity and the profile's braking distance; nothing moves after
SIGCONT.

With --attacks instead: the lateness of the loop, and the time of an operator's ping, without and under each attack of
`support.socket_attacks` (one message of 1.8 million parts, messages that do not end, 64 peers that send as fast as they
can, 500 foreign keys a second), and the time from a command to the set point that it changes. Criterion: the loop is
late by less than a pass of 5 ms.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from support.cli_args import make_parser, write_figures
from support.ports import free_port
from support.robot_moments import DRIVER, HERE, MOST, P50, SERVER, STOOD_STILL, VALIDITY, Cell, J, Moment, make_keys
from support.socket_attacks import ATTACKS, attacked

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.drivers.fake import HOME

PASSES = 5.0  # s of which the server reports the lateness
STEP = 0.01  # rad
ROW = struct.Struct(f"<{J + 1}d")


class Served:
    """A served robot of its own process. `keys`: of its operator, or none."""

    def __init__(self, folder: Path, secured: bool = False) -> None:
        folder.mkdir()
        self.port, self.keys, self.log = free_port(), None, folder / "set_points"
        (folder / "logged.py").write_text(DRIVER)
        line = ""
        if secured:
            self.keys, line = make_keys(folder / "keys")["operator"], f'keys = "{folder / "keys"}"\n'
        (folder / "robot.toml").write_text(
            f'name = "lateness"\nstart = "evaluating"\nport = {self.port}\n{line}'
            f'[driver]\nname = "logged.py:Logged"\nlog = "{self.log}"\n'
        )
        self.process = subprocess.Popen(
            [sys.executable, *SERVER, "serve", str(folder / "robot.toml")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_STATE_HOME": str(folder)},
        )
        self.operator = self.client("operator", "operator")
        while not self.operator.next_state(60.0)["answered"]:
            pass

    def client(self, name: str, role: str) -> RobotClient:
        return RobotClient(f"{HERE}:{self.port}", name=name, role=role, keys=self.keys, answer=20.0)

    def lateness(self, attack: str, seconds: float = PASSES + 1.0) -> dict[str, float]:
        """Return the lateness of the passes of the last 5 s, ms, and the answers to pings meanwhile, ms."""
        more = {"server": self.keys.server} if self.keys is not None else {}
        times: list[float] = []
        with attacked(attack, self.port, seconds + 2.0, **more) if attack else contextlib.nullcontext():
            ends = time.monotonic() + seconds + 1.0
            while time.monotonic() < ends:
                began = time.monotonic()
                self.operator.request("ping")
                times.append(1e3 * (time.monotonic() - began))
                time.sleep(0.02)
            late = self.operator.next_state()["late"]
        made = {f"late_{name}_ms": 1e3 * late[name] for name in ("p50", "p99", "max")}
        p50, p99, most = np.percentile(times, (50, 99, 100))
        return {**made, "answer_p50_ms": float(p50), "answer_p99_ms": float(p99), "answer_max_ms": float(most)}

    def commands(self, count: int, seed: int = 0) -> dict[str, float]:
        """Return the times from a command to the first set point that it changes, ms. Lapses are left out."""
        rng, times = np.random.default_rng(seed), []
        actor, ends = self.client("actor", "controller"), time.monotonic() + 3.0 * count
        with self.log.open("rb") as file:
            while len(times) < count and time.monotonic() < ends:
                with contextlib.suppress(RobotError):
                    if actor.next_state()["state"] != "RUN":
                        self._arm(actor)
                    time_of = self._command(actor, file, float(rng.uniform(0.0, 0.01)))
                    times += [] if time_of is None else [time_of]
        actor.close()
        p50, p99 = np.percentile(times, (50, 99))
        return {"n": len(times), "p50_ms": float(p50), "p99_ms": float(p99)}

    def _arm(self, actor: RobotClient) -> None:
        if self.operator.next_state()["state"] == "STOPPED":
            self.operator.request("clear")
        actor.request("arm")

    def _command(self, actor: RobotClient, file: BinaryIO, phase: float) -> float | None:
        """Let the robot stand, command a step, and return the time until it moves, ms; None where it lapsed."""
        at = np.array(actor.next_state()["set_point"])
        for _ in range(8):
            actor.newest_state()
            actor.send_command(at)
            time.sleep(0.02)
        time.sleep(phase)
        file.seek(0, os.SEEK_END)
        file.seek(file.tell() // ROW.size * ROW.size - ROW.size)
        before = ROW.unpack(file.read(ROW.size))[1:]
        target = at + STEP * (np.arange(J) == 0) * (-1 if at[0] > HOME[0] else 1)
        actor.newest_state()
        sent = time.monotonic()
        actor.send_command(target)
        time.sleep(0.03)
        rows = np.frombuffer(file.read(), np.float64)
        rows = rows[: len(rows) // (J + 1) * (J + 1)].reshape(-1, J + 1)
        changed = rows[(rows[:, 1:] != before).any(axis=1), 0]
        stood = np.abs(np.array(before) - at).max() < 1e-9
        if actor.next_state()["state"] != "RUN" or not len(changed) or not stood:
            return None
        return float(1e3 * (changed[0] - sent))

    def close(self) -> None:
        self.operator.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def attacks(folder: Path, rounds: int = 3) -> dict[str, Any]:
    """Return lateness without and under each attack, the median of so many rounds, and the time of commands."""
    made: dict[str, Any] = {}
    for name in ("", *ATTACKS):
        with contextlib.closing(Served(folder / (name or "none"), name == "foreign_keys")) as robot:
            try:
                found = [robot.lateness(name) for _ in range(rounds)]
            except RobotError as e:  # what an earlier server does
                print(f"{name}: {e}", flush=True)
                continue
            made[name or "none"] = {key: float(np.median([each[key] for each in found])) for key in found[0]}
            made[name or "none"]["late_max_ms"] = max(each["late_max_ms"] for each in found)
        print(name or "none", {key: round(value, 2) for key, value in made[name or "none"].items()}, flush=True)
    with contextlib.closing(Served(folder / "commands")) as robot:
        made["command"] = robot.commands(100)
    print("command", made["command"], flush=True)
    return made


def measure(robot: Cell, moments: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    robot.start()
    idle = robot.lateness()
    robot.learn()
    robot.act()
    done: list[Moment] = []
    stood_still: list[Moment] = []
    while len(done) < moments and len(stood_still) <= moments:
        moment = robot.moment("stop" if len(done) % 2 == 0 else "kill", float(rng.uniform(0.5, 1.5)))
        disturbed = STOOD_STILL in moment.word + moment.end
        (stood_still if disturbed else done).append(moment)
        if moment.how == "kill" and len(done) < moments:
            robot.act()
        print(f"{len(done)} {'(the loop stood still) ' if disturbed else ''}{moment.how}: braking after "
              f"{1e3 * moment.braking:.1f} ms at {moment.speed:.2f} rad/s, travel {moment.travel:.4f} of at most "
              f"{moment.bound:.4f} rad, moved after {moment.moved_after}", flush=True)  # fmt: skip
    return {"idle_late": idle, **figures(done), "stood_still": len(stood_still), "moments": [m._asdict() for m in done]}


def figures(done: list[Moment]) -> dict[str, Any]:
    """Summarize moments; times in ms."""
    made: dict[str, Any] = {}
    for how in ("kill", "stop"):
        times = np.array([m.braking for m in done if m.how == how])
        made[how] = {"n": len(times)}
        if len(times):
            made[how] |= {"p50_ms": 1e3 * float(np.median(times)), "max_ms": 1e3 * float(times.max())}
    times = np.array([m.braking for m in done])
    made["moved_after"] = sum(m.moved_after for m in done)
    made["within_bound"] = sum(m.within for m in done)
    made["holds"] = bool(
        np.median(times) <= VALIDITY + P50
        and times.max() <= VALIDITY + MOST
        and not made["moved_after"]
        and made["within_bound"] == len(done)
    )
    return made


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attacks", action="store_true", help="measure attacks on the server instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="robot_stops_") as folder:
        if args.attacks:
            made = attacks(Path(folder))
        else:
            ports = free_port(), free_port()
            with contextlib.closing(Cell(Path(folder), ports, 3 * args.moments, os.environ)) as robot:
                made = measure(robot, args.moments, args.seed)
    print({name: value for name, value in made.items() if name != "moments"})
    write_figures(args, made)


if __name__ == "__main__":
    main()
