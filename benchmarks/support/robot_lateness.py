"""How late the loop of a served robot is while peers attack it, and how soon a command moves it. Whole processes."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.drivers.fake import HOME
from serl_chunk_robot.wire.curve import Pair
from support.ports import free_port
from support.robot_moments import DRIVER, HERE, SERVER, J
from support.socket_attacks import ATTACKS, attacked

PASSES = 5.0  # s of which the server reports the lateness
STEP = 0.01  # rad
ROW = struct.Struct(f"<{J + 1}d")


class Served:
    """A served robot of its own process. `keys`: of its operator, or none."""

    def __init__(self, folder: Path, secured: bool) -> None:
        self.port, self.keys, self.log = free_port(), None, folder / "set_points"
        (folder / "logged.py").write_text(DRIVER)
        line = ""
        if secured:
            self.keys, line = _keys(folder / "keys"), f'keys = "{folder / "keys"}"\n'
        (folder / "robot.toml").write_text(
            f'name = "lateness"\nstart = "evaluating"\nport = {self.port}\n{line}'
            f'[driver]\nname = "logged.py:Logged"\nlog = "{self.log}"\n'
        )
        self.process = subprocess.Popen(
            [sys.executable, *SERVER, "serve", str(folder / "robot.toml")], stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "XDG_STATE_HOME": str(folder)},
        )  # fmt: skip
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


@contextlib.contextmanager
def served(folder: Path, secured: bool = False) -> Iterator[Served]:
    """A Served that is ended."""
    folder.mkdir()
    made = Served(folder, secured)
    try:
        yield made
    finally:
        made.close()


def attacks(folder: Path, rounds: int = 3) -> dict[str, Any]:
    """Return lateness without and under each attack, the median of so many rounds, and the time of commands."""
    made: dict[str, Any] = {}
    for name in ("", *ATTACKS):
        with served(folder / (name or "none"), name == "foreign_keys") as robot:
            try:
                found = [robot.lateness(name) for _ in range(rounds)]
            except RobotError as e:  # what an earlier server does
                print(f"{name}: {e}", flush=True)
                continue
            made[name or "none"] = {key: float(np.median([each[key] for each in found])) for key in found[0]}
            made[name or "none"]["late_max_ms"] = max(each["late_max_ms"] for each in found)
        print(name or "none", {key: round(value, 2) for key, value in made[name or "none"].items()}, flush=True)
    with served(folder / "commands") as robot:
        made["command"] = robot.commands(100)
    print("command", made["command"], flush=True)
    return made


def _keys(folder: Path) -> Keys:
    server, operator = Pair.new(), Pair.new()
    (folder / "allowed").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    files = {
        "server.json": {"public": server.public, "secret": server.secret},
        "allowed/operator.json": {"public": operator.public, "role": "operator"},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
        (folder / name).chmod(0o600)
    return Keys(server.public, operator)
